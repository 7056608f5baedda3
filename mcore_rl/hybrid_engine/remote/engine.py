"""Engines in other processes, updated shard to shard: the side of the vLLM worker.

A vLLM started with `--weight-transfer-config '{"backend": "mcore_rl"}'` makes one
`MegatronWeightTransferEngine` in each of its workers. It joins the trainer's ranks in a world of
their own, learns from the model's loaders what this worker needs, and then receives exactly those
slices at each update; no rank on either side ever gathers a tensor. The trainer's side, which
drives all of it, is `trainer`.

What vLLM calls, in this order: `init_transfer_engine` once per connection; `start_weight_update`,
`update_weights`, `finish_weight_update` for each update. All of it blocks the worker; generation
should be paused, which is up to the caller of those functions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mcore_rl.hybrid_engine.plan.moves import TensorInfo
from mcore_rl.hybrid_engine.remote.session import Holdings, Session, UpdateReport
from mcore_rl.hybrid_engine.transfer.transfer import Pieces
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, reach_store
from mcore_rl.hybrid_engine.vllm.reload import Reloader
from mcore_rl.hybrid_engine.vllm.sliced_tensor import SlicedTensor

logger = logging.getLogger(__name__)

BACKEND = "mcore_rl"


def register() -> None:
    """Make the backend known to vLLM, on both sides; an entry point in `vllm.general_plugins`."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    # By name: the trainer's module imports Megatron, which a server does not have.
    trainer = f"{__package__}.trainer"
    for factory, module, name in (
        (WeightTransferEngineFactory, __name__, "MegatronWeightTransferEngine"),
        (WeightTransferTrainerFactory, trainer, "MegatronTrainerWeightTransferEngine"),
    ):
        if BACKEND not in factory._registry:  # vLLM may load plugins several times
            factory.register_engine(BACKEND, module, name)


@dataclass
class MegatronInitInfo(WeightTransferInitInfo):
    """Where and how to join the trainer; made by the trainer, the same for all workers of a vLLM.

    Worker w of this vLLM, counted over its data parallel replicas too, has rank `rank_offset + w`
    of `world_size`.
    """

    master_address: str
    master_port: int
    world_name: str
    rank_offset: int
    world_size: int
    group_backend: str  # "gloo" or "nccl", of the groups over which weights travel
    bucket_bytes: int
    timeout_seconds: float


@dataclass
class MegatronUpdateInfo(WeightTransferUpdateInfo):
    """Which update this is; a worker refuses one that was planned for another layout."""

    plan_id: str
    weight_version: str


class MegatronWeightTransferEngine(WeightTransferEngine[MegatronInitInfo, MegatronUpdateInfo]):
    """This worker's end of the connection to a Megatron trainer.

    `init_transfer_engine` and `update_weights` are collective over the trainer's ranks and all
    workers, and return within the timeout. Both raise RuntimeError saying which rank failed first,
    here or elsewhere. After a failed update this worker's model has some layers of the old and some
    of the new version: keep the vLLM paused until an update succeeds. After a lost connection the
    trainer has to connect again.
    """

    init_info_cls = MegatronInitInfo
    update_info_cls = MegatronUpdateInfo
    supports_draft_weight_update = False

    _session: Session | None = None
    _loaded: str | None = None  # the version that `update_weights` brought
    last_report: UpdateReport | None = None

    def init_transfer_engine(self, init_info: MegatronInitInfo) -> None:
        """Join the trainer's world, learn what this worker needs, and agree on the plan."""
        if self.vllm_config.quant_config is not None:
            raise RuntimeError(
                f"mcore_rl: this vLLM serves weights in {self.vllm_config.quant_config.get_name()},"
                " and trained ones are not quantised; start it with --load-format dummy "
                """--hf-overrides '{"quantization_config": null}'"""
            )
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = reach_store(
            init_info.master_address, init_info.master_port, init_info.timeout_seconds
        )
        world = JoinedWorld(
            store,
            rank=init_info.rank_offset + worker,
            size=init_info.world_size,
            name=init_info.world_name,
            backend=init_info.group_backend,
            timeout_seconds=init_info.timeout_seconds,
        )
        try:
            self._session = Session(
                world,
                bucket_bytes=init_info.bucket_bytes,
                device=self.device,
                learn=self._learn_needs,
            )
        except BaseException:
            world.close()
            raise
        logger.info(
            "mcore_rl: rank %d of %d, needs a part of %d of %d tensors",
            world.rank,
            world.size,
            len(self._session.need),
            len(self._session.tensors),
        )

    def _learn_needs(self, tensors: Mapping[str, TensorInfo]) -> Holdings:
        metadata = {name: (i.shape, getattr(torch, i.dtype)) for name, i in tensors.items()}
        return self._reloader.learn_needs(metadata)

    @cached_property
    def _reloader(self) -> Reloader:
        return Reloader(self.model, self.vllm_config)

    def start_weight_update(self) -> None:
        """Begin an update. RuntimeError if no trainer is connected."""
        if self._session is None:
            raise RuntimeError(
                "mcore_rl: no trainer is connected; call init_weight_transfer_engine first"
            )
        self._loaded = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """`receive_weights` of the request's JSON; the device is done with it on return."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MegatronUpdateInfo) -> None:
        """Receive this worker's slices and load them in place; a failure ends the connection."""
        assert self._session is not None, "start_weight_update asks for a session"
        try:
            report = self._session.update(
                update_info.weight_version,
                plan_id=update_info.plan_id,
                read=None,
                load=self._load,
            )
        except BaseException:
            self.shutdown()
            raise
        self._loaded, self.last_report = report.weight_version, report

    def finish_weight_update(self) -> None:
        """End an update. RuntimeError if `update_weights` has not succeeded since it began."""
        if self._loaded is None:
            raise RuntimeError("mcore_rl: finish_weight_update, but no update succeeded before it")
        logger.info("mcore_rl: weight version %s is loaded", self._loaded)
        self._loaded = None

    def _load(self, arriving: Iterator[tuple[str, Pieces]]) -> None:
        """Write the arriving slices into the model, each before the next is asked for.

        Raises RuntimeError naming the tensor that was missing or not loaded in full.
        """
        self._reloader.load(self._stand_ins(arriving))

    def _stand_ins(
        self, arriving: Iterator[tuple[str, Pieces]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._session is not None
        for name, pieces in arriving:
            info = self._session.tensors[name]
            yield name, SlicedTensor(name, info.shape, getattr(torch, info.dtype), pieces)

    def shutdown(self) -> None:
        """Let go of the trainer; the model stays as it is. May be called again."""
        if self._session is not None:
            self._session.close()
        self._session = None
