"""What changed in a message since the last version, exactly, in few bytes.

Both ends keep the bytes of the last version. The source compares in words of 8 bytes and describes
the changes chunk by chunk; for each chunk it takes the form of the fewest bytes:

    UNCHANGED            nothing
    BLOCKS_8, _64, _512  a bit per block of so many bytes, then the blocks that changed
    RAW                  the chunk

An encoded message is a byte per chunk that names its form (padded to 8), then the chunks in turn;
a message without any change is 0 bytes. Small blocks serve updates that touch single elements: a
step of 1e-6 changes 4 in a hundred bfloat16 weights of a scale of 0.02, which in blocks of 8 bytes
come to 17 % of the bytes, in blocks of 64 to 75 %, in larger ones to all. Large blocks serve rows:
one in twenty comes to 6.5 % in blocks of 8 and to 5.0 % in blocks of 512. A frozen parameter costs
one comparison at nearly the speed of memory.

Plain host memory (numpy) in and out; nothing here talks to other ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mcore_rl.hybrid_engine.buckets import CHUNK_BYTES, table_bytes

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

UNCHANGED, RAW = 0, 255
_BLOCKS = {1: 8, 2: 64, 3: 512}  # form -> bytes of a block; each eight of the one before
_WORD = 8


def padded_bytes(num_bytes: int) -> int:
    """The size of the buffers for a message of `num_bytes`: whole words."""
    return -(-num_bytes // _WORD) * _WORD


def encode(buffer: Bytes, last: Bytes, num_bytes: int) -> int:
    """Replace a message in `buffer` by its difference from `last`; `last` becomes the message.

    `buffer` holds `table_bytes(num_bytes)` bytes of room and then the message, padded with zeros to
    whole words; `last` has the same padded size. Returns the bytes of the encoded message, which
    start at the start of `buffer`: 0 where nothing changed. Where encoding would not save anything
    it returns `num_bytes`, and the message itself lies where it lay.
    """
    table = table_bytes(num_bytes)
    content = buffer[table:]
    assert len(content) == len(last) == padded_bytes(num_bytes), "message and copy differ in size"
    forms = np.zeros(table, dtype=np.uint8)
    end = table
    for number, start in enumerate(range(0, len(last), CHUNK_BYTES)):
        new, old = content[start : start + CHUNK_BYTES], last[start : start + CHUNK_BYTES]
        changed: Mask = new.view(np.int64) != old.view(np.int64)
        forms[number], mask = _cheapest(changed)
        if forms[number] == UNCHANGED:
            continue
        np.copyto(old, new)
        # From here on the chunk is read from the copy: what is written now may lie over it. It
        # never reaches the next chunk, since no form is larger than the chunk.
        end = _write(buffer, end, forms[number], mask, old)
    if not forms.any():
        return 0
    if end >= num_bytes:
        np.copyto(content, last)
        return num_bytes
    buffer[:table] = forms
    return end


def decode(payload: Bytes, last: Bytes, num_bytes: int) -> int:
    """Apply an encoded message of `num_bytes` to `last`; returns its bytes that are weights.

    Raises RuntimeError where `payload` is not what `encode` makes of a message of this size.
    """
    table = table_bytes(num_bytes)
    at, weights = table, 0
    for number, start in enumerate(range(0, len(last), CHUNK_BYTES)):
        form, old = int(payload[number]), last[start : start + CHUNK_BYTES]
        if form == UNCHANGED:
            continue
        if form == RAW:
            size = len(old)
            old[:] = payload[at : at + size]
        else:
            block = _BLOCKS.get(form, 0)
            if not block:
                raise RuntimeError(f"a message describes a chunk in the unknown form {form}")
            count = len(old) // block
            bits = payload[at : at + _bitmap_bytes(count)]
            mask = np.unpackbits(bits, count=count).view(np.bool_)
            at += len(bits)
            size = int(np.count_nonzero(mask)) * block
            _blocks(old, block)[mask] = _blocks(payload[at : at + size], block)
        at += size
        weights += size
    if at != len(payload):
        raise RuntimeError(f"a message of {len(payload)} bytes describes changes of {at} bytes")
    return weights


def _cheapest(changed: Mask) -> tuple[int, Mask]:
    """The form that describes these changed words in the fewest bytes, with its blocks."""
    count = int(np.count_nonzero(changed))
    if count == 0:
        return UNCHANGED, changed
    best, best_mask, least = RAW, changed, changed.size * _WORD
    mask = changed
    for form, block in _BLOCKS.items():
        if block > _WORD:
            if mask.size % 8:
                break  # a chunk at the end of a message that is not made of such blocks
            mask = mask.view(np.int64) != 0
            count = int(np.count_nonzero(mask))
        cost = _bitmap_bytes(mask.size) + count * block
        if cost < least:
            best, best_mask, least = form, mask, cost
    return best, best_mask


def _write(buffer: Bytes, at: int, form: int, mask: Mask, chunk: Bytes) -> int:
    """Write `chunk` in `form` to `buffer` from `at`; returns where it ends."""
    if form == RAW:
        buffer[at : at + len(chunk)] = chunk
        return at + len(chunk)
    bits = np.packbits(mask)
    size = _bitmap_bytes(len(mask))
    buffer[at : at + len(bits)] = bits
    buffer[at + len(bits) : at + size] = 0
    at += size
    block = _BLOCKS[form]
    size = int(np.count_nonzero(mask)) * block
    np.compress(mask, _blocks(chunk, block), out=_blocks(buffer[at : at + size], block))
    return at + size


def _blocks(data: Bytes, block: int) -> npt.NDArray[np.void]:
    return data.view(np.int64 if block == _WORD else f"V{block}")


def _bitmap_bytes(num_blocks: int) -> int:
    """A bit per block, padded to words so that everything stays aligned."""
    return -(-num_blocks // 64) * 8
