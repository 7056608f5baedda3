"""Fewer points than steps, so that a page of a long run stays quick, and the curve behind them.
Pure."""

from __future__ import annotations

import numpy as np

# A chart is some 500 pixels wide.
MAX_POINTS = 800
MAX_BARS = 200


# Below so many points a reader sees the curve, above a mean over a tenth of them, but not more.
SMOOTHED_FROM = 20
_LONGEST_SPAN = 50


def smoothed(values: np.ndarray) -> np.ndarray:
    """The moving average that TensorBoard draws: of the values so far, the later the heavier, and
    not drawn to 0 at the beginning."""
    weight = 1 - 2 / (min(max(values.size // 10, 5), _LONGEST_SPAN) + 1)
    means = np.empty(values.size)
    total = norm = 0.0
    for row, value in enumerate(values.tolist()):
        total, norm = weight * total + value, weight * norm + 1
        means[row] = total / norm
    return means


def thin_line(
    steps: np.ndarray, values: np.ndarray, max_points: int = MAX_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """At most `max_points` of the points: the lowest and the highest of each run of neighbours, so
    that no spike is lost, and the very first and last. None is made up."""
    if steps.size <= max_points:
        return steps, values
    kept = {0, steps.size - 1}
    for part in np.array_split(np.arange(steps.size), max_points // 2 - 1):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    rows = sorted(kept)
    return steps[rows], values[rows]


def thin_means(
    steps: np.ndarray, columns: np.ndarray, max_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Means over runs of neighbours, at the first step of each; `columns` is `[k, n]`, n steps.

    What stands on each other or belongs together must be thinned at the same steps.
    """
    if steps.size <= max_points:
        return steps, columns
    parts = np.array_split(np.arange(steps.size), max_points)
    means = np.stack([columns[:, part].mean(axis=1) for part in parts], axis=1)
    return steps[[part[0] for part in parts]], means
