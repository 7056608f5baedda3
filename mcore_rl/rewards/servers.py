"""All reward servers of a run, requested over HTTP in one thread while requests are open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Container, Sequence
from queue import SimpleQueue

from mcore_rl.batching.types import Rollout
from mcore_rl.rewards.http import Answered, ServerReward

_Added = tuple[int, int, Rollout]  # number of a server, ticket, rollout


class Servers:
    """Requests of rewards for each rollout from the servers that its source names.

    Rollouts added since the last `advance` are passed on together; `ServerReward.answer` turns them
    into requests. Without open requests, no thread or connection exists. A server's faults fail its
    samples and raise nothing.
    """

    def __init__(self, servers: Sequence[ServerReward]) -> None:
        self._servers = tuple(servers)
        self._added: list[_Added] = []
        self._num_open = 0  # outcomes that are due
        self._answered: SimpleQueue[Answered] = SimpleQueue()
        self._has_answers = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._requests: _Requests | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when `advance` has outcomes to return."""
        return self._has_answers

    def add(self, ticket: int, rollout: Rollout, names: Container[str]) -> None:
        """Store a rollout for `advance`, for the servers among `names`."""
        numbers = [n for n, server in enumerate(self._servers) if server.name in names]
        self._added += [(number, ticket, rollout) for number in numbers]
        self._num_open += len(numbers)

    def advance(self) -> Answered:
        """Request what was added and return the outcomes that have arrived; does not block."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._has_answers)  # first, so that it is set by later answers
        answers: Answered = []
        while not self._answered.empty():
            answers += self._answered.get()
        self._num_open -= len(answers)
        if self._num_open == 0:
            self._end_requests()
            return answers
        if self._requests is None:
            self._requests = _Requests(self._servers, self._on_answers)
        self._requests.add(self._added)
        self._added = []
        return answers

    def reset(self) -> None:
        """Cancel all requests and forget all rollouts."""
        self._end_requests()
        self._added, self._num_open, self._answered = [], 0, SimpleQueue()

    def close(self) -> None:
        """Cancel all requests. Call it once."""
        self._end_requests()
        os.close(self._has_answers)

    def _end_requests(self) -> None:
        if self._requests is not None:
            self._requests.end()
            self._requests = None

    def _on_answers(self, answered: Answered) -> None:
        """Queue a server's answers; called in the thread of the requests."""
        self._answered.put(answered)
        os.eventfd_write(self._has_answers, 1)


class _Requests:
    """A thread with an event loop that runs the requests to each server."""

    def __init__(
        self, servers: Sequence[ServerReward], on_answers: Callable[[Answered], None]
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rewards over HTTP", daemon=True
        )
        self._thread.start()
        self._waiting: list[asyncio.Queue[tuple[int, Rollout]]] = [asyncio.Queue() for _ in servers]
        self._clients = [
            asyncio.run_coroutine_threadsafe(server.answer(waiting, on_answers), self._loop)
            for server, waiting in zip(servers, self._waiting, strict=True)
        ]

    def add(self, rollouts: Sequence[_Added]) -> None:
        """Request these rollouts as well. Raises only what a bug of ours can cause."""
        for client in self._clients:
            if client.done():
                client.result()
        if rollouts:
            self._loop.call_soon_threadsafe(self._put, rollouts)

    def _put(self, rollouts: Sequence[_Added]) -> None:
        for number, ticket, rollout in rollouts:
            self._waiting[number].put_nowait((ticket, rollout))

    def end(self) -> None:
        """Cancel unanswered requests, close all connections and end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    """Cancel all other tasks of this loop, and wait until they have closed their resources."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
