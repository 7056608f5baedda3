"""Plotly figures of the panels. The page sets the colors that depend on the color scheme."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from plotly import graph_objects

from mcore_rl.observe.alarms import RULES
from mcore_rl.tools.report.panels import COLORS, SECTIONS, Panel
from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.texts import clean, shown
from mcore_rl.tools.report.timeline_chart import timeline_figure

_BAND_COLORS = (
    "rgba(61, 127, 214, 0.18)",
    "rgba(217, 115, 26, 0.18)",
)  # the first two of COLORS, pale
# For the first and the second run. Lower bounds are dashed, or an equal curve would hide them.
_DASHES, _BOUND_DASHES = ("solid", "dot"), ("dash", "dashdot")
MAX_BARS = 200  # a chart is about 500 pixels wide
MAX_METRICS = 200  # of a pattern: more lines or rows than a chart has pixels
SMOOTHED_FROM = 20  # points of a line
_MARKERS_UP_TO = 40
_LONGEST_NAME = 28
_METRIC_OF_ALARM = {rule.name: rule.metric for rule in RULES}
_LAYOUT: Mapping[str, Any] = {
    "template": "none", "height": 290, "font": {"size": 12},
    "margin": {"l": 54, "r": 12, "t": 26, "b": 40},  # the bar of buttons is at the top
    **dict.fromkeys(("paper_bgcolor", "plot_bgcolor", "modebar_bgcolor"), "rgba(0,0,0,0)"),
    "hovermode": "x unified", "barmode": "stack", "bargap": 0,
    "legend": {"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top", "font": {"size": 11}},
    "legend_traceorder": "normal",
    "xaxis": {"zeroline": False, "tickformat": ",d"},
    "yaxis": {"automargin": True, "exponentformat": "none", "separatethousands": True},
}  # fmt: skip
_Y_AXES: Mapping[str, Mapping[str, Any]] = {
    "number": {},
    "share": {"tickformat": ".2~%"},
    "bytes": {"tickformat": ".4~s", "ticksuffix": "B", "rangemode": "tozero"},
    "seconds": {"ticksuffix": " s", "rangemode": "tozero"},
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of a panel. `run` names its run if it does not show all runs."""

    panel: Panel
    figure: graph_objects.Figure
    run: str = ""


def charts_of(panel: Panel, runs: Sequence[Run]) -> list[Chart]:
    """Return a panel's charts: one, or one per run for "stack", "map" and "timeline"; none without
    a value."""
    if panel.kind == "timeline":
        figure_of = {run.name: timeline_figure(panel, run, _LAYOUT) for run in runs}
        return [
            Chart(panel, figure, name if len(runs) > 1 else "")
            for name, figure in figure_of.items()
            if figure is not None
        ]
    metrics = metrics_of(panel, runs)
    if not (panel.expected or any(run.series(m)[1].any() for run in runs for m in metrics)):
        return []
    if panel.kind in ("lines", "band"):
        traces = [*_lines(panel, metrics, runs), *_alarm_marks(panel, runs)]
        return [Chart(panel, _figure(panel, traces))] if traces else []
    draw = _stack if panel.kind == "stack" else _map
    drawn = {run.name: traces for run in runs if (traces := list(draw(panel, run)))}
    figures = {name: _figure(panel, traces) for name, traces in drawn.items()}
    # Equal heights or colors mean equal values in the charts of two runs.
    if panel.kind == "stack":
        tops = [float(sum(trace.y for trace in traces).max()) for traces in drawn.values()]
        more: dict[str, Any] = {"yaxis_range": [0, 1.05 * max(tops, default=0)], "height": 370}
    else:
        tops = [float(trace.z.max()) for traces in drawn.values() for trace in traces]
        more = {"coloraxis_cmax": max([1e-6, *tops])}
    return [
        Chart(panel, figure.update_layout(more), name if len(runs) > 1 else "")
        for name, figure in figures.items()
    ]


def metrics_of(panel: Panel, runs: Sequence[Run]) -> dict[str, str]:
    """Return the metrics of a panel that have a value, with their labels.

    A metric that matches a pattern is labelled with the part that matches the asterisk; of each
    pattern the first `MAX_METRICS` are returned.
    """
    labels = {}
    for metric, label in panel.series.items():
        first, is_pattern, last = metric.partition("*")
        names = _matching(first, last, runs) if is_pattern else [metric]
        for name in names[:MAX_METRICS]:
            if any(name in run.points for run in runs):
                labels[name] = label or name.removeprefix(first).removesuffix(last)
    return labels


def _matching(first: str, last: str, runs: Sequence[Run]) -> list[str]:
    """Return the metrics with this beginning and this end, sorted."""
    least = len(first) + len(last)
    return sorted(
        {
            name
            for run in runs
            for name in run.points
            if name.startswith(first) and name.endswith(last) and len(name) >= least
        }
    )


