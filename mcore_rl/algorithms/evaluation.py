"""Metrics of several responses to each of many prompts, with their 95 % intervals.

Shape legend: p prompts, k responses considered, n responses of a prompt, c of them correct.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_Z = 1.959964  # of a normal distribution's central 95 %


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that one of k responses is correct,
    1 - C(n - c, k) / C(n, k), with k at most n (Chen et al. 2021, arXiv 2107.03374, section 2.1).
    """
    wrong = num_samples - num_correct
    return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)


def majority_is_correct(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return 1 if the most frequent answer is correct, else 0 (Wang et al. 2022, arXiv 2203.11171).

    None is a response without an answer, which has no vote. Of answers that are equally frequent,
    the one that was given first counts.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    winner = votes.most_common(1)[0][0]  # ties keep the order of the first votes
    return float(correct[answers.index(winner)])


def wilson_interval(mean: float, num_prompts: int) -> tuple[float, float]:
    """Return the Wilson score interval, 95 %, of a mean over prompts of values in [0, 1].

    Exact in form for values of 0 and 1. Others vary less, so for them it is wider than needed.
    (Wilson 1927, Probable inference, the law of succession, and statistical inference)
    """
    shrink = 1.0 + _Z**2 / num_prompts
    center = (mean + _Z**2 / (2 * num_prompts)) / shrink
    spread = mean * (1.0 - mean) / num_prompts + (_Z / (2 * num_prompts)) ** 2
    half = _Z * math.sqrt(max(0.0, spread)) / shrink
    return max(0.0, center - half), min(1.0, center + half)


def ks_of(num_samples: int) -> list[int]:
    """Return the k of pass@k: the powers of two below `num_samples`, and `num_samples`."""
    return [1 << bit for bit in range((num_samples - 1).bit_length())] + [num_samples]
