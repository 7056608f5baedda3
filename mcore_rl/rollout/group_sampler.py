"""Groups that all engines of a job sample, from their draws to the decision of a step.

    begin_step ──► sample ── until the step is decided ──► groups_of
                                                            end_step   engines stop
                                                            pause      engines sample on

The engines of a run's steps stop, or sample on between them (`rollout.admission`); those of an
evaluation stop.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mcore_rl.batching.types import Prompt
from mcore_rl.common import objects
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingGeneration
from mcore_rl.observe.timeline import IDLE, Activity
from mcore_rl.rollout.admission import Admission, AdmissionCounts, StepDecision, StepEnd
from mcore_rl.rollout.bank import Bank, BankedGroup
from mcore_rl.rollout.draws import Draws, StepStart
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.scheduler import Scheduler, Select
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.stream import step_engine
from mcore_rl.rollout.user_groups import UserGroups


@dataclass(frozen=True, slots=True)
class Rules:
    """What `Admission` decides by.

    Example: of 6 groups that start, a step takes the 4 that finish first; the others continue:
    `Rules(groups_per_step=4, max_staleness=4, extra_groups=2)`.
    """

    groups_per_step: int
    max_staleness: int = 0
    extra_groups: int | None = 0  # None: engines do not stop
    max_refills: int | None = None
    drops_stale: bool = False
    deterministic: bool = False  # the result does not depend on the speed of engines and rewards

    @property
    def decides_alone(self) -> bool:
        """Whether each TP group decides on a share of the groups: if it depends on speed which
        groups are replaced, or finish first."""
        depends = self.max_refills is not None or self.max_staleness or self.extra_groups
        return self.deterministic and bool(depends)

    @property
    def stops(self) -> bool:
        """Whether engines stop when a step is decided."""
        return self.extra_groups is not None

    def share(self, part: int, num_parts: int) -> Rules:
        """Return part `part` of `num_parts` nearly equal parts."""
        most = share_of(self.groups_per_step + (self.extra_groups or 0), part, num_parts)
        num_groups = share_of(self.groups_per_step, part, num_parts)
        extra = most - num_groups if num_groups else 0
        return dataclasses.replace(self, groups_per_step=num_groups, extra_groups=extra)


def share_of(number: int, part: int, num_parts: int) -> int:
    """Return part `part` of `num_parts` nearly equal parts of a number."""
    return number // num_parts + (part < number % num_parts)


class GroupSampler:
    """Samples groups on this rank's engine. Collective over the engines' ranks, except for
    properties; the first rank of the first TP group has the `Admission`, with
    `Rules.decides_alone` that of each TP group."""

    def __init__(
        self,
        workers: RolloutWorkers,
        plan: GroupPlan,
        prompt_of: Callable[[int], Prompt],
        rules: Rules,
        *,
        name: str,
        next_draw: int = 0,
        groups: Mapping[int, int] | None = None,
        select: Select | None = None,
        bank: Bank | None = None,
        banked: dict[int, BankedGroup] | None = None,
        user_groups: UserGroups | None = None,
    ) -> None:
        """`name` is unique in the job. Every rank has the same `next_draw` and `groups` (see
        `Admission`); with `Rules.decides_alone`, `groups` are those of the TP group. `select`,
        `bank`, `banked` and `user_groups` are those of `Scheduler`."""
        self._workers, self._engine, self._rules = workers, workers.engine, rules
        self._member, self._num_members = workers.tp_group, workers.num_tp_groups
        self.activity = Activity()
        self._is_paused = True
        self._context = ExitStack()  # of the generation
        self._generation: SamplingGeneration | None = None
        self._own = rules.share(*self._place) if rules.decides_alone else rules
        self._draws = self._make_draws(name, next_draw, groups) if workers.is_leader else None
        self.scheduler = Scheduler(
            self._engine,
            workers.complete(plan),
            prompt_of,
            draws=self._draws,
            rewards=workers.rewards if workers.is_leader else None,
            select=select,
            most_groups=self._most_groups,
            conversations=workers.conversations,
            bank=bank,
            banked=banked,
            user_groups=user_groups,
            waits=rules.decides_alone and select is not None,
        )

    @property
    def _place(self) -> tuple[int, int]:
        return self._member, self._num_members

    @property
    def _most_groups(self) -> int:
        """The number of groups that are sampled here at a time."""
        own, extra = self._own, self._own.extra_groups
        most = own.groups_per_step + (
            own.groups_per_step * own.max_staleness if extra is None else extra
        )
        return most if self._rules.decides_alone else math.ceil(most / self._num_members)

    def _make_draws(self, name: str, next_draw: int, groups: Mapping[int, int] | None) -> Draws:
        own, alone = self._own, self._rules.decides_alone
        stride = self._num_members if alone else 1
        admission = None
        if alone or self._workers.is_coordinator:
            admission = Admission(
                groups_per_step=own.groups_per_step,
                max_staleness=own.max_staleness,
                next_draw=next_draw,
                max_refills=own.max_refills,
                drops_stale=own.drops_stale,
                groups=groups,
                extra_groups=own.extra_groups,
                stride=stride,
            )
        if alone or self._num_members == 1:
            return Draws(dist.HashStore(), next_draw, admission, stride=stride)
        # The store outlives a job that torchrun restarts.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(
            f"mcore_rl/draws/{attempt}/{name}", dist.distributed_c10d._get_default_store()
        )
        member, num_members = self._place
        return Draws(store, next_draw, admission, member=member, num_members=num_members)

    @property
    def admission(self) -> Admission | None:
        """On the coordinator, or on the first rank of each TP group."""
        return None if self._draws is None else self._draws.admission

    def counts(self) -> AdmissionCounts:
        """Return the counts of the coordinator's `admission`."""
        admission = self.admission
        agreed: AdmissionCounts = self._agreed(None if admission is None else admission.counts())
        return agreed

    # A step

    def begin_step(
        self,
        weight_version: int,
        *,
        num_skipped: int = 0,
        num_groups: int | None = None,
        sizes: Sequence[int] = (),
        next_draw: int | None = None,
        order_of: Callable[[int], Sequence[int]] | None = None,
    ) -> StepStart:
        """Begin a step with weights of this version, after `num_skipped` versions without a step.
        If engines stop, it may be another round, as in `Admission.begin_step`. `order_of` returns
        the order in which a number of first draws start."""
        if not self._rules.stops:
            self._flush()
        start = None
        if self._draws is not None and self.admission is not None:
            if num_skipped:
                self.admission.skip_versions(num_skipped)
            part, num_parts = self._place if self._rules.decides_alone else (0, 1)
            start = self._draws.begin_step(
                weight_version,
                num_groups=None if num_groups is None else share_of(num_groups, part, num_parts),
                sizes=sizes[part::num_parts],
                next_draw=None if next_draw is None else next_draw + part,
            )
        agreed: StepStart = self._agreed(start)
        if self._draws is not None and self._rules.stops:
            counts_all = not self._rules.decides_alone  # else every n-th draw is here
            self._draws.restart(
                agreed,
                order=order_of(agreed.num_first) if order_of and counts_all else (),
                num_round_robin=self._num_round_robin(agreed.num_first, num_groups),
                is_last=self._rules.max_refills is None,
            )
        self.resume(weight_version)
        return agreed

    def _num_round_robin(self, num_first: int, num_groups: int | None) -> int:
        """Return the number of draws that every TP group begins with: those that have room there,
        or none if groups continue, which have places already. Where the result must not depend on
        speed, all."""
        num_groups = self._rules.groups_per_step if num_groups is None else num_groups
        continues = num_first < num_groups + (self._rules.extra_groups or 0)
        if self._rules.decides_alone or continues:
            return 0
        if self._rules.deterministic:
            return math.ceil(num_first / self._num_members)
        room = self._engine.config.max_num_seqs // self.scheduler.plan.size
        return min(room, num_first // self._num_members)

    def resume(self, weight_version: int) -> None:
        """Sample with weights of this version, after `pause`. Local."""
        self.scheduler.resume(weight_version)
        self._is_paused = False

    def load(
        self, groups: Sequence[OpenGroup], restarted: Sequence[int] = (), *, is_resumed: bool
    ) -> None:
        """Continue groups of this TP group, and its part of draws that start again, in a step that
        has begun. For `is_resumed` see `Scheduler.load`. Local."""
        mine = restarted
        if not self._rules.decides_alone:
            mine = restarted[self._member :: self._num_members]
        new = (self.scheduler.new_group(draw) for draw in mine)
        self.scheduler.load([*groups, *new], is_resumed=is_resumed)

    def sample(
        self,
        *,
        is_stuck: Callable[[], bool] | None = None,
        when_few_are_left: Callable[[], object] | None = None,
    ) -> StepDecision | None:
        """Sample until the step is decided, and return its groups; None if `is_stuck` on the first
        rank of any TP group before that. Raises RuntimeError on all ranks if rewards fail. For
        `when_few_are_left` see `step_engine`."""
        decided: list[StepDecision] = []

        def is_decided() -> bool:
            assert self._draws is not None
            if not decided and (decision := self._draws.decision()) is not None:
                decided.append(decision)
            if not decided and is_stuck is not None and is_stuck():
                self._draws.stop_all()
            # Without anything left to do, wait below for the coordinator, and not by polling.
            is_done = self._draws.is_exhausted and self.scheduler.has_reported_all
            is_done = is_done and self.admission is None
            return bool(decided) or is_done or self._draws.must_stop()

        self._run(is_decided, when_few_are_left)
        decision = decided[0] if decided else None
        everywhere = objects.all_gather((self.scheduler.error, decision))
        for rank, (error, _) in enumerate(everywhere):
            if error is not None:
                raise RuntimeError(f"sampling failed on rank {rank}: {error}") from error
        decisions: list[StepDecision] = [each for _, each in everywhere if each is not None]
        if self._rules.decides_alone:
            return StepDecision(
                tuple(sorted(draw for each in decisions for draw in each.taken)),
                tuple(sorted(draw for each in decisions for draw in each.dropped)),
            )
        agreed: StepDecision | None = everywhere[self._workers.coordinator][1]
        if agreed is not None and self._draws is not None and not decided:
            self._draws.decision()  # is in the store
        return agreed

    def end_step(self) -> StepEnd:
        """Stop the engines of a decided step, with all rewards, and return what else ends with it.
        Groups that continue wait for the next step."""
        self._stop(drops=not self._rules.max_staleness)
        self.scheduler.release()
        self.flush()
        agreed: StepEnd = self._agreed(
            None if self.admission is None else self.admission.end_step()
        )
        return agreed

    def next_draw(self, position: int, end: StepEnd) -> int:
        """Return the first draw after a step that began at `position`."""
        if not self._rules.decides_alone:
            return end.next_draw
        ends: list[int] = objects.all_gather(end.next_draw)
        return max(position, max(ends) - self._num_members + 1)

    def groups_of(self, draws: Collection[int]) -> list[OpenGroup]:
        """Return those of these draws' groups that are here."""
        here = self.scheduler.held(draws) if self._draws is not None else None
        return self.scheduler.groups_of(self._engine.of_first_rank(here))

    # Between steps

    def pause(self) -> None:
        """End running requests with their next token, before the weights change."""
        if self._is_paused:
            return
        self._stop(drops=False)
        if self._draws is not None:
            self._draws.forget_stops()

    def work_until(self, is_called: Callable[[], bool]) -> None:
        """Sample until a call has begun; does nothing after `pause` or `end_step`."""
        if not self._is_paused:
            self._run(is_called)

    def flush(self) -> None:
        """Let the `admission` know what all TP groups have done."""
        self._flush()
        self._flush_here()

    def close(self) -> None:
        """Stop sampling. Local."""
        self._context.close()
        self.scheduler.close()

    # Internal

    def _stop(self, *, drops: bool) -> None:
        self._is_paused = True
        self.scheduler.pause(drops=drops)
        if self._generation is not None:
            self._run(lambda: False)
        self._context.close()
        self._generation = None
        self.activity.begin(IDLE)

    def _flush(self) -> None:
        self._flush_here()
        objects.barrier()  # all TP groups have flushed

    def _flush_here(self) -> None:
        if self._draws is not None:
            self._draws.flush()

    def _agreed(self, mine: Any) -> Any:
        """Return what the rank with the `admission` has, on all ranks that it decides for."""
        if self._rules.decides_alone:
            return self._engine.of_first_rank(mine)
        return objects.broadcast(mine, self._workers.coordinator)

    def _run(
        self, until: Callable[[], bool], when_few_are_left: Callable[[], object] | None = None
    ) -> None:
        """Step the engine until `until` is true on the first rank of each TP group, or, while
        pausing, until no request runs."""
        if self._generation is None:
            self._generation = self._context.enter_context(self._engine.generation())
        self.scheduler.until = until
        step_engine(
            self._engine, self.scheduler, self._generation, when_few_are_left, self.activity
        )
