"""Runs with a group filter; other ways of sampling are in test_separate.py and test_resume.py."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.recipe import HOOKS, SMALL, metrics_of, run_job, task_flags
from tests.rank_pool import ROOT, RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OWN = ROOT / "examples" / "own_parts"
ALONE = (*SMALL, "--expert-model-parallel-size", "1")


def test_a_step_does_not_learn_from_groups_without_a_right_response(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The example of the documentation, with shaped rewards."""
    flags = [
        *("--rl-import", str(OWN / "filter.py"), str(OWN / "reward.py")),
        *("--rl-reward", "arithmetic,brevity", "--rl-reward-weights", "1,0.1"),
        *("--rl-group-filter", "solvable", "--rl-solved-by", "arithmetic"),
        *("--rl-max-refills", "1", "--rl-num-steps", "2", "--rl-num-logged-rollouts", "1000"),
    ]
    tokens = task_flags(warmed_checkpoint, tmp_path / "run", *ALONE, *flags)
    run_job(ranks, tokens, world_size=1).require(0)
    groups = defaultdict(list)
    for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups[row["draw"]].append(row)
    assert len(groups) == 2 * 4
    for rows in groups.values():
        is_solved = any(row["parts"]["arithmetic"] == 1 for row in rows)
        assert {row["filtered"] for row in rows} == {None if is_solved else "all_wrong"}
    steps = metrics_of(tmp_path / "run")
    assert sum(step["rollout/filtered/all_wrong"] for step in steps) > 0
    assert all(step["rollout/refills"] <= 1 for step in steps)


def test_a_step_whose_groups_are_all_dropped_learns_nothing(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    flags = [
        *("--rl-import", str(HOOKS / "picky_filter.py"), "--rl-group-filter", "later"),
        *("--rl-num-steps", "2", "--rl-kl-coef", "0.1", "--weight-decay", "0"),
    ]
    tokens = task_flags(warmed_checkpoint, tmp_path / "run", *ALONE, *flags)
    run_job(ranks, tokens, world_size=1).require(0)
    first, second = metrics_of(tmp_path / "run")
    assert [step["rollout/filtered/first"] for step in (first, second)] == [4, 0]
    assert first["grad_norm"] == 0 < second["grad_norm"]
    assert first["reward/failures"] == 0
    assert all(math.isfinite(value) for value in first.values())


def test_an_error_of_the_filter_ends_the_run_on_all_ranks(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from mcore_rl.api import group_filter\n"
        "@group_filter('mine', reasons=['short'])\n"
        "def mine(group, parameters):\n"
        "    return group[0].missing\n"
    )
    flags = ["--rl-import", str(tmp_path / "mine.py"), "--rl-group-filter", "mine"]
    flags += ["--rl-num-steps", "1"]
    tokens = task_flags(warmed_checkpoint, tmp_path / "run", *ALONE, *flags)
    ended = run_job(ranks, tokens, world_size=2)
    ended.require(1)
    assert "--rl-group-filter mine raised AttributeError" in ended.said
    assert f"in line 4 of {tmp_path / 'mine.py'}" in ended.said
