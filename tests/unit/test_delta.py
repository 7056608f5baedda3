"""Encoded changes bring the old version to the new one, bit for bit, in no more bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.hybrid_engine.plan.buckets import bitmap_bytes, padded_bytes
from mcore_rl.hybrid_engine.transfer import delta

CHUNK_BYTES = 1 << 20  # compared in one call


def _encoded(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(payload, what the source keeps) for a message of `new`, where `old` was sent before."""
    front = bitmap_bytes(len(new))
    buffer = np.full(front + padded_bytes(len(new)), 0xEE, dtype=np.uint8)
    buffer[front:] = _padded(new)
    last = _padded(old)
    size = delta.encode(torch.from_numpy(buffer), torch.from_numpy(last), len(new))
    start = front if size == len(new) else 0
    return buffer[start : start + size].copy(), last


def _expected(old: np.ndarray, new: np.ndarray) -> bytes:
    """The bitmap, then the changed words; nothing where nothing changed."""
    a, b = (_padded(data).view(np.int64) for data in (old, new))
    bits = np.packbits(a != b).tobytes()
    padding = bytes(bitmap_bytes(len(new)) - len(bits))
    return bits + padding + b[a != b].tobytes() if any(bits) else b""


def _padded(data: np.ndarray) -> np.ndarray:
    padded = np.zeros(padded_bytes(len(data)), dtype=np.uint8)
    padded[: len(data)] = data
    return padded


def _check(old: np.ndarray, new: np.ndarray) -> int:
    payload, kept = _encoded(old, new)
    assert np.array_equal(kept, _padded(new))
    received = _padded(old)
    if len(payload) == len(new):
        assert np.array_equal(payload, new)
        return len(payload)
    assert payload.tobytes() == _expected(old, new)
    if len(payload):
        weights = delta.decode(torch.from_numpy(payload), torch.from_numpy(received), len(new))
        assert 0 < weights < len(payload) < len(new)
    assert np.array_equal(received, _padded(new))
    return len(payload)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 7, 8, 100, 512, 4096, 5000, CHUNK_BYTES - 3, 2 * CHUNK_BYTES + 1000]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 3000), st.integers(1, 97)), max_size=8),
    st.integers(0, 9),
)
def test_old_version_becomes_the_new_one(size: int, runs: list, seed: int) -> None:
    old = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    for place, length, step in runs:  # runs of changed bytes, dense or spread
        start = int(place * (size - 1))
        new[start : start + length * step : step] ^= 1
    assert _check(old, new) <= size
    assert _check(new, new) == 0


@pytest.mark.parametrize(
    ("share", "at_most"), [(0.0, 0.0), (0.001, 0.025), (0.01, 0.06), (0.1, 0.38), (1.0, 1.0)]
)
def test_random_sparse_changes_cost_little(share: float, at_most: float) -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 3 * CHUNK_BYTES, dtype=np.uint8)
    new = old.copy()
    new.view(np.int16)[random.random(len(new) // 2) < share] ^= 1
    assert _check(old, new) <= at_most * len(new)


def test_changed_rows_cost_little_more_than_themselves() -> None:
    old = np.zeros(8 * CHUNK_BYTES, dtype=np.uint8)
    new = old.copy()
    new[: CHUNK_BYTES + 4096] = 7  # the first chunk whole, of the second 4 KiB
    assert _check(old, new) == CHUNK_BYTES + 4096 + len(old) // 64


def test_negative_zero_and_nan_are_changes() -> None:
    old = np.zeros(64, dtype=np.float32)
    new = old.copy()
    new[3], new[40] = -0.0, np.nan
    assert 0 < _check(old.view(np.uint8), new.view(np.uint8)) < 256


def test_payload_of_another_message_is_refused() -> None:
    old = np.zeros(4096, dtype=np.uint8)
    new = old.copy()
    new[::512] = 1
    payload, _ = _encoded(old, new)

    def decode(data: np.ndarray) -> None:
        delta.decode(torch.from_numpy(data), torch.from_numpy(old.copy()), 4096)

    with pytest.raises(RuntimeError, match="describes changes of"):
        decode(np.append(payload, np.uint8(0)))
    payload[0] ^= 255
    with pytest.raises(RuntimeError, match="describes changes of"):
        decode(payload)
