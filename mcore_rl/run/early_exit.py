"""Megatron's flags that end a run before its last step, with everything saved.

`--exit-signal-handler` (with `--exit-signal`), `--exit-duration-in-mins` and `--exit-interval`, as
in Megatron: looked at after every step, saved, and left with exit code 0.
"""

from __future__ import annotations

import argparse
import time

import psutil

from mcore_rl.common import objects


class EarlyExit:
    """Knows when to leave. Minutes are counted from the start of this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def reason(self, num_steps: int) -> str | None:
        """Why to leave after `num_steps` steps, in words; the same on all ranks, as it is enough
        that one of them has reason to. Collective."""
        from megatron.training.global_vars import get_signal_handler

        args = self._args
        if args.exit_signal_handler and any(get_signal_handler().signals_received()):
            return f"{args.exit_signal.name}, by --exit-signal-handler"
        if args.exit_interval and num_steps % args.exit_interval == 0:
            return f"--exit-interval {args.exit_interval}"
        if args.exit_duration_in_mins:
            minutes = (time.time() - psutil.Process().create_time()) / 60
            if objects.on_any(minutes > args.exit_duration_in_mins):
                return f"--exit-duration-in-mins {args.exit_duration_in_mins}"
        return None
