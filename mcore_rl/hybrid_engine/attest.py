"""Proof that what vLLM's loaders wrote is what Megatron held, element by element.

Before the bytes move, every rank hashes slices of its own parameters, as they will be served; while
vLLM loads, every rank hashes what its loaders have written, in its place, right after they did. One
all-reduce brings both together. How the bytes travelled plays no part: neither plan nor transport
is trusted, so the same check serves a plan, a stale plan and the plain gather.

The unit of comparison is the cell (see `cells`): what a rank needs is made of cells, and so is what
another holds, so a difference is narrowed down to those who hold the cell. Each cell is hashed by
one of its holders; replicas that have drifted apart are found by that, too.

What is not proved: that the weight map names the right tensors (the checkpoint round trip is tested
for that), that a loader chose the right place, and what vLLM makes of its parameters afterwards
(on CPU its kernels keep packed copies behind closures). These are what canaries are for.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.boxes import Box, contains, intersect, relative, show, volume
from mcore_rl.hybrid_engine.buckets import cut
from mcore_rl.hybrid_engine.cells import Cell, make_cells
from mcore_rl.hybrid_engine.plan import Boxes, TensorInfo
from mcore_rl.hybrid_engine.slice_hash import Sample, slice_hash_tensor, tensor_key

FULL, SAMPLE, OFF = "full", "sample", "off"
SAMPLE_PERIOD = 32  # in mode sample every row is hashed once in so many versions
_READ_BYTES = 16 << 20  # at a time: what is served in another dtype is converted for it
_SHOWN = 20  # mismatches that a rank tells the others of

ReadSlice = Callable[[str, Box], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A slice that did not arrive as it was held."""

    tensor: str
    box: Box
    source_ranks: tuple[int, ...]  # all that hold it, first the one whose copy was hashed
    destination_rank: int
    problem: str  # "differs" or what is missing

    def __str__(self) -> str:
        holders = ", ".join(map(str, self.source_ranks))
        held = f"rank{'s' * (len(self.source_ranks) > 1)} {holders}"
        slice_ = f"{self.tensor}{show(self.box)}"
        return f"{slice_} of {held} {self.problem} on rank {self.destination_rank}"


@dataclass(frozen=True, slots=True)
class Attestation:
    """The verdict on one hand-over, the same on all ranks but for the last two fields."""

    mode: str  # FULL or SAMPLE
    weight_version: int
    mismatches: tuple[Mismatch, ...]  # at most 20 of every rank
    num_mismatches: int
    faults: tuple[str, ...]  # "rank R: what it raised"
    num_cells: int  # of all tensors that are served
    hashed_bytes: int  # on this rank, both sides; what sampling leaves out is not counted
    seconds: float  # on this rank, without waiting for others; on CUDA: of launching

    @property
    def ok(self) -> bool:
        return not self.faults and self.num_mismatches == 0

    def __str__(self) -> str:
        if self.ok:
            return f"version {self.weight_version} arrived as it was held ({self.mode})"
        found = [*self.faults[:2], *map(str, self.mismatches[:3])]
        more = self.num_mismatches + len(self.faults) - len(found)
        rest = f" (and {more} more)" if more else ""
        return f"version {self.weight_version} did not arrive: {'; '.join(found)}{rest}"


