"""Policy losses that restrain the tokens from which entropy collapses (arXiv 2505.22617).

These are tokens of high covariance, with means over the N loss tokens of the step:

    cov = (log_prob - mean(log_prob)) * (A - mean(A))

clip_cov gives no gradient to floor(ratio N) random ones of cov in [low, high]; kl_cov adds a KL to
the floor(ratio N) largest, at least one. The authors' code takes means and tokens from each micro-
batch, by the policy of that time, and for clip_cov at least one of them. Here they are chosen once
per step, by the policy before the update: losses then do not depend on the division into micro-
batches and ranks. In the authors' scripts the clip ranges of clip_cov are 1, and the ratio of
kl_cov is 2e-4 (32B) or 2e-3 (7B).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_rl.algorithms.interfaces import PolicyLossInputs, SelectionInputs, TokenLosses
from mcore_rl.algorithms.policy_losses import Clip, bounded_ratio, ppo_clip_objective
from mcore_rl.algorithms.registry import policy_loss
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, param

_LOWEST, _HIGHEST = -(1 << 31), 1 << 31  # bounds of the keys of float32 numbers


def covariances(inputs: SelectionInputs) -> tuple[torch.Tensor, float]:
    """Return `[m]` float32, the covariance of each loss token here, and N, those of all ranks.

    Collective: calls `inputs.global_sum` once.
    """
    log_probs, advantages = (
        values[inputs.loss_mask].double() for values in (inputs.old_log_probs, inputs.advantages)
    )
    count = torch.tensor(float(len(log_probs)), dtype=torch.float64)
    total = inputs.global_sum(torch.stack((count, log_probs.sum(), advantages.sum())))
    num_tokens = max(float(total[0]), 1.0)
    covariance = (log_probs - total[1] / num_tokens) * (advantages - total[2] / num_tokens)
    return covariance.float(), float(total[0])


def largest(values: torch.Tensor, count: int, inputs: SelectionInputs) -> torch.Tensor:
    """Return `[m]` bool: the `count` largest of the float32 values of all ranks, and their equals.

    Bisects the order of float32 numbers, so that no rank sees the values of others. Collective:
    calls `inputs.global_sum` 32 times, and not at all for a count of 0.
    """
    if not count:
        return torch.zeros_like(values, dtype=torch.bool)
    bits = values.view(torch.int32).long()
    keys = torch.where(bits < 0, _LOWEST - bits, bits)  # in the order of the numbers
    low, high = _LOWEST, _HIGHEST
    while high - low > 1:
        middle = (low + high) // 2
        above = inputs.global_sum((keys >= middle).sum().double()[None])
        low, high = (middle, high) if float(above) >= count else (low, middle)
    return keys >= low


def _at_tokens(chosen: torch.Tensor, inputs: SelectionInputs) -> torch.Tensor:
    """Return `[t]` bool from `[m]`, False where masked."""
    tokens = torch.zeros_like(inputs.loss_mask)
    tokens[inputs.loss_mask] = chosen
    return tokens


@dataclass(frozen=True, slots=True)
class ClipCov(Clip):
    """Parameters of clip_cov; 0 <= low < high."""

    clip_cov_ratio: float = param(
        2e-4,
        "share of tokens that clip_cov gives no gradient",
        above=0,
        most=1,
        advice="choose for example 2e-4",
    )
    clip_cov_low: float = param(
        1.0, "smallest covariance of tokens that clip_cov chooses", least=0, advice="choose 1"
    )
    clip_cov_high: float = param(
        5.0, "largest covariance of tokens that clip_cov chooses", above=0, advice="choose 5"
    )

    def __post_init__(self) -> None:
        super(ClipCov, self).__post_init__()
        if not self.clip_cov_low < self.clip_cov_high:
            raise UsageError(
                f"is not below --rl-clip-cov-high {self.clip_cov_high}",
                flag=f"--rl-clip-cov-low {self.clip_cov_low}",
                remedy="tokens between them are chosen from, so choose for example 1 and 5",
            )


def select_clip_cov(inputs: SelectionInputs, config: ClipCov) -> torch.Tensor:
    """Return `[t]` bool: random tokens of high covariance. Collective."""
    cov, num_tokens = covariances(inputs)
    is_high = (cov >= config.clip_cov_low) & (cov <= config.clip_cov_high)
    num_high = int(inputs.global_sum(is_high.sum().double()[None]))
    count = min(int(config.clip_cov_ratio * num_tokens), num_high)
    drawn = inputs.random[inputs.loss_mask].masked_fill(~is_high, -1.0)
    return _at_tokens(largest(drawn, count, inputs) & is_high, inputs)


@policy_loss("clip_cov", ClipCov(), select=select_clip_cov)
def clip_cov(inputs: PolicyLossInputs, config: ClipCov) -> TokenLosses:
    """Return PPO's loss, 0 for the tokens of `select_clip_cov` (arXiv 2505.22617).

    These count as clipped above.
    """
    assert inputs.selected is not None, "chosen before the update"
    objective = ppo_clip_objective(inputs, config)
    loss = torch.where(inputs.selected, torch.zeros_like(objective.loss), objective.loss)
    return TokenLosses(loss, objective.clipped_lower, objective.clipped_upper | inputs.selected)


@dataclass(frozen=True, slots=True)
class KLCov(Parameters):
    """Parameters of kl_cov."""

    kl_cov_ratio: float = param(
        2e-4,
        "share of tokens, those of largest covariance, that kl_cov holds back by a KL",
        above=0,
        most=1,
        advice="choose for example 2e-4",
    )
    kl_cov_coef: float = param(
        1.0, "weight of that KL to the policy before the update", least=0, advice="choose 1"
    )


def select_kl_cov(inputs: SelectionInputs, config: KLCov) -> torch.Tensor:
    """Return `[t]` bool: the tokens of largest covariance, at least one. Collective."""
    cov, num_tokens = covariances(inputs)
    count = min(max(int(config.kl_cov_ratio * num_tokens), 1), int(num_tokens))
    return _at_tokens(largest(cov, count, inputs), inputs)


@policy_loss("kl_cov", KLCov(), select=select_kl_cov)
def kl_cov(inputs: PolicyLossInputs, config: KLCov) -> TokenLosses:
    """Return -r A, plus coef |log r| for the tokens of `select_kl_cov` (arXiv 2505.22617,
    with the estimate of the KL in its authors' code). Nothing is clipped.
    """
    assert inputs.selected is not None, "chosen before the update"
    log_ratio = inputs.log_probs - inputs.old_log_probs
    loss = -bounded_ratio(log_ratio) * inputs.advantages
    held_back = loss + config.kl_cov_coef * log_ratio.abs()
    none = torch.zeros_like(inputs.loss_mask)
    return TokenLosses(torch.where(inputs.selected, held_back, loss), none, none)
