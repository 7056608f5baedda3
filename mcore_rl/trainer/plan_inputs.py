"""The planner's case of a job, from Megatron's flags and ours.

`values` are always Megatron's flags by destination, as typed and derived; for activations alone
they may be Megatron's validated arguments, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import MOST_KEYS_IN_FLOAT32
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.memory.offload import kinds_at_start, offload_kinds
from mcore_rl.hybrid_engine.options import ranks_per_node
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.lora import ADAPTERS, targets_of
from mcore_rl.model.roles import ACTOR, CRITIC, TEACHER, Roles
from mcore_rl.model.speculation import parse_speculation
from mcore_rl.moe.routing import R3
from mcore_rl.planner.models import TrainedModel
from mcore_rl.planner.phases import Case
from mcore_rl.planner.settings import (
    BATCHED_TOKENS,
    COMMUNICATOR_MB,
    CUDA_GRAPHS_GB,
    GB,
    GPU_RESERVED_GB,
    MB,
    MIB,
    OTHER_NODES_GB_PER_SECOND,
    OWN_NODE_GB_PER_SECOND,
    EngineSettings,
    Machine,
    Recompute,
    TrainSettings,
)
from mcore_rl.spec import LaidOut

_DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
# Moments of each optimizer, for parameters that are matrices; others may have more.
_MOMENTS = {"adam": 2, "lion": 1, "muon": 1, "dist_muon": 1, "adaptive_muon": 2}
_WITHOUT_LIMIT = 1 << 60


def case_of(
    config: RLConfig,
    values: Mapping[str, Any],
    model: tuple[ModelShape, TrainLayout, PipelineLayers],
    rollout: RolloutLayout,
    critic: TrainedModel | None,
    machine: Machine,
    *,
    engine_ranks: tuple[int, ...] = (),
    has_cuda: bool,
    expert_load: float = 1.0,
    batched_tokens: int = BATCHED_TOKENS,
) -> Case:
    """Return the case of a job on machines like `machine`; `engine_ranks` only run engines, if
    any. Raises UsageError for an optimizer that the planner does not know."""
    shape, train, layers = model
    training = _train_settings(config, values, train, layers, expert_load)
    training = _with_adapters(training, config, shape)
    training = _with_demonstrations(training, config, values, train, layers)
    return Case(
        shape=shape,
        train=train,
        layers=layers,
        rollout=rollout,
        # Controllers of servers hold nothing of a model.
        engine_ranks=() if config.rollout.servers else engine_ranks,
        training=training,
        critic=critic,
        engine=_engine_settings(
            config, values, shape, rollout, has_cuda=has_cuda, batched_tokens=batched_tokens
        ),
        machine=machine,
        has_engines=config.has_engines and not config.rollout.servers,
        has_servers=bool(config.rollout.servers),
    )


def case_of_run(
    config: RLConfig,
    values: Mapping[str, Any],
    model: tuple[ModelShape, TrainLayout, PipelineLayers],
    rollout: RolloutLayout,
    critic: TrainedModel | None,
    *,
    engine_ranks: tuple[int, ...] = (),
    device_bytes: int | None,
) -> Case | None:
    """Return the case of a run on devices of that size (None: without devices). Returns None if the
    planner does not know the optimizer."""
    if values.get("optimizer", "adam") not in _MOMENTS:
        return None
    machine = Machine(
        ranks_per_node=ranks_per_node(config.engine, model[1].world_size),
        gpu_bytes=_WITHOUT_LIMIT if device_bytes is None else device_bytes,
        reserved_bytes=int(GPU_RESERVED_GB * GB),
        communicator_bytes=int(COMMUNICATOR_MB * MB),
        host_bytes=_WITHOUT_LIMIT,
        own_node_rate=OWN_NODE_GB_PER_SECOND * GB,
        other_nodes_rate=OTHER_NODES_GB_PER_SECOND * GB,
    )
    has_cuda = device_bytes is not None
    return case_of(
        config,
        values,
        model,
        rollout,
        critic,
        machine,
        engine_ranks=engine_ranks,
        has_cuda=has_cuda,
    )


def trained_critic(
    config: RLConfig, critic: LaidOut, roles: Roles, *, expert_load: float = 1.0
) -> TrainedModel:
    """Return the critic as a model of the plan."""
    own = {
        "tp_size": config.critic.tp_size,
        "pp_size": config.critic.pp_size,
        "ep_size": config.critic.ep_size,
    }
    train, layers = critic.layout, critic.layers
    return TrainedModel(
        name=CRITIC,
        shape=critic.shape,
        train=train,
        layers=layers,
        training=_train_settings(config, critic.values, train, layers, expert_load),
        own_degrees=frozenset(degree for degree, size in own.items() if size is not None),
        ranks=roles.critic,
    )


def with_teachers(
    case: Case,
    config: RLConfig,
    teachers: Sequence[LaidOut],
    roles: Roles,
    *,
    expert_load: float = 1.0,
) -> Case:
    """Return the case with the teachers in folders, if it has any."""
    if not teachers:
        return case
    options = config.teacher
    own = {
        "tp_size": options.teacher_tp_size,
        "pp_size": options.teacher_pp_size,
        "ep_size": options.teacher_ep_size,
    }
    # The form with hidden states is for one teacher.
    outputs: dict[str, Any] = {
        "teacher_top_k": options.num_top_tokens,
        "teacher_hidden": teachers[0].shape.hidden_size if options.with_hidden else 0,
    }

    def model(number: int, teacher: LaidOut) -> TrainedModel:
        train, layers = teacher.layout, teacher.layers
        settings = _train_settings(config, teacher.values, train, layers, expert_load)
        return TrainedModel(
            name=f"{TEACHER} {number}" if number > 1 else TEACHER,
            shape=teacher.shape,
            train=train,
            layers=layers,
            training=replace(settings.without_state(), **outputs),
            own_degrees=frozenset(degree for degree, size in own.items() if size is not None),
            ranks=roles.teacher,
        )

    models = tuple(model(number, each) for number, each in enumerate(teachers, 1))
    return replace(case, teachers=models, training=replace(case.training, **outputs))


def model_of_args(
    config: RLConfig,
    values: Mapping[str, Any],
    shape: ModelShape,
    train: TrainLayout,
    layers: PipelineLayers,
    *,
    name: str = ACTOR,
) -> TrainedModel:
    """Return a model of a run with its settings of activations, from Megatron's arguments."""
    training = activation_settings(config, values, train, layers)
    if name == ACTOR:
        training = _with_adapters(training, config, shape)
    return TrainedModel(name=name, shape=shape, train=train, layers=layers, training=training)


