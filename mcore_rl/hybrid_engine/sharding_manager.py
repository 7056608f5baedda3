"""The switch between training and rollout: `with manager:` is rollout mode.

    enter  train -> rollout: save the training RNG, offload gradients and optimizer state, wake the
           engine's weight memory, move exactly the slices that this rank's vLLM shard needs and
           does not hold, prove that they arrived, offload the parameters, wake the KV cache, seed
           the rollout RNG
    exit   rollout -> train: free the engine's memory, bring back what was offloaded, restore the
           training RNG bit for bit

Pipeline parallelism becomes extra data parallelism: the ranks of one stage, as many engines as fit,
each receive the other stages' slices. Experts stay on their EP rank. Under equal TP and EP every
message therefore stays inside a PP group, which is found by planning over slices and not by rule:
other layouts give other moves through the same code.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl import megatron_adapter
from mcore_rl.hybrid_engine.attest import FULL, OFF, Attestor
from mcore_rl.hybrid_engine.boxes import Box, intersect, uncovered, volume
from mcore_rl.hybrid_engine.canary import Canary
from mcore_rl.hybrid_engine.gather import GatherPath
from mcore_rl.hybrid_engine.holdings import Holdings, exchange
from mcore_rl.hybrid_engine.layout import RolloutLayout, TrainLayout
from mcore_rl.hybrid_engine.memory import PeakMemory
from mcore_rl.hybrid_engine.model_shards import ModelShards
from mcore_rl.hybrid_engine.offload import Offloader
from mcore_rl.hybrid_engine.plan import Neighbourhoods, TensorInfo, make_plan
from mcore_rl.hybrid_engine.proof import Proof
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
    saved_bytes: int = 0  # by a narrower dtype and by sending changes only
    hidden_share: float = 1.0  # of the time that transfers took, during which the engine loaded
    lower_bound_bytes: int = 0  # the least, over all placements
    peak_extra_bytes: int = 0  # of the process, above where it stood before
    num_tensors: int = 0
    attested: bool = False  # proved to have arrived; a hand-over that is not raises
    attest_seconds: float = 0.0  # of this rank's hashing
    repeated: bool = False  # by the plain gather, whose bytes are in `received_bytes` too


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
        offloader: Offloader | None = None,
        dtype: str = "checkpoint",
        delta: bool = False,
        full_every: int = 20,
        attest: str = FULL,
        canary: Canary | None = None,
    ) -> None:
        self._shards, self._engine = shards, engine
        self._ranks_per_node = ranks_per_node or train_layout.world_size
        self._layout, self._rollout = train_layout, rollout_layout
        self._seed, self._bucket_bytes = seed, bucket_bytes
        self._delta, self._full_every = delta, full_every
        self._rank = dist.get_rank()
        served = _served(tensors, shards)
        self._tensors = travelling_as(served, dtype)
        self._narrowed = {
            name: served[name].itemsize - info.itemsize for name, info in self._tensors.items()
        }
        self._order = layer_order(self._tensors)
        self._need = engine.learn_needs(
            {name: (i.shape, getattr(torch, i.dtype)) for name, i in self._tensors.items()}
        )
        engine.sleep()  # training comes first
        holdings = exchange({name: shards.boxes(name) for name in self._tensors}, self._need)
        self._transfer = self._plan(holdings)
        self.lower_bound_bytes = holdings.lower_bound_bytes(self._rank, self._tensors)
        self._gather = GatherPath(
            self._tensors,
            order=self._order,
            have=holdings.have,
            wanted=[name for name, boxes in self._need.items() if boxes],
            bucket_bytes=bucket_bytes,
            device=shards.device,
        )
        self._proof = Proof(
            engine,
            attestor=self._attestor(attest, holdings),
            gather=self._gather,
            canary=canary,
            on_repeat=self._before_repetition,
        )
        self._offloader = offloader
        self._rng: RngState | None = None
        self.weight_version = 0
        self.on_reshard_start: list[Hook] = []
        self.on_reshard_end: list[Hook] = []

    def _before_repetition(self) -> None:
        """The parameters are read once more, and nothing is built on what arrived before."""
        self._transfer.invalidate()
        if self._offloader is not None and "parameters" in self._offloader.away:
            self._offloader.onload()

    def _attestor(self, mode: str, holdings: Holdings) -> Attestor | None:
        if mode == OFF:
            return None
        return Attestor(
            self._tensors,
            holdings.have,
            holdings.need,
            rank=self._rank,
            mode=mode,
            seed=self._seed,
            device=self._shards.device,
        )

    def _plan(self, holdings: Holdings) -> Transfer:
        """The transfer between what all ranks have and need: a question of the layout alone."""
        plan = make_plan(
            self._tensors,
            order=self._order,
            have=holdings.have,
            need=holdings.need,
            near=self._near(),
        )
        groups = {frozenset(self._layout.pp_group(r)) for r in range(self._layout.world_size)}
        pp_group = megatron_adapter.model_parallel_groups()["pp"]
        transfer = Transfer(
            plan,
            self._tensors,
            bucket_bytes=self._bucket_bytes,
            delta=self._delta,
            full_every=self._full_every,
            groups={ranks: pp_group for ranks in groups},
            device=self._shards.device,
        )
        self._saved_by_dtype = sum(
            self._narrowed[move.tensor] * volume(move.box)
            for move in plan.moves
            if self._rank in move.receivers
        )
        return transfer

    def _near(self) -> Neighbourhoods:
        ranks = range(self._layout.world_size)
        return Neighbourhoods(
            node=tuple(rank // self._ranks_per_node for rank in ranks),
            pipeline=tuple(self._layout.pp_group(rank)[0] for rank in ranks),
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, stand-in of full shape with some of this rank's slices), by layer.

        Collective; must be exhausted. Only tensors of which this rank needs anything are given, one
        after the other, each in one or more parts: what lies here already, then what each bucket
        brings. A part is valid until the next one is asked for.
        """
        arriving = self._transfer.stream(self._read, partial=True, keep=False)
        ahead = next(arriving, None)
        for name in self._order:
            own = self._own_pieces(name)
            if own:
                yield name, self._part(name, own)
            while ahead is not None and ahead[0] == name:
                yield name, self._part(name, ahead[1])
                ahead = next(arriving, None)
        assert ahead is None, f"{ahead[0]} arrived out of order"

    def _own_pieces(self, name: str) -> list[tuple[Box, torch.Tensor]]:
        """What this rank needs and holds already, each element once."""
        found: list[tuple[Box, torch.Tensor]] = []
        for needed in self._need[name]:
            for held in self._shards.boxes(name):
                shared = intersect(needed, held)
                rest = [] if shared is None else uncovered(shared, [box for box, _ in found])
                found.extend((box, self._read(name, box)) for box in rest)
        return found

    def _part(self, name: str, pieces: list[tuple[Box, torch.Tensor]]) -> SlicedTensor:
        info = self._tensors[name]
        return SlicedTensor(name, info.shape, getattr(torch, info.dtype), pieces)

    def _read(self, name: str, box: Box) -> torch.Tensor:
        """A slice of the training weights, in the dtype in which it travels."""
        return self._shards.read(name, box).to(getattr(torch, self._tensors[name].dtype))

    def __enter__(self) -> MegatronVLLMShardingManager:
        if self._rng is not None:
            raise RuntimeError(f"rank {self._rank}: rollout mode was entered twice")
        self._rng = RngState.capture()
        self.weight_version += 1
        begin = ReshardReport(TO_ROLLOUT, self.weight_version, 0.0)
        _call(self.on_reshard_start, begin)
        self._proof.score_canary(self.weight_version)  # while the parameters are in place
        started = time.perf_counter()
        with contextlib.ExitStack() as undo:
            # A hand-over that fails must not leave training without its state.
            undo.callback(self._bring_training_back)
            if self._offloader is not None:  # before the engine wants the memory
                self._offloader.offload("gradients", "optimizer")
            with PeakMemory() as peak:
                self._proof.begin(self.weight_version, self._read)
                self._engine.wake_weights()
                attestation = self._proof.reload(self.weights(), self._read)
            if self._offloader is not None:  # they were read until here
                self._offloader.offload("parameters")
            self._engine.wake_kv_cache()
            seconds = time.perf_counter() - started
            self._proof.check_canary(self._read)
            undo.pop_all()
        self._seed_rollout()
        gathered = self._gather.received_bytes if self._proof.repeated else 0
        report = ReshardReport(
            TO_ROLLOUT,
            self.weight_version,
            duration_seconds=seconds,
            received_bytes=self._transfer.stats.received_bytes + gathered,
            saved_bytes=self._transfer.stats.saved_bytes + self._saved_by_dtype,
            hidden_share=self._transfer.stats.hidden_share,
            lower_bound_bytes=self.lower_bound_bytes,
            peak_extra_bytes=peak.extra_bytes,
            num_tensors=sum(bool(boxes) for boxes in self._need.values()),
            attested=attestation is not None,  # not to be proved raises
            attest_seconds=0.0 if attestation is None else attestation.seconds,
            repeated=self._proof.repeated,
        )
        _call(self.on_reshard_end, report)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._rng is not None, "left rollout mode without entering it"
        _call(self.on_reshard_start, ReshardReport(TO_TRAIN, self.weight_version, 0.0))
        started = time.perf_counter()
        try:
            self._engine.sleep()  # first: it holds the memory that training needs
        finally:
            self._bring_training_back()
        report = ReshardReport(
            TO_TRAIN, self.weight_version, duration_seconds=time.perf_counter() - started
        )
        _call(self.on_reshard_end, report)

    def prefetch(self) -> int:
        """Begin to bring back what training had offloaded; see `Offloader.prefetch`.

        In rollout mode, when few responses are still being generated. Local to this rank.
        """
        return 0 if self._offloader is None else self._offloader.prefetch()

    def _bring_training_back(self) -> None:
        assert self._rng is not None
        if self._offloader is not None and self._offloader.away:
            self._offloader.onload()
        self._rng.restore()
        self._rng = None

    def _seed_rollout(self) -> None:
        """All ranks of a TP group draw the same tokens, different groups and versions others."""
        group = self._rollout.tp_group_index(self._rank)
        entropy = [self._seed, self.weight_version, group]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        self._engine.seed_sampling(seed)


