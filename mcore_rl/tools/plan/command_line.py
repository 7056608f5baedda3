"""Conversion of the command line of `mcore-rl plan` to the case to be planned.

Flags are read as in a run, by Megatron's own parser and with the values that config.json and RL
add, but without a device, process group or model.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rl.common.errors import CORRECT, CommandParser, UsageError, as_flag, check_output_file
from mcore_rl.common.platform import Platform
from mcore_rl.flags.parsed_flags import expand_config, import_given_files
from mcore_rl.hybrid_engine.plan.buckets import frame_of, slot_bytes
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.model.config_json import ModelShape, read_model_shape
from mcore_rl.model.families import family_of
from mcore_rl.model.layout import SPLITS_SHARED_EXPERTS
from mcore_rl.model.quantization import FP8, INT4, MXFP4
from mcore_rl.model.roles import ACTOR, CRITIC
from mcore_rl.planner.memory import placement_of
from mcore_rl.planner.phases import Case
from mcore_rl.planner.settings import (
    BATCHED_TOKENS,
    COMMUNICATOR_MB,
    GB,
    GPU,
    GPU_RESERVED_GB,
    GPUS,
    HOST_GB,
    MB,
    OTHER_NODES_GB_PER_SECOND,
    OWN_NODE_GB_PER_SECOND,
    USUAL_RANKS_PER_NODE,
    Machine,
    gpu_named,
)
from mcore_rl.planner.step_seconds import Step
from mcore_rl.tools.plan.simulate import (
    MAY_BE_0,
    add_simulation_flags,
    check_simulation_flags,
    not_simulated,
)

if TYPE_CHECKING:
    from mcore_rl.config import RLConfig
    from mcore_rl.job.facts import Facts
    from mcore_rl.spec import LaidOut

_BATCH_FLAGS = frozenset(
    "rl_num_prompts_per_step rl_num_samples_per_prompt rl_num_mini_batches micro_batch_size "
    "global_batch_size".split()
)
# The platform that scripts/setup_env.sh installs on a GPU machine, which may not be this one.
_PLANNED_FOR = Platform(cuda=True, transformer_engine=(2, 20), fused_weight_gradients=False)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A parsed command line."""

    case: Case
    step: Step  # for --search and --simulate
    prompts_per_step: int
    notes: tuple[str, ...]
    not_simulated: tuple[str, ...] = ()  # by --simulate


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the planner's own flags; all others are Megatron's and mcore_rl's."""
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.description = (
        "Plan a job without a GPU and without weights: its memory in every phase, and what a "
        "hand-over moves."
    )
    parser.epilog = (
        "All other flags are those of mcore_rl.train (see -m mcore_rl.train --help): any Megatron "
        "flag, any --rl-* flag, --rl-config FILE. GB are 10^9 bytes."
    )
    add = parser.add_argument
    add("--hf-config", help="config.json of the checkpoint, or its folder")
    add("--world-size", type=int, help="number of GPUs")
    add("--json", metavar="FILE", help="also write the plan there")
    add("--search", action="store_true", help="rank other layouts that fit")
    add("--top", type=int, default=10, help="with --search, how many to show")
    add("--gpu", metavar="NAME", default=GPU, help=f"device: {', '.join(GPUS)}")
    add("--gpu-memory-gb", type=float, help="of a device, in place of that of --gpu")
    add("--gpu-reserved-gb", type=float, default=GPU_RESERVED_GB, help="of it, not available to "
        "tensors: contexts, fragmentation")  # fmt: skip
    add("--communicator-mb", type=float, default=COMMUNICATOR_MB, help="of a device, what NCCL "
        "takes for each communicator: an assumption, 50 to 200 by estimate")  # fmt: skip
    add("--host-memory-gb", type=float, default=HOST_GB, help="of a node")
    add(
        "--intra-node-gb-per-second",
        type=float,
        default=OWN_NODE_GB_PER_SECOND,
        help="of a rank, each way",
    )
    add(
        "--inter-node-gb-per-second",
        type=float,
        default=OTHER_NODES_GB_PER_SECOND,
        help="of a rank, each way",
    )
    add("--expert-load", type=float, default=1.5, help="tokens of the busiest rank's experts over "
        "the mean")  # fmt: skip
    add("--batched-tokens", type=int, default=BATCHED_TOKENS, help="tokens in one step of vLLM")
    add("--gpu-tflops", type=float, help="achieved in training, likewise, for --search")
    add("--gpu-memory-gb-per-second", type=float, help="achieved, likewise, for --search")
    add_simulation_flags(parser)


