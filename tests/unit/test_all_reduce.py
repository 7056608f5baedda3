"""Every automatic rank map, and whether engines use vLLM's own all-reduce with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from mcore_rl.hybrid_engine.plan.placement import Placement, choose_rank_map
from mcore_rl.hybrid_engine.vllm import startup
from mcore_rl.hybrid_engine.vllm.all_reduce import all_reduce_obstacle
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig, engine_arguments
from mcore_rl.model.layout import RolloutLayout, TrainLayout, pipeline_layers
from tests.model_shapes import small_shape

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
MOST_EP, NODE = 16, 8
SLOW = pytest.mark.slow


# An ascending map is as cheap, but only a chain of swaps across the ranks of an engine leads to it.
MISSED = [
    (TrainLayout(8, 2, ep_size=ep, etp_size=etp), RolloutLayout(8, 2, True, 2))
    for ep, etp in ((8, 1), (4, 2))
]


def divisors(number: int, most: int = MOST_EP) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def training_layouts(world: int) -> Iterator[TrainLayout]:
    """All TP, PP, EP and DP, with experts in the TP of the rest or complete."""
    for tp in divisors(world):
        for pp in divisors(world // tp, most=8):
            yield TrainLayout(world, tp, pp)
            for etp in {1, tp}:
                for ep in divisors(world // pp // etp)[1:]:
                    if world // (tp * pp) % max(1, etp * ep // tp) == 0:
                        yield TrainLayout(world, tp, pp, ep_size=ep, etp_size=etp)


def placements(world: int) -> Iterator[Placement]:
    """All training layouts by all TP' and EP'."""
    for train in training_layouts(world):
        shape = small_shape(num_layers=8, num_experts=16 if train.ep_size > 1 else 0)
        layers = pipeline_layers(8, train.pp_size)
        for tp in divisors(world):
            spread = [n for n in divisors(world // tp) if tp * n <= MOST_EP]
            for dp in spread if train.ep_size > 1 else [1]:
                rollout = RolloutLayout(world, tp, train.ep_size > 1, dp)
                yield Placement(shape, train, layers, rollout)


def ascends(rank_map: tuple[int, ...], tp_size: int) -> bool:
    groups = np.array(rank_map).reshape(-1, tp_size)
    return bool((np.diff(groups, axis=1) > 0).all())


@pytest.mark.parametrize("world", [2, 4, 8, *(pytest.param(n, marks=SLOW) for n in (16, 32))])
def test_every_automatic_map_is_best_and_ascends_or_turns_the_own_all_reduce_off(
    world: int,
) -> None:
    turned_off = 0
    for placement in placements(world):
        tp_size, layout = placement.rollout.tp_size, (placement.train, placement.rollout)
        rank_map = choose_rank_map(placement, ranks_per_node=max(min(NODE, world), tp_size))
        found = all_reduce_obstacle(
            tp_size, rank_map, {}, captures_graphs=True, offloads_graphs=False
        )
        assert (found is None) == ascends(rank_map, tp_size), (layout, rank_map)
        turned_off += found is not None
        received = int(placement.received_bytes(rank_map).sum())
        if world > NODE:
            assert received == least_within_nodes(placement, rank_map), (layout, rank_map)
            continue
        least, least_ascending = least_of_all(placement)
        assert received == least, (layout, rank_map)
        is_missed = found is not None and least == least_ascending
        assert is_missed == (layout in MISSED), (layout, rank_map)
    assert turned_off or world == 2, "the test has cases of both kinds"


def least_within_nodes(placement: Placement, rank_map: tuple[int, ...]) -> int:
    """The least bytes if each node keeps its slots."""
    total, size = 0, max(NODE, placement.rollout.tp_size)
    identity = tuple(range(len(rank_map)))
    for first in range(0, len(rank_map), size):
        ranks = identity[first : first + size]
        slots = [slot for slot, rank in enumerate(rank_map) if rank in ranks]
        costs = placement.missing_bytes(ranks, slots)
        total += int(costs[linear_sum_assignment(costs)].sum())
    return total


def least_of_all(placement: Placement) -> tuple[int, int]:
    """The least bytes over all rank maps, and over those whose TP' groups ascend."""
    maps = permutations(placement.train.world_size)
    ranks = range(placement.train.world_size)
    costs = placement.missing_bytes(ranks, ranks)[maps, np.array(ranks)].sum(axis=1)
    groups = maps.reshape(len(maps), -1, placement.rollout.tp_size)
    ascending = (np.diff(groups, axis=2) > 0).all(axis=(1, 2))
    return int(costs.min()), int(costs[ascending].min())


@cache
def permutations(size: int) -> Any:
    return np.array(list(itertools.permutations(range(size))))


OBSTACLES = [
    # TP', rank map, environment, graphs captured, offloaded; words of the obstacle
    (4, (0, 2, 1, 3), {}, (True, False), "0, 2, 1, 3"),
    (4, (0, 2, 1, 3), {}, (True, True), "0, 2, 1, 3"),  # handles are exchanged all the same
    (2, (0, 2, 3, 1), {}, (True, False), "3, 1"),
    (4, (0, 2, 1, 3), {}, (False, False), None),
    (2, (0, 2, 1, 3), {}, (True, False), None),
    (1, (1, 0), EXPANDABLE, (True, False), None),
    (2, None, EXPANDABLE, (True, False), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    (2, (), {"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:1"}, (True, False), "PYTORCH_ALLOC_"),
    (2, None, {**EXPANDABLE, "PYTORCH_ALLOC_CONF": "a:1"}, (True, False), None),  # not read
    (2, None, EXPANDABLE, (True, True), None),  # graphs are in a pool of sleep's
    (2, None, EXPANDABLE, (False, False), None),
]


@pytest.mark.parametrize(("tp_size", "rank_map", "environment", "graphs", "words"), OBSTACLES)
def test_engine_starts_without_the_own_all_reduce_where_it_cannot_run(
    tp_size: int,
    rank_map: tuple[int, ...] | None,
    environment: dict[str, str],
    graphs: tuple[bool, bool],
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captures, offloads = graphs
    found = all_reduce_obstacle(
        tp_size, rank_map, environment, captures_graphs=captures, offloads_graphs=offloads
    )
    assert found is None if words is None else found and words in found.found and found.remedy
    monkeypatch.setattr(startup, "on_cuda", lambda: True)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    config = EngineConfig(
        tmp_path,
        tp_size=tp_size,
        rank_map=rank_map,
        enforce_eager=not captures,
        offload_graphs=offloads,
    )
    arguments = engine_arguments(config)
    assert arguments["disable_custom_all_reduce"] == (words is not None)
    assert arguments.get("sleep_mode_offload_cudagraph", False) == offloads
