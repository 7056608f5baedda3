"""A pool of worker processes that scores rollouts by reward functions.

A reward function is user code that processes unforeseen text. If it raises, hangs or kills its
process, it costs the sample that it was scoring, never the run.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from pebble import ProcessExpired, ProcessPool

from mcore_rl.batching.types import Rollout, ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.answers import WorkerFault
from mcore_rl.rewards.lanes import Batch, Lanes
from mcore_rl.rewards.parts import weighed
from mcore_rl.rewards.process import WorkerContext
from mcore_rl.rewards.scorer import Scorer
from mcore_rl.rewards.worker import (
    EXIT_OUT_OF_MEMORY,
    Outcome,
    resolve_rewards,
    score_samples,
    start_worker,
)

_Scored = tuple[list[Outcome], float]  # outcomes of a batch, and its seconds

# The worker's own timer (see `score_sample`) fires first and is exact. The pool's timer covers what
# escapes it: a reward that handles SIGALRM itself, or that ends its process with exit code 0.
_POOL_TIMEOUT_MARGIN_SECONDS = 2.0
_WORKER_START_SECONDS = 60.0
_MAX_FRUITLESS_STARTS = 3

# In a batch a sample gets less time; one that needs more is scored again alone, with its full time.
_TIMEOUT_IN_COMPANY_SECONDS = 1.0


class RewardPool(Scorer):
    """Worker processes that score samples, with a time limit per sample and function.

    A faulty function costs only its sample, even if it writes into the pipe of its process
    (`answers`).

    Not collective: every rank that scores has its own pool. Workers start when the first sample is
    sent. They import only `worker`, its imports and the user's modules, inherit the standard
    streams and the environment variables of `process` and `environment_names`, and are killed when
    this process ends, however it ends. Linux also kills them when the thread ends that sent the
    first sample (by `finished`, `wait`, `outcomes`); later samples then start new workers. Each may
    have `memory_gib` GiB; 0 means unlimited. `sandbox_accept` lists protections that
    `python_sandbox` may lack (`isolation.levels.PROTECTIONS`).

    `specs` are arguments of `resolve_reward`, `imports` of `import_user_file`; call these before
    building anything, for their errors. All functions share the workers: each worker scores any
    sample by any function, the oldest ticket first. Several waiting samples of a quick function go
    to a worker at once; if one of them kills its process, all of them are scored again, each alone.
    Each sample has `timeout_seconds` from the moment its worker starts on it. `failure_counts`
    counts failures by kind since the pool was created.

    `finished`, `wait` and `outcomes` raise UsageError if the workers cannot resolve a reward
    function, and RuntimeError if workers repeatedly die or stall without scoring anything.
    """

    def __init__(
        self,
        *specs: str,
        num_workers: int,
        timeout_seconds: float,
        imports: Sequence[str] = (),
        memory_gib: float = 0.0,
        environment_names: Sequence[str] = (),
        sandbox_accept: Sequence[str] = (),
        wake: threading.Event | None = None,
    ) -> None:
        if not specs or len(set(specs)) < len(specs):
            raise ValueError(f"specs are {specs}, they must be one or several, none of them twice")
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, it must be at least 1")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be above 0")
        if not (memory_gib >= 0 and math.isfinite(memory_gib)):
            raise ValueError(f"memory_gib is {memory_gib}, it must be finite and at least 0")
        super().__init__(specs, wake)
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        # The working directory may differ when workers start.
        self._imports = tuple(os.path.abspath(path) for path in imports)
        self._memory_gib = memory_gib
        self._environment_names = tuple(environment_names)
        self._sandbox_accept = tuple(sandbox_accept)
        self._lanes = Lanes(specs, num_workers)
        self._sent: OrderedDict[Future[_Scored], Batch] = OrderedDict()
        self._landed: SimpleQueue[Future[_Scored]] = SimpleQueue()
        self._oldest_sent: tuple[Future[_Scored] | None, float] = (None, 0.0)  # and since when
        self._pool = self._new_pool()
        self._broken: str | None = None
        self._resolved: set[str] = set()  # functions that have scored a sample
        self._ending: tuple[ThreadPoolExecutor, Future[None]] | None = None
        self._fruitful, self._num_fruitless_starts = False, 0

    @property
    def failure_counts(self) -> Counter[str]:
        return sum((log.counts for log in self._logs.values()), Counter())

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """Score all rollouts, in their order, by the sum of all functions; see `outcomes`.

        A sample that fails has the reason in `failure`; its reward of 0 is meaningless.
        """
        return weighed(rollouts, self.outcomes(rollouts), dict.fromkeys(self.names, 1.0))

    def check(self) -> None:
        """Raise UsageError if a worker cannot find a function; this process imports nothing."""
        asked = self._pool.schedule(
            resolve_rewards, args=(self.names, self._imports), timeout=_WORKER_START_SECONDS
        )
        try:
            # A task's own time begins when a worker takes it, after the imports.
            asked.result(timeout=_WORKER_START_SECONDS)
        except (RuntimeError, WorkerFault, ProcessExpired, TimeoutError) as error:
            is_told = isinstance(error, (RuntimeError, WorkerFault))
            reason = self._why_broken(error) if is_told else type(error).__name__
            raise UsageError(
                "cannot be used, because the process that imported it ended or gave no answer "
                f"within {_WORKER_START_SECONDS:g} s ({reason})",
                flag=f"--rl-reward {','.join(self.names)}",
                remedy="make its import work by itself",
            ) from error

    # Queue and dispatch ---------------------------------------------------------------------------

    def _accept(self, ticket: int, rollout: Rollout) -> None:
        sample = (rollout.prompt.text, rollout.text, rollout.prompt.answer, rollout.prompt.row)
        self._lanes.add(ticket, sample)

    def _drop(self, tickets: Sequence[int]) -> None:
        # Tasks that pebble holds continue: pebble stops a worker that meets a cancelled task, and
        # at times loses the task that the worker has taken since.
        self._lanes.drop(tickets)

    def _advance(self) -> None:
        self._take_landed()
        if self._broken is None and self._context.answers is not None:
            # Tasks sent to a pool that is about to break would never return.
            self._broken = self._context.answers.fault
        if self._broken is None:
            self._notice_a_stall()
        if self._broken is None:
            self._send()
        if self._broken is not None and self._replace_pool():
            self._send()

    def _send(self) -> None:
        try:
            while (batch := self._lanes.next_batch()) is not None:
                future = self._schedule(batch)
                self._lanes.sent(batch)
                self._sent[future] = batch
                future.add_done_callback(self._land)
        except RuntimeError as refusal:
            self._broken = str(refusal)

    def _sample_seconds(self, batch: Batch) -> float:
        """Return the time limit of each sample of a batch."""
        if len(batch) == 1:
            return self._timeout_seconds
        return min(self._timeout_seconds, _TIMEOUT_IN_COMPANY_SECONDS)

    def _limit_seconds(self, batch: Batch) -> float:
        return len(batch) * self._sample_seconds(batch) + _POOL_TIMEOUT_MARGIN_SECONDS

    def _schedule(self, batch: Batch) -> Future[_Scored]:
        return self._pool.schedule(
            score_samples,
            args=(list(batch.samples.values()), batch.spec),
            kwargs={"timeout_seconds": self._sample_seconds(batch), "imports": self._imports},
            timeout=self._limit_seconds(batch),
        )

    # Results --------------------------------------------------------------------------------------

    def _land(self, future: Future[_Scored]) -> None:
        """Queue a finished future; called by a thread of pebble."""
        self._landed.put(future)
        self._wake.set()

    def _take_landed(self) -> None:
        while not self._landed.empty():
            future = self._landed.get()
            batch = self._sent[future]
            error = future.exception()
            if isinstance(error, RuntimeError):
                # A worker without a sample died (the kernel is short of memory, say): pebble then
                # gives up all samples, and some of their futures never end.
                self._broken = self._broken or self._why_broken(error)
                continue
            del self._sent[future]
            self._lanes.back(batch)
            wanted = [ticket for ticket in batch.samples if ticket in self._open]
            if not wanted:
                continue
            if isinstance(error, UsageError) and batch.spec not in self._resolved:
                raise error
            if len(batch) > 1 and error is not None:
                self._lanes.put_back(batch, wanted, alone=True)
                # A fault breaks the pool, but brings it closer to the faulty sample.
                self._fruitful = self._fruitful or isinstance(error, WorkerFault)
                continue
            if error is None:
                self._resolved.add(batch.spec)
            found, seconds = self._outcomes(future)
            for ticket, outcome in zip(batch.samples, found, strict=True):
                self._found(ticket, batch.spec, outcome)
            self._lanes.took(batch, seconds)
            self._fruitful = True

    def _outcomes(self, future: Future[_Scored]) -> _Scored:
        limit = f"no value within {self._timeout_seconds:g} s"
        try:
            return future.result()
        except WorkerFault as fault:
            outcome = Outcome(0.0, fault.kind, fault.detail)
        except UsageError as error:  # for a function that was resolved before
            outcome = Outcome(0.0, "failed in its worker", str(error))
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

    def _why_broken(self, error: BaseException) -> str:
        answers = self._context.answers
        return (answers.fault if answers is not None else None) or str(error)

    def _memory_limit(self) -> str:
        if self._memory_gib == 0:
            return "the machine has no more"
        return f"its process may have {self._memory_gib:g} GiB (--rl-reward-memory-gib)"

    # The pool and its replacement -----------------------------------------------------------------

    def _new_pool(self) -> ProcessPool:
        self._context = WorkerContext(self._environment_names)
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=start_worker,
            initargs=(
                self.names,
                self._imports,
                int(self._memory_gib * 2**30),
                self._sandbox_accept,
            ),
            context=self._context,
        )

    def _notice_a_stall(self) -> None:
        """Break the pool if its oldest sample stalls. Workers take samples in the order sent, so a
        worker has the oldest, or will have it once one has started or has finished a batch."""
        if self._context.answers is not None:
            self._context.answers.check_clocks()
        oldest, since = next(iter(self._sent), None), time.monotonic()
        if oldest is not self._oldest_sent[0]:
            self._oldest_sent = (oldest, since)
        if oldest is None:
            return
        stall_seconds = _WORKER_START_SECONDS + 2 * self._limit_seconds(self._sent[oldest])
        if since - self._oldest_sent[1] > stall_seconds:
            self._broken = f"no answer within {stall_seconds:g} s"

    def _replace_pool(self) -> bool:
        """End the broken pool in another thread, as that takes time; then queue its unfinished
        samples for a new pool. Return whether there is a new pool."""
        if self._ending is None:
            self._pool.stop()
            thread = ThreadPoolExecutor(1, "end of a reward pool")
            self._ending = (thread, thread.submit(self._pool.join))
            self._ending[1].add_done_callback(lambda _: self._wake.set())
            thread.shutdown(wait=False)  # it ends with this task
        thread, ended = self._ending
        if not ended.done():
            return False
        self._take_landed()
        self._ending = None
        thread.shutdown()
        ended.result()
        broken, self._broken = self._broken, None
        for batch in reversed(self._sent.values()):
            self._lanes.back(batch)
            wanted = [ticket for ticket in batch.samples if ticket in self._open]
            self._lanes.put_back(batch, wanted, alone=batch.alone)
        self._sent.clear()
        self._pool = self._new_pool()
        self._num_fruitless_starts = 0 if self._fruitful else self._num_fruitless_starts + 1
        self._fruitful = False
        if self._num_fruitless_starts == _MAX_FRUITLESS_STARTS:
            self._num_fruitless_starts = 0
            raise RuntimeError(
                f"the workers of reward {','.join(self.names)} were started "
                f"{_MAX_FRUITLESS_STARTS} times and scored none of {len(self._open)} samples: "
                f"{broken}"
            )
        return True

    def _end(self) -> None:
        if self._ending is not None:
            self._ending[0].shutdown()
        self._pool.stop()
        self._pool.join()
