"""Files of the user, which register rewards, environments, estimators and losses by decorators.

This module needs only the standard library.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from mcore_rl.common.errors import UsageError

_IMPORTED: dict[Path, str] = {}  # file -> module name


def import_user_file(path: str, flag: str = "") -> ModuleType:
    """Run the Python file at `path`, whose decorators register its functions; return its module.

    A file that was imported before, under any spelling of its path, is not run again. Its folder is
    not added to `sys.path`. `flag` names it, with its value, in errors; default: `--rl-import`.

    Raises UsageError if the file is missing, not a .py file, or raises (also if a name is taken).
    """
    file, flag = Path(path).resolve(), flag or f"--rl-import {path}"
    if file in _IMPORTED:
        return sys.modules[_IMPORTED[file]]
    if file.suffix != ".py":
        raise UsageError(
            "is not a .py file",
            flag=flag,
            remedy="name the Python file that holds your functions",
        )
    if not file.is_file():
        raise UsageError(
            f"does not exist, seen from the working directory {Path.cwd()}",
            flag=flag,
            remedy="correct the path",
        )
    # Two files named rewards.py are two modules.
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    module_name = f"mcore_rl_import_{file.stem}_{digest}"
    try:
        _run(file, module_name)
    except (Exception, SystemExit) as error:  # the user sees whatever their file raises
        raise UsageError(
            f"cannot be used, because running it raised {type(error).__name__}: {error}",
            flag=flag,
            remedy=f"make `python {path}` work",
        ) from error
    _IMPORTED[file] = module_name
    return sys.modules[module_name]


def _run(file: Path, module_name: str) -> None:
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None and spec.loader is not None, f"no loader for {file}"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look up a class's module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
