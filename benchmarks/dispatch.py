"""Possible gain of dispatching prompts to engines: the long-tail load of `rollout.py`, simulated.

    python benchmarks/dispatch.py [--repetitions 200] [--write]

No engine runs. Two simulated engines take steps with a fixed cost and a cost per sequence. All
policies dispatch the same responses. The bound is the time if both engines were full to the end.
--write replaces its section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.pages import section, write_section  # noqa: E402
from benchmarks.records import RESULTS  # noqa: E402
from benchmarks.rollout_worker import LONG_TAIL, Load  # noqa: E402

NUM_ENGINES = 2
FIXED_PARTS = (3, 6, 12)  # fixed cost of a step, in sequences
SECTION = "dispatch"
KNOWS = {
    "blocks": "nothing",
    "groups, as engines have room": "nothing",
    "samples, as engines have room": "nothing",
    "groups, longest first": "lengths",
    "samples, longest first": "lengths",
    "bound": "",
}


def makespan(
    shares: Sequence[Sequence[int]], rest: Iterator[Sequence[int]], room: int, fixed: float
) -> float:
    """Return the time until all engines are done. Each begins with its share of lengths, and draws
    from the rest when it has room. A step costs `fixed`, plus one per sequence."""
    waiting = [list(share) for share in shares]
    running: list[list[int]] = [[] for _ in shares]
    clocks = [0.0] * len(shares)
    open_engines = set(range(len(shares)))
    while open_engines:
        engine = min(open_engines, key=lambda each: clocks[each])
        mine = running[engine]
        while len(mine) < room:
            if not waiting[engine] and (drawn := next(rest, None)) is not None:
                waiting[engine] += drawn
            if not waiting[engine]:
                break
            mine.append(waiting[engine].pop(0))
        if not mine:
            open_engines.discard(engine)
            continue
        clocks[engine] += fixed + len(mine)
        running[engine] = [left - 1 for left in mine if left > 1]
    return max(clocks)


def seconds_of(load: Load, seed: int, fixed: float) -> dict[str, float]:
    """Return the time of each policy for the responses of a repetition."""
    lengths = np.array(load.lengths(seed)).reshape(load.num_prompts, load.num_samples)
    room, half = load.max_num_seqs, load.num_prompts // NUM_ENGINES
    blocks = [lengths[:half].ravel().tolist(), lengths[half:].ravel().tolist()]

    def dispatched(units: Sequence[Sequence[int]]) -> float:
        """Round-robin while there is room, then to the engine that has room."""
        in_turn = NUM_ENGINES * max(1, room // len(units[0]))
        shares = [
            [length for unit in units[engine:in_turn:NUM_ENGINES] for length in unit]
            for engine in range(NUM_ENGINES)
        ]
        return makespan(shares, iter(units[in_turn:]), room, fixed)

    groups = lengths.tolist()
    samples = [[length] for length in lengths.ravel().tolist()]
    tokens = lengths.sum() / NUM_ENGINES
    return {
        "blocks": makespan(blocks, iter(()), room, fixed),
        "groups, as engines have room": dispatched(groups),
        "samples, as engines have room": dispatched(samples),
        "groups, longest first": dispatched(sorted(groups, key=lambda each: -max(each))),
        "samples, longest first": dispatched(sorted(samples, reverse=True)),
        "bound": max(tokens / room, float(lengths.max())) * fixed + tokens,
    }


def section_of(load: Load, repetitions: int) -> str:
    """Return the section of the page."""
    lines = [
        "# Possible gain of dispatch, simulated",
        "",
        "Printed by `benchmarks/dispatch.py`, of the lengths of the case `long_tail` above: "
        f"{load.num_prompts} x {load.num_samples} responses, {NUM_ENGINES} engines of "
        f"{load.max_num_seqs} sequences. A step costs a fixed part, in sequences, and one for each "
        f"sequence. Ratios to blocks, medians of {repetitions} repetitions and the middle half. "
        "`bound`: no engine waits and all are full, or the longest response takes all the time.",
        "",
        f"| way | knows | {' | '.join(f'fixed part {each}' for each in FIXED_PARTS)} |",
        f"| --- | --- |{' ---: |' * len(FIXED_PARTS)}",
    ]
    found = {
        fixed: [seconds_of(load, seed, fixed) for seed in range(repetitions)]
        for fixed in FIXED_PARTS
    }
    for way, knows in KNOWS.items():
        cells = []
        for each in found.values():
            ratios = [seconds["blocks"] / seconds[way] for seconds in each]
            low, high = np.quantile(ratios, (0.25, 0.75))
            cells.append(f"{statistics.median(ratios):.2f}x ({low:.2f}-{high:.2f})")
        lines.append(f"| {way} | {knows} | {' | '.join(cells)} |")
    return section(SECTION, lines)


def main(tokens: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="put the section into RESULTS.md")
    options = parser.parse_args(tokens)
    if options.repetitions < 1:
        parser.error(f"--repetitions {options.repetitions} must be at least 1; raise it")
    part = section_of(LONG_TAIL, options.repetitions)
    print(part)
    if options.write:
        write_section(RESULTS, SECTION, part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
