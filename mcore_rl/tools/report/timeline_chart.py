"""The chart of timeline.jsonl: a row per role, a bar per span, over the last steps."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from plotly import graph_objects

from mcore_rl.observe.timeline import ENGINES, TRAINER, RoleStep, TimeSpan
from mcore_rl.tools.report.panels import COLORS, Panel
from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.texts import clean

TIMELINE_STEPS = 20
_SHORTEST_SHARE = 1 / 2000  # of the time shown, on about 1,400 pixels
_HOVER = "step %{customdata:,d}, %{fullData.name}: %{x:.4~g} s, from %{base:.4~g} s<extra></extra>"


def timeline_figure(
    panel: Panel, run: Run, layout: Mapping[str, Any]
) -> graph_objects.Figure | None:
    """Return the figure of a run's last steps; None without a span."""
    lines = _last_lines(run)
    if not lines:
        return None
    spans = [(line, span) for line in lines for span in line.spans]
    begin = min(span.start for _, span in spans)
    seconds = max(span.end for _, span in spans) - begin
    # Without engines of their own, the trainer's ranks do everything.
    roles = {TRAINER: "trainers" if any(ln.role == ENGINES for ln in lines) else "ranks"}
    roles |= {ENGINES: "engines"}
    by_label: dict[str, list[tuple[RoleStep, TimeSpan]]] = {
        label: [] for label in panel.series.values()
    }
    for line, span in spans:
        if span.end - span.start > seconds * _SHORTEST_SHARE:
            label = panel.series.get(span.what, span.what)
            by_label.setdefault(label, []).append((line, span))
    figure = graph_objects.Figure(layout=layout)
    for number, (label, drawn) in enumerate(by_label.items()):
        if drawn:
            figure.add_bar(
                orientation="h",
                name=html.escape(clean(label)),
                y=[html.escape(clean(roles.get(line.role, line.role))) for line, _ in drawn],
                base=[round(span.start - begin, 4) for _, span in drawn],
                x=[round(span.end - span.start, 4) for _, span in drawn],
                customdata=[line.step for line, _ in drawn],
                hovertemplate=_HOVER,
                marker={"color": COLORS[number % len(COLORS)], "line": {"width": 0}},
            )
    begins = {step: begun - begin for step, (begun, _) in _periods(lines).items()}
    figure.update_xaxes(tickvals=[*begins.values()], ticktext=[f"{step:,}" for step in begins])
    figure.update_xaxes(title_text=f"step; {seconds:,.4g} seconds in all", range=[0, seconds])
    order = {"categoryorder": "array", "categoryarray": [*roles.values()]}
    figure.update_yaxes(type="category", autorange="reversed", **order)
    figure.update_layout(margin_b=60, legend_y=-0.34)  # below the axis's title
    return figure.update_layout(hovermode="closest", bargap=0.3, height=250, showlegend=True)


def _last_lines(run: Run) -> list[RoleStep]:
    """Return the lines of the last steps, without those before a pause that would take more than
    half of the chart: the run ended there, and was resumed."""
    lines = [line for line in run.timeline if line.spans]
    steps = sorted({line.step for line in lines})[-TIMELINE_STEPS:]
    periods = _periods([line for line in lines if line.step in steps])
    if periods:
        seconds = max(e for _, e in periods.values()) - min(b for b, _ in periods.values())
        for former, step in pairwise(sorted(periods)):
            if periods[step][0] - periods[former][1] > seconds / 2:
                steps = steps[steps.index(step) :]
    return [line for line in lines if line.step in steps]


def _periods(lines: Sequence[RoleStep]) -> dict[int, tuple[float, float]]:
    """Return the begin and the end of each step: of the trainer's spans, if it has any."""
    periods: dict[int, tuple[float, float]] = {}
    for line in sorted(lines, key=lambda line: line.role == TRAINER):
        periods[line.step] = (line.spans[0].start, max(span.end for span in line.spans))
    return dict(sorted(periods.items()))
