"""The tiny job on other releases than the installed ones: two steps, their second again from a
checkpoint, and `mcore_rl.verify`; and what must come of them on every release."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.recipe import exported_weights, task_flags
from tests.rank_pool import RankPool

SMALL = (
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-num-steps", "2", "--save-interval", "1", "--rl-eval-interval", "0"),
    *("--rl-attest", "full"),
    # So that there is a gradient where all responses to each prompt are worth the same.
    *("--rl-entropy-coef", "0.01"),
)


@dataclass(frozen=True)
class TinyJob:
    """What a run of two steps left behind, one that resumes after its first, and a verification."""

    first: Path
    resumed: Path
    verified: dict[str, Any]

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """The metrics of the first run, by step."""
        return _steps_of(self.first)

    @property
    def versions(self) -> dict[str, str]:
        """Versions by package, as the summary has them."""
        return json.loads((self.first / "summary.json").read_text())["versions"]


def run_tiny_job(pool: RankPool, checkpoint: Path, folder: Path, *more: str) -> TinyJob:
    first, resumed, verified = (folder / name for name in ("first", "resumed", "verified.json"))
    for run_dir, load in (
        (first, ()),
        (resumed, ("--load", str(first / "checkpoints"), "--ckpt-step", "1")),
    ):
        flags = task_flags(checkpoint, run_dir, *SMALL, *more, *load)
        flags += ["--rl-export-hf", str(run_dir / "exported")]
        pool.run("tests.e2e.jobs:train", world_size=4, tokens=flags)
    flags = task_flags(checkpoint, folder / "unused", *more, "--rl-verify-out", str(verified))
    assert pool.run("tests.e2e.jobs:verify", world_size=4, tokens=flags) == [0] * 4
    return TinyJob(first, resumed, json.loads(verified.read_text()))


def assert_proven(job: TinyJob) -> None:
    """Every hand-over is attested and moves what it must, and the two models agree."""
    for step, metrics in job.steps.items():
        assert metrics["reshard/weight_version"] == step + 1
        assert metrics["reshard/received_bytes_max"] == metrics["reshard/lower_bound_bytes_max"] > 0
        assert metrics["kl/rollout_actor"] < 0.01 and metrics["grad_norm"] > 0


def assert_stored_as_loaded(job: TinyJob) -> None:
    """What vLLM stores after a hand-over is what its own loader stores."""
    assert job.verified["stored_equal"] is True and job.verified["differing"] == []
    assert job.verified["mean_abs_difference"] < 0.05  # bfloat16


def assert_resumed(job: TinyJob) -> None:
    """The resumed run repeats the first bit for bit."""
    first, resumed = job.steps, _steps_of(job.resumed)
    (last,) = resumed
    same = ("reward/mean", "loss/policy", "grad_norm", "entropy", "kl/rollout_actor")
    assert {name: first[last][name] for name in same} == {n: resumed[last][n] for n in same}
    assert exported_weights(job.first) == exported_weights(job.resumed) != {}


def _steps_of(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {metrics["step"]: metrics for metrics in map(json.loads, lines)}
