"""The switch between training and rollout: `with manager:` is rollout mode.

    enter  train -> rollout: save the training RNG, wake the engine's weight memory, move exactly
    the
           slices that this rank's vLLM shard needs and does not hold, wake the KV cache, seed the
           rollout RNG
    exit   rollout -> train: free the engine's memory, restore the training RNG bit for bit

Pipeline parallelism becomes extra data parallelism: the ranks of one stage, as many engines as fit,
each receive the other stages' slices. Experts stay on their EP rank. Under equal TP and EP every
message therefore stays inside a PP group, which is found by planning over slices and not by rule:
other layouts give other moves through the same code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.hybrid_engine.boxes import Box, uncovered, volume
from mcore_rl.hybrid_engine.layout import RolloutLayout, TrainLayout
from mcore_rl.hybrid_engine.memory import PeakMemory
from mcore_rl.hybrid_engine.model_shards import ModelShards
from mcore_rl.hybrid_engine.needs import learn_needs
from mcore_rl.hybrid_engine.plan import Neighbourhoods, TensorInfo, make_plan
from mcore_rl.hybrid_engine.rng import RngState
from mcore_rl.hybrid_engine.sliced_tensor import SlicedTensor
from mcore_rl.hybrid_engine.transfer import Transfer
from mcore_rl.hybrid_engine.vllm_engine import VLLMEngine
from mcore_rl.hybrid_engine.weight_map import layer_order

logger = logging.getLogger(__name__)

TO_ROLLOUT, TO_TRAIN = "train_to_rollout", "rollout_to_train"


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """One direction of one switch, as this rank saw it. Bytes are of this rank."""

    direction: str  # TO_ROLLOUT or TO_TRAIN
    weight_version: int
    duration_seconds: float
    received_bytes: int = 0  # counted at the calls
    lower_bound_bytes: int = 0  # what the engine needs and this rank does not hold
    peak_extra_bytes: int = 0  # of the process, above where it stood before
    num_tensors: int = 0


Hook = Callable[[ReshardReport], None]


class MegatronVLLMShardingManager:
    """Hands the weights of a Megatron model to the vLLM engines in the same processes.

    Constructing, entering and leaving are collective over the world. Re-entering without leaving is
    an error. `weight_version` counts the hand-overs, the first is 1. `on_reshard_start` and
    `on_reshard_end` are lists of functions called on this rank before and after either direction.
    """

    def __init__(
        self,
        shards: ModelShards,
        engine: VLLMEngine,
        tensors: Mapping[str, TensorInfo],
        train_layout: TrainLayout,
        rollout_layout: RolloutLayout,
        *,
        seed: int,
        bucket_bytes: int = 512 << 20,
        ranks_per_node: int | None = None,
    ) -> None:
        self._shards, self._engine = shards, engine
        self._ranks_per_node = ranks_per_node or train_layout.world_size
        self._layout, self._rollout = train_layout, rollout_layout
        self._seed, self._bucket_bytes = seed, bucket_bytes
        self._rank = dist.get_rank()
        self._tensors = _served(tensors, shards, engine)
        self._order = layer_order(self._tensors)
        self._need = learn_needs(
            engine,
            {name: (i.shape, getattr(torch, i.dtype)) for name, i in self._tensors.items()},
        )
        engine.sleep()  # training comes first
        self._transfer, self.lower_bound_bytes = self._plan()
        self._rng: RngState | None = None
        self.weight_version = 0
        self.on_reshard_start: list[Hook] = []
        self.on_reshard_end: list[Hook] = []

    def _plan(self) -> tuple[Transfer, int]:
        """Exchange holdings and needs once; they depend on the layout alone."""
        have = {name: self._shards.boxes(name) for name in self._tensors}
        boxes: list[Any] = [None] * self._layout.world_size
        dist.all_gather_object(boxes, (have, self._need))
        plan = make_plan(
            self._tensors,
            order=self._order,
            have=[held for held, _ in boxes],
            need=[needed for _, needed in boxes],
            near=self._near(),
        )
        groups = {frozenset(self._layout.pp_group(r)) for r in range(self._layout.world_size)}
        pp_group = megatron_adapter.model_parallel_groups()["pp"]
        transfer = Transfer(
            plan,
            self._tensors,
            bucket_bytes=self._bucket_bytes,
            groups={ranks: pp_group for ranks in groups},
            device=self._shards.device,
        )
        return transfer, lower_bound_bytes(self._tensors, have, self._need)

    def _near(self) -> Neighbourhoods:
        ranks = range(self._layout.world_size)
        return Neighbourhoods(
            node=tuple(rank // self._ranks_per_node for rank in ranks),
            pipeline=tuple(self._layout.pp_group(rank)[0] for rank in ranks),
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, stand-in of full shape holding this rank's slices), ordered by layer.

        Collective; must be exhausted. Only tensors of which this rank needs anything are given.
        """
        arriving = self._transfer.stream(self._shards.read)
        ahead = next(arriving, None)
        for name in self._order:
            received: list[tuple[Box, torch.Tensor]] = []
            if ahead is not None and ahead[0] == name:
                received = ahead[1]
                ahead = next(arriving, None)
            if not self._need[name]:
                continue
            info = self._tensors[name]
            own = [(box, self._shards.read(name, box)) for box in self._shards.boxes(name)]
            pieces = [*own, *received]
            yield name, SlicedTensor(name, info.shape, getattr(torch, info.dtype), pieces)
        assert ahead is None, f"{ahead[0]} arrived out of order"

    def __enter__(self) -> MegatronVLLMShardingManager:
        if self._rng is not None:
            raise RuntimeError(f"rank {self._rank}: rollout mode was entered twice")
        self._rng = RngState.capture()
        self.weight_version += 1
        begin = ReshardReport(TO_ROLLOUT, self.weight_version, 0.0)
        _call(self.on_reshard_start, begin)
        started = time.perf_counter()
        with PeakMemory() as peak:
            self._engine.wake_weights()
            self._engine.reload(self.weights())
            self._engine.wake_kv_cache()
        self._seed_rollout()
        report = ReshardReport(
            TO_ROLLOUT,
            self.weight_version,
            duration_seconds=time.perf_counter() - started,
            received_bytes=self._transfer.stats.received_bytes,
            lower_bound_bytes=self.lower_bound_bytes,
            peak_extra_bytes=peak.extra_bytes,
            num_tensors=sum(bool(boxes) for boxes in self._need.values()),
        )
        _call(self.on_reshard_end, report)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._rng is not None, "left rollout mode without entering it"
        _call(self.on_reshard_start, ReshardReport(TO_TRAIN, self.weight_version, 0.0))
        started = time.perf_counter()
        self._engine.sleep()
        self._rng.restore()
        self._rng = None
        report = ReshardReport(
            TO_TRAIN, self.weight_version, duration_seconds=time.perf_counter() - started
        )
        _call(self.on_reshard_end, report)

    def _seed_rollout(self) -> None:
        """All ranks of an engine draw the same tokens, different engines and versions others."""
        engine = self._rollout.engine_index(self._rank)
        entropy = [self._seed, self.weight_version, engine]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        self._engine.seed_sampling(seed)


