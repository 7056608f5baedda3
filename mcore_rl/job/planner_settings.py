"""The settings of the planner's formulas, from the values of Megatron's flags and ours.

They serve the planner, which parses a command line, and a run, which has Megatron's validated
arguments. This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.speculation import parse_speculation
from mcore_rl.moe.routing import R3
from mcore_rl.planner.settings import (
    MIB,
    ActivationSettings,
    EngineSettings,
    Recompute,
    TrainSettings,
)

_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# Moments of each optimizer, for parameters that are matrices; others may have more.
_MOMENTS = {"adam": 2, "sgd": 1, "lion": 1, "muon": 1, "dist_muon": 1, "adaptive_muon": 2}


def activation_settings(
    config: RLConfig,
    values: Mapping[str, Any],
    train: TrainLayout,
    layers: PipelineLayers,
    *,
    vocabulary_multiple: int | None = None,
    expert_load: float = 1.0,
) -> ActivationSettings:
    """Return what determines the size of activations. `values` are the model's Megatron flags by
    destination; `train` and `layers` are its layout."""
    positions = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    settings = ActivationSettings(
        weight_bytes=4 if config.trainer.precision == "fp32" else 2,
        vocabulary_multiple=vocabulary_multiple,
        micro_batch_size=values["micro_batch_size"],
        num_micro_batches=1,  # counted below
        positions=positions,
        packed_tokens=config.trainer.max_tokens_per_microbatch,
        sequence_parallel=bool(values.get("sequence_parallel")) and train.tp_size > 1,
        recompute=recompute(values),
        chunk_tokens=config.trainer.log_prob_chunk_tokens,
        expert_load=expert_load,
        mtp_layers=values.get("mtp_num_layers") or 0,
    )
    mini_batch = config.samples_per_step // config.trainer.num_mini_batches
    group = values.get("microbatch_group_size_per_vp_stage") or train.pp_size
    multiple = group if len(layers[0]) > 1 else 1
    return replace(
        settings, num_micro_batches=settings.micro_batches_of(mini_batch, train.dp_size, multiple)
    )


def train_settings(
    config: RLConfig,
    values: Mapping[str, Any],
    train: TrainLayout,
    layers: PipelineLayers,
    *,
    vocabulary_multiple: int | None = None,
    expert_load: float = 1.0,
) -> TrainSettings:
    """Return how training stores its state, from flags before Megatron's validation. Raises
    UsageError for an optimizer of unknown size."""
    activations = activation_settings(
        config,
        values,
        train,
        layers,
        vocabulary_multiple=vocabulary_multiple,
        expert_load=expert_load,
    )
    moments = _moment_bytes(values)
    kept = [_main_bytes(config, values), *moments]
    return TrainSettings(
        **{field.name: getattr(activations, field.name) for field in fields(activations)},
        gradient_bytes=_gradient_bytes(config, values),
        optimizer_bytes=sum(kept),
        moment_bytes=sum(moments),
        distributed_optimizer=bool(values.get("use_distributed_optimizer")),
        optimizer_instances=values.get("num_distributed_optimizer_instances", 1),
        optimizer_host_share=(
            values.get("optimizer_offload_fraction", 1.0)
            if values.get("optimizer_cpu_offload")
            else 0.0
        ),
        saved_in_pieces=bool(
            values.get("dist_ckpt_optim_fully_reshardable")
            and values.get("use_distributed_optimizer")
            and not values.get("use_precision_aware_optimizer")
        ),
        exact=_exact(values),
    )


def is_known_optimizer(values: Mapping[str, Any]) -> bool:
    """Return whether `train_settings` knows the size of the optimizer's state."""
    return values.get("optimizer", "adam") in _MOMENTS


def _exact(values: Mapping[str, Any]) -> frozenset[str]:
    """Return the parts of a rank's state that are counted byte by byte, as lower bounds."""
    if values.get("use_megatron_fsdp"):
        return frozenset()  # the plan counts complete parameters
    by_flag = {
        "weights": ("fp8_param_gather", "fp4_param_gather"),
        "optimizer": ("optimizer_cpu_offload", "use_precision_aware_optimizer"),
    }
    left_out = {part for part, dests in by_flag.items() if any(map(values.get, dests))}
    if values.get("optimizer", "adam") != "adam":
        left_out.add("optimizer")
    return frozenset({"weights", "gradients", "optimizer"} - left_out)


