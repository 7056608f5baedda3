"""One loop over the steps of an engine, on which everything in rollout hangs.

Between two steps a conductor says what else is to be sampled and what is to end; after a step it
hears what has. It decides on the first rank of each TP group, and all ranks of the group do the
same. They agree at first, after a step in which a request ended, and every few steps as long as
more may come.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from torch.profiler import record_function

from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request

_IDLE_SECONDS = 0.001
_FIRST_STEP_SECONDS = 0.03  # that a step is taken to last before there was one
_ASK_STEPS = 4


@dataclass(frozen=True, slots=True)
class Orders:
    """What the first rank of a TP group has decided, for all of its ranks."""

    submit: tuple[Request, ...] = ()
    end: tuple[int, ...] = ()  # numbers of requests that are to end with their next token
    drop: tuple[int, ...] = ()  # and of those that are forgotten
    more: bool = False  # whether more may come, though nothing runs


class Conductor(Protocol):
    """Says what an engine does next."""

    def orders(self, num_running: int) -> Orders:
        """Between two steps, on the first rank of the TP group; must not wait for anything."""

    def finished(self, completion: Completion) -> None:
        """A request has ended; on all ranks of the TP group, in the same order."""

    def dropped(self, request: Request, num_tokens: int) -> None:
        """A request has been forgotten, as ordered, with so many tokens that it had generated; on
        all ranks of the TP group."""

    def between_steps(self, num_running: int, step_seconds: float) -> None:
        """Whatever is to go on while the engine generates; on the first rank. Waits for nothing
        that comes more slowly than the engine samples: a token for each that runs, in a step."""


def run_stream(
    engine: VLLMEngine,
    conductor: Conductor,
    *,
    when_few_are_left: Callable[[], object] | None = None,
) -> None:
    """Step the engine until nothing runs and nothing more will come. Collective over the engine.

    `when_few_are_left` is called once, between two steps, as soon as nothing more will come and no
    more than a quarter of the sequences that fit are still being generated. A trace shows what
    comes before as "first responses" and what comes after as "last responses".
    """
    few = max(1, engine.config.max_num_seqs // 4)
    orders, ask, num_steps = Orders(more=True), True, 0
    step_seconds = _FIRST_STEP_SECONDS
    with ExitStack() as traced, engine.generation() as generation:
        traced.enter_context(record_function("first responses"))
        while True:
            if ask:
                mine = conductor.orders(generation.num_running) if engine.tp_rank == 0 else None
                orders = engine.of_first_rank(mine)
                for request in orders.submit:
                    generation.submit(request)
                generation.end_soon(orders.end)
                for request, num_tokens in generation.drop(orders.drop):
                    conductor.dropped(request, num_tokens)
            if when_few_are_left is not None and not orders.more and generation.num_running <= few:
                traced.close()
                with record_function("prefetch"):
                    when_few_are_left()
                when_few_are_left = None
                traced.enter_context(record_function("last responses"))
            if not engine.any_rank(generation.num_running > 0 or orders.more):
                return
            ended = []
            if generation.num_running or engine.config.dp_size > 1:
                began = time.perf_counter()
                ended = generation.step()
                step_seconds = time.perf_counter() - began
                num_steps += 1
                for completion in ended:
                    conductor.finished(completion)
            else:
                time.sleep(_IDLE_SECONDS)  # for a tool or a reward that the next request needs
            if engine.tp_rank == 0:
                conductor.between_steps(generation.num_running, step_seconds)
            is_time = not generation.num_running or num_steps % _ASK_STEPS == 0
            ask = bool(ended) or (orders.more and is_time)
