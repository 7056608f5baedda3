"""All checks of a command line and of what it names; imports Megatron."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.batching.accounting import describe
from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.machine import machine_memory
from mcore_rl.common.platform import find_platform
from mcore_rl.config import RLConfig
from mcore_rl.job.facts import Facts
from mcore_rl.job.inputs import checks_of_places
from mcore_rl.job.layout import own_all_reduce_obstacle
from mcore_rl.job.memory import kv_cache_bytes
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, check_values
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.quantization import READ_AS
from mcore_rl.planner.checks import MOST_REMEDIES, check_host, host_needs
from mcore_rl.planner.phases import ROLLOUT, START, UPDATE
from mcore_rl.planner.plan import Outcome, plan_case
from mcore_rl.planner.settings import GB
from mcore_rl.spec import LaidOut
from mcore_rl.tools.doctor.data import examine_data, run
from mcore_rl.tools.doctor.finding import Finding, Report, Request, green, plural, red, yellow
from mcore_rl.tools.doctor.flags import check_flags
from mcore_rl.tools.doctor.installation import Gpus, check_attention, properties_from_nvml
from mcore_rl.tools.doctor.machine import check_saves, num_kept
from mcore_rl.tools.doctor.network import check_job
from mcore_rl.tools.plan.command_line import read_command_line
from mcore_rl.trainer.plan_inputs import has_slow_products
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.save_rule import SaveRule
from mcore_rl.trainer.resume.trainer_state import check_mtp

# The part of a checkpoint that is read or hashed; the sizes of all files are compared.
_READ_BYTES = 4 << 30
_OVERLAPS = "overlap_moe_expert_parallel_comm"


@dataclass(slots=True)
class Job:
    """What checks of the machine ask of a job."""

    facts: Facts
    config: RLConfig
    outcome: Outcome | None = None  # the plan; None: it cannot be made


def examine_job(
    report: Report, request: Request, gpus: Gpus, environment: Mapping[str, str]
) -> Job | None:
    """Examine the flags and all that they name; None if the flags of a run cannot be read."""
    world_size = request.world_size or gpus.num_ranks
    if request.world_size is None:
        each = "one for each visible GPU" if gpus.num_visible else "as no GPU is visible"
        what = f"without --world-size, a job of {plural(world_size, 'rank')} is examined, {each}"
        report.findings.append(green("flags", what))
    if request.gpu_memory_bytes is None:
        size = gpus.smallest_bytes
        request = replace(request, gpu_memory_bytes=size, gpu_memory_source="found here")
    facts = None
    with report.catching("flags"), properties_from_nvml(gpus), _environment_kept():
        facts = check_flags(
            report,
            request.tokens,
            world_size=world_size,
            platform=find_platform(),
            environment=environment,
            device_bytes=request.gpu_memory_bytes,
        )
    if facts is None or facts.config is None:
        return None
    job, has_flash_attention = Job(facts, facts.config), importlib.util.find_spec("flash_attn")
    if facts.shape is not None:
        report.findings += check_attention(
            facts.shape, gpus, has_flash_attention=has_flash_attention is not None
        )
    resumed = _examine_checkpoints(report, job)
    if facts.spec is not None:
        run(report, checks_of_places(facts.spec))
    if facts.batches_are_right:
        report.add("batches", lambda: check_batches(facts))
        with report.catching("plan"):
            job.outcome = make_plan(facts.tokens, world_size, request)
            report.findings += check_plan(job.outcome, request)
    examine_data(report, facts, resumed)
    return job


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# ------------------------------------------------------------------------------------- checkpoints


def _examine_checkpoints(report: Report, job: Job) -> Path | None:
    """Return the checkpoint that the run resumes from."""
    facts, resumed = job.facts, None
    if facts.checkpoint is not None:
        actor, others = "--rl-hf-checkpoint", {} if facts.spec is None else facts.spec.checkpoints
        for flag, checkpoint in ({actor: facts.checkpoint} | others).items():
            with report.catching("checkpoint"):
                report.findings += check_folder(checkpoint, facts.shape if flag == actor else None)
    interval = facts.given.get("save_interval")
    report.findings.append(check_interval(interval, job.config.trainer.num_steps))
    with report.catching("checkpoint"):
        resumed = check_load(report, job.facts.known, job.config)
    return resumed


def num_parameters(checkpoint: HFCheckpoint) -> int:
    """Return the number of elements of all trained tensors."""
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values())


def check_folder(checkpoint: HFCheckpoint, shape: ModelShape | None = None) -> Iterator[Finding]:
    """Read one tensor in N of a folder, in seconds; describe the actor's, of this `shape`. Raises
    UsageError for values that the load refuses."""
    every = max(1, math.ceil(checkpoint.stored_bytes / _READ_BYTES))
    zeros = check_values(checkpoint, every=every)
    if shape is not None:
        quantized = READ_AS.get(shape.quantization or "")
        what = (
            f"{checkpoint.folder}: {shape.architecture}, {num_parameters(checkpoint) / 1e6:,.1f} "
        )
        what += f"million parameters, {shown_bytes(checkpoint.stored_bytes)} "
        what += f"of {quantized}, read as bfloat16, " if quantized else ""
        what += f"in {plural(len(set(checkpoint.files.values())), 'file')}, "
        part = f"no file missing, one tensor in {every:,} was read"
        yield green("checkpoint", what + ("all complete" if every == 1 else part))
        for part, held in (
            ("multi-token-prediction layers", checkpoint.mtp),
            ("models besides the text model", checkpoint.others),
        ):
            if held:
                what = f"its {part} ({plural(len(held), 'tensor')}) are not trained, and exported "
                yield green("checkpoint", f"{what}as is")
    if zeros:
        more = f" and {plural(len(zeros) - 1, 'other tensor')}" if zeros[1:] else ""
        what = f"{checkpoint.folder} has only zeros in {zeros[0]}{more}"
        yield yellow("checkpoint", what, "copy it again, unless it was made so")


def check_interval(save_interval: int | None, num_steps: int) -> Finding:
    """Check that a run that ends early can be resumed; `save_interval` is the given one."""
    if save_interval is None or save_interval < num_steps:
        return green("checkpoint", f"saves {SaveRule(save_interval)}")
    what = f"--save-interval {save_interval} saves only at the end of --rl-num-steps {num_steps}: "
    what += "a run that is killed before cannot be resumed"
    return yellow("checkpoint", what, "drop it, to save by time, or lower it")


def check_load(report: Report, values: Mapping[str, Any], config: RLConfig) -> Path | None:
    """Report what `--load` resumes; return the checkpoint's folder, None for a new run and with
    `--finetune`, which takes only the weights.

    Reads sizes, and hashes of 4 GiB at most. Raises UsageError for what the start refuses.
    """
    load = Path(values["load"]) if values.get("load") else None
    asked, finetune = values.get("ckpt_step"), bool(values.get("finetune"))
    folders.check_load(
        load,
        asked=asked,
        pretrained=values.get("pretrained_checkpoint"),
        may_begin=config.trainer.load_or_start,
        exits=bool(values.get("exit_on_missing_checkpoint")),
    )
    step = None
    if load is not None:
        beside = [folders.critic_folder(load)] if config.recipe.needs_critic else []
        places = folders.places_of(load, beside)
        steps = folders.common_steps(places)
        step = folders.newest_undamaged(load, steps, asked, lambda step: _damage(places, step))
    save = folders.checkpoint_folder(values.get("save"), config.run.directory)
    folders.check_beginning(save, load, step, asked=asked, finetune=finetune)
    if load is None:
        return None
    if step is None:
        megatron = (load / folders.TRACKER).is_file() or asked is not None
        what = "is Megatron's own checkpoint" if megatron else "has no complete checkpoint: step 0"
    else:
        check_mtp(load, step, values.get("mtp_num_layers"))
        what = f"gives only the weights of step {step}" if finetune else f"resumes at step {step}"
    report.findings.append(green("checkpoint", f"--load {load} {what}"))
    return None if step is None or finetune else load / folders.iteration_name(step)


def _damage(places: Sequence[Path], step: int) -> list[folders.Damage]:
    """Return the damage to a checkpoint, of which a part is hashed that takes seconds."""
    damaged: list[folders.Damage] = []
    for place in places:
        parts = max(1, math.ceil(folders.recorded_bytes(place, step) / _READ_BYTES))
        damaged += folders.damage(place, step, world_size=parts)
    return damaged


# ------------------------------------------------------------------------------- batches, the plan


def check_batches(facts: Facts) -> Iterator[Finding]:
    """Yield the lines that a start prints, for a job whose layout and batch are valid."""
    assert facts.config and facts.actor
    config = facts.config

    def divided(model: LaidOut) -> Any:
        interleaved = len(model.layers[0]) > 1
        return model.layout.dp_size, config.micro_batching(
            model.shape, model.layout, model.values, interleaved=interleaved
        )

    critic = None if facts.critic is None else divided(facts.critic)
    for line in describe(config.accounting(actor=divided(facts.actor), critic=critic)):
        yield green("batches", line)


def make_plan(tokens: Sequence[str], world_size: int, request: Request) -> Outcome:
    """Return the plan of `mcore-rl plan` for the job's flags. Raises UsageError."""
    host_bytes = request.host_memory_bytes or machine_memory().limit_bytes
    own = ["--world-size", str(world_size), "--host-memory-gb", str(host_bytes / GB)]
    if request.gpu_memory_bytes is not None:
        own += ["--gpu-memory-gb", str(request.gpu_memory_bytes / GB)]
        own += ["--gpu-reserved-gb", str(request.gpu_reserved_bytes / GB)]
    return plan_case(read_command_line([*own, *tokens]).case)


