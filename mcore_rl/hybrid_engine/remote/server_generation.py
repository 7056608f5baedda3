"""Requests that run on servers: each on one server at a time, and on the next if it fails."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mcore_rl.batching.types import TopTokens
from mcore_rl.hybrid_engine.remote.generate_client import Received, ServerFault, WrongAnswer
from mcore_rl.hybrid_engine.remote.loop_thread import LoopThread
from mcore_rl.hybrid_engine.remote.server_pool import (
    CONTINUED,
    FAILED,
    NoServerLeft,
    Server,
    ServerPool,
)
from mcore_rl.hybrid_engine.vllm.generation import (
    BYTES_PER_CHARACTER,
    Completion,
    Request,
    seed_of,
)
from mcore_rl.moe.routing import RoutedLayers, Routes

_STEP_SECONDS = 0.004  # the longest wait of a step
# With speculative decoding a stop text may end some tokens before the response.
_MOST_AFTER_STOP = 16


@dataclass(eq=False, slots=True)
class _Run:
    """A request in progress, on the event loop. A part is what one server samples of it."""

    request: Request
    token_ids: list[int] = field(default_factory=list)  # of parts that have ended
    log_probs: list[float] = field(default_factory=list)
    top_tokens: list[TopTokens] = field(default_factory=list)
    part: Received = field(default_factory=Received)
    server: Server | None = None  # of the part
    is_over: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + len(self.part.token_ids)

    @property
    def response(self) -> tuple[int, bytes]:
        """Name of the response: also later requests that continue it have it."""
        ids = self.request.token_ids
        return self.request.number, ids[: len(ids) - self.request.num_own].tobytes()

    def next_request(self) -> Request:
        """Return the request for what is missing."""
        request, so_far = self.request, len(self.token_ids)
        if not so_far:
            return request
        seed = request.seed
        return replace(
            request,
            token_ids=np.concatenate(
                [request.token_ids, np.asarray(self.token_ids, dtype=np.int32)], dtype=np.int32
            ),
            max_tokens=request.max_tokens - so_far,
            num_own=request.num_own + so_far,
            seed=None if seed is None else seed_of(seed, "after", so_far),
        )

    def end_part(self, *, keep: bool) -> None:
        """Add the part's tokens to the response, or discard them."""
        if keep:
            self.token_ids += self.part.token_ids
            self.log_probs += self.part.log_probs
            self.top_tokens += self.part.top_tokens
        self.part, self.server = Received(), None


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion for `step`, or an error that it raises.

    Example: `Ended(run, completion)`.
    """

    run: _Run | None = None
    completion: Completion | None = None
    error: BaseException | None = None


class ServerGeneration:
    """The requests running on the servers; see `Generation` for the contracts."""

    def __init__(
        self,
        pool: ServerPool,
        loop: LoopThread,
        ended: queue.SimpleQueue[Ended],
        tokenizer: Any,
        routed: RoutedLayers | None,
        end_tokens: Collection[int],
    ) -> None:
        """`pool` lives on `loop`. `ended` may bring errors from elsewhere, which `step` raises."""
        self._pool, self._loop, self._ended = pool, loop, ended
        self._tokenizer, self._routed, self._end_tokens = tokenizer, routed, end_tokens
        self._running: dict[int, _Run] = {}

    @property
    def num_running(self) -> int:
        """The number of requests that are not complete, including those that wait for a server."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Start a request, or let it wait for a server with room."""
        if request.number in self._running:
            raise ValueError(f"a request of number {request.number} runs already")
        run = self._running[request.number] = _Run(request)

        def start() -> None:
            run.task = asyncio.create_task(self._play(run))

        self._loop.post(start)

    def step(self) -> list[Completion]:
        """Return the requests that have ended, after waiting a few milliseconds for one. No answer
        of a server is an error: those of the code that runs requests are raised."""
        completions: list[Completion] = []
        try:
            ended = self._ended.get(timeout=_STEP_SECONDS)
            while True:
                if ended.error is not None:
                    raise ended.error
                run, completion = ended.run, ended.completion
                assert run is not None and completion is not None
                if self._running.get(completion.number) is run:  # else it was dropped
                    del self._running[completion.number]
                    completions.append(completion)
                ended = self._ended.get_nowait()
        except queue.Empty:
            return completions

    def end_soon(self, numbers: Sequence[int]) -> None:
        """End requests now, with the tokens that have arrived; ignore unknown numbers. The next
        steps return them. A request without any token is dropped and never completed."""
        runs = [self._running[number] for number in numbers if number in self._running]
        for run in self._loop.call(lambda: self._cut(runs)):
            del self._running[run.request.number]

    def drop(self, numbers: Sequence[int] | None = None) -> list[tuple[Request, int]]:
        """Drop requests (default: all) with their tokens; ignore unknown numbers. Return each with
        the number of tokens that have arrived."""
        chosen = set(self._running if numbers is None else numbers) & set(self._running)
        runs = [self._running.pop(number) for number in sorted(chosen)]
        if not runs:
            return []
        self._loop.call(lambda: _cancel(runs))
        return [(run.request, run.num_tokens) for run in runs]

    # On the event loop

    def _cut(self, runs: Sequence[_Run]) -> list[_Run]:
        """End runs that are not over; return those without a token."""
        going = [run for run in runs if not run.is_over]
        _cancel(going)
        for run in going:
            reason, routes = run.part.finish_reason or "length", run.part.routes
            self._end_part(run, keep=run.server is None or run.server.is_trusted)
            if run.token_ids:
                self._end(run, reason, routes)
        return [run for run in going if not run.token_ids]

    async def _play(self, run: _Run) -> None:
        try:
            await self._run_parts(run)
        except Exception as error:  # `step` raises it
            run.is_over = True
            self._ended.put(Ended(error=error))

    async def _run_parts(self, run: _Run) -> None:
        """Run a request on one server after the other, to its end."""
        key = (run.request.cache_name, run.request.token_ids.tobytes())
        faults = self._pool.faults_of(run.response)
        gives_up = faults.is_given_up
        while not gives_up:
            try:
                server = run.server = await self._pool.acquire(key, faults.servers)
            except NoServerLeft as none:
                last = f", and the last fault was: {faults.last}" if faults.last else ""
                self._fail(run, f"no server is left for it: {none}{last}")
                return
            try:
                await self._run_part(run, server)
            except ServerFault as fault:
                self._end_part(run, keep=fault.keeps_tokens)
                gives_up = self._pool.report(server, fault, run.response)
                faults = self._pool.faults_of(run.response)
                if len(run.token_ids) == run.request.max_tokens:
                    self._end(run, "length")
                    return
                if not gives_up:
                    self._pool.count(CONTINUED)
            else:
                reason, routes = run.part.finish_reason, run.part.routes
                assert reason is not None
                self._end_part(run, keep=True)
                self._end(run, reason, routes)
                return
            finally:
                self._pool.release(server)
        self._fail(run, f"servers failed it {faults.number} times, the last with: {faults.last}")

    async def _run_part(self, run: _Run, server: Server) -> None:
        request, version = run.next_request(), self._pool.weight_version
        assert version is not None, "a server was given without weights"
        if request.sampling.stop and request.num_own:
            run.part.ends = search = StopSearch(request, self._tokenizer)
            if search.is_alone:
                request = replace(request, sampling=replace(request.sampling, stop=()))
        try:
            await server.client.generate(request, run.part, version)
        except ServerFault:
            if run.part.finish_reason is None:  # else the response had arrived before
                raise
        if run.part.finish_reason == "stop" and not run.part.is_cut:
            if not may_end(request, run.part.token_ids, self._end_tokens, self._tokenizer):
                run.part.finish_reason = None
                raise WrongAnswer("a response that stops early, without an end token or stop text")

    def _end_part(self, run: _Run, *, keep: bool) -> None:
        """Add the part's tokens to the response, or discard them."""
        if keep and run.part.token_ids:
            self._pool.keep(run.response)
        run.end_part(keep=keep)

    def _fail(self, run: _Run, failure: str) -> None:
        self._pool.count(FAILED)
        self._end(run, "stop", failure=failure)  # not "length": it must not be continued

    def _end(
        self, run: _Run, reason: str, routes: Routes | None = None, *, failure: str | None = None
    ) -> None:
        run.is_over = True
        request, routed = run.request, self._routed
        if request.with_routes and routed is not None and routes is None:
            num_computed = max(0, len(request.token_ids) + len(run.token_ids) - 1)
            routes = _unknown_routes(routed, num_computed)  # only complete responses have some
        completion = Completion(
            request=request,
            token_ids=np.asarray(run.token_ids, dtype=np.int32),
            log_probs=np.asarray(run.log_probs, dtype=np.float32),
            finish_reason=reason,
            routes=routes,
            failure=failure,
            top_tokens=TopTokens.joined(run.top_tokens) if run.top_tokens else None,
        )
        if failure is None and not completion.is_cut_short:
            self._pool.complete(run.response)
        self._ended.put(Ended(run, completion))


