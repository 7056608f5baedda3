"""From the command line of `mcore-rl plan` to the case to be planned.

Every Megatron and --rl-* flag is read as a run reads it: by Megatron's own parser, after
`--rl-config` files, with what config.json and RL add. The module imports Megatron for that and
takes no other part of it: no device, no process group, no model.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.flags.classes import check_no_megatron_rl_flag
from mcore_rl.flags.derived import derive_flags
from mcore_rl.flags.given import expand_config, given_values, import_given_files
from mcore_rl.flags.options import DEGREE_FLAGS, RLConfig, config_from
from mcore_rl.flags.roles import Roles, parse_roles
from mcore_rl.hybrid_engine.plan.buckets import frame_of, slot_bytes
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.job.planner_settings import engine_settings, train_settings
from mcore_rl.model.config_json import ModelShape, read_model_shape
from mcore_rl.model.layout import (
    SPLITS_SHARED_EXPERTS,
    PipelineLayers,
    RolloutLayout,
    TrainLayout,
)
from mcore_rl.planner.models import ACTOR, CRITIC, CRITIC_FLAGS, TrainedModel
from mcore_rl.planner.phases import Case
from mcore_rl.planner.settings import (
    BATCHED_TOKENS,
    COMMUNICATOR_MB,
    GB,
    GPU_RESERVED_GB,
    MB,
    EngineSettings,
    Machine,
)
from mcore_rl.tools import CommandParser

_BATCH_FLAGS = frozenset(
    "rl_num_prompts_per_step rl_num_samples_per_prompt rl_num_mini_batches micro_batch_size "
    "global_batch_size".split()
)
_USUAL_RANKS_PER_NODE = 8
# Of published checkpoints; their tensors have the shapes of those that are trained.
_DEQUANTIZED = ("fp8",)
# What scripts/setup_env.sh makes of a machine with GPUs; the one that plans is another.
_PLANNED_FOR = Platform(cuda=True, transformer_engine=(2, 20), fused_weight_gradients=False)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A parsed command line: the case, and what is asked beside it."""

    case: Case
    options: argparse.Namespace  # those of the planner alone
    samples_per_step: int
    num_mini_batches: int
    notes: tuple[str, ...]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The planner's own flags; all others are Megatron's and ours."""
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
    add("--gpu-memory-gb", type=float, default=80.0, help="of a device")
    add("--gpu-reserved-gb", type=float, default=GPU_RESERVED_GB, help="of it, what no tensor "
        "gets: contexts, CUDA graphs, fragmentation")  # fmt: skip
    add("--communicator-mb", type=float, default=COMMUNICATOR_MB, help="of a device, what NCCL "
        "takes for each communicator: an assumption, 50 to 200 by estimate")  # fmt: skip
    add("--host-memory-gb", type=float, default=2000.0, help="of a node")
    add("--intra-node-gb-per-second", type=float, default=400.0, help="a rank's, each way")
    add("--inter-node-gb-per-second", type=float, default=50.0, help="a rank's, each way")
    add("--expert-load", type=float, default=1.5, help="tokens of the busiest rank's experts over "
        "the mean")  # fmt: skip
    add("--batched-tokens", type=int, default=BATCHED_TOKENS, help="that vLLM works on at one time")
    add("--gpu-tflops", type=float, default=400.0, help="achieved in training, for --search")
    add("--gpu-memory-gb-per-second", type=float, default=3000.0, help="for --search")


def read_command_line(tokens: Sequence[str]) -> PlanRequest:
    """Parse and check `tokens`. Raises UsageError; leaves with SystemExit after --help."""
    parser = CommandParser(prog="mcore-rl plan")
    add_flags(parser)
    return read_request(*parser.parse_known_args(list(tokens)))


def read_request(options: argparse.Namespace, rest: Sequence[str]) -> PlanRequest:
    """From the planner's own flags and the job's. Raises UsageError."""
    _check_options(options)
    # Late, because it takes seconds: importing them imports Megatron.
    from mcore_rl.job import layout as layout_checks
    from mcore_rl.job import preflight

    import_given_files(rest)
    parser = preflight.make_parser()
    rest = expand_config(rest, parser)
    given = given_values(rest, parser)
    check_no_megatron_rl_flag(given, parser)
    config = _config(given, options.world_size)
    preflight.check_ranges(config)
    shape = _read_shape(options.hf_config, config)
    preflight.check_lengths(config, shape, cp_size=given.get("context_parallel_size") or 1)
    actor = _Flags(shape, given, parser)
    values = actor.values(config)
    preflight.check_switches(values)
    roles = parse_roles(options.world_size, config.critic_ranks, config.reward_ranks)
    models = [_laid_out(ACTOR, actor, config, world_size=len(roles.actor))]
    if config.recipe.needs_critic:
        models.append(_critic(actor, config, roles))
    train, layers = models[0].train, models[0].layers
    rollout = layout_checks.check_rollout(config, shape, train, layers, has_cuda=True)
    placement = Placement(shape, train, layers, rollout)
    notes = [*_notes(placement), *layout_checks.note_on_experts(config, placement)]
    if values.get("use_megatron_fsdp"):
        notes.append(
            "--use-megatron-fsdp: weights, gradients and what travels are counted as if every "
            "data-parallel rank held whole parameters, which is more than it shards them to"
        )
    if config.reward_model is not None:
        notes.append("the reward model of --rl-reward-model is not counted")
    if not given.keys() & _BATCH_FLAGS:
        raised = _with_batch_for(config, models)
        if raised != config:
            notes.append(
                f"--rl-num-prompts-per-step is taken as {raised.num_prompts_per_step}, the least "
                f"that {' and '.join(_sharing(models, config))} can share"
            )
            config = raised
    trained = [_trained(model, config, options) for model in models]
    case = Case(
        shape=shape,
        train=train,
        layers=layers,
        rollout=rollout,
        training=trained[0].training,
        critic=trained[1] if len(trained) > 1 else None,
        engine=_engine(config, values, rollout, options),
        machine=_machine(options, layout_checks.ranks_per_node(config, train.world_size)),
    )
    _check_bucket(case)
    return PlanRequest(
        case, options, config.samples_per_step, config.num_mini_batches, tuple(notes)
    )


@dataclass(frozen=True, slots=True)
class _Flags:
    """A model's shape, and the flags that are given for it."""

    shape: ModelShape
    given: Mapping[str, Any]
    parser: argparse.ArgumentParser

    def values(self, config: RLConfig) -> dict[str, Any]:
        """All of Megatron's and ours, by destination: what is derived, and what was given."""
        derived = derive_flags(
            self.shape, config, self.given, parser=self.parser, platform=_PLANNED_FOR
        )
        return {**given_values(derived.tokens, self.parser), **self.given}


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """A model in its layout, before the batch is settled."""

    name: str
    flags: _Flags
    train: TrainLayout
    layers: PipelineLayers
    own_degrees: frozenset[str]
    ranks: tuple[int, ...]

    def group(self, config: RLConfig) -> int:
        """What the number of micro-batches of a data-parallel rank must divide by."""
        if len(self.layers[0]) == 1 or config.max_tokens_per_microbatch:
            return 1
        given = self.flags.given.get("microbatch_group_size_per_vp_stage")
        return int(given or self.train.pp_size)


