"""What documentation, docstrings and messages name exists: code blocks, modules, flags, metrics.

Everything is resolved against the sources, so no page can name what was renamed or removed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
import yaml

from mcore_rl import cli
from mcore_rl.flags.parsed_flags import options_of
from mcore_rl.flags.parser import HELP_RL, add_rl_args
from mcore_rl.megatron import adapter as megatron_adapter

ROOT = Path(__file__).resolve().parents[2]
# The changelog is about the past.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md"]
PAGES += [page for page in (ROOT / "docs").glob("**/*.md") if page.stem != "changelog"]
SOURCES = [
    file for folder in ("mcore_rl", "patches") for file in sorted((ROOT / folder).glob("**/*.py"))
]
SCRIPTS = [
    file
    for folder in ("scripts", "benchmarks", "tests", "examples")
    for file in sorted((ROOT / folder).glob("**/*.py"))
]


@functools.cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def label(file: Path) -> str:
    return str(file.relative_to(ROOT))


@functools.cache
def nodes_of(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))


@functools.cache
def strings_of(file: Path) -> list[tuple[int, str, bool]]:
    """Line, text and whether it is a docstring, of each string; f-strings have {} for values."""
    docstrings, inner = set(), set()
    found = []
    for node in nodes_of(file):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(first.value)
        if isinstance(node, ast.JoinedStr):
            inner.update(node.values)
            parts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            found.append((node.lineno, "".join(map(str, parts)), False))
    for node in nodes_of(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inner:
            found.append((node.lineno, node.value, node in docstrings))
    return found


# ------------------------------------------------------------------------------------ modules


@functools.cache
def names_in(module: str) -> set[str] | None:
    """The names that one of our modules binds at its top; None if the module does not exist."""
    path = ROOT / (module.replace("mcore_rl.patches", "patches").replace(".", "/"))
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    if not file.is_file():
        return None
    found = {p.stem for p in path.glob("*.py")} | {p.name for p in path.glob("*/")}
    for node in nodes_of(file):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # of __all__ and of lazy attributes
    return found


def is_there(dotted: str) -> bool:
    """Whether `mcore_rl.a.b.c` is a module, or a name in one (or of a class in it)."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        if (names := names_in(".".join(parts[:end]))) is not None:
            return all(part in names for part in parts[end:])
    return False


DOTTED = re.compile(r"(?<![\w./-])mcore_rl(?:\.[A-Za-z_]\w*)+(?!\w*[/@-])")


def test_modules_and_attributes_named_anywhere_exist() -> None:
    texts = [(label(page), page.read_text(encoding="utf-8")) for page in PAGES]
    for file in [*SOURCES, *SCRIPTS]:
        if file.is_relative_to(ROOT / "tests"):  # which make names up
            continue
        texts += [(f"{label(file)}:{line}", text) for line, text, _ in strings_of(file)]
    wrong = [
        f"{where}: {name}"
        for where, text in texts
        for name in DOTTED.findall(text)
        if not is_there(name) and not name.endswith((".yaml", ".sh"))
    ]
    assert not wrong, "\n".join(wrong)


def test_is_there_detects_missing_modules() -> None:
    assert is_there("mcore_rl.train.main") and is_there("mcore_rl.patches.registry.apply_patch")
    assert not is_there("mcore_rl.training") and not is_there("mcore_rl.train.walk")


# -------------------------------------------------------------------------------------- flags

# Flags of pip, git, docker, srun, apt, bwrap, tensorboard and mkdocs.
OTHERS_FLAGS = frozenset(
    (
        "--no-deps --ignore-requires-python --index-url --extra-index-url --error-unmatch --always"
        " --dirty --abbrev --gpus --ipc --ulimit --shm-size --privileged --security-opt"
        " --ntasks-per-node --gpus-per-node --gpus-per-task --gpu-bind --no-install-recommends"
        " --logdir --strict --die-with-parent --size"
        " --unshare-all --unshare-user --new-session --cap-drop --hostname --info-fd --tmpfs"
        " --remount-ro --chdir --clearenv --ro-bind --dev-bind --setenv --symlink"
        " --help --version"
    ).split()
)
# Flags of run_tests.sh, of examples in texts and of OpenRLHF.
MADE_UP = {"--all", "--rl-my-width", "--rl-train-temperature", "--kl_ctl"}


