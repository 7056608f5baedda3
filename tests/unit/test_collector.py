"""The prompts that a step draws, the samples that it keeps, and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Baseline, Prompt, Rollout, ScoredRollout, with_baselines
from mcore_rl.config import RLConfig
from mcore_rl.data.prompts import PromptSources, prompt_indices
from mcore_rl.data.sources import SourceSpec
from mcore_rl.hybrid_engine.vllm.generation import Request, Sampling
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.collector import Collected, Collector
from mcore_rl.rollout.comparison import Selection
from mcore_rl.rollout.curriculum import Curriculum
from mcore_rl.rollout.dispatch import Dispatcher, LocalCounters, SamplingTarget, StepCounts
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.segments import new_rollout
from mcore_rl.trainer.step_metrics import rollout_metrics
from tests.held import HeldHere
from tests.prompt_tables import dataset, one_source

SEED = 7
NUM_PROMPTS = 20
GREEDY_REWARD = 0.25
Rewards = Callable[[int], Sequence[float | None]]


@dataclass
class ScriptedWorkers:
    """Replaces `RolloutWorkers`: two rewards for each row, which its responses get in turn.

    Each response contains its own number, so that a sample that is counted twice is noticed.
    """

    rewards: Rewards  # by row; None: the reward fails
    calls: list[dict[str, Any]] = field(default_factory=list)
    greedy_fails: Callable[[int], bool] = lambda row: False
    num_responses: int = 0
    scored: list[ScoredRollout] = field(default_factory=list)
    seconds_waited: float = 0.0
    compares: bool = True
    orders: list[tuple[int, ...]] = field(default_factory=list)
    num_undone: int = 0
    parts: Sequence[Mapping[str, float]] = ()  # of all prompts' responses in turn

    def sample(
        self,
        plan: GroupPlan,
        target: SamplingTarget,
        prompt_of: Callable[[int], Prompt],
        *,
        key: str,
        select: Callable[[Sequence[ScoredRollout]], Selection] | None = None,
        order_of: Callable[[int], tuple[int, ...]],
        when_few_are_left: Any = None,
    ) -> tuple[list[list[ScoredRollout]], Dispatcher]:
        assert key not in [call["key"] for call in self.calls]
        places = Counter(plan.sizes)
        dispatcher, groups = Dispatcher(target, LocalCounters(), key, places=places), []
        self.orders.append(order_of(target.num_started))
        while (draw := dispatcher.next_draw()) is not None:
            prompt = prompt_of(plan.first_draw + draw)
            num_samples = plan.size_of(prompt) - plan.with_greedy
            both = [
                self._scored(self._rollout(prompt, number, number >= num_samples), prompt.index)
                for number in range(plan.size_of(prompt))
            ]
            groups.append(with_baselines(both, [num_samples])[:num_samples])
            if select is not None:
                is_valid = any(sample.is_valid for sample in groups[-1])
                is_kept = select(groups[-1]).is_kept
                dispatcher.record_group(size=num_samples, differs=is_kept, is_valid=is_valid)
        assert dispatcher.is_exhausted
        self.calls.append(
            {
                "rows": [group[0].rollout.prompt.index for group in groups],
                "plan": plan,
                "key": key,
                "when_few_are_left": when_few_are_left,
            }
        )
        return groups, dispatcher

    def example(self) -> None:
        return None

    def settle(
        self,
        groups: tuple[list[list[ScoredRollout]], Dispatcher],
        waited: Callable[[float], object],
        *,
        select: Any,
    ) -> tuple[SampleTable, StepCounts]:
        waited(self.seconds_waited)
        found, dispatcher = groups
        first = len(self.scored)
        self.scored += [sample for group in found for sample in group]
        draws = [
            self.calls[-1]["plan"].first_draw + draw
            for draw, group in enumerate(found)
            for _ in group
        ]
        numbers = range(first, len(self.scored))
        table = SampleTable.of(self.scored[first:], numbers=numbers, draws=draws)
        plan = self.calls[-1]["plan"]
        counts = StepCounts(
            num_draws=len(found),
            started=len(found),
            refills=dispatcher.num_refills,
            generated_tokens=len(found) * plan.size,
        )
        return table, counts

    def undo(self) -> None:
        self.num_undone += 1

    def samples_of(self, collected: Collected) -> list[ScoredRollout]:
        """Return the samples of the table."""
        return [self.scored[number] for number in collected.table.numbers]

    def draft_metrics(self) -> dict[str, float]:
        return {}

    def _rollout(self, prompt: Prompt, number: int, is_greedy: bool) -> Rollout:
        self.num_responses += 1
        return Rollout(
            prompt=prompt,
            sample_index=number,
            text="greedy" if is_greedy else "sampled",
            response_token_ids=np.array([self.num_responses], np.int32),
            rollout_log_probs=np.zeros(1, np.float32),
            finish_reason="stop",
            weight_version=0,
        )

    def _scored(self, rollout: Rollout, row: int) -> ScoredRollout:
        if rollout.text == "greedy":
            failure = "timed out" if self.greedy_fails(row) else None
            return ScoredRollout(rollout, GREEDY_REWARD + row, failure)
        reward = self.rewards(row)[rollout.sample_index % 2]
        if reward is None:
            return ScoredRollout(rollout, 0.0, "timed out")
        parts = self.parts[rollout.sample_index % 2] if self.parts else {}
        return ScoredRollout(rollout, float(reward), parts=parts)


def prompts() -> PromptSources:
    return one_source(NUM_PROMPTS)


def make_collector(
    rewards: Rewards,
    *,
    position: int = 0,
    num_prompts: int = 4,
    sources: PromptSources | None = None,
    **flags: Any,
) -> tuple[Collector, ScriptedWorkers]:
    workers = ScriptedWorkers(rewards)
    given = {"algorithm": "grpo", "num_samples_per_prompt": 2, **flags}
    config = RLConfig.of(num_prompts_per_step=num_prompts, **given)
    collector = Collector(
        workers,  # type: ignore[arg-type]
        sources or prompts(),
        config.recipe,
        config.rollout,
        RewardSpec(("a", "b", "noted"), (1.0, 1.0, 0.0), None, 1.0),
        num_prompts_per_step=num_prompts,
        seed=SEED,
        timers=StageTimers(),
        position=position,
        sample_store=HeldHere(),  # type: ignore[arg-type]
    )
    return collector, workers


def dynamic(rewards: Rewards, **flags: Any) -> tuple[Collector, ScriptedWorkers]:
    return make_collector(rewards, dynamic_sampling=True, **flags)


def drawn_rows(start: int, count: int) -> list[int]:
    """Return the rows in the order in which the sampler draws them."""
    return prompt_indices(NUM_PROMPTS, start=start, count=count, seed=SEED).tolist()


def differ(row: int) -> tuple[float, float]:
    return (0.0, 1.0)


def equal(row: int) -> tuple[float, float]:
    return (1.0, 1.0)


def informative_at(*places: int) -> Rewards:
    """Return rewards that differ only in the draws at these places, counted from 0."""
    rows = {drawn_rows(0, NUM_PROMPTS)[place] for place in places}
    return lambda row: differ(row) if row in rows else equal(row)


def rows_of(collected: Collected) -> list[int]:
    """Check the samples and return the prompt of each group."""
    groups = collected.table.prompts.reshape(-1, 2).tolist()
    assert all(first == second for first, second in groups)
    return [first for first, _ in groups]


def assert_samples_are_distinct(collected: Collected) -> None:
    numbers = collected.table.numbers.tolist()
    assert len(set(numbers)) == len(numbers)


def seeds_of(plan: GroupPlan) -> list[int | None]:
    """Return the seeds of all responses to a step's draws."""
    draws = (plan.draw(count) for count in range(NUM_PROMPTS))
    return [request.seed for draw in draws for request in requests(plan, draw)]


