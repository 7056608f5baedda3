"""Which servers get requests: those that hold the current weights and answer.

    excluded ── answers a probe ──► returned ── update, `admit` ──► admitted ── fault ──► excluded

All servers begin as excluded. A server leaves "admitted" at once for a connection error, a timeout,
a refusal, a wrong answer, or other weights than the current ones, which a probe finds: a server
that has restarted answers, but with the weights of its checkpoint. `begin_update` makes all
admitted servers returned. Everything here runs on one event loop and never blocks it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.common.http import quoted
from mcore_rl.hybrid_engine.remote.generate_client import (
    GenerateClient,
    OtherVersion,
    ServerFault,
    ServerState,
)

logger = logging.getLogger(__name__)

EXCLUDED, RETURNED, ADMITTED = "excluded", "returned", "admitted"
# Events that are counted besides kinds of `ServerFault`.
CONTINUED, FAILED = "continued", "failed"
_EVENTS = (
    *("unreachable", "timeout", "refused", "wrong_answer", "other_version"),
    *(EXCLUDED, RETURNED, CONTINUED, FAILED),
)
_MOST_KEYS = 1 << 14  # groups whose server is remembered


class NoServerLeft(Exception):
    """All admitted servers are among those that a request avoids."""


@dataclass(eq=False, slots=True)
class Server:
    """One server, as the pool sees it.

    Example: `Server(client, 128, state="admitted", num_running=3)`.
    """

    client: GenerateClient
    max_num_seqs: int  # requests of this process at a time
    state: str = EXCLUDED
    num_running: int = 0  # requests of this process
    problem: str = ""  # why the last probe failed, or why it was excluded
    is_trusted: bool = False  # tokens that have arrived since `admit` can be trained on

    @property
    def url(self) -> str:
        return self.client.url


@dataclass(eq=False, slots=True)
class _Waiter:
    key: Hashable
    avoid: Collection[str]
    future: asyncio.Future[Server]
    stuck_since: float | None = None  # no admitted server is left for it


class ServerPool:
    """The servers of a run; made on the event loop that its methods run on."""

    def __init__(
        self,
        clients: Sequence[GenerateClient],
        *,
        max_num_seqs: int,
        probe_interval_seconds: float,
        probe_timeout_seconds: float,
        patience_seconds: float,
    ) -> None:
        """A server gets at most `max_num_seqs` requests at a time. A request that no admitted
        server is left for gives up after `patience_seconds`; while none is admitted, it waits. Each
        server is probed every `probe_interval_seconds`, which must be shorter than its start."""
        self._servers = {client.url: Server(client, max_num_seqs) for client in clients}
        self._max_num_seqs, self._patience_seconds = max_num_seqs, patience_seconds
        self._probe_interval, self._probe_timeout = probe_interval_seconds, probe_timeout_seconds
        self.weight_version: int | None = None  # of admitted servers; None during an update
        self._served: set[str] = set()  # admitted before the update that runs
        self.gives_up = False  # requests that wait while no server is admitted end as failures
        self._waiting: list[_Waiter] = []
        self._last_server: dict[Hashable, Server] = {}
        self._counts: Counter[str] = Counter()
        self._vllm_version: str | None = None  # of the first server that answered
        self._without_since: float | None = _now()

    # Around updates

    def begin_update(self) -> tuple[str, ...]:
        """Return the servers that can take part in an update: all that answer. None of them gets a
        request until `admit`; requests must have ended before."""
        self.weight_version = None
        self._served |= set(self.admitted)
        for server in self._servers.values():
            if server.state == ADMITTED:
                server.state = RETURNED
        self._note_admitted()
        return self.returned

    def admit(self, max_num_seqs: Mapping[str, int], weight_version: int) -> None:
        """Give requests to these servers from now on, and to no others: they hold attested weights
        of this version. Each gets at most so many at a time, within the pool's maximum. Raises
        KeyError for an unknown URL."""
        chosen = {url: self._servers[url] for url in max_num_seqs}
        for _ in self._served - chosen.keys():
            self.count(EXCLUDED)
        self._served = set()
        self.weight_version = weight_version
        for server in self._servers.values():
            if server.url in chosen:
                server.state, server.is_trusted = ADMITTED, True
                server.max_num_seqs = min(max_num_seqs[server.url], self._max_num_seqs)
            elif server.state == ADMITTED:
                server.state = EXCLUDED
        self._note_admitted()
        self._assign()

    @property
    def returned(self) -> tuple[str, ...]:
        """The servers that answer and are not admitted, for the next update."""
        return self._urls(RETURNED)

    @property
    def admitted(self) -> tuple[str, ...]:
        """The servers that get requests."""
        return self._urls(ADMITTED)

    @property
    def seconds_without_server(self) -> float:
        """How long no server has been admitted; 0.0 while one is."""
        return 0.0 if self._without_since is None else _now() - self._without_since

    # Requests

    async def acquire(self, key: Hashable, avoid: Collection[str] = ()) -> Server:
        """Return a server with room for one more request, after waiting for it in order.

        The server with the least load, but that of the last request with the same `key` if it has
        room: its prefix cache has the prompt. `release` must follow. Raises NoServerLeft.
        """
        waiter = _Waiter(key, avoid, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._assign()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            future = waiter.future
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(future.result())
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def release(self, server: Server) -> None:
        """Return the room that `acquire` has taken."""
        server.num_running -= 1
        self._assign()

    def report(self, server: Server, fault: ServerFault) -> None:
        """Count a request's fault; exclude the server, unless the request is at fault."""
        if fault.is_of_request:
            self.count(fault.kind)
        else:
            self._exclude(server, fault)

    def count(self, event: str) -> None:
        """Count an event."""
        assert event in _EVENTS, f"{event} has no metric"
        self._counts[event] += 1

    def take_metrics(self) -> dict[str, float]:
        """Return the number of admitted servers, and of events since the last call."""
        counts, self._counts = self._counts, Counter()
        found = {f"servers/{name}": float(counts[name]) for name in _EVENTS}
        return {"servers/admitted": float(len(self.admitted))} | found

    # Probes

    async def watch(self) -> None:
        """Probe all servers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for server in self._servers.values():
                tasks.create_task(self._watch(server))

    async def _watch(self, server: Server) -> None:
        while True:
            await self._probe(server)
            self._give_up()
            await asyncio.sleep(self._probe_interval)

    async def _probe(self, server: Server) -> None:
        asked = (server.state, self.weight_version)
        try:
            found = await server.client.probe(self._probe_timeout)
            if asked != (server.state, self.weight_version):
                return  # an update or a fault has come between
            self._check(server, found)
        except ServerFault as fault:
            if server.state == ADMITTED:
                self._exclude(server, fault)
                return
            server.state = EXCLUDED  # it cannot take part in an update
            if str(fault) != server.problem:
                server.problem = str(fault)
                logger.warning("[Servers] %s cannot take part in an update: %s", server.url, fault)

    def _check(self, server: Server, found: ServerState) -> None:
        """Compare a server's answers with what is expected. Raises OtherVersion."""
        self._vllm_version = self._vllm_version or found.vllm_version
        if server.state == ADMITTED and found.weight_version != str(self.weight_version):
            held = quoted(found.weight_version.encode(), 60)
            raise OtherVersion(f"weights of version {held} instead of {self.weight_version}")
        if found.vllm_version != self._vllm_version:
            other = quoted(found.vllm_version.encode(), 60)
            raise OtherVersion(f"vLLM {other}, but another server has {self._vllm_version}")
        if server.state == EXCLUDED:
            server.state, server.problem = RETURNED, ""
            self.count(RETURNED)
            logger.info("[Servers] %s answers; the next update can include it", server.url)

    # Internal

    def _urls(self, state: str) -> tuple[str, ...]:
        return tuple(url for url, each in self._servers.items() if each.state == state)

    def _exclude(self, server: Server, fault: ServerFault) -> None:
        self.count(fault.kind)
        server.is_trusted &= fault.keeps_tokens
        if server.state != ADMITTED:
            return
        server.state, server.problem = EXCLUDED, str(fault)
        self.count(EXCLUDED)
        logger.warning("[Servers] %s gets no more requests: %s", server.url, fault)
        self._note_admitted()

    def _note_admitted(self) -> None:
        if self.admitted:
            self._without_since = None
        elif self._without_since is None:
            self._without_since = _now()

    def _assign(self) -> None:
        """Give waiting requests to servers with room."""
        free = [
            each
            for each in self._servers.values()
            if each.state == ADMITTED and each.num_running < each.max_num_seqs
        ]
        for waiter in list(self._waiting):
            if not free:
                return
            able = [each for each in free if each.url not in waiter.avoid]
            if not able or waiter.future.done():
                continue
            last = self._last_server.get(waiter.key)
            server = last if last in able else min(able, key=lambda each: each.num_running)
            self._remember(waiter.key, server)
            self._waiting.remove(waiter)
            server.num_running += 1
            if server.num_running == server.max_num_seqs:
                free.remove(server)
            waiter.future.set_result(server)

    def _remember(self, key: Hashable, server: Server) -> None:
        self._last_server.pop(key, None)  # the newest come last
        self._last_server[key] = server
        if len(self._last_server) > _MOST_KEYS:
            del self._last_server[next(iter(self._last_server))]

    def _give_up(self) -> None:
        """End waiting requests that have had no server left for too long."""
        admitted, now = set(self.admitted), _now()
        for waiter in list(self._waiting):
            if not admitted and self.gives_up and not waiter.future.done():
                waiter.future.set_exception(NoServerLeft("none is admitted"))
            elif not admitted or not admitted <= set(waiter.avoid):
                waiter.stuck_since = None
            elif waiter.stuck_since is None:
                waiter.stuck_since = now
            if waiter.stuck_since is not None and not waiter.future.done():
                if now - waiter.stuck_since >= self._patience_seconds:
                    waiter.future.set_exception(NoServerLeft(f"{len(admitted)} admitted"))


def _now() -> float:
    return asyncio.get_running_loop().time()
