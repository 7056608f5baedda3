"""Files that a run writes, also on a full or read-only disk and after a killed run."""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rl.batching.types import StepStats
from mcore_rl.common import disk
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.observe.progress import RunProgress
from mcore_rl.observe.run_directory import (
    PatientFile,
    RunConfig,
    RunDirectory,
    read_config,
    read_metrics,
)
from mcore_rl.spec import JobSpec
from tests.report_runs import scored


@pytest.fixture(autouse=True)
def warnings_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="mcore_rl")


def test_lines_wait_for_a_full_disk(tmp_path, caplog):
    path = tmp_path / "lines"
    path.symlink_to("/dev/full")  # every write fails as on a full disk
    file = PatientFile(path)
    for number in range(3):
        file.write(f"{number}\n")
    (message,) = caplog.messages
    assert message.startswith(f"{path}: No space left on device")
    path.unlink()
    file.write("3\n")
    file.close()
    assert path.read_text() == "0\n1\n2\n3\n"
    assert "can be written again, and nothing is missing" in caplog.messages[-1]


def test_partly_written_lines_are_not_written_twice(tmp_path, monkeypatch):
    (tmp_path / "lines").write_text("first\n")
    file = PatientFile(tmp_path / "lines")

    class TakesTwoBytes(io.FileIO):
        """Every second write fails, and the others write two bytes."""

        calls = 0

        def write(self, data):
            self.calls += 1
            if self.calls % 2 == 0:
                raise OSError(28, "No space left on device")
            return super().write(bytes(data[:2]))

    monkeypatch.setattr(io, "FileIO", TakesTwoBytes)
    for line in ("second\n", "third\n"):
        file.write(line)
    assert (tmp_path / "lines").read_text() == "first\nseco"
    monkeypatch.undo()
    file.close()
    assert (tmp_path / "lines").read_text() == "first\nsecond\nthird\n"


def test_line_cut_by_a_kill_is_ended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "a": 1.0}\n{"step": 1, "a"')
    directory = RunDirectory(tmp_path, RunConfig(), first_step=1)
    directory.write_step(StepStats(1, {"a": 2.0}))
    directory.close()
    assert path.read_text() == '{"step": 0, "a": 1.0}\n{"step": 1, "a"\n{"step": 1, "a": 2.0}\n'
    assert read_metrics(path) == {0: {"a": 1.0}, 1: {"a": 2.0}}


def test_config_yaml_reproduces_the_job(checkpoint_factory, tmp_path):
    from mcore_rl.job.facts import Source
    from mcore_rl.job.resolver import resolve
    from mcore_rl.megatron.world import parsed_args

    checkpoint = checkpoint_factory("qwen2")
    (tmp_path / "more.yaml").write_text("adam-beta2: 0.95\nrl-log-prob-chunk-tokens: 64\n")
    tokens = [
        *("--rl-config", str(tmp_path / "more.yaml"), "--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl"), "--rl-reward", "arithmetic"),
        *("--rl-reward-weights=-1", "--rl-algorithm", "ppo", "--rl-critic-lr", "5e-6"),
        *("--lr", "2e-6", "--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1", "--no-bias-swiglu-fusion", "--rl-run-dir", "first"),
    ]

    def read(tokens: list[str]) -> tuple[JobSpec, dict[str, Any]]:
        checked = resolve(Source(tokens=tokens, platform=WITHOUT_CUDA))
        like = argparse.Namespace(rank=0, local_rank=0, async_save=False, async_strategy="mcore")
        args = parsed_args(list(checked.tokens), add_rl_args, like, log=io.StringIO())
        return checked, {**vars(args), "rl_run_dir": ""}

    checked, args = read(tokens)
    (tmp_path / "config.yaml").write_text(RunConfig(checked.given, args).text())
    again, same = read(["--rl-config", str(tmp_path / "config.yaml"), "--rl-run-dir", "second"])
    assert again.config == checked.config.replaced(run_dir="second")
    assert same == args and again.flags["--rl-run-dir"] == "second"
    assert again.notes == checked.notes
    assert again.critic is not None and checked.critic is not None
    assert again.critic.layout == checked.critic.layout


