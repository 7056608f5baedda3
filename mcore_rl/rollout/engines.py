"""Rollouts over all engines of the world: who samples which prompt, and how all ranks get them all.

Prompts are dealt out in blocks to the TP groups of the engines (an engine with data-parallel ranks
of its own has several); all ranks of a group generate alike; the first rank of each scores its
samples; then everybody receives everything, in the order of the prompts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
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
from mcore_rl.rollout.routes import RouteKeeper
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
        reward_model: Callable[[Sequence[Rollout]], list[Outcome]] | None = None,
        keeper: RouteKeeper | None = None,
    ) -> None:
        """`reward_model` scores all samples of a step on every rank, collectively; `keeper` gets
        the experts that samples with routes were sampled with."""
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
    ) -> list[Rollout]:
        """Sample responses to this TP group's block of `prompts`, in rollout mode.

        Each response is drawn from a random stream of its own, which its prompt's seed determines:
        who samples it and beside what is all the same. `when_few_are_left` is that of `run_stream`.
        """
        blocks = np.array_split(np.arange(len(prompts)), self._layout.num_tp_groups)
        mine = blocks[self._layout.tp_group_index(self._rank)]
        if not len(mine) and self._layout.dp_size == 1:  # fewer prompts than groups
            return []  # data-parallel ranks of one engine step together, prompts or not
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
        return [
            self._engine.rollout(
                prompts[number // num_samples], number % num_samples, each, weight_version
            )
            for number, each in sorted(block.completions.items())
        ]

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
        *,
        waited: Callable[[float], object] = lambda seconds: None,
    ) -> list[ScoredRollout]:
        """Reward this group's rollouts and exchange: all samples, in prompt order.

        A reward model then scores them all, on every rank. `waited` hears for how many seconds this
        rank stood still because others were still sampling: beyond what the slowest scored for.
        """
        started = time.perf_counter()
        digest = b""
        if self._keeper is not None:
            rollouts = self._keeper.keep(rollouts)
            digest = self._keeper.digest()
        mine: Any = None
        if self._scores:
            try:
                mine = (_without_rows(rollouts), self._rewards.outcomes(rollouts))
            except Exception as error:  # told to all ranks below, which raise together
                mine = error
        answers = objects.all_gather((mine, time.perf_counter() - started, digest))
        gathered = [answer for answer, _, _ in answers]
        for rank, other in enumerate(gathered):
            if isinstance(other, Exception):
                raise RuntimeError(f"scoring failed on rank {rank}: {other}") from other
        if self._keeper is not None:
            self._keeper.require_agreement([each for _, _, each in answers])
        slowest = max(seconds for _, seconds, _ in answers)
        waited(max(0.0, time.perf_counter() - started - slowest))
        by_slot = [gathered[self._layout.rank(slot)] for slot in range(len(gathered))]
        everything: list[Rollout] = []
        outcomes: dict[str, list[Outcome]] = {}
        for part in by_slot:
            if part is not None:
                everything += part[0]
                for name, found in part[1].items():
                    outcomes.setdefault(name, []).extend(found)
        if self._reward_model is not None:
            outcomes[REWARD_MODEL] = self._reward_model(everything)
        return self._rewards.weigh(everything, outcomes)

    def close(self) -> None:
        """End the reward processes of this rank."""
        self._rewards.close()


def _without_rows(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """As all ranks get them: what only rewards read stays here."""
    prompts = {
        id(rollout.prompt): dataclasses.replace(rollout.prompt, row="{}") for rollout in rollouts
    }
    return [dataclasses.replace(each, prompt=prompts[id(each.prompt)]) for each in rollouts]
