"""Groups that a user's `@sampler` function samples, on the first rank of a TP group.

    begin ──► requests ──► engine ──► ended ──► more requests, or the responses of the group

Requests have numbers above all others. One that an update of the weights cuts continues with the
new weights. The responses count as sampled by the weights that the group began with, since a
function may return any part of what was generated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mcore_rl.algorithms.samplers import (
    Generate,
    Generated,
    RegisteredSampler,
    SamplerInputs,
    Steps,
)
from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common.parameters import Parameters
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, seed_of
from mcore_rl.rollout.conversations import turns_of
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.segments import OpenGroup, new_rollout

_FIRST_NUMBER = 1 << 60  # of requests


def is_of_user(number: int) -> bool:
    """Return whether a request is one of a user's function."""
    return number >= _FIRST_NUMBER


@dataclass(slots=True)
class _Open:
    """A group whose function has not returned."""

    draw: int
    inputs: SamplerInputs
    steps: Steps
    version: int  # of the weights that it began with
    failure: str | None = None  # of a sequence, which the engine could not continue
    num_asked: int = 0  # sequences so far
    asked: dict[int, int] = field(default_factory=dict)  # number of a request -> its place
    generated: list[Generated | None] = field(default_factory=list)  # by place


@dataclass(frozen=True, slots=True)
class Progress:
    """What follows from a step of a function: requests, or the group with all its responses.

    Example: `Progress(requests=[request])`.
    """

    requests: Sequence[Request] = ()
    group: OpenGroup | None = None


class UserGroups:
    """The groups that are being sampled by a function; local."""

    def __init__(
        self,
        sampler: RegisteredSampler,
        parameters: Parameters,
        *,
        vocab_size: int,
        text_of: Callable[[np.ndarray], str],
    ) -> None:
        """`text_of` decodes tokens without special ones."""
        self._sampler, self._parameters = sampler, parameters
        self._vocab_size, self._text_of = vocab_size, text_of
        self._open: dict[int, _Open] = {}  # by draw
        self._draws: dict[int, int] = {}  # number of a request -> draw
        self._cut: dict[int, list[Completion]] = {}  # parts of responses, by number
        self._stopped: list[Completion] = []  # the last of them, if they wait for `again`
        self._numbers = itertools.count(_FIRST_NUMBER)

    @property
    def num_open(self) -> int:
        """The number of groups whose function has not returned."""
        return len(self._open)

    def begin(self, draw: int, prompt: Prompt, plan: GroupPlan) -> Progress:
        """Start the function of a group. Raises UsageError, as `ended`."""
        inputs = SamplerInputs(
            prompt,
            num_samples=prompt.num_samples or plan.num_samples,
            max_tokens=prompt.limit(plan.max_tokens),
            decode=lambda tokens: self._text_of(np.asarray(tokens, np.int32)),
        )
        steps = self._sampler.start(inputs, self._parameters)
        self._open[draw] = opened = _Open(draw, inputs, steps, plan.weight_version)
        return self._advance(opened, lambda: next(steps), plan)

    def ended(self, completion: Completion, plan: GroupPlan) -> Progress:
        """Continue a function if this was the last of the sequences that it has asked for. If any
        has failed, all responses of the group have failed, and the function ends."""
        number = completion.number
        opened = self._open[self._draws.pop(number)]
        opened.failure = opened.failure or completion.failure
        parts = [*self._cut.pop(number, []), completion]
        opened.generated[opened.asked[number]] = Generated(
            np.concatenate([each.token_ids for each in parts], dtype=np.int32),
            np.concatenate([each.log_probs for each in parts], dtype=np.float32),
            completion.finish_reason,
        )
        generated = [each for each in opened.generated if each is not None]
        if len(generated) < len(opened.generated):
            return Progress()
        if opened.failure is not None:
            self.forget([opened.draw])
            return Progress(group=_failed(opened))
        return self._advance(opened, lambda: opened.steps.send(generated), plan)

    def cut(self, completion: Completion) -> None:
        """Keep the part of a response that an update of the weights ends, until `again`."""
        self._cut.setdefault(completion.number, []).append(completion)
        self._stopped.append(completion)

    def again(self) -> list[Request]:
        """Return requests that continue what was cut."""
        requests = [_continued(each) for each in self._stopped if each.number in self._draws]
        self._stopped.clear()
        return requests

    def forget(self, draws: Iterable[int]) -> set[int]:
        """End the functions of these draws; return the numbers of their requests."""
        numbers: set[int] = set()
        for draw in draws:
            if (opened := self._open.pop(draw, None)) is not None:
                opened.steps.close()
                numbers |= opened.asked.keys() & self._draws.keys()
        for number in numbers:
            del self._draws[number]
            self._cut.pop(number, None)
        return numbers

    def _advance(
        self, opened: _Open, step: Callable[[], Sequence[Generate]], plan: GroupPlan
    ) -> Progress:
        inputs, sampler = opened.inputs, self._sampler
        try:
            asked = sampler.checked(inputs, step)
        except StopIteration as end:
            del self._open[opened.draw]
            returned = sampler.responses(inputs, end.value, self._vocab_size)
            rollouts: list[Rollout | None] = []
            for index, each in enumerate(returned):
                others = each.is_generated
                rollout = Rollout(
                    prompt=inputs.prompt,
                    sample_index=index,
                    text="",
                    response_token_ids=np.asarray(each.token_ids),
                    rollout_log_probs=np.asarray(each.log_probs),
                    finish_reason=each.finish_reason,
                    weight_version=opened.version,
                    is_generated=None if others is None else np.asarray(others),
                )
                texts = [self._text_of(turn) for turn in turns_of(rollout)]
                rollouts.append(replace(rollout, text="\n".join(texts)))
            return Progress(group=OpenGroup(opened.draw, rollouts))
        sequences = sampler.sequences(inputs, asked, self._vocab_size)
        opened.generated, opened.asked = [None] * len(sequences), {}
        requests = []
        for place, sequence in enumerate(sequences):
            number = next(self._numbers)
            opened.asked[number], self._draws[number] = place, opened.draw
            requests.append(self._request(opened, number, sequence, plan))
            opened.num_asked += 1
        return Progress(requests)

    def _request(self, opened: _Open, number: int, sequence: Generate, plan: GroupPlan) -> Request:
        assert sequence.max_tokens is not None, "set by the checks"
        return Request(
            number=number,
            token_ids=np.asarray(sequence.token_ids),
            max_tokens=sequence.max_tokens,
            sampling=plan.sampling,
            seed=seed_of(plan.seed_of_sample(opened.draw, opened.num_asked), "sampler"),
            cache_name=f"version {plan.weight_version}" if plan.keeps_kv else "",
        )


def _failed(opened: _Open) -> OpenGroup:
    """Return a group without tokens, which is not trained on."""
    empty = (
        new_rollout(opened.inputs.prompt, index, opened.version)
        for index in range(opened.inputs.num_samples)
    )
    ended = [replace(each, finish_reason="stop", failure=opened.failure) for each in empty]
    return OpenGroup(opened.draw, [*ended])


def _continued(completion: Completion) -> Request:
    """Return the request that continues a response."""
    request, added = completion.request, completion.token_ids
    assert request.seed is not None, "each sequence has its own"
    return replace(
        request,
        token_ids=np.concatenate([request.token_ids, added], dtype=np.int32),
        max_tokens=request.max_tokens - len(added),
        seed=seed_of(request.seed, "after", len(added)),
        num_own=request.num_own + len(added),
    )