def test_config_yaml_has_given_and_resolved_flags(tmp_path):
    config = RunConfig(
        {"lr": "1e-5", "rl-import": ["a.py"], "rl-run-dir": "here", "wandb-exp-name": "# a\n# b"},
        {
            "lr": 1e-5,
            "backend": Path("x"),
            "notes": "two\nlines \u2028 a: b # \x85",
            "rl_seed": None,
        },
        {"command": "python -m mcore_rl.train --lr 1e-5", "ranks": 4},
    )
    RunDirectory(tmp_path, config).close()
    file = tmp_path / "config.yaml"
    given = {"lr": "1e-5", "rl-import": ["a.py"], "wandb-exp-name": "# a\n# b"}
    assert yaml.safe_load(file.read_text()) == given
    assert read_config(file) == RunConfig(given, {**config.resolved, "backend": "x"}, config.about)
    for of_older_run in ("rl_num_steps: 3\nnum_steps: 3\n", "num_steps: 3\n"):
        file.write_text(of_older_run)
        assert read_config(file).resolved["num_steps"] == 3 and not read_config(file).given


def test_resumed_run_replaces_its_later_steps(tmp_path):
    for first_step, values in ((0, [1.0, 2.0, 3.0]), (1, [5.0])):
        directory = RunDirectory(tmp_path, RunConfig(), first_step=first_step)
        for step, value in enumerate(values, first_step):
            metrics = dict.fromkeys(("entropy", "reward/mean", "kl/rollout_actor"), value)
            directory.write_step(StepStats(step, metrics))
        summary = directory.write_summary({})
        directory.close()
    assert summary == {
        "reward/mean": {"first": 1.0, "last": 5.0, "best": 5.0},
        "kl/rollout_actor": {"first": 1.0, "last": 5.0, "best": 1.0},
        "entropy": {"first": 1.0, "last": 5.0},  # neither the highest nor the lowest is the best
    }
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"] == summary
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == metrics


def test_console_and_metrics_number_steps_alike(tmp_path, capsys):
    progress = RunProgress(num_steps=12, first_step=10, enabled=True)
    directory = RunDirectory(tmp_path, RunConfig(), first_step=10)
    names = ("reward/mean", "throughput/rollout_tokens_per_second", "time/step_seconds")
    names += ("time/reshard_to_rollout_seconds", "time/reshard_to_train_seconds")
    metrics = dict.fromkeys(names, 1.0)
    for step in (10, 11):
        directory.write_step(StepStats(step, metrics))
        progress.update(step, metrics)
    directory.close()
    shown = re.findall(r"^step (\d+) \((\d+)/12\) · ", capsys.readouterr().out, re.MULTILINE)
    assert [int(step) for step, _ in shown] == list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [done for _, done in shown] == ["11", "12"]


DAMAGED = (
    '{"step": 1, "reward/mean": null}',
    '{"step": 1, "reward/mean": "x"}',
    '{"step": 1, "reward/mean": [1]}',
    '{"step": 1, "reward/mean": true}',
    '{"step": 1, "reward/mean": ' + "9" * 400 + "}",
    '{"step": 1, "reward/mean": ' + "9" * 5000 + "}",
    '{"step": Infinity}',
    '{"step": 1e30}',
    '{"step": 99999999999999999999}',
    '{"step": -1}',
    '{"step": "x"}',
    '{"a": 1}',
    "[1]",
    "7",
    "[" * 200_000,
    '{"step": 1, "a": ' + "[" * 200_000,
    "\0" * 500,
    "\0" * (3 << 20),
    "\ud800",
)


