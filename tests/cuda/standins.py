"""Stand-ins for what a machine without a GPU lacks, for the jobs of tests/cuda.

A job installs those it needs at its head, before it imports vllm, megatron or mcore_rl:

    from tests.cuda import standins
    standins.transformer_engine_extension()
    standins.vllm_libraries()
    standins.cuda_device(capability=(9, 0))

Each does nothing where the real thing can be imported, so that the same job runs on the light and
on the full stack. None of them computes anything, but for `triton_interpreter`. So no job can show
what a compiled kernel returns, what NCCL sends, what the device's allocator does (sleep,
peaks, fragmentation), nor what CUDA graphs and streams change.
"""

from __future__ import annotations

import enum
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GIB = 1 << 30
_NUM_DEVICES = 8
_CAPABILITIES = {(9, 0): "NVIDIA H100 80GB HBM3", (10, 0): "NVIDIA B200"}


# ---------------------------------------------------------------------------- Transformer Engine


def transformer_engine_extension() -> bool:
    """Let transformer_engine.pytorch be imported from its pure wheel; whether that was needed.

    Stands in for transformer_engine_torch, the compiled module, and for the core library. Modules
    can be built (on `meta` too) with their parameters; nothing can be run forward, and what the
    compiled module would refuse (a type, an enumeration's value) is accepted.
    """
    try:
        version("transformer-engine-torch")
        return False
    except PackageNotFoundError:
        pass
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # the core library is not looked for
    import transformer_engine.common as common

    constants = Path(common.__file__).parents[1] / "pytorch" / "constants.py"
    names = re.findall(r"^    (k\w+) = int\(tex\.DType\.", constants.read_text(), re.MULTILINE)
    module: Any = _CompiledModule("transformer_engine_torch")
    members = [(name, _TE_TYPES[name]) for name in names]
    module.DType = enum.IntEnum("DType", members)  # type: ignore[misc]
    module.get_cudnn_version = lambda: 92000
    sys.modules["transformer_engine_torch"] = module
    common.load_framework_extension = lambda framework: None
    return True


# transformer_engine/common/include/transformer_engine/transformer_engine.h: enum NVTEDType.
_TE_TYPES = {
    name: value
    for value, name in enumerate(
        "kByte kInt16 kInt32 kInt64 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 "
        "kFloat8E8M0 kFloat4E2M1".split()
    )
}


