"""The GPUs of this machine, asked through NVML: no CUDA context is made for it.

Megatron's validation asks torch what kind of GPU there is, which would start CUDA: here NVML
answers instead.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# NVIDIA's own binding, and the copy of it that vLLM brings.
_BINDINGS = ("pynvml", "vllm.third_party.pynvml")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `used_bytes` of its memory are taken by whoever is there now."""

    name: str
    total_bytes: int
    used_bytes: int
    capability: tuple[int, int]  # (9, 0): Hopper


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of the machine, whatever CUDA_VISIBLE_DEVICES shows of them."""

    devices: tuple[Device, ...] = ()
    driver: str = ""
    driver_cuda: tuple[int, int] = (0, 0)  # the newest CUDA that the driver serves

    @property
    def smallest_bytes(self) -> int | None:
        """Memory of the device that has least; None without a device."""
        return min((device.total_bytes for device in self.devices), default=None)


def find_gpus() -> Gpus:
    """What NVML knows; no GPU where there is no binding, no driver or no device."""
    for name in _BINDINGS:
        try:
            nvml = importlib.import_module(name)
        except ImportError:
            continue
        return _ask(nvml)
    return Gpus()


def _ask(nvml: Any) -> Gpus:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one that does not answer
        return Gpus()
    try:
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        devices = []
        for handle in handles:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
            name = _text(nvml.nvmlDeviceGetName(handle))
            devices.append(Device(name, memory.total, memory.used, capability))
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        return Gpus(
            tuple(devices),
            _text(nvml.nvmlSystemGetDriverVersion()),
            (version // 1000, version % 1000 // 10),
        )
    finally:
        nvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextlib.contextmanager
def properties_from_nvml(gpus: Gpus) -> Iterator[None]:
    """In which `torch.cuda.get_device_properties`, and what calls it, speak of `gpus` and make no
    CUDA context. Without a GPU nothing is changed."""
    if not gpus.devices:
        yield
        return
    import torch

    ask_cuda = torch.cuda.get_device_properties

    def properties(device: Any = None) -> SimpleNamespace:
        # Which one does not matter: the GPUs of a job are alike.
        found = gpus.devices[0]
        return SimpleNamespace(
            name=found.name,
            major=found.capability[0],
            minor=found.capability[1],
            total_memory=found.total_bytes,
        )

    torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.get_device_properties = ask_cuda
