"""The rank map and the bytes of any two layouts, against formulas and brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.hybrid_engine.plan.placement import Placement, choose_rank_map, with_rank_map
from mcore_rl.hybrid_engine.plan.transfer_plan import make_plan
from mcore_rl.hybrid_engine.plan.trees import Neighbourhoods
from mcore_rl.model.boxes import intersect
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import RolloutLayout, TrainLayout, pipeline_layers
from mcore_rl.model.tensors import Cut, checkpoint_tensors
from tests.model_shapes import DEEPSEEK_V3, small_shape
from tests.plans import covers_once


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def placements(draw: st.DrawFn) -> tuple[Placement, int]:
    """Any two layouts of a model on up to 16 ranks, and the ranks of a node."""
    world = draw(st.sampled_from([1, 2, 4, 8, 16]))
    tp_size = draw(st.sampled_from(divisors(world)))
    pp_size = draw(st.sampled_from([n for n in divisors(world // tp_size) if n <= 4]))
    per_stage = world // pp_size
    cp_size = draw(st.sampled_from(divisors(per_stage // tp_size)))
    has_experts = draw(st.booleans())
    etp_size = draw(st.sampled_from(divisors(per_stage))) if has_experts else tp_size
    ep_size = draw(st.sampled_from(divisors(per_stage // etp_size))) if has_experts else 1
    vp_size = draw(st.sampled_from([1, 2])) if pp_size > 1 else 1
    last = draw(st.sampled_from([None, vp_size])) if pp_size > 1 else None
    middle = draw(st.integers(1, 2)) * vp_size
    num_layers = middle * (pp_size - 1) + last if last else middle * pp_size
    train = TrainLayout(world, tp_size, pp_size, cp_size, ep_size, etp_size)
    rollout_tp = draw(st.sampled_from(divisors(world)))
    whole_experts = has_experts and draw(st.booleans())
    dp_size = draw(st.sampled_from(divisors(world // rollout_tp))) if whole_experts else 1
    shape = small_shape(
        num_layers=num_layers,
        num_experts=16 if has_experts else 0,
        latent=draw(st.booleans()),
        tied=draw(st.booleans()),
        vocab_size=draw(st.sampled_from([500, 512, 130])),
        num_kv_heads=draw(st.sampled_from([n for n in (1, 2, 16) if n % tp_size == 0])),
    )
    if shape.latent:
        shape = replace(shape, num_kv_heads=shape.num_heads)
    layers = pipeline_layers(num_layers, pp_size, vp_size=vp_size, last=last)
    rollout = RolloutLayout(world, rollout_tp, whole_experts, dp_size)
    node = draw(st.sampled_from([n for n in divisors(world) if n % rollout_tp == 0]))
    return Placement(shape, train, layers, rollout), node


@settings(max_examples=300, deadline=None)
@given(placements())
def test_plan_covers_every_needed_element_exactly_once(drawn: tuple[Placement, int]) -> None:
    placement, ranks_per_node = drawn
    rank_map = choose_rank_map(placement, ranks_per_node=ranks_per_node)
    ranks = range(placement.train.world_size)
    assert sorted(rank_map) == list(ranks)
    slot_of = {rank: slot for slot, rank in enumerate(rank_map)}
    have = [placement.held[placement.train_class[rank]] for rank in ranks]
    need = [placement.needed[placement.slot_class[slot_of[rank]]] for rank in ranks]
    near = Neighbourhoods(
        node=tuple(rank // ranks_per_node for rank in ranks),
        pipeline=tuple(placement.train.pp_group(rank)[0] for rank in ranks),
    )
    order = list(placement.infos)
    plan = make_plan(placement.infos, order=order, have=have, need=need, near=near)
    received = placement.received_bytes(rank_map)
    assert [plan.received_bytes(rank) for rank in ranks] == received.tolist()
    assert (received >= placement.lower_bound_bytes).all()
    arriving: list[dict] = [{} for _ in ranks]
    for move in plan.moves:
        assert any(intersect(move.box, box) == move.box for box in have[move.source][move.tensor])
        for rank in move.receivers:
            arriving[rank].setdefault(move.tensor, []).append(move.box)
    for rank in ranks:
        for tensor, (box,) in need[rank].items():
            kept = [intersect(box, own) for own in have[rank].get(tensor, ())]
            pieces = [*arriving[rank].pop(tensor, []), *(part for part in kept if part)]
            assert covers_once(box, pieces), (rank, tensor)
        assert not arriving[rank], "nothing else is received"


@settings(max_examples=100, deadline=None)
@given(placements())
def test_rollout_tp_group_stays_inside_node(drawn: tuple[Placement, int]) -> None:
    placement, ranks_per_node = drawn
    rollout = with_rank_map(placement, ranks_per_node=ranks_per_node)
    for first in range(0, rollout.world_size, rollout.tp_size):
        group = [rollout.rank(slot) for slot in range(first, first + rollout.tp_size)]
        assert len({rank // ranks_per_node for rank in group}) == 1


def _roles(shape: ModelShape) -> tuple[int, int, int]:
    """B_T, B_R, B_E: bytes that TP cuts, that it replicates, and of routed experts."""
    cut = replicated = experts = 0
    for _, spec in checkpoint_tensors(shape):
        one = spec.num_bytes // max(1, spec.num_experts)
        if spec.num_experts:
            experts += one
        elif spec.cut is Cut.REPLICATED:
            replicated += one
        else:
            cut += one
    return cut, replicated, experts


# (world, TP, PP, EP, TP', DP', with EP): nested, so that the formula's optimum can be reached.
NESTED = [
    (2, 1, 2, 1, 1, 1, False),
    (2, 2, 1, 1, 1, 1, False),
    (4, 2, 2, 1, 2, 1, False),
    (4, 4, 1, 1, 2, 1, False),
    (4, 1, 2, 1, 4, 1, False),
    (8, 4, 2, 1, 2, 1, False),
    (8, 2, 4, 1, 2, 1, False),
    (8, 8, 1, 1, 2, 1, False),
    (4, 2, 2, 2, 2, 1, True),
    (8, 2, 2, 4, 2, 2, True),
    (8, 4, 2, 4, 4, 1, True),
    (8, 2, 4, 2, 2, 1, True),
    (8, 1, 2, 4, 1, 4, True),
    (4, 2, 2, 2, 1, 1, False),
]


@pytest.mark.parametrize("layout", NESTED, ids=str)
def test_best_rank_map_reaches_lower_bound_for_nested_layouts(layout: tuple) -> None:
    """R_min for uniform stages (HybridFlow, arXiv 2409.19256, table 2, with replicated weights and
    experts beside the TP-cut ones), which each rank of a nested layout can reach."""
    world, tp, pp, ep, rollout_tp, rollout_dp, with_ep = layout
    shape = small_shape(num_layers=4, num_experts=16 if ep > 1 else 0, vocab_size=512)
    if ep > 1:
        shape = replace(shape, is_moe_layer=(True,) * 4)
    train = TrainLayout(world, tp_size=tp, pp_size=pp, ep_size=ep)
    backend = "flashinfer_nvlink_two_sided"  # shared experts are split
    rollout = RolloutLayout(world, rollout_tp, with_ep, rollout_dp, (), backend)
    placement = Placement(shape, train, pipeline_layers(4, pp), rollout)
    received = placement.received_bytes(choose_rank_map(placement, ranks_per_node=world))
    assert received.tolist() == placement.lower_bound_bytes.tolist()
    # Uniform stages: of the layers alone, as embedding and head lie on one stage each.
    cut, replicated, experts = _roles(shape)
    ends = sum(
        s.num_bytes for n, s in checkpoint_tensors(shape) if not n.startswith("model.layers")
    )
    norm = 2 * shape.hidden_size
    cut, replicated = cut - (ends - norm), replicated - norm
    etp, rollout_etp = train.etp_size, 1 if with_ep else rollout_tp
    expected = (
        cut * (1 / rollout_tp - 1 / (pp * max(tp, rollout_tp)))
        + replicated * (1 - 1 / pp)
        + experts
        * (
            1 / (rollout.ep_size * rollout_etp)
            - 1 / (pp * max(ep, rollout.ep_size) * max(etp, rollout_etp))
        )
    )
    stages = received.reshape(pp, -1)
    of_ends = [_missing_ends(placement, stage) for stage in range(pp)]
    for stage in range(pp):
        assert (stages[stage] - of_ends[stage] == round(expected)).all()


def _missing_ends(placement: Placement, stage: int) -> float:
    """What a rank of `stage` receives of embedding, final norm and head."""
    tp, rollout_tp = placement.train.tp_size, placement.rollout.tp_size
    vocabulary = placement.shape.vocab_size * placement.shape.hidden_size * 2
    norm = 2 * placement.shape.hidden_size
    kept = vocabulary / max(tp, rollout_tp)
    last = placement.train.pp_size - 1
    embedding = vocabulary / rollout_tp - (kept if stage == 0 else 0)
    head = vocabulary / rollout_tp - (kept if stage == last else 0)
    return embedding + head + (0 if stage == last else norm)


@pytest.mark.parametrize(
    ("tp", "pp", "rollout_tp", "expected"),
    [(4, 1, 2, (0, 2, 1, 3)), (4, 2, 2, (0, 2, 1, 3, 4, 6, 5, 7)), (4, 1, 1, (0, 1, 2, 3))],
)
def test_smaller_rollout_groups_take_ranks_at_regular_intervals(
    tp: int, pp: int, rollout_tp: int, expected: tuple
) -> None:
    world = tp * pp
    placement = Placement(
        small_shape(num_experts=0),
        TrainLayout(world, tp_size=tp, pp_size=pp),
        pipeline_layers(4, pp),
        RolloutLayout(world, rollout_tp, False),
    )
    found = choose_rank_map(placement, ranks_per_node=world)
    # Which of the equally good maps it is does not matter, what each slot starts with does.
    assert placement.received_bytes(found).tolist() == placement.received_bytes(expected).tolist()


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize(("rollout_tp", "rollout_dp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_rank_map_is_best_of_all(ep: int, rollout_tp: int, rollout_dp: int) -> None:
    shape = small_shape(num_layers=2)
    train = TrainLayout(4, tp_size=2, pp_size=1, ep_size=ep)
    rollout = RolloutLayout(4, rollout_tp, True, rollout_dp)
    placement = Placement(shape, train, pipeline_layers(2, 1), rollout)
    chosen = placement.received_bytes(choose_rank_map(placement, ranks_per_node=4)).sum()
    best = min(placement.received_bytes(m).sum() for m in itertools.permutations(range(4)))
    assert chosen == best


def test_deepseek_v3_on_256_ranks_equals_known_figures() -> None:
    cut, replicated, experts = _roles(DEEPSEEK_V3)
    assert (round(cut / 1e9, 1), round(replicated / 1e9, 2)) == (32.2, 2.06)
    assert round(experts / 1e9, 1) == 1307.8
    train = TrainLayout(256, tp_size=8, pp_size=8, ep_size=32)
    layers = pipeline_layers(61, 8, last=5)
    backend = "flashinfer_nvlink_two_sided"  # with others, vLLM keeps shared experts whole
    rollout = RolloutLayout(256, 8, True, 4, all2all_backend=backend)
    placement = Placement(DEEPSEEK_V3, train, layers, rollout)
    rank_map = choose_rank_map(placement, ranks_per_node=8)
    assert rank_map == tuple(range(256)), "EP intact and TP' = TP: stage s is engine s"
    received = placement.received_bytes(rank_map)
    assert math.isclose(received.mean(), 41.1e9, rel_tol=0.01)
    assert math.isclose(placement.resident_bytes.max(), 47.0e9, rel_tol=0.01)
    assert np.array_equal(received, placement.lower_bound_bytes)
    whole = Placement(DEEPSEEK_V3, train, layers, RolloutLayout(256, 8, True, 4))
    more = whole.resident_bytes.max() - placement.resident_bytes.max()
    assert more == 58 * 3 * 7168 * 2048 * 2 * 7 // 8
