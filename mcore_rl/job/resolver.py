"""Resolving a command line or a fork's arguments to one `JobSpec`, by one list of named checks.

A check takes facts, named by its parameters, and gives one: its result. It runs once all facts that
it needs are known, and is skipped if one of them was refused or is not requested. The start stops
at the first refusal, the doctor collects all, and the planner leaves out what needs files or a
machine. A fork's parsed arguments enter as the fact `args` and pass the same list as a command
line, the fact `typed`.

Each check raises UsageError. They read configuration and files only, so that all of them take
seconds, and `mcore_rl.common.agreement` makes all ranks fail together. Megatron's own validation
runs last, once, to find in advance what Megatron would refuse.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine_memory import MachineMemory
from mcore_rl.common.platform import Platform
from mcore_rl.flags.given import import_given_files
from mcore_rl.flags.pages import help_text
from mcore_rl.flags.parser import HELP_RL, ExtraArgs, all_args
from mcore_rl.job.checks import CHECKS, Check
from mcore_rl.job.preflight import check_versions
from mcore_rl.job.reading import make_parser, read_shape_of
from mcore_rl.job.spec import JobSpec

Facts = dict[str, Any]


def resolve(
    facts: Facts,
    *,
    leaves_out: Collection[str] = (),
    refused: Callable[[Check, UsageError], None] | None = None,
    unknown: Collection[str] = (),
) -> Facts:
    """Return `facts` with the results of all checks.

    `leaves_out` names kinds of checks, or single ones. With `refused`, which is called with every
    refusal, the checks that do not need what was refused continue. Checks that depend on the flags
    `unknown`, by destination, are skipped, since the meaning of these is not known.
    """
    facts = dict(facts)
    for check in CHECKS:
        if check.gives in facts or not facts.keys() >= {*check.needs.values(), *check.after}:
            continue
        if {check.gives, check.asks} & {*leaves_out} or any(map(check.depends_on, unknown)):
            continue
        try:
            facts[check.gives] = check.run(**{p: facts[name] for p, name in check.needs.items()})
        except UsageError as error:
            if refused is None:
                raise
            refused(check, error)
    return facts


def facts_of_tokens(
    typed: Sequence[str],
    *,
    platform: Platform,
    world_size: int,
    scores_only: bool = False,
    extra_args: ExtraArgs = all_args,
    device_bytes: Callable[[], int] | None = None,
    host_memory: Callable[[], MachineMemory] | None = None,
) -> Facts:
    """Return the initial facts of a command line; see `resolve_tokens`."""
    return {
        "typed": tuple(typed),
        "extra_args": extra_args,
        "platform": platform,
        "world_size": world_size,
        "scores_only": scores_only,
        "device_bytes": device_bytes,
        "host_memory": host_memory,
        "read_shape": read_shape_of,
    }


def resolve_tokens(
    tokens: Sequence[str],
    *,
    platform: Platform,
    scores_only: bool = False,
    extra_args: ExtraArgs = all_args,
    device_bytes: Callable[[], int] | None = None,
    host_memory: Callable[[], MachineMemory] | None = None,
) -> JobSpec:
    """Return the job of a command line, and of everything that it names except the prompts.

    With `scores_only`, prompts are scored without responses: --rl-max-response-tokens is then 1,
    the token that vLLM generates whenever it scores. `extra_args` adds all flags that are not
    Megatron's own, including ours. `--help` and `--help-rl` exit with SystemExit, after rank 0 has
    printed the flags. `device_bytes`, which returns the size of this rank's device, is called only
    with CUDA, and late: the environment may be changed for CUDA before. `host_memory`, which
    returns this machine's host memory, is called late, too, and everywhere.
    """
    is_first = int(os.environ.get("RANK", 0)) == 0
    if HELP_RL in tokens:
        import_given_files(tokens)
        if is_first:
            print(help_text(), end="")
        sys.exit(0)
    if {"-h", "--help"} & set(tokens):
        check_versions()
        import_given_files(tokens)
        if is_first:
            make_parser(extra_args).print_help()
        sys.exit(0)
    facts = facts_of_tokens(
        tokens,
        platform=platform,
        world_size=int(os.environ.get("WORLD_SIZE", 1)),
        scores_only=scores_only,
        extra_args=extra_args,
        device_bytes=device_bytes,
        host_memory=host_memory,
    )
    return _spec(resolve(facts))


def resolve_args(
    args: argparse.Namespace,
    *,
    platform: Platform,
    device_bytes: Callable[[], int] | None = None,
    host_memory: Callable[[], MachineMemory] | None = None,
) -> JobSpec:
    """Return the job of the arguments that a fork has parsed with Megatron's parser.

    It is too late to derive flags, so the architecture in `args` must match config.json.
    """
    facts: Facts = {
        "args": args,
        "extra_args": all_args,
        "platform": platform,
        "world_size": args.world_size,
        "scores_only": False,
        "device_bytes": device_bytes,
        "host_memory": host_memory,
        "read_shape": read_shape_of,
    }
    return _spec(resolve(facts))


def _spec(facts: Facts) -> JobSpec:
    other = {"typed", "args"} - facts.keys()
    missing = {
        check.gives
        for check in CHECKS
        if check.gives not in facts and not other & {*check.needs, *check.after}
    }
    assert not missing, f"passed over without a refusal: {', '.join(sorted(missing))}"
    spec = facts["spec"]
    assert isinstance(spec, JobSpec)
    return spec
