"""The hand-over from trainers to engines on ranks of their own, against one within processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.layouts import job_flags
from tests.dist.test_float8_rollout import SIZES
from tests.rank_pool import RankPool, free_port

Results = list[dict[str, Any]]  # by joint rank: two trainers, then two ranks of engines
JOBS = "tests.dist.separate_hand_over_jobs"


def run(ranks: RankPool, job: str, flags: list[str]) -> Results:
    ports = [free_port() for _ in range(2)]
    return ranks.run(f"{JOBS}:{job}", world_size=4, flags=flags, ports=ports)


@pytest.fixture(
    scope="module",
    params=[
        ("tp2_pp1_ep2", "2"),  # one engine of TP2, experts over TP
        ("tp2_pp1_ep2", "1"),  # two engines
        ("tp1_pp2_ep1", "2"),
        ("tp1_pp2_ep1", "1"),
    ],
    ids=lambda param: f"{param[0]}_to_tp{param[1]}",
)
def results(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> Results:
    split, rollout_tp = request.param
    flags = job_flags(
        checkpoint_factory("deepseek_v3"),
        split,
        *("--lr", "1e-2", "--rl-rollout-tp-size", rollout_tp),
        precision="bf16",
    )
    return run(ranks, "hand_overs", flags)


def of(results: Results, name: str) -> list[dict[str, Any]]:
    return [result["versions"][name] for result in results]


@pytest.mark.parametrize(
    "name", ["loaded", "unchanged", "updated", "flipped", "repaired", "unattested", "again"]
)
def test_engines_store_what_they_would_store_in_the_trainers_processes(
    results: Results, name: str
) -> None:
    found = of(results, name)
    assert [one["raised"] for one in found] == [None] * 4
    assert len(found[0]["stored"]) > 20
    for trainer, engine in zip(found[:2], found[2:], strict=True):
        assert engine["stored"] == trainer["stored"]


def test_versions_differ_only_by_the_update(results: Results) -> None:
    for rank in (2, 3):
        stored = {name: v["stored"] for name, v in results[rank]["versions"].items()}
        assert stored["loaded"] == stored["unchanged"]
        num_changed = sum(
            stored["loaded"][name] != digest for name, digest in stored["updated"].items()
        )
        assert num_changed > 10


def test_engines_receive_the_lower_bound_and_trainers_nothing(results: Results) -> None:
    assert [result["needed"] for result in results[:2]] == [0, 0]
    for result in results:
        report = result["versions"]["loaded"]["report"]
        assert report["received_bytes"] == result["lower_bound"] == result["needed"]
        assert report["lower_bound_bytes"] == result["lower_bound"]
        assert report["attested"] and not report["repeated"]
    assert all(result["needed"] > 0 for result in results[2:])


def test_only_changes_travel(results: Results) -> None:
    for result in results[2:]:
        unchanged = result["versions"]["unchanged"]
        assert unchanged["report"]["received_bytes"] == unchanged["headers"]
        assert unchanged["report"]["saved_bytes"] > 0.9 * result["needed"]
        updated = result["versions"]["updated"]
        assert 0 < updated["report"]["received_bytes"] - updated["headers"] <= result["needed"]


def test_a_flipped_bit_is_repaired_by_the_plain_gather_on_all_ranks(results: Results) -> None:
    for one in of(results, "flipped"):
        assert one["report"]["repeated"] and one["report"]["attested"]
    for result in results:
        after = result["versions"]["repaired"]["report"]
        assert not after["repeated"]
        assert after["received_bytes"] == result["needed"], "copies from before were used"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unread", "rank 1: the disk is on fire"),
        ("unloaded", "rank 3: the disk is on fire"),
        ("unattested_unloaded", "the disk is on fire"),
    ],
)
def test_a_failure_is_raised_on_all_ranks(results: Results, name: str, text: str) -> None:
    for one in of(results, name):
        assert one["raised"] is not None and text in one["raised"]


def test_engines_draft_and_canaries_agree_across_ranks(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    checkpoint = checkpoint_factory("deepseek_v3", num_mtp_layers=1)
    more = ("--rl-rollout-tp-size", "1", "--rl-speculate", "mtp:1")
    flags = job_flags(checkpoint, "tp1_pp2_ep1", *more, precision="bf16")
    found = run(ranks, "canaries", flags)
    assert len({str(one["mtp_tensors"]) for one in found}) == 1 and found[0]["mtp_tensors"]
    assert all(one["drafter"] > 10 for one in found[2:])
    for one in found:
        assert one["clean"]["raised"] is one["misplaced_once"]["raised"] is None
        assert not one["clean"]["repeated"] and one["misplaced_once"]["repeated"]
        assert "canary prompt" in one["misplaced"]["raised"]
        assert one["again"]["raised"] is None
    for one in found[2:]:
        for name in ("clean", "misplaced_once", "again"):
            assert one[name]["stored_equal"], name


def test_trainers_quantise_for_engines_in_float8(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    checkpoint = checkpoint_factory("deepseek_v3", overrides=SIZES)
    flags = job_flags(checkpoint, "tp2_pp1_ep1", "--lr", "1e-2")
    found = run(ranks, "float8", [*flags, "--expert-tensor-parallel-size", "2"])
    for result in found:
        assert result["unlike"] == [[[], []]] * 2
        assert all("arrived as it was held (full)" in text for text in result["attested"])
        assert result["received"] == [result["lower_bound"]] * 2
    assert all(result["cut_blocks"] > 20 for result in found[:2])
    assert all(result["lower_bound"] > 0 for result in found[2:])
