"""Over all ranks, the pieces of a model's parameters tile every checkpoint tensor."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from mcore_rl.model.boxes import extent, full_box
from mcore_rl.model.config_json import LatentAttention, ModelShape
from mcore_rl.model.experts import Experts
from mcore_rl.model.weight_map import ShardCoordinates, layer_order, map_parameter
from tests.plans import covers_once

DEEPSEEK = ModelShape(
    architecture="deepseek_v3",
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    vocab_size=13,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    latent=LatentAttention(6, 8, 4, 2, 4),
    experts=Experts(4, 2, 12, 12, "sigmoid", True, True, 1.0, None, None),
    is_moe_layer=(False, True),
    qk_norm=True,
    qkv_bias=False,
    tied_embeddings=False,
    norm_epsilon=1e-6,
    rope={},
    max_positions=64,
    num_mtp_layers=0,
)
QWEN = replace(DEEPSEEK, architecture="qwen3", latent=None, num_kv_heads=2, qkv_bias=True)


def coordinates(tp_rank: int, tp_size: int, ep_rank: int, ep_size: int) -> ShardCoordinates:
    return ShardCoordinates(tp_rank, tp_size, ep_rank, ep_size, 0, 1, layers=(0, 1))


def tiles(name: str, shape: tuple[int, ...], model: ModelShape, tp_size: int, ep_size: int = 1):
    """checkpoint tensor -> boxes on all (TP, EP) ranks, checking the local side on the way."""
    found = defaultdict(list)
    for tp_rank in range(tp_size):
        for ep_rank in range(ep_size):
            at = coordinates(tp_rank, tp_size, ep_rank, ep_size)
            pieces = map_parameter(name, shape, model, at)
            for piece in pieces:
                assert extent(piece.checkpoint_box) == extent(piece.local_box)
                found[piece.tensor].append(piece.checkpoint_box)
            assert covers_once(full_box(shape), [p.local_box for p in pieces])
    return found


L0, L1 = "decoder.layers.0.", "decoder.layers.1."
H0, H1 = "model.layers.0.", "model.layers.1."
O_PROJ, QB, KVB, QA = (
    H0 + f"self_attn.{name}.weight" for name in ("o_proj", "q_b_proj", "kv_b_proj", "q_a_proj")
)
GATE_UP = [H0 + f"mlp.{half}_proj.weight" for half in ("gate", "up")]
SHARED_DOWN = H1 + "mlp.shared_experts.down_proj.weight"
SPLIT = [
    # (model, parameter, local shape under TP2, {checkpoint tensor: full shape})
    (DEEPSEEK, L0 + "self_attention.linear_proj.weight", (16, 8), {O_PROJ: (16, 16)}),
    (DEEPSEEK, L0 + "self_attention.linear_q_up_proj.weight", (12, 6), {QB: (24, 6)}),
    (DEEPSEEK, L0 + "self_attention.linear_kv_up_proj.weight", (16, 8), {KVB: (32, 8)}),
    (DEEPSEEK, L0 + "self_attention.linear_q_down_proj.weight", (3, 16), {QA: (6, 16)}),
    (DEEPSEEK, L0 + "mlp.linear_fc1.weight", (24, 16), dict.fromkeys(GATE_UP, (24, 16))),
    (DEEPSEEK, L0 + "mlp.linear_fc2.weight", (16, 12), {H0 + "mlp.down_proj.weight": (16, 24)}),
    (DEEPSEEK, L1 + "mlp.shared_experts.linear_fc2.weight", (16, 6), {SHARED_DOWN: (16, 12)}),
    *(
        (
            QWEN,
            L0 + f"self_attention.linear_qkv.{kind}",
            (32, *rest),
            {H0 + f"self_attn.{n}_proj.{kind}": (32 if n == "q" else 16, *rest) for n in "qkv"},
        )
        for kind, rest in (("weight", (16,)), ("bias", ()))
    ),
]


@pytest.mark.parametrize(("model", "name", "shape", "expected"), SPLIT, ids=lambda v: str(v)[:60])
def test_split_parameter_tiles_its_tensors(model, name, shape, expected):
    found = tiles(name, shape, model, tp_size=2)
    assert found.keys() == expected.keys()
    for tensor, full in expected.items():
        assert covers_once(full_box(full), found[tensor])


REPLICATED = {
    L0 + "input_layernorm.weight": H0 + "input_layernorm.weight",
    L0 + "self_attention.linear_qkv.layer_norm_weight": H0 + "input_layernorm.weight",
    L0 + "pre_mlp_layernorm.weight": H0 + "post_attention_layernorm.weight",
    L0 + "mlp.linear_fc1.layer_norm_weight": H0 + "post_attention_layernorm.weight",
    L0 + "self_attention.linear_q_up_proj.layer_norm_weight": H0 + "self_attn.q_a_layernorm.weight",
    L0 + "self_attention.kv_layernorm.weight": H0 + "self_attn.kv_a_layernorm.weight",
    L1 + "mlp.router.expert_bias": H1 + "mlp.gate.e_score_correction_bias",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "decoder.final_norm.weight": "model.norm.weight",
}


@pytest.mark.parametrize(("name", "tensor"), REPLICATED.items())
def test_replicated_parameter_is_whole_on_every_rank(name, tensor):
    found = tiles(name, (16,), QWEN if "linear_qkv" in name else DEEPSEEK, tp_size=2)
    assert found == {tensor: [((0, 16),), ((0, 16),)]}


def test_down_projection_is_replicated_with_transformer_engine():
    name = L0 + "self_attention.linear_kv_down_proj.weight"
    found = tiles(name, (10, 16), DEEPSEEK, tp_size=2)
    assert list(found.values()) == [[((0, 10), (0, 16))] * 2]


def test_fused_down_projection_is_split_within_both_its_tensors():
    """--mla-down-proj-fusion: a rank holds its rows of the queries', then of the keys/values'."""
    name = L0 + "self_attention.linear_qkv_down_proj.weight"
    kv_a = H0 + "self_attn.kv_a_proj_with_mqa.weight"
    found = tiles(name, (8, 16), DEEPSEEK, tp_size=2)  # half of 6 rows, then of 10
    assert found == {
        QA: [((0, 3), (0, 16)), ((3, 6), (0, 16))],
        kv_a: [((0, 5), (0, 16)), ((5, 10), (0, 16))],
    }


@pytest.mark.parametrize("form", ["local_experts.{}.linear_fc1.weight", "linear_fc1.weight{}"])
def test_experts_are_numbered_over_expert_parallel_ranks(form):
    for local in range(2):
        found = tiles(L1 + "mlp.experts." + form.format(local), (24, 16), DEEPSEEK, 1, ep_size=2)
        for expert in (local, 2 + local):
            for half in ("gate", "up"):
                boxes = found.pop(f"{H1}mlp.experts.{expert}.{half}_proj.weight")
                assert boxes == [((0, 12), (0, 16))]
        assert not found


def test_vocabulary_padding_has_no_counterpart():
    boxes = []
    for tp_rank in range(4):
        at = coordinates(tp_rank, 4, 0, 1)
        pieces = map_parameter("output_layer.weight", (4, 16), DEEPSEEK, at)
        boxes += [piece.checkpoint_box for piece in pieces]
    assert covers_once(full_box((13, 16)), boxes)
    tied = replace(DEEPSEEK, tied_embeddings=True)
    (piece,) = map_parameter("output_layer.weight", (4, 16), tied, coordinates(0, 4, 0, 1))
    assert piece.tensor == "model.embed_tokens.weight"


def test_unknown_parameter_is_named():
    with pytest.raises(RuntimeError, match="decoder.layers.0.mystery.weight"):
        map_parameter(L0 + "mystery.weight", (4,), DEEPSEEK, coordinates(0, 1, 0, 1))


def test_tensors_are_ordered_by_layer_and_expert():
    names = [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.10.mlp.experts.2.up_proj.weight",
        "model.layers.10.mlp.experts.11.up_proj.weight",
        "model.layers.10.input_layernorm.weight",
        "model.layers.9.mlp.down_proj.weight",
        "model.embed_tokens.weight",
    ]
    assert layer_order(names) == [
        "model.embed_tokens.weight",
        "model.layers.9.mlp.down_proj.weight",
        "model.layers.10.input_layernorm.weight",
        "model.layers.10.mlp.experts.2.up_proj.weight",
        "model.layers.10.mlp.experts.11.up_proj.weight",
        "lm_head.weight",
        "model.norm.weight",
    ]
