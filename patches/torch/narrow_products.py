"""bf16 and fp16 matrix products run in float32 on a CPU without instructions for them.

Symptom: on an x86 CPU without AVX-512 (most laptops, servers up to Zen 3) a run is ten times as
slow as in float32: torch multiplies bf16 matrices at about 1 GF/s per core, float32 at 80. With
AVX-512, but without its bf16 instructions (most of Intel's servers up to Ice Lake), products in
bf16 take three to four times as long: 28 GF/s per core instead of 82 to 126, measured with oneDNN
limited to such a CPU (ONEDNN_MAX_CPU_ISA=AVX512_CORE).
Cause: oneDNN computes 16-bit products if the CPU has AVX-512 or AMX, and emulates them without
AVX512_BF16; without AVX-512 torch falls back to loops that are not vectorised. Its attention
kernels on CPU call the same loops.
Why safe: inputs are widened, which is exact; the product is summed in float32, as in oneDNN, and
rounded once at the end. Only these operators change. Other dtypes and devices use torch's own
kernels, and autograd, which differentiates above this level, is not affected. An operator costs 2
microseconds more.
Upstream: as described, as of 2.13.0.
Drop when: torch's own fallback is as fast as float32.
Versions: torch 2.13.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Registrations last as long as this object.
_library: torch.library.Library | None = None


def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes for which this machine's CPU has no fast matrix products."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    slow = {dtype for dtype, is_supported in supported.items() if not is_supported()}
    cpu: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.11 lacks it
    if cpu.get("avx512_f") and not (cpu.get("avx512_bf16") or cpu.get("amx_bf16")):
        slow.add(torch.bfloat16)
    return frozenset(slow)


def widened_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes whose products are computed in float32; none if there is a GPU."""
    return frozenset() if torch.cuda.is_available() else slow_dtypes()


def needed() -> bool:
    return bool(widened_dtypes())


def apply() -> None:
    global _library
    known = hasattr(torch.library, "get_kernel")
    require(known, "aten's CPU kernels", "torch.library has no get_kernel")
    slow = widened_dtypes()
    _library = torch.library.Library("aten", "IMPL")
    for name in (*PRODUCTS, *ATTENTION):
        _replace(_library, name, _widened(_kernel(name), slow))
    for name in PRODUCTS:
        _replace(_library, f"{name}.out", _widened_into(_kernel(f"{name}.out"), name, slow))


def _kernel(name: str) -> Callable[..., Any]:
    """Return torch's own kernel, even after another is registered."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel.call_boxed(_ON_CPU, *args, **kwargs)

    return call


def _replace(library: torch.library.Library, name: str, function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, function, "CPU")


def _widened(kernel: Callable[..., Any], slow: frozenset[torch.dtype]) -> Callable[..., Any]:
    """Run `kernel` in float32 for tensors of the `slow` dtypes, and cast results back.

    Attention's log-sum-exp stays float32, as in torch's kernel; its gradients get the input dtype.
    """

    def widened(*args: Any, **kwargs: Any) -> Any:
        dtype = next((arg.dtype for arg in args if isinstance(arg, torch.Tensor)), None)
        if dtype not in slow:
            return kernel(*args, **kwargs)
        results = kernel(*_wide(args, dtype), **_wide_values(kwargs, dtype))
        if isinstance(results, torch.Tensor):
            return results.to(dtype)
        if len(results) == 2:  # attention's output, and the log-sum-exp
            return results[0].to(dtype), results[1]
        return tuple(gradient.to(dtype) for gradient in results)

    return widened


def _widened_into(
    kernel: Callable[..., Any], name: str, slow: frozenset[torch.dtype]
) -> Callable[..., Any]:
    """Do the same for an operator that writes its result into `out`."""
    operator = getattr(torch.ops.aten, name).default

    def widened(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if args[0].dtype not in slow:
            narrow: torch.Tensor = kernel(*args, out=out, **kwargs)
            return narrow
        result = operator(*_wide(args, args[0].dtype), **kwargs)
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return widened


def _wide(args: tuple[Any, ...], dtype: torch.dtype) -> list[Any]:
    return [
        arg.float() if isinstance(arg, torch.Tensor) and arg.dtype == dtype else arg for arg in args
    ]


def _wide_values(kwargs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return dict(zip(kwargs, _wide(tuple(kwargs.values()), dtype), strict=True))


PATCH = Patch(
    "torch.narrow_products",
    "the CPU has no 16-bit matrix products: they are computed in float32",
    apply,
    needed,
    packages=("torch",),
    versions="==2.13.0",
)
