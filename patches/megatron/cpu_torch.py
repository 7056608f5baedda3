"""Megatron's modules, and no others, get a `torch` whose `cuda` is the CPU.

Symptom: Megatron calls `torch.cuda.*`, `tensor.cuda()` and `device="cuda"` unconditionally, so on a
machine without a GPU it fails in its first function.

Cause: it was written for one kind of device.

Why safe: the process's own `torch` keeps its attributes. An import hook rebinds the module globals
`torch`, `torch.cuda` and `torch.distributed` of modules named `megatron.*` to stand-ins that
forward everything they do not replace. Three methods belong to shared classes and cannot be rebound
per module: `Tensor.cuda`, `Module.cuda` and the argument-less `Tensor.type`. They check the caller,
and change only for Megatron. vLLM, inductor and transformers therefore still see a machine without
CUDA.

Upstream: Megatron-LM runs single unit tests on CPU, not training; no issue proposes it.

Drop when: Megatron takes the device from `torch.accelerator`.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from mcore_rl.common.errors import UsageError
from mcore_rl.common.megatron_version import NEWEST, OLDEST
from mcore_rl.patches.registry import Patch

_PREFIX = "megatron."
_FACTORIES = (
    "tensor empty zeros ones full arange rand randn randint as_tensor "
    "empty_like zeros_like ones_like full_like rand_like randn_like"
).split()


class CpuStream:
    """A stream or event of a device with one queue, on which everything is already ordered."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def record(self, *args: Any) -> None:
        """Do nothing: no work is pending on a CPU."""

    wait = wait_event = wait_stream = synchronize = record

    def record_event(self, event: CpuStream | None = None) -> CpuStream:
        return event or CpuStream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: CpuStream) -> float:
        return 0.0


class _DeviceProperties:
    """Device properties that Megatron reads for sizing; they do not affect results."""

    name = "cpu"
    major, minor = 9, 0
    multi_processor_count = 1
    total_memory = 0


def forwarding_module(name: str, target: types.ModuleType) -> types.ModuleType:
    """Return a module that forwards to `target` all attributes that it does not set."""
    module = types.ModuleType(name)
    module.__getattr__ = functools.partial(getattr, target)  # type: ignore[method-assign]
    return module


