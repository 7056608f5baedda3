"""Building everything that a run consists of on this rank, from its job: `build`.

`mcore_rl.trainer.models` builds the trained models; this module adds the engine, the hand-over
between both, and monitoring.
"""

from __future__ import annotations

import dataclasses
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
from mcore_rl.data.prompts import PromptDataset
from mcore_rl.data.tokenizer_process import close_all
from mcore_rl.flags.options import RLConfig
from mcore_rl.hybrid_engine.memory.offload import Offloader, kinds_at_start, offload_kinds
from mcore_rl.hybrid_engine.proof.canary import NUM_PROMPTS, Canary
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.vllm.engine import EngineConfig, VLLMEngine
from mcore_rl.job.batches import accounting_of
from mcore_rl.job.layout import check_stages, ranks_per_node
from mcore_rl.job.memory_report import memory_lines
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.carried import CarriedTensors
from mcore_rl.megatron.hf_checkpoint import fingerprint
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.speculation import parse_speculation
from mcore_rl.moe.expert_load import ExpertLoad
from mcore_rl.moe.routing import R3
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace import Tracer
from mcore_rl.observe.watchdog import StageWatchdog, own_connection
from mcore_rl.rollout.collector import Collector
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.keeper import SampleKeeper
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.inputs import (
    conversation_tokens,
    environment_spec,
    load_prompt_files,
    reward_spec,
)
from mcore_rl.trainer.learner import Learner
from mcore_rl.trainer.models import (
    build_actor,
    build_learner,
    critic_role,
    micro_batching,
    reward_role,
    routed_layers,
    sample_keeper,
)
from mcore_rl.trainer.recorder import RunRecorder
from mcore_rl.trainer.resume.point import ROLLOUT, ResumePoint, find_resume_point
from mcore_rl.trainer.resume.trainer_state import LOADED, date_of_checkpoints
from mcore_rl.trainer.roles.remote import Here, Role
from mcore_rl.trainer.roles.reward_model import ModelReward
from mcore_rl.trainer.saver import RunSaver
from mcore_rl.trainer.start import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run on this rank; `mcore_rl.train.Run` has its stages."""

    first_step: int
    eval_prompts: PromptDataset | None
    shards: ModelShards
    learner: Learner
    engine: VLLMEngine
    manager: MegatronVLLMShardingManager
    workers: RolloutWorkers
    collector: Collector
    recorder: RunRecorder
    saver: RunSaver
    timers: StageTimers
    watchdog: StageWatchdog
    tracer: Tracer
    roles: tuple[Role, ...]  # critic and reward model, if any


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
    config = job.config
    day = _date(job)
    prompts, eval_prompts = load_prompt_files(
        config, trust_remote_code=job.args.trust_remote_code, date=day
    )
    _require_same_prompts(prompts, config)
    close_all()  # of the tokenizer: prompts are tokenised, and environments start another one
    point = find_resume_point(
        job.args,
        config,
        checkpoint=job.checkpoint,
        layout=job.train_layout.describe(),
        prompts=prompts,
        eval_prompts=eval_prompts,
    )
    began_with = _began_with(job, point)
    state, shards = build_actor(job, model_provider, log=log)
    # On ranks of its own it is built while the engines start.
    critic = critic_role(job, model_provider, iteration=state.iteration, log=log)
    keeper = sample_keeper(job)
    learner = build_learner(job, state, shards, critic, point, log=log, keeper=keeper)
    offloader = build_offloader(job, state, critic)
    canary = build_canary(job, state, prompts)
    logger.info("the model is built; vLLM is imported and its engines are started")
    note_stage("starting the engines")
    with offloader.everything_away():
        engine = VLLMEngine(engine_config(job))
        manager = build_manager(job, shards, engine, canary=canary, offloader=offloader)
    watchdog = _watchdog(job)
    timers = StageTimers(watchdog)
    reward_model = reward_role(job, log=log)
    asked = None if reward_model is None else ModelReward(reward_model).outcomes
    workers = RolloutWorkers(
        engine,
        job.rollout_layout,
        config,
        reward_spec(config),
        keeper,
        asked,
        None if config.environment is None else partial(_conversations, job, day),
    )
    position = state.iteration * config.num_prompts_per_step
    if point is not None:
        position = _go_on_from(point, manager, learner)
    collector = Collector(
        workers,
        prompts,
        config,
        seed=job.args.seed,
        timers=timers,
        position=position,
        keeper=keeper,
    )
    if point is not None and point.same_prompts:
        agreed_in_world(partial(collector.restore, point.folder / ROLLOUT))
    recorder = _recorder(job, state, shards.device, timers, learner, keeper)
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
        day=day,
        log=log,
    )
    _say_sizes(job, learner, critic)
    tracer = _tracer(job, state.iteration)
    _listen(manager, watchdog, recorder, tracer)
    tracer.start()
    if point is not None and point.rng is not None:
        point.rng.restore()  # last, since building the parts above uses the generators
    logger.info("model and engines ready after %.0f s", time.perf_counter() - started)
    return Parts(
        first_step=state.iteration,
        eval_prompts=eval_prompts,
        shards=shards,
        learner=learner,
        engine=engine,
        manager=manager,
        workers=workers,
        collector=collector,
        recorder=recorder,
        saver=saver,
        timers=timers,
        watchdog=watchdog,
        tracer=tracer,
        roles=tuple(role for role in (critic, reward_model) if role is not None),
    )


def _conversations(job: Job, day: str) -> Conversations:
    """Build the environments of a TP group's samples, on its first rank."""
    config, spec = job.config, environment_spec(job.config)
    assert spec is not None
    return Conversations(
        spec,
        conversation_tokens(config, trust_remote_code=job.args.trust_remote_code, date=day),
        max_prompt_tokens=config.max_prompt_tokens,
        max_tokens=config.max_response_tokens,
        waits=config.deterministic,
    )