def constant(metric: str, runs: Sequence[Run]) -> float | None:
    """Return the value that a metric has at all steps of all runs, if a run has several steps."""
    series = [run.series(metric)[1] for run in runs]
    values = np.concatenate(series)
    if max(map(len, series)) < 2 or values.min() != values.max():
        return None
    return float(values[0])


def remarks_on(runs: Sequence[Run]) -> str:
    """Return remarks on the charts: smoothing, means and omitted metrics."""
    longest = max(run.steps.size for run in runs)
    remarks, constants, missing, cut = [], {}, [], []
    if longest >= SMOOTHED_FROM:
        remarks.append(
            "Lines are moving averages, in front of the measured values, which are pale."
        )
    if longest > MAX_BARS:
        remarks.append(f"Bars and maps are means over up to {-(-longest // MAX_BARS)} steps.")
    for panel in (panel for section in SECTIONS for panel in section.panels):
        metrics = metrics_of(panel, runs)
        if panel.expected and not metrics:
            missing.append(panel.title)
        if len(metrics) >= MAX_METRICS:
            cut.append(panel.title)
        for metric in metrics if panel.kind == "lines" else ():
            value = constant(metric, runs)
            if value is not None and (value or panel.expected):
                constants[metric] = f"{clean(metric)} {shown(metric, value)}"
    if constants:
        remarks.append(f"Constant, and not drawn: {', '.join(constants.values())}.")
    if cut:
        remarks.append(f"With the first {MAX_METRICS} metrics alone: {', '.join(cut)}.")
    if missing:
        remarks.append(f"Without a value yet: {', '.join(missing)}.")
    return " ".join(remarks)


def _figure(panel: Panel, traces: Sequence[Any]) -> graph_objects.Figure:
    figure = graph_objects.Figure(traces, _LAYOUT).update_yaxes(_Y_AXES[panel.unit])
    figure.update_layout(showlegend=sum(t.showlegend is not False for t in traces) > 1)
    if panel.kind == "map":
        form, low = (".2%", 0) if panel.unit == "share" else (".2f", 1)
        bar = {"thickness": 12, "tickformat": form}
        figure.update_coloraxes(colorscale="Viridis", cmin=low, colorbar=bar)
        figure.update_layout(hovermode="closest", showlegend=False, yaxis_title_text="layer")
        figure.update_yaxes(type="category", autorange="reversed", tickformat="")
        hover = f"layer %{{y}}, step %{{x}}: %{{z:{form}}}<extra></extra>"
        figure.update_traces(coloraxis="coloraxis", hovertemplate=hover)
    elif panel.kind != "stack":
        values = np.concatenate([trace.y for trace in traces])
        # Otherwise Plotly would draw a constant 1e-4 between -1 and 1.
        if panel.from_zero or values.min() == values.max():
            figure.update_yaxes(rangemode="tozero")
    return figure


def _lines(panel: Panel, metrics: Mapping[str, str], runs: Sequence[Run]) -> Iterator[Any]:
    """Yield lines, with bands behind them.

    A single metric has a color per run; several metrics have a color each, and dashes per run.
    """
    with_alarm = {_METRIC_OF_ALARM.get(e.alarm or "") for run in runs for e in run.events}
    drawn = {m: metrics[m] for m in metrics if m in with_alarm or constant(m, runs) is None}
    if panel.kind == "band":
        drawn = {m: metrics[m] for m in list(panel.series)[:1] if m in metrics}
    is_only, is_alone = len(drawn) == 1, len(runs) == 1
    for number, run in enumerate(runs):
        # The name is a path, whose end is more specific.
        end = run.name if len(run.name) <= _LONGEST_NAME else f"…{run.name[-_LONGEST_NAME:]}"
        for place, (metric, label) in enumerate(drawn.items()):
            if not run.series(metric)[0].size:
                continue
            # Plotly interprets names as HTML.
            name = html.escape(label if is_alone else end if is_only else f"{label}, {end}")
            if panel.kind == "band":
                yield from _band(panel, run, name, _BAND_COLORS[number], showlegend=is_alone)
            dashes = _BOUND_DASHES if "lower_bound" in metric else _DASHES
            color = COLORS[(number if is_only else place) % len(COLORS)]
            yield from _curve(panel, run, metric, name, color, dashes[0 if is_only else number])


