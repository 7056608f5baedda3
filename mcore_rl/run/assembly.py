"""Puts the parts of a run together on this rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mcore_rl.batching.accounting import describe
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.job.layout import check_stages
from mcore_rl.job.memory_report import memory_lines
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import fingerprint
from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace.tracer import Tracer
from mcore_rl.observe.watchdog import StageWatchdog, own_connection
from mcore_rl.resume.point import find_resume_point
from mcore_rl.resume.trainer_state import LOADED
from mcore_rl.roles.remote import Here, Role
from mcore_rl.roles.reward import ModelReward
from mcore_rl.rollout.collector import Collector
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.run.builders import (
    batches_of,
    build_canary,
    build_learner,
    build_manager,
    build_offloader,
    critic_role,
    engine_config,
    load_prompt_files,
    reward_role,
    reward_spec,
)
from mcore_rl.run.learner import Learner
from mcore_rl.run.parts import Parts
from mcore_rl.run.recorder import RunRecorder
from mcore_rl.run.saver import RunSaver
from mcore_rl.run.startup import Job, build_actor

logger = logging.getLogger(__name__)


def build_parts(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> Parts:
    """Build actor, engine and the rest on this rank. Collective."""
    started = time.perf_counter()
    prompts, eval_prompts = load_prompt_files(
        job.config, trust_remote_code=job.args.trust_remote_code
    )
    point = find_resume_point(
        job.args,
        job.config,
        checkpoint=job.checkpoint,
        layout=job.train_layout.describe(),
        prompts=prompts,
        eval_prompts=eval_prompts,
    )
    began_with = _beginning(job) if point is None else point.state.began_with
    state, shards = build_actor(job, model_provider, log=log)
    # On ranks of its own it is built while the engines start.
    critic = critic_role(job, model_provider, iteration=state.iteration, log=log)
    learner = build_learner(job, state, shards, critic, point, log=log)
    offloader = build_offloader(job, state, critic)
    canary = build_canary(job, state, prompts)
    with offloader.everything_away():
        engine = VLLMEngine(engine_config(job))
        manager = build_manager(job, shards, engine, canary=canary, offloader=offloader)
    watchdog = _watchdog(job)
    timers = StageTimers(watchdog)
    reward_model = reward_role(job, log=log)
    workers = RolloutWorkers(
        engine,
        job.rollout_layout,
        job.config,
        reward_spec(job.config),
        None if reward_model is None else ModelReward(reward_model),
    )
    position = state.iteration * job.config.num_prompts_per_step
    if point is not None:
        position = point.state.sampler_position
        manager.weight_version = point.state.weight_version
        learner.kl_controller.load_state_dict(dict(point.state.kl_controller))
    collector = Collector(
        workers, prompts, job.config, seed=job.args.seed, timers=timers, position=position
    )
    recorder = _recorder(job, state, shards.device, timers, learner)
    saver = RunSaver(
        job,
        state=state,
        learner=learner,
        manager=manager,
        collector=collector,
        prompts=prompts,
        eval_prompts=eval_prompts,
        timers=timers,
        has_loaded=point is not None,
        began_with=began_with,
        log=log,
    )
    _say_sizes(job, learner, critic)
    tracer = _tracer(job, state.iteration)
    _listen(manager, watchdog, recorder, tracer)
    tracer.start()
    if point is not None and point.rng is not None:
        point.rng.restore()  # at last: what is built before draws from them, too
    logger.info("model and engines ready after %.0f s", time.perf_counter() - started)
    return Parts(
        job,
        first_step=state.iteration,
        eval_prompts=eval_prompts,
        learner=learner,
        shards=shards,
        engine=engine,
        manager=manager,
        workers=workers,
        collector=collector,
        timers=timers,
        watchdog=watchdog,
        tracer=tracer,
        saver=saver,
        recorder=recorder,
        roles=[role for role in (critic, reward_model) if role is not None],
    )


def _beginning(job: Job) -> str:
    """`TrainerState.began_with` of a run that begins. Collective."""
    if megatron_checkpoint.loads_checkpoint(job.args):
        return LOADED
    return fingerprint(job.checkpoint)


def _watchdog(job: Job) -> StageWatchdog:
    world_size = dist.get_world_size()
    return StageWatchdog(
        job.config.stage_timeout_seconds,
        rank=dist.get_rank(),
        world_size=world_size,
        connect=own_connection if world_size > 1 else None,
    )


def _recorder(
    job: Job,
    state: megatron_adapter.TrainState,
    device: torch.device,
    timers: StageTimers,
    learner: Learner,
) -> RunRecorder:
    expert_load = None
    if job.shape.experts is not None:
        expert_load = ExpertLoad(
            state.chunks,
            num_layers=job.shape.num_layers,
            num_experts=job.shape.experts.num_experts,
        )
    return RunRecorder(
        job,
        first_step=state.iteration,
        device=device,
        timers=timers,
        reward_names=reward_spec(job.config).names,
        rates=learner.rates,
        expert_load=expert_load,
    )


def _tracer(job: Job, first_step: int) -> Tracer:
    rank, layout = dist.get_rank(), job.train_layout
    return Tracer(
        job.config.trace,
        first_step=first_step,
        num_steps_left=job.config.num_steps - first_step,
        folder=job.config.directory / "trace",
        rank=rank,
        label=f"tp{layout.tp_rank(rank)} pp{layout.pp_rank(rank)} "
        f"cp{layout.cp_rank(rank)} dp{layout.dp_rank(rank)}",
    )


def _listen(
    manager: MegatronVLLMShardingManager,
    watchdog: StageWatchdog,
    recorder: RunRecorder,
    tracer: Tracer,
) -> None:
    """Have the others hear of every switch between the modes."""
    manager.on_reshard_start += [
        lambda report: watchdog.enter(f"hand-over {report.direction}"),
        tracer.handover_started,
    ]
    manager.on_reshard_end += [
        lambda _: watchdog.leave(),
        recorder.note_reshard,
        tracer.handover_ended,
    ]


def _say_sizes(job: Job, learner: Learner, critic: Role | None) -> None:
    """How large the updates are, of a critic apart too, once that is there; and what saves
    memory."""
    for line in (*describe(batches_of(job, learner)), *_memory_lines(job, critic)):
        logger.info("%s", line)


def _memory_lines(job: Job, critic: Role | None) -> list[str]:
    """What flags save of memory, of the models on these ranks."""
    lines = memory_lines(job.config, vars(job.args), job.shape, job.train_layout, job.layers)
    if isinstance(critic, Here) and job.critic is not None:
        world = critic.served.model.world
        args, layout = vars(world.args), world.layout
        layers = check_stages(job.critic.shape, layout.pp_size, args)
        lines += memory_lines(job.config, args, job.critic.shape, layout, layers, name="critic")
    return lines
