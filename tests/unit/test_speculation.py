"""Values of --rl-speculate, checkpoints that can draft, and the costs of a drafter."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.drafter import DraftCounts, DraftRecord
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.speculation import (
    Speculation,
    check_drafter,
    check_drafter_weights,
    parse_speculation,
)
from mcore_rl.model.tensors import TensorInfo, mtp_tensors
from mcore_rl.model.weight_map import ShardCoordinates, map_parameter
from mcore_rl.planner.engine import drafter_bytes, kv_bytes_per_token
from mcore_rl.trainer.actor import mtp_cross_entropy, predicted
from tests.model_shapes import published_shape

V3 = published_shape("deepseek-v3")
MTP = Speculation("mtp", 2)
MTP_ENDS = ("eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight")


def test_speculation_is_parsed():
    assert parse_speculation("off") is None
    assert parse_speculation("mtp:2") == MTP and str(MTP) == "mtp:2" and MTP.has_drafter
    assert parse_speculation("ngram:128") == Speculation("ngram", 128)


@pytest.mark.parametrize("text", ["mtp", "mtp:0", "ngram:129", "ngram:-1", "eagle:2", "mtp:2 ", ""])
def test_invalid_speculation_is_refused(text):
    with pytest.raises(UsageError, match=r"^--rl-speculate .* is not off, mtp:N .*; give"):
        parse_speculation(text)


@pytest.mark.parametrize(
    ("shape", "speculation", "reason"),
    [
        (dataclasses.replace(V3, num_mtp_layers=0), MTP, "config.json has none"),
        (dataclasses.replace(V3, num_mtp_layers=2), Speculation("mtp", 3), "is not a multiple of"),
        (dataclasses.replace(V3, architecture="kimi_k2"), MTP, "a drafter .* model_type 'kimi_k2'"),
    ],
)
def test_model_without_a_drafter_is_refused(shape, speculation, reason):
    with pytest.raises(UsageError, match=f"^--rl-speculate {speculation} .*{reason}.*; give "):
        check_drafter(speculation, shape)
    check_drafter(Speculation("ngram", 3), shape)
    check_drafter(MTP, V3)


def test_missing_or_mismatched_drafter_weights_are_named():
    held = {name: spec.shape for name, spec in mtp_tensors(V3)}
    check_drafter_weights(MTP, V3, held, "DIR")
    name = "model.layers.61.eh_proj.weight"
    other = {**held, name: (7168, 7168)}
    with pytest.raises(UsageError, match=rf"{name} of shape \[7168, 14336\], .* has it of shape"):
        check_drafter_weights(MTP, V3, other, "DIR")
    del other[name]
    with pytest.raises(UsageError, match=rf"{name} .* --rl-hf-checkpoint DIR lacks it; copy"):
        check_drafter_weights(MTP, V3, other, "DIR")
    check_drafter_weights(Speculation("ngram", 2), V3, {}, "DIR")


def test_draft_counts_of_the_scheduler_are_added_up():
    class Scheduler:
        def make_spec_decoding_stats(self, stats: Any, *rest: Any, **named: Any) -> Any:
            return stats

    scheduler = Scheduler()
    record = DraftRecord(scheduler)
    for drafted, accepted in ((3, 1), (0, 0), (1, 1)):
        made = scheduler.make_spec_decoding_stats(
            "stats", num_draft_tokens=drafted, num_accepted_tokens=accepted, request_id="r"
        )
        assert made == "stats"
    taken = record.take()
    assert taken == DraftCounts(2, 4, 2) and record.take() == DraftCounts()
    assert (taken + taken).metrics() == {
        "rollout/draft_acceptance": 0.5,
        "rollout/accepted_tokens_per_step": 1.0,
    }
    assert set(DraftCounts().metrics().values()) == {0.0}


def test_drafter_memory_is_its_share_of_weights_and_cache():
    whole = RolloutLayout(world_size=1, tp_size=1, dp_size=1, expert_parallel=False)
    split = RolloutLayout(world_size=32, tp_size=8, dp_size=4, expert_parallel=True)
    table = sum(
        (4 if spec.dtype == "float32" else 2) * math.prod(spec.shape) for _, spec in mtp_tensors(V3)
    )
    assert drafter_bytes(V3, whole, 1) == table > 22e9
    assert table / 40 < drafter_bytes(V3, split, 1) < table / 16
    assert drafter_bytes(V3, split, 0) == 0
    cached = kv_bytes_per_token(V3, 1)
    assert kv_bytes_per_token(V3, 1, drafter_layers=1) * 61 == cached * 62


def test_mtp_loss_predicts_tokens_ahead_in_the_same_sample():
    """The reference is a loop over samples and positions."""
    lengths = torch.tensor([1, 4, 2, 5])
    counts = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1]).bool()
    log_probs = [-torch.arange(1.0, 13.0), -torch.arange(2.0, 14.0)]
    expected: list[list[float]] = [[], []]
    start = 0
    for length in lengths.tolist():
        for place in range(length):
            for layer in range(2):
                # Position p scores token p+1, the layer's own prediction is of token p+2+layer.
                if place + 1 + layer < length and counts[start + place + 1 + layer]:
                    expected[layer].append(-log_probs[layer][start + place].item())
        start += length
    assert predicted(counts, lengths, 1).sum() == len(expected[0]) > len(expected[1]) > 1
    assert predicted(counts, lengths, 2).sum() == len(expected[1])
    assert not predicted(counts, lengths, 99).any()
    log_probs[0][0] = float("nan")  # where nothing is predicted
    loss, total = mtp_cross_entropy(log_probs, counts, lengths, [len(e) for e in expected])
    assert total.item() == sum(map(sum, expected))
    means = [sum(each) / len(each) for each in expected]
    assert loss.item() == pytest.approx(sum(means) / 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_of_trained_mtp_layers_tile_their_tensors(world_size):
    """By the names of Megatron's last stage."""
    shape = dataclasses.replace(
        V3, num_layers=2, hidden_size=16, is_moe_layer=(False, False), ffn_hidden_size=24
    )
    rows = 16 // world_size
    for name, local, tensor in (
        ("enorm.weight", (16,), "enorm.weight"),
        ("eh_proj.weight", (rows, 32), "eh_proj.weight"),
        ("final_layernorm.weight", (16,), "shared_head.norm.weight"),
        ("mtp_model_layer.input_layernorm.weight", (16,), "input_layernorm.weight"),
        ("mtp_model_layer.mlp.linear_fc2.weight", (16, 24 // world_size), "mlp.down_proj.weight"),
        # in a HybridModel
        ("mtp_model_layer.layers.0.input_layernorm.weight", (16,), "input_layernorm.weight"),
        (
            "mtp_model_layer.layers.1.mlp.linear_fc2.weight",
            (16, 24 // world_size),
            "mlp.down_proj.weight",
        ),
    ):
        for rank in range(world_size):
            at = ShardCoordinates(rank, world_size, 0, 1, 0, 1, layers=(1,))
            (piece,) = map_parameter(f"mtp.layers.0.{name}", local, shape, at)
            assert piece.tensor == f"model.layers.2.{tensor}"
            cut = [stop - start for start, stop in piece.checkpoint_box]
            assert cut == list(local) and piece.checkpoint_box[0][0] in (0, rank * rows)
    with pytest.raises(RuntimeError, match=r"'decoder.layers.0.enorm.weight' .* no counterpart"):
        map_parameter("decoder.layers.0.enorm.weight", (16,), shape, at)


def test_checkpoint_with_trained_mtp_layers_copies_shared_tensors():
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    names_of_mtp = [f"model.layers.{layer}.{end}" for layer in (2, 3) for end in MTP_ENDS]
    infos = {name: TensorInfo((4, 4), "bfloat16", 2) for name in [*names, *names_of_mtp]}
    checkpoint = HFCheckpoint(
        Path("here"),
        dict.fromkeys(infos, "model.safetensors"),
        {name: infos[name] for name in names},
        {name: infos[name] for name in names_of_mtp},
    )
    shape = dataclasses.replace(V3, num_layers=2, num_mtp_layers=2)
    assert checkpoint.with_mtp_trained(shape, 0) == checkpoint
    found = checkpoint.with_mtp_trained(shape, 1)
    assert found.tensors.keys() == {*names, "model.layers.2.eh_proj.weight"}
    assert found.mtp.keys() == {n for n in names_of_mtp if ".3." in n}  # carried still
    assert found.copies == {
        "model.layers.2.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight": "lm_head.weight",
    }
    assert found.everything == infos