def requests(plan: GroupPlan, draw: int) -> list[Request]:
    return [plan.request(draw, new_rollout(prompts()[0], index, 0)) for index in range(plan.size)]


def no_prefetch() -> None:
    return None


# Without dynamic sampling ------------------------------------------------------------------------


def test_idle_time_counts_as_rollout() -> None:
    collector, workers = make_collector(differ)
    workers.seconds_waited = 50.0
    collector.collect(0, no_prefetch)
    seconds = collector._timers.finish_step()
    assert 50 <= seconds["time/rollout_seconds"] < 50 + seconds["time/step_seconds"]
    assert -50 <= seconds["time/reward_seconds"] < -50 + seconds["time/step_seconds"]


def test_collect_draws_in_order_and_continues_there():
    collector, workers = make_collector(equal, position=3)
    first, second = (collector.collect(1, no_prefetch) for _ in range(2))
    assert rows_of(first) == drawn_rows(3, 4) and rows_of(second) == drawn_rows(7, 4)
    assert collector.position == 11
    assert [call["rows"] for call in workers.calls] == [drawn_rows(3, 4), drawn_rows(7, 4)]
    assert first.metrics == {}  # rewards are not compared


def test_seeds_of_draws_are_distinct_and_reproducible():
    """Seeds of one prompt differ between epochs, so that its responses differ."""
    collector, workers = make_collector(equal, num_prompts=NUM_PROMPTS)
    for _ in range(2):
        collector.collect(1, no_prefetch)
    collector.undo()
    collector.collect(1, no_prefetch)
    resumed, others = make_collector(equal, num_prompts=NUM_PROMPTS, position=NUM_PROMPTS)
    resumed.collect(1, no_prefetch)
    first, second, again = (seeds_of(call["plan"]) for call in workers.calls)
    assert len({*first, *second}) == 2 * NUM_PROMPTS * 2
    assert again == second == seeds_of(others.calls[0]["plan"])


