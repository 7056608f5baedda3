"""vLLM on CPU with our patches and without them.

Each probe runs in a process of its own, because a patch stays applied; in one of `ranks`, which has
vLLM imported and not patched, unless it looks at imports.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from mcore_rl.patches.vllm import mla_prefill_together, shared_memory_names
from tests.rank_pool import RankPool


def output_of(ranks: RankPool, probe: str) -> list[str]:
    (ended,) = ranks.run_raw("tests.rank_pool:execute", world_size=1, code=probe)
    assert ended.exit_code == 0, ended.output[-3000:]
    return ended.output.splitlines()


def before_and_after(ranks: RankPool, probe: str) -> list[Any]:
    lines = [line for line in output_of(ranks, probe) if not line.startswith("INFO:")]
    return [json.loads(line) for line in lines[-2:]]


# The layers of a block are replaced by stubs: the patch changes the code around them.
GPT_OSS = """
import json, torch
from types import SimpleNamespace as Named
from vllm.model_executor.models import gpt_oss
from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.vllm import experts_one_by_one

gpt_oss.GateLinear = gpt_oss.FusedMoEFactory = lambda *args, **kwargs: None
torch.distributed.is_initialized = lambda: True
torch.distributed.get_world_size = lambda: 7
config = Named(num_local_experts=4, hidden_size=8, num_experts_per_tok=2, intermediate_size=96)
parallel = Named(use_sequence_parallel_moe=False)
whole = Named(model_config=Named(hf_config=config), quant_config=None, lora_config=None,
              parallel_config=parallel)

class Model(gpt_oss.GptOssModel):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.config = Named(quantization_config=None, num_attention_heads=2, num_local_experts=4)
        self.parallel_config = Named(enable_expert_parallel=True)

gpt_oss.get_tensor_model_parallel_rank = lambda: 0
gpt_oss.get_tensor_model_parallel_world_size = lambda: 1
gpt_oss.get_ep_group = lambda: Named(world_size=1, rank_in_group=0)
Model._load_weights_other = lambda *args: "loaded"

def tried(function):
    try:
        return str(function())
    except Exception as error:
        return type(error).__name__

def seen():
    return [tried(lambda: gpt_oss.MLPBlock(whole, 0)), tried(lambda: Model().load_weights([]))]

print(json.dumps(seen()))
assert apply_patch(experts_one_by_one.PATCH)
print(json.dumps(seen()))
"""


@pytest.mark.slow
def test_gpt_oss_blocks_and_weight_loading_need_the_patch(ranks: RankPool):
    before, after = before_and_after(ranks, GPT_OSS)
    assert before == ["AssertionError", "TypeError"]
    assert after == ["MLPBlock()", "loaded"]


MINIMAX_M2 = """
import functools, json, torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.model_loader.reload import layerwise
from mcore_rl.patches.vllm import loaders_without_a_name, sigmoid_router_on_cpu

torch.manual_seed(0)
bias, logits = torch.randn(8), torch.randn(16, 8)
scores = logits.sigmoid()
chosen = (scores + bias).topk(3).indices.sort().values
weights = scores.gather(1, chosen)
weights /= weights.sum(1, keepdim=True)
tensor = torch.zeros(2)
tensor.weight_loader = functools.partial(print, end="")

def routed():
    router = CPURouter(3, 8, scoring_func="sigmoid", e_score_correction_bias=bias)
    found, ids = router._compute_routing(None, logits, None)
    order = ids.long().argsort()
    assert torch.equal(ids.long().gather(1, order), chosen)
    return float((found.gather(1, order) - weights).abs().max())

def loader_found():
    return layerwise._get_original_loader(tensor) is tensor.weight_loader

def tried(function):
    try:
        return function()
    except Exception as error:
        return type(error).__name__

print(json.dumps([*map(tried, (routed, loader_found)), loaders_without_a_name.needed()]))
sigmoid_router_on_cpu.apply()
loaders_without_a_name.apply()
softmax = CPURouter(3, 8)
assert not softmax.use_grouped_topk
print(json.dumps([*map(tried, (routed, loader_found))]))
"""


@pytest.mark.slow
def test_minimax_m2_router_and_loader_need_the_patches(ranks: RankPool):
    before, after = before_and_after(ranks, MINIMAX_M2)
    assert before == ["AssertionError", "AttributeError", True]
    assert after[0] <= 1e-6 and after[1] is True


# Largest differences to the native implementation, for latent attention's strided views by head and
# for plain `[t, n * d]` arguments.
ROTARY_EMBEDDING = """
import json, torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from mcore_rl.patches.vllm import rotary_embedding_of_heads

