"""The checks of a job, in the order of a start, with the facts that each needs; see `resolver`."""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine_memory import MachineMemory
from mcore_rl.common.platform import Platform
from mcore_rl.flags.allocator import check_allocator
from mcore_rl.flags.classes import check_critic_rate, notes
from mcore_rl.flags.derived import DerivedFlags, derive_flags, effective_of, for_megatron
from mcore_rl.flags.fsdp import check_fsdp, check_fsdp_machine
from mcore_rl.flags.given import given_values
from mcore_rl.flags.options import RLConfig, config_from
from mcore_rl.flags.packages import check_wandb
from mcore_rl.flags.parser import ExtraArgs
from mcore_rl.flags.roles import CRITIC, Roles, describe_ranks, parse_roles
from mcore_rl.hybrid_engine.memory.offload import offload_kinds
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.job import preflight, reading, value_models
from mcore_rl.job.batches import check_lengths
from mcore_rl.job.device import case_of_run, check_device, training_of
from mcore_rl.job.host import check_host, has_slow_products
from mcore_rl.job.layout import (
    check_batches,
    check_layout,
    check_rollout,
    check_stages,
    note_on_experts,
)
from mcore_rl.job.spec import JobSpec, ValueModelSpec
from mcore_rl.job.validation import check_megatron_accepts
from mcore_rl.job.value_models import CRITIC_ROLE, REWARD_ROLE, Folder, LaidOut, ValueRole
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.speculation import (
    Speculation,
    check_drafter,
    check_drafter_weights,
    parse_speculation,
)
from mcore_rl.planner.memory import memory_of, resident_of
from mcore_rl.planner.models import TrainedModel

# Facts without a check; either `typed` or `args`.
INITIAL = frozenset(
    """
    typed args extra_args platform world_size scores_only device_bytes host_memory read_shape
    """.split()
)
# Kinds of checks, by what they need besides the flags and config.json.
FILES, MACHINE = "files", "machine"
# Flags, by destination, that the checks of layout, batch and lengths depend on.
_LAYOUT = re.compile(
    r"parallel_size|pipeline|virtual|^rl_(rollout_|critic_|reward_)?(ranks|[te]p_)"
)
_BATCH = re.compile(r"batch|^rl_(num_prompts|num_samples|algorithm|share_prompts|max_tokens)")
_LENGTHS = re.compile(r"^rl_max_(prompt|response)_tokens|^rl_max_tokens|context_parallel")


@dataclass(frozen=True, slots=True)
class Check:
    """One check: the fact it gives, its function, and the facts it needs."""

    gives: str  # the fact that its result becomes
    run: Callable[..., Any]
    needs: Mapping[str, str]  # parameters of `run` -> facts
    after: tuple[str, ...] = ()  # facts that must exist, too, or it would only repeat a refusal
    asks: str = ""
    # It examines flags one by one: without the flag that it refuses, the rest may be right.
    alone: bool = False
    reads: tuple[re.Pattern[str], ...] = field(default=())

    def depends_on(self, dest: str) -> bool:
        """Return whether its result depends on this flag."""
        return any(pattern.search(dest) for pattern in self.reads)


def _check(gives: str, run: Callable[..., Any], *after: str, **kinds: Any) -> Check:
    needs = {name: name for name in inspect.signature(run).parameters}
    return Check(gives, run, needs, after, **kinds)


# ------------------------------------------------------------------------------- what they do


def _versions() -> None:
    preflight.check_versions()


def _config(given: Mapping[str, Any], scores_only: bool) -> RLConfig:
    config = config_from(given)
    preflight.check_ranges(config)
    return replace(config, max_response_tokens=1) if scores_only else config


def _speculation(config: RLConfig) -> Speculation | None:
    return parse_speculation(config.speculate)


def _drafter(speculation: Speculation | None, shape: ModelShape) -> None:
    check_drafter(speculation, shape)


