"""The hand-over, for real: Megatron's shards into vLLM engines in the same processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

MOVED = ("--moe-router-bias-update-rate", "0.01")
# name -> (architecture, options of the checkpoint, split, further flags)
CASES: dict[str, tuple[str, dict, str, tuple[str, ...]]] = {
    "tp_and_ep_intact": ("deepseek_v3", {}, "tp2_pp2_ep2", MOVED),
    "experts_split_over_tp": (
        "deepseek_v3",
        {},
        "tp2_pp2_ep2",
        ("--rl-rollout-no-expert-parallel",),
    ),
    "experts_gathered": ("qwen3_moe", {}, "tp1_pp2_ep2", ()),
    "tied_embeddings": ("qwen3", {"tie_word_embeddings": True}, "tp2_pp2_ep1", ()),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param("tp_and_ep_intact", marks=pytest.mark.quick), *list(CASES)[1:]],
)
def case(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> tuple[str, list[dict[str, Any]]]:
    """One start of the engines per layout, many assertions on what each rank reports."""
    arch, options, split, more = CASES[request.param]
    checkpoint = checkpoint_factory(arch, **options)
    flags = job_flags(checkpoint, split, "--lr", "1e-2", *more, precision="bf16")
    results = ranks.run("tests.dist.jobs:hand_over", world_size=SPLITS[split][3], flags=flags)
    return request.param, results


def test_engine_stores_what_its_own_loader_stores(case: tuple) -> None:
    for result in case[1]:
        assert result["num_stored"] > 20
        assert result["stored_equal"]


def test_update_reaches_the_engine(case: tuple) -> None:
    for result in case[1]:
        assert result["num_changed_by_update"] > 10
        # bfloat16 in two implementations, on random weights; tighter on the warmed-up model.
        assert result["mean_difference_after_update"] < 0.06


def test_moved_biases_of_experts_reach_the_engine_bit_for_bit(case: tuple) -> None:
    name, results = case
    of_v3, moved = CASES[name][0] == "deepseek_v3", CASES[name][3] == MOVED
    for result in results:
        in_engine, of_trainer, before = result["biases"]
        assert bool(in_engine) == of_v3 and of_trainer.keys() <= in_engine.keys()
        for stored, bias in in_engine.items():  # several modules of a layer have the same one
            layer, _, _ = stored.partition(".mlp.")
            assert bias == of_trainer[f"{layer}.mlp.gate.e_score_correction_bias"], stored
        assert (of_trainer != before) == moved
        assert {dtype for dtype, _ in in_engine.values()} <= {"torch.float32"}


def test_what_is_stored_otherwise_is_named_with_both_values(case: tuple) -> None:
    """`mcore_rl.verify` would print it: what an update has changed."""
    _, results = case
    pattern = r"rank \d+: \S+?\[[\d, ]*\] is (\S+) after the hand-over and (\S+) as vLLM's own load"
    for rank, result in enumerate(results):
        assert result["loaded_again_from_disk"]
        mine = [each for each in result["differing"] if each.startswith(f"rank {rank}: ")]
        assert len(mine) == result["num_changed_by_update"]
        for sentence in mine[:10]:
            found = re.match(pattern, sentence)
            assert found and found[1] != found[2], sentence
        assert all(each.endswith(" differs") for each in mine[10:])


def test_rng_is_restored_bit_for_bit(case: tuple) -> None:
    assert all(result["rng_restored"] for result in case[1])


def test_engines_draw_different_samples_and_their_ranks_the_same(case: tuple) -> None:
    by_engine: dict[int, list[list[list[int]]]] = {}
    for result in case[1]:
        by_engine.setdefault(result["engine"][0], []).append(result["first_tokens"])
    assert len(by_engine) > 1
    for tokens in by_engine.values():
        assert all(other == tokens[0] for other in tokens)
    different = [tokens[0] for tokens in by_engine.values()]
    assert all(a != b for i, a in enumerate(different) for b in different[i + 1 :])
    # The next version draws anew.
    assert all(result["first_tokens"] != result["second_tokens"] for result in case[1])


def test_failure_of_the_engine_is_reported(case: tuple) -> None:
    assert [result["failure"] for result in case[1]] == ["the kernel failed"] * len(case[1])


def test_messages_stay_inside_the_pipeline_group(case: tuple) -> None:
    name, results = case
    outside = [set(result["spoken_to"]) - set(result["pp_group"]) for result in results]
    if name in ("tp_and_ep_intact", "tied_embeddings"):
        assert not any(outside)
        assert all(result["spoken_to"] for result in results), "two stages: something must be sent"
    else:
        assert any(outside), "experts on other EP ranks must have been asked for"


def test_received_bytes_equal_what_was_missing(case: tuple) -> None:
    for result in case[1]:
        to_rollout = result["received_bytes"][0::2]
        assert to_rollout == [result["lower_bound_bytes"]] * 2
        assert result["lower_bound_bytes"] > 0


def test_hooks_run_around_both_directions(case: tuple) -> None:
    expected = [
        [kind, direction, version]
        for version in (1, 2)
        for direction in ("train_to_rollout", "rollout_to_train")
        for kind in ("start", "end")
    ]
    for result in case[1]:
        assert result["events"] == expected
        line = result["log_line"]
        assert line.startswith("[Reshard] direction=train_to_rollout duration=")
        assert "received=" in line and "lower_bound=" in line and "peak=" in line
        assert line.endswith("share_of_step=25.0%")


def test_caches_go_back_to_the_driver_before_either_of_the_engines_memories_wakes(
    case: tuple,
) -> None:
    for result in case[1]:
        assert result["events_of_switch"] == [
            *("give back", "allocate weights", "reload", "give back", "allocate kv_cache"),
        ]


def test_what_sleeps_cannot_be_read(case: tuple) -> None:
    """Nobody has in this job, where it had no memory: that would have ended the process."""
    for result in case[1]:
        assert min(result["gone_while_asleep"].values()) > 1 << 16
        said = result["read_asleep"]
        for call in ("stored_tensors", "reload"):
            assert said[call] == f"{call} while the weights sleep; call wake_weights first"


def test_no_shared_memory_is_left(case: tuple) -> None:
    assert all(result["shared_memory"] == [] for result in case[1])
