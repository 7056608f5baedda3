"""Responses that are sampled in parts: by weights of several versions, or between observations.

Each token keeps the log-prob and the weight version that it was sampled with, and the experts of
the forward pass that the next token was sampled from.

Shape legend: p tokens of the prompt, r of the response so far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mcore_rl.algorithms.registry import Drop
from mcore_rl.batching.types import UNFINISHED, Prompt, Rollout, TopTokens
from mcore_rl.hybrid_engine.vllm.generation import Completion
from mcore_rl.moe.routing import Routes
from mcore_rl.rewards.worker import Outcome


def new_rollout(prompt: Prompt, sample_index: int, weight_version: int) -> Rollout:
    """Return a response without tokens."""
    return Rollout(
        prompt=prompt,
        sample_index=sample_index,
        text="",
        response_token_ids=np.empty(0, dtype=np.int32),
        rollout_log_probs=np.empty(0, dtype=np.float32),
        finish_reason=UNFINISHED,
        weight_version=weight_version,
    )


def extend_rollout(so_far: Rollout, completion: Completion, weight_version: int) -> Rollout:
    """Append the tokens that the request added, then the sampled tokens.

    The text stays empty: a finished response is decoded as a whole.
    """
    before = len(so_far.prompt.token_ids) + len(so_far.response_token_ids)
    added = completion.request.token_ids[before:]
    finish_reason = UNFINISHED if completion.is_cut_short else completion.finish_reason
    if not len(so_far.response_token_ids) and not len(added):  # most responses have one part
        return dataclasses.replace(
            so_far,
            response_token_ids=completion.token_ids,
            rollout_log_probs=completion.log_probs,
            finish_reason=finish_reason,
            weight_version=weight_version,
            routes=completion.routes,
            failure=so_far.failure or completion.failure,
            top_tokens=completion.top_tokens,
        )
    num_new = len(completion.token_ids)
    no_log_probs = np.zeros(len(added), dtype=np.float32)
    generated = so_far.is_generated
    if generated is None and len(added):
        generated = np.ones(len(so_far.response_token_ids), dtype=np.bool_)
    if generated is not None:
        parts = [generated, np.zeros(len(added), np.bool_), np.ones(num_new, np.bool_)]
        generated = np.concatenate(parts)
    return dataclasses.replace(
        so_far,
        response_token_ids=np.concatenate(
            [so_far.response_token_ids, added, completion.token_ids], dtype=np.int32
        ),
        rollout_log_probs=np.concatenate(
            [so_far.rollout_log_probs, no_log_probs, completion.log_probs], dtype=np.float32
        ),
        finish_reason=finish_reason,
        weight_version=weight_version,
        weight_versions=np.concatenate(
            [
                so_far.token_versions,
                np.full(len(added) + num_new, weight_version, dtype=np.int32),
            ]
        ),
        is_generated=generated,
        routes=_merge_routes(so_far.routes, completion.routes),
        failure=so_far.failure or completion.failure,
        top_tokens=None
        if completion.top_tokens is None
        else TopTokens.joined([so_far.top_tokens or 0, len(added), completion.top_tokens]),
    )


def _merge_routes(earlier: Routes | None, now: Routes | None) -> Routes | None:
    """Return the experts of `now`, but those of `earlier` for tokens whose successor was sampled
    earlier."""
    if earlier is None or now is None:
        return now
    kept = len(earlier.ids)
    return Routes(
        np.concatenate([earlier.ids, now.ids[kept:]]),
        np.concatenate([earlier.known, now.known[kept:]]),
    )


def turn_start(rollout: Rollout) -> int:
    """Return the number of response tokens before the last turn that has no reward yet, of a
    response that has tokens of it; else the number of all its tokens."""
    answered = rollout.turn_rewards[-1].end if rollout.turn_rewards else 0
    if rollout.is_generated is None:
        return answered
    later = np.flatnonzero(rollout.is_generated[answered:])
    return answered + int(later[0]) if len(later) else len(rollout.is_generated)


@dataclass(frozen=True, slots=True)
class KeptConversation:
    """How the conversation of an unfinished response continues with another process.

    Example: `KeptConversation("[true, false]", array([220, 19]), environment="Calculator")`.
    """

    state: str  # of the environment after its last answer, as JSON
    observed: np.ndarray  # [o] int32, its last answer; the response may already contain it
    environment: str  # `EnvironmentSpec.class_for`
    unanswered: str | None = None  # finish_reason of a last turn that it has not answered


@dataclass(slots=True)
class OpenGroup:
    """The responses to one draw, in progress. On all ranks of a TP group; rewards and conversations
    on the first.

    Example: one response has tokens, the other has not started: `OpenGroup(96, [rollout, None])`.
    """

    draw: int  # of the run
    rollouts: list[Rollout | None]  # by index; None: not started
    outcomes: dict[int, Mapping[str, Outcome]] = field(default_factory=dict)  # by index
    environment_outcomes: dict[int, Outcome] = field(default_factory=dict)  # by index
    conversations: dict[int, KeptConversation] = field(default_factory=dict)  # by index
    reward_sources: Mapping[str, str] = field(default_factory=dict)  # of `outcomes`, by reward
    dropped: Drop | None = None  # by the group filter; not stored, as it is asked again

    @classmethod
    def new(cls, draw: int, size: int) -> OpenGroup:
        """Create a group without responses."""
        return cls(draw, [None] * size)

    @property
    def is_sampled(self) -> bool:
        """Whether all responses have ended."""
        return all(each is not None and is_finished(each) for each in self.rollouts)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled a token; None without tokens."""
        return min(
            (
                each.oldest_version
                for each in self.rollouts
                if each is not None and len(each.response_token_ids)
            ),
            default=None,
        )

    def has_top_tokens(self, num_top: int, num_samples: int) -> bool:
        """Return whether the first `num_samples` responses so far have the `num_top` most probable
        tokens at each position; True for 0."""
        started = (each for each in self.rollouts[:num_samples] if each is not None)
        top_tokens = (each.top_tokens for each in started if len(each.response_token_ids))
        return not num_top or all(
            top is not None and top.ids.shape[1] == num_top for top in top_tokens
        )

    def num_tokens(self, num_samples: int) -> int:
        """Count the tokens of the first `num_samples` responses so far."""
        started = (each for each in self.rollouts[:num_samples] if each is not None)
        return sum(len(each.response_token_ids) for each in started)


def is_finished(rollout: Rollout) -> bool:
    """Return whether a response is complete."""
    return rollout.finish_reason != UNFINISHED
