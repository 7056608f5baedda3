"""The models of a run, built from its job: actor, reference, critic, reward model and teacher.

Critic, reward model and teacher are roles (`mcore_rl.trainer.roles.remote`), on the actor's ranks
or on ranks of their own; one table maps each to its builder.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.common.errors import UsageError
from mcore_rl.common.kills import note_stage
from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.peft_export import load_adapter
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import check_complete, load_into_megatron
from mcore_rl.megatron.lora import with_adapters
from mcore_rl.megatron.model_provider import make_actor_provider
from mcore_rl.megatron.policy_head import make_policy_provider
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.roles import CRITIC, REWARD, ROLLOUT, TEACHER
from mcore_rl.moe.routing import OFF, R3
from mcore_rl.moe.routing_replay import RoutingReplay
from mcore_rl.rollout.sample_store import JointRanks, SampleStore
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.learner import Learner
from mcore_rl.trainer.resume.point import ResumePoint
from mcore_rl.trainer.roles.critic import ServedCritic, StepCritic, build_critic
from mcore_rl.trainer.roles.reference import build_reference
from mcore_rl.trainer.roles.remote import LocalRole, RemoteRole, Role, serve
from mcore_rl.trainer.roles.reward_model import RewardModel, build_reward_model
from mcore_rl.trainer.roles.teacher import (
    CalledTeacher,
    StepTeachers,
    Teacher,
    TeacherModel,
    TeacherOf,
    build_swapped_teacher,
    build_teacher_model,
    read_teacher_head,
)
from mcore_rl.trainer.roles.teacher_server import TeacherServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Models:
    """The trained models on this rank."""

    state: megatron_adapter.TrainState  # of the actor
    shards: ModelShards
    critic: Role | None
    teachers: tuple[Role, ...]  # that are not swapped into the actor
    learner: Learner
    sample_store: SampleStore


def build_actor(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> tuple[megatron_adapter.TrainState, ModelShards]:
    """Build the actor through Megatron and fill it from the Hugging Face checkpoint. Collective.

    If `--load` names a Megatron checkpoint (or with `--pretrained-checkpoint`), its weights win and
    the Hugging Face ones are not read. `model_provider` is a fork's own; without it the model
    follows config.json. Unusable weights end every rank with exit code 2.
    """
    if model_provider is not None and job.args.mtp_num_layers:
        raise UsageError(
            "is for the model that mcore_rl builds, and this one is a fork's",
            flag=f"--mtp-num-layers {job.args.mtp_num_layers}",
            remedy="drop it; MTP layers are then carried as they are",
        )
    provider = make_policy_provider(
        model_provider
        or make_actor_provider(job.args, job.spec.shape, job.config.trainer.model_class),
        real_vocab_size=job.spec.shape.vocab_size,
        chunk_tokens=job.config.trainer.log_prob_chunk_tokens,
        in_float32=job.config.trainer.fp32_lm_head,
    )
    lora = job.spec.lora
    if lora is not None:
        layout = job.spec.train_layout
        provider = with_adapters(
            provider,
            lora,
            job.spec.shape,
            layout,
            seed=job.args.seed,
            dithers=job.config.trainer.dither,
        )
    with megatron_adapter.megatron_output_to(log):
        state = megatron_adapter.setup(provider)
    shards = ModelShards(
        state.chunks,
        job.spec.shape,
        job.spec.train_layout,
        dist.get_rank(),
        job.spec.checkpoint.tensors,
        dithers=job.config.trainer.dither,
    )
    check_complete(job.spec.checkpoint, set().union(*objects.all_gather(shards.tensors())))
    is_loaded = megatron_checkpoint.loads_checkpoint(job.args)
    if lora is not None or not is_loaded:  # with LoRA a Megatron checkpoint has the adapters only
        num_bytes = agreed_in_world(lambda: load_into_megatron(job.spec.checkpoint, shards))
        if not is_loaded:
            if lora is not None and (folder := job.config.lora.adapter) is not None:
                agreed_in_world(lambda: load_adapter(state.chunks, Path(folder), lora))
            megatron_adapter.reload_main_params(state)
        logger.info("read %.1f MB of %s", num_bytes / 1e6, job.spec.checkpoint.folder)
    has_main_params = is_loaded and not (job.args.finetune or job.args.no_load_optim)
    if job.config.trainer.dither and not has_main_params:
        megatron_adapter.dither_main_params(state)
    if lora is not None:
        logger.info("LoRA: %s; %d parameters are trained", lora.describe(), lora.num_parameters)
    return state, shards


def build_learner(
    job: Job,
    state: megatron_adapter.TrainState,
    shards: ModelShards,
    critic: Role | None,
    point: ResumePoint | None = None,
    *,
    teachers: Sequence[Role | None] = (),
    prompts: PromptSources | None = None,
    log: TextIO | None = None,
    sample_store: SampleStore | None = None,
) -> Learner:
    """Build actor, reference and critic of a job on the actor's ranks. Collective.

    `critic` comes from `critic_role`, `teachers` from `teacher_roles`; `prompts` are needed if
    their sources have rewards or teachers of their own; `point` is given if the run resumes;
    `sample_store` is a `new_sample_store` by default.
    """
    replay, routed = None, job.spec.routed_layers
    if routed is not None and job.config.trainer.routing_replay != OFF:
        replay = RoutingReplay(state.chunks, routed)
    actor = Actor(job, state, replay=replay)
    reference = None
    if job.config.recipe.needs_reference:
        reference = build_reference(
            state, point, args=job.args, checkpoint=job.spec.checkpoint, shards=shards, log=log
        )
        if job.spec.lora is not None and point is None and _begins_trained(job):
            logger.info(
                "[Reference] the run begins with trained adapters, and its reference is the base "
                "without adapters: they differ from the first step on"
            )
    learner = Learner(
        job,
        actor,
        None if critic is None else StepCritic(critic),
        reference=reference,
        teachers=_step_teachers(job, actor, state, shards, teachers, prompts),
        sample_store=new_sample_store(job) if sample_store is None else sample_store,
    )
    if prompts is not None:
        learner.source_keys = prompts.keys_of
    return learner


def _begins_trained(job: Job) -> bool:
    """Return whether the actor's weights are others than those of --rl-hf-checkpoint."""
    has_adapter = job.config.lora.adapter is not None
    return has_adapter or megatron_checkpoint.loads_checkpoint(job.args)


