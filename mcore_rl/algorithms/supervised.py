"""Supervised losses as policy gradients: what a token of given data gets as its advantage.

    sft   1                                          cross-entropy, -log p
    dpo   +-2 beta sigmoid(-m)                       arXiv 2305.18290, eq. 7
          m = beta [(log p - log ref)(chosen) - (log p - log ref)(rejected)]

With the policy loss -A log p, the advantage 1 is the cross-entropy. DPO's loss -log sigmoid(m) has
the gradient -beta sigmoid(-m) of the chosen response's log-prob, and its opposite for the rejected
one. m depends on sums over both responses, which may be on several ranks and micro-batches, and is
therefore computed before the update, by the pass that scores the policy: a step is one mini-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mcore_rl.algorithms.aggregation import masked
from mcore_rl.algorithms.interfaces import AdvantageInputs, AdvantageOutputs
from mcore_rl.algorithms.registry import advantage_estimator
from mcore_rl.common.parameters import Parameters, param


@advantage_estimator("demonstrations")
def demonstrations(inputs: AdvantageInputs, config: Parameters) -> AdvantageOutputs:
    """Return 1 for every token to learn."""
    return AdvantageOutputs(inputs.loss_mask.float())


@dataclass(frozen=True, slots=True)
class Preference(Parameters):
    """Parameter of DPO."""

    dpo_beta: float = param(
        0.1,
        "how much DPO holds the policy to the reference: weight of their log-ratio",
        above=0,
        advice="choose for example 0.1",
    )


@advantage_estimator("dpo", Preference())
def dpo(inputs: AdvantageInputs, config: Preference) -> AdvantageOutputs:
    """Return DPO's advantages of pairs, in which the chosen response comes first.

    The outcomes are minus the log-ratios to the reference, as of a KL in the reward with the
    estimator k1 and the coefficient 1. The factor 2 makes the mean over responses, N of
    seq_mean_token_sum, the paper's mean over pairs.
    """
    weight = 2.0 * config.dpo_beta * _sigmoid(-margins(inputs.scores, config))
    by_sample = np.stack([weight, -weight], axis=1).ravel()[inputs.rows]
    tokens = torch.from_numpy(by_sample).float().repeat_interleave(inputs.lengths)
    return AdvantageOutputs(masked(inputs.loss_mask, tokens))


def margins(scores: np.ndarray, config: Preference) -> np.ndarray:
    """Return `[pairs]` float64: m of each pair, from `[n]` outcomes as in `dpo`."""
    chosen, rejected = scores.reshape(-1, 2).T
    found: np.ndarray = config.dpo_beta * (rejected - chosen)
    return found


def preference_metrics(scores: np.ndarray, config: Preference) -> dict[str, float]:
    """Return DPO's loss, the mean margin, and the share of pairs in which it is positive."""
    m = margins(scores, config)
    return {
        "loss/dpo": float(np.logaddexp(0.0, -m).mean()),
        "dpo/margin": float(m.mean()),
        "dpo/accuracy": float((m > 0).mean()),
    }


def _sigmoid(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.exp(-np.logaddexp(0.0, -x))
    return found