def _laid_out(
    name: str,
    flags: _Flags,
    config: RLConfig,
    *,
    world_size: int,
    own_degrees: frozenset[str] = frozenset(),
    ranks: tuple[int, ...] = (),
) -> _LaidOut:
    from mcore_rl.job import layout as layout_checks

    values = flags.values(config)
    train = layout_checks.check_layout(flags.shape, values, world_size)
    layers = layout_checks.check_stages(flags.shape, train.pp_size, values)
    return _LaidOut(name, flags, train, layers, own_degrees, ranks)


def _critic(actor: _Flags, config: RLConfig, roles: Roles) -> _LaidOut:
    """The critic, of the actor's flags and those that it has of its own; as `critic_startup`."""
    shape = actor.shape
    if config.critic_init is not None:
        shape = _shape_of("--rl-critic-init", config.critic_init)
    shape = dataclasses.replace(shape, value_head=True, tied_embeddings=False)
    own = {d: size for d in CRITIC_FLAGS if (size := getattr(config, f"critic_{d}")) is not None}
    tokens = [t for degree, size in own.items() for t in (DEGREE_FLAGS[degree], str(size))]
    given = {**actor.given, **given_values(tokens, actor.parser)}
    flags = _Flags(shape, given, actor.parser)
    try:
        return _laid_out(
            CRITIC,
            flags,
            config,
            world_size=len(roles.ranks(CRITIC)),
            own_degrees=frozenset(own),
            ranks=roles.critic,
        )
    except UsageError as error:
        raise UsageError(f"of the critic: {error}") from error


