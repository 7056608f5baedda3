"""Checks of the training and the rollout layout against the world and the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl.common.errors import CORRECT, UsageError, as_flag
from mcore_rl.hybrid_engine.options import EngineOptions, ranks_per_node
from mcore_rl.hybrid_engine.plan.placement import Placement, with_rank_map
from mcore_rl.hybrid_engine.vllm.all_reduce import Obstacle, all_reduce_obstacle
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.families import family_of
from mcore_rl.model.layout import (
    ALL2ALL_BACKENDS,
    NOT_RELOADABLE,
    PipelineLayers,
    RolloutLayout,
    TrainLayout,
    layers_of_chunks,
    pipeline_layers,
)
from mcore_rl.model.quantization import FP8
from mcore_rl.model.roles import Roles, describe_ranks
from mcore_rl.model.sparse_attention import Indexer

# The latent sizes for which vLLM's CPU attention is compiled.
CPU_LATENT = (512, 64)
# Sizes of a delta net's heads for which they are.
CPU_DELTA_NET = (64, 128)

_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
# With one of these, stages may differ in their number of layers.
_END_STAGES = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# These count as a layer of their stage.
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def check_layout(shape: ModelShape, values: Mapping[str, Any], world_size: int) -> TrainLayout:
    """Return the training layout, with degrees that fit the world size and the model."""
    for dest in _DEGREES:
        if values.get(dest) is not None and values[dest] < 1:
            flag = as_flag(dest, values[dest])
            raise UsageError("must be at least 1", flag=flag, remedy=CORRECT)
    tp_size = values.get("tensor_model_parallel_size", 1)
    layout = TrainLayout(
        world_size=world_size,
        tp_size=tp_size,
        pp_size=values.get("pipeline_model_parallel_size", 1),
        cp_size=values.get("context_parallel_size", 1),
        ep_size=values.get("expert_model_parallel_size", 1),
        etp_size=values.get("expert_tensor_parallel_size") or tp_size,
    )
    _check_divides(f"--tensor-model-parallel-size {tp_size}", tp_size, _split_over_tp(shape))
    if shape.delta_net:
        flag = f"--context-parallel-size {layout.cp_size} x {as_flag(_DEGREES[0], tp_size)}"
        heads = {"linear_num_key_heads": shape.delta_net.num_key_heads}
        _check_divides(flag, layout.cp_size * tp_size, heads)
    if shape.mamba:
        flag = f"--context-parallel-size {layout.cp_size} x {as_flag(_DEGREES[0], tp_size)}"
        _check_divides(flag, layout.cp_size * tp_size, {"mamba_num_heads": shape.mamba.num_heads})
    if shape.experts is None and layout.ep_size > 1:
        raise UsageError(
            f"needs a model with experts and {shape.architecture} has none",
            flag=f"--expert-model-parallel-size {layout.ep_size}",
            remedy="drop the flag",
        )
    if shape.experts:
        flag = f"--expert-model-parallel-size {layout.ep_size}"
        _check_divides(flag, layout.ep_size, {"number of experts": shape.experts.num_experts})
        flag = f"--expert-tensor-parallel-size {layout.etp_size}"
        sizes = {"moe_intermediate_size": shape.experts.hidden_size}
        _check_divides(flag, layout.etp_size, sizes)
        if shape.linear_biases and layout.etp_size > 1:
            raise UsageError(
                f"splits experts with biases, which {shape.architecture} has, and Megatron adds "
                "those on every rank",
                flag=flag,
                remedy="give --expert-tensor-parallel-size 1",
            )
        _check_dispatcher(values)
    instances = values.get("num_distributed_optimizer_instances") or 1
    if layout.edp_size % instances or layout.dp_size * layout.cp_size % instances:
        raise UsageError(
            f"divides the data-parallel ranks into as many groups, and these are {layout.dp_size} "
            f"x --context-parallel-size {layout.cp_size}, or {layout.edp_size} of an expert",
            flag=f"--num-distributed-optimizer-instances {instances}",
            remedy="give a divisor of both, or drop the flag",
        )
    return layout


def check_actor_layout(shape: ModelShape, values: Mapping[str, Any], roles: Roles) -> TrainLayout:
    """Return the actor's layout; the error names its ranks if other ranks have other roles."""
    try:
        return check_layout(shape, values, len(roles.actor))
    except UsageError as error:
        if len(roles.actor) == roles.world_size:
            raise
        raise error.of_role(f"the actor, on {describe_ranks(roles.actor)}") from error