torch.manual_seed(0)
with set_current_vllm_config(VllmConfig()):
    rotary = RotaryEmbedding(64, 64, 128, 10000.0, is_neox_style=False, dtype=torch.float32)
positions = torch.arange(7) + 3
by_head = torch.randn(7, 4, 192)[..., 128:], torch.randn(7, 640)[:, 576:].unsqueeze(1)
flat = torch.randn(7, 4 * 64), torch.randn(7, 64)

def difference(query, key):
    expected = rotary.forward_native(positions, query.clone(), key.clone())
    got = rotary.forward_cpu(positions, query.clone(), key.clone())
    return max(float((a - b).abs().max()) for a, b in zip(got, expected))

print(json.dumps(difference(*by_head)))
rotary_embedding_of_heads.apply()
print(json.dumps([difference(*by_head), difference(*flat)]))
"""


@pytest.mark.slow
def test_rotary_embedding_by_head_needs_the_patch(ranks: RankPool):
    before, (by_head, flat) = before_and_after(ranks, ROTARY_EMBEDDING)
    assert before > 0.5
    assert by_head <= 1e-5 and flat <= 1e-5


MLA_PREFILL = """
import torch
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend
from mcore_rl.patches.vllm import mla_prefill_together

backend = object.__new__(CPUSDPAMLAPrefillBackend)
backend.scale = 0.3
calls = []
matmul = torch.matmul
torch.matmul = lambda *args: calls.append(1) or matmul(*args)


def found(q_lengths, kv_lengths, causal, with_sums):
    torch.manual_seed(1)
    bounds = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (q_lengths, kv_lengths)]
    q = torch.randn(sum(q_lengths), 4, 24)
    k, v = torch.randn(sum(kv_lengths), 4, 24), torch.randn(sum(kv_lengths), 4, 16)
    calls.clear()
    result = backend._ragged_sdpa(q, k, v, *bounds, causal, with_sums)
    return (result if with_sums else (result,)), len(calls)


cases = {  # queries, keys, products of all
    "equal": ([8] * 6, [8] * 6, 2),
    "two kinds": ([8, 8, 3, 3, 3], [8, 8, 3, 3, 3], 4),
    "context": ([2, 2, 5], [16, 16, 32], 4),
    "no context": ([2, 2, 5], [16, 0, 32], 6),
    "one": ([7], [7], 2),
    "bounded": ([8] * 6, [8] * 6, 4),
}
variants = [
    (case, causal, with_sums)
    for case, (queries, keys, _) in cases.items()
    for causal in ([True, False] if queries == keys else [False])
    for with_sums in (True, False)
]
before = [found(*cases[case][:2], causal, sums)[0] for case, causal, sums in variants]
mla_prefill_together.apply()
for (case, causal, with_sums), expected in zip(variants, before, strict=True):
    mla_prefill_together.MOST_SCORES = 4 * 8 * 8 * 3 if case == "bounded" else 2**22
    got, products = found(*cases[case][:2], causal, with_sums)
    assert products == cases[case][2], (case, products)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
print("same")
"""


@pytest.mark.slow
def test_mla_prefill_of_batched_requests_is_that_of_single_ones_with_fewer_products(
    ranks: RankPool,
):
    assert output_of(ranks, MLA_PREFILL)[-1] == "same"


def test_mla_prefill_batches_are_bounded_and_keep_the_order(monkeypatch):
    monkeypatch.setattr(mla_prefill_together, "MOST_SCORES", 100)
    lengths = [2, 2, 2, 2, 9, 2], [4, 4, 4, 4, 9, 4]
    found = list(mla_prefill_together.batches(*lengths, num_heads=4))
    assert found == [(3, 2, 4), (1, 2, 4), (1, 9, 9), (1, 2, 4)]


# A stub replaces the dispatch by CPU type, so that the result does not depend on the machine.
WIDE_LINEAR = """
import torch
from vllm.model_executor.layers import utils
from mcore_rl.patches.vllm import wide_linear

asked = []
utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: asked.append(layer)
wide_linear.widened_dtypes = lambda: frozenset({torch.bfloat16})
wide_linear.require_parameters = lambda *unused: None  # of the stand-in for upstream's
assert wide_linear.needed()
wide_linear.apply()


def layer_of(shape, dtype, device="cpu"):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(shape, device=device).to(dtype), False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer


