"""The table of a trace: the time of each stage, with every moment counted once.

A moment belongs to the innermost open span: a collective inside a forward pass counts as
communication, and not as forward pass. Collectives of training (log-probs, advantages, updates)
are in the row "communication". Collectives of a hand-over, a reward or a checkpoint stay in its
row, because a hand-over consists of little else; so do unknown spans of torch and of the engine.

Waiting is separated from communication where possible: all ranks leave a blocking call of
`common.objects` together, so the time that a rank spends there beyond the last rank to arrive is
waiting. It goes to the row "idle", with all the time that no span covers. In a pipeline, waiting
for a neighbour is part of "communication": the trace does not show which of the two was late.

This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STAGE, MODEL, COMMUNICATION = "stage", "model", "communication"
IDLE = "idle"
OTHER_UPDATE = "update, other"
STEP = "ProfilerStep#"  # torch.profiler's span of a step, numbered from 0
OF_WORLD = "all ranks: "  # prefix of the spans of `common.objects`
_PASSES = ("forward", "backward", "optimizer")
# Stages of `StageTimers` and of the hand-over, by their names in the table.
STAGE_ROWS = {
    "data": "data",
    "rollout": "rollout",
    "reward": "reward",
    "log_probs": "log-probs",
    "advantages": "advantages",
    "train": OTHER_UPDATE,
    "reshard_to_rollout": "hand-over to rollout",
    "reshard_to_train": "hand-over to train",
    "checkpoint": "checkpoint",
    "eval": "evaluation",
}
_ROWS = (
    *("data", "rollout", "reward", "log-probs", "advantages", "forward", "backward", "optimizer"),
    *(OTHER_UPDATE, "communication", "hand-over to rollout", "hand-over to train", "checkpoint"),
    *("evaluation", IDLE),
)
_SHOWN_STEPS = 6  # columns; the mean is of all steps
_SHOWN_COLLECTIVES = 8


@dataclass(frozen=True, slots=True)
class Span:
    """A period of time on this rank, in nanoseconds of the trace's clock."""

    name: str
    category: str  # STAGE, MODEL or COMMUNICATION
    row: str
    start: int
    end: int
    of_world: bool = False  # a blocking call of all ranks


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step of one rank, ready to be sent to rank 0."""

    number: int  # from 0, as in metrics.jsonl
    duration: int  # nanoseconds
    rows: Mapping[str, int]  # row -> nanoseconds; they add up to the duration
    world: Sequence[tuple[str, str, int]]  # blocking collectives of the world: name, row, ns
    collectives: Mapping[tuple[str, str], tuple[int, int]]  # (row, name) -> calls, nanoseconds


def row_of(name: str, category: str, stage: str | None) -> str:
    """Return the row of a span that begins inside `stage`, or outside of all stages."""
    if category == STAGE:
        return STAGE_ROWS.get(name, name)
    if category == MODEL:
        # Forward passes for log-probs count as log-probs.
        return name if stage in (None, "train") else row_of(str(stage), STAGE, None)
    if stage in (None, "train", "log_probs", "advantages"):
        return "communication"
    return row_of(str(stage), STAGE, None)


def traced_steps(
    events: Sequence[Mapping[str, Any]], stages: Collection[str], first_step: int
) -> list[TracedStep]:
    """Return the steps in a Chrome trace of torch.profiler; `stages` names its stages."""
    complete = sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"])
    spans: list[Span] = []
    running: list[Span] = []  # stages, the innermost last
    for event in complete:
        name, start = event["name"], round(1e3 * event["ts"])
        category = _category(name, event["cat"], stages)
        if category is None:
            continue
        end = start + round(1e3 * event["dur"])
        while running and running[-1].end <= start:
            running.pop()
        row = row_of(name, category, running[-1].name if running else None)
        spans.append(Span(name, category, row, start, end, name.startswith(OF_WORLD)))
        if category == STAGE:
            running.append(spans[-1])
    steps = []
    for event in complete:
        if event["name"].startswith(STEP) and event["cat"] == "user_annotation":
            begin = round(1e3 * event["ts"])
            end = begin + round(1e3 * event["dur"])
            inside = [span for span in spans if begin <= span.start < end]
            number = first_step + int(event["name"].removeprefix(STEP))
            steps.append(traced_step(number, inside, begin, end))
    return steps


def _category(name: str, kind: str, stages: Collection[str]) -> str | None:
    """Return the category of an event; None for foreign annotations and compute kernels."""
    if kind == "kernel":  # NCCL's kernels: an annotation on the host only covers the launch
        return COMMUNICATION if name.startswith("nccl") else None
    if kind != "user_annotation":
        return None
    if name in stages:
        return STAGE
    if name in _PASSES:
        return MODEL
    return COMMUNICATION if name.startswith((OF_WORLD, "gloo:")) else None


def exclusive_times(spans: Sequence[Span], begin: int, end: int) -> dict[str, int]:
    """Return row -> nanoseconds between `begin` and `end`; they add up to `end - begin`.

    If several spans are open, the moment belongs to the one that began last.
    """
    changes: list[tuple[int, int, int]] = []  # moment, 0 to end and 1 to begin, index
    for index, span in enumerate(spans):
        start, stop = max(span.start, begin), min(span.end, end)
        if start < stop:
            changes += [(start, 1, index), (stop, 0, index)]
    changes.sort()
    rows: dict[str, int] = {}
    running: list[int] = []  # by their starts; spans end in any order
    now = begin
    for moment, begins, index in changes:
        row = spans[running[-1]].row if running else IDLE
        rows[row] = rows.get(row, 0) + moment - now
        now = moment
        if begins:
            running.append(index)
        else:
            running.remove(index)
    rows[IDLE] = rows.get(IDLE, 0) + end - now
    return rows


def traced_step(number: int, spans: Sequence[Span], begin: int, end: int) -> TracedStep:
    """Summarize a step's spans."""
    collectives: dict[tuple[str, str], tuple[int, int]] = {}
    for span in spans:
        if span.category == COMMUNICATION:
            calls, nanoseconds = collectives.get((span.row, span.name), (0, 0))
            longer = nanoseconds + span.end - span.start
            collectives[span.row, span.name] = (calls + 1, longer)
    return TracedStep(
        number=number,
        duration=end - begin,
        rows=exclusive_times(spans, begin, end),
        world=[(span.name, span.row, span.end - span.start) for span in spans if span.of_world],
        collectives=collectives,
    )


