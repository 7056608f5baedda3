"""The hand-over: one model's weights from the ranks that train it to their engines, with proof.

    move    hash what Megatron holds -> stream the slices into the engines -> attest them
    check   let both sides score the canaries, if they are due

A rank has shards of the model and an engine (colocated), only shards (a trainer), or only an
engine. Who sleeps and what is offloaded meanwhile is the caller's, see `sharding_manager`.

With adapters, the first hand-over brings the base and then the adapters, later ones the adapters
alone. Each of the two has a plan and an attestation of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from mcore_rl.hybrid_engine.memory.usage import PeakMemory
from mcore_rl.hybrid_engine.proof.attest import OFF, Attestation, Attestor
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.proof.proof import Proof
from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, ReshardReport
from mcore_rl.hybrid_engine.transfer.gather import GatherPath
from mcore_rl.hybrid_engine.transfer.transfer import TransferStats
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld, World
from mcore_rl.hybrid_engine.vllm.in_process_engine import Receiver, ServedEngine, VLLMEngine
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions, WeightStream
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.tensors import TensorInfo

if TYPE_CHECKING:
    from mcore_rl.megatron.carried import CarriedTensors
    from mcore_rl.megatron.lora import FactorShards
    from mcore_rl.megatron.shards import ModelShards


class HandOver:
    """The hand-overs of one model. Constructing and all methods are collective over the world.

    `world` is by default the job's own, in which every rank has `shards` and an `engine`. In a
    joined world the trainers come first and have only shards, and the engines' ranks follow; all
    ranks named in errors are ranks of this world. `train_layout` is that of the job's own world,
    None in a joined one. `tensors` are the checkpoint's, `shape` is the
    model's, `device` is where messages are built. `canary` and `carried` are given on all ranks or
    on none, `carried` if engines draft by MTP layers that are not trained. `room` is that of
    `Proof`. `adapters` are the factors that engines apply to the base, in the dtype of their LoRA
    layers; without them engines get merged weights.

    On a failure every rank of the world raises, except for a process that is gone, which ends the
    calls of the others with an error. The engines then refuse to generate until a `move` succeeds.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        train_layout: TrainLayout | None,
        options: HandOverOptions,
        *,
        shards: ModelShards | None,
        engine: ServedEngine | None,
        shape: ModelShape,
        device: torch.device,
        world: World | None = None,
        canary: Canary | None = None,
        carried: CarriedTensors | None = None,
        adapters: Mapping[str, TensorInfo] | None = None,
        room: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        part = partial(
            _Part, train_layout, engine=engine, shape=shape, device=device, world=world, room=room
        )
        if adapters is None:
            self._parts = [
                part(
                    tensors,
                    options,
                    shards=shards,
                    receiver=engine,
                    canary=canary,
                    carried=carried,
                )
            ]
        else:
            of_base = None if shards is None else shards.of_base()
            factors = None if shards is None else shards.factors
            receiver = None if engine is None else engine.adapters
            options = replace(options, delta=False)
            self._parts = [
                part(tensors, options, shards=of_base, receiver=engine),
                part(
                    adapters,
                    replace(options, dtype="checkpoint"),
                    shards=factors,
                    receiver=receiver,
                    canary=canary,
                ),
            ]
        self._has_adapters = adapters is not None
        self._moved: list[_Part] = []
        self._weight_version = 0
        self._peak_extra_bytes = 0

    @property
    def stream(self) -> WeightStream:
        """What every hand-over streams: all weights, or adapters."""
        return self._last.stream

    @property
    def repeated(self) -> bool:
        """Whether the last hand-over was repeated by the plain gather."""
        return any(part.proof.repeated for part in self._moved)

    def sent_and_received_bytes(self) -> tuple[int, int]:
        """Return this rank's bytes of the last hand-over, counted at the calls. Not collective."""
        sent = sum(part.stream.transfer.stats.sent_bytes for part in self._moved)
        return sent, sum(part.received_bytes for part in self._moved)

    @property
    def keeps_weights(self) -> bool:
        """Whether engines must keep their weights, because no later hand-over brings them."""
        return self._has_adapters and len(self._parts) == 1

    @property
    def _last(self) -> _Part:
        return self._parts[-1]

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
        self._last.proof.score_canary(weight_version)

    def move(self, weight_version: int, *, wake: Callable[[], None] = lambda: None) -> None:
        """Move and attest the weights; repeat it by the plain gather if they did not arrive.

        `wake` is called before this rank's engine receives the first tensor.
        """
        self._weight_version = weight_version
        self._moved = []
        with PeakMemory() as peak:
            for part in self._parts:
                part.begin(weight_version)
                if not self._moved:
                    wake()
                self._moved.append(part)
                part.load()
        self._peak_extra_bytes = peak.extra_bytes
        for part in self._parts[:-1]:
            part.stream.transfer.close()
        del self._parts[:-1]

    def check_canary(self) -> None:
        """Compare both sides' scores, if canaries are due; engines must be able to generate."""
        self._last.proof.check_canary(self.stream.read)

    def report(self, duration_seconds: float) -> ReshardReport:
        """Return this rank's numbers of the last hand-over. Not collective."""
        moved = self._moved
        stats = [part.stream.transfer.stats for part in moved]
        return ReshardReport(
            TO_ROLLOUT,
            self._weight_version,
            duration_seconds=duration_seconds,
            received_bytes=sum(part.received_bytes for part in moved),
            saved_bytes=sum(part.stream.saved_bytes for part in moved),
            hidden_share=TransferStats(
                in_flight_seconds=sum(each.in_flight_seconds for each in stats),
                wait_seconds=sum(each.wait_seconds for each in stats),
            ).hidden_share,
            lower_bound_bytes=sum(part.stream.lower_bound_bytes for part in moved),
            peak_extra_bytes=self._peak_extra_bytes,
            num_tensors=sum(part.num_tensors for part in moved),
            # A failed attestation raises.
            attested=all(part.attestation is not None for part in moved),
            repeated=self.repeated,
        )


