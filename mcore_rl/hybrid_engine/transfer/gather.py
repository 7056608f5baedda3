"""The plain way to feed an engine: every tensor, whole, to everybody.

For each checkpoint tensor in layer order, whoever holds a part of it broadcasts it to the whole
world, every rank puts the tensor together, and those whose engine reads it load it. There is no
plan, no group and no cache, and nothing is learned from an earlier hand-over: this is what remains
when the other path delivered something else than was sent, and what benchmarks compare with.

It costs about the whole model received on every rank. Transients are one bucket and, on the ranks
that load it, the whole tensors of a layer: vLLM keeps what it is given until a layer is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.plan.buckets import cut
from mcore_rl.hybrid_engine.plan.moves import Boxes, TensorInfo
from mcore_rl.hybrid_engine.transfer.transfer import ReadSlice
from mcore_rl.model.boxes import Box, extent, full_box, show, uncovered, volume


class GatherPath:
    """Feeds whole tensors to the engines. Constructing it is not collective.

    `order` names the tensors in the order in which they travel; `have[rank]` are the boxes of that
    rank; `wanted` the tensors that this rank's engine reads. No message is larger than
    `bucket_bytes`, unless a single element is. `device` is where tensors are put together.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        *,
        order: Sequence[str],
        have: Sequence[Boxes],
        wanted: Collection[str],
        bucket_bytes: int,
        device: torch.device | str,
    ) -> None:
        self._tensors, self._order, self._have = tensors, order, have
        self._wanted, self._bucket_bytes, self._device = frozenset(wanted), bucket_bytes, device
        self._rank = dist.get_rank()
        self.received_bytes = 0  # in the last run, counted at the calls
        self.num_calls = 0

    def weights(self, read: ReadSlice) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of what this rank wants. Collective over the world; exhaust it.

        `read(tensor, box)` serves a box that this rank holds, in the tensor's dtype. Raises
        RuntimeError, on all ranks, for a slice that nobody holds. Where `read` fails, zeros travel
        in its place so that nobody hangs, and its error is raised here at the end.
        """
        self.received_bytes = self.num_calls = 0
        fault: RuntimeError | None = None
        for name in self._order:
            info = self._tensors[name]
            dtype = getattr(torch, info.dtype)
            whole = None
            if name in self._wanted:
                whole = torch.empty(info.shape, dtype=dtype, device=self._device)
            for source, box in self._parts(name):
                for part in cut(box, max(1, self._bucket_bytes // info.itemsize)):
                    data = torch.empty(extent(part), dtype=dtype, device=self._device)
                    if source == self._rank:
                        try:
                            data.copy_(read(name, part))
                        except RuntimeError as error:
                            fault = fault or error
                            data.zero_()
                    self._broadcast(data, source)
                    if whole is not None:
                        whole[tuple(slice(start, stop) for start, stop in part)] = data
            if whole is not None:
                yield name, whole
        if fault is not None:
            raise fault

    def _parts(self, name: str) -> list[tuple[int, Box]]:
        """Disjoint (rank, box) that make up the tensor: of every part the lowest rank that has it.

        The same on all ranks.
        """
        whole = full_box(self._tensors[name].shape)
        parts: list[tuple[int, Box]] = []
        for rank, holdings in enumerate(self._have):
            for held in holdings.get(name, ()):
                new = uncovered(held, [box for _, box in parts])
                parts.extend((rank, box) for box in new)
            if sum(volume(box) for _, box in parts) == volume(whole):
                return parts
        missing = uncovered(whole, [box for _, box in parts])
        raise RuntimeError(f"no rank holds {name}{show(missing[0])}")

    def _broadcast(self, data: torch.Tensor, source: int) -> None:
        # As bytes: gloo does not know every dtype.
        dist.broadcast(data.view(-1).view(torch.uint8), src=source)
        self.num_calls += 1
        if source != self._rank:
            self.received_bytes += data.nbytes