def test_collect_continues_into_the_next_epoch():
    collector, _ = make_collector(equal, position=NUM_PROMPTS - 1)
    collected = collector.collect(1, no_prefetch)
    assert rows_of(collected) == [*drawn_rows(NUM_PROMPTS - 1, 1), *drawn_rows(NUM_PROMPTS, 3)]


def test_collect_passes_the_sampling_options():
    collector, workers = make_collector(
        equal,
        num_samples_per_prompt=3,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        mismatch_correction="token_tis",
    )
    collected = collector.collect(12, no_prefetch)
    (call,) = workers.calls
    assert len(collected.table) == 12
    assert call["plan"].sampling == Sampling(0.7, 0.9, 5)
    assert (call["plan"].size, call["plan"].weight_version) == (3, 12)
    assert call["when_few_are_left"] is no_prefetch


@pytest.mark.parametrize("top_k", [None, 0])
def test_collect_samples_from_all_tokens_by_default(top_k: int | None):
    collector, workers = make_collector(equal, top_k=top_k)
    collector.collect(1, no_prefetch)
    assert workers.calls[0]["plan"].sampling == Sampling(1.0, 1.0, -1)


# Greedy baselines --------------------------------------------------------------------------------


def test_collect_requests_one_greedy_response_per_prompt():
    collector, workers = make_collector(differ, algorithm="remax")
    collected = collector.collect(5, no_prefetch)
    (call,) = workers.calls
    assert (call["plan"].num_samples, call["plan"].size) == (2, 3)
    asked = requests(call["plan"], 1)
    assert [r.sampling.temperature for r in asked] == [1.0, 1.0, 0.0]
    assert [r.sampling.temperature == 0 for r in asked] == [False, False, True]
    # Only sampled responses are trained on, each with the baseline of its prompt.
    assert [s.rollout.text for s in workers.samples_of(collected)] == ["sampled"] * 8
    expected = [Baseline(GREEDY_REWARD + row, 1) for row in drawn_rows(0, 4) for _ in range(2)]
    assert [s.baseline for s in workers.samples_of(collected)] == expected
    assert collected.metrics == {"reward/baseline_failures": 0.0}


def test_samples_are_invalid_when_the_greedy_response_has_no_reward():
    collector, workers = make_collector(differ, algorithm="remax")
    failing = drawn_rows(0, 4)[1]
    workers.greedy_fails = lambda row: row == failing
    collected = collector.collect(5, no_prefetch)
    assert collected.table.valid.tolist() == [True] * 2 + [False] * 2 + [True] * 4
    assert collected.metrics == {"reward/baseline_failures": 1.0}
    found = rollout_metrics(collected.table)  # the rewards of the samples are valid
    assert (found["reward/mean"], found["reward/failures"]) == (0.5, 0.0)


