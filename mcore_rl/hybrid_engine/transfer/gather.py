"""The plain gather: every complete tensor to every rank.

For each checkpoint tensor in layer order, the ranks that hold a part of it broadcast it to the
world; ranks whose engine reads the tensor assemble and load it. This path has no plan, no groups
and no cache, and keeps nothing from earlier hand-overs. It is the fallback when the other path did
not deliver what was sent, and the baseline of benchmarks.

Every rank receives about the full model. Transient memory is one bucket and, on ranks that load
them, the full tensors of a layer: vLLM keeps what it is given until a layer is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.plan.buckets import cut
from mcore_rl.hybrid_engine.transfer.transfer import ReadSlice
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld, World
from mcore_rl.model.boxes import Box, Boxes, extent, full_box, show, slices, uncovered, volume
from mcore_rl.model.tensors import TensorInfo


class GatherPath:
    """A source of complete tensors for the engines, by default over the job's world.

    `order` names the tensors in the order in which they travel; `have[rank]` are that rank's boxes;
    `wanted` are the tensors that this rank's engine reads. A message is at most `bucket_bytes`, or
    one element if that is larger. Tensors are assembled on `device`.
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
        world: World | None = None,
    ) -> None:
        self._tensors, self._order, self._have = tensors, order, have
        self._wanted, self._bucket_bytes, self._device = frozenset(wanted), bucket_bytes, device
        self._world = world or DefaultWorld(torch.device(device))
        self._rank = self._world.rank
        self.received_bytes = 0  # in the last run, counted at the calls

    def weights(self, read: ReadSlice) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, complete tensor) of `wanted`. Collective over the world; exhaust it.

        `read(tensor, box)` serves a box that this rank holds, in the tensor's dtype. Raises
        RuntimeError, on all ranks, for a slice that no rank holds. If `read` fails, zeros travel
        instead so that no rank hangs, and its error is raised on this rank at the end.
        """
        self.received_bytes = 0
        fault: Exception | None = None
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
                        except Exception as error:  # of any type: others wait for the slice
                            fault = fault or error
                            data.zero_()
                    self._broadcast(data, source)
                    if whole is not None:
                        whole[slices(part)] = data
            if whole is not None:
                yield name, whole
        if fault is not None:
            raise fault

    def _parts(self, name: str) -> list[tuple[int, Box]]:
        """Return disjoint (rank, box) that cover the tensor, each from the lowest rank that has it.

        The result is the same on all ranks.
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
        # As bytes: gloo does not support every dtype.
        flat, group = data.view(-1).view(torch.uint8), self._world.everyone
        self._world.wait(dist.broadcast(flat, src=source, group=group, async_op=True), group)
        if source != self._rank:
            self.received_bytes += data.nbytes