def check_plan(outcome: Outcome, request: Request) -> Iterator[Finding]:
    """Report the plan's figures, or what does not fit: yellow if only formulas and reserves show
    it, when a start only warns."""
    has_device, phases = request.gpu_memory_bytes is not None, outcome.memory.phases
    if not has_device:  # there is no share of a device for an engine
        phases = tuple(phase for phase in phases if phase.name not in (START, ROLLOUT, UPDATE))
    fullest = max(phases, key=lambda phase: phase.total_bytes)
    figures = f"{fullest.name} needs {shown_bytes(fullest.total_bytes)} on the fullest rank"
    if outcome.usual_traffic is not None:
        received = shown_bytes(int(outcome.usual_traffic.received.max()))
        figures += f"; a hand-over sends a rank at most {received}"
        if has_device:
            figures += f", in about {outcome.seconds:.2f} s; the KV cache has "
            figures += f"{outcome.memory.kv_cache.tokens:,} tokens on a rank"
    if request.gpu_memory_bytes is None:
        yield green("plan", f"no device memory to fit into: {figures}")
        return
    size = f"{shown_bytes(request.gpu_memory_bytes)} ({request.gpu_memory_source})"
    surely = {phase.name: phase.surely_lacking_bytes for phase in outcome.memory.phases}
    for problem in outcome.problems:
        is_sure = surely.get(problem.where, problem.lacking_bytes) > 0
        make, lacks = (red, "lacks") if is_sure else (yellow, "may lack")
        what = f"{problem.where} {lacks} {shown_bytes(problem.lacking_bytes)} on devices of {size}"
        ways = [
            f"{way.flags} ({f'lacks {shown_bytes(n)}' if (n := way.lacking_bytes) else 'fits'})"
            for way in problem.remedies[:MOST_REMEDIES]
        ]
        more = "use more GPUs, or search for a layout by mcore-rl plan --search"
        yield make("plan", what, "; or ".join(ways) or more)
    if outcome.fits:
        yield green("plan", f"fits into {size}: {figures}")


