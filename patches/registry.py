"""Apply a repair of an upstream package once, to the code that it is for, and say so.

A repair reaches into code that is not ours, so it is never applied on trust: a version it does not
name, or a target that does not look as the repair expects, is refused with the way out.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mcore_rl.common.errors import UsageError
from mcore_rl.megatron.version import NEWEST, OLDEST, find_megatron
from mcore_rl.megatron.version import PACKAGE as MEGATRON

logger = logging.getLogger(__name__)

_applied: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Patch:
    """One repair of one package.

    `package` is the distribution's name, or several names under which the same code is published,
    the usual one first. `versions` are the ones it was tried with: a specifier set ("==0.32.0",
    ">=0.16,<0.20") or an explicit tuple. Local labels such as "+cpu" do not count. None: what the
    code looks like decides alone, as of Megatron, which is forked more than it is released.

    `needed` tells whether this process has the defect at all (a CPU repair is not needed on a GPU,
    nor one of code that a release does not have yet); where it says no, the version does not
    matter. `apply` does the repair. Both raise UsageError, through `require_parameters`,
    `require_source` or `require`, where the code looks like none that they know; without
    `versions` a module or an attribute that is not there counts as such, too.
    """

    name: str
    package: str | tuple[str, ...]
    reason: str
    needed: Callable[[], bool]
    apply: Callable[[], None]
    versions: SpecifierSet | tuple[str, ...] | None = None

    @property
    def packages(self) -> tuple[str, ...]:
        return (self.package,) if isinstance(self.package, str) else self.package

    @property
    def supported(self) -> str:
        """The supported versions, as a person reads them."""
        if self.versions is None:
            return f"one of {OLDEST} to {NEWEST}"
        if isinstance(self.versions, tuple):
            return ", ".join(self.versions)
        return str(self.versions)

    def supports(self, version: str) -> bool:
        if self.versions is None:
            return True
        if isinstance(self.versions, tuple):
            public = Version(version).public
            return any(Version(known).public == public for known in self.versions)
        return self.versions.contains(Version(version).public, prereleases=True)


def apply_patch(patch: Patch) -> bool:
    """Apply `patch` if this process needs it and has not got it; True if it was applied now.

    Raises UsageError where the package is missing, its version is not one the patch names, or its
    code looks different. A patch that raised is not counted as applied.
    """
    if patch.name in _applied or not is_needed(patch):
        return False
    package, version = installed(patch)
    if not patch.supports(version):
        raise UsageError(
            f"patch {patch.name} ({patch.reason}) knows {package} {patch.supported}, not the "
            f"installed {version}",
            remedy="install one of those versions",
        )
    with _naming(patch):
        patch.apply()
    _applied[patch.name] = f"{package} {version}"
    logger.info("[Patch] %s applied to %s %s: %s", patch.name, package, version, patch.reason)
    return True


def is_needed(patch: Patch) -> bool:
    """`patch.needed()`; UsageError where that cannot be told from the code."""
    with _naming(patch):
        return patch.needed()


@contextlib.contextmanager
def _naming(patch: Patch) -> Iterator[None]:
    """Refuse code that looks like none that `patch` knows by one sentence with the patch's name."""
    try:
        yield
    except (_Unfit, ImportError, AttributeError) as error:
        # With versions, what is missing there is a fault of the patch.
        if patch.versions is not None and not isinstance(error, _Unfit):
            raise
        package, version = installed(patch)
        raise UsageError(
            f"patch {patch.name} ({patch.reason}) does not fit the code of {package} {version}: "
            f"{error}",
            remedy="the package is changed or another patch got there first: install "
            f"{patch.supported} anew",
        ) from error


def apply_all(patches: Iterable[Patch]) -> tuple[str, ...]:
    """Apply `patches` in order; the names of those that were applied now."""
    return tuple([patch.name for patch in patches if apply_patch(patch)])


def applied_patches() -> Mapping[str, str]:
    """Name of every patch applied in this process -> the package and version it was applied to."""
    return MappingProxyType(_applied)


class _Unfit(UsageError):
    """The code to be patched is none that the patch knows."""


def require(condition: bool, target: str, expectation: str) -> None:
    """Refuse to patch `target` unless `condition`: it is not what the patch was written for."""
    if not condition:
        raise _Unfit(f"{target} {expectation}")


def require_parameters(target: Callable[..., Any], *names: str) -> None:
    """Refuse to patch `target` unless its parameters are exactly `names`, in this order."""
    found = parameters_of(target)
    label = f"{target.__module__}.{target.__qualname__}"
    require(found == names, label, f"takes {', '.join(found)}, not {', '.join(names)}")


def parameters_of(target: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's parameters, to tell one release's from another's."""
    return tuple(inspect.signature(target).parameters)


def require_source(target: Callable[..., Any], *fragments: str) -> None:
    """Refuse to patch `target` unless its source has each of `fragments`, spaces aside."""
    label = f"{target.__module__}.{target.__qualname__}"
    try:
        source = "".join(inspect.getsource(target).split())
    except OSError as error:
        raise _Unfit(f"{label} comes without its source") from error
    for fragment in fragments:
        require("".join(fragment.split()) in source, label, f"no longer has `{fragment}`")


def installed(patch: Patch) -> tuple[str, str]:
    """Name and version of the package that `patch` is for; UsageError where there is none.

    Megatron's version is that of the code which is imported.
    """
    for package in patch.packages:
        if package == MEGATRON:
            if (source := find_megatron()) is not None:
                return package, source.version
            continue
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UsageError(
        f"patch {patch.name} is for {' or '.join(patch.packages)}, which is not installed",
        remedy="run scripts/setup_env.sh",
    )
