"""Check whether mcore_rl's patches of upstream packages apply to the installed versions."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Sequence

from mcore_rl.common.errors import UsageError
from mcore_rl.patches.registry import (
    Patch,
    applied_patches,
    apply_patch,
    installed,
    is_needed,
)
from mcore_rl.tools.doctor.finding import PATCHES, Finding, green, red, refusal

_DROP = re.compile(r"^Drop when: (.*?)(?:\n\n|\n[A-Z]|\Z)", re.DOTALL | re.MULTILINE)


def check_patches(patches: Sequence[Patch], of: str, *, apply: bool) -> list[Finding]:
    """Return a finding for all that apply, one for all not needed, and one for each that refuses.

    With `apply` they are applied in this process, which shows whether the code that they change is
    as they expect; otherwise names and versions are compared. `of` names the patched package.
    """
    applying, unneeded, refused = [], [], []
    for patch in patches:
        try:
            _, version = installed(patch)
            if patch.name not in applied_patches() and not is_needed(patch):
                unneeded.append(patch.name)
            elif not patch.supports(version):
                refused.append(_unknown_version(patch, version))
            else:
                if apply:
                    apply_patch(patch)
                applying.append(patch.name)
        except UsageError as error:
            found = refusal(PATCHES, error)
            refused.append(red(PATCHES, found.found, found.remedy + _end_of(patch)))
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
    return red(PATCHES, what, remedy + _end_of(patch))


def _end_of(patch: Patch) -> str:
    """Return the "Drop when" of the patch's module, in brackets."""
    module = sys.modules.get(patch.apply.__module__)
    match = _DROP.search(inspect.getdoc(module) or "") if module else None
    drop = " ".join(match[1].split()).rstrip(".") if match else ""
    return f" (the patch may go when: {drop})" if drop else ""
