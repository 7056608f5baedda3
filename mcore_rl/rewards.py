"""Scores rollouts in a pool of worker processes.

A reward function is code of the user's that meets text nobody has seen before. It may raise, hang,
or take its process with it: that costs the one sample it was scoring, never the run.
"""

from __future__ import annotations

import logging
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, wait
from types import TracebackType

from pebble import ProcessExpired, ProcessPool

from mcore_rl.reward_functions import Outcome, WorkerContext, score_sample, start_worker
from mcore_rl.types import Rollout, ScoredRollout

logger = logging.getLogger(__name__)

# The worker's own timer (see `score_sample`) fires first and is exact. The pool's is for what
# escapes that: a reward that takes SIGALRM for itself, or that ends its process with exit code 0.
_POOL_TIMEOUT_MARGIN_SECONDS = 2.0
_WORKER_START_SECONDS = 60.0
_MAX_FRUITLESS_STARTS = 3


class RewardPool:
    """Processes that score samples, each sample within a time of its own.

    Not collective: every rank that scores has its own pool. Workers start at the first `score`,
    import only `reward_functions` and the user's module, inherit the environment and the standard
    streams, and are killed when this process ends, however it ends. Linux kills them also when the
    thread that called the first `score` ends; the next call then starts new ones.

    `spec` is what `resolve_reward` takes; call that one before building anything, for its errors.
    `failure_counts` has the number of failed samples by kind since the pool was made.
    """

    def __init__(self, spec: str, *, num_workers: int, timeout_seconds: float) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}, it must be at least 1")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be above 0")
        self.failure_counts: Counter[str] = Counter()
        self._spec = spec
        self._num_workers = num_workers
        self._timeout_seconds = timeout_seconds
        self._pool = self._new_pool()
        self._closed = False

    def score(self, rollouts: Sequence[Rollout]) -> list[ScoredRollout]:
        """Scores all rollouts, in their order; blocks until the last has a reward or has failed.

        A sample has `timeout_seconds` from the moment its worker starts on it. One that fails has
        reward 0 and the reason in `failure`; the first failure of each kind is logged.

        Raises UsageError if the workers cannot resolve the reward function, and RuntimeError if
        the workers die or stall again and again without scoring anything.
        """
        if self._closed:
            raise RuntimeError("this RewardPool is closed")
        outcomes: dict[int, Outcome] = {}
        num_fruitless_starts = 0
        while len(outcomes) < len(rollouts):
            num_before = len(outcomes)
            broken = self._score_missing(rollouts, outcomes)
            if broken is None:
                continue
            self._restart()
            num_fruitless_starts = 0 if len(outcomes) > num_before else num_fruitless_starts + 1
            if num_fruitless_starts == _MAX_FRUITLESS_STARTS:
                raise RuntimeError(
                    f"the workers of reward {self._spec} were started {num_fruitless_starts} "
                    f"times and scored none of {len(rollouts) - len(outcomes)} samples: {broken}"
                )
        self._report_failures(outcomes)
        return [
            ScoredRollout(rollout, outcomes[index].reward, outcomes[index].failure)
            for index, rollout in enumerate(rollouts)
        ]

    def close(self) -> None:
        """Ends the workers. A second call does nothing."""
        self._closed = True
        self._stop_workers()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=start_worker,
            initargs=(self._spec,),
            context=WorkerContext(),
        )

    def _stop_workers(self) -> None:
        self._pool.stop()
        self._pool.join()

    def _restart(self) -> None:
        self._stop_workers()
        self._pool = self._new_pool()

    def _score_missing(
        self, rollouts: Sequence[Rollout], outcomes: dict[int, Outcome]
    ) -> str | None:
        """Adds the outcomes that are not there yet; returns why the pool broke, or None.

        A pool breaks when a worker dies that had no sample (the kernel is short of memory, say):
        pebble then gives up all samples, and some of their futures never end.
        """
        futures: dict[int, Future[Outcome]] = {}
        broken: str | None = None
        try:
            try:
                for index, rollout in enumerate(rollouts):
                    if index not in outcomes:
                        futures[index] = self._schedule(rollout)
            except RuntimeError as refusal:
                broken = str(refusal)
            for index, future in futures.items():
                if broken is None:
                    wait([future], timeout=self._stall_seconds)
                if not future.done():
                    broken = broken or f"no answer within {self._stall_seconds:g} s"
                elif isinstance(error := future.exception(), RuntimeError):
                    broken = broken or str(error)
                else:
                    outcomes[index] = self._outcome(future)
        finally:
            for future in futures.values():
                future.cancel()
        return broken

    def _schedule(self, rollout: Rollout) -> Future[Outcome]:
        prompt = rollout.prompt
        return self._pool.schedule(
            score_sample,
            args=(self._spec, prompt.text, rollout.text, prompt.answer, self._timeout_seconds),
            timeout=self._timeout_seconds + _POOL_TIMEOUT_MARGIN_SECONDS,
        )

    @property
    def _stall_seconds(self) -> float:
        """Longest time to the end of the oldest sample in a pool that works: a worker may have to
        start, and to finish the sample before it."""
        return _WORKER_START_SECONDS + 2 * (self._timeout_seconds + _POOL_TIMEOUT_MARGIN_SECONDS)

    def _outcome(self, future: Future[Outcome]) -> Outcome:
        limit = f"no value within {self._timeout_seconds:g} s"
        try:
            return future.result()
        except TimeoutError:
            return Outcome(0.0, "timed out", f"{limit}, or its process exited with code 0")
        except ProcessExpired as error:
            if error.exitcode == -signal.SIGALRM:
                return Outcome(0.0, "timed out", limit)
            return Outcome(0.0, "ended its process", f"exit code {error.exitcode}")

    def _report_failures(self, outcomes: dict[int, Outcome]) -> None:
        for _, outcome in sorted(outcomes.items()):
            if outcome.kind is None:
                continue
            if outcome.kind not in self.failure_counts:
                logger.warning(
                    "reward %s failed on a sample, which costs that sample its reward; the reason, "
                    "logged once of its kind: %s",
                    self._spec,
                    outcome.failure,
                )
            self.failure_counts[outcome.kind] += 1