def _step_teachers(
    job: Job,
    actor: Actor,
    state: megatron_adapter.TrainState,
    shards: ModelShards,
    roles: Sequence[Role | None],
    prompts: PromptSources | None,
) -> StepTeachers | None:
    """Return the teachers of the job as a step asks them; None without any. Collective."""
    teachers: list[Teacher] = []
    places = job.config.teachers
    for place, role in zip(places, roles, strict=True):
        spec = job.spec.teacher_in(place)
        if spec is not None and job.config.teacher.with_hidden:
            read_head = functools.partial(read_teacher_head, spec.checkpoint, spec.shape, state)
            actor.teacher_head = agreed_in_world(read_head)
        if role is not None:
            teachers.append(CalledTeacher(role))
        elif spec is not None:
            scores = actor.teacher_scores
            teachers.append(build_swapped_teacher(scores, state, spec.checkpoint, shards))
    if not teachers:
        return None
    numbers = {each.place: number for number, each in enumerate(places)}
    of_sources = [numbers[each.place] if each else -1 for each in job.config.teachers_of_sources]
    if not any(of_sources):
        return StepTeachers(teachers)
    assert prompts is not None, "samples have teachers by their sources"
    return StepTeachers(teachers, teachers_by_source(prompts, of_sources))


def teachers_by_source(prompts: PromptSources, numbers: Sequence[int]) -> TeacherOf:
    """Return the teachers of samples by the sources of their prompts; `numbers` are by source."""
    return lambda table: np.array(numbers)[prompts.sources_of(table.prompts)]


