"""The prompts that a step draws, the samples that it keeps, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Baseline, Rollout, ScoredRollout
from mcore_rl.config import RLConfig
from mcore_rl.data.prompts import PromptSources, prompt_indices
from mcore_rl.data.sources import SourceSpec
from mcore_rl.hybrid_engine.vllm.generation import Sampling
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.parts import weighed
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.curriculum import Curriculum
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Collected, Sampler
from mcore_rl.trainer.step_metrics import rollout_metrics
from tests.prompt_tables import dataset, one_source
from tests.unit.scripted_sampling import ScriptedEngine, one_rank

SEED = 7
NUM_PROMPTS = 20
GREEDY_REWARD = 0.25
Rewards = Callable[[int], Sequence[float | None]]


@pytest.fixture(autouse=True, scope="module")
def world() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, one_rank():
        patch.setattr(dist, "get_rank", lambda: 0)
        patch.setattr(dist, "get_world_size", lambda: 1)
        yield


class RowRewards:
    """Replaces a `RewardStack`: two rewards for each row, which its responses get in turn; None:
    the reward fails. `parts` are those of all prompts' responses in turn."""

    names: tuple[str, ...] = ("scripted",)

    def __init__(self, rewards: Rewards, parts: Sequence[Mapping[str, float]] = ()) -> None:
        self._rewards, self._parts = rewards, parts
        self.greedy_fails: Callable[[int], bool] = lambda row: False
        self.num_samples = 2
        self._open: list[tuple[int, Rollout]] = []
        self._num_begun = 0

    def sources(self) -> dict[str, str]:
        return {}

    find_sources = sources

    def begin(self, rollout: Rollout) -> int:
        self._num_begun += 1
        self._open.append((self._num_begun, rollout))
        return self._num_begun

    def finished(self) -> list[tuple[int, dict[str, Outcome]]]:
        ended, self._open = self._open, []
        return [(n, {name: self.outcome(each) for name in self.names}) for n, each in ended]

    def wait(self) -> None:
        """Nothing takes time."""

    def outcome(self, rollout: Rollout) -> Outcome:
        row, index = rollout.prompt.index, rollout.sample_index
        if index >= (rollout.prompt.num_samples or self.num_samples):
            failed = self.greedy_fails(row)
            return Outcome(GREEDY_REWARD + row, "timed out" if failed else None)
        reward = self._rewards(row)[index % 2]
        return Outcome(0.0, "timed out") if reward is None else Outcome(float(reward))

    def weigh(self, rollouts: Sequence[Rollout], outcomes: Any) -> list[ScoredRollout]:
        (name,) = outcomes
        scored = weighed(rollouts, outcomes, {name: 1.0})
        return [
            ScoredRollout(
                each.rollout,
                each.reward,
                each.failure,
                parts=self._parts[each.rollout.sample_index % 2] if self._parts else {},
            )
            for each in scored
        ]


class ModelRewards(RowRewards):
    """The same of a reward model, which scores the samples of a round."""

    names = ()

    def score(self, sample_store: SampleStore, table: SampleTable) -> list[Outcome]:
        samples = sample_store.first(len(sample_store.first(1 << 20)))
        return [self.outcome(samples[number].rollout) for number in table.numbers.tolist()]


def prompts() -> PromptSources:
    return one_source(NUM_PROMPTS)


