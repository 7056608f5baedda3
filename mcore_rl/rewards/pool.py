"""Scores rollouts in a pool of worker processes.

A reward function is code of the user's that meets text nobody has seen before. It may raise, hang,
or take its process with it: that costs the one sample it was scoring, never the run.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import groupby

from pebble import ProcessExpired, ProcessPool

from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.parts import FailureLog, weighed
from mcore_rl.rewards.process import WorkerContext
from mcore_rl.rewards.worker import (
    EXIT_OUT_OF_MEMORY,
    Outcome,
    resolve_rewards,
    score_samples,
    start_worker,
)

_Task = tuple[int, str]  # which rollout is scored by which function
_Scored = tuple[list[Outcome], float]  # of a batch of tasks, and its seconds

# The worker's own timer (see `score_sample`) fires first and is exact. The pool's is for what
# escapes that: a reward that takes SIGALRM for itself, or that ends its process with exit code 0.
_POOL_TIMEOUT_MARGIN_SECONDS = 2.0
_WORKER_START_SECONDS = 60.0
_MAX_FRUITLESS_STARTS = 3

# Sending a sample to a worker and back costs half a millisecond of the trainer's, more than most
# rewards take. Quick ones travel together, for about so long; in company a sample gets less time
# before it is scored by itself, with all of its own.
_BATCH_SECONDS = 0.02
_TIMEOUT_IN_COMPANY_SECONDS = 1.0
_BATCHES_PER_WORKER = 4


class ClosedAtTheEnd(contextlib.AbstractContextManager):
    """`with` closes it, whatever happens."""

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class RewardPool(ClosedAtTheEnd):
    """Processes that score samples, each sample and function within a time of its own.

    Not collective: every rank that scores has its own pool. Workers start at the first `score`,
    import only `worker`, what that needs and the user's modules, inherit the standard streams and
    of the environment what `process` names and `environment_names`, and are killed when this
    process ends, however it ends. Linux kills them also when the thread that called the first
    `score` ends; the next call then starts new ones. Each may have `memory_gib` GiB; 0 is no limit.

    `specs` are what `resolve_reward` takes, `imports` what `import_file` does; call these before
    building anything, for their errors. All functions share the workers: each of them scores any
    sample by any function. Of a quick function several samples go to a worker at once; if one of
    these takes its process with it, all of them are scored again, each by itself. `failure_counts`
    has the number of failures by kind since the pool was made.
    """

    def __init__(
        self,
        *specs: str,
        num_workers: int,
        timeout_seconds: float,
        imports: Sequence[str] = (),
        memory_gib: float = 0.0,
        environment_names: Sequence[str] = (),
    ) -> None:
        if not specs or len(set(specs)) < len(specs):
            raise ValueError(f"specs are {specs}, they must be one or several, none of them twice")
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, it must be at least 1")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be above 0")
        if not (memory_gib >= 0 and math.isfinite(memory_gib)):
            raise ValueError(f"memory_gib is {memory_gib}, it must be finite and at least 0")
        self._specs = specs
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        # The working directory may be another one when workers start.
        self._imports = tuple(os.path.abspath(path) for path in imports)
        self._memory_gib = memory_gib
        self._environment_names = tuple(environment_names)
        self._logs = {spec: FailureLog(spec) for spec in specs}
        # Of each function's slowest sample, or batch in the mean, in the latest call that had any.
        self._slowest: dict[str, float] = {}
        self._pool = self._new_pool()
        self._closed = False

    @property
    def failure_counts(self) -> Counter[str]:
        return sum((log.counts for log in self._logs.values()), Counter())

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """Scores all rollouts, in their order, with the sum of all functions; see `outcomes`.

        A sample that fails has the reason in `failure`, and a reward of 0 that means nothing.
        """
        return weighed(rollouts, self.outcomes(rollouts), dict.fromkeys(self._specs, 1.0))

    def outcomes(self, rollouts: Sequence[Rollout]) -> dict[str, list[Outcome]]:
        """Scores all rollouts by all functions; blocks until the last has a value or has failed.

        Returns for each function the outcomes in the order of the rollouts. Each of them had
        `timeout_seconds` from the moment its worker started on it; the first failure of each kind
        is logged.

        Raises UsageError if the workers cannot resolve a reward function, and RuntimeError if the
        workers die or stall again and again without scoring anything.
        """
        if self._closed:
            raise RuntimeError("this RewardPool is closed")
        outcomes: dict[_Task, Outcome] = {}
        num_tasks = len(rollouts) * len(self._specs)
        num_fruitless_starts = 0
        alone: set[_Task] = set()
        slowest: dict[str, float] = {}
        while len(outcomes) < num_tasks:
            num_before = len(outcomes)
            broken = self._score_missing(rollouts, outcomes, alone, slowest)
            if broken is None:
                continue
            self._restart()
            num_fruitless_starts = 0 if len(outcomes) > num_before else num_fruitless_starts + 1
            if num_fruitless_starts == _MAX_FRUITLESS_STARTS:
                missing = {task[0] for task in self._missing(rollouts, outcomes)}
                raise RuntimeError(
                    f"the workers of reward {','.join(self._specs)} were started "
                    f"{num_fruitless_starts} times and scored none of {len(missing)} samples: "
                    f"{broken}"
                )
        self._slowest.update(slowest)
        by_spec = {
            spec: [outcomes[index, spec] for index in range(len(rollouts))] for spec in self._specs
        }
        for spec, log in self._logs.items():
            log.note(by_spec[spec])
        return by_spec

    def check(self) -> None:
        """Raises UsageError if a worker cannot find a function; this process imports nothing."""
        asked = self._pool.schedule(
            resolve_rewards, args=(self._specs, self._imports), timeout=_WORKER_START_SECONDS
        )
        try:
            # A task's own time begins when a worker takes it, after the imports.
            asked.result(timeout=_WORKER_START_SECONDS)
        except (RuntimeError, ProcessExpired, TimeoutError) as error:
            reason = str(error) if isinstance(error, RuntimeError) else type(error).__name__
            raise UsageError(
                "cannot be used, because the process that imported it ended or gave no answer "
                f"within {_WORKER_START_SECONDS:g} s ({reason})",
                flag=f"--rl-reward {','.join(self._specs)}",
                remedy="make its import work by itself",
            ) from error

    def close(self) -> None:
        """Ends the workers. A second call does nothing."""
        self._closed = True
        self._stop_workers()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=start_worker,
            initargs=(self._specs, self._imports, int(self._memory_gib * 2**30)),
            context=WorkerContext(self._environment_names),
        )

    def _stop_workers(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _restart(self) -> None:
        self._stop_workers()
        self._pool = self._new_pool()

    def _missing(self, rollouts: Sequence[Rollout], outcomes: dict[_Task, Outcome]) -> list[_Task]:
        tasks = [(index, spec) for spec in self._specs for index in range(len(rollouts))]
        return [task for task in tasks if task not in outcomes]

    def _score_missing(
        self,
        rollouts: Sequence[Rollout],
        outcomes: dict[_Task, Outcome],
        alone: set[_Task],
        slowest: dict[str, float],
    ) -> str | None:
        """Adds outcomes that are not there yet, to `alone` what must be scored by itself, and to
        `slowest` the seconds of a sample; returns why the pool broke, or None.

        A pool breaks when a worker dies that had no sample (the kernel is short of memory, say):
        pebble then gives up all samples, and some of their futures never end.
        """
        futures: list[tuple[list[_Task], Future[_Scored]]] = []
        broken: str | None = None
        try:
            try:
                for batch in self._batches(self._missing(rollouts, outcomes), alone):
                    futures.append((batch, self._schedule(rollouts, batch)))
            except RuntimeError as refusal:
                broken = str(refusal)
            for batch, future in futures:
                stall_seconds = _WORKER_START_SECONDS + 2 * self._limit_seconds(batch)
                if broken is None:  # a worker may have to start, and to finish a batch before
                    wait([future], timeout=stall_seconds)
                if not future.done():
                    broken = broken or f"no answer within {stall_seconds:g} s"
                elif isinstance(error := future.exception(), RuntimeError):
                    broken = broken or str(error)
                elif len(batch) > 1 and isinstance(error, (TimeoutError, ProcessExpired)):
                    alone.update(batch)
                else:
                    found, seconds = self._outcomes(future)
                    outcomes.update(zip(batch, found, strict=True))
                    spec = batch[0][1]
                    slowest[spec] = max(slowest.get(spec, 0.0), seconds / len(batch))
        finally:
            for _, future in futures:
                future.cancel()
        return broken

    def _batches(self, tasks: Sequence[_Task], alone: set[_Task]) -> list[list[_Task]]:
        """Tasks in parts that one worker does one after the other, each of a single function."""
        batches = [[task] for task in tasks if task in alone]
        in_company = (task for task in tasks if task not in alone)
        for spec, of_spec in groupby(in_company, key=lambda task: task[1]):
            together = list(of_spec)
            size = 1
            if spec in self._slowest:
                quick = int(_BATCH_SECONDS / max(self._slowest[spec], 1e-6))
                share = -(-len(together) // (_BATCHES_PER_WORKER * self._num_workers))
                size = max(1, min(quick, share))
            batches += [together[at : at + size] for at in range(0, len(together), size)]
        return batches

    def _sample_seconds(self, batch: Sequence[_Task]) -> float:
        """What each sample of a batch gets."""
        if len(batch) == 1:
            return self._timeout_seconds
        return min(self._timeout_seconds, _TIMEOUT_IN_COMPANY_SECONDS)

    def _limit_seconds(self, batch: Sequence[_Task]) -> float:
        return len(batch) * self._sample_seconds(batch) + _POOL_TIMEOUT_MARGIN_SECONDS

    def _schedule(self, rollouts: Sequence[Rollout], batch: Sequence[_Task]) -> Future[_Scored]:
        samples = [
            (rollout.prompt.text, rollout.text, rollout.prompt.answer, rollout.prompt.row)
            for rollout in (rollouts[index] for index, _ in batch)
        ]
        return self._pool.schedule(
            score_samples,
            args=(samples, batch[0][1]),
            kwargs={"timeout_seconds": self._sample_seconds(batch), "imports": self._imports},
            timeout=self._limit_seconds(batch),
        )

    def _outcomes(self, future: Future[_Scored]) -> _Scored:
        limit = f"no value within {self._timeout_seconds:g} s"
        try:
            return future.result()
        except TimeoutError:
            outcome = Outcome(0.0, "timed out", f"{limit}, or its process exited with code 0")
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGALRM:
                outcome = Outcome(0.0, "timed out", limit)
            elif error.exitcode == EXIT_OUT_OF_MEMORY:
                outcome = Outcome(0.0, "ran out of memory", self._memory_limit())
            else:
                outcome = Outcome(0.0, "ended its process", f"exit code {error.exitcode}")
        return [outcome], math.inf

    def _memory_limit(self) -> str:
        if self._memory_gib == 0:
            return "the machine has no more"
        return f"its process may have {self._memory_gib:g} GiB (--rl-reward-memory-gib)"