def _drafter_weights(
    speculation: Speculation | None, shape: ModelShape, checkpoint: HFCheckpoint
) -> None:
    held = {name: info.shape for name, info in checkpoint.mtp.items()}
    check_drafter_weights(speculation, shape, held, str(checkpoint.folder))


def _wandb(given: Mapping[str, Any]) -> None:
    check_wandb(given)


def _lengths(
    config: RLConfig, shape: ModelShape, given: Mapping[str, Any], scores_only: bool
) -> None:
    cp_size = given.get("context_parallel_size") or 1
    check_lengths(config, shape, cp_size=cp_size, scores_only=scores_only)


def _derived(
    shape: ModelShape,
    config: RLConfig,
    given: Mapping[str, Any],
    parser: argparse.ArgumentParser,
    platform: Platform,
) -> DerivedFlags:
    return derive_flags(shape, config, given, parser=parser, platform=platform)


def _values(
    derived: DerivedFlags, given: Mapping[str, Any], parser: argparse.ArgumentParser
) -> dict[str, Any]:
    return {**given_values(derived.tokens, parser), **effective_of(given, derived.unread)}


def _roles(world_size: int, config: RLConfig) -> Roles:
    return parse_roles(world_size, config.critic_ranks, config.reward_ranks)


def _critic_rate(config: RLConfig, values: Mapping[str, Any]) -> None:
    check_critic_rate(config.critic_lr, values)


def _allocator(platform: Platform) -> None:
    if platform.cuda:
        check_allocator(os.environ)


def _queues(values: Mapping[str, Any]) -> None:
    """Allow many queues for FSDP, before CUDA starts."""
    if values.get("use_megatron_fsdp"):
        megatron_adapter.allow_many_queues()


def _fsdp_machine(values: Mapping[str, Any], platform: Platform) -> None:
    check_fsdp_machine(values, os.environ, platform=platform)


def _kv_after_update(config: RLConfig, platform: Platform) -> None:
    preflight.check_kv_after_update(config, has_cuda=platform.cuda)


def _offload(config: RLConfig, values: Mapping[str, Any], platform: Platform) -> frozenset[str]:
    return offload_kinds(config.offload, values, has_cuda=platform.cuda)


def _layout(shape: ModelShape, values: Mapping[str, Any], roles: Roles) -> TrainLayout:
    """Return the actor's layout; the error names its ranks if other ranks have other roles."""
    try:
        return check_layout(shape, values, len(roles.actor))
    except UsageError as error:
        if len(roles.actor) == roles.world_size:
            raise
        raise error.of_role(f"the actor, on {describe_ranks(roles.actor)}") from error


def _layers(shape: ModelShape, values: Mapping[str, Any]) -> PipelineLayers:
    return check_stages(shape, values.get("pipeline_model_parallel_size", 1), values)


def _rollout(
    config: RLConfig,
    shape: ModelShape,
    layout: TrainLayout,
    layers: PipelineLayers,
    platform: Platform,
) -> RolloutLayout:
    return check_rollout(config, shape, layout, layers, has_cuda=platform.cuda)


def _tokens_of_megatron(
    derived: DerivedFlags, tokens: tuple[str, ...], parser: argparse.ArgumentParser
) -> tuple[str, ...]:
    return for_megatron(derived, tokens, parser)


def _accepted(
    all_tokens: tuple[str, ...], shape: ModelShape, roles: Roles, extra_args: ExtraArgs
) -> None:
    check_megatron_accepts(all_tokens, shape, world_size=len(roles.actor), extra_args=extra_args)


def _value_model(
    own_folder: Folder | None, own_laid_out: LaidOut | None, extra_args: ExtraArgs
) -> ValueModelSpec | None:
    if own_folder is None or own_laid_out is None:
        return None
    return ValueModelSpec(
        shape=own_laid_out.shape,
        checkpoint=own_folder.checkpoint,
        has_head=own_folder.has_head,
        layout=own_laid_out.layout,
        layers=own_laid_out.layers,
        tokens=own_laid_out.tokens,
        extra_args=extra_args,
    )


