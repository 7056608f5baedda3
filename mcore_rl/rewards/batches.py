"""The queues of samples for workers, and their division into batches; pure.

Sending a sample to a worker takes longer than most rewards, so waiting samples of a quick function
are sent in batches; no sample waits for a fuller batch. If a sample takes long or ends its process,
all samples of its batch are scored again, each alone.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice

from mcore_rl.rewards.worker import Sample

# A batch of quick samples takes about this long.
_BATCH_SECONDS = 0.02
# The slowest of this many latest batches determines the size of a batch.
_REMEMBERED_BATCHES = 256
# Waiting quick samples are divided into this many batches, so that workers end together.
_BATCHES_PER_WORKER = 4
# The work sent to each worker, at least two batches, outlasts the time between two polls of the
# caller. The rest waits here, for whichever worker is free first.
_AHEAD_SECONDS = 0.1
_MIN_AHEAD_BATCHES = 2
# A sample is sent behind another only if none of the latest took longer than this.
_QUICK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples by ticket that one worker scores by one function, one after the other, e.g.

    Batch("exact_match", False, True, {7: ("2+3=", " 5", "5", "{}")}, 0.0001)
    """

    spec: str
    alone: bool  # a sample that must not be with others
    is_quick: bool  # other batches may wait behind it
    samples: dict[int, Sample]
    expected_seconds: float

    def __len__(self) -> int:
        return len(self.samples)


class BatchQueue:
    """Two queues per function: samples that may be batched, and samples that must be alone.

    `num_workers` is the number of batches in progress at once.
    """

    def __init__(self, specs: Sequence[str], num_workers: int) -> None:
        self._num_workers = num_workers
        self._specs = tuple(specs)
        self._queues: dict[tuple[str, bool], OrderedDict[int, Sample]] = {
            (spec, alone): OrderedDict() for spec in specs for alone in (False, True)
        }
        # For each function's latest batches: the mean seconds per sample.
        self._seconds = {spec: deque[float](maxlen=_REMEMBERED_BATCHES) for spec in specs}
        self._typical_seconds = dict.fromkeys(specs, _AHEAD_SECONDS)
        self.num_out = 0  # batches with the workers
        self._out_seconds = 0.0

    def add(self, ticket: int, sample: Sample, names: Container[str] | None = None) -> None:
        """Queue a new sample for the functions among `names`, None: for all. Tickets must
        increase."""
        for spec in self._specs:
            if names is None or spec in names:
                self._queues[spec, False][ticket] = sample

    @property
    def num_waiting(self) -> int:
        """The number of samples that are in no batch, counted once for each function."""
        return sum(map(len, self._queues.values()))

    def next_batch(self, *, only_quick: bool = False) -> Batch | None:
        """Return the next batch, or None if nothing waits or the workers have enough.

        The function with the oldest ticket comes first. The size of a quick function's batch
        divides all waiting samples evenly. `only_quick`: no worker is idle, so a batch that may
        take long stays here, with all later ones.
        """
        waiting = [key for key, queue in self._queues.items() if queue]
        is_enough = self.num_out >= _MIN_AHEAD_BATCHES * self._num_workers
        if not waiting or (is_enough and self._out_seconds >= _AHEAD_SECONDS * self._num_workers):
            return None
        spec, alone = min(waiting, key=lambda key: next(iter(self._queues[key])))
        if only_quick and not self._is_quick(spec, alone):
            return None
        queue = self._queues[spec, alone]
        num_quick = 0 if alone else int(_BATCH_SECONDS / max(self._slowest(spec), 1e-6))
        share = -(-len(queue) // max(1, _BATCHES_PER_WORKER * self._num_workers - self.num_out))
        size = max(1, min(num_quick, share))
        samples = dict(islice(queue.items(), size))
        expected_seconds = len(samples) * self._typical_seconds[spec]
        return Batch(spec, alone, self._is_quick(spec, alone), samples, expected_seconds)

    def _is_quick(self, spec: str, alone: bool) -> bool:
        return not alone and self._slowest(spec) <= _QUICK_SECONDS

    def _slowest(self, spec: str) -> float:
        return max(self._seconds[spec], default=math.inf)

    def sent(self, batch: Batch) -> None:
        """Record that the batch of `next_batch` was sent."""
        for ticket in batch.samples:
            del self._queues[batch.spec, batch.alone][ticket]
        self.num_out += 1
        self._out_seconds += batch.expected_seconds

    def back(self, batch: Batch) -> None:
        """Record that a batch is no longer with the workers."""
        self.num_out -= 1
        self._out_seconds = self._out_seconds - batch.expected_seconds if self.num_out else 0.0

    def took(self, batch: Batch, seconds: float) -> None:
        """Record the scoring time of a batch; inf for one that had to be ended."""
        latest = self._seconds[batch.spec]
        latest.append(seconds / len(batch))
        self._typical_seconds[batch.spec] = min(statistics.median(latest), _AHEAD_SECONDS)

    def put_back(self, batch: Batch, *, alone: bool) -> None:
        """Queue the samples of a batch before all others; call it for the latest batch first."""
        queue = self._queues[batch.spec, alone]
        for ticket, sample in reversed(batch.samples.items()):
            queue[ticket] = sample
            queue.move_to_end(ticket, last=False)
