"""All checks of a command line and of what it names; imports Megatron."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.batching.types import Prompt
from mcore_rl.common.machine import machine_memory
from mcore_rl.common.platform import find_platform
from mcore_rl.config import RLConfig
from mcore_rl.job.facts import Facts
from mcore_rl.job.layout import own_all_reduce_obstacle
from mcore_rl.job.teachers import check_teacher_servers
from mcore_rl.planner.host import HostPhase
from mcore_rl.planner.plan import Outcome
from mcore_rl.tools.doctor.checkpoint import (
    check_hf_folder,
    check_interval,
    check_load,
    check_other_folders,
    num_parameters,
)
from mcore_rl.tools.doctor.finding import (
    BATCHES,
    CHECKPOINT,
    FLAGS,
    NETWORK,
    PLAN,
    PROMPTS,
    REWARD,
    Finding,
    Report,
    Request,
    green,
    plural,
    yellow,
)
from mcore_rl.tools.doctor.flags import check_flags
from mcore_rl.tools.doctor.gpus import Gpus, properties_from_nvml
from mcore_rl.tools.doctor.network import check_hub, check_proxies, check_queues, check_timeouts
from mcore_rl.tools.doctor.plan import (
    DeviceMemory,
    check_batches,
    check_plan,
    checkpoint_bytes,
    fullest_on_host,
    make_plan,
)
from mcore_rl.tools.doctor.prompts import check_demonstrations, check_prompts
from mcore_rl.tools.doctor.reward import asks_loopback, check_reward
from mcore_rl.tools.doctor.space import Saves, num_kept
from mcore_rl.tools.doctor.versions import check_attention
from mcore_rl.trainer.resume.folders import checkpoint_folder


def examine_job(
    report: Report, request: Request, gpus: Gpus, environment: Mapping[str, str]
) -> Job | None:
    """Examine the flags and all that they name; None if the flags of a run cannot be read."""
    world_size = request.world_size or gpus.num_ranks
    if request.world_size is None:
        each = "one for each visible GPU" if gpus.num_visible else "as no GPU is visible"
        what = f"without --world-size, a job of {plural(world_size, 'rank')} is examined, {each}"
        report.findings.append(green(FLAGS, what))
    facts, memory = None, _device_memory(request, gpus)
    with report.catching(FLAGS), properties_from_nvml(gpus), _environment_kept():
        facts = check_flags(
            report,
            request.tokens,
            world_size=world_size,
            platform=find_platform(),
            environment=environment,
            device_bytes=memory.total_bytes,
        )
    if facts is None or facts.config is None:
        return None
    job = Job(facts, facts.config)
    shape, has_flash_attention = facts.shape, importlib.util.find_spec("flash_attn") is not None
    if shape is not None:
        report.findings += check_attention(shape, gpus, has_flash_attention=has_flash_attention)
    resumed = _examine_checkpoints(report, job)
    if facts.batches_are_right:
        report.add(BATCHES, lambda: check_batches(facts))
    if facts.config.rollout.servers:
        report.add(NETWORK, lambda: _check_servers(facts))
    if facts.batches_are_right:
        with report.catching(PLAN):
            host_bytes = request.host_memory_bytes or machine_memory().limit_bytes
            job.outcome = make_plan(facts.tokens, world_size, memory, host_bytes)
            report.findings += check_plan(job.outcome, memory)
    report.add(NETWORK, lambda: _check_teachers(facts))
    few: list[Prompt] = []
    trusts = bool(job.values.get("trust_remote_code"))
    if not facts.config.has_engines:
        check_demonstrations(report, job.config, resumed, trust_remote_code=trusts)
        return job
    with report.catching(PROMPTS):
        few = check_prompts(
            report,
            job.config,
            facts.rewards,
            resumed,
            environment=facts.environment,
            trust_remote_code=trusts,
        )
    rewards = facts.rewards
    if rewards is not None:
        report.add(
            REWARD,
            lambda: check_reward(rewards, facts.environment, few, facts.reward_model_folder),
        )
    return job


def _examine_checkpoints(report: Report, job: Job) -> Path | None:
    """Return the checkpoint that the run resumes from."""
    shape, checkpoint, resumed = job.facts.shape, job.facts.checkpoint, None
    if shape is not None and checkpoint is not None:
        report.add(CHECKPOINT, lambda: check_hf_folder(shape, checkpoint))
    interval = job.facts.given.get("save_interval")
    report.findings.append(check_interval(interval, job.config.trainer.num_steps))
    with report.catching(CHECKPOINT):
        resumed = check_load(report, job.values, job.config)
    if job.facts.spec is not None:
        with report.catching(CHECKPOINT):
            check_other_folders(job.facts.spec.checkpoints)
    return resumed


def _check_servers(facts: Facts) -> Iterator[Finding]:
    """Report the servers of a job whose other flags are right."""
    if facts.spec is None:
        return
    # It imports vLLM, which takes seconds.
    from mcore_rl.trainer.server_checks import check_servers

    silent = check_servers(facts.spec)
    for line in silent:
        yield yellow(NETWORK, f"server {line}", "start it before the run, or correct its address")
    num_servers = len(facts.spec.config.rollout.servers) - len(silent)
    if num_servers:
        yield green(NETWORK, f"{num_servers} servers answer and fit the job")


def _check_teachers(facts: Facts) -> Iterator[Finding]:
    """Report the teachers' servers of a job whose other flags are right."""
    if facts.spec is None:
        return
    silent = check_teacher_servers(facts.spec)
    for line in silent:
        yield yellow(NETWORK, f"teacher {line}", "start it before the run, or correct its address")
    num_servers = sum(each.url is not None for each in facts.spec.config.teachers) - len(silent)
    if num_servers:
        yield green(NETWORK, f"{plural(num_servers, 'teacher')} on servers: answers fit the job")


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _device_memory(request: Request, gpus: Gpus) -> DeviceMemory:
    if request.gpu_memory_bytes is not None:
        reserved = request.gpu_reserved_bytes
        return DeviceMemory(request.gpu_memory_bytes, reserved, request.gpu_memory_source)
    return DeviceMemory(gpus.smallest_bytes, request.gpu_reserved_bytes, "found here")


