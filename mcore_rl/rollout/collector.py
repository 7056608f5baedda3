"""Collection of a step's samples: prompts, responses, rewards and replaced prompts.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) keeps a prompt only if its responses differ
in reward (see `comparison`): otherwise no response has an advantage over another. A step draws
prompts until it has enough, within `--rl-max-refills`. It fills the remaining places with prompts
whose rewards do not differ, so that every step has the same number of samples.

A group filter (`--rl-group-filter`) replaces groups in the same way, or drops them: a dropped group
keeps its place, as one whose rewards do not differ does, and is not trained on.

A sample whose reward failed has no reward. It is not compared and not trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from mcore_rl.algorithms.recipes import Algorithm
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import not_held
from mcore_rl.common.readers import read_regular
from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.vllm.generation import Sampling
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import TimeSpan
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.comparison import GroupComparison
from mcore_rl.rollout.curriculum import Curriculum
from mcore_rl.rollout.dispatch import SamplingTarget, StepCounts
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.options import RolloutOptions
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.segments import OpenGroup

_LENGTHS = "lengths.safetensors"


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


class Collector:
    """Draws, samples and scores a step's samples. Collective, except for methods marked local.

    `position` is the number of prompts drawn so far; a resumed run starts at the saved position.
    `lengths`, `[rows]` int32, are the tokens of the longest response when a row of the prompts file
    was last drawn; -1 if it never was.
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
        sample_store: SampleStore,
        curriculum: Curriculum | None = None,
    ) -> None:
        """`sample_store` must be the store of `workers`."""
        self._workers, self._prompts, self._options = workers, prompts, options
        self._recipe, self._num_prompts_per_step = recipe, num_prompts_per_step
        self._seed, self._timers, self._sample_store = seed, timers, sample_store
        self.position = self._step_began_at = position
        self.lengths = np.full(int(prompts.rows.max()) + 1, -1, dtype=np.int32)
        self._lengths_before = self.lengths
        self._curriculum = curriculum
        self._comparison = GroupComparison(recipe, rewards, prompts.keys_of)
        self._counts = StepCounts()  # of this step
        self._num_calls = 0

    def collect(self, weight_version: int, when_few_are_left: Callable[[], object]) -> Collected:
        """Sample a step, in rollout mode. `when_few_are_left` is passed to `run_stream`."""
        self._counts = StepCounts()
        self._step_began_at, self._lengths_before = self.position, self.lengths.copy()
        if self._curriculum is not None:
            self._curriculum.begin_step()
        self._sample_store.clear()
        self._workers.draft_metrics()  # discard the counts of evaluations
        if self._recipe.replaces_groups:
            return self._collect_informative(weight_version, when_few_are_left)
        target = SamplingTarget.of(
            self._num_prompts_per_step, oversample=self._options.groups_at_a_time
        )
        table = self._sample_groups(target, weight_version, when_few_are_left)
        return self._build_result(table, weight_version)

    def _collect_informative(
        self, weight_version: int, when_few_are_left: Callable[[], object]
    ) -> Collected:
        """Sample a step whose groups may be replaced: in one round if that is done during sampling,
        else in rounds."""
        num_groups, recipe = self._num_prompts_per_step, self._recipe
        places = Counter(self._sizes_of_step())
        kept: list[SampleTable] = []
        uninformative: list[SampleTable] = []
        max_draws = num_groups * (1 + recipe.max_refills)
        refills = 0
        while missing := num_groups - len(_in_places(kept, places)[0]):
            left = max_draws - (self.position - self._step_began_at)
            if left <= 0:
                break
            target = SamplingTarget(missing, min(missing, left), left)
            refills += target.num_started if kept or uninformative else 0
            if self._workers.compares:
                target = SamplingTarget.of(
                    num_groups,
                    max_refills=recipe.max_refills,
                    oversample=self._options.groups_at_a_time,
                )
            # Another round may follow: do not prefetch training.
            call_back = when_few_are_left if target.compares else None
            for group in _groups_of(self._sample_groups(target, weight_version, call_back)):
                (kept if self._comparison.is_kept(group) else uninformative).append(group)
            has_valid = (g.valid.any() or g.dropped[0] for g in (*kept, *uninformative))
            if target.compares or not any(has_valid):
                break  # if every reward failed, more draws would not help
        taken, surplus = _in_places(kept, places)
        fillers, others = _in_places(uninformative, places - Counter(map(len, taken)))
        for group in (*surplus, *others):
            self._counts.dropped += 1
            self._counts.left_samples += len(group)
            self._counts.left_tokens += int(group.response_lengths.sum())
        metrics = {
            "rollout/refills": (refills + self._counts.refills) / num_groups,
            "rollout/uninformative_share": len(fillers) / num_groups,
            "rollout/dropped_samples": float(self._dropped_samples),
            **self._comparison.filtered((*kept, *uninformative)),
        }
        table = SampleTable.joined(taken + fillers)
        return self._build_result(table, weight_version, metrics)

    def save(self, folder: Path) -> None:
        """Write what later steps depend on, besides the position. Local; all ranks must call it."""
        folder.mkdir(parents=True, exist_ok=True)
        self._workers.save_pending(folder)
        if dist.get_rank() == 0:
            save_file({"lengths": self.lengths}, folder / _LENGTHS)
            if self._curriculum is not None:
                self._curriculum.save(folder)

    def restore(self, folder: Path) -> None:
        """Load the state that a run over the same prompts saved. Local. Raises UsageError if a file
        has other content."""
        if not folder.is_dir():
            return  # an earlier version wrote the checkpoint
        self.lengths[:] = lengths_in(folder / _LENGTHS, len(self.lengths))
        if self._curriculum is not None:
            self._curriculum.restore(folder)
        recipe = self._recipe
        num_samples = recipe.num_samples_per_prompt

        def fits(group: OpenGroup) -> bool:
            if len(group.rollouts) != num_samples + recipe.needs_greedy_baseline:
                return False
            return group.has_top_tokens(recipe.score_centering, num_samples)

        self._workers.load_pending(folder, self._prompt_of, fits)

    def undo(self) -> None:
        """Discard the last step, which will be repeated: its prompts count as not drawn. Local."""
        self.position, self.lengths = self._step_began_at, self._lengths_before
        if self._curriculum is not None:
            self._curriculum.undo(self.position)
        self._workers.undo()

    def _build_result(
        self, table: SampleTable, weight_version: int, metrics: dict[str, float] | None = None
    ) -> Collected:
        metrics = {**(metrics or {}), **self._workers.draft_metrics()}
        if self._curriculum is not None:
            metrics |= self._curriculum.metrics()
        if self._recipe.needs_greedy_baseline:
            firsts = table.take(np.unique(table.group_ids, return_index=True)[1])
            metrics["reward/baseline_failures"] = float((~firsts.has_baseline).sum())
        if self._options.groups_at_a_time > 1.0:
            metrics |= _first_finished_metrics(table, self._counts)
        if self._options.keeps_unfinished:
            staleness = weight_version - table.oldest_versions
            metrics["rollout/pending_groups"] = float(self._counts.pending)
            metrics["rollout/staleness_mean"] = float(staleness.mean())
            metrics["rollout/staleness_max"] = float(staleness.max())
        example = self._workers.example()
        return Collected(table, self._counts.generated_tokens, metrics, example=example)

    def _sizes_of_step(self) -> tuple[int, ...]:
        """Return the samples of each group that a step takes: of as many draws, from any one on,
        because all blocks of draws are alike where sources differ in it."""
        size = self._recipe.num_samples_per_prompt
        return self._prompts.samples_of(self._step_began_at, self._num_prompts_per_step, size)

    @property
    def _dropped_samples(self) -> int:
        """The samples of the step's dropped groups. Pending groups are all of one size."""
        pending = self._counts.pending * self._recipe.num_samples_per_prompt
        return self._counts.left_samples - pending

    def _sample_groups(
        self,
        target: SamplingTarget,
        weight_version: int,
        when_few_are_left: Callable[[], object] | None,
    ) -> SampleTable:
        """Sample the responses to the next prompts, with their rewards."""
        options, recipe, sizes = self._options, self._recipe, self._sizes_of_step()
        plan = GroupPlan(
            num_samples=recipe.num_samples_per_prompt,
            most_samples=self._prompts.most_samples,
            sizes=sizes if len(set(sizes)) > 1 else (),
            sampling=sampling_of(options),
            max_tokens=options.max_response_tokens,
            seed=self._seed,
            first_draw=self.position,
            weight_version=weight_version,
            with_routes=self._sample_store.routed is not None,
            num_top=self._recipe.score_centering,
            with_greedy=recipe.needs_greedy_baseline,
            keeps_unfinished=options.keeps_unfinished,
        )
        with self._timers("rollout"):
            self._num_calls += 1
            groups = self._workers.sample(
                plan,
                target,
                self._prompt_of,
                key=f"{self._num_calls}",
                select=self._comparison.select if target.compares else None,
                order_of=self._longest_first,
                when_few_are_left=when_few_are_left,
            )
        with self._timers("reward"):
            select = None if target.compares else self._comparison.select
            table, counts = self._workers.settle(groups, self._record_idle_time, select=select)
        self.position += counts.num_draws
        self._counts += counts
        self.lengths[table.prompts] = 0
        np.maximum.at(self.lengths, table.prompts, table.response_lengths)
        if self._curriculum is not None:
            informative = self._comparison.informative(table, table.prompts)
            self._curriculum.settle(self.position, table, informative)
        return table

    def _record_idle_time(self, seconds: float) -> None:
        self._timers.add("reward", -seconds)
        self._timers.add("rollout", seconds)

    def _longest_first(self, count: int) -> tuple[int, ...]:
        """Return the order of the next `count` draws, by the length of the previous responses to
        their prompts, longest first, so that the last responses to start are short. Draws without a
        known length count as the mean and keep their order."""
        rows = self._prompts.rows[self._prompt_positions(self.position, count)]
        lengths = self.lengths[rows].astype(np.float64)
        is_known = lengths >= 0
        if not is_known.any():
            return ()
        lengths[~is_known] = lengths[is_known].mean()
        return tuple(np.argsort(-lengths, kind="stable").tolist())

    def _prompt_of(self, draw: int) -> Prompt:
        """Return the prompt of one of the run's draws."""
        return self._prompts[int(self._prompt_positions(draw, 1)[0])]

    def _prompt_positions(self, draw: int, count: int) -> np.ndarray:
        if self._curriculum is None:
            return self._prompts.indices(draw, count, seed=self._seed)
        return np.array([self._curriculum.position_of(draw + n) for n in range(count)])


def lengths_in(path: Path, num_rows: int) -> np.ndarray:
    """Read `[num_rows]` int32 as written by `Collector.save`; -1: unknown. Raises UsageError."""
    what = f"lengths of responses to {num_rows} prompts"
    try:
        lengths = load(read_regular(path))["lengths"]
    except (SafetensorError, LookupError, OSError) as error:
        raise not_held(path, what, f"{type(error).__name__}: {error}") from error
    if lengths.dtype != np.int32 or lengths.shape != (num_rows,) or (lengths < -1).any():
        raise not_held(
            path, what, f"it has {lengths.shape} of {lengths.dtype}, or lengths below -1"
        )
    return lengths


def _first_finished_metrics(table: SampleTable, counts: StepCounts) -> dict[str, float]:
    """Return the numbers of started and dropped groups, and the length bias of the taken groups."""
    return {
        "rollout/started_groups": float(counts.started),
        "rollout/dropped_groups": float(counts.dropped),
        "rollout/length_bias_tokens": length_bias(table, counts),
    }


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