def declared_in(files: list[Path]) -> set[str]:
    """The flags that `add_argument` calls and shell scripts of these folders declare."""
    found: set[str] = set()
    for file in files:
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return found


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    parser = megatron_adapter.make_parser(add_rl_args)
    known = {*options_of(parser), HELP_RL}
    for name, action in options_of(parser).items():
        if action.nargs == 0:  # a switch, which has a form that undoes it
            known.add(f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}")
    known |= options_of(torchrun.get_args_parser()).keys()
    for name in cli.COMMANDS:
        command = argparse.ArgumentParser()
        importlib.import_module(f"mcore_rl.tools.{name}.command").add_flags(command)
        known |= options_of(command).keys()
    known |= declared_in([*SCRIPTS, *SOURCES])
    for script in (ROOT / "scripts").glob("*.sh"):
        known |= set(re.findall(r"(--[a-z][a-z0-9-]+)\)", script.read_text(encoding="utf-8")))
        known |= set(re.findall(r"(--[a-z][a-z0-9-]+) \|", script.read_text(encoding="utf-8")))
    known |= vllm_flags()
    known |= user_flags()
    # A name with an underscore is the same flag to argparse's users of torchrun and Megatron.
    return known | {flag.replace("_", "-") for flag in known} | OTHERS_FLAGS | MADE_UP


def user_flags() -> set[str]:
    """Those that the classes of parameters in examples declare."""
    found = set()
    for file in (ROOT / "examples").glob("**/*.py"):
        for node in nodes_of(file):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add("--rl-" + node.target.id.replace("_", "-"))
    return found


@functools.cache
def vllm_flags() -> set[str]:
    """The server's flags: fields of vLLM's argument classes, read from their source."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    base = Path(spec.submodule_search_locations[0])
    found = {"--model"}
    files = ["engine/arg_utils.py", *(p.relative_to(base) for p in base.glob("config/*.py"))]
    files += [p.relative_to(base) for p in base.glob("entrypoints/**/cli_args.py")]
    for file in files:
        for node in nodes_of(base / file):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add("--" + node.target.id.replace("_", "-"))
    return found


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*(?![\w*{<-])")


def test_flags_named_anywhere_exist(known_flags: set[str]) -> None:
    texts = []
    for page in PAGES:
        if page.name == "coming_from.md":  # names other systems' flags; test_site.py reads it
            continue
        texts.append((label(page), page.read_text(encoding="utf-8")))
    for file in SOURCES:
        if file.name == "megatron_flags.py":  # tables of all releases; it has tests of its own
            continue
        texts += [(f"{label(file)}:{line}", text) for line, text, _ in strings_of(file)]
    wrong = [
        f"{where}: {flag}"
        for where, text in texts
        for flag in sorted(set(FLAG.findall(text)))
        if flag not in known_flags and not any(k.startswith(flag + "-") for k in known_flags)
    ]
    assert not wrong, "\n".join(wrong)


# ------------------------------------------------------------------------------------ metrics

PREFIXES = (
    "reward eval loss kl response_tokens time reshard throughput memory critic moe mismatch rollout"
    " health"
).split()
METRIC = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PREFIXES)})/[a-z_<>*/]++(?![\w.-])")


@functools.cache
def recorded() -> list[re.Pattern[str]]:
    """Patterns of all metric names that the sources make."""
    found = set()
    for file in SOURCES:
        for _, text, is_docstring in strings_of(file):
            if not is_docstring and re.fullmatch(rf"(?:{'|'.join(PREFIXES)})/[\w{{}}/]+", text):
                found.add(text)
    return [re.compile(re.escape(text).replace(r"\{\}", r"[\w<>*]+")) for text in sorted(found)]


def is_recorded(metric: str) -> bool:
    if "*" in metric:
        start = metric.partition("*")[0]
        return any(pattern.pattern.replace("\\", "").startswith(start) for pattern in recorded())
    return any(pattern.fullmatch(metric) for pattern in recorded())


def test_metrics_named_anywhere_are_recorded() -> None:
    texts = [(label(page), page.read_text(encoding="utf-8")) for page in PAGES]
    for file in SOURCES:
        texts += [
            (f"{label(file)}:{line}", text)
            for line, text, is_docstring in strings_of(file)
            if is_docstring
        ]
    wrong = [
        f"{where}: {metric}"
        for where, text in texts
        for metric in METRIC.findall(text)
        if not is_recorded(metric)
    ]
    assert not wrong, "\n".join(wrong)
    assert is_recorded("reward/mean") and not is_recorded("throughput/nothing")


# -------------------------------------------------------------------------------- code blocks

COMMANDS = ("bash", "python", "mcore-rl", "pytest", "pip", "vllm", "docker", "git", "srun", "VLLM_")


def blocks_of(page: Path) -> Iterator[tuple[str, str]]:
    """Language ("" for an indented block) and text of each code block."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield found[1] or "text", found[2]
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in re.finditer(r"(?:\A|\n\n)((?:    .*\n|\n(?=    ))+)", text):
        yield "", re.sub(r"^    ", "", found[1], flags=re.MULTILINE)


