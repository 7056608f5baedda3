"""A run's samples: the prompts that a step draws, and the groups that it trains on.

    collect ──► GroupSampler ── groups of a step ──► score ──► table of samples, metrics
    save    ──► the draws in flight, their responses so far, lengths, curriculum

Ways to sample are values of `Rules`, for N groups a step:

    way                       maximum staleness  extra groups       after a decision
    by default                0                  0                  engines stop
    --rl-oversample           0                  (oversample - 1) N engines stop, others are dropped
    --rl-partial-rollouts     K                  (oversample - 1) N engines stop, others continue
    ranks or servers of their K, at least 1      measured, at most  engines sample ahead while the
    own                                          N K                actor trains

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) keeps a prompt only if its responses differ
in reward (see `comparison`): otherwise no response has an advantage over another. Other prompts are
drawn in their place, within `--rl-max-refills`. A group filter (`--rl-group-filter`) replaces
groups in the same way, or drops them: a dropped group keeps its place, as one whose rewards do not
differ does, and is not trained on. With a reward model, which scores when a step's groups are
sampled, groups are replaced in rounds.

A sample whose reward failed has no reward. It is not compared and not trained on.

What samples ahead writes finished groups to a `Bank` on the disk, for a run that is killed between
two checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.algorithms.recipes import Algorithm
from mcore_rl.algorithms.registry import find_sampler
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt
from mcore_rl.common import objects
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.common.errors import not_held
from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.vllm.generation import Sampling
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import SAMPLING, Activity, TimeSpan
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.admission import StepDecision, StepEnd
from mcore_rl.rollout.bank import Bank, BankedGroup, read_bank
from mcore_rl.rollout.comparison import GroupComparison
from mcore_rl.rollout.curriculum import Curriculum
from mcore_rl.rollout.draws import StepStart
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.group_sampler import GroupSampler, Rules
from mcore_rl.rollout.options import RolloutOptions
from mcore_rl.rollout.sampling_state import (
    AheadMetrics,
    SamplingState,
    StepCounts,
    read_groups,
    read_lengths,
    write_groups,
    write_lengths,
)
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.user_groups import UserGroups

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Collected:
    """A step's samples, the same on all ranks; responses to one prompt are adjacent.

    Example: `Collected(table, num_generated_tokens=8192, metrics={"rollout/refills": 0.25})`.
    """

    table: SampleTable
    num_generated_tokens: int  # includes dropped samples and baselines
    metrics: dict[str, float] = field(default_factory=dict)
    sampling_seconds: float | None = None  # None: as the actor's ranks measure
    engine_spans: tuple[TimeSpan, ...] = ()  # of the first of engines on ranks of their own
    example: list[str] | None = None  # a sample of the first step, see `RolloutWorkers.example`


def rules_of(
    recipe: Algorithm, options: RolloutOptions, groups_per_step: int, *, compares: bool
) -> Rules:
    """Return how a run samples. `compares`: groups are compared during sampling."""
    started = math.ceil(groups_per_step * options.groups_at_a_time)
    return Rules(
        groups_per_step,
        max_staleness=options.staleness_limit,
        extra_groups=None if options.samples_ahead else started - groups_per_step,
        max_refills=recipe.max_refills if recipe.replaces_groups and compares else None,
        drops_stale=options.stale_rollouts == "drop",
        deterministic=options.deterministic,
    )


class Sampler:
    """Draws, samples and scores a run's samples. Collective over the engines' ranks, except for
    methods marked local.

    `lengths`, `[rows]` int32, are the tokens of the longest response when a row of the prompts file
    was last drawn by engines that stop; -1 if it never was.
    """

    def __init__(
        self,
        workers: RolloutWorkers,
        prompts: PromptSources,
        recipe: Algorithm,
        options: RolloutOptions,
        rewards: RewardSpec,
        *,
        num_prompts_per_step: int,
        seed: int,
        timers: StageTimers,
        position: int,
        curriculum: Curriculum | None = None,
        bank: Path | None = None,
        folder: Path | None = None,
        origin: Sequence[Any] = (),
    ) -> None:
        """`position` is the number of prompts drawn before. `bank` is the folder of finished
        groups, for engines that sample ahead. `folder` is what `save` wrote, if a run resumes; a
        file with other content ends the run. `origin` are JSON values that name the run's branch,
        the model that it began with, and its environments.

        On the first rank of a TP group, which reads the bank, `num_banked` is then the number of
        groups that need not be sampled again, and `skipped` describes what is damaged or of another
        run."""
        self._workers, self._prompts, self._options = workers, prompts, options
        self._recipe, self._num_prompts_per_step = recipe, num_prompts_per_step
        self._seed, self._timers, self._curriculum = seed, timers, curriculum
        self._sample_store = workers.sample_store
        self._comparison = GroupComparison(recipe, rewards, prompts.keys_of)
        self._rules = rules_of(recipe, options, num_prompts_per_step, compares=workers.compares)
        self._select = None if self._rules.max_refills is None else self._comparison.select
        self.lengths = np.full(int(prompts.rows.max()) + 1, -1, dtype=np.int32)
        self._lengths_before = self.lengths
        self._metrics = AheadMetrics()
        self._taken: dict[int, int] = {}  # draws of the last step, and their oldest versions
        self._undone: dict[int, int] = {}  # the same, if the step is to be repeated
        state = agreed_in_world(partial(self._restore, folder, position))
        self._position = self._step_began_at = state.next_draw
        self._last_version, self._metrics.uncounted = state.weight_version, state.uncounted
        fingerprint, self.skipped = self._fingerprint(origin), list[str]()
        banked: dict[int, BankedGroup] = {}
        if bank is not None and workers.is_leader:
            banked, self.skipped = read_bank(
                bank,
                self._prompt_of,
                fingerprint=fingerprint,
                limits=workers.limits,
                fits=self._fits,
            )
        objects.barrier()  # all have read it before the first file is rewritten
        # Groups that this TP group continues in the first step.
        self._resumed = workers.engine.of_first_rank(self._held(folder, state, banked))
        outstanding = state.outstanding
        # Draws that are trained on or dropped, and whose groups are in the bank.
        self._done = {d for d in banked if d < state.next_draw and d not in outstanding}
        self._covered: set[int] = set()  # of these, those before the last `save`
        self.num_banked = len(banked) - len(self._done)
        if self._rules.decides_alone:
            outstanding = {each.draw: outstanding[each.draw] for each in self._resumed}
        self._groups = GroupSampler(
            workers,
            self._plan(),
            self._prompt_of,
            self._rules,
            name="run",
            next_draw=state.next_draw,
            groups=outstanding,
            select=self._select,
            bank=self._make_bank(bank, fingerprint),
            banked={draw: each for draw, each in banked.items() if draw >= state.next_draw},
            user_groups=self._make_user_groups(),
        )

    def _make_user_groups(self) -> UserGroups | None:
        if self._recipe.sampler is None or not self._workers.is_leader:
            return None
        return UserGroups(
            find_sampler(self._recipe.sampler),
            self._recipe.sampler_parameters,
            vocab_size=self._workers.limits.vocab_size,
            text_of=self._workers.engine.text_of,
        )

    def _make_bank(self, folder: Path | None, fingerprint: str) -> Bank | None:
        if folder is None or not self._workers.is_leader:
            return None
        owner, num_owners = self._workers.tp_group, self._workers.num_tp_groups
        return Bank(folder, owner=owner, num_owners=num_owners, fingerprint=fingerprint)

    @property
    def activity(self) -> Activity:
        """What the engine of this rank does."""
        return self._groups.activity

    @property
    def position(self) -> int:
        """The first draw that has never been admitted; with engines that do not stop on the
        coordinator, and 0 on others."""
        if self._rules.stops:
            return self._position
        admission = self._groups.admission
        return 0 if admission is None else admission.limit

    # A step

    def collect(
        self, weight_version: int, when_few_are_left: Callable[[], object] | None = None
    ) -> Collected:
        """Begin a step with weights of this version, in rollout mode, or after `pause`. Sample
        until its groups are decided, and return them. With engines that stop, `when_few_are_left`
        is passed to `step_engine`."""
        if self._rules.stops:
            return self._collect_and_stop(weight_version, when_few_are_left)
        collected = self.collect_unless(weight_version, None)
        assert collected is not None, "nothing stops it"
        return collected

    def collect_unless(
        self, weight_version: int, is_stuck: Callable[[], bool] | None
    ) -> Collected | None:
        """Do what `collect` does with engines that do not stop, unless `is_stuck` on the first rank
        of any TP group before the groups are decided. Then return None on all ranks: after `pause`
        and an update to the same weights, call it again, or `abandon_step`. `is_stuck` None: no
        rank is ever stuck."""
        left = StepCounts()
        if weight_version != self._last_version:
            left = self._begin_ahead(weight_version)
        else:
            self._groups.resume(weight_version)
        decision = self._groups.sample(is_stuck=is_stuck)
        if decision is None:
            return None
        with self._timers("reward"):
            return self._collected_ahead(weight_version, decision, left)

    def _begin_ahead(self, weight_version: int) -> StepCounts:
        """Begin a step of engines that do not stop. Return the counts of stale groups here."""
        is_first = not self._metrics.num_steps
        start, gone = self._begin_step(weight_version)
        if is_first:  # before the bank has other groups of the same draws
            self._groups.scheduler.forget_banked(start.stale, waits=True)
        else:
            self._done |= {*start.stale}
        return self._counts_left(gone if self._rules.drops_stale else ())

    def _collected_ahead(
        self, weight_version: int, decision: StepDecision, counts: StepCounts
    ) -> Collected:
        scheduler, leaves = self._groups.scheduler, {*decision.taken, *decision.dropped}
        taken = self._groups.groups_of(decision.taken)
        scheduler.forget(leaves)
        self._done |= leaves
        self._sample_store.clear()
        generated, _ = scheduler.take_num_tokens()
        counts.generated_tokens += generated if self._workers.is_leader else 0
        table, counts = self._score(taken, counts)
        self._taken = _oldest_versions(table)
        metrics = self._metrics.of_step(
            table,
            weight_version,
            self._groups.counts(),
            taken if self._workers.is_leader else [],
            self.activity.seconds(SAMPLING),
        )
        for name, count in self._comparison.filtered([table]).items():
            metrics[name] = metrics.get(name, 0.0) + count
        if self._rules.drops_stale:
            metrics["rollout/length_bias_tokens"] = length_bias(table, counts)
        return Collected(
            table,
            counts.generated_tokens,
            metrics | self._workers.draft_metrics(),
            sampling_seconds=self._metrics.sampling_seconds,
            example=self._workers.example(),
        )

    def _collect_and_stop(
        self, weight_version: int, when_few_are_left: Callable[[], object] | None
    ) -> Collected:
        """Do what `collect` does with engines that stop."""
        self._step_began_at, self._lengths_before = self._position, self.lengths.copy()
        self._taken = {}
        if self._curriculum is not None:
            self._curriculum.begin_step()
        self._sample_store.clear()
        self._workers.draft_metrics()  # discard the counts of evaluations
        if self._recipe.replaces_groups and not self._workers.compares:
            return self._collect_in_rounds(weight_version)
        sizes = self._sizes_of_step()
        table, decision, counts = self._round(
            weight_version,
            sizes=sizes if len({*sizes}) > 1 else (),
            when_few_are_left=when_few_are_left,
        )
        if not self._recipe.replaces_groups:
            return self._build_result(table, weight_version, counts)
        of_draws = {int(group.draws[0]): group for group in _groups_of(table)}
        return self._build_informative(
            [of_draws[draw] for draw in decision.taken],
            [of_draws[draw] for draw in decision.dropped],
            weight_version,
            counts,
        )

    def _collect_in_rounds(self, weight_version: int) -> Collected:
        """Sample a step whose groups are compared after each round."""
        num_groups, recipe = self._num_prompts_per_step, self._recipe
        places = Counter(self._sizes_of_step())
        kept: list[SampleTable] = []
        uninformative: list[SampleTable] = []
        counts = StepCounts()
        last = self._step_began_at + num_groups * (1 + recipe.max_refills)
        while missing := min(
            num_groups - len(_in_places(kept, places)[0]), max(0, last - self._position)
        ):
            is_first = not kept and not uninformative
            # Another round may follow: do not prefetch training.
            table, _, more = self._round(weight_version, num_groups=missing)
            counts += more
            counts.refills += 0 if is_first else missing
            for group in _groups_of(table):
                (kept if self._comparison.is_kept(group) else uninformative).append(group)
            if not any(g.valid.any() or g.dropped[0] for g in (*kept, *uninformative)):
                break  # if every reward failed, more draws would not help
        taken, surplus = _in_places(kept, places)
        fillers, others = _in_places(uninformative, places - Counter(map(len, taken)))
        return self._build_informative(taken + fillers, [*surplus, *others], weight_version, counts)

    def _round(
        self,
        weight_version: int,
        *,
        num_groups: int | None = None,
        sizes: Sequence[int] = (),
        when_few_are_left: Callable[[], object] | None = None,
    ) -> tuple[SampleTable, StepDecision, StepCounts]:
        """Sample the responses to the next prompts. Return the groups with rewards that the step
        may take, its decision, and the counts of all TP groups."""
        groups = self._groups
        with self._timers("rollout"):
            start, stale = self._begin_step(
                weight_version,
                num_groups=num_groups,
                sizes=sizes,
                next_draw=self._position,
                order_of=self._longest_first,
            )
            decision = groups.sample(when_few_are_left=when_few_are_left)
            assert decision is not None, "nothing stops it"
            end = groups.end_step()
            self._position = groups.next_draw(self._position, end)
        seconds = groups.scheduler.take_wait_seconds()
        self._timers.add("rollout", -seconds)
        self._timers.add("reward", seconds)
        with self._timers("reward"):
            scored = groups.groups_of({*decision.taken, *decision.dropped})
            groups.scheduler.forget({*decision.taken, *decision.dropped})
            left = [*stale, *groups.scheduler.forget(end.dropped), *self.pending]
            table, counts = self._score(scored, self._counts_here(start, end, left))
        self._taken |= _oldest_versions(table)
        self.lengths[table.prompts] = 0
        np.maximum.at(self.lengths, table.prompts, table.response_lengths)
        if self._curriculum is not None:
            informative = self._comparison.informative(table, table.prompts)
            self._curriculum.settle(self._position, table, informative)
        return table, decision, counts

    @property
    def pending(self) -> list[OpenGroup]:
        """The groups here that continue in the next step; between two steps."""
        return list(self._groups.scheduler.open.values())

    def _begin_step(self, weight_version: int, **step: Any) -> tuple[StepStart, list[OpenGroup]]:
        """Begin a step, or a round of it, with the groups that continue. Return the stale groups
        here as well."""
        scheduler, metrics = self._groups.scheduler, self._metrics
        is_first, num_skipped = not metrics.num_steps, 0
        if self._last_version is not None and is_first:
            # Versions without a step, such as that of the last evaluation of a run.
            metrics.last_before = self._last_version
            metrics.num_skipped = num_skipped = weight_version - 1 - self._last_version
        start = self._groups.begin_step(weight_version, num_skipped=num_skipped, **step)
        if is_first and start.stale and self._groups.admission is not None:
            self._log_late(len(start.stale))
        stale = scheduler.forget(start.stale)
        continuing = self.pending if self._rules.stops and not is_first else self._resumed
        self._resumed = []
        left = [group for group in continuing if group.draw not in start.stale]
        self._groups.load(left, start.restarted, is_resumed=is_first)
        metrics.num_steps += 1
        self._last_version = weight_version
        return start, stale

    def _log_late(self, num_groups: int) -> None:
        logger.warning(
            "[Resume] %d groups of the checkpoint are too many or too old for --rl-max-staleness "
            "%d: %s",
            num_groups,
            self._rules.max_staleness,
            "they are dropped" if self._rules.drops_stale else "their prompts are sampled again",
        )

    def _counts_left(self, left: Sequence[OpenGroup]) -> StepCounts:
        """Return the counts of groups here that are not trained on, on the first rank."""
        if not self._workers.is_leader:
            return StepCounts()
        num_samples_of = self._groups.scheduler.plan.num_samples_of
        return StepCounts(
            left_samples=sum(map(num_samples_of, left)),
            left_tokens=sum(each.num_tokens(num_samples_of(each)) for each in left),
        )

    def _counts_here(self, start: StepStart, end: StepEnd, left: Sequence[OpenGroup]) -> StepCounts:
        counts = self._counts_left(left)
        generated, left_tokens = self._groups.scheduler.take_num_tokens()
        if self._workers.is_leader:
            counts += StepCounts(generated_tokens=generated, left_tokens=left_tokens)
        if self._groups.admission is not None:
            num_dropped = len(start.stale) + len(end.dropped)
            counts += StepCounts(end.started, end.refills, num_dropped, end.pending)
        return counts

    def _score(
        self, groups: Sequence[OpenGroup], counts: StepCounts
    ) -> tuple[SampleTable, StepCounts]:
        scheduler = self._groups.scheduler
        # Groups that are not compared during sampling are now.
        select = self._comparison.select if self._select is None else None
        return self._workers.score(scheduler.plan, groups, counts, scheduler.error, select=select)

    def _build_informative(
        self,
        taken: Sequence[SampleTable],
        others: Sequence[SampleTable],
        weight_version: int,
        counts: StepCounts,
    ) -> Collected:
        """Return a step of groups that may have been replaced, first those with information."""
        for group in others:
            counts.dropped += 1
            counts.left_samples += len(group)
            counts.left_tokens += int(group.response_lengths.sum())
        kept = [group for group in taken if self._comparison.is_kept(group)]
        fillers = [group for group in taken if not self._comparison.is_kept(group)]
        # Pending groups are all of one size.
        pending = counts.pending * self._recipe.num_samples_per_prompt
        metrics = {
            "rollout/refills": counts.refills / self._num_prompts_per_step,
            "rollout/uninformative_share": len(fillers) / self._num_prompts_per_step,
            "rollout/dropped_samples": float(counts.left_samples - pending),
            **self._comparison.filtered([*taken, *others]),
        }
        table = SampleTable.joined(kept + fillers)
        return self._build_result(table, weight_version, counts, metrics)

    def _build_result(
        self,
        table: SampleTable,
        weight_version: int,
        counts: StepCounts,
        metrics: Mapping[str, float] | None = None,
    ) -> Collected:
        metrics = {**(metrics or {}), **self._workers.draft_metrics()}
        if self._curriculum is not None:
            metrics |= self._curriculum.metrics()
        if self._recipe.needs_greedy_baseline:
            firsts = table.take(np.unique(table.group_ids, return_index=True)[1])
            metrics["reward/baseline_failures"] = float((~firsts.has_baseline).sum())
        if self._options.groups_at_a_time > 1.0:
            metrics["rollout/started_groups"] = float(counts.started)
            metrics["rollout/dropped_groups"] = float(counts.dropped)
            metrics["rollout/length_bias_tokens"] = length_bias(table, counts)
        if self._rules.max_staleness:
            staleness = self._metrics.staleness(table, weight_version)
            metrics["rollout/pending_groups"] = float(counts.pending)
            metrics["rollout/staleness_mean"] = float(staleness.mean())
            metrics["rollout/staleness_max"] = float(staleness.max())
        example = self._workers.example()
        return Collected(table, counts.generated_tokens, metrics, example=example)

    def _sizes_of_step(self) -> tuple[int, ...]:
        """Return the samples of each group that a step takes: of as many draws, from any one on,
        because all blocks of draws are alike where sources differ in it."""
        size = self._recipe.num_samples_per_prompt
        return self._prompts.samples_of(self._step_began_at, self._num_prompts_per_step, size)

    def _longest_first(self, count: int) -> tuple[int, ...]:
        """Return the order of the next `count` draws, by the length of the previous responses to
        their prompts, longest first, so that the last responses to start are short. Draws without a
        known length count as the mean and keep their order."""
        rows = self._prompts.rows[self._prompt_positions(self._position, count)]
        lengths = self.lengths[rows].astype(np.float64)
        is_known = lengths >= 0
        if not is_known.any():
            return ()
        lengths[~is_known] = lengths[is_known].mean()
        return tuple(np.argsort(-lengths, kind="stable").tolist())

    # Between steps; engines that stop do nothing then

    def pause(self) -> None:
        """End running requests with their next token, before the weights change."""
        self._groups.pause()

    def work_until(self, is_called: Callable[[], bool]) -> None:
        """Sample until a call has begun; does nothing after `pause`."""
        self._groups.work_until(is_called)

    def abandon_step(self) -> None:
        """Count a step whose groups are not decided as not begun: a run that resumes begins it."""
        assert self._last_version is not None, "no step has begun"
        self._last_version -= 1

    def undo(self) -> None:
        """Count the last step's draws as not sampled: a run that resumes samples them again, and
        repeats the step with weights of the same version. Local."""
        assert self._last_version is not None, "no step to undo"
        self._last_version -= 1
        self._undone = dict(self._taken)
        if not self._rules.stops:
            self._groups.scheduler.forget_banked(self._taken, waits=True)
            self._metrics.undo()
            return
        self.lengths = self._lengths_before
        if not self._rules.max_staleness:  # all that the step has drawn
            self._position = self._step_began_at
            self._undone = {d: v for d, v in self._taken.items() if d < self._position}
        if self._curriculum is not None:
            self._curriculum.undo(self._position)

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write what a resumed run continues from."""
        folder.mkdir(parents=True, exist_ok=True)
        if not self._rules.stops:
            self._groups.flush()
        admission = self._groups.admission
        everywhere = objects.all_gather({} if admission is None else admission.outstanding)
        outstanding = {draw: v for some in everywhere for draw, v in some.items()} | self._undone
        if self._workers.is_coordinator:
            assert admission is not None, "the coordinator has one"
            uncounted: dict[str, int] = {}
            if not self._rules.stops:
                counts = admission.counts()
                # Draws that have not started start with the resumed run, which does not count them.
                num_started = counts.started + admission.num_unstarted
                uncounted = self._metrics.since(dataclasses.replace(counts, started=num_started))
            SamplingState(self.position, outstanding, self._last_version, uncounted).write(folder)
            write_lengths(self.lengths, folder)
            if self._curriculum is not None:
                self._curriculum.save(folder)
        self._covered = {*self._done}
        if self._workers.is_leader and outstanding:
            write_groups(self._continuing(outstanding), folder, self._workers.tp_group)

    def saved(self) -> None:
        """Remove from the bank what the checkpoint of the last `save`, which is complete now, has
        trained on; does not wait for the disk. Local."""
        self._groups.scheduler.forget_banked(self._covered)
        self._done -= self._covered

    def close(self) -> None:
        """Stop sampling. Local."""
        self._groups.close()

    def _restore(self, folder: Path | None, position: int) -> SamplingState:
        """Load the state that a run over the same prompts saved. Local. Raises UsageError if a file
        has other content."""
        if folder is not None and folder.is_dir():
            read_lengths(folder, self.lengths)
            if self._curriculum is not None:
                self._curriculum.restore(folder)
        return SamplingState.read(folder, position)

    def _plan(self) -> GroupPlan:
        return GroupPlan(
            num_samples=self._recipe.num_samples_per_prompt,
            most_samples=self._prompts.most_samples,
            sampling=sampling_of(self._options),
            max_tokens=self._options.max_response_tokens,
            seed=self._seed,
            with_routes=self._sample_store.routed is not None,
            num_top=self._recipe.score_centering,
            with_greedy=self._recipe.needs_greedy_baseline,
        )

    def _prompt_of(self, draw: int) -> Prompt:
        """Return the prompt of one of the run's draws."""
        return self._prompts[int(self._prompt_positions(draw, 1)[0])]

    def _prompt_positions(self, draw: int, count: int) -> np.ndarray:
        if self._curriculum is None:
            return self._prompts.indices(draw, count, seed=self._seed)
        return np.array([self._curriculum.position_of(draw + n) for n in range(count)])

    def _fingerprint(self, origin: Sequence[Any]) -> str:
        """Return a line that names what the responses of a finished group depend on, besides what
        weights have learned. Rewards are not part of it: what a group lacks is requested again."""
        options = dataclasses.asdict(self._options)
        kept = ("temperature", "top_p", "top_k", "max_response_tokens", "stop")
        begin = dataclasses.asdict(self._prompts.begin)
        facts = [self._prompts.fingerprint, begin, self._seed, self._plan().size]
        facts += [self._recipe.score_centering] if self._recipe.score_centering else []
        facts += [self._recipe.sampler] if self._recipe.sampler else []
        return json.dumps([*facts, *(options[name] for name in kept), *origin])

    def _fits(self, group: OpenGroup) -> bool:
        """Return whether a stored group has the responses that this run samples."""
        plan = self._plan()
        has_all = len(group.rollouts) == plan.size_of(self._prompt_of(group.draw))
        return has_all and group.has_top_tokens(plan.num_top, plan.num_samples)

    def _held(
        self, folder: Path | None, state: SamplingState, banked: Mapping[int, BankedGroup]
    ) -> list[OpenGroup]:
        """Return the groups that this TP group continues: those of a checkpoint that have not been
        trained on, on its first rank in the newest state that is on the disk."""
        by_draw: dict[int, OpenGroup] = {}
        num_unfit = 0
        for each in agreed_in_world(partial(self._stored_groups, folder)):
            if each.draw not in state.outstanding:
                continue
            fits = self._fits(each)
            num_unfit += not fits
            by_draw[each.draw] = each if fits else self._new_group(each.draw)
        if num_unfit and self._workers.is_leader:
            logger.warning(
                "[Resume] %d unfinished groups are sampled again: the number of samples per prompt "
                "or --rl-score-centering has changed",
                num_unfit,
            )
        held = objects.all_gather(list(by_draw) if self._workers.is_leader else [])
        everywhere = [draw for some in held for draw in some]
        if len({*everywhere}) < len(everywhere):
            raise not_held(folder, "unfinished groups of samples", "a draw has several groups")
        missing = sorted(state.outstanding.keys() - {*everywhere})
        for draw in missing[self._workers.tp_group :: self._workers.num_tp_groups]:
            by_draw[draw] = self._new_group(draw)
        here = {draw: banked[draw].read() for draw in by_draw.keys() & banked.keys()}
        return [here.get(draw) or by_draw[draw] for draw in sorted(by_draw)]

    def _stored_groups(self, folder: Path | None) -> list[OpenGroup]:
        if folder is None or not folder.is_dir():
            return []
        return read_groups(
            folder,
            self._prompt_of,
            tp_group=self._workers.tp_group,
            num_tp_groups=self._workers.num_tp_groups,
            has_environments=self._workers.has_environments,
            limits=self._workers.limits,
        )

    def _new_group(self, draw: int) -> OpenGroup:
        return OpenGroup.new(draw, self._plan().size_of(self._prompt_of(draw)))

    def _continuing(self, outstanding: Collection[int]) -> list[OpenGroup]:
        """Return the groups here whose responses a checkpoint holds, with their conversations as
        they are now."""
        scheduler, resumed = self._groups.scheduler, {each.draw: each for each in self._resumed}
        return [
            dataclasses.replace(
                group, conversations=group.conversations | scheduler.conversations_of(draw)
            )
            for draw, group in sorted((resumed | scheduler.open).items())
            if draw in outstanding
        ]


