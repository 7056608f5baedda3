"""The tiny model of the main job learns by PPO and by other recipes, on one process each.

That a run learns is proven by tests/e2e/test_training.py in every run. Here four steps follow the
curves in tests/data/curves.json. `scripts/run_tests.sh --all` sets MCORE_RL_LONG_TESTS=1, with
which each recipe runs until it has learned: PPO 100 steps without discounting, in which the critic
comes to explain 0.3 of the variance of returns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import load_script
from tests.e2e.recipe import CURVE_TOLERANCES, LONG, follows_curve, metrics_of, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CURVE = 4  # steps
ONE_PROCESS = (
    *("--tensor-model-parallel-size", "1"),
    *("--pipeline-model-parallel-size", "1"),
    *("--expert-model-parallel-size", "1"),
)
# Without discounting all variance lies in which answer will be right, of which a policy that
# improves fast leaves little to be explained in its first steps; discounted returns also tell how
# far the end is.
RETURNS = "--rl-gamma 1 --rl-gae-lambda 1" if LONG else "--rl-gamma 0.9"
WARM_UP = 4 if LONG else 2
PPO = tuple(
    "--rl-algorithm ppo --rl-num-prompts-per-step 128 --rl-num-samples-per-prompt 1 "
    f"--rl-num-mini-batches 4 {RETURNS} --rl-critic-lr 5e-4 --rl-critic-warmup-steps {WARM_UP} "
    "--lr 5e-5".split()
)
RECIPES: dict[str, tuple[str, ...]] = {
    "dapo": ("--rl-max-refills", "3", "--rl-speculate", "ngram:2")
}
if LONG:
    RECIPES |= {"rloo": (), "gspo": (), "cispo": ()}


def run(
    checkpoint: Path, run_dir: Path, ranks: RankPool, num_steps: int, *flags: str
) -> list[dict[str, Any]]:
    """The metrics of each step, and of an evaluation before and after them if it is long."""
    steps = ("--rl-num-steps", str(num_steps), "--rl-eval-interval", str(num_steps if LONG else 0))
    tokens = task_flags(checkpoint, run_dir, *ONE_PROCESS, *steps, *flags)
    run_job(ranks, tokens, world_size=1, timeout_seconds=800).require(0)
    return metrics_of(run_dir)


def check_learning(
    name: str,
    metrics: list[dict[str, Any]],
    gain: float = 0.2,
    curve: Iterable[str] = tuple(CURVE_TOLERANCES),
) -> None:
    """Held-out accuracy has risen by `gain`, or the `curve` of four steps is the stored one."""
    if not LONG:
        return follows_curve(name, metrics[:CURVE], curve)
    first, last = (m["eval/accuracy"] for m in metrics if "eval/accuracy" in m)
    assert last - first > gain


def test_ppo_learns_and_its_critic_explains_returns(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    metrics = run(warmed_checkpoint, tmp_path / "run", ranks, 100 if LONG else CURVE, *PPO)
    check_learning("ppo", metrics)
    steps = [m for m in metrics if "reward/mean" in m]
    explained = [m["critic/explained_variance"] for m in steps]
    assert abs(explained[0]) < 1e-6  # a head of zeros
    if LONG:
        assert sum(explained[-20:]) / 20 > 0.3
    # Only the critic learns at first.
    assert all("loss/policy" not in m for m in steps[:WARM_UP])
    assert all("loss/policy" in m and "loss/value" in m for m in steps[WARM_UP:])
    assert max(m["kl/rollout_actor"] for m in steps) < 0.01


def telling_prompts(checkpoint: Path, file: Path) -> Path:
    """The task's prompts, of which every fourth tells its answer first, in the words of a response:
    otherwise nothing ever stands in a response of six tokens that stood before."""
    lines = (checkpoint / "prompts" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[::4]:
        ones = sum(int(number) % 10 for number in row["prompt"].split("+"))
        row["prompt"] = f"{ones:02d} {row['answer']} {row['prompt']}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_learns(
    recipe: str, warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("from mcore_rl.api import metric\nmetric('samples')(len)\n")
    flags = ("--rl-algorithm", recipe, *RECIPES[recipe], "--rl-import", str(mine))
    if recipe == "dapo":
        told = telling_prompts(warmed_checkpoint, tmp_path / "prompts.jsonl")
        flags += ("--rl-prompts", str(told))
    metrics = run(warmed_checkpoint, tmp_path / "run", ranks, 12 if LONG else CURVE, *flags)
    check_learning(recipe, metrics)
    steps = [m for m in metrics if "reward/mean" in m]
    assert all(m["user/samples"] > 0 for m in steps)  # a metric of one's own
    if recipe == "dapo":
        # Prompts were drawn again where all responses had the same reward.
        assert sum(m["rollout/refills"] for m in steps) > 0
        assert all(m["rollout/uninformative_share"] <= 0.5 for m in steps)
        # Drafts were made, some were right, and all tokens came with their experts.
        assert all(0 <= m["rollout/draft_acceptance"] < 1 for m in steps)
        assert sum(m["rollout/draft_acceptance"] > 0 for m in steps) >= len(steps) / 2
        assert all(m["moe/replayed_share"] == 1.0 for m in steps)
        assert max(m["kl/rollout_actor"] for m in steps) < 0.01


def test_a_task_of_two_turns_is_learned(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """What is asked for is in the calculator's memory, and no first turn can know it."""
    load_script("calculator_task").write_prompts(tmp_path / "task", 0)
    flags = (
        *("--rl-prompts", str(tmp_path / "task" / "train.jsonl")),
        *("--rl-eval-prompts", str(tmp_path / "task" / "heldout.jsonl")),
        *("--rl-environment", "calculator", "--rl-reward", "environment", "--rl-max-turns", "4"),
        *("--rl-max-response-tokens", "24"),
        *("--rl-num-prompts-per-step", "32", "--lr", "3e-4"),
    )
    metrics = run(warmed_checkpoint, tmp_path / "run", ranks, 16 if LONG else CURVE, *flags)
    # Not its lengths and entropies: over six seeds, and so over kernels that round otherwise, those
    # of its third step have standard deviations of 0.9 tokens and 0.04 nats.
    check_learning("two turns", metrics, curve=("reward/mean",))
    steps = [m for m in metrics if "reward/mean" in m]
    rewards = [m["reward/mean"] for m in steps]
    assert min(rewards[1:]) > rewards[0] + 0.04, rewards  # at least 0.086 with those seeds
    assert not any(m["reward/failures"] or m["rollout/failures"] for m in steps)
    rollouts = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    turns = [json.loads(line)["response"].count("\n") + 1 for line in rollouts]
    assert max(turns) > 1