class Attestor:
    """Attests the hand-overs of one layout on this rank.

        attestor.begin(version, read)                    hash what this rank attests
        engine.reload(weights, attestor.note)            hash what the loaders took
        attestor.finish(fault)                           compare: collective over the world

    `have` and `need` are the boxes of all ranks, as they are exchanged for planning. `device` is
    where the collective's tensor is made. `mode` FULL hashes every element, SAMPLE one row of 32
    (see `slice_hash.Sample`); that every needed element was read is checked in both.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        have: Sequence[Boxes],
        need: Sequence[Boxes],
        *,
        rank: int,
        mode: str,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        assert mode in (FULL, SAMPLE), mode
        self.mode = mode
        self._tensors, self._rank, self._seed = tensors, rank, seed
        self._device = torch.device(device)
        cells = make_cells(tensors, have, need)
        self._num_cells = sum(map(len, cells.values()))
        self._owned = [c for group in cells.values() for c in group if c.owner == rank]
        self._needed = {
            tensor: [c for c in cells[tensor] if any(contains(box, c.box) for box in boxes)]
            for tensor, boxes in need[rank].items()
            if boxes
        }
        self._version = 0
        self._source = _Tally()
        self._arrived = _Tally()
        self._fault: str | None = None

    def begin(self, weight_version: int, read: ReadSlice) -> None:
        """Hash the cells that this rank attests, as `read(tensor, box)` serves them.

        Not collective. A slice that cannot be read is a fault that `finish` tells of.
        """
        self._version = weight_version
        self._source, self._arrived, self._fault = _Tally(), _Tally(), None
        try:
            with self._source.timed():
                for cell in self._owned:
                    itemsize = self._tensors[cell.tensor].itemsize
                    for box in cut(cell.box, _READ_BYTES // itemsize):
                        self._hash(self._source, cell, box, read(cell.tensor, box))
        except RuntimeError as error:
            self._fault = str(error)

    def repeat(self) -> None:
        """Begin again with the same version: what was loaded until now is forgotten."""
        self._arrived = _Tally()

    def note(self, tensor: str, box: Box, data: torch.Tensor) -> None:
        """Hash what a loader took of a tensor: `on_write` of `VLLMEngine.reload`.

        `data` is what stands where the loader put it, or, where it computed with the tensor, what
        it was given.
        """
        with self._arrived.timed():
            for cell in self._needed.get(tensor, ()):
                part = intersect(cell.box, box)
                if part is not None:
                    at = tuple(slice(start, stop) for start, stop in relative(part, box))
                    self._hash(self._arrived, cell, part, data[at])

    def finish(self, fault: str | None = None) -> Attestation:
        """Compare on all ranks. Collective over the world.

        `fault` is what this rank's hand-over raised, if it did.
        """
        source = torch.from_numpy(self._source.sums(self._num_cells)).to(self._device)
        dist.all_reduce(source)  # int64 wraps around, as the hashes do
        with self._arrived.timed():
            mine = self._mismatches(source.cpu().numpy())
        faults = [text for text in (self._fault, fault) if text is not None]
        count = torch.tensor([len(mine) + len(faults)], device=self._device)
        dist.all_reduce(count)
        told: list[Any] = []
        if count.item():
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, (len(mine), mine[:_SHOWN], faults))
        return Attestation(
            mode=self.mode,
            weight_version=self._version,
            mismatches=tuple(m for _, mismatches, _ in told for m in mismatches),
            num_mismatches=sum(number for number, _, _ in told),
            faults=tuple(f"rank {r}: {text}" for r, t in enumerate(told) for text in t[2]),
            num_cells=self._num_cells,
            hashed_bytes=self._source.num_bytes + self._arrived.num_bytes,
            seconds=self._source.seconds + self._arrived.seconds,
        )

    def _mismatches(self, expected: np.ndarray) -> list[Mismatch]:
        """What this rank needs and did not get as it was held."""
        found = self._arrived.sums(self._num_cells)
        mismatches = []
        for cell in itertools.chain.from_iterable(self._needed.values()):
            read, size = self._arrived.elements[cell.number], volume(cell.box)
            if read != size:
                problem = f"was not loaded ({read} of {size} elements were)"
            elif found[cell.number] != expected[cell.number]:
                problem = "differs"
            else:
                continue
            sources = (cell.owner, *(rank for rank in cell.holders if rank != cell.owner))
            mismatches.append(Mismatch(cell.tensor, cell.box, sources, self._rank, problem))
        return mismatches

    def _hash(self, tally: _Tally, cell: Cell, box: Box, data: torch.Tensor) -> None:
        """Add `data`, the part `box` of a cell, to a tally."""
        shape = self._tensors[cell.tensor].shape
        key = tensor_key(cell.tensor, self._version, self._seed)
        sample = None
        if self.mode == SAMPLE:
            sample = Sample(cell.tensor, self._version, SAMPLE_PERIOD)
        tally.add(cell.number, slice_hash_tensor(data, box, shape, key, sample), volume(box))
        sampled = sample is not None and sample.applies(shape, data.element_size())
        tally.num_bytes += data.nbytes // (SAMPLE_PERIOD if sampled else 1)


class _Tally:
    """Hashes and numbers of elements, by cell."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._hashes: list[torch.Tensor] = []  # scalars on their device: nobody waits for it here
        self.elements: dict[int, int] = defaultdict(int)
        self.num_bytes = 0
        self.seconds = 0.0

    def add(self, number: int, hashed: torch.Tensor, num_elements: int) -> None:
        self._numbers.append(number)
        self._hashes.append(hashed)
        self.elements[number] += num_elements

    def sums(self, num_cells: int) -> np.ndarray:
        """`[cells]` int64, the sum of each cell's hashes modulo 2^64."""
        sums = np.zeros(num_cells, dtype=np.int64)
        if self._hashes:
            np.add.at(sums, self._numbers, torch.stack(self._hashes).cpu().numpy())
        return sums

    def timed(self) -> _Timed:
        return _Timed(self)


class _Timed:
    """Adds the time of a `with` block to a tally."""

    def __init__(self, tally: _Tally) -> None:
        self._tally = tally

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._tally.seconds += time.perf_counter() - self._started
