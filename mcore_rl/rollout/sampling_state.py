"""The state of a run's sampling in a checkpoint, and what a step counts."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt
from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError, not_held
from mcore_rl.common.readers import InvalidData, integer_within, parse_json, read_regular
from mcore_rl.rollout.admission import AdmissionCounts
from mcore_rl.rollout.bank import read_records, write_records
from mcore_rl.rollout.group_encoding import (
    MALFORMED,
    EngineLimits,
    environments_in,
    group_from_bytes,
    group_to_bytes,
)
from mcore_rl.rollout.segments import OpenGroup, is_finished

# Groups by the metric that counts them, without rollout/.
_COUNTED = ("started_groups", "uninformative_groups", "stale_groups")
_FILTERED = "filtered/"  # and the reason
_NAME, _LENGTHS = "ahead.json", "lengths.safetensors"
_GROUPS = "group_{:05d}_1.bank"
_MOST_DRAWS = 1 << 53
_T = TypeVar("_T")


@dataclass(slots=True)
class StepCounts:
    """The counts of a step, of one TP group or summed over all.

    Example: of 6 groups of 8 samples 2 are pending:

        StepCounts(started=6, pending=2, generated_tokens=9000, left_samples=16, left_tokens=3000)
    """

    started: int = 0
    refills: int = 0  # among `started`, replacing groups without information or a place
    dropped: int = 0
    pending: int = 0
    generated_tokens: int = 0
    left_samples: int = 0  # of dropped or pending groups
    left_tokens: int = 0  # their tokens so far

    def __add__(self, other: StepCounts) -> StepCounts:
        names = (each.name for each in dataclasses.fields(self))
        return StepCounts(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class SamplingState:
    """The draws of a run at a checkpoint.

    Example: draws 0 to 39 were admitted, of which 36 and 38 have not been trained on:
    `SamplingState(40, {36: 8, 38: 9}, 9, {"started_groups": 4})`.
    """

    next_draw: int  # the first that has never been admitted
    outstanding: dict[int, int]  # version at the start
    weight_version: int | None = None  # of the last step
    # Since the last step, in no step's metrics: see `counts_of`.
    uncounted: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the state into the folder of a checkpoint."""
        (folder / _NAME).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path | None, position: int) -> SamplingState:
        """Read the state of a checkpoint. `position` is the number of prompts that a run has drawn,
        if the checkpoint does not say; `folder` is None for a new run. Raises UsageError."""
        path = None if folder is None else folder / _NAME
        if path is None or not path.exists():
            return cls(position, {})
        try:
            facts = parse_json(read_regular(path))
            outstanding = {int(draw): version for draw, version in facts["outstanding"].items()}
            counts = facts.get("uncounted", {})  # earlier versions wrote a list, or nothing
            if isinstance(counts, list):
                counts = dict(zip(_COUNTED, counts, strict=True))
            uncounted = dict(counts)
            if not all(name.removeprefix(_FILTERED).isidentifier() for name in uncounted):
                raise ValueError("it counts something else than groups")
            state = cls(facts["next_draw"], outstanding, facts["weight_version"], uncounted)
            for number in (
                *(state.next_draw, state.weight_version, *uncounted.values()),
                *(*outstanding, *outstanding.values()),
            ):
                if integer_within(number, 0, _MOST_DRAWS) is None:
                    raise ValueError(f"{repr(number)[:60]} is not a draw or a version")
        except (
            *(InvalidData, AttributeError, LookupError),
            *(OSError, TypeError, ValueError),
        ) as error:
            raise not_held(path, "draws in flight", f"{type(error).__name__}: {error}") from error
        return state


def write_lengths(lengths: np.ndarray, folder: Path) -> None:
    """Write `Sampler.lengths`."""
    save_file({"lengths": lengths}, folder / _LENGTHS)


def read_lengths(folder: Path, lengths: np.ndarray) -> None:
    """Read what `write_lengths` wrote into `lengths`, `[num_rows]` int32, if it did. Raises
    UsageError."""
    path = folder / _LENGTHS
    if not path.exists():
        return
    what = f"lengths of responses to {len(lengths)} prompts"
    try:
        stored = load(read_regular(path))["lengths"]
    except (SafetensorError, LookupError, OSError) as error:
        raise not_held(path, what, f"{type(error).__name__}: {error}") from error
    if stored.dtype != np.int32 or stored.shape != lengths.shape or (stored < -1).any():
        raise not_held(path, what, f"it has {stored.shape} of {stored.dtype}, or lengths below -1")
    lengths[:] = stored


def write_groups(groups: Iterable[OpenGroup], folder: Path, tp_group: int) -> None:
    """Write the unfinished groups of a TP group; on its first rank, which has their rewards."""
    folder.mkdir(parents=True, exist_ok=True)
    records = ((group.draw, group_to_bytes(group)) for group in groups)
    write_records(folder / _GROUPS.format(tp_group), records)


