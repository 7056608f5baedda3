"""The page of `mcore-rl report` in a real browser, from a file and without a network.

Chromium shows it in a frame of a phone's and of a desk's width. A script that the test adds to its
copy of the page tells what came of it.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tools.report.command import read_runs
from mcore_rl.tools.report.page import render
from tests.report_runs import write_hostile_run, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The window of a browser without a screen is never narrower than 500 pixels; a frame is.
FRAME = """<!DOCTYPE html><title>frame</title>
<iframe src="page.html" width="{width}" height="900"></iframe><pre id="told"></pre>
<script>
onmessage = (event) => document.getElementById("told").replaceChildren(event.data);
</script>"""
LONG_NAME = "second-with-a-learning-rate-of-1e-6-and-a-kl-of-0.05-and-seed-1234"
PROBE = """
{
  const errors = [];
  addEventListener("error", (event) => errors.push(String(event.message || event.target)), true);
  addEventListener("unhandledrejection", (event) => errors.push(String(event.reason)));
  addEventListener("securitypolicyviolation", (event) => errors.push(event.violatedDirective));
  const tell = async () => {
    const root = document.documentElement;
    const charts = Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) => [
      chart.ariaLabel,
      chart.querySelectorAll(
        "svg .scatterlayer .trace, svg .barlayer .trace, svg .heatmaplayer .hm").length,
    ]));
    const past = () => [...document.querySelectorAll("main *")]
      .filter((element) => !element.closest(".scroll, .chart"))
      .filter((element) => element.getBoundingClientRect().right > root.clientWidth + 1)
      .map((element) => element.outerHTML.slice(0, 200));
    const folded = { width: root.scrollWidth, past: past() };
    for (const details of document.querySelectorAll("details")) details.open = true;
    const unfolded = { width: root.scrollWidth, past: past() };
    const box = document.getElementById("search");
    let found = null;
    if (box) {
      box.value = "kl-COEF";
      box.dispatchEvent(new Event("input"));
      found = [...document.querySelectorAll(".settings tbody tr")]
        .filter((row) => row.checkVisibility()).map((row) => row.cells[0].textContent);
    }
    const plots = Object.fromEntries([...document.querySelectorAll(".chart")]
      .map((chart) => [chart.ariaLabel, chart._fullLayout?._size.h]));
    parent.postMessage(JSON.stringify({
      charts, plots, folded, unfolded, found, errors,
      width: root.clientWidth,
      ink: getComputedStyle(document.body).color,
      chart_ink: document.querySelector(".chart .xtick text")?.style.fill ?? "",
      hacked: window.hacked ?? null,
      failure: document.getElementById("failure").hidden,
    }), "*");
  };
  const drawn = () => "drawn" in document.documentElement.dataset;
  addEventListener("load", () => {
    if (drawn() || !document.querySelector(".chart")) return tell();
    new MutationObserver(() => drawn() && tell())
      .observe(document.documentElement, { attributes: true });
  });
}
"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        assert not os.environ.get("CI"), f"none of {', '.join(BROWSERS)} is there"
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    return found


def opened(
    browser: str, page: str, place: Path, *, width: int = 1280, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What the probe tells of the page in a frame of that width; no error is in the console."""
    nonce = re.search(r'<script nonce="([^"]+)"', page)
    assert nonce is not None
    probe = f'<script nonce="{nonce[1]}">{PROBE}</script>'
    (place / "page.html").write_text(page.replace("<style>", f"{probe}<style>", 1), "utf-8")
    (place / "frame.html").write_text(FRAME.format(width=width), "utf-8")
    process = subprocess.run(
        [
            browser,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={place / 'profile'}"),
            *("--enable-logging=stderr", "--window-size=1400,1000"),
            *("--virtual-time-budget=60000", "--dump-dom"),
            *more,
            (place / "frame.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
    )
    said = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    assert not said, "\n".join(said)
    told = re.search(r'<pre id="told">(.+?)</pre>', process.stdout, re.DOTALL)
    assert told is not None, process.stdout[-2000:] + process.stderr[-2000:]
    return json.loads(html.unescape(told[1]))


def assert_is_well(told: dict[str, Any], width: int) -> None:
    assert told["errors"] == [] and told["failure"] and told["hacked"] is None
    assert told["charts"] and all(told["charts"].values()), told["charts"]
    # A scroll bar takes some of the width.
    assert width - 20 <= told["width"] <= width
    for state in ("folded", "unfolded"):
        assert told[state]["past"] == []
        assert told[state]["width"] <= told["width"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    first = write_run(place / "first")
    return [first, write_run(place / LONG_NAME, seed=1, num_steps=40, config={"rl_kl_coef": 0.05})]


@pytest.mark.parametrize("width", [1280, 400])
def test_page_draws_every_chart_and_is_no_wider_than_its_window(
    browser: str, folders: list[Path], tmp_path: Path, width: int
) -> None:
    page = render(read_runs(folders[:1]))
    told = opened(browser, page, tmp_path, width=width)
    assert_is_well(told, width)
    assert len(told["charts"]) == page.count('class="chart"') >= 14
    assert told["charts"]["Stages of a step"] > 8
    assert told["found"] == ["--rl-kl-coef"]


def test_comparison_draws_both_runs(browser: str, folders: list[Path], tmp_path: Path) -> None:
    told = opened(browser, render(read_runs(folders)), tmp_path)
    assert_is_well(told, 1280)
    assert told["charts"]["KL to the reference"] == 4  # of each run a line, and what was measured
    # The legend, of long names, has room of its own.
    plots = [height for key, height in told["plots"].items() if not key.startswith("Stages")]
    assert len(plots) >= 12 and min(plots) > 0.9 * max(plots) > 150
    assert all(told["charts"][f"Stages of a step, {name}"] for name in ("first", LONG_NAME))


def test_charts_follow_the_colour_scheme(browser: str, folders: list[Path], tmp_path: Path) -> None:
    inks = []
    for scheme in ("0", "1"):  # dark, light
        more = (f"--blink-settings=preferredColorScheme={scheme}",)
        (tmp_path / scheme).mkdir()
        told = opened(browser, render(read_runs(folders[:1])), tmp_path / scheme, more=more)
        assert told["ink"] == told["chart_ink"]
        inks.append(told["ink"])
    assert inks == ["rgb(228, 232, 237)", "rgb(27, 31, 36)"]


@pytest.mark.parametrize("width", [1280, 400])
def test_hostile_texts_neither_run_nor_widen_the_page(
    browser: str, tmp_path: Path, width: int
) -> None:
    run = write_hostile_run(tmp_path / "runs")
    assert_is_well(opened(browser, render(read_runs([run])), tmp_path, width=width), width)


def test_page_of_a_run_that_has_just_begun_has_no_error(browser: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    told = opened(browser, render(read_runs([tmp_path])), tmp_path)
    assert told["charts"] == {} and told["errors"] == [] and told["failure"]


def test_probe_hears_of_what_it_is_there_for(browser: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    page = render(read_runs([tmp_path]))
    fetched = page.replace("<main>", '<main><img src="http://example.com/a.png">', 1)
    with pytest.raises(AssertionError, match="violates the following"):
        opened(browser, fetched, tmp_path)
    acting = page.replace("<main>", "<main><p onclick='' id=p><script>hacked = 1</script>", 1)
    with pytest.raises(AssertionError, match="violates the following"):
        opened(browser, acting, tmp_path)
    wide = page.replace("<main>", '<main><div style="width: 3000px">wide</div>', 1)
    told = opened(browser, wide, tmp_path)
    assert told["folded"]["width"] >= 3000 and "wide" in told["folded"]["past"][0]
