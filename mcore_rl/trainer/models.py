"""The models of a run, from its job: actor, reference, critic and reward model.

Critic and reward model are roles (`mcore_rl.roles.remote`): on the actor's ranks or on ranks of
their own, which one table says how to build.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import torch.distributed as dist

from mcore_rl.batching.accounting import BatchAccounting, batch_accounting
from mcore_rl.batching.dealing import SampleFlops
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.shared_prompts import shares_prompts
from mcore_rl.common import objects
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.flags.options import RLConfig
from mcore_rl.flags.roles import CRITIC, REWARD
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import check_complete, load_into_megatron
from mcore_rl.megatron.policy_head import make_actor_provider, make_policy_provider
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.megatron.world import MegatronWorld
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.resume.point import ResumePoint
from mcore_rl.roles.critic import Critic, ServedCritic, StepCritic
from mcore_rl.roles.critic_startup import BuiltCritic, build_critic, restore_random_states
from mcore_rl.roles.remote import Apart, Here, Role, serve
from mcore_rl.roles.reward_model import RewardModel, build_reward_model
from mcore_rl.trainer.actor import Actor, ReferencePolicy
from mcore_rl.trainer.learner import Learner
from mcore_rl.trainer.start import Job

logger = logging.getLogger(__name__)


def build_actor(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> tuple[megatron_adapter.TrainState, ModelShards]:
    """Build the actor through Megatron and fill it from the Hugging Face checkpoint. Collective.

    With `--load` naming a Megatron checkpoint (or `--pretrained-checkpoint`), its weights win and
    the Hugging Face ones are not read. `model_provider` is a fork's own; without it the model
    follows config.json. Weights that a user must mend end every rank with exit code 2.
    """
    provider = make_policy_provider(
        model_provider or make_actor_provider(job.args, job.shape),
        real_vocab_size=job.shape.vocab_size,
        chunk_tokens=job.config.log_prob_chunk_tokens,
    )
    with megatron_adapter.megatron_output_to(log):
        state = megatron_adapter.setup(provider)
    shards = ModelShards(
        state.chunks, job.shape, job.train_layout, dist.get_rank(), dict(job.checkpoint.tensors)
    )
    check_complete(job.checkpoint, set().union(*objects.all_gather(shards.tensors())))
    if not megatron_checkpoint.loads_checkpoint(job.args):
        num_bytes = agreed_in_world(lambda: load_into_megatron(job.checkpoint, shards))
        megatron_adapter.reload_main_params(state)
        logger.info("read %.1f MB of %s", num_bytes / 1e6, job.checkpoint.folder)
    return state, shards


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
        reference=_reference(job, state, shards, point, log=log),
        seed=job.args.seed,
    )


def _reference(
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
    title, build = _ROLES[name]
    if job.roles.is_apart(name):
        return Apart(title, job.world.bridges.get(name), **how)
    return Here(build(job, model_provider, log=log, **how))


def serve_role(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> None:
    """Be a rank of a role that is not the actor's, until the actor ends the run. Collective over
    the role's ranks. `model_provider` is a fork's own, for a critic."""
    title, build = _ROLES[job.world.role]
    bridge = job.world.bridges[job.world.role]
    serve(title, bridge, functools.partial(build, job, model_provider, log=log))


def _served_critic(
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


def _served_reward_model(
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


# What a role is called, and what makes it, here or on ranks of its own.
_ROLES: dict[str, tuple[str, Callable[..., Any]]] = {
    CRITIC: ("critic", _served_critic),
    REWARD: ("reward model", _served_reward_model),
}


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
    """`micro_batching` of a model in its layout. `values` are Megatron's flags by destination,
    validated or not; `interleaved` says whether a pipeline stage has several model chunks."""
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


def accounting_of(
    config: RLConfig,
    *,
    actor: tuple[int, MicroBatching],
    critic: tuple[int, MicroBatching] | None,
) -> BatchAccounting:
    """The sequences, micro-batches and updates that the flags make, of the data-parallel sizes and
    micro-batches of the models that learn."""
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
