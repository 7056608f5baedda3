"""Host memory for what training keeps off the device: page-locked, allocated once, reused.

`HostBuffer` is the memory, `HostCopy` a second set of values for tensors that stay in place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class HostBuffer:
    """Host memory for one kind, in chunks that fill a bucket of the host allocator exactly.

    torch rounds page-locked memory up to a power of two: one allocation of 65 GiB would take 128.
    All chunks but the last are powers of two, and a storage may span two chunks.
    """

    def __init__(self, pinned: bool, chunk_bytes: int) -> None:
        assert chunk_bytes.bit_count() == 1, f"{chunk_bytes} is not a power of two"
        self._pinned, self._chunk_bytes = pinned, chunk_bytes
        self._chunks: list[torch.Tensor] = []
        self._ends: list[int] = []  # of the chunks

    @property
    def num_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    def reserve(self, num_bytes: int) -> None:
        """Allocate room for at least `num_bytes`. Chunks allocated before a failure are kept."""
        while (missing := num_bytes - self.num_bytes) > 0:
            size = min(missing, self._chunk_bytes)
            if self._pinned:
                size = 1 << (size - 1).bit_length()
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned))
            self._ends.append(self.num_bytes + size)

    def pieces(self, start: int, num_bytes: int) -> Iterator[torch.Tensor]:
        """Yield `[n]` uint8 views that together are `num_bytes` bytes from `start`."""
        # A model has thousands of storages and hundreds of chunks: begin at the first that counts.
        number, end = bisect_right(self._ends, start), start + num_bytes
        while start < end:
            chunk, last = self._chunks[number], min(end, self._ends[number])
            low = start - self._ends[number] + len(chunk)
            yield chunk[low : low + last - start]
            start, number = last, number + 1

    def release_before(self, end: int) -> None:
        """Free chunks that end at or before `end`, unless they are page-locked. They must not be
        read again."""
        for chunk in () if self._pinned else self._chunks[: bisect_right(self._ends, end)]:
            chunk.untyped_storage().resize_(0)

    def release(self) -> None:
        """Free the memory, unless it is page-locked."""
        if not self._pinned:
            self._chunks.clear()
            self._ends.clear()


class HostCopy:
    """A second set of values of some tensors, kept on the host, to be exchanged in place.

    For tensors on CUDA the memory is page-locked and the copies run on a separate stream. They wait
    for the caller's earlier work on its stream, and its later work sees the result; the host waits
    for neither. After the first copy nothing is allocated, except at most `bucket_bytes` on the
    device during an exchange (less if all tensors are smaller).

    Raises RuntimeError for a tensor that is not contiguous.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        chunk_bytes: int = 256 << 20,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        self._tensors = list(tensors)
        self._device = self._tensors[0].device if self._tensors else torch.device("cpu")
        on_cuda = self._device.type == "cuda"
        self._host = HostBuffer(on_cuda, chunk_bytes)
        self._host.reserve(sum(tensor.nbytes for tensor in self._tensors))
        self._bucket_bytes = min(bucket_bytes, max((t.nbytes for t in self._tensors), default=0))
        self._stream = torch.cuda.Stream(self._device) if on_cuda else None
        self.take()

    @property
    def host_bytes(self) -> int:
        """Host memory held, including the rounding of page-locked chunks."""
        return self._host.num_bytes

    def take(self) -> None:
        """Keep the tensors' current values instead of those kept so far."""
        with self._beside():
            for values, kept in self._pieces():
                kept.copy_(values, non_blocking=True)

    def exchange(self) -> None:
        """Swap the tensors' values with those kept here."""
        with self._beside():
            bucket = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device)
            for values, kept in self._pieces():
                now = bucket[: len(values)]
                now.copy_(values, non_blocking=True)
                values.copy_(kept, non_blocking=True)
                kept.copy_(now, non_blocking=True)

    def _pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `[n]` uint8 views of the tensors and of their kept values, n at most a bucket."""
        start = 0
        for tensor in self._tensors:
            whole = _bytes_in_place(tensor)
            for low in range(0, len(whole), max(1, self._bucket_bytes)):
                piece = whole[low : low + self._bucket_bytes]
                for kept in self._host.pieces(start, len(piece)):
                    yield piece[: len(kept)], kept
                    piece = piece[len(kept) :]
                    start += len(kept)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Run copies on the separate stream, ordered with the work on the caller's stream."""
        if self._stream is None:
            yield
            return
        callers = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(callers)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            callers.wait_stream(self._stream)


def _bytes_in_place(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise RuntimeError(
            f"a weight of shape {tuple(tensor.shape)} has strides {tensor.stride()}, expected its "
            "elements one after the other: it cannot be exchanged with a copy on the host"
        )
    return tensor.detach().view(-1).view(torch.uint8)
