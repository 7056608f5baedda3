"""RL post-training for Megatron-LM, with vLLM as the rollout engine.

Importing the package imports neither torch nor Megatron nor vLLM. A Megatron fork uses

    mcore_rl.add_rl_args(parser)           the `--rl-*` flags
    mcore_rl.run(args, model_provider)     the whole run, on an initialised Megatron

and the parts by their modules: `mcore_rl.algorithms.total_loss`,
`mcore_rl.hybrid_engine.sharding_manager`, ...
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "add_rl_args", "run"]


def add_rl_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--rl-*` flags to a parser; see `mcore_rl.arguments.add_rl_args`."""
    from mcore_rl.arguments import add_rl_args as add

    return add(parser)


def run(args: argparse.Namespace, model_provider: Callable[..., Any] | None = None) -> None:
    """Train as `args` say, on an initialised Megatron; see `mcore_rl.train.run`."""
    from mcore_rl.train import run as train

    train(args, model_provider)
