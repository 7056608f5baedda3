"""Runs in the layout that the plan chooses, and their resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rl.observe.run_directory import read_config
from tests.e2e.recipe import metrics_of, run_job
from tests.rank_pool import ROOT, RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PRESETS = ROOT / "scripts" / "presets"


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_run_in_a_chosen_layout_resumes_in_it(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    checkpoint, run_dir = checkpoint_factory("qwen3_moe"), tmp_path / "run"
    flags = [
        *(
            "--rl-config",
            str(PRESETS / "tiny.yaml"),
            "--rl-config",
            str(PRESETS / "tiny-task.yaml"),
        ),
        *("--rl-hf-checkpoint", str(checkpoint), "--rl-layout", "auto"),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl"), "--rl-eval-interval", "0"),
        *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "2"),
        *("--rl-run-dir", str(run_dir), "--rl-rollout-kv-cache-gib", "0.0625"),
    ]
    run_job(ranks, [*flags, "--rl-num-steps", "1"], world_size=world_size).require(0)
    config = read_config(run_dir / "config.yaml")
    chosen = config.about["chosen"]
    assert "--expert-model-parallel-size" in chosen and "rl-layout" not in config.given
    load = ("--load", str(run_dir / "checkpoints"), "--rl-num-steps", "2")
    resumed = run_job(ranks, [*flags, *load], world_size=world_size)
    resumed.require(0)
    assert f"chosen by the plan, and kept if they are given: {chosen}" in resumed.said
    assert [metrics["step"] for metrics in metrics_of(run_dir)] == [0, 1]
