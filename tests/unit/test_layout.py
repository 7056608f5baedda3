"""Ranks from degrees, against Megatron's own rank generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mcore_rl.common.errors import UsageError
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.model.layout import RolloutLayout, TrainLayout, pipeline_layers

SIZE = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> TrainLayout:
    tp_size, pp_size, cp_size, dp_size = (draw(SIZE) for _ in range(4))
    per_stage = tp_size * cp_size * dp_size
    etp_size = draw(st.sampled_from([n for n in range(1, per_stage + 1) if per_stage % n == 0]))
    rest = per_stage // etp_size
    ep_size = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
    world_size = per_stage * pp_size
    return TrainLayout(world_size, tp_size, pp_size, cp_size, ep_size, etp_size)


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_rank_coordinates_equal_megatron(layout: TrainLayout) -> None:
    megatron_adapter.prepare()
    from megatron.core.parallel_state import RankGenerator

    common = {"pp": layout.pp_size, "order": "tp-cp-ep-dp-pp"}
    dense = RankGenerator(tp=layout.tp_size, ep=1, dp=layout.dp_size, cp=layout.cp_size, **common)
    expert = RankGenerator(
        tp=layout.etp_size, ep=layout.ep_size, dp=layout.edp_size, cp=1, **common
    )
    for generator, kind, position in (
        (dense, "tp", layout.tp_rank),
        (dense, "pp", layout.pp_rank),
        (dense, "dp", layout.dp_rank),
        (expert, "tp", layout.etp_rank),
        (expert, "ep", layout.ep_rank),
        (expert, "pp", layout.pp_rank),
    ):
        for group in generator.get_ranks(kind):
            assert [position(rank) for rank in group] == list(range(len(group))), kind
            if kind == "pp":
                assert all(layout.pp_group(rank) == tuple(group) for rank in group)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: TrainLayout(4, tp_size=2, pp_size=3), r"2 x .* 3 x .* 1 = 6 .* 4 processes"),
        (
            lambda: TrainLayout(4, tp_size=2, pp_size=2, ep_size=4),
            r"1 x .* 4 x .* 2 = 8 .* 4 processes",
        ),
        (lambda: RolloutLayout(4, 3, False), r"--rl-rollout-tp-size 3 does not divide .* 4"),
        (lambda: RolloutLayout(8, 2, True, 8), r"--rl-rollout-ep-size 16 .* does not divide"),
        (lambda: RolloutLayout(8, 2, False, 2), "--rl-rollout-no-expert-parallel leaves no use"),
        (lambda: pipeline_layers(61, 8), r"61 layers do not divide .* 8 stages"),
        (lambda: pipeline_layers(61, 8, last=4), r"61 layers, of which 4 are .* do not divide"),
        (lambda: pipeline_layers(16, 2, vp_size=3), r"3 model chunks do not divide the 8 layers"),
    ],
)
def test_impossible_layout_is_refused(build: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build()


def test_pipeline_stages_become_engines() -> None:
    train = TrainLayout(8, tp_size=2, pp_size=4)
    rollout = RolloutLayout(8, tp_size=2, expert_parallel=True)
    assert rollout.num_engines == train.pp_size * train.dp_size == 4
    assert all(train.tp_rank(rank) == rollout.tp_rank(rank) for rank in range(8))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(["even", "first", "last", "both", "embedding", "loss", "embedding and loss"]),
)
def test_layers_of_stage_equal_megatron(
    pp_size: int, vp_size: int, per_chunk: int, kind: str
) -> None:
    megatron_adapter.prepare()
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if pp_size == 1:
        vp_size = 1
    uneven = pp_size > (2 if kind == "both" else 1)
    first = vp_size if uneven and kind in ("first", "both") else None
    last = 2 * vp_size if uneven and kind in ("last", "both") else None
    ends = [count for count in (first, last) if count is not None]
    embedding, loss = "embedding" in kind and pp_size > 1, "loss" in kind and pp_size > 1
    num_layers = per_chunk * vp_size * (pp_size - len(ends)) + sum(ends) - embedding - loss
    assume(num_layers > 0)
    found = pipeline_layers(
        num_layers,
        pp_size,
        vp_size=vp_size,
        first=first,
        last=last,
        embedding_counts=embedding,
        loss_counts=loss,
    )
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=vp_size if vp_size > 1 else None,
        pipeline_dtype=torch.bfloat16,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )
    for stage, chunks in enumerate(found):
        for chunk, layers in enumerate(chunks):
            at = {"vp_stage": chunk if vp_size > 1 else None, "pp_rank": stage}
            count = get_num_layers_to_build(config, **at)
            offset = get_transformer_layer_offset(config, **at)
            assert layers == tuple(range(offset, offset + count))
    held = sorted(n for chunks in found for layers in chunks for n in layers)
    assert held == list(range(num_layers))


def test_rank_map_assigns_slots_to_ranks() -> None:
    rollout = RolloutLayout(4, tp_size=2, expert_parallel=True, rank_map=(0, 2, 1, 3))
    assert [rollout.rank(slot) for slot in range(4)] == [0, 2, 1, 3]
    assert [rollout.slot(rank) for rank in range(4)] == [0, 2, 1, 3]
    assert [rollout.tp_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [rollout.tp_group_index(rank) for rank in range(4)] == [0, 1, 0, 1]
    with pytest.raises(RuntimeError, match="not a permutation"):
        RolloutLayout(4, tp_size=2, expert_parallel=True, rank_map=(0, 2, 1, 1))


def test_experts_span_data_parallel_ranks_of_engine() -> None:
    rollout = RolloutLayout(8, tp_size=2, expert_parallel=True, dp_size=2)
    assert (rollout.num_engines, rollout.ep_size) == (2, 4)
    assert rollout.slots_per_engine == 4
