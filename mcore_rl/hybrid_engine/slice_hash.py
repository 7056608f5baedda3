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
number is the same.) It is no protection against an adversary.

Cost on a CPU, per core, of bfloat16 in rows of 2 KB and more: 4.8 GB/s from the cache, 3.6 GB/s
of a model, beside 13 GB/s for a copy and 12 for the blind variant; a call costs 40 us. The
integer products go through torch.mv, lanes are reinterpreted memory. Not run on CUDA.

Pure: torch and numpy only. Integers are exact, so CPU and CUDA agree.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mcore_rl.hybrid_engine.boxes import Box, extent

LANE_BYTES = 8
_CHUNK_BYTES = {"cpu": 1 << 20}  # stays in a core's second-level cache
_DEVICE_CHUNK_BYTES = 16 << 20  # elsewhere: few launches, small beside a bucket
_ROTATIONS = 4096  # places where the weights of a tensor may start
_SMALL_BYTES = 1 << 16  # tensors so small are hashed whole, which costs less than choosing rows


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

    def applies(self, shape: Sequence[int], itemsize: int) -> bool:
        """Whether a tensor of this shape is large enough to be sampled."""
        return len(shape) > 1 and math.prod(shape) * itemsize > _SMALL_BYTES

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
    return int(slice_hash_tensor(data, box, shape, key, sample)) % (1 << 64)


def slice_hash_tensor(
    data: torch.Tensor, box: Box, shape: Sequence[int], key: int, sample: Sample | None = None
) -> torch.Tensor:
    """`slice_hash` as a scalar int64 tensor on the data's device, which is not waited for."""
    assert tuple(data.shape) == extent(box), (tuple(data.shape), box)
    if data.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=data.device)
    data = data.detach()
    *leading, (first, last) = box if box else ((0, 1),)
    numbers = [range(*ends) for ends in leading]
    if sample is not None and sample.applies(shape, data.element_size()):
        numbers[-1] = sample.rows(*leading[-1])
        data = data[..., numbers[-1].start - leading[-1][0] :: sample.period, :]
        if data.numel() == 0:
            return torch.zeros((), dtype=torch.int64, device=data.device)
    rows = data.reshape(-1, last - first)
    per_lane = LANE_BYTES // data.element_size()
    lanes = range(first // per_lane, -(-last // per_lane))
    column_weights = (
        _weights("lane", lanes, key >> 12, data.device),
        _weights("high", lanes, key >> 24, data.device),
    )
    row_weights = _row_weights(numbers, shape, key >> 36, data.device)
    chunk_bytes = _CHUNK_BYTES.get(data.device.type, _DEVICE_CHUNK_BYTES)
    step = max(1, chunk_bytes // (len(lanes) * LANE_BYTES))
    sums = [
        _row_sums(_as_lanes(part, first % per_lane, -last % per_lane), *column_weights)
        for part in (rows.split(step) if len(rows) > step else (rows,))
    ]
    by_row = sums[0] if len(sums) == 1 else torch.cat(sums)
    return (by_row * row_weights).sum() * _signed(key)


def _row_sums(
    lanes: torch.Tensor, weights: torch.Tensor, high_weights: torch.Tensor
) -> torch.Tensor:
    """sum_k (c_k L_k + d_k high(L_k)) of every row, modulo 2^64.

    `lanes` is `[rows, lanes]` int64.
    """
    high = lanes >> 32
    if lanes.device.type == "cpu":
        return torch.mv(lanes, weights) + torch.mv(high, high_weights)
    # CUDA has no integer matrix product, and bandwidth to spare.
    return (lanes * weights + high * high_weights).sum(dim=1)


def _as_lanes(rows: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """`[rows, elements]` as `[rows, lanes]` int64, with zeros where a lane reaches outside.

    A view where elements fill whole lanes and lie on their boundaries in memory, else a copy.
    """
    per_lane = LANE_BYTES // rows.element_size()
    if before or after:
        padded = rows.new_zeros(rows.shape[0], before + rows.shape[1] + after)
        padded[:, before : before + rows.shape[1]] = rows
        rows = padded
    aligned = (
        rows.stride(1) == 1
        and rows.stride(0) % per_lane == 0
        and rows.storage_offset() % per_lane == 0
        and rows.data_ptr() % LANE_BYTES == 0
    )
    if not aligned:
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.view(torch.int64)


def _row_weights(
    numbers: Sequence[range], shape: Sequence[int], start: int, device: torch.device
) -> torch.Tensor:
    """The weights of the rows with these numbers along each of the leading dimensions."""
    if len(numbers) < 2:
        return _weights("row", numbers[0] if numbers else range(1), start, device)
    flat = np.zeros(1, dtype=np.int64)
    for along, size in zip(numbers, shape, strict=False):
        flat = (flat[:, None] * size + np.array(along)).reshape(-1)
    window = _weights("row", range(int(flat[-1]) + 1), start, device)
    return window[torch.from_numpy(flat).to(device)]


def _weights(kind: str, numbers: range, start: int, device: torch.device) -> torch.Tensor:
    """The odd numbers of a sequence that belong to these rows or lanes of a tensor."""
    start %= _ROTATIONS
    size = 1 << (start + numbers.stop + _ROTATIONS).bit_length()
    table = _table(kind, size, device)
    return table[start + numbers.start : start + numbers.stop : numbers.step]


@functools.lru_cache(maxsize=32)
def _table(kind: str, size: int, device: torch.device) -> torch.Tensor:
    """The first `size` odd numbers of a sequence; a longer table begins with the shorter one."""
    numbers = _mixed(_name_number(kind), size) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


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
