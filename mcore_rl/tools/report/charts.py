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
from mcore_rl.tools.report.panels import BAND, MAP, NUMBER, SHARE, STACK, Panel
from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.texts import axis_unit
from mcore_rl.tools.report.thinning import (
    MAX_BARS,
    MAX_POINTS,
    SMOOTHED_FROM,
    smoothed,
    thin_line,
    thin_means,
)

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
# Pixels: of a line of the legend, of its entries, and of the plot above it.
_LEGEND_LINE, _ENTRY, _LETTER, _WIDTH = 19, 44, 6, 420
_LONGEST_NAME = 28


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
    if panel.kind == MAP:
        rows = {run.name: _rows(panel, run) for run in with_values}
        highest = max(float(values.max()) for _, _, values in rows.values())
        return [
            Chart(
                f"{panel.key}-{number}" if len(runs) > 1 else panel.key,
                panel,
                _map(panel, *rows[run.name], highest),
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
            and (constant(metric, runs) is None or _has_alarm(metric, runs))
        ]
        if not metrics:
            return []
        divisor, unit = _axis(panel, metrics, runs)
        figure.update_yaxes(title_text=unit)
        smooth = panel.unit in (NUMBER, SHARE) and not panel.exact
        _add_lines(figure, metrics, runs, divisor, smooth=smooth)
        drawn_at = {metric: metric for metric, _ in metrics}
    _range_of_constant(figure)
    has_marks = False
    for run in runs:
        has_marks |= _add_alarms(figure, drawn_at, run, divisor, in_legend=not has_marks)
    _make_room_for_legend(figure)
    return [Chart(panel.key, panel, figure, has_marks=has_marks)]


def constant(metric: str, runs: Sequence[Run]) -> float | None:
    """The value that a metric has at every step of every run, of which one has several steps."""
    found = [values for run in runs if (values := run.series(metric)[1]).size]
    if not found or max(values.size for values in found) == 1:
        return None
    values = np.concatenate(found)
    return float(values[0]) if values.min() == values.max() else None


def _has_alarm(metric: str, runs: Sequence[Run]) -> bool:
    return any(_METRIC_OF_ALARM.get(e.alarm or "") == metric for run in runs for e in run.events)


def _make_room_for_legend(figure: graph_objects.Figure) -> None:
    """Below a plot that stays as high as one without: plotly would take the room from it."""
    names = [trace.name for trace in figure.data if trace.showlegend is not False]
    if len(names) == 1:
        figure.update_layout(showlegend=False)
        return
    lines, left = 1, _WIDTH
    for name in names:
        width = _ENTRY + _LETTER * len(html.unescape(name))
        if width > left and left < _WIDTH:
            lines, left = lines + 1, _WIDTH
        left -= width
    room = _LEGEND_LINE * lines
    layout = figure.layout
    figure.update_layout(height=layout.height + room, margin_b=layout.margin.b + room)


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
    if panel.kind == STACK and not run.series(panel.total)[1].size:
        return False
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
    *,
    smooth: bool,
) -> None:
    """One metric has a colour for each run; several have a colour each, and dashes for the
    second run. What is smoothed has its points behind it, pale."""
    for number, run in enumerate(runs):
        for place, (metric, label) in enumerate(metrics):
            steps, values = run.series(metric)
            if not steps.size:
                continue
            one = len(metrics) == 1
            # A lower bound that is met would hide behind what meets it.
            dashes = _BOUND_DASHES if "lower_bound" in metric else _DASHES
            _add_curve(
                figure,
                steps,
                values / divisor,
                name=_name(run, label, runs, one),
                colour=COLOURS[(number if one else place) % len(COLOURS)],
                dash=dashes[0 if one else number],
                smooth=smooth,
            )


def _add_curve(
    figure: graph_objects.Figure,
    steps: np.ndarray,
    values: np.ndarray,
    *,
    name: str,
    colour: str,
    dash: str = "solid",
    smooth: bool,
    group: str | None = None,
) -> None:
    """The values, or a moving average over them and the values behind it."""
    smooth &= steps.size >= SMOOTHED_FROM
    mode = "lines+markers" if steps.size <= _MARKERS_UP_TO else "lines"
    if smooth:
        x, y = thin_line(steps, values)
        figure.add_scatter(
            x=x.astype(np.int32),
            y=y.astype(np.float32),
            name=f"{name}, as measured",
            mode=mode,
            marker={"size": 4},
            line={"color": colour, "width": 1},
            opacity=0.35,
            legendgroup=group or name,
            showlegend=False,
        )
    x, y = thin_line(steps, smoothed(values) if smooth else values)
    figure.add_scatter(
        x=x.astype(np.int32),
        y=y.astype(np.float32),
        name=name,
        mode="lines" if smooth else mode,
        marker={"size": 5},
        line={"color": colour, "dash": dash, "width": 1.8},
        legendgroup=group or name,
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
    name = run.name
    if len(name) > _LONGEST_NAME:  # whose end tells more: it is of a path
        name = f"…{name[-_LONGEST_NAME:]}"
    return html.escape(name if only_metric else f"{label}, {name}")


def _axis(
    panel: Panel, metrics: Sequence[tuple[str, str]], runs: Sequence[Run]
) -> tuple[float, str]:
    highest = [run.series(name)[1].max(initial=0.0) for run in runs for name, _ in metrics]
    return axis_unit(panel.unit, max(highest))


def _add_band(
    figure: graph_objects.Figure, panel: Panel, run: Run, number: int, *, named: bool
) -> None:
    (mean_name, label), (std_name, band_label) = panel.metrics
    measured, exact = run.series(mean_name)
    if not measured.size:
        return
    steps, means = measured, exact
    every = run.values.get(std_name, np.zeros(run.steps.size))
    stds = np.nan_to_num(every[np.isin(run.steps, steps)])
    steps, (means, stds) = thin_means(steps, np.stack([means, stds]), MAX_POINTS)
    steps, colour = steps.astype(np.int32), COLOURS[number]
    name = _name(run, label, [run, run] if named else [run], True)
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
    _add_curve(figure, measured, exact, name=name, colour=colour, smooth=True, group=name)


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


def _rows(panel: Panel, run: Run) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Labels, steps, and `[k, n]` values of a map."""
    metrics = sorted(metrics_of(panel, [run]), key=lambda metric: int(metric[1]))
    steps = run.series(metrics[0][0])[0]
    every = [np.nan_to_num(run.values[name][np.isin(run.steps, steps)]) for name, _ in metrics]
    steps, values = thin_means(steps, np.stack(every), MAX_BARS)
    return [label for _, label in metrics], steps, values


def _map(
    panel: Panel, labels: Sequence[str], steps: np.ndarray, values: np.ndarray, highest: float
) -> graph_objects.Figure:
    """A row a layer, a colour a value; of two runs beside each other the same is as much."""
    figure = _empty(panel)
    form = ".2%" if panel.unit == SHARE else ".2f"
    figure.add_heatmap(
        x=steps.astype(np.int32),
        y=[html.escape(label) for label in labels],
        z=values.astype(np.float32),
        zmin=0.0 if panel.unit == SHARE else 1.0,
        zmax=max(highest, 1e-6),
        colorscale="Viridis",
        colorbar={"thickness": 12, "tickformat": form},
        hovertemplate=f"layer %{{y}}, step %{{x}}: %{{z:{form}}}<extra></extra>",
    )
    figure.update_layout(hovermode="closest", showlegend=False)
    figure.update_yaxes(title_text="layer", type="category", autorange="reversed", tickformat="")
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
