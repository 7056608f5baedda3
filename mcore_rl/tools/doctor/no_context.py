"""Megatron's validation asks torch what kind of GPU there is, which would start CUDA: here NVML
answers instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from mcore_rl.tools.doctor.gpus import Gpus


@contextlib.contextmanager
def properties_from_nvml(gpus: Gpus) -> Iterator[None]:
    """In which `torch.cuda.get_device_properties`, and what calls it, speak of `gpus` and make no
    CUDA context. Without a GPU nothing is changed."""
    if not gpus.devices:
        yield
        return
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

    torch.cuda.get_device_properties = properties
    try:
        yield
    finally:
        torch.cuda.get_device_properties = ask_cuda
