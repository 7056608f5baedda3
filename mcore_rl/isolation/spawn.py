"""The start of a process for a user's code, and what it inherits from the trainer.

User code is not trusted. Its process is started by exec, so it holds none of the trainer's memory,
with a few environment variables, and only the standard streams and one socket as file descriptors.
"""

from __future__ import annotations

import fnmatch
import os
import socket
import subprocess
import sys
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
    """Return a process's part of `environment`: what programs need, and `extra_names`."""
    return {
        name: value
        for name, value in environment.items()
        if name in extra_names or any(fnmatch.fnmatchcase(name, known) for known in _PASSED_ON)
    }


def start_process(
    program: str,
    control: socket.socket,
    *,
    environment_names: Sequence[str],
    output: int | None,
) -> subprocess.Popen[bytes]:
    """Run `main(descriptor of control, id of this process)` of the module `program`.

    `environment_names` lists variables that the process gets besides the usual ones. `output` is
    the descriptor of its standard output and error, which are then unbuffered, as the process may
    be killed; None: this process's.
    """
    main = (
        f"import sys; sys.path[:] = {sys.path!r}; from {program} import main; "
        f"main({control.fileno()}, {os.getpid()})"
    )
    return subprocess.Popen(
        [sys.executable, *(() if output is None else ("-u",)), "-c", main],
        env=process_environment(os.environ, environment_names),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(control.fileno(),),
        # A signal for the trainer, which may continue to the end of its step, does not reach it.
        start_new_session=True,
    )


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
