"""Servers that speak vLLM's route for token ids, and do what a test says.

A token depends on the tokens before it alone, so that a response is the same on one server and in
parts on several.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

from aiohttp import web

from mcore_rl.hybrid_engine.remote.loop_thread import LoopThread

VOCAB_SIZE = 97
Change = Callable[[dict[str, Any]], object]


def next_token(token_ids: Sequence[int]) -> tuple[int, float]:
    """The token after these, and its log-prob."""
    token = (31 * sum(token_ids) + 7 * len(token_ids)) % VOCAB_SIZE
    return token, -(token + 1) / 64


def response_to(token_ids: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """What a sound server answers, computed one token after the other."""
    tokens, log_probs = [], []
    for _ in range(max_tokens):
        token, log_prob = next_token([*token_ids, *tokens])
        tokens.append(token)
        log_probs.append(log_prob)
    return tokens, log_probs


def candidates_of(token: int, log_prob: float, count: int) -> list[tuple[int, float]]:
    """The most probable tokens at a position, by rank; the sampled one is the second, or none."""
    others = [((token + n) % VOCAB_SIZE, -n / 128) for n in range(1, 1 + count)]
    return [*others[:1], (token, log_prob), *others[1:-1]] if token % 2 else others


def as_candidates(token: int, log_prob: float, count: int) -> list[dict[str, Any]]:
    """`count` of them as vLLM sends them, the sampled one first."""
    by_rank = {
        each: {"token_id": each, "logprob": of_each, "rank": rank}
        for rank, (each, of_each) in enumerate(candidates_of(token, log_prob, count), 1)
    }
    sampled = {"token_id": token, "logprob": log_prob, "rank": count + 5}
    return [by_rank.pop(token, sampled), *by_rank.values()][:count]


class FakeServer:
    """Attributes may change at any time; `reset` makes the server sound again."""

    def __init__(self) -> None:
        self.url = ""
        self.reset()

    def reset(self) -> None:
        self.weight_version, self.vllm_version = "default", "0.32.0"
        self.configuration: dict[str, Any] = {
            "model_config": {
                "model": "/elsewhere",
                "max_model_len": 128,
                "max_logprobs": 20,
                "logprobs_mode": "processed_logprobs",
                "quantization": None,
                "multimodal_config": None,
            },
            "load_config": {"load_format": "dummy"},
            "scheduler_config": {"max_num_seqs": 32},
            "parallel_config": {"data_parallel_size": 1},
            "weight_transfer_config": {"backend": "mcore_rl"},
            "aux_output_config": {"enable_return_routed_experts": False},
        }
        self.end_tokens = {2}
        self.is_paused = False
        self.is_down = False  # closes each connection
        self.status = self.probe_status = 200
        self.status_of_get = 405  # of the route for token ids
        self.refusal = "nothing\nfor you " + "x" * 5000  # with another status
        # A semaphore: a limited number of requests run at a time, and others wait for their turn.
        self.turns: AbstractAsyncContextManager[Any] = nullcontext()
        self.hold_after: int | None = None  # tokens after which a stream hangs
        self.close_after: int | None = None  # tokens after which the connection is closed
        self.end_after: int | None = None  # tokens after which the stream ends
        self.stop_after: int | None = None  # tokens after which a response ends
        self.change: Change = lambda event: None  # of each event, before it is sent
        self.raw: Callable[[int], bytes] | None = None  # in place of the n-th event
        self.prefix = b""  # of each event
        self.extra: dict[str, Any] = {}  # of the last choice
        self.bodies: list[dict[str, Any]] = []  # of requests to generate
        self.headers: list[dict[str, str]] = []
        self.num_running = self.most_running = self.num_probes = self.num_hung_up = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self._check(request, self.status)
        if not body["stream"]:
            (token,) = body["sampling_params"]["allowed_token_ids"]
            ends = token in self.end_tokens
            choice = {"token_ids": [token] * (2 - ends), "finish_reason": "length"}
            choice |= {"finish_reason": "stop"} if ends else {}
            return web.json_response({"choices": [choice]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await response.prepare(request)
            async with self.turns:
                async for event in self._events(request, body):
                    await response.write(event)
        except (asyncio.CancelledError, ConnectionError):
            self.num_hung_up += 1
            raise
        finally:
            self.num_running -= 1
        return response

    async def _events(self, request: web.Request, body: dict[str, Any]) -> AsyncIterator[bytes]:
        most = body["sampling_params"]["max_tokens"]
        tokens, log_probs = response_to(body["token_ids"], self.stop_after or most)
        # The last test's requests may still be running.
        version, change, raw, prefix = self.weight_version, self.change, self.raw, self.prefix
        for number, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            while number == self.hold_after:
                await asyncio.sleep(0.01)
            if number == self.close_after:
                assert request.transport is not None
                request.transport.close()
                return
            if number == self.end_after:
                return
            top = as_candidates(token, log_prob, body["sampling_params"]["logprobs"])
            entry = {"token_id": token, "logprob": log_prob, "rank": 1, "top_logprobs": top}
            choice: dict[str, Any] = {
                "index": 0,
                "token_ids": [token],
                "logprobs": {"content": [entry]},
                "finish_reason": None,
                "weight_versions": None,
                "routed_experts": None,
            }
            if number == len(tokens) - 1:
                span = {"version": version, "start": 0, "end": len(tokens)}
                choice |= {
                    "finish_reason": "stop" if self.stop_after else "length",
                    "weight_versions": [span],
                    **self.extra,
                }
            event = {"request_id": "1", "choices": [choice]}
            change(event)
            text = b"data: " + json.dumps(event).encode() if raw is None else raw(number)
            yield prefix + text + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _check(self, request: web.Request, status: int) -> None:
        if self.is_down:
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if status != 200:
            location = {"Location": "http://127.0.0.1:9/"} if 300 <= status < 400 else None
            response = web.Response(status=status, text=self.refusal, headers=location)
            raise _Answered(response)

    async def _get_generate(self, _: web.Request) -> web.Response:
        return web.Response(status=self.status_of_get)

    def reading(self, fields: Callable[[], dict[str, Any]]) -> Any:
        async def answer(request: web.Request) -> web.StreamResponse:
            self._check(request, self.probe_status)
            self.num_probes += 1
            return web.json_response(fields())

        return answer

    async def start(self) -> None:
        @web.middleware
        async def answered(request: web.Request, handler: Any) -> web.StreamResponse:
            try:
                found: web.StreamResponse = await handler(request)
                return found
            except _Answered as early:
                return early.response

        app = web.Application(middlewares=[answered])
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_get("/inference/v1/generate", self._get_generate)
        app.router.add_get("/is_paused", self.reading(lambda: {"is_paused": self.is_paused}))
        app.router.add_get("/health", self.reading(dict))
        app.router.add_get("/version", self.reading(lambda: {"version": self.vllm_version}))
        app.router.add_get(
            "/weight_info", self.reading(lambda: {"weight_version": self.weight_version})
        )
        app.router.add_get(
            "/server_info", self.reading(lambda: {"vllm_config": self.configuration})
        )
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"


class _Answered(Exception):
    def __init__(self, response: web.Response) -> None:
        self.response = response


@contextmanager
def fake_servers(count: int) -> Iterator[list[FakeServer]]:
    """Servers in one thread."""
    loop, servers = LoopThread(), [FakeServer() for _ in range(count)]

    async def start() -> None:
        for server in servers:
            await server.start()

    async def stop() -> None:
        for server in servers:
            await server._runner.cleanup()

    asyncio.run_coroutine_threadsafe(start(), loop._loop).result()
    try:
        yield servers
    finally:
        loop.close(stop)
