"""Draw the simulated samples per second of docs/using/separate_engines.md.

    python -m benchmarks.simulated_ways

16 ranks with engines of TP2, whose speed and that of training are assumed. Tests fail when the
figure is not what the simulation says.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.line_charts import Chart, Line, svg
from mcore_rl.planner.simulated_workload import EngineSpeed, ResponseLengths, Workload
from mcore_rl.planner.simulation import COLOCATED, SEPARATE, Candidate, Speeds, simulate

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "assets" / "simulated_ways.svg"
SPEEDS = Speeds(EngineSpeed((1, 64, 256), (0.010, 0.014, 0.026), 40_000.0), train_rate=2000.0)
NUM_RANKS, TP_SIZE, MOST_RUNNING = 16, 2, 256
SWITCH_SECONDS, TRANSFER_SECONDS = 1.0, 1.0
STALENESS = (0, 1, 2, 4)
NUM_STEPS = 8  # that count
COLORS = {COLOCATED: "#8a8f98", "12 + 4": "#d9731a", "8 + 8": "#3d7fd6", "4 + 12": "#3a9d5d"}
WORKLOADS = {
    "even answers": Workload(
        groups_per_step=64,
        samples_per_group=8,
        prompt_tokens=200.0,
        lengths=ResponseLengths(512, 128.0, 0.05),
    ),
    "long tails, three turns with a tool": Workload(
        groups_per_step=32,
        samples_per_group=8,
        prompt_tokens=300.0,
        lengths=ResponseLengths(8192, 1000.0, 1.0, turns=3),
        tool_seconds=2.0,
    ),
}


def lines_of(workload: Workload) -> dict[str, Line]:
    """Return the samples per second of colocated engines and of each split, by staleness."""

    def rate(mode: str, trainers: int, staleness: int = 0) -> float:
        engine_ranks = NUM_RANKS - trainers if mode == SEPARATE else NUM_RANKS
        candidate = Candidate(
            mode,
            num_ranks=NUM_RANKS,
            num_trainers=trainers,
            num_engines=engine_ranks // TP_SIZE,
            most_running=MOST_RUNNING,
            hand_over_seconds=TRANSFER_SECONDS if mode == SEPARATE else SWITCH_SECONDS,
            max_staleness=staleness,
        )
        return simulate(candidate, workload, SPEEDS, steps=NUM_STEPS).samples_per_second

    lines: dict[str, Line] = {COLOCATED: ((0, STALENESS[-1]), (rate(COLOCATED, NUM_RANKS),) * 2)}
    for name in list(COLORS)[1:]:
        trainers = int(name.split(" + ")[0])
        lines[name] = STALENESS, [rate(SEPARATE, trainers, k) for k in STALENESS]
    return lines


def figure() -> str:
    """Return the figure."""
    last = str(STALENESS[-1])
    charts = [Chart(name, lines_of(each), "K = 0", last) for name, each in WORKLOADS.items()]
    return svg(charts, COLORS)


if __name__ == "__main__":
    FIGURE.write_text(figure(), encoding="utf-8")
