"""The pure modules stay pure, and `import mcore_rl` stays light.

docs/developing/map.md lists the pure modules: whole packages, except for modules that it names. A
fresh process shows what an import loads. torch itself imports torch.distributed, so that imports of
torch.distributed are searched in the source, along the imports of mcore_rl.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = "torch.distributed"

# Imports the modules named in argv in turn and prints for each which heavy packages are loaded.
PROBE = """
import importlib, json, sys
loaded = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded[name] = sorted({"megatron", "torch", "vllm"} & sys.modules.keys())
print(json.dumps(loaded))
"""


@functools.cache
def source_of(module: str, root: Path = ROOT) -> Path | None:
    """The file of a module; patches/ is installed as mcore_rl.patches."""
    parts = module.split(".")
    path = root.joinpath(*parts[1:] if parts[:2] == ["mcore_rl", "patches"] else parts)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.exists():
            return file
    return None


def lines_of_map(title: str) -> list[str]:
    """The block of lines under a heading of the map."""
    text = (ROOT / "docs" / "developing" / "map.md").read_text()
    block = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return [line for line in block.splitlines() if line.startswith("    ")]


def names_in(line: str) -> list[str]:
    return [name.strip() for name in line.split(",") if name.strip()]


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name if name.startswith("mcore_rl") else f"mcore_rl.{name}"


def modules_of(name: str) -> list[str]:
    """A module, or all modules of a package, itself included."""
    file = source_of(name)
    assert file is not None, f"the map names {name}, which is not there"
    if file.name != "__init__.py":
        return [name]
    return sorted(module_of(found) for found in file.parent.rglob("*.py"))


def pure_modules() -> list[str]:
    found: list[str] = []
    for line in lines_of_map("Pure modules"):
        rooms, _, impure = line.partition(" except ")
        modules = [module for room in names_in(rooms) for module in modules_of(f"mcore_rl.{room}")]
        excepted = {f"mcore_rl.{rooms.strip()}.{name}" for name in names_in(impure)}
        assert excepted <= set(modules), f"the map excepts {excepted - set(modules)}"
        found += [module for module in modules if module not in excepted]
    return found


def run_code(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def loaded_by(*modules: str) -> dict[str, list[str]]:
    process = run_code(PROBE, *modules)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute or name, and "" of anything else."""
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def nodes(tree: ast.AST, with_functions: bool) -> Iterator[ast.AST]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        children = ast.iter_child_nodes(node)
        waiting += [
            child for child in children if with_functions or not isinstance(child, ast.FunctionDef)
        ][::-1]


