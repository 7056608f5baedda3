"""Engines in other processes, updated shard to shard: the side of the vLLM worker.

A vLLM started with `--weight-transfer-config '{"backend": "mcore_rl"}'` creates one
`MegatronWeightTransferEngine` in each of its workers. The engine joins the trainer's ranks in a
separate world, learns from the model's loaders what this worker needs, and then receives exactly
these slices at each update. No rank on either side ever gathers a tensor. The trainer's side, which
drives the updates, is `trainer`.

vLLM calls, in this order: `init_transfer_engine` once per connection; `start_weight_update`,
`update_weights`, `finish_weight_update` for each update. All of these block the worker. Their
caller should pause generation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mcore_rl.hybrid_engine.remote.session import Session
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, reach_store
from mcore_rl.hybrid_engine.vllm.needs import Metadata, Needs
from mcore_rl.hybrid_engine.vllm.reload import Reloader, Weights, load_to_the_end
from mcore_rl.hybrid_engine.vllm.sliced_tensor import WriteObserver
from mcore_rl.model.float8_blocks import Float8Weights

logger = logging.getLogger(__name__)

BACKEND = "mcore_rl"
NO_PLAN = "none"
NO_FIT = "its model does not fit the trainer's tensors"


def register() -> None:
    """Register the backend with vLLM, on both sides; an entry point in `vllm.general_plugins`."""
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
    """Address and parameters of the trainer's world; the same for all workers of a vLLM.

    The trainer creates it. Worker w of this vLLM, counted over its data-parallel replicas, has rank
    `rank_offset + w` of `world_size`.

    Example: worker 3 of a server that joins 8 trainer ranks has rank 11: `rank_offset` is 8.
    """

    master_address: str
    master_port: int
    world_name: str
    rank_offset: int
    world_size: int
    group_backend: str  # "gloo" or "nccl", for the groups that carry weights
    timeout_seconds: float


@dataclass
class MegatronUpdateInfo(WeightTransferUpdateInfo):
    """Identity of an update; a worker refuses one that was planned for another layout.

    With the plan NO_PLAN it ends an update that was begun and will not be sent: vLLM ends an update
    when it fails, and refuses to begin another one before that.
    """

    plan_id: str
    weight_version: str


class _Served:
    """A worker's model, as the receiver of hand-overs."""

    float8: Float8Weights | None = None
    adapters = None

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """Raises RuntimeError if the model does not fit the tensors."""
        try:
            return self._reloader.learn_needs(tensor_metadata)
        except Exception as error:  # of vLLM's loaders, of any type
            raise RuntimeError(f"{NO_FIT}: {error}") from error

    def reload(self, weights: Weights, on_write: WriteObserver | None = None) -> None:
        """Write the weights into the model; exhausts them even on failure.

        Raises RuntimeError naming a tensor that is missing or not loaded completely.
        """
        load_to_the_end(self._reloader.load, weights, on_write)


class MegatronWeightTransferEngine(WeightTransferEngine[MegatronInitInfo, MegatronUpdateInfo]):
    """This worker's end of the connection to a Megatron trainer.

    `init_transfer_engine` and `update_weights` are collective over the trainer's ranks and all
    workers, and return within the timeout. Both raise RuntimeError naming the rank that failed
    first, here or elsewhere. After a failed update this worker's model has some layers of the old
    and some of the new version: keep the vLLM paused until an update succeeds. After a lost
    connection the trainer must connect again.
    """

    init_info_cls = MegatronInitInfo
    update_info_cls = MegatronUpdateInfo
    supports_draft_weight_update = False

    _session: Session | None = None
    _loaded: str | None = None  # the version that `update_weights` loaded

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
            self._session = Session(world, device=self.device, engine=_Served(self._reloader))
        except BaseException:
            world.close()
            raise
        logger.info(
            "mcore_rl: rank %d of %d, needs a part of %d of %d tensors",
            world.rank,
            world.size,
            len(self._session.stream.need),
            len(self._session.stream.tensors),
        )

    @cached_property
    def _reloader(self) -> Reloader:
        from vllm.model_executor.models.interfaces import supports_multimodal

        model: Any = self.model
        if supports_multimodal(model):  # the job trains the text model alone
            model = model.get_language_model()
        return Reloader(model, self.vllm_config)

    def start_weight_update(self) -> None:
        """Begin an update. Raises RuntimeError if no trainer is connected."""
        if self._session is None:
            raise RuntimeError(
                "mcore_rl: no trainer is connected; call init_weight_transfer_engine first"
            )
        self._loaded = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Call `receive_weights` with the request's JSON; the device has finished on return."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: MegatronUpdateInfo) -> None:
        """Receive this worker's slices and load them in place; a failure ends the connection."""
        if update_info.plan_id == NO_PLAN:
            raise RuntimeError("mcore_rl: the trainer does not send the update that it has begun")
        assert self._session is not None, "start_weight_update requires a session"
        try:
            report = self._session.update(update_info.weight_version, plan_id=update_info.plan_id)
        except BaseException:
            self.shutdown()
            raise
        self._loaded = report.weight_version

    def finish_weight_update(self) -> None:
        """End an update. Raises RuntimeError if `update_weights` did not succeed in it."""
        if self._loaded is None:
            raise RuntimeError("mcore_rl: finish_weight_update, but no update succeeded before it")
        logger.info("mcore_rl: weight version %s is loaded", self._loaded)
        self._loaded = None

    def shutdown(self) -> None:
        """Disconnect from the trainer; the model does not change. May be called again."""
        if self._session is not None:
            self._session.close()
        self._session = None
