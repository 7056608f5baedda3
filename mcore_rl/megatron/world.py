"""Worlds: a second model in the actor's processes, with its own parallel degrees and arguments.

Megatron keeps its process groups and arguments in module globals. A `MegatronWorld` is one set of
these. Inside `with world:` Megatron sees that set, so that the same code builds, runs, updates and
saves a critic and an actor, each in its own layout. Like `adapter` it calls `megatron.training`.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.megatron import adapter as megatron_adapter

# The names of groups and their sizes; functions and imported modules do not match.
_GLOBAL = re.compile(r"_[A-Z][A-Z0-9_]*|_global_process_group_list")


class MegatronWorld:
    """The process groups and arguments in Megatron's globals inside `with world:`.

    Creating one is collective over all processes. Worlds do not nest.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from megatron.core import parallel_state
        from megatron.training import global_vars, initialize

        self.args = args
        self.layout = megatron_adapter.train_layout(args)
        self._outside: dict[str, Any] | None = None
        if self.layout == megatron_adapter.train_layout(global_vars.get_args()):
            self._groups = _globals_of(parallel_state)
            return
        outside, outside_args = _globals_of(parallel_state), global_vars.get_args()
        try:
            # This only resets the globals; the process groups stay.
            parallel_state.destroy_model_parallel()
            global_vars.set_args(args)
            initialize._initialize_distributed(None, None, store=None)
            self._groups = _globals_of(parallel_state)
        finally:
            vars(parallel_state).update(outside)
            global_vars.set_args(outside_args)

    def __enter__(self) -> MegatronWorld:
        from megatron.core import parallel_state
        from megatron.training import global_vars

        assert self._outside is None, "worlds do not nest"
        self._outside = _globals_of(parallel_state)
        self._outside_args = global_vars.get_args()
        vars(parallel_state).update(self._groups)
        global_vars.set_args(self.args)
        return self

    def __exit__(self, *exc: object) -> None:
        from megatron.core import parallel_state
        from megatron.training import global_vars

        assert self._outside is not None
        vars(parallel_state).update(self._outside)
        global_vars.set_args(self._outside_args)
        self._outside = None


def _globals_of(module: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _GLOBAL.fullmatch(name)}


def parsed_args(
    tokens: Sequence[str],
    extra_args: ExtraArgs,
    like: argparse.Namespace,
    *,
    log: TextIO | None = None,
) -> argparse.Namespace:
    """Parse and validate another model's command line with Megatron.

    `extra_args` adds the flags that are not Megatron's. The ranks come from `like`. Megatron's
    errors for invalid flags propagate.
    """
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.arguments import parse_args, validate_args

    saved = sys.argv
    sys.argv = ["mcore_rl", *tokens]
    try:
        with megatron_adapter.megatron_output_to(log), warnings.catch_warnings(action="ignore"):
            args: argparse.Namespace = parse_args(extra_args)
            validate_args(args)
            build_tokenizer(args)  # sets the padded vocabulary size
    finally:
        sys.argv = saved
    args.rank, args.local_rank = like.rank, like.local_rank
    args.async_save, args.async_strategy = like.async_save, like.async_strategy
    return args
