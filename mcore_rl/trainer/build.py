"""Building everything that a run consists of on this rank, from its job: `build`.

A run with engines, on these ranks or others, and supervised training are built apart; they share
their models, monitors and checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch.distributed as dist

from mcore_rl.batching.accounting import describe
from mcore_rl.common.kills import note_stage
from mcore_rl.data.prompts import PromptSources, log_examples
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.model.roles import ROLLOUT
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.watchdog import StageWatchdog
from mcore_rl.planner.savings import memory_lines
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.trainer.demonstration_store import DemonstrationStore
from mcore_rl.trainer.hand_overs import (
    build_canary,
    build_manager,
    build_offloader,
    engine_config,
)
from mcore_rl.trainer.inputs import Inputs, read_prompts, read_rows, start_of
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.mixed import MixedDemonstrations, read_mixed
from mcore_rl.trainer.models import (
    Models,
    build_actor,
    build_learner,
    critic_role,
    new_sample_store,
    reward_role,
    teacher_roles,
)
from mcore_rl.trainer.monitors import Monitors, build_monitors
from mcore_rl.trainer.plan_inputs import model_of_args
from mcore_rl.trainer.recorder import SampleMetrics
from mcore_rl.trainer.resume.point import warn_of_other_demonstrations
from mcore_rl.trainer.roles.remote import LocalRole, RemoteRole, Role
from mcore_rl.trainer.rollouts import LocalRollouts, Rollouts
from mcore_rl.trainer.sampling import bank_folder, build_sampling
from mcore_rl.trainer.saver import RunSaver
from mcore_rl.trainer.separate import (
    RemoteRollouts,
    RemoteSampleStore,
    connect_engines,
    start_engines,
)
from mcore_rl.trainer.step_metrics import sampled_metrics
from mcore_rl.trainer.supervised import SupervisedData, supervised_metrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run on this rank; `mcore_rl.train.Run` has its stages."""

    inputs: Inputs[Any]
    models: Models
    rollouts: Rollouts
    monitors: Monitors
    saver: RunSaver

    @property
    def roles(self) -> tuple[Role, ...]:
        """Critic, reward model and teachers, if any."""
        models = self.models
        roles = (models.critic, self.rollouts.reward_model, *models.teachers)
        return tuple(role for role in roles if role is not None)


