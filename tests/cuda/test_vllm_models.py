"""vLLM's CUDA models are reloaded in place: the bytes of its own load, where they were before.

On the real CUDA build of vLLM, with tensors of the CPU, for all kernels of unquantised experts that
it chooses on CUDA and all families; each engine starts with dummy weights, as a run does, sleeps
and is reloaded from slices of two sets of weights in turn. Compared is every tensor that the model
can reach, be it a parameter, a buffer, or what a kernel object or a closure has kept.

Models of published sizes also run forward without data, to hold every call of an operator of vLLM's
libraries against its schema, and to compile every Triton kernel; test_triton_kernels.py computes.

Out of reach here:
- BATCHED_TRITON, which vLLM takes with DeepEP's or NIXL's low-latency all-to-all alone, and whose
  libraries are not in the CUDA stack; it keeps weights as TRITON does (one function prepares both).
- What compiled kernels compute from these bytes; that captured CUDA graphs read these addresses.
- FlashInfer's compiled kernels: vLLM is told that they are there. On a GPU machine without them
  (neither `flashinfer-cubin` nor nvcc) it chooses TRITON on every device.
- Memory: what the driver maps when an engine wakes, and what a reload takes beside the model.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts.make_tiny_deepseek import ARCHS
from tests.cuda.stack import Stack
from tests.model_shapes import has_experts

pytestmark = pytest.mark.timeout(1900)

MLA = dict(arch="deepseek_v3")
TP2 = dict(tp_size=2, rank=1)
EP2 = dict(**TP2, expert_parallel=True)
HOPPER: dict[str, dict[str, Any]] = {
    **{arch: dict(arch=arch, **(EP2 if has_experts(arch) else TP2)) for arch in ARCHS},
    "deepseek_v3, experts split": dict(**MLA, **TP2),
    "deepseek_v3, cutlass": dict(**MLA, **EP2, moe_backend="flashinfer_cutlass"),
    "deepseek_v3, EP over DP": dict(**MLA, tp_size=2, dp_size=2, rank=3, expert_parallel=True),
    "deepseek_v3, CUDA graphs": dict(**MLA, **EP2, enforce_eager=False),
    "deepseek_v32, EP over DP": dict(
        arch="deepseek_v32", tp_size=2, dp_size=2, rank=3, expert_parallel=True
    ),
    "mixtral": dict(arch="mixtral", **TP2),
    "gpt_oss, experts split": dict(arch="gpt_oss", **TP2),
    "qwen3": dict(arch="qwen3", **TP2, tied=True),
    "llama": dict(arch="llama", tied=True),
}
BLACKWELL = {
    "deepseek_v3": dict(**MLA, **EP2),
    "deepseek_v3, experts split": dict(**MLA, **TP2),  # padded
    "deepseek_v3, small": dict(**MLA, size="small"),  # not padded
    "deepseek_v3, cutlass": dict(**MLA, **EP2, moe_backend="flashinfer_cutlass"),
    "deepseek_v3, triton": dict(**MLA, **EP2, moe_backend="triton"),
    "deepseek_v3, float16": dict(**MLA, **EP2, dtype="float16"),
    "deepseek_v32": dict(arch="deepseek_v32", **EP2),
    "glm_5_2": dict(arch="glm_5_2", **EP2),
    "qwen3_moe": dict(arch="qwen3_moe", **EP2),
    "mixtral": dict(arch="mixtral", **TP2),
    "qwen3": dict(arch="qwen3", **TP2, tied=True),
}
CASES = [("9.0", name) for name in HOPPER] + [("10.0", name) for name in BLACKWELL]

# In FP8 blocks: vLLM's own load of a folder in that format, and reloads of the same blocks.
_MLA = dict(arch="deepseek_v3", float8=True,
            fields=dict(hidden_size=256, moe_intermediate_size=256, q_lora_rank=128))  # fmt: skip
_GQA = dict(float8=True, fields=dict(hidden_size=256, moe_intermediate_size=256,
            num_attention_heads=4, num_key_value_heads=2, head_dim=128))  # fmt: skip
FLOAT8 = {
    "deepseek_v3": dict(**_MLA, **EP2),
    "deepseek_v3, experts split": dict(**_MLA, **TP2),
    "deepseek_v3, EP over DP": dict(**_MLA, tp_size=2, dp_size=2, rank=3, expert_parallel=True),
    "deepseek_v3, deep_gemm": dict(**_MLA, **TP2, moe_backend="deep_gemm"),
    "deepseek_v3, triton": dict(**_MLA, **EP2, moe_backend="triton"),
    "deepseek_v32": dict(_MLA, **EP2, arch="deepseek_v32"),
    "qwen3_moe": dict(arch="qwen3_moe", **_GQA, **TP2),
    "qwen3": dict(arch="qwen3", **_GQA, **TP2),
}
# capability -> kernels of linear layers, and of experts by case. "without DeepGEMM": on a machine
# where vLLM's other kernels cannot be used either.
FLOAT8_KERNELS: dict[str, tuple[str, dict[str, str | None]]] = {
    "9.0": (
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        {
            "deepseek_v3": "FLASHINFER_CUTLASS FlashInferExperts",
            "deepseek_v3, experts split": "TRITON TritonExperts",
            "deepseek_v3, EP over DP": "FLASHINFER_CUTLASS FlashInferExperts",
            "deepseek_v3, deep_gemm": "DEEPGEMM TritonOrDeepGemmExperts",
            "deepseek_v32": "FLASHINFER_CUTLASS FlashInferExperts",
            "qwen3_moe": "TRITON TritonExperts",
            "qwen3": None,
        },
    ),
    "9.0 without DeepGEMM": (
        "TritonFp8BlockScaledMMKernel",
        {"deepseek_v3": "FLASHINFER_CUTLASS FlashInferExperts", "qwen3": None},
    ),
    "10.0": (
        "DeepGemmFp8BlockScaledMMKernel",
        {
            "deepseek_v3": "FLASHINFER_TRTLLM TrtLlmFp8ExpertsMonolithic",
            "deepseek_v3, deep_gemm": "DEEPGEMM TritonOrDeepGemmExperts",
            "deepseek_v3, triton": "TRITON TritonExperts",
            "qwen3_moe": "FLASHINFER_TRTLLM TrtLlmFp8ExpertsMonolithic",
        },
    ),
}
FLOAT8_CASES = [(on, case) for on, (_, experts) in FLOAT8_KERNELS.items() for case in experts]
_WITHOUT = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DISABLED_KERNELS": "CutlassFp8BlockScaledMMKernel,B12xFp8BlockScaledMMKernel,"
    "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel",
}


@pytest.fixture(scope="module")
def results(cuda_stack: Stack) -> dict[str, dict[str, Any]]:
    """The results of all cases, those in FP8 blocks by `in_blocks`: a process on each device."""
    unquantised: dict[str, dict[str, Any]] = {"9.0": HOPPER, "10.0": {**BLACKWELL}}
    return {
        on: cuda_stack.run(
            "vllm_models_job",
            on.split()[0],
            json.dumps(
                {**unquantised.get(on, {}), **{in_blocks(case): FLOAT8[case] for case in experts}}
            ),
            timeout=1800,
            **(_WITHOUT if "without" in on else {}),
        )
        for on, (_, experts) in FLOAT8_KERNELS.items()
    }


def in_blocks(case: str) -> str:
    return f"{case}, in FP8 blocks"


@pytest.fixture(scope="module")
def found(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results of each capability's cases that are not in FP8 blocks."""
    return {
        capability: {case: results[capability][case] for case in cases}
        for capability, cases in (("9.0", HOPPER), ("10.0", BLACKWELL))
    }


