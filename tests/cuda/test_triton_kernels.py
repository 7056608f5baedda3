"""vLLM's Triton kernels for CUDA compute from handed-over weights what the model's authors wrote.

Triton's interpreter runs them, on the CPU, in a model that was reloaded as a run does it. Experts
are compared with the layer of transformers on the same checkpoint; sampled tokens, the kept part of
the vocabulary and log-probs with the references below; the choices of sparse attention's indexers
with what `mismatch/indexer_replaced` counts.

Out of reach here: the code that Triton compiles from these kernels, and FlashInfer's experts.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from mcore_rl.megatron import adapter, sparse_attention  # noqa: F401  (it applies patches)
from tests.cuda.sampling_case import POSITIONS, SAMPLING, SEEDS, VOCAB_SIZE, logits
from tests.cuda.stack import Stack

from megatron.core.transformer.experimental_attention_variant import dsa  # isort: skip

EP2 = dict(tp_size=2, expert_parallel=True)
EXPERTS = {
    "deepseek_v3": dict(arch="deepseek_v3", **EP2),
    "deepseek_v3, experts split": dict(arch="deepseek_v3", tp_size=2),
    "moonlight": dict(arch="moonlight"),  # its weights of experts are scaled
    "qwen3_moe": dict(arch="qwen3_moe", **EP2),
    "qwen2_moe": dict(arch="qwen2_moe", **EP2),
    "olmoe": dict(arch="olmoe", **EP2),
    "mixtral": dict(arch="mixtral", **EP2),
    "glm4_moe": dict(arch="glm4_moe", **EP2),
    "minimax_m2": dict(arch="minimax_m2", **EP2),
    "gpt_oss": dict(arch="gpt_oss", **EP2),  # gate and up alternate
    "deepseek_v2_large": dict(arch="deepseek_v2_large", **EP2),  # experts in groups
}
# Of the largest output: up to 0.011 was seen, and 0.3 or more after the smallest change. Weights
# and activations are bfloat16; transformers computes in float32 here.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def folder(cuda_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("triton")
    cuda_stack.run("triton_job", str(folder), json.dumps(EXPERTS), timeout=600)
    return folder


@pytest.fixture(scope="module")
def outputs(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return torch.load(folder / "outputs")


# ----------------------------------------------------------------------------------- experts


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_compute_what_transformers_computes(
    folder: Path, outputs: dict[str, Any], case: str
) -> None:
    found = outputs[case]
    model = AutoModelForCausalLM.from_pretrained(folder / case, dtype=torch.float32)
    with torch.no_grad():
        expected = model.model.layers[-1].mlp(found.pop("input").unsqueeze(0))
    expected = (expected[0] if isinstance(expected, tuple) else expected).squeeze(0)
    error = {
        name: ((output - expected).abs().max() / expected.abs().max()).item()
        for name, output in found.items()
    }
    assert error.pop("none") < TOLERANCE
    assert len(error) == 3
    for change, size in error.items():
        assert size > 5 * TOLERANCE, f"{change} would not be seen"


# ---------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("number", range(len(SAMPLING)))
def test_sampler_draws_by_the_seed_from_the_part_that_is_kept(
    outputs: dict[str, Any], number: int
) -> None:
    found = {name: value[number] for name, value in outputs["sampling"].items()}
    processed = kept_logits(logits()[number], **SAMPLING[number])
    assert torch.equal(found["processed"], processed)
    scores = processed.clone()
    if SAMPLING[number]["temperature"] > 0:
        scores += gumbel_noise(SEEDS[number], POSITIONS[number])
    assert found["tokens"] == scores.argmax()
    log_probs = processed.double().log_softmax(-1)
    assert found["logprobs"].item() == pytest.approx(log_probs[found["tokens"]].item(), abs=1e-5)
    assert found["ranks"] == (processed >= processed[found["tokens"]]).sum()


def test_a_draw_is_that_of_its_request_in_any_batch(outputs: dict[str, Any]) -> None:
    """Its place among the others changes no bit."""
    found = outputs["sampling"]
    for name in ("tokens", "processed", "logprobs", "ranks"):
        assert torch.equal(found[name], found[f"{name}, reversed"]), name


def kept_logits(
    logits: torch.Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    """`[v]`: top-k first, then the fewest tokens whose probability, after it, is at least top-p."""
    if temperature > 0:
        logits = logits / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -math.inf)
    if top_p < 1:
        probs, tokens = logits.double().softmax(-1).sort(descending=True)
        needed = probs.cumsum(-1) - probs < top_p
        logits = logits.clone().index_fill_(0, tokens[~needed], -math.inf)
    return logits


def gumbel_noise(seed: int, position: int) -> torch.Tensor:
    """`[v]`, of the uniform numbers that MurmurHash3 makes of seed, position and token."""
    words = [struct.pack("<qII", seed, position, token) for token in range(VOCAB_SIZE)]
    uniform = [(murmur3(word) + 0.5) / 2**32 for word in words]
    return torch.tensor([-math.log(-math.log1p(-u)) for u in uniform])


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 of whole words, with seed 0."""
    state = 0
    for (word,) in struct.iter_unpack("<I", data):
        state ^= rotated(word * 0xCC9E2D51, 15) * 0x1B873593 & 0xFFFFFFFF
        state = (rotated(state, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def rotated(value: int, bits: int) -> int:
    value &= 0xFFFFFFFF
    return (value << bits | value >> (32 - bits)) & 0xFFFFFFFF


def test_hash_is_the_published_one() -> None:
    """By the digest of "test" in the reference implementation's tests."""
    assert murmur3(b"test") == 0xBA6BD213


# ------------------------------------------------------------------- indexers of sparse attention


@pytest.mark.parametrize("case", ["indexer", "indexer, interleaved"])
def test_measured_choices_are_those_of_vllms_kernels(outputs: dict[str, Any], case: str) -> None:
    """The keys that Megatron counts as replaced are exactly those that an engine does not choose
    for the same queries and keys. What the engine's products round beyond FP8 is not part of it."""
    found, topk = outputs[case], 12
    num, num_heads, size = found["projected"].shape
    queries = rotated_heads(found["projected"], found["rotations"], case.endswith("interleaved"))
    weights = found["weights"] * num_heads**-0.5 * size**-0.5
    count = sparse_attention.Choices()
    with sparse_attention.comparing_choices(count):
        _, chosen = dsa.fused_qk_topk_naive(
            *(x.unsqueeze(1) for x in (queries, found["normed"], weights)),
            topk,
            varlen_starts=torch.zeros(num, dtype=torch.int64),
            varlen_ends=torch.arange(1, num + 1),
        )
    scores = torch.einsum("shd,td->hst", found["queries"], found["keys"]).relu()
    scores = (scores * found["scaled weights"].T[:, :, None]).sum(0)
    replaced = 0
    for query in range(topk, num):
        by_engine = scores[query, : query + 1].topk(topk).indices.tolist()
        replaced += len(set(chosen[0, query].tolist()) - set(by_engine))
    assert count.chosen == topk * (num - topk)
    assert count.replaced == replaced > 0
    assert torch.equal(sparse_attention.in_float8(found["normed"]), found["keys"])


def rotated_heads(x: torch.Tensor, rotations: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`[s, h, d]` with the first elements rotated: neighbours, or halves, make a pair."""
    cos, sin = rotations[:, None].chunk(2, dim=-1)
    head, rest = x.split([rotations.shape[1], x.shape[2] - rotations.shape[1]], dim=-1)
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, dim=-1)
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((turned, rest), dim=-1)