def read_command_line(tokens: Sequence[str]) -> PlanRequest:
    """Parse and check `tokens`. Raises UsageError; leaves with SystemExit after --help."""
    parser = CommandParser(prog="mcore-rl plan")
    add_flags(parser)
    return read_request(*parser.parse_known_args(list(tokens)))


def read_request(options: argparse.Namespace, rest: Sequence[str]) -> PlanRequest:
    """Read the planner's own flags and the job's, by the checks of a start except those that need
    the weights or the machine of the run. Raises UsageError."""
    _take_gpu(options)
    _check_options(options)
    # Imported late, because they import Megatron, which takes seconds.
    from mcore_rl.job.choices import choose_defaults, choose_layout, with_chosen
    from mcore_rl.job.facts import Refusals, Source
    from mcore_rl.job.reading import make_parser
    from mcore_rl.job.resolver import examine

    import_given_files(rest)
    parser = make_parser()
    rest = expand_config(rest, parser)
    own_flags = ["--rl-ranks-per-node", str(min(USUAL_RANKS_PER_NODE, options.world_size))]

    source = Source(
        tokens=[*own_flags, *rest],
        platform=_PLANNED_FOR,
        world_size=options.world_size,
        parser=parser,
        read_shape=functools.partial(read_named_shape, options.hf_config),
        has_files=False,
        is_here=False,
    )
    notes = []

    def choice(choose: Callable[[Source], tuple[str, ...]]) -> tuple[str, ...]:
        return choose(replace(source, device_bytes=lambda: int(options.gpu_memory_gb * GB)))

    source = with_chosen(source, choice(choose_layout))
    facts = examine(replace(source, checks_batches=False), Refusals())
    if not facts.given.keys() & _BATCH_FLAGS:
        assert facts.config and facts.actor, "nothing was refused"
        models = {ACTOR: facts.actor} | ({CRITIC: facts.critic} if facts.critic else {})
        least, sharing = _least_prompts(facts.config, facts.given, models)
        if least != facts.config.trainer.num_prompts_per_step:
            notes.append(
                f"--rl-num-prompts-per-step is taken as {least}, the least number that "
                f"{' and '.join(sharing)} can share"
            )
            least_flags = ("--rl-num-prompts-per-step", str(least))
            source = replace(source, tokens=(*least_flags, *source.tokens))
    _check_tries(facts, options)
    source = with_chosen(source, choice(choose_defaults))
    facts = examine(source, Refusals())
    if source.chosen:
        notes.append(f"chosen by the plan, as a start would: {' '.join(source.chosen)}")
    config, case = facts.config, _case(facts, options)
    assert config is not None, "nothing was refused"
    step = Step(
        samples=config.samples_per_step,
        mini_batches=config.trainer.num_mini_batches,
        flops=options.gpu_tflops * 1e12,
        memory_rate=options.gpu_memory_gb_per_second * GB,
    )
    return PlanRequest(
        case,
        step,
        config.trainer.num_prompts_per_step,
        (*_notes(case, config, facts.values or {}), *notes),
        tuple(not_simulated(config)),
    )


