"""Megatron's parsers are made without the help texts of their flags, unless help is printed.

Symptom: a parser takes as long as a module of Megatron to import, and each check of a command line
makes several.
Cause: `ArgumentGroupFactory` finds the help text of each field in the source of its class. For that
it parses the whole file of each class, and those of its bases, for every parser.
Why safe: nothing else of a flag comes from these texts. A process with -h or --help in its command
line gets them all.
Upstream: as described in 0.18 and 0.19, and on main.
Drop when: Megatron reads the texts where it prints them.
Versions: megatron-core 0.18 to 0.20. mcore_rl applies it when it makes a parser, because it imports
`megatron.training`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from mcore_rl.patches.registry import require_parameters


@functools.cache
def apply() -> None:
    """Leave the texts out where no help was asked for. Idempotent; raises UsageError for code that
    looks different. It is not logged, since a mistake in a command line gives one sentence."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    require_parameters(read, "self src_cfg_class")

    def read_if_asked(self: Any, src_cfg_class: type) -> dict[str, str]:
        texts: dict[str, str] = {}
        return read(self, src_cfg_class) if {"-h", "--help"} & {*sys.argv} else texts

    ArgumentGroupFactory._get_field_docstrings = read_if_asked
