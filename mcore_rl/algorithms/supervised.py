"""Supervised losses as policy gradients: what a token of given data gets as its advantage.

    sft   1                                          cross-entropy, -log p
    dpo   +-2 beta [(1 - e) sigmoid(-m) - e sigmoid(m)]        arXiv 2305.18290, eq. 7
          m = beta [(log p - log ref)(chosen) - (log p - log ref)(rejected)]

With the policy loss -A log p, the advantage 1 is the cross-entropy. DPO's loss, with a share e of
labels that are wrong (conservative DPO, e = 0 in the paper),

    -(1 - e) log sigmoid(m) - e log sigmoid(-m)

has the gradient -beta [...] of the chosen response's log-prob, and its opposite for the rejected
one. In the length-normalised form (arXiv 2411.15124; TRL's sigmoid_norm) each log-ratio is
divided by the learned tokens of its response, and so is the advantage. m depends on sums over
both responses, which may be on several ranks and micro-batches, and is therefore computed before
the update, by the pass that scores the policy: a step is one mini-batch.
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
    dpo_label_smoothing: float = param(
        0.0,
        "share of pairs whose chosen response is taken to be the worse one (conservative DPO)",
        least=0,
        below=0.5,
        advice="choose for example 0.1, or 0 for the loss of the paper",
    )
    dpo_length_normalized: bool = param(
        False, "divide the log-ratio of each response by the number of its learned tokens"
    )


@advantage_estimator("dpo", Preference())
def dpo(inputs: AdvantageInputs, config: Preference) -> AdvantageOutputs:
    """Return DPO's advantages of pairs, in which the chosen response comes first.

    The outcomes are minus the log-ratios to the reference, as of a KL in the reward with the
    estimator k1 and the coefficient 1. The factor 2 makes the mean over responses, N of
    seq_mean_token_sum, the paper's mean over pairs.
    """
    lengths = inputs.response_lengths
    m, e = margins(inputs.scores, lengths, config), config.dpo_label_smoothing
    weight = 2.0 * config.dpo_beta * ((1.0 - e) * _sigmoid(-m) - e * _sigmoid(m))
    by_sample = np.stack([weight, -weight], axis=1).ravel() / _divisors(lengths, config)
    by_sample = by_sample[inputs.rows]
    tokens = torch.from_numpy(by_sample).float().repeat_interleave(inputs.lengths)
    return AdvantageOutputs(masked(inputs.loss_mask, tokens))


def margins(scores: np.ndarray, lengths: np.ndarray, config: Preference) -> np.ndarray:
    """Return `[pairs]` float64: m of each pair, from `[n]` outcomes as in `dpo` and `[n]` numbers
    of learned tokens."""
    chosen, rejected = (scores / _divisors(lengths, config)).reshape(-1, 2).T
    margin: np.ndarray = config.dpo_beta * (rejected - chosen)
    return margin


def _divisors(lengths: np.ndarray, config: Preference) -> np.ndarray:
    """Return `[n]` float64: by what the log-ratio of each response is divided."""
    used = np.maximum(lengths, 1) if config.dpo_length_normalized else np.ones(len(lengths))
    return used.astype(np.float64)


def preference_metrics(
    scores: np.ndarray, lengths: np.ndarray, config: Preference
) -> dict[str, float]:
    """Return DPO's loss, the mean margin, and the share of pairs in which it is positive; the
    arguments are those of `margins`."""
    m, e = margins(scores, lengths, config), config.dpo_label_smoothing
    losses = (1.0 - e) * np.logaddexp(0.0, -m) + e * np.logaddexp(0.0, m)
    return {
        "loss/dpo": float(losses.mean()),
        "dpo/margin": float(m.mean()),
        "dpo/accuracy": float((m > 0).mean()),
    }


def _sigmoid(x: np.ndarray) -> np.ndarray:
    sigmoid: np.ndarray = np.exp(-np.logaddexp(0.0, -x))
    return sigmoid