def _case(facts: Facts, options: argparse.Namespace) -> Case:
    # Imported late, because they import torch.
    from mcore_rl.hybrid_engine.options import ranks_per_node
    from mcore_rl.trainer.plan_inputs import case_of, trained_critic, with_teachers

    config, actor, rollout, roles = facts.config, facts.actor, facts.rollout, facts.roles
    assert config and actor and rollout and roles, "nothing was refused"
    # The derived multiple pads as the planner does without one.
    multiple = {"make_vocab_size_divisible_by": facts.given.get("make_vocab_size_divisible_by")}
    critic = None
    if (own := facts.critic) is not None:
        own = replace(own, values={**own.values, **multiple})
        critic = trained_critic(config, own, roles, expert_load=options.expert_load)
    machine = Machine(
        ranks_per_node=ranks_per_node(config.engine, actor.layout.world_size),
        gpu_bytes=int(options.gpu_memory_gb * GB),
        reserved_bytes=int(options.gpu_reserved_gb * GB),
        communicator_bytes=int(options.communicator_mb * MB),
        host_bytes=int(options.host_memory_gb * GB),
        own_node_rate=options.intra_node_gb_per_second * GB,
        other_nodes_rate=options.inter_node_gb_per_second * GB,
    )
    case = case_of(
        config,
        {**actor.values, **multiple},
        (actor.shape, actor.layout, actor.layers),
        rollout,
        critic,
        machine,
        engine_ranks=roles.rollout,
        has_cuda=True,
        expert_load=options.expert_load,
        batched_tokens=options.batched_tokens,
    )
    teachers = [replace(each, values={**each.values, **multiple}) for each in facts.teachers]
    case = with_teachers(case, config, teachers, roles, expert_load=options.expert_load)
    # The bucket must hold a message in each of its buffers.
    frame = frame_of({"float32": 4}, with_delta=case.engine.delta)
    slot_bytes(case.engine.bucket_bytes, 3 if case.engine.delta else 2, frame)
    return case


def _check_tries(facts: Facts, options: argparse.Namespace) -> None:
    """Refuse to look for other layouts of a job whose engines have given ranks, or that has none
    to simulate."""
    assert facts.config is not None, "nothing was refused"
    if not facts.config.has_engines and options.simulate:
        raise UsageError(
            "simulates trainers and engines, and --rl-algorithm "
            f"{facts.config.trainer.algorithm} starts no engine",
            flag="--simulate",
            remedy="drop it",
        )
    if facts.config.rollout.servers and options.simulate:
        raise UsageError(
            "names engines that the job does not start, and --simulate tries engines of the job",
            flag=f"--rl-rollout-servers {facts.config.rollout.rollout_servers}",
            remedy="drop it, or --simulate",
        )
    ranks = facts.config.rollout.rollout_ranks
    tries = next((name for name in ("search", "simulate") if getattr(options, name)), None)
    if ranks is not None and tries is not None:
        why = "does not change" if tries == "search" else "chooses itself"
        raise UsageError(
            f"fixes ranks, which --{tries} {why}",
            flag=f"--rl-rollout-ranks {ranks}",
            remedy=f"drop it, or --{tries}",
        )


def _take_gpu(options: argparse.Namespace) -> None:
    """Set what was not given of a device to that of `--gpu`."""
    gpu = gpu_named(options.gpu)
    for name, value in (
        ("gpu_memory_gb", gpu.memory_gb),
        ("gpu_tflops", gpu.tflops),
        ("gpu_memory_gb_per_second", gpu.gb_per_second),
    ):
        if getattr(options, name) is None:
            setattr(options, name, value)


def _check_options(options: argparse.Namespace) -> None:
    if options.world_size is None:
        raise UsageError(
            "is missing", flag="--world-size", remedy="give the number of GPUs to plan for"
        )
    for name, value in vars(options).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least_is_0 = name in ("gpu_reserved_gb", "communicator_mb", *MAY_BE_0)
        if is_number and not (value > 0 or (least_is_0 and value == 0)):
            raise UsageError("must be greater than 0", flag=as_flag(name, value), remedy=CORRECT)
    if options.expert_load < 1:
        raise UsageError(
            "must be at least 1, an even load",
            flag=f"--expert-load {options.expert_load}",
            remedy=CORRECT,
        )
    if options.gpu_reserved_gb >= options.gpu_memory_gb:
        raise UsageError(
            f"leaves nothing of --gpu-memory-gb {options.gpu_memory_gb}",
            flag=f"--gpu-reserved-gb {options.gpu_reserved_gb}",
            remedy="lower it",
        )
    check_simulation_flags(options)
    if options.json:
        check_output_file(Path(options.json), f"--json {options.json}")


