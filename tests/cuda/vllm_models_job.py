"""Reloads vLLM's CUDA models in place, and compares all that they hold with vLLM's own load.

    python -m tests.cuda.vllm_models_job 9.0 '{"case": {"arch": "deepseek_v3", ...}, ...}'

For each case one engine is loaded by vLLM from a checkpoint, another starts with dummy weights as a
run does and is reloaded from slices of that checkpoint, of a second one and of the first again; it
sleeps before each, so that what no reload writes comes back as garbage.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

from tests.cuda import vllm_model

major, minor = map(int, sys.argv[1].split("."))
vllm_model.pretend((major, minor))

import torch  # noqa: E402

from mcore_rl.hybrid_engine.vllm.live_layers import _Layer  # noqa: E402
from mcore_rl.megatron.float8 import dequantise, quantise_whole  # noqa: E402
from mcore_rl.model.boxes import full_box  # noqa: E402
from mcore_rl.model.config_json import model_shape, read_model_shape  # noqa: E402
from mcore_rl.model.float8_blocks import Float8Weights, float8_weights  # noqa: E402
from mcore_rl.model.layout import RolloutLayout  # noqa: E402
from mcore_rl.moe.routing import RoutedLayers  # noqa: E402
from scripts.make_tiny_deepseek import hf_config  # noqa: E402
from tests.cuda.reachable import Place, reachable  # noqa: E402
from tests.engine_place import EnginePlace  # noqa: E402

Weights = Mapping[str, torch.Tensor]
# Written by a forward pass of sparse attention before it is read; made by torch.empty.
_SCRATCH = ("topk_indices_buffer", ".physical_topk_indices", ".valid_topk_counts")


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = hf_config(
        case.pop("arch"),
        case.pop("size", "micro"),
        tie_word_embeddings=case.pop("tied", False),
    ) | case.pop("fields", {})
    if case.get("float8"):
        case["float8"] = in_float8(config, case)
    checkpoints = [folder / "first", folder / "second"]
    first, second = (
        vllm_model.write_checkpoint(path, config, seed=seed, float8=case.get("float8"))
        for seed, path in enumerate(checkpoints)
    )
    with vllm_model.build(checkpoints[0], load_format="auto", **case) as engine:
        expected = {path: digest(tensor) for path, tensor in reachable(engine.model).items()}
    shape = read_model_shape(checkpoints[0])
    routed = None
    if shape.experts is not None:
        routed = RoutedLayers(shape.moe_layers, shape.experts.topk, shape.experts.num_experts)
    with vllm_model.build(checkpoints[0], routed_layers=routed, **case) as engine:
        found = reloaded(engine, expected, first, second)
        found["quantised_once"] = case.get("float8") is None or quantised_once(engine)
        return {**chosen(engine), "settings": settings(engine), **found}


def in_float8(config: Mapping[str, Any], case: Mapping[str, Any]) -> Float8Weights:
    """The weights that the engine of `case` holds in FP8 blocks."""
    tp_size, dp_size = case.get("tp_size", 1), case.get("dp_size", 1)
    layout = RolloutLayout(
        tp_size * dp_size, tp_size, bool(case.get("expert_parallel")), dp_size=dp_size
    )
    return float8_weights(model_shape(config, Path("config.json"), for_planning=True), layout)


def quantised_once(engine: Any) -> bool:
    """Whether weights quantised for `engine` keep their values where vLLM rounds scales."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    if not is_deep_gemm_e8m0_used():
        return True
    values = torch.randn(300, 260, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight, scales = quantise_whole(values, powers_of_two=engine.float8.powers_of_two)
    box = full_box(tuple(values.shape))
    before = dequantise(weight, scales, box)
    requant_weight_ue8m0_inplace(weight, scales)
    return torch.equal(dequantise(weight, scales, box), before)


def reloaded(
    engine: Any, expected: Mapping[str, str], first: Weights, second: Weights
) -> dict[str, Any]:
    """What is another after reloads than after vLLM's own load, by path from the model."""
    at_start = reachable(engine.model)
    places = {path: Place.of(tensor) for path, tensor in at_start.items()}
    needs = engine.learn_needs({n: (tuple(w.shape), w.dtype) for n, w in first.items()})
    moved: set[str] = set()
    replaced: set[str] = set()
    differing = []
    copies: list[Any] = []
    for weights in (first, second, first):
        engine._worker.sleep(level=2)
        engine._worker.wake_up(["weights"])
        with patch.object(_Layer, "_new_target", noting(copies)):
            engine.reload(vllm_model.slices(weights, needs))
        now = reachable(engine.model)
        moved |= {p for p in places.keys() | now.keys() if place(now, p) != places.get(p)}
        replaced |= {path for path in now if now[path] is not at_start.get(path)}
        found = {path: digest(tensor) for path, tensor in now.items()}
        differing.append(
            sorted(p for p in expected if expected[p] != found.get(p) and not p.endswith(_SCRATCH))
        )
    return {
        "tensors": len(places),
        "loaded_beside_the_model": copies,
        "only_reloaded": sorted(places.keys() - expected.keys()),
        "moved": sorted(path for path in moved if not on_host(path)),
        "replaced": sorted(path for path in replaced if not on_host(path)),
        "differing": differing[0],
        "of_other_weights": len(differing[1]),
        "differing_at_last": differing[2],
    }


def noting(copies: list[str]) -> Any:
    """`_Layer._new_target`, by which a reload takes memory of its own, telling of its calls."""
    make = _Layer._new_target

    def new_target(layer: _Layer, key: str) -> torch.Tensor:
        copies.append(f"{layer.name}.{key}")
        return make(layer, key)

    return new_target


def chosen(engine: Any) -> dict[str, Any]:
    """Which kernels vLLM has chosen."""
    experts, attention, linear = set(), set(), set()
    for module in engine.model.modules():
        method: Any = getattr(module, "quant_method", None)
        backend = getattr(method, "unquantized_backend", getattr(method, "fp8_backend", None))
        if backend is not None:
            experts.add(f"{backend.name} {method.experts_cls.__name__}")
        if hasattr(method, "fp8_linear"):
            linear.add(type(method.fp8_linear).__name__)
        if hasattr(module, "impl"):
            attention.add(type(module.impl).__name__)
    return {
        "experts": sorted(experts),
        "attention": sorted(attention),
        "float8_linear": sorted(linear),
    }


def settings(engine: Any) -> dict[str, Any]:
    """What a run on a GPU is started with, as vLLM has resolved it."""
    config, place = engine._vllm_config, EnginePlace.of(engine)
    runner = engine._worker.model_runner
    return {
        "async_scheduling": config.scheduler_config.async_scheduling,
        "runner": type(runner).__module__,
        "logprobs_mode": [config.model_config.logprobs_mode, runner.model_config.logprobs_mode],
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "sleep_mode": config.model_config.enable_sleep_mode,
        "cudagraph_mode": config.compilation_config.cudagraph_mode.name,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "expert_parallel": config.parallel_config.enable_expert_parallel,
        "load_balancing": config.parallel_config.enable_eplb,
        "launcher": config.parallel_config.distributed_executor_backend,
        "ep_size": place.ep_size,
        "ep_rank": place.ep_rank,
        "collectives_of_an_idle_step": collectives_of_an_idle_step(runner),
        "reports_experts": config.aux_output_config.enabled,
        "cannot_report": cannot_report(engine) if config.aux_output_config.enabled else None,
    }


def cannot_report(engine: Any) -> str | None:
    """Why vLLM cannot tell which experts its kernels have chosen."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    try:
        bind_routed_experts_capturer(engine.model, Mock())
    except ValueError as error:
        return str(error)
    return None


def collectives_of_an_idle_step(runner: Any) -> int:
    """How many all-reduces a data-parallel rank takes part in when it has nothing to run."""
    from vllm.v1.core.sched.output import SchedulerOutput

    if not hasattr(runner, "block_tables"):
        runner.block_tables = Mock()  # made with the KV cache
    with patch.object(torch.distributed, "all_reduce") as all_reduce:
        runner.execute_model(SchedulerOutput.make_empty())
    return all_reduce.call_count


def on_host(path: str) -> bool:
    """Scales that vLLM makes anew whenever it processes weights, for code on the host to read."""
    return path.endswith(("_k_scale_cpu", "_v_scale_cpu"))


def place(tensors: Mapping[str, torch.Tensor], path: str) -> Place | None:
    return Place.of(tensors[path]) if path in tensors else None


def digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().data, digest_size=16).hexdigest()


found = {}
for name, case in json.loads(sys.argv[2]).items():
    with tempfile.TemporaryDirectory() as folder:
        try:
            found[name] = run(case, Path(folder))
        except Exception as error:
            if "--raise" in sys.argv:
                raise
            found[name] = {"error": f"{type(error).__name__}: {error}"}
print(json.dumps(found))
