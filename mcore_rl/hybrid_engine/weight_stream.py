"""The stream of the weights of this rank's engine: its own slices, and those other ranks send.

This module joins what Megatron holds (`megatron.shards`), what the engine needs (`vllm.needs`), the
plan between them, and the transfer that executes it. Everything except the weights themselves is
computed once, from the two layouts. A rank may have both sides or one. One without training, a
vLLM server's worker, may be in an environment without Megatron.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from mcore_rl.hybrid_engine.plan.transfer_plan import Plan, make_plan
from mcore_rl.hybrid_engine.plan.trees import KnownGroups, Neighbourhoods
from mcore_rl.hybrid_engine.proof.attest import FULL
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld, World
from mcore_rl.hybrid_engine.vllm.in_process_engine import Receiver
from mcore_rl.hybrid_engine.vllm.sliced_tensor import SlicedTensor
from mcore_rl.model.boxes import Box, Boxes, intersect, show, uncovered, volume
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.float8_blocks import Float8Weights
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.tensors import TensorInfo, is_mtp_tensor
from mcore_rl.model.weight_map import layer_order

if TYPE_CHECKING:
    from mcore_rl.hybrid_engine.float8_shards import Float8Shards
    from mcore_rl.megatron.carried import CarriedTensors
    from mcore_rl.megatron.lora import FactorShards
    from mcore_rl.megatron.shards import ModelShards


@dataclass(frozen=True, slots=True)
class HandOverOptions:
    """Options of a hand-over, the same on all ranks.

    Weights travel in `dtype`. With `delta` only changes travel, and everything every `full_every`
    times. `bucket_bytes` caps what is in flight on a rank. `ranks_per_node` consecutive ranks are
    near each other; None: ranks of one host. `attest` is a mode of `proof.attest`.

    Example: `HandOverOptions(seed=1, bucket_bytes=512 << 20, dtype="bf16", delta=True)`.
    """

    seed: int
    bucket_bytes: int = 512 << 20
    ranks_per_node: int | None = None
    dtype: str = "checkpoint"  # or "bf16", "fp16"
    delta: bool = False
    full_every: int = 20
    attest: str = FULL


@dataclass(frozen=True, slots=True)
class Holdings:
    """`have[rank]` and `need[rank]`: checkpoint tensor -> boxes. Equal mappings are one object.

    Example: `have[0]` may be {"lm_head.weight": (((0, 64), (0, 32)),)}.
    """

    have: tuple[Boxes, ...]
    need: tuple[Boxes, ...]

    def lower_bound_bytes(self, rank: int, tensors: Mapping[str, TensorInfo]) -> int:
        """Return the minimum that `rank` must receive, over all ranks' places in rollout."""
        places = {id(need): need for need in self.need}
        return min(missing_bytes(tensors, self.have[rank], need) for need in places.values())


_Boxes = dict[str, tuple[Box, ...]]


def exchange(
    have: Mapping[str, Sequence[Box]], need: Mapping[str, Sequence[Box]], world: World
) -> Holdings:
    """Exchange with all ranks what each has and needs. Collective over `world`."""
    mine = tuple(
        {name: tuple(some) for name, some in boxes.items() if some} for boxes in (have, need)
    )
    everybody = world.gather(mine, of=tuple[_Boxes, _Boxes])
    known: dict[frozenset[Any], Boxes] = {}

    def only_one(boxes: Boxes) -> Boxes:
        return known.setdefault(frozenset(boxes.items()), boxes)

    return Holdings(
        have=tuple(only_one(held) for held, _ in everybody),
        need=tuple(only_one(needed) for _, needed in everybody),
    )


def missing_bytes(tensors: Mapping[str, TensorInfo], have: Boxes, need: Boxes) -> int:
    """Return the number of bytes that are needed and not held."""
    return sum(
        volume(part) * tensors[name].itemsize
        for name, boxes in need.items()
        for box in boxes
        for part in uncovered(box, have.get(name, ()))
    )


# The largest share in flight of what the busiest rank sends and receives. It is below 1 so that a
# rank loads one part while the rest travels.
_SHARE_IN_FLIGHT = 1 / 4
_LEAST_BUCKET_BYTES = 2 << 20


