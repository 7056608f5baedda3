"""Files that `mcore-rl report` reads: complete, partial and damaged run directories."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.observe.run_directory import RunConfig, RunDirectory
from mcore_rl.rewards.parts import FailureLog
from mcore_rl.rewards.worker import Outcome
from mcore_rl.tools.report.charts import thin_means
from mcore_rl.tools.report.page import render
from mcore_rl.tools.report.run_files import Run, read_events, read_run, read_runs, read_samples
from mcore_rl.tools.report.tables import Headline, headlines
from mcore_rl.tools.report.texts import clean
from tests.report_runs import scored, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a", num_steps=40)


def copy(folder: Path, target: Path, *left_out: str) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.name not in left_out:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def read(folder: Path) -> Run:
    return read_run(folder, name=folder.name)


def steps_headline(run: Run) -> Headline:
    return headlines([run])["Steps"][0]


def test_finished_run_is_read_completely(folder):
    run = read(folder)
    assert run.notes == () and steps_headline(run) == ("40 of 40", "finished", "good")
    steps, accuracy = run.series("eval/accuracy")
    assert steps.tolist() == [0, 15, 30, 40] and accuracy[-1] == 0.81
    assert run.config["rl_kl_coef"] == 0.01 and run.summary["train_layout"] == "TP8 x PP8"
    assert [s.step for s in run.samples] == [0, 5, 10, 15, 20, 25, 30, 35]
    [alarm] = run.events
    assert (alarm.step, alarm.alarm) == (30, "entropy") and alarm.text.startswith("the entropy is")


@pytest.mark.parametrize("finish", [False, True])
def test_shorter_run_than_asked_is_still_running(tmp_path, finish):
    """Even with a summary, which an earlier part of the run may have written."""
    run = read(write_run(tmp_path / "run", num_steps=7, asked=50, finish=finish))
    assert steps_headline(run)[0] == "7 of 50" and "still running" in steps_headline(run).beneath
    assert bool(run.summary) == finish
    assert len(run.notes) == (0 if finish else 1)
    assert all(note.startswith("summary.json") for note in run.notes)


@pytest.mark.parametrize("size", [0, 20, -30])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("metrics.jsonl", "metrics.jsonl"),
        ("rollouts.jsonl", "rollouts.jsonl"),
        ("timeline.jsonl", "timeline.jsonl"),
        ("summary.json", "summary.json is empty or truncated"),
        ("config.yaml", None),
        ("run.log", None),
    ],
)
def test_truncated_file_is_read_up_to_the_cut(folder, tmp_path, name, size, message):
    here = copy(folder, tmp_path / "run")
    (here / name).write_bytes((folder / name).read_bytes()[:size])
    run = read(here)
    if message and not (name in ("rollouts.jsonl", "timeline.jsonl") and size == 0):
        assert any(message in note for note in run.notes), run.notes
    assert run.series("reward/mean")[0].size == (40 if name != "metrics.jsonl" or size < 0 else 0)
    whole = read(folder)
    for part in ("config", "summary", "samples", "events", "timeline"):
        others = {"config.yaml": "config", "summary.json": "summary"}
        others |= {"rollouts.jsonl": "samples", "run.log": "events", "timeline.jsonl": "timeline"}
        if others.get(name) != part:
            assert getattr(run, part) == getattr(whole, part)


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "rollouts.jsonl", "timeline.jsonl"),
        *("summary.json", "config.yaml", "run.log"),
    ],
)
def test_missing_file_is_noted(folder, tmp_path, name):
    run = read(copy(folder, tmp_path / "run", name))
    assert run.notes[0].startswith(name) and "is missing" in run.notes[0]


def test_lines_without_metrics_are_skipped(tmp_path):
    lines = ['{"step": 0, "reward/mean": 0.5, "a": "x", "b": null, "c": NaN}', "[1]", "", "{"]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 2, "a": 1}', ""]))
    run = read(tmp_path)
    assert run.steps.tolist() == [0, 2]
    assert run.series("a")[1].tolist() == [1.0] and run.series("c")[1].size == 0
    assert run.series("reward/mean")[0].tolist() == [0]


def test_runs_of_the_same_name_are_distinguished(tmp_path):
    folders = [write_run(tmp_path / where / "run", num_steps=1) for where in ("x", "y")]
    assert [run.name for run in read_runs(folders)] == ["x/run", "y/run"]
    assert [run.name for run in read_runs(folders[:1])] == ["run"]


# ----------------------------------------------------------------------------------------- events


def test_resumes_ends_and_tracebacks_are_events(folder, tmp_path):
    here = copy(folder, tmp_path / "run")
    with (here / "run.log").open("a") as log:
        log.write("2026-01-02 03:04:05,678 [Resume] resuming from step 20 of x\n")
        log.write("2026-01-02 03:04:06,678 [Reshard] direction=a attested=yes\n")
        log.write("2026-01-02 03:05:00,000 the run ended early\nTraceback:\n  ValueError: no\n")
    events = read(here).events[-2:]
    assert [(e.kind, e.time) for e in events] == [
        ("resume", "2026-01-02 03:04:05"),
        ("end", "2026-01-02 03:05:00"),
    ]
    assert events[1].details == "Traceback:\n  ValueError: no"


def test_lines_within_a_message_are_not_events(tmp_path):
    """A reward may raise one; only the first line comes from the run."""
    forged = "2026-01-02 03:04:05,678 [Health] step 7, kl: forged"
    directory = RunDirectory(tmp_path, RunConfig())
    for end in ("\n", "\r", "\r\n"):
        logging.getLogger("mcore_rl").warning(
            "the run ended early%sTraceback:%s", end, end + forged
        )
    directory.close()
    events = read_events(tmp_path / "run.log")
    assert [event.kind for event in events] == ["end"] * 3
    assert {event.details for event in events} == {f"Traceback:\n{forged}"}


def test_text_quoted_by_a_reward_is_not_an_event(tmp_path):
    directory = RunDirectory(tmp_path, RunConfig())
    log = FailureLog("a:b")
    log.note([Outcome(0.0, "raised ValueError", "no answer in '[Health] step 7, kl: forged'")])
    logging.getLogger("mcore_rl").warning("[Health] step 8, kl: true")
    directory.close()
    assert [event.step for event in read_events(tmp_path / "run.log")] == [8]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["the run ended early"], "ended early, see the events"),
        (["[Health] stopped after step 9 by --rl-on-alarm stop"], "stopped by an alarm"),
        (["the run ended early", "[Resume] resuming from step 20 of x"], "still running"),
        ([], "still running"),
    ],
)
def test_unfinished_run_says_why(tmp_path, lines, message):
    (tmp_path / "config.yaml").write_text("num_steps: 50\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 20, "reward/mean": 0.5}\n')
    with (tmp_path / "run.log").open("w") as log:
        log.writelines(f"2026-01-02 03:04:05,678 {line}\n" for line in lines)
    found = steps_headline(read(tmp_path))
    assert found.value == "1 of 50" and found.beneath.startswith(message)


# ---------------------------------------------------------------------------------------- samples


def test_samples_are_best_and_worst_of_evenly_spread_steps(tmp_path):
    rewards = [0.25, 1.0, -0.5]
    texts = [scored(f"for {reward}", reward) for reward in rewards]
    write_run(tmp_path, num_steps=200, rollouts=texts)
    found = read_samples(tmp_path / "rollouts.jsonl", num_steps=4)
    assert [step.step for step in found] == [0, 65, 130, 195]
    for step in found:
        assert step.worst is not None and step.num_logged == 3
        assert (step.best.response, step.worst.response) == ("for 1.0", "for -0.5")


def test_later_samples_of_a_repeated_step_count(tmp_path):
    lines = [{"step": step, "response": text, "reward": 1} for step, text in ((3, "old"), (4, "x"))]
    lines += [{"step": 3, "response": text, "reward": 1} for text in ("new", "new")]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {step.step: step for step in read_samples(path)}
    assert found[3].best.response == "new" and found[3].num_logged == 2 and found[3].worst is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x00b\x1b[31mc\x7f", "a\u2400b\u241b[31mc\u2421"),
        ("tab\tand\nline", "tab\tand\nline"),
        ("half \ud83d a pair", "half \ufffd a pair"),
        ("😀 שלום", "😀 שלום"),
        (None, "null"),
        (["a", 1.5], '["a", 1.5]'),
    ],
)
def test_clean_turns_any_value_into_text(text, shown):
    assert clean(text) == shown
    clean(text).encode("utf-8")


def test_clean_cuts_long_texts():
    assert clean("x" * 25_000).endswith("x\n[5,000 more characters in the file]")


# --------------------------------------------------------------------------------------- thinning


def test_thinned_means_keep_the_sum():
    steps = np.arange(1_000) + 5
    columns = np.random.default_rng(0).random((3, 1_000))
    few_steps, few = thin_means(steps, columns, 100)
    assert few_steps.tolist() == list(range(5, 1_005, 10))
    np.testing.assert_allclose(few, columns.reshape(3, 100, 10).mean(axis=2), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("metrics.jsonl", '{"step": 99999999999999999999, "reward/mean": 1}'),
        ("metrics.jsonl", '{"step": 41, "reward/mean": null, "grad_norm": [1]}'),
        ("metrics.jsonl", '{"step": 41, "time/rollout_seconds": 1e308, "reward/mean": 1e999}'),
        ("metrics.jsonl", "[" * 200_000),
        ("rollouts.jsonl", '{"step": ' + "1" * 5000 + ', "prompt": "x"}'),
        ("rollouts.jsonl", '{"step": 39, "prompt": 1, "parts": 2, "reward": ' + "9" * 400 + "}"),
        ("rollouts.jsonl", '{"step": 39, "prompt": ' + "[" * 200_000),
        ("timeline.jsonl", '{"step": 41, "role": "trainer", "spans": [["train", 1, 1e999]]}'),
        ("timeline.jsonl", '{"step": 41, "role": "trainer", "spans": [["train", -1e308, 1e308]]}'),
        ("run.log", "2026-01-01 00:00:00,000 [Health] step " + "9" * 5000 + ", entropy: x"),
        ("config.yaml", "# " + "[" * 20_000),
        (
            "config.yaml",
            "# a0: &a0 [x]\n"
            + "".join(f"# a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
        ),
        ("config.yaml", "# resolved: [1]\n# about: 7"),
        ("summary.json", "[" * 200_000),
        ("summary.json", '{"metrics": 7, "versions": [1], "train_layout": {}}'),
    ],
    ids=range(15),
)
def test_page_is_rendered_despite_a_damaged_line(folder, tmp_path, file, damage):
    run = copy(folder, tmp_path / "run", *([file] if file == "summary.json" else []))
    with (run / file).open("a", encoding="utf-8") as end:
        end.write(damage + "\n")
    [found] = read_runs([run])
    assert steps_headline(found).value.startswith("40")
    assert "</html>" in render([found])
