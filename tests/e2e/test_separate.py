"""Whole runs whose engines have ranks of their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.observe.timeline import ENGINES, IDLE, SAMPLING, TRAINER, UPDATE, read_timeline
from tests.conftest import load_script
from tests.dist.test_value_model import reward_model
from tests.e2e.recipe import (
    HOOKS,
    SMALL,
    Ended,
    assert_pass_at_k_of_each_set,
    exported_weights,
    metrics_of,
    run_job,
    seeded_metrics,
    task_flags,
    write_sources,
)
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TP2 = ("--tensor-model-parallel-size", "2")
EVAL = ("--rl-eval-interval", "2", "--rl-num-eval-prompts", "8")
# With the files of `write_sources`.
SETS = (
    "--rl-prompts {sources}/train.yaml --rl-eval-prompts {sources}/eval.yaml "
    "--rl-eval-interval 2 --rl-num-eval-prompts 8 --rl-eval-samples 4 --rl-eval-temperature 0.7"
)
TAUGHT = "--rl-sft-demonstrations {sources}/taught.jsonl --rl-sft-coef 0.1 --rl-sft-rows-per-step 4"
CALCULATOR = tuple(
    "--rl-environment calculator --rl-reward environment --rl-max-turns 4 "
    "--rl-max-response-tokens 24".split()
)
# name -> flags, ranks of the actor with the engines, and engines, ranks and flags of their own
SYNCHRONOUS: dict[str, tuple[tuple[str, ...], int, int, str]] = {
    # Two engines, in which the speed of none decides what is sampled.
    "remax, dynamic sampling, r3, oversampling, sources, demonstrations, killed and resumed": (
        tuple(
            "--rl-algorithm remax --rl-dynamic-sampling --rl-max-refills 2 --rl-routing-replay r3 "
            "--rl-oversample 2 --rl-deterministic --expert-model-parallel-size 2 "
            f"--rl-curriculum drop {SETS} {TAUGHT}".split()
        ),
        2,
        4,
        "--rl-rollout-ranks 2-3",
    ),
    "ppo, environment, evaluation": (
        # Deterministic: the time of a tool would decide which turns share a forward pass.
        ("--rl-algorithm", "ppo", "--rl-deterministic", *TP2, *CALCULATOR, *EVAL),
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
    sources = write_sources(warmed_checkpoint, tmp_path)
    flags = tuple(flag.format(sources=sources) for flag in flags)
    more = [*SMALL, *flags, "--rl-num-steps", "3", *task_of(case, warmed_checkpoint, tmp_path)]

    def run(name: str, num_ranks: int, *extra: str, **environment: str) -> Ended:
        tokens = task_flags(warmed_checkpoint, tmp_path / name, *more, *extra)
        tokens += ["--rl-export-hf", str(tmp_path / name / "exported")]
        return run_job(ranks, tokens, world_size=num_ranks, environment=environment)

    run("together", num_together).require(0)
    own = [*apart.split(), "--rl-max-staleness", "0"]
    if "killed" in case:
        own += ["--save-interval", "1"]
        hook = ("--rl-import", str(HOOKS / "end_at_step.py"))
        ended = run("apart", num_apart, *own, *hook, MCORE_RL_TEST_END_AT_STEP="1")
        # The engines end by themselves once the trainers are gone.
        assert [rank.exit_code for rank in ended.ranks] == [-9, -9, 1, 1], ended.said[-3000:]
        own += ["--load", str(tmp_path / "apart" / "checkpoints")]
    run("apart", num_apart, *own).require(0)
    found, expected = (lasting(seeded_metrics(tmp_path / name)) for name in ("apart", "together"))
    assert found == expected and found.keys() >= {0, 1, 2}
    assert exported_weights(tmp_path / "apart") == exported_weights(tmp_path / "together") != {}
    if "sources" in case:
        assert_pass_at_k_of_each_set(found[0])
        assert_pass_at_k_of_each_set(found[2])
        assert found[2]["curriculum/settled_share"] > 0
        names = ("easy", "hard")
        assert all(sum(found[s][f"source/{n}/prompts"] for n in names) == 4 for s in range(3))
        assert all(found[step]["loss/sft"] > 0 for step in range(3))
        assert all(found[step]["moe/replayed_share"] == 1.0 for step in range(3))
    rows, expected_rows = (rollouts_of(tmp_path / name) for name in ("apart", "together"))
    assert rows[-8:] == expected_rows[-8:]  # of the last step
    _check_idle_times(tmp_path / "apart")


def _check_idle_times(run_dir: Path) -> None:
    """Both sides wait for each other, and the timeline has a row for each."""
    timeline = read_timeline(run_dir / "timeline.jsonl")
    for metrics in metrics_of(run_dir)[:-1]:
        if "idle/trainers" not in metrics:
            continue  # an evaluation after the last step
        step = metrics["step"]
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


def lasting(metrics: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """All but those of the way that weights take, and of idle ranks."""
    return {
        step: {
            n: v for n, v in found.items() if not n.startswith(("reshard/", "offload/", "idle/"))
        }
        for step, found in metrics.items()
    }


def rollouts_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


# name -> flags, ranks, the largest staleness
AHEAD: dict[str, tuple[str, int, int]] = {
    "remax, dynamic sampling, r3, two engines, sources": (
        "--rl-algorithm remax --rl-dynamic-sampling --rl-max-refills 2 --rl-routing-replay r3 "
        "--rl-stale-rollouts drop "
        f"--rl-import {HOOKS}/picky_filter.py --rl-group-filter picky "
        f"--expert-model-parallel-size 2 --rl-rollout-ranks 2-3 {SETS}",
        4,
        3,
    ),
    "environment with a slow tool": (
        "--tensor-model-parallel-size 2 --rl-rollout-ranks 2-3 --rl-max-turns 3 "
        "--rl-max-response-tokens 24 --rl-max-turn-tokens 4 --rl-reward environment "
        "--rl-eval-interval 2 --rl-num-eval-prompts 8",
        4,
        1,
    ),
    "critic, reward model apart, stop strings": (
        "--rl-algorithm ppo --rl-critic-ep-size 1 --rl-reward-ranks 2 --rl-reward-ep-size 1 "
        "--expert-model-parallel-size 1 --rl-reward arithmetic,model --rl-reward-weights 1,0.01 "
        "--rl-rollout-ranks 1 --rl-stop 7 --rl-routing-replay off",
        3,
        2,
    ),
}


@pytest.mark.parametrize("case", AHEAD)
def test_engines_that_sample_ahead_train_every_draw_once_and_in_time(
    case: str, warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    flags, num_ranks, most = AHEAD[case]
    flags = flags.format(sources=write_sources(warmed_checkpoint, tmp_path))
    more = [*SMALL, *flags.split(), *ahead_files(case, warmed_checkpoint, tmp_path)]
    more += ["--rl-max-staleness", str(most), "--rl-num-logged-rollouts", "1000"]
    more += ["--load", str(tmp_path / "run" / "checkpoints"), "--rl-load-or-start"]
    # Conversations end with the run, and their responses start again in the next.
    for num_steps in (3, 5) if "environment" in case else (5,):
        flags_now = (*more, "--rl-num-steps", str(num_steps))
        tokens = task_flags(warmed_checkpoint, tmp_path / "run", *flags_now)
        run_job(ranks, tokens, world_size=num_ranks).require(0)
    metrics = [step for step in metrics_of(tmp_path / "run") if "reward/mean" in step]
    assert [step["step"] for step in metrics] == list(range(5))
    for step in metrics:
        assert 0 <= step["rollout/staleness_max"] <= most
        assert step["rollout/failures"] == step["reward/failures"] == 0
        assert step.get("moe/replayed_share", 1.0) == 1.0
        assert ("rollout/length_bias_tokens" in step) == ("--rl-stale-rollouts drop" in flags)
    rows = rollouts_of(tmp_path / "run")
    for row in rows:  # a resumed run has one version without a step
        assert 0 <= row["step"] + 1 - row["oldest_weight_version"] <= most or row["step"] >= 3
    assert max(row["step"] + 1 - row["oldest_weight_version"] for row in rows) > 0
    draws = Counter(row["draw"] for row in rows)
    assert set(draws.values()) == {4} and len(draws) == 5 * 4
    end = json.loads(
        (tmp_path / "run" / "checkpoints" / "iter_0000005" / "rollout" / "ahead.json").read_text()
    )
    dropped = sum(step["rollout/uninformative_groups"] for step in metrics)
    left = end["next_draw"] - len({*draws, *map(int, end["outstanding"])})
    assert left >= dropped and (left > 0) == ("dynamic" in case)
    if "dynamic" in case:
        replaced, left_out = (
            sum(step[f"rollout/filtered/{reason}"] for step in metrics)
            for reason in ("odd", "third")
        )
        assert replaced <= dropped + sum(row["filtered"] == "odd" for row in rows) / 4
        assert left_out == sum(row["filtered"] == "third" for row in rows) / 4
        assert replaced + left_out > 0  # the few groups that differ may all be of one kind
    if "sources" in case:
        for step in (0, 2, 4, 5):
            assert_pass_at_k_of_each_set(seeded_metrics(tmp_path / "run")[step])
    if "stop" in case:
        assert all(row["response"].count("7") <= row["response"].endswith("7") for row in rows)
    if "slow" in case:
        turns = [turn for row in rows for turn in row["response"].split("\n")]
        assert len(turns) > 4 * len(draws)


SLOW_TOOL = '''
import time
from mcore_rl.api.environment import Environment, StepResult

class Slow(Environment):
    """Answers two turns after a while with a number."""

    def start(self, prompt):
        self.turns = 0

    def step(self, response):
        time.sleep(0.2)
        self.turns += 1
        return StepResult("12", 1.0, self.turns == 3)
'''


def ahead_files(case: str, checkpoint: Path, folder: Path) -> tuple[str, ...]:
    if "slow" not in case:
        return task_of(case, checkpoint, folder)
    (folder / "slow.py").write_text(SLOW_TOOL)
    return ("--rl-environment", f"{folder / 'slow.py'}:Slow")