def new_sample_store(job: Job, make: Callable[..., SampleStore] = SampleStore) -> SampleStore:
    """Return an empty store of a step's samples, and of their experts if training uses them; `make`
    is a subclass."""
    routed = job.spec.routed_layers if job.config.trainer.routing_replay == R3 else None
    ranks, roles = None, job.spec.roles
    if roles.is_separate(ROLLOUT):
        ranks = JointRanks(
            job.joint_rank,
            len(roles.actor) + len(roles.rollout),
            len(roles.actor),
            job.world.joint_groups[ROLLOUT].exchange,
        )
    return make(
        job.spec.train_layout,
        job.spec.rollout_layout,
        job.spec.layers,
        routed,
        has_turns=job.config.environments.environment is not None,
        num_top=job.config.recipe.score_centering,
        ranks=ranks,
    )


def critic_role(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    iteration: int = 0,
    log: TextIO | None = None,
) -> Role | None:
    """Build the critic, if there is one, as the actor's ranks call it. Collective.

    `iteration` is the actor's step, `model_provider` a fork's own.
    """
    if job.spec.critic is None:
        return None
    return _role(job, CRITIC, model_provider, log=log, iteration=iteration)


def reward_role(job: Job, *, log: TextIO | None = None) -> Role | None:
    """Build the reward model, if there is one, as the actor's ranks call it. Collective."""
    return None if job.spec.reward_model is None else _role(job, REWARD, None, log=log)


def teacher_roles(job: Job, *, log: TextIO | None = None) -> list[Role | None]:
    """Build the teachers as the actor's ranks call them, in the order of `RLConfig.teachers`; None
    for one whose weights the actor's model takes. Collective."""
    roles: list[Role | None] = []
    for place in job.config.teachers:
        spec = job.spec.teacher_in(place)
        if place.url is not None:
            roles.append(LocalRole(TeacherServer(place.url, job.config.teacher)))
        elif spec is None or spec.is_swapped:
            roles.append(None)
        else:
            number = job.spec.teachers.index(spec)
            roles.append(_role(job, TEACHER, None, log=log, number=number))
    return roles


def _role(
    job: Job,
    name: str,
    model_provider: Callable[..., Any] | None,
    *,
    log: TextIO | None,
    **how: Any,
) -> Role:
    """Build a role here or on ranks of its own, as the flags say; `how` goes to its builder."""
    title, build = _ROLES[name]
    if job.spec.roles.is_separate(name):
        return RemoteRole(title, job.world.bridges.get(name), job.world.joint_groups[name], **how)
    return LocalRole(build(job, model_provider, log=log, **how))


def serve_role(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> None:
    """Serve a role on ranks of its own until the actor ends the run. Collective over the role's
    ranks. `model_provider` is a fork's own, for a critic."""
    title, build = _ROLES[job.world.role]
    note_stage(f"serving as {title}")
    bridge, group = job.world.bridges[job.world.role], job.world.joint_groups[job.world.role]
    serve(title, bridge, group, functools.partial(build, job, model_provider, log=log))


def _served_critic(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    iteration: int = 0,
    log: TextIO | None = None,
) -> ServedCritic:
    """Build the critic on the ranks of this process's role. Collective."""
    assert job.spec.critic is not None
    is_separate = job.spec.roles.is_separate(CRITIC)
    critic = build_critic(
        job.spec.critic, job.config, job.args, model_provider, actor_iteration=iteration, log=log
    )
    if is_separate:  # else these ranks restore the actor's
        critic.restore_random_states()
    return ServedCritic(critic, job.config.trainer, is_separate=is_separate, log=log)


def _served_reward_model(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> RewardModel:
    """Build the model of `--rl-reward-model` on the ranks of this process's role, by its own
    config.json even in a fork. Collective."""
    assert job.spec.reward_model is not None
    return build_reward_model(job.spec.reward_model, job.config, job.args, log=log)


def _served_teacher(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    number: int,
    log: TextIO | None = None,
) -> TeacherModel:
    """Build the model of a teacher in a folder, counted from 0, on the ranks of this process's
    role. Collective."""
    return build_teacher_model(job.spec.teachers[number], job.config, job.args, log=log)


# A role's name in messages, and its builder, on either ranks.
_ROLES: dict[str, tuple[str, Callable[..., Any]]] = {
    CRITIC: ("critic", _served_critic),
    REWARD: ("reward model", _served_reward_model),
    TEACHER: ("teacher", _served_teacher),
}
