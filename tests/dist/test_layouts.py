"""Any layout to any layout: received is the lower bound, and the planner knew it beforehand.

The real Megatron builds each training layout, the real vLLM each rollout layout, as far as to its
loaded model: on CPU vLLM cannot run all of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.rank_pool import RankPool


@dataclass(frozen=True)
class Case:
    """A model, its training layout by flags, and rollout as (TP', DP', with EP)."""

    arch: str
    world_size: int
    train: str  # e.g. "tp2 pp2 ep2"
    rollout: tuple[int, int, bool]
    options: tuple[tuple[str, Any], ...] = ()
    more: str = ""  # further flags
    ratio: float = 1.0  # received / lower bound, at most


# The last TP rank has fewer rows of the vocabulary, so that every rank would rather be that one,
# and the bound, which is each rank's own, cannot be had by all.
VOCABULARY = 1.005

TINY = (("size", "tiny"),)
CASES = {
    "pp_becomes_engines": Case("qwen3", 2, "tp1 pp2", (1, 1, False)),
    "tp_shrinks_to_one": Case("qwen3", 2, "tp2", (1, 1, False)),
    "tp_from_pp": Case("qwen3_moe", 2, "pp2", (2, 1, False), ratio=VOCABULARY),
    "tp_and_ep_intact": Case("deepseek_v3", 4, "tp2 pp2 ep2", (2, 1, True)),
    "tp_shrinks": Case("deepseek_v2", 4, "tp4", (2, 1, False)),
    "tp_and_ep_grow": Case("deepseek_v3", 4, "tp2 pp2 ep2", (4, 1, True), ratio=VOCABULARY),
    "ep_over_engine_dp": Case("qwen3_moe", 4, "pp2 ep2", (1, 2, True)),
    "ep_over_tp_and_engine_dp": Case("deepseek_v3", 4, "tp2 ep4", (2, 2, True)),
    "virtual_stages": Case(
        "qwen3_moe",
        4,
        "tp2 pp2 ep2",
        (2, 1, True),
        TINY,
        "--num-virtual-stages-per-pipeline-rank 2",
    ),
    "uneven_last_stage": Case(
        "deepseek_v3", 4, "tp2 pp2 ep2", (2, 1, True), TINY, "--decoder-last-pipeline-num-layers 1"
    ),
    "custom_stages": Case(
        "qwen3",
        2,
        "pp2",
        (2, 1, False),
        TINY,
        "--pipeline-model-parallel-layout Et|tttL",
        VOCABULARY,
    ),
    "tied_embeddings": Case("qwen3", 4, "tp2 pp2", (2, 1, False), (("tie_word_embeddings", True),)),
    "experts_split_by_tp": Case(
        "qwen3_moe", 4, "tp2 ep2", (2, 1, False), (), "--expert-tensor-parallel-size 2"
    ),
    "context_parallel": Case("qwen3", 4, "tp2 cp2", (2, 1, False)),
    "eight_ranks_ep_intact": Case("deepseek_v3", 8, "tp2 pp2 ep4", (2, 2, True)),
    "eight_ranks_tp_shrinks": Case("qwen3_moe", 8, "tp2 pp4 ep2", (1, 1, False), TINY),
    "experts_do_not_nest": Case("qwen3_moe", 4, "tp2 pp1 ep2", (4, 1, True), ratio=1.10),
}
_DEGREES = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "ep": "--expert-model-parallel-size",
    "cp": "--context-parallel-size",
}


@pytest.fixture(scope="module", params=list(CASES))
def handed_over(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> tuple[Case, list[dict[str, Any]]]:
    case = CASES[request.param]
    flags = [
        *("--rl-hf-checkpoint", str(checkpoint_factory(case.arch, **dict(case.options)))),
        *("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "2"),
        *("--rl-max-prompt-tokens", "32", "--rl-max-response-tokens", "32"),
        *case.more.split(),
    ]
    for degree in case.train.split():
        flags += [_DEGREES[degree[:2]], degree[2:]]
    tp_size, dp_size, expert_parallel = case.rollout
    results = ranks.run(
        "tests.dist.layout_jobs:hand_over",
        world_size=case.world_size,
        flags=flags,
        rollout_tp=tp_size,
        rollout_dp=dp_size,
        expert_parallel=expert_parallel,
    )
    return case, results


def test_engine_stores_what_its_own_loader_stores(handed_over: tuple) -> None:
    assert all(result["stored_equal"] for result in handed_over[1])


def test_received_bytes_are_the_lower_bound_and_were_planned(handed_over: tuple) -> None:
    case, results = handed_over
    for result in results:
        assert result["received"] == result["planned"]
        assert result["lower_bound"] == result["planned_lower_bound"]
        assert result["resident"] == result["planned_resident"]
        assert result["held"] == result["planned_held"]
    received = max(result["received"] for result in results)
    bound = max(result["lower_bound"] for result in results)
    print(f"{results[0]['layout']}: received / lower bound = {received} / {bound}")
    if case.ratio == 1.0:
        assert [r["received"] for r in results] == [r["lower_bound"] for r in results]
    else:
        assert received <= case.ratio * bound


def test_communicators_are_megatrons_and_as_planned(handed_over: tuple) -> None:
    for result in handed_over[1]:
        assert result["groups_as_planned"] and result["groups_are_megatrons"]
        assert result["groups"] <= 4  # of PP, EP, DP and TP
        spoke, planned = result["speaks_point_to_point"]
        assert spoke == planned
        assert result["made_groups"] == result["planned_to_make"] <= 1


def test_table_says_what_megatron_holds_and_vllm_needs(handed_over: tuple) -> None:
    for result in handed_over[1]:
        assert result["other_needs"] == []
        assert result["other_holdings"] == []
        assert result["unlike_the_checkpoint"] == []


def test_ranks_play_their_slots(handed_over: tuple) -> None:
    for result in handed_over[1]:
        assert result["engine_slot"] == result["layout_slot"]
