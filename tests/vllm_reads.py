"""Fields of a config.json that the installed vLLM reads, found in its sources."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

import transformers

# Names of the configuration in vLLM's code.
_HOLDERS = frozenset({"hf_config", "hf_text_config", "text_config", "pretrained_config"})
_LOOKED_UP_BY = ("getattr", "hasattr", "getattr_iter")
_SHARED = ("interfaces", "interfaces_base", "utils", "registry", "adapters")


@functools.cache
def vllm_folder() -> Path:
    """The folder of the installed package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def read_of_all_models() -> frozenset[str]:
    """Fields that the code around the models reads."""
    root = vllm_folder()
    models = root / "model_executor" / "models"
    files = [
        *(root / "config").glob("*.py"),
        *(root / "transformers_utils").glob("*.py"),
        *(root / "v1").rglob("*.py"),
        *(root / "model_executor" / "model_loader").rglob("*.py"),
        *(models / f"{name}.py" for name in ("config", *_SHARED) if name != "registry"),
    ]
    return frozenset().union(*(_reads(file, _HOLDERS) for file in files))


def read_by_class(class_name: str) -> frozenset[str]:
    """Fields that the module of a model's class reads, and the modules it imports classes from.

    Where vLLM runs the class of transformers, those that this one reads."""
    from vllm.model_executor.models.registry import _VLLM_MODELS

    module, _ = _VLLM_MODELS.get(class_name, ("transformers", class_name))
    if module == "transformers":
        return _reads(Path(inspect.getfile(getattr(transformers, class_name))), {"config"})
    modules: set[str] = set()
    package = vllm_folder().joinpath(*module.split(".")[1:])
    if module.startswith("vllm.") and package.is_dir():  # with a module for each platform
        files = [file for file in package.rglob("*.py") if "amd" not in file.parts]
        for file in files:
            _add_imported(file, modules)
        own = frozenset().union(*(_reads(file, _HOLDERS | {"config"}) for file in files))
    else:
        own = frozenset()
        _add_modules(module, modules)
    found = (_reads(_model_file(name), _HOLDERS | {"config"}) for name in modules)
    return own.union(*found)


def _model_file(name: str) -> Path:
    return vllm_folder() / "model_executor" / "models" / f"{name}.py"


def _add_modules(name: str, found: set[str]) -> None:
    if name in found or name in _SHARED or not _model_file(name).is_file():
        return
    found.add(name)
    _add_imported(_model_file(name), found)


def _add_imported(file: Path, found: set[str]) -> None:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            package = "vllm.model_executor.models."
            if node.level == 1 or module.startswith(package):
                _add_modules(module.removeprefix(package), found)


def _reads(file: Path, holders: frozenset[str]) -> set[str]:
    return {name for node in ast.walk(_tree(file)) for name in _read_by(node, holders)}


def _read_by(node: ast.AST, holders: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _is_held(node.value, holders):
        if isinstance(node.ctx, ast.Load):
            yield node.attr
    if not isinstance(node, ast.Call) or not node.args:
        return
    names = node.args[1:2]
    if isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        holder, names = node.func.value, node.args[:1]
    elif isinstance(node.func, ast.Name) and node.func.id in _LOOKED_UP_BY:
        holder = node.args[0]
    else:
        return
    if _is_held(holder, holders):
        for name in (part for given in names for part in ast.walk(given)):
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def _is_held(node: ast.expr, holders: frozenset[str]) -> bool:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name in holders


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
