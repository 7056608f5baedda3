"""Which slow test files a run has: `scripts/run_tests.sh --touched`, `pytest --tier touched`.

The quick tests run in every tier. Of the slow files, a run has

1. those in `ALWAYS`: whole runs, in which each room has a part;
2. a quarter of the others, in turn from landing to landing, so that no file is unproven for longer
   than four;
3. those that the change touches, as far as `MAX_CPU_SECONDS` allows. A change touches a file if the
   file, a helper under tests/ that it uses, or a module of the product that one of these imports
   (or names, as `"mcore_rl.verify"`) differs from the commit in `tests/landed.json`, the last that
   CI has passed. Files whose changed modules concern few test files come first: `common/errors.py`
   touches everything, `megatron/lora.py` the tests of LoRA. What time does not allow is named.

What imports cannot show is in `ALSO`. Without git or that commit, all files run.

    python -m tests.tiers             the slow files of the present change, with the reason of each
    python -m tests.tiers landed      note that HEAD has landed: the next change begins here
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
LANDED = ROOT / "tests" / "landed.json"
TURNS = 4
# Of slow files, on the processor of `file_seconds.json`. Two cores have 4,800 in 40 minutes; one
# without AVX-512 takes twice as long.
MAX_CPU_SECONDS = 3000.0
UNKNOWN_CPU_SECONDS = 60.0  # of a file without a budget
ALWAYS = (
    "tests/dist/test_sharding_manager.py",
    "tests/e2e/test_training.py",
    "tests/e2e/test_resume.py",
    "tests/e2e/test_separate.py",
)
# What test files, by the beginning of their paths, concern beside their imports.
ALSO = {
    "tests/cuda/": ("patches/", "mcore_rl/hybrid_engine/vllm/", "mcore_rl/megatron/adapter.py"),
    "tests/versions/": ("patches/", "mcore_rl/megatron/adapter.py", "setup.py"),
    "tests/e2e/test_examples.py": ("examples/",),
    "tests/e2e/test_fork.py": ("examples/fork/",),
    "tests/e2e/test_slurm.py": ("examples/slurm/",),
    "tests/e2e/test_gpu_trial.py": ("scripts/gpu_trial", "tests/gpu/"),
    "tests/dist/test_benchmark.py": ("benchmarks/",),
    "tests/unit/test_cli.py": ("mcore_rl/planner/", "docs/using/plan_671b.md"),
    "tests/unit/test_gpu_trial": ("scripts/gpu_trial",),
    "tests/unit/test_installing.py": ("setup.py", "scripts/setup_env"),
    "tests/unit/test_setup_env.py": ("scripts/setup_env", "scripts/requirements-"),
    "tests/unit/test_run_script.py": ("scripts/run_deepseek_moe.sh", "scripts/presets/"),
    "tests/unit/test_run_tests.py": ("scripts/run_tests.sh",),
    "tests/unit/test_site.py": ("docs/", "mkdocs.yml"),
}
# Not followed: it imports for all jobs what any of them might need.
NOT_FOLLOWED = ("tests/rank_pool.py",)


@dataclass(frozen=True)
class Selection:
    """The slow files of a run.

    Example: `Selection({"tests/dist/test_lora.py": "touched by mcore_rl/megatron/lora.py"}, {})`.
    """

    chosen: dict[str, str]  # file -> why it runs
    left_out: dict[str, str]  # file -> what touches it, though time does not allow it to run


def file_of(module: str) -> str | None:
    """The path of a module of the product or of tests/; `mcore_rl.patches` is patches/."""
    name = module.removeprefix("mcore_rl.") if module.startswith("mcore_rl.patches") else module
    base = ROOT.joinpath(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return str(path.relative_to(ROOT))
    return None


def _names(tree: ast.AST) -> Iterable[str]:
    """Dotted names that a file imports, or has as strings (`"tests.dist.jobs:hand_over"`)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"(tests|mcore_rl)(\.\w+)+(:\w+)?", node.value):
                yield node.value.split(":")[0]


@functools.cache
def direct(file: str) -> frozenset[str]:
    """The files of the product and of tests/ that a file imports or names itself."""
    names = _names(ast.parse((ROOT / file).read_text()))
    ours = (name for name in names if name.split(".")[0] in ("tests", "mcore_rl"))
    return frozenset(path for name in ours if (path := file_of(name)))


