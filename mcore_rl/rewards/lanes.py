"""Samples that wait for workers, and in which parts they go to them.

Sending a sample to a worker and back costs half a millisecond of the trainer's, more than most
rewards take. So the samples of a quick function go several at a time, if several wait: none waits
for company. Should a sample that travels with others take long or end its process, all of them are
scored again, each alone.
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

# Quick ones that wait travel together, for about so long.
_BATCH_SECONDS = 0.02
# Of those that came back last, the slowest says how many are quick together.
_REMEMBERED_BATCHES = 256
# What waits is made into so many batches, if they are quick: nobody ends long after the others.
_BATCHES_PER_WORKER = 4
# So much lies with each worker, to outlast the pauses between the caller's looks, and at least two
# batches. The rest waits here, where it can still be abandoned.
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
    """Two lanes for each function: of samples that may travel together, and of those that may not.

    `num_workers` is how many batches are worked on at one time.
    """

    def __init__(self, specs: Sequence[str], num_workers: int) -> None:
        self._num_workers = num_workers
        self._specs = tuple(specs)
        self._lanes: dict[tuple[str, bool], OrderedDict[int, Sample]] = {
            (spec, alone): OrderedDict() for spec in specs for alone in (False, True)
        }
        # Of each function's latest batches: the seconds of a sample, in the mean.
        self._seconds = {spec: deque[float](maxlen=_REMEMBERED_BATCHES) for spec in specs}
        self._typical_seconds = dict.fromkeys(specs, _AHEAD_SECONDS)
        self._num_out, self._out_seconds = 0, 0.0

    def add(self, ticket: int, sample: Sample) -> None:
        """A new sample, for all functions. Tickets grow."""
        for spec in self._specs:
            self._lanes[spec, False][ticket] = sample

    def next_batch(self) -> Batch | None:
        """What to send next, or None if nothing waits or enough lies with the workers.

        The function with the oldest ticket comes first; of a quick one so many samples as there
        would be in each batch if all that wait were sent now.
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
        """`next_batch` lies with the workers."""
        for ticket in batch.samples:
            del self._lanes[batch.spec, batch.alone][ticket]
        self._num_out += 1
        self._out_seconds += batch.expected_seconds

    def back(self, batch: Batch) -> None:
        """It lies there no longer."""
        self._num_out -= 1
        self._out_seconds = self._out_seconds - batch.expected_seconds if self._num_out else 0.0

    def took(self, batch: Batch, seconds: float) -> None:
        """A batch was scored in so long; inf for one that had to be ended."""
        latest = self._seconds[batch.spec]
        latest.append(seconds / len(batch))
        self._typical_seconds[batch.spec] = min(statistics.median(latest), _AHEAD_SECONDS)

    def put_back(self, batch: Batch, tickets: Iterable[int], *, alone: bool) -> None:
        """Have these of a batch wait again, before others; call it for the latest batch first."""
        lane = self._lanes[batch.spec, alone]
        for ticket in reversed(list(tickets)):
            lane[ticket] = batch.samples[ticket]
            lane.move_to_end(ticket, last=False)

    def drop(self, tickets: Sequence[int]) -> None:
        """Forget these, as far as they wait."""
        for lane in self._lanes.values():
            for ticket in tickets:
                lane.pop(ticket, None)
