"""TensorBoard and Weights & Biases get the metrics of metrics.jsonl; their failures do no harm."""

from __future__ import annotations

import importlib
import json
import logging
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_rl.batching.types import StepStats
from mcore_rl.common.errors import UsageError
from mcore_rl.flags.packages import check_wandb
from mcore_rl.observe import metric_sinks
from mcore_rl.observe.metric_sinks import WandbRun, _run_id
from mcore_rl.observe.run_directory import RunConfig, RunDirectory, read_metrics

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
def init(**values):
    if {where!r} == "init": raise {error}
    return _Run()
"""


def write(folder: Path, steps=STEPS, **options) -> None:
    directory = RunDirectory(folder, RunConfig(resolved={"lr": 1e-6}), **options)
    for step, metrics in steps.items():
        directory.write_step(StepStats(step, metrics))
    directory.close()


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


def points_of_wandb(folder: Path) -> tuple[dict[int, dict[str, float]], set[str]]:
    """Points by step, and the ids of the runs, of all offline files.

    `finish` does not wait until the service of Weights & Biases has written the file; `teardown`,
    which an interpreter calls at its end, does.
    """
    importlib.import_module("wandb").teardown()
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    found: dict[int, dict[str, float]] = {}
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
    return found, runs


def test_wandb_equals_metrics_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("_INIT_SECONDS", "_FINISH_SECONDS"):  # the machine may be busy
        monkeypatch.setattr(metric_sinks, name, 600)
    write(tmp_path, wandb=WandbRun("sums", name="first try"))
    found, runs = points_of_wandb(tmp_path)
    assert found == read_metrics(tmp_path / "metrics.jsonl") == STEPS
    assert len(runs) == 1
    write(tmp_path, {3: {"reward/mean": 1.0}}, first_step=3, wandb=WandbRun("sums"))
    found, same = points_of_wandb(tmp_path)
    assert found == {**STEPS, 3: {"reward/mean": 1.0}} and same == runs


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\0" * 8, b"", b"a\nb"])
def test_damaged_wandb_run_id_starts_new_run(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wandb_run_id"
    path.write_bytes(content)
    begun = _run_id(path, resumes=True)
    assert begun.isalnum() and _run_id(path, resumes=True) == begun


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("init", "ConnectionError('no route to host')"),
        ("init", "SystemExit(1)"),
        ("log", "ConnectionError('the service is gone')"),
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
        write(tmp_path / "run", wandb=WandbRun("sums"))
    finally:
        sys.modules.pop("wandb", None)
    warning = (
        f"Weights & Biases gets no further points in project sums ({error}); metrics.jsonl has"
    )
    assert [r.getMessage() for r in caplog.records] == [f"{warning} them all"]
    assert warning in (tmp_path / "run" / "run.log").read_text()
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == STEPS
    assert points_of_tensorboard(tmp_path / "run" / "tensorboard").keys() == STEPS.keys()


def test_missing_wandb_is_refused_before_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_wandb({})
    with pytest.raises(UsageError, match="--wandb-project sums needs the package wandb"):
        check_wandb({"wandb_project": "sums"})


def test_wandb_run_is_named_by_flags_of_megatron() -> None:
    assert WandbRun.from_flags({"wandb_project": None, "wandb_exp_name": "a"}) is None
    flags = {"wandb_project": "sums", "wandb_exp_name": ""}
    found = WandbRun.from_flags({**flags, "wandb_entity": "we", "wandb_save_dir": "here"})
    assert found == WandbRun("sums", name=None, entity="we", save_dir="here")
