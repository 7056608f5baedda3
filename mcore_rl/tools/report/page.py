"""Rendering of the page, which is self-contained and safe against texts that a run wrote.

The template escapes texts. A content security policy makes the browser run only scripts with the
page's own nonce, which a text cannot know, and load nothing.
"""

from __future__ import annotations

import base64
import functools
import gzip
import secrets
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import jinja2
import numpy as np
import plotly
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from mcore_rl.common.version import VERSION
from mcore_rl.tools.report.charts import charts_of, remarks_on
from mcore_rl.tools.report.panels import COLORS, SECTIONS
from mcore_rl.tools.report.run_files import NO_SUMMARY, Run
from mcore_rl.tools.report.tables import (
    facts_of,
    headlines,
    metric_names,
    metric_rows,
    settings_of,
    subjects_of,
)

_FOLDED_FROM, _FOLDED_LINES = 400, 8  # visible characters and lines of a folded text
_TEMPLATES = Path(__file__).with_name("templates")


@np.errstate(all="ignore")  # metrics may exceed what a curve can show
def render(runs: Sequence[Run], *, live: str = "") -> str:
    """Render the page of one run, or of two side by side. With `live`, an ETag, it asks its server
    for updates until the runs have ended."""
    sections = [
        (section, [chart for panel in section.panels for chart in charts_of(panel, runs)])
        for section in SECTIONS
    ]
    figures = [chart.figure.to_plotly_json() for _, charts in sections for chart in charts]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["beginning"] = _beginning
    # No text in the JSON can end the script element.
    json = to_json_plotly(figures).replace("<", "\\u003c").replace("&", "\\u0026")
    rows = metric_rows(runs)
    return environment.get_template("page.html").render(
        runs=runs,
        live=live,
        natural_notes=[NO_SUMMARY] if live else [],  # of a run that continues
        has_ended=all(run.has_ended for run in runs),
        colors=COLORS,
        subjects=subjects_of(runs),
        headlines=headlines(runs),
        sections=[(section, charts) for section, charts in sections if charts],
        remarks=remarks_on(runs),
        has_alarms=any(event.alarm for run in runs for event in run.events),
        metric_rows=rows,
        num_left_out=len(metric_names(runs)) - len(rows),
        settings=settings_of(runs),
        facts=facts_of(runs),
        figures=Markup(json),
        plotly=_packed_plotly(),
        versions=f"mcore_rl {VERSION}, plotly {plotly.__version__}",
        written=datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
        nonce=secrets.token_urlsafe(16),
        css=Markup((_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup((_TEMPLATES / "page.js").read_text(encoding="utf-8")),
    )


def without_plotly(page: str) -> str:
    """Return a page for a browser that has plotly.js from an earlier one: a tenth of the size."""
    return page.replace(_packed_plotly(), "", 1)


def _beginning(text: str) -> str:
    """Return the visible part of a folded text."""
    return "\n".join(text[:_FOLDED_FROM].split("\n")[:_FOLDED_LINES])


@functools.cache
def _packed_plotly() -> Markup:
    """Return plotly.js, compressed to a third: its 4.8 MB would be most of the page."""
    packed = gzip.compress(get_plotlyjs().encode(), compresslevel=9, mtime=0)
    return Markup(base64.b64encode(packed).decode())
