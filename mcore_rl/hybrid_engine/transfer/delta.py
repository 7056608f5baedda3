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

Tensors in and out, on the host or on a device, where the comparison and the encoding run: nothing
but sizes and tables of forms crosses to the host. Nothing here talks to other ranks.
"""

from __future__ import annotations

import torch

from mcore_rl.hybrid_engine.plan.buckets import CHUNK_BYTES, table_bytes

UNCHANGED, RAW = 0, 255
_BLOCKS = {1: 8, 2: 64, 3: 512}  # form -> bytes of a block; each eight of the one before
_WORD = 8
# Chunks that are compared together: on the host what fits into caches, else so that calls are few.
_AT_ONCE = {"cpu": 1}
_AT_ONCE_ELSEWHERE = 16
# Eight bytes of 0 or 1, times this, have these as the bits of their highest byte, the first one
# highest.
_GATHER_BITS = 0x8040201008040201 - (1 << 64)


def padded_bytes(num_bytes: int) -> int:
    """The size of the buffers for a message of `num_bytes`: whole words."""
    return -(-num_bytes // _WORD) * _WORD


def encode(buffer: torch.Tensor, last: torch.Tensor, num_bytes: int) -> int:
    """Replace a message in `buffer` by its difference from `last`; `last` becomes the message.

    Both are uint8 `[n]` on one device. `buffer` holds `table_bytes(num_bytes)` bytes of room and
    then the message, padded with zeros to whole words; `last` has the same padded size. Returns the
    bytes of the encoded message, which start at the start of `buffer`: 0 where nothing changed.
    Where encoding would not save anything it returns `num_bytes`, and the message itself lies where
    it lay.
    """
    table = table_bytes(num_bytes)
    content = buffer[table:]
    assert len(content) == len(last) == padded_bytes(num_bytes), "message and copy differ in size"
    if torch.equal(content.view(torch.int64), last.view(torch.int64)):
        return 0
    forms: list[int] = []
    end = table
    for new, old in zip(_groups(content), _groups(last), strict=True):
        masks, found = _cheapest(new, old)
        # From here on the chunks are read from the copy: what is written now may lie over them. It
        # never reaches the next group, since no form is larger than the chunk.
        old.copy_(new)
        for row, (form, count) in enumerate(found):
            forms.append(form)
            end = _write(buffer, end, old[row], form, masks, row, count)
    if end >= num_bytes:
        content.copy_(last)
        return num_bytes
    forms += [UNCHANGED] * (table - len(forms))
    buffer[:table] = torch.tensor(forms, dtype=torch.uint8)
    return end


def decode(payload: torch.Tensor, last: torch.Tensor, num_bytes: int) -> int:
    """Apply an encoded message of `num_bytes` to `last`; returns its bytes that are weights.

    Both are uint8 `[n]` on one device. Raises RuntimeError where `payload` is not what `encode`
    makes of a message of this size.
    """
    table = table_bytes(num_bytes)
    at, weights = table, 0
    forms = payload[:table].tolist()
    for form, start in zip(forms, range(0, len(last), CHUNK_BYTES), strict=False):
        old = last[start : start + CHUNK_BYTES]
        if form == UNCHANGED:
            continue
        if form == RAW:
            size = len(old)
            old.copy_(payload[at : at + size])
        else:
            block = _BLOCKS.get(form, 0)
            if not block:
                raise RuntimeError(f"a message describes a chunk in the unknown form {form}")
            count = len(old) // block
            bits = payload[at : at + _bitmap_bytes(count)]
            places = _unpacked(bits)[:count].nonzero().squeeze(1)
            at += len(bits)
            size = len(places) * block
            _blocks(old, block).index_copy_(0, places, _blocks(payload[at : at + size], block))
        at += size
        weights += size
    if at != len(payload):
        raise RuntimeError(f"a message of {len(payload)} bytes describes changes of {at} bytes")
    return weights


def _groups(data: torch.Tensor) -> list[torch.Tensor]:
    """Views `[chunks, words]` int64 of whole chunks, some at a time, and of what is left over."""
    words = data.view(torch.int64)
    per_chunk = CHUNK_BYTES // _WORD
    whole = len(words) // per_chunk
    at_once = _AT_ONCE.get(data.device.type, _AT_ONCE_ELSEWHERE)
    groups = list(words[: whole * per_chunk].view(whole, per_chunk).split(at_once))
    rest = words[whole * per_chunk :]
    return [*(group for group in groups if len(group)), *([rest[None]] if len(rest) else [])]


def _cheapest(
    new: torch.Tensor, old: torch.Tensor
) -> tuple[dict[int, torch.Tensor], list[tuple[int, int]]]:
    """Form -> the blocks that changed, `[chunks, blocks]`; of each chunk (form, changed blocks).

    The form is the one that describes the chunk in the fewest bytes.
    """
    mask = new != old
    num_words = mask.shape[1]
    masks: dict[int, torch.Tensor] = {}
    counts = [mask.sum(1)]
    least = torch.full_like(counts[0], num_words * _WORD)
    best = torch.where(counts[0] > 0, RAW, UNCHANGED)
    count_of_best = torch.zeros_like(best)
    for form, block in _BLOCKS.items():
        if block > _WORD:
            if mask.shape[1] % 8:
                break  # a chunk at the end of a message that is not made of such blocks
            mask = mask.unflatten(1, (-1, 8)).any(2)
        masks[form] = mask
        count = mask.sum(1)
        cost = _bitmap_bytes(mask.shape[1]) + count * block
        is_better = (cost < least) & (best != UNCHANGED)
        best = torch.where(is_better, form, best)
        count_of_best = torch.where(is_better, count, count_of_best)
        least = torch.minimum(least, cost)
    found = torch.stack([best, count_of_best], dim=1).tolist()
    return masks, [(form, count) for form, count in found]


def _write(
    buffer: torch.Tensor,
    at: int,
    chunk: torch.Tensor,
    form: int,
    masks: dict[int, torch.Tensor],
    row: int,
    count: int,
) -> int:
    """Write `chunk`, int64 words, in `form` to `buffer` from `at`; returns where it ends."""
    if form == UNCHANGED:
        return at
    if form == RAW:
        size = len(chunk) * _WORD
        buffer[at : at + size].view(torch.int64).copy_(chunk)
        return at + size
    bits = _packed(masks[form][row])
    buffer[at : at + len(bits)] = bits
    at += len(bits)
    block = _BLOCKS[form]
    # Of a known number, so that the device need not be waited for.
    places = torch.nonzero_static(masks[form][row], size=count).squeeze(1)
    size = count * block
    target = _blocks(buffer[at : at + size], block)
    torch.index_select(chunk.view(-1, block // _WORD), 0, places, out=target)
    return at + size


def _blocks(data: torch.Tensor, block: int) -> torch.Tensor:
    """uint8 `[n]` as int64 `[blocks, words of a block]`."""
    return data.view(torch.int64).view(-1, block // _WORD)


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """`[blocks]` bool as bits, uint8 `[_bitmap_bytes]`, the first block in the highest bit."""
    padded = mask.new_zeros(8 * _bitmap_bytes(len(mask)))
    padded[: len(mask)] = mask
    eights = padded.view(torch.uint8).view(torch.int64)
    return (((eights * _GATHER_BITS) >> 56) & 255).to(torch.uint8)


def _unpacked(bits: torch.Tensor) -> torch.Tensor:
    """The bits of uint8 `[n]`, bool `[8 n]`, the highest of each first."""
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=bits.device)
    return ((bits[:, None] >> shifts) & 1).view(-1).bool()


def _bitmap_bytes(num_blocks: int) -> int:
    """A bit per block, padded to words so that everything stays aligned."""
    return -(-num_blocks // 64) * 8
