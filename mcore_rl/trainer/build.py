"""Building everything that a run consists of on this rank, from its job: `build`.

`mcore_rl.trainer.models` builds the trained models; this module adds the engine, the hand-over
between both, and monitoring.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mcore_rl.batching.accounting import describe
from mcore_rl.common import objects
from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.common.errors import UsageError
from mcore_rl.common.kills import note_stage
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations, Drawn
from mcore_rl.data.prompts import PromptSources, load_prompt_files, log_examples
from mcore_rl.data.tokenizer_process import close_all
from mcore_rl.hybrid_engine.memory.offload import Offloader, kinds_at_start, offload_kinds
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.carried import CarriedTensors
from mcore_rl.megatron.hf_checkpoint import fingerprint
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.roles import ROLLOUT
from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace import Tracer
from mcore_rl.observe.watchdog import StageWatchdog
from mcore_rl.planner.savings import memory_lines
from mcore_rl.rollout.branch import Branch
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.demonstration_store import DemonstrationStore
from mcore_rl.trainer.hand_overs import (
    engine_config,
    hand_over_options,
    make_canary,
    served_adapters,
)
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.learner import Learner
from mcore_rl.trainer.mixed import MixedDemonstrations, read_mixed
from mcore_rl.trainer.models import (
    build_actor,
    build_learner,
    critic_role,
    new_sample_store,
    reward_role,
    teacher_roles,
)
from mcore_rl.trainer.plan_inputs import model_of_args
from mcore_rl.trainer.recorder import RunRecorder
from mcore_rl.trainer.resume import point as resume_point
from mcore_rl.trainer.resume.point import (
    ResumePoint,
    find_resume_point,
    warn_of_other_demonstrations,
)
from mcore_rl.trainer.resume.trainer_state import LOADED, date_of_checkpoints
from mcore_rl.trainer.roles.remote import LocalRole, RemoteRole, Role
from mcore_rl.trainer.rollouts import LocalRollouts, Rollouts
from mcore_rl.trainer.sampling import Start, bank_folder, branch_of, build_sampling
from mcore_rl.trainer.saver import RunSaver
from mcore_rl.trainer.separate import (
    RemoteRollouts,
    RemoteSampleStore,
    connect_engines,
    start_engines,
)
from mcore_rl.trainer.supervised import SupervisedData, read_supervised

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run reads before its models are built."""

    prompts: Drawn
    eval_prompts: Drawn | None
    day: str  # for chat templates
    point: ResumePoint | None  # None: nothing is resumed
    began_with: str  # see `TrainerState`
    branch: Branch | None  # None: nothing is sampled ahead

    @property
    def weight_version(self) -> int:
        """The number of hand-overs before."""
        return 0 if self.point is None else self.point.state.weight_version

    def position(self, job: Job, num_steps: int) -> int:
        """Return how many prompts or rows were drawn in the `num_steps` steps before."""
        drawn = num_steps * job.config.trainer.num_prompts_per_step
        return drawn if self.point is None else self.point.state.sampler_position

    def start(self, job: Job, num_steps: int = 0) -> Start:
        """Return what sampling begins with after `num_steps` steps."""
        point, position, folder = self.point, self.position(job, num_steps), None
        if point is not None:
            folder = point.folder / resume_point.ROLLOUT if point.same_prompts else None
        prompts, held_out = self.prompts, self.eval_prompts
        assert isinstance(prompts, PromptSources), "only prompts are sampled"
        assert held_out is None or isinstance(held_out, PromptSources)
        whose = self.began_with, self.branch.name if self.branch else ""
        return Start(prompts, held_out, self.day, position, folder, *whose)


@dataclass(frozen=True, slots=True)
class Models:
    """The trained models on this rank."""

    state: megatron_adapter.TrainState  # of the actor
    shards: ModelShards
    critic: Role | None
    teachers: tuple[Role, ...]  # that are not swapped into the actor
    learner: Learner
    sample_store: SampleStore


