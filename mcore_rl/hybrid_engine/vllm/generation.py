"""Requests in this process's vLLM: they are added and removed between any two steps of the engine.

All ranks of a TP group submit the same requests in the same order between the same steps. The
response to a request depends on its tokens, its seed and the weights. It depends on other requests
only as far as kernels round differently for batches of another size.

Shape legend: p tokens that are given, r tokens that are sampled.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from mcore_rl.batching.types import TopTokens
from mcore_rl.moe.routing import RoutedLayers, Routes
from mcore_rl.moe.routing_capture import routes_of

BYTES_PER_CHARACTER = 4  # at most; a token has at least one byte
FINISH_REASONS = ("stop", "length")  # of complete responses
NO_LOG_PROB = -9999.0  # vLLM's floor, also in place of NaN and of a missing log-prob


def are_tokens(values: Any, vocab_size: int) -> Any:
    """Return whether integers are token ids: a bool, or an array of bools for an array."""
    return (values >= 0) & (values < vocab_size)


def are_log_probs(values: Any) -> Any:
    """Return whether floats are log-probs of sampled tokens: finite and at most 0. A bool, or an
    array of bools for an array."""
    return (values > NO_LOG_PROB) & (values <= 0.0)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that tokens are sampled from; temperature 0 takes the most likely token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    ignore_eos: bool = False
    # Texts that end a response. The token that completes one is kept.
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A sequence to continue.

    Example: `Request(7, array([16, 10, 16, 28]), max_tokens=64, sampling=Sampling(top_p=0.9),
    seed=11)`.
    """

    number: int  # the caller's; unique among running requests
    token_ids: np.ndarray  # [p] int32
    max_tokens: int
    sampling: Sampling
    seed: int | None = None  # of the request's own random stream; None: the process's stream
    with_routes: bool = False
    # Keys and values are shared only with requests of the same name; "": with all without one.
    cache_name: str = ""
    num_own: int = 0  # trailing `token_ids` that were sampled in the same turn
    num_top: int = 0  # most probable tokens whose log-probs to return at each position


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a request.

    Example: `Completion(request, array([17, 2]), array([-0.1, -0.01]), finish_reason="stop")`.
    """

    request: Request
    token_ids: np.ndarray  # [r] int32, the end-of-sequence token included if it was sampled
    # [r] float32, under the distribution that was sampled from, after temperature, top-p and top-k;
    # at temperature 0 under the distribution at temperature 1.
    log_probs: np.ndarray
    finish_reason: str  # "stop" (end of sequence or one of `Sampling.stop`) or "length"
    routes: Routes | None = None  # of p + r - 1 tokens; the last is sampled but not computed
    failure: str | None = None  # why it cannot be trained on
    top_tokens: TopTokens | None = None  # [r, k]; None for `num_top` 0

    @property
    def number(self) -> int:
        """The request's number."""
        return self.request.number

    @property
    def is_cut_short(self) -> bool:
        """Whether `Generation.end_soon` stopped it early, so that it can be continued."""
        return self.finish_reason == "length" and len(self.token_ids) < self.request.max_tokens


