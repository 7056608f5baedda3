"""Our ways to bring the weights to a rank's destination, and the copy that nobody can beat.

A path's `run` is collective over the world and ends when this rank's destination holds everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.destination import Destination
from mcore_rl import megatron_adapter
from mcore_rl.hybrid_engine.boxes import Box, intersect, uncovered
from mcore_rl.hybrid_engine.gather import GatherPath
from mcore_rl.hybrid_engine.holdings import Holdings
from mcore_rl.hybrid_engine.plan import Neighbourhoods, TensorInfo, make_plan
from mcore_rl.hybrid_engine.transfer import Transfer
from mcore_rl.hybrid_engine.weight_map import layer_order
from mcore_rl.startup import Job

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all paths of one case work on, on this rank."""

    job: Job
    shards: Any  # ModelShards
    chunks: list[torch.nn.Module]
    tensors: Mapping[str, TensorInfo]
    holdings: Holdings
    engine: Any  # VLLMModelOnly
    weights: Weights  # the checkpoint in memory, shared by all ranks
    bucket_bytes: int

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def order(self) -> list[str]:
        return layer_order(self.tensors)


class Path(Protocol):
    """One way; `destination` is None where it fills the engine."""

    name: str
    destination: Destination | None

    def prepare(self) -> None:
        """What precedes a run and is not measured. Collective."""

    def run(self) -> None:
        """What is measured. Collective."""

    def finish(self) -> None:
        """What follows a run and is not measured. Collective."""


class OnDestination:
    """Base of the paths that fill a destination."""

    name: str

    def __init__(self, destination: Destination) -> None:
        self.destination: Destination | None = destination
        self._target = destination

    def prepare(self) -> None:
        """Nothing."""

    finish = prepare


class Ours(OnDestination):
    """The planned transfer: what a rank holds is copied, what it lacks arrives, bucket by bucket."""

    name = "ours"

    def __init__(self, setting: Setting, destination: Destination) -> None:
        super().__init__(destination)
        layout, holdings = setting.job.train_layout, setting.holdings
        ranks = range(layout.world_size)
        plan = make_plan(
            setting.tensors,
            order=setting.order,
            have=holdings.have,
            need=holdings.need,
            near=Neighbourhoods(
                node=(0,) * layout.world_size,
                pipeline=tuple(layout.pp_group(rank)[0] for rank in ranks),
            ),
        )
        pp_group = megatron_adapter.model_parallel_groups()["pp"]
        self._transfer = Transfer(
            plan,
            setting.tensors,
            bucket_bytes=setting.bucket_bytes,
            groups={frozenset(layout.pp_group(rank)): pp_group for rank in ranks},
        )
        self._read = setting.shards.read
        self._own = list(_own_pieces(setting))

    def run(self) -> None:
        # The stream starts the first two buckets before it gives the first tensor.
        arriving = self._transfer.stream(self._read, partial=True, keep=False)
        ahead = next(arriving, None)
        for name, box in self._own:
            self._target.fill(name, [(box, self._read(name, box))])
        while ahead is not None:
            self._target.fill(*ahead)
            ahead = next(arriving, None)


def _own_pieces(setting: Setting) -> Iterator[tuple[str, Box]]:
    """What this rank needs and holds already, each element once."""
    for name, boxes in setting.holdings.need[setting.rank].items():
        for needed in boxes:
            found: list[Box] = []
            for held in setting.shards.boxes(name):
                shared = intersect(needed, held)
                if shared is not None:
                    found.extend(uncovered(shared, found))
            yield from ((name, box) for box in found)


class Gather(OnDestination):
    """Every tensor, whole, to every rank; each keeps what it needs."""

    name = "gather"

    def __init__(self, setting: Setting, destination: Destination) -> None:
        super().__init__(destination)
        self._path = GatherPath(
            setting.tensors,
            order=setting.order,
            have=setting.holdings.have,
            wanted=destination.names,
            bucket_bytes=setting.bucket_bytes,
        )
        self._read = setting.shards.read

    def run(self) -> None:
        for name, tensor in self._path.weights(self._read):
            self._target.fill_whole(name, tensor)


class Memcpy(OnDestination):
    """W' from one place in this rank's memory to another: no hand-over can be faster."""

    name = "memcpy"

    def __init__(self, setting: Setting, destination: Destination) -> None:
        super().__init__(destination)
        self._pairs = [
            (name, box, setting.weights[name][tuple(slice(*r) for r in box)].clone())
            for name in destination.names
            for box in destination.boxes(name)
        ]

    def run(self) -> None:
        for (_, _, source), target in zip(self._pairs, self._target.parts(), strict=True):
            target.copy_(source)


class Switch:
    """The whole switch into vLLM by the sharding manager: needs, transfer, vLLM's loaders."""

    name = "switch"
    destination = None

    def __init__(self, setting: Setting, manager: Any) -> None:
        self._manager = manager
        self._stack = contextlib.ExitStack()

    def prepare(self) -> None:
        """Nothing: the engine sleeps."""

    def run(self) -> None:
        self._stack.enter_context(self._manager)

    def finish(self) -> None:
        self._stack.close()


class VllmLoad:
    """vLLM's own reload of the tensors of which this rank needs anything, whole and in memory."""

    name = "vllm_load"
    destination = None

    def __init__(self, setting: Setting) -> None:
        self._engine = setting.engine
        needed = setting.holdings.need[setting.rank]
        self._weights = [(name, setting.weights[name]) for name in setting.order if name in needed]

    def prepare(self) -> None:
        self._engine.wake_weights()

    def run(self) -> None:
        self._engine._worker.reload_weights(weights_iterator=iter(self._weights))

    def finish(self) -> None:
        self._engine.wake_kv_cache()
        self._engine.sleep()
