"""What a rank does in the tests of transfers; run by `tests.rank_pool`, which calls these by name.

Tensors are full on every rank, made from a seed, so that each knows what must arrive.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.memory.usage import PeakMemory
from mcore_rl.hybrid_engine.plan.transfer_plan import Move, Plan
from mcore_rl.hybrid_engine.plan.trees import Forest, KnownGroups, Neighbourhoods, Tree, connections
from mcore_rl.hybrid_engine.transfer import transport
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.model.boxes import Box, contains, extent, full_box, volume
from mcore_rl.model.tensors import TensorInfo
from tests.plans import direct

SHAPES = [(), (1,), (17,), (1, 300), (6, 10), (3, 4, 5), (40, 33), (2, 1, 64), (5, 2, 3, 4)]
# Of 4 ranks: what Megatron has as PP and TP groups.
FAMILIES = ([(0, 2), (1, 3)], [(0, 1), (2, 3)])
DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "int64": 8}


class World:
    """Random tensors and a random plan over them, the same on every rank."""

    def __init__(self, seed: int, *, dtypes: dict[str, int] | None = None) -> None:
        self.draw = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        dtypes = dtypes or DTYPES
        self.values: dict[str, torch.Tensor] = {}
        for number, shape in enumerate(self.draw.sample(SHAPES, 6)):
            dtype = getattr(torch, self.draw.choice(list(dtypes)))
            self.values[f"t{number}"] = self._random(shape, dtype)
        self.tensors = {
            name: TensorInfo(tuple(v.shape), str(v.dtype)[len("torch.") :], v.itemsize)
            for name, v in self.values.items()
        }
        self.known = KnownGroups(FAMILIES if dist.get_world_size() == 4 else [])
        self.plan = Plan(tuple(self._moves()))

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)
        return data.view(dtype).view(shape)

    def _moves(self) -> Iterator[Move]:
        world = range(dist.get_world_size())
        for tensor, info in self.tensors.items():
            for box in self._partition(full_box(info.shape)):
                ranks = self.draw.sample(world, self.draw.randint(1, len(world)))
                if len(ranks) > 1:
                    yield Move(tensor, box, self._tree(ranks), volume(box) * info.itemsize)

    def _tree(self, ranks: list[int]) -> Tree:
        """From the first to the others, over one that passes it on more often than not."""
        if self.draw.random() < 0.2:
            return direct(ranks[0], ranks[1:])
        world_size = dist.get_world_size()
        load = [self.draw.randint(0, 3) for _ in range(world_size)]
        near = Neighbourhoods.alike(world_size)
        (tree,) = Forest(ranks[:1], ranks[1:], near, self.known, load).trees
        return tree

    def groups(self) -> dict[frozenset[int], Any]:
        """Process groups of the families. Collective."""
        return {ranks: dist.new_group(sorted(ranks)) for ranks in sorted(self.known.sets, key=min)}

    def _partition(self, box: Box) -> list[Box]:
        """A grid of uneven boxes, some of them of a single element's width."""
        ranges = []
        for start, stop in box:
            inner = self.draw.sample(range(start + 1, stop), min(stop - start - 1, 2))
            edges = [start, *sorted(inner), stop]
            ranges.append(list(itertools.pairwise(edges)))
        return list(itertools.product(*ranges))

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """What the rank holds. A source must not be asked for what it does not send."""
        rank = dist.get_rank()
        held = [m.box for m in self.plan.moves if m.tensor == tensor and m.source == rank]
        assert any(contains(other, box) for other in held), (tensor, box)
        return cut(self.values[tensor], box)

    def update(self, share: float) -> None:
        """Change about that share of the elements of about half of the tensors."""
        for value in self.values.values():
            if value.dim() and self.draw.random() < 0.5:
                flat = value.view(-1).view(torch.uint8).view(-1, value.itemsize)
                rows = torch.rand(len(flat), generator=self.generator) < share
                flat[rows, 0] ^= 1

    def collect(self, arriving: Iterator[Any]) -> dict[str, list[Any]]:
        """Everything that arrives, copied at once. The parts of a tensor are consecutive."""
        found: dict[str, list[Any]] = {}
        for tensor, pieces in arriving:
            assert tensor not in found or tensor == next(reversed(found)), tensor
            found.setdefault(tensor, []).extend((box, data.clone()) for box, data in pieces)
        return found

    def check(self, found: dict[str, list[Any]]) -> None:
        """Every element that the plan brings here came exactly once, bit for bit."""
        rank = dist.get_rank()
        mine = [m for m in self.plan.moves if rank in m.receivers]
        assert list(found) == list(dict.fromkeys(m.tensor for m in mine)), list(found)
        for tensor, pieces in found.items():
            value = self.values[tensor]
            times, expected = (torch.zeros(value.shape, dtype=torch.int8) for _ in range(2))
            for move in mine:
                if move.tensor == tensor:
                    cut(expected, move.box).add_(1)
            for box, data in pieces:
                cut(times, box).add_(1)
                assert same_bits(data, cut(value, box)), (tensor, box)
            assert torch.equal(times, expected), tensor