class _Part:
    """One set of tensors with its stream, its plain gather and its proof. All methods are
    collective over the world. `receiver` is what they fill, on ranks with an `engine`."""

    def __init__(
        self,
        train_layout: TrainLayout | None,
        tensors: Mapping[str, TensorInfo],
        options: HandOverOptions,
        *,
        shards: ModelShards | FactorShards | None,
        engine: ServedEngine | None,
        receiver: Receiver | None,
        shape: ModelShape,
        device: torch.device,
        world: World | None,
        room: Callable[[], AbstractContextManager[None]],
        canary: Canary | None = None,
        carried: CarriedTensors | None = None,
    ) -> None:
        self.stream = WeightStream(
            tensors,
            train_layout,
            options,
            shards=shards,
            engine=receiver,
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
        self.proof = Proof(
            # A server's worker scores no canaries: the server does, by requests.
            engine if isinstance(engine, VLLMEngine) else None,
            receiver=receiver,
            world=world,
            attestor=attestor,
            gather=self._gather,
            canary=canary,
            on_repeat=self.stream.transfer.invalidate,
            room=room,
        )
        self.num_tensors = len(need[world.rank])
        self.attestation: Attestation | None = None

    def begin(self, weight_version: int) -> None:
        """Hash what this rank attests, before engines receive it."""
        self.stream.prepare()
        self.proof.begin(weight_version, self.stream.read)

    def load(self) -> None:
        """Move the tensors, and attest them."""
        self.attestation = self.proof.reload(self.stream.weights(), self.stream.read)

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank received in the last hand-over, by all paths."""
        gathered = self._gather.received_bytes if self.proof.repeated else 0
        return self.stream.transfer.stats.received_bytes + gathered