def seed_of(*parts: int | str) -> int:
    """Return a 63-bit seed determined by `parts`, independent of the seeds of other parts."""
    text = "\0".join(f"{type(part).__name__} {part}" for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@functools.cache
def _compact_log_probs() -> Any:
    """Return a class for vLLM's log-probs of a request."""
    from vllm.logprobs import FlatLogprobs

    class CompactLogProbs(FlatLogprobs):
        """The first `width` log-probs of each position, one position after the other."""

        def __init__(self, width: int) -> None:
            super().__init__(token_ids=array("i"), logprobs=array("f"))
            self._width = width

        def append_fast(
            self, token_ids: list[int], logprobs: list[float], ranks: Any, decoded_tokens: Any
        ) -> None:
            """Add a position, without ranks and texts."""
            self.token_ids.extend(token_ids[: self._width])
            self.logprobs.extend(logprobs[: self._width])

    return CompactLogProbs


def sampling_fields(request: Request) -> dict[str, Any]:
    """Return a request's fields of vLLM's `SamplingParams`, as values of JSON."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": None if sampling.temperature == 0.0 else request.seed,
        "max_tokens": request.max_tokens,
        "ignore_eos": sampling.ignore_eos,
        "logprobs": request.num_top,  # besides that of the sampled token
        # Works token by token, so only for stop strings; these may be special tokens.
        "detokenize": bool(sampling.stop),
        "stop": list(sampling.stop) or None,
        "include_stop_str_in_output": True,
        "skip_special_tokens": not sampling.stop,
    }


def begin_with(detokenizer: Any, token_ids: Sequence[int], tokenizer: Any) -> None:
    """Have vLLM's `detokenizer` of a request begin with the text of the last of its given tokens.

    It searches its text for stop strings; nothing else reads it.
    """
    if not hasattr(detokenizer, "stream"):  # of a tokenizer in Python
        detokenizer.output_text = tokenizer.decode(token_ids, skip_special_tokens=False)
        return
    # vLLM's stream begins with all given tokens. If they end within a character, it gives their
    # text with the rest of it, and a stop string would be found in the prompt.
    detokenizer.stream = DecodeStream(skip_special_tokens=False)
    detokenizer.output_text = "".join(map(detokenizer.decode_next, token_ids))


class Generation:
    """The requests running in an `LLMEngine`. Local, but see the module's docstring."""

    def __init__(self, engine: Any, routed: RoutedLayers | None, adapter: Any = None) -> None:
        """`engine` is vLLM's; `routed` are the expert layers whose routes a request may ask for;
        `adapter` is vLLM's `LoRARequest` of all requests, if any."""
        self._engine, self._routed, self._adapter = engine, routed, adapter
        self._running: dict[int, Request] = {}

    @property
    def num_running(self) -> int:
        """The number of requests that are not complete, including those that wait for room."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Add a request from the next step on."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if request.number in self._running:
            raise ValueError(f"a request of number {request.number} runs already")
        self._engine.add_request(
            str(request.number),
            tokens_input(request.token_ids.tolist(), cache_salt=request.cache_name or None),
            SamplingParams(
                **sampling_fields(request),
                flat_logprobs=True,  # lists of numbers instead of two objects per token
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # no other request uses these parameters
            ),
            lora_request=self._adapter,
        )
        self._running[request.number] = request
        if request.num_top:
            self._keep_compactly(request)
        if request.sampling.stop and request.num_own:
            self._remember_own(request)

    def _states(self, request: Request) -> Iterator[Any]:
        """Yield vLLM's states of a request's output."""
        processor = self._engine.output_processor
        for internal in processor.external_req_ids[str(request.number)]:
            yield processor.request_states[internal]

    def _keep_compactly(self, request: Request) -> None:
        """Keep log-probs as arrays: vLLM's lists hold an object for each number, and for a request
        with stop strings the text of each candidate."""
        for state in self._states(request):
            state.logprobs_processor.logprobs = _compact_log_probs()(1 + request.num_top)
            state.logprobs_processor.tokenizer = None

    def _remember_own(self, request: Request) -> None:
        """Let vLLM find a stop string that began in an earlier part of the response."""
        longest = max(map(len, request.sampling.stop))
        num_tokens = min(request.num_own, BYTES_PER_CHARACTER * longest)
        tail = request.token_ids[-num_tokens:].tolist()
        for state in self._states(request):
            begin_with(state.detokenizer, tail, self._engine.get_tokenizer())

    def step(self) -> list[Completion]:
        """Run one step of the engine; return what ended in it, in the same order on all ranks."""
        return [self._completed(output) for output in self._engine.step() if output.finished]

    def end_soon(self, numbers: Sequence[int]) -> None:
        """End requests with the next token, as by their `max_tokens`; ignore unknown numbers.

        They end by length, so that their results are complete: an aborted request does not report
        its experts. A request without any sampled token is dropped and never completed.
        """
        not_begun = []
        for number, request in self._in_scheduler(numbers):
            if request.num_output_tokens == 0:
                not_begun.append(number)
            request.max_tokens = min(request.max_tokens, request.num_output_tokens + 1)
        self.drop(not_begun)

    def drop(self, numbers: Sequence[int] | None = None) -> list[tuple[Request, int]]:
        """Drop requests (default: all) with their tokens; ignore unknown numbers. Return each with
        the number of tokens that it had generated."""
        dropped = set(self._running if numbers is None else numbers) & set(self._running)
        generated = {n: each.num_output_tokens for n, each in self._in_scheduler(dropped)}
        self._engine.abort_request([str(number) for number in sorted(dropped)])
        return [(self._running.pop(number), generated.get(number, 0)) for number in sorted(dropped)]

    def _in_scheduler(self, numbers: Collection[int]) -> list[tuple[int, Any]]:
        """Return (number, the scheduler's request) of the `numbers` that vLLM's scheduler has."""
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
        (sampled,) = output.outputs
        if sampled.finish_reason not in FINISH_REASONS:
            raise RuntimeError(
                f"request {request.number} ended with {sampled.finish_reason!r}, not by a stop "
                "token or its length"
            )
        tokens = sampled.token_ids
        # Of each position, first that of the sampled token, then those of the most probable ones.
        width = 1 + request.num_top
        ids = np.asarray(sampled.logprobs.token_ids, dtype=np.int32).reshape(-1, width)
        log_probs = np.asarray(sampled.logprobs.logprobs, dtype=np.float32).reshape(-1, width)
        if ids[:, 0].tolist() != list(tokens):
            raise RuntimeError(f"request {request.number}: log-probs of other tokens than sampled")
        routes, failure = None, None
        if request.with_routes and self._routed is not None:
            num_computed = len(request.token_ids) + len(tokens) - 1
            reported = routes_of(sampled.routed_experts, self._routed, num_computed)
            routes, failure = (None, reported) if isinstance(reported, str) else (reported, None)
        return Completion(
            request=request,
            token_ids=np.asarray(tokens, dtype=np.int32),
            log_probs=log_probs[:, 0].copy(),
            finish_reason=sampled.finish_reason,
            routes=routes,
            failure=failure,
            top_tokens=TopTokens(ids[:, 1:].copy(), log_probs[:, 1:].copy())
            if request.num_top
            else None,
        )
