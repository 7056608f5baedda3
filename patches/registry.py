"""Apply a repair of an upstream package once, to the versions it names, and say so.

A repair reaches into code that is not ours, so it is never applied on trust: a version it does not
name, or a target that no longer looks as the repair expects, is refused with the way out.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mcore_rl.errors import UsageError

logger = logging.getLogger(__name__)

_applied: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Patch:
    """One repair of one package.

    `package` is the distribution's name, or several names under which the same code is published,
    the usual one first. `versions` are the ones it was tried with: a specifier set ("==0.32.0",
    ">=0.16,<0.20") or an explicit tuple. Local labels such as "+cpu" do not count.

    `needed` tells whether this process has the defect at all (a CPU repair is not needed on a GPU);
    where it says no, the version does not matter. `apply` does the repair; it raises UsageError,
    through `require_parameters` or `require`, where its target looks different.
    """

    name: str
    package: str | tuple[str, ...]
    versions: SpecifierSet | tuple[str, ...]
    reason: str
    needed: Callable[[], bool]
    apply: Callable[[], None]

    @property
    def packages(self) -> tuple[str, ...]:
        return (self.package,) if isinstance(self.package, str) else self.package

    @property
    def supported(self) -> str:
        """The supported versions, as a person reads them."""
        if isinstance(self.versions, tuple):
            return ", ".join(self.versions)
        return str(self.versions)

    def supports(self, version: str) -> bool:
        if isinstance(self.versions, tuple):
            public = Version(version).public
            return any(Version(known).public == public for known in self.versions)
        return self.versions.contains(Version(version).public, prereleases=True)


def apply_patch(patch: Patch) -> bool:
    """Apply `patch` if this process needs it and has not got it; True if it was applied now.

    Raises UsageError where the package is missing, its version is not one the patch names, or its
    code looks different. A patch that raised is not counted as applied.
    """
    if patch.name in _applied or not patch.needed():
        return False
    package, version = _installed(patch)
    if not patch.supports(version):
        raise UsageError(
            f"patch {patch.name} ({patch.reason}) knows {package} {patch.supported}, not the "
            f"installed {version}; install one of those versions"
        )
    patch.apply()
    _applied[patch.name] = f"{package} {version}"
    logger.info("[Patch] %s applied to %s %s: %s", patch.name, package, version, patch.reason)
    return True


def apply_all(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Apply `patches` in order; the names of those that were applied now."""
    return tuple([patch.name for patch in patches if apply_patch(patch)])


def applied_patches() -> Mapping[str, str]:
    """Name of every patch applied in this process -> the package and version it was applied to."""
    return MappingProxyType(_applied)


def require(condition: bool, target: str, expectation: str) -> None:
    """Refuse to patch `target` unless `condition`: it is not what the patch was written for."""
    if not condition:
        raise UsageError(
            f"{target} was to be patched and {expectation}; the package is changed or another "
            "patch got there first: install it anew in one of the supported versions"
        )


def require_parameters(target: Callable, *names: str) -> None:
    """Refuse to patch `target` unless its parameters are exactly `names`, in this order."""
    found = tuple(inspect.signature(target).parameters)
    label = f"{target.__module__}.{target.__qualname__}"
    require(found == names, label, f"takes {', '.join(found)}, not {', '.join(names)}")


def _installed(patch: Patch) -> tuple[str, str]:
    for package in patch.packages:
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UsageError(
        f"patch {patch.name} is for {' or '.join(patch.packages)}, which is not installed; run "
        "scripts/setup_env.sh"
    )
