"""Which servers get requests: those that hold the current weights and answer.

    excluded ── answers a probe ──► returned ── update, `admit` ──► admitted ── fault ──► excluded

All servers begin as excluded. A server leaves "admitted" at once for a connection error, a timeout,
a refusal, a wrong answer, or other weights than the current ones, which a probe finds: a server
that has restarted answers, but with the weights of its checkpoint. `begin_update` makes all
admitted servers returned. Everything here runs on one event loop and never blocks it.

Faults are counted for each response, too, across updates: a response is given up after three
faults without a token between them, or after twelve. While no server sends a token to any request,
servers rather than prompts are at fault, and only one prompt in `patience_seconds` is given up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field

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
_MOST_KEYS = 1 << 14  # groups whose server is remembered, and responses that had faults
_MOST_IN_A_ROW, _MOST_FAULTS = 3, 12  # of a response: without a token between them, and in all


Response = tuple[int, bytes]  # a number, unique among running requests, and the prompt


class NoServerLeft(Exception):
    """No server is admitted, and requests do not wait for one."""


@dataclass(slots=True)
class Faults:
    """Faults of servers while they sampled one response, since it began.

    Example: two servers refused it, one of them after some tokens:
    `Faults(num_in_a_row=1, number=2, servers={"http://a:8000"})`.
    """

    num_in_a_row: int = 0  # since its last token
    number: int = 0
    servers: set[str] = field(default_factory=set)  # that have failed it since its last token
    last: str = ""
    is_given_up: bool = False  # the response, until the weights change

    @property
    def are_too_many(self) -> bool:
        """Whether to give the response up, unless servers are at fault."""
        return self.num_in_a_row >= _MOST_IN_A_ROW or self.number >= _MOST_FAULTS

    def add(self, url: str, fault: ServerFault) -> None:
        """Count a fault of the server at `url`."""
        self.num_in_a_row += 1
        self.number += 1
        self.servers.add(url)
        self.last = str(fault)

    def end_row(self) -> None:
        """Note that a token has arrived."""
        self.num_in_a_row = 0
        self.servers.clear()


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
    fault: str = ""  # why it was excluded the last time
    is_trusted: bool = False  # tokens that have arrived since `admit` can be trained on

    @property
    def url(self) -> str:
        return self.client.url


@dataclass(eq=False, slots=True)
class _Waiter:
    key: Hashable
    avoid: Set[str]
    future: asyncio.Future[Server]


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
        """A server gets at most `max_num_seqs` requests at a time. Each is probed every
        `probe_interval_seconds`, which must be shorter than its start. `patience_seconds` is
        described in the module."""
        self._servers = {client.url: Server(client, max_num_seqs) for client in clients}
        self._max_num_seqs, self._patience_seconds = max_num_seqs, patience_seconds
        self._probe_interval, self._probe_timeout = probe_interval_seconds, probe_timeout_seconds
        self.weight_version: int | None = None  # of admitted servers; None during an update
        self._last_version: int | None = None  # the same, also during an update
        self._served: set[str] = set()  # admitted before the update that runs
        self.gives_up = False  # requests that wait while no server is admitted end as failures
        self._waiting: list[_Waiter] = []
        self._last_server: dict[Hashable, Server] = {}
        self._counts: Counter[str] = Counter()
        self._faults: dict[Response, Faults] = {}  # of responses that are not complete
        self._given_up: tuple[bytes, float] | None = None  # the last prompt, and when
        self._kept_at = -math.inf  # when tokens were last kept
        self._update_began_at = -math.inf
        self.has_sampled = False  # a token arrived between the last two beginnings of an update
        self._unprobed = set(self._servers)
        self.first_probes = threading.Event()  # set once each server was probed

    # Around updates

    def begin_update(self) -> tuple[str, ...]:
        """Return the servers that can take part in an update: all that answer. None of them gets a
        request until `admit`; requests must have ended before."""
        self.weight_version = None
        self._served |= set(self.admitted)
        for server in self._servers.values():
            if server.state == ADMITTED:
                server.state = RETURNED
        self.has_sampled = self._last_token_at > self._update_began_at
        self._update_began_at = _now()
        return self.returned

    def admit(self, max_num_seqs: Mapping[str, int], weight_version: int) -> None:
        """Give requests to these servers from now on, and to no others: they hold attested weights
        of this version. Each gets at most this many at once, within the pool's maximum. Raises
        KeyError for an unknown URL."""
        chosen = {url: self._servers[url] for url in max_num_seqs}
        for _ in self._served - chosen.keys():
            self.count(EXCLUDED)
        self._served = set()
        if self._last_version != weight_version:
            self._faults = {key: each for key, each in self._faults.items() if not each.is_given_up}
        self.weight_version = self._last_version = weight_version
        for server in self._servers.values():
            if server.url in chosen:
                server.state, server.is_trusted = ADMITTED, True
                server.max_num_seqs = min(max_num_seqs[server.url], self._max_num_seqs)
            elif server.state == ADMITTED:
                server.state = EXCLUDED
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
    def faults(self) -> dict[str, str]:
        """Why servers were excluded the last time, by URL."""
        return {url: each.fault for url, each in self._servers.items() if each.fault}

    @property
    def _last_token_at(self) -> float:
        """When the last token arrived that is not known to be wrong."""
        trusted = (each.client for each in self._servers.values() if each.is_trusted)
        return max([self._kept_at, *(client.last_token_at for client in trusted)])

    # Requests

    async def acquire(self, key: Hashable, avoid: Set[str] = frozenset()) -> Server:
        """Return a server with room for one more request, after waiting for it in order; one of
        those to `avoid` only if no other is admitted.

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

    def faults_of(self, response: Response) -> Faults:
        """Return the faults of a response so far, also of earlier requests for it."""
        return self._faults.get(response) or Faults()

    def keep(self, response: Response) -> None:
        """Note that tokens of a response are kept."""
        self._kept_at = _now()
        self.faults_of(response).end_row()

    def complete(self, response: Response) -> None:
        """Forget the faults of a response that is complete."""
        self._faults.pop(response, None)

    def report(self, server: Server, fault: ServerFault, response: Response) -> bool:
        """Count a fault of a request for a response; return whether to give the response up.
        Exclude the server, unless the request is at fault."""
        faults = self._faults.setdefault(response, Faults())
        faults.add(server.url, fault)
        if len(self._faults) > _MOST_KEYS:
            del self._faults[next(iter(self._faults))]
        server.is_trusted &= fault.keeps_tokens
        _, prompt = response
        faults.is_given_up = faults.are_too_many and self._may_give_up(prompt)
        is_of_server = faults.are_too_many and not faults.is_given_up
        if fault.is_of_request and not is_of_server:
            self.count(fault.kind)
        else:
            self._exclude(server, fault)
        return faults.is_given_up

    def _may_give_up(self, prompt: bytes) -> bool:
        """Return whether a prompt may be at fault, rather than all servers."""
        now = _now()
        if self._given_up is not None:
            last, at = self._given_up
            has_moved = last == prompt or self._last_token_at > at
            if not has_moved and now - at < self._patience_seconds:
                return False
        self._given_up = (prompt, now)
        return True

    def count(self, event: str) -> None:
        """Count an event."""
        assert event in _EVENTS, f"{event} has no metric"
        self._counts[event] += 1

    def take_metrics(self) -> dict[str, float]:
        """Return the number of admitted servers, and of events since the last call."""
        counts, self._counts = self._counts, Counter()
        events = {f"servers/{name}": float(counts[name]) for name in _EVENTS}
        return {"servers/admitted": float(len(self.admitted))} | events

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
            state = await server.client.probe(self._probe_timeout)
            if asked != (server.state, self.weight_version):
                return  # an update or a fault has come between
            self._check(server, state)
        except ServerFault as fault:
            if server.state == ADMITTED:
                self._exclude(server, fault)
                return
            server.state = EXCLUDED  # it cannot take part in an update
            if str(fault) != server.problem:
                server.problem = str(fault)
                logger.warning("[Servers] %s cannot take part in an update: %s", server.url, fault)
        finally:
            self._unprobed.discard(server.url)
            if not self._unprobed:
                self.first_probes.set()

    def _check(self, server: Server, state: ServerState) -> None:
        """Compare a server's weights with those expected; `check_server` compares its vLLM with the
        job's. Raises OtherVersion."""
        if server.state == ADMITTED and state.weight_version != str(self.weight_version):
            held = quoted(state.weight_version.encode(), 60)
            raise OtherVersion(f"weights of version {held} instead of {self.weight_version}")
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
        server.fault = server.problem
        self.count(EXCLUDED)
        logger.warning("[Servers] %s gets no more requests: %s", server.url, fault)
        self._assign()  # requests may have avoided the others

    def _assign(self) -> None:
        """Give waiting requests to servers with room."""
        admitted = {*self.admitted}
        free = [
            each
            for each in self._servers.values()
            if each.state == ADMITTED and each.num_running < each.max_num_seqs
        ]
        for waiter in list(self._waiting):
            if not free:
                return
            has_other = not admitted <= waiter.avoid
            able = [each for each in free if not has_other or each.url not in waiter.avoid]
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
        """End waiting requests while no server is admitted, if they do not wait for one."""
        for waiter in self._waiting if self.gives_up and not self.admitted else ():
            if not waiter.future.done():
                waiter.future.set_exception(NoServerLeft("none is admitted"))


def _now() -> float:
    return asyncio.get_running_loop().time()
