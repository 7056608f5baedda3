"""From the flags of a job to what a run is made of on a rank: prompts, engine, hand-over, offload.

`startup` builds the actor, `assembly` puts everything together.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from mcore_rl.batching.accounting import BatchAccounting, batch_accounting
from mcore_rl.batching.balance import SampleFlops
from mcore_rl.batching.micro_batching import MicroBatching
from mcore_rl.batching.shared_prompts import shares_prompts
from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_file import PromptSource
from mcore_rl.data.prompts import PromptDataset, load_prompts
from mcore_rl.data.tokenizer import HOW_TO_END, missing_end
from mcore_rl.flags.options import RLConfig
from mcore_rl.flags.roles import CRITIC, REWARD
from mcore_rl.hybrid_engine.memory.offload import Offloader, kinds_at_start, offload_kinds
from mcore_rl.hybrid_engine.proof.canary import NUM_PROMPTS, Canary
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.vllm.engine import EngineConfig, VLLMEngine
from mcore_rl.job.layout import ranks_per_node
from mcore_rl.job.preflight import Checked
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import load_into_megatron
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.megatron.world import MegatronWorld
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.resume.point import ResumePoint
from mcore_rl.rewards.specs import RewardSpec, check_rewards, parse_rewards
from mcore_rl.roles.critic import Critic, ServedCritic, StepCritic
from mcore_rl.roles.critic_startup import BuiltCritic, build_critic, restore_random_states
from mcore_rl.roles.remote import Apart, Here, Role, serve
from mcore_rl.roles.reward_model import RewardModel, build_reward_model
from mcore_rl.run.actor import Actor, ReferencePolicy
from mcore_rl.run.learner import Learner
from mcore_rl.run.startup import Job

logger = logging.getLogger(__name__)


def prompt_source(config: RLConfig, path: str, *, trust_remote_code: bool = False) -> PromptSource:
    """How the flags say a prompts file is to be read."""
    return PromptSource(
        path=Path(path),
        prompt_column=config.prompt_column,
        answer_column=config.answer_column,
        use_chat_template=not config.no_chat_template,
        max_prompt_tokens=config.max_prompt_tokens,
        trust_remote_code=trust_remote_code,
    )


def load_prompt_files(
    config: RLConfig, *, trust_remote_code: bool = False
) -> tuple[PromptDataset, PromptDataset | None]:
    """Training and held-out prompts, from the cache if they were tokenised before.

    `trust_remote_code` is Megatron's --trust-remote-code.
    """
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
                prompt_source(config, path, trust_remote_code=trust_remote_code),
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
    trusts = checked.trust_remote_code
    load_prompt_files(checked.config, trust_remote_code=trusts)
    check_rewards(reward_spec(checked.config))
    if int(os.environ.get("RANK", 0)) == 0:
        _warn_without_end(checked, trust_remote_code=trusts)


def _warn_without_end(checked: Checked, *, trust_remote_code: bool) -> None:
    fault = missing_end(checked.checkpoint.folder, trust_remote_code=trust_remote_code)
    if fault is not None:
        logger.warning(
            "%s: every response will be cut at --rl-max-response-tokens %d; %s",
            fault,
            checked.config.max_response_tokens,
            HOW_TO_END,
        )


def reward_spec(config: RLConfig) -> RewardSpec:
    """The rewards that the flags name, with their weights."""
    return parse_rewards(
        config.reward,
        config.reward_weights,
        num_workers=config.reward_workers,
        timeout_seconds=config.reward_timeout_seconds,
        imports=config.import_,
        url=config.reward_url,
        header_env=config.reward_http_header_env,
        pooling_url=config.reward_pooling_url,
        pooling_header_env=config.reward_pooling_header_env,
        http_batch=config.reward_http_batch,
        http_concurrency=config.reward_http_concurrency,
        http_retries=config.reward_http_retries,
        memory_gib=config.reward_memory_gib,
        environment_names=config.reward_env,
    )


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
        trust_remote_code=job.args.trust_remote_code,
        timeout_seconds=60 * job.args.distributed_timeout_minutes,
    )


def micro_batching(job: Job) -> MicroBatching:
    """How the flags say samples become micro-batches."""
    return micro_batching_of(
        job.config,
        job.shape,
        job.train_layout,
        vars(job.args),
        interleaved=job.args.virtual_pipeline_model_parallel_size is not None,
    )


def micro_batching_of(
    config: RLConfig,
    shape: ModelShape,
    layout: TrainLayout,
    values: Mapping[str, Any],
    *,
    interleaved: bool,
) -> MicroBatching:
    """The same of a model in its layout. `values` are Megatron's flags by destination, validated or
    not; `interleaved` says whether a pipeline stage has several model chunks."""
    group = values.get("microbatch_group_size_per_vp_stage") or layout.pp_size
    return MicroBatching(
        max_tokens=config.max_tokens_per_microbatch,
        micro_batch_size=values["micro_batch_size"],
        multiple_of=layout.tp_size * layout.cp_size,
        cp_size=layout.cp_size,
        same_length=layout.pp_size > 1,
        count_multiple_of=group if interleaved else 1,
        share_prompts=shares_prompts(
            config.share_prompts, values, config.max_tokens_per_microbatch
        ),
        cost=SampleFlops.of(shape),
    )


def build_reference(
    job: Job,
    state: megatron_adapter.TrainState,
    shards: ModelShards,
    point: ResumePoint | None,
    *,
    log: TextIO | None = None,
) -> ReferencePolicy | None:
    """The policy that the KL is taken to, if there is one: the one that the run began with, or a
    later one that it was saved with. Collective."""
    if not job.config.recipe.needs_reference:
        return None
    reference = ReferencePolicy(state)  # of a run that begins, whatever it was loaded from
    if point is not None:  # the actor goes on from a later policy
        reference.version = point.state.reference_version
        if point.reference is not None:
            with megatron_adapter.megatron_output_to(log):
                megatron_checkpoint.load_weights(job.args, state, state.iteration, point.reference)
        else:
            load_into_megatron(job.checkpoint, shards)
        reference.swap()
    return reference


def build_learner(
    job: Job,
    state: megatron_adapter.TrainState,
    shards: ModelShards,
    critic: Role | None,
    point: ResumePoint | None = None,
    *,
    log: TextIO | None = None,
) -> Learner:
    """Actor, reference and critic of a job; the one who runs is the actor. Collective.

    `critic` is that of `critic_role`, `point` is there if the run goes on from it.
    """
    batching = micro_batching(job)
    actor = Actor(job.args, job.config, state, job.train_layout, batching)
    return Learner(
        job.config,
        job.train_layout,
        batching,
        actor,
        None if critic is None else StepCritic(critic, actor.runner),
        reference=build_reference(job, state, shards, point, log=log),
        seed=job.args.seed,
    )


def critic_role(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    iteration: int = 0,
    log: TextIO | None = None,
) -> Role | None:
    """The critic as the actor's ranks ask it, if there is one. Collective.

    `iteration` is the step that the actor is of, `model_provider` a fork's own.
    """
    if job.critic is None:
        return None
    return _role(job, CRITIC, model_provider, log=log, iteration=iteration)


def reward_role(job: Job, *, log: TextIO | None = None) -> Role | None:
    """The reward model as the actor's ranks ask it, if there is one. Collective."""
    return None if job.reward_model is None else _role(job, REWARD, None, log=log)


