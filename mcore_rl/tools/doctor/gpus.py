"""The GPUs of this machine, queried through NVML: asking torch would start CUDA."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# NVIDIA's binding, and the copy that vLLM contains.
_BINDINGS = ("pynvml", "vllm.third_party.pynvml")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; `used_bytes` of its memory are in use now, by any process."""

    name: str
    total_bytes: int
    used_bytes: int
    capability: tuple[int, int]  # (9, 0): Hopper


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs of the machine, visible or not."""

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
    for name in _BINDINGS:
        with contextlib.suppress(ImportError):
            return _query(importlib.import_module(name))
    return Gpus()


def _query(nvml: Any) -> Gpus:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or one that does not answer
        return Gpus()
    try:
        count = nvml.nvmlDeviceGetCount()
        devices = [_device(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        cuda = (version // 1000, version % 1000 // 10)
        return Gpus(tuple(devices), _text(nvml.nvmlSystemGetDriverVersion()), cuda)
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, handle: Any) -> Device:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    name = _text(nvml.nvmlDeviceGetName(handle))
    return Device(name, memory.total, memory.used, (major, minor))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@contextlib.contextmanager
def properties_from_nvml(gpus: Gpus) -> Iterator[None]:
    """Make `torch.cuda.get_device_properties` and its callers report the first of `gpus`, without a
    CUDA context: the GPUs of a job are identical. Without a GPU nothing changes."""
    if not gpus.devices:
        yield
        return
    import torch

    first, ask_cuda = gpus.devices[0], torch.cuda.get_device_properties
    properties: Any = SimpleNamespace(
        name=first.name,
        major=first.capability[0],
        minor=first.capability[1],
        total_memory=first.total_bytes,
    )
    torch.cuda.get_device_properties = lambda device=None: properties
    try:
        yield
    finally:
        torch.cuda.get_device_properties = ask_cuda
