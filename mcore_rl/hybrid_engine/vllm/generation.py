"""Requests in this process's vLLM, by hand: they come and end between any two steps of the engine.

All ranks of a TP group submit the same requests in the same order between the same steps. What a
request is answered depends on its tokens, its seed and the weights; on what else runs only as far
as kernels give other last bits for batches of another size.

Shape legend: p tokens that are given, r tokens that are sampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_rl.moe.routing import RoutedLayers, Routes
from mcore_rl.moe.routing_capture import routes_of

_BYTES_PER_CHARACTER = 4  # at most, and at least one of them in each token


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are drawn from; temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    ignore_eos: bool = False
    # Texts that end a response with the token that completes one, which is kept.
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A sequence to go on with."""

    number: int  # the caller's; of all that run together each has another
    token_ids: np.ndarray  # [p] int32
    max_tokens: int
    sampling: Sampling
    seed: int | None = None  # of a random stream of its own; None: the process's
    with_routes: bool = False
    # Keys and values are shared with none but those of the same name; "": with all without one.
    cache_name: str = ""
    num_own: int = 0  # of the last of `token_ids`, that were sampled as a part of the same turn


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of a request."""

    request: Request
    token_ids: np.ndarray  # [r] int32, the end-of-sequence token included if it was drawn
    # [r] float32, of the distribution that was sampled from, after temperature, top-p and top-k; at
    # temperature 0 of the untempered one.
    log_probs: np.ndarray
    finish_reason: str  # "stop" (end of sequence or one of `Sampling.stop`) or "length"
    routes: Routes | None = None  # of p + r - 1 tokens; the last is sampled and not computed
    failure: str | None = None  # why nothing can be learned from it

    @property
    def number(self) -> int:
        """Number of the request."""
        return self.request.number

    @property
    def is_cut_short(self) -> bool:
        """Whether it was ended before its time (`Generation.end_soon`), and could go on."""
        return self.finish_reason == "length" and len(self.token_ids) < self.request.max_tokens


def seed_of(*parts: int | str) -> int:
    """A seed that these determine, and that has nothing to do with that of others: 63 bits."""
    text = "\0".join(f"{type(part).__name__} {part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Generation:
    """The requests that run in an `LLMEngine`. Local, but see the module's docstring."""

    def __init__(self, engine: Any, routed: RoutedLayers | None) -> None:
        """`engine` is vLLM's; `routed` has the layers of experts that a request may ask about."""
        self._engine, self._routed = engine, routed
        self._running: dict[int, Request] = {}

    @property
    def num_running(self) -> int:
        """Requests that have not been completed, those included that wait for room."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Take part from the next step on."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if request.number in self._running:
            raise ValueError(f"a request of number {request.number} runs already")
        sampling = request.sampling
        greedy = sampling.temperature == 0.0
        self._engine.add_request(
            str(request.number),
            tokens_input(request.token_ids.tolist(), cache_salt=request.cache_name or None),
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=None if greedy else request.seed,
                max_tokens=request.max_tokens,
                ignore_eos=sampling.ignore_eos,
                logprobs=0,  # of the sampled token only
                flat_logprobs=True,  # lists of numbers, in place of two objects for every token
                # Token by token and so for stop strings alone; those may be special tokens.
                detokenize=bool(sampling.stop),
                stop=list(sampling.stop) or None,
                include_stop_str_in_output=True,
                skip_special_tokens=not sampling.stop,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # it is this request's alone
            ),
        )
        self._running[request.number] = request
        if sampling.stop and request.num_own:
            self._remember_own(request)

    def _remember_own(self, request: Request) -> None:
        """Have a stop string found that began in an earlier part of the response."""
        longest = max(map(len, request.sampling.stop))
        num_tokens = min(request.num_own, _BYTES_PER_CHARACTER * longest)
        tail = request.token_ids[-num_tokens:].tolist()
        text = self._engine.get_tokenizer().decode(tail, skip_special_tokens=False)
        processor = self._engine.output_processor
        for internal in processor.external_req_ids[str(request.number)]:
            # What it has of the text is searched, and read by nobody else.
            processor.request_states[internal].detokenizer.output_text = text

    def step(self) -> list[Completion]:
        """One step of the engine; what ends with it, in an order that all ranks share."""
        return [self._completed(output) for output in self._engine.step() if output.finished]

    def end_soon(self, numbers: Sequence[int]) -> None:
        """End these with the next token, as by their `max_tokens`; unknown numbers are ignored.

        By its length, so that all that is told of an ended request is told of these: to abort one
        leaves no experts behind. One that has no token yet is forgotten and never completed.
        """
        not_begun = []
        for number, request in self._in_scheduler(numbers):
            if request.num_output_tokens == 0:
                not_begun.append(number)
            request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)
        self.drop(not_begun)

    def drop(self, numbers: Sequence[int] | None = None) -> list[tuple[Request, int]]:
        """Forget these, or all, with what they have generated; returns each with the number of
        these tokens. Unknown numbers are ignored."""
        dropped = set(self._running if numbers is None else numbers) & set(self._running)
        generated = {n: each.num_output_tokens for n, each in self._in_scheduler(dropped)}
        self._engine.abort_request([str(number) for number in sorted(dropped)])
        return [(self._running.pop(number), generated.get(number, 0)) for number in sorted(dropped)]

    def _in_scheduler(self, numbers: Collection[int]) -> list[tuple[int, Any]]:
        """vLLM's own of these requests."""
        if not numbers:
            return []
        wanted = {str(number) for number in numbers}
        requests = self._engine.engine_core.engine_core.scheduler.requests
        states = self._engine.output_processor.request_states
        return [
            (int(state.external_req_id), requests[internal])
            for internal, state in states.items()
            if state.external_req_id in wanted and internal in requests
        ]

    def _completed(self, output: Any) -> Completion:
        request = self._running.pop(int(output.request_id))
        (found,) = output.outputs
        if found.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"request {request.number} ended with {found.finish_reason!r}, not by a stop token "
                "or its length"
            )
        tokens = found.token_ids
        log_probs = found.logprobs.logprobs  # of each position that of what was sampled, no other
        if found.logprobs.token_ids != list(tokens):
            raise RuntimeError(f"request {request.number}: log-probs of other tokens than sampled")
        routes, failure = None, None
        if request.with_routes and self._routed is not None:
            num_computed = len(request.token_ids) + len(tokens) - 1
            told = routes_of(found.routed_experts, self._routed, num_computed)
            routes, failure = (None, told) if isinstance(told, str) else (told, None)
        return Completion(
            request=request,
            token_ids=np.asarray(tokens, dtype=np.int32),
            log_probs=np.asarray(log_probs, dtype=np.float32),
            finish_reason=found.finish_reason,
            routes=routes,
            failure=failure,
        )
