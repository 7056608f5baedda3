"""Engines on servers that do what a test says, and requests to them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from mcore_rl.hybrid_engine.remote.server_engine import ServerEngine, ServersConfig
from mcore_rl.hybrid_engine.remote.server_generation import ServerGeneration
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from tests.unit.fake_servers import VOCAB_SIZE, FakeServer, response_to

NUM_TOKENS = 6


class Tokenizer:
    """A letter for each token."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(33 + token) for token in token_ids)


Make = Callable[..., ServerEngine]


@contextmanager
def making() -> Iterator[Make]:
    """Make engines on some servers, which hold weights of version 1; they are closed at the end."""
    with ExitStack() as closing:

        def engine(*chosen: FakeServer, admits: bool = True, **options: Any) -> ServerEngine:
            times = {"probe_interval_seconds": 0.01, "probe_timeout_seconds": 60.0}
            urls = tuple(each.url for each in chosen)
            config = ServersConfig(
                urls, **{"seqs_per_server": 4, "vocab_size": VOCAB_SIZE, **times, **options}
            )
            made = ServerEngine(config, Tokenizer())
            closing.callback(made.close)
            if admits:
                until(lambda: set(made.returned) == set(urls))
                update(made, chosen, 1)
            return made

        yield engine


def update(engine: ServerEngine, chosen: Sequence[FakeServer], version: int) -> None:
    engine.begin_update()
    for server in chosen:
        server.weight_version = str(version)
    engine.admit({each.url: 100 for each in chosen}, version)


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        threading.Event().wait(0.002)


def request_of(number: int, **options: Any) -> Request:
    prompt = np.array([number, 5, 6], dtype=np.int32)
    return Request(
        number, prompt, **{"max_tokens": NUM_TOKENS, "sampling": Sampling(), "seed": 11, **options}
    )


def finished(generation: ServerGeneration, seconds: float = 60) -> dict[int, Completion]:
    """All completions until nothing runs."""
    found: dict[int, Completion] = {}

    def step() -> bool:
        found.update({each.number: each for each in generation.step()})
        return not generation.num_running

    until(step, seconds)
    return found


def sampled(engine: ServerEngine, requests: Sequence[Request]) -> dict[int, Completion]:
    with engine.generation() as generation:
        for request in requests:
            generation.submit(request)
        return finished(generation)


def assert_expected(found: dict[int, Completion], requests: Sequence[Request]) -> None:
    assert found.keys() == {each.number for each in requests}
    for request in requests:
        tokens, log_probs = response_to(request.token_ids.tolist(), request.max_tokens)
        completion = found[request.number]
        assert completion.failure is None and completion.request is request
        assert completion.token_ids.tolist() == tokens and completion.token_ids.dtype == np.int32
        np.testing.assert_array_equal(completion.log_probs, np.array(log_probs, dtype=np.float32))


def tokens_of(generation: ServerGeneration, number: int) -> int:
    return generation._running[number].num_tokens


def until_no_server_runs(generation: ServerGeneration) -> None:
    """Wait until every request waits for a server or has ended."""
    until(lambda: all(run.server is None for run in generation._running.values()))


def set_token_timeout(engine: ServerEngine, server: FakeServer, seconds: float) -> None:
    """Of this server alone; the engine's configuration is for all."""
    engine._pool._servers[server.url].client._timeout_seconds = seconds


def nan_log_prob(event: dict[str, Any]) -> None:
    if len(event["choices"][0]["token_ids"]) and event["choices"][0]["finish_reason"]:
        event["choices"][0]["logprobs"]["content"][0]["logprob"] = float("nan")


def wrong_id(event: dict[str, Any]) -> None:
    event["choices"][0]["token_ids"] = [VOCAB_SIZE]


def old_weights(event: dict[str, Any]) -> None:
    for span in event["choices"][0]["weight_versions"] or []:
        span["version"] = "0"
