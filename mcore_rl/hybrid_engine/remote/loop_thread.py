"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until `close`. Methods are called from other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], object]) -> None:
        """Run a function on the loop, after those of earlier calls. It must not raise."""
        self._loop.call_soon_threadsafe(function)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the loop, after those of earlier calls; return its result, or raise
        what it raises. It must not block."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # raised in the caller's thread
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    def close(self, at_the_end: Callable[[], Awaitable[object]]) -> None:
        """Cancel all tasks, await `at_the_end()`, and end the thread. A second call has no
        effect."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await at_the_end()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
