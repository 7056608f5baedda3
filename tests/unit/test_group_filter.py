"""Group filters: what they are asked about, and what a step does with their answers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mcore_rl.algorithms.registry import Drop, find_group_filter, group_filter
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters
from mcore_rl.config import RLConfig, config_from
from mcore_rl.data.prompts import PromptSources
from mcore_rl.flags.parsed_flags import given_values, import_given_files
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.comparison import GroupComparison, Selection
from mcore_rl.rollout.curriculum import Curriculum
from tests.prompt_tables import one_source
from tests.rank_pool import ROOT

pytestmark = pytest.mark.usefixtures("restored_tables")

OWN = str(ROOT / "examples" / "own_parts" / "filter.py")
SHAPED = RewardSpec(("gsm8k", "brevity"), (1.0, 0.1), None, 1.0)
REFILL = Drop("all_wrong", refill=True)


def config_of(*tokens: str) -> RLConfig:
    import_given_files(tokens)
    return config_from(given_values(tokens, add_rl_args(argparse.ArgumentParser())))


def group(*rewards: tuple[float, float] | None, index: int = 3) -> list[ScoredRollout]:
    """Samples with these rewards for being right and for being brief; None: it failed."""
    prompt = Prompt(index, "1+1=", "2", np.array([5], np.int32))
    found = []
    for number, both in enumerate(rewards):
        ids = np.arange(1 + number, dtype=np.int32)
        rollout = Rollout(prompt, number, "", ids, np.zeros(1 + number, np.float32), "stop", 1)
        if both is None:
            found.append(ScoredRollout(rollout, 0.0, "timed out"))
            continue
        parts = {"gsm8k": both[0], "brevity": both[1]}
        found.append(ScoredRollout(rollout, both[0] + 0.1 * both[1], parts=parts))
    return found


WRONG, MIXED = group((0, 0.2), (0, 0.9)), group((0, 0.2), (1, 0.1))
FAILED = group(None, None)


def test_groups_without_a_right_response_are_left_out_although_shaped_rewards_differ():
    """The example of the documentation, beside dynamic sampling alone."""
    dynamic = GroupComparison(config_of("--rl-dynamic-sampling").recipe, SHAPED)
    assert dynamic.select(WRONG) == Selection(True)  # learns to be brief
    own = "--rl-import", OWN, "--rl-group-filter", "solvable"
    for more in ((), ("--rl-dynamic-sampling",)):
        recipe = config_of(*own, *more).recipe
        assert recipe.replaces_groups and recipe.group_filter_parameters.solved_by == "gsm8k"
        comparison = GroupComparison(recipe, SHAPED)
        assert comparison.select(WRONG) == Selection(False, REFILL)
        assert comparison.select(MIXED) == Selection(True)
        # Without a reward there is nothing to ask about, and dynamic sampling replaces the group.
        assert comparison.select(FAILED) == Selection(not more)
    by_brevity = config_of(*own, "--rl-solved-by", "brevity").recipe
    assert GroupComparison(by_brevity, SHAPED).select(MIXED) == Selection(False, REFILL)


def test_dropped_samples_are_counted_by_group_and_not_valid():
    recipe = config_of("--rl-import", OWN, "--rl-group-filter", "solvable").recipe
    comparison = GroupComparison(recipe, SHAPED)
    wrong = [replace(sample, dropped=REFILL) for sample in WRONG]
    table = SampleTable.joined(
        [SampleTable.of(each, draws=[n] * 2) for n, each in enumerate((wrong, MIXED, wrong))]
    )
    assert table.valid.tolist() == [False] * 2 + [True] * 2 + [False] * 2
    assert table.has_reward.all() and set(table.why_not_valid) == {
        None,
        "--rl-group-filter: all_wrong",
    }
    assert comparison.filtered([table]) == {"rollout/filtered/all_wrong": 2.0}
    first, second = table.take([0, 1]), table.take([2, 3])
    assert not comparison.is_kept(first) and comparison.is_kept(second)
    kept = [replace(sample, dropped=Drop("all_wrong")) for sample in WRONG]
    assert comparison.is_kept(SampleTable.of(kept))
    assert comparison.filtered([second]) == {"rollout/filtered/all_wrong": 0.0}


def test_a_curriculum_knows_the_accuracy_of_dropped_groups():
    prompts: PromptSources = one_source(4)
    curriculum = Curriculum(prompts, "drop", seed=1, position=0)
    index = prompts[curriculum.position_of(0)].index
    wrong = [replace(sample, dropped=REFILL) for sample in group((0, 0), (0, 0), index=index)]
    curriculum.settle(1, SampleTable.of(wrong, draws=[0, 0]), np.empty(0, np.int64))
    assert curriculum.metrics()["curriculum/settled_share"] == 0.25


def rejects(samples: Sequence[ScoredRollout], parameters: Parameters) -> None:
    raise KeyError(samples[0].rollout.text or "no text")


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (rejects, "raised KeyError: 'no text', in line "),
        (lambda samples, parameters: Drop("a_wrong_reason"), "returned Drop(reason='a_wrong"),
        (lambda samples, parameters: True, "returned True"),
    ],
)
def test_errors_of_a_filter_name_it_and_the_row(function, named):
    group_filter("mine", reasons=["all_wrong", "short"])(function)
    with pytest.raises(UsageError) as refused:
        find_group_filter("mine").decision(WRONG, Parameters())
    said = str(refused.value)
    assert said.startswith(f"--rl-group-filter mine {named}") and "row 3" in said
    if function is rejects:
        assert __file__ in said
    else:
        assert said.endswith("return None, or Drop with one of its reasons: all_wrong, short")


@pytest.mark.parametrize(
    "reasons", [[], "short", ["short"] * 2, ["a b"], [f"r{n}" for n in range(17)]]
)
def test_reasons_are_distinct_names_and_few(reasons):
    with pytest.raises(ValueError, match="reasons of group filter 'mine'"):
        group_filter("mine", reasons=reasons)
