"""Groups of responses as bytes, for the bank and for checkpoints.

Arrays are stored in the safetensors format, other fields as JSON in its header. Reading never
unpickles, and believes no value unchecked: they would reach embeddings, ratios and losses.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mcore_rl.batching.types import UNFINISHED, Prompt, Rollout, TopTokens, TurnReward
from mcore_rl.common.readers import finite_number, integer_within, parse_json
from mcore_rl.environments.wire import checked_state
from mcore_rl.hybrid_engine.vllm.generation import (
    FINISH_REASONS,
    NO_LOG_PROB,
    are_log_probs,
    are_tokens,
)
from mcore_rl.moe.routing import RoutedLayers, Routes
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.segments import KeptConversation, OpenGroup, is_finished, turn_start

_ARRAYS = ("response_token_ids", "rollout_log_probs", "is_generated", "weight_versions")
_ALL_ARRAYS = (*_ARRAYS, "routes", "routes_known", "top_ids", "top_log_probs", "prompt_token_ids")
_FIELDS = ("text", "finish_reason", "weight_version", "failure", "turn_rewards")
_DTYPES = dict.fromkeys(("response_token_ids", "prompt_token_ids", "weight_versions"), np.int32) | {
    "rollout_log_probs": np.float32,
    "is_generated": np.bool_,
}
_MOST_DRAWS, _MOST_VERSIONS = 1 << 53, (1 << 31) - 1
# What reading raises for content of another form.
MALFORMED = (
    *(SafetensorError, AttributeError, LookupError),
    *(OSError, OverflowError, TypeError, ValueError),
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What responses of a run's engines are within.

    Example: `EngineLimits(vocab_size=129280)`.
    """

    vocab_size: int = 1 << 31
    routed: RoutedLayers | None = None  # whose experts come with responses; None: not checked


_NO_LIMITS = EngineLimits()


def environments_in(data: bytes) -> set[str]:
    """Return the environments of an encoded group's conversations. Raises one of `MALFORMED`."""
    return {*_recorded(_facts(data)).values()}


def _recorded(facts: Mapping[str, Any]) -> dict[str, str]:
    environments: dict[str, str] = facts["environments"]
    if not all(isinstance(each, str) for each in environments.values()):
        raise ValueError("an environment is not a text")
    return environments


def group_to_bytes(group: OpenGroup) -> bytes:
    """Encode a group with its rewards."""
    arrays: dict[str, np.ndarray] = {"empty": np.empty(0, np.uint8)}  # at least one is needed
    samples: list[dict[str, Any] | None] = []
    for index, rollout in enumerate(group.rollouts):
        if rollout is None:
            samples.append(None)
            continue
        samples.append({name: getattr(rollout, name) for name in _FIELDS})
        for name, array in _arrays_of(rollout).items():
            arrays[f"{group.draw}/{index}/{name}"] = np.ascontiguousarray(array)
    for index, kept in group.conversations.items():
        place = f"{group.draw}/{index}/"
        arrays[place + "state"] = np.frombuffer(kept.state.encode(), np.uint8)
        arrays[place + "observed"] = kept.observed
    facts = {
        "draw": group.draw,
        "samples": samples,
        "reward_sources": dict(group.reward_sources),
        "outcomes": {index: dict(by) for index, by in group.outcomes.items()},
        "environment_outcomes": group.environment_outcomes,
        "conversations": {n: each.unanswered for n, each in group.conversations.items()},
        "environments": {n: each.environment for n, each in group.conversations.items()},
    }
    # A list of one group: earlier versions wrote several into a file.
    return save(arrays, {"groups": json.dumps([facts])})