@pytest.mark.parametrize("line", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_line_is_skipped_on_resume(line, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 0, "reward/mean": 0.5, "a": NaN}'
    path.write_text(f"{whole}\n{line}\n" + '{"step": 2, "reward/mean": 1}', errors="replace")
    damaged: list[int] = []
    found = read_metrics(path, damaged)
    assert damaged == [2]
    assert found.pop(0)["reward/mean"] == 0.5 and found.pop(2) == {"reward/mean": 1.0}
    assert not any(found.values())
    directory = RunDirectory(tmp_path, RunConfig(), first_step=5)
    main = directory.write_summary({})
    directory.close()
    assert main["reward/mean"] == {"first": 0.5, "last": 1.0, "best": 1.0}
    assert any("line 2" in message for message in caplog.messages)


def test_unfinished_last_line_is_not_damage(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n\n{"step": 1, "a"')
    damaged: list[int] = []
    assert read_metrics(tmp_path / "metrics.jsonl", damaged) == {0: {"a": 1.0}}
    assert damaged == []


def test_each_sample_is_one_line_whatever_its_text(tmp_path):
    texts = ["\n\r\v\f", "\x1c\x1d\x1e\x85", "\u2028\u2029", "你好"]
    directory = RunDirectory(tmp_path, RunConfig())
    directory.write_rollouts(0, [scored(text, 1.0) for text in texts], range(4))
    directory.close()
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in lines] == texts
    assert texts[-1] in lines[-1]


@pytest.mark.parametrize("method", ["add_scalar", "add_text", "close", "__init__"])
def test_failing_tensorboard_is_left_out(tmp_path, monkeypatch, caplog, method):
    from torch.utils.tensorboard import SummaryWriter

    def failing(*args, **keywords):
        raise RuntimeError("the event file is gone")

    monkeypatch.setattr(SummaryWriter, method, failing)
    directory = RunDirectory(tmp_path, RunConfig())
    for step in range(3):
        directory.write_step(StepStats(step, {"a": 1.0}))
        directory.write_rollouts(step, [scored("96", 1.0)], [step])
    directory.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["draw"]) for row in rows] == [(0, 0), (1, 1), (2, 2)]
    assert all(row["oldest_weight_version"] <= row["weight_version"] for row in rows)
    (message,) = caplog.messages
    assert str(tmp_path / "tensorboard") in message and "the event file is gone" in message
    assert message.endswith("; metrics.jsonl has them all")


def test_read_only_folder_loses_no_step(tmp_path, monkeypatch, caplog):
    """Every opening of a file for writing fails."""
    directory = RunDirectory(tmp_path, RunConfig())
    real = io.open

    def refusing(file, mode="r", *args, **keywords):
        if set(mode) & set("wa+x"):
            raise OSError(30, "Read-only file system", str(file))
        return real(file, mode, *args, **keywords)

    monkeypatch.setattr(io, "open", refusing)
    main = directory.write_summary({"fact": 1})
    assert main == {} and not (tmp_path / "summary.json").exists()
    assert "summary.json cannot be written" in caplog.messages[0]
    directory.write_step(StepStats(0, {"a": 1.0}))
    monkeypatch.undo()
    directory.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "a": 1.0}


def test_full_disk_leaves_the_config_of_the_run_before(tmp_path, monkeypatch, caplog):
    RunDirectory(tmp_path, RunConfig({"lr": 1})).close()
    before = (tmp_path / "config.yaml").read_text()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(disk, "sync", full)
    RunDirectory(tmp_path, RunConfig({"lr": 2})).close()
    assert "config.yaml cannot be written ([Errno 28]" in caplog.messages[0]
    assert (tmp_path / "config.yaml").read_text() == before
    assert not list(tmp_path.glob("*.partial"))


def test_log_survives_a_full_disk(tmp_path):
    logger = logging.getLogger("mcore_rl.test")
    logger.parent.setLevel(logging.INFO)
    (tmp_path / "run.log").symlink_to("/dev/full")
    directory = RunDirectory(tmp_path, RunConfig())
    logger.info("first")  # no exception, no recursion
    directory.close()
