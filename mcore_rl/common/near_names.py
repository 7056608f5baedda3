"""Suggestions for unknown names: the known name that was probably meant.

A wrong suggestion is worse than none (`--rl-eval-temperature` for `--rl-train-temperature`), so
names are compared word by word. Words may be in another order, run together or in the plural, and
have a wrong letter or two. A word that a known name contains is never a typo of another word (`min`
and `max`), and no word may be missing or added (`no`, `critic`).

Worker processes import this module, so it needs only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `name` is a typo of; None if there is none, or a tie."""
    others = sorted({*known} - {name})
    words = {word for other in others for word in _words(other)}
    slips = {other: slips for other in others if (slips := _slips(name, other, words)) is not None}
    nearest = [other for other, count in slips.items() if count == min(slips.values())]
    return nearest[0] if len(nearest) == 1 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)", or an empty string."""
    nearest = nearest_name(name, known)
    return f" (did you mean {nearest}?)" if nearest else ""


def _slips(name: str, other: str, known_words: set[str]) -> int | None:
    """Count the typos that lead from `other` to `name`; None if they differ by more than typos."""
    ours, theirs = _words(name), _words(other)
    if "".join(ours) == "".join(theirs):
        return 1
    for word in list(ours):
        if word in theirs:  # which has it once, or as often
            ours.remove(word)
            theirs.remove(word)
    if len(ours) != len(theirs):
        return None
    slips = 0 if ours else 1  # the order alone
    for word, meant in zip(ours, theirs, strict=True):
        if word.removesuffix("s") == meant.removesuffix("s"):
            slips += 1
            continue
        distance = _distance(word, meant)
        # One typo, or two in a word of eight letters or more; digits must match.
        most = 1 if max(len(word), len(meant)) < 8 else 2
        is_short = max(len(word), len(meant)) < 3
        if is_short or distance > most or word in known_words or _digits(word) != _digits(meant):
            return None
        slips += distance
    return slips


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _digits(word: str) -> str:
    return re.sub("[^0-9]", "", word)


def _distance(a: str, b: str) -> int:
    """Count the letters to insert, remove, replace or swap with their neighbour."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