def group_from_bytes(
    data: bytes, prompt_of: Callable[[int], Prompt], limits: EngineLimits = _NO_LIMITS
) -> OpenGroup:
    """Decode a group; `prompt_of` returns the prompt of its draw. Raises one of `MALFORMED` for
    other content, or values that are not within `limits`."""
    facts, stored = _facts(data), load(data)
    prompt = prompt_of(facts["draw"])
    rollouts: list[Rollout | None] = []
    for index, sample in enumerate(facts["samples"]):
        if sample is None:
            rollouts.append(None)
            continue
        place = f"{facts['draw']}/{index}/"
        arrays = {name: stored[place + name] for name in _ALL_ARRAYS if place + name in stored}
        rollouts.append(_rollout(prompt, index, sample, arrays, limits))
    outcomes: dict[int, Mapping[str, Outcome]] = {
        int(index): {name: _outcome(*each) for name, each in by.items()}
        for index, by in facts["outcomes"].items()
    }
    of_environments = {
        int(index): _outcome(*each) for index, each in facts["environment_outcomes"].items()
    }
    ended = {n for n, each in enumerate(rollouts) if each is not None and is_finished(each)}
    if not rollouts or not outcomes.keys() | of_environments.keys() <= ended:
        raise ValueError("there are no samples, or outcomes of samples that have not ended")
    for index in ended - of_environments.keys():
        rollout = rollouts[index]
        if rollout is not None and rollout.failure is None and not len(rollout.response_token_ids):
            raise ValueError(f"sample {index} has ended without tokens")
    sources = dict(facts["reward_sources"])
    group = OpenGroup(facts["draw"], rollouts, outcomes, of_environments, reward_sources=sources)
    for index, unanswered in facts["conversations"].items():
        place = f"{group.draw}/{index}/"
        state, observed = stored[place + "state"], stored[place + "observed"]
        _check_conversation(group, int(index), unanswered, state, observed, limits)
        text = checked_state(state.tobytes().decode())
        kept = KeptConversation(text, observed, _recorded(facts)[index], unanswered)
        group.conversations[int(index)] = kept
    return group


def _facts(data: bytes) -> dict[str, Any]:
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")])
    (facts,) = parse_json(header["__metadata__"]["groups"])
    _draw(facts["draw"])
    return dict(facts)


def _arrays_of(rollout: Rollout) -> dict[str, np.ndarray]:
    arrays = {name: getattr(rollout, name) for name in _ARRAYS}
    if rollout.routes is not None:
        arrays |= {"routes": rollout.routes.ids, "routes_known": rollout.routes.known}
    if rollout.top_tokens is not None:
        arrays |= {"top_ids": rollout.top_tokens.ids, "top_log_probs": rollout.top_tokens.log_probs}
    arrays["prompt_token_ids"] = rollout.prompt.token_ids
    return {name: array for name, array in arrays.items() if array is not None}


def _check_conversation(
    group: OpenGroup,
    index: int,
    unanswered: Any,
    state: np.ndarray,
    observed: np.ndarray,
    limits: EngineLimits,
) -> None:
    rollout = group.rollouts[index] if 0 <= index < len(group.rollouts) else None
    kinds = [(each.dtype, each.ndim) for each in (state, observed)]
    expected = [(np.dtype(np.uint8), 1), (np.dtype(np.int32), 1)]
    if kinds != expected or unanswered not in (None, *FINISH_REASONS):
        raise ValueError(f"the conversation of sample {index} has wrong fields")
    if not are_tokens(observed, limits.vocab_size).all():
        raise ValueError(f"the conversation of sample {index} has tokens beyond the vocabulary")
    if rollout is None or is_finished(rollout):
        raise ValueError(f"the conversation of sample {index} has no response that continues")
    if unanswered is not None and turn_start(rollout) == len(rollout.response_token_ids):
        raise ValueError(f"the conversation of sample {index} has no turn to answer")


def _draw(value: Any) -> int:
    if integer_within(value, 0, _MOST_DRAWS) is None:
        raise ValueError(f"{repr(value)[:60]} is not the number of a draw")
    return int(value)


def _outcome(reward: Any, kind: Any, detail: Any) -> Outcome:
    is_text = isinstance(kind, str | None) and isinstance(detail, str)
    if finite_number(reward) is None or not is_text:
        raise ValueError(f"{repr([reward, kind, detail])[:60]} is not the outcome of a reward")
    return Outcome(reward, kind, detail)


def _turn(num_response: int, end: Any, reward: Any) -> TurnReward:
    if integer_within(end, 0, num_response) is None or finite_number(reward) is None:
        raise ValueError(f"{repr([end, reward])[:60]} is not the reward of a turn")
    return TurnReward(end, reward)


