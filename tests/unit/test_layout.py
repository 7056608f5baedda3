"""Ranks from degrees, against Megatron's own rank generator."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl import megatron_adapter
from mcore_rl.errors import UsageError
from mcore_rl.hybrid_engine.layout import RolloutLayout, TrainLayout

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
def test_rank_coordinates_equal_megatrons(layout: TrainLayout) -> None:
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


def test_product_that_does_not_divide_the_world_is_printed() -> None:
    with pytest.raises(UsageError, match=r"2 x .* 3 x .* 1 = 6 .* 4 processes"):
        TrainLayout(4, tp_size=2, pp_size=3)
    with pytest.raises(UsageError, match=r"1 x .* 4 x .* 2 = 8 .* 4 processes"):
        TrainLayout(4, tp_size=2, pp_size=2, ep_size=4)


def test_pipeline_parallelism_becomes_engines() -> None:
    train = TrainLayout(8, tp_size=2, pp_size=4)
    rollout = RolloutLayout(8, tp_size=2, expert_parallel=True)
    assert rollout.num_engines == train.pp_size * train.dp_size == 4
    assert all(train.tp_rank(rank) == rollout.tp_rank(rank) for rank in range(8))
    assert [rollout.engine_index(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rollout_tp_size_must_divide_the_world() -> None:
    with pytest.raises(UsageError, match=r"--rl-rollout-tp-size 3 does not divide .* 4"):
        RolloutLayout(4, tp_size=3, expert_parallel=False)