def _role(
    job: Job,
    name: str,
    model_provider: Callable[..., Any] | None,
    *,
    log: TextIO | None,
    **how: Any,
) -> Role:
    """Here or apart, as the flags say; `how` goes to what builds it."""
    if job.roles.is_apart(name):
        return Apart(NAMES[name], job.world.bridges.get(name), **how)
    return Here(BUILDERS[name](job, model_provider, log=log, **how))


def serve_role(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> None:
    """Be a rank of a role that is not the actor's, until the actor ends the run. Collective over
    the role's ranks. `model_provider` is a fork's own, for a critic."""
    role = job.world.role
    build = functools.partial(BUILDERS[role], job, model_provider, log=log)
    serve(NAMES[role], job.world.bridges[role], build)


def served_critic(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    iteration: int = 0,
    log: TextIO | None = None,
) -> ServedCritic:
    """The critic on the ranks of this process's role. Collective."""
    assert job.critic is not None
    built = build_critic(
        job.critic, job.config, job.args, model_provider, actor_iteration=iteration, log=log
    )
    return serving(job, built, log=log)


def serving(job: Job, built: BuiltCritic, *, log: TextIO | None = None) -> ServedCritic:
    """What scores and learns, of what `build_critic` returns."""
    assert job.critic is not None
    batching = micro_batching(
        dataclasses.replace(
            job, args=built.world.args, train_layout=built.world.layout, shape=job.critic.shape
        )
    )
    model = Critic(built.world, job.config, built.state, batching)
    is_apart = job.roles.is_apart(CRITIC)
    if is_apart:  # else the actor's are these
        restore_random_states(built)
    return ServedCritic(model, job.config, is_apart=is_apart, log=log)


def served_reward_model(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> RewardModel:
    """That of `--rl-reward-model`, on the ranks of this process's role; its own config.json
    describes it, whatever a fork provides. Collective."""
    checked = job.reward_model
    assert checked is not None

    def batching(world: MegatronWorld) -> MicroBatching:
        own = dataclasses.replace(
            job, args=world.args, train_layout=world.layout, shape=checked.shape
        )
        return micro_batching(own)

    return build_reward_model(checked, job.args, batching, log=log)


# What makes a role, here or on ranks of its own, and what it is called.
BUILDERS: dict[str, Callable[..., Any]] = {CRITIC: served_critic, REWARD: served_reward_model}
NAMES = {CRITIC: "critic", REWARD: "reward model"}


def batches_of(job: Job, learner: Learner) -> BatchAccounting:
    """The sequences, micro-batches and updates that the flags of a job make."""
    critic = learner.critic
    return accounting_of(
        job.config,
        actor=(job.train_layout.dp_size, micro_batching(job)),
        critic=None if critic is None else critic.facts(),
    )


def accounting_of(
    config: RLConfig,
    *,
    actor: tuple[int, MicroBatching],
    critic: tuple[int, MicroBatching] | None,
) -> BatchAccounting:
    """The same of the data-parallel sizes and micro-batches of the models that learn."""
    recipe = config.recipe
    return batch_accounting(
        num_prompts=config.num_prompts_per_step,
        samples_per_prompt=config.samples_per_prompt,
        num_mini_batches=config.num_mini_batches,
        num_epochs=config.num_epochs,
        num_steps=config.num_steps,
        max_sequence_tokens=config.max_prompt_tokens + config.max_response_tokens,
        actor=actor,
        critic=critic,
        critic_warmup_steps=config.critic_warmup_steps or 0,
        max_draws=1 + recipe.max_refills if recipe.dynamic_sampling else 1,
    )


def build_offloader(
    job: Job, state: megatron_adapter.TrainState, critic: Role | None = None
) -> Offloader:
    """What `--rl-offload` asks for, on this rank, of the actor and of a critic that is here."""
    has_cuda = torch.cuda.is_available()
    states = [state, critic.served.model.state] if isinstance(critic, Here) else [state]

    def train_tensors() -> dict[str, list[tuple[str, torch.Tensor]]]:
        found: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for each in states:
            for kind, tensors in megatron_adapter.train_tensors(each).items():
                found.setdefault(kind, []).extend(tensors)
        return found

    return Offloader(
        train_tensors,
        offload_kinds(job.config.offload, vars(job.args), has_cuda=has_cuda),
        device=next(state.model[0].parameters()).device,
        at_start=kinds_at_start(vars(job.args)),
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
    batching = micro_batching(job)
    return Canary(
        Actor(job.args, untempered, state, job.train_layout, batching).log_probs,
        [prompt.token_ids.tolist() for prompt in rows],
        interval=interval,
        tolerance=job.config.canary_tolerance,
        count_multiple_of=batching.count_multiple_of,
    )


def _travels_as(config: RLConfig) -> str:
    """As in the checkpoint, but for an actor and engines in fp16: bf16 has three bits less."""
    if config.precision == "fp16" and config.reshard_dtype == "checkpoint":
        return "fp16"
    return config.reshard_dtype


def build_manager(
    job: Job,
    shards: Any,
    engine: VLLMEngine,
    *,
    canary: Canary | None = None,
    offloader: Offloader | None = None,
) -> MegatronVLLMShardingManager:
    """The sharding manager of a job; the engine sleeps from here on. Collective."""
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
        dtype=_travels_as(job.config),
        delta=job.config.reshard_delta,
        full_every=job.config.reshard_full_interval,
        attest=job.config.attest,
        canary=canary,
    )