def engine_settings(
    config: RLConfig,
    values: Mapping[str, Any],
    shape: ModelShape,
    rollout: RolloutLayout,
    *,
    offloaded: frozenset[str],
    away_at_start: frozenset[str],
    batched_tokens: int,
) -> EngineSettings:
    """Return how a run uses memory besides training. `values` are Megatron's flags by destination;
    `offloaded` and `away_at_start` are kinds of `hybrid_engine.offload`."""
    length = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    samples = math.ceil(config.trainer.num_prompts_per_step / rollout.num_tp_groups)
    speculation = parse_speculation(config.engine.speculate)
    drafts = speculation is not None and speculation.has_drafter
    return EngineSettings(
        gpu_memory_utilization=config.engine.rollout_gpu_memory_utilization,
        max_num_seqs=config.engine.rollout_max_num_seqs,
        max_model_tokens=length,
        max_response_tokens=config.rollout.max_response_tokens,
        batched_tokens=batched_tokens,
        bucket_bytes=config.weight_sync.reshard_bucket_mb * MIB,
        delta=config.weight_sync.reshard_delta,
        may_spread_experts=not config.engine.rollout_no_expert_parallel,
        offloaded=offloaded,
        away_at_start=away_at_start,
        keeps_gradients=config.weight_sync.offload_keep_gradients,
        keeps_reference=config.recipe.needs_reference,
        saves_checkpoints=True,  # the last step's, by default
        loads_checkpoint=bool(values.get("load")) and not values.get("finetune"),
        exports=bool(config.trainer.export_hf),
        has_canary=config.weight_sync.canary_interval > 0,
        drafter_layers=shape.num_mtp_layers if drafts else 0,
        sampled_tokens=samples * config.samples_per_prompt * length,
        sampled_tokens_in_all=config.samples_per_step * length,
        replays_experts=config.trainer.routing_replay == R3,
    )


def recompute(values: Mapping[str, Any]) -> Recompute:
    """Return the settings of Megatron's --recompute-* flags."""
    granularity = values.get("recompute_granularity")
    if values.get("recompute_activations"):
        granularity = "selective"
    return Recompute(
        granularity=granularity,
        method=values.get("recompute_method") or ("uniform" if granularity == "full" else None),
        num_layers=values.get("recompute_num_layers") or 1,
        modules=frozenset(values.get("recompute_modules") or ["core_attn"]),
        spread_over_tp=bool(values.get("distribute_saved_activations")),
    )


def _gradient_bytes(config: RLConfig, values: Mapping[str, Any]) -> int:
    """Return the bytes per element of Megatron's gradient buffers."""
    if values.get("accumulate_allreduce_grads_in_fp32") or config.trainer.precision == "fp32":
        return 4
    if config.trainer.precision == "fp16":
        return 2
    in_bf16 = values.get("grad_reduce_in_bf16") or values.get("main_grads_dtype") == "bf16"
    return 2 if in_bf16 else 4


def _main_bytes(config: RLConfig, values: Mapping[str, Any]) -> int:
    """Return the bytes per element of main parameters; 0 for float32, which are their own."""
    if config.trainer.precision == "fp32":
        return 0
    precise = bool(values.get("use_precision_aware_optimizer"))
    return _DTYPE_BYTES[values.get("main_params_dtype", "fp32") if precise else "fp32"]


def _moment_bytes(values: Mapping[str, Any]) -> list[int]:
    """Return the bytes per element of each moment."""
    name = values.get("optimizer", "adam")
    if name not in _MOMENTS:
        raise UsageError(
            "is not known to the planner",
            flag=f"--optimizer {name}",
            remedy=f"choose one of {', '.join(_MOMENTS)}",
        )
    precise = bool(values.get("use_precision_aware_optimizer"))
    dtypes = ("exp_avg_dtype", "exp_avg_sq_dtype")[: _MOMENTS[name]]
    return [_DTYPE_BYTES[values.get(dest, "fp32") if precise else "fp32"] for dest in dtypes]