def length_bias(table: SampleTable, counts: StepCounts) -> float:
    """Return the mean length of a step's responses minus that of these and the left ones, in
    tokens.

    Responses of dropped and pending groups count with their length so far, so the true bias is at
    least as large.
    """
    num_tokens = int(table.response_lengths.sum())
    mean_of_all = (num_tokens + counts.left_tokens) / (len(table) + counts.left_samples)
    return num_tokens / len(table) - mean_of_all


def sampling_of(options: RolloutOptions) -> Sampling:
    """Return how training samples are drawn, from the flags."""
    return Sampling(
        temperature=options.temperature,
        top_p=1.0 if options.top_p is None else options.top_p,
        top_k=options.top_k or -1,
        stop=options.stop,
    )


def _oldest_versions(table: SampleTable) -> dict[int, int]:
    """Return the oldest version of each draw's samples."""
    return dict(zip(table.draws.tolist(), table.oldest_versions.tolist(), strict=True))


def _groups_of(table: SampleTable) -> list[SampleTable]:
    """Return the samples of each group."""
    ends = np.cumsum(np.bincount(table.group_ids)) if len(table) else ()
    return [table.take(range(first, end)) for first, end in pairwise((0, *ends))]


def _in_places(
    groups: Sequence[SampleTable], places: Mapping[int, int]
) -> tuple[list[SampleTable], list[SampleTable]]:
    """Divide groups into the first for which there are `places`, by their samples, and others."""
    left = Counter(places)
    divided: tuple[list[SampleTable], list[SampleTable]] = [], []
    for group in groups:
        left[len(group)] -= 1
        divided[left[len(group)] < 0].append(group)
    return divided