def _served(tensors: Mapping[str, TensorInfo], shards: ModelShards) -> dict[str, TensorInfo]:
    """The tensors that travel: all that training holds, on whichever rank.

    A checkpoint of tied embeddings may hold a copy of the embedding as lm_head; training has one.
    """
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, shards.tensors())
    trained = set().union(*held)
    return {name: info for name, info in tensors.items() if name in trained}


def travelling_as(tensors: Mapping[str, TensorInfo], dtype: str) -> dict[str, TensorInfo]:
    """`tensors` with the dtype in which they travel: "checkpoint", "bf16" or "fp16".

    What is float32 in a checkpoint of another dtype stays so: a router's bias decides between
    experts by differences that a narrower dtype loses.
    """
    if dtype == "checkpoint":
        return dict(tensors)
    sizes = Counter()
    for info in tensors.values():
        sizes[info.dtype] += info.num_bytes
    common = max(sizes, key=lambda name: sizes[name])
    narrow = {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    return {
        name: replace(info, dtype=narrow, itemsize=2) if info.dtype == common else info
        for name, info in tensors.items()
    }


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
        f"saved={report.saved_bytes / 1e9:.6f}GB hidden={100 * report.hidden_share:.0f}% "
        f"peak={report.peak_extra_bytes / 1e9:.6f}GB "
        f"attested={'yes' if report.attested else 'no'}"
        f"{' repeated=yes' if report.repeated else ''}{share}"
    )