class WeightStream:
    """One plan, streamed once per hand-over. Constructing and streaming are collective.

    `tensors` are the checkpoint's, or an adapter's. Those that training holds on any rank travel.
    MTP layers come last; if they are not trained, they are `carried` for a drafter, and each rank
    reads its own.
    `world` and the other arguments are those of `HandOver`. The `layout` is that of this process's
    default world, whose groups the stream uses; None in a joined world.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        layout: TrainLayout | None,
        options: HandOverOptions,
        *,
        shards: ModelShards | FactorShards | None,
        engine: Receiver | None,
        shape: ModelShape,
        device: torch.device,
        world: World | None = None,
        carried: CarriedTensors | None = None,
    ) -> None:
        world = world or DefaultWorld(device)
        assert (layout is None) == world.is_joined, "Megatron's groups are of the job's own world"
        self._shards, self._carried, self._device = shards, carried, device
        self._float8: Float8Shards | None = None
        served = _served(tensors, shards, world)
        also = {} if carried is None else dict(carried.tensors)
        self.tensors = with_transfer_dtype({**served, **also}, options.dtype, shape)
        quantised = _quantised(engine, world)
        if quantised is not None:
            self.tensors = quantised.in_blocks(self.tensors)
            if shards is not None:
                from mcore_rl.hybrid_engine.float8_shards import Float8Shards

                # Adapters are not quantised.
                self._float8 = Float8Shards(cast("ModelShards", shards), served, quantised)
        self.need: Boxes = {}
        if engine is not None:
            self.need = engine.learn_needs(
                {name: (i.shape, getattr(torch, i.dtype)) for name, i in self.tensors.items()}
            )
        if carried is not None:
            carried.hold(self.need)
        self.holdings = exchange({n: self._boxes(n) for n in self.tensors}, self.need, world)
        if self._float8 is not None:
            self._float8.share(self.holdings.have)
        # A drafter's copies of tensors that the model has are carried, too, but no rank needs them.
        also = {n: i for n, i in also.items() if any(n in need for need in self.holdings.need)}
        unused = (carried.tensors.keys() if carried is not None else set()) - also.keys()
        self.tensors = {n: i for n, i in self.tensors.items() if n not in unused}
        drafters = {n for n in self.tensors if is_mtp_tensor(n, shape.num_layers)}
        self.order = [*layer_order(self.tensors.keys() - drafters), *layer_order(drafters)]
        self.plan = plan = make_plan(
            self.tensors,
            order=self.order,
            have=self.holdings.have,
            need=self.holdings.need,
            near=_near(world, options.ranks_per_node, layout),
            groups=None if layout is None else KnownGroups(layout.groups().values()),
        )
        self.transfer = Transfer(
            plan,
            self.tensors,
            bucket_bytes=min(options.bucket_bytes, _enough_to_overlap(plan, world.size)),
            delta=options.delta,
            full_every=options.full_every,
            groups=None if layout is None else _groups(layout),
            world=world,
            device=device,
        )
        rank = world.rank
        if layout is not None:
            self.lower_bound_bytes = self.holdings.lower_bound_bytes(rank, self.tensors)
        else:  # engines hold nothing: another order of their ranks would save none of them bytes
            self.lower_bound_bytes = missing_bytes(
                self.tensors, self.holdings.have[rank], self.holdings.need[rank]
            )
        before = {name: info.itemsize for name, info in served.items()}  # scales are added
        self._saved_by_dtype = sum(
            (before.get(move.tensor, 0) - self.tensors[move.tensor].itemsize) * volume(move.box)
            for move in plan.moves
            if rank in move.receivers
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes saved in the last hand-over by a narrower dtype and by sending changes only."""
        return self.transfer.stats.saved_bytes + self._saved_by_dtype

    def prepare(self) -> None:
        """Note that the parameters have changed: call it before `read` or `weights`. Collective."""
        if self._float8 is not None:
            self._float8.prepare()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, stand-in of full shape with some of this rank's slices) by layer.

        Collective; must be exhausted. Yields only tensors that this rank needs, one after the
        other, each in one or more parts: the slices held here, then those of each bucket. A part is
        valid until the next one is requested. On a rank without an engine it yields nothing.
        """
        with contextlib.closing(self.transfer.stream(self.read)) as arriving:
            ahead = next(arriving, None)
            for name in self.order:
                own = self._own_pieces(name)
                if own:
                    yield name, self._part(name, own)
                while ahead is not None and ahead[0] == name:
                    yield name, self._part(name, ahead[1])
                    ahead = next(arriving, None)
            assert ahead is None, f"{ahead[0]} arrived out of order"

    def _own_pieces(self, name: str) -> list[tuple[Box, torch.Tensor]]:
        """Return what this rank needs and holds already, each element once."""
        pieces: list[tuple[Box, torch.Tensor]] = []
        for needed in self.need.get(name, ()):
            for held in self._boxes(name):
                shared = intersect(needed, held)
                rest = [] if shared is None else uncovered(shared, [box for box, _ in pieces])
                pieces.extend((box, self.read(name, box)) for box in rest)
        return pieces

    def _part(self, name: str, pieces: list[tuple[Box, torch.Tensor]]) -> SlicedTensor:
        info = self.tensors[name]
        return SlicedTensor(name, info.shape, getattr(torch, info.dtype), pieces)

    def read(self, name: str, box: Box, at: Any = ...) -> torch.Tensor:
        """Return a slice that this rank holds, or its part `at`, in the dtype it travels in."""
        holder = self._holder(name)
        if holder is None:
            raise RuntimeError(f"{name}{show(box)} was read on a rank without Megatron")
        return holder.read(name, box, at).to(self._device, getattr(torch, self.tensors[name].dtype))

    def _boxes(self, name: str) -> tuple[Box, ...]:
        holder = self._holder(name)
        return () if holder is None else holder.boxes(name)

    def _holder(
        self, name: str
    ) -> ModelShards | FactorShards | Float8Shards | CarriedTensors | None:
        """Return the holder of this rank's slices of a tensor; None: it can hold none."""
        if self._carried is not None and name in self._carried.tensors:
            return self._carried
        return self._float8 or self._shards