def cut(value: torch.Tensor, box: Box) -> torch.Tensor:
    return value[tuple(slice(start, stop) for start, stop in box)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def arrivals(num_plans: int) -> dict[str, Any]:
    """Random plans through buckets from one element to all of it, twice."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    result: dict[str, Any] = {"runs": 0, "num_buckets": []}
    for seed in range(num_plans):
        world = World(seed)
        groups = world.groups()
        unit = max((world.tensors[m.tensor].itemsize for m in world.plan.moves), default=1)
        for bucket_bytes in (2 * unit, 100, 4096, 1 << 20):
            transfer = Transfer(
                world.plan, world.tensors, bucket_bytes=bucket_bytes, groups=groups, device="cpu"
            )
            for _ in range(2):
                world.check(world.collect(transfer.stream(world.read)))
                stats = transfer.stats
                assert stats.received_bytes == world.plan.received_bytes(rank)
                assert stats.sent_bytes == world.plan.sent_bytes(rank)
                assert stats.saved_bytes == stats.header_bytes == 0
                assert stats.largest_bucket_bytes <= bucket_bytes // 2
                assert stats.buffer_bytes <= bucket_bytes
                assert 0 <= stats.hidden_share <= 1
                result["runs"] += 1
            result["num_buckets"].append(stats.num_buckets)
            transfer.close()
    dist.destroy_process_group()
    return result


def bounded_memory() -> dict[str, Any]:
    """A large tensor in one row and a fused one through a small bucket; what it takes besides."""
    dist.init_process_group("gloo")
    rank, bucket_bytes = dist.get_rank(), 8 << 20
    tensors = {
        "row": TensorInfo((1, 48 << 20), "bfloat16", 2),
        "experts": TensorInfo((6, 1024, 8192), "bfloat16", 2),
    }
    moves = tuple(
        Move(name, full_box(info.shape), direct(0, [1]), info.num_bytes)
        for name, info in tensors.items()
    )
    transfer = Transfer(Plan(moves), tensors, bucket_bytes=bucket_bytes, device="cpu")
    value = torch.arange(8192, dtype=torch.bfloat16) if rank == 0 else None

    def read(tensor: str, box: Box) -> torch.Tensor:
        assert value is not None
        return value[:1].expand(extent(box))

    storages: dict[int, int] = {}
    received = 0
    # Once before measuring, so that threads and sockets have their memory.
    for _ in transfer.stream(read):
        pass
    with PeakMemory() as peak:
        for _, pieces in transfer.stream(read):
            for box, data in pieces:
                storage = data.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
                received += data.nbytes
                assert tuple(data.shape) == extent(box) and data.min() == data.max() == 0
    transfer.close()
    dist.destroy_process_group()
    return {
        "bucket_bytes": bucket_bytes,
        "buffer_bytes": transfer.stats.buffer_bytes,
        "storage_bytes": sum(storages.values()),
        "num_storages": len(storages),
        "received_bytes": received,
        "total_bytes": sum(info.num_bytes for info in tensors.values()),
        "peak_extra_bytes": peak.extra_bytes,
    }


def delta_versions(num_plans: int) -> list[dict[str, Any]]:
    """Several versions by delta, beside the values themselves; every fourth is full."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = []
    for seed in range(num_plans):
        world = World(seed + 100)
        groups = world.groups()
        planned = world.plan.received_bytes(rank)
        for bucket_bytes in (72, 300, 1 << 20):
            transfer = Transfer(
                world.plan,
                world.tensors,
                bucket_bytes=bucket_bytes,
                groups=groups,
                device="cpu",
                delta=True,
                full_every=4,
            )
            full, frozen = [], []
            for version in range(7):
                world.check(world.collect(transfer.stream(world.read)))
                stats = transfer.stats
                assert stats.received_bytes + stats.saved_bytes == planned
                assert stats.buffer_bytes <= bucket_bytes
                full.append(stats.is_full)
                if version == 2:  # nothing was changed before it
                    frozen.append(stats.received_bytes - stats.header_bytes)
                    assert stats.received_bytes % 8 == 0
                if version != 1:
                    world.update(0.05)
                if version == 5 and rank == 1:
                    transfer.invalidate()
            results.append({"full": full, "frozen": frozen})
            transfer.close()
    dist.destroy_process_group()
    return results


def delta_saves() -> dict[str, Any]:
    """A tensor of which one element in a hundred changes, and a frozen one."""
    dist.init_process_group("gloo")
    size = 1 << 20
    tensors = {
        "frozen": TensorInfo((4, size // 4), "bfloat16", 2),
        "trained": TensorInfo((size,), "bfloat16", 2),
    }
    everyone = range(dist.get_world_size())
    near = Neighbourhoods.alike(len(everyone))
    (tree,) = Forest([0], everyone[1:], near, KnownGroups(), [0] * len(everyone)).trees
    moves = tuple(
        Move(name, full_box(info.shape), tree, info.num_bytes) for name, info in tensors.items()
    )
    generator = torch.Generator().manual_seed(1)
    values = {
        name: torch.randn(info.shape, generator=generator).bfloat16()
        for name, info in tensors.items()
    }
    transfer = Transfer(Plan(moves), tensors, bucket_bytes=3 << 20, device="cpu", delta=True)
    rows = []
    for _ in range(3):
        for tensor, pieces in transfer.stream(lambda tensor, box: cut(values[tensor], box)):
            for box, data in pieces:
                assert same_bits(data, cut(values[tensor], box))
        stats = transfer.stats
        rows.append([stats.received_bytes, stats.header_bytes, stats.saved_bytes, stats.num_calls])
        changed = torch.rand(size, generator=generator) < 0.01
        values["trained"].view(torch.int16)[changed] ^= 1
        if len(rows) == 2:
            values["trained"].view(torch.int16)[changed] ^= 1  # back: nothing at all has changed
    transfer.close()
    dist.destroy_process_group()
    return {"rows": rows, "planned_bytes": 4 * size}


def failures(with_delta: bool) -> dict[str, Any]:
    """Consumers that give up and reads that fail, then a run that must be whole again."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = World(7)
    transfer = Transfer(world.plan, world.tensors, bucket_bytes=300, device="cpu", delta=with_delta)
    result: dict[str, Any] = {"full": []}
    world.check(world.collect(transfer.stream(world.read)))

    # Rank 1 gives up at its first tensor: its iterator is closed, once by hand, once by `drain`.
    for way in ("close", "drain"):
        arriving = transfer.stream(world.read)
        if rank != 1:
            world.check(world.collect(arriving))
            continue
        next(arriving)
        with pytest.raises(RuntimeError) as raised:
            transfer.stream(world.read)
        result["second_start"] = str(raised.value)
        arriving.close() if way == "close" else transfer.drain()
        assert next(arriving, None) is None
        assert transfer.stats.received_bytes > 0 or with_delta
        assert 0 <= transfer.stats.hidden_share <= 1
    # It never starts, and takes part all the same.
    arriving = transfer.stream(world.read)
    if rank == 1:
        transfer.drain()
    else:
        world.check(world.collect(arriving))
    result["full"].append(transfer.stats.is_full)

    sent = [m for m in world.plan.moves if m.source == 2]
    broken = sent[len(sent) // 2].tensor

    def read(tensor: str, box: Box) -> torch.Tensor:
        if rank == 2 and tensor == broken:
            raise ValueError("the disk is on fire")
        return world.read(tensor, box)

    result["broken"] = broken
    with pytest.raises(RuntimeError) as raised:
        world.collect(transfer.stream(read))
    result["error"] = str(raised.value)
    with pytest.raises(RuntimeError) as raised:
        world.collect(transfer.stream(lambda tensor, box: world.read(tensor, box).double()))
    result["wrong_dtype"] = str(raised.value)
    world.check(world.collect(transfer.stream(world.read)))
    result["full"].append(transfer.stats.is_full)
    with pytest.raises(UsageError) as refused:
        Transfer(world.plan, world.tensors, bucket_bytes=2, device="cpu")
    result["too_small"] = str(refused.value)
    transfer.close()
    dist.destroy_process_group()
    return result


def overlap(with_delta: bool) -> list[list[Any]]:
    """What was started and waited for, and what the caller had in hand, in order."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tensors = {f"t{i}": TensorInfo((16,), "uint8", 1) for i in range(6)}
    moves = tuple(Move(name, ((0, 16),), direct(0, [1]), 16) for name in tensors)
    bucket_bytes = 3 * (16 + 16) if with_delta else 2 * 16  # a tensor in each buffer
    events: list[list[Any]] = []

    class NotedFlight(transport.Flight):
        def __init__(self, hops: Any, world: Any, what: str) -> None:
            super().__init__(hops, world, what)
            self.number = sum(event[0] == "start" for event in events)
            events.append(["start", self.number])

        def wait(self) -> None:
            super().wait()
            events.append(["arrived", self.number])

    transport.Flight = NotedFlight  # type: ignore[misc]
    transfer = Transfer(
        Plan(moves), tensors, bucket_bytes=bucket_bytes, device="cpu", delta=with_delta
    )
    for version in range(2 if with_delta else 1):
        events.clear()
        value = torch.full((16,), version + 1, dtype=torch.uint8)

        def read(tensor: str, box: Box, value: torch.Tensor = value) -> torch.Tensor:
            return value[slice(*box[0])]

        for tensor, _ in transfer.stream(read):
            if not events or events[-1] != ["work", tensor]:
                events.append(["work", tensor])
    transfer.close()
    dist.destroy_process_group()
    return events if rank == 1 else []


def groups() -> dict[str, Any]:
    """Every pair of ranks and every set of three; of these one is a group already."""
    dist.init_process_group("gloo")
    world = range(dist.get_world_size())
    known = frozenset({0, 1, 2})
    group = dist.new_group(sorted(known))
    sets = [*itertools.permutations(world, 2), *itertools.permutations(world, 3)]
    tensors = {f"t{i}": TensorInfo((32,), "float32", 4) for i in range(len(sets))}
    near, groups = Neighbourhoods.alike(len(world)), KnownGroups([[sorted(known)]])
    trees = [
        Forest(ranks[:1], ranks[1:], near, groups, [0] * len(world)).trees[0] for ranks in sets
    ]
    moves = tuple(
        Move(name, ((0, 32),), tree, 128) for name, tree in zip(tensors, trees, strict=True)
    )
    objects.start()
    before = len(dist.distributed_c10d._world.pg_map)
    given = {known: group}
    transfer = Transfer(Plan(moves), tensors, bucket_bytes=1024, groups=given, device="cpu")
    made = len(dist.distributed_c10d._world.pg_map) - before
    received = 0

    def number_of(tensor: str, box: Box) -> torch.Tensor:
        return torch.full(extent(box), int(tensor[1:]) + 0.5)

    for _ in range(2):
        for tensor, pieces in transfer.stream(number_of):
            for _, data in pieces:
                assert torch.all(data == int(tensor[1:]) + 0.5)
                received += data.nbytes
    assert made == len(dist.distributed_c10d._world.pg_map) - before
    spoken_to = sorted(transfer.stats.peer_ranks)
    transfer.close()
    left = len(dist.distributed_c10d._world.pg_map) - before
    rank = dist.get_rank()
    of_ranks = connections(trees, groups.sets, len(world))
    planned = 2 * Plan(moves).received_bytes(rank)
    dist.destroy_process_group()
    return {
        "as_planned": transfer.connections == of_ranks[rank],
        "num_known_groups": len(of_ranks[rank].groups),
        "peers": sorted(of_ranks[rank].peers),
        "num_groups": transfer.num_groups,
        "made_here": made,
        "left": left,
        "received": received,
        "planned": planned,
        "spoken_to": spoken_to,
    }