def test_partial_rollouts_of_no_age_are_a_run_without_them(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """With K = 0 and as many groups as a step takes, every response ends in its step: the metrics
    are the same bit for bit, but for clocks and memory. Scores are centered by the engine's most
    probable tokens."""
    few = ("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "4")
    few += ("--rl-policy-loss", "policy_gradient", "--rl-score-centering", "16")
    no_age = ("--rl-partial-rollouts", "--rl-max-staleness", "0", "--rl-oversample", "1")
    plain, partial = (
        run(warmed_checkpoint, tmp_path / name, ranks, 3, "--rl-deterministic", *few, *more)
        for name, more in (("plain", ()), ("partial", no_age))
    )
    assert len(plain) == len(partial) == 3 + LONG
    for step in plain[:3]:
        masses = step["centering/engine_mass"], step["centering/actor_mass"]
        # One model with kernels of two kinds.
        assert 0.5 < masses[0] <= 1.0001 and abs(masses[0] - masses[1]) < 0.01
        assert 0 < step["centering/coefficients_l1"] < 0.05
    for expected, found in zip(plain, partial, strict=True):
        of_clocks = ("time/", "throughput/", "memory/", "reshard/peak_extra_bytes")
        assert {name: value for name, value in found.items() if not name.startswith(of_clocks)} == {
            name: value for name, value in expected.items() if not name.startswith(of_clocks)
        }


def test_adapters_of_rank_8_learn_what_all_weights_learn(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    accuracies = {}
    ways = {"lora": ("--rl-lora-rank", "8", "--lr", "1e-3")} | ({"all": ()} if LONG else {})
    for name, flags in ways.items():
        metrics = run(warmed_checkpoint, tmp_path / name, ranks, 30 if LONG else CURVE, *flags)
        check_learning(name, metrics, gain=0.3)
        steps = [m for m in metrics if "reward/mean" in m]
        assert max(m["kl/rollout_actor"] for m in steps) < 0.01
        accuracies[name] = metrics[-1].get("eval/accuracy")
    if LONG:
        assert accuracies["lora"] >= accuracies["all"] - 0.05
