"""vLLM's CUDA model of one rank of any layout, on tensors of the CPU or without any.

    vllm_model.pretend(capability=(9, 0))                    # before vllm is imported
    folder = vllm_model.write_checkpoint(tmp_path, config_json, seed=1)
    with vllm_model.build(folder, tp_size=8, dp_size=4, expert_parallel=True, rank=5) as engine:
        needs = engine.learn_needs(metadata)
        engine.reload(...)

The engine is the tests' `VLLMModelOnly`: our own configuration, vLLM's executor, worker and
model runner, its loader and what follows loading, all of the CUDA build. Stand-ins are the device
(see `standins`), torch's fake process group for a world of which only one rank exists, and, under
vLLM's own allocator of the sleep mode, the driver's mapping of memory: what is unmapped is
overwritten, and comes back so.

With `large_on_meta` everything of more than 64 Ki elements is a meta tensor: DeepSeek-V3 takes
under 1 GB, and needs can be learned, but nothing is loaded.

Out of reach: kernels, the memory that profiling finds, the KV cache, CUDA graphs.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from mcore_rl.hybrid_engine.plan.buckets import cut
from mcore_rl.hybrid_engine.vllm.sliced_tensor import SlicedTensor
from mcore_rl.megatron.float8 import quantised_weights
from mcore_rl.model.boxes import extent
from mcore_rl.model.config_json import model_shape
from mcore_rl.model.families import FAMILIES
from mcore_rl.model.float8_blocks import Float8Weights
from mcore_rl.model.tensors import embedding_specs, head_specs, layer_specs
from tests.allocations import Allocations
from tests.cuda import standins

Metadata = dict[str, tuple[tuple[int, ...], torch.dtype]]
_LARGE_ELEMENTS = 1 << 16


def pretend(capability: tuple[int, int]) -> None:
    """Let vLLM, which must not be imported yet, start its worker here as on such a device."""
    standins.vllm_libraries()
    standins.cuda_device(capability)
    from vllm.platforms import current_platform

    type(current_platform).dispatch_key = "CPU"  # of operators that vLLM registers in Python
    # An engine freezes the imported modules at its start. A worker that shuts down would unfreeze
    # them before it collects garbage many times, which took two thirds of a build's time.
    gc.unfreeze = lambda: None
    # "FlashInfer can be used" is asked by its compiled kernels, its functions are Python.
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    os.environ["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
    os.environ["VLLM_DISABLE_PYNCCL"] = "1"  # whose library is there in the full tier
    if find_spec("cuda") is None:  # NVIDIA's bindings, by which FlashInfer's ranks talk
        spec = ModuleSpec("flashinfer.comm", None, is_package=True)
        sys.modules[spec.name] = module_from_spec(spec)
        # And by which the ranks of MiniMax-M2's norms do; as between devices that cannot, without.
        fused: Any = ModuleType("vllm.model_executor.layers.minimax_rms_norm.lamport_workspace")
        fused.get_allreduce_workspace = standins.needs_gpu("get_allreduce_workspace")
        sys.modules[fused.__name__] = fused
    if find_spec("cutlass") is None:  # in whose language vLLM writes kernels for Blackwell
        cutedsl: Any = ModuleType("vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl")
        cutedsl.is_fused_q_cutedsl_supported = lambda *_, **__: capability >= (10, 0)
        cutedsl.fused_q_cutedsl = standins.needs_gpu("fused_q_cutedsl")
        sys.modules[cutedsl.__name__] = cutedsl
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_, **__: None
    torch.cuda.manual_seed = torch.cuda.manual_seed_all = lambda *_: None
    torch.cuda.memory.get_allocator_backend = lambda: "none"
    memory = {
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_stats": {},
        "get_memory_info": (80 * standins.GIB, 80 * standins.GIB),
        "device_count": 8,
        "current_device_index": 0,
        "reset_peak_memory_stats": None,
    }
    for question, answer in memory.items():
        setattr(torch.accelerator, question, lambda *_, answer=answer: answer)
    import vllm.distributed.device_communicators.custom_all_reduce as reduce
    import vllm.distributed.device_communicators.shm_broadcast as shm
    import vllm.distributed.parallel_state as groups
    import vllm.v1.worker.gpu.buffer_utils as buffers

    groups.in_the_same_node_as = lambda group, source_rank=0: [True] * dist.get_world_size(group)
    groups._ENABLE_CUSTOM_ALL_REDUCE = reduce.custom_ar = False
    shm.MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    buffers.get_accelerator_view_from_cpu_tensor = lambda tensor: tensor  # of pinned memory
    standins.deep_gemm(capability)
    _map_memory()


# ------------------------------------------------------------------------- the sleep mode's memory


class _Runtime:
    """The part of libcudart that vLLM's allocator uses."""

    def cudaMemcpy(self, to: int, source: int, size: int) -> None:
        ctypes.memmove(to, source, size)


