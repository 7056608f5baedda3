"""Folders that a script makes once and keeps: `made_once`."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError

MARKER = "complete.json"  # the recipe of a complete folder


def made_once(
    out: str | os.PathLike[str], recipe: Mapping[str, Any], write: Callable[[Path], None]
) -> Path:
    """Have `write` fill the folder `out`, or return at once if it was made by the same `recipe`.

    The work is done in a sibling folder that is renamed at the end, so an interrupted call leaves
    nothing that looks complete; a lock next to `out` makes a concurrent caller wait and reuse the
    result. `recipe` has values of JSON alone. Returns the absolute path. Raises `UsageError` if
    `out` has files that no call has made.
    """
    out = Path(out).absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        marker = out / MARKER
        if marker.is_file() and json.loads(marker.read_text()) == recipe:
            print(f"Reusing the checkpoint in {out}.")
            return out
        if out.exists() and not marker.is_file() and (out.is_file() or any(out.iterdir())):
            raise UsageError(
                f"--out {out} holds files that this script did not make and would have to delete; "
                "name another directory"
            )
        partial = out.parent / f".{out.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed call: we hold the lock
        partial.mkdir()
        try:
            write(partial)
            (partial / MARKER).write_text(json.dumps(recipe, indent=2) + "\n")
            shutil.rmtree(out, ignore_errors=True)
            os.replace(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out