def check_space(job: Job, ranks: int) -> Iterator[Finding]:
    """Check the disk of checkpoints, and the host memory for `ranks` of the job here."""
    facts, outcome, given = job.facts, job.outcome, job.facts.given
    if outcome is None or facts.checkpoint is None:
        return
    critic = facts.spec.critic if facts.spec else None
    models = [facts.checkpoint, critic.checkpoint if critic else facts.checkpoint]
    size = checkpoint_bytes(outcome, [num_parameters(model) for model in models])
    num_steps = job.config.trainer.num_steps
    count = num_kept(num_steps, given.get("save_interval"), given.get("save_retain_interval"))
    folder = folders.checkpoint_folder(job.facts.known.get("save"), job.config.run.directory)
    yield check_saves(folder, size, count)
    case = replace(outcome.case, machine=replace(outcome.case.machine, ranks_per_node=ranks))
    memory = outcome.memory if find_platform().cuda else None
    cache, widens = kv_cache_bytes(job.config), has_slow_products(job.config.trainer.precision)
    how: dict[str, Any] = {"memory": memory, "kv_cache_bytes": cache, "widens": widens}
    lines = check_host(case, machine_memory(), **how)  # as a start does
    for line in lines:
        found, _, remedy = line.rpartition(": ")
        yield yellow("space", found, remedy)
    if not lines:
        phase, _ = host_needs(case, **how)
        what = f"{plural(ranks, 'rank')} here need about {shown_bytes(phase.total_bytes)} of host "
        yield green("space", f"{what}memory in phase {phase.name} ({phase.described})")


def checkpoint_bytes(outcome: Outcome, sizes: Sequence[int]) -> int:
    """Return the bytes of one checkpoint: weights, main parameters and moments. `sizes` are the
    parameters of each model that may be trained, the actor's first."""
    return sum(
        size * (model.training.weight_bytes + model.training.optimizer_bytes)
        for size, model in zip(sizes, outcome.case.models, strict=False)
    )


# ----------------------------------------------------------------------------------- the network


def check_network_of(
    job: Job, environment: Mapping[str, str], capabilities: Sequence[tuple[int, int]]
) -> Iterator[Finding]:
    """Check the variables that matter to this job, on GPUs of these compute capabilities."""
    values, config, rewards = job.facts.known, job.config, job.facts.rewards
    servers = rewards.servers if rewards else ()
    degrees = ("tensor_model_parallel_size", "context_parallel_size")
    splits_layers = any((values.get(dest) or 1) > 1 for dest in degrees)
    yield from check_job(
        environment,
        collective_minutes=values.get("distributed_timeout_minutes"),
        stage_seconds=config.run.stage_timeout_seconds,
        has_server_here=any(is_loopback(urlsplit(each.url).hostname or "") for each in servers),
        has_local_checkpoint=os.path.isdir(config.trainer.hf_checkpoint or ""),
        splits_and_overlaps=splits_layers and bool(values.get(_OVERLAPS)),
        capabilities=capabilities,
    )
    rollout = job.facts.rollout
    if capabilities and rollout is not None and config.has_engines:
        obstacle = own_all_reduce_obstacle(config.engine, rollout, environment)
        if obstacle is not None:
            what = f"engines reduce by NCCL, without vLLM's own all-reduce: {obstacle.found}"
            yield yellow("network", what, obstacle.remedy)