def _with_adapters(settings: TrainSettings, config: RLConfig, shape: ModelShape) -> TrainSettings:
    """Return the actor's settings with the adapters of LoRA, if any."""
    if not config.lora.rank:
        return settings
    targets = targets_of(config.lora, shape)
    return replace(settings, lora_rank=config.lora.rank, lora_targets=targets)


def _with_demonstrations(
    settings: TrainSettings,
    config: RLConfig,
    values: Mapping[str, Any],
    train: TrainLayout,
    layers: PipelineLayers,
) -> TrainSettings:
    """Return the actor's settings with the micro-batches of --rl-sft-demonstrations, which follow
    those of the samples in each mini-batch."""
    if config.supervised.demonstrations is None:
        return settings
    rows = config.supervised.rows_per_step // config.trainer.num_mini_batches
    more = settings.micro_batches_of(rows, train.dp_size, _multiple_of(values, train, layers))
    return replace(settings, num_demonstration_micro_batches=more)


def _multiple_of(values: Mapping[str, Any], train: TrainLayout, layers: PipelineLayers) -> int:
    """Return the divisor of a rank's number of micro-batches in an interleaved schedule."""
    group = values.get("microbatch_group_size_per_vp_stage") or train.pp_size
    return group if len(layers[0]) > 1 else 1


def activation_settings(
    config: RLConfig,
    values: Mapping[str, Any],
    train: TrainLayout,
    layers: PipelineLayers,
    expert_load: float = 1.0,
) -> TrainSettings:
    """Return what determines the size of activations; `train` and `layers` are the model's."""
    positions = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    settings = TrainSettings(
        weight_bytes=4 if config.trainer.precision == "fp32" else 2,
        vocabulary_multiple=values.get("make_vocab_size_divisible_by"),
        micro_batch_size=values["micro_batch_size"],
        num_micro_batches=1,  # counted below
        positions=positions,
        packed_tokens=config.trainer.max_tokens_per_microbatch,
        sequence_parallel=bool(values.get("sequence_parallel")) and train.tp_size > 1,
        recompute=_recompute(values),
        chunk_tokens=config.trainer.log_prob_chunk_tokens,
        head_in_float32=config.trainer.fp32_lm_head,
        attention_in_float32=config.trainer.precision != "fp32"
        and values.get("distributed_backend") == "gloo"
        and positions <= MOST_KEYS_IN_FLOAT32,
        num_top_tokens=config.recipe.score_centering,
        expert_load=expert_load,
        mtp_layers=values.get("mtp_num_layers") or 0,
        trains_indexers=bool(values.get("dsa_indexer_loss_coeff")),
        keeps_sparse_scores=values.get("dsa_kernel_backend", "none") == "none",
    )
    mini_batch = config.samples_per_step // config.trainer.num_mini_batches
    multiple = _multiple_of(values, train, layers)
    count = settings.micro_batches_of(mini_batch, train.dp_size, multiple)
    return replace(settings, num_micro_batches=count)


def _train_settings(
    config: RLConfig,
    values: Mapping[str, Any],
    train: TrainLayout,
    layers: PipelineLayers,
    expert_load: float,
) -> TrainSettings:
    """Return the same with the training state."""
    moments = _moment_bytes(values)
    is_distributed = bool(values.get("use_distributed_optimizer"))
    host_share = values.get("optimizer_offload_fraction", 1.0)
    return replace(
        activation_settings(config, values, train, layers, expert_load),
        gradient_bytes=_gradient_bytes(config, values),
        optimizer_bytes=_main_bytes(config, values) + moments,
        moment_bytes=moments,
        distributed_optimizer=is_distributed,
        optimizer_instances=values.get("num_distributed_optimizer_instances", 1),
        optimizer_host_share=host_share if values.get("optimizer_cpu_offload") else 0.0,
        saved_in_pieces=bool(
            values.get("dist_ckpt_optim_fully_reshardable")
            and is_distributed
            and not values.get("use_precision_aware_optimizer")
        ),
        saves_in_background=bool(values.get("async_save")),
        exact=_exact(values),
    )


