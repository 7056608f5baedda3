"""The Megatron that Python imports: version, commit, and a check for the functions called here.

pip's record describes only the installed package. A fork or a checkout on Python's path takes
precedence without changing the record, so this module reads the code itself, without running it.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from mcore_rl.common.errors import UsageError

PACKAGE = "megatron-core"
# The versions that were tried. Others are accepted if their code has everything in `_CALLED`.
OLDEST, NEWEST = "0.18.0", "0.20.0"
_INSTALLED = "0.19.2"  # what scripts/setup_env.sh installs
_VERSION_FILE = "megatron/core/package_info.py"
# Functions of Megatron that mcore_rl calls, by file: enough to detect a release that lacks some of
# them. Functions that moved between releases are left out.
_CALLED = {
    "megatron/training/arguments.py": ("add_megatron_arguments", "parse_args", "validate_args"),
    "megatron/training/initialize.py": ("initialize_megatron",),
    "megatron/training/training.py": ("setup_model_and_optimizer", "get_model"),
    "megatron/training/checkpointing.py": ("save_checkpoint", "load_checkpoint"),
    "megatron/training/global_vars.py": ("get_args", "set_global_variables"),
    "megatron/core/tokenizers/utils/build_tokenizer.py": ("build_tokenizer",),
    "megatron/core/models/gpt/gpt_layer_specs.py": ("get_gpt_decoder_block_spec",),
}


@dataclass(frozen=True, slots=True)
class MegatronSource:
    """The Megatron that `import megatron.core` finds. `folder` contains `megatron`."""

    folder: Path
    version: str

    def commit(self) -> str | None:
        """Return its commit; see `commit_of`."""
        return commit_of(self.folder, _VERSION_FILE, PACKAGE)


def commit_of(folder: Path, file: str, package: str) -> str | None:
    """Return the commit of the checkout that has `file` of `folder`, "-dirty" if files differ.
    Otherwise it is the commit that pip installed `package` from, if `file` belongs to it, or None.
    Runs git."""
    # A virtual environment may lie in another project's checkout.
    if _git(folder, "ls-files", "--error-unmatch", file) is not None:
        return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        record = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    if Path(str(record.locate_file(file))).resolve() != (folder / file).resolve():
        return None
    origin = json.loads(record.read_text("direct_url.json") or "{}")
    commit: str | None = origin.get("vcs_info", {}).get("commit_id")
    return commit


def _git(folder: Path, *command: str) -> str | None:
    """Return git's output for a folder; None outside repositories and without git."""
    # In containers a checkout may belong to another user; imported code is trusted anyway.
    git = ("git", "-C", str(folder), "-c", "safe.directory=*")
    try:
        run = subprocess.run([*git, *command], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def find_megatron() -> MegatronSource | None:
    """Return the Megatron that Python imports, or has imported; None if it finds none.

    Raises UsageError if it does not state its version.
    """
    try:
        spec = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    folder = None if spec is None else _folder_of(spec)
    if folder is None:
        return None
    return MegatronSource(folder, stated_version(folder / _VERSION_FILE))


def check_megatron() -> MegatronSource:
    """Return the Megatron that Python imports; UsageError if it is missing or lacks a function."""
    source = find_megatron()
    if source is None:
        raise UsageError(
            "megatron-core is not installed",
            remedy=f"run scripts/setup_env.sh or pip install megatron-core=={_INSTALLED}",
        )
    if missing := _missing(source.folder):
        raise UsageError(
            f"{PACKAGE} {source.version}, which Python finds in {source.folder}, lacks "
            f"{' and '.join(missing)}",
            remedy=f"mcore_rl runs with {OLDEST} to {NEWEST}: pip install "
            f"{PACKAGE}=={_INSTALLED}, or put a checkout of one of them first on PYTHONPATH",
        )
    return source


def _folder_of(spec: ModuleSpec) -> Path | None:
    """Return the folder of `megatron`, given `megatron.<name>`; symbolic links are not resolved."""
    return None if spec.origin is None else Path(os.path.abspath(spec.origin)).parents[2]


def _missing(folder: Path) -> list[str]:
    """Return the missing modules and functions that mcore_rl calls."""
    spec = importlib.util.find_spec("megatron.training")
    training = None if spec is None else _folder_of(spec)
    if training != folder:
        # `megatron` is a namespace package: modules missing in one folder come from the next.
        other = f" (that in {training} belongs to another Megatron)" if training else ""
        return [f"megatron.training{other}"]
    missing = []
    for file, names in _CALLED.items():
        module = file.removesuffix(".py").replace("/", ".")
        if not (folder / file).is_file():
            missing.append(module)
            continue
        text = (folder / file).read_text(encoding="utf-8")
        missing += [
            f"{module}.{name}"
            for name in names
            if not re.search(rf"^(async )?def {name}\b|^class {name}\b", text, re.MULTILINE)
        ]
    return missing


def stated_version(file: Path) -> str:
    """Return the version that package_info.py states, without what it appends when it runs.

    Releases set MAJOR, MINOR, PATCH and PRE_RELEASE; a fork may set only `__version__`.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise _no_version(file) from error
    stated = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if isinstance(whole := stated.get("__version__"), str):
        return whole
    try:
        return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format_map({"PRE_RELEASE": "", **stated})
    except KeyError as error:
        raise _no_version(file) from error


def _no_version(file: Path) -> UsageError:
    return UsageError(
        f"{file} does not say which Megatron it is by MAJOR, MINOR and PATCH, or __version__",
        remedy="take it as Megatron-LM has it",
    )
