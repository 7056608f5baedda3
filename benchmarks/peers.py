"""The peers, as they are: mbridge's export and Megatron's own resharding.

Both are made for CUDA. Where there is none they get the stand-in for `torch` that Megatron's
modules already have (see patches/megatron/cpu_torch.py); nothing else of them is changed.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.destination import Destination
from benchmarks.paths import OnDestination, Setting
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.model_class import GPT
from mcore_rl.megatron.model_provider import make_actor_provider
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.layout import TrainLayout


class NotHere(Exception):
    """Why a path cannot be measured in this case; the same on all ranks."""


def _stand_in_for_torch() -> Any:
    """The `torch` that Megatron's modules see: the real one where there is CUDA."""
    from megatron.core import parallel_state

    return parallel_state.torch


# mbridge


class HFConfig(dict):
    """config.json with its entries as attributes, as mbridge reads it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class UnderTransformerEngineNames:
    """A model chunk of Megatron's local spec, its tensors under Transformer Engine's names.

    What mbridge asks of a model and no more. The tensors are the model's own.
    """

    def __init__(self, chunk: torch.nn.Module, *, latent: bool) -> None:
        self.decoder = chunk.decoder
        is_moe = [hasattr(layer.mlp, "router") for layer in chunk.decoder.layers]
        self._parameters = {
            transformer_engine_name(name, latent=latent, is_moe=is_moe): parameter
            for name, parameter in chunk.named_parameters()
        }
        self._state = dict(self._parameters)
        for name, value in chunk.state_dict().items():
            if name.endswith("expert_bias"):
                self._state[name] = value

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._parameters.items()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._state


def transformer_engine_name(name: str, *, latent: bool, is_moe: list[bool]) -> str:
    """What a parameter of the local spec is called in Transformer Engine's, as mbridge knows it.

    `is_moe` is by local layer; `latent` is whether attention is MLA, which fuses other norms.
    """
    expert = re.fullmatch(
        r"(.*\.mlp\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", name
    )
    if expert:
        return f"{expert[1]}.{expert[3]}.weight{expert[2]}"
    layer = re.fullmatch(r"(decoder\.layers\.(\d+))\.(.*)", name)
    if not layer:
        return name
    prefix, number, rest = layer[1], int(layer[2]), layer[3]
    fused = {}
    if not is_moe[number]:
        fused["pre_mlp_layernorm.weight"] = "mlp.linear_fc1.layer_norm_weight"
    if latent:
        for part in ("q", "kv"):
            fused[f"self_attention.{part}_layernorm.weight"] = (
                f"self_attention.linear_{part}_up_proj.layer_norm_weight"
            )
    else:
        fused["input_layernorm.weight"] = "self_attention.linear_qkv.layer_norm_weight"
    return f"{prefix}.{fused.get(rest, rest)}"


class MBridge(OnDestination):
    """`export_weights`: broadcast over PP, all-gather over EP and TP, tensor by tensor."""

    name = "mbridge"

    def __init__(self, setting: Setting, destination: Destination) -> None:
        super().__init__(destination)
        try:
            import mbridge
        except ImportError as error:
            raise NotHere(
                f"mbridge cannot be imported ({error}): install the bench extra"
            ) from error
        from mbridge.core import bridge, util

        for module in (bridge, util):
            module.torch = _stand_in_for_torch()
        text = (setting.job.spec.checkpoint.folder / "config.json").read_text()
        config = HFConfig({"router_aux_loss_coef": 0.0} | json.loads(text))
        if not config.get("num_nextn_predict_layers"):
            config.pop("num_nextn_predict_layers", None)
        # It is given the models' own configuration instead of building one: that names fields
        # which Megatron has renamed since.
        bridge_class = bridge._MODEL_REGISTRY[config.model_type]
        bridge_class.TransformerConfigClass = staticmethod(lambda **_: setting.chunks[0].config)
        self._bridge = mbridge.AutoBridge.from_config(config)
        latent = setting.job.spec.shape.latent is not None
        self._models = [UnderTransformerEngineNames(c, latent=latent) for c in setting.chunks]

    @torch.no_grad()
    def run(self) -> None:
        for name, tensor in self._bridge.export_weights(self._models):
            self._target.fill_whole(name, tensor)


# megatron.core.resharding


class CoreResharding(OnDestination):
    """`swap_model_weights` into a second Megatron model in the rollout layout, then a local copy.

    Its ranks are in order: it does not choose a rank map. The second model stays resident.
    """

    name = "core.resharding"

    def __init__(self, setting: Setting) -> None:
        job = setting.job
        rollout, has_experts = job.spec.rollout_layout, job.spec.shape.experts is not None
        if has_experts and rollout.has_whole_shared_experts:
            raise NotHere(
                "vLLM wants shared experts whole on every TP rank here, and no layout of Megatron "
                "has them so"
            )
        if has_experts and rollout.ep_size != job.spec.train_layout.ep_size:
            raise NotHere(
                "it matches experts of another EP rank by Transformer Engine's names only"
            )
        # What vLLM's rank of the same number would need without a rank map.
        needed = setting.holdings.need[rollout.rank(setting.rank)]
        super().__init__(Destination(needed, setting.tensors))
        layout = TrainLayout(
            world_size=rollout.world_size,
            tp_size=rollout.tp_size,
            ep_size=rollout.ep_size,
            etp_size=1 if has_experts else rollout.tp_size,
        )
        self._source = setting.chunks[0]
        self._model = _model_in(setting, layout)
        resident = sum(p.nbytes for p in self._model.parameters())
        self.note = f"and a second model of {resident / 1e6:.0f} MB stays resident on every rank"
        self._shards = ModelShards(
            [self._model], job.spec.shape, layout, setting.rank, dict(setting.tensors)
        )
        self._service = _gloo_service()

    @torch.no_grad()
    def run(self) -> None:
        from megatron.core.resharding.refit import swap_model_weights

        swap_model_weights(self._source, self._model, self._service)
        for name in self._target.names:
            for box in self._shards.boxes(name):
                self._target.fill(name, [(box, self._shards.read(name, box))])


def _gloo_service() -> Any:
    from megatron.core.resharding.copy_services import gloo_copy_service

    if not torch.cuda.is_available():
        stand_in = gloo_copy_service.torch

        def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            return stand_in.empty(*args, **kwargs)  # without CUDA there is nothing to pin for

        gloo_copy_service.torch = SimpleNamespace(
            cuda=stand_in.cuda, distributed=stand_in.distributed, no_grad=torch.no_grad,
            Tensor=torch.Tensor, empty=empty,
        )  # fmt: skip
    return gloo_copy_service.GlooCopyService()


def _model_in(setting: Setting, layout: TrainLayout) -> torch.nn.Module:
    """A second model in bf16, in `layout`, which has no PP. Collective."""
    args = copy.copy(setting.job.args)
    args.pipeline_model_parallel_size = 1
    args.expert_model_parallel_size = layout.ep_size
    args.tensor_model_parallel_size = args.tensor_parallel_num_weight_shards = layout.tp_size
    args.expert_tensor_parallel_size = layout.etp_size
    args.expert_tensor_parallel_num_weight_shards = layout.etp_size
    args.sequence_parallel = layout.tp_size > 1 and args.sequence_parallel
    config = megatron_adapter.transformer_config(args)
    provider = make_actor_provider(args, setting.job.spec.shape, GPT)
    model = provider(True, True, config=config, pg_collection=_groups(layout))
    return model.bfloat16().requires_grad_(False)


def _groups(layout: TrainLayout) -> Any:
    """Megatron's collection of groups for TP x DP, experts ETP x EP x EDP. Collective."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    world = range(layout.world_size)

    def same(key: Callable[[int], Any]) -> Any:
        sets = [[r for r in world if key(r) == value] for value in sorted(set(map(key, world)))]
        return dist.new_subgroups_by_enumeration(sets)[0]

    def expert_replica(rank: int) -> int:
        return rank // (layout.etp_size * layout.ep_size)

    tp, dp = same(layout.dp_rank), same(layout.tp_rank)
    expt_dp = same(lambda rank: (layout.etp_rank(rank), layout.ep_rank(rank)))
    of = {
        **dict.fromkeys(("tp", "mp", "tp_cp"), tp),
        **dict.fromkeys(("dp", "dp_cp", "intra_dp_cp"), dp),
        **dict.fromkeys(("expt_dp", "intra_expt_dp"), expt_dp),
        **dict.fromkeys(("tp_ep", "tp_ep_pp"), same(expert_replica)),
        "ep": same(lambda rank: (expert_replica(rank), layout.etp_rank(rank))),
        "expt_tp": same(lambda rank: (expert_replica(rank), layout.ep_rank(rank))),
    }
    alone = same(lambda rank: rank)
    groups = ProcessGroupCollection()
    for field in dataclasses.fields(ProcessGroupCollection):
        setattr(groups, field.name, of.get(field.name, alone))
    return groups