def _engine_settings(
    config: RLConfig,
    values: Mapping[str, Any],
    shape: ModelShape,
    rollout: RolloutLayout,
    *,
    has_cuda: bool,
    batched_tokens: int,
) -> EngineSettings:
    """Return how a run uses memory besides training."""
    length = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    num_prompts = config.trainer.num_prompts_per_step
    # Of the TP group that generates most; a prompt has the mean of a step where sources differ.
    samples = math.ceil(
        math.ceil(num_prompts / rollout.num_tp_groups) * config.samples_per_step / num_prompts
    )
    speculation = parse_speculation(config.engine.speculate)
    drafts = speculation is not None and speculation.has_drafter
    # Engines on ranks of their own, and servers, leave the devices of training alone.
    has_engines = config.has_engines and not config.rollout.servers
    stays = config.rollout.rollout_ranks is not None or not has_engines
    has_graphs = has_cuda and has_engines and not config.engine.rollout_enforce_eager
    return EngineSettings(
        gpu_memory_utilization=config.engine.rollout_gpu_memory_utilization,
        max_num_seqs=config.engine.rollout_max_num_seqs,
        max_model_tokens=length,
        max_response_tokens=config.rollout.max_response_tokens,
        batched_tokens=batched_tokens,
        bucket_bytes=config.weight_sync.reshard_bucket_mb * MIB,
        delta=config.weight_sync.reshard_delta,
        loads_adapters=bool(config.lora.rank) and config.lora.rollout == ADAPTERS,
        may_spread_experts=not config.engine.rollout_no_expert_parallel,
        may_span_ranks=has_cuda,
        offloaded=frozenset()
        if stays
        else offload_kinds(config.weight_sync.offload, values, has_cuda=has_cuda),
        away_at_start=frozenset() if stays else kinds_at_start(values),
        keeps_gradients=config.weight_sync.offload_keep_gradients,
        keeps_reference=config.recipe.needs_reference and not config.lora.rank,
        saves_checkpoints=True,  # the last step's, by default
        loads_checkpoint=bool(values.get("load")) and not values.get("finetune"),
        exports=bool(config.trainer.export_hf),
        exports_between=bool(config.trainer.export_interval),
        has_canary=config.weight_sync.canary_interval > 0,
        drafter_layers=shape.num_mtp_layers if drafts else 0,
        sampled_tokens=samples * length,
        sampled_tokens_in_all=config.samples_per_step * length,
        replays_experts=config.trainer.routing_replay == R3,
        graph_bytes=int(CUDA_GRAPHS_GB * GB) if has_graphs else 0,
        offloads_graphs=config.engine.rollout_offload_cuda_graphs,
    )


def has_slow_products(precision: str) -> bool:
    """Return whether this CPU lacks matrix products for `precision` (bf16, fp16 or fp32)."""
    import torch

    from mcore_rl.patches.torch.narrow_products import slow_dtypes

    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision) in slow_dtypes()


# ------------------------------------------------------------------------------ Megatron's flags


def _recompute(values: Mapping[str, Any]) -> Recompute:
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


def _gradient_bytes(config: RLConfig, values: Mapping[str, Any]) -> int:
    """Return the bytes per element of Megatron's gradient buffers."""
    if values.get("accumulate_allreduce_grads_in_fp32") or config.trainer.precision == "fp32":
        return 4
    in_bf16 = values.get("grad_reduce_in_bf16") or values.get("main_grads_dtype") == "bf16"
    return 2 if in_bf16 or config.trainer.precision == "fp16" else 4


def _main_bytes(config: RLConfig, values: Mapping[str, Any]) -> int:
    """Return the bytes per element of main parameters; 0 for float32, which are their own."""
    return 0 if config.trainer.precision == "fp32" else _dtype_bytes(values, "main_params_dtype")


def _moment_bytes(values: Mapping[str, Any]) -> int:
    """Return the bytes per element of all moments together."""
    name = values.get("optimizer", "adam")
    if name not in _MOMENTS:
        raise UsageError(
            "is not known to the planner",
            flag=f"--optimizer {name}",
            remedy=f"choose one of {', '.join(_MOMENTS)}",
        )
    dests = ("exp_avg_dtype", "exp_avg_sq_dtype")[: _MOMENTS[name]]
    return sum(_dtype_bytes(values, dest) for dest in dests)


def _dtype_bytes(values: Mapping[str, Any], dest: str) -> int:
    """Return the bytes of a dtype that only the precision-aware optimizer reads."""
    is_read = bool(values.get("use_precision_aware_optimizer"))
    return _DTYPE_BYTES[values.get(dest, "fp32") if is_read else "fp32"]
