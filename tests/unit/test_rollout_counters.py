"""Counters and limits of a step, in all combinations of options, against a slow reference.

Engines are threads, with the real sampler, workers, draws and scheduler; tokens and rewards are
scripted. The reference counts again from a record of what each engine did.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms import registry
from mcore_rl.algorithms.registry import Drop, group_filter
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common import objects
from mcore_rl.common.parameters import Parameters
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.vllm.generation import Completion
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.parts import weighed
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Collected, Sampler
from tests import hostile
from tests.prompt_tables import one_source
from tests.unit.scripted_sampling import ScriptedEngine, number_of

_PATIENT_SECONDS = 120.0
_MAX_POLLS = 60_000
NUM_PROMPTS = 20


def varied(group: Sequence[ScoredRollout], parameters: Parameters) -> Drop | None:
    rewards = {sample.reward for sample in group if sample.is_valid}
    return None if len(rewards) > 1 else Drop("equal", refill=True)


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    group_filter("varied", reasons=["equal"])(varied)
    yield
    del registry.GROUP_FILTERS["varied"]


@dataclass(frozen=True)
class Options:
    """Options of a run; `options` generates only valid combinations."""

    num_engines: int = 1
    groups: int = 4
    num_samples: int = 2
    oversample: float | None = None
    partial: bool = False
    max_staleness: int = 2
    stale_rollouts: str = "finish"
    dynamic: bool = False
    by_filter: bool = False  # a group filter replaces groups in place of dynamic sampling
    max_refills: int = 2
    deterministic: bool = False
    algorithm: str = "grpo"
    reward_model: bool = False
    informative_share: float = 0.6  # share of groups with a difference
    fails: float = 0.0  # share of samples without a reward
    seed: int = 0
    lengths: tuple[int, ...] = ()  # of the first samples; random for the others

    @property
    def config(self) -> RLConfig:
        given: dict[str, Any] = {
            "num_prompts_per_step": self.groups,
            "algorithm": self.algorithm,
            "num_samples_per_prompt": self.num_samples,
            "deterministic": self.deterministic,
            "partial_rollouts": self.partial,
        }
        if self.oversample is not None:
            given["oversample"] = self.oversample
        if self.partial:
            given |= {"max_staleness": self.max_staleness, "stale_rollouts": self.stale_rollouts}
        if self.dynamic:
            given |= {"group_filter": "varied"} if self.by_filter else {"dynamic_sampling": True}
            given |= {"max_refills": self.max_refills}
        return RLConfig.of(**given)

    @property
    def size(self) -> int:
        return self.num_samples + (self.algorithm == "remax")

    def length_of(self, number: int) -> int:
        if number < len(self.lengths):
            return self.lengths[number]
        return random.Random(f"{self.seed} length {number}").randint(1, 14)

    def outcome(self, number: int) -> Outcome:
        draw, index = divmod(number, self.size)
        if random.Random(f"{self.seed} fails {number}").random() < self.fails:
            return Outcome(0.0, "timed out")
        return Outcome(float(index) if self.teaches_at(draw) else 1.0)

    def teaches_at(self, draw: int) -> bool:
        return random.Random(f"{self.seed} teaches {draw}").random() < self.informative_share

    def differs(self, draw: int) -> bool:
        found = self.rewards(draw)  # the filter is not asked about a group without a reward
        return len(found) > 1 or (self.by_filter and not found)

    def rewards(self, draw: int) -> set[float]:
        """Return the distinct valid rewards of a group; empty if its baseline has no reward."""
        found = [self.outcome(draw * self.size + index) for index in range(self.size)]
        if any(each.kind is not None for each in found[self.num_samples :]):
            return set()
        return {each.reward for each in found[: self.num_samples] if each.kind is None}


@st.composite
def options(draw: st.DrawFn) -> Options:
    partial, dynamic = draw(st.booleans()), draw(st.booleans())
    most = draw(st.integers(1, 3))
    oversample = draw(st.sampled_from([1.2, 1.5, 1.0 + most] if partial else [None, 1.0, 1.5, 2.5]))
    alone = not partial and (oversample or 1.0) == 1.0
    return Options(
        num_engines=draw(st.integers(1, 4)),
        groups=draw(st.integers(1, 6)),
        num_samples=draw(st.integers(2, 3)),
        oversample=oversample,
        partial=partial,
        max_staleness=most,
        stale_rollouts=draw(st.sampled_from(["finish", "drop"])),
        dynamic=dynamic,
        by_filter=dynamic and draw(st.booleans()),
        max_refills=draw(st.integers(0, 3)),
        deterministic=draw(st.booleans()),
        algorithm=draw(st.sampled_from(["grpo", "remax", "reinforce_pp"])),
        reward_model=dynamic and alone and draw(st.booleans()),
        informative_share=draw(st.sampled_from([0.0, 0.3, 0.6, 1.0])),
        fails=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        seed=draw(st.integers(0, 10_000)),
    )


class TracedEngine(ScriptedEngine):
    """Records the length of each response, and the number of generated tokens."""

    def __init__(self, options: Options) -> None:
        super().__init__(options.length_of)
        self.length: dict[int, int] = {}
        self.num_tokens = self.num_polls = 0

    def step(self) -> list[Completion]:
        running = dict(self.running)
        self.num_tokens += len(running)
        found = super().step()
        for number, (request, tokens) in running.items():
            self.length[number] = len(request.token_ids) - 1 + len(tokens)
        return found

    def any_rank(self, here: bool) -> bool:
        self.num_polls += 1
        assert self.num_polls < _MAX_POLLS, "the engine waits forever"
        return here


class ScriptedStack:
    """Replaces a `RewardStack`: outcomes arrive in any order."""

    def __init__(self, options: Options) -> None:
        self._options, self._random = options, random.Random(options.seed)
        self._name = REWARD_MODEL if options.reward_model else "scripted"
        self.names = () if options.reward_model else ("scripted",)  # known before a step ends
        self._open: list[tuple[int, Rollout]] = []
        self.settled: list[int] = []  # request numbers, in the order of their outcomes
        self._is_waiting = False

    def sources(self) -> dict[str, str]:
        return {}

    find_sources = sources

    def begin(self, rollout: Rollout) -> int:
        self._open.append((len(self._open) + len(self.settled), rollout))
        return self._open[-1][0]

    def finished(self) -> list[tuple[int, dict[str, Outcome]]]:
        share, self._is_waiting = (2.0 if self._is_waiting else 0.4), False
        ready = [each for each in self._open if self._random.random() < share]
        self._open = [each for each in self._open if each not in ready]
        self.settled += [number_of(rollout) for _, rollout in ready]
        outcomes = {} if self._options.reward_model else {"scripted": self._options.outcome}
        return [
            (ticket, {name: give(number_of(rollout)) for name, give in outcomes.items()})
            for ticket, rollout in ready
        ]

    def wait(self) -> None:
        self._is_waiting = True

    def weigh(self, rollouts: Sequence[Rollout], outcomes: Any) -> list[ScoredRollout]:
        return weighed(rollouts, outcomes, {self._name: 1.0})


class World:
    """Ranks as threads; each is an engine of one rank."""

    def __init__(self, size: int) -> None:
        self._here, self._gathered = threading.local(), [None] * size
        self._barrier = threading.Barrier(size, timeout=_PATIENT_SECONDS)
        self._pool = ThreadPoolExecutor(size)
        self._size = size
        store = dist.HashStore()
        self._patch = patch = pytest.MonkeyPatch()
        patch.setattr(dist, "get_rank", lambda: self._here.rank)
        patch.setattr(dist, "get_world_size", lambda: size)
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        patch.setattr(objects, "all_gather", self.all_gather)
        patch.setattr(objects, "broadcast", lambda mine, source: self.all_gather(mine)[source])
        patch.setattr(objects, "barrier", self._barrier.wait)

    def all_gather(self, mine: Any) -> list[Any]:
        self._gathered[self._here.rank] = mine
        self._barrier.wait()
        gathered = list(self._gathered)
        self._barrier.wait()
        return gathered

    def on_all(self, work: Callable[[int], Any]) -> list[Any]:
        def on_one(rank: int) -> Any:
            self._here.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        futures = [self._pool.submit(on_one, rank) for rank in range(self._size)]
        return [each.result() for each in futures]

    def close(self) -> None:
        self._patch.undo()
        self._pool.shutdown()


class _Sampler(Sampler):
    """Records the draws whose prompts are looked up, that is, that were started."""

    looked_up: list[int]

    def _prompt_of(self, draw: int) -> Prompt:
        self.looked_up.append(draw)
        return super()._prompt_of(draw)


@dataclass
class Run:
    """Steps of a run, with records of everything that was sampled."""

    options: Options
    version: int = 0
    position: int = 0  # of the step's first draw
    taken: list[int] = field(default_factory=list)  # draws, over all steps
    dropped: set[int] = field(default_factory=set)
    looked_up: list[int] = field(default_factory=list)  # draws, in the order of their look-ups

    def __enter__(self) -> Run:
        self.world = World(self.options.num_engines)
        made = self.world.on_all(self._made)
        self.engines, self.stacks, self.samplers = zip(*made, strict=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.world.close()

    def _made(self, rank: int) -> tuple[Any, ...]:
        size, options = self.options.num_engines, self.options
        order = range(size)[:: -1 if options.seed % 2 else 1]  # a rank map may be any
        layout = RolloutLayout(size, 1, expert_parallel=False, rank_map=tuple(order))
        sample_store = SampleStore(TrainLayout(size), layout, [[[]]])
        engine, stack = TracedEngine(options), ScriptedStack(options)
        name = REWARD_MODEL if options.reward_model else "scripted"
        spec = RewardSpec((name,), (1.0,), num_workers=1, timeout_seconds=1.0)
        model = self._reward_model if options.reward_model else None
        workers = RolloutWorkers(engine, layout, options.config.rollout, spec, sample_store, model)  # type: ignore[arg-type]
        workers.rewards = stack  # type: ignore[assignment]
        sampler = _Sampler(
            workers,
            one_source(NUM_PROMPTS),
            options.config.recipe,
            options.config.rollout,
            spec,
            num_prompts_per_step=options.config.trainer.num_prompts_per_step,
            seed=options.seed,
            timers=StageTimers(),
            position=0,
        )
        sampler.looked_up = self.looked_up
        return engine, stack, sampler

    def _reward_model(self, sample_store: SampleStore, table: SampleTable) -> list[Outcome]:
        # The table has no response index: rows of a draw are in the order of its responses.
        seen: dict[int, int] = {}
        found = []
        for draw in table.draws.tolist():
            index = seen[draw] = seen.get(draw, -1) + 1
            found.append(self.options.outcome(draw * self.options.size + index))
        return found

    def pending(self) -> set[int]:
        return {group.draw for sampler in self.samplers for group in sampler.pending}

    def started(self) -> set[int]:
        """Return the draws dispatched to any engine, sampled or not."""
        return set(self.looked_up)

    def length(self, draw: int, index: int) -> int:
        number = draw * self.options.size + index
        return max(engine.length.get(number, 0) for engine in self.engines)

    def step(self) -> Collected:
        """Run one step and check it against the reference."""
        self.version += 1
        before, known = self.pending(), self.started()
        tokens = sum(engine.num_tokens for engine in self.engines)
        ages, self.position = self._ages(before), self.samplers[0].position
        by_rank = self.world.on_all(
            lambda rank: self.samplers[rank].collect(self.version, lambda: None)
        )
        collected = by_rank[0]
        for other in by_rank[1:]:
            assert other.metrics == collected.metrics
            assert (other.table.draws == collected.table.draws).all()
        made = sum(engine.num_tokens for engine in self.engines) - tokens
        assert collected.num_generated_tokens == made
        started = self.started() - known - before
        self._check(collected, before, started, ages)
        return collected

    def _ages(self, draws: set[int]) -> dict[int, int]:
        groups = [group for sampler in self.samplers for group in sampler.pending]
        return {g.draw: self.version - (g.oldest_version or self.version) for g in groups}

    def _check(
        self, collected: Collected, before: set[int], started: set[int], ages: dict[int, int]
    ) -> None:
        options, metrics, table = self.options, collected.metrics, collected.table
        wanted, num = options.groups, options.num_samples
        taken = list(dict.fromkeys(table.draws.tolist()))
        pending, hand = self.pending(), before | started
        # Each sample is settled once.
        assert len(taken) == wanted and len(table) == wanted * num
        assert not set(taken) & (set(self.taken) | self.dropped | pending)
        assert set(taken) <= hand and pending <= hand
        for draw in taken:
            rows = np.flatnonzero(table.draws == draw)
            expected = [options.length_of(draw * options.size + index) for index in range(num)]
            assert table.response_lengths[rows].tolist() == expected
        dropped = hand - set(taken) - pending
        self.taken += taken
        self.dropped |= dropped
        stale = {draw for draw in before if ages[draw] > options.max_staleness}
        assert stale <= dropped
        self._check_metrics(metrics, table, hand, taken, dropped, started, pending)
        if options.partial:
            assert dropped <= stale or options.dynamic
            assert (self.version - table.oldest_versions <= options.max_staleness).all()
        if options.dynamic:
            self._check_refills(metrics, taken, started, before - stale)

    def _check_metrics(
        self,
        metrics: dict[str, float],
        table: SampleTable,
        hand: set[int],
        taken: list[int],
        dropped: set[int],
        started: set[int],
        pending: set[int],
    ) -> None:
        options, num = self.options, self.options.num_samples
        if options.dynamic:
            assert metrics["rollout/dropped_samples"] == len(dropped) * num
        if options.by_filter:
            useless = {draw for draw in hand - pending if not options.differs(draw)}
            filtered, kept = metrics["rollout/filtered/equal"], np.isin(table.draws, [*useless])
            assert len(useless & {*taken}) <= filtered <= len(useless)
            if not options.partial and options.config.rollout.groups_at_a_time == 1.0:
                assert filtered == len(useless)  # no other group was stopped
            assert not table.valid[kept].any()
        if options.partial:
            assert metrics["rollout/pending_groups"] == len(pending)
            ages = self.version - table.oldest_versions
            assert metrics["rollout/staleness_max"] == ages.max()
            assert metrics["rollout/staleness_mean"] == pytest.approx(ages.mean())
        if options.config.rollout.groups_at_a_time > 1.0:
            assert metrics["rollout/started_groups"] == len(started)
            assert metrics["rollout/dropped_groups"] == len(dropped)
            every = [self.length(draw, index) for draw in hand for index in range(num)]
            found = [self.length(draw, index) for draw in taken for index in range(num)]
            bias = sum(found) / len(found) - sum(every) / len(every)
            assert metrics["rollout/length_bias_tokens"] == pytest.approx(bias, abs=1e-9)

    def _check_refills(
        self, metrics: dict[str, float], taken: list[int], started: set[int], before: set[int]
    ) -> None:
        options, wanted = self.options, self.options.groups
        first = math.ceil(wanted * options.config.rollout.groups_at_a_time)
        most = first + wanted * options.max_refills
        useless = [draw for draw in taken if not options.differs(draw)]
        assert metrics["rollout/uninformative_share"] == len(useless) / wanted
        refills = metrics["rollout/refills"] * wanted
        assert 0 <= refills <= wanted * options.max_refills + 1e-9
        if not options.deterministic or options.num_engines == 1:
            in_hand = len(before) + len(started)
            planned = self.position + max(0, first - len(before))
            if not options.reward_model:  # whose rounds continue the numbers
                assert refills == pytest.approx(sum(draw >= planned for draw in started))
            else:
                assert refills == pytest.approx(len(started) - wanted)
            assert in_hand <= max(most, len(before))
            # Uninformative groups are taken only at the limit, or if every reward fails.
            valid = any(options.rewards(draw) for draw in before | started)
            assert not useless or in_hand >= most or not valid


def test_dropped_responses_count_with_their_length_so_far() -> None:
    """The first two of four are taken, at 4 and 6 tokens; the others have at least 6 by then."""
    alone = Options(
        groups=2, num_samples=1, oversample=2.0, algorithm="reinforce_pp", lengths=(4, 6, 20, 30)
    )
    with Run(alone) as run:
        collected = run.step()
    left = [run.length(draw, 0) for draw in (2, 3)]
    assert min(left) >= 6
    bias = (4 + 6) / 2 - (4 + 6 + sum(left)) / 4
    assert collected.metrics["rollout/length_bias_tokens"] == bias
    assert collected.num_generated_tokens == 4 + 6 + sum(left)


def test_first_sample_of_a_run_is_shown_once() -> None:
    with Run(Options(num_engines=2)) as run:
        first, second = run.step(), run.step()
    assert first.example is not None and second.example is None
    prompt, response = map(json.loads, first.example)
    assert len(prompt) == first.table.prompt_lengths[0]
    assert len(response) == first.table.response_lengths[0]


@pytest.mark.parametrize("by_filter", [False, True])
def test_reserved_group_that_does_not_differ_is_replaced(by_filter: bool) -> None:
    limit = Options(
        partial=True,
        dynamic=True,
        by_filter=by_filter,
        max_staleness=1,
        max_refills=10,
        informative_share=0.4,
    )
    for seed in range(6):
        with Run(Options(**{**vars(limit), "seed": seed, "num_engines": 1 + seed % 2})) as run:
            for _ in range(6):
                assert run.step().metrics["rollout/uninformative_share"] == 0.0


@pytest.mark.parametrize("by_filter", [False, True])
@pytest.mark.parametrize("max_refills", [0, 1, 2])
def test_rounds_of_a_reward_model_respect_max_refills(max_refills: int, by_filter: bool) -> None:
    for seed in range(8):
        with Run(
            Options(
                groups=5,
                dynamic=True,
                by_filter=by_filter,
                reward_model=True,
                max_refills=max_refills,
                informative_share=0.3,
                seed=seed,
            )
        ) as run:
            assert run.step().metrics["rollout/refills"] <= max_refills


@pytest.mark.slow
@settings(hostile.BOUNDED, max_examples=120)
@given(options())
@example(Options(num_engines=2, oversample=2.5, dynamic=True, informative_share=0.0, fails=1.0))
@example(Options(num_engines=3, partial=True, dynamic=True, deterministic=True, groups=5))
@example(Options(num_engines=2, partial=True, dynamic=True, by_filter=True, deterministic=True))
@example(Options(num_engines=4, groups=1, oversample=1.9, deterministic=True, seed=16))
def test_counters_and_limits_equal_the_reference(options: Options) -> None:
    with Run(options) as run:
        for _ in range(4):
            run.step()
        settled = [number for stack in run.stacks for number in stack.settled]
        assert len(settled) == len(set(settled))
        assert {draw * run.options.size for draw in run.taken} <= set(settled)