def read_groups(
    folder: Path,
    prompt_of: Callable[[int], Prompt],
    *,
    tp_group: int,
    num_tp_groups: int,
    has_environments: bool = False,
    limits: EngineLimits | None = None,
) -> list[OpenGroup]:
    """Return the groups that a TP group resumes: its own, or, if the number of TP groups has
    changed, its share of all groups, assigned round-robin in the order of their draws.

    `prompt_of` returns the prompt of a draw. All ranks of a TP group read the same groups. An
    unfinished response starts again if it has a conversation, and the run does not
    `has_environments`, or the other way round. So does a finished one that no environment has
    judged, if the run has environments. Raises UsageError if a file has other content, or values
    that are not within `limits`.
    """
    files = _group_files(folder)
    mine, draws = [files[tp_group]] if len(files) == num_tp_groups else files, None
    if len(files) != num_tp_groups:
        everywhere = sorted(draw for file in files for draw, _ in _records(file, environments_in))
        draws = {*everywhere[tp_group::num_tp_groups]}

    def decoded(data: bytes) -> OpenGroup:
        return group_from_bytes(data, prompt_of, limits or EngineLimits())

    found = [group for file in mine for _, group in _records(file, decoded, draws)]
    for group in found:
        _drop_what_cannot_continue(group, has_environments)
    return found if draws is None else sorted(found, key=lambda group: group.draw)


def _drop_what_cannot_continue(group: OpenGroup, has_environments: bool) -> None:
    for index, rollout in enumerate(group.rollouts):
        if rollout is None:
            continue
        if is_finished(rollout):
            continues = index in group.environment_outcomes or not has_environments
        else:
            continues = (index in group.conversations) == has_environments
        if not continues:
            group.rollouts[index] = None
            group.conversations.pop(index, None)
            group.outcomes.pop(index, None)


def check_environments(folder: Path, environment_of: Callable[[int], str]) -> None:
    """Raise UsageError if a conversation that a run continues was with another environment, or if a
    file has other content. `environment_of` returns the environment of a draw."""
    for file in _group_files(folder):
        for draw, environments in _records(file, environments_in):
            for then in sorted(environments):
                if then != (now := environment_of(draw)):
                    raise UsageError(
                        f"has conversations with {then} to continue, and the environment is now "
                        f"{now}",
                        flag=f"--load {folder.parent}",
                        remedy="bring that class back, or begin a new run with the trained weights "
                        "by --finetune and another --rl-run-dir",
                    )


def _group_files(folder: Path) -> list[Path]:
    """Return the files of `write_groups`, in the order of the TP groups."""
    if any(folder.glob("group_*.safetensors")):
        raise UsageError(
            "has unfinished samples in the format of an earlier version",
            flag=f"--load {folder.parent}",
            remedy=f"continue with that version, or delete {folder}/group_*.safetensors, whose "
            "samples are then lost",
        )
    return sorted(folder.glob("group_*.bank"))


def _records(
    file: Path, decoded: Callable[[bytes], _T], draws: Collection[int] | None = None
) -> Iterator[tuple[int, _T]]:
    """Yield the groups of a file, or only those of `draws`, each with its draw."""
    try:
        for draw, data in read_records(file):
            if draws is None or draw in draws:
                yield draw, decoded(data)
    except MALFORMED as error:
        why = f"{type(error).__name__}: {error}"
        raise not_held(file, "unfinished groups of samples", why) from error


def count_unfinished(folder: Path) -> int:
    """Count the groups in a checkpoint's `folder` that a run with the same prompts continues.
    Raises UsageError if a file has other content."""
    return len(SamplingState.read(folder, 0).outstanding)


def counts_of(admitted: AdmissionCounts) -> Counter[str]:
    """Return the groups of a run by the metric that counts them, without rollout/."""
    counts = Counter({_FILTERED + why: count for why, count in admitted.reasons.items()})
    numbers = admitted.started, admitted.uninformative, admitted.stale
    return counts + Counter(dict(zip(_COUNTED, numbers, strict=True)))


@dataclass(slots=True)
class AheadMetrics:
    """What is measured between two steps, on a rank of engines."""

    num_steps: int = 0
    num_skipped: int = 0  # versions without a step, after version `last_before`
    last_before: int = 0
    sampling_seconds: float = 0.0  # of the last step, mean of all engines
    # By the run before, which the next step counts: see `counts_of`.
    uncounted: Mapping[str, int] = field(default_factory=dict)
    _counted: Counter[str] = field(default_factory=Counter)  # at the end of the last step
    # Both, at the beginning of that.
    _before: tuple[Mapping[str, int], Counter[str]] = field(default_factory=lambda: ({}, Counter()))

    def since(self, admitted: AdmissionCounts) -> dict[str, int]:
        """Return what the next step counts: what happened since the last one."""
        return dict(Counter(self.uncounted) + counts_of(admitted) - self._counted)

    def undo(self) -> None:
        """Forget the last step, so that the next one counts the same."""
        self.uncounted, self._counted = self._before

    def staleness(self, table: SampleTable, weight_version: int) -> np.ndarray:
        """Return `[n]` int64: the versions between each sample's oldest token and this one, of
        those with a step."""
        oldest = table.oldest_versions
        oldest = oldest + self.num_skipped * (oldest <= self.last_before)
        staleness: np.ndarray = np.maximum(0, weight_version - oldest)
        return staleness

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
        counts = dict.fromkeys(_COUNTED, 0) | self.since(admitted)
        self._before = self.uncounted, self._counted
        self.uncounted, self._counted = {}, counts_of(admitted)
        self.sampling_seconds = float(seconds) / len(everywhere)
        staleness = self.staleness(table, weight_version)
        return {
            "rollout/staleness_mean": float(staleness.mean()),
            "rollout/staleness_max": float(staleness.max()),
            "rollout/versions_per_sample": float(num_versions / max(1, num_rollouts)),
            "rollout/groups_in_flight": float(admitted.in_flight),
            "rollout/groups_waiting": float(admitted.waiting),
            **{f"rollout/{name}": float(count) for name, count in counts.items()},
        }
