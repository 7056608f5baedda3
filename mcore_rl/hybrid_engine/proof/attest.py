"""Attestation: proof that vLLM's loaders wrote what Megatron held, element by element.

Before the bytes move, every rank hashes slices of its own parameters, as they will be served. While
vLLM loads, every rank hashes what its loaders wrote, in place, right after they wrote it. One
all-reduce compares both. The check does not trust the plan or the transport: it is the same for a
plan, a stale plan and the plain gather.

The unit of comparison is the cell (see `cells`). Needs and holdings consist of cells, so a
difference is narrowed down to the ranks that hold the cell. One holder hashes each cell; this also
detects replicas that have diverged.

Not proved: that the weight map names the right tensors (the checkpoint round trip tests that), that
a loader chose the right place, and vLLM's later processing of its parameters (on CPU its kernels
keep packed copies behind closures). Canaries cover these.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.plan.buckets import cut
from mcore_rl.hybrid_engine.plan.cells import Cell, make_cells
from mcore_rl.hybrid_engine.proof.slice_hash import HostBits, Place, Sample, host_bits, tensor_key
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld, World
from mcore_rl.model.boxes import Box, Boxes, contains, intersect, relative, show, slices, volume
from mcore_rl.model.tensors import TensorInfo

FULL, SAMPLE, OFF = "full", "sample", "off"
SAMPLE_PERIOD = 32  # versions in which mode SAMPLE hashes every row once
_READ_BYTES = 16 << 20  # per read: slices served in another dtype are converted
_SAMPLES_AT_ONCE = 64
_SHOWN = 20  # mismatches that a rank reports to the others


class ReadSlice(Protocol):
    """Reader of what a rank holds: the values of `box` of a tensor, or the index `at` into them.
    Only what `at` selects is copied or converted."""

    def __call__(self, tensor: str, box: Box, at: Any = ..., /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A slice that changed or was not loaded.

    Example: `Mismatch("model.norm.weight", ((0, 64),), (1, 3), 2, "differs")`.
    """

    tensor: str
    box: Box
    source_ranks: tuple[int, ...]  # its holders, first the one whose copy was hashed
    destination_rank: int
    problem: str  # "differs", or the number of elements that were not loaded
    hashes: tuple[int, int] | None = None  # of what differs: as it is held, and as it was loaded

    def __str__(self) -> str:
        holders = ", ".join(map(str, self.source_ranks))
        held = f"rank{'s' * (len(self.source_ranks) > 1)} {holders}"
        slice_ = f"{self.tensor}{show(self.box)}"
        text = f"{slice_} of {held} {self.problem} on rank {self.destination_rank}"
        if self.hashes is None:
            return text
        as_held, as_loaded = self.hashes
        return f"{text} (its hash is {as_held:016x} as held and {as_loaded:016x} as loaded)"


_Report = tuple[int, list[Mismatch], list[str]]  # a rank's mismatches, some of them, and faults


@dataclass(frozen=True, slots=True)
class Attestation:
    """The result of attesting one hand-over, the same on all ranks except `hashed_bytes`."""

    mode: str  # FULL or SAMPLE
    weight_version: int
    mismatches: tuple[Mismatch, ...]  # at most 20 of every rank
    num_mismatches: int
    faults: tuple[str, ...]  # "rank R: the error it raised"
    num_cells: int  # of all served tensors
    hashed_bytes: int  # on this rank, both sides, without rows that sampling skips

    @property
    def ok(self) -> bool:
        return not self.faults and self.num_mismatches == 0

    @property
    def findings(self) -> str:
        """The first faults and mismatches."""
        shown = [*self.faults[:2], *map(str, self.mismatches[:3])]
        more = self.num_mismatches + len(self.faults) - len(shown)
        return "; ".join(shown) + (f" (and {more} more)" if more else "")

    def __str__(self) -> str:
        if self.ok:
            return f"version {self.weight_version} arrived as it was held ({self.mode})"
        return f"version {self.weight_version} did not arrive: {self.findings}"


