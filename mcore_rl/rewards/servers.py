"""All reward servers of a run, requested over HTTP in one thread while requests are open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Container, Sequence
from queue import SimpleQueue

from mcore_rl.batching.types import Rollout
from mcore_rl.rewards.http import ServerReward
from mcore_rl.rewards.scorer import Scorer, Wake
from mcore_rl.rewards.worker import Outcome


class Servers(Scorer):
    """A scorer that requests rewards for each rollout from every server.

    Rollouts begun since the last call are passed on together; `ServerReward.answer` turns them into
    requests. Without open tickets, no thread or connection exists. A server's faults cost its
    samples and raise nothing.
    """

    def __init__(self, servers: Sequence[ServerReward], wake: Wake | None = None) -> None:
        super().__init__([server.name for server in servers], wake)
        self._servers = tuple(servers)
        self._begun: list[tuple[int, Rollout]] = []
        self._answered: SimpleQueue[tuple[str, list[int], list[Outcome]]] = SimpleQueue()
        self._asking: _Asking | None = None

    def _accept(self, ticket: int, rollout: Rollout) -> None:
        self._begun.append((ticket, rollout))

    def _advance(self) -> None:
        while not self._answered.empty():
            name, tickets, outcomes = self._answered.get()
            for ticket, outcome in zip(tickets, outcomes, strict=True):
                self._found(ticket, name, outcome)
        if not self._open:
            self._end()
            return
        if self._asking is None:
            self._asking = _Asking(self._servers, self._open, self._hear)
        self._asking.about(self._begun)
        self._begun = []

    def _drop(self, tickets: Sequence[int]) -> None:
        if not self._open:  # otherwise the requests skip them
            self._end()

    def _end(self) -> None:
        self._begun = []
        if self._asking is not None:
            self._asking.end()
            self._asking = None

    def _hear(self, name: str, tickets: list[int], outcomes: list[Outcome]) -> None:
        """Queue a server's answer; called in the thread of the requests."""
        self._answered.put((name, tickets, outcomes))
        self._wake.set()


class _Asking:
    """A thread with an event loop that runs the requests to each server."""

    def __init__(
        self,
        servers: Sequence[ServerReward],
        wanted: Container[int],
        tell: Callable[[str, list[int], list[Outcome]], None],
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rewards over HTTP", daemon=True
        )
        self._thread.start()
        self._waiting: list[asyncio.Queue[tuple[int, Rollout]]] = [asyncio.Queue() for _ in servers]
        self._answers = [
            asyncio.run_coroutine_threadsafe(server.answer(waiting, wanted, tell), self._loop)
            for server, waiting in zip(servers, self._waiting, strict=True)
        ]

    def about(self, begun: Sequence[tuple[int, Rollout]]) -> None:
        """Request these rollouts as well. Raises only what a bug of ours can cause."""
        for answer in self._answers:
            if answer.done():
                answer.result()
        if begun:
            self._loop.call_soon_threadsafe(self._put, begun)

    def _put(self, begun: Sequence[tuple[int, Rollout]]) -> None:
        for waiting in self._waiting:
            for each in begun:
                waiting.put_nowait(each)

    def end(self) -> None:
        """Cancel unanswered requests, close all connections and end the thread."""
        asyncio.run_coroutine_threadsafe(_wind_up(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _wind_up() -> None:
    """Cancel all other tasks of this loop, and wait until they have closed their resources."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
