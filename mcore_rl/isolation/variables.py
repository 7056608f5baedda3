"""The environment variables of processes that run a user's code."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence

from mcore_rl.common.errors import UsageError

# Variables of Python, the dynamic linker and numerical libraries; none of them is a secret.
_PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "LC_*", "TZ", "TMPDIR", "TERM"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING"),
    *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONWARNINGS"),
    *("PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONFAULTHANDLER", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    "MCORE_RL_LAUNCHER",  # finds these processes when the launcher is killed
)


def process_environment(
    environment: Mapping[str, str], extra_names: Sequence[str] = ()
) -> dict[str, str]:
    """Return a process's part of `environment`: the usual variables and `extra_names`."""
    return {
        name: value
        for name, value in environment.items()
        if name in extra_names or any(fnmatch.fnmatchcase(name, known) for known in _PASSED_ON)
    }


def parse_environment_names(text: str | None, flag: str) -> tuple[str, ...]:
    """Parse a flag's variable names; UsageError for an invalid name."""
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    if not all(map(is_variable_name, names)):
        # The value may be the secret itself.
        raise UsageError(
            "must be names of environment variables, made of letters, digits and _, with commas "
            "between them",
            flag=flag,
            remedy="put what is needed into a variable and give its name",
        )
    return names


def is_variable_name(text: str) -> bool:
    """Return whether a text consists of letters, digits and _, and does not begin with a digit."""
    return text.isascii() and text.isidentifier()


def check_environment_names(names: Sequence[str], flag: str) -> None:
    """Raise UsageError for a variable that is not set."""
    for name in names:
        if name not in os.environ:
            raise UsageError(
                "names an environment variable that is not set",
                flag=f"{flag} {name}",
                remedy="export it or leave it out",
            )
