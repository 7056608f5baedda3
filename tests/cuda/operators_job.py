"""Loads the libraries of vLLM and Transformer Engine, and holds vLLM's calls against them.

vllm/_custom_ops.py calls operators that the libraries register; each that is there must take as
many arguments as it is called with. Only the full stack has libraries.
"""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator")
NAMESPACES = ("_C", "_moe_C", "_C_cache_ops", "_C_custom_ar", "_C_cuda_utils")


def operator_calls(file: Path) -> list[tuple[str, str, int]]:
    """Namespace, name and number of positional arguments of each call of `torch.ops`."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and not any(isinstance(a, ast.Starred) for a in node.args):
            path = ast.unparse(node.func).split(".")
            if path[:2] == ["torch", "ops"] and path[2] in NAMESPACES and len(path) == 4:
                found.append((path[2], path[3], len(node.args)))
    return found


def main() -> dict[str, Any]:
    for library in LIBRARIES:
        importlib.import_module(library)
    from vllm import _custom_ops

    absent, unfit, fit = set(), [], set()
    for namespace, name, count in operator_calls(Path(_custom_ops.__file__)):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is None:
            absent.add(f"{namespace}.{name}")
            continue
        longest = max(len(getattr(packet, o)._schema.arguments) for o in packet.overloads())
        if count > longest:
            unfit.append(f"{namespace}.{name} is called with {count} arguments and takes {longest}")
        else:
            fit.add(f"{namespace}.{name}")
    engine = importlib.import_module("transformer_engine.pytorch")
    extension = importlib.import_module("transformer_engine_torch")
    return {
        "absent": sorted(absent),
        "unfit": unfit,
        "fit": sorted(fit),
        "engine": engine.__name__,
        "extension": extension.__file__,
        "cudnn": extension.get_cudnn_version(),
        "names": len(dir(extension)),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