def _trained(model: _LaidOut, config: RLConfig, options: argparse.Namespace) -> TrainedModel:
    """With the settings that its flags give it, now that the batch is settled."""
    from mcore_rl.job import layout as layout_checks

    values = model.flags.values(config)
    try:
        layout_checks.check_batches(config, model.train, values)
    except UsageError as error:
        if model.name == ACTOR:
            raise
        raise UsageError(f"of the {model.name}: {error}") from error
    return TrainedModel(
        name=model.name,
        shape=model.flags.shape,
        train=model.train,
        layers=model.layers,
        training=train_settings(
            config,
            values,
            model.train,
            model.layers,
            vocabulary_multiple=model.flags.given.get("make_vocab_size_divisible_by"),
            expert_load=options.expert_load,
        ),
        own_degrees=model.own_degrees,
        ranks=model.ranks,
    )


def _check_options(options: argparse.Namespace) -> None:
    if options.world_size is None:
        raise UsageError("--world-size is missing; give the number of GPUs to plan for")
    for name, value in vars(options).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        least_is_0 = name in ("gpu_reserved_gb", "communicator_mb")
        if is_number and not (value > 0 or (least_is_0 and value == 0)):
            raise UsageError(f"--{name.replace('_', '-')} {value} must be greater than 0")
    if options.expert_load < 1:
        raise UsageError(f"--expert-load {options.expert_load} must be at least 1, an even load")
    if options.gpu_reserved_gb >= options.gpu_memory_gb:
        raise UsageError(
            f"--gpu-reserved-gb {options.gpu_reserved_gb} leaves nothing of --gpu-memory-gb "
            f"{options.gpu_memory_gb}; lower it"
        )
    target = Path(options.json) if options.json else None
    if target and (target.is_dir() or not target.absolute().parent.is_dir()):
        raise UsageError(f"--json {options.json} must name a file in a folder that exists")


def _config(given: Mapping[str, Any], world_size: int) -> RLConfig:
    """As a run has it, but for the machine: the one that plans is another."""
    config = config_from(given)
    if config.ranks_per_node:
        return config
    return dataclasses.replace(config, ranks_per_node=min(_USUAL_RANKS_PER_NODE, world_size))


def _read_shape(named: str | None, config: RLConfig) -> ModelShape:
    flag, source = "--hf-config", named
    if source is None:
        flag, source = "--rl-hf-checkpoint", config.hf_checkpoint
    if source is None:
        raise UsageError("--hf-config is missing; give the config.json of the checkpoint to train")
    return _shape_of(flag, source)


