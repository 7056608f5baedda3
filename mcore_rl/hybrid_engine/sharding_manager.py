"""The switch between training and rollout: `with manager:` is rollout mode.

    enter  train -> rollout: save the training RNG, offload gradients and optimizer state, wake the
           engine's weight memory, move exactly the slices that this rank's vLLM shard needs and
           does not hold, attest that they arrived, offload the parameters, wake the KV cache, seed
           the rollout RNG
    exit   rollout -> train: free the engine's memory, bring back what was offloaded, restore the
           training RNG bit for bit

Pipeline parallelism becomes extra data parallelism: the ranks of a stage form as many engines as
fit, and each rank receives the other stages' slices. Experts stay on their EP rank. With equal TP
and EP every message therefore stays inside a PP group. This follows from planning over slices and
is not a rule of its own: the same code plans other layouts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch.distributed as dist

from mcore_rl.common.spans import STAGE, span
from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.memory.offload import Offloader
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.switch_report import (
    TO_ROLLOUT,
    TO_TRAIN,
    Hook,
    ReshardReport,
)
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions, WeightStream
from mcore_rl.megatron.carried import CarriedTensors
from mcore_rl.megatron.rng import RngState
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.model.tensors import TensorInfo

logger = logging.getLogger(__name__)


class MegatronVLLMShardingManager:
    """Hand-over of a Megatron model's weights to the vLLM engines in the same processes.

    Constructing, entering and leaving are collective over the world. The constructor reads no
    weights and puts the engine to sleep. Entering twice without leaving raises RuntimeError.
    `weight_version` counts the hand-overs from 1. `on_reshard_start` and `on_reshard_end` list
    functions that this rank calls before and after each direction. With `adapters` (see `HandOver`)
    a sleeping engine's weights are in host memory; else nothing of them is kept.
    """

    def __init__(
        self,
        shards: ModelShards,
        engine: VLLMEngine,
        tensors: Mapping[str, TensorInfo],
        train_layout: TrainLayout,
        rollout_layout: RolloutLayout,
        options: HandOverOptions,
        *,
        offloader: Offloader | None = None,
        canary: Canary | None = None,
        carried: CarriedTensors | None = None,
        adapters: Mapping[str, TensorInfo] | None = None,
    ) -> None:
        self._engine, self._rollout, self._seed = engine, rollout_layout, options.seed
        self._rank = dist.get_rank()
        self._hand_over = HandOver(
            tensors,
            train_layout,
            options,
            shards=shards,
            engine=engine,
            shape=shards.shape,
            device=shards.device,
            canary=canary,
            carried=carried,
            adapters=adapters,
            room=self._room_for_repetition,
        )
        engine.sleep()  # training comes first
        self._offloader = offloader or Offloader(dict, frozenset(), device=shards.device)
        self._rng: RngState | None = None
        self.weight_version = 0
        self.on_reshard_start: list[Hook] = []
        self.on_reshard_end: list[Hook] = []

    @property
    def stream(self) -> WeightStream:
        """What every hand-over streams."""
        return self._hand_over.stream

    @contextlib.contextmanager
    def _room_for_repetition(self) -> Iterator[None]:
        """Bring the parameters back to be read again; the KV cache may occupy their memory."""
        self._sleep()
        self._engine.wake_weights()
        if "parameters" in self._offloader.offloaded:
            self._offloader.onload("parameters")
        yield
        self._offloader.offload("parameters")
        self._engine.wake_kv_cache()

    def _sleep(self) -> None:
        self._engine.sleep(keep_weights=self._hand_over.keeps_weights)

    @span("reshard_to_rollout", STAGE)
    def __enter__(self) -> MegatronVLLMShardingManager:
        if self._rng is not None:
            raise RuntimeError(f"rank {self._rank}: rollout mode was entered twice")
        self._rng = RngState.capture()
        self.weight_version += 1
        begin = ReshardReport(TO_ROLLOUT, self.weight_version, 0.0)
        _call(self.on_reshard_start, begin)
        self._hand_over.score_canary(self.weight_version)
        started = time.perf_counter()
        with contextlib.ExitStack() as undo:
            # A failed hand-over must not leave training without its state.
            undo.callback(self._bring_training_back)
            self._offloader.offload("gradients", "optimizer")  # before the engine allocates
            self._hand_over.move(self.weight_version, wake=self._engine.wake_weights)
            self._offloader.offload("parameters")  # after they are read, before the KV cache wakes
            self._engine.wake_kv_cache()
            seconds = time.perf_counter() - started
            self._hand_over.check_canary()
            undo.pop_all()
        seed_sampling(self._engine, self._rollout, self._seed, self.weight_version)
        offloaded = self._offloader.stats.of(self._offloader.offloaded)
        _call(self.on_reshard_end, replace(self._hand_over.report(seconds), offloaded=offloaded))
        return self

    def __exit__(self, failed: type[BaseException] | None, *exc: object) -> None:
        assert self._rng is not None, "left rollout mode without entering it"
        try:
            self._leave()
        except Exception as error:
            if failed is None:
                raise
            # Report the first failure, not that its requests keep the engine from sleeping.
            logger.debug("rank %d: after a failure in rollout mode: %s", self._rank, error)

    @span("reshard_to_train", STAGE)
    def _leave(self) -> None:
        _call(self.on_reshard_start, ReshardReport(TO_TRAIN, self.weight_version, 0.0))
        started = time.perf_counter()
        try:
            self._sleep()  # first: it holds the memory that training needs
        finally:
            self._bring_training_back()
        report = ReshardReport(
            TO_TRAIN, self.weight_version, duration_seconds=time.perf_counter() - started
        )
        _call(self.on_reshard_end, report)

    def prefetch(self) -> int:
        """Begin to bring back what training had offloaded; see `Offloader.prefetch`.

        Called in rollout mode, when few responses are still being generated. Local to this rank.
        """
        return self._offloader.prefetch() if self._offloader.offloaded else 0

    def _bring_training_back(self) -> None:
        assert self._rng is not None
        if self._offloader.offloaded:
            self._offloader.onload()
        self._rng.restore()
        self._rng = None


def seed_sampling(
    engine: VLLMEngine, layout: RolloutLayout, seed: int, weight_version: int
) -> None:
    """Seed sampling by TP group and weight version: the ranks of a group draw equal tokens. On the
    ranks of engines, whose world `layout` divides."""
    entropy = [seed, weight_version, layout.tp_group_index(dist.get_rank())]
    engine.seed_sampling(int(np.random.SeedSequence(entropy).generate_state(1)[0]))


def _call(hooks: list[Hook], report: ReshardReport) -> None:
    for hook in hooks:
        hook(report)
