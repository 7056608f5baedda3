"""Checks our code against the sources of vllm, megatron and transformer_engine with basedpyright.

Nothing is imported: a package that needs CUDA is read on any machine. The type checker finds names
that do not exist, calls that a function does not accept, methods that do not fit the method they
override, missing abstract methods and wrong numbers of type parameters.

Two things it does not check, so `_instrumented` adds a call for each to a copy of our code:

- A function that replaces one of a module must accept every call that the original accepts.
- `require_parameters(function, "a b")` of a patch: the function must accept these parameters.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PACKAGES = ("vllm", "megatron", "transformer_engine")
_RULES = (
    "reportMissingImports",
    "reportAttributeAccessIssue",
    "reportCallIssue",
    "reportIncompatibleMethodOverride",
    "reportImplicitAbstractClass",
    "reportInvalidTypeArguments",
    "reportArgumentType",  # of _replaces alone: mypy checks the types of our own code
)
# Names that basedpyright knows in every file.
_BUILTINS = """
from typing import Any, Callable, ParamSpec
_P = ParamSpec("_P")
def _replaces(theirs: Callable[_P, object], ours: Callable[_P, object]) -> None: ...
_anything: Any
"""


def check(
    code: Mapping[str, Path],
    sites: Sequence[Path],
    folder: Path,
    *,
    packages: Sequence[str] = PACKAGES,
) -> list[str]:
    """Return what does not fit, as "file:line: message".

    Checked are the files of `code` (where it is imported from -> its folder) that import one of
    `packages`. All PACKAGES come from the folders `sites`, the first that has them; everything else
    comes from the environment of the tests. `folder` must be empty.
    """
    imports = re.compile(rf"^\s*(from|import) ({'|'.join(packages)})\b", re.MULTILINE)
    own, others = folder / "own", folder / "others"
    files = [
        copy
        for name, source in code.items()
        for copy in _copies(source, own / name)
        if imports.search(copy.read_text(encoding="utf-8"))
    ]
    others.mkdir()
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if installed.name not in PACKAGES:
            (others / installed.name).symlink_to(installed)
    (own / "__builtins__.pyi").write_text(_BUILTINS)
    settings = {
        "include": [str(file.relative_to(own)) for file in files],
        "extraPaths": [*map(str, sites), str(others)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "off",
        **dict.fromkeys(_RULES, "error"),
    }
    (own / "pyrightconfig.json").write_text(json.dumps(settings))
    # An interpreter that does not find the packages of the environment by itself.
    python = Path(sys.base_prefix) / "bin" / "python3"
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", str(python)]
    done = subprocess.run([*command, "-p", str(own)], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(files) > 0, done.stderr
    return [
        f"{Path(found['file']).relative_to(own)}:{found['range']['start']['line'] + 1}: "
        + found["message"].replace("\n", " ").replace("\N{NO-BREAK SPACE}", " ")
        for found in report["generalDiagnostics"]
        if found["rule"] != "reportArgumentType" or '"_replaces"' in found["message"]
    ]


def _copies(source: Path, target: Path) -> Iterator[Path]:
    """Copy and instrument the files of a package."""
    for file in sorted(source.rglob("*.py")):
        copy = target / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_instrumented(file.read_text(encoding="utf-8")), encoding="utf-8")
        yield copy


def _instrumented(text: str) -> str:
    """Insert the calls of the module's docstring before statements, on the same lines."""
    tree = ast.parse(text)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines = text.splitlines(keepends=True)
    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0), reverse=True):
        if isinstance(node, ast.stmt) and (call := _added_call(node, functions)):
            # Columns count bytes.
            line = lines[node.lineno - 1].encode()
            lines[node.lineno - 1] = (
                line[: node.col_offset] + f"{call}; ".encode() + line[node.col_offset :]
            ).decode()
    return "".join(lines)


def _added_call(node: ast.stmt, functions: set[str]) -> str | None:
    match node:
        case ast.Assign(targets=[ast.Attribute(value=owner) as target], value=ast.Name(id=name)):
            if name in functions and ast.unparse(owner) != "self":
                return f"_replaces({ast.unparse(target)}, {name})"
        case ast.Expr(
            value=ast.Call(
                func=ast.Name(id="require_parameters"),
                args=[target, ast.Constant(value=str(names))],
            )
        ):
            keywords = ", ".join(f"{name}=_anything" for name in names.split())
            return f"{ast.unparse(target)}({keywords})"
    return None
