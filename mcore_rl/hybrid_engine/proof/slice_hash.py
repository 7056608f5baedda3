"""A hash of a slice of a tensor that can be summed: over any cut of a box, the parts add up to it.

Every element is weighed by where it lies in the full tensor, and the hash is the sum, modulo 2^64:

    hash(box) = key * sum_i r_i * sum_k (c_k * L_ik + d_k * high(L_ik))

A tensor is rows of its last dimension (row i counts all the others, row-major); a row is cut into
lanes L_k of 8 bytes, from the row's start in the *full* tensor, read as integers low + 2^32 high.
Elements of a lane that lie outside the box count as zero bits. `r`, `c` and `d` are fixed
pseudo-random odd numbers, `key` is odd and depends on the tensor's name and the weight version, and
also says where in the sequences of `r`, `c` and `d` a tensor starts.

What it proves. The weight of a half is odd: c_k of the low one, 2^32 c_k + d_k of the high one. A
changed element changes its half by some x, 0 < |x| < 2^32, and so the hash by x times an odd
number, which is not 0 modulo 2^64: one changed element is never missed. Several changes cancel out
with a probability of 2^-32 or so at most, because 32 random bits of the weights remain above the
highest bit of a half; that goes for exchanged rows, columns or tensors and for shifted slices, too.
(Without d it would be twice as fast and blind to pairs of changed signs, since 2^63 times any odd
number is the same.) It does not protect against an adversary.

Cost on a CPU, per core, of bfloat16: 6.7 GB/s from the cache, 4.8 GB/s of a model while four
processes share two cores; a call costs 13 us, and three times that where other code ran before it.
On the host the integer products go through numpy, elsewhere through PyTorch; lanes are
reinterpreted memory. Not run on CUDA.

Pure: torch and numpy only. Integers are exact, so CPU and CUDA agree.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.model.boxes import Box, extent

LANE_BYTES = 8
_CHUNK_BYTES = 1 << 18  # with what is computed of it, it stays in a core's second-level cache
_DEVICE_CHUNK_BYTES = 16 << 20  # few launches, small beside a bucket
_ROTATIONS = 4096  # places where the weights of a tensor may start
_SMALL_BYTES = 1 << 16  # tensors so small are hashed whole, which costs less than choosing rows
_MODULUS = 1 << 64
_BITS_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HostBits = npt.NDArray[Any]
_Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """Which rows are hashed: one of every `period`, other ones in each version.

    Where the first lies depends on tensor and version alone, so that everyone chooses the same
    however the tensor is cut; in `period` consecutive versions every row has its turn. Rows are
    counted along the last dimension but one, and those that are chosen are a view. A tensor of one
    dimension (a norm, a bias) or of at most 64 KiB is always hashed whole.
    """

    tensor: str
    weight_version: int
    period: int

    def rows(self, first: int, last: int) -> range:
        """The sampled rows of the half-open range `first` to `last`."""
        chosen = (_name_number(self.tensor) + self.weight_version) % self.period
        return range(first + (chosen - first) % self.period, last, self.period)


def tensor_key(tensor: str, weight_version: int, seed: int = 0) -> int:
    """The key of one tensor in one version: odd, 64 bits."""
    text = f"{seed} {weight_version} {tensor}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1


def slice_hash(
    data: torch.Tensor, box: Box, shape: Sequence[int], key: int, sample: Sample | None = None
) -> int:
    """The hash of `data`, which is `box` of a tensor of `shape`: 0 <= hash < 2^64.

    Hashes of disjoint boxes add up, modulo 2^64, to that of the box they make up. Elements have 1,
    2, 4 or 8 bytes; any strides. With `sample` only its rows count.
    """
    assert tuple(data.shape) == extent(box), (tuple(data.shape), box)
    place = Place(box, shape, data.element_size())
    rows = place.rows(sample)
    return int(place.hash(data, key, rows, cuts=(place.index(rows),))) % _MODULUS


class _HostMemory:
    """A tensor's memory for numpy, read-only, as integers; the tensor must outlive what is made.

    `Tensor.numpy` would forbid PyTorch for good to free that memory, as offloading does.
    """

    def __init__(self, data: torch.Tensor) -> None:
        itemsize = data.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"<i{itemsize}",
            "shape": tuple(data.shape),
            "strides": tuple(step * itemsize for step in data.stride()),
            "data": (data.data_ptr(), True),
        }


def host_bits(data: torch.Tensor, cuts: Sequence[Any] = ()) -> HostBits:
    """The elements of `data` on the host as integers, after all `cuts`: a view, valid while `data`
    lives."""
    # An empty tensor may have no address.
    bits = np.asarray(_HostMemory(data)) if data.numel() else np.zeros(data.shape, dtype=np.uint8)
    for at in cuts:  # here, because numpy's views cost a tenth of PyTorch's
        bits = bits[at]
    return bits


class Place:
    """Where a slice lies in its tensor: all of its hash that its elements do not decide.

    Worked out once, it serves every version of the slice.
    """

    def __init__(self, box: Box, shape: Sequence[int], itemsize: int) -> None:
        *self._leading, (first, last) = box if box else ((0, 1),)
        self._shape, self._itemsize, self._columns = tuple(shape), itemsize, last - first
        self._per_lane = LANE_BYTES // itemsize
        self._lanes = range(first // self._per_lane, -(-last // self._per_lane))
        self._before, self._after = first % self._per_lane, -last % self._per_lane
        self._is_small = not self._leading or math.prod(shape) * itemsize <= _SMALL_BYTES

    def rows(self, sample: Sample | None) -> range:
        """What is hashed along the last dimension but one, in the tensor's coordinates."""
        if not self._leading:
            return range(1)
        if sample is None or self._is_small:
            return range(*self._leading[-1])
        return sample.rows(*self._leading[-1])

    def index(self, rows: range) -> Any:
        """What cuts `rows` out of the slice."""
        if not self._leading:
            return ...
        first = self._leading[-1][0]
        along = slice(rows.start - first, rows.stop - first, rows.step)
        return along if len(self._leading) == 1 else (..., along, slice(None))

    def hash(
        self, data: torch.Tensor, key: int, rows: range, *, cuts: Sequence[Any] = ()
    ) -> int | torch.Tensor:
        """The hash of `rows` of the slice, modulo 2^64; `data` are those, after all `cuts` to it.

        Elsewhere than on the host it is a scalar int64 tensor there, which is not waited for.
        """
        if data.device.type == "cpu":
            return self.hash_bits(host_bits(data, cuts), key, rows)
        for at in cuts:
            data = data[at]
        return self.hash_on_device(data, key, rows) if data.numel() else 0

    def hash_bits(self, bits: HostBits, key: int, rows: range) -> int:
        """As `hash`, of `host_bits` or a copy of them."""
        if not bits.size:
            return 0
        lanes = self._lanes_of(bits.reshape(-1, self._columns))
        c, d, r = self._weights(key, rows)
        step = max(1, _CHUNK_BYTES // (len(self._lanes) * LANE_BYTES))
        if len(lanes) <= step:
            by_row = _row_sums(lanes, c, d)
        else:
            parts = (lanes[at : at + step] for at in range(0, len(lanes), step))
            by_row = np.concatenate([_row_sums(part, c, d) for part in parts])
        return int(np.dot(by_row, r)) * key % _MODULUS

    def _lanes_of(self, rows: _Array) -> _Array:
        """`[rows, elements]` as `[rows, lanes]` int64, with zeros where a lane reaches outside.

        A view where elements fill whole lanes and lie side by side in memory, else a copy.
        """
        if self._before or self._after:
            padded = np.zeros(
                (len(rows), self._before + self._columns + self._after), dtype=rows.dtype
            )
            padded[:, self._before : self._before + self._columns] = rows
            rows = padded
        elif rows.strides[1] != rows.itemsize:
            rows = np.ascontiguousarray(rows)
        return rows.view(np.int64)

    def hash_on_device(self, data: torch.Tensor, key: int, rows: range) -> torch.Tensor:
        """As `hash`, of what is not empty. CUDA has no product of an integer matrix, and bandwidth
        to spare."""
        bits = data.detach().reshape(-1, self._columns).view(_BITS_OF[self._itemsize])
        if self._before or self._after:
            bits = torch.nn.functional.pad(bits, (self._before, self._after))
        in_lanes = (bits.stride(0), bits.storage_offset())  # whole lanes, for the view
        aligned = not any(n % self._per_lane for n in in_lanes) and bits.stride(1) == 1
        if not aligned or bits.data_ptr() % LANE_BYTES:
            bits = bits.clone(memory_format=torch.contiguous_format)
        c, d, r = self._weights(key, rows, data.device)
        step = max(1, _DEVICE_CHUNK_BYTES // (len(self._lanes) * LANE_BYTES))
        total = torch.zeros((), dtype=torch.int64, device=data.device)
        for lanes, by_row in zip(bits.view(torch.int64).split(step), r.split(step), strict=True):
            total += ((lanes * c + (lanes >> 32) * d).sum(dim=1) * by_row).sum()
        return total * _signed(key)

    def _weights(
        self, key: int, rows: range, device: torch.device | None = None
    ) -> tuple[Any, Any, Any]:
        """c and d of the slice's lanes, and r of its `rows`, all int64."""
        c = _weights("lane", self._lanes, key >> 12, device)
        d = _weights("high", self._lanes, key >> 24, device)
        if len(self._leading) < 2:
            return c, d, _weights("row", rows, key >> 36, device)
        flat = np.zeros(1, dtype=np.int64)
        numbers = [*(range(*ends) for ends in self._leading[:-1]), rows]
        for along, size in zip(numbers, self._shape, strict=False):
            flat = (flat[:, None] * size + np.array(along)).reshape(-1)
        r = _weights("row", range(int(flat[-1]) + 1), key >> 36, device)
        return c, d, r[flat if device is None else torch.from_numpy(flat).to(device)]


def _row_sums(lanes: _Array, weights: _Array, high_weights: _Array) -> _Array:
    """sum_k (c_k L_k + d_k high(L_k)) of every row of int64 `[rows, lanes]`, modulo 2^64."""
    # Of numpy's ways to this product, einsum is the fastest: 7 GB/s where dot has 4.7.
    low = np.einsum("ij,j->i", lanes, weights)
    hashes: np.ndarray = low + np.einsum("ij,j->i", lanes >> 32, high_weights)
    return hashes


def _weights(kind: str, numbers: range, start: int, device: torch.device | None) -> Any:
    """The odd numbers of a sequence that belong to these rows or lanes of a tensor.

    An array, or a tensor where a device is given.
    """
    start %= _ROTATIONS
    size = 1 << (start + numbers.stop + _ROTATIONS).bit_length()
    table = _table(kind, size) if device is None else _table_on(kind, size, device)
    return table[start + numbers.start : start + numbers.stop : numbers.step]


@functools.lru_cache(maxsize=32)
def _table(kind: str, size: int) -> _Array:
    """The first `size` odd numbers of a sequence; a longer table begins with the shorter one."""
    return (_mixed(_name_number(kind), size) | np.uint64(1)).view(np.int64)


@functools.lru_cache(maxsize=32)
def _table_on(kind: str, size: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_table(kind, size)).to(device)


@functools.lru_cache(maxsize=1 << 16)
def _name_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")


def _mixed(first: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` pseudo-random numbers, entry i a function of first + i alone (SplitMix64)."""
    x = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _signed(number: int) -> int:
    """The int64 that is equal modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