def _get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _make_cuda() -> types.ModuleType:
    cuda = forwarding_module("torch.cuda", torch.cuda)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def stream(*args: Any, **kwargs: Any) -> CpuStream:
        return CpuStream()

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: torch.device("cpu"),
        "get_device_capability": lambda *a: (9, 0),
        "get_device_properties": lambda *a: _DeviceProperties,
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda *a, **k: {},
        "Stream": CpuStream,
        "Event": CpuStream,
        "stream": stream,
        "current_stream": stream,
        "default_stream": stream,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": torch.manual_seed,
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "IntTensor": torch.IntTensor,
        "LongTensor": torch.LongTensor,
        "ByteTensor": torch.ByteTensor,
    }
    for name in "set_device synchronize empty_cache set_stream reset_peak_memory_stats".split():
        replaced[name] = nothing
    for name in "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split():
        replaced[name] = zero
    vars(cuda).update(replaced)

    cuda.random = forwarding_module("torch.cuda.random", torch.cuda.random)  # type: ignore[attr-defined]
    cuda.random.get_rng_state = _get_rng_state
    cuda.random.set_rng_state = _set_rng_state

    cuda.nvtx = types.ModuleType("torch.cuda.nvtx")  # type: ignore[attr-defined]
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, nothing)

    @contextlib.contextmanager
    def nvtx_range(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    cuda.nvtx.range = nvtx_range
    return cuda


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that every CUDA device (also an int) is the CPU, unpinned."""

    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)  # pinning needs a device
        return factory(*args, **kwargs)

    return on_cpu


def _make_distributed() -> types.ModuleType:
    distributed = forwarding_module("torch.distributed", torch.distributed)

    def as_list(sizes: Any) -> Any:
        # Megatron keeps split sizes in tensors if no CUDA copy to the host is pending; gloo's
        # binding takes only lists.
        return sizes.tolist() if torch.is_tensor(sizes) else sizes

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **kwargs: Any,
    ) -> Any:
        return torch.distributed.all_to_all_single(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs
        )

    distributed.all_to_all_single = all_to_all_single  # type: ignore[attr-defined]
    distributed.all_gather = _all_gather  # type: ignore[attr-defined]
    distributed.reduce_scatter = _reduce_scatter  # type: ignore[attr-defined]
    return distributed


# NCCL takes pieces of different lengths, such as tokens of experts that are split over ranks; gloo
# does not. Every rank knows all lengths, so all ranks take the same branch.


def _all_gather(
    pieces: list[torch.Tensor], piece: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    longest = _length_of_uneven(pieces)
    if longest is None:
        return torch.distributed.all_gather(pieces, piece, group=group, async_op=async_op)
    assert not async_op, "Megatron waits for pieces of different lengths"
    padded = [_padded(each, longest) for each in pieces]
    torch.distributed.all_gather(padded, _padded(piece, longest), group=group)
    for each, gathered in zip(pieces, padded, strict=True):
        each.copy_(gathered[: len(each)])


def _reduce_scatter(
    output: torch.Tensor,
    pieces: list[torch.Tensor],
    op: Any = torch.distributed.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    longest = _length_of_uneven(pieces)
    if longest is None:
        return torch.distributed.reduce_scatter(output, pieces, op, group, async_op)
    assert not async_op, "Megatron waits for pieces of different lengths"
    padded = torch.empty_like(_padded(output, longest))
    torch.distributed.reduce_scatter(padded, [_padded(p, longest) for p in pieces], op, group)
    output.copy_(padded[: len(output)])


def _length_of_uneven(pieces: list[torch.Tensor]) -> int | None:
    """Return the longest piece's length, or None if all have the same."""
    lengths = {len(piece) for piece in pieces}
    return max(lengths) if len(lengths) > 1 else None


def _padded(piece: torch.Tensor, length: int) -> torch.Tensor:
    """Return a copy padded with zeros to `length`."""
    whole = piece.new_zeros(length, *piece.shape[1:])
    whole[: len(piece)] = piece
    return whole


def _make_torch() -> types.ModuleType:
    stand_in = forwarding_module("torch", torch)
    stand_in.__path__ = torch.__path__
    stand_in.__spec__ = torch.__spec__
    stand_in.cuda = _make_cuda()  # type: ignore[attr-defined]
    stand_in.distributed = _make_distributed()  # type: ignore[attr-defined]
    for name in _FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    return stand_in


def _called_by_megatron() -> bool:
    # Frame 0 is this function, 1 the replaced method, 2 its caller.
    name: str = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith(_PREFIX)


def _replace_shared_methods() -> None:
    tensor_cuda, module_cuda = torch.Tensor.cuda, torch.nn.Module.cuda
    tensor_type = torch.Tensor.type

    @functools.wraps(tensor_cuda)
    def cuda_of_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else tensor_cuda(self, *args, **kwargs)

    @functools.wraps(module_cuda)
    def cuda_of_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return self if _called_by_megatron() else module_cuda(self, *args, **kwargs)

    @functools.wraps(tensor_type)
    def type_of_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        type_name = tensor_type(self, *args, **kwargs)
        if args or kwargs or not _called_by_megatron():
            return type_name
        # The optimizers sort parameters by names such as "torch.cuda.FloatTensor".
        return type_name.replace("torch.", "torch.cuda.", 1)

    # The replacements take any arguments; torch declares specific ones.
    torch.Tensor.cuda = cuda_of_tensor  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = cuda_of_module  # type: ignore[assignment, method-assign]
    torch.Tensor.type = type_of_tensor  # type: ignore[assignment, method-assign]


class _MegatronLoader(importlib.abc.Loader):
    """A loader that runs a Megatron module, then rebinds its `torch` and the two submodules."""

    def __init__(self, loader: Any, stand_in: types.ModuleType) -> None:
        self._loader = loader
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        rebound = {
            id(torch): self._stand_in,
            id(torch.cuda): self._stand_in.cuda,
            id(torch.distributed): self._stand_in.distributed,
        }
        for name, value in list(vars(module).items()):
            if isinstance(value, types.ModuleType) and id(value) in rebound:
                setattr(module, name, rebound[id(value)])
        if module.__name__ == "megatron.core.tensor_parallel.random":
            self._use_cpu_rng(module)

    def _use_cpu_rng(self, module: types.ModuleType) -> None:
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
            if not hasattr(module, name):
                raise UsageError(
                    f"patch megatron.cpu_torch does not fit {module.__name__}, which has no {name}",
                    remedy=f"install megatron-core {OLDEST} to {NEWEST}, or train on a GPU",
                )

        # These two bypass torch.cuda and use torch._C and its generators directly.
        module._get_cuda_rng_state = _get_rng_state  # type: ignore[attr-defined]
        module._set_cuda_rng_state = _set_rng_state  # type: ignore[attr-defined]


class _MegatronFinder(importlib.abc.MetaPathFinder):
    def __init__(self, stand_in: types.ModuleType) -> None:
        self._stand_in = stand_in

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(_PREFIX):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _MegatronLoader(spec.loader, self._stand_in)
        return spec


def needed() -> bool:
    """Return whether CUDA is missing; the patch must not be applied on a machine with it."""
    return not torch.cuda.is_available()


def apply() -> None:
    """Install the import hook for later imports."""
    _replace_shared_methods()
    sys.meta_path.insert(0, _MegatronFinder(_make_torch()))


PATCH = Patch(
    "megatron.cpu_torch", "Megatron's modules see a torch whose cuda is the CPU", apply, needed
)
