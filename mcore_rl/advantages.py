"""Group-relative advantages: how much better a response was than its prompt's other responses.

    A_i = (r_i - mean(r_group)) / (std(r_group) + eps)      GRPO, arXiv 2402.03300, section 4.1.2
    A_i =  r_i - mean(r_group)                              Dr. GRPO, arXiv 2503.20783

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def grpo_advantages(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[int] | np.ndarray,
    *,
    normalize_std: bool = True,
    eps: float = 1e-6,
) -> np.ndarray:
    """One advantage per response, `[n]` float32.

    `rewards` `[n]` are finite numbers; `group_ids` `[n]` says which responses answer the same
    prompt, in any order. Every group must be complete in the call: the result then does not depend,
    to the last bit, on the order of the samples or on how they are later spread over ranks. A
    prompt drawn twice into one global batch needs two ids if it is to form two groups.

    `normalize_std=False` is Dr. GRPO: the division by the standard deviation, which favours prompts
    that are almost always or almost never solved, is left out. The standard deviation is that of a
    sample (divisor n - 1), as in the training code that the authors of Dr. GRPO published for both
    forms; the GRPO paper writes only "std" and came without code.

    A group of equal rewards, a group of one included, gets exactly 0.

    RuntimeError: a reward is not finite (a reward function that failed is scored 0 before this).
    """
    values = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(group_ids)
    assert values.ndim == 1 and values.shape == groups.shape, (
        f"rewards {values.shape} and group_ids {groups.shape} must both be [n]"
    )
    if not np.isfinite(values).all():
        sample = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RuntimeError(
            f"reward {values[sample]} of sample {sample} (group {groups[sample]}) is not finite"
        )
    advantages = np.zeros(values.shape, dtype=np.float64)
    for group in np.unique(groups):
        members = groups == group
        advantages[members] = _advantages_of_group(values[members], normalize_std, eps)
    return advantages.astype(np.float32)


def _advantages_of_group(rewards: np.ndarray, normalize_std: bool, eps: float) -> np.ndarray:
    # The mean of equal numbers need not equal them in floating point (three times 0.1), and that
    # residue divided by eps would no longer be small.
    if rewards.min() == rewards.max():
        return np.zeros_like(rewards)
    # math.fsum rounds once, so the order of the samples leaves no trace in the result.
    centred = rewards - math.fsum(rewards) / rewards.size
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(centred**2) / (rewards.size - 1))
    return centred / (std + eps)