def commands_in(block: str) -> Iterator[list[str]]:
    lines = re.sub(r"\\\n\s*", " ", block).splitlines()
    for line in lines:
        line = line.removeprefix("$ ")
        words = line.split()
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words.pop(0)
        program = words[0].removeprefix(".venv/bin/") if words else ""
        if program in COMMANDS:
            yield shlex.split(" ".join(words), comments=True)


def unresolved_of_command(words: list[str], known_flags: set[str]) -> list[str]:
    """What of a command does not exist: the script, the module, a flag."""
    wrong = []
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m" and not word.startswith(("quick", "versions", "real_size")):
            module = word
            ours = module.startswith(("mcore_rl.", "tests.", "mcore_rl"))
            there = is_there(module) if ours else importlib.util.find_spec(module) is not None
            if module.startswith("tests."):
                there = (ROOT / f"{module.replace('.', '/')}.py").is_file()
            wrong += [] if there else [module]
        if re.match(r"(scripts|benchmarks|examples|tests)/[\w/.-]+$", word):
            wrong += [] if (ROOT / word).exists() else [word]
        if word.startswith("--"):
            flag = word.partition("=")[0]
            wrong += [] if flag == "--" or flag in known_flags else [flag]
    return wrong


def unresolved_of_python(text: str) -> list[str]:
    """Imports of ours that do not exist; the text must parse."""
    wrong = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            wrong += [
                f"{node.module}.{alias.name}"
                for alias in node.names
                if node.module.startswith("mcore_rl")
                and not is_there(f"{node.module}.{alias.name}")
            ]
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_code_blocks_resolve(page: Path, known_flags: set[str]) -> None:
    wrong: list[str] = []
    for language, text in blocks_of(page):
        if included := re.fullmatch(r'--8<-- "([^":]+)[^"]*"\n', text):
            wrong += [] if (ROOT / included[1]).is_file() else [included[1]]
            continue
        assert "--8" not in text, f"a damaged include: {text}"
        if language == "python" or re.match(r"from \w|import \w|@\w+\(|async def |def ", text):
            wrong += unresolved_of_python(text)
        elif language == "yaml":
            wrong += [key for key in yaml.safe_load(text) if f"--{key}" not in known_flags]
        for words in commands_in(text):
            wrong += unresolved_of_command(words, known_flags)
    assert not wrong, "\n".join(wrong)


def test_unresolved_parts_of_a_command_are_found(known_flags: set[str]) -> None:
    block = "python -m mcore_rl.launch scripts/none.py \\\n  --rl-nothing 3   # a comment\n"
    [words] = commands_in(block)
    assert unresolved_of_command(words, known_flags) == ["scripts/none.py", "--rl-nothing"]
    assert unresolved_of_python("from mcore_rl.api import nothing") == ["mcore_rl.api.nothing"]