def _device(
    config: RLConfig,
    values: Mapping[str, Any],
    shape: ModelShape,
    layout: TrainLayout,
    layers: PipelineLayers,
    rollout: RolloutLayout,
    critic_laid_out: LaidOut | None,
    roles: Roles,
    platform: Platform,
    device_bytes: Callable[[], int] | None,
    host_memory: Callable[[], MachineMemory] | None,
    scores_only: bool,
) -> tuple[str, ...]:
    """Return a line for each thing that may not fit the device or the host."""
    if device_bytes is None and host_memory is None:
        return ()
    critic = None
    if critic_laid_out is not None:
        own = critic_laid_out
        critic = TrainedModel(
            name=CRITIC,
            shape=own.shape,
            train=own.layout,
            layers=own.layers,
            training=training_of(config, own.values, own.layout, own.layers),
            ranks=roles.critic,
        )
    model = (shape, layout, layers)
    has_device = platform.cuda and device_bytes is not None
    size = device_bytes() if platform.cuda and device_bytes is not None else None
    case = case_of_run(config, values, model, rollout, critic, device_bytes=size)
    if case is None:
        return ()
    lines = check_device(case, scores_only=scores_only) if has_device else ()
    if host_memory is not None and has_device == platform.cuda and not scores_only:
        lines += check_host(
            case,
            host_memory(),
            memory=memory_of(case, resident_of(case)) if has_device else None,
            kv_cache_bytes=int(config.rollout_kv_cache_gib * (1 << 30)),
            widens=has_slow_products(config.precision),
        )
    return lines


def _spec(
    config: RLConfig,
    given: Mapping[str, Any],
    shape: ModelShape,
    checkpoint: HFCheckpoint,
    derived: DerivedFlags,
    all_tokens: tuple[str, ...],
    parser: argparse.ArgumentParser,
    roles: Roles,
    layout: TrainLayout,
    layers: PipelineLayers,
    rollout: RolloutLayout,
    critic: ValueModelSpec | None,
    reward_model: ValueModelSpec | None,
    device: tuple[str, ...],
) -> JobSpec:
    return JobSpec(
        config=config,
        shape=shape,
        checkpoint=checkpoint.with_mtp_trained(shape, given.get("mtp_num_layers") or 0),
        roles=roles,
        train_layout=layout,
        layers=layers,
        rollout_layout=rollout,
        derived=derived,
        tokens=all_tokens,
        flags=reading.flags_of(
            {**given_values(derived.tokens, parser), **effective_of(given, derived.unread)},
            parser,
        ),
        notes=(
            # Without a fork's flags.
            *notes(given, megatron_adapter.make_parser(), unread=derived.unread),
            *note_on_experts(config, Placement(shape, layout, layers, rollout)),
            *device,
        ),
        save=given.get("save"),
        critic=critic,
        reward_model=reward_model,
        trust_remote_code=bool(given.get("trust_remote_code")),
    )


# ---------------------------------------------------------------------------------- the list


def _of_role(role: ValueRole, key: str, read_folder: Callable[..., Any]) -> list[Check]:
    """Return the checks of a critic or a reward model; `key` replaces `own` in names of facts."""

    def check(gives: str, run: Callable[..., Any], *after: str, **kinds: Any) -> Check:
        bound = {"role": role} if "role" in inspect.signature(run).parameters else {}
        names = [name for name in inspect.signature(run).parameters if name not in bound]
        needs = {name: re.sub("^own_", f"{key}_", name) for name in names}
        return Check(gives, functools.partial(run, **bound), needs, after, **kinds)

    laid_out = f"{key}_laid_out"
    models = value_models
    return [
        check(f"{key}_shape", models.read_value_shape),
        check(f"{key}_folder", read_folder, asks=FILES),
        check(f"{key}_positions", models.check_value_positions, reads=(_LENGTHS,)),
        check(laid_out, models.lay_out, "typed", "layout", "layers", reads=(_LAYOUT,)),
        check(laid_out, models.lay_out_in_fork, "args"),
        check(f"{key}_batches", models.check_value_batches, "batches", reads=(_BATCH,)),
        check(f"{key}_balancing", models.check_value_balancing, "balancing"),
        check(f"{key}_biases", models.check_value_biases, "biases", asks=FILES),
        check(f"{key}_accepted", models.check_value_accepted, "accepted", asks=MACHINE),
        check(key, _value_model),
    ]


