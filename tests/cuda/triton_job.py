"""Runs vLLM's Triton kernels of a rollout on what was handed over, by Triton's interpreter.

    python -m tests.cuda.triton_job FOLDER '{"case": {"arch": "deepseek_v3", ...}, ...}'

Writes FOLDER/outputs: for each case the output of the last layer with experts, computed by vLLM's
own layer of its build for CUDA (the router, the experts' Triton kernel, the shared experts) after a
reload with the weights in FOLDER/<case>; what its sampler of model runner V2 makes of logits; and
what its indexers of sparse attention make of queries and keys.
What vLLM's compiled operators do between the kernels is computed by eager_operators.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.cuda import eager_operators, standins, vllm_model

standins.triton_interpreter()
vllm_model.pretend((9, 0))
eager_operators.register()

import torch  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from scripts.make_tiny_deepseek import hf_config  # noqa: E402
from tests.cuda.sampling_case import POSITIONS, SAMPLING, SEEDS, logits  # noqa: E402

Outputs = dict[str, torch.Tensor]
NUM_TOKENS = 24
NUM_PROCESSORS = 28  # each takes a part of a row; fewer than an H100 has, so that it takes seconds


# ----------------------------------------------------------------------------------- experts


def run_experts(case: dict[str, Any], folder: Path) -> Outputs:
    """`[t, h]` by what was changed after the reload; "input" is the layer's. The sum over ranks, as
    the fake process group leaves each rank with its own part."""
    config = hf_config(case.pop("arch"), "micro")
    weights = vllm_model.write_checkpoint(folder, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(NUM_TOKENS, config["hidden_size"], generator=generator).bfloat16()
    found = {"input": hidden.float()}
    for rank in range(case.get("tp_size", 1)):
        with vllm_model.build(folder, rank=rank, **case) as engine:
            needs = engine.learn_needs({n: (tuple(w.shape), w.dtype) for n, w in weights.items()})
            engine.reload(vllm_model.slices(weights, needs))
            for name, output in outputs_of_rank(engine, hidden).items():
                found[name] = found.get(name, 0) + output
    return found


def outputs_of_rank(engine: Any, hidden: torch.Tensor) -> Outputs:
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.workspace import current_workspace_manager

    layer = engine.model.model.layers[-1]
    block = layer.mlp if hasattr(layer, "mlp") else layer.block_sparse_moe
    experts = block.experts.routed_experts
    current_workspace_manager()._device = torch.device("cpu")
    found = {}
    with torch.inference_mode(), set_forward_context(None, engine._vllm_config):
        for name, change in CHANGES.items():
            kept = {key: weight.clone() for key, weight in experts.named_parameters()}
            change(experts.w13_weight, experts.w2_weight)
            found[name] = block(hidden.clone()).float()
            for key, weight in experts.named_parameters():
                weight.copy_(kept[key])
    return found


def swap_gate_and_up(w13: torch.Tensor, _: torch.Tensor) -> None:
    w13.copy_(w13.roll(w13.shape[1] // 2, dims=1))


def shift_experts(w13: torch.Tensor, w2: torch.Tensor) -> None:
    for weight in (w13, w2):
        weight.copy_(weight.roll(1, dims=0))


def double_one(_: torch.Tensor, w2: torch.Tensor) -> None:
    w2[0] *= 2


CHANGES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "none": lambda *_: None,
    "gate and up swapped": swap_gate_and_up,
    "experts shifted": shift_experts,
    "one expert doubled": double_one,
}


# ---------------------------------------------------------------------------------- sampling


def run_sampling(folder: Path) -> Outputs:
    """By the sampler of an engine of ours, in two orders of the requests."""
    vllm_model.write_checkpoint(folder, hf_config("qwen3", "micro"), seed=1)
    with vllm_model.build(folder, max_num_seqs=len(SAMPLING)) as engine, kernels_of_small_batches():
        sampler = engine._worker.model_runner.sampler
        first = sample(sampler, list(range(len(SAMPLING))))
        second = sample(sampler, list(reversed(range(len(SAMPLING)))))
    return {**first, **{f"{name}, reversed": value.flip(0) for name, value in second.items()}}


def sample(sampler: Any, order: list[int]) -> Outputs:
    """One step of the requests of `SAMPLING`, in this order."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    rows = logits()[order]
    sampler.sampling_states.vocab_size = rows.shape[1]
    for slot, number in enumerate(order):
        options = {**SAMPLING[number], "logprobs": 0}
        seed = None if options["temperature"] == 0 else SEEDS[number]
        sampler.add_request(slot, SamplingParams(seed=seed, **options))
    sampler.apply_staged_writes()
    slots = torch.arange(len(order), dtype=torch.int32)
    positions = torch.tensor([POSITIONS[number] for number in order])
    unused = torch.zeros_like(slots)
    sampled, processed = sampler.sample(
        *(rows, slots, slots, slots.numpy(), positions, unused, unused, positions.numpy() + 1),
        return_logprobs=True,
    )
    scores = compute_topk_scores(processed, 0, sampled)
    return {
        "tokens": sampled,
        "processed": processed,
        "logprobs": scores.logprobs[:, 0],
        "ranks": scores.selected_token_ranks,
    }


