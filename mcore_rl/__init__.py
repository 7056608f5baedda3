"""RL post-training for Megatron-LM, with vLLM as the rollout engine.

Importing the package imports neither torch nor Megatron nor vLLM. A script of a Megatron fork uses

    mcore_rl.prepare()                     before its first import of Megatron
    mcore_rl.initialize(extra_args)        checks, Megatron's flags, Megatron's start
    mcore_rl.run(job, model_provider)      the complete run
    mcore_rl.add_rl_args(parser)           the `--rl-*` flags, for a fork that parses them itself

and imports the parts from their modules: `mcore_rl.algorithms.total_loss`,
`mcore_rl.hybrid_engine.sharding_manager`, ...
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

from mcore_rl.common.spawning import refuse_run_in_run
from mcore_rl.common.version import VERSION as __version__

__all__ = ["__version__", "add_rl_args", "initialize", "prepare", "run"]

if sys.version_info < (3, 12):
    # Megatron imports it from typing, and a forgotten `prepare` is for us to report.
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]


def prepare() -> None:
    """Repair Megatron for this machine, before any of its modules is imported; idempotent.

    A Megatron that is not supported, or is imported already, ends the process with exit code 2 and
    one sentence.
    """
    with _mistakes_end_the_process():
        from mcore_rl.megatron import adapter as megatron_adapter

        megatron_adapter.prepare()


def initialize(
    extra_args: Callable[[argparse.ArgumentParser], Any] | None = None, **megatron_options: Any
) -> Any:
    """Check the command line and start Megatron; see `mcore_rl.train.initialize`."""
    refuse_run_in_run()
    with _mistakes_end_the_process():
        from mcore_rl.train import initialize as start
    return start(extra_args, **megatron_options)


def run(job: Any, model_provider: Callable[..., Any] | None = None) -> None:
    """Train on an initialised Megatron; see `mcore_rl.train.run`."""
    refuse_run_in_run()
    with _mistakes_end_the_process():
        from mcore_rl.train import run as train
    train(job, model_provider)


def add_rl_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--rl-*` flags to a parser; see `mcore_rl.flags.parser.add_rl_args`."""
    from mcore_rl.flags.parsed_flags import import_given_files
    from mcore_rl.flags.parser import add_rl_args as add

    with _mistakes_end_the_process():
        import_given_files(sys.argv[1:])
    return add(parser)


@contextlib.contextmanager
def _mistakes_end_the_process() -> Iterator[None]:
    """End the process on a UsageError that every rank finds by itself."""
    from mcore_rl.common.agreement import leave_with
    from mcore_rl.common.errors import UsageError

    try:
        yield
    except UsageError as error:
        leave_with(error)
