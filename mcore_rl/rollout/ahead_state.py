"""The state of sampling ahead in a checkpoint, and its metrics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mcore_rl.batching.table import SampleTable
from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError, not_held
from mcore_rl.common.readers import InvalidData, integer_within, parse_json, read_regular
from mcore_rl.rollout.admission import AdmissionCounts
from mcore_rl.rollout.pending import environments_by_draw
from mcore_rl.rollout.segments import OpenGroup

Counts = tuple[int, int, int]  # groups: started, without information, stale

_NAME = "ahead.json"
_MOST_DRAWS = 1 << 53


@dataclass(frozen=True, slots=True)
class AheadState:
    """The draws of a run at a checkpoint.

    Example: draws 0 to 39 were admitted, of which 36 and 38 have not been trained on:
    `AheadState(40, {36: 8, 38: 9}, weight_version=9)`.
    """

    next_draw: int  # the first that has never been admitted
    outstanding: dict[int, int] | None  # version at the start; None: nothing was sampled ahead
    weight_version: int | None = None  # of the last step
    uncounted: Counts = 0, 0, 0  # since the last step, in no step's metrics

    def write(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint."""
        (folder / _NAME).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path | None, position: int) -> AheadState:
        """Read the state of a checkpoint. `position` is the number of prompts that a run has drawn
        if it did not sample ahead; `folder` is None for a new run. Raises UsageError."""
        if folder is None:
            return cls(position, {})
        path = folder / _NAME
        if not path.exists():
            return cls(position, None)
        try:
            facts = parse_json(read_regular(path))
            outstanding = {int(draw): version for draw, version in facts["outstanding"].items()}
            # Earlier versions did not write `uncounted`.
            started, uninformative, stale = facts.get("uncounted", (0, 0, 0))
            uncounted = started, uninformative, stale
            found = cls(facts["next_draw"], outstanding, facts["weight_version"], uncounted)
            for number in (
                *(found.next_draw, found.weight_version, *uncounted),
                *(*outstanding, *outstanding.values()),
            ):
                if integer_within(number, 0, _MOST_DRAWS) is None:
                    raise ValueError(f"{repr(number)[:60]} is not a draw or a version")
        except (
            *(InvalidData, AttributeError, LookupError),
            *(OSError, TypeError, ValueError),
        ) as error:
            raise not_held(path, "draws in flight", f"{type(error).__name__}: {error}") from error
        return found


def require_nothing_outstanding(folder: Path) -> None:
    """Refuse a checkpoint's `folder` with groups that only a run that samples ahead continues."""
    if outstanding := AheadState.read(folder, 0).outstanding:
        raise UsageError(
            f"has {len(outstanding)} groups that were sampled ahead, which only a run that does so "
            "continues",
            flag=f"--load {folder.parent}",
            remedy="give --rl-rollout-ranks and --rl-max-staleness 1 or more",
        )


def count_unfinished(folder: Path) -> int:
    """Count the groups in a checkpoint's `folder` that a run with the same prompts continues.
    Raises UsageError if a file has other content."""
    outstanding = AheadState.read(folder, 0).outstanding
    return len(environments_by_draw(folder) if outstanding is None else outstanding)


@dataclass(slots=True)
class AheadMetrics:
    """What is measured between two steps, on a rank of engines."""

    num_steps: int = 0
    num_skipped: int = 0  # versions without a step, after version `last_before`
    last_before: int = 0
    sampling_seconds: float = 0.0  # of the last step, mean of all engines
    uncounted: Counts = 0, 0, 0  # by the run before, which the next step counts
    _counted: Counts = 0, 0, 0  # at the end of the last step
    _before: tuple[Counts, Counts] = (0, 0, 0), (0, 0, 0)  # both, at the beginning of that

    def since(self, admitted: AdmissionCounts) -> Counts:
        """Return what the next step counts: what happened since the last one."""
        now = admitted.started, admitted.uninformative, admitted.stale
        started, uninformative, stale = (
            more + at - before
            for more, at, before in zip(self.uncounted, now, self._counted, strict=True)
        )
        return started, uninformative, stale

    def undo(self) -> None:
        """Forget the last step, so that the next one counts the same."""
        self.uncounted, self._counted = self._before

    def of_step(
        self,
        table: SampleTable,
        weight_version: int,
        admitted: AdmissionCounts,
        taken: Sequence[OpenGroup],
        sampling_seconds: float,
    ) -> dict[str, float]:
        """Return the metrics of a step whose groups have been taken. Collective over the engines'
        ranks; `taken` are the groups here, on the first rank of each TP group, and
        `sampling_seconds` those that this rank sampled since the last step was taken."""
        rollouts = [each for group in taken for each in group.rollouts if each is not None]
        versions = [len(np.unique(each.token_versions)) for each in rollouts]
        measured = sampling_seconds, sum(versions), len(versions)
        everywhere = np.array(objects.all_gather(measured))
        seconds, num_versions, num_rollouts = everywhere.sum(axis=0)
        started, uninformative, stale = self.since(admitted)
        self._before = self.uncounted, self._counted
        self.uncounted = 0, 0, 0
        self._counted = admitted.started, admitted.uninformative, admitted.stale
        self.sampling_seconds = float(seconds) / len(everywhere)
        oldest = table.oldest_versions
        oldest = oldest + self.num_skipped * (oldest <= self.last_before)
        staleness = np.maximum(0, weight_version - oldest)
        return {
            "rollout/staleness_mean": float(staleness.mean()),
            "rollout/staleness_max": float(staleness.max()),
            "rollout/versions_per_sample": float(num_versions / max(1, num_rollouts)),
            "rollout/groups_in_flight": float(admitted.in_flight),
            "rollout/groups_waiting": float(admitted.waiting),
            "rollout/started_groups": float(started),
            "rollout/uninformative_groups": float(uninformative),
            "rollout/stale_groups": float(stale),
        }
