"""The page of `mcore-rl report` in a real browser, without a network: from a file, and of --live.

Chromium shows it in a frame as wide as a phone or a desktop. A probe script in the test's copy of
the page reports what was drawn.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.tools.report.live import LivePage, LiveServer
from mcore_rl.tools.report.page import render
from mcore_rl.tools.report.run_files import read_runs
from tests.report_runs import write_hostile_run, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
# The window of a browser without a screen is never narrower than 500 pixels; a frame is.
FRAME = """<!DOCTYPE html><title>frame</title>
<iframe src="page.html" width="{width}" height="900"></iframe><pre id="report"></pre>
<script>
onmessage = (event) => document.getElementById("report").replaceChildren(event.data);
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


def open_page(
    browser: str, page: str, place: Path, *, width: int = 1280, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What the probe reports of the page in a frame of `width`; the console must be empty."""
    (place / "page.html").write_text(with_script(page, PROBE), "utf-8")
    (place / "frame.html").write_text(FRAME.format(width=width), "utf-8")
    return report_of(browser, (place / "frame.html").as_uri(), place, more=more)


def with_script(page: str, script: str) -> str:
    nonce = re.search(r'<script nonce="([^"]+)"', page)
    assert nonce is not None
    return page.replace("<style>", f'<script nonce="{nonce[1]}">{script}</script><style>', 1)


def report_of(
    browser: str, address: str, place: Path, *, more: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The JSON that the page of an address leaves in its #report; the console must be empty."""
    process = subprocess.run(
        [
            browser,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            *(f"--user-data-dir={place / 'profile'}", "--enable-logging=stderr"),
            *("--window-size=1400,1000", "--virtual-time-budget=60000", "--dump-dom"),
            *more,
            address,
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=240,
    )
    console = [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    assert not console, "\n".join(console)
    report = re.search(r'<pre id="report">(.+?)</pre>', process.stdout, re.DOTALL)
    assert report is not None, process.stdout[-2000:] + process.stderr[-2000:]
    return json.loads(html.unescape(report[1]))


def assert_no_fault(report: dict[str, Any], width: int) -> None:
    assert report["errors"] == [] and report["failure"] and report["hacked"] is None
    assert report["charts"] and all(report["charts"].values()), report["charts"]
    # A scroll bar takes some of the width.
    assert width - 20 <= report["width"] <= width
    for state in ("folded", "unfolded"):
        assert report[state]["past"] == []
        assert report[state]["width"] <= report["width"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    first = write_run(place / "first")
    return [first, write_run(place / LONG_NAME, seed=1, num_steps=40, config={"rl_kl_coef": 0.05})]


@pytest.mark.parametrize("width", [1280, 400])
def test_page_draws_every_chart_within_its_window(browser, folders, tmp_path, width):
    page = render(read_runs(folders[:1]))
    report = open_page(browser, page, tmp_path, width=width)
    assert_no_fault(report, width)
    assert len(report["charts"]) == page.count('class="chart"') >= 14
    assert report["charts"]["Stages of a step"] > 8
    assert report["found"] == ["--rl-kl-coef"]


def test_comparison_draws_both_runs(browser, folders, tmp_path):
    report = open_page(browser, render(read_runs(folders)), tmp_path)
    assert_no_fault(report, 1280)
    assert report["charts"]["KL to the reference"] == 4  # a curve and its points for each run
    # The legend with long names takes no room from the plot.
    others = ("Stages", "Timeline")  # of other heights
    plots = [height for key, height in report["plots"].items() if not key.startswith(others)]
    assert len(plots) >= 12 and min(plots) > 0.9 * max(plots) > 150
    assert all(report["charts"][f"Stages of a step, {name}"] for name in ("first", LONG_NAME))


def test_charts_follow_the_colour_scheme(browser, folders, tmp_path):
    inks = []
    for scheme in ("0", "1"):  # dark, light
        more = (f"--blink-settings=preferredColorScheme={scheme}",)
        (tmp_path / scheme).mkdir()
        report = open_page(browser, render(read_runs(folders[:1])), tmp_path / scheme, more=more)
        assert report["ink"] == report["chart_ink"]
        inks.append(report["ink"])
    assert inks == ["rgb(228, 232, 237)", "rgb(27, 31, 36)"]


@pytest.mark.parametrize("width", [1280, 400])
def test_hostile_texts_neither_run_nor_widen_the_page(browser, tmp_path, width):
    run = write_hostile_run(tmp_path / "runs")
    assert_no_fault(open_page(browser, render(read_runs([run])), tmp_path, width=width), width)


def test_page_of_a_new_run_has_no_error(browser, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    report = open_page(browser, render(read_runs([tmp_path])), tmp_path)
    assert report["charts"] == {} and report["errors"] == [] and report["failure"]


LIVE_PROBE = """
{
  const states = [];
  addEventListener("error", (event) => states.push(String(event.message || event.target)), true);
  addEventListener("unhandledrejection", (event) => states.push(String(event.reason)));
  const chart = () => document.querySelector(".chart[aria-label='Gradient norm']");
  const folds = () => [...document.querySelectorAll("#samples > details")];
  const drag = () => {
    const { left, top } = chart().querySelector(".nsewdrag").getBoundingClientRect();
    const events = [["mousedown", 40, 20], ["mousemove", 140, 90], ["mouseup", 140, 90]];
    for (const [type, x, y] of events) {
      const place = document.querySelector(".dragcover") ?? chart().querySelector(".nsewdrag");
      const where = { clientX: left + x, clientY: top + y, buttons: 1 };
      place.dispatchEvent(new MouseEvent(type, { bubbles: true, view: window, ...where }));
    }
  };
  const see = () => {
    states.push({
      zoom: chart()._fullLayout.xaxis.range.map((end) => end.toFixed(3)),
      steps: document.querySelector(".headline .value").textContent,
      points: chart()._fullData[0].x.length,
      is_same_chart: chart().dataset.mark === "set",
      open: folds().map((fold) => fold.open),
      scrolled: scrollY,
      found: [...document.querySelectorAll(".settings tbody tr")]
        .filter((row) => row.checkVisibility()).map((row) => row.cells[0].textContent),
      note: document.querySelector("header .note").textContent,
      lost: document.getElementById("lost").hidden,
      failure: document.getElementById("failure").hidden,
    });
    if (states.length > 1) return;
    chart().dataset.mark = "set";
    folds().forEach((fold, place) => (fold.open = place === 2));
    const box = document.getElementById("search");
    box.value = "kl-COEF";
    box.dispatchEvent(new Event("input"));
    scrollTo(0, 3000);
    drag();
    states[0].zoomed = chart()._fullLayout.xaxis.range.map((end) => end.toFixed(3));
  };
  addEventListener("load", () => {
    const changes = { attributeFilter: ["data-drawn"] };
    new MutationObserver(see).observe(document.documentElement, changes);
  });
  setTimeout(() => {
    const report = document.createElement("pre");
    report.id = "report";
    report.textContent = JSON.stringify({ states });
    document.body.append(report);
  }, 50000);
}
"""


class LivePageOfGrowingRun(LivePage):
    """After the first answer the run writes a step, after the second one its summary."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder])
        self.num_answers, self._folder = 0, folder

    def current(self) -> tuple[str, str]:
        tag, page = super().current()
        self.num_answers += 1
        if self.num_answers == 1:
            line = {"step": 40, "reward/mean": 0.5, "grad_norm": 1.5}
            with (self._folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
        elif self.num_answers == 2:
            (self._folder / "summary.json").write_text('{"train_layout": "TP1"}')
        return tag, with_script(page, LIVE_PROBE)


def test_live_page_follows_the_run_and_keeps_what_is_open(browser, tmp_path):
    page = LivePageOfGrowingRun(write_run(tmp_path / "run", num_steps=40, asked=60, finish=False))
    with LiveServer(page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            states = report_of(browser, server.url, tmp_path)["states"]
        finally:
            server.shutdown()
            thread.join()
    first, second, third = states
    assert page.num_answers == 3
    assert (first["steps"], first["points"]) == ("40 of 60", 40) and "Live." in first["note"]
    assert first["open"] != second["open"] and first["scrolled"] == 0
    assert (second["steps"], second["points"]) == ("41 of 60", 41) and "Live." in second["note"]
    assert (third["steps"], third["points"]) == ("41 of 60", 41) and "Ended." in third["note"]
    for state in (second, third):
        assert state["open"] == [place == 2 for place in range(8)]
        assert state["scrolled"] == 3000 and state["found"] == ["--rl-kl-coef"]
        assert first["zoom"] != first["zoomed"] == state["zoom"]
        assert state["is_same_chart"] and state["lost"] and state["failure"]


def test_probe_detects_faults(browser, tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    page = render(read_runs([tmp_path]))
    for attack in (
        '<img src="http://example.com/a.png">',
        "<p onclick='' id=p><script>hacked = 1</script>",
    ):
        with pytest.raises(AssertionError, match="violates the following"):
            open_page(browser, page.replace("<main>", f"<main>{attack}", 1), tmp_path)
    wide = page.replace("<main>", '<main><div style="width: 3000px">wide</div>', 1)
    report = open_page(browser, wide, tmp_path)
    assert report["folded"]["width"] >= 3000 and "wide" in report["folded"]["past"][0]
