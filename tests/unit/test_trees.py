"""Trees of a transfer: each receiver once, from a rank with the data, in known groups."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.hybrid_engine.plan.placement import Placement, with_rank_map
from mcore_rl.hybrid_engine.plan.trees import (
    Forest,
    KnownGroups,
    Leg,
    Neighbourhoods,
    Tree,
    connections,
)
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.planner.layouts import stages_for
from mcore_rl.planner.links import Traffic, traffic_of
from mcore_rl.planner.settings import GB
from tests.model_shapes import MACHINE, published_shape
from tests.plans import direct

WORLD = 12
FAMILIES = (
    [tuple(range(first, WORLD, 4)) for first in range(4)],
    [tuple(range(first, first + 4)) for first in range(0, WORLD, 4)],
    [(rank, rank + 1) for rank in range(0, WORLD, 2)],
)
LAYOUTS = [
    TrainLayout(16, tp_size=4, pp_size=2, ep_size=8),
    TrainLayout(16, tp_size=2, pp_size=2, cp_size=2, ep_size=2, etp_size=2),
    TrainLayout(8, tp_size=2, pp_size=4),
    TrainLayout(4, ep_size=4),
]


def trees_of(holders: list[int], receivers: list[int], groups: KnownGroups, **more) -> list[Tree]:
    near = more.get("near") or Neighbourhoods.alike(WORLD)
    return Forest(holders, receivers, near, groups, more.get("load", [0] * WORLD)).trees


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_receiver_is_reached_once_by_a_rank_with_the_data(data):
    ranks = data.draw(st.permutations(range(WORLD)))
    num_holders = data.draw(st.integers(1, WORLD - 1))
    holders = sorted(ranks[:num_holders])
    receivers = sorted(ranks[num_holders : data.draw(st.integers(num_holders + 1, WORLD))])
    groups = KnownGroups(data.draw(st.lists(st.sampled_from(FAMILIES), unique_by=id)))
    numbers = st.lists(st.integers(0, 2), min_size=WORLD, max_size=WORLD)
    near = Neighbourhoods(*(tuple(data.draw(numbers)) for _ in range(2)))
    trees = trees_of(holders, receivers, groups, near=near, load=data.draw(numbers))
    assert sorted(rank for tree in trees for rank in tree.receivers) == receivers
    for tree in trees:
        assert tree.source in holders
        has = {tree.source}
        for hop in tree.hops:
            senders = [leg.sender for leg in hop]
            assert has.issuperset(senders) and len(set(senders)) == len(senders)
            for leg in hop:
                assert leg.receivers and has.isdisjoint(leg.receivers)
                assert len(leg.receivers) == 1 or leg.ranks in groups.sets
            has.update(rank for leg in hop for rank in leg.receivers)
        assert has == tree.ranks == {tree.source, *tree.receivers}
        assert sum(tree.sends(rank) for rank in has) == sum(map(len, tree.hops))


def test_pipeline_groups_send_to_stages_and_tp_groups_within_them():
    pipelines, nodes = FAMILIES[0], FAMILIES[1]
    everyone_else = [rank for rank in range(WORLD) if rank != 1]
    (tree,) = trees_of([1], everyone_else, KnownGroups([pipelines, nodes]))
    assert tree.hops == (
        (Leg(1, (5, 9)),),
        (Leg(1, (0, 2, 3)), Leg(5, (4, 6, 7)), Leg(9, (8, 10, 11))),
    )
    assert [tree.sends(rank) for rank in (0, 1, 5)] == [0, 2, 1]
    found = connections([tree], KnownGroups([pipelines, nodes]).sets, WORLD)
    assert [len(of_rank.groups) for of_rank in found] == [1, 2, 1, 1] + [1, 2, 1, 1] * 2
    assert not any(of_rank.peers for of_rank in found)


def test_group_with_a_rank_outside_the_receivers_is_not_used():
    (tree,) = trees_of([1], [5, 0, 2], KnownGroups(FAMILIES[:2]))
    assert all(len(leg.receivers) == 1 for leg in tree.legs)
    found = connections([tree, direct(3, [7])], KnownGroups(FAMILIES[:2]).sets, WORLD)
    assert not any(of_rank.groups for of_rank in found)
    assert found[3].peers == {7} and found[7].peers == {3} and found[11].peers == set()


def test_one_holder_reaches_all_in_few_hops_and_each_node_once():
    node = tuple(rank // 4 for rank in range(WORLD))
    (tree,) = trees_of(
        [0], list(range(1, WORLD)), KnownGroups(), near=Neighbourhoods(node, (0,) * WORLD)
    )
    entering = [leg for leg in tree.legs if node[leg.sender] != node[leg.receivers[0]]]
    assert len(entering) == 2
    assert len(tree.hops) <= 6 and max(tree.sends(rank) for rank in range(WORLD)) <= 3


@pytest.mark.parametrize("train", LAYOUTS, ids=TrainLayout.describe)
def test_groups_of_a_layout_divide_its_ranks(train):
    sizes = {"pp": train.pp_size, "ep": train.ep_size, "tp": train.tp_size}
    sizes["dp"] = train.dp_size * train.cp_size
    for name, groups in train.groups().items():
        assert sorted(rank for group in groups for rank in group) == list(range(train.world_size))
        assert {len(group) for group in groups} == {sizes[name]}
    for group in train.groups()["ep"]:
        assert [train.ep_rank(rank) for rank in group] == list(range(train.ep_size))
        assert len({(train.etp_rank(rank), train.pp_rank(rank)) for rank in group}) == 1
    for group in train.groups()["dp"]:
        assert len({(train.tp_rank(rank), train.pp_rank(rank)) for rank in group}) == 1


class Counting(dict[int, frozenset[int]]):
    """A family of groups that counts its look-ups."""

    asked = 0

    def get(self, *args: Any) -> Any:
        Counting.asked += 1
        return super().get(*args)


@pytest.mark.parametrize("world", [64, 512])
def test_groups_are_looked_up_for_holders_only(world, monkeypatch):
    train = TrainLayout(world, tp_size=8, pp_size=8, ep_size=world // 8)
    groups = KnownGroups(train.groups().values())
    for family in groups:  # the ranks of a group share one object
        assert len({id(group) for group in family.values()}) == len(set(family.values()))
    groups._of_rank = [Counting(family) for family in groups]
    monkeypatch.setattr(Counting, "asked", 0)
    holders = list(range(world // 8))
    receivers = range(world // 8, world)
    forest = Forest(holders, receivers, Neighbourhoods.alike(world), groups, [0] * world)
    assert len(forest.trees) == len(holders)
    assert Counting.asked == len(holders)  # the PP groups reach all; not 3 x world times more


def test_traffic_is_counted_without_hashing_trees(monkeypatch):
    """Trees of thousands of ranks are slow to hash, and every tensor has one."""

    def refuse(tree: Tree) -> int:
        raise AssertionError("a tree was hashed")

    monkeypatch.setattr(Tree, "__hash__", refuse)
    found = traffic(TrainLayout(256, tp_size=8, pp_size=8, ep_size=32), 8, 4)
    assert (found.received == found.lower_bound).all()


# ------------------------------------------------------------------------- DeepSeek-V3 on 256 ranks


def traffic(train: TrainLayout, tp_size: int, dp_size: int, name: str = "deepseek-v3") -> Traffic:
    shape = published_shape(name)
    stages = stages_for(shape.num_layers, train.pp_size)
    assert stages is not None
    rollout = RolloutLayout(train.world_size, tp_size, dp_size > 1 or tp_size > 1, dp_size)
    placement = Placement(shape, train, stages.layers, rollout)
    rank_map = with_rank_map(placement, ranks_per_node=8).rank_map
    return traffic_of(placement, rank_map, MACHINE)


def test_v3_preset_uses_two_groups_and_no_peer():
    found = traffic(TrainLayout(256, tp_size=8, pp_size=8, ep_size=32), 8, 4)
    assert {len(of_rank.groups) for of_rank in found.connections} == {2}  # of PP and of TP
    assert not any(of_rank.peers for of_rank in found.connections)
    assert (found.received == found.lower_bound).all()
    # Shared experts, whole on every rank, enter each node once: a rank sends its stage's experts to
    # other nodes, and within its node its part of those of all stages.
    held = found.sent_other_nodes.max()
    assert held == pytest.approx(6.34 * GB, rel=0.001)
    assert found.sent.max() - held == pytest.approx(0.64 * GB, rel=0.01)
    assert found.received_other_nodes.max() < 43 * GB < 46 * GB < found.received.max()


@pytest.mark.parametrize(("tp_size", "dp_size"), [(4, 8), (16, 2), (8, 8)])
def test_other_rollout_layouts_use_at_most_two_groups(tp_size, dp_size):
    found = traffic(TrainLayout(256, tp_size=8, pp_size=8, ep_size=32), tp_size, dp_size)
    assert max(len(of_rank.groups) for of_rank in found.connections) <= 2
    assert max(len(of_rank.peers) for of_rank in found.connections) < 32
    assert found.received.sum() < 1.05 * found.lower_bound.sum()
    assert found.sent.max() < found.received.max()