def names_used(source: str, package: str, with_functions: bool = True) -> Iterator[str]:
    """Full names of what a module imports, and of the attributes it reads of what it imported.

    Of the strings only the forbidden name, for importlib.import_module.
    """
    used = list(nodes(ast.parse(source), with_functions))
    meaning: dict[str, str] = {}
    for node in used:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                top = alias.name.split(".")[0]
                meaning[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                yield f"{base}.{alias.name}"
                meaning[alias.asname or alias.name] = f"{base}.{alias.name}"
        elif isinstance(node, ast.Constant) and is_forbidden(node.value):
            yield node.value
    for node in used:
        if isinstance(node, ast.Attribute):
            head, _, rest = dotted(node).partition(".")
            if head in meaning:
                yield f"{meaning[head]}.{rest}"


@functools.cache
def names_in_file(file: Path, package: str, with_functions: bool = True) -> frozenset[str]:
    """`names_used` of a file; most pure modules share most of their imports."""
    return frozenset(names_used(file.read_text(), package, with_functions))


def floors() -> list[set[str]]:
    """The rooms that the map names, the highest floor first."""
    return [set(names_in(line)) for line in lines_of_map("Which room may import which")]


def room_of(module: str) -> str:
    """The innermost package of a module that is a room; a module at the root is one itself."""
    parts = module.split(".")[1:]
    if not parts:
        return "mcore_rl"
    inner = (ROOT / "mcore_rl").joinpath(*parts[:2]).is_dir()
    has_inner = parts[0] in ("hybrid_engine", "tools", "trainer") and len(parts) > 1 and inner
    return ".".join(parts[:2]) if has_inner else parts[0]


def arrows_between_rooms() -> set[tuple[str, str]]:
    found = set()
    for file in [*(ROOT / "mcore_rl").rglob("*.py"), *(ROOT / "patches").rglob("*.py")]:
        module = module_of(file)
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for name in names_in_file(file, package):
            parts = name.split(".")
            ends = (end for end in range(len(parts), 0, -1) if source_of(".".join(parts[:end])))
            if parts[0] == "mcore_rl" and (end := next(ends, 0)):
                found.add((room_of(module), room_of(".".join(parts[:end]))))
    return {(room, other) for room, other in found if room != other}


def test_rooms_import_only_lower_floors() -> None:
    height = {room: -number for number, rooms in enumerate(floors()) for room in rooms}
    arrows = arrows_between_rooms()
    assert {room for arrow in arrows for room in arrow} <= set(height)
    assert len(arrows) > 100
    assert [arrow for arrow in sorted(arrows) if height[arrow[0]] <= height[arrow[1]]] == []


def is_forbidden(name: object) -> bool:
    return isinstance(name, str) and (name == FORBIDDEN or name.startswith(f"{FORBIDDEN}."))


def paths_to_forbidden(module: str, root: Path = ROOT) -> list[str]:
    """Each way along the imports of `mcore_rl` from `module` to torch.distributed.

    Modules count with what their functions import. Packages, which importing a module of theirs
    runs, may be lazy: of them only what runs on import counts.
    """
    found, seen, waiting = [], {module}, [(module, module)]
    while waiting:
        current, path = waiting.pop()
        file = source_of(current, root)
        assert file is not None
        is_package = file.name == "__init__.py"
        package = current if is_package else current.rpartition(".")[0]
        names = [package, *names_in_file(file, package, not is_package)]
        found += [f"{path} -> {name}" for name in names if is_forbidden(name)]
        for name in names:
            # A name may continue after the module, and all packages above the module are run.
            parts = name.split(".") if name.startswith("mcore_rl") else []
            for target in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
                if target not in seen and source_of(target, root):
                    seen.add(target)
                    waiting.append((target, f"{path} -> {target}"))
    return found


@pytest.fixture(scope="module")
def loaded_by_pure_modules() -> dict[str, list[str]]:
    return loaded_by(*pure_modules())


def test_pure_modules_are_read_from_map() -> None:
    found = pure_modules()
    assert len(found) == len(set(found)) > 150
    assert {"mcore_rl.batching.types", "mcore_rl.common", "mcore_rl.common.errors"} <= set(found)
    assert "mcore_rl.common.agreement" not in found


@pytest.mark.parametrize("module", pure_modules())
def test_pure_module_loads_neither_megatron_nor_vllm(
    module: str, loaded_by_pure_modules: dict[str, list[str]]
) -> None:
    assert set(loaded_by_pure_modules[module]) <= {"torch"}


@pytest.mark.parametrize("module", pure_modules())
def test_pure_module_does_not_reach_torch_distributed(module: str) -> None:
    assert paths_to_forbidden(module) == []


def test_package_import_loads_nothing_heavy() -> None:
    assert loaded_by("mcore_rl") == {"mcore_rl": []}


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "import torch.distributed.nn.functional",
        "from torch import distributed",
        "from torch.distributed import all_reduce",
        "def f():\n    from torch.distributed import all_reduce",
        "import torch\n\n\ndef f(x):\n    torch.distributed.all_reduce(x)",
        "import torch as t\n\nrank = t.distributed.get_rank()",
        "import importlib\n\ndist = importlib.import_module('torch.distributed')",
        "from mcore_rl import other",
        "from mcore_rl.other import rank",
        "from . import other",
        "from .other import rank",
        "import mcore_rl.eager.part",
    ],
)
def test_import_path_to_torch_distributed_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "mcore_rl" / "eager").mkdir(parents=True)
    (tmp_path / "mcore_rl" / "__init__.py").touch()
    (tmp_path / "mcore_rl" / "other.py").write_text("import torch.distributed\n\nrank = 0\n")
    (tmp_path / "mcore_rl" / "eager" / "__init__.py").write_text("from mcore_rl.other import rank")
    (tmp_path / "mcore_rl" / "eager" / "part.py").touch()
    (tmp_path / "mcore_rl" / "pure.py").write_text(source)
    assert len(paths_to_forbidden("mcore_rl.pure", tmp_path)) >= 1


def test_no_import_path_is_found_without_import(tmp_path: Path) -> None:
    (tmp_path / "mcore_rl").mkdir()
    (tmp_path / "mcore_rl" / "__init__.py").write_text(
        "def lazy():\n    import torch.distributed\n    return torch.distributed\n"
    )
    (tmp_path / "mcore_rl" / "pure.py").write_text(
        '"""Imports no torch.distributed."""\nimport torch\n\nnormal = torch.distributions.Normal\n'
    )
    assert paths_to_forbidden("mcore_rl.pure", tmp_path) == []


COLLECTIONS = """
import gc, os, runpy, sys
seen = []
def see(phase, info):
    if phase == "start" and "torch" in sys.modules and "mcore_rl.train" not in sys.modules:
        seen.append(info)
def leave(code):
    print(len(seen), gc.isenabled(), gc.get_freeze_count() > 100_000, flush=True)
    end(code)
gc.callbacks.append(see)
os._exit, end = leave, os._exit
runpy.run_module("mcore_rl.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_rank_collects_no_garbage_during_imports() -> None:
    process = run_code(COLLECTIONS, "--rl-no-such-flag")
    assert process.stdout.split() == ["0", "True", "True"], process.stderr


@pytest.mark.slow
def test_launcher_imports_no_compiler() -> None:
    code = """
import sys
from mcore_rl.launch import folder, launcher
assert not {"torch._dynamo", "torch._inductor", "megatron", "vllm"} & sys.modules.keys()
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
assert folder.kernel_cache() == default_cache_dir()
"""
    process = run_code(code)
    assert process.returncode == 0, process.stderr
