"""The settings of responses, and the requests that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.hybrid_engine.vllm.generation import Request, Sampling, seed_of
from mcore_rl.rollout.segments import OpenGroup

NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The settings of all responses to prompts.

    Example: 8 samples for each prompt:

        GroupPlan(num_samples=8, sampling=Sampling(1.0), max_tokens=512, seed=1)
    """

    num_samples: int  # of a prompt that does not say
    sampling: Sampling
    max_tokens: int
    seed: int  # of the run
    weight_version: int = 0
    most_samples: int = 0  # of any prompt; 0: none says
    with_routes: bool = False
    num_top: int = 0  # most probable tokens whose log-probs come with each sampled token
    with_greedy: bool = False  # adds a response at temperature 0
    has_environments: bool = False  # samples have environments and several turns
    max_turn_tokens: int | None = None  # None: the rest of `max_tokens`
    keeps_kv: bool = False  # KV cache of resumed responses outlives an update

    @property
    def size(self) -> int:
        """The most responses to a prompt. Request `index` of a draw has the number `draw * size +
        index`."""
        return max(self.num_samples, self.most_samples) + self.with_greedy

    def size_of(self, prompt: Prompt) -> int:
        """Return the number of responses to a prompt; the last one is greedy, `with_greedy`."""
        return (prompt.num_samples or self.num_samples) + self.with_greedy

    def num_samples_of(self, group: OpenGroup) -> int:
        """Return the number of a group's responses that are trained on."""
        return len(group.rollouts) - self.with_greedy

    def seed_of_sample(self, draw: int, index: int) -> int:
        """Derive a seed from the run's seed, the draw and the index, independent of step and
        engine."""
        return seed_of(seed_of(self.seed, "draw", draw), index)

    def request(
        self,
        draw: int,
        so_far: Rollout,
        observed: np.ndarray = NO_TOKENS,
        num_turn_tokens: int = 0,
    ) -> Request:
        """Build the request that starts a response, or continues it after `observed`, or after
        `num_turn_tokens` tokens of a turn.

        Each sample has its own random stream for each number of tokens so far.
        """
        index = so_far.sample_index
        num_tokens = len(so_far.response_token_ids) + len(observed)
        seed = self.seed_of_sample(draw, index)
        is_sample = index < (so_far.prompt.num_samples or self.num_samples)
        left = so_far.prompt.limit(self.max_tokens) - num_tokens
        return Request(
            number=draw * self.size + index,
            token_ids=np.concatenate(
                [so_far.prompt.token_ids, so_far.response_token_ids, observed], dtype=np.int32
            ),
            max_tokens=left
            if self.max_turn_tokens is None
            else min(left, self.max_turn_tokens - num_turn_tokens),
            sampling=self.sampling
            if is_sample
            else Sampling(temperature=0.0, stop=self.sampling.stop),
            seed=seed_of(seed, "after", num_tokens) if num_tokens else seed,
            with_routes=self.with_routes and is_sample,
            cache_name=self.cache_name(so_far) if self.keeps_kv else "",
            num_own=0 if len(observed) else _num_generated_last(so_far),
            num_top=self.num_top if is_sample else 0,
        )

    def cache_name(self, so_far: Rollout) -> str:
        """Name the KV cache by the version that a response began with. A resumed response finds its
        own keys and values. A new response finds none of earlier weights."""
        oldest = so_far.oldest_version if len(so_far.response_token_ids) else self.weight_version
        return f"version {oldest}"


def _num_generated_last(rollout: Rollout) -> int:
    """Count the sampled tokens at the end of a response."""
    if rollout.is_generated is None:
        return len(rollout.response_token_ids)
    others = np.flatnonzero(~rollout.is_generated)
    return len(rollout.is_generated) - (int(others[-1]) + 1 if len(others) else 0)
