"""What samples with an engine of this rank: `build_sampling`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.data.options import NO_CURRICULUM
from mcore_rl.data.prompts import PromptSources
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.branch import Branch
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.curriculum import Curriculum
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.evaluation import Evaluator
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Sampler
from mcore_rl.rollout.turn_reader import TurnReader
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.resume.point import ResumePoint
from mcore_rl.trainer.roles.remote import Role
from mcore_rl.trainer.roles.reward_model import ModelReward


@dataclass(frozen=True, slots=True)
class Sampling:
    """An engine of this rank, and what samples with it. Collective over the engines' ranks."""

    engine: SamplingEngine
    workers: RolloutWorkers
    sampler: Sampler
    evaluator: Evaluator | None  # None without held-out prompts

    def close(self) -> None:
        """End the engine, and processes of rewards and environments."""
        self.sampler.close()
        if self.evaluator is not None:
            self.evaluator.workers.close()
        self.workers.close()
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Start:
    """What a run's sampling begins with.

    Example: of a run that resumes after 3 steps of 16 prompts: `Start(prompts, None, "2026-11-26",
    position=48, folder=Path("checkpoints/iter_0000003/rollout"))`.
    """

    prompts: PromptSources
    eval_prompts: PromptSources | None
    day: str  # for chat templates
    position: int = 0  # prompts drawn before
    folder: Path | None = None  # what `Rollouts.save` wrote, if the run resumes
    began_with: str = ""  # see `TrainerState`
    branch: str = ""  # as above

    def message(self) -> dict[str, Any]:
        """Return the arguments of `SamplingRanks.connect`."""
        return {
            "position": self.position,
            "begin": asdict(self.prompts.begin),
            "folder": None if self.folder is None else str(self.folder),
            "began_with": self.began_with,
            "branch": self.branch,
        }

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the prompts that are given."""
        return [each.fingerprint for each in (self.prompts, self.eval_prompts) if each is not None]


def build_sampling(
    job: Job,
    engine: SamplingEngine,
    sample_store: SampleStore,
    reward_model: Role | None,
    start: Start,
    timers: StageTimers,
) -> Sampling:
    """Build what samples with the engines. Collective over their ranks."""
    workers = _workers(job, engine, sample_store, reward_model, start.day)
    sampler = _sampler(job, workers, start, timers)
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
            job.spec.rewards,
            seed=job.args.seed,
            timers=timers,
        )
    return Sampling(engine, workers, sampler, evaluator)


def _workers(
    job: Job, engine: SamplingEngine, sample_store: SampleStore, reward_model: Role | None, day: str
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
        job.spec.shape.vocab_size,
    )


def _sampler(job: Job, workers: RolloutWorkers, start: Start, timers: StageTimers) -> Sampler:
    kind, curriculum, seed = job.config.data.curriculum, None, job.args.seed
    if kind != NO_CURRICULUM:
        curriculum = Curriculum(start.prompts, kind, seed=seed, position=start.position)
    return Sampler(
        workers,
        start.prompts,
        job.config.recipe,
        job.config.rollout,
        job.spec.rewards,
        num_prompts_per_step=job.config.trainer.num_prompts_per_step,
        seed=seed,
        timers=timers,
        position=start.position,
        curriculum=curriculum,
        bank=bank_folder(job) if job.config.rollout.samples_ahead else None,
        folder=start.folder,
        origin=[start.branch, start.began_with, *environment_facts(job.spec.environment)],
    )


def bank_folder(job: Job) -> Path:
    """Return where a run keeps finished groups."""
    return job.config.run.directory / "bank"


def branch_of(job: Job, point: ResumePoint | None) -> Branch | None:
    """Return the branch of the bank that a run continues or begins, None if nothing is sampled
    ahead. Collective. `point` is what it resumes."""
    if not job.config.rollout.samples_ahead:
        return None
    name, step = ("", 0) if point is None else (point.state.branch, point.state.step)
    mine = Branch.of_start(bank_folder(job), name, step) if dist.get_rank() == 0 else None
    branch: Branch = objects.broadcast(mine)
    return branch


def environment_facts(spec: EnvironmentSpec | None) -> list[Any]:
    """Return what responses depend on if they have environments."""
    if spec is None:
        return []
    classes = [spec.class_for(source) for source in ("", *sorted(spec.of_sources))]
    return [classes, spec.max_turns, spec.max_turn_tokens]


def _conversations(job: Job, spec: EnvironmentSpec, day: str) -> Conversations:
    """Build the environments of a TP group's samples, on its first rank."""
    config, folder, trusts = job.config, job.spec.checkpoint.folder, job.spec.trust_remote_code
    tokens = ConversationTokens.of_model(folder, config.data, trust_remote_code=trusts, date=day)
    return Conversations(
        spec,
        tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=config.rollout.max_response_tokens,
        waits=config.rollout.deterministic,
        reader=TurnReader.of_model(folder, tokens, spec, trust_remote_code=trusts),
    )