def read_named_shape(named: str | None, source: str | None, flag: str) -> ModelShape:
    """Read the shape in a config.json; `named`, the planner's own flag, replaces the actor's."""
    if flag == "--rl-hf-checkpoint" and (named is not None or source is None):
        flag, source = "--hf-config", named
    if source is None:
        raise UsageError(
            "is missing", flag=flag, remedy="give the config.json of the checkpoint to train"
        )
    if not Path(source).exists():
        raise UsageError(
            "is not there", flag=f"{flag} {source}", remedy="give a config.json or its folder"
        )
    shape = read_model_shape(Path(source), flag=flag, for_planning=True)
    # Published checkpoints; their tensors have the shapes of the trained tensors.
    known = (MXFP4,) if family_of(shape.architecture).has_mxfp4 else (FP8, INT4)
    if shape.quantization not in (None, *known):
        raise UsageError(
            f"describes weights quantised by {shape.quantization}, and the planner knows "
            f"{' and '.join(known)}, converted to bfloat16 for training",
            flag=f"{flag} {source}",
            remedy="give the config.json of such a checkpoint or of one that is not quantised",
        )
    return shape


def _notes(case: Case, config: RLConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on what the figures do not show."""
    if case.has_engines:
        yield from _notes_on_engines(placement_of(case), config, values)
    if case.has_servers:
        yield (
            "the traffic of a hand-over is not planned, since the layout of servers is not known: "
            "with --rl-rollout-ranks in place of --rl-rollout-servers it is, for engines of the job"
        )
    if values.get("use_megatron_fsdp"):
        yield (
            "--use-megatron-fsdp: weights, gradients and what travels are counted as if every "
            "data-parallel rank held whole parameters, which is more than it shards them to"
        )
    if config.rewards.reward_model is not None:
        yield "the reward model of --rl-reward-model is not counted"
    if config.has_groups_of_different_size:
        mean = config.samples_per_step / config.trainer.num_prompts_per_step
        yield f"every prompt is planned with {mean:g} samples, the mean of a step"


def _notes_on_engines(
    placement: Placement, config: RLConfig, values: Mapping[str, Any]
) -> Iterator[str]:
    from mcore_rl.job.layout import note_on_experts

    shape, rollout = placement.shape, placement.rollout
    if shape.quantization:
        how = "read and trained" if rollout.float8 else "read, trained and handed over"
        yield (
            f"config.json describes weights in {shape.quantization}; the plan is for bfloat16, in "
            f"which they are {how}"
        )
    if rollout.float8:
        yield "engines hold linear layers in FP8 blocks, quantised by the sender"
    if carried := shape.num_mtp_layers - (values.get("mtp_num_layers") or 0):
        yield (
            f"{carried} multi-token-prediction layer(s) are not trained; engines hold "
            "them with --rl-speculate mtp:N"
        )
    if rollout.has_whole_shared_experts and shape.experts and shape.experts.shared_hidden_size:
        backends = SPLITS_SHARED_EXPERTS
        other = replace(rollout, all2all_backend=backends[0])
        split = Placement(shape, placement.train, placement.layers, other)
        is_separate = config.rollout.rollout_ranks is not None
        least = split.resident_bytes if is_separate else split.lower_bound_bytes
        yield (
            "in this layout vLLM keeps shared experts whole on every rank; "
            f"--rl-rollout-all2all-backend with one of {', '.join(backends)} splits them, where "
            f"the machine can run it: then {split.resident_bytes.max() / GB:.2f} GB are resident "
            f"and at least {least.mean() / GB:.2f} GB received on average"
        )
    if config.rollout.rollout_ranks is None:
        yield from note_on_experts(config.engine, placement)


def _least_prompts(
    config: RLConfig, given: Mapping[str, Any], models: Mapping[str, LaidOut]
) -> tuple[int, list[str]]:
    """Return the fewest prompts that the data-parallel ranks of all models can share, at least the
    default, and these ranks in words: "4 data-parallel ranks", per model if they differ."""
    shares: list[int] = []
    whose: dict[str, str] = {}
    for name, model in models.items():
        group = 1  # the divisor of a rank's number of micro-batches
        if len(model.layers[0]) > 1 and not config.trainer.max_tokens_per_microbatch:
            group = int(given.get("microbatch_group_size_per_vp_stage") or model.layout.pp_size)
        shares.append(model.layout.dp_size * group)
        by = f" by {group} micro-batches" if group > 1 else ""
        of = "" if name == ACTOR else f" of the {name}"
        whose.setdefault(f"{model.layout.dp_size} data-parallel ranks{by}", of)
    parts = config.trainer.num_mini_batches * math.lcm(*shares)
    step = parts // math.gcd(parts, config.samples_per_prompt)
    least = math.ceil(config.trainer.num_prompts_per_step / step) * step
    return least, [ranks + of for ranks, of in whose.items()]