@functools.cache
def concerns(file: str) -> frozenset[str]:
    """A test file, its helpers under tests/, and all that these import themselves."""
    todo, known = [file], {file}
    while todo:
        for path in direct(todo.pop()) - known:
            known.add(path)
            if path.startswith("tests/") and path not in NOT_FOLLOWED:
                todo.append(path)
    return frozenset(known)


def touches(path: str, file: str) -> bool:
    """Whether a change of `path` touches a test file."""
    return path in concerns(file) or any(
        path.startswith(begins) for test, begins in ALSO.items() if file.startswith(test)
    )


def touched(files: Iterable[str], changed: Iterable[str]) -> dict[str, str]:
    """Touched files with the change that touches the fewest; the most specific ones first."""
    why: dict[str, tuple[int, str]] = {}
    for path in changed:
        concerned = [file for file in files if touches(path, file)]
        for file in concerned:
            why[file] = min(why.get(file, (len(concerned), path)), (len(concerned), path))
    return {file: why[file][1] for file in sorted(why, key=lambda file: (why[file], file))}


def turn_of(file: str) -> int:
    return zlib.crc32(file.encode()) % TURNS


def select(
    files: list[str], changed: set[str] | None, landings: int, seconds: dict[str, float]
) -> Selection:
    """Choose from all slow files.

    `changed` has paths from the root, or is None if unknown; `seconds` has each file's CPU seconds.
    """
    if changed is None:
        return Selection(dict.fromkeys(files, "it is not known what has changed"), {})
    chosen = {file: "in every run" for file in files if file in ALWAYS}
    for file in files:
        if turn_of(file) == landings % TURNS:
            chosen.setdefault(file, "in turn, a quarter of the files a landing")
    left_out = {}
    spent = sum(seconds.get(file, UNKNOWN_CPU_SECONDS) for file in chosen)
    for file, path in touched(files, changed).items():
        if file in chosen:
            continue
        more = seconds.get(file, UNKNOWN_CPU_SECONDS)
        if spent + more <= MAX_CPU_SECONDS:
            chosen[file] = f"touched by {path}"
            spent += more
        else:
            left_out[file] = path
    return Selection(chosen, left_out)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def changed_since(commit: str) -> set[str] | None:
    """Files that differ from a commit, uncommitted and untracked ones included."""
    tracked = _git("diff", "--name-only", "--no-renames", commit)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    if tracked is None or untracked is None:
        return None
    return {*tracked.splitlines(), *untracked.splitlines()}


def selection(files: list[str]) -> Selection:
    """The slow files of the present change."""
    landed = json.loads(LANDED.read_text())
    seconds = json.loads((ROOT / "tests" / "file_seconds.json").read_text())
    return select(files, changed_since(landed["commit"]), landed["landings"], seconds)


class Tier:
    """Plugin of `--tier touched`: deselects what `selection` leaves out, and says so at the end."""

    def __init__(self) -> None:
        self._selection = Selection({}, {})

    @pytest.hookimpl(trylast=True)  # quick tests have their mark by then
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        slow = [item for item in items if not item.get_closest_marker("quick")]
        self._selection = selection(sorted({_file(item) for item in slow}))
        gone = [item for item in slow if _file(item) not in self._selection.chosen]
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for file, path in self._selection.left_out.items():
            terminalreporter.line(f"{file} is touched by {path} and left for its turn")


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def note_landing() -> None:
    landed = json.loads(LANDED.read_text())
    head = (_git("rev-parse", "HEAD") or "").strip()
    if head != landed["commit"]:
        landed = {"commit": head, "landings": landed["landings"] + 1}
        LANDED.write_text(json.dumps(landed) + "\n")


def main() -> None:
    if sys.argv[1:] == ["landed"]:
        return note_landing()
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")]
    now = selection(sorted(file for file in files if not file.startswith("tests/unit/")))
    for file, why in now.chosen.items():
        print(f"{file}: {why}")
    for file, path in now.left_out.items():
        print(f"left for its turn: {file}, touched by {path}")


if __name__ == "__main__":
    main()
