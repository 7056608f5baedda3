"""What a run calls of its engines: `Rollouts`, and `Sampling`, which the ranks of engines run.

Engines share the actor's ranks (`LocalRollouts`) or have ranks of their own (`separate`).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from mcore_rl.common.agreement import agreed_in_world
from mcore_rl.data.prompts import PromptDataset
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.proof.canary import NUM_PROMPTS, Canary, LogProbs
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.switch_report import Hook
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions
from mcore_rl.megatron.carried import CarriedTensors
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.speculation import parse_speculation
from mcore_rl.moe.routing import R3
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.ahead import AheadSampler
from mcore_rl.rollout.collector import Collected, Collector
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.evaluation import Evaluator
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.remote import Role
from mcore_rl.trainer.roles.reward_model import ModelReward

# Engines take minutes to start. A process that is gone ends the connections of the others.
_PATIENCE_SECONDS = 7.0 * 24 * 3600


class WeightSync(Protocol):
    """Rollout mode: entering it gives the engines the actor's weights. Collective."""

    weight_version: int
    on_reshard_start: list[Hook]
    on_reshard_end: list[Hook]

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        failed: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Rollouts(abc.ABC):
    """The engines of a run, on the actor's ranks. Methods are collective over these ranks."""

    manager: WeightSync
    sample_store: SampleStore
    reward_model: Role | None = None  # as the actor calls it

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """The number of prompts drawn so far."""

    @abc.abstractmethod
    def sample_eval(self, step: int, weight_version: int) -> None:
        """Sample the held-out prompts, of which there are some; in rollout mode."""

    @abc.abstractmethod
    def evaluate(self) -> float | None:
        """Return the accuracy of the last `sample_eval`; None if there was none since."""

    @abc.abstractmethod
    def collect(self, weight_version: int) -> Collected:
        """Return a step's samples with their rewards; in rollout mode."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Discard the last step, which will be repeated: its prompts count as not drawn."""

    @abc.abstractmethod
    def save(self, folder: Path) -> None:
        """Write what later steps depend on, besides the position."""

    @abc.abstractmethod
    def saved(self) -> None:
        """Remove what nothing needs any more once the checkpoint of `save` is complete."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Make `close` wait for no other rank, because this one has failed. Local."""

    @abc.abstractmethod
    def close(self) -> None:
        """End engines, and processes of rewards and environments. Idempotent."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """An engine of this rank, and what samples with it. Collective over the engines' ranks."""

    engine: VLLMEngine
    workers: RolloutWorkers
    collector: Collector | AheadSampler
    evaluator: Evaluator | None  # None without held-out prompts

    def close(self) -> None:
        """End the engine, and processes of rewards and environments."""
        if isinstance(self.collector, AheadSampler):
            self.collector.close()
        if self.evaluator is not None:
            self.evaluator.workers.close()
        self.workers.close()
        self.engine.close()


class LocalRollouts(Rollouts):
    """Engines on the actor's ranks, which hand their memory over to training in turn."""

    def __init__(
        self,
        sampling: Sampling,
        manager: MegatronVLLMShardingManager,
        sample_store: SampleStore,
        reward_model: Role | None,
    ) -> None:
        self.sampling, self.manager, self.sample_store = sampling, manager, sample_store
        assert isinstance(sampling.collector, Collector), "engines here cannot sample ahead"
        self.reward_model, self._collector = reward_model, sampling.collector
        self._prefetch = manager.prefetch

    @property
    def position(self) -> int:
        return self._collector.position

    def sample_eval(self, step: int, weight_version: int) -> None:
        assert self.sampling.evaluator is not None, "there are no held-out prompts"
        self.sampling.evaluator.sample(step, weight_version)

    def evaluate(self) -> float | None:
        evaluator = self.sampling.evaluator
        return None if evaluator is None else evaluator.accuracy()

    def collect(self, weight_version: int) -> Collected:
        return self._collector.collect(weight_version, self._prefetch)

    def undo(self) -> None:
        self._collector.undo()

    def save(self, folder: Path) -> None:
        self._collector.save(folder)

    def saved(self) -> None:
        """Do nothing: nothing else has what the checkpoint has."""

    def abandon(self) -> None:
        """Do nothing: `close` does not wait."""

    def close(self) -> None:
        self.sampling.close()