@pytest.mark.parametrize(("on", "case"), FLOAT8_CASES)
def test_reload_of_float8_blocks(results: dict[str, Any], on: str, case: str) -> None:
    seen = results[on][in_blocks(case)]
    _assert_reloaded(seen)
    if on.startswith("9.0"):
        assert seen["loaded_beside_the_model"] == [], "memory was taken for a second copy"
    linear, experts = FLOAT8_KERNELS[on]
    assert seen["float8_linear"] == [linear]
    assert seen["experts"] == [experts[case]] * (experts[case] is not None)
    assert seen["quantised_once"], "vLLM's rounding of scales changes values"


@pytest.mark.parametrize(("capability", "case"), CASES)
def test_reload_leaves_the_bytes_of_vllms_own_load_where_they_were(
    found: dict[str, Any], capability: str, case: str
) -> None:
    seen = found[capability][case]
    _assert_reloaded(seen)
    assert seen["loaded_beside_the_model"] == [], "memory was taken for a second copy"


def _assert_reloaded(seen: dict[str, Any]) -> None:
    assert "error" not in seen, seen
    assert seen["differing"] == [], "after the first reload"
    assert seen["differing_at_last"] == [], "after another set of weights"
    assert seen["of_other_weights"] > 10, "the two sets of weights are the same"
    assert seen["moved"] == [], "another address, shape, stride or dtype"
    assert seen["replaced"] == [], "another object where a kernel may hold the first"
    assert seen["only_reloaded"] == []
    assert seen["tensors"] > 20


