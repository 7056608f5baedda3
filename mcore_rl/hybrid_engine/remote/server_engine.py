"""An engine whose requests run on several `vllm serve` processes.

`ServerEngine` and `ServerGeneration` have the interface of `VLLMEngine` and `Generation` that
sampling uses. An event loop in a thread runs all requests; the caller's thread never waits for a
server.

    caller's thread                     thread of the event loop
    submit ──────── request ──────────► one task each: room on a server, stream, next server
    step ◄───────── completion ──────── queue
    end_soon, drop ── call, answered ─► cancel the tasks
    begin_update, admit ─ call ───────► ServerPool, which probes the servers
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from mcore_rl.common.addresses import header_from
from mcore_rl.common.http import client_session
from mcore_rl.hybrid_engine.remote.generate_client import GenerateClient
from mcore_rl.hybrid_engine.remote.loop_thread import LoopThread
from mcore_rl.hybrid_engine.remote.server_generation import Ended, ServerGeneration
from mcore_rl.hybrid_engine.remote.server_pool import ServerPool
from mcore_rl.hybrid_engine.vllm.drafter import DraftCounts
from mcore_rl.moe.routing import RoutedLayers


@dataclass(frozen=True, slots=True)
class ServersConfig:
    """The servers, and how they are used.

    `seqs_per_server` is the number of requests that this process runs on each server, which may run
    fewer. A server that sends this process no token within `token_timeout_seconds`, though it has
    requests, is excluded; the other times are described in `server_pool`. `header_env` names an
    environment variable with a header to send. With `routed_layers` servers must be started with
    --enable-return-routed-experts. `end_tokens` are those at which a response ends; None: the
    tokenizer's.

    Example: `ServersConfig(("http://a:8000", "http://b:8000"), seqs_per_server=256,
    vocab_size=129280)`.
    """

    urls: tuple[str, ...]
    seqs_per_server: int
    vocab_size: int
    header_env: str | None = None
    routed_layers: RoutedLayers | None = None
    end_tokens: tuple[int, ...] | None = None
    token_timeout_seconds: float = 60.0
    probe_interval_seconds: float = 5.0
    probe_timeout_seconds: float = 30.0
    patience_seconds: float = 60.0

    @property
    def max_num_seqs(self) -> int:
        return len(self.urls) * self.seqs_per_server

    @property
    def dp_size(self) -> int:
        return 1

    @property
    def speculation(self) -> None:
        return None  # servers may draft, but do not report counts per request


class ServerEngine:
    """Servers as one engine of one rank. Local; use it from one thread.

    No request runs before the first `admit`. `tokenizer` is the Hugging Face tokenizer of the
    model. Raises UsageError for an unusable header. `close` must follow.
    """

    def __init__(self, config: ServersConfig, tokenizer: Any) -> None:
        self.config, self.tokenizer = config, tokenizer
        header = header_from(config.header_env, "--rl-rollout-servers-header-env")
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._loop = LoopThread()
        self._session, self._pool = self._loop.call(lambda: self._start(header))

    def _start(self, header: dict[str, str]) -> tuple[aiohttp.ClientSession, ServerPool]:
        config = self.config
        # A connection for each request, and one for each server's probes.
        concurrency = config.max_num_seqs + len(config.urls)
        session = client_session(header, concurrency=concurrency, keeps_connections=False)
        clients = [
            GenerateClient(
                session,
                url,
                vocab_size=config.vocab_size,
                token_timeout_seconds=config.token_timeout_seconds,
                routed=config.routed_layers,
                shows_refusals=not header,
            )
            for url in config.urls
        ]
        pool = ServerPool(
            clients,
            max_num_seqs=config.seqs_per_server,
            probe_interval_seconds=config.probe_interval_seconds,
            probe_timeout_seconds=config.probe_timeout_seconds,
            patience_seconds=config.patience_seconds,
        )
        self._watching = asyncio.create_task(pool.watch())
        self._watching.add_done_callback(self._watch_ended)
        return session, pool

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._ended.put(Ended(error=error))

    # Servers

    def begin_update(self) -> tuple[str, ...]:
        """Call `ServerPool.begin_update`, before the weights change. The first call waits until
        each server was probed."""
        self._pool.first_probes.wait(self.config.probe_timeout_seconds)
        return self._loop.call(self._pool.begin_update)

    def admit(self, max_num_seqs: Mapping[str, int], weight_version: int) -> None:
        """Call `ServerPool.admit`, after the weights have changed."""
        self._loop.call(lambda: self._pool.admit(max_num_seqs, weight_version))

    @property
    def returned(self) -> tuple[str, ...]:
        """The servers that answer and get no requests; the next update can include them."""
        return self._loop.call(lambda: self._pool.returned)

    @property
    def admitted(self) -> tuple[str, ...]:
        """The servers that get requests."""
        return self._loop.call(lambda: self._pool.admitted)

    @property
    def has_sampled(self) -> bool:
        """Whether a token arrived between the last two calls of `begin_update`."""
        return self._loop.call(lambda: self._pool.has_sampled)

    @property
    def faults(self) -> dict[str, str]:
        """Why servers were excluded the last time, by URL."""
        return self._loop.call(lambda: self._pool.faults)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Within it, requests that find no server admitted end as failures instead of waiting."""
        self._pool.gives_up = True
        try:
            yield
        finally:
            self._pool.gives_up = False

    def take_metrics(self) -> dict[str, float]:
        """Return `servers/...`: counts of events since the last call, and admitted servers."""
        return self._loop.call(self._pool.take_metrics)

    # As VLLMEngine

    @property
    def tp_rank(self) -> int:
        """0: there is one rank."""
        return 0

    def any_rank(self, here: bool) -> bool:
        """Return `here`."""
        return here

    def of_first_rank(self, mine: Any) -> Any:
        """Return `mine`."""
        return mine

    def seed_sampling(self, seed: int) -> None:
        """Do nothing: requests bring their own seeds."""

    def take_draft_counts(self) -> DraftCounts:
        """Return no counts."""
        return DraftCounts()

    def text_of(self, token_ids: np.ndarray, *, with_special: bool = False) -> str:
        """Decode a response for its rewards, without special tokens; with them for a log."""
        ids = token_ids.tolist()
        text: str = self.tokenizer.decode(ids, skip_special_tokens=not with_special)
        return text

    def require_ready(self) -> None:
        """Raise RuntimeError before the first `admit`, and during an update."""
        if self._pool.weight_version is None:
            raise RuntimeError("no server holds the current weights: call admit after an update")

    @contextmanager
    def generation(self) -> Iterator[ServerGeneration]:
        """Open a context for adding and removing requests; those left at its end are dropped."""
        self.require_ready()
        config, ends = self.config, self.config.end_tokens
        if ends is None:
            own = getattr(self.tokenizer, "eos_token_id", None)  # not every one has it
            ends = () if own is None else (own,)
        generation = ServerGeneration(
            self._pool, self._loop, self._ended, self.tokenizer, config.routed_layers, ends
        )
        try:
            yield generation
        finally:
            generation.drop()

    def close(self) -> None:
        """End all requests and the thread. A second call has no effect."""
        self._loop.close(self._session.close)