def title_of_engines(roles: Roles) -> str:
    """Return how an error names engines on ranks of their own; "" on the actor's."""
    return f"the engines, on {describe_ranks(roles.rollout)}" if roles.rollout else ""


def _check_dispatcher(values: Mapping[str, Any]) -> None:
    """Refuse dispatchers that need equal numbers of tokens on all ranks or in all micro-batches.
    `alltoall` and DeepEP do not; nor does `allgather`, by `patches/megatron/uneven_all_gather`."""
    if values.get("moe_token_dispatcher_type") != "flex":
        return
    flag = "--moe-flex-dispatcher-backend"
    backend = values.get("moe_flex_dispatcher_backend")
    if backend == "ncclep":
        raise UsageError(
            "ncclep makes its buffers for as many tokens as the first micro-batch has, and in RL "
            "later ones have more",
            flag=flag,
            remedy="give deepep or hybridep, or --moe-token-dispatcher-type alltoall",
        )
    if backend == "hybridep" and not values.get("moe_hybridep_pad_uneven_dispatch_inputs"):
        raise UsageError(
            "hybridep needs as many tokens on every rank, which in RL have different numbers",
            flag=flag,
            remedy="add --moe-hybridep-pad-uneven-dispatch-inputs",
        )


def _split_over_tp(shape: ModelShape) -> dict[str, int]:
    """Return the sizes that tensor parallelism splits evenly, by their names in config.json."""
    sizes = {"num_attention_heads": shape.num_heads, "num_key_value_heads": shape.num_kv_heads}
    if shape.delta_net:  # which divides that of value heads
        sizes["linear_num_key_heads"] = shape.delta_net.num_key_heads
    if shape.mamba:  # groups divide heads
        sizes["n_groups"] = shape.mamba.num_groups
    if any(kind.has_dense for kind in shape.layer_kinds):
        sizes["intermediate_size"] = shape.ffn_hidden_size
    if shape.experts and shape.experts.shared_hidden_size:
        router = family_of(shape.architecture).router
        assert router is not None, "experts without a router"
        name = (
            router.gated_shared_size
            or router.shared_size
            or f"{router.shared_experts} x {router.expert_size}"
        )
        sizes[name] = shape.experts.shared_hidden_size
    return sizes


