"""Sampling ahead: engines on ranks of their own sample later steps while the actor trains.

    the actor ── update(version) ──► pause: running requests end; new weights; the next step begins
              ── collect ──────────► sample until the step's groups are decided; they leave
                                     between calls: sample what may start

Groups start, finish and are taken by the rules of `admission.Admission`, across all TP groups.
Finished groups are in a `Bank` on the disk, for a run that is killed between two checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.algorithms.recipes import Algorithm
from mcore_rl.batching.types import Prompt
from mcore_rl.common import objects
from mcore_rl.common.errors import not_held
from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine, SamplingGeneration
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.observe.timeline import SAMPLING, Activity
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.admission import Admission
from mcore_rl.rollout.ahead_state import AheadMetrics, AheadState
from mcore_rl.rollout.bank import Bank, BankedGroup, read_bank
from mcore_rl.rollout.collector import Collected, length_bias, sampling_of
from mcore_rl.rollout.comparison import GroupComparison
from mcore_rl.rollout.continuous import ContinuousScheduler
from mcore_rl.rollout.dispatch import StepCounts
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.options import RolloutOptions
from mcore_rl.rollout.pending import read_groups, write_groups
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.shared_draws import SharedDraws, StepDecision
from mcore_rl.rollout.stream import step_engine

logger = logging.getLogger(__name__)

# The version of a group without tokens, above all others: it starts with the current weights.
_NOT_STARTED = 1 << 31


class AheadSampler:
    """The engines' sampling of a run. Methods are collective over the engines' ranks."""

    def __init__(
        self,
        engine: SamplingEngine,
        workers: RolloutWorkers,
        prompts: PromptSources,
        recipe: Algorithm,
        options: RolloutOptions,
        rewards: RewardSpec,
        layout: RolloutLayout,
        *,
        num_prompts_per_step: int,
        seed: int,
        position: int,
        sample_store: SampleStore,
        bank: Path,
        folder: Path | None = None,
        origin: Sequence[Any] = (),
    ) -> None:
        """`position` is the number of prompts drawn before, `bank` the folder of finished groups.
        `folder` is what `save` wrote, if a run resumes; UsageError if it has other content.
        `origin` are JSON values that name the run's branch, the model that it began with, and its
        environments.
        On the first rank of a TP group, which reads the bank, `num_banked` is then the number of
        groups that need not be sampled again, and `skipped` describes what is damaged or of another
        run."""
        self._engine, self._workers, self._sample_store = engine, workers, sample_store
        self._prompts, self._recipe, self._options, self._seed = prompts, recipe, options, seed
        self._drops_stale = options.stale_rollouts == "drop"
        rank = dist.get_rank()
        self._tp_group, self._num_tp_groups = layout.tp_group_index(rank), layout.num_tp_groups
        self._is_leader = layout.tp_rank(rank) == 0
        self._metrics, self.activity = AheadMetrics(), Activity()
        self._taken: dict[int, int] = {}  # draws of the last step, and their oldest versions
        self._undone: dict[int, int] = {}  # the same, if the step is to be repeated
        self._left = StepCounts()  # groups dropped since the last step, on the first rank
        self._is_paused = True
        self._context = ExitStack()  # of the generation
        self._generation: SamplingGeneration | None = None
        state = AheadState.read(folder, position)
        fingerprint = self._fingerprint(origin)
        banked: dict[int, BankedGroup] = {}
        self.skipped: list[str] = []
        if self._is_leader:
            banked, self.skipped = read_bank(
                bank,
                self._prompt_of,
                fingerprint=fingerprint,
                limits=workers.limits,
                fits=self._fits,
            )
        objects.barrier()  # all have read it before the first file is rewritten
        self._resumed = engine.of_first_rank(self._held(folder, state, banked))
        self._last_version = state.weight_version
        self._metrics.uncounted = state.uncounted
        outstanding = self._outstanding(state)
        # Draws that are trained on or dropped, and whose groups are in the bank.
        self._done = {d for d in banked if d < state.next_draw and d not in outstanding}
        self._covered: set[int] = set()  # of these, those before the last `save`
        self.num_banked = len(banked) - len(self._done)
        self._draws = self._make_draws(state.next_draw, outstanding, num_prompts_per_step)
        self._comparison = GroupComparison(recipe, rewards, prompts.keys_of)
        most_groups = (options.staleness_limit + 1) * num_prompts_per_step
        self._scheduler = ContinuousScheduler(
            engine,
            self._plan(),
            self._prompt_of,
            draws=self._draws,
            bank=self._make_bank(bank, fingerprint),
            rewards=workers.rewards if self._is_leader else None,
            select=self._comparison.select if recipe.replaces_groups else None,
            most_groups=math.ceil(most_groups / self._num_tp_groups),
            conversations=workers.conversations,
            banked={draw: each for draw, each in banked.items() if draw >= state.next_draw},
        )

    def _make_draws(
        self, next_draw: int, outstanding: Mapping[int, int], groups_per_step: int
    ) -> SharedDraws | None:
        """Return this TP group's access to the draws, on its first rank."""
        if not self._is_leader:
            return None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"mcore_rl/ahead/{attempt}", store)
        admission = None
        if self._tp_group == 0:
            recipe, options = self._recipe, self._options
            admission = Admission(
                groups_per_step=groups_per_step,
                max_staleness=options.staleness_limit,
                next_draw=next_draw,
                max_refills=recipe.max_refills if recipe.replaces_groups else None,
                drops_stale=self._drops_stale,
                groups=outstanding,
            )
        return SharedDraws(store, next_draw, admission)

    def _make_bank(self, folder: Path, fingerprint: str) -> Bank | None:
        if not self._is_leader:
            return None
        owners = self._tp_group, self._num_tp_groups
        return Bank(folder, owner=owners[0], num_owners=owners[1], fingerprint=fingerprint)

    # What a run does

    def pause(self) -> None:
        """End running requests with their next token, before the weights change."""
        self._is_paused = True
        self._scheduler.pause()
        if self._generation is not None:
            self._run(lambda: False)
        self._context.close()
        self._generation = None
        if self._draws is not None:
            self._draws.forget_stops()

    def work_until(self, is_called: Callable[[], bool]) -> None:
        """Sample until a call has begun; does nothing after `pause`."""
        if not self._is_paused:
            self._run(is_called)

    def collect(self, weight_version: int) -> Collected:
        """Begin a step with weights of this version, after `pause`. Sample until its groups are
        decided, and return them."""
        collected = self.collect_unless(weight_version, None)
        assert collected is not None, "nothing stops it"
        return collected

    def collect_unless(
        self, weight_version: int, is_stuck: Callable[[], bool] | None
    ) -> Collected | None:
        """Do what `collect` does, unless `is_stuck` on the first rank of any TP group before the
        groups are decided. Then return None on all ranks: after `pause` and an update to the same
        weights, call it again, or `abandon_step`. `is_stuck` None: no rank is ever stuck."""
        if weight_version != self._last_version:
            self._begin_step(weight_version)
        else:
            self._continue_step(weight_version)
        decided: list[StepDecision] = []

        def is_decided() -> bool:
            assert self._draws is not None
            if not decided and (decision := self._draws.decision()) is not None:
                decided.append(decision)
            if decided or is_stuck is None:
                return bool(decided)
            if is_stuck():
                self._draws.stop_all()
            return self._draws.must_stop()

        self._run(is_decided)
        if is_stuck is not None:
            if not objects.broadcast(bool(decided)):  # the coordinator is the first rank
                return None
            if self._draws is not None and not decided:
                is_decided()  # the decision is in the store
        decision = self._engine.of_first_rank(decided[0] if decided else None)
        here = self._scheduler.take(decision.taken) if self._is_leader else None
        taken, _ = self._scheduler.partition(self._engine.of_first_rank(here))
        self._scheduler.forget({*decision.taken, *decision.dropped})
        self._done |= {*decision.taken, *decision.dropped}
        self._sample_store.clear()
        counts, self._left = self._left, StepCounts()
        if self._is_leader:
            counts.generated_tokens = self._scheduler.take_generated_tokens()
        table, counts = self._workers.score(
            self._scheduler.plan, taken, counts, None, seconds=0.0, waited=lambda seconds: None
        )
        self._taken = dict(zip(table.draws.tolist(), table.oldest_versions.tolist(), strict=True))
        admitted = None if self._admission is None else self._admission.counts()
        metrics = self._metrics.of_step(
            table,
            weight_version,
            objects.broadcast(admitted),
            taken if self._is_leader else [],
            self.activity.seconds(SAMPLING),
        )
        for name, count in self._comparison.filtered([table]).items():
            metrics[name] = metrics.get(name, 0.0) + count
        if self._drops_stale:
            metrics["rollout/length_bias_tokens"] = length_bias(table, counts)
        return Collected(
            table,
            counts.generated_tokens,
            metrics | self._workers.draft_metrics(),
            sampling_seconds=self._metrics.sampling_seconds,
            example=self._workers.example(),
        )

    def undo(self) -> None:
        """Count the last step's draws as not sampled: a run that resumes samples them again, and
        repeats the step with weights of the same version."""
        self._scheduler.forget_banked(self._taken, waits=True)
        self._undone = dict(self._taken)
        self._metrics.undo()
        assert self._last_version is not None, "no step to undo"
        self._last_version -= 1

    def abandon_step(self) -> None:
        """Count a step whose groups are not decided as not begun: a run that resumes begins it."""
        assert self._last_version is not None, "no step has begun"
        self._last_version -= 1

    @property
    def position(self) -> int:
        """The first draw that has never been admitted, on the first rank; 0 on others."""
        return 0 if self._admission is None else self._admission.limit

    def save(self, folder: Path) -> None:
        """Write what a resumed run continues from."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._draws is not None:
            self._draws.flush()
        objects.barrier()
        outstanding: dict[int, int] = {}
        if self._admission is not None and self._draws is not None:
            self._draws.flush()  # reads what the others have sent
            outstanding = self._admission.outstanding | self._undone
            counts = self._admission.counts()
            # Draws that have not started start with the resumed run, which does not count them.
            num_started = counts.started + self._admission.num_unstarted
            uncounted = self._metrics.since(dataclasses.replace(counts, started=num_started))
            state = AheadState(self._admission.limit, outstanding, self._last_version, uncounted)
            state.write(folder)
        outstanding = objects.broadcast(outstanding)
        self._covered = {*self._done}
        if self._is_leader:
            write_groups(self._continuing(outstanding), folder, self._tp_group)

    def saved(self) -> None:
        """Remove from the bank what the checkpoint of the last `save`, which is complete now, has
        trained on; does not wait for the disk."""
        self._scheduler.forget_banked(self._covered)
        self._done -= self._covered

    def close(self) -> None:
        """Stop sampling."""
        self._context.close()
        self._scheduler.close()

    # Internal

    def _begin_step(self, weight_version: int) -> None:
        if self._draws is not None:
            self._draws.flush()
        objects.barrier()  # all TP groups have flushed
        is_first = self._metrics.num_steps == 0
        discarded: tuple[tuple[int, ...], ...] = (), ()
        if self._last_version is not None and is_first:
            # Versions without a step, such as that of the last evaluation of a run.
            self._metrics.last_before = self._last_version
            self._metrics.num_skipped = weight_version - 1 - self._last_version
        if self._admission is not None and self._draws is not None:
            if is_first:
                self._admission.skip_versions(self._metrics.num_skipped)
            discarded = self._draws.begin_step(weight_version), self._admission.restarted
            if is_first and discarded[0]:
                self._log_late(len(discarded[0]))
        stale, restarted = objects.broadcast(discarded)
        gone = self._scheduler.forget(stale)
        if self._is_leader and self._drops_stale:
            self._count_left(gone)
        if is_first:  # before the bank has other groups of the same draws
            self._scheduler.forget_banked(stale, waits=True)
        else:
            self._done |= set(stale)
        self._metrics.num_steps += 1
        self._last_version = weight_version
        self._continue_step(weight_version)
        resumed, self._resumed = self._resumed, []
        groups = [each for each in resumed if each.draw not in stale]
        size = self._plan().size
        mine = restarted[self._tp_group :: self._num_tp_groups]
        self._scheduler.load([*groups, *(OpenGroup.new(draw, size) for draw in mine)])

    def _count_left(self, dropped: Sequence[OpenGroup]) -> None:
        num_samples_of = self._plan().num_samples_of
        self._left.left_samples += sum(map(num_samples_of, dropped))
        self._left.left_tokens += sum(each.num_tokens(num_samples_of(each)) for each in dropped)

    def _log_late(self, num_groups: int) -> None:
        logger.warning(
            "[Resume] %d groups of the checkpoint are too many or too old for --rl-max-staleness "
            "%d: %s",
            num_groups,
            self._options.staleness_limit,
            "they are dropped" if self._drops_stale else "their prompts are sampled again",
        )

    def _continue_step(self, weight_version: int) -> None:
        self._scheduler.resume(weight_version)
        self._is_paused = False

    @property
    def _admission(self) -> Admission | None:
        """On the coordinator, the first rank."""
        return None if self._draws is None else self._draws.admission

    def _run(self, until: Callable[[], bool]) -> None:
        """Step the engine until `until` is true on the first rank of each TP group, or, while
        pausing, until no request runs."""
        if self._generation is None:
            self._generation = self._context.enter_context(self._engine.generation())
        self._scheduler.until = until
        step_engine(self._engine, self._scheduler, self._generation, activity=self.activity)
        error = self._engine.of_first_rank(
            None if self._scheduler.error is None else str(self._scheduler.error)
        )
        if error is not None:
            raise RuntimeError(f"sampling failed: {error}") from self._scheduler.error

    def _plan(self) -> GroupPlan:
        return GroupPlan(
            num_samples=self._recipe.num_samples_per_prompt,
            sampling=sampling_of(self._options),
            max_tokens=self._options.max_response_tokens,
            seed=self._seed,
            first_draw=0,
            weight_version=0,
            with_routes=self._sample_store.routed is not None,
            num_top=self._recipe.score_centering,
            with_greedy=self._recipe.needs_greedy_baseline,
            has_environments=self._workers.has_environments,
            max_turn_tokens=self._workers.max_turn_tokens,
            keeps_kv=self._options.keeps_kv,
        )

    def _prompt_of(self, draw: int) -> Prompt:
        return self._prompts.of_draw(draw, seed=self._seed)

    def _fingerprint(self, origin: Sequence[Any]) -> str:
        """Return a line that names what the responses of a finished group depend on, besides what
        weights have learned. Rewards are not part of it: what a group lacks is requested again."""
        options = dataclasses.asdict(self._options)
        kept = ("temperature", "top_p", "top_k", "max_response_tokens", "stop")
        begin = dataclasses.asdict(self._prompts.begin)
        facts = [self._prompts.fingerprint, begin, self._seed, self._plan().size]
        facts += [self._recipe.score_centering] if self._recipe.score_centering else []
        return json.dumps([*facts, *(options[name] for name in kept), *origin])

    def _fits(self, group: OpenGroup) -> bool:
        """Return whether a stored group has the responses that this run samples."""
        plan = self._plan()
        has_all = len(group.rollouts) == plan.size
        return has_all and group.has_top_tokens(plan.num_top, plan.num_samples)

    def _held(
        self, folder: Path | None, state: AheadState, banked: Mapping[int, BankedGroup]
    ) -> list[OpenGroup]:
        """Return the groups that this TP group continues: those of a checkpoint that have not been
        trained on, on its first rank in the newest state that is on the disk."""
        size = self._plan().size
        groups: list[OpenGroup] = []
        if folder is not None and folder.is_dir():
            groups = read_groups(
                folder,
                self._prompt_of,
                tp_group=self._tp_group,
                num_tp_groups=self._num_tp_groups,
                has_environments=self._workers.has_environments,
                limits=self._workers.limits,
            )
        by_draw: dict[int, OpenGroup] = {}
        num_unfit = 0
        for each in groups:
            if state.outstanding is not None and each.draw not in state.outstanding:
                continue
            fits = self._fits(each)
            num_unfit += not fits
            by_draw[each.draw] = each if fits else OpenGroup.new(each.draw, size)
        if num_unfit and self._is_leader:
            logger.warning(
                "[Resume] %d unfinished groups are sampled again: the number of samples per prompt "
                "or --rl-score-centering has changed",
                num_unfit,
            )
        held = objects.all_gather(list(by_draw) if self._is_leader else [])
        everywhere = [draw for some in held for draw in some]
        if len({*everywhere}) < len(everywhere):
            raise not_held(folder, "unfinished groups of samples", "a draw has several groups")
        missing = (state.outstanding or {}).keys() - {*everywhere}
        for draw in sorted(missing)[self._tp_group :: self._num_tp_groups]:
            by_draw[draw] = OpenGroup.new(draw, size)
        here = {draw: banked[draw].read() for draw in by_draw.keys() & banked.keys()}
        return [here.get(draw) or by_draw[draw] for draw in sorted(by_draw)]

    def _outstanding(self, state: AheadState) -> dict[int, int]:
        """Return the draws that the run continues, with the versions that they started with."""
        if state.outstanding is not None:
            return state.outstanding
        # Partial responses of engines on the actor's ranks.
        oldest = {each.draw: each.oldest_version for each in self._resumed}
        mine = {draw: _NOT_STARTED if v is None else v for draw, v in oldest.items()}
        everywhere = objects.all_gather(mine if self._is_leader else {})
        return {draw: version for some in everywhere for draw, version in some.items()}

    def _continuing(self, outstanding: Collection[int]) -> list[OpenGroup]:
        """Return the groups here whose responses a checkpoint holds, with their conversations as
        they are now."""
        return [
            dataclasses.replace(group, conversations=self._scheduler.conversations_of(draw))
            for draw, group in sorted(self._scheduler.open.items())
            if draw in outstanding
        ]
