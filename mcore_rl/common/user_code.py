"""User code: import the files and modules that flags name, and find objects in them.

Processes of rewards and environments import this module: it stays free of torch, Megatron, vLLM and
numpy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import operator
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import did_you_mean

_MAX_DETAIL_CHARACTERS = 500
IMPORTED: dict[Path, str] = {}  # file -> module name


def import_user_file(path: str, flag: str = "") -> ModuleType:
    """Run the Python file at `path`, whose decorators register its functions; return its module.

    A file that was imported before, under any spelling of its path, is not run again. Its folder is
    not added to `sys.path`. `flag` names it, with its value, in errors; default: `--rl-import`.

    Raises UsageError if the file is missing, not a .py file, or raises (also if a name is taken).
    """
    file, flag = Path(path).resolve(), flag or f"--rl-import {path}"
    if file in IMPORTED:
        return sys.modules[IMPORTED[file]]
    refusal = functools.partial(UsageError, flag=flag)
    if file.suffix != ".py":
        raise refusal("is not a .py file", remedy="name the Python file that holds your functions")
    if not file.is_file():
        found = f"does not exist, seen from the working directory {Path.cwd()}"
        raise refusal(found, remedy="correct the path")
    # Two files named rewards.py are two modules.
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    module_name = f"mcore_rl_import_{file.stem}_{digest}"
    try:
        _run(file, module_name)
    except (Exception, SystemExit) as error:  # the user sees whatever their file raises
        found = f"cannot be used, because running it raised {type(error).__name__}: {error}"
        raise refusal(found, remedy=f"make `python {path}` work") from error
    IMPORTED[file] = module_name
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


def source_hash(function: object) -> str:
    """Return a hash of the code that a user's function runs: of its module and, of the modules that
    are imported here, those of its package and all that are not installed. It does not depend on
    where they are. Modules that mcore_rl or Python come with do not count.

    Call it right after the function's import, before its files may change.
    """
    own = getattr(inspect.unwrap(function), "__module__", None)  # type: ignore[arg-type]
    package = str(own).partition(".")[0]
    digests = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or (name != own and _is_installed(name, file, package)):
            continue
        with contextlib.suppress(OSError), open(file, "rb") as content:
            digests.add(hashlib.file_digest(content, "sha256").hexdigest())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def _is_installed(name: str, file: str, package: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("mcore_rl", "__main__", "__mp_main__"):
        return True
    return top != package and file.startswith(_installed_folders())


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    kinds = ("purelib", "platlib", "stdlib", "platstdlib")
    return tuple(f"{sysconfig.get_path(kind)}{os.sep}" for kind in kinds)


def meant_own(spec: str) -> str:
    """Return " (did you mean X?)" for a name without a colon that may name a module or a file."""
    in_file = re.fullmatch(r"(.+\.py)\W*(\w*)", spec)
    in_module = re.fullmatch(r"(.*\w)\.([^\W\d]\w*)", spec)
    if not in_file and not in_module:
        return ""
    place, name = (in_file or in_module).groups()  # type: ignore[union-attr]
    if not in_file and os.sep in place:
        place += ".py"
    return f" (did you mean {place}:{name or 'NAME'}?)"


def without_variants(spec: str) -> str:
    """Return `spec` with its colon as documented: neither doubled nor surrounded by blanks."""
    return re.sub(r"\s*::?\s*", ":", spec.strip())


def find_in_module(spec: str, flag: str) -> Any:
    """Return an attribute of a user's module: `package.module:a.b` is `b` of its `a`.

    Modules are searched on `sys.path` and then in the working directory, which is added to it. A
    name that ends with `.py` or contains a `/` is the path of a file (`.py` may be omitted), which
    `import_user_file` runs. Raises UsageError, with `flag` and its value, if the module or
    attribute does not exist, or if importing raises.
    """
    module_name, _, attribute = without_variants(spec).rpartition(":")
    if not module_name or not attribute:
        raise UsageError(
            f"has nothing {'behind' if module_name else 'before'} its colon",
            flag=flag,
            remedy="write package.module:NAME or ./file.py:NAME",
        )
    module = _import_module(module_name, flag)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        raise UsageError(
            f"cannot be used, because module {module_name} has no attribute "
            f"{attribute!r}{did_you_mean(attribute, vars(module))}",
            flag=flag,
            remedy="name one that exists",
        ) from error


def _import_module(module_name: str, flag: str) -> ModuleType:
    if module_name.endswith(".py") or os.sep in module_name:
        path = os.path.expanduser(module_name)
        return import_user_file(f"{path}.py" if os.path.isfile(f"{path}.py") else path, flag)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"cannot be imported, because there is no module {error.name!r} on sys.path or in "
                "the working directory",
                flag=flag,
                remedy="check the name or set PYTHONPATH",
            ) from error
        raise _import_error(module_name, flag, error) from error
    except (Exception, SystemExit) as error:  # the user must see whatever the module raises
        raise _import_error(module_name, flag, error) from error


def _import_error(module_name: str, flag: str, error: BaseException) -> UsageError:
    return UsageError(
        f"cannot be used, because importing {module_name!r} raised {type(error).__name__}: "
        f"{shortened(str(error))}",
        flag=flag,
        remedy=f"make `python -c 'import {module_name}'` work",
    )


def shortened(text: str) -> str:
    """Return `text`, cut to fit a message, without unpaired surrogates, which no log can hold."""
    is_short = len(text) <= _MAX_DETAIL_CHARACTERS
    shown = text if is_short else text[:_MAX_DETAIL_CHARACTERS] + " ..."
    return shown.encode(errors="replace").decode()
