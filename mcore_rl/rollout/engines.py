"""Rollouts over all engines of the world: who samples which prompt, and what all ranks hear of it.

Prompts are dealt out in blocks to the TP groups of the engines (an engine with data-parallel ranks
of its own has several); all ranks of a group generate alike; the first rank of each scores its
samples; then everybody hears of all samples, in the order of the prompts, without their tokens.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Baseline, Prompt, Rollout, ScoredRollout
from mcore_rl.common import objects
from mcore_rl.flags.options import RLConfig
from mcore_rl.hybrid_engine.vllm.drafter import DraftCounts
from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling, seed_of
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.speculation import OFF
from mcore_rl.rewards.functions import REWARD_MODEL
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.dealing import Counters, Deal, LocalCounters, Wanted
from mcore_rl.rollout.groups import Differs, GroupPlan, Groups
from mcore_rl.rollout.keeper import SampleKeeper
from mcore_rl.rollout.stream import Conductor, Orders, run_stream


class Block(Conductor):
    """Requests that are known from the beginning."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = tuple(requests)
        self.completions: dict[int, Completion] = {}

    def orders(self, num_running: int) -> Orders:
        """All at first, nothing later."""
        submit, self._requests = self._requests, ()
        return Orders(submit)

    def finished(self, completion: Completion) -> None:
        """It is kept."""
        self.completions[completion.number] = completion

    def between_steps(self) -> None:
        """Nothing."""


