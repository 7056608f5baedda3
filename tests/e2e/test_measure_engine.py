"""`mcore-rl plan --measure-engine` with the real vLLM, and what reads its file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.tools.plan.recorded import read_engine_speed
from tests.e2e.recipe import run_job
from tests.rank_pool import ROOT, RankPool

LAUNCHED = ("-m", "mcore_rl.launch", "--nproc-per-node", "2", "-m", "mcore_rl.cli")


def command_line(checkpoint: Path, target: Path, *flags: str) -> list[str]:
    return [
        *("plan", "--measure-engine", str(target), "--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl"), "--rl-reward", "exact"),
        *("--rl-max-prompt-tokens", "32", "--rl-max-response-tokens", "32"),
        *("--micro-batch-size", "1", "--rl-rollout-max-num-seqs", "6"),
        *("--rl-rollout-kv-cache-gib", "0.1", *flags),
    ]


@pytest.mark.parametrize("tp_size", [1, 2], ids=["one_process", "launched"])
def test_speed_of_an_engine_is_measured(
    tp_size: int,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    warm_python: Path,
    tmp_path: Path,
) -> None:
    target = tmp_path / "speed.json"
    size = ("--tensor-model-parallel-size", str(tp_size))
    tokens = command_line(checkpoint_factory("qwen3"), target, *size)
    if tp_size == 1:
        run_job(ranks, tokens, world_size=1, job="command").require(0)
    else:
        command = [warm_python, *LAUNCHED, *tokens]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    speed = read_engine_speed(target)
    assert speed.running == (1, 2, 4, 6)
    assert all(0 < seconds < 60 for seconds in speed.step_seconds) and speed.prefill_rate > 0
    about = json.loads(target.read_text())
    assert about["engine"] == f"1 engines of TP{tp_size}, EP1" and about["prompt_tokens"] == 16


def test_ranks_of_their_own_are_refused(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    apart = ("--rl-rollout-ranks", "1")
    tokens = command_line(checkpoint_factory("qwen3"), tmp_path / "speed.json", *apart)
    ended = run_job(ranks, tokens, job="command")
    ended.require(2)
    assert "--measure-engine starts engines on all ranks" in ended.said
