"""From the flags of a job to what a run is made of on a rank: prompts, engine, hand-over, offload.

`startup` builds the actor, `run_parts` puts everything together.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from mcore_rl import megatron_adapter
from mcore_rl.actor import Actor
from mcore_rl.arguments import RLConfig
from mcore_rl.data import PromptDataset, PromptSource, load_prompts
from mcore_rl.errors import UsageError
from mcore_rl.hybrid_engine.canary import NUM_PROMPTS, Canary
from mcore_rl.hybrid_engine.offload import Offloader, offload_kinds
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.vllm_engine import EngineConfig, VLLMEngine
from mcore_rl.layout_checks import ranks_per_node
from mcore_rl.preflight import Checked
from mcore_rl.reward_functions import resolve_reward
from mcore_rl.startup import Job


def prompt_source(config: RLConfig, path: str) -> PromptSource:
    """How the flags say a prompts file is to be read."""
    return PromptSource(
        path=Path(path),
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        use_chat_template=not config.no_chat_template,
        max_prompt_tokens=config.max_prompt_tokens,
    )


def load_prompt_files(config: RLConfig) -> tuple[PromptDataset, PromptDataset | None]:
    """Training and held-out prompts, from the cache if they were tokenised before."""
    if config.prompts is None:
        raise UsageError("--rl-prompts is missing; give a JSONL or Parquet file of prompts")
    assert config.hf_checkpoint is not None, "checked before"
    files = []
    for path, flag in (
        (config.prompts, "--rl-prompts"),
        (config.eval_prompts, "--rl-eval-prompts"),
    ):
        files.append(
            None
            if path is None
            else load_prompts(
                prompt_source(config, path),
                config.hf_checkpoint,
                cache_dir=config.cache_dir,
                flag=flag,
            )
        )
    train, held_out = files
    assert train is not None
    return train, held_out


def check_data(checked: Checked) -> None:
    """What training needs beyond a valid command line: readable prompts and a reward."""
    load_prompt_files(checked.config)
    resolve_reward(checked.config.reward)


def engine_config(job: Job, *, load_format: str = "dummy") -> EngineConfig:
    """How the flags say the engines are to be started."""
    config = job.config
    on_cpu = not torch.cuda.is_available()
    return EngineConfig(
        model_dir=job.checkpoint.folder,
        tp_size=job.rollout_layout.tp_size,
        dp_size=job.rollout_layout.dp_size,
        rank_map=job.rollout_layout.rank_map,
        all2all_backend=job.rollout_layout.all2all_backend,
        enable_expert_parallel=job.rollout_layout.expert_parallel,
        # A float32 actor samples in bfloat16, too: vLLM's CPU experts know nothing else.
        dtype="float16" if config.precision == "fp16" else "bfloat16",
        max_model_len=config.max_prompt_tokens + config.max_response_tokens,
        max_num_seqs=config.rollout_max_num_seqs,
        kv_cache_bytes=int(config.rollout_kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=config.rollout_gpu_memory_utilization,
        enforce_eager=on_cpu or config.rollout_enforce_eager,
        seed=job.args.seed,
        load_format=load_format,
    )


def build_offloader(job: Job, state: megatron_adapter.TrainState) -> Offloader:
    """What `--rl-offload` asks for, on this rank."""
    has_cuda = torch.cuda.is_available()
    return Offloader(
        functools.partial(megatron_adapter.train_tensors, state),
        offload_kinds(job.config.offload, vars(job.args), has_cuda=has_cuda),
        device=next(state.model[0].parameters()).device,
        keep_gradients=job.config.offload_keep_gradients,
    )


def build_canary(
    job: Job, state: megatron_adapter.TrainState, prompts: PromptDataset
) -> Canary | None:
    """What `--rl-canary-interval` asks for, over the first of `prompts`."""
    interval = job.config.canary_interval
    if interval == 0:
        return None
    rows = [prompts[row] for row in range(min(NUM_PROMPTS, len(prompts)))]
    # vLLM scores prompts untempered, whatever temperature the policy samples at.
    untempered = dataclasses.replace(job.config, temperature=1.0)
    return Canary(
        Actor(job.args, untempered, state, job.train_layout).log_probs,
        [prompt.token_ids.tolist() for prompt in rows],
        micro_batch_size=job.args.micro_batch_size,
        multiple_of=job.train_layout.tp_size * job.train_layout.cp_size,
        interval=interval,
    )


def build_manager(
    job: Job,
    shards: Any,
    engine: VLLMEngine,
    *,
    canary: Canary | None = None,
    offloader: Offloader | None = None,
) -> MegatronVLLMShardingManager:
    """The sharding manager of a job. Collective."""
    return MegatronVLLMShardingManager(
        shards,
        engine,
        job.checkpoint.tensors,
        job.train_layout,
        job.rollout_layout,
        seed=job.args.seed,
        bucket_bytes=job.config.reshard_bucket_mb << 20,
        offloader=offloader,
        ranks_per_node=ranks_per_node(job.config, job.train_layout.world_size),
        dtype=job.config.reshard_dtype,
        delta=job.config.reshard_delta,
        full_every=job.config.reshard_full_interval,
        attest=job.config.attest,
        canary=canary,
    )
