"""The page: everything it needs lies within it, and nothing that a run wrote can act there.

Texts are escaped by the template. A content security policy has the browser run only scripts that
carry the page's own nonce, which a text cannot know, and load nothing from anywhere.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import gzip
import importlib.metadata
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import numpy as np
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from mcore_rl.tools.report.charts import COLOURS, Chart, as_json, charts_of, constant, metrics_of
from mcore_rl.tools.report.figures import headlines
from mcore_rl.tools.report.panels import LINES, SECTIONS, Section
from mcore_rl.tools.report.run_files import Run
from mcore_rl.tools.report.tables import facts_of, metric_rows, settings_of, subjects_of
from mcore_rl.tools.report.texts import clean, shown
from mcore_rl.tools.report.thinning import MAX_BARS, MAX_POINTS, SMOOTHED_FROM

_FOLDED_FROM = 400  # characters of a text, of which so many stand above the fold
_FOLDED_LINES = 8
_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class ChartSection:
    """A section that has charts."""

    section: Section
    charts: tuple[Chart, ...]


def render(runs: Sequence[Run]) -> str:
    """The page of one run, or of two beside each other."""
    with np.errstate(all="ignore"):  # of metrics beyond what a curve can show
        return _rendered(runs)


def _rendered(runs: Sequence[Run]) -> str:
    drawn = [
        ChartSection(section, tuple(c for panel in section.panels for c in charts_of(panel, runs)))
        for section in SECTIONS
    ]
    charts = [chart for section in drawn for chart in section.charts]
    has_alarms = any(event.alarm for run in runs for event in run.events)
    return _template().render(
        runs=runs,
        colours=COLOURS,
        subjects=subjects_of(runs),
        headlines=headlines(runs),
        sections=[section for section in drawn if section.charts],
        not_measured=_not_measured(runs, charts),
        thinned=_thinned(runs),
        constants=_constants(runs),
        has_alarms=has_alarms,
        metric_rows=metric_rows(runs),
        settings=settings_of(runs),
        facts=facts_of(runs),
        figures=_in_script(to_json_plotly(as_json(charts))),
        plotly=_packed_plotly(),
        versions=_versions(),
        written=datetime.now().strftime("%Y-%m-%d %H:%M"),
        nonce=secrets.token_urlsafe(16),
        css=_own_file("page.css"),
        script=_own_file("page.js"),
    )


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in ("mcore_rl", "plotly"):
        # A checkout on the path of Python has none.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append((package, importlib.metadata.version(package)))
    return found


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["beginning"] = _beginning
    environment.filters["is_long"] = _is_long
    return environment.get_template("page.html")


def _is_long(text: str) -> bool:
    return len(text) > _FOLDED_FROM or text.count("\n") >= _FOLDED_LINES


def _beginning(text: str) -> str:
    """What stands above the fold of a long text."""
    return "\n".join(text[:_FOLDED_FROM].split("\n")[:_FOLDED_LINES])


def _own_file(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def _in_script(text: str) -> Markup:
    """JSON for a script element, which no text in it can end."""
    return Markup(text.replace("<", "\\u003c").replace("&", "\\u0026"))


@functools.cache
def _packed_plotly() -> Markup:
    """plotly.js, a third of its size: 4.8 MB would be most of the page."""
    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return Markup(base64.b64encode(packed).decode())


def _not_measured(runs: Sequence[Run], charts: Sequence[Chart]) -> list[str]:
    there = {chart.panel.key for chart in charts}
    return [
        panel.title
        for section in SECTIONS
        for panel in section.panels
        if not panel.optional
        and panel.key not in there
        and metrics_of(panel, runs)
        and not any(run.series(name)[1].size for run in runs for name, _ in metrics_of(panel, runs))
    ]


def _constants(runs: Sequence[Run]) -> list[str]:
    """Metrics that would be drawn if they had not the same value throughout, with that value."""
    found = {}
    for section in SECTIONS:
        for panel in section.panels:
            for metric, _ in metrics_of(panel, runs) if panel.kind == LINES else ():
                value = constant(metric, runs)
                if value is not None and not (panel.optional and value == 0):
                    found[metric] = f"{clean(metric)} {shown(metric, value)}"
    return list(found.values())


def _thinned(runs: Sequence[Run]) -> str:
    """What to know of charts that have fewer points than steps."""
    longest = max((run.steps.size for run in runs), default=0)
    said = []
    if longest >= SMOOTHED_FROM:
        said.append("Lines are moving averages, with what was measured behind them, pale.")
    if longest > MAX_POINTS:
        said.append(
            f"Of {longest:,} steps lines show {MAX_POINTS} points, the lowest and highest of each "
            "run of neighbours, and bands their means."
        )
    if longest > MAX_BARS:
        said.append(f"Bars of stages are means over {-(-longest // MAX_BARS)} steps or fewer.")
    return " ".join(said)