@dataclass(slots=True)
class Job:
    """What checks of the machine ask of a job."""

    facts: Facts
    config: RLConfig
    outcome: Outcome | None = None  # the plan; None: it cannot be made

    @property
    def values(self) -> Mapping[str, Any]:
        """The flags by destination: given and derived, or only given if some are wrong."""
        return self.facts.values or self.facts.given

    def saves(self) -> Saves | None:
        """Return what the job saves; None if its size is not known."""
        facts, outcome = self.facts, self.outcome
        if outcome is None or facts.checkpoint is None:
            return None
        models = [facts.checkpoint]
        if outcome.case.critic is not None:
            critic = facts.spec.critic if facts.spec else None
            models.append(critic.checkpoint if critic else facts.checkpoint)
        size = checkpoint_bytes(outcome, [num_parameters(model) for model in models])
        given = facts.given  # --save brings an interval that only Megatron asks for
        kept = num_kept(
            self.config.trainer.num_steps,
            given.get("save_interval"),
            given.get("save_retain_interval"),
        )
        return Saves(
            checkpoint_folder(self.values.get("save"), self.config.run.directory), size, kept
        )

    def fullest_on_host(self, ranks: int) -> HostPhase | None:
        """Return the phase that needs most memory on a machine of `ranks`; None if unknown."""
        if self.outcome is None or self.facts.checkpoint is None:
            return None
        has_cuda = find_platform().cuda
        return fullest_on_host(self.config, self.outcome, local_ranks=ranks, has_cuda=has_cuda)

    def check_network(
        self, environment: Mapping[str, str], capabilities: Sequence[tuple[int, int]]
    ) -> Iterator[Finding]:
        """Check the variables that matter to this job, on GPUs of these compute capabilities."""
        values, config = self.values, self.config
        minutes = values.get("distributed_timeout_minutes")
        yield from check_timeouts(minutes, config.run.stage_timeout_seconds)
        if asks_loopback(config):
            yield from check_proxies(environment)
        if config.trainer.hf_checkpoint and os.path.isdir(config.trainer.hf_checkpoint):
            yield from check_hub(environment)
        degrees = ("tensor_model_parallel_size", "context_parallel_size")
        splits_layers = any((values.get(dest) or 1) > 1 for dest in degrees)
        if splits_layers and values.get("overlap_moe_expert_parallel_comm"):
            yield from check_queues(environment, capabilities)
        rollout = self.facts.rollout
        if capabilities and rollout is not None and config.has_engines:
            obstacle = own_all_reduce_obstacle(config.engine, rollout, environment)
            if obstacle is not None:
                what = f"engines reduce by NCCL, without vLLM's own all-reduce: {obstacle.found}"
                yield yellow(NETWORK, what, obstacle.remedy)
