"""One list of named checks, from a command line or a fork's arguments to one `JobSpec`.

A check takes facts, by the names of its parameters, and gives one: its result. So it runs once all
that it needs is known, and is passed over where something of that was refused, or is not asked for.
The start stops at the first refusal, the doctor collects all, the planner leaves out what needs
files or a machine. What a fork has parsed enters as the fact `args` and passes the same list as
what was `typed`.

Each check raises UsageError. They read configuration and files only, so that the whole takes
seconds, and `mcore_rl.common.agreement` makes all ranks fail together. What Megatron itself would
refuse comes last: its own validation is run once beforehand.
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
    """`facts` with all that the checks make of them.

    `leaves_out` names kinds of checks, or single ones. With `refused`, which is told every refusal,
    the checks go on to those that do not need what was refused. Nothing is said of what depends on
    the flags `unknown`, by destination, as what was meant by them is not known.
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
    """What the checks of a command line begin with; see `resolve_tokens`."""
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
    """The job of a command line, and of everything that it names but the prompts.

    With `scores_only`, prompts are scored and not answered: of --rl-max-response-tokens there is
    the one token left that vLLM generates whenever it scores. `extra_args` adds all flags that are
    not Megatron's own, ours among them. With `--help` or `--help-rl` it leaves with SystemExit,
    after rank 0 has printed the flags. `device_bytes`, which tells how large this rank's device is,
    is asked where there is CUDA, and late: the environment may be changed for it before; so is
    `host_memory`, which tells of this machine's host memory, everywhere.
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
    """The job of the arguments that a fork has parsed with Megatron's parser.

    Nothing can be derived any more, so the architecture in `args` must be that of config.json.
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