def lower_bound_bytes(
    tensors: Mapping[str, TensorInfo],
    have: Mapping[str, tuple[Box, ...]],
    need: Mapping[str, tuple[Box, ...]],
) -> int:
    """The least a rank can receive where it is placed: what it needs and does not hold."""
    return sum(
        volume(part) * tensors[name].itemsize
        for name, boxes in need.items()
        for box in boxes
        for part in uncovered(box, have.get(name, ()))
    )


def _served(
    tensors: Mapping[str, TensorInfo], shards: ModelShards, engine: VLLMEngine
) -> dict[str, TensorInfo]:
    """The tensors that travel: all that training holds, on whichever rank.

    A checkpoint of tied embeddings may hold a copy of the embedding as lm_head; training has one.
    """
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, shards.tensors())
    trained = set().union(*held)
    return {name: info for name, info in tensors.items() if name in trained}


def _call(hooks: list[Hook], report: ReshardReport) -> None:
    for hook in hooks:
        hook(report)


def log_reshard(report: ReshardReport, share_of_step: float | None = None) -> str:
    """The `[Reshard]` line of a report."""
    share = "" if share_of_step is None else f" share_of_step={100 * share_of_step:.1f}%"
    return (
        f"[Reshard] direction={report.direction} duration={report.duration_seconds:.3f}s "
        f"received={report.received_bytes / 1e9:.6f}GB "
        f"lower_bound={report.lower_bound_bytes / 1e9:.6f}GB "
        f"peak={report.peak_extra_bytes / 1e9:.6f}GB{share}"
    )