def test_collect_has_no_baselines_when_the_estimator_needs_none():
    collector, workers = make_collector(differ)
    collected = collector.collect(5, no_prefetch)
    assert len(workers.calls) == 1
    assert np.isnan(collected.table.baselines).all()


# Dynamic sampling --------------------------------------------------------------------------------


def metrics(refills: float, share: float, dropped: int) -> dict[str, float]:
    return {
        "rollout/refills": refills,
        "rollout/uninformative_share": share,
        "rollout/dropped_samples": dropped,
    }


@pytest.mark.parametrize("compares", [True, False])  # during sampling, or after each round
@pytest.mark.parametrize("differing", [2, 99])  # number of the draw of a that differs; 99: none
def test_dynamic_sampling_fills_the_places_of_each_group_size(
    differing: int, compares: bool
) -> None:
    specs = {"a": (Fraction(1, 4), 4), "b": (Fraction(3, 4), None)}
    of_two = PromptSources(
        [
            (SourceSpec(name, f"{name}.jsonl", share, samples_per_prompt=own), dataset(20, name))
            for name, (share, own) in specs.items()
        ],
        per_step=4,
    )
    drawn = [of_two.of_draw(draw, seed=SEED) for draw in range(16)]
    of_a = [prompt for prompt in drawn if prompt.source == "a"]
    of_b = [prompt for prompt in drawn if prompt.source == "b"]

    def rewards(row: int) -> Sequence[float]:
        informative = [*of_a[differing : differing + 1], *of_b]
        return differ(row) if row in [prompt.index for prompt in informative] else equal(row)

    collector, workers = dynamic(rewards, sources=of_two, max_refills=3)
    workers.compares = compares
    collected = collector.collect(1, no_prefetch)
    rows, sizes = np.unique(collected.table.prompts, return_counts=True)
    taken = of_a[differing] if differing == 2 else of_a[0]
    assert dict(zip(rows.tolist(), sizes.tolist(), strict=True)) == {
        taken.index: 4,
        **{prompt.index: 2 for prompt in of_b[:3]},
    }
    num_draws = drawn.index(taken) + 1 if differing == 2 else 16
    assert collector.position == num_draws
    num_of_a = sum(prompt.source == "a" for prompt in drawn[:num_draws])
    dropped = 4 * (num_of_a - 1) + 2 * (num_draws - num_of_a - 3)
    assert collected.metrics == metrics((num_draws - 4) / 4, 0.25 * (differing == 99), dropped)
    assert_samples_are_distinct(collected)


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize(
    ("advantage", "parts", "is_informative"),
    [
        ("grpo", [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], False),
        ("gdpo", [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], True),
        ("gdpo", [{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}], False),
        ("gdpo", [{"a": 1.0, "noted": 0.0}, {"a": 1.0, "noted": 1.0}], False),
        ("gdpo", [], False),
    ],
)
def test_dynamic_sampling_compares_each_reward_that_the_estimator_reads(
    advantage: str, parts: Sequence[Mapping[str, float]], is_informative: bool, compares: bool
) -> None:
    collector, workers = dynamic(equal, advantage=advantage, max_refills=1)
    workers.parts, workers.compares = parts, compares
    collected = collector.collect(1, no_prefetch)
    assert collected.metrics == (metrics(0, 0.0, 0) if is_informative else metrics(1, 1.0, 8))


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize(("clip", "is_informative"), [(1.0, False), (2.5, True), (None, True)])
def test_dynamic_sampling_compares_clipped_rewards(
    clip: float | None, is_informative: bool, compares: bool
) -> None:
    collector, workers = dynamic(lambda row: (2.0, 3.0), max_refills=1, reward_clip=clip)
    workers.compares = compares
    collected = collector.collect(1, no_prefetch)
    assert collected.metrics == (metrics(0, 0.0, 0) if is_informative else metrics(1, 1.0, 8))


