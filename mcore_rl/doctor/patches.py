"""Do our repairs of upstream packages apply to what is installed?"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
from collections.abc import Sequence

from mcore_rl.doctor.finding import PATCHES, Finding, green, red, refusal
from mcore_rl.errors import UsageError
from mcore_rl.patches.registry import Patch, applied_patches, apply_patch

_DROP = re.compile(r"^Drop when: (.*?)(?:\n\n|\n[A-Z]|\Z)", re.DOTALL | re.MULTILINE)


def check_patches(patches: Sequence[Patch], of: str, *, apply: bool) -> list[Finding]:
    """One line for all that apply, one for all that are not needed, one for each that refuses.

    With `apply` they are applied in this process, which shows whether the code that they change
    looks as they expect; without, names and versions are compared. `of` is whose they are.
    """
    applying, unneeded, refused = [], [], []
    for patch in patches:
        version = _installed_version(patch)
        if version is None:
            what = f"patch {patch.name} is for {' or '.join(patch.packages)}, not installed here"
            refused.append(red(PATCHES, what, "run scripts/setup_env.sh"))
        elif patch.name not in applied_patches() and not patch.needed():
            unneeded.append(patch.name)
        elif not patch.supports(version):
            refused.append(_unknown_version(patch, version))
        else:
            try:
                if apply:
                    apply_patch(patch)
            except UsageError as error:
                refused.append(refusal(PATCHES, error))
                continue
            applying.append(patch.name)
    return [*_summary(of, applying, unneeded, apply), *refused]


def _summary(
    of: str, applying: Sequence[str], unneeded: Sequence[str], applied: bool
) -> list[Finding]:
    found = []
    if applying:
        how = "fit the installed code" if applied else "name the installed version"
        names = ", ".join(name.partition(".")[2] for name in applying)
        found.append(green(PATCHES, f"of {of}, {len(applying)} {how}: {names}"))
    if unneeded:
        names = ", ".join(name.partition(".")[2] for name in unneeded)
        found.append(green(PATCHES, f"not needed here, of {of}: {names}"))
    return found


def _unknown_version(patch: Patch, version: str) -> Finding:
    what = (
        f"patch {patch.name} ({patch.reason}) knows {patch.packages[0]} {patch.supported}, not the "
        f"installed {version}"
    )
    remedy = "install a version that it knows: run scripts/setup_env.sh"
    if drop := _drop_when(patch):
        remedy += f" (the patch may go when: {drop})"
    return red(PATCHES, what, remedy)


def _installed_version(patch: Patch) -> str | None:
    for package in patch.packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _drop_when(patch: Patch) -> str:
    """What the patch's module says of its end."""
    module = sys.modules.get(patch.apply.__module__)
    match = _DROP.search(inspect.getdoc(module) or "") if module else None
    return " ".join(match[1].split()).rstrip(".") if match else ""
