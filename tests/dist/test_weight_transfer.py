"""A vLLM server in processes of its own, updated by a Megatron trainer, shard to shard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.layouts import job_flags
from tests.rank_pool import RankPool, free_port

# Two minutes, most of them for imports: five ranks and the server's three processes start at once.
pytestmark = pytest.mark.timeout(600)

SERVE = [
    *("--host", "127.0.0.1", "--served-model-name", "micro"),
    *("--weight-transfer-config", '{"backend": "mcore_rl"}'),
    *("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"),
    *("--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8"),
    *("--enforce-eager", "--logprobs-mode", "processed_logprobs"),
    *("--kv-cache-memory-bytes", str(1 << 26)),
    *("--enable-expert-parallel", "--attention-backend", "CPU_MLA"),
]


@pytest.fixture(scope="module")
def results(
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """Trainer and server live once; each rank's result, the server's last."""
    checkpoint = checkpoint_factory("deepseek_v3")
    outcomes = ranks.run_raw(
        "tests.dist.weight_transfer_jobs:play",
        world_size=5,
        flags=job_flags(checkpoint, "tp2_pp2_ep2", "--lr", "1e-2", precision="bf16"),
        folder=tmp_path_factory.mktemp("weight_transfer"),
        port=free_port(),
        checkpoint=checkpoint,
        serve=SERVE,
        timeout_seconds=500,
    )
    for rank, outcome in enumerate(outcomes):
        # Rank 3 ends itself in the middle of the last update.
        assert outcome.exit_code == (3 if rank == 3 else 0), outcome.output[-4000:]
    return [outcome.result for outcome in outcomes]


def test_text_and_log_probs_are_those_of_a_fresh_engine(results: list[dict[str, Any]]) -> None:
    answers, fresh = results[0]["answers"], results[4]["fresh"]
    assert list(answers) == ["export-1", "export-2"]
    assert answers == fresh
    for one, other in zip(answers["export-1"], answers["export-2"], strict=True):
        assert one["log_probs"] != other["log_probs"]
        assert one["tokens"] != other["tokens"]


def test_running_requests_are_held_and_finish(results: list[dict[str, Any]]) -> None:
    for update in results[0]["updates"]:
        assert 0 < update["chunks_before"] < 300
        assert update["running"] == {"reason": "length", "num_tokens": 300}


def test_engine_reports_the_weight_version(results: list[dict[str, Any]]) -> None:
    assert [u["reported_version"] for u in results[0]["updates"]] == ["1", "2"]


def test_workers_receive_what_they_need_and_nothing_is_gathered(
    results: list[dict[str, Any]],
) -> None:
    for result in results[:3]:
        for update in result["updates"]:
            received, needed = update["received_bytes"], update["needed_bytes"]
            assert received == needed
            assert received[:4] == [0] * 4  # trainers only send
            assert all(num > 0 for num in received[4:])


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ("stale plan", "the plan is not the same on all ranks of the joined world"),
        ("read", "rank 3 could not send"),
        ("shape", "lm_head.weight"),
    ],
)
def test_a_failure_is_raised_on_all_ranks_and_the_engine_recovers(
    results: list[dict[str, Any]], failure: str, text: str
) -> None:
    for result in results[:3]:
        assert text in result["failures"][failure]["error"]
    found = results[0]["failures"][failure]
    assert found["answers"] == results[4]["fresh"]["export-2"]  # the weights are still those
    if failure != "shape":  # that one fails before an update begins
        assert found["paused"]


def test_a_transfer_that_spoils_a_bit_is_repeated_by_the_plain_gather(
    results: list[dict[str, Any]],
) -> None:
    assert all(result["failures"]["bit"]["repeated"] for result in results[:3])
    found = results[0]["failures"]["bit"]
    assert found["version"] == "5" and found["answers"] == results[4]["fresh"]["export-2"]


def test_the_death_of_a_trainer_rank_ends_in_errors(results: list[dict[str, Any]]) -> None:
    for result in results[:3]:
        assert result["failures"]["death"]["error"]
    found = results[0]["failures"]["death"]
    assert found["paused"]
    assert found["version"] == "after shape"
