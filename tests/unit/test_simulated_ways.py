"""The figure of docs/using/separate_engines.md is what the simulation says."""

from __future__ import annotations

from benchmarks import simulated_ways


def test_figure_is_current() -> None:
    text = simulated_ways.FIGURE.read_text(encoding="utf-8")
    assert simulated_ways.figure() == text, "run python -m benchmarks.simulated_ways"