def _enough_to_overlap(plan: Plan, world_size: int) -> int:
    """Return the bucket's bytes with which even a small model's transfer overlaps its loading."""
    busy = [0] * world_size
    for move in plan.moves:
        for rank in (move.source, *move.receivers):
            busy[rank] += move.num_bytes
    return max(_LEAST_BUCKET_BYTES, int(max(busy) * _SHARE_IN_FLIGHT))


def _groups(layout: TrainLayout) -> dict[frozenset[int], Any]:
    """Return Megatron's groups by their ranks; entries for other ranks' groups are placeholders."""
    from mcore_rl.megatron import adapter as megatron_adapter

    mine = megatron_adapter.broadcast_groups()
    groups: dict[frozenset[int], Any] = {}
    for name, sets in layout.groups().items():
        for ranks in sets:
            groups.setdefault(frozenset(ranks), mine[name])
    return groups


def _near(world: World, ranks_per_node: int | None, layout: TrainLayout | None) -> Neighbourhoods:
    ranks = range(world.size)
    if ranks_per_node is None:
        hosts = world.gather(socket.gethostname(), of=str)
        nodes = tuple(map(hosts.index, hosts))
    else:
        nodes = tuple(rank // ranks_per_node for rank in ranks)
    return Neighbourhoods(
        node=nodes,
        pipeline=tuple(0 if layout is None else layout.pp_group(rank)[0] for rank in ranks),
    )


def _served(
    tensors: Mapping[str, TensorInfo], shards: ModelShards | FactorShards | None, world: World
) -> dict[str, TensorInfo]:
    """Return the tensors that travel: those that training holds on any rank."""
    held = [] if shards is None else list(shards.tensors())
    trained = set().union(*world.gather(held, of=list[str]))
    return {name: info for name, info in tensors.items() if name in trained}


def _quantised(engine: Receiver | None, world: World) -> Float8Weights | None:
    """Return the engines' weights in FP8 blocks on all ranks; the last one has an engine."""
    mine = None if engine is None else engine.float8
    weights: Float8Weights | None = world.gather(mine, of=Float8Weights | None)[-1]
    return weights


def with_transfer_dtype(
    tensors: Mapping[str, TensorInfo], dtype: str, shape: ModelShape
) -> dict[str, TensorInfo]:
    """Return `tensors` with the dtype in which they travel: "checkpoint", "bf16" or "fp16".

    What decides between experts stays in float32 where it is: engines keep a router's bias, and
    where no kernel has a float32 output its weights, in float32, and a narrower dtype would lose
    the differences between close logits (`patches/vllm/routers_in_float32.py`).
    """
    if dtype == "checkpoint":
        return dict(tensors)
    narrow = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    names = family_of(shape.architecture).names
    routers = (names.router, names.router_bias, names.scorer_bias)
    return {
        name: info
        if info.dtype == "float32" and name.endswith(routers)
        else replace(info, dtype=narrow, itemsize=2)
        for name, info in tensors.items()
    }