torch.manual_seed(0)
layer = layer_of((5, 7), torch.bfloat16)
copy = layer.cpu_linear.__closure__
assert not any(isinstance(cell.cell_contents, torch.Tensor) for cell in copy), "copied unasked"
x, bias = torch.randn(3, 7).bfloat16(), torch.randn(5).bfloat16()
exact = x.double() @ layer.weight.double().t()
assert torch.equal(layer.cpu_linear(x, layer.weight, None), exact.float().bfloat16())
with_bias = layer.cpu_linear(x, layer.weight, bias)
assert torch.equal(with_bias, (exact + bias.double()).float().bfloat16())
assert layer.weight.numel() == 35, "the weight is needed by latent attention"
assert not asked
others = [
    layer_of((5, 7), torch.float32), layer_of((2, 5, 7), torch.bfloat16),
    layer_of((5, 7), torch.bfloat16, "meta"),
]
assert asked == others and not any(hasattr(layer, "cpu_linear") for layer in others)
print("same")
"""


@pytest.mark.slow
def test_wide_linear_products_are_float32_rounded_once_and_others_are_left_to_vllm(ranks: RankPool):
    assert output_of(ranks, WIDE_LINEAR)[-1] == "same"


TEXT_MODEL = """
import importlib, json, sys
sys.modules["torchvision"] = None  # as if it were not installed
from vllm.model_executor.models.registry import ModelRegistry
from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.vllm import text_models_without_torchvision
from transformers.utils.import_utils import is_torchvision_available

def tried():
    try:
        return ModelRegistry.models["Qwen3_5ForCausalLM"].load_model_cls().__name__
    except ImportError as error:
        return type(error).__name__

before = tried()
del sys.modules["torchvision"]
assert apply_patch(text_models_without_torchvision.PATCH)
print(json.dumps([before, tried()]))
left = [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
print(json.dumps([left, is_torchvision_available()]))
"""


ROUTERS = """
import json, tempfile, torch
from types import SimpleNamespace as Named
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models import qwen3_moe
from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.vllm import routers_in_float32

torch.set_default_dtype(torch.bfloat16)
torch.manual_seed(3)
x, weight = torch.randn(512, 256), torch.randn(128, 256) / 16

# A block of Qwen3-MoE without its experts, which get the router.
seen = []
qwen3_moe.FusedMoEFactory = lambda **given: seen.append(given["gate"])
text = Named(hidden_size=256, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=32,
             norm_topk_prob=True)
whole = VllmConfig()

def chosen():
    qwen3_moe.Qwen3MoeSparseMoeBlock(whole, prefix="mlp")
    gate = seen.pop()
    gate.weight.data.copy_(weight)
    gate.quant_method.process_weights_after_loading(gate)
    logits, _ = gate(x)
    return logits.dtype, logits.topk(8, sorted=False).indices.sort().values

exact = (x.double() @ weight.double().T).topk(8, sorted=False).indices.sort().values
with set_current_vllm_config(whole), tempfile.NamedTemporaryFile() as file:
    init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
    initialize_model_parallel()
    whole.model_config = Named(hf_text_config=text)
    for is_patched in (False, True):
        if is_patched:
            assert apply_patch(routers_in_float32.PATCH)
        dtype, found = chosen()
        print(json.dumps([str(dtype), (found != exact).any(dim=1).float().mean().item()]))
"""


@pytest.mark.slow
def test_experts_are_those_of_float32_logits_with_the_patch(ranks: RankPool):
    """Top 8 of 128, in the block of Qwen3-MoE."""
    before, after = before_and_after(ranks, ROUTERS)
    assert before[0] == "torch.bfloat16" and before[1] > 0.02
    assert after == ["torch.float32", 0.0]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
def test_text_model_of_qwen3_5_needs_the_patch():
    run = subprocess.run([sys.executable, "-c", TEXT_MODEL], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    loaded, left = map(json.loads, run.stdout.splitlines()[-2:])
    assert loaded == ["ModuleNotFoundError", "Qwen3_5ForCausalLM"]
    assert left == [[], False]


@pytest.mark.parametrize(
    ("affinities", "num_cores", "num_ranks", "expected"),
    [
        ([{0, 1, 2, 3}] * 2, 4, 4, True),
        ([{0, 1, 2, 3}] * 2, 2, 4, False),  # as a control group allows
        ([{0}, {1}], 1, 4, True),
        ([{0, 1}, {1, 2}], 2, 4, False),
    ],
)
def test_ranks_wait_in_shared_memory_if_each_has_a_core(affinities, num_cores, num_ranks, expected):
    assert shared_memory_names.has_cores(affinities, num_cores, num_ranks) is expected
