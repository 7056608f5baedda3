"""User-defined sources of prompts: functions that yield rows, selected by name.

    from mcore_rl.api import prompts

    @prompts("sums")
    def sums():
        for a in range(1000):
            yield {"prompt": f"{a} + 1 =", "answer": a + 1}

is part of a file of `--rl-import`, and `--rl-prompts sums` trains on it. The rows are written to a
file in the cache, named by their content, which is then checked, tokenised, drawn and resumed like
any prompts file. Reward processes run the user's file, too, so this module imports nothing heavy.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError

RowsFunction = Callable[[], Iterable[Mapping[str, Any]]]

SOURCES: dict[str, RowsFunction] = {}


def prompts(name: str) -> Callable[[RowsFunction], RowsFunction]:
    """Register the decorated function as `name` for --rl-prompts and --rl-eval-prompts.

    It yields rows with the columns of a prompts file. Every process of a run calls it once and must
    get the same, finitely many rows. Raises ValueError if the name is taken, or not an identifier.
    """

    def register(function: RowsFunction) -> RowsFunction:
        if not name or not name.isidentifier():
            raise ValueError(f"prompts cannot be called {name!r}; give letters, digits and _")
        if name in SOURCES:
            raise ValueError(f"two sources of prompts are called {name!r}; rename one")
        SOURCES[name] = function
        return function

    return register


def prompts_path(named: str, cache_dir: str | None, flag: str) -> Path:
    """Return the prompts file that a flag names: a path, or a source whose rows are written now.

    Raises UsageError if the source raises, yields no row, or yields one that JSON cannot hold.
    """
    if named not in SOURCES:
        return Path(named)
    try:
        lines = [json.dumps(dict(row), ensure_ascii=False) for row in SOURCES[named]()]
    except Exception as error:  # the user sees whatever their function raises
        raise UsageError(
            f"cannot be used, because its function raised {type(error).__name__}: {error}",
            flag=f"{flag} {named}",
            remedy="let it yield mappings of strings and numbers",
        ) from error
    if not lines:
        raise UsageError(
            "gives no row", flag=f"{flag} {named}", remedy="let its function yield some"
        )
    data = ("\n".join(lines) + "\n").encode()
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    file = f"{named}-{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    try:
        return _written(cache / "made_prompts" / file, data)
    except OSError:  # a cache that cannot be written to
        folder = tempfile.mkdtemp(prefix="mcore_rl_prompts_")  # private, as its parent is shared
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _written(Path(folder) / file, data)


def default_cache_dir() -> Path:
    """Return the cache folder if --rl-cache-dir does not name one."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mcore_rl"


def _written(target: Path, data: bytes) -> Path:
    """Write `data` to `target` atomically, also if others write the same; return `target`."""
    if not target.is_file() or target.read_bytes() != data:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as part:
            part.write(data)
        os.replace(part.name, target)
    return target
