"""What --rl-speculate may say, which checkpoints can draft, and what a drafter takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.vllm.drafter import DraftCounts, DraftRecord
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.speculation import (
    Speculation,
    check_drafter,
    check_drafter_weights,
    parse_speculation,
)
from mcore_rl.model.tensors import mtp_tensors
from mcore_rl.planner.parameters import drafter_bytes, kv_bytes_per_token
from tests.model_shapes import published_shape

V3 = published_shape("deepseek-v3")
MTP = Speculation("mtp", 2)


def test_a_drafter_and_its_tokens_are_read() -> None:
    assert parse_speculation("off") is None
    assert parse_speculation("mtp:2") == MTP and str(MTP) == "mtp:2" and MTP.has_drafter
    assert parse_speculation("ngram:128") == Speculation("ngram", 128)


@pytest.mark.parametrize("text", ["mtp", "mtp:0", "ngram:129", "ngram:-1", "eagle:2", "mtp:2 ", ""])
def test_anything_else_is_refused_with_what_may_be_said(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--rl-speculate .* is not off, mtp:N .*; give for"):
        parse_speculation(text)


@pytest.mark.parametrize(
    ("shape", "speculation", "reason"),
    [
        (dataclasses.replace(V3, num_mtp_layers=0), MTP, "config.json has none"),
        (dataclasses.replace(V3, num_mtp_layers=2), Speculation("mtp", 3), "is no multiple of"),
        (
            dataclasses.replace(V3, architecture="kimi_k2"),
            MTP,
            "a drafter of vLLM's for model_type 'kimi_k2'",
        ),
    ],
)
def test_a_model_that_vllm_cannot_draft_for_is_refused(
    shape: Any, speculation: Speculation, reason: str
) -> None:
    with pytest.raises(UsageError, match=f"^--rl-speculate {speculation} .*{reason}.*; give "):
        check_drafter(speculation, shape)
    check_drafter(Speculation("ngram", 3), shape)
    check_drafter(MTP, V3)


def test_weights_that_are_missing_or_of_another_shape_are_named() -> None:
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


def test_drafts_are_counted_as_the_scheduler_sees_them_and_added_up() -> None:
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


def test_a_drafter_takes_its_share_of_weights_and_cache() -> None:
    whole = RolloutLayout(world_size=1, tp_size=1, dp_size=1, expert_parallel=False)
    split = RolloutLayout(world_size=32, tp_size=8, dp_size=4, expert_parallel=True)
    table = sum(
        4 * spec.shape[0] if spec.dtype == "float32" else 2 * _elements(spec.shape)
        for _, spec in mtp_tensors(V3)
    )
    assert drafter_bytes(V3, whole, 1) == table > 22e9
    assert table / 40 < drafter_bytes(V3, split, 1) < table / 16
    assert drafter_bytes(V3, split, 0) == 0
    cached = kv_bytes_per_token(V3, 1)
    assert kv_bytes_per_token(V3, 1, drafter_layers=1) * 61 == cached * 62


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)
