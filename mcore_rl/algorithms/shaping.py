"""What happens to outcomes before advantages: the overlong penalty, and which groups can teach."""

from __future__ import annotations

import numpy as np

from mcore_rl.algorithms.estimators import finite_scores, members_by_group
from mcore_rl.common.errors import UsageError


def check_overlong_buffer(buffer_tokens: int, max_response_tokens: int) -> None:
    """UsageError: the buffer is not within the response budget. 0 turns the penalty off."""
    if not 0 <= buffer_tokens <= max_response_tokens:
        raise UsageError(
            f"is not between 0 and --rl-max-response-tokens {max_response_tokens}",
            flag=f"--rl-overlong-buffer-tokens {buffer_tokens}",
            remedy="the penalty grows over the last tokens of that budget, so choose for example "
            f"{max(1, max_response_tokens // 5)}",
        )


def overlong_penalty(
    response_lengths: np.ndarray, *, buffer_tokens: int, max_response_tokens: int
) -> np.ndarray:
    """DAPO's soft overlong punishment, `[n]` float64 in [-1, 0], to be added to the scores.

        0                                    length <= max - buffer
        (max - buffer - length) / buffer     up to max
        -1                                   beyond

    (arXiv 2503.14476, eq. 13.) A response that was cut at the budget gets -1.

    response_lengths: `[n]` int64, generated tokens. A buffer of 0 gives no penalty at all.
    """
    check_overlong_buffer(buffer_tokens, max_response_tokens)
    lengths = np.asarray(response_lengths, dtype=np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths)
    over = lengths - (max_response_tokens - buffer_tokens)
    return 0.0 - np.clip(over / buffer_tokens, 0.0, 1.0)  # 0.0 - x: without negative zeros


def select_informative_groups(scores: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """`[k]`, rising: ids of the groups whose scores are not all equal.

    Only these have an advantage other than 0; dynamic sampling (arXiv 2503.14476, section 3.2)
    draws prompts again until there are enough of them. The paper asks for an accuracy strictly
    between 0 and 1, which for rewards of 0 and 1 is the same.

    scores: `[n]` finite, before any penalty for length (a penalty makes equal outcomes unequal);
    group_ids: `[n]`. RuntimeError: a score is not finite.
    """
    values, groups = finite_scores(scores, group_ids), np.asarray(group_ids)
    informative = [
        groups[members[0]]
        for members in members_by_group(groups)
        if values[members].min() != values[members].max()
    ]
    return np.asarray(informative, dtype=groups.dtype)
