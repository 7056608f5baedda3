"""A pool of worker processes that scores rollouts by reward functions.

    add ────► BatchQueue ──► idle worker ──► answers ──► advance
                  ▲                             │
                  └── a batch that has failed ──┘   (each of its samples alone)

A reward function that raises, hangs or kills its process fails the sample that it was scoring,
never the run.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from mcore_rl.batching.types import Rollout
from mcore_rl.common.addresses import header_from
from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine import available_cores, machine_memory
from mcore_rl.common.readers import InvalidData
from mcore_rl.common.user_code import import_user_file, shortened
from mcore_rl.isolation.pool import START_SECONDS, ProcessPool, Starts, check_program
from mcore_rl.isolation.session import Event
from mcore_rl.isolation.variables import check_environment_names
from mcore_rl.isolation.wire import NO_ANSWER, Answer, Failed
from mcore_rl.isolation.zygote import Program
from mcore_rl.rewards.batches import Batch, BatchQueue
from mcore_rl.rewards.functions import resolve_reward
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.worker import Outcome, as_outcomes, as_sources
from mcore_rl.sandbox import PYTHON_SANDBOX

# By default; each worker holds the modules that a reward imports.
_MOST_WORKERS = 16
_WORKER_BYTES = 1 << 30
_MAX_ANSWER_BYTES = 1 << 26  # thousands of samples with the longest failure texts

# In a batch of several; a sample that needs more is scored again alone, with its full time.
_TIMEOUT_IN_BATCH_SECONDS = 1.0


@dataclass(slots=True)
class _Worker:
    ticket: int
    is_ready: bool = False  # it has resolved the functions
    batches: deque[Batch] = field(default_factory=deque)  # not answered; it works on the first

    @property
    def takes_more(self) -> bool:
        """Whether a quick batch may wait behind what it has."""
        return self.is_ready and all(batch.is_quick for batch in self.batches)

    @property
    def expected_seconds(self) -> float:
        return sum(batch.expected_seconds for batch in self.batches)


class RewardPool:
    """Worker processes that score samples, with a time limit per sample and function.

    A faulty function fails only its sample, even if it writes into the socket of its process.

    Workers start when the first sample is sent. They import only `worker`, its imports and the
    user's modules, inherit the standard streams and the variables of `isolation.variables` and the
    spec, and are killed when this process ends, however it ends.

    Each worker scores any sample by any function, the oldest ticket first, so the number of workers
    decides no outcome. Each sample has `timeout_seconds` from the moment its worker starts on it.
    """

    def __init__(self, spec: RewardSpec, output: int | None = None) -> None:
        """`output` is a descriptor for what workers print; None: this process's."""
        self._functions = spec.functions
        self._num_workers = spec.num_workers or default_workers()
        self._timeout_seconds = spec.timeout_seconds
        program = _program(spec, output)
        self._pool = ProcessPool(program, self._num_workers)
        self._batches = BatchQueue(spec.functions, self._num_workers)
        self._workers: dict[int, _Worker] = {}
        self._starts = Starts(program.owner)
        self._is_resolved = False  # by a worker, some time
        self.sources: dict[str, str] = {}  # `source_hash` by function, once a worker has started
        self._found: list[tuple[int, str, Outcome]] = []

    def fileno(self) -> int:
        """Return a descriptor that is readable when `advance` has something to do."""
        return self._pool.fileno()

    def find_sources(self) -> None:
        """Wait until a worker has imported the functions, so that `sources` has them. Raises the
        errors of `advance`."""
        while not self._is_resolved:
            if not self._workers:
                self._start_worker()
            self._pool.wait()
            outcomes = self.advance()
            self._found += outcomes

    def add(self, ticket: int, rollout: Rollout, names: Container[str]) -> None:
        """Store a rollout for `advance`, for the functions among `names`. Tickets must increase."""
        sample = (rollout.prompt.text, rollout.text, rollout.prompt.answer, rollout.prompt.row)
        self._batches.add(ticket, sample, names)

    def advance(self) -> list[tuple[int, str, Outcome]]:
        """Send samples to workers and return the outcomes that have arrived; does not block.

        Raises UsageError if the workers cannot resolve a reward function, and RuntimeError if
        workers repeatedly die or stall without scoring anything; call `reset` then.
        """
        for ticket, event in self._pool.events():
            if ticket in self._workers:  # else an earlier event has lost it
                self._take(self._workers[ticket], event)
        self._send()
        outcomes, self._found = self._found, []
        return outcomes

    def reset(self) -> None:
        """End the workers and forget all samples."""
        self._pool.kill(self._workers)
        self._workers.clear()
        self._found.clear()
        self._batches = BatchQueue(self._functions, self._num_workers)

    def close(self) -> None:
        """End all processes of this pool."""
        self._pool.close()

    # From the workers -----------------------------------------------------------------------------

    def _take(self, worker: _Worker, event: Event) -> None:
        if not worker.is_ready:
            self._take_start(worker, event)
            return
        batch = worker.batches.popleft()
        self._batches.back(batch)
        if isinstance(event, Answer):
            try:
                outcomes, seconds = as_outcomes(event.value, len(batch))
            except InvalidData as error:
                self._pool.kill([worker.ticket])
                event = Failed(NO_ANSWER, shortened(str(error)))
            else:
                self._settle(batch, outcomes, seconds)
                return
        self._lose(worker)
        if len(batch) > 1:
            self._batches.put_back(batch, alone=True)
        else:
            self._settle(batch, [self._failure(event)], math.inf)

    def _take_start(self, worker: _Worker, event: Event) -> None:
        """Record whether a worker could resolve the functions."""
        if isinstance(event, Answer):
            worker.is_ready = self._is_resolved = True
            sources = as_sources(event.value)
            # Of workers that have imported different files nobody knows which one graded what.
            is_same = self.sources in ({}, sources)
            self.sources = sources if is_same else dict.fromkeys(sources, "")
            self._starts.had_result()
            return
        self._lose(worker)
        if isinstance(event, UsageError) and not self._is_resolved:
            raise event
        self._starts.ended(str(event) if isinstance(event, UsageError) else event.failure)

    def _lose(self, worker: _Worker) -> None:
        """Forget a worker whose process has ended or ends; queue what it has not begun."""
        del self._workers[worker.ticket]
        for batch in reversed(worker.batches):
            self._batches.back(batch)
            self._batches.put_back(batch, alone=batch.alone)

    def _settle(self, batch: Batch, outcomes: Sequence[Outcome], seconds: float) -> None:
        self._batches.took(batch, seconds)
        for ticket, outcome in zip(batch.samples, outcomes, strict=True):
            self._found.append((ticket, batch.spec, outcome))

    def _failure(self, event: Failed | UsageError) -> Outcome:
        if isinstance(event, UsageError):
            return Outcome(0.0, "failed in its worker", str(event))
        if event.kind == "timed out":
            return Outcome(0.0, event.kind, f"no value within {self._timeout_seconds:g} s")
        return Outcome(0.0, event.kind, event.detail)

    # To the workers -------------------------------------------------------------------------------

    def _send(self) -> None:
        for ticket in self._pool.end_gone():
            del self._workers[ticket]
        while self._batches.num_waiting and len(self._workers) < self._num_workers:
            self._start_worker()
        while True:
            free = [worker for worker in self._workers.values() if worker.takes_more]
            if not free:
                return
            worker = min(free, key=lambda each: (len(each.batches) > 0, each.expected_seconds))
            batch = self._batches.next_batch(only_quick=bool(worker.batches))
            if batch is None:
                return
            self._batches.sent(batch)
            worker.batches.append(batch)
            self._ask(worker, batch)

    def _start_worker(self) -> None:
        worker = _Worker(self._pool.open())
        self._workers[worker.ticket] = worker
        self._pool.ask(worker.ticket, None, limit_seconds=START_SECONDS)

    def _ask(self, worker: _Worker, batch: Batch) -> None:
        seconds = self._timeout_seconds
        if len(batch) > 1:
            seconds = min(seconds, _TIMEOUT_IN_BATCH_SECONDS)
        samples = list(batch.samples.values())
        request = {"spec": batch.spec, "samples": samples, "seconds": seconds}
        self._pool.ask(worker.ticket, request, limit_seconds=len(batch) * seconds)


