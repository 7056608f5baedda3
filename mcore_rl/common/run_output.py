"""Where what a rank says goes: our own messages to the console, Megatron's output to a file."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TextIO


def setup_logging(*, quiet: bool = False) -> None:
    """mcore_rl speaks on rank 0, unless `quiet`; every rank's warnings are heard; Megatron's
    chatter is not."""
    speaks = not quiet and int(os.environ.get("RANK", 0)) == 0
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.INFO)
    # Down to DEBUG, for run.log; the console shows INFO.
    logging.getLogger("mcore_rl").setLevel(logging.DEBUG if speaks else logging.WARNING)
    logging.getLogger("megatron").setLevel(logging.ERROR)


@contextlib.contextmanager
def log_file() -> Iterator[TextIO]:
    """Where what Megatron prints goes: the file MCORE_RL_MEGATRON_LOG names (".rankN" appended)."""
    name = os.environ.get("MCORE_RL_MEGATRON_LOG")
    path = f"{name}.rank{os.environ.get('RANK', 0)}" if name else os.devnull
    with open(path, "w", encoding="utf-8") as log:
        yield log
