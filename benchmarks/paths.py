"""Our paths of weights to a rank's destination, and a copy in memory as the lower bound.

A path's `run` is collective over the world and ends when this rank's destination is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.destination import Destination
from mcore_rl.hybrid_engine.transfer.gather import GatherPath
from mcore_rl.hybrid_engine.vllm.sliced_tensor import pieces_of
from mcore_rl.hybrid_engine.weight_stream import Holdings
from mcore_rl.model.tensors import TensorInfo
from mcore_rl.trainer.job import Job

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """Inputs of all paths of a case, on this rank."""

    job: Job
    shards: Any  # ModelShards
    chunks: list[torch.nn.Module]
    stream: Any  # WeightStream: the plan between what is held and what is needed
    engine: Any  # VLLMModelOnly
    weights: Weights  # the checkpoint in memory, shared by all ranks
    bucket_bytes: int

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self.stream.tensors

    @property
    def holdings(self) -> Holdings:
        return self.stream.holdings


class Path(Protocol):
    """One path; `destination` is None if it fills the engine."""

    name: str
    note: str  # for the table
    destination: Destination | None

    def prepare(self) -> None:
        """Prepare a run; not measured. Collective."""

    def run(self) -> None:
        """Move the weights; measured. Collective."""

    def finish(self) -> None:
        """Clean up after a run; not measured. Collective."""


class OnDestination:
    """Base of the paths that fill a destination."""

    name: str
    note = ""

    def __init__(self, destination: Destination) -> None:
        self.destination: Destination | None = destination
        self._target = destination

    def prepare(self) -> None:
        """Do nothing."""

    finish = prepare


class Ours(OnDestination):
    """The stream that feeds vLLM: parts that a rank lacks arrive in buckets."""

    name = "ours"

    def __init__(self, setting: Setting, destination: Destination) -> None:
        super().__init__(destination)
        self._stream = setting.stream

    def run(self) -> None:
        for name, part in self._stream.weights():
            self._target.fill(name, pieces_of(part))


class Gather(OnDestination):
    """Every whole tensor to every rank, which keeps the parts that it needs."""

    name = "gather"

    def __init__(self, setting: Setting, destination: Destination) -> None:
        super().__init__(destination)
        self._path = GatherPath(
            setting.tensors,
            order=setting.stream.order,
            have=setting.holdings.have,
            wanted=destination.names,
            bucket_bytes=setting.bucket_bytes,
            device=setting.shards.device,
        )
        self._read = setting.stream.read

    def run(self) -> None:
        for name, tensor in self._path.weights(self._read):
            self._target.fill_whole(name, tensor)


class Memcpy(OnDestination):
    """A copy of W' within this rank's memory: no hand-over can be faster."""

    name = "memcpy"

    def __init__(self, setting: Setting, destination: Destination) -> None:
        super().__init__(destination)
        self._sources = [
            setting.weights[name][tuple(slice(*r) for r in box)].clone()
            for name in destination.names
            for box in destination.boxes(name)
        ]

    def run(self) -> None:
        for source, target in zip(self._sources, self._target.parts(), strict=True):
            target.copy_(source)


class Switch:
    """The complete switch by the sharding manager: transfer, vLLM's loaders, verification."""

    destination = None

    def __init__(self, manager: Any, name: str, attest: str) -> None:
        self.name, self._manager = name, manager
        self.note = f"with `--rl-attest {attest}`"
        self._stack = contextlib.ExitStack()

    def prepare(self) -> None:
        """Do nothing: the engine sleeps."""

    def run(self) -> None:
        self._stack.enter_context(self._manager)

    def finish(self) -> None:
        self._stack.close()


class VllmLoad:
    """vLLM's own reload of all tensors that this rank needs in part, from whole ones in memory."""

    name = "vllm_load"
    note = ""
    destination = None

    def __init__(self, setting: Setting) -> None:
        self._engine = setting.engine
        stream = setting.stream
        self._weights = [(n, setting.weights[n]) for n in stream.order if stream.need[n]]

    def prepare(self) -> None:
        self._engine.wake_weights()

    def run(self) -> None:
        self._engine._worker.reload_weights(weights_iterator=iter(self._weights))

    def finish(self) -> None:
        self._engine.wake_kv_cache()
        self._engine.sleep()