def _program(spec: RewardSpec, output: int | None = None) -> Program:
    """Return the program of the workers that call `spec.functions`."""
    # The working directory may differ when workers start.
    files = [os.path.abspath(path) for path in spec.imports]
    return Program(
        f"reward {','.join(spec.functions)}",
        "mcore_rl.rewards.worker",
        {"specs": spec.functions, "imports": files},
        memory_gib=spec.memory_gib,
        memory_flag="--rl-reward-memory-gib",
        max_answer_bytes=_MAX_ANSWER_BYTES,
        environment_names=spec.environment_names,
        runs_code=PYTHON_SANDBOX in spec.functions,
        sandbox_accept=spec.sandbox_accept,
        output=output,
    )


def default_workers() -> int:
    """Return the number of workers per rank of this machine: its share of the cores that ranks
    leave, and of half of the free memory."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    spare_cores = available_cores() - num_ranks
    workers_of_memory = machine_memory().available_bytes // (2 * _WORKER_BYTES)
    return max(1, min(_MOST_WORKERS, min(spare_cores, workers_of_memory) // num_ranks))


def check_rewards(spec: RewardSpec) -> None:
    """Raise UsageError if a file, a function or an environment variable is unusable.

    Runs the files of `--rl-import`, which may also define losses. A `package.module:function` is
    only imported in worker processes, one of which is started here.
    """
    for path in spec.imports:
        import_user_file(path)
    for name in spec.functions:
        if ":" not in name:
            resolve_reward(name)
    check_functions(spec, [name for name in spec.functions if ":" in name])


def check_functions(spec: RewardSpec, names: Sequence[str] | None = None) -> None:
    """Raise UsageError if an environment variable, the sandbox or a function cannot be used.

    The functions `names`, by default all, are looked up by a worker process; this process imports
    nothing.
    """
    check_environment_names(spec.environment_names, "--rl-reward-env")
    for server in spec.servers:
        header_from(server.header_env, server.header_flag)
    if PYTHON_SANDBOX in spec.functions:
        from mcore_rl.sandbox.runner import check_sandbox

        check_sandbox(f"--rl-reward {','.join(spec.names)}", spec.sandbox_accept)
    names = spec.functions if names is None else names
    if names:
        weights = (1.0,) * len(names)
        some = dataclasses.replace(spec, names=tuple(names), weights=weights)
        check_program(_program(some), f"--rl-reward {','.join(names)}")