@pytest.mark.parametrize(
    ("rewards", "advantage", "settled"),
    [
        ((0.1, 0.9), "grpo", 0.0),
        ((1.0, 2.0), "grpo", 0.0),
        ((1.0, 2.0), "gdpo", 1.0),  # reads the parts, of which there are none
        ((1.0, 1.0), "grpo", 1.0),
    ],
)
def test_a_curriculum_keeps_prompts_that_teach(
    rewards: tuple[float, float], advantage: str, settled: float
) -> None:
    collector, _ = make_collector(lambda row: rewards, num_prompts=20, advantage=advantage)
    collector._curriculum = Curriculum(prompts(), "drop", seed=SEED, position=0)
    collected = collector.collect(1, no_prefetch)
    assert collected.metrics["curriculum/settled_share"] == settled


def test_dynamic_sampling_draws_once_when_all_groups_differ():
    collector, workers = dynamic(differ)
    collected = collector.collect(1, no_prefetch)
    assert rows_of(collected) == drawn_rows(0, 4)
    assert len(workers.calls) == 1 and collector.position == 4
    assert collected.metrics == metrics(0, 0.0, 0)


@pytest.mark.parametrize("max_refills", [0, 1, 3])
def test_dynamic_sampling_stops_at_max_refills(max_refills: int):
    collector, workers = dynamic(equal, max_refills=max_refills)
    collected = collector.collect(1, no_prefetch)
    (call,) = workers.calls
    assert call["rows"] == drawn_rows(0, 4 * (max_refills + 1))
    assert rows_of(collected) == drawn_rows(0, 4)
    assert collector.position == 4 * (max_refills + 1)
    assert collected.metrics == metrics(max_refills, 1.0, 8 * max_refills)
    assert_samples_are_distinct(collected)


def test_dynamic_sampling_draws_the_missing_groups():
    # Two of draws 0-3 differ, none of 4-5, both of 6-7.
    collector, workers = dynamic(informative_at(1, 3, 6, 7))
    collected = collector.collect(1, no_prefetch)
    order = drawn_rows(0, 8)
    assert [call["rows"] for call in workers.calls] == [order]
    assert rows_of(collected) == [order[1], order[3], order[6], order[7]]
    assert collector.position == 8
    assert collected.metrics == metrics(1.0, 0.0, 8)
    assert_samples_are_distinct(collected)


def test_groups_are_compared_in_rounds_with_a_reward_model():
    collector, workers = dynamic(informative_at(1, 3, 6, 7))
    workers.compares = False
    collected = collector.collect(1, no_prefetch)
    order = drawn_rows(0, 8)
    assert [call["rows"] for call in workers.calls] == [order[:4], order[4:6], order[6:]]
    assert [call["when_few_are_left"] for call in workers.calls] == [None] * 3
    assert rows_of(collected) == [order[1], order[3], order[6], order[7]]
    assert collected.metrics == metrics(1.0, 0.0, 8)


def test_dynamic_sampling_fills_the_remaining_places():
    collector, workers = dynamic(informative_at(2, 5, 8, 9), max_refills=1)
    collected = collector.collect(1, no_prefetch)
    order = drawn_rows(0, 8)
    assert len(workers.calls) == 1 and collector.position == 8
    assert rows_of(collected) == [order[2], order[5], order[0], order[1]]
    # Four of eight groups are kept.
    assert collected.metrics == metrics(1.0, 0.5, 8)
    assert_samples_are_distinct(collected)


def test_dynamic_sampling_stops_when_the_step_is_complete():
    collector, workers = dynamic(informative_at(0, 1, 2, 4), max_refills=1)
    collected = collector.collect(1, no_prefetch)
    order = drawn_rows(0, 5)
    assert rows_of(collected) == [order[0], order[1], order[2], order[4]]
    assert collected.metrics == metrics(0.25, 0.0, 2)


def test_dynamic_sampling_continues_after_its_draws():
    collector, _ = dynamic(informative_at(1, 3, 4, 5, 6, 7, 8, 9))
    first, second = (collector.collect(1, no_prefetch) for _ in range(2))
    order = drawn_rows(0, 10)
    assert rows_of(first) == [order[place] for place in (1, 3, 4, 5)]
    assert rows_of(second) == order[6:]
    assert collector.position == 10


