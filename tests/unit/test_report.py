"""`mcore-rl report`: contents of the page, and that texts of a run stay texts.

test_report_browser.py opens the page in a browser.
"""

from __future__ import annotations

import html.parser
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.cli import main
from mcore_rl.observe.alarms import RULES
from mcore_rl.observe.stage_timers import STAGES
from mcore_rl.observe.timeline import TRAINER, Timeline
from mcore_rl.tools.report.charts import MAX_BARS, MAX_METRICS, charts_of, remarks_on
from mcore_rl.tools.report.panels import SECTIONS
from mcore_rl.tools.report.run_files import read_runs
from mcore_rl.tools.report.tables import MAX_ROWS, headlines, metric_rows, settings_of
from tests.report_runs import step_metrics, write_hostile_run, write_run

PANELS = {panel.title: panel for section in SECTIONS for panel in section.panels}


class Page(html.parser.HTMLParser):
    """The elements of a page with their attributes, and the text that is shown."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self.raw: dict[str, str] = {}  # id of a script -> its content
        self._script: str | None = None
        self.feed(text)
        self.text = " ".join(" ".join(self.shown).split())
        titles = [str(a["aria-label"]) for _, a in self.elements if a.get("class") == "chart"]
        figures = json.loads(self.raw["figures"])
        self.charts: dict[str, Any] = dict(zip(titles, figures, strict=True))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._script = (dict(attrs).get("id") or tag) if tag in ("script", "style") else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.shown.append(data)
        else:
            self.raw[self._script] = self.raw.get(self._script, "") + data


def report(*tokens: Path | str) -> Page:
    assert main(["report", *map(str, tokens)]) == 0
    target = Path(tokens[tokens.index("-o") + 1]) if "-o" in tokens else None
    return Page((target or Path(tokens[0]) / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"rl_kl_coef": 0.05, "lr": 2e-6}
    target = tmp_path_factory.mktemp("runs") / "second"
    return write_run(target, seed=1, num_steps=40, asked=60, config=config, finish=False)


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return report(folder)


def test_every_metric_is_in_a_chart_or_in_the_table(page):
    constant = {"Bytes received, against the lower bound", "Clipped and skipped", "Learning rate"}
    constant |= {"Host memory of the largest rank", "Device memory of the largest rank"}
    asked = {"Reward", "Held-out accuracy", "KL to the reference", "Entropy", "Stages of a step"}
    asked |= {"Mismatch of engine and actor", "Length of responses", "Throughput", "Gradient norm"}
    asked |= {"Timeline", "Value loss", "Load of the busiest expert", "Alarms that last"}
    assert asked <= page.charts.keys() <= PANELS.keys() - constant
    assert "not drawn" in page.text and "memory/host_bytes 52.0 GB" in page.text
    assert "clip_fraction 0.04" in page.text and "skipped_updates" not in page.text
    for name in step_metrics(0, 60, random.Random(0)):
        assert name in page.text
    assert "Without a value yet" not in page.text


def test_every_panel_draws_its_metrics_with_their_labels(tmp_path):
    parts = {name.replace("*", "7"): "7" for p in PANELS.values() for name in p.series}
    rng = random.Random(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(3):
            metrics = {name: rng.random() for name in parts} | {"time/step_seconds": 20.0 + step}
            file.write(json.dumps({"step": step, **metrics}) + "\n")
    timeline = Timeline(tmp_path / "timeline.jsonl")
    for number, what in enumerate(PANELS["Timeline"].series):
        timeline.add(TRAINER, 0, what, number, number + 1)
    timeline.close()
    charts = report(tmp_path).charts
    assert list(charts) == list(PANELS)
    for title, panel in PANELS.items():
        data = charts[title]["data"]
        if panel.kind == "map":
            assert data[0]["y"] == ["7"]
        else:
            drawn = {trace["name"] for trace in data if trace.get("showlegend", True)}
            assert drawn == {label or "7" for label in panel.series.values()}, title


@pytest.mark.parametrize(
    "metrics", [{"reward/std": 0.5}, {"moe/imbalance/layer_x": 2.0, "moe/imbalance/layer_1": 1.5}]
)
def test_page_of_few_metrics_lists_them(tmp_path, metrics):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, **metrics}) + "\n")
    assert all(name in report(tmp_path).text for name in metrics)


def test_headlines_summarize_the_run(folder):
    found = {title: line[0] for title, line in headlines(read_runs([folder])).items()}
    assert found["Steps"] == ("60 of 60", "finished", "good")
    assert found["Held-out accuracy"].value == "30.0 % → 81.0 %"
    beneath = "1.00 x the lower bound; 60 of 60 attested"
    assert found["Hand-over a step"] == ("41.1 GB", beneath, "good")
    assert found["Alarms"] == ("1", "1 lasting; entropy", "bad")
    assert found["Memory"].value == "71.0 GB"


def test_metric_rows_have_first_last_and_best_values(folder):
    [run] = read_runs([folder])
    rows = {row.name: row.cells for row in metric_rows([run])}
    values = run.series("reward/mean")[1]
    first, last, best = rows["reward/mean"]
    assert (first, last) == (f"{values[0]:.4g}", f"{values[-1]:.4g}")
    assert best == f"{values.max():.4g} @ {values.argmax()}"
    assert rows["eval/accuracy"][1] == "81.0 %"
    assert rows["entropy"][2] == "–"  # neither high nor low is good
    assert rows["reshard/received_bytes_max"][0] == "41.1 GB"


def test_stacked_stages_add_up_to_the_step(folder):
    names = {f"time/{stage}_seconds" for stage in STAGES}
    assert names <= PANELS["Stages of a step"].series.keys()
    [run] = read_runs([folder])
    [chart] = charts_of(PANELS["Stages of a step"], [run])
    stacked = np.sum([trace.y for trace in chart.figure.data], axis=0)
    np.testing.assert_allclose(stacked, run.series("time/step_seconds")[1], rtol=1e-5)
    other = next(trace for trace in chart.figure.data if trace.name == "other")
    np.testing.assert_allclose(other.y, 0.05, atol=1e-4)


def test_map_has_one_row_per_layer_in_order(folder, other):
    runs = read_runs([folder, other])
    charts = charts_of(PANELS["Choices that differ, by layer"], runs)
    assert [chart.run for chart in charts] == [run.name for run in runs]
    for chart, run in zip(charts, runs, strict=True):
        [map_] = chart.figure.data
        assert list(map_.y) == ["1", "2", "10"]
        for row, layer in zip(map_.z, map_.y, strict=True):
            expected = run.series(f"moe/routing_disagreement/layer_{layer}")[1]
            np.testing.assert_allclose(row, expected, rtol=1e-6)
    assert len({chart.figure.layout.coloraxis.cmax for chart in charts}) == 1
    assert charts_of(PANELS["Busiest expert in rollout, by layer"], runs) == []


def test_report_stays_small_when_names_have_the_step_in_them(tmp_path):
    lines = [
        {
            "step": step,
            "reward/mean": 0.5 + step,
            **{f"mine/{step}/{k}": 1.0 for k in range(10)},
            f"source/{step}/accuracy": 0.5,
        }
        for step in range(300)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    [run] = read_runs([tmp_path])
    assert sum(values.size for _, values in run.points.values()) == 300 * 12  # as in the file
    [chart] = charts_of(PANELS["Accuracy by source"], [run])
    assert len(chart.figure.data) == MAX_METRICS
    assert f"first {MAX_METRICS} metrics alone: Accuracy by source" in remarks_on([run])
    page = report(tmp_path, "-o", tmp_path / "page.html")
    assert page.text.count("mine/") == MAX_ROWS
    assert f"{3301 - MAX_ROWS - 1:,} more metrics are in metrics.jsonl." in page.text


def test_alarm_is_marked_on_the_chart_of_its_metric(folder):
    drawn = {name for panel in PANELS.values() for name in panel.series}
    assert {rule.metric for rule in RULES} <= drawn
    [run] = read_runs([folder])
    [chart] = charts_of(PANELS["Entropy"], [run])
    [mark] = [trace for trace in chart.figure.data if trace.name == "alarm"]
    assert mark.x == (30,) and mark.y == (pytest.approx(run.series("entropy")[1][30]),)
    assert "lower --lr" in mark.text[0].replace("<br>", " ")
    [other] = charts_of(PANELS["KL to the reference"], [run])
    assert "alarm" not in {trace.name for trace in other.figure.data}


def test_comparison_shows_both_runs_and_differences_first(folder, other, tmp_path):
    page = report(folder, other, "-o", tmp_path / "both.html")
    assert not (other / "report.html").exists()
    lines = page.charts["KL to the reference"]["data"]
    assert [t["name"] for t in lines if t.get("showlegend", True)] == ["first", "second"]
    stages = [page.charts[f"Stages of a step, {run}"]["layout"] for run in ("first", "second")]
    assert stages[0]["yaxis"]["range"] == stages[1]["yaxis"]["range"]
    settings = settings_of(read_runs([folder, other]))
    differing, _ = settings["What differs"]
    assert [row.name for row in differing] == ["--rl-kl-coef", "lr"]
    assert differing[0].cells == ("0.01", "0.05")
    assert "--rl-num-steps" in {row.name for row in settings["What is alike"][0]}
    assert page.text.index("What differs") < page.text.index("What is alike")


def test_long_names_of_runs_are_cut_in_legends(folder, tmp_path):
    other = write_run(tmp_path / "a-run-with-everything-in-its-name-second-try", num_steps=2)
    page = report(folder, other, "-o", tmp_path / "both.html")
    names = [trace["name"] for trace in page.charts["Throughput"]["data"]]
    assert max(map(len, names)) < 60 and any(name.endswith("second-try") for name in names)


def test_noisy_curves_are_smoothed_over_their_points(folder):
    [run] = read_runs([folder])
    steps, values = run.series("entropy")
    [chart] = charts_of(PANELS["Entropy"], [run])
    points, line = chart.figure.data[:2]
    np.testing.assert_allclose(points.y, values, rtol=1e-6)
    assert points.opacity < 0.5 and points.showlegend is False and line.name == "entropy"
    weight, total, norm, expected = 1 - 2 / 7, 0.0, 0.0, []  # TensorBoard's, with its span
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        expected.append(total / norm)
    np.testing.assert_allclose(line.y, expected, rtol=1e-6)
    assert list(line.x) == list(steps) and np.diff(line.y).std() < np.diff(values).std() / 2
    [accuracy] = charts_of(PANELS["Held-out accuracy"], [run])  # measured seldom, not smoothed
    assert len(accuracy.figure.data) == 1


def test_page_begins_with_model_data_and_command(tmp_path):
    folder = write_run(
        tmp_path / "run",
        num_steps=2,
        config={"rl_hf_checkpoint": "models/v3", "rl_prompts": "sums.jsonl", "num_layers": 61},
        about={"command": "python -m mcore_rl.train --lr 1e-6", "ranks": 256, "versions": {}},
    )
    text = report(folder).text
    expected = ("models/v3 (61 layers)", "sums.jsonl", "mcore_rl.train --lr 1e-6", "256")
    places = [text.index(part) for part in expected]
    assert places == sorted(places) and places[-1] < text.index("2 of 2")


def test_settings_that_differ_from_defaults_come_first(folder):
    (ours, defaults), (_, theirs) = settings_of(read_runs([folder])).values()
    assert [row.name for row in ours] == ["--rl-num-steps", "--rl-kl-coef"] and len(defaults) > 50
    assert [row.name for row in theirs] == ["lr", "tensor_model_parallel_size"]


def test_page_is_self_contained(page):
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "base", "form"), tag
        for name in ("src", "href", "srcset", "data", "action", "poster", "background"):
            assert (attrs.get(name) or "#").startswith(("#", "data:,")), (tag, attrs)
    assert not re.search(r"@import|url\(", page.raw["style"])
    policies = [a for t, a in page.elements if t == "meta" and "http-equiv" in a]
    assert "default-src 'none'" in (policies[0]["content"] or "")


def test_hostile_texts_of_a_run_stay_texts(folder, tmp_path):
    page = report(write_hostile_run(tmp_path), folder, "-o", tmp_path / "page.html")
    nonces = [a.get("nonce") for tag, a in page.elements if tag == "script"]
    assert len(nonces) == 3 and sum(nonce is not None for nonce in nonces) == 1
    assert not [tag for tag, _ in page.elements if tag in ("img", "svg", "b-hostile")]
    assert not [a for _, a in page.elements if any(name.startswith("on") for name in a)]
    assert "<script>window.hacked" in page.text and "{{ 7 * 7 }}" in page.text
    assert "\u2400" in page.text and "\x00" not in page.text
    names = [trace.get("name", "") for chart in page.charts.values() for trace in chart["data"]]
    assert names and not any(set("<>") & set(name) for name in names)


@pytest.mark.parametrize("content", ["", '{"step": 0, "rew'])
def test_page_of_a_new_run_lists_what_is_missing(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content)
    page = report(tmp_path)
    for part in ("metrics.jsonl has no step yet", "config.yaml is missing", "Incomplete."):
        assert part in page.text
    assert page.charts == {}


def test_page_of_5000_steps_is_fast_and_small(tmp_path):
    rng = random.Random(0)
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(5000):
            file.write(json.dumps({"step": step, **step_metrics(step, 5000, rng)}) + "\n")
    started = time.process_time()
    page = report(tmp_path)
    assert time.process_time() - started < 30
    assert (tmp_path / "report.html").stat().st_size < 4_000_000
    assert "Bars and maps are means over up to 25 steps" in page.text
    [run] = read_runs([tmp_path])
    for panel in PANELS.values():
        for chart in charts_of(panel, [run]):
            expected = max(run.series(metric)[0].size for metric in panel.series)
            if panel.kind in ("stack", "map"):
                expected = MAX_BARS
            assert max(len(trace.x) for trace in chart.figure.data) == expected, panel.title


def test_command_imports_neither_megatron_nor_torch(folder, tmp_path):
    code = "import json, sys; from mcore_rl.cli import main; code = main(sys.argv[1:]); "
    code += "print(json.dumps([code, sorted({'megatron', 'torch', 'vllm'} & sys.modules.keys())]))"
    process = subprocess.run(
        [sys.executable, "-c", code, "report", str(folder), "-o", str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
    )
    assert json.loads(process.stdout.splitlines()[-1]) == [0, []], process.stderr


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["{here}/nowhere"], "{here}/nowhere is not a folder; name the folder"),
        (["{here}"], "{here} has no metrics.jsonl and no config.yaml"),
        (["{run}", "{run}"], "are both {run}; name another run"),
        (["{run}", "-o", "{here}/a/b.html"], "--output {here}/a/b.html cannot be written"),
        ([], "RUN_DIR; see mcore-rl report --help"),
        (["{run}", "--outptu", "x"], "unrecognized arguments: --outptu"),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(tokens, sentence, folder, tmp_path, capsys):
    places: dict[str, Any] = {"here": tmp_path, "run": folder}
    assert main(["report", *(token.format(**places) for token in tokens)]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"mcore_rl: error: [^\n]+\n", error), error
    assert sentence.format(**places) in error
