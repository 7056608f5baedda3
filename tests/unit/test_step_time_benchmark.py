"""Pure parts of benchmarks/step_time.py: rows, ratios, verdicts, sections.

`python benchmarks/step_time.py --quick` makes the runs.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import step_time
from benchmarks.pages import markers, paired_ratio, with_section
from benchmarks.processes import PeakMemory
from benchmarks.step_time_packing import LIMIT_TOKENS, sample_lengths, samples
from benchmarks.step_time_report import SECTION, packing_row, section_of, training_row, verdicts
from benchmarks.step_time_task import (
    LEFT_OUT_STEPS,
    WORKLOADS,
    quick,
    reward,
    stop_probability,
    trl_reward_of,
)
from mcore_rl.rewards.functions import resolve_reward

ROOT = Path(__file__).resolve().parents[2]


def run(*step_seconds: float, accuracy: float | None = 0.5) -> dict[str, Any]:
    tokens = [6.0, 8.0]
    return dict(
        step_seconds=list(step_seconds), response_tokens=tokens, accuracy=accuracy, setting=""
    )


def row(system: str, *runs: dict[str, Any]) -> dict[str, Any]:
    settings = {"samples_per_step": 10, "left_out_steps": 2, "accuracy_at_start": 0.25}
    return training_row("short", system, runs, **settings)


def packed(seconds: float, peak_bytes: int) -> dict[str, Any]:
    return {
        "seconds": [seconds, 100.0, seconds],
        "cpu_seconds": [seconds / 2] * 3,
        "tokens": 600,
        "peak_bytes": peak_bytes,
        "setting": "",
    }


def test_row_leaves_out_the_first_steps():
    found = row("mcore_rl", run(100.0, 50.0, 1.0, 5.0, accuracy=0.5))
    assert (found["workload"], found["system"]) == ("short", "mcore_rl")
    assert found["samples_per_second"] == pytest.approx(10 / 3)
    assert found["response_tokens_mean"] == 7.0
    # The accuracy was gained in 4 steps, which take a fifth of a minute at 3 s each.
    assert found["accuracy_per_minute"] == pytest.approx(0.25 / 0.2)
    assert row("mcore_rl", run(1, 1, 1, accuracy=None))["accuracy_per_minute"] is None
    with pytest.raises(ValueError, match="trl made 2 steps of workload short"):
        row("trl", run(1.0, 1.0))


def test_ratio_is_taken_within_one_repetition():
    # The machine was slow in the second repetition for both.
    assert paired_ratio([20.0, 2.0], [10.0, 1.0]) == 2.0


@pytest.mark.parametrize(("seconds", "met"), [(1.19, False), (1.21, True)])
def test_verdict_follows_the_figures(seconds, met):
    rows = [row("mcore_rl", run(0, 0, 1.0)), row("trl", run(0, 0, seconds))]
    assert [ok for _, _, ok in verdicts(rows, {"short": 1.2, "long": 8.0})] == [met]


def test_other_systems_give_no_verdict():
    rows = [row("mcore_rl", run(0, 0, 1.0)), row("trl, bf16 weights", run(0, 0, 9.0))]
    assert verdicts(rows, {"short": 1.2}) == []


@pytest.mark.parametrize(("seconds", "peak", "met"), [(1.0, 79, True), (1.01, 81, False)])
def test_packing_is_judged_by_pace_and_by_memory(seconds, peak, met):
    rows = [
        packing_row("dense", "packed", [packed(seconds, peak)]),
        packing_row("dense", "padded", [packed(1.4, 100)]),
    ]
    assert rows[0]["workload"] == "packing"
    assert [ok for _, _, ok in verdicts(rows, {})] == [met, met]
    assert verdicts(rows[:1], {}) == []


def test_trls_defaults_and_best_settings_are_compared_with_our_defaults():
    rows = [
        row("mcore_rl", run(0, 0, 1.0) | {"peak_bytes": 21}),
        row("trl, defaults", run(0, 0, 4.5) | {"peak_bytes": 10}),
        row("trl, best settings", run(0, 0, 3.5) | {"peak_bytes": 11}),
    ]
    assert [ok for _, _, ok in verdicts(rows, {"short": 4.0})] == [True, False, False, True]


def test_memory_of_descendants_counts():
    size = 50 << 20
    child = f"import time; held = bytearray({size}); held[::4096] = b'1' * len(held[::4096]); "
    child += "time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    memory = PeakMemory(seconds=0.1)
    with subprocess.Popen([sys.executable, "-c", parent], start_new_session=True) as process:
        memory.watch(process.pid)
        until = time.monotonic() + 50
        while memory.num_bytes <= size and time.monotonic() < until:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    memory.end()
    assert size < memory.num_bytes < size + (60 << 20)


BEGIN, END = markers(SECTION)


def test_section_has_rows_between_its_markers():
    rows = [row("mcore_rl", run(0, 0, 1.0)), packing_row("dense", "packed", [packed(1.0, 5)])]
    text = section_of(SECTION, rows, {"commit": "abc"}, {"short": 1.2})
    assert text.startswith(BEGIN + "\n") and text.endswith(END + "\n")
    assert "- commit: abc" in text and "| packed, dense |" in text
    rows = [row("trl", run(0, 0, 1.0, accuracy=0.5), run(0, 0, 1.0, accuracy=0.75))]
    assert "| 0.250 to 0.625 (0.500, 0.750) |" in section_of(SECTION, rows, {}, {})
    unknown = [row("trl", run(0, 0, 1.0, accuracy=None))]
    assert "| - | - |" in section_of(SECTION, unknown, {}, {})


def test_section_is_replaced_and_the_rest_of_the_page_stays():
    first, second = f"{BEGIN}\none \\1\n{END}\n", f"{BEGIN}\ntwo \\2\n{END}\n"
    page = with_section("# Resharding\n", SECTION, first)
    assert page == f"# Resharding\n\n{first}"
    assert with_section(page + "\nmore\n", SECTION, second) == f"# Resharding\n\n{second}\nmore\n"
    assert with_section("", SECTION, first) == first


@pytest.mark.parametrize("page", [BEGIN, END, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_broken_markers_are_refused(page):
    with pytest.raises(ValueError, match="once each"):
        with_section(page, SECTION, "")


def command(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, f"benchmarks/{script}", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True)


def test_help_lists_the_flags():
    done = command("step_time.py", "--help")
    assert done.returncode == 0
    assert {"--record", "--quick"} <= set(re.findall(r"--\w+", done.stdout))


@pytest.mark.parametrize(("flag", "value"), [("--repetitions", "0"), ("--processes", "3")])
def test_mistake_is_one_sentence_before_a_run(flag, value):
    done = command("step_time.py", flag, value)
    assert done.returncode == 2
    (sentence,) = done.stderr.strip().splitlines()
    assert f"{flag} {value}" in sentence


def test_missing_trl_is_refused_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setattr(step_time.importlib.util, "find_spec", lambda name: None)
    assert step_time.main(["--only", "short"]) == 2
    assert "pip install .[bench]" in capsys.readouterr().err


def test_workloads_match_the_targets():
    shorts, longs = (
        [w for w in WORKLOADS if w.name.startswith(kind)] for kind in ("short", "long")
    )
    assert [w.samples_per_step for w in shorts] == [128, 128, 512]
    assert [w.samples_per_step for w in longs] == [64, 256]
    assert all((w.aimed_ratio, w.max_response_tokens) == (1.2, 16) for w in shorts)
    assert all((w.aimed_ratio, w.max_response_tokens) == (8.0, 200) for w in longs)
    for workload in WORKLOADS:
        assert workload.num_steps > LEFT_OUT_STEPS
        assert quick(workload).num_steps == LEFT_OUT_STEPS + 1


def test_real_size_runs_only_if_named():
    usual = step_time.make_parser().parse_args([]).only
    for name in step_time.NAMED_ONLY:
        assert name not in usual
        assert step_time.make_parser().parse_args(["--only", name]).only == [name]


def test_stop_probability_gives_the_mean_length():
    p = stop_probability(100.0, 200)
    # Reference: the sum over all lengths.
    chances = [p * (1 - p) ** (n - 1) for n in range(1, 200)]
    mean = sum(n * c for n, c in enumerate(chances, 1)) + 200 * (1 - sum(chances))
    assert mean == pytest.approx(100.0)
    with pytest.raises(ValueError, match="between 1 and the limit"):
        stop_probability(200.0, 200)


def test_reward_reads_the_text_before_the_first_full_stop():
    assert reward(prompt="", response="15 85....9 and more", answer="85") == 1.0
    assert reward(prompt="", response="15 75....85", answer="85") == 0.0


@pytest.mark.parametrize("name", ["short", "smollm2"])
def test_both_systems_get_the_same_rewards(name: str) -> None:
    (workload,) = (each for each in WORKLOADS if each.name == name)
    score = resolve_reward(workload.reward_name)
    texts, answers = ["15 85", "15 75. 85", "no"], ["85", "85", "85"]
    alone = [score(prompt="", response=t, answer=a) for t, a in zip(texts, answers, strict=True)]
    assert alone == [1.0, float(name == "smollm2"), 0.0]
    assert trl_reward_of(workload)(texts, answers) == alone
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert trl_reward_of(workload)(chats, answers) == alone


def test_lengths_have_a_long_tail():
    lengths = sample_lengths()
    assert 50 <= np.median(lengths) <= 80
    assert lengths.max() <= LIMIT_TOKENS and lengths.max() >= 4 * np.median(lengths)
    made = samples(lengths, 509)
    parts = [(s.rollout.prompt.token_ids, s.rollout.response_token_ids) for s in made]
    assert [len(prompt) + len(response) for prompt, response in parts] == lengths.tolist()