def with_waiting_apart(ranks: Sequence[TracedStep]) -> list[dict[str, int]]:
    """Return the rows of one step on all ranks, with waiting for other ranks moved to "idle".

    If the ranks did not have the same collectives of the world, nothing is moved.
    """
    rows = [dict(step.rows) for step in ranks]
    names = {tuple((name, row) for name, row, _ in step.world) for step in ranks}
    if len(names) != 1:
        return rows
    for same in zip(*(step.world for step in ranks), strict=True):
        shortest = min(nanoseconds for _, _, nanoseconds in same)
        for of_rank, (_, row, nanoseconds) in zip(rows, same, strict=True):
            # Spans of other threads in the meantime are already subtracted from the row.
            waited = min(nanoseconds - shortest, of_rank.get(row, 0))
            of_rank[row] = of_rank.get(row, 0) - waited
            of_rank[IDLE] = of_rank.get(IDLE, 0) + waited
    return rows


@dataclass(frozen=True, slots=True)
class TableRow:
    """Seconds of a row of the table."""

    name: str
    by_step: tuple[float, ...]  # means over ranks
    mean: float  # over steps and ranks
    low: float  # smallest of the ranks' means over steps
    high: float  # and the largest
    share: float  # of the step


@dataclass(frozen=True, slots=True)
class TraceTable:
    """The time of the traced steps by row, over all ranks."""

    steps: tuple[int, ...]
    rows: tuple[TableRow, ...]
    whole: TableRow  # the step itself
    # (row, collective, calls per step and rank, mean seconds per step), the longest first
    collectives: tuple[tuple[str, str, float, float], ...] = field(default=())

    @property
    def bottleneck(self) -> str:
        """The row with the largest share; for "idle" also the row that the ranks waited for."""
        worst = max(self.rows, key=lambda row: row.mean)
        text = f"bottleneck: {worst.name}, {100 * worst.share:.0f} % of the step"
        if worst.name != IDLE:
            return text
        uneven = max(self.rows, key=lambda row: (row.name != IDLE, row.high - row.mean))
        if uneven.high - uneven.mean < 0.1 * worst.mean:
            return text
        return (
            f"{text} (ranks differ most in {uneven.name}: {_seconds(uneven.high)} s on the slowest,"
            f" {_seconds(uneven.mean)} s on average)"
        )


