"""Megatron-FSDP runs on a machine without CUDA, over gloo.

Symptom: `--use-megatron-fsdp` fails when the model is wrapped ("Invalid device string:
'cuda:cpu'"), then at its device meshes, then at the first reduction of gradients ("Cannot use
ReduceOp.PREMUL_SUM with Gloo"). Rarely, a rank ends with "malloc(): unaligned tcache chunk
detected" or a segmentation fault.

Cause: it hard-codes CUDA devices and meshes of type "cuda", and lets NCCL scale during a reduction.
It gathers the next layers while it reduces gradients in the same group. gloo then corrupts its
memory (torch 2.13.0; two processes that do nothing else crash within minutes).

Why safe: in Megatron-FSDP's own modules a CUDA device or mesh becomes the CPU's, as `cpu_torch`
does for the rest of Megatron; `torch` does not change for other code. Gradients are scaled before
the reduction, as Megatron-FSDP itself does in bfloat16. A gather ends before anything else starts,
which computes the same; Megatron-FSDP waits for it a second time where it needs the result.

Upstream: no issue proposes it.

Drop when: Megatron takes the device from `torch.accelerator`, and gloo's collectives of a group can
run at the same time.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from mcore_rl.patches.megatron.cpu_torch import forwarding_module, needed
from mcore_rl.patches.registry import Patch, require, require_parameters


def apply() -> None:
    """Give Megatron-FSDP devices, meshes and sums that exist here."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import (
        megatron_fsdp,
        param_and_grad_buffer,
        utils,
    )

    modules: tuple[Any, ...] = (mcore_fsdp_adapter, megatron_fsdp, param_and_grad_buffer, utils)
    for module in modules:
        module.torch = _with_cpu_devices(module.torch)
    _use_cpu_meshes()
    _scale_before_adding()
    _gather_before_anything_else()


def _with_cpu_devices(torch: Any) -> types.ModuleType:
    """Return a `torch` for one module whose `device("cuda:...")` is the CPU."""

    def device(kind: Any, *index: Any) -> Any:
        return torch.device("cpu") if str(kind).startswith("cuda") else torch.device(kind, *index)

    stand_in: types.ModuleType = forwarding_module("torch", torch)
    stand_in.device = device  # type: ignore[attr-defined]
    return stand_in


def _use_cpu_meshes() -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    mesh = adapter.DeviceMesh
    require(hasattr(mesh, "from_group"), "DeviceMesh of Megatron-FSDP", "has no from_group")

    def from_group(group: Any, *, device_type: str, **options: Any) -> Any:
        return mesh.from_group(group, device_type="cpu", **options)

    # The module uses nothing else of DeviceMesh.
    adapter.DeviceMesh = types.SimpleNamespace(from_group=from_group)


def _scale_before_adding() -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    prepare = buffers.gradient_reduce_preprocessing
    require_parameters(prepare, "grad_data scaling_factor ddp_config")

    def prepare_for_gloo(grad_data: Any, scaling_factor: Any, ddp_config: Any) -> Any:
        if scaling_factor is None or ddp_config.average_in_collective:
            return prepare(grad_data, scaling_factor, ddp_config)
        grad_data.mul_(scaling_factor)
        return torch.distributed.ReduceOp.SUM

    buffers.gradient_reduce_preprocessing = prepare_for_gloo


def _gather_before_anything_else() -> None:
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    coalescing_manager = buffers._coalescing_manager
    require_parameters(coalescing_manager, "group device async_ops")

    @contextlib.contextmanager
    def ended_on_leaving(*args: Any, **options: Any) -> Iterator[Any]:
        with coalescing_manager(*args, **options) as works:
            yield works
        works.wait()

    buffers._coalescing_manager = ended_on_leaving


PATCH = Patch("megatron.fsdp_on_cpu", "Megatron-FSDP runs over gloo", apply, needed)
