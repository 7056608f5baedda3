"""Options of losses in whole runs: an LM head in float32, the engine's log-probs as old ones, and
what is masked, selected or adapted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.recipe import SMALL, metrics_of, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMON = (
    *SMALL,
    *("--expert-model-parallel-size", "1", "--rl-num-steps", "2", "--rl-num-mini-batches", "2"),
    *("--rl-num-prompts-per-step", "64"),
)
PLAIN = ("--rl-policy-loss", "kl_cov", "--rl-kl-cov-ratio", "0.1")
WITH_OPTIONS = (
    "--rl-fp32-lm-head",
    *("--rl-old-log-probs", "rollout", "--rl-off-policy-threshold", "1e-4"),
    *("--rl-mask-truncated", "--rl-missing-eos-penalty", "0.5", "--rl-reward-clip", "0.75"),
    *("--rl-entropy-target", "9", "--rl-entropy-step", "0.25"),
    *("--rl-kl-coef", "0.01", "--rl-kl-clamp", "10"),
    *("--rl-policy-loss", "clip_cov", "--rl-clip-cov-ratio", "0.5"),
    *("--rl-clip-cov-low", "0", "--rl-clip-cov-high", "99"),
    # No ratio is out of the clip range.
    *("--rl-clip-eps-lower", "1", "--rl-clip-eps-upper", "1000"),
)


def test_options_of_losses_work_together(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    found = {}
    for name, flags in (("plain", PLAIN), ("with", WITH_OPTIONS)):
        tokens = task_flags(warmed_checkpoint, tmp_path / name, *COMMON, *flags)
        run_job(ranks, tokens, world_size=1, timeout_seconds=280).require(0)
        found[name] = metrics_of(tmp_path / name)[:2]
    plain, options = found["plain"], found["with"]
    # Logits rounded to bfloat16 on one side alone would raise it. It falls to less than a half.
    key = "kl/rollout_actor"
    assert 0 < sum(step[key] for step in options) < 0.75 * sum(step[key] for step in plain)
    assert all("entropy_coef" not in step for step in plain)
    assert [step["entropy_coef"] for step in options] == [0.0, 0.25]
    assert all(0.1 < step["clip_fraction"] <= 0.5 for step in options)  # those of clip_cov
    assert all(step["clip_fraction"] == 0 for step in plain)
    assert all(step["mismatch/off_policy_share"] == 0 for step in plain)
    assert sum(step["mismatch/off_policy_share"] for step in options) > 0