@contextmanager
def kernels_of_small_batches() -> Iterator[None]:
    """vLLM asks where logits are, and has kernels for few rows on CUDA alone."""
    import vllm.v1.sample.ops.topk_topp_sampler as sampler
    import vllm.v1.sample.ops.topk_topp_triton as kernels

    apply = kernels.apply_top_k_top_p_triton

    def on_cuda(*args: Any) -> torch.Tensor:
        with _OnCuda():
            return apply(*args)

    with (
        patch.object(sampler, "apply_top_k_top_p_triton", on_cuda),
        patch.object(kernels, "num_compute_units", lambda *_: NUM_PROCESSORS),
    ):
        yield


class _OnCuda(TorchFunctionMode):
    """Within it, tensors say that they are on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------- indexers of sparse attention


def run_indexer(*, interleaved: bool) -> Outputs:
    """Queries `[t, h, d]`, their weights `[t, h]` and keys `[t, d]` of one sample: as projections
    give them, and as the kernels of DeepSeek-V3.2's layers leave them for the scores, in FP8."""
    from vllm.models.deepseek_v32.common import kernels
    from vllm.platforms import current_platform

    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    num, num_heads, size, rotated = 2 * NUM_TOKENS, 8, 128, 64
    positions, rope = torch.arange(num), rotations(num, rotated)
    queries, keys = draw(num, num_heads, size).bfloat16(), draw(num, size).bfloat16()
    weights = draw(num, num_heads).bfloat16()
    norm, bias = 1 + 0.1 * draw(size), 0.1 * draw(size)
    cache = torch.zeros(1, num, size + 4, dtype=torch.uint8)  # the last four: a scale for each key
    normed = torch.empty(num, size)
    # Of the attention itself, which is not looked at.
    others = draw(num, size).bfloat16(), torch.ones(size), 1e-6
    heads = draw(num, 2, rotated).bfloat16()
    with patch.object(current_platform, "is_arch_support_pdl", lambda: False):
        kernels.fused_norm_rope(
            *(positions, *others, *others, heads[:, 0], rope),
            *(keys, norm, bias, 1e-6, rope, torch.zeros(num, 1, dtype=torch.int32)),
            slot_mapping=positions,
            indexer_k_cache=cache,
            index_rope_interleave=interleaved,
            index_k_out=normed,
        )
        in_float8, scaled_weights, _ = kernels.fused_q(
            *(positions, heads, rope, queries, rope, heads, torch.ones(1), weights),
            *(size**-0.5, num_heads**-0.5),
            index_rope_interleave=interleaved,
            quantize_mqa=False,
        )
    stored = cache.flatten()
    keys_in_float8 = stored[: num * size].view(torch.float8_e4m3fn).view(num, size).float()
    return {
        "projected": queries.float(),
        "weights": weights.float(),
        "rotations": rope,
        "queries": in_float8.float(),
        "scaled weights": scaled_weights,
        "normed": normed,
        "keys": keys_in_float8 * stored[num * size :].view(torch.float32)[:, None],
    }


def rotations(num: int, size: int) -> torch.Tensor:
    """Cosines and sines `[positions, size]`."""
    angles = torch.arange(num)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    outputs = {name: run_experts(case, folder / name) for name, case in cases.items()}
    outputs["sampling"] = run_sampling(folder / "sampling")
    outputs["indexer"] = run_indexer(interleaved=False)
    outputs["indexer, interleaved"] = run_indexer(interleaved=True)
    torch.save(outputs, folder / "outputs")
    print(json.dumps({"cases": list(outputs)}))


if __name__ == "__main__":
    main()
