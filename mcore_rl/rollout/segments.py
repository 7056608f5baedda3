"""A response that is sampled in parts: by weights of several versions, or with something that an
environment says in between.

Every token keeps the log-prob and the weight version that it was sampled with, and the experts of
the forward pass that the next one was sampled from.

Shape legend: p tokens of the prompt, r of the response so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.batching.types import UNFINISHED, Prompt, Rollout
from mcore_rl.hybrid_engine.vllm.generation import Completion
from mcore_rl.moe.routing import Routes
from mcore_rl.rewards.worker import Outcome


def begun(prompt: Prompt, sample_index: int, weight_version: int) -> Rollout:
    """A response without a token yet."""
    return Rollout(
        prompt=prompt,
        sample_index=sample_index,
        text="",
        response_token_ids=np.empty(0, dtype=np.int32),
        rollout_log_probs=np.empty(0, dtype=np.float32),
        finish_reason=UNFINISHED,
        weight_version=weight_version,
    )


def extended(so_far: Rollout, completion: Completion, weight_version: int) -> Rollout:
    """With the tokens that were sampled next, and before them those that the request had more.

    Its text stays behind: what is generated is decoded once, when all of it is there.
    """
    before = len(so_far.prompt.token_ids) + len(so_far.response_token_ids)
    given = completion.request.token_ids[before:]
    finish_reason = UNFINISHED if completion.is_cut_short else completion.finish_reason
    if not len(so_far.response_token_ids) and not len(given):  # most responses have one part
        return dataclasses.replace(
            so_far,
            response_token_ids=completion.token_ids,
            rollout_log_probs=completion.log_probs,
            finish_reason=finish_reason,
            weight_version=weight_version,
            routes=completion.routes,
            failure=so_far.failure or completion.failure,
        )
    num_new = len(completion.token_ids)
    nothing = np.zeros(len(given), dtype=np.float32)
    generated = so_far.is_generated
    if generated is None and len(given):
        generated = np.ones(len(so_far.response_token_ids), dtype=np.bool_)
    if generated is not None:
        parts = [generated, np.zeros(len(given), np.bool_), np.ones(num_new, np.bool_)]
        generated = np.concatenate(parts)
    return dataclasses.replace(
        so_far,
        response_token_ids=np.concatenate(
            [so_far.response_token_ids, given, completion.token_ids], dtype=np.int32
        ),
        rollout_log_probs=np.concatenate(
            [so_far.rollout_log_probs, nothing, completion.log_probs], dtype=np.float32
        ),
        finish_reason=finish_reason,
        weight_version=weight_version,
        weight_versions=np.concatenate(
            [
                so_far.token_versions,
                np.full(len(given) + num_new, weight_version, dtype=np.int32),
            ]
        ),
        is_generated=generated,
        routes=_with_earlier(so_far.routes, completion.routes),
        failure=so_far.failure or completion.failure,
    )


def _with_earlier(earlier: Routes | None, now: Routes | None) -> Routes | None:
    """The experts of `now`, but where tokens were followed by one that was sampled before."""
    if earlier is None or now is None:
        return now
    kept = len(earlier.ids)
    return Routes(
        np.concatenate([earlier.ids, now.ids[kept:]]),
        np.concatenate([earlier.known, now.known[kept:]]),
    )


@dataclass(slots=True)
class OpenGroup:
    """The responses to a draw, on their way; on all ranks of a TP group, rewards on the first."""

    draw: int  # of the run
    rollouts: list[Rollout | None]  # by their place; None: not begun
    outcomes: dict[int, Mapping[str, Outcome]] = field(default_factory=dict)  # by place
    paid: dict[int, Outcome] = field(default_factory=dict)  # by environments, by place

    @classmethod
    def new(cls, draw: int, size: int) -> OpenGroup:
        """Without a response."""
        return cls(draw, [None] * size)

    @property
    def is_sampled(self) -> bool:
        """Whether all responses have ended."""
        return all(each is not None and is_finished(each) for each in self.rollouts)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that a token was sampled with; None without a token."""
        return min(
            (each.oldest_version for each in self.rollouts if each is not None), default=None
        )

    def num_tokens(self, num_samples: int) -> int:
        """Tokens of the first `num_samples` responses so far."""
        begun = (each for each in self.rollouts[:num_samples] if each is not None)
        return sum(len(each.response_token_ids) for each in begun)


def is_finished(rollout: Rollout) -> bool:
    """Whether nothing more is to be sampled of it."""
    return rollout.finish_reason != UNFINISHED
