"""Engines, hand-overs, offloading and canaries of a job, from its flags."""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.memory.offload import Offloader, kinds_at_start, offload_kinds
from mcore_rl.hybrid_engine.proof.canary import NUM_PROMPTS, Canary, LogProbs
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.carried import CarriedTensors
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.lora import ADAPTERS, factor_shapes
from mcore_rl.model.speculation import parse_speculation
from mcore_rl.model.tensors import TensorInfo
from mcore_rl.moe.routing import R3
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.remote import LocalRole, Role

# Engines take minutes to start. A process that is gone ends the connections of the others.
_PATIENCE_SECONDS = 7.0 * 24 * 3600


def engine_config(job: Job, *, load_format: str = "dummy") -> EngineConfig:
    """Return the engines' configuration, from the flags."""
    config = job.config
    on_cpu = not torch.cuda.is_available()
    return EngineConfig(
        model_dir=job.spec.checkpoint.folder,
        tp_size=job.spec.rollout_layout.tp_size,
        dp_size=job.spec.rollout_layout.dp_size,
        rank_map=job.spec.rollout_layout.rank_map,
        all2all_backend=job.spec.rollout_layout.all2all_backend,
        enable_expert_parallel=job.spec.rollout_layout.expert_parallel,
        # A float32 actor samples in bfloat16, too: vLLM's CPU experts support nothing else.
        dtype="float16" if config.trainer.precision == "fp16" else "bfloat16",
        float8=job.spec.float8,
        head_in_float32=config.trainer.fp32_lm_head,
        num_top_tokens=config.recipe.score_centering,
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        max_num_seqs=config.engine.rollout_max_num_seqs,
        kv_cache_bytes=int(config.engine.rollout_kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=config.engine.rollout_gpu_memory_utilization,
        enforce_eager=on_cpu or config.engine.rollout_enforce_eager,
        offload_graphs=config.engine.rollout_offload_cuda_graphs,
        seed=job.args.seed,
        speculation=parse_speculation(config.engine.speculate),
        lora=job.spec.lora if config.lora.rollout == ADAPTERS else None,
        keeps_kv=config.rollout.keeps_kv,
        load_format=load_format,
        routed_layers=job.spec.routed_layers if config.trainer.routing_replay == R3 else None,
        trust_remote_code=job.args.trust_remote_code,
        timeout_seconds=60 * job.args.distributed_timeout_minutes,
    )


def hand_over(
    job: Job,
    *,
    shards: ModelShards | None = None,
    engine: VLLMEngine | None = None,
    canary: Canary | None = None,
) -> HandOver:
    """Return the hand-over between the actor's ranks, which give `shards`, and engines on ranks of
    their own, which give `engine`. Collective over both."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    roles, store = job.spec.roles, job.world.weights_store
    assert store is not None, "the engines have no ranks of their own"
    world = JoinedWorld(
        store,
        rank=job.joint_rank,
        size=len(roles.actor) + len(roles.rollout),
        name="hand_over",
        backend="nccl" if is_cuda else "gloo",
        timeout_seconds=_PATIENCE_SECONDS,
    )
    speculation = parse_speculation(job.config.engine.speculate)
    drafts = speculation is not None and speculation.has_drafter
    return HandOver(
        job.spec.checkpoint.tensors,
        None,
        hand_over_options(job),
        shards=shards,
        engine=engine,
        shape=job.spec.shape,
        device=device,
        world=world,
        canary=canary,
        carried=CarriedTensors(job.spec.checkpoint) if drafts else None,
        adapters=served_adapters(engine_config(job)),
    )


def served_adapters(engine: EngineConfig) -> dict[str, TensorInfo] | None:
    """Return the factors that engines apply, in the engines' dtype; None: they get merged weights.

    They have their names in an adapter's file."""
    if engine.lora is None:
        return None
    itemsize = getattr(torch, engine.dtype).itemsize
    shapes = factor_shapes(engine.lora)
    return {name: TensorInfo(shape, engine.dtype, itemsize) for name, shape in shapes.items()}


def hand_over_options(job: Job) -> HandOverOptions:
    """Return the options of a job's hand-overs, from the flags."""
    options, dtype = job.config.weight_sync, job.config.weight_sync.reshard_dtype
    if job.config.trainer.precision == "fp16" and dtype == "checkpoint":
        dtype = "fp16"  # of actor and engines: the checkpoint's bf16 has three bits less
    return HandOverOptions(
        seed=job.args.seed,
        bucket_bytes=options.reshard_bucket_mb << 20,
        ranks_per_node=job.spec.ranks_per_node,
        dtype=dtype,
        delta=options.reshard_delta,
        full_every=options.reshard_full_interval,
        attest=options.attest,
    )


def make_canary(
    job: Job, log_probs: LogProbs | None, prompts: PromptSources, count_multiple_of: int = 1
) -> Canary | None:
    """Return the canary of `--rl-canary-interval`, over the first of `prompts`; see `Canary`."""
    options = job.config.weight_sync
    if options.canary_interval == 0:
        return None
    rows = [prompts[row] for row in range(min(NUM_PROMPTS, len(prompts)))]
    return Canary(
        log_probs,
        [prompt.token_ids.tolist() for prompt in rows],
        interval=options.canary_interval,
        tolerance=options.canary_tolerance,
        count_multiple_of=count_multiple_of,
    )


def build_manager(
    job: Job,
    shards: Any,
    engine: VLLMEngine,
    *,
    canary: Canary | None = None,
    offloader: Offloader | None = None,
) -> MegatronVLLMShardingManager:
    """Build the sharding manager of a job; the engine sleeps from here on. Collective."""
    return MegatronVLLMShardingManager(
        shards,
        engine,
        job.spec.checkpoint.tensors,
        job.spec.train_layout,
        job.spec.rollout_layout,
        hand_over_options(job),
        offloader=offloader,
        canary=canary,
        carried=None if engine.drafter is None else CarriedTensors(job.spec.checkpoint),
        adapters=served_adapters(engine.config),
    )


def build_offloader(
    job: Job, state: megatron_adapter.TrainState, critic: Role | None = None
) -> Offloader:
    """Build the offloader of `--rl-offload` for the actor, and for a critic on these ranks."""
    has_cuda = torch.cuda.is_available()
    states = [state, critic.served.model.state] if isinstance(critic, LocalRole) else [state]

    def train_tensors() -> dict[str, list[tuple[str, torch.Tensor]]]:
        by_kind: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for each in states:
            for kind, tensors in megatron_adapter.train_tensors(each).items():
                by_kind.setdefault(kind, []).extend(tensors)
        return by_kind

    return Offloader(
        train_tensors,
        offload_kinds(job.config.weight_sync.offload, vars(job.args), has_cuda=has_cuda),
        device=state.device,
        at_start=kinds_at_start(vars(job.args)),
        keep_gradients=job.config.weight_sync.offload_keep_gradients,
    )


def build_canary(
    job: Job, state: megatron_adapter.TrainState, prompts: PromptSources
) -> Canary | None:
    """Build the canary of `--rl-canary-interval`, over the first of `prompts`."""
    # vLLM scores prompts untempered, at any sampling temperature of the policy.
    log_probs = Actor(job, state, temperature=1.0).log_probs
    return make_canary(job, log_probs, prompts, job.micro_batching().count_multiple_of)