class StopSearch:
    """Search for a stop text that began in an earlier part of the response.

    The server searches only what it samples itself, so this looks at its first tokens, together
    with the last of the earlier ones. If these end within a character, `is_alone`: with the rest of
    it, the server's text would begin with the whole prompt, in which a stop text may occur. The
    server must then not search.
    """

    def __init__(self, request: Request, tokenizer: Any) -> None:
        self._stop, self._tokenizer = request.sampling.stop, tokenizer
        self._longest = max(map(len, self._stop))
        self._num_tokens = BYTES_PER_CHARACTER * self._longest
        self._earlier = request.token_ids[-min(request.num_own, self._num_tokens) :].tolist()
        self.is_alone = self._decoded(self._earlier) != self._text(self._earlier)
        self._is_over = False

    def __call__(self, new: Sequence[int]) -> bool:
        """Return whether a text ends with the last of the `new` tokens; call it with each."""
        if self._is_over:
            return False
        earlier = self._earlier
        if self.is_alone:
            begin = max(0, len(earlier) + len(new) - self._num_tokens)
            earlier, new = earlier[begin:], new[-self._num_tokens :]
        num_earlier, text = len(self._text(earlier)), self._text([*earlier, *new])
        self._is_over = not self.is_alone and len(text) - num_earlier >= self._longest
        return any(text.find(stop, max(0, num_earlier - len(stop) + 1)) >= 0 for stop in self._stop)

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the text, as vLLM's, without a character of which bytes are missing."""
        return self._decoded(token_ids).rstrip("\ufffd")

    def _decoded(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


def may_end(
    request: Request, token_ids: Sequence[int], end_tokens: Collection[int], tokenizer: Any
) -> bool:
    """Return whether a response to `request` may end with the last of these tokens before it has
    `max_tokens`: at one of `end_tokens`, or after a stop text."""
    sampling = request.sampling
    if not sampling.ignore_eos and token_ids[-1] in end_tokens:
        return True
    if not sampling.stop:
        return False
    num_tokens = BYTES_PER_CHARACTER * max(map(len, sampling.stop)) + _MOST_AFTER_STOP
    given = request.token_ids[-num_tokens:].tolist()
    num_own = min(request.num_own, len(given))
    tokens = [*given, *token_ids][-num_tokens:]
    num_earlier = max(0, len(tokens) - len(token_ids) - num_own)

    def text_of(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    # A stop text may begin in what was given, but ends in what was sampled.
    before, text = len(text_of(tokens[:num_earlier])), text_of(tokens)
    return any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in sampling.stop)


def _cancel(runs: Iterable[_Run]) -> None:
    for run in runs:
        run.is_over = True
        if run.task is not None:
            run.task.cancel()


def _unknown_routes(routed: RoutedLayers, num_tokens: int) -> Routes:
    shape = (num_tokens, len(routed.layers), routed.topk)
    return Routes(np.zeros(shape, dtype=routed.dtype), np.zeros(num_tokens, dtype=np.bool_))