def _rollout(
    prompt: Prompt, index: int, facts: dict[str, Any], arrays: dict[str, Any], limits: EngineLimits
) -> Rollout:
    is_version = integer_within(facts["weight_version"], 0, _MOST_VERSIONS) is not None
    is_text = isinstance(facts["text"], str) and isinstance(facts["failure"], str | None)
    is_reason = facts["finish_reason"] in (*FINISH_REASONS, UNFINISHED)
    if not (is_version and is_text and is_reason) or facts.keys() != {*_FIELDS}:
        raise ValueError(f"sample {index} has wrong fields")
    num_tokens = {name: len(arrays["response_token_ids"]) for name in _ARRAYS}
    num_tokens["prompt_token_ids"] = len(arrays["prompt_token_ids"])
    for name, array in arrays.items():
        kind = (array.dtype, array.shape)
        if name in num_tokens and kind != (np.dtype(_DTYPES[name]), (num_tokens[name],)):
            raise ValueError(f"{name} of sample {index} is {array.shape} of {array.dtype}")
    _check_tokens(index, facts["weight_version"], arrays, limits)
    num_response = len(arrays["response_token_ids"])
    turns = tuple(_turn(num_response, *each) for each in facts["turn_rewards"])
    if list(turns) != sorted(turns, key=lambda turn: turn.end):
        raise ValueError(f"the turns of sample {index} are not in order")
    facts["turn_rewards"] = turns
    num_routed = max(0, num_tokens["prompt_token_ids"] + num_response - 1)
    return Rollout(
        prompt=dataclasses.replace(prompt, token_ids=arrays.pop("prompt_token_ids")),
        sample_index=index,
        routes=_routes(index, arrays, num_routed, limits.routed),
        top_tokens=_top_tokens(index, arrays, num_response, limits),
        **facts,
        **arrays,
    )


def _check_tokens(
    index: int, newest: int, arrays: Mapping[str, np.ndarray], limits: EngineLimits
) -> None:
    """Raise ValueError for values that no engine gives; a server's answer is checked alike."""
    for name in ("response_token_ids", "prompt_token_ids"):
        if not are_tokens(arrays[name], limits.vocab_size).all():
            raise ValueError(f"{name} of sample {index} are not within the vocabulary")
    if not are_log_probs(arrays["rollout_log_probs"]).all():
        raise ValueError(f"the log-probs of sample {index} are not finite and at most 0")
    versions = arrays.get("weight_versions", np.empty(0, np.int32))
    if not ((versions >= 0) & (versions <= newest)).all():
        raise ValueError(f"the weight versions of sample {index} are not from 0 to {newest}")


def _routes(
    index: int, arrays: dict[str, Any], num_tokens: int, routed: RoutedLayers | None
) -> Routes | None:
    if "routes" not in arrays:
        return None
    routes = Routes(arrays.pop("routes"), arrays.pop("routes_known"))
    ids, known = routes.ids, routes.known
    is_right = (ids.ndim, known.dtype, known.shape) == (3, np.dtype(np.bool_), (len(ids),))
    is_right = is_right and len(ids) <= num_tokens and ids.dtype in (np.uint8, np.int16)
    if is_right and routed is not None:
        is_right = ids.dtype == routed.dtype
        is_right = is_right and ids.shape[1:] == (len(routed.layers), routed.topk)
    most = np.iinfo(np.int16).max if routed is None else routed.num_experts - 1
    chosen = ids[known] if is_right else ids[:0]
    if not is_right or not ((chosen >= 0) & (chosen <= most)).all():
        raise ValueError(f"the experts of sample {index} are {ids.shape} of {ids.dtype}")
    return routes


def _top_tokens(
    index: int, arrays: dict[str, Any], num_response: int, limits: EngineLimits
) -> TopTokens | None:
    if "top_ids" not in arrays:
        return None
    top = TopTokens(arrays.pop("top_ids"), arrays.pop("top_log_probs"))
    kinds = [(each.dtype, each.shape) for each in (top.ids, top.log_probs)]
    shape = (num_response, *top.ids.shape[1:])
    is_right = kinds == [(np.dtype(np.int32), shape), (np.dtype(np.float32), shape)]
    if not is_right or len(shape) != 2:
        raise ValueError(f"the candidates of sample {index} are {top.ids.shape}")
    within = (top.log_probs >= NO_LOG_PROB) & (top.log_probs <= 0.0)
    if not (are_tokens(top.ids, limits.vocab_size) & within).all():
        raise ValueError(f"the candidates of sample {index} are not tokens with log-probs")
    return top