def _map_memory() -> None:
    """Let vLLM's allocator map and unmap memory that is always there."""
    import vllm.distributed.device_communicators.cuda_wrapper as wrapper

    def unmap(_: int, size: int, address: int, __: int) -> None:
        ctypes.memset(address, 0xFF, size)

    @contextmanager
    def pool(allocated: Any, freed: Any) -> Iterator[tuple[Any, Any]]:
        kept = []  # so that no address comes twice

        def made(storage: torch.UntypedStorage) -> None:
            kept.append(storage)
            allocated((0, storage.nbytes(), storage.data_ptr(), 0))

        with Allocations(made):
            yield SimpleNamespace(snapshot=lambda: []), kept

    wrapper.CudaRTLibrary = _Runtime
    library: Any = import_module("vllm.cumem_allocator")
    library.init_module = None
    library.python_create_and_map = lambda *_: None
    library.python_unmap_and_release = unmap
    cumem: Any = import_module("vllm.device_allocator.cumem")
    cumem.use_memory_pool_with_allocator = pool
    cumem.current_alloc_conf = lambda: ""


# -------------------------------------------------------------------------------- the model itself


class _OnCpu(TorchFunctionMode):
    """What is asked for on CUDA comes to be on the CPU, or, with `large_on_meta`, on meta."""

    def __init__(self, large_on_meta: bool) -> None:
        super().__init__()
        self._large_on_meta = large_on_meta

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)
        if isinstance(kwargs.get("device"), int):  # a CUDA device
            kwargs["device"] = "cpu"
        args = tuple(map(_on_cpu, args)) if func is torch.Tensor.to else args
        factories = (torch.empty, torch.zeros, torch.ones)
        if self._large_on_meta and func in factories and not _is_fake():
            size = args[0] if args and isinstance(args[0], Sequence) else args
            if math.prod(size or kwargs.get("size", ())) > _LARGE_ELEMENTS:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _is_fake() -> bool:
    """Whether a FakeTensorMode is active, in which no tensor takes memory."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


@contextmanager
def build(
    model_dir: Path,
    *,
    tp_size: int = 1,
    dp_size: int = 1,
    expert_parallel: bool = False,
    rank: int = 0,
    moe_backend: str | None = None,
    large_on_meta: bool = False,
    **options: Any,
) -> Iterator[Any]:
    """The tests' `VLLMModelOnly` of `rank` in a world of one engine, closed afterwards.

    `options` are those of its `EngineConfig`; `load_format="auto"` lets vLLM load the folder.
    One at a time; within, everything that is asked for on CUDA is made on the CPU.
    """
    from vllm.model_executor.model_loader import base_loader, dummy_loader
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from mcore_rl.hybrid_engine.vllm.startup import EngineConfig, engine_arguments
    from tests import model_only

    config = EngineConfig(
        model_dir=model_dir,
        tp_size=tp_size,
        dp_size=dp_size,
        enable_expert_parallel=expert_parallel,
        **{"max_model_len": 1024, "max_num_seqs": 8, **options},
    )
    given = {} if moe_backend is None else {"moe_backend": moe_backend}
    # Nothing is drawn at random where there is no memory to hold it.
    draw: Any = (
        (lambda *_, **__: None) if large_on_meta else dummy_loader.initialize_single_dummy_weight
    )
    # FP8 blocks on meta cannot be processed with their scales, which are small enough to be real.
    is_unreal = large_on_meta and config.float8 is not None
    unprocessed: Any = (lambda *_: None) if is_unreal else base_loader.process_weights_after_loading
    with (
        _fake_world(rank, tp_size * dp_size),
        patch.object(base_loader, "process_weights_after_loading", unprocessed),
        patch.object(model_only, "engine_arguments", lambda c: {**engine_arguments(c), **given}),
        patch.object(dummy_loader, "initialize_single_dummy_weight", draw),
        _OnCpu(large_on_meta),
    ):
        engine = model_only.VLLMModelOnly(config)
        for module in engine.model.modules():
            # Where vLLM believes it to be, and a reload in place expects it.
            get_layerwise_info(module).restore_device = torch.device("cpu")
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """One rank of a world whose collectives return at once, with what is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.device_allocator.cumem import CuMemAllocator
    from vllm.distributed import parallel_state as groups

    place = {"RANK": str(rank), "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    os.environ.update(place)
    new_group = dist.new_group
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    dist.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    try:
        yield
    finally:
        groups.destroy_model_parallel()
        groups._WORLD = CuMemAllocator.instance = None
        dist.new_group = new_group
        dist.destroy_process_group()
        for name in place:
            os.environ.pop(name, None)


# --------------------------------------------------------------------------------- its checkpoint


def write_config(folder: Path, config_json: Mapping[str, Any]) -> Path:
    """A folder with config.json alone, for which needs can be learned; without quantisation."""
    folder.mkdir(parents=True, exist_ok=True)
    # Without architectures, as our copies of published files are, vLLM makes a model of embeddings.
    architecture = FAMILIES[config_json["model_type"]].class_name
    kept = {"architectures": [architecture], **config_json}
    kept.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def metadata_of(config_json: Mapping[str, Any]) -> Metadata:
    """Every tensor of the checkpoint, under the names of Hugging Face, as the planner has them."""
    shape = model_shape(config_json, Path("config.json"), for_planning=True)
    found: Metadata = {}

    def add(prefix: str, specs: Any) -> None:
        for spec in specs:
            for expert in range(max(1, spec.num_experts)):
                name = prefix + spec.name.format(expert=expert)
                found[name] = (spec.shape, getattr(torch, spec.dtype))

    add("", embedding_specs(shape))
    for layer, kind in enumerate(shape.layer_kinds):
        add(f"model.layers.{layer}.", layer_specs(shape, kind))
    add("", head_specs(shape))
    return found


def write_checkpoint(
    folder: Path,
    config_json: Mapping[str, Any],
    *,
    seed: int,
    float8: Float8Weights | None = None,
) -> dict[str, torch.Tensor]:
    """The folder of a checkpoint with random weights, which are returned; where a family stacks its
    experts, by expert, while the folder has them stacked. Weights `float8` are in FP8 blocks."""
    write_config(folder, config_json)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (0.05 * torch.randn(shape, generator=generator)).to(dtype)
        for name, (shape, dtype) in metadata_of(config_json).items()
    }
    if float8 is not None:
        weights = dict(quantised_weights(weights.items(), float8))
    stored = weights
    if FAMILIES[config_json["model_type"]].has_mxfp4:
        stored = stacked(weights, config_json["num_local_experts"])
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def slices(
    weights: Mapping[str, torch.Tensor], needs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank needs, each box of it in two items, as a transfer in buckets brings them."""
    for name, boxes in needs.items():
        whole = weights[name]
        for box in boxes:
            size = torch.Size(extent(box)).numel()
            for part in cut(box, -(-size // 2)):
                data = whole[tuple(slice(*ends) for ends in part)].clone()
                yield name, SlicedTensor(name, whole.shape, whole.dtype, [(part, data)])


def stacked(weights: Mapping[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """The same with the experts of a layer together, as gpt-oss is published."""
    found = {name: weight for name, weight in weights.items() if ".experts." not in name}
    for first in [name for name in weights if name.endswith(".experts.0.w1.weight")]:
        prefix = first.removesuffix("0.w1.weight")
        for kind, ending in (("weight", ""), ("bias", "_bias")):
            w1, w2, w3 = (
                torch.stack([weights[f"{prefix}{e}.{part}.{kind}"] for e in range(num_experts)])
                for part in ("w1", "w2", "w3")
            )
            gate_up = torch.stack((w1, w3), dim=2).flatten(1, 2)  # row by row in turn
            for name, whole in (("gate_up_proj", gate_up), ("down_proj", w2)):
                whole = whole if ending else whole.mT.contiguous()
                found[f"{prefix}{name}{ending}"] = whole
    return found
