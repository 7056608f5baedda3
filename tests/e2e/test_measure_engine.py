"""`mcore-rl plan --measure-engine` with the real vLLM, and what reads its file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.tools.plan.recorded import read_engine_speed

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ("-m", "mcore_rl.launch", "--nproc-per-node", "2")


def run(
    checkpoint: Path, target: Path, *flags: str, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    tokens = [
        *("plan", "--measure-engine", str(target), "--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl"), "--rl-reward", "exact"),
        *("--rl-max-prompt-tokens", "32", "--rl-max-response-tokens", "32"),
        *("--micro-batch-size", "1", "--rl-rollout-max-num-seqs", "6", *flags),
    ]
    return subprocess.run(
        [sys.executable, *before, "-m", "mcore_rl.cli", *tokens],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("before", "flags", "engine"),
    [
        ((), (), "1 engines of TP1, EP1"),
        (LAUNCH, ("--tensor-model-parallel-size", "2"), "1 engines of TP2, EP1"),
    ],
    ids=["one_process", "two_ranks"],
)
def test_speed_of_an_engine_is_measured(
    checkpoint_factory: Callable[..., Path],
    tmp_path: Path,
    before: tuple[str, ...],
    flags: tuple[str, ...],
    engine: str,
) -> None:
    target = tmp_path / "speed.json"
    done = run(checkpoint_factory("qwen3"), target, *flags, before=before)
    assert done.returncode == 0, done.stderr[-3000:]
    speed = read_engine_speed(target)
    assert speed.running == (1, 2, 4, 6)
    assert all(0 < seconds < 60 for seconds in speed.step_seconds) and speed.prefill_rate > 0
    about = json.loads(target.read_text())
    assert (about["engine"], about["prompt_tokens"]) == (engine, 16)


def test_ranks_of_their_own_are_refused(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    flags = ("--rl-rollout-ranks", "1")
    done = run(checkpoint_factory("qwen3"), tmp_path / "speed.json", *flags, before=LAUNCH)
    assert done.returncode == 2
    assert "--measure-engine starts engines on all ranks" in done.stderr