def _date(job: Job) -> str:
    """Return the date for chat templates, same on all ranks: the date of the run's first start, so
    that a resumed run draws the same prompts. Collective."""
    goes_on = job.args.load is not None and not job.args.finetune
    known = date_of_checkpoints(Path(job.args.load)) if goes_on else None
    found: str = objects.broadcast(known or date.today().isoformat())
    return found


def _require_same_prompts(prompts: PromptDataset, config: RLConfig) -> None:
    """Raise UsageError on all ranks if machines have made different prompts. Collective."""
    fingerprints = set(objects.all_gather(prompts.fingerprint))

    def check() -> None:
        if len(fingerprints) > 1:
            raise UsageError(
                "gives other prompts on some machines (files, tokenizers or libraries differ)",
                flag=f"--rl-prompts {config.prompts}",
                remedy="give all machines the same",
            )

    agreed_in_world(check)


def _began_with(job: Job, point: ResumePoint | None) -> str:
    """Return the run's `TrainerState.began_with`. Collective."""
    if point is not None:
        return point.state.began_with
    if megatron_checkpoint.loads_checkpoint(job.args):
        return LOADED
    return fingerprint(job.checkpoint)


def _go_on_from(point: ResumePoint, manager: MegatronVLLMShardingManager, learner: Learner) -> int:
    """Restore the counters of both from a checkpoint; return the position in the prompts."""
    manager.weight_version = point.state.weight_version
    learner.kl_controller.load_state_dict(dict(point.state.kl_controller))
    return point.state.sampler_position


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
    keeper: SampleKeeper,
) -> RunRecorder:
    routed, expert_load = routed_layers(job.shape), None
    if routed is not None:
        expert_load = ExpertLoad(
            state.chunks,
            routed,
            replay=learner.actor.replay,
            of_rollout=None if keeper.routed is None else keeper.load,
        )
    return RunRecorder(
        job,
        first_step=state.iteration,
        device=device,
        timers=timers,
        reward_names=reward_spec(job.config).names,
        rates=learner.rates,
        expert_load=expert_load,
        keeper=keeper,
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
    """Notify the others of every switch between the modes."""
    manager.on_reshard_start += [
        lambda report: watchdog.enter(f"hand-over {report.direction}"),
        lambda report: tracer.handover_started(report.direction),
    ]
    manager.on_reshard_end += [
        lambda _: watchdog.leave(),
        recorder.note_reshard,
        lambda _: tracer.handover_ended(),
    ]


def _say_sizes(job: Job, learner: Learner, critic: Role | None) -> None:
    """Log the sizes of the updates (waits for a critic on ranks of its own) and the memory that
    flags save for the models on these ranks."""
    accounting = accounting_of(
        job.config,
        actor=(job.train_layout.dp_size, micro_batching(job)),
        critic=None if learner.critic is None else learner.critic.facts(),
    )
    lines = memory_lines(job.config, vars(job.args), job.shape, job.train_layout, job.layers)
    if isinstance(critic, Here) and job.critic is not None:
        world = critic.served.model.world
        args, layout = vars(world.args), world.layout
        layers = check_stages(job.critic.shape, layout.pp_size, args)
        lines += memory_lines(job.config, args, job.critic.shape, layout, layers, name="critic")
    for line in (*describe(accounting), *lines):
        logger.info("%s", line)


def engine_config(job: Job, *, load_format: str = "dummy") -> EngineConfig:
    """Return the engines' configuration, from the flags."""
    config = job.config
    on_cpu = not torch.cuda.is_available()
    return EngineConfig(
        model_dir=job.checkpoint.folder,
        tp_size=job.rollout_layout.tp_size,
        dp_size=job.rollout_layout.dp_size,
        rank_map=job.rollout_layout.rank_map,
        all2all_backend=job.rollout_layout.all2all_backend,
        enable_expert_parallel=job.rollout_layout.expert_parallel,
        # A float32 actor samples in bfloat16, too: vLLM's CPU experts support nothing else.
        dtype="float16" if config.precision == "fp16" else "bfloat16",
        max_model_len=config.max_prompt_tokens + config.max_response_tokens,
        max_num_seqs=config.rollout_max_num_seqs,
        kv_cache_bytes=int(config.rollout_kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=config.rollout_gpu_memory_utilization,
        enforce_eager=on_cpu or config.rollout_enforce_eager,
        seed=job.args.seed,
        speculation=parse_speculation(config.speculate),
        keeps_kv=config.keeps_kv,
        load_format=load_format,
        routed_layers=routed_layers(job.shape) if config.routing_replay == R3 else None,
        trust_remote_code=job.args.trust_remote_code,
        timeout_seconds=60 * job.args.distributed_timeout_minutes,
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
    dtype = job.config.reshard_dtype
    if job.config.precision == "fp16" and dtype == "checkpoint":
        dtype = "fp16"  # of actor and engines: the checkpoint's bf16 has three bits less
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
        dtype=dtype,
        delta=job.config.reshard_delta,
        full_every=job.config.reshard_full_interval,
        attest=job.config.attest,
        canary=canary,
        carried=None if engine.drafter is None else CarriedTensors(job.checkpoint),
    )


def build_offloader(
    job: Job, state: megatron_adapter.TrainState, critic: Role | None = None
) -> Offloader:
    """Build the offloader of `--rl-offload` for the actor, and for a critic on these ranks."""
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
    """Build the canary of `--rl-canary-interval`, over the first of `prompts`."""
    interval = job.config.canary_interval
    if interval == 0:
        return None
    rows = [prompts[row] for row in range(min(NUM_PROMPTS, len(prompts)))]
    # vLLM scores prompts untempered, at any sampling temperature of the policy.
    untempered = dataclasses.replace(job.config, temperature=1.0)
    batching = micro_batching(job)
    return Canary(
        Actor(job.args, untempered, state, job.train_layout, batching).log_probs,
        [prompt.token_ids.tolist() for prompt in rows],
        interval=interval,
        tolerance=job.config.canary_tolerance,
        count_multiple_of=batching.count_multiple_of,
    )
