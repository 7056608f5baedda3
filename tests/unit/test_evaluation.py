"""Metrics of evaluations with several samples per prompt, against enumeration."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from mcore_rl.algorithms.evaluation import ks_of, majority_is_correct, pass_at_k, wilson_interval
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.job.preflight import check_ranges
from mcore_rl.rewards.functions import NAMED_ANSWERS, resolve_reward
from mcore_rl.rollout.evaluation import sample_metrics
from mcore_rl.rollout.segments import new_rollout
from tests.prompt_tables import one_source


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        outcomes = [1] * c + [0] * (n - c)
        subsets = [max(chosen) for chosen in itertools.combinations(outcomes, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_has_the_true_probability_as_its_mean():
    n, k, p = 6, 3, 0.3
    mean = sum(
        math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
    )
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["5", "5", "6"], [True, True, False], 1.0),
        (["5", "6", "6"], [True, False, False], 0.0),
        (["6", "5", "5", "6"], [False, True, True, False], 0.0),  # a tie: the first
        ([None, None, "5"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_the_majority_of_answers(answers, correct, expected):
    assert majority_is_correct(answers, correct) == expected


@pytest.mark.parametrize("n", [1, 5, 30, 200])
def test_wilson_interval_holds_the_means_that_a_score_test_does_not_reject(n):
    for c in range(n + 1):
        low, high = wilson_interval(c / n, n)
        assert 0 <= low <= c / n + 1e-12 and c / n - 1e-12 <= high <= 1
        for bound in (low, high):
            if bound * (1 - bound) < 1e-12:
                continue
            z = (c / n - bound) / math.sqrt(bound * (1 - bound) / n)
            assert abs(z) == pytest.approx(1.959964, abs=1e-6)


def test_named_answers_are_equal_where_the_reward_is():
    texts = ["5", " 5 ", "so 5.0", "#### 5\nok 7", "5 apples", "-5", "none", "1,005", "1005"]
    for name, answer_in in NAMED_ANSWERS.items():
        reward = resolve_reward(name)
        for text, answer in itertools.product(texts, ["5", "1005"]):
            value = reward(prompt="", response=text, answer=answer)
            is_equal = answer_in(text) == answer_in(answer)
            assert is_equal == (value == 1.0), (name, text, answer)


def samples(rewards: list[list[float | None]]) -> SampleTable:
    """Responses to each prompt; None: the generation failed."""
    prompts, scored, draws = one_source(len(rewards)), [], []
    for row, of_prompt in enumerate(rewards):
        for index, reward in enumerate(of_prompt):
            rollout = new_rollout(prompts[row], index, 0)
            if reward is None:
                rollout = dataclasses.replace(rollout, failure="the engine failed")
            scored.append(ScoredRollout(rollout, reward or 0.0))
            draws.append(row)
    return SampleTable.of(scored, draws=draws)


def test_metrics_are_means_over_prompts_with_intervals():
    table = samples([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    answers = ["5", "6", "6", "7", *"1112", *"abcd"]
    found = sample_metrics("eval/math", table, answers, several=True)
    means = {name: value for name, value in found.items() if not name.endswith(("_low", "_high"))}
    assert means == pytest.approx(
        {
            "eval/math/accuracy": 4 / 12,
            "eval/math/pass@1": 4 / 12,
            "eval/math/pass@2": (0.5 + 1 + 0) / 3,
            "eval/math/pass@4": 2 / 3,
            "eval/math/avg@4": 4 / 12,
            "eval/math/maj@4": 1 / 3,
        }
    )
    for name in means.keys() - {"eval/math/accuracy"}:
        assert (found[f"{name}_low"], found[f"{name}_high"]) == wilson_interval(means[name], 3)
    without = sample_metrics("eval", table, [], several=True)
    assert not any("maj" in name for name in without)  # the reward names no answer
    assert sample_metrics("eval", table, [], several=False) == {"eval/accuracy": 4 / 12}


def test_failed_generations_do_not_count():
    table = samples([[1.0, None], [None, None], [0.0, 1.0]])
    found = sample_metrics("eval", table, list("abcdef"), several=True)
    assert found["eval/accuracy"] == 2 / 3
    assert found["eval/pass@1"] == found["eval/avg@2"] == (1 + 0.5) / 2
    assert found["eval/pass@2"] == 1.0  # of the one prompt with two responses
    assert sample_metrics("eval", samples([[None, None]]), [], several=True) == {}


def test_ks_are_powers_of_two_and_the_number_of_samples():
    assert [ks_of(n) for n in (2, 5, 8)] == [[1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_several_greedy_samples_are_refused():
    with pytest.raises(UsageError, match="--rl-eval-samples 4 .*--rl-eval-temperature"):
        check_ranges(RLConfig.of(eval_samples=4))
    check_ranges(RLConfig.of(eval_samples=4, eval_temperature=0.6))