class RolloutWorkers:
    """This rank's part in sampling and scoring. All methods but `close` are collective."""

    def __init__(
        self,
        engine: VLLMEngine,
        layout: RolloutLayout,
        config: RLConfig,
        rewards: RewardSpec,
        keeper: SampleKeeper,
        reward_model: Callable[[SampleKeeper, SampleTable], list[Outcome]] | None = None,
    ) -> None:
        """`keeper` gets what is sampled; `reward_model` scores what it keeps, collectively."""
        self._engine, self._layout, self._config = engine, layout, config
        self._rank = dist.get_rank()
        self._scores = layout.tp_rank(self._rank) == 0
        self._rewards = RewardStack(rewards)
        self._reward_model, self._keeper = reward_model, keeper
        self._counters: Counters = LocalCounters()
        if layout.num_tp_groups > 1:
            # The store outlives a job that torchrun starts again.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.distributed_c10d._get_default_store()
            self._counters = dist.PrefixStore(f"mcore_rl/deal/{attempt}", store)

    @property
    def compares(self) -> bool:
        """Whether groups can be compared while others are sampled: all their rewards come then."""
        return self._reward_model is None

    def generate(
        self,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        *,
        num_samples: int,
        temperature: float,
        weight_version: int,
        top_p: float = 1.0,
        top_k: int = -1,
        when_few_are_left: Callable[[], object] | None = None,
        with_routes: bool = False,
    ) -> dict[int, list[Rollout]]:
        """Sample responses to this TP group's block of `prompts`, in rollout mode: to each of its
        prompts, by their place in `prompts`.

        Each response is drawn from a random stream of its own, which its prompt's seed determines:
        who samples it and beside what is all the same. `when_few_are_left` is that of `run_stream`.
        """
        blocks = np.array_split(np.arange(len(prompts)), self._layout.num_tp_groups)
        mine = blocks[self._layout.tp_group_index(self._rank)]
        if not len(mine) and self._layout.dp_size == 1:  # fewer prompts than groups
            return {}  # data-parallel ranks of one engine step together, prompts or not
        requests = [
            Request(
                number=prompt * num_samples + sample,
                token_ids=prompts[prompt].token_ids,
                max_tokens=self._config.max_response_tokens,
                sampling=Sampling(temperature, top_p, top_k),
                seed=seed_of(seeds[prompt], sample),
                with_routes=with_routes,
            )
            for prompt in mine.tolist()
            for sample in range(num_samples)
        ]
        block = Block(requests)
        run_stream(self._engine, block, when_few_are_left=when_few_are_left)
        found: dict[int, list[Rollout]] = {prompt: [] for prompt in mine.tolist()}
        for number, completion in sorted(block.completions.items()):
            prompt, sample = divmod(number, num_samples)
            found[prompt].append(
                self._engine.rollout(prompts[prompt], sample, completion, weight_version)
            )
        return found

    def draft_metrics(self) -> dict[str, float]:
        """What became of drafts in all engines since the last call; none without --rl-speculate.

        Ranks of one TP group count the same, one of them for all.
        """
        if self._config.speculate == OFF:
            return {}
        mine = self._engine.take_draft_counts()
        counts = objects.all_gather(mine if self._scores else DraftCounts())
        return sum(counts, DraftCounts()).metrics()

    def sample(
        self,
        plan: GroupPlan,
        wanted: Wanted,
        prompt_of: Callable[[int], Prompt],
        *,
        key: str,
        differs: Differs | None = None,
        when_few_are_left: Callable[[], object] | None = None,
    ) -> Groups:
        """This TP group's part of a step's groups, on their way to their rewards; in rollout mode.

        `prompt_of` gives the prompt of each of the step's draws; `key` is of this call alone, and
        the same on all ranks. `differs` is asked of groups where `wanted` compares them.
        """
        deal = None
        if self._scores:
            group, num_groups = self._layout.tp_group_index(self._rank), self._layout.num_tp_groups
            turn = (group, num_groups) if self._config.deterministic else None
            deal = Deal(wanted, self._counters, key, turn=turn)
        groups = Groups(
            self._engine,
            plan,
            prompt_of,
            deal=deal,
            rewards=self._rewards if self._scores else None,
            differs=differs,
        )
        run_stream(self._engine, groups, when_few_are_left=when_few_are_left)
        return groups

    def settle(self, groups: Groups, waited: Callable[[float], object]) -> tuple[SampleTable, int]:
        """Wait for the rewards that are left: the table of all TP groups' samples, in the order of
        the draws, and how many draws there were. The samples stay here, with the keeper.

        `waited` hears for how many seconds this rank stood still because others were still
        sampling: beyond what the slowest was rewarded for.
        """
        started = time.perf_counter()
        groups.wait()
        plan, sampled = groups.plan, groups.sampled
        # Greedy responses last: what learns is the samples.
        numbers = sorted(sampled.rollouts, key=lambda n: (plan.is_greedy(n), n))
        num_samples = sum(not plan.is_greedy(number) for number in numbers)
        return self._rewarded(
            [sampled.rollouts[number] for number in numbers],
            [plan.first_draw + number // plan.size for number in numbers],
            num_samples,
            {name: [sampled.outcomes[n][name] for n in numbers] for name in self._rewards.names}
            if self._scores and sampled.error is None
            else {},
            sampled.error,
            seconds=time.perf_counter() - started,
            last=groups.last,
            waited=waited,
        )

    def score(self, rollouts: Sequence[Rollout], places: Sequence[int]) -> SampleTable:
        """Reward this group's rollouts, which stand at these places: the table of all groups', in
        their order."""
        error, outcomes = self._asked(rollouts)
        table, _ = self._rewarded(rollouts, places, len(rollouts), outcomes, error)
        return table

    def _rewarded(
        self,
        rollouts: Sequence[Rollout],
        draws: Sequence[int],
        num_samples: int,
        outcomes: dict[str, list[Outcome]],
        error: Exception | None,
        *,
        seconds: float = 0.0,
        last: int = -1,
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> tuple[SampleTable, int]:
        """The table of all groups' samples; behind so many of them are greedy responses."""
        first = self._keeper.keep([ScoredRollout(each, reward=0.0) for each in rollouts])
        if self._reward_model is not None:
            table, _ = self._exchanged(
                self._keeper.table(first, draws), error, seconds, last, waited
            )
            scores = self._reward_model(self._keeper, table)
            here = np.flatnonzero(table.homes == self._keeper.home)
            in_order = here[np.argsort(table.numbers[here])]
            outcomes[REWARD_MODEL] = [scores[row] for row in in_order]
            seconds, waited = 0.0, lambda seconds: None
        if self._scores and error is None:
            weighed = self._rewards.weigh(rollouts, outcomes)
            self._keeper.rewarded(first, _with_baselines(weighed, num_samples))
        mine = self._keeper.table(first, draws[:num_samples])
        return self._exchanged(mine, error, seconds, last, waited)

    def _asked(
        self, rollouts: Sequence[Rollout]
    ) -> tuple[Exception | None, dict[str, list[Outcome]]]:
        """What the rewards make of them, but for a reward model; or what they raised."""
        try:
            return None, self._rewards.outcomes(rollouts) if self._scores else {}
        except Exception as error:  # told to all ranks, which raise together
            return error, {}

    def _exchanged(
        self,
        mine: SampleTable,
        error: Exception | None,
        seconds: float,
        last: int,
        waited: Callable[[float], object],
    ) -> tuple[SampleTable, int]:
        """The tables of all groups, of which one rank each tells, and how many draws there were."""
        started = time.perf_counter()
        told = mine if self._scores else None
        answers = objects.all_gather((told, error, seconds, last, self._keeper.digest()))
        for rank, (_, other, *_) in enumerate(answers):
            if other is not None:
                raise RuntimeError(f"scoring failed on rank {rank}: {other}") from other
        self._keeper.require_agreement([digest for *_, digest in answers])
        slowest = max(each for _, _, each, *_ in answers)
        waited(max(0.0, time.perf_counter() - started + seconds - slowest))
        table = SampleTable.joined([each for each, *_ in answers if each is not None])
        num_draws = 1 + max(each for *_, each, _ in answers)
        return table.take(np.argsort(table.draws, kind="stable")), num_draws

    def close(self) -> None:
        """End the reward processes of this rank."""
        self._rewards.close()


def _with_baselines(scored: Sequence[ScoredRollout], num_samples: int) -> list[ScoredRollout]:
    """So many samples, with the greedy responses behind them as what they are compared with."""
    samples, greedy = list(scored[:num_samples]), list(scored[num_samples:])
    if not greedy:
        return samples
    size = len(samples) // len(greedy)
    baselines = [
        Baseline(each.reward, len(each.rollout.response_token_ids), each.why_not_valid)
        for each in greedy
    ]
    return [
        dataclasses.replace(sample, baseline=baselines[index // size])
        for index, sample in enumerate(samples)
    ] + greedy
