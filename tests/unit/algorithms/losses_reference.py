"""Policy losses token by token, as their papers write them, in torch scalars for autograd.

Each takes one response's log-probs, old log-probs and advantages, and returns the *objective* J (to
be maximised) of every token. Losses with one ratio per response return J of the response at each of
its tokens, without stop-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from mcore_rl.algorithms.aggregation import Aggregation, Denominators, Segments
from mcore_rl.algorithms.policy_losses import PolicyLossConfig
from mcore_rl.algorithms.registry import find_policy_loss
from mcore_rl.common.parameters import with_values
from tests.unit.algorithms.ragged import Ragged

Scalars = list[torch.Tensor]


def loss_config(name: str = "ppo_clip", /, *terms: Any, **values: Any) -> PolicyLossConfig:
    """The config of a loss, of those `values` that it reads; clip ranges default to 0.2."""
    of_all = {field.name for field in fields(PolicyLossConfig)}
    own = {"clip_eps_lower": 0.2, "clip_eps_upper": 0.2, **values}
    parameters = with_values(find_policy_loss(name).parameters, own)
    rest = {key: value for key, value in values.items() if key in of_all}
    return PolicyLossConfig(name, parameters, *terms, **rest)


def clip(value: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.clamp(value, low, high)


def pessimistic(ratio: torch.Tensor, a: torch.Tensor, config: Any) -> torch.Tensor:
    bounded = clip(ratio, 1 - config.clip_eps_lower, 1 + config.clip_eps_upper)
    objective = min(ratio * a, bounded * a)
    if config.dual_clip is not None and a < 0:
        objective = max(objective, config.dual_clip * a)
    return objective


def ppo_clip(now: Scalars, old: Scalars, a: Scalars, config: Any) -> Scalars:
    return [pessimistic((n - o).exp(), adv, config) for n, o, adv in zip(now, old, a, strict=True)]


def policy_gradient(now: Scalars, old: Scalars, a: Scalars, config: Any) -> Scalars:
    return [n * adv for n, adv in zip(now, a, strict=True)]


def cispo(now: Scalars, old: Scalars, a: Scalars, config: Any) -> Scalars:
    low, high = 1 - config.clip_eps_lower, 1 + config.clip_eps_upper
    return [
        clip((n - o).exp(), low, high).detach() * adv * n
        for n, o, adv in zip(now, old, a, strict=True)
    ]


def sapo(now: Scalars, old: Scalars, a: Scalars, config: Any) -> Scalars:
    objectives = []
    for n, o, adv in zip(now, old, a, strict=True):
        positive, negative = config.sapo_temperature_positive, config.sapo_temperature_negative
        tau = positive if adv > 0 else negative
        gate = 4 / tau / (1 + torch.exp(-tau * ((n - o).exp() - 1)))
        objectives.append(gate * adv)
    return objectives


def gspo(now: Scalars, old: Scalars, a: Scalars, config: Any) -> Scalars:
    assert len({adv.item() for adv in a}) == 1, "the paper has one advantage per response"
    ratio = 1.0
    for n, o in zip(now, old, strict=True):
        ratio = ratio * (n - o).exp()
    return [pessimistic(ratio ** (1 / len(now)), a[0], config)] * len(now)


def gmpo(now: Scalars, old: Scalars, a: Scalars, config: Any) -> Scalars:
    assert len({adv.item() for adv in a}) == 1, "the paper has one advantage per response"
    sign = 1.0 if a[0] > 0 else -1.0
    low, high = math.exp(-config.clip_eps_lower), math.exp(config.clip_eps_upper)
    if sign < 0:
        low, high = 1 / high, 1 / low
    product = 1.0
    for n, o in zip(now, old, strict=True):
        signed = (n - o).exp() ** sign
        product = product * min(signed, clip(signed, low, high)) ** sign
    return [product ** (1 / len(now)) * a[0]] * len(now)


REFERENCES: dict[str, Callable[..., Scalars]] = {
    function.__name__: function for function in (ppo_clip, policy_gradient, cispo, sapo, gspo, gmpo)
}


def aggregate(per_sample: list[Scalars], mode: str, constant: float | None) -> torch.Tensor:
    """The mean that `mode` names, over all samples of the mini-batch."""
    filled = [tokens for tokens in per_sample if tokens]
    num_tokens, num_samples = sum(len(tokens) for tokens in filled), len(filled)
    total = torch.zeros((), dtype=torch.float64)
    for tokens in filled:
        token_sum = sum(tokens)
        total = (
            total
            + {
                "token_mean": token_sum / num_tokens,
                "seq_mean_token_mean": token_sum / len(tokens) / num_samples,
                "seq_mean_token_sum": token_sum / num_samples,
                "constant": token_sum / (num_samples * (constant or 1.0)),
            }[mode]
        )
    return total


def per_sample(batch: Ragged, values: torch.Tensor) -> list[Scalars]:
    return [[values[j] for j in tokens] for tokens in batch.loss_tokens]


def reference_kl(p: torch.Tensor, q: torch.Tensor, estimator: str) -> torch.Tensor:
    return {"k1": p - q, "k2": (p - q) ** 2 / 2, "k3": (q - p).exp() - 1 - (q - p)}[estimator]


def aggregation_of(mode: str) -> Aggregation:
    return Aggregation(mode, 13.0 if mode == "constant" else None)


def denominators_of(batch: Ragged) -> Denominators:
    return Denominators.of(Segments.of(batch.lengths, batch.loss_mask))
