"""The table of a trace: the time of each stage, with every moment counted once. Pure.

A moment belongs to the span that began last. The rows are the stages of `StageTimers` and of the
hand-over. Inside "train" (and outside of all stages) passes and collectives have rows of their own:
"forward", "backward", "optimizer" and "communication"; elsewhere they belong to their stage. On a
CPU a collective inside a pass belongs to the pass.

All ranks leave a wait for all ranks (a call of `common.objects`) together, so the time that a rank
spends there beyond the last rank to arrive is waiting. It goes to the row "idle", with all the time
that no span covers. In a pipeline, waiting for a neighbor is part of "communication": the trace
does not show which of the two was late.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from mcore_rl.common.spans import PART, PASS, STAGE, WORLD, Span

IDLE = "idle"
_SHOWN_STEPS = 6  # columns; the mean is of all steps


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step of one rank; times in nanoseconds.

    Example: `TracedStep(2, {"rollout": 6_000, "reward": 1_000, "idle": 0}, [("reward", 900)])`
    """

    number: int  # from 0, as in metrics.jsonl
    rows: Mapping[str, int]  # they add up to the step
    world: Sequence[tuple[str, int]]  # waits for all ranks: row, time


def traced_step(number: int, spans: Iterable[Span], begin: int, end: int) -> TracedStep:
    """Summarize the spans of a step from `begin` to `end`."""
    counted = with_rows([span for span in spans if begin <= span.start < end])
    return TracedStep(
        number,
        rows=exclusive_times([(row, s.start, s.end) for row, s in counted], begin, end),
        world=[(row, s.end - s.start) for row, s in counted if s.kind == WORLD],
    )


def with_rows(spans: Iterable[Span]) -> list[tuple[str, Span]]:
    """Return the spans that count, in their order, with their rows of the table."""
    counted: list[tuple[str, Span]] = []
    stages: list[Span] = []  # running ones, the innermost last
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stages and stages[-1].end <= span.start:
            stages.pop()
        stage = stages[-1].name if stages else "train"
        if span.kind == STAGE:
            stages.append(span)
        if span.kind != PART:
            is_own = span.kind == STAGE or stage == "train"
            name = span.name if span.kind in (STAGE, PASS) else "communication"
            counted.append((name if is_own else stage, span))
    return counted


def exclusive_times(spans: Iterable[tuple[str, int, int]], begin: int, end: int) -> dict[str, int]:
    """Return row -> time between `begin` and `end`; the times add up to `end - begin`.

    `spans` are (row, start, end). If several are open, the moment belongs to the last one.
    """
    changes: list[tuple[int, bool, int, str]] = []  # moment, begins, number, row
    for number, (row, start, stop) in enumerate(spans):
        if max(start, begin) < min(stop, end):
            changes += [
                (max(start, begin), True, number, row),
                (min(stop, end), False, number, row),
            ]
    times: dict[str, int] = defaultdict(int)
    running: dict[int, str] = {}  # by their starts; spans end in any order
    now = begin
    for moment, begins, number, row in sorted(changes):
        times[next(reversed(running.values()), IDLE)] += moment - now
        now = moment
        if begins:
            running[number] = row
        else:
            del running[number]
    times[IDLE] += end - now
    return dict(times)


def with_waiting_apart(ranks: Sequence[TracedStep]) -> list[dict[str, int]]:
    """Return the rows of one step on all ranks, with waiting for other ranks moved to "idle".

    If the ranks did not have the same waits for all ranks, nothing is moved.
    """
    rows = [dict(step.rows) for step in ranks]
    if len({tuple(row for row, _ in step.world) for step in ranks}) != 1:
        return rows
    for waits in zip(*(step.world for step in ranks), strict=True):
        shortest = min(time for _, time in waits)
        for rank_rows, (row, time) in zip(rows, waits, strict=True):
            # Spans of other threads in the meantime are already subtracted from the row.
            waited = min(time - shortest, rank_rows.get(row, 0))
            rank_rows[row] = rank_rows.get(row, 0) - waited
            rank_rows[IDLE] = rank_rows.get(IDLE, 0) + waited
    return rows


def table_of(ranks: Sequence[Sequence[TracedStep]]) -> str:
    """Return the table of all ranks' steps, which must be the same on all ranks.

    The last line names the bottleneck.
    """
    steps = [step.number for step in ranks[0]]
    by_step = [with_waiting_apart(same) for same in zip(*ranks, strict=True)]
    labels = dict.fromkeys(name for same in by_step for rows in same for name in rows)
    names = [*(name for name in labels if name != IDLE), IDLE]
    # [steps, ranks, rows] in seconds; the last row is the step
    times = np.array([[[rows.get(n, 0) for n in names] for rows in same] for same in by_step]) / 1e9
    times = np.concatenate([times, times.sum(axis=2, keepdims=True)], axis=2)
    rank_means = times.mean(axis=0)
    mean, low, high = rank_means.mean(axis=0), rank_means.min(axis=0), rank_means.max(axis=0)
    shown = steps[:_SHOWN_STEPS]
    table = Table(title=f"seconds of steps {steps[0]} to {steps[-1]}, means over ranks")
    table.add_column("stage")
    for head in (*(f"step {n}" for n in shown), "mean", "min rank", "max rank", "share"):
        table.add_column(head, justify="right")
    columns = [*times.mean(axis=1)[: len(shown)], mean, low, high]
    for row, name in enumerate([*names, "step"]):
        numbers = [_seconds(column[row]) for column in columns]
        table.add_row(name, *numbers, f"{mean[row] / mean[-1]:.1%}", end_section=name == IDLE)
    console = Console(file=io.StringIO(), width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get() + _bottleneck(names, mean, high)


def _bottleneck(names: Sequence[str], mean: np.ndarray, high: np.ndarray) -> str:
    """Name the row with the largest share; for "idle" also the row that the ranks waited for."""
    worst = int(mean[:-1].argmax())
    text = f"bottleneck: {names[worst]}, {mean[worst] / mean[-1]:.0%} of the step"
    excess = (high - mean)[: len(names) - 1]  # without "idle", the last one
    if names[worst] != IDLE or excess.max(initial=0.0) < 0.1 * mean[worst]:
        return text
    uneven = int(excess.argmax())
    return (
        f"{text} (ranks differ most in {names[uneven]}: {_seconds(high[uneven])} s on the slowest,"
        f" {_seconds(mean[uneven])} s on average)"
    )


def _seconds(value: float) -> str:
    return "-" if value == 0 else f"{value:.3f}" if value < 100 else f"{value:.1f}"
