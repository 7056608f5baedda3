"""From panels and runs to plotly's figures. Pure.

A figure's colours that depend on the colour scheme are set where it is drawn, by the page.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from plotly import graph_objects

from mcore_rl.observe.alarms import RULES
from mcore_rl.tools.report.panels import BAND, SHARE, STACK, Panel
from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.thinning import MAX_BARS, MAX_POINTS, thin_line, thin_means
from mcore_rl.tools.report.units import axis_unit

# Each has a contrast of 3 and more on the white and on the dark ground.
COLOURS = (
    "#3d7fd6",
    "#d9731a",
    "#22976b",
    "#b059c4",
    "#d94f5c",
    "#12919e",
    "#8f7a2d",
    "#7a83e0",
    "#c2558d",
    "#6f8a2b",
    "#8a8f98",
)
_OTHER_COLOUR = "#8a8f98"
HEIGHT = 290
_STACK_HEIGHT = 370
_BAND_FILL = "rgba(61, 127, 214, 0.18)", "rgba(217, 115, 26, 0.18)"
_DASHES, _BOUND_DASHES = ("solid", "dot"), ("dash", "dashdot")
_METRIC_OF_ALARM = {
    rule.field.removeprefix("alarm_").replace("_", "-"): rule.metric for rule in RULES
}
# Points that a line is drawn without, but not a pair of them far apart.
_MARKERS_UP_TO = 40


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure, and the panel it is of; `run` is the one it shows where it does not show all."""

    key: str
    panel: Panel
    figure: graph_objects.Figure
    run: str = ""
    has_marks: bool = False  # of alarms


def charts_of(panel: Panel, runs: Sequence[Run]) -> list[Chart]:
    """The charts of a panel: one, or one for each run where they stack; none without a value."""
    with_values = [run for run in runs if _is_measured(panel, run)]
    if not with_values:
        return []
    if panel.kind == STACK:
        highest = max(float(_stacked(panel, run)[1].sum(axis=0).max()) for run in with_values)
        return [
            Chart(
                f"{panel.key}-{number}" if len(runs) > 1 else panel.key,
                panel,
                _stack(panel, run, highest),
                run=run.name if len(runs) > 1 else "",
            )
            for number, run in enumerate(runs)
            if run in with_values
        ]
    figure = _empty(panel)
    if panel.kind == BAND:
        for number, run in enumerate(runs):
            _add_band(figure, panel, run, number, named=len(runs) > 1)
        divisor = 1.0
        drawn_at = {metric: panel.metrics[0][0] for metric, _ in panel.metrics}
    else:
        metrics = [
            (metric, label)
            for metric, label in metrics_of(panel, runs)
            if any(run.series(metric)[1].size for run in runs)
        ]
        divisor, unit = _axis(panel, metrics, runs)
        figure.update_yaxes(title_text=unit)
        _add_lines(figure, metrics, runs, divisor)
        drawn_at = {metric: metric for metric, _ in metrics}
    _range_of_constant(figure)
    has_marks = False
    for run in runs:
        has_marks |= _add_alarms(figure, drawn_at, run, divisor, in_legend=not has_marks)
    if len(figure.data) == 1:
        figure.update_layout(showlegend=False)
    return [Chart(panel.key, panel, figure, has_marks=has_marks)]


def metrics_of(panel: Panel, runs: Sequence[Run]) -> list[tuple[str, str]]:
    """The metrics a panel draws, with their labels; those it knows by a pattern among them."""
    found = list(panel.metrics)
    if panel.rest:
        first, last = panel.rest.split("*")
        names = sorted({name for run in runs for name in run.values})
        for name in names:
            if fnmatchcase(name, panel.rest):
                found.append((name, name.removeprefix(first).removesuffix(last)))
    return found


def _is_measured(panel: Panel, run: Run) -> bool:
    for metric, _ in metrics_of(panel, [run]):
        values = run.series(metric)[1]
        if values.size and not (panel.optional and not values.any()):
            return True
    return False


def _empty(panel: Panel, axis_title: str = "") -> graph_objects.Figure:
    figure = graph_objects.Figure()
    figure.update_layout(
        template="none",
        # The bar of buttons has the top for itself.
        margin={"l": 54, "r": 12, "t": 26, "b": 40},
        height=HEIGHT,
        hovermode="x unified",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top", "font": {"size": 11}},
        modebar={"bgcolor": "rgba(0,0,0,0)"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"size": 12},
        xaxis={"zeroline": False, "tickformat": ",d"},
        yaxis={
            "title": {"text": axis_title, "standoff": 6},
            "automargin": True,
            "exponentformat": "none",
            "separatethousands": True,
        },
    )
    if panel.from_zero or panel.kind == STACK:
        figure.update_yaxes(rangemode="tozero")
    if panel.unit == SHARE:
        figure.update_yaxes(tickformat=".2~%")
    return figure


def _add_lines(
    figure: graph_objects.Figure,
    metrics: Sequence[tuple[str, str]],
    runs: Sequence[Run],
    divisor: float,
) -> None:
    """One metric has a colour for each run; several have a colour each, and dashes for the
    second run."""
    for number, run in enumerate(runs):
        for place, (metric, label) in enumerate(metrics):
            steps, values = thin_line(*run.series(metric))
            if not steps.size:
                continue
            one = len(metrics) == 1
            # A lower bound that is met would hide behind what meets it.
            dashes = _BOUND_DASHES if "lower_bound" in metric else _DASHES
            dash = dashes[0 if one else number]
            figure.add_scatter(
                x=steps.astype(np.int32),
                y=(values / divisor).astype(np.float32),
                name=_name(run, label, runs, one),
                mode="lines+markers" if steps.size <= _MARKERS_UP_TO else "lines",
                marker={"size": 5},
                line={
                    "color": COLOURS[(number if one else place) % len(COLOURS)],
                    "dash": dash,
                    "width": 1.8,
                },
            )


