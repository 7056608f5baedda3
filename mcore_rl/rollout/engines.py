"""Rollouts over all engines of the world: who samples which prompt, and what all ranks hear of it.

Prompts are dealt out in blocks to the TP groups of the engines (an engine with data-parallel ranks
of its own has several); all ranks of a group generate alike; the first rank of each scores its
samples; then everybody hears of all samples, in the order of the prompts, without their tokens.
"""

from __future__ import annotations

import dataclasses
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

    def score(
        self,
        rollouts: Sequence[Rollout],
        draws: Sequence[int],
        greedy: Sequence[Rollout] = (),
        *,
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> SampleTable:
        """Reward this group's rollouts, of which each answers one of `draws`: the table of all
        groups' samples, in the order of the draws. The samples stay here, with the keeper.

        `greedy` has a greedy response to each of the prompts, in their order, with which their
        samples are compared. `waited` hears for how many seconds this rank stood still because
        others were still sampling: beyond what the slowest scored for.
        """
        started = time.perf_counter()
        everything = [*rollouts, *greedy]
        first = self._keeper.keep([ScoredRollout(each, reward=0.0) for each in everything])
        error, outcomes = self._asked(everything)
        seconds = time.perf_counter() - started
        if self._reward_model is not None:
            size = len(rollouts) // len(greedy) if greedy else 1
            every_draw = [*draws, *(draws[::size] if greedy else ())]
            table = self._exchanged(self._keeper.table(first, every_draw), error, seconds, waited)
            scores = self._reward_model(self._keeper, table)
            here = np.flatnonzero(table.homes == self._keeper.home)
            in_order = here[np.argsort(table.numbers[here])]
            outcomes[REWARD_MODEL] = [scores[row] for row in in_order]
            seconds, waited = 0.0, lambda seconds: None
        if self._scores and error is None:
            weighed = self._rewards.weigh(everything, outcomes)
            self._keeper.rewarded(first, _with_baselines(weighed, len(rollouts)))
        return self._exchanged(self._keeper.table(first, draws), error, seconds, waited)

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
        waited: Callable[[float], object],
    ) -> SampleTable:
        """The tables of all groups, of which one rank each tells."""
        started = time.perf_counter()
        told = mine if self._scores else None
        answers = objects.all_gather((told, error, seconds, self._keeper.digest()))
        for rank, (_, other, _, _) in enumerate(answers):
            if other is not None:
                raise RuntimeError(f"scoring failed on rank {rank}: {other}") from other
        self._keeper.require_agreement([digest for *_, digest in answers])
        slowest = max(each for _, _, each, _ in answers)
        waited(max(0.0, time.perf_counter() - started + seconds - slowest))
        table = SampleTable.joined([each for each, *_ in answers if each is not None])
        return table.take(np.argsort(table.draws, kind="stable"))

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
