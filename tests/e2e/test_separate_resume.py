"""Runs whose engines sample ahead, killed, failing, and continued with other engines."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from mcore_rl.observe.run_directory import read_metrics
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.trainer_state import TRAINER, read_trainer_state
from tests.e2e import kill_runs
from tests.e2e.kill_runs import Setting
from tests.e2e.recipe import HOOKS, SMALL, Ended, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ONE_TRAINER = (*SMALL, "--expert-model-parallel-size", "1", "--rl-num-logged-rollouts", "1000")


def ahead(last_rank: int, staleness: int) -> tuple[str, ...]:
    ranks = "1" if last_rank == 1 else f"1-{last_rank}"
    return ("--rl-rollout-ranks", ranks, "--rl-max-staleness", str(staleness))


def outstanding(run_dir: Path, step: int) -> tuple[int, set[int]]:
    """The first draw never admitted, and the draws that a checkpoint has not trained on."""
    folder = run_dir / "checkpoints" / folders.iteration_name(step)
    state = json.loads((folder / "rollout" / "ahead.json").read_text())
    return state["next_draw"], set(map(int, state["outstanding"]))


def branch_of(run_dir: Path, step: int) -> str:
    folder = run_dir / "checkpoints" / folders.iteration_name(step)
    return read_trainer_state(folder / TRAINER).branch


def test_a_run_continues_with_other_engines_and_bounds_and_loses_no_draw(
    tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    checkpoint, run_dir = checkpoint_factory(), tmp_path / "run"

    def run(num_ranks: int, num_steps: int, *more: str) -> Ended:
        load = ("--load", str(run_dir / "checkpoints"), "--rl-load-or-start")
        # At the end alone, and all of them are kept.
        saves = ("--save-interval", "100")
        flags = (*ONE_TRAINER, "--rl-num-steps", str(num_steps), *saves, *load, *more)
        return run_job(ranks, task_flags(checkpoint, run_dir, *flags), world_size=num_ranks)

    partial = ("--rl-partial-rollouts", "--rl-oversample", "2", "--rl-deterministic")
    run(2, 2, *partial, "--rl-max-response-tokens", "20").require(0)
    pending = read_metrics(run_dir / "metrics.jsonl")[0]["rollout/pending_groups"]
    assert pending > 0
    for num_ranks, num_steps, staleness in ((2, 4, 1), (3, 6, 2), (2, 7, 1)):
        # A checkpoint waits for all engines.
        late = ("--rl-import", str(HOOKS / "writes_late.py"))
        ended = run(num_ranks, num_steps, *ahead(num_ranks - 1, staleness), *late)
        ended.require(0)
        metrics = read_metrics(run_dir / "metrics.jsonl")
        for step in range(num_steps - 2 if num_steps < 7 else 6, num_steps):
            assert metrics[step]["rollout/staleness_max"] <= staleness
    of_two = run_dir / "checkpoints" / folders.iteration_name(6) / "rollout"
    assert len(list(of_two.glob("group_*.bank"))) == 2
    assert folders.damage(run_dir / "checkpoints", 6) == []
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    counts = Counter(row["draw"] for row in rows)
    next_draw, left = outstanding(run_dir, 7)
    assert set(counts.values()) == {4} and len(counts) == 7 * 4 and left.isdisjoint(counts)
    # Groups that a larger bound has admitted may be too many for a smaller one: they start again.
    dropped = [metrics[step]["rollout/stale_groups"] for step in range(2, 7)]
    assert dropped == [0, 0, 0, 0, 0]
    assert next_draw == len(counts) + len(left)
    first, *others = (branch_of(run_dir, step) for step in (2, 4, 6, 7))
    assert first == "" and len({*others}) == 1  # each resumed from the newest
    known = json.loads((run_dir / "bank" / "branch.json").read_text())
    assert known == {"name": others[0], "step": 7}
    # Engines that do not sample ahead begin with the prompts of groups that did.
    for num_ranks, num_steps, more in ((1, 8, ()), (2, 9, ahead(1, 0))):
        ended = run(num_ranks, num_steps, *more)
        ended.require(0)
    said = f"{len(left)} groups of the checkpoint are too many or too old for --rl-max-staleness 0"
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    drawn = Counter(row["draw"] for row in rows)
    assert set(drawn.values()) == {4} and len(drawn) == 9 * 4
    later = sorted({*drawn} - {*counts})
    assert later == sorted({*left, *range(next_draw, next_draw + 8)})[: len(later)]
    assert said in (run_dir / "run.log").read_text()


def test_a_step_without_any_reward_is_repeated_with_its_draws(
    tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    checkpoint, run_dir, marker = checkpoint_factory(), tmp_path / "run", tmp_path / "fails"

    def run(num_steps: int, *more: str, **environment: str) -> Ended:
        reward = ("--rl-import", str(HOOKS / "fails_later.py"), "--rl-reward", "fails_later")
        flags = (*ONE_TRAINER, *reward, "--rl-reward-env", "MCORE_RL_TEST_REWARD_FAILS", *more)
        flags += ("--rl-num-steps", str(num_steps), *ahead(1, 1))
        environment["MCORE_RL_TEST_REWARD_FAILS"] = str(marker)
        tokens = task_flags(checkpoint, run_dir, *flags)
        return run_job(ranks, tokens, world_size=2, environment=environment)

    ended = run(9)
    assert ended.ranks[0].exit_code == 1
    assert "the judge is away; earlier steps are saved" in ended.said
    (step,) = folders.complete_steps(run_dir / "checkpoints")
    trained = {row["draw"] for row in rows_before(run_dir, step)}
    next_draw, left = outstanding(run_dir, step)
    assert trained | left == set(range(next_draw)) and trained.isdisjoint(left)
    marker.unlink()
    load = ("--load", str(run_dir / "checkpoints"))
    run(step + 2, *load, MCORE_RL_TEST_REWARD_STAYS="1").require(0)
    rows = rows_before(run_dir, step + 2)
    counts = Counter(row["draw"] for row in rows)
    assert set(counts.values()) == {4} and len(counts) == 4 * (step + 2)
    assert left <= counts.keys()
    assert not any(row["failure"] for row in rows if row["step"] >= step)
    metrics = read_metrics(run_dir / "metrics.jsonl")
    assert [metrics[step + n]["rollout/stale_groups"] for n in (0, 1)] == [0, 0]


def rows_before(run_dir: Path, num_steps: int) -> list[dict]:
    lines = (run_dir / "rollouts.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] < num_steps]


def test_killed_runs_train_every_draw_once(tmp_path: Path) -> None:
    """Some of the kills that `python -m tests.e2e.kill_runs` makes."""
    checkpoint = kill_runs.kill_test.make_checkpoint(tmp_path / "checkpoint", size="micro")
    setting = Setting(checkpoint, tmp_path, num_trainers=1, num_engines=1, num_steps=5)
    with Console(file=(tmp_path / "said").open("w"), width=140) as console:
        num_bad = kill_runs.run_kills(setting, 3, 1, console)
    assert num_bad == 0, (tmp_path / "said").read_text()


def test_an_engine_that_raises_while_the_actor_trains_ends_the_job_with_its_reason(
    tmp_path: Path,
) -> None:
    checkpoint = kill_runs.kill_test.make_checkpoint(tmp_path / "checkpoint", size="micro")
    setting = Setting(checkpoint, tmp_path, num_trainers=1, num_engines=2)
    more = ("--rl-import", str(HOOKS / "engine_raises.py"))
    ending = kill_runs.start(setting, tmp_path / "run", 1, more=more)
    assert ending.exit_code == 1, ending.output[-6000:]
    (fault,) = ending.faults
    assert fault.startswith("it ended with 1")  # and leaves nothing
    assert "RuntimeError: the engine's kernel found an illegal address" in ending.output
    assert "rank      : 2 " in ending.output  # torchrun's table
    assert "the engines failed" in ending.output and os.listdir(tmp_path / "run")