def make_table(ranks: Sequence[Sequence[TracedStep]]) -> TraceTable:
    """Build the table from each rank's traced steps, which must be the same on all ranks."""
    steps = tuple(step.number for step in ranks[0])
    assert steps and all(tuple(s.number for s in of_rank) == steps for of_rank in ranks), (
        f"ranks traced other steps than rank 0's {steps}"
    )
    by_step = [with_waiting_apart(step) for step in zip(*ranks, strict=True)]
    durations = [[step.duration for step in same] for same in zip(*ranks, strict=True)]
    whole = _row("step", durations, 0.0)
    found = {name for step in by_step for rows in step for name, spent in rows.items() if spent}
    unknown = sorted(found - set(_ROWS))
    wanted = [name for name in _ROWS if name in found or name not in (OTHER_UPDATE, "evaluation")]
    wanted[-1:-1] = unknown
    rows = (
        _row(name, [[rows.get(name, 0) for rows in step] for step in by_step], whole.mean)
        for name in wanted
    )
    return TraceTable(steps, tuple(rows), whole, _collectives(ranks))


def _row(name: str, nanoseconds: Sequence[Sequence[int]], step_seconds: float) -> TableRow:
    """Return a row of `nanoseconds`, which are by step and then by rank."""
    num_steps, num_ranks = len(nanoseconds), len(nanoseconds[0])
    by_rank = [
        sum(step[rank] for step in nanoseconds) / num_steps / 1e9 for rank in range(num_ranks)
    ]
    mean = sum(by_rank) / num_ranks
    return TableRow(
        name,
        by_step=tuple(sum(step) / num_ranks / 1e9 for step in nanoseconds),
        mean=mean,
        low=min(by_rank),
        high=max(by_rank),
        share=mean / step_seconds if step_seconds else 1.0,
    )


def _collectives(
    ranks: Sequence[Sequence[TracedStep]],
) -> tuple[tuple[str, str, float, float], ...]:
    count = sum(len(steps) for steps in ranks)
    total: dict[tuple[str, str], tuple[int, int]] = {}
    for step in (step for steps in ranks for step in steps):
        for key, (calls, nanoseconds) in step.collectives.items():
            before = total.get(key, (0, 0))
            total[key] = (before[0] + calls, before[1] + nanoseconds)
    found = [
        (row, name, calls / count, nanoseconds / count / 1e9)
        for (row, name), (calls, nanoseconds) in total.items()
    ]
    return tuple(sorted(found, key=lambda entry: -entry[-1]))


def render(table: TraceTable) -> str:
    """Format the table as text, whose last line names the bottleneck."""
    from rich.console import Console
    from rich.table import Table

    shown = table.steps[:_SHOWN_STEPS]
    steps = f"steps {table.steps[0]} to {table.steps[-1]}" if len(table.steps) > 1 else ""
    main = Table(title=f"seconds of {steps or f'step {table.steps[0]}'}, means over ranks")
    main.add_column("stage")
    for name in (*(f"step {step}" for step in shown), "mean", "min rank", "max rank", "share"):
        main.add_column(name, justify="right")
    for row in (*table.rows, table.whole):
        if row is table.whole:
            main.add_section()
        numbers = (*row.by_step[: len(shown)], row.mean, row.low, row.high)
        main.add_row(row.name, *map(_seconds, numbers), f"{100 * row.share:.1f} %")
    console = Console(file=io.StringIO(), width=40 + 12 * len(shown) + 40, color_system=None)
    console.print(main)
    if table.collectives:
        details = Table(title="collectives, in them with all waiting")
        for name in ("in", "call", "calls a step", "seconds a step"):
            details.add_column(name, justify="left" if name in ("in", "call") else "right")
        for row_name, name, calls, seconds in table.collectives[:_SHOWN_COLLECTIVES]:
            details.add_row(row_name, name, f"{calls:.1f}", _seconds(seconds))
        console.print(details)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join([*lines, table.bottleneck])


def _seconds(value: float) -> str:
    return "-" if value == 0 else f"{value:.3f}" if value < 100 else f"{value:.1f}"
