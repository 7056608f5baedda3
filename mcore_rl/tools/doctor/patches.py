"""Check whether mcore_rl's patches of upstream packages apply to the installed versions."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mcore_rl.common.errors import UsageError
from mcore_rl.patches.registry import (
    Patch,
    applied_patches,
    apply_patch,
    installed,
    is_needed,
)
from mcore_rl.tools.doctor.finding import PATCHES, Finding, green, refusal

_DROP = re.compile(r"^Drop when: (.*?)(?:\n\n|\n[A-Z]|\Z)", re.DOTALL | re.MULTILINE)


def check_patches(patches: Sequence[Patch], of: str, *, apply: bool) -> Iterator[Finding]:
    """Yield a finding for all that apply, one for all not needed, and one for each that refuses.

    With `apply` they are applied in this process, which shows whether the code that they change is
    as they expect; otherwise names and versions are compared. `of` names the patched package.
    """
    applying, unneeded, refused = [], [], []
    for patch in patches:
        try:
            if _is_to_apply(patch, apply=apply):
                applying.append(patch.name.partition(".")[2])
            else:
                unneeded.append(patch.name.partition(".")[2])
        except UsageError as error:
            finding = refusal(PATCHES, error)
            refused.append(replace(finding, remedy=finding.remedy + _end_of(patch)))
    if applying:
        how = "fit the installed code" if apply else "support the installed version"
        yield green(PATCHES, f"{of}: {len(applying)} {how}: {', '.join(applying)}")
    if unneeded:
        yield green(PATCHES, f"{of}: not needed here: {', '.join(unneeded)}")
    yield from refused


def _is_to_apply(patch: Patch, *, apply: bool) -> bool:
    """Return whether a patch is needed here; apply it on request. Raises UsageError if it does not
    know the installed version."""
    _, version = installed(patch)
    if patch.name not in applied_patches() and not is_needed(patch):
        return False
    if not patch.supports(version):
        raise UsageError(
            f"patch {patch.name} ({patch.reason}) supports {patch.packages[0]} {patch.supported}, "
            f"not the installed {version}",
            remedy="install a version that it supports: run scripts/setup_env.sh",
        )
    if apply:
        apply_patch(patch)
    return True


def _end_of(patch: Patch) -> str:
    """Return the "Drop when" of the patch's module, in brackets."""
    module = sys.modules.get(patch.apply.__module__)
    match = _DROP.search(inspect.getdoc(module) or "") if module else None
    drop = " ".join(match[1].split()).rstrip(".") if match else ""
    return f" (drop the patch when: {drop})" if drop else ""
