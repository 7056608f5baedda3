"""The registry of patches: it applies each once, to the code it was written for, and logs it.

A patch changes code that is not ours. An unknown version, or a target that does not look as the
patch expects, is therefore refused, with a remedy.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mcore_rl.common.admitted_torch import is_admitted
from mcore_rl.common.errors import UsageError
from mcore_rl.common.megatron_version import NEWEST, OLDEST, find_megatron
from mcore_rl.common.megatron_version import PACKAGE as MEGATRON

logger = logging.getLogger(__name__)

_applied: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Patch:
    """One repair of one package.

    `apply` does the repair; `needed` returns whether this process has the defect (a CPU repair is
    not needed on a GPU, nor a repair of code that a release does not have yet). If not, the version
    is not checked. Both raise UsageError, through `require_parameters`, `require_source` or
    `require`, if they do not know the code; without `versions`, a missing module or attribute also
    counts as unknown code.

    `packages` are the names under which the same distribution is published, the usual one first.
    `versions` are the versions it was tried with, as a specifier ("==0.32.0", ">=2.8,<2.14"); local
    labels such as "+cpu" are ignored. With None only the code's appearance counts, as for Megatron,
    which is forked more often than released.
    """

    name: str
    reason: str
    apply: Callable[[], None]
    needed: Callable[[], bool] = lambda: True
    packages: tuple[str, ...] = (MEGATRON,)
    versions: str | None = None

    @property
    def supported(self) -> str:
        """The supported versions, as text for messages."""
        versions = self.versions or f"one of {OLDEST} to {NEWEST}"
        return versions.removeprefix("==")

    def supports(self, version: str) -> bool:
        """Return whether the patch was tried with a version, or the version is admitted."""
        if self.versions is None:  # a fork's version may be any text
            return True
        if SpecifierSet(self.versions).contains(Version(version).public, prereleases=True):
            return True
        return self.packages == ("torch",) and is_admitted(version)


def apply_patch(patch: Patch) -> bool:
    """Apply `patch` if this process needs it and lacks it; return True if it was applied now.

    Raises UsageError if the package is missing, the patch does not name its version, or its code
    looks different. A patch that raises does not count as applied.
    """
    if patch.name in _applied or (package := patched_by(patch)) is None:
        return False
    with _naming(patch):
        patch.apply()
    _applied[patch.name] = package
    logger.info("[Patch] %s applied to %s: %s", patch.name, package, patch.reason)
    return True


def patched_by(patch: Patch) -> str | None:
    """Return the package and the version that `patch` is for, None if it is not needed. Raises
    UsageError if the package is missing, or the patch does not name its version."""
    if not is_needed(patch):
        return None
    package, version = installed(patch)
    if not patch.supports(version):
        raise UsageError(
            f"patch {patch.name} ({patch.reason}) knows {package} {patch.supported}, not the "
            f"installed {version}",
            remedy="install one of those versions: run scripts/setup_env.sh",
        )
    return f"{package} {version}"


def is_needed(patch: Patch) -> bool:
    """Return `patch.needed()`; raises UsageError if the code does not show it."""
    with _naming(patch):
        return patch.needed()


@contextlib.contextmanager
def _naming(patch: Patch) -> Iterator[None]:
    """Refuse code that `patch` does not know, in one sentence with the patch's name."""
    try:
        yield
    except (_Unfit, ImportError, AttributeError) as error:
        # If versions are given, a missing name is a fault of the patch.
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
    """Apply `patches` in order, and return the names of those applied now."""
    return tuple([patch.name for patch in patches if apply_patch(patch)])


def applied_patches() -> Mapping[str, str]:
    """Return the patches applied in this process: name -> package and version."""
    return MappingProxyType(_applied)


class _Unfit(UsageError):
    """The error for code that a patch does not know."""


def require(condition: bool, target: str, expectation: str) -> None:
    """Refuse to patch `target` unless `condition` holds: the patch was written for other code."""
    if not condition:
        raise _Unfit(f"{target} {expectation}")


def require_parameters(target: Callable[..., Any], names: str) -> None:
    """Refuse to patch `target` unless its parameters are `names`, in this order ("self x y")."""
    actual, expected = parameters_of(target), tuple(names.split())
    label = f"{target.__module__}.{target.__qualname__}"
    require(actual == expected, label, f"takes {', '.join(actual)}, not {', '.join(expected)}")


def parameters_of(target: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's parameters, which may differ between releases."""
    return tuple(inspect.signature(target).parameters)


def names_in(function: Any) -> tuple[str, ...]:
    """Return the globals and attributes that a function's code names; none without code."""
    code: types.CodeType | None = getattr(function, "__code__", None)
    return () if code is None else code.co_names


def require_source(target: Callable[..., Any], *fragments: str) -> None:
    """Refuse to patch `target` unless its source has each of `fragments`, ignoring spaces."""
    label = f"{target.__module__}.{target.__qualname__}"
    try:
        source = "".join(inspect.getsource(target).split())
    except OSError as error:
        raise _Unfit(f"{label} comes without its source") from error
    for fragment in fragments:
        require("".join(fragment.split()) in source, label, f"no longer has `{fragment}`")


def installed(patch: Patch) -> tuple[str, str]:
    """Return name and version of the package that `patch` is for; UsageError if it is missing.

    For Megatron it is the version of the imported code.
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