def test_dynamic_sampling_may_repeat_a_prompt_in_the_next_epoch():
    """Two groups of one prompt stay separate and have different responses."""
    collector, _ = dynamic(informative_at(0), num_prompts=2, max_refills=2 * NUM_PROMPTS)
    collected = collector.collect(1, no_prefetch)
    row = drawn_rows(0, 1)[0]
    assert rows_of(collected) == [row, row]
    assert_samples_are_distinct(collected)


def test_dynamic_sampling_scores_greedy_responses_of_refills():
    collector, workers = dynamic(informative_at(1, 3, 4, 5), algorithm="remax")
    collected = collector.collect(1, no_prefetch)
    assert [call["rows"] for call in workers.calls] == [drawn_rows(0, 6)]
    for sample in workers.samples_of(collected):
        assert sample.baseline is not None
        assert sample.baseline.reward == GREEDY_REWARD + sample.rollout.prompt.index


def test_sample_without_reward_is_not_compared():
    # A reward of 0 would differ from the other response's 1.
    rows = drawn_rows(0, 4)
    collector, _ = dynamic(lambda row: (None, 1.0) if row in rows[:2] else differ(row))
    collected = collector.collect(1, no_prefetch)
    assert rows_of(collected) == [*rows[2:], *drawn_rows(4, 2)]
    assert collected.metrics == metrics(refills=0.5, share=0.0, dropped=4)


def test_no_refills_when_every_reward_fails():
    collector, workers = dynamic(lambda row: (None, None))
    collected = collector.collect(1, no_prefetch)
    assert len(workers.calls) == 1 and len(collected.table) == 8
    assert not collected.table.valid.any()


def test_undone_step_repeats_its_draws():
    collector, workers = dynamic(informative_at(1, 3, 6, 7), position=0)
    collector.collect(1, no_prefetch)
    before = collector.position
    first = rows_of(collector.collect(2, no_prefetch))
    collector.undo()
    assert collector.position == before and workers.num_undone == 1
    assert rows_of(collector.collect(2, no_prefetch)) == first


def test_prompts_with_long_responses_come_first():
    collector, workers = make_collector(equal)
    collector.collect(1, no_prefetch)
    assert (
        workers.orders == [()] and (collector.lengths > 0).sum() == 4
    )  # the lengths of four rows are known
    first, second, third, fourth = prompt_indices(NUM_PROMPTS, start=4, count=4, seed=SEED)
    collector.lengths[[first, third, fourth]] = 5, 40, 3  # the second draw counts as the mean
    collector.collect(2, no_prefetch)
    assert workers.orders[1] == (2, 1, 0, 3)
    collector.undo()
    assert collector.lengths[[first, second, third, fourth]].tolist() == [5, -1, 40, 3]


def test_reward_metrics_ignore_failed_rewards():
    collector, _ = make_collector(lambda row: (None, 3.0))
    found = rollout_metrics(collector.collect(1, no_prefetch).table)
    assert (found["reward/mean"], found["reward/std"], found["reward/failures"]) == (3.0, 0.0, 4.0)


def test_generated_tokens_include_dropped_samples():
    """Each response has one token. Without dropped samples, refills would look slow."""
    drawn_again = informative_at(0, 3), {"algorithm": "remax", "dynamic_sampling": True}
    for rewards, options in ((equal, {}), drawn_again):
        collector, workers = make_collector(rewards, **options)
        for _ in range(2):
            before = workers.num_responses
            collected = collector.collect(1, no_prefetch)
            assert collected.num_generated_tokens == workers.num_responses - before
            assert collected.num_generated_tokens >= len(collected.table) == 8


def test_dynamic_sampling_compares_rewards_without_length_penalty():
    """An overlong penalty would make equal outcomes differ; it comes later (`learner`)."""
    collector, _ = dynamic(equal, overlong_buffer_tokens=4, max_response_tokens=4, max_refills=0)
    assert collector.collect(1, no_prefetch).metrics["rollout/uninformative_share"] == 1.0