@pytest.mark.parametrize(
    ("capability", "case", "experts"),
    [
        ("9.0", "deepseek_v3", "TRITON TritonExperts"),
        ("9.0", "deepseek_v3, cutlass", "FLASHINFER_CUTLASS FlashInferExperts"),
        ("10.0", "deepseek_v3", "FLASHINFER_TRTLLM TrtLlmBf16ExpertsMonolithic"),
        ("10.0", "mixtral", "FLASHINFER_TRTLLM TrtLlmBf16ExpertsMonolithic"),
        ("10.0", "deepseek_v3, cutlass", "FLASHINFER_CUTLASS FlashInferExperts"),
        ("10.0", "deepseek_v3, triton", "TRITON TritonExperts"),
        ("10.0", "deepseek_v3, float16", "TRITON TritonExperts"),
    ],
)
def test_cases_run_the_kernels_they_are_for(
    found: dict[str, Any], capability: str, case: str, experts: str
) -> None:
    assert found[capability][case]["experts"] == [experts]


def test_engines_run_on_a_gpu_as_we_ask_them_to(found: dict[str, Any]) -> None:
    """What the CPU runs of the other tests do not have, or have otherwise."""
    for cases in found.values():
        for name, seen in cases.items():
            settings = seen["settings"]
            assert settings["runner"] == "vllm.v1.worker.gpu.model_runner", f"{name}: runner V2"
            assert settings["logprobs_mode"] == ["processed_logprobs"] * 2, name
            assert settings["launcher"] == "external_launcher", name
            assert settings["kv_cache_dtype"] in ("auto", "bfloat16"), f"{name}: as trained"
            assert settings["sleep_mode"] and settings["prefix_caching"], name
            assert not settings["load_balancing"], f"{name}: experts would move by themselves"
    graphs = found["9.0"]["deepseek_v3, CUDA graphs"]["settings"]
    assert graphs["cudagraph_mode"] == "FULL_AND_PIECEWISE"
    assert found["9.0"]["deepseek_v3"]["settings"]["cudagraph_mode"] == "NONE"
    attention = [found[capability]["deepseek_v3"]["attention"] for capability in ("9.0", "10.0")]
    assert attention == [["FlashAttnMLAImpl"], ["FlashInferMLAImpl"]]
    assert found["9.0"]["qwen2"]["attention"] == ["FlashAttentionImpl"]


def test_chosen_experts_are_reported_with_every_kernel(found: dict[str, Any]) -> None:
    """As --rl-routing-replay r3 needs it."""
    for cases in found.values():
        for name, seen in cases.items():
            settings = seen["settings"]
            assert settings["reports_experts"] is has_experts(name.split(",")[0]), name
            assert settings["cannot_report"] is None, name


def test_experts_over_data_parallel_ranks_are_not_scheduled_ahead(found: dict[str, Any]) -> None:
    """Scheduled ahead, a rank ends in a step without tokens, in which model runner V2 takes part in
    no collective, while the others wait for it. Once it does, `async_scheduling` may be left on."""
    over_dp = found["9.0"]["deepseek_v3, EP over DP"]["settings"]
    assert over_dp["expert_parallel"] and (over_dp["ep_size"], over_dp["ep_rank"]) == (4, 3)
    assert over_dp["collectives_of_an_idle_step"] == 0
    assert over_dp["async_scheduling"] is False
    assert found["9.0"]["deepseek_v3"]["settings"]["async_scheduling"] is True


