"""When a run saves, and which of its checkpoints stay on the disk."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

MINUTES = 20
NUM_NEWEST = 2


@dataclass(frozen=True, slots=True)
class SaveRule:
    """The rule of a run. The last step is always saved.

    Example: of a run without flags: `SaveRule()`; with `--save-interval 50`: `SaveRule(50)`.
    """

    interval: int | None = None  # --save-interval; None: by time
    retain_interval: int | None = None  # --save-retain-interval

    @property
    def is_rolling(self) -> bool:
        """Whether older checkpoints are deleted by `surplus`: no flag says otherwise."""
        return self.interval is None and self.retain_interval is None

    def is_due(self, num_steps: int, seconds: float) -> bool:
        """Return whether to save after `num_steps` steps, `seconds` after the start or the last
        save."""
        if self.interval is None:
            return seconds >= 60 * MINUTES
        return num_steps % self.interval == 0

    def __str__(self) -> str:
        when = f"every {self.interval} steps"
        if self.interval is None:
            when = f"about every {MINUTES} minutes"
        kept = "all checkpoints stay"
        if self.retain_interval is not None:
            kept = f"of older checkpoints those of every {self.retain_interval}th step stay"
        elif self.is_rolling:
            kept = f"the last {NUM_NEWEST} checkpoints and that of the best evaluation stay"
        return f"{when} and at the end; {kept}"

    def surplus(
        self,
        complete: Sequence[int],
        rolling: Collection[int],
        scores: Mapping[int, float],
        *,
        loaded: int | None,
    ) -> list[int]:
        """Return the steps of the checkpoints to delete, after a save.

        `complete` are the steps of all complete checkpoints. `--save-retain-interval` deletes as in
        Megatron: the one before the newest, if no multiple. Otherwise only `rolling` ones are
        deleted, the marked ones of runs without a flag. The newest stay, the one that the run has
        `loaded`, which the same command may ask for again, and the one of the best evaluation.
        `scores` are the evaluations by step, higher is better; that of a checkpoint is the last one
        up to its step. Of equal ones the newest counts.
        """
        newest = sorted(complete, reverse=True)
        if self.retain_interval is not None:
            return [step for step in newest[1:2] if step % self.retain_interval]
        if not self.is_rolling:
            return []
        kept = {*newest[:NUM_NEWEST], loaded}
        scored = {s: score for s in newest if (score := _score(s, scores)) is not None}
        if scored:
            kept.add(max(scored, key=lambda step: (scored[step], step)))
        return sorted({*rolling} - kept)


def _score(step: int, scores: Mapping[int, float]) -> float | None:
    last = max((at for at in scores if at <= step), default=None)
    return None if last is None else scores[last]


def scores_of(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Return the evaluations in a run's metrics by step, higher is better: the held-out accuracy,
    or the held-out loss with the opposite sign. Values that are not finite do not count."""
    scores = {}
    for step, of_step in metrics.items():
        for name, sign in (("eval/accuracy", 1.0), ("eval/loss", -1.0)):
            if math.isfinite(value := of_step.get(name, math.nan)):
                scores[step] = sign * value
    return scores