def _shape_of(flag: str, source: str) -> ModelShape:
    if not Path(source).exists():
        raise UsageError(f"{flag} {source} is not there; give a config.json or its folder")
    shape = read_model_shape(Path(source), flag=flag, for_planning=True)
    if shape.quantization not in (None, *_DEQUANTIZED):
        raise UsageError(
            f"{flag} {source} describes weights quantised by {shape.quantization}; the planner "
            f"knows {', '.join(_DEQUANTIZED)}, which is converted to bfloat16 for training: give "
            "the config.json of such a checkpoint or of one that is not quantised"
        )
    return shape


def _notes(placement: Placement) -> list[str]:
    """What the figures do not say by themselves."""
    shape, rollout = placement.shape, placement.rollout
    notes = []
    if shape.quantization:
        notes.append(
            f"config.json describes weights in {shape.quantization}; the plan is for the "
            "checkpoint once it is converted to bfloat16, which training needs"
        )
    if shape.num_mtp_layers:
        notes.append(
            f"{shape.num_mtp_layers} multi-token-prediction layer(s) are left out: RL neither "
            "trains them nor samples from them"
        )
    if rollout.has_whole_shared_experts and shape.experts and shape.experts.shared_hidden_size:
        backends = SPLITS_SHARED_EXPERTS
        split = Placement(
            shape,
            placement.train,
            placement.layers,
            dataclasses.replace(rollout, all2all_backend=backends[0]),
        )
        notes.append(
            "in this layout vLLM keeps shared experts whole on every rank; "
            f"--rl-rollout-all2all-backend with one of {', '.join(backends)} splits them, where "
            f"the machine can run it: then {split.resident_bytes.max() / GB:.2f} GB are resident "
            f"and at least {split.lower_bound_bytes.mean() / GB:.2f} GB received on average"
        )
    return notes


def _with_batch_for(config: RLConfig, models: Sequence[_LaidOut]) -> RLConfig:
    """`config` with the least batch, not below the default, that data-parallel ranks can share."""
    shares = [model.train.dp_size * model.group(config) for model in models]
    parts = config.num_mini_batches * math.lcm(*shares)
    step = parts // math.gcd(parts, config.samples_per_prompt)
    prompts = math.ceil(config.num_prompts_per_step / step) * step
    return dataclasses.replace(config, num_prompts_per_step=prompts)


def _sharing(models: Sequence[_LaidOut], config: RLConfig) -> list[str]:
    """4 data-parallel ranks; of each model if they differ."""
    found: dict[str, str] = {}
    for model in models:
        group = model.group(config)
        by = f" by {group} micro-batches" if group > 1 else ""
        whose = "" if model.name == ACTOR else f" of the {model.name}"
        found.setdefault(f"{model.train.dp_size} data-parallel ranks{by}", whose)
    return [text + whose for text, whose in found.items()]


def _engine(
    config: RLConfig, values: Mapping[str, Any], rollout: RolloutLayout, options: argparse.Namespace
) -> EngineSettings:
    from mcore_rl.hybrid_engine.memory.offload import (  # which import torch
        kinds_at_start,
        offload_kinds,
    )

    return engine_settings(
        config,
        values,
        rollout,
        offloaded=offload_kinds(config.offload, values, has_cuda=True),
        away_at_start=kinds_at_start(values),
        batched_tokens=options.batched_tokens,
    )


def _machine(options: argparse.Namespace, ranks_per_node: int) -> Machine:
    return Machine(
        ranks_per_node=ranks_per_node,
        gpu_bytes=int(options.gpu_memory_gb * GB),
        reserved_bytes=int(options.gpu_reserved_gb * GB),
        communicator_bytes=int(options.communicator_mb * MB),
        host_bytes=int(options.host_memory_gb * GB),
        own_node_rate=options.intra_node_gb_per_second * GB,
        other_nodes_rate=options.inter_node_gb_per_second * GB,
    )


def _check_bucket(case: Case) -> None:
    """The bucket must hold a message in each of its buffers, as a transfer asks for."""
    frame = frame_of({"float32": 4}, with_delta=case.engine.delta)
    slot_bytes(case.engine.bucket_bytes, 3 if case.engine.delta else 2, frame)
