"""Client of one server's route for token ids in and token ids out.

`vllm serve --enable-scale-out` has POST /inference/v1/generate. Its answer is a stream of events:

    data: {"choices": [{"token_ids": [17], "logprobs": {"content":
          [{"token_id": 17, "logprob": -0.1, "top_logprobs": [...]}]}, "finish_reason": null}]}
    data: [DONE]

The last event of a response has a finish reason, the weight versions of its tokens
(`WeightVersionSpan`, from vLLM 0.32 on), and, with --enable-return-routed-experts, the experts of
prompt and response. Log-probs are of the distribution that was sampled from only with
--logprobs-mode processed_logprobs, which an answer does not show. Nothing in an answer is believed
unchecked, and whatever else an answer causes is a fault of its server (`answers_of`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import aiohttp
import numpy as np
from packaging.version import InvalidVersion, Version

from mcore_rl.batching.types import TopTokens
from mcore_rl.common.http import HTTPFailure, answer_to, lines_of, quoted, request
from mcore_rl.common.readers import InvalidData, finite_number, integer_within, parse_json
from mcore_rl.common.vllm_version import WEIGHT_VERSIONS_SINCE
from mcore_rl.hybrid_engine.vllm.generation import (
    FINISH_REASONS,
    NO_LOG_PROB,
    Request,
    are_log_probs,
    sampling_fields,
)
from mcore_rl.moe.routing import RoutedLayers, Routes
from mcore_rl.moe.routing_capture import routes_of

logger = logging.getLogger(__name__)

_MAX_EVENT_BYTES = 1 << 20  # without routes
_MAX_CANDIDATE_BYTES = 128  # of one of the most probable tokens of a position
_MAX_ROUTE_BYTES = 6  # of one expert: an int32 in base64, rounded up
_MAX_ANSWER_BYTES = 1 << 16  # of refusals and probes
_OF_THE_REQUEST = (400, 413, 422)  # statuses that another server would answer with, too


def num_log_probs(num_top: int, vocab_size: int) -> int:
    """Return the number to ask a server for at each position, to get the `num_top` most probable
    tokens: it includes the sampled token, which a server returns first."""
    return min(1 + num_top, vocab_size)


class ServerFault(Exception):
    """A request that a server did not complete. The message fits on one line of a log."""

    kind: ClassVar[str]  # as in metrics
    is_of_request: bool = False  # the request is at fault, not the server
    keeps_tokens: bool = True  # what arrived before can be trained on


class Unreachable(ServerFault):
    """The connection could not be made, or broke."""

    kind = "unreachable"


class TimedOut(ServerFault):
    """No token, or no answer to a probe, within the time."""

    kind = "timeout"


class Refused(ServerFault):
    """An error status instead of an answer, or an error or an abort within a stream."""

    kind = "refused"

    def __init__(self, text: str, *, is_of_request: bool = False) -> None:
        super().__init__(text)
        self.is_of_request = is_of_request


class WrongAnswer(ServerFault):
    """An answer that no sound server gives."""

    kind, keeps_tokens = "wrong_answer", False


class OtherVersion(ServerFault):
    """Tokens of other weights than expected."""

    kind, keeps_tokens = "other_version", False


@contextlib.contextmanager
def answers_of(url: str) -> Iterator[None]:
    """Within it, whatever a server's answer causes is a ServerFault: no answer ends a run."""
    try:
        yield
    except ServerFault:
        raise
    except Exception as error:  # of any type: readers and libraries raise their own
        logger.debug("an answer of %s", url, exc_info=True)
        raise WrongAnswer(f"an answer that cannot be read ({type(error).__name__})") from error


