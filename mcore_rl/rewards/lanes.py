"""The queues of samples for workers, and their division into batches.

Sending a sample to a worker and back costs the trainer half a millisecond, more than most rewards
take. So waiting samples of a quick function are sent in batches, but no sample waits for others. If
a sample in a batch takes long or ends its process, all of the batch are scored again, each alone.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

Sample = tuple[str, str, Any, str]  # prompt, response, answer, row

# A batch of quick samples takes about this long.
_BATCH_SECONDS = 0.02
# The slowest of this many latest batches determines how many samples are quick together.
_REMEMBERED_BATCHES = 256
# Waiting quick samples are divided into this many batches, so that no worker ends long after the
# others.
_BATCHES_PER_WORKER = 4
# The work sent ahead to each worker, at least two batches, outlasts the pauses between the caller's
# looks. The rest waits here, where it can still be abandoned.
_AHEAD_SECONDS = 0.1
_MIN_AHEAD_BATCHES = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples by ticket that one worker scores by one function, one after the other."""

    spec: str
    alone: bool
    samples: dict[int, Sample]
    expected_seconds: float

    def __len__(self) -> int:
        return len(self.samples)


class Lanes:
    """Two queues per function: samples that may be batched, and samples that must be alone.

    `num_workers` is the number of batches in progress at once.
    """

    def __init__(self, specs: Sequence[str], num_workers: int) -> None:
        self._num_workers = num_workers
        self._specs = tuple(specs)
        self._lanes: dict[tuple[str, bool], OrderedDict[int, Sample]] = {
            (spec, alone): OrderedDict() for spec in specs for alone in (False, True)
        }
        # For each function's latest batches: the mean seconds per sample.
        self._seconds = {spec: deque[float](maxlen=_REMEMBERED_BATCHES) for spec in specs}
        self._typical_seconds = dict.fromkeys(specs, _AHEAD_SECONDS)
        self._num_out, self._out_seconds = 0, 0.0

    def add(self, ticket: int, sample: Sample) -> None:
        """Queue a new sample for all functions. Tickets must increase."""
        for spec in self._specs:
            self._lanes[spec, False][ticket] = sample

    def next_batch(self) -> Batch | None:
        """Return the next batch, or None if nothing waits or the workers have enough.

        The function with the oldest ticket comes first. A quick function's batch has the size that
        results if all waiting samples were sent now.
        """
        waiting = [key for key, lane in self._lanes.items() if lane]
        is_enough = self._num_out >= _MIN_AHEAD_BATCHES * self._num_workers
        if not waiting or (is_enough and self._out_seconds >= _AHEAD_SECONDS * self._num_workers):
            return None
        spec, alone = min(waiting, key=lambda key: next(iter(self._lanes[key])))
        lane = self._lanes[spec, alone]
        slowest = max(self._seconds[spec], default=math.inf)
        num_quick = 0 if alone else int(_BATCH_SECONDS / max(slowest, 1e-6))
        share = -(-len(lane) // max(1, _BATCHES_PER_WORKER * self._num_workers - self._num_out))
        size = max(1, min(num_quick, share))
        samples = dict(islice(lane.items(), size))
        return Batch(spec, alone, samples, len(samples) * self._typical_seconds[spec])

    def sent(self, batch: Batch) -> None:
        """Record that the batch of `next_batch` was sent."""
        for ticket in batch.samples:
            del self._lanes[batch.spec, batch.alone][ticket]
        self._num_out += 1
        self._out_seconds += batch.expected_seconds

    def back(self, batch: Batch) -> None:
        """Record that a batch is no longer with the workers."""
        self._num_out -= 1
        self._out_seconds = self._out_seconds - batch.expected_seconds if self._num_out else 0.0

    def took(self, batch: Batch, seconds: float) -> None:
        """Record the scoring time of a batch; inf for one that had to be ended."""
        latest = self._seconds[batch.spec]
        latest.append(seconds / len(batch))
        self._typical_seconds[batch.spec] = min(statistics.median(latest), _AHEAD_SECONDS)

    def put_back(self, batch: Batch, tickets: Iterable[int], *, alone: bool) -> None:
        """Queue these samples of a batch before all others; call it for the latest batch first."""
        lane = self._lanes[batch.spec, alone]
        for ticket in reversed(list(tickets)):
            lane[ticket] = batch.samples[ticket]
            lane.move_to_end(ticket, last=False)

    def drop(self, tickets: Sequence[int]) -> None:
        """Remove these tickets from the queues."""
        for lane in self._lanes.values():
            for ticket in tickets:
                lane.pop(ticket, None)
