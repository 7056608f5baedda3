"""Whole runs whose engines have ranks of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.observe.timeline import ENGINES, IDLE, SAMPLING, TRAINER, UPDATE, read_timeline
from tests.conftest import load_script
from tests.dist.test_value_model import reward_model
from tests.e2e.recipe import MEASURED, SMALL, metrics_of, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TP2 = ("--tensor-model-parallel-size", "2")
EVAL = ("--rl-eval-interval", "2", "--rl-num-eval-prompts", "8")
CALCULATOR = tuple(
    "--rl-environment calculator --rl-reward environment --rl-max-turns 4 "
    "--rl-max-response-tokens 24".split()
)
# name -> flags, ranks of the actor with the engines, and engines, ranks and flags of their own
SYNCHRONOUS: dict[str, tuple[tuple[str, ...], int, int, str]] = {
    # Two engines, in which the speed of none decides what is sampled.
    "remax, dynamic sampling, r3, oversampling": (
        tuple(
            "--rl-algorithm remax --rl-dynamic-sampling --rl-max-refills 2 --rl-routing-replay r3 "
            "--rl-oversample 2 --rl-deterministic --expert-model-parallel-size 2".split()
        ),
        2,
        4,
        "--rl-rollout-ranks 2-3",
    ),
    "ppo, environment, evaluation": (
        ("--rl-algorithm", "ppo", *TP2, *CALCULATOR, *EVAL),
        2,
        4,
        "--rl-rollout-ranks 2-3",
    ),
    "ppo, critic and reward model apart": (
        tuple(
            "--rl-algorithm ppo --rl-critic-ranks 1 --rl-critic-ep-size 1 --rl-reward-ranks 2 "
            "--rl-reward-ep-size 1 --expert-model-parallel-size 1 "
            "--rl-reward arithmetic,model --rl-reward-weights 1,0.01".split()
        ),
        3,
        4,
        "--rl-rollout-ranks 3",
    ),
}


@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_synchronous_engines_reproduce_a_colocated_run(
    case: str, warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    flags, num_together, num_apart, apart = SYNCHRONOUS[case]
    more = [*SMALL, *flags, "--rl-num-steps", "3", *task_of(case, warmed_checkpoint, tmp_path)]
    own = (*apart.split(), "--rl-max-staleness", "0")
    for name, num_ranks, extra in (("together", num_together, ()), ("apart", num_apart, own)):
        tokens = task_flags(warmed_checkpoint, tmp_path / name, *more, *extra)
        run_job(ranks, tokens, world_size=num_ranks).require(0)
    found, expected = (lasting(metrics_of(tmp_path / name)) for name in ("apart", "together"))
    assert found == expected and len(found) >= 3
    found, expected = (rollouts_of(tmp_path / name) for name in ("apart", "together"))
    assert found == expected
    _check_idle_times(tmp_path / "apart")


def _check_idle_times(run_dir: Path) -> None:
    """Both sides wait for each other, and the timeline has a row for each."""
    timeline = read_timeline(run_dir / "timeline.jsonl")
    for step, metrics in enumerate(metrics_of(run_dir)[:-1]):
        assert 0 < metrics["idle/trainers"] < 1 and 0 < metrics["idle/engines"] < 1
        whats = {
            line.role: {span.what for span in line.spans} for line in timeline if line.step == step
        }
        assert {IDLE, UPDATE, SAMPLING} <= whats[ENGINES]
        assert {IDLE, "train"} <= whats[TRAINER] and "rollout" not in whats[TRAINER]


def task_of(case: str, checkpoint: Path, folder: Path) -> tuple[str, ...]:
    """Flags with files."""
    if "environment" in case:
        return calculator_prompts(folder)
    if "reward model" in case:
        model = reward_model(checkpoint, folder / "reward", with_lm_head=False)
        return ("--rl-reward-model", str(model))
    return ()


def calculator_prompts(folder: Path) -> tuple[str, ...]:
    load_script("calculator_task").write_prompts(folder / "task", 0)
    return (
        *("--rl-prompts", str(folder / "task" / "train.jsonl")),
        *("--rl-eval-prompts", str(folder / "task" / "heldout.jsonl")),
    )


def lasting(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            name: value
            for name, value in step.items()
            if not name.startswith((*MEASURED, "reshard/", "offload/", "idle/"))
            and not name.endswith(("_seconds", "_peak_bytes"))
        }
        for step in metrics
    ]


def rollouts_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