def _check_divides(flag: str, degree: int, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        if size % degree:
            raise UsageError(
                f"does not divide the checkpoint's {name} {size}",
                flag=flag,
                remedy=f"choose a divisor of {size}",
            )


def check_stages(shape: ModelShape, pp_size: int, values: Mapping[str, Any]) -> PipelineLayers:
    """Return the layers of every pipeline stage and model chunk."""
    stages = _stages(shape, pp_size, values)
    if shape.indexer:
        _check_choices_stay(shape.indexer, stages, pp_size)
    return stages


def _check_choices_stay(indexer: Indexer, stages: PipelineLayers, pp_size: int) -> None:
    """Refuse a chunk whose first layers need the choice of keys of a layer in another chunk."""
    if (layer := indexer.separated(stages)) is not None:
        raise UsageError(
            f"separates layer {layer} from layer {indexer.source_of(layer)}, whose indexer chooses "
            "its keys: Megatron does not send the choice to another stage",
            flag=f"--pipeline-model-parallel-size {pp_size}",
            remedy="let every stage begin at a layer with an indexer, by another size or "
            "--pipeline-model-parallel-layout",
        )


def _stages(shape: ModelShape, pp_size: int, values: Mapping[str, Any]) -> PipelineLayers:
    flag = f"--pipeline-model-parallel-size {pp_size}"
    if pp_size > shape.num_layers:
        raise UsageError(
            f"is more than the {shape.num_layers} layers",
            flag=flag,
            remedy="choose at most one stage a layer",
        )
    first, last = (values.get(dest) for dest in _END_STAGES)
    ends = [count for count in (first, last) if count is not None]
    left, stages = shape.num_layers - sum(ends), pp_size - len(ends)
    shared = left >= stages and left % stages == 0 if stages > 0 else left == stages == 0
    if ends and (min(ends) < 1 or not shared):
        raise UsageError(
            f"leaves {left} of {shape.num_layers} layers to {stages} of {pp_size} stages, which "
            "must share them evenly",
            flag=f"--decoder-first/last-pipeline-num-layers {' and '.join(map(str, ends))}",
            remedy="choose another number",
        )
    if values.get("pipeline_model_parallel_layout"):
        return _custom_stages(values["pipeline_model_parallel_layout"], shape, pp_size)
    counted = [bool(values.get(dest)) for dest in _COUNTED]
    if (shape.num_layers + sum(counted)) % pp_size and not ends:
        flags = [
            as_flag(dest) for dest, is_counted in zip(_COUNTED, counted, strict=True) if is_counted
        ]
        also = f", with one more each by {' and '.join(flags)}" if flags else ""
        raise UsageError(
            f"does not divide the {shape.num_layers} layers{also}",
            flag=flag,
            remedy="choose a divisor or set --decoder-last-pipeline-num-layers",
        )
    return pipeline_layers(
        shape.num_layers,
        pp_size,
        vp_size=_virtual_stages(shape.num_layers + sum(counted), pp_size, values),
        first=first,
        last=last,
        embedding_counts=counted[0],
        loss_counts=counted[1],
    )


def _virtual_stages(num_layers: int, pp_size: int, values: Mapping[str, Any]) -> int:
    """Return a stage's number of model chunks; `num_layers` includes what counts as a layer."""
    per_rank = values.get("num_virtual_stages_per_pipeline_rank")
    per_chunk = values.get("num_layers_per_virtual_pipeline_stage")
    if per_rank is not None:
        given, flag = per_rank, as_flag("num_virtual_stages_per_pipeline_rank", per_rank)
    elif per_chunk is not None:
        given, flag = per_chunk, as_flag("num_layers_per_virtual_pipeline_stage", per_chunk)
    else:
        return 1
    if given < 1 or pp_size == 1:
        raise UsageError(
            "needs --pipeline-model-parallel-size above 1 and must be at least 1",
            flag=flag,
            remedy="drop it",
        )
    if per_rank is not None:
        return int(per_rank)
    if num_layers // pp_size % given:
        raise UsageError(
            f"does not divide the {num_layers // pp_size} layers of a stage",
            flag=flag,
            remedy="choose a divisor",
        )
    return int(num_layers // pp_size // given)


def _custom_stages(layout: Any, shape: ModelShape, pp_size: int) -> PipelineLayers:
    """Return the layers of `--pipeline-model-parallel-layout`, as Megatron reads it."""
    from mcore_rl.megatron import adapter as megatron_adapter

    try:
        counts = megatron_adapter.decoder_layers_of_layout(layout, pp_size)
    except (AssertionError, ValueError, KeyError) as error:
        raise UsageError(
            f"cannot be read ({error})",
            flag=f"--pipeline-model-parallel-layout {layout}",
            remedy="see --help",
        ) from error
    if sum(map(sum, counts)) != shape.num_layers:
        raise UsageError(
            f"has {sum(map(sum, counts))} decoder layers, but the checkpoint has "
            f"{shape.num_layers}",
            flag=f"--pipeline-model-parallel-layout {layout}",
            remedy="correct it",
        )
    return layers_of_chunks(counts)


def check_rollout(
    options: EngineOptions,
    shape: ModelShape,
    layout: TrainLayout,
    layers: PipelineLayers,
    *,
    roles: Roles | None = None,
    has_cuda: bool,
) -> RolloutLayout:
    """Return the engines' layout with the best rank map; refuse what the engine cannot run.

    By default engines have Megatron's TP and EP, so that experts stay where they are, where vLLM
    supports that; `note_on_experts` reports where it does not. With `roles` that give engines
    ranks of their own, they have the largest divisors of both that divide the number of these
    ranks. A controller of servers is the only rank of its engine.
    """
    own_ranks = () if roles is None else roles.rollout
    if roles is not None and roles.has_controllers:
        return RolloutLayout(len(own_ranks), tp_size=1, expert_parallel=False)
    if options.rollout_all2all_backend == NOT_RELOADABLE:
        raise UsageError(
            ": with it vLLM keeps experts in memory that new weights cannot be loaded into",
            flag=f"--rl-rollout-all2all-backend {NOT_RELOADABLE}",
            remedy="choose another backend or leave the flag out",
        )
    if options.rollout_all2all_backend not in ("", *ALL2ALL_BACKENDS):
        raise UsageError(
            "is not a vLLM all-to-all backend",
            flag=f"--rl-rollout-all2all-backend {options.rollout_all2all_backend}",
            remedy=f"choose one of {', '.join(ALL2ALL_BACKENDS)}, or leave the flag out",
        )
    world_size = len(own_ranks) or layout.world_size
    tp_size = options.rollout_tp_size or math.gcd(layout.tp_size, world_size)
    dp_size = _engine_dp_size(options, shape, layout, tp_size, world_size, has_cuda=has_cuda)
    rollout = RolloutLayout(
        world_size=world_size,
        tp_size=tp_size,
        dp_size=dp_size,
        all2all_backend=options.rollout_all2all_backend,
        float8=options.rollout_dtype == FP8,
        expert_parallel=bool(
            shape.experts
            and (layout.ep_size > 1 or dp_size > 1)
            and tp_size * dp_size > 1
            and not options.rollout_no_expert_parallel
        ),
    )
    sizes = _split_over_tp(shape)
    # vLLM copies key/value heads if there are fewer of them than ranks.
    sizes["num_key_value_heads"] = max(shape.num_kv_heads, tp_size)
    if shape.experts and rollout.expert_parallel:
        flag = f"--rl-rollout-ep-size {rollout.ep_size}"
        if not options.rollout_ep_size:
            flag += " (by default, all ranks of an engine)"
        _check_divides(flag, rollout.ep_size, {"number of experts": shape.experts.num_experts})
    elif shape.experts:
        sizes["moe_intermediate_size"] = shape.experts.hidden_size
    flag = f"--rl-rollout-tp-size {tp_size}"
    if not options.rollout_tp_size:
        flag += " (by default, from --tensor-model-parallel-size)"
    _check_divides(flag, tp_size, sizes)
    if not has_cuda:
        _check_runs_on_cpu(shape, rollout)
    job_size = world_size if roles is None else roles.world_size
    _check_nodes(options, rollout, own_ranks or range(world_size), job_size)
    if own_ranks:
        return rollout  # its ranks hold no weights of the actor, so no map is better
    placement = Placement(shape, layout, layers, rollout)
    return with_rank_map(placement, ranks_per_node=ranks_per_node(options, layout.world_size))


def _check_runs_on_cpu(shape: ModelShape, rollout: RolloutLayout) -> None:
    """Refuse what vLLM has no kernels for without a GPU."""
    if shape.latent:
        latent = (shape.latent.kv_lora_rank, shape.latent.qk_rope_head_dim)
        if latent != CPU_LATENT:
            raise UsageError(
                f": kv_lora_rank {latent[0]} with qk_rope_head_dim {latent[1]}: without a GPU vLLM "
                f"runs latent attention of {CPU_LATENT[0]} and {CPU_LATENT[1]} only",
                flag="--rl-hf-checkpoint",
                remedy="use such a checkpoint or a machine with a GPU",
            )
    if shape.delta_net:
        heads = {shape.delta_net.key_head_dim, shape.delta_net.value_head_dim}
        if not heads <= {*CPU_DELTA_NET}:
            raise UsageError(
                f": linear_key_head_dim or linear_value_head_dim {min(heads - {*CPU_DELTA_NET})}: "
                f"without a GPU vLLM runs delta nets with heads of {CPU_DELTA_NET[0]} or "
                f"{CPU_DELTA_NET[1]} only",
                flag="--rl-hf-checkpoint",
                remedy="use such a checkpoint or a machine with a GPU",
            )
    if rollout.dp_size > 1:
        raise UsageError(
            f"spreads experts over {rollout.dp_size} data-parallel ranks of an engine, which vLLM "
            "runs on GPUs only",
            flag=f"--rl-rollout-ep-size {rollout.ep_size}",
            remedy=f"drop it or raise --rl-rollout-tp-size to {rollout.ep_size}",
        )


def _engine_dp_size(
    options: EngineOptions,
    shape: ModelShape,
    layout: TrainLayout,
    tp_size: int,
    world_size: int,
    *,
    has_cuda: bool,
) -> int:
    """Return an engine's data-parallel ranks; experts are spread over these and TP."""
    ep_size = options.rollout_ep_size
    if not ep_size:
        may_spread = has_cuda and shape.experts and not options.rollout_no_expert_parallel
        keeps = may_spread and layout.ep_size % tp_size == 0
        return math.gcd(layout.ep_size // tp_size, world_size // tp_size) if keeps else 1
    flag = f"--rl-rollout-ep-size {ep_size}"
    if shape.experts is None:
        raise UsageError(
            f"needs a model with experts and {shape.architecture} has none",
            flag=flag,
            remedy="drop the flag",
        )
    if options.rollout_no_expert_parallel:
        raise UsageError(
            "contradicts --rl-rollout-no-expert-parallel", flag=flag, remedy="drop one of them"
        )
    if ep_size % tp_size:
        raise UsageError(
            f"is not a multiple of the engine's TP size {tp_size} (EP = TP x data-parallel ranks "
            "of the engine)",
            flag=flag,
            remedy="change it or --rl-rollout-tp-size",
        )
    return ep_size // tp_size


def note_on_experts(options: EngineOptions, placement: Placement) -> list[str]:
    """Report that engines have a smaller EP than Megatron, why, and what it costs a hand-over."""
    train, rollout = placement.train, placement.rollout
    chosen = options.rollout_ep_size or options.rollout_no_expert_parallel
    if chosen or placement.shape.experts is None or train.ep_size <= rollout.tp_size:
        return []
    if rollout.ep_size == train.ep_size:
        return []
    received = int(placement.received_bytes(_rank_map(rollout)).max()) / 1e9
    note = (
        f"engines have EP{rollout.ep_size}, their TP, and not Megatron's EP{train.ep_size}, so "
        f"that experts move: a rank receives up to {received:.3g} GB in a hand-over"
    )
    if train.ep_size % rollout.tp_size:
        return [
            f"{note}; --rl-rollout-tp-size {rollout.tp_size} does not divide "
            f"--expert-model-parallel-size {train.ep_size}, one that does keeps EP"
        ]
    kept = dataclasses.replace(
        rollout, dp_size=train.ep_size // rollout.tp_size, expert_parallel=True, rank_map=()
    )
    would = Placement(placement.shape, train, placement.layers, kept)
    kept = with_rank_map(would, ranks_per_node=ranks_per_node(options, train.world_size))
    least = int(would.received_bytes(_rank_map(kept)).max()) / 1e9
    return [
        f"{note}, with Megatron's EP {least:.3g} GB; vLLM spreads experts over data-parallel ranks "
        "of an engine on GPUs only"
    ]


def own_all_reduce_obstacle(
    options: EngineOptions, rollout: RolloutLayout, environment: Mapping[str, str]
) -> Obstacle | None:
    """Return what prevents vLLM's own all-reduce in the engines of a job on GPUs."""
    return all_reduce_obstacle(
        rollout.tp_size,
        rollout.rank_map,
        environment,
        captures_graphs=not options.rollout_enforce_eager,
        offloads_graphs=options.rollout_offload_cuda_graphs,
    )


def _rank_map(rollout: RolloutLayout) -> Sequence[int]:
    return rollout.rank_map or range(rollout.world_size)


def _check_nodes(
    options: EngineOptions, rollout: RolloutLayout, ranks: Sequence[int], job_size: int
) -> None:
    """Check that each TP group of engines on `ranks` is within one node, or fills several."""
    per_node = ranks_per_node(options, job_size)
    if job_size % per_node:
        raise UsageError(
            f"does not divide the world of {job_size} processes",
            flag=f"--rl-ranks-per-node {per_node}",
            remedy="give the number of processes on each machine",
        )
    for first in range(0, len(ranks), rollout.tp_size):
        group = tuple(ranks[first : first + rollout.tp_size])
        num_nodes = len({rank // per_node for rank in group})
        if num_nodes > 1 and num_nodes * per_node != rollout.tp_size:
            raise UsageError(
                f"lets the engine on {describe_ranks(group)} straddle machines of {per_node} ranks "
                "(--rl-ranks-per-node)",
                flag=f"--rl-rollout-tp-size {rollout.tp_size}",
                remedy="choose another size" + (" or other ranks" if job_size > len(ranks) else ""),
            )