@dataclass(frozen=True, slots=True)
class Start:
    """What a run's sampling begins with.

    Example: of a run that resumes after 3 steps of 16 prompts: `Start(prompts, None, "2026-11-26",
    position=48, folder=Path("checkpoints/iter_0000003/rollout"))`.
    """

    prompts: PromptDataset
    eval_prompts: PromptDataset | None
    day: str  # for chat templates
    position: int = 0  # prompts drawn before
    folder: Path | None = None  # what `Rollouts.save` wrote, if the run resumes

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the prompts that are given."""
        return [each.fingerprint for each in (self.prompts, self.eval_prompts) if each is not None]


def build_sampling(
    job: Job,
    engine: VLLMEngine,
    sample_store: SampleStore,
    reward_model: Role | None,
    start: Start,
    timers: StageTimers,
) -> Sampling:
    """Build what samples with the engines. Collective over their ranks."""
    workers = _workers(job, engine, sample_store, reward_model, start.day)
    if job.config.rollout.samples_ahead:
        collector: Collector | AheadSampler = _ahead(job, engine, workers, sample_store, start)
    else:
        collector = _collector(job, workers, sample_store, start, timers)
    evaluator = None
    if start.eval_prompts is not None:
        evaluator = Evaluator(
            # While training samples are in flight, an evaluation needs rewards of its own.
            _workers(job, engine, sample_store, reward_model, start.day)
            if job.config.rollout.samples_ahead
            else workers,
            start.eval_prompts,
            job.config.evaluation,
            job.config.rollout,
            seed=job.args.seed,
            timers=timers,
        )
    return Sampling(engine, workers, collector, evaluator)


def _workers(
    job: Job, engine: VLLMEngine, sample_store: SampleStore, reward_model: Role | None, day: str
) -> RolloutWorkers:
    environment = job.spec.environment
    return RolloutWorkers(
        engine,
        job.spec.rollout_layout,
        job.config.rollout,
        job.spec.rewards,
        sample_store,
        None if reward_model is None else ModelReward(reward_model).outcomes,
        None if environment is None else partial(_conversations, job, environment, day),
        job.config.environments.max_turn_tokens,
    )


def _collector(
    job: Job,
    workers: RolloutWorkers,
    sample_store: SampleStore,
    start: Start,
    timers: StageTimers,
) -> Collector:
    collector = Collector(
        workers,
        start.prompts,
        job.config.recipe,
        job.config.rollout,
        num_prompts_per_step=job.config.trainer.num_prompts_per_step,
        seed=job.args.seed,
        timers=timers,
        position=start.position,
        sample_store=sample_store,
    )
    if start.folder is not None:
        agreed_in_world(partial(collector.restore, start.folder))
    return collector


def _ahead(
    job: Job,
    engine: VLLMEngine,
    workers: RolloutWorkers,
    sample_store: SampleStore,
    start: Start,
) -> AheadSampler:
    return AheadSampler(
        engine,
        workers,
        start.prompts,
        job.config.recipe,
        job.config.rollout,
        job.spec.rollout_layout,
        num_prompts_per_step=job.config.trainer.num_prompts_per_step,
        seed=job.args.seed,
        position=start.position,
        sample_store=sample_store,
        bank=job.config.run.directory / "bank",
        folder=start.folder,
    )


def _conversations(job: Job, spec: EnvironmentSpec, day: str) -> Conversations:
    """Build the environments of a TP group's samples, on its first rank."""
    config = job.config
    return Conversations(
        spec,
        ConversationTokens.of_model(
            job.spec.checkpoint.folder,
            config.data,
            trust_remote_code=job.spec.trust_remote_code,
            date=day,
        ),
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.rollout.max_response_tokens,
        waits=config.rollout.deterministic,
    )


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
        max_model_len=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        max_num_seqs=config.engine.rollout_max_num_seqs,
        kv_cache_bytes=int(config.engine.rollout_kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=config.engine.rollout_gpu_memory_utilization,
        enforce_eager=on_cpu or config.engine.rollout_enforce_eager,
        offload_graphs=config.engine.rollout_offload_cuda_graphs,
        seed=job.args.seed,
        speculation=parse_speculation(config.engine.speculate),
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
        job.spec.train_layout,
        hand_over_options(job),
        shards=shards,
        engine=engine,
        shape=job.spec.shape,
        device=device,
        world=world,
        canary=canary,
        carried=CarriedTensors(job.spec.checkpoint) if drafts else None,
    )


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
    job: Job, log_probs: LogProbs | None, prompts: PromptDataset, count_multiple_of: int = 1
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
