"""The loop over an engine's steps.

Between two steps a scheduler decides which requests to submit, end or drop. After a step it
receives the completions. The first rank of a TP group decides, and all ranks of the group follow.
They synchronize at the start, after a step in which a request ended, and every few steps while more
requests may come or have to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from mcore_rl.common.spans import span
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine, SamplingGeneration
from mcore_rl.observe.timeline import IDLE, SAMPLING, Activity
from mcore_rl.rollout.segments import OpenGroup

# Pauses between polls while nothing runs: of rewards at first, of stores with many clients later.
_IDLE_SECONDS, _MOST_IDLE_SECONDS = 0.001, 0.005
_FIRST_STEP_SECONDS = 0.03  # assumed duration of a step before one is measured
STEPS_BETWEEN_SCHEDULES = 4


@dataclass(frozen=True, slots=True)
class StreamActions:
    """The decision of a TP group's first rank, for all its ranks.

    Example: submit a request and drop two: `StreamActions((request,), drop=(12, 13), more=True)`.
    """

    submit: tuple[Request, ...] = ()
    end: tuple[int, ...] = ()  # numbers of requests that end with their next token
    drop: tuple[int, ...] = ()  # numbers of requests that are dropped
    more: bool = False  # continue even if nothing runs: more may come, or rewards are missing
    is_last: bool = False  # no further request will come
    restore: tuple[OpenGroup, ...] = ()  # groups from the bank, which the first rank has read
    stop: bool = False  # return to the caller, whatever runs


class RequestScheduler(Protocol):
    """Decides which requests an engine runs."""

    def schedule(self, num_running: int) -> StreamActions:
        """Return the next actions; on the first rank of the TP group. Must not block."""

    def finished(self, completion: Completion) -> None:
        """Handle a request that has ended; on all ranks of the TP group, in the same order."""

    def dropped(self, request: Request, num_tokens: int) -> None:
        """Handle a request dropped after `num_tokens`; on all ranks of the TP group."""

    def restored(self, groups: Sequence[OpenGroup]) -> None:
        """Take over groups from the bank; on all ranks of the TP group."""

    def between_steps(self, num_running: int, step_seconds: float) -> None:
        """Process rewards and environments; on the first rank. Must not wait for anything slower
        than the engine, which samples one token per running request and step."""


def step_engine(
    engine: SamplingEngine,
    scheduler: RequestScheduler,
    generation: SamplingGeneration,
    when_few_are_left: Callable[[], object] | None = None,
    activity: Activity | None = None,
) -> None:
    """Step the engine with the requests of `generation` until none runs and none will come, or
    until the scheduler stops. Collective over the engine. `activity` notes when there are requests.

    `when_few_are_left` is called once, between two steps, as soon as no request will come and at
    most a quarter of the sequences that fit are running. With it, a trace shows the time before as
    "first responses" and the time after as "last responses".
    """
    few = max(1, engine.config.max_num_seqs // 4)
    actions, must_schedule, num_steps = StreamActions(more=True), True, 0
    step_seconds, idle_seconds = _FIRST_STEP_SECONDS, _IDLE_SECONDS
    with ExitStack() as traced:
        if when_few_are_left is not None:
            traced.enter_context(span("first responses"))
        while True:
            if must_schedule:
                decided = (
                    scheduler.schedule(generation.num_running) if engine.tp_rank == 0 else None
                )
                actions = engine.of_first_rank(decided)
                _apply(actions, scheduler, generation)
            is_last = actions.is_last or not actions.more
            if when_few_are_left is not None and is_last and generation.num_running <= few:
                traced.close()
                with span("prefetch"):
                    when_few_are_left()
                when_few_are_left = None
                traced.enter_context(span("last responses"))
            goes_on = generation.num_running > 0 or actions.more
            if not engine.any_rank(goes_on and not actions.stop):
                return
            if activity is not None:
                activity.begin(SAMPLING if generation.num_running else IDLE)
            ended = []
            if generation.num_running or engine.config.dp_size > 1:
                began = time.perf_counter()
                ended = generation.step()
                step_seconds, idle_seconds = time.perf_counter() - began, _IDLE_SECONDS
                num_steps += 1
                for completion in ended:
                    scheduler.finished(completion)
            else:
                time.sleep(idle_seconds)  # wait for an environment, a reward or a draw
                idle_seconds = min(_MOST_IDLE_SECONDS, 1.1 * idle_seconds)
            if engine.tp_rank == 0:
                scheduler.between_steps(generation.num_running, step_seconds)
            is_time = not generation.num_running or num_steps % STEPS_BETWEEN_SCHEDULES == 0
            must_schedule = bool(ended) or (actions.more and is_time)


def _apply(
    actions: StreamActions, scheduler: RequestScheduler, generation: SamplingGeneration
) -> None:
    if actions.restore:
        scheduler.restored(actions.restore)
    for request in actions.submit:
        generation.submit(request)
    generation.end_soon(actions.end)
    for request, num_tokens in generation.drop(actions.drop):
        scheduler.dropped(request, num_tokens)