@dataclass(slots=True)
class Received:
    """Tokens of a request that have arrived; grows while the request runs.

    Example: two tokens, more to come: `Received([17, 2], [-0.1, -0.01])`.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)  # of each token, if asked for
    finish_reason: str | None = None  # "stop" or "length" of a complete response
    routes: Routes | None = None  # of a complete response
    # Whether a response ends with the last of these tokens, though the server continues.
    ends: Callable[[Sequence[int]], bool] | None = None
    is_cut: bool = False  # by `ends`: the server's last event has not arrived


@dataclass(frozen=True, slots=True)
class ServerState:
    """The answers to a probe.

    Example: `ServerState(vllm_version="0.32.0", weight_version="17")`.
    """

    vllm_version: str
    weight_version: str  # "default" before the first update


class GenerateClient:
    """Client of the server at `url`; on the event loop of `session`.

    A request ends with an error if no token of any request of this client arrives within
    `token_timeout_seconds` of its start or of the last token: it may wait for its turn in a full
    server. `shows_refusals` puts a server's text into errors; False if a secret header is sent,
    which the text may repeat.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        *,
        vocab_size: int,
        token_timeout_seconds: float,
        routed: RoutedLayers | None = None,
        shows_refusals: bool = True,
    ) -> None:
        self.url = url
        self._session, self._vocab_size, self._routed = session, vocab_size, routed
        self._timeout_seconds, self._shows_refusals = token_timeout_seconds, shows_refusals
        self.last_token_at = -math.inf  # of any request, by the loop's clock
        self._names_weights = True  # in its answers, as far as is known

    async def generate(self, request: Request, received: Received, weight_version: int) -> None:
        """Run `request` to its end, and append its tokens to `received` as they arrive.

        Cancelling it closes the connection, and the server aborts the request. Raises ServerFault,
        and nothing else, whatever the server answers; `received` then has the tokens before it.
        """
        with answers_of(self.url):
            await self._generate(request, received, weight_version)

    async def _generate(self, request: Request, received: Received, weight_version: int) -> None:
        reader = _EventReader(
            request,
            received,
            self._vocab_size,
            weight_version,
            names_weights=self._names_weights,
        )
        sampling = sampling_fields(request)
        if request.num_top:
            sampling["logprobs"] = num_log_probs(request.num_top, self._vocab_size)
        body = {
            "token_ids": request.token_ids.tolist(),
            "sampling_params": sampling,
            "stream": True,
            "cache_salt": request.cache_name or None,
        }
        try:
            async with (
                self._until_silent(),
                answer_to(
                    self._session,
                    "POST",
                    f"{self.url}/inference/v1/generate",
                    body=json.dumps(body).encode(),
                    kept_refusal_bytes=_MAX_ANSWER_BYTES,
                ) as response,
            ):
                async for line in lines_of(response, self._max_event_bytes(request)):
                    if self._read(line, reader):
                        self.last_token_at = asyncio.get_running_loop().time()
                    if reader.finish_reason is not None:
                        self._read_routes(reader)
                        received.finish_reason = reader.finish_reason
                        return
        except TimeoutError:
            raise TimedOut(f"no token within {self._timeout_seconds:g} s") from None
        except HTTPFailure as failure:
            if request.num_top and b"logprobs" in (failure.answer or b""):
                raise Refused(
                    f"it refuses {sampling['logprobs']} log-probs of each token, which "
                    f"--rl-score-centering {request.num_top} needs; start its vllm serve with "
                    f"--max-logprobs {sampling['logprobs']}"
                ) from None
            raise self._fault(failure) from None
        raise Unreachable("the stream ended before the response")

    @contextlib.asynccontextmanager
    async def _until_silent(self) -> AsyncIterator[None]:
        """Raise TimeoutError within it once the server is silent for too long."""
        loop, seconds = asyncio.get_running_loop(), self._timeout_seconds
        started = loop.time()
        timer: asyncio.TimerHandle
        async with asyncio.timeout(None) as deadline:

            def check() -> None:
                nonlocal timer
                due = max(started, self.last_token_at) + seconds
                if loop.time() < due:
                    timer = loop.call_at(due, check)
                else:
                    deadline.reschedule(loop.time())

            timer = loop.call_at(started + seconds, check)
            try:
                yield
            finally:
                timer.cancel()

    async def probe(self, timeout_seconds: float) -> ServerState:
        """Return the state of a server whose engine runs. Each of three requests may take
        `timeout_seconds`. Raises ServerFault."""
        with answers_of(self.url):
            await self._get("health", timeout_seconds)  # fails if the engine behind it is dead
            state = ServerState(
                _text(await self._get("version", timeout_seconds), "version"),
                _text(await self._get("weight_info", timeout_seconds), "weight_version"),
            )
        self._names_weights = _names_weights(state.vllm_version)
        return state

    async def _get(self, path: str, timeout_seconds: float) -> bytes:
        try:
            return await request(
                self._session,
                "GET",
                f"{self.url}/{path}",
                timeout_seconds=timeout_seconds,
                max_answer_bytes=_MAX_ANSWER_BYTES,
            )
        except HTTPFailure as failure:
            raise self._fault(failure) from None

    def _fault(self, failure: HTTPFailure) -> ServerFault:
        text = str(failure)
        if failure.kind == "timed out":
            return TimedOut(text)
        if failure.kind == "answer too long":
            return WrongAnswer(text)
        if failure.status is None:
            return Unreachable(text)
        if failure.answer and self._shows_refusals:
            text = f"{text}: {quoted(failure.answer)}"
        return Refused(text, is_of_request=failure.status in _OF_THE_REQUEST)

    def _max_event_bytes(self, request: Request) -> int:
        most = _MAX_EVENT_BYTES + request.num_top * request.max_tokens * _MAX_CANDIDATE_BYTES
        if self._routed is None or not request.with_routes:
            return most
        num_tokens = len(request.token_ids) + request.max_tokens
        num_layers = self._routed.layers[-1] + 1  # those without experts are counted, too
        return most + num_tokens * num_layers * self._routed.topk * _MAX_ROUTE_BYTES

    def _read(self, line: bytes, reader: _EventReader) -> bool:
        """Read a line of the stream; return whether it had tokens."""
        if not line.strip() or line.startswith(b":"):
            return False
        prefix, _, text = line.partition(b"data: ")
        if prefix or not text:
            raise WrongAnswer("a line of the stream is not an event")
        try:
            event = parse_json(text)
        except InvalidData:
            raise WrongAnswer("an event of the stream is not JSON") from None
        if isinstance(event, dict) and "error" in event:
            shown = f": {quoted(text)}" if self._shows_refusals else ""
            raise Refused(f"an error within the stream{shown}")
        return reader.read(event)

    def _read_routes(self, reader: _EventReader) -> None:
        if self._routed is None or not reader.request.with_routes or reader.received.is_cut:
            return
        if reader.routes_text is None:
            raise WrongAnswer(
                "it does not return the experts of each token, which --rl-routing-replay r3 needs; "
                "start its vllm serve with --enable-return-routed-experts"
            )
        reader.received.routes = reader.routes(self._routed)


