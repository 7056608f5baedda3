"""Operators of vLLM's libraries for CUDA, computed by torch on tensors of the CPU.

    eager_operators.register()      # after the libraries are loaded: they bring the schemas

Each is written after vLLM's sources, for what a job runs between vLLM's Triton kernels. An operator
that is not here still raises NotImplementedError.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

_libraries: list[torch.library.Library] = []  # what a library registers ends with it


def register() -> None:
    for name in ("_C", "_moe_C"):
        importlib.import_module(f"vllm.{name}_stable_libtorch")
        _libraries.append(torch.library.Library(name, "IMPL", "CPU"))
    activations, experts = _libraries[-2:]
    operators: dict[torch.library.Library, tuple[Any, ...]] = {
        activations: (silu_and_mul, swigluoai_and_mul),
        experts: (grouped_topk, moe_align_block_size, moe_sum, topk_sigmoid, topk_softmax),
    }
    for library, functions in operators.items():
        for function in functions:
            library.impl(function.__name__, function)
    _libraries.append(torch.library.Library("aten", "IMPL", "CPU"))
    _libraries[-1].impl("mm.dtype", mm_with_dtype)  # cuBLAS's, for routers


def mm_with_dtype(left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """A product of bfloat16 with sums and result in float32."""
    return left.to(out_dtype) @ right.to(out_dtype)


def silu_and_mul(result: torch.Tensor, input: torch.Tensor) -> None:
    """The first half of the last dimension is the gate."""
    gate, up = input.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate.float()).to(up.dtype) * up)


def swigluoai_and_mul(
    result: torch.Tensor, input: torch.Tensor, alpha: float = 1.702, limit: float = 7.0
) -> None:
    """Gate and up in turn, as gpt-oss has them."""
    gate, up = input[..., ::2].float().clamp(max=limit), input[..., 1::2].float()
    result.copy_((up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate))


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    assert bias is None and is_padding is None
    weights, experts = gating_output.float().softmax(-1).topk(topk_indices.shape[1])
    topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
    topk_indices.copy_(experts)


def topk_sigmoid(
    topk_weights: torch.Tensor,
    topk_indices: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    routed_scaling_factor: float,
    is_padding: torch.Tensor | None,
) -> None:
    """Chosen with the bias, weighted without it."""
    assert is_padding is None
    scores = gating_output.float().sigmoid()
    experts = (scores if bias is None else scores + bias).topk(topk_indices.shape[1]).indices
    weights = scores.gather(1, experts)
    weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
    topk_weights.copy_(weights * routed_scaling_factor)
    topk_indices.copy_(experts)


def grouped_topk(
    scores: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: torch.Tensor,
    scoring_func: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One group, as in Kimi-K2 and Moonlight: chosen with the bias, weighted without it."""
    assert (n_group, topk_group) == (1, 1)
    scores = scores.float().sigmoid() if scoring_func == 1 else scores.float()
    experts = (scores + bias).topk(topk).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routed_scaling_factor, experts.int()


def moe_align_block_size(
    topk_ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: torch.Tensor,
    experts_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    maybe_expert_map: torch.Tensor | None,
    scatter_idx: torch.Tensor | None = None,
) -> None:
    """Rows (token, choice) by expert; each expert's are filled up to whole blocks by a row that
    does not exist. Experts that the map has at -1 get no blocks."""
    assert scatter_idx is None
    rows, blocks = [], []
    for expert in range(num_experts):
        local = expert if maybe_expert_map is None else int(maybe_expert_map[expert])
        mine = (topk_ids.flatten() == expert).nonzero().flatten().tolist() if local >= 0 else []
        mine += [topk_ids.numel()] * (-len(mine) % block_size)
        rows += mine
        blocks += [local] * (len(mine) // block_size)
    sorted_token_ids.fill_(topk_ids.numel())
    sorted_token_ids[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    experts_ids.fill_(-1)
    experts_ids[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    num_tokens_post_pad.fill_(len(rows))


def moe_sum(
    input: torch.Tensor,
    output: torch.Tensor,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
) -> None:
    """The sum over a token's choices; with a map, over those of this rank's experts."""
    if topk_ids is not None and expert_map is not None:
        here = expert_map[topk_ids.long()] >= 0
        input = torch.where(here.unsqueeze(-1), input, 0)
    output.copy_(input.float().sum(1))
