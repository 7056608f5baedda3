"""Corrections for the difference between the engine's sampling distribution and the trainer's.

Trainer and engine hold the same weights but differ slightly (kernels, dtypes, the engine's
quantisation), so the sampling policy is not the policy before the update. With
rho = exp(old_log_probs - rollout_log_probs) per token:

    none                  1
    token_tis             min(rho, cap)                              truncated importance sampling
    sequence_tis          min(product of the response's rho, cap)    the same, per response
    icepop                rho if it is in [low, high], else 0             Ring-1T, arXiv 2510.18855
    geometric_rejection   1 if the geometric mean of the response's rho is in [low, high], else 0
    product_rejection     1 if their product is, else 0
    token_tis_geometric   token_tis if geometric_rejection keeps the response, else 0
    token_tis_product     token_tis if product_rejection keeps the response, else 0

(For truncation: Yao et al., "Your efficient RL framework secretly brings you off-policy RL
training", 2025; for rejection: verl's documentation of rollout correction.) Truncated weights may
have a lower bound, too. A veto (of verl up to 0.7.0) gives weight 0 to every token of a response
that has a token whose rho is below a threshold, as the trainer would hardly have sampled it. The
weights multiply the surrogate. The denominators of the loss still count all generated tokens: a
token of weight 0 counts, but contributes no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from mcore_rl.algorithms.aggregation import Segments, TokenSums, masked
from mcore_rl.algorithms.kl import kl_estimate
from mcore_rl.algorithms.policy_losses import bounded_ratio
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param

MismatchCorrection = Literal[
    "none",
    "token_tis",
    "sequence_tis",
    "icepop",
    "geometric_rejection",
    "product_rejection",
    "token_tis_geometric",
    "token_tis_product",
]


@dataclass(frozen=True, kw_only=True)  # without slots, which two base classes cannot both have
class Veto(Parameters):
    """Parameters of all corrections."""

    mismatch_veto: float | None = param(
        None,
        "drop responses with a token whose ratio is below this",
        above=0,
        below=1,
        advice="such tokens are far less likely for the trainer than for the engine, so choose "
        "for example 1e-4",
    )


@dataclass(frozen=True)
class Cap(Veto):
    """Parameters of the corrections that truncate; floor <= cap."""

    mismatch_cap: float = param(
        2.0,
        "largest weight of corrections that truncate",
        above=0,
        advice="weights above it are lowered to it, so choose for example 2",
    )
    mismatch_floor: float = param(
        0.0,
        "smallest weight of corrections that truncate",
        least=0,
        most=1,
        advice="weights below it are raised to it, so choose for example 0.5",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mismatch_floor > self.mismatch_cap:
            raise UsageError(
                f"is above --rl-mismatch-cap {self.mismatch_cap}, so that every weight would be "
                "the cap",
                flag=f"--rl-mismatch-floor {self.mismatch_floor}",
                remedy="lower it, or raise the cap",
            )


@dataclass(frozen=True)
class Band(Veto):
    """Parameters of the corrections that mask tokens outside a band; 0 <= low < high."""

    mismatch_low: float = param(0.5, "smallest ratio that icepop and rejection keep")
    mismatch_high: float = param(5.0, "largest ratio that icepop and rejection keep")

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.mismatch_low, self.mismatch_high
        if not 0.0 <= low < high < math.inf:
            raise UsageError(
                f"and --rl-mismatch-high {high} are not 0 <= low < high",
                flag=f"--rl-mismatch-low {low}",
                remedy="ratios between them are kept, so choose for example 0.5 and 2",
            )


@dataclass(frozen=True)
class CapAndBand(Cap, Band):
    """Parameters of the corrections that truncate tokens and reject responses."""


# A mean over a response is much closer to 1 than a token's ratio or a product.
CORRECTIONS: Mapping[str, Parameters] = {
    "none": Parameters(),
    "token_tis": Cap(),
    "sequence_tis": Cap(),
    "icepop": Band(0.5, 5.0),
    "geometric_rejection": Band(0.999, 1.001),
    "product_rejection": Band(0.5, 2.0),
    "token_tis_geometric": CapAndBand(mismatch_low=0.999, mismatch_high=1.001),
    "token_tis_product": CapAndBand(mismatch_low=0.5, mismatch_high=2.0),
}


# Those that weigh a token by its own ratio alone, apart from a veto.
TOKEN_CORRECTIONS = ("none", "token_tis", "icepop")


@dataclass(frozen=True, slots=True)
class MismatchConfig:
    """Correction and its parameters."""

    correction: MismatchCorrection = "none"
    parameters: Parameters = Parameters()


@dataclass(frozen=True, slots=True)
class MismatchSums(TokenSums):
    """Sums over loss tokens, 0-dim float64; add over ranks (`stacked`), then call `metrics`."""

    num_tokens: torch.Tensor
    masked: torch.Tensor  # tokens to which the correction gave weight 0
    truncated: torch.Tensor  # tokens with weight lowered to the cap, or raised to the floor
    weight: torch.Tensor
    weight_squared: torch.Tensor
    kl: torch.Tensor  # k3 of KL(engine || actor)
    difference: torch.Tensor  # |log-prob of the engine - log-prob of the actor|

    def metrics(self) -> dict[str, float]:
        """Return shares and means over the summed tokens; all 0 without tokens.

        effective_sample_size is (sum w)^2 / (n sum w^2): 1 if all weights are equal, and 1 / n if
        one token has all the weight.
        """
        num_tokens = max(float(self.num_tokens), 1.0)
        squared = float(self.weight_squared)
        return {
            "masked_share": float(self.masked) / num_tokens,
            "truncated_share": float(self.truncated) / num_tokens,
            "mean_weight": float(self.weight) / num_tokens,
            "effective_sample_size": (
                float(self.weight) ** 2 / (num_tokens * squared) if squared > 0 else 0.0
            ),
            "kl": float(self.kl) / num_tokens,
            "mean_abs_difference": float(self.difference) / num_tokens,
        }


@dataclass(frozen=True, slots=True)
class Mismatch:
    weights: torch.Tensor  # [t] float32, detached; 1 where masked or not corrected
    sums: MismatchSums


def ratio_weights(ratio: torch.Tensor, config: MismatchConfig) -> torch.Tensor:
    """Return the weight of each ratio by itself, in any shape: that of `TOKEN_CORRECTIONS` without
    a veto; for other corrections, what is left of them without rejection."""
    parameters = config.parameters
    if isinstance(parameters, Cap):
        return ratio.clamp(parameters.mismatch_floor, parameters.mismatch_cap)
    if config.correction == "icepop":
        return torch.where(_is_within(ratio, parameters), ratio, torch.zeros_like(ratio))
    return torch.ones_like(ratio)


def _is_within(ratio: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    assert isinstance(parameters, Band), "a correction that masks"
    return (ratio >= parameters.mismatch_low) & (ratio <= parameters.mismatch_high)


@torch.no_grad()
def mismatch_weights(
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    loss_mask: torch.Tensor,
    lengths: torch.Tensor,
    config: MismatchConfig,
) -> Mismatch:
    """Return the weights of this call's samples, see the module's docstring.

    old_log_probs, rollout_log_probs: `[t]` float32, nats, of trainer and engine under the same
    weights; masked positions may hold anything. Samples are complete. A nan in a loss token appears
    in its weight, or as a rejected sample in `sums.masked`.
    """
    old, rollout = masked(loss_mask, old_log_probs), masked(loss_mask, rollout_log_probs)
    segments = Segments.of(lengths, loss_mask)
    log_ratio = old - rollout
    ratio, parameters, correction = bounded_ratio(log_ratio), config.parameters, config.correction
    rejected = truncated = torch.zeros_like(loss_mask)
    if correction == "sequence_tis":
        ratio = bounded_ratio(segments.to_tokens(segments.sum(log_ratio)))
    weights = ratio_weights(ratio, config)
    if isinstance(parameters, Cap):
        truncated = (ratio > parameters.mismatch_cap) | (ratio < parameters.mismatch_floor)
    if isinstance(parameters, Band):
        compared = ratio
        if "product" in correction:
            compared = bounded_ratio(segments.to_tokens(segments.sum(log_ratio)))
        elif "geometric" in correction:
            compared = bounded_ratio(segments.to_tokens(segments.mean(log_ratio)))
        rejected = ~_is_within(compared, parameters)
    if isinstance(parameters, Veto) and parameters.mismatch_veto is not None:
        vetoes = log_ratio < math.log(parameters.mismatch_veto)
        rejected = rejected | (segments.to_tokens(segments.sum(vetoes.to(old.dtype))) > 0)
    weights = torch.where(rejected, torch.zeros_like(weights), weights)
    weights = torch.where(loss_mask, weights, torch.ones_like(weights))

    def total(tokens: torch.Tensor) -> torch.Tensor:
        return masked(loss_mask, tokens.double()).sum()

    return Mismatch(
        weights=weights,
        sums=MismatchSums(
            num_tokens=total(loss_mask),
            masked=total(rejected),
            truncated=total(truncated),
            weight=total(weights),
            weight_squared=total(weights.double().square()),
            kl=total(kl_estimate(rollout, old, "k3")),
            difference=total((old - rollout).abs()),
        ),
    )