TP4 = dict(tp_size=4, expert_parallel=True)
TP8 = dict(tp_size=8, expert_parallel=True)
_NORMS = ("_C.rms_norm", "_C.fused_add_rms_norm")
_ATTENTION = "vllm.unified_attention_with_output"
GROUPED = (*_NORMS, _ATTENTION)
LATENT = (*_NORMS, "vllm.unified_mla_attention_with_output")
# Its own operators need metadata of a batch, and FlashMLA and DeepGEMM.
SPARSE = (*_NORMS, "_fused_norm_rope_kernel", "_fused_q_kernel")
DELTA = ("vllm.qwen_gdn_attention_core", "layer_norm_fwd_kernel")
GATED = (_ATTENTION, "_fused_qk_rmsnorm_rope_gate_kernel")
MAMBA = ("vllm.mamba_mixer2", "_C.relu_squared")
# Classes for which vLLM runs the code of transformers.
BY_TRANSFORMERS = ("_C.rms_norm", _ATTENTION)
# Published config -> layout, operators and Triton kernels of its layers, routers' operator,
# launches of the experts' kernel.
FORWARD: dict[str, tuple[dict[str, Any], tuple[str, ...], str | None, int]] = {
    "deepseek-v3": (TP8, LATENT, "grouped_topk", 2),
    "deepseek-v2-lite": (TP8, LATENT, "topk_softmax", 2),
    "moonlight-16b-a3b": (TP8, LATENT, "grouped_topk", 2),
    "glm-4.5-air": (TP8, GROUPED, "grouped_topk", 2),
    "glm-4.7-flash": (TP4, LATENT, "grouped_topk", 2),
    "minimax-m2": (TP8, GROUPED, "topk_sigmoid", 4),
    "qwen3-30b-a3b": (TP4, GROUPED, "topk_softmax", 4),
    "qwen1.5-moe-a2.7b": (TP4, GROUPED, "topk_softmax", 4),
    "olmoe-1b-7b-0924": (TP4, GROUPED, "topk_softmax", 4),
    "mixtral-8x7b": (dict(tp_size=2), GROUPED, "topk_softmax", 4),
    "gpt-oss-20b": (TP4, GROUPED, "topk_softmax", 4),
    "qwen2.5-7b": (dict(tp_size=4), GROUPED, None, 0),
    "llama-3.2-1b": (dict(tp_size=4), GROUPED, None, 0),
    "hy3-preview": (TP8, GROUPED, "grouped_topk", 2),
    "dots.llm1": (TP4, BY_TRANSFORMERS, "grouped_topk", 2),
    "mistral-small-24b-2501": (dict(tp_size=4), GROUPED, None, 0),
    "seed-oss-36b": (dict(tp_size=4), BY_TRANSFORMERS, None, 0),
    "deepseek-v3.2": (TP8, SPARSE, "grouped_topk", 2),
    "glm-5.2": (TP8, SPARSE, "grouped_topk", 2),
    "qwen3-next-80b-a3b": (TP4, (*DELTA, *GATED), "topk_softmax", 4),
    "qwen3.5-35b-a3b": (TP4, (*DELTA, *GATED), "topk_softmax", 4),
    "qwen3.5-9b": (dict(tp_size=4), (*DELTA, *GATED), None, 0),
    "nemotron-h-8b": (dict(tp_size=4), (*GROUPED, *MAMBA), None, 0),
    "nemotron-3-nano-30b-a3b": (TP4, (*GROUPED, *MAMBA), "grouped_topk", 2),
}


@pytest.fixture(scope="module")
def forward(cuda_stack: Stack) -> dict[str, dict[str, Any]]:
    layouts = {config: layout for config, (layout, *_) in FORWARD.items()}
    return cuda_stack.run("forward_job", json.dumps(layouts), timeout=900)


@pytest.mark.parametrize("config", FORWARD)
def test_operators_take_what_models_of_published_sizes_give_them(
    forward: dict[str, Any], config: str
) -> None:
    _, layers, router, launches = FORWARD[config]
    seen = forward[config]
    hidden_size, vocab_size = seen["expected"]
    assert seen["hidden"] == [[24, hidden_size], "torch.bfloat16"]
    assert seen["logits"] == [24, vocab_size]
    assert seen["launches"].get("fused_moe_kernel", 0) == launches
    expected = {"_C.vocab_parallel_embedding", *layers}
    if router is not None:
        expected |= {f"_moe_C.{name}" for name in (router, "moe_align_block_size", "moe_sum")}
    assert expected <= {*seen["operators"], *seen["launches"]}
