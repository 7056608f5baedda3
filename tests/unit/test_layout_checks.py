"""Rollout layouts from flags: nodes, expert parallelism of engines, stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mcore_rl.arguments import RLConfig
from mcore_rl.errors import UsageError
from mcore_rl.hybrid_engine.layout import TrainLayout, pipeline_layers
from mcore_rl.layout_checks import check_rollout, check_stages, ranks_per_node
from tests.model_shapes import small_shape


def rollout(world_size: int, **given: Any) -> Any:
    layout = TrainLayout(world_size, tp_size=4, ep_size=4)
    shape = replace(small_shape(), num_heads=48, num_kv_heads=48)
    layers = pipeline_layers(shape.num_layers, 1)
    return check_rollout(RLConfig(**given), shape, layout, layers, has_cuda=True)


@pytest.mark.parametrize(
    ("world_size", "given", "sentence"),
    [
        (12, {"ranks_per_node": 8}, r"--rl-ranks-per-node 8 does not divide the world of 12"),
        (12, {"ranks_per_node": 6}, r"--rl-rollout-tp-size 4 neither divides .* 6 ranks of a node"),
        (16, {"rollout_ep_size": 6}, r"--rl-rollout-ep-size 6 is no multiple .* TP size 4"),
        (
            16,
            {"rollout_ep_size": 12},
            r"--rl-rollout-ep-size 12 .* does not divide the world of 16",
        ),
    ],
)
def test_impossible_rollout_is_told(world_size: int, given: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        rollout(world_size, **given)


def test_experts_span_data_parallel_ranks_of_an_engine() -> None:
    found = rollout(16, rollout_ep_size=8, ranks_per_node=8)
    assert (found.tp_size, found.dp_size, found.ep_size, found.num_engines) == (4, 2, 8, 2)


def test_tp_group_may_fill_whole_nodes() -> None:
    assert rollout(16, rollout_tp_size=8, ranks_per_node=4).tp_size == 8


def test_ranks_of_a_node_come_from_the_flag_then_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_per_node(RLConfig(), 64) == 8
    assert ranks_per_node(RLConfig(), 4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert ranks_per_node(RLConfig(), 64) == 16
    assert ranks_per_node(RLConfig(ranks_per_node=4), 64) == 4


def test_stages_of_flags() -> None:
    shape = small_shape(num_layers=8)
    even = check_stages(shape, 2, {"num_layers_per_virtual_pipeline_stage": 2})
    assert even == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    custom = check_stages(shape, 2, {"pipeline_model_parallel_layout": "Ett|tttttt,L"})
    assert [len(chunks[0]) for chunks in custom] == [2, 6]
    counted = {"account_for_embedding_in_pipeline_split": True}
    assert [len(c[0]) for c in check_stages(replace(shape, num_layers=7), 2, counted)] == [3, 4]
    with pytest.raises(UsageError, match="does not divide the 4 layers of a stage"):
        check_stages(shape, 2, {"num_layers_per_virtual_pipeline_stage": 3})
    with pytest.raises(UsageError, match="cannot be read"):
        check_stages(shape, 2, {"pipeline_model_parallel_layout": "Ett|ttt|tttL"})