def build(
    job: Job,
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> Parts:
    """Build actor, engine and the rest on this rank. Collective.

    `model_provider` is a fork's own, `log` receives Megatron's output.
    """
    started = time.perf_counter()
    note_stage("building the models")
    builder = build_with_engines if job.config.has_engines else build_supervised
    parts = builder(job, model_provider, log=log)
    _log_sizes(job, parts.models)
    if parts.inputs.point is not None and parts.inputs.point.rng is not None:
        parts.inputs.point.rng.restore()  # last, since building the parts uses the generators
    logger.info("model and engines ready after %.0f s", time.perf_counter() - started)
    return parts


def build_with_engines(
    job: Job, model_provider: Callable[..., Any] | None = None, *, log: TextIO | None = None
) -> Parts:
    """Build a run whose samples engines make, on these ranks or on others. Collective."""
    inputs, engines = read_prompts(job), None
    if job.spec.roles.is_separate(ROLLOUT):
        engines = start_engines(job, start_of(job, inputs).fingerprints, inputs.day)
    make_store = SampleStore if engines is None else partial(RemoteSampleStore, engines)
    models = build_models(
        job, inputs, lambda: new_sample_store(job, make_store), model_provider, log=log
    )
    watchdog = job.watchdog()
    timers = StageTimers(watchdog)
    if engines is None:
        rollouts: Rollouts = build_rollouts(job, inputs, models, timers, log=log)
    else:
        rollouts = connect_rollouts(job, inputs, models, timers, engines)
    metrics = partial(sampled_metrics, prompts=inputs.prompts, rewards=job.spec.rewards)
    return _parts(job, inputs, models, rollouts, metrics, timers, watchdog, log=log)


def build_supervised(
    job: Job, model_provider: Callable[..., Any] | None = None, *, log: TextIO | None = None
) -> Parts:
    """Build a run that learns the rows of a file. Collective."""
    inputs = read_rows(job)
    store = DemonstrationStore(job, inputs.prompts)
    models = build_models(job, inputs, lambda: store, model_provider, log=log)
    watchdog = job.watchdog()
    timers = StageTimers(watchdog)
    rows = SupervisedData(
        job,
        models.learner.actor,
        store,
        inputs.eval_prompts,
        timers,
        position=inputs.position(job, models.state.iteration),
        weight_version=inputs.weight_version,
    )
    metrics = partial(supervised_metrics, aggregation=job.config.recipe.loss_aggregation)
    return _parts(job, inputs, models, rows, metrics, timers, watchdog, log=log)


def _parts(
    job: Job,
    inputs: Inputs[Any],
    models: Models,
    rollouts: Rollouts,
    sample_metrics: SampleMetrics,
    timers: StageTimers,
    watchdog: StageWatchdog,
    *,
    log: TextIO | None,
) -> Parts:
    saver = RunSaver(
        job,
        state=models.state,
        learner=models.learner,
        rollouts=rollouts,
        prompts=inputs.prompts,
        eval_prompts=inputs.eval_prompts,
        timers=timers,
        has_loaded=inputs.point is not None,
        began_with=inputs.began_with,
        branch=inputs.branch,
        day=inputs.day,
        log=log,
    )
    monitors = build_monitors(job, models, rollouts, sample_metrics, timers, watchdog)
    return Parts(inputs, models, rollouts, monitors, saver)


def build_models(
    job: Job,
    inputs: Inputs[Any],
    new_store: Callable[[], SampleStore],
    model_provider: Callable[..., Any] | None = None,
    *,
    log: TextIO | None = None,
) -> Models:
    """Build actor, critic and learner. Collective. `new_store` makes the store of a step's samples
    once the actor is built."""
    state, shards = build_actor(job, model_provider, log=log)
    # On ranks of their own they are built while the engines start.
    critic = critic_role(job, model_provider, iteration=state.iteration, log=log)
    teachers = teacher_roles(job, log=log)
    sample_store = new_store()
    learner = build_learner(
        job,
        state,
        shards,
        critic,
        inputs.point,
        teachers=teachers,
        prompts=inputs.prompts if job.config.has_engines else None,
        log=log,
        sample_store=sample_store,
    )
    how = {"trust_remote_code": job.spec.trust_remote_code, "date": inputs.day}
    if (rows := read_mixed(job.config, job.spec.checkpoint.folder, **how)) is not None:
        log_examples(rows, flag="--rl-sft-demonstrations")
        if inputs.point is not None:
            warn_of_other_demonstrations(inputs.point.state, rows)
        learner.demonstrations = MixedDemonstrations(job, rows)
    if inputs.point is not None:
        learner.kl_controller.load_state_dict(dict(inputs.point.state.kl_controller))
        learner.entropy_controller.load_state_dict(inputs.point.state.entropy_controller)
    called = tuple(each for each in teachers if each is not None)
    return Models(state, shards, critic, called, learner, sample_store)


def build_rollouts(
    job: Job,
    inputs: Inputs[PromptSources],
    models: Models,
    timers: StageTimers,
    *,
    log: TextIO | None = None,
) -> Rollouts:
    """Start the engines, which sleep from here on, and build what samples with them. Collective."""
    offloader = build_offloader(job, models.state, models.critic)
    start = start_of(job, inputs, models.state.iteration)
    canary = build_canary(job, models.state, start.prompts)
    logger.info("the model is built; vLLM is imported and its engines are started")
    note_stage("starting the engines")
    with offloader.all_offloaded():
        engine = VLLMEngine(engine_config(job))
        manager = build_manager(job, models.shards, engine, canary=canary, offloader=offloader)
    manager.weight_version = inputs.weight_version
    reward_model = reward_role(job, log=log)
    sampling = build_sampling(job, engine, models.sample_store, reward_model, start, timers)
    return LocalRollouts(sampling, manager, models.sample_store, reward_model)


def connect_rollouts(
    job: Job,
    inputs: Inputs[PromptSources],
    models: Models,
    timers: StageTimers,
    engines: RemoteRole,
) -> Rollouts:
    """Plan the hand-over with engines on other ranks, or connect to controllers. Collective."""
    assert isinstance(models.sample_store, RemoteSampleStore)
    start = start_of(job, inputs, models.state.iteration)
    note_stage("waiting for the engines")
    if inputs.branch is not None and dist.get_rank() == 0:
        inputs.branch.write(bank_folder(job))  # before the engines read the bank
    canary = build_canary(job, models.state, start.prompts)
    if job.spec.roles.has_controllers:
        from mcore_rl.trainer.servers import connect_servers  # imports vLLM

        rollouts: RemoteRollouts = connect_servers(
            job, engines, models.shards, models.sample_store, canary, start, timers
        )
    else:
        rollouts = connect_engines(
            job, engines, models.shards, models.sample_store, canary, start, timers
        )
    rollouts.manager.weight_version = inputs.weight_version
    return rollouts


def _log_sizes(job: Job, models: Models) -> None:
    """Log the sizes of the updates (waits for a critic on ranks of its own) and the memory that
    flags save for the models on these ranks."""
    config, spec, critic = job.config, job.spec, models.learner.critic
    accounting = config.accounting(
        actor=(spec.train_layout.dp_size, job.micro_batching()),
        critic=None if critic is None else critic.facts(),
    )
    actor = (spec.shape, spec.train_layout, spec.layers)
    lines = memory_lines(model_of_args(config, vars(job.args), *actor))
    if isinstance(models.critic, LocalRole) and spec.critic is not None:
        args, own = vars(models.critic.served.model.world.args), spec.critic
        trained = (own.shape, own.layout, own.layers)
        lines += memory_lines(model_of_args(config, args, *trained, name="critic"))
    for line in (*describe(accounting), *lines):
        logger.info("%s", line)
