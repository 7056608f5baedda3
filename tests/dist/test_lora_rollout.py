"""Hand-overs of adapters alone, into the LoRA layers of a real vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rl.model.config_json import ModelShape, read_model_shape
from mcore_rl.model.lora import factor_names
from mcore_rl.planner.plan import plan_case
from mcore_rl.tools.plan.command_line import read_command_line
from tests.dist.layouts import job_flags
from tests.dist.test_lora import RANK, SCALE, lora_of, random_adapter, start_from
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400)]

FLOAT32, BFLOAT16 = 4, 2  # bytes: these engines' dtype, and that of a run's
VLLM_RANK = 8  # the smallest that holds RANK
COLUMNS = ("o_proj", "down_proj")  # whose columns TP divides; of all other layers it divides rows
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "o_proj": ("o_proj",),
    "down_proj": ("down_proj",),
}


def expected_memory(
    adapter: Path, shape: ModelShape, sign: float, tp_rank: int, tp_size: int
) -> dict[str, torch.Tensor]:
    """What vLLM's LoRA layers hold on a rank, from an adapter's file."""
    factors = load_file(adapter / "adapter_model.safetensors")
    found = {}
    for number in range(shape.num_layers):
        for module, layers in FUSED.items():
            parent = "self_attn" if module in ("qkv_proj", "o_proj") else "mlp"
            prefix = f"model.layers.{number}.{parent}."
            for index, layer in enumerate(layers):
                a, b = (factors[name] for name in factor_names(prefix + layer))
                b = sign * SCALE * b
                if layer in COLUMNS:
                    a = a.chunk(tp_size, dim=1)[tp_rank]
                else:
                    b = b.chunk(tp_size)[tp_rank]
                of_vllm = torch.zeros(VLLM_RANK, a.shape[1]), torch.zeros(b.shape[0], VLLM_RANK)
                of_vllm[0][:RANK], of_vllm[1][:, :RANK] = a, b
                for buffer, tensor in zip("ab", of_vllm, strict=True):
                    found[f"{prefix}{module}.lora_{buffer}_stacked.{index}"] = tensor
    return found


def missing_elements(checkpoint: Path, split: str, rank: int) -> int:
    """The elements of adapters that a rank's engine needs and the rank does not train."""
    lora, num_layers = lora_of(checkpoint), read_model_shape(checkpoint).num_layers
    missing = 0
    for layer, (rows, columns) in lora.modules.items():
        divided = columns if layer.endswith(COLUMNS) else rows
        whole = rows + columns - divided
        if split == "tp2_pp1_ep1":  # it trains half of all layers, and needs them whole
            missing += divided // 2
        elif int(layer.split(".")[2]) // (num_layers // 2) != rank:  # half of the other stage's
            missing += whole + divided // 2
    return missing * RANK


@pytest.mark.parametrize(
    ("split", "tp_size", "then_merged"), [("tp2_pp1_ep1", 1, False), ("tp1_pp2_ep1", 2, True)]
)
def test_engines_get_adapters_alone_and_compute_as_with_merged_weights(
    split: str,
    tp_size: int,
    then_merged: bool,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_factory("qwen3")
    shape, adapter = read_model_shape(checkpoint), random_adapter(checkpoint, tmp_path / "adapter")
    flags = job_flags(checkpoint, split, *start_from(adapter), "--rl-lora-rollout", "adapters")
    flags += ["--rl-rollout-tp-size", str(tp_size), "--rl-attest", "full"]
    results = ranks.run(
        "tests.dist.lora_rollout_jobs:adapters",
        world_size=2,
        flags=flags,
        target=tmp_path,
        then_merged=then_merged,
    )
    plan = plan_case(read_command_line([*flags, "--world-size", "2"]).case)
    assert plan.adapters is not None
    planned = plan.rank_bytes["adapters_received"]
    for rank, found in enumerate(results):
        for name, sign in (("first", 1), ("flipped", 1), ("negated", -1)):
            expected = expected_memory(adapter, shape, sign, rank % tp_size, tp_size)
            stored = load_file(tmp_path / f"{name}_{rank}")
            assert stored.keys() == expected.keys()
            for tensor, value in expected.items():
                assert torch.equal(stored[tensor], value), (name, tensor)
        adapter_bytes = missing_elements(checkpoint, split, rank) * FLOAT32
        assert found["negated"]["received_bytes"] == adapter_bytes
        assert planned[rank] * FLOAT32 // BFLOAT16 == adapter_bytes
        unserved = found.pop("unserved")
        assert "model.layers.0.mlp.gate" in unserved and "--rl-lora-rollout merged" in unserved
        assert all(found[name]["attested"] for name in found)
        assert [name for name in found if found[name]["repeated"]] == ["flipped"]
        assert found["negated"]["num_tensors"] == 2 * len(lora_of(checkpoint).modules)
        first, negated = (torch.tensor(found[n]["log_probs"]) for n in ("first", "negated"))
        assert (first - negated).abs().max() > 0.1
        assert found["flipped"]["log_probs"] == found["first"]["log_probs"]
        # vLLM's own reading of the export, which has the negated factors.
        exported = torch.tensor(found["exported"]["log_probs"])
        assert (exported - negated).abs().max() <= 1e-4
        assert found["exported"]["sampled"] == found["negated"]["sampled"]
        if not then_merged:
            continue
        for name, mine in (("first", first), ("negated", negated)):
            merged = found[f"{name}_merged"]
            assert (mine - torch.tensor(merged["log_probs"])).abs().max() <= 1e-4, name
            assert found[name]["sampled"] == merged["sampled"], name
        assert found["first"]["received_bytes"] == adapter_bytes + merged["received_bytes"]
