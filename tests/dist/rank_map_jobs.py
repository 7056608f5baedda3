"""What four ranks do for the tests of rank maps and of engines that hold a model only."""

from __future__ import annotations

import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.startup import require_placement
from mcore_rl.patches.registry import applied_patches
from mcore_rl.patches.vllm.rank_map import ranks_in_given_order
from mcore_rl.verify import stored_digests
from tests.dist.vllm_engine_worker import (
    SEQUENCES,
    as_json,
    error_of,
    metadata_of,
    prompts,
    sampling,
    slices,
    weights_of,
)
from tests.engine_place import EnginePlace
from tests.engine_samples import sample_responses, small_engine
from tests.model_only import VLLMModelOnly


def place(engine: VLLMEngine) -> dict[str, Any]:
    return {**asdict(EnginePlace.of(engine)), "tp_group": engine._groups.get_tp_group().ranks}


def generate(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """An engine that generates: where it sits, what it stores and needs, and what it says."""
    weights, _ = weights_of(checkpoint)
    engine = VLLMEngine(small_engine(checkpoint, **changes))
    engine.seed_sampling(100 + EnginePlace.of(engine).engine_index)
    result = {
        "place": place(engine),
        "stored": stored_digests(engine),
        "rollouts": as_json(sample_responses(engine, prompts(), **sampling())),
        "scores": [scores.tolist() for scores in engine.prompt_log_probs(SEQUENCES)],
        "needs": engine.learn_needs(metadata_of(weights)),
    }
    engine.close()
    return result


def hold(checkpoint: Path, **changes: Any) -> dict[str, Any]:
    """A model only: load from disk, learn, load zeros, load slices; what is stored after each."""
    weights, _ = weights_of(checkpoint)
    engine = VLLMModelOnly(small_engine(checkpoint, **changes))
    stored = stored_digests(engine)
    needs = engine.learn_needs(metadata_of(weights))
    # Each rank is given whole tensors, of experts too that only another rank of its engine holds.
    engine.reload((name, torch.zeros_like(t)) for name, t in weights.items())
    zeros = stored_digests(engine)
    engine.reload(slices(weights, needs).items())
    after = stored_digests(engine)
    model = weakref.ref(engine.model)
    result = {
        "place": place(engine),
        "stored": stored,
        "needs": needs,
        "same_as_zeros": sorted(name for name in stored if zeros[name] == stored[name]),
        "changed_by_slices": sorted(name for name in stored if after[name] != stored[name]),
    }
    engine.close()
    return {**result, "freed": model() is None}


def refusals(checkpoint: Path) -> dict[str, str]:
    """What is raised by placements that cannot be, and by an engine that cannot generate."""

    def placed(**changes: Any) -> str:
        return error_of(lambda: require_placement(small_engine(checkpoint, **changes)))

    errors = {
        "tp": placed(tp_size=3),
        "dp": placed(tp_size=2, dp_size=4),
        "twice": placed(rank_map=(0, 1, 1, 3)),
        "short": placed(rank_map=(1, 0)),
        "nodes": placed(tp_size=2, rank_map=(0, 2, 1, 3), ranks_per_node=2),
        "nodes kept": placed(tp_size=2, rank_map=(1, 0, 3, 2), ranks_per_node=2),
        "cannot run": error_of(
            lambda: VLLMEngine(
                small_engine(checkpoint, tp_size=2, dp_size=2, enable_expert_parallel=True)
            )
        ),
    }
    engine = VLLMModelOnly(small_engine(checkpoint, "dummy", tp_size=2))
    engine.sleep()
    errors["sleep twice"] = error_of(engine.sleep)
    errors["reload asleep"] = error_of(lambda: engine.reload(weights_of(checkpoint)[0].items()))
    engine.wake_weights()
    errors["wake twice"] = error_of(engine.wake_weights)
    engine.wake_kv_cache()
    errors["reload"] = error_of(lambda: engine.reload(weights_of(checkpoint)[0].items()))
    engine.close()
    engine.close()
    return errors


def order_of_groups() -> dict[str, Any]:
    """A group of descending ranks, made in both ways, and what it gathers."""
    found = {}
    for by_argument in (True, False):
        with ranks_in_given_order(by_argument=by_argument):
            group = dist.new_group([2, 0, 3])
        outside = dist.new_group([2, 0, 3])
        if dist.get_rank() == 1:
            continue
        gathered = torch.empty(3, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([dist.get_rank()]), group=group)
        found[str(by_argument)] = [
            gathered.tolist(),
            dist.get_process_group_ranks(group),
            dist.get_process_group_ranks(outside),
        ]
    return found


def graph_handles() -> dict[str, Any]:
    """The IPC handles that vLLM's own all-reduce registers on this rank after it has captured
    graphs, by the order of the group's ranks; handles are the numbers of their ranks."""
    from vllm.distributed.device_communicators import custom_all_reduce

    rank, found = dist.get_rank(), {}
    for ranks in ([0, 2, 3], [2, 0, 3]):
        with ranks_in_given_order():
            group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        ops = Mock()  # of CUDA alone
        ops.get_graph_buffer_ipc_meta.return_value = [rank], [0]
        communicator: Any = object.__new__(custom_all_reduce.CustomAllreduce)
        communicator.group, communicator.rank = group, dist.get_rank(group)
        communicator._ptr, communicator.disabled = 0, True
        with patch.object(custom_all_reduce, "ops", ops):
            communicator.register_graph_buffers()
        (_, handles, _), _ = ops.register_graph_buffers.call_args
        found[str(ranks)] = handles
    return found


def run(checkpoints: dict[str, str]) -> dict[str, Any]:
    """Everything, on this rank. `checkpoints` maps architectures to directories."""
    paths = {name: Path(path) for name, path in checkpoints.items()}
    dist.init_process_group("gloo")
    v3, qwen3_moe, qwen3 = paths["deepseek_v3"], paths["qwen3_moe"], paths["qwen3"]
    tp2 = dict(tp_size=2, enable_expert_parallel=True)
    result: dict[str, Any] = {"order": order_of_groups(), "refusals": refusals(v3)}
    result["generate"] = {"identity": generate(v3, **tp2)}
    result["patched"] = ["vllm.rank_map" in applied_patches()]
    result["generate"]["mapped"] = generate(v3, **tp2, rank_map=(2, 0, 1, 3))
    result["patched"].append("vllm.rank_map" in applied_patches())
    result["generate"]["tp1"] = generate(v3, rank_map=(1, 3, 0, 2))
    result["hold"] = {
        "v3 TP2 EP2": hold(v3, **tp2),
        "v3 TP2 EP2 mapped": hold(v3, **tp2, rank_map=(2, 0, 1, 3)),
        "v3 TP2 x DP2 EP4": hold(v3, **tp2, dp_size=2),
        "v3 TP2 x DP2 EP4 mapped": hold(v3, **tp2, dp_size=2, rank_map=(3, 1, 2, 0)),
        "v3 TP1 x DP2 EP2": hold(v3, dp_size=2, enable_expert_parallel=True),
        "v3 TP4": hold(v3, tp_size=4),
        "v3 TP4 mapped": hold(v3, tp_size=4, rank_map=(0, 2, 1, 3)),
        "qwen3_moe TP1 x DP4 EP4": hold(qwen3_moe, dp_size=4, enable_expert_parallel=True),
        "qwen3 TP2": hold(qwen3, tp_size=2),
        "qwen3 TP2 mapped": hold(qwen3, tp_size=2, rank_map=(0, 2, 1, 3)),
    }
    result["handles"] = graph_handles()
    return result