class _EventReader:
    """Checks the events of one stream, and adds their tokens to what has been received."""

    def __init__(
        self,
        request: Request,
        received: Received,
        vocab_size: int,
        weight_version: int,
        *,
        names_weights: bool,
    ) -> None:
        self.request, self.received, self._names_weights = request, received, names_weights
        self._last_token, self._weight_version = vocab_size - 1, str(weight_version)
        self.finish_reason: str | None = None
        self.routes_text: str | None = None

    def read(self, event: Any) -> bool:
        """Read an event; return whether it had tokens. Raises WrongAnswer, OtherVersion or
        Refused, without having added any token of the event."""
        choices = event.get("choices") if isinstance(event, dict) else None
        if choices == []:  # counts of tokens
            return False
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise WrongAnswer("an event has not one choice")
        choice = choices[0]
        tokens, log_probs, top = self._tokens(choice)
        reason = choice.get("finish_reason")
        if reason is not None:
            self._check_end(choice, reason, len(self.received.token_ids) + len(tokens))
        for place, token in enumerate(tokens):
            self.received.token_ids.append(token)
            self.received.log_probs.append(log_probs[place])
            self.received.top_tokens += top[place : place + 1]
            if self.received.ends is not None and self.received.ends(self.received.token_ids):
                reason, self.received.is_cut = "stop", True
                break
        self.finish_reason = reason
        return bool(tokens)

    def _tokens(self, choice: dict[str, Any]) -> tuple[list[int], list[float], list[TopTokens]]:
        """Return an event's tokens, their log-probs and, if asked for, their candidates."""
        tokens = choice.get("token_ids") or []
        if not isinstance(tokens, list):
            raise WrongAnswer("token ids are not a list")
        if any(integer_within(token, 0, self._last_token) is None for token in tokens):
            raise WrongAnswer(f"a token id is not an integer from 0 to {self._last_token}")
        if len(self.received.token_ids) + len(tokens) > self.request.max_tokens:
            raise WrongAnswer(f"more than the {self.request.max_tokens} tokens asked for")
        logprobs = choice.get("logprobs")
        content = logprobs.get("content") if isinstance(logprobs, dict) else None
        entries = (content if tokens else None) or []
        if not isinstance(entries, list) or len(entries) != len(tokens):
            raise WrongAnswer("there is not one log-prob for each token")
        log_probs = [_log_prob(entry, t) for entry, t in zip(entries, tokens, strict=True)]
        return tokens, log_probs, [self._top(entry) for entry in entries if self.request.num_top]

    def _top(self, entry: dict[str, Any]) -> TopTokens:
        """Return the most probable tokens of a position. Raises WrongAnswer."""
        num_top, candidates = self.request.num_top, entry.get("top_logprobs")
        if not isinstance(candidates, list) or not num_top <= len(candidates) <= 1 + num_top:
            raise WrongAnswer(f"a token comes without the {num_top} candidates asked for")
        # The sampled token is first, whatever its rank.
        by_rank = dict(_candidate(each, self._last_token) for each in candidates)
        ranked = [by_rank.get(1 + n) for n in range(num_top)]
        best = [each for each in ranked if each is not None]
        if len({token for token, _ in best}) != num_top:
            raise WrongAnswer(f"the candidates of a token are not those of ranks 1 to {num_top}")
        ids, log_probs = zip(*best, strict=True)
        return TopTokens(np.array([ids], dtype=np.int32), np.array([log_probs], dtype=np.float32))

    def _check_end(self, choice: dict[str, Any], reason: Any, num_tokens: int) -> None:
        if reason == "abort":
            raise Refused("the server aborted the request")
        if reason not in FINISH_REASONS:
            raise WrongAnswer("an unknown finish reason")
        if not num_tokens:
            raise WrongAnswer("a response without tokens")
        if reason == "length" and num_tokens < self.request.max_tokens:
            raise WrongAnswer(
                f"the response ended after {num_tokens} of {self.request.max_tokens} tokens; the "
                "server's --max-model-len may be too small"
            )
        self._check_versions(choice.get("weight_versions"), num_tokens)
        routes = choice.get("routed_experts")
        if routes is not None and not isinstance(routes, str):
            raise WrongAnswer("experts are not a text in base64")
        self.routes_text = routes

    def _check_versions(self, spans: Any, num_tokens: int) -> None:
        """Check spans `[start, end)` of tokens; an older vLLM sends none."""
        if spans is None and not self._names_weights:
            return
        end = 0
        for span in spans if isinstance(spans, list) else [None]:
            if not isinstance(span, dict) or span.get("start") != end:
                raise WrongAnswer("spans of weight versions do not cover the response")
            if span.get("version") != self._weight_version:
                raise OtherVersion(f"tokens of other weights than version {self._weight_version}")
            end = integer_within(span.get("end"), end, num_tokens) or 0
        if end != num_tokens:
            raise WrongAnswer("spans of weight versions do not cover the response")

    def routes(self, routed: RoutedLayers) -> Routes:
        """Return the experts of all tokens except the last. Raises WrongAnswer, or what numpy
        raises."""
        assert self.routes_text is not None
        data = base64.b64decode(self.routes_text, validate=True)
        reported = np.load(io.BytesIO(data), allow_pickle=False)
        if not isinstance(reported, np.ndarray) or not np.issubdtype(reported.dtype, np.integer):
            raise WrongAnswer("experts are not an array of integers")
        num_computed = len(self.request.token_ids) + len(self.received.token_ids) - 1
        routes = routes_of(reported, routed, num_computed)
        if isinstance(routes, str):
            raise WrongAnswer(routes)
        return routes