def _range_of_constant(figure: graph_objects.Figure) -> None:
    """An axis that begins or ends at 0, where plotly would draw 1e-4 between -1 and 1."""
    values = np.concatenate([trace.y for trace in figure.data])
    if values.min() == values.max():
        value = float(values[0])
        figure.update_yaxes(range=[min(0.0, 2 * value), max(0.0, 2 * value) or float(value == 0)])


def _name(run: Run, label: str, runs: Sequence[Run], only_metric: bool) -> str:
    if len(runs) == 1:
        return html.escape(label)
    return html.escape(run.name if only_metric else f"{label}, {run.name}")


def _axis(
    panel: Panel, metrics: Sequence[tuple[str, str]], runs: Sequence[Run]
) -> tuple[float, str]:
    highest = [run.series(name)[1].max(initial=0.0) for run in runs for name, _ in metrics]
    return axis_unit(panel.unit, max(highest))


def _add_band(
    figure: graph_objects.Figure, panel: Panel, run: Run, number: int, *, named: bool
) -> None:
    (mean_name, label), (std_name, band_label) = panel.metrics
    steps, means = run.series(mean_name)
    if not steps.size:
        return
    every = run.values.get(std_name, np.zeros(run.steps.size))
    stds = np.nan_to_num(every[np.isin(run.steps, steps)])
    steps, (means, stds) = thin_means(steps, np.stack([means, stds]), MAX_POINTS)
    steps, colour = steps.astype(np.int32), COLOURS[number]
    name = html.escape(run.name if named else label)
    edges = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "legendgroup": name}
    low, high = ((means + sign * stds).astype(np.float32) for sign in (-1, 1))
    figure.add_scatter(x=steps, y=low, showlegend=False, **edges)
    figure.add_scatter(
        x=steps,
        y=high,
        fill="tonexty",
        fillcolor=_BAND_FILL[number],
        name=band_label,
        showlegend=not named,
        **edges,
    )
    figure.add_scatter(
        x=steps,
        y=means.astype(np.float32),
        name=name,
        legendgroup=name,
        mode="lines+markers" if steps.size <= _MARKERS_UP_TO else "lines",
        marker={"size": 5},
        line={"color": colour, "width": 1.8},
    )


def _stacked(panel: Panel, run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and `[k + 1, n]` seconds of the k stages and of what the total has beyond them."""
    steps, total = run.series(panel.total)
    rows = np.isin(run.steps, steps)
    nothing = np.zeros(run.steps.size)
    stages = [np.nan_to_num(run.values.get(name, nothing)[rows]) for name, _ in panel.metrics]
    if not stages or not steps.size:
        return steps, np.zeros((len(panel.metrics) + 1, steps.size))
    other = np.maximum(0.0, total - np.sum(stages, axis=0))
    return thin_means(steps, np.stack([*stages, other]), MAX_BARS)


def _stack(panel: Panel, run: Run, highest: float) -> graph_objects.Figure:
    steps, columns = _stacked(panel, run)
    divisor, unit = axis_unit(panel.unit, highest)
    figure = _empty(panel, unit)
    labels = [*(label for _, label in panel.metrics), "other"]
    for place, (label, seconds) in enumerate(zip(labels, columns, strict=True)):
        if seconds.any():
            figure.add_bar(
                x=steps.astype(np.int32),
                y=(seconds / divisor).astype(np.float32),
                name=label,
                marker={
                    "color": _OTHER_COLOUR if label == "other" else COLOURS[place % len(COLOURS)],
                    "line": {"width": 0},
                },
            )
    figure.update_layout(
        barmode="stack", bargap=0.0, height=_STACK_HEIGHT, legend_traceorder="normal"
    )
    # Of two runs beside each other the same height is the same time.
    figure.update_yaxes(range=[0, 1.05 * highest / divisor])
    return figure


def _add_alarms(
    figure: graph_objects.Figure,
    drawn_at: Mapping[str, str],
    run: Run,
    divisor: float,
    *,
    in_legend: bool,
) -> bool:
    """A mark where an alarm was raised, on the line that its metric is drawn at."""
    marks: list[tuple[int, float, str]] = []
    for event in run.events:
        metric = drawn_at.get(_METRIC_OF_ALARM.get(event.alarm or "", ""))
        if metric is None:
            continue
        steps, values = run.series(metric)
        at = np.flatnonzero(steps == event.step)
        if at.size:
            text = "<br>".join(html.escape(part) for part in textwrap.wrap(event.text, 60))
            marks.append((int(steps[at[0]]), float(values[at[0]]) / divisor, text))
    if not marks:
        return False
    figure.add_scatter(
        x=[step for step, _, _ in marks],
        y=[value for _, value, _ in marks],
        text=[text for _, _, text in marks],
        mode="markers",
        name="alarm",
        showlegend=in_legend,
        hovertemplate="%{text}<extra>alarm</extra>",
        marker={"symbol": "x", "size": 10, "color": "#d92d3a"},
    )
    return True


def as_json(charts: Sequence[Chart]) -> dict[str, dict[str, Any]]:
    """Plotly's data and layout of each chart, by key, as its JSON encoder wants them."""
    return {chart.key: chart.figure.to_plotly_json() for chart in charts}