def _curve(
    panel: Panel, run: Run, metric: str, name: str, color: str, dash: str
) -> Iterator[graph_objects.Scatter]:
    """Yield the values, or their moving average in front of the pale values."""
    steps, values = run.series(metric)
    style: dict[str, Any] = {"name": name, "legendgroup": name, "line_color": color}
    style["mode"] = "lines+markers" if steps.size <= _MARKERS_UP_TO else "lines"
    front = {"line_dash": dash, "line_width": 1.8, "marker_size": 5}
    is_noisy = panel.unit in ("number", "share") and not panel.exact
    if is_noisy and steps.size >= SMOOTHED_FROM:
        pale = {"name": f"{name}, as measured", "opacity": 0.35, "showlegend": False}
        pale |= {"line_dash": "solid", "line_width": 1, "marker_size": 4}
        yield graph_objects.Scatter(_points(steps, values) | style | pale)
        values, style["mode"] = smoothed(values), "lines"
    yield graph_objects.Scatter(_points(steps, values) | style | front)


def _alarm_marks(panel: Panel, runs: Sequence[Run]) -> Iterator[graph_objects.Scatter]:
    """Yield the marks where an alarm of a metric of the panel was raised."""
    marks = []
    for run in runs:
        for event in run.events:
            metric = _METRIC_OF_ALARM.get(event.alarm or "", "")
            if metric in panel.series:
                line = next(iter(panel.series)) if panel.kind == "band" else metric
                at = np.flatnonzero(run.series(line)[0] == event.step)
                text = "<br>".join(map(html.escape, textwrap.wrap(event.text, 60)))
                marks += [(event.step, run.series(line)[1][place], text) for place in at]
    if marks:
        x, y, texts = zip(*marks, strict=True)
        marker = {"symbol": "x", "size": 10, "color": "#d92d3a"}
        hover = "%{text}<extra>alarm</extra>"
        yield graph_objects.Scatter(
            x=x, y=y, text=texts, mode="markers", name="alarm", marker=marker, hovertemplate=hover
        )


def _band(
    panel: Panel, run: Run, name: str, color: str, *, showlegend: bool
) -> Iterator[graph_objects.Scatter]:
    """Yield the two edges of the band; the second one fills it."""
    mean, std = panel.series
    steps = run.series(mean)[0]
    means, stds = _rows(run, [mean, std], steps)
    style: dict[str, Any] = {"mode": "lines", "line_width": 0, "hoverinfo": "skip"}
    style |= {"name": panel.series[std], "legendgroup": name, "showlegend": False}
    yield graph_objects.Scatter(_points(steps, means - stds) | style)
    style |= {"fill": "tonexty", "fillcolor": color, "showlegend": showlegend}
    yield graph_objects.Scatter(_points(steps, means + stds) | style)


def _stack(panel: Panel, run: Run) -> Iterator[Any]:
    steps = run.series(list(panel.series)[-1])[0]
    rows = _rows(run, panel.series, steps)
    rows[-1] = np.maximum(0.0, rows[-1] - rows[:-1].sum(axis=0))
    steps, rows = thin_means(steps, rows, MAX_BARS)
    for label, row, color in zip(panel.series.values(), rows, COLORS, strict=True):
        if row.any():
            marker = {"color": color, "line": {"width": 0}}
            yield graph_objects.Bar(_points(steps, row), name=label, marker=marker)


def _map(panel: Panel, run: Run) -> Iterator[Any]:
    labels = metrics_of(panel, [run])
    if labels:
        metrics = sorted(labels, key=lambda metric: (len(metric), metric))  # layer 2 before 10
        steps = np.unique(np.concatenate([run.series(metric)[0] for metric in metrics]))
        steps, rows = thin_means(steps, _rows(run, metrics, steps), MAX_BARS)
        x, y = steps.astype(np.int32), [html.escape(labels[metric]) for metric in metrics]
        yield graph_objects.Heatmap(x=x, y=y, z=rows.astype(np.float32))


def _rows(run: Run, metrics: Iterable[str], steps: np.ndarray) -> np.ndarray:
    """Return `[k, n]` values of k metrics at n steps; 0 where a metric has none."""
    rows = []
    for metric in metrics:
        at, values = run.series(metric)
        is_asked = np.isin(at, steps)
        rows.append(np.zeros(steps.size))
        rows[-1][np.searchsorted(steps, at[is_asked])] = values[is_asked]
    return np.stack(rows)


def _points(steps: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
    """Convert points to 32 bits, which halves the page."""
    return {"x": steps.astype(np.int32), "y": values.astype(np.float32)}


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return TensorBoard's moving average: exponential, without a bias towards 0."""
    weight = 1 - 2 / (min(max(values.size // 10, 5), 50) + 1)
    totals = [*accumulate(values.tolist(), lambda total, value: weight * total + value)]
    return np.array(totals) * (1 - weight) / (1 - weight ** np.arange(1, values.size + 1))


def thin_means(steps: np.ndarray, rows: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return means of `rows` `[k, n]` over `most` runs of neighbors, at the first step of each."""
    if steps.size <= most:
        return steps, rows
    parts = np.array_split(np.arange(steps.size), most)
    means = np.stack([rows[:, part].mean(axis=1) for part in parts], axis=1)
    return steps[[part[0] for part in parts]], means