class Attestor:
    """Attestor of one layout's hand-overs on this rank.

        attestor.begin(version, read)                    hash what this rank attests
        engine.reload(weights, attestor.note)            hash what the loaders took
        attestor.finish(fault)                           compare: collective over the world

    The world is by default the job's; the ranks in an `Attestation` are ranks of it. `have` and
    `need` are the boxes of all ranks, as they are exchanged for planning. The collective's tensor
    is on `device`. `mode` FULL hashes every element, SAMPLE one row of 32 (see
    `slice_hash.Sample`); both check that every needed element was read.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        have: Sequence[Boxes],
        need: Sequence[Boxes],
        *,
        mode: str,
        seed: int = 0,
        device: torch.device | str = "cpu",
        world: World | None = None,
    ) -> None:
        assert mode in (FULL, SAMPLE), mode
        self.mode = mode
        self._tensors, self._seed = tensors, seed
        self._device = torch.device(device)
        self._world = world or DefaultWorld(self._device)
        self._rank = rank = self._world.rank
        cells = make_cells(tensors, have, need)
        self._num_cells = sum(map(len, cells.values()))
        self._owned = [
            self._part(cell, box)
            for group in cells.values()
            for cell in group
            if cell.owner == rank
            for box in cut(cell.box, _READ_BYTES // tensors[cell.tensor].itemsize)
        ]
        self._needed = {
            tensor: [c for c in cells[tensor] if any(contains(box, c.box) for box in boxes)]
            for tensor, boxes in need[rank].items()
            if boxes
        }
        self._version = 0
        self._salts: dict[str, tuple[int, Sample | None]] = {}  # of this version
        self._parts_of: dict[tuple[str, Box], list[_Part]] = {}
        self._source = _CellHashes()
        self._arrived = _CellHashes()
        self._samples: list[tuple[_Part, int, range, HostBits]] = []  # copied, not yet hashed
        self._expected: torch.Tensor | None = None  # `[cells]` int64, summed over all ranks
        self._exchange: Any = None  # the all-reduce of `_expected`, while it runs
        self._fault: str | None = None

    def begin(self, weight_version: int, read: ReadSlice) -> None:
        """Hash the cells that this rank attests, as `read` serves them, and begin to exchange them.

        Collective over the world; it waits only in a joined one. `finish` reports a slice that
        cannot be read as a fault.
        """
        self._version = weight_version
        self._salts.clear()
        self._source, self._fault = _CellHashes(), None
        self.repeat()
        try:
            for part in self._owned:
                key, sample = self._salt(part.tensor)
                rows = part.place.rows(sample)
                data = read(part.tensor, part.box, part.place.index(rows))
                self._source.add(part, part.place.hash(data, key, rows), len(rows))
        except Exception as error:  # of any type: `finish` reports it to all ranks
            self._fault = str(error) or repr(error)
        self._expected = self._source.sums(self._num_cells, self._device)
        # int64 wraps around, as the hashes do
        self._exchange = dist.all_reduce(self._expected, group=self._world.everyone, async_op=True)
        if self._world.is_joined:  # a rank that fails can close no group in which a collective runs
            self.wait()

    def wait(self) -> None:
        """Wait for the exchange that `begin` has begun. Collective over the world."""
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            self._world.wait(exchange, self._world.everyone)

    def repeat(self) -> None:
        """Restart with the same version, and discard the hashes of what was loaded so far."""
        self._arrived = _CellHashes()
        self._samples.clear()

    def note(self, tensor: str, box: Box, data: torch.Tensor) -> None:
        """Hash what a loader took of a tensor: the `on_write` of `VLLMEngine.reload`.

        `data` is what the loader stored, in place; if the loader computed with the tensor, it is
        the loader's input.
        """
        parts = self._parts_of.get((tensor, box))
        if parts is None:
            parts = self._parts_of[tensor, box] = self._parts(tensor, box)
        key, sample = self._salt(tensor)
        for part in parts:
            rows = part.place.rows(sample)
            cuts = (*part.at, part.place.index(rows))
            if self.mode == SAMPLE and data.device.type == "cpu":
                self._samples.append((part, key, rows, host_bits(data, cuts).copy()))
            else:
                self._arrived.add(part, part.place.hash(data, key, rows, cuts=cuts), len(rows))
        if len(self._samples) >= _SAMPLES_AT_ONCE:
            self._hash_samples()

    def _hash_samples(self) -> None:
        """Hash the samples that `note` copied.

        Many in one call: between the loaders' copies, which fill all caches, each would take three
        times as long.
        """
        for part, key, rows, bits in self._samples:
            self._arrived.add(part, part.place.hash_bits(bits, key, rows), len(rows))
        self._samples.clear()

    def finish(self, fault: str | None = None) -> Attestation:
        """Compare on all ranks. Collective over the world.

        `fault` is the error of this rank's hand-over, if it raised one.
        """
        assert self._expected is not None, "begin comes first"
        self.wait()
        expected = self._expected.cpu().numpy()
        self._hash_samples()
        mine = self._mismatches(expected)
        faults = [text for text in (self._fault, fault) if text is not None]
        count = torch.tensor([len(mine) + len(faults)], device=self._device)
        group = self._world.everyone
        self._world.wait(dist.all_reduce(count, group=group, async_op=True), group)
        reports: list[Any] = []
        if count.item():
            reports = self._world.gather((len(mine), mine[:_SHOWN], faults), of=_Report)
        return Attestation(
            mode=self.mode,
            weight_version=self._version,
            mismatches=tuple(m for _, mismatches, _ in reports for m in mismatches),
            num_mismatches=sum(number for number, _, _ in reports),
            faults=tuple(f"rank {r}: {text}" for r, (*_, t) in enumerate(reports) for text in t),
            num_cells=self._num_cells,
            hashed_bytes=self._source.num_bytes + self._arrived.num_bytes,
        )

    def _mismatches(self, expected: np.ndarray) -> list[Mismatch]:
        """Return the cells that this rank needs and that did not arrive unchanged."""
        arrived = self._arrived.sums(self._num_cells, self._device).cpu().numpy()
        mismatches = []
        for cell in itertools.chain.from_iterable(self._needed.values()):
            read, size = self._arrived.elements[cell.number], volume(cell.box)
            hashes = None
            if read != size:
                problem = f"was not loaded ({read} of {size} elements were)"
            elif arrived[cell.number] != expected[cell.number]:
                problem = "differs"
                held, loaded = (int(each[cell.number]) % (1 << 64) for each in (expected, arrived))
                hashes = held, loaded
            else:
                continue
            sources = (cell.owner, *(rank for rank in cell.holders if rank != cell.owner))
            mismatches.append(Mismatch(cell.tensor, cell.box, sources, self._rank, problem, hashes))
        return mismatches

    def _salt(self, tensor: str) -> tuple[int, Sample | None]:
        """Return the key and sample of a tensor's hashes in this version."""
        if tensor not in self._salts:
            sample = None
            if self.mode == SAMPLE:
                sample = Sample(tensor, self._version, SAMPLE_PERIOD)
            self._salts[tensor] = tensor_key(tensor, self._version, self._seed), sample
        return self._salts[tensor]

    def _parts(self, tensor: str, box: Box) -> list[_Part]:
        """Return the parts of needed cells that lie in `box`."""
        shared = ((cell, intersect(cell.box, box)) for cell in self._needed.get(tensor, ()))
        return [self._part(cell, part, box) for cell, part in shared if part is not None]

    def _part(self, cell: Cell, box: Box, within: Box | None = None) -> _Part:
        info = self._tensors[cell.tensor]
        at: tuple[tuple[slice, ...], ...] = ()
        if within is not None and within != box:
            at = (slices(relative(box, within)),)
        place = Place(box, info.shape, info.itemsize)
        num_rows = max(1, box[-2][1] - box[-2][0]) if len(box) > 1 else 1
        row_bytes = volume(box) // num_rows * info.itemsize
        return _Part(cell.tensor, cell.number, box, at, place, volume(box), row_bytes)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a cell that is hashed in one call."""

    tensor: str
    number: int  # of the cell
    box: Box
    at: tuple[tuple[slice, ...], ...]  # the index of the part in the given data; empty: all of it
    place: Place
    num_elements: int
    row_bytes: int  # bytes per index along the last dimension but one


class _CellHashes:
    """Hashes and element counts, by cell."""

    def __init__(self) -> None:
        self._sums: dict[int, int] = defaultdict(int)
        self._elsewhere: list[tuple[int, torch.Tensor]] = []  # on the device, until `sums`
        self.elements: dict[int, int] = defaultdict(int)
        self.num_bytes = 0

    def add(self, part: _Part, hashed: int | torch.Tensor, num_rows: int) -> None:
        if isinstance(hashed, int):
            self._sums[part.number] += hashed
        else:
            self._elsewhere.append((part.number, hashed))
        self.elements[part.number] += part.num_elements
        self.num_bytes += num_rows * part.row_bytes

    def sums(self, num_cells: int, device: torch.device) -> torch.Tensor:
        """Return `[cells]` int64 on `device`, the sum of each cell's hashes modulo 2^64."""
        on_host = np.zeros(num_cells, dtype=np.uint64)
        for number, total in self._sums.items():
            on_host[number] = total % (1 << 64)
        sums = torch.from_numpy(on_host.view(np.int64)).to(device)
        if self._elsewhere:
            numbers, hashes = zip(*self._elsewhere, strict=True)
            sums.index_add_(0, torch.tensor(numbers, device=device), torch.stack(hashes).to(device))
        return sums
