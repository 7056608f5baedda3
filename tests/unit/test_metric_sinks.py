"""TensorBoard and Weights & Biases get the metrics of metrics.jsonl and the samples of
rollouts.jsonl; their failures do no harm."""

from __future__ import annotations

import html.parser
import importlib
import json
import logging
import struct
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.batching.types import ScoredRollout, StepStats
from mcore_rl.common.errors import UsageError
from mcore_rl.flags.packages import check_wandb
from mcore_rl.observe import metric_sinks
from mcore_rl.observe.metric_sinks import COLUMNS, WandbRun, id_of_run, markdown_table, table_rows
from mcore_rl.observe.run_directory import RunConfig, RunDirectory, read_metrics
from tests.report_runs import HOSTILE_TEXTS, scored

STEPS = {
    0: {"reward/mean": 0.25, "time/step_seconds": 2.5, "eval/accuracy": 0.5},
    1: {"reward/mean": 0.5, "time/step_seconds": 1.0 / 3.0},
    2: {"eval/accuracy": 0.75},
}
# A package that breaks where its name says, as one does without a network, a disk or a service.
FAILING = """
class Settings:
    def __init__(self, **values): pass
class _Run:
    def log(self, *args, **values):
        if {where!r} == "log": raise ConnectionError("the service is gone")
    def finish(self):
        if {where!r} == "finish": raise TimeoutError("no end of it")
class Table:
    def __init__(self, **values):
        if {where!r} == "Table": raise ValueError("columns of mixed types")
def init(**values):
    if {where!r} == "init": raise {error}
    return _Run()
"""


def write(folder: Path, steps=STEPS, rollouts=(), **options) -> None:
    directory = RunDirectory(folder, RunConfig(resolved={"lr": 1e-6}), **options)
    for step, metrics in steps.items():
        directory.write_step(StepStats(step, metrics))
        directory.write_rollouts(step, rollouts, range(len(rollouts)))
    directory.close()


def two_samples() -> list[ScoredRollout]:
    """One without a reward, one of several versions."""
    first, second = scored("9\n6", 0.0), scored("96", 1.0)
    versions = np.array([3, 4, 5], dtype=np.int32)
    several = replace(
        second.rollout, weight_version=5, weight_versions=versions, finish_reason="length"
    )
    return [
        replace(first, failure="the server is gone", parts={}),
        replace(second, rollout=several),
    ]


def rows_of_two_samples(step: int) -> list[list[Any]]:
    return [
        [step, "19+77", "9\n6", None, "{}", 3, 1, 1, "stop"],
        [step, "19+77", "96", 1.0, '{"arithmetic": 1.0}', 3, 3, 5, "length"],
    ]


class Cells(html.parser.HTMLParser):
    """The texts of an HTML table's cells, row by row, with newlines for <br>."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.removesuffix("\n")


def shown_by_tensorboard(text: str) -> Cells:
    """The cells that TensorBoard shows of a Markdown text."""
    from tensorboard.plugin_util import markdown_to_safe_html

    return Cells(markdown_to_safe_html(text))


def tables_of_tensorboard(folder: Path) -> dict[int, list[list[str]]]:
    """The rows of each step's table, without those of the head."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    found = {}
    for event in events.Tensors("rollouts/text_summary"):
        head, *rows = shown_by_tensorboard(event.tensor_proto.string_val[0].decode()).rows
        assert head == list(COLUMNS)
        found[event.step] = rows
    return found