class Run:
    """A run's sampler on an engine whose responses have one token."""

    def __init__(
        self,
        rewards: Rewards,
        *,
        position: int = 0,
        num_prompts: int = 4,
        sources: PromptSources | None = None,
        parts: Sequence[Mapping[str, float]] = (),
        compares: bool = True,
        curriculum: str | None = None,
        folder: Path | None = None,
        **flags: Any,
    ) -> None:
        """`compares`: during sampling, else after each round."""
        given = {"algorithm": "grpo", "num_samples_per_prompt": 2, **flags}
        config = RLConfig.of(num_prompts_per_step=num_prompts, **given)
        self.engine = ScriptedEngine(lambda number: 1)
        self.engine.config.max_num_seqs = 1000
        self.rewards = (RowRewards if compares else ModelRewards)(rewards, parts)
        self.rewards.num_samples = config.recipe.num_samples_per_prompt
        model = self.rewards.score if isinstance(self.rewards, ModelRewards) else None
        names = ("a", "b", "noted") if compares else (REWARD_MODEL, "a", "b", "noted")
        weights = (1.0, 1.0, 0.0) if compares else (1.0, 1.0, 1.0, 0.0)
        self.store = SampleStore(TrainLayout(1), RolloutLayout(1, 1, expert_parallel=False), [[[]]])
        workers = RolloutWorkers(
            self.engine,  # type: ignore[arg-type]
            RolloutLayout(1, 1, expert_parallel=False),
            config.rollout,
            RewardSpec((), (), None, 1.0),
            self.store,
            model,
        )
        workers.rewards = self.rewards  # type: ignore[assignment]
        workers._reward_names = [] if model else ["scripted"]
        self.timers = StageTimers()
        drawn = sources or prompts()
        self.sampler = Sampler(
            workers,
            drawn,
            config.recipe,
            config.rollout,
            RewardSpec(names, weights, None, 1.0),
            num_prompts_per_step=num_prompts,
            seed=SEED,
            timers=self.timers,
            position=position,
            curriculum=None
            if curriculum is None
            else Curriculum(drawn, curriculum, seed=SEED, position=position),
            folder=folder,
        )

    def collect(self, version: int = 1, when_few_are_left: Any = None) -> Collected:
        self.engine.submitted.clear()
        return self.sampler.collect(version, when_few_are_left)

    @property
    def begun(self) -> list[int]:
        """The rows of the last step, in the order in which they began."""
        size = self.sampler._plan().size
        draws = dict.fromkeys(each.number // size for each in self.engine.submitted)
        return [self.sampler._prompt_of(draw).index for draw in draws]

    def samples(self, collected: Collected) -> list[ScoredRollout]:
        """Return the samples of the table."""
        stored = self.store.first(1 << 20)
        return [stored[number] for number in collected.table.numbers]


def dynamic(rewards: Rewards, **flags: Any) -> Run:
    return Run(rewards, dynamic_sampling=True, **flags)


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


def seeds(run: Run) -> list[int | None]:
    """Return the seeds of the last step's responses."""
    return [request.seed for request in run.engine.submitted]


# Without dynamic sampling ------------------------------------------------------------------------


def test_waits_for_rewards_count_as_reward() -> None:
    run = Run(differ)
    run.sampler._groups.scheduler.take_wait_seconds = lambda: 50.0  # type: ignore[method-assign]
    run.collect()
    seconds = run.timers.finish_step()
    assert -50 <= seconds["time/rollout_seconds"] < -50 + seconds["time/step_seconds"]
    assert 50 <= seconds["time/reward_seconds"] < 50 + seconds["time/step_seconds"]


def test_collect_draws_in_order_and_continues_there():
    run = Run(equal, position=3)
    first = run.collect()
    assert run.begun == rows_of(first) == drawn_rows(3, 4)
    second = run.collect(2)
    assert run.begun == rows_of(second) == drawn_rows(7, 4)
    assert run.sampler.position == 11
    assert first.metrics == {}  # rewards are not compared


def test_seeds_of_draws_are_distinct_and_reproducible():
    """Seeds of one prompt differ between epochs, so that its responses differ."""
    run = Run(equal, num_prompts=NUM_PROMPTS)
    run.collect()
    first = seeds(run)
    run.collect(2)
    second = seeds(run)
    resumed = Run(equal, num_prompts=NUM_PROMPTS, position=NUM_PROMPTS)
    resumed.collect()
    assert len({*first, *second}) == 2 * NUM_PROMPTS * 2
    assert {*seeds(resumed)} == {*second}


def test_collect_continues_into_the_next_epoch():
    collected = Run(equal, position=NUM_PROMPTS - 1).collect()
    assert rows_of(collected) == [*drawn_rows(NUM_PROMPTS - 1, 1), *drawn_rows(NUM_PROMPTS, 3)]


def test_collect_passes_the_sampling_options():
    run = Run(
        equal,
        num_samples_per_prompt=3,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        mismatch_correction="token_tis",
    )
    called = list[str]()
    collected = run.collect(12, lambda: called.append("when few are left"))
    assert len(collected.table) == 12 == len(run.engine.submitted)
    assert {each.sampling for each in run.engine.submitted} == {Sampling(0.7, 0.9, 5)}
    assert {each.rollout.weight_version for each in run.samples(collected)} == {12}
    assert called == ["when few are left"]


@pytest.mark.parametrize("top_k", [None, 0])
def test_collect_samples_from_all_tokens_by_default(top_k: int | None):
    run = Run(equal, top_k=top_k)
    run.collect()
    assert run.engine.submitted[0].sampling == Sampling(1.0, 1.0, -1)


# Greedy baselines --------------------------------------------------------------------------------


def test_collect_requests_one_greedy_response_per_prompt():
    run = Run(differ, algorithm="remax")
    collected = run.collect(5)
    asked = sorted(run.engine.submitted, key=lambda each: each.number)
    assert [r.sampling.temperature for r in asked] == [1.0, 1.0, 0.0] * 4
    # Only sampled responses are trained on, each with the baseline of its prompt.
    samples = run.samples(collected)
    assert [each.rollout.sample_index for each in samples] == [0, 1] * 4
    expected = [Baseline(GREEDY_REWARD + row, 1) for row in drawn_rows(0, 4) for _ in range(2)]
    assert [each.baseline for each in samples] == expected
    assert collected.metrics == {"reward/baseline_failures": 0.0}


def test_samples_are_invalid_when_the_greedy_response_has_no_reward():
    run = Run(differ, algorithm="remax")
    failing = drawn_rows(0, 4)[1]
    run.rewards.greedy_fails = lambda row: row == failing
    collected = run.collect(5)
    assert collected.table.valid.tolist() == [True] * 2 + [False] * 2 + [True] * 4
    assert collected.metrics == {"reward/baseline_failures": 1.0}
    found = rollout_metrics(collected.table)  # the rewards of the samples are valid
    assert (found["reward/mean"], found["reward/failures"]) == (0.5, 0.0)


def test_collect_has_no_baselines_when_the_estimator_needs_none():
    run = Run(differ)
    collected = run.collect()
    assert len(run.engine.submitted) == 8
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

    run = dynamic(rewards, sources=of_two, max_refills=3, compares=compares)
    collected = run.collect()
    rows, sizes = np.unique(collected.table.prompts, return_counts=True)
    taken = of_a[differing] if differing == 2 else of_a[0]
    assert dict(zip(rows.tolist(), sizes.tolist(), strict=True)) == {
        taken.index: 4,
        **{prompt.index: 2 for prompt in of_b[:3]},
    }
    num_draws = drawn.index(taken) + 1 if differing == 2 else 16
    assert run.sampler.position == num_draws
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
    run = dynamic(equal, advantage=advantage, max_refills=1, parts=parts, compares=compares)
    expected = metrics(0, 0.0, 0) if is_informative else metrics(1, 1.0, 8)
    assert run.collect().metrics == expected


@pytest.mark.parametrize("compares", [True, False])
@pytest.mark.parametrize(("clip", "is_informative"), [(1.0, False), (2.5, True), (None, True)])
def test_dynamic_sampling_compares_clipped_rewards(
    clip: float | None, is_informative: bool, compares: bool
) -> None:
    run = dynamic(lambda row: (2.0, 3.0), max_refills=1, reward_clip=clip, compares=compares)
    expected = metrics(0, 0.0, 0) if is_informative else metrics(1, 1.0, 8)
    assert run.collect().metrics == expected


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
    run = Run(lambda row: rewards, num_prompts=20, advantage=advantage, curriculum="drop")
    assert run.collect().metrics["curriculum/settled_share"] == settled


def test_a_curriculum_knows_the_groups_that_were_replaced() -> None:
    run = dynamic(informative_at(1, 3, 6, 7), curriculum="drop")
    run.collect()
    assert run.sampler._curriculum is not None
    accuracy = run.sampler._curriculum.state.accuracy[drawn_rows(0, 8)]
    assert accuracy.tolist() == [1.0, 0.5, 1.0, 0.5, 1.0, 1.0, 0.5, 0.5]
    assert run.sampler._curriculum.metrics()["curriculum/settled_share"] == 4 / NUM_PROMPTS


def test_dynamic_sampling_draws_once_when_all_groups_differ():
    run = dynamic(differ)
    collected = run.collect()
    assert run.begun == rows_of(collected) == drawn_rows(0, 4)
    assert run.sampler.position == 4
    assert collected.metrics == metrics(0, 0.0, 0)


@pytest.mark.parametrize("max_refills", [0, 1, 3])
def test_dynamic_sampling_stops_at_max_refills(max_refills: int):
    run = dynamic(equal, max_refills=max_refills)
    collected = run.collect()
    assert run.begun == drawn_rows(0, 4 * (max_refills + 1))
    assert rows_of(collected) == drawn_rows(0, 4)
    assert run.sampler.position == 4 * (max_refills + 1)
    assert collected.metrics == metrics(max_refills, 1.0, 8 * max_refills)
    assert_samples_are_distinct(collected)


def test_dynamic_sampling_draws_the_missing_groups():
    # Two of draws 0-3 differ, none of 4-5, both of 6-7.
    run = dynamic(informative_at(1, 3, 6, 7))
    collected = run.collect()
    order = drawn_rows(0, 8)
    assert run.begun == order
    assert rows_of(collected) == [order[1], order[3], order[6], order[7]]
    assert run.sampler.position == 8
    assert collected.metrics == metrics(1.0, 0.0, 8)
    assert_samples_are_distinct(collected)


def test_groups_are_compared_in_rounds_with_a_reward_model():
    run = dynamic(informative_at(1, 3, 6, 7), compares=False)
    collected = run.collect(1, lambda: pytest.fail("another round may follow"))
    order = drawn_rows(0, 8)
    assert run.begun == order
    # A round: the groups that the step lacks.
    assert [sorted({n // 2 for n in batch}) for batch in run.engine.batches] == [
        [0, 1, 2, 3],
        [4, 5],
        [6, 7],
    ]
    assert rows_of(collected) == [order[1], order[3], order[6], order[7]]
    assert collected.metrics == metrics(1.0, 0.0, 8)


def test_dynamic_sampling_fills_the_remaining_places():
    run = dynamic(informative_at(2, 5, 8, 9), max_refills=1)
    collected = run.collect()
    order = drawn_rows(0, 8)
    assert run.sampler.position == 8
    assert rows_of(collected) == [order[2], order[5], order[0], order[1]]
    # Four of eight groups are kept.
    assert collected.metrics == metrics(1.0, 0.5, 8)
    assert_samples_are_distinct(collected)


def test_dynamic_sampling_stops_when_the_step_is_complete():
    collected = dynamic(informative_at(0, 1, 2, 4), max_refills=1).collect()
    order = drawn_rows(0, 5)
    assert rows_of(collected) == [order[0], order[1], order[2], order[4]]
    assert collected.metrics == metrics(0.25, 0.0, 2)


def test_dynamic_sampling_continues_after_its_draws():
    run = dynamic(informative_at(1, 3, 4, 5, 6, 7, 8, 9))
    first, second = rows_of(run.collect()), rows_of(run.collect(2))
    order = drawn_rows(0, 10)
    assert first == [order[place] for place in (1, 3, 4, 5)]
    assert second == order[6:]
    assert run.sampler.position == 10


def test_dynamic_sampling_may_repeat_a_prompt_in_the_next_epoch():
    """Two groups of one prompt stay separate and have different responses."""
    run = dynamic(informative_at(0), num_prompts=2, max_refills=2 * NUM_PROMPTS)
    collected = run.collect()
    row = drawn_rows(0, 1)[0]
    assert rows_of(collected) == [row, row]
    assert_samples_are_distinct(collected)


def test_dynamic_sampling_scores_greedy_responses_of_refills():
    run = dynamic(informative_at(1, 3, 4, 5), algorithm="remax")
    collected = run.collect()
    assert run.begun == drawn_rows(0, 6)
    for sample in run.samples(collected):
        assert sample.baseline is not None
        assert sample.baseline.reward == GREEDY_REWARD + sample.rollout.prompt.index


def test_sample_without_reward_is_not_compared():
    # A reward of 0 would differ from the other response's 1.
    rows = drawn_rows(0, 4)
    run = dynamic(lambda row: (None, 1.0) if row in rows[:2] else differ(row))
    collected = run.collect()
    assert rows_of(collected) == [*rows[2:], *drawn_rows(4, 2)]
    assert collected.metrics == metrics(refills=0.5, share=0.0, dropped=4)


@pytest.mark.parametrize("compares", [True, False])
def test_no_refills_when_every_reward_fails(compares: bool):
    run = dynamic(lambda row: (None, None), compares=compares)
    collected = run.collect()
    assert run.begun == drawn_rows(0, 4) and len(collected.table) == 8
    assert not collected.table.valid.any()


# Between steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize("curriculum", [None, "drop"])
def test_a_step_that_is_undone_is_repeated_by_the_run_that_resumes(
    curriculum: str | None, tmp_path: Path
):
    rewards = informative_at(1, 3, 6, 7)
    run = dynamic(rewards, curriculum=curriculum)
    run.collect()
    before = run.sampler.position
    lengths = run.sampler.lengths.copy()
    undone = rows_of(run.collect(2))
    run.sampler.undo()
    assert run.sampler.position == before
    assert run.sampler.lengths.tolist() == lengths.tolist()
    run.sampler.save(tmp_path)
    resumed = dynamic(rewards, curriculum=curriculum, position=before, folder=tmp_path)
    assert rows_of(resumed.collect(2)) == undone


def test_responses_of_a_step_that_is_undone_are_sampled_again_in_partial_rollouts(
    tmp_path: Path,
):
    flags = {"partial_rollouts": True, "oversample": 2.0}
    run = Run(equal, **flags)
    run.engine._length_of = lambda number: 1 + number // 2
    seen = {int(draw) for draw in run.collect().table.draws}
    undone = {int(draw) for draw in run.collect(2).table.draws}
    run.sampler.undo()
    run.sampler.save(tmp_path)
    resumed = Run(equal, position=run.sampler.position, folder=tmp_path, **flags)
    resumed.engine._length_of = run.engine._length_of
    again: set[int] = set()
    for version in range(2, 8):
        draws = {int(draw) for draw in resumed.collect(version).table.draws}
        assert not draws & (seen | again)
        again |= draws
    assert undone <= again and {*range(max(undone))} <= seen | again


def test_engines_that_stop_continue_the_draws_of_a_run_that_sampled_ahead(tmp_path: Path):
    (tmp_path / "ahead.json").write_text(
        '{"next_draw": 9, "outstanding": {"5": 1, "7": 2}, "weight_version": 2}'
    )
    run = Run(equal, position=9, folder=tmp_path)
    draws = [sorted({*run.collect(version).table.draws.tolist()}) for version in (3, 4)]
    assert draws == [[5, 7, 9, 10], [11, 12, 13, 14]]


def test_prompts_with_long_responses_come_first():
    run = Run(equal)
    lengths = run.sampler.lengths
    run.collect()
    assert run.begun == drawn_rows(0, 4)
    assert (lengths > 0).sum() == 4  # of the four rows
    first, second, third, fourth = drawn_rows(4, 4)
    lengths[[first, third, fourth]] = 5, 40, 3  # the second draw counts as the mean
    run.collect(2)
    assert run.begun == [third, second, first, fourth]
    run.sampler.undo()
    assert run.sampler.lengths[[first, second, third, fourth]].tolist() == [5, -1, 40, 3]


def test_reward_metrics_ignore_failed_rewards():
    found = rollout_metrics(Run(lambda row: (None, 3.0)).collect().table)
    assert (found["reward/mean"], found["reward/std"], found["reward/failures"]) == (3.0, 0.0, 4.0)


def test_generated_tokens_include_dropped_samples():
    """Each response has one token. Without dropped samples, refills would look slow."""
    drawn_again = informative_at(0, 3), {"algorithm": "remax", "dynamic_sampling": True}
    for rewards, options in ((equal, {}), drawn_again):
        run = Run(rewards, **options)
        for version in (1, 2):
            collected = run.collect(version)
            assert collected.num_generated_tokens == len(run.engine.submitted)
            assert collected.num_generated_tokens >= len(collected.table) == 8


def test_dynamic_sampling_compares_rewards_without_length_penalty():
    """An overlong penalty would make equal outcomes differ; it comes later (`learner`)."""
    run = dynamic(equal, overlong_buffer_tokens=4, max_response_tokens=4, max_refills=0)
    assert run.collect().metrics["rollout/uninformative_share"] == 1.0