class _CompiledModule(ModuleType):
    """Has every name: in capitals a type or an enumeration, else a function that raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = (
            _Enumeration(name, (), {})
            if name[0].isupper()
            else needs_gpu(f"{self.__name__}.{name}")
        )
        setattr(self, name, value)
        return value


class _Enumeration(type):
    """A class of which every attribute is a member, made when it is asked for."""

    _counter = itertools.count()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls()
        member.name, member.value = name, next(_Enumeration._counter)
        setattr(cls, name, member)
        return member

    def __iter__(cls) -> Any:
        return iter([member for member in vars(cls).values() if isinstance(member, cls)])

    @property
    def __members__(cls) -> dict[str, Any]:
        return {member.name: member for member in cls}

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return type.__call__(cls)

    def __new__(mcs, name: str, bases: tuple[type, ...], _: Mapping[str, Any]) -> Any:
        number = {"__int__": lambda self: self.value, "__index__": lambda self: self.value}
        return super().__new__(mcs, name, bases, number)


def needs_gpu(name: str) -> Callable[..., Any]:
    """A function of that name that cannot be run here."""

    def function(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{name} was called, which needs a GPU")

    function.__name__ = name.rpartition(".")[2]
    return function


# -------------------------------------------------------------------------------------- vLLM

_LIBRARIES = """_flashmla_C _flashmla_extension_C _qutlass_C _deepselect_C _flashkda_C
vllm_flash_attn._vllm_fa2_C vllm_flash_attn._vllm_fa3_C""".split()


def vllm_libraries() -> bool:
    """Let vLLM for CUDA be imported on torch for CPU; whether that was needed.

    Stands in for the libraries that the light stack leaves out. Those that are there register their
    operators with their schemas and without a kernel for the CPU.
    """
    if torch.version.cuda is not None:
        return False
    for name in _LIBRARIES:
        module = ModuleType(f"vllm.{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    return True


def deep_gemm(capability: tuple[int, int]) -> None:
    """Let vLLM choose DeepGEMM, and lay out scales as DeepGEMM does.

    Written after csrc/utils/layout.hpp of DeepGEMM 2: Hopper's kernels read float32 scales as they
    are. Blackwell's read one for each row, as an exponent, four in an int32, column by column, each
    column 16 bytes aligned. Linear layers compute what their kernel would from that layout, since
    vLLM multiplies by the identity to dequantise kv_b_proj.
    """
    module: Any = _CompiledModule("deep_gemm")
    module.__spec__ = ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module

    def transform(sf: torch.Tensor, mn: int, k: int, recipe: Any, **_: Any) -> torch.Tensor:
        assert recipe == (1, 128, 128) and sf.dtype is torch.float32
        assert sf.shape[-2:] == (-(-mn // 128), -(-k // 128)), "scales of other blocks"
        return packed(sf[..., torch.arange(mn) // 128, :]) if capability[0] == 10 else sf

    def packed(scales: torch.Tensor) -> torch.Tensor:
        """`[..., rows, blocks]` float32 as `[..., rows, ceil(blocks / 4)]` int32."""
        bits = scales.contiguous().view(torch.int32)
        assert not (bits & 0x007FFFFF).any(), "a scale that is not a power of two"
        exponents = torch.nn.functional.pad(bits >> 23, (0, -bits.shape[-1] % 4)).to(torch.uint8)
        words = exponents.contiguous().view(torch.int32)
        *outer, rows, columns = words.shape
        aligned = -(-rows // 4) * 4
        strides = [columns * aligned] if outer else []
        found = torch.empty_strided(words.shape, (*strides, 1, aligned), dtype=torch.int32)
        return found.copy_(words)

    def unpacked(words: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """`[rows, blocks]` float32 of `[rows, words]`."""
        by_row = words.clone(memory_format=torch.contiguous_format)
        exponents = by_row.view(torch.uint8)[:, :num_blocks].to(torch.int32)
        return (exponents << 23).view(torch.float32)

    def product(self: Any, layer: Any, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        weight, scale = layer.weight, layer.weight_scale_inv
        rows, columns = weight.shape
        if scale.dtype is torch.int32:
            scales = unpacked(scale, -(-columns // 128))
        else:
            scales = scale[torch.arange(rows) // 128]
        values = weight.float() * scales[:, torch.arange(columns) // 128]
        return (x.float() @ values.T).to(x.dtype)

    module.transform_sf_into_required_layout = transform
    module.get_mk_alignment_for_contiguous_layout = lambda: 128
    from vllm.model_executor.kernels.linear.scaled_mm import BlockScaledMMLinearKernel as kernels

    kernels.Fp8BlockScaledMMLinearKernel.apply_weights = product


def triton_interpreter() -> None:
    """Run vLLM's Triton kernels on tensors of the CPU, by Triton's interpreter.

    Three gaps of the interpreter are filled: `tl.dot` multiplies the bits of bfloat16, `tl.range`
    counts in integers, where compiled kernels have tensors, and float8 is not rounded to nearest.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # else vLLM looks for Triton's driver
    from triton import language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot
    set_attr = interpreter._LangPatchScope.set_attr
    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (self.create_fp_ext(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    def set_attr_with_tensors(self: Any, target: Any, name: str, value: Any) -> None:
        def tensors(*args: Any, **kwargs: Any) -> Any:
            return map(interpreter.interpreter_semantic.to_tensor, value(*args, **kwargs))

        set_attr(self, target, name, tensors if name == "range" else value)

    def convert_rounded(self: Any, value: Any, to: Any, rounding: Any) -> Any:
        if value.dtype.scalar != tl.float32 or to.scalar != tl.float8e4nv:
            return convert(self, value, to, rounding)
        rounded = torch.tensor(value.data).to(torch.float8_e4m3fn).view(torch.uint8)
        return interpreter.TensorHandle(rounded.numpy(), to.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.InterpreterBuilder.create_fp_to_fp = convert_rounded
    interpreter._LangPatchScope.set_attr = set_attr_with_tensors


# ------------------------------------------------------------------------------------- a device


def _triton_device() -> None:
    """Let Triton's driver answer what vLLM's gated delta net asks when it is imported, and what
    Triton asks when it compiles a kernel."""
    from triton.runtime import driver

    properties = {"max_shared_mem": 232448, "multiprocessor_count": 132}
    driver.active.utils.get_device_properties = _always(properties)
    driver.active.get_current_stream = _always(0)


def cuda_device(capability: tuple[int, int] = (9, 0)) -> None:
    """Let vLLM and Megatron believe in devices of that compute capability (9.0 H100, 10.0 B200).

    Stands in for the driver: NVML as vLLM asks it, questions to torch.cuda and torch.accelerator,
    streams and events. There is no memory and no device: what is made on "cuda" must go elsewhere,
    as by `CudaOnMeta`.
    """
    name, total = _CAPABILITIES[capability], 80 * GIB
    properties = SimpleNamespace(
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        name=name,
        total_memory=total,
        is_integrated=False,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        uuid="0",
        gcnArchName="",
    )
    nothing = (
        "set_device set_stream synchronize empty_cache reset_peak_memory_stats ipc_collect".split()
    )
    answers = {
        **dict.fromkeys(nothing),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), 0),
        "is_available": True,
        "is_initialized": False,
        "is_current_stream_capturing": False,
        "device_count": _NUM_DEVICES,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_name": name,
        "get_device_capability": capability,
        "mem_get_info": (total, total),
    }
    for question, answer in answers.items():
        setattr(torch.cuda, question, _always(answer))
    for question in ("set_device_index", "empty_cache", "synchronize"):
        setattr(torch.accelerator, question, _always(None))
    torch.accelerator.is_available = _always(True)
    torch.accelerator.current_device_index = _always(0)
    for made in ("Stream", "Event", "current_stream", "stream", "default_stream"):
        setattr(torch.cuda, made, Stream)
    torch.Event = Stream  # type: ignore[misc,assignment]
    _nvml(capability)  # the first import of vLLM, which keeps some of the above
    _triton_device()


def _nvml(capability: tuple[int, int]) -> None:
    import vllm.third_party.pynvml as nvml

    answers = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": _NUM_DEVICES,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetName": _CAPABILITIES[capability],
        "nvmlDeviceGetUUID": "GPU-0",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, free=80 * GIB, used=0),
        "nvmlDeviceGetP2PStatus": 0,
        "nvmlDeviceGetCudaComputeCapability": capability,
    }
    for question, answer in answers.items():
        setattr(nvml, question, _always(answer))


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


class Stream:
    """Stands in for torch.cuda.Stream, Event and their contexts; everything is done at once."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _always(None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class CudaOnMeta(TorchFunctionMode):
    """Within it, what is asked for by `device=` on CUDA is made on `meta`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device") or "").startswith("cuda"):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