def points_of_tensorboard(folder: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    return found


def test_tensorboard_equals_metrics_jsonl(tmp_path: Path) -> None:
    write(tmp_path)
    expected = read_metrics(tmp_path / "metrics.jsonl")
    assert expected == STEPS
    found = points_of_tensorboard(tmp_path / "tensorboard")
    assert found.keys() == expected.keys()
    for step, metrics in expected.items():
        assert found[step] == pytest.approx(metrics, rel=1e-6)  # it stores float32


def test_tensorboard_is_written_to_given_folder(tmp_path: Path) -> None:
    """Megatron's --tensorboard-dir."""
    write(tmp_path / "run", tensorboard=str(tmp_path / "points"))
    assert points_of_tensorboard(tmp_path / "points").keys() == STEPS.keys()
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_resumed_run_replaces_later_points(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, {1: {"reward/mean": 0.625}}, first_step=1)
    rewards = {
        step: metrics["reward/mean"]
        for step, metrics in points_of_tensorboard(tmp_path / "tensorboard").items()
        if "reward/mean" in metrics
    }
    assert rewards == {0: 0.25, 1: 0.625}


def test_tensorboard_has_samples_of_each_step(tmp_path: Path) -> None:
    write(tmp_path, rollouts=two_samples())
    expected = {
        step: [["" if c is None else str(c) for c in row] for row in rows_of_two_samples(step)]
        for step in STEPS
    }
    assert tables_of_tensorboard(tmp_path / "tensorboard") == expected


def test_markdown_shows_texts_unchanged() -> None:
    hostile = [text for text in HOSTILE_TEXTS if len(text) < 1000]
    texts = [*hostile, "a|b || `c|d` \\| *e* _f_ __g__ [h](http://i) ![j](k) <br> &amp; &#65; 1. l"]
    texts += [
        "# head",
        "- item",
        "---",
        "> quote",
        "http://a.b <http://c.d>",
        "~~~\nx\n~~~",
        "$x^2$",
    ]
    rows = table_rows(3, [scored(text, 1.0, prompt=text) for text in texts])
    cells = shown_by_tensorboard(markdown_table(rows))
    # HTML has no control characters, UTF-8 no half of a pair of surrogates.
    controls = dict.fromkeys([0, 0x1B, 0x7F, 0x85], "\ufffd")
    expected = [t.translate(controls).replace("\ud83d", "?").strip(" \n") for t in texts]
    assert [row[1:3] for row in cells.rows[1:]] == [[text, text] for text in expected]
    assert cells.tags == {"table", "thead", "tbody", "tr", "th", "td", "br"}


def test_tables_are_bounded() -> None:
    rows = table_rows(0, [scored("a" * 2005, 1.0, prompt="b" * 2000)] * 100)
    assert len(rows) == 32
    assert rows[0][1:3] == ("b" * 2000, "a" * 2000 + " [5 more characters in rollouts.jsonl]")
    with_table = [step for step in range(131) if table_rows(step, [scored("a", 1.0)])]
    assert with_table == [*range(101), 110, 120, 130]


def records(path: Path) -> Iterator[bytes]:
    """Those of a file of Weights & Biases: after 7 bytes blocks of 32 KiB of pieces, each with
    its checksum, length and whether it is whole (1) or a record's first, middle or last (2, 3, 4).
    """
    data, position, record = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record = (b"" if kind in (1, 2) else record) + data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record


def points_of_wandb(folder: Path) -> tuple[dict[int, dict[str, Any]], set[str]]:
    """Points and tables by step, and the ids of the runs, of all offline files.

    `finish` does not wait until the service of Weights & Biases has written the file; `teardown`,
    which an interpreter calls at its end, does.
    """
    importlib.import_module("wandb").teardown()
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: dict[int, dict[str, Any]] = {}
    runs = set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            message = messages.Record.FromString(record)
            if message.HasField("run"):
                runs.add(message.run.run_id)
            if message.HasField("history"):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in message.history.item
                }
                step = message.history.step.num
                found[step] = {
                    name: value for name, value in items.items() if not name.startswith("_")
                }
                if table := found[step].get("rollouts/path"):
                    table = json.loads((path.parent / "files" / table).read_text())
                    found[step] = {k: v for k, v in found[step].items() if "rollouts/" not in k}
                    found[step]["rollouts"] = table
    return found, runs


@pytest.mark.slow
def test_wandb_equals_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("_INIT_SECONDS", "_FINISH_SECONDS"):  # the machine may be busy
        monkeypatch.setattr(metric_sinks, name, 600)
    write(tmp_path, wandb=WandbRun("sums", name="first try"))
    found, runs = points_of_wandb(tmp_path)
    assert found == read_metrics(tmp_path / "metrics.jsonl") == STEPS
    assert len(runs) == 1
    more = {"first_step": 3, "wandb": WandbRun("sums"), "rollouts": two_samples()}
    write(tmp_path, {3: {"reward/mean": 1.0}, 4: {}}, **more)
    found, same = points_of_wandb(tmp_path)
    for step in (3, 4):
        table = found[step].pop("rollouts")
        assert table["columns"] == list(COLUMNS) and table["data"] == rows_of_two_samples(step)
    assert found == {**STEPS, 3: {"reward/mean": 1.0}, 4: {}} and same == runs


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0" * 8, b"", b"a\nb"])
def test_damaged_wandb_run_id_starts_new_run(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wandb_run_id"
    path.write_bytes(content)
    begun = id_of_run(path, resumes=True)
    assert begun.isalnum() and id_of_run(path, resumes=True) == begun


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("init", "ConnectionError('no route to host')"),
        ("init", "SystemExit(1)"),
        ("log", "ConnectionError('the service is gone')"),
        ("Table", "ValueError('columns of mixed types')"),
        ("finish", "TimeoutError('no end of it')"),
    ],
)
def test_failing_wandb_is_logged_once_and_loses_no_metric(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    error: str,
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "wandb.py").write_text(FAILING.format(where=where, error=error))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    caplog.set_level(logging.WARNING, logger="mcore_rl")
    try:
        write(tmp_path / "run", rollouts=two_samples(), wandb=WandbRun("sums"))
    finally:
        sys.modules.pop("wandb", None)
    warning = (
        f"Weights & Biases gets no further points in project sums ({error}); metrics.jsonl has"
    )
    assert [r.getMessage() for r in caplog.records] == [f"{warning} them all"]
    assert warning in (tmp_path / "run" / "run.log").read_text()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == STEPS
    assert points_of_tensorboard(tmp_path / "run" / "tensorboard").keys() == STEPS.keys()


def test_missing_wandb_is_refused_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb({})
    with pytest.raises(UsageError, match="--wandb-project sums needs the package wandb"):
        check_wandb({"wandb_project": "sums"})


def test_wandb_run_is_named_by_flags_of_megatron() -> None:
    assert WandbRun.from_flags({"wandb_project": None, "wandb_exp_name": "a"}) is None
    flags = {"wandb_project": "sums", "wandb_exp_name": ""}
    found = WandbRun.from_flags({**flags, "wandb_entity": "we", "wandb_save_dir": "here"})
    assert found == WandbRun("sums", name=None, entity="we", save_dir="here")