@dataclass(frozen=True, slots=True)
class Monitors:
    """What observes a run."""

    timers: StageTimers
    watchdog: StageWatchdog
    recorder: RunRecorder
    tracer: Tracer


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run on this rank; `mcore_rl.train.Run` has its stages."""

    inputs: Inputs
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
    inputs = read_inputs(job)
    engines = None
    if job.spec.roles.is_separate(ROLLOUT):
        engines = start_engines(job, inputs.start(job).fingerprints, inputs.day)
    models = build_models(job, inputs, model_provider, engines, log=log)
    watchdog = job.watchdog()
    timers = StageTimers(watchdog)
    if isinstance(models.sample_store, DemonstrationStore):
        rollouts: Rollouts = build_supervised(job, inputs, models, timers)
    elif engines is None:
        rollouts = build_rollouts(job, inputs, models, timers, log=log)
    else:
        rollouts = connect_rollouts(job, inputs, models, timers, engines)
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
    monitors = _monitors(job, models, rollouts, inputs.prompts, timers, watchdog)
    _log_sizes(job, models)
    if inputs.point is not None and inputs.point.rng is not None:
        inputs.point.rng.restore()  # last, since building the parts above uses the generators
    logger.info("model and engines ready after %.0f s", time.perf_counter() - started)
    return Parts(inputs, models, rollouts, monitors, saver)


def read_inputs(job: Job) -> Inputs:
    """Read prompts and the checkpoint to resume from. Collective."""
    day = _date(job)
    prompts, eval_prompts = _read_prompts(job, day)
    _require_same_prompts(prompts, job.config)
    log_examples(prompts.parts[0] if isinstance(prompts, PromptSources) else prompts)
    close_all()  # of the tokenizer: prompts are tokenised, and environments start another one
    point = find_resume_point(job.spec, job.args, prompts, eval_prompts)
    if point is not None:
        prompts = prompts.begun(point.state.begin)
    return Inputs(prompts, eval_prompts, day, point, _began_with(job, point), branch_of(job, point))


def _read_prompts(job: Job, day: str) -> tuple[Drawn, Drawn | None]:
    if not job.config.has_engines:
        return read_supervised(job.spec, date=day)
    return load_prompt_files(
        job.config.data,
        job.spec.checkpoint.folder,
        per_step=job.config.trainer.num_prompts_per_step,
        trust_remote_code=job.spec.trust_remote_code,
        date=day,
    )


def build_models(
    job: Job,
    inputs: Inputs,
    model_provider: Callable[..., Any] | None = None,
    engines: RemoteRole | None = None,
    *,
    log: TextIO | None = None,
) -> Models:
    """Build actor, critic and learner. Collective. `engines` are given if they have ranks of their
    own."""
    state, shards = build_actor(job, model_provider, log=log)
    # On ranks of their own they are built while the engines start.
    critic = critic_role(job, model_provider, iteration=state.iteration, log=log)
    teachers = teacher_roles(job, log=log)
    sample_store: SampleStore
    if isinstance(inputs.prompts, Demonstrations):
        sample_store = DemonstrationStore(job, inputs.prompts)
    else:
        store = SampleStore if engines is None else partial(RemoteSampleStore, engines)
        sample_store = new_sample_store(job, store)
    learner = build_learner(
        job,
        state,
        shards,
        critic,
        inputs.point,
        teachers=teachers,
        prompts=inputs.prompts if isinstance(inputs.prompts, PromptSources) else None,
        log=log,
        sample_store=sample_store,
    )
    if (rows := read_mixed(job.spec, date=inputs.day)) is not None:
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
    job: Job, inputs: Inputs, models: Models, timers: StageTimers, *, log: TextIO | None = None
) -> Rollouts:
    """Start the engines, which sleep from here on, and build what samples with them. Collective."""
    offloader = build_offloader(job, models.state, models.critic)
    start = inputs.start(job, models.state.iteration)
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


def build_supervised(
    job: Job, inputs: Inputs, models: Models, timers: StageTimers
) -> SupervisedData:
    """Build what draws rows of a file in place of engines."""
    held_out = inputs.eval_prompts
    assert isinstance(models.sample_store, DemonstrationStore)
    assert held_out is None or isinstance(held_out, Demonstrations)
    return SupervisedData(
        job,
        models.learner.actor,
        models.sample_store,
        held_out,
        timers,
        position=inputs.position(job, models.state.iteration),
        weight_version=inputs.weight_version,
    )


def connect_rollouts(
    job: Job, inputs: Inputs, models: Models, timers: StageTimers, engines: RemoteRole
) -> Rollouts:
    """Plan the hand-over with engines on other ranks, or connect to controllers. Collective."""
    assert isinstance(models.sample_store, RemoteSampleStore)
    start = inputs.start(job, models.state.iteration)
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


def _date(job: Job) -> str:
    """Return the date for chat templates, same on all ranks: the date of the run's first start, so
    that a resumed run draws the same prompts. Collective."""
    resumes = job.args.load is not None and not job.args.finetune
    known = date_of_checkpoints(Path(job.args.load)) if resumes else None
    day: str = objects.broadcast(known or date.today().isoformat())
    return day


def _require_same_prompts(prompts: Drawn, config: RLConfig) -> None:
    """Raise UsageError on all ranks if machines have made different prompts. Collective."""
    fingerprints = set(objects.all_gather(prompts.fingerprint))

    def check() -> None:
        if len(fingerprints) > 1:
            raise UsageError(
                "gives other prompts on some machines (files, tokenizers or libraries differ)",
                flag=f"--rl-prompts {config.data.prompts}",
                remedy="give all machines the same",
            )

    agreed_in_world(check)


def _began_with(job: Job, point: ResumePoint | None) -> str:
    """Return the run's `TrainerState.began_with`. Collective."""
    if point is not None:
        return point.state.began_with
    if job.spec.lora is None and megatron_checkpoint.loads_checkpoint(job.args):
        return LOADED
    return fingerprint(job.spec.checkpoint)