def _names_weights(vllm_version: str) -> bool:
    """Return whether answers of this vLLM name the weight versions of their tokens."""
    try:
        return Version(vllm_version) >= Version(WEIGHT_VERSIONS_SINCE)
    except InvalidVersion:
        return True


def _text(answer: bytes, name: str) -> str:
    """Return a text of a JSON answer."""
    try:
        fields = parse_json(answer)
    except InvalidData:
        fields = None
    text = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        raise WrongAnswer(f"an answer to a probe has no text {name!r}")
    return text


def _candidate(entry: Any, last_token: int) -> tuple[int | None, tuple[int, float]]:
    """Return the rank of a token, from 1, and the token and its log-prob, which may be vLLM's
    floor."""
    fields = entry if isinstance(entry, dict) else {}
    token = integer_within(fields.get("token_id"), 0, last_token)
    log_prob = finite_number(fields.get("logprob"))
    if token is None or log_prob is None or not NO_LOG_PROB <= log_prob <= 0.0:
        raise WrongAnswer("a candidate is not a token with a finite log-prob of at most 0")
    return integer_within(fields.get("rank"), 1, last_token + 1), (token, log_prob)


def _log_prob(entry: Any, token: int) -> float:
    if not isinstance(entry, dict) or entry.get("token_id") != token:
        raise WrongAnswer("a log-prob is of another token than sampled")
    value = finite_number(entry.get("logprob"))
    if value is None or not are_log_probs(value):
        raise WrongAnswer("a log-prob is not a finite number of at most 0")
    return value
