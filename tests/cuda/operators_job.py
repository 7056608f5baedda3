"""Loads vLLM's libraries, and holds all its calls of their operators against the schemas.

    python -m tests.cuda.operators_job [FILE ...]

Each operator that is there must take as many arguments as it is called with, by those names; in all
of vLLM's modules and in the FILEs.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator")
NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_C_cuda_utils")


def operator_calls(file: Path) -> Iterator[tuple[str, str, int, set[str]]]:
    """Namespace, name, number of positional arguments and keywords of each call of `torch.ops`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and not any(isinstance(a, ast.Starred) for a in node.args):
            path = ast.unparse(node.func).split(".")
            if path[:2] == ["torch", "ops"] and path[2] in NAMESPACES and len(path) == 4:
                keywords = {word.arg for word in node.keywords if word.arg is not None}
                yield path[2], path[3], len(node.args), keywords


def misfit(packet: Any, count: int, keywords: set[str]) -> str | None:
    """Why none of the operator's overloads can be called so."""
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    for schema in schemas:
        rest = {argument.name for argument in schema.arguments[count:]}
        if count <= len(schema.arguments) and keywords <= rest:
            return None
    return f"is called with {count} arguments and {sorted(keywords)}: {schemas[0]}"


def main() -> dict[str, Any]:
    for library in LIBRARIES:
        importlib.import_module(library)
    import vllm

    absent, unfit, fit = set(), [], set()
    modules = sorted(Path(vllm.__file__).parent.rglob("*.py"))
    for file in [*modules, *map(Path, sys.argv[1:])]:
        for namespace, operator, count, keywords in operator_calls(file):
            name = f"{namespace}.{operator}"
            packet = getattr(getattr(torch.ops, namespace), operator, None)
            if packet is None:
                absent.add(name)
            elif reason := misfit(packet, count, keywords):
                unfit.append(f"{file.name}: {name} {reason}")
            else:
                fit.add(name)
    return {"absent": sorted(absent), "unfit": unfit, "fit": sorted(fit)}


if __name__ == "__main__":
    print(json.dumps(main()))