def _monitors(
    job: Job,
    models: Models,
    rollouts: Rollouts,
    prompts: Drawn,
    timers: StageTimers,
    watchdog: StageWatchdog,
) -> Monitors:
    """Build recorder and tracer, and let all monitors observe the hand-over."""
    first_step, sample_store, learner = models.state.iteration, models.sample_store, models.learner
    expert_load = None
    if job.spec.routed_layers is not None:
        expert_load = ExpertLoad(
            models.state.chunks,
            job.spec.routed_layers,
            replay=learner.actor.replay,
            of_rollout=None if sample_store.routed is None else sample_store.load,
        )
    recorder = RunRecorder(
        job,
        first_step=first_step,
        device=models.shards.device,
        timers=timers,
        rates=learner.rates,
        expert_load=expert_load,
        sample_store=sample_store,
        prompts=prompts,
    )
    timers.on_stage_end.append(recorder.note_stage)
    tracer = _tracer(job, first_step)
    manager = rollouts.manager
    manager.on_reshard_start += [
        lambda report: watchdog.enter(f"hand-over {report.direction}"),
    ]
    manager.on_reshard_end += [
        lambda _: watchdog.leave(),
        recorder.note_reshard,
    ]
    tracer.start()
    return Monitors(timers, watchdog, recorder, tracer)


def _tracer(job: Job, first_step: int) -> Tracer:
    rank, layout = dist.get_rank(), job.spec.train_layout
    return Tracer(
        job.config.run.trace,
        first_step=first_step,
        num_steps_left=job.config.trainer.num_steps - first_step,
        folder=job.config.run.directory / "trace",
        rank=rank,
        label=f"tp{layout.tp_rank(rank)} pp{layout.pp_rank(rank)} "
        f"cp{layout.cp_rank(rank)} dp{layout.dp_rank(rank)}",
    )


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