# Facts of one source only, which no other check needs.
_OF_ONE_SOURCE = ("imports", "typed_alone", "queues")
_CHECKS: tuple[Check, ...] = (
    _check("versions", _versions, asks=MACHINE),
    # What is given.
    _check("imports", reading.import_files),
    _check("parser", reading.make_parser),
    _check("tokens", reading.tokens_of, alone=True),
    _check("tokens", reading.no_tokens),
    _check("given", reading.given_in, "typed", alone=True),
    _check("given", reading.given_in_fork),
    _check("config", _config, alone=True),
    _check("reward_flags", value_models.check_reward_model_flags, alone=True),
    _check("environment_flags", preflight.check_environment_flags, alone=True),
    _check("kv_after_update", _kv_after_update, alone=True),
    _check("switches", preflight.check_switches, alone=True),
    _check("typed_alone", reading.check_needs_no_command_line),
    # What the flags name.
    _check("inputs", preflight.check_inputs, asks=FILES, alone=True),
    _check("outputs", preflight.check_outputs, asks=FILES),
    _check("wandb", _wandb, asks=MACHINE),
    _check("shape", reading.read_actor_shape),
    _check("checkpoint", reading.read_checkpoint, asks=FILES),
    _check("export_dtype", preflight.check_export_dtype, asks=FILES),
    _check("speculation", _speculation),
    _check("drafter", _drafter),
    _check("drafter_weights", _drafter_weights, "drafter", asks=FILES),
    _check("lengths", _lengths, reads=(_LENGTHS,)),
    # All flags, and their combinations.
    _check("derived", _derived, "typed", alone=True),
    _check("derived", reading.derived_in_fork),
    _check("values", _values, "typed"),
    _check("values", reading.values_in_fork),
    _check("together", preflight.check_together),
    _check("routing", preflight.check_routing),
    _check("balancing", preflight.check_balancing),
    _check("biases", preflight.check_biases),
    _check("roles", _roles, reads=(_LAYOUT,)),
    _check("critic_rate", _critic_rate),
    _check("allocator", _allocator, asks=MACHINE),
    _check("queues", _queues, "typed", asks=MACHINE),
    _check("fsdp", check_fsdp),
    _check("fsdp_machine", _fsdp_machine, "fsdp", asks=MACHINE),
    _check("offload", _offload),
    _check("layout", _layout, reads=(_LAYOUT,)),
    _check("layers", _layers, reads=(_LAYOUT,)),
    _check("mtp", preflight.check_mtp),
    _check("mtp_weights", preflight.check_mtp_weights, "mtp", asks=FILES),
    _check("rollout", _rollout, reads=(_LAYOUT,)),
    _check("batches", check_batches, reads=(_LAYOUT, _BATCH)),
    _check("all_tokens", _tokens_of_megatron),
    _check("accepted", _accepted, "typed", "rollout", "batches", "lengths", asks=MACHINE),
    _check("accepted", reading.accepted_in_fork),
    *_of_role(CRITIC_ROLE, CRITIC, value_models.read_critic_folder),
    *_of_role(REWARD_ROLE, "reward_model", value_models.read_reward_folder),
    _check("device", _device, "batches", "lengths", asks=MACHINE),
)
CHECKS = (
    *_CHECKS,
    _check("spec", _spec, *{c.gives: 0 for c in _CHECKS if c.gives not in _OF_ONE_SOURCE}),
)
