"""The hand-over: one model's weights from the ranks that train it to their engines, with proof.

    move    hash what Megatron holds -> stream the slices into the engines -> attest them
    check   let both sides score the canaries, if they are due

A rank has shards of the model and an engine (colocated), only shards (a trainer), or only an
engine. Who sleeps and what is offloaded meanwhile is the caller's, see `sharding_manager`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch

from mcore_rl.hybrid_engine.memory.usage import PeakMemory
from mcore_rl.hybrid_engine.proof.attest import OFF, Attestation, Attestor
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.proof.proof import Proof
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, ReshardReport
from mcore_rl.hybrid_engine.transfer.gather import GatherPath
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld, World
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions, WeightStream
from mcore_rl.megatron.carried import CarriedTensors
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.tensors import TensorInfo


class HandOver:
    """The hand-overs of one model. Constructing and all methods are collective over the world.

    `world` is by default the job's own, in which every rank has `shards` and an `engine`. In a
    joined world the trainers come first and have only shards, and the engines' ranks follow; all
    ranks named in errors are ranks of this world. `tensors` are the checkpoint's, `shape` is the
    model's, `device` is where messages are built. `canary` and `carried` are given on all ranks or
    on none, `carried` if engines draft by MTP layers that are not trained. `room` is that of
    `Proof`.

    On a failure every rank of the world raises, except for a process that is gone, which ends the
    calls of the others with an error. The engines then refuse to generate until a `move` succeeds.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        train_layout: TrainLayout,
        options: HandOverOptions,
        *,
        shards: ModelShards | None,
        engine: VLLMEngine | None,
        shape: ModelShape,
        device: torch.device,
        world: World | None = None,
        canary: Canary | None = None,
        carried: CarriedTensors | None = None,
        room: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.stream = WeightStream(
            tensors,
            train_layout,
            options,
            shards=shards,
            engine=engine,
            shape=shape,
            device=device,
            world=world,
            carried=carried,
        )
        world = world or DefaultWorld(device)
        have, need = self.stream.holdings.have, self.stream.holdings.need
        self._gather = GatherPath(
            self.stream.tensors,
            order=self.stream.order,
            have=have,
            wanted=need[world.rank],
            bucket_bytes=options.bucket_bytes,
            device=device,
            world=world,
        )
        attestor = None
        if options.attest != OFF:
            attestor = Attestor(
                self.stream.tensors,
                have,
                need,
                mode=options.attest,
                seed=options.seed,
                device=device,
                world=world,
            )
        self._proof = Proof(
            engine,
            world=world,
            attestor=attestor,
            gather=self._gather,
            canary=canary,
            on_repeat=self.stream.transfer.invalidate,
            room=room,
        )
        self._num_tensors = len(need[world.rank])
        self._weight_version = 0
        self._attestation: Attestation | None = None
        self._peak_extra_bytes = 0

    def run(self, weight_version: int) -> ReshardReport:
        """Hand over the weights to engines that are awake and have no requests.

        Returns when this rank's engine has them, or what this rank sends has left, and every other
        rank agrees.
        """
        self.score_canary(weight_version)
        started = time.perf_counter()
        self.move(weight_version)
        seconds = time.perf_counter() - started
        self.check_canary()
        return self.report(seconds)

    def score_canary(self, weight_version: int) -> None:
        """Let Megatron score the canaries, if they are due; while its parameters are in place."""
        self._proof.score_canary(weight_version)

    def move(self, weight_version: int, *, wake: Callable[[], None] = lambda: None) -> None:
        """Move and attest the weights; repeat it by the plain gather if they did not arrive.

        `wake` is called before this rank's engine receives the first tensor.
        """
        self._weight_version = weight_version
        with PeakMemory() as peak:
            self.stream.prepare()
            self._proof.begin(weight_version, self.stream.read)
            wake()
            self._attestation = self._proof.reload(self.stream.weights(), self.stream.read)
        self._peak_extra_bytes = peak.extra_bytes

    def check_canary(self) -> None:
        """Compare both sides' scores, if canaries are due; engines must be able to generate."""
        self._proof.check_canary(self.stream.read)

    def report(self, duration_seconds: float) -> ReshardReport:
        """Return this rank's numbers of the last hand-over. Not collective."""
        stats, repeated = self.stream.transfer.stats, self._proof.repeated
        return ReshardReport(
            TO_ROLLOUT,
            self._weight_version,
            duration_seconds=duration_seconds,
            received_bytes=stats.received_bytes + (self._gather.received_bytes if repeated else 0),
            saved_bytes=self.stream.saved_bytes,
            hidden_share=stats.hidden_share,
            lower_bound_bytes=self.stream.lower_bound_bytes,
            peak_extra_bytes=self._peak_extra_bytes,
            num_tensors=self._num_tensors,
            attested=self._attestation is not None,  # a failed attestation raises
            repeated=repeated,
        )
