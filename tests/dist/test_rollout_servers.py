"""Two vLLM servers as one engine, compared with an engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.rollout_servers_jobs import LONG_TOKENS, NUM_TOP, certain
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]

# Batches of another size may round differently in bfloat16; here they do not.
MEAN_DIFFERENCE, LARGEST_DIFFERENCE = 0.005, 0.05


@pytest.fixture(scope="module")
def result(checkpoint_factory: Callable[..., Path], ranks: RankPool) -> dict[str, Any]:
    """The process runs once, and each test looks at one part of it."""
    checkpoint = checkpoint_factory("qwen3")
    (found,) = ranks.run(
        "tests.dist.rollout_servers_jobs:play",
        world_size=1,
        checkpoint=checkpoint,
        vocab_size=json.loads((checkpoint / "config.json").read_text())["vocab_size"],
    )
    return found


def test_a_request_alone_has_the_tokens_and_log_probs_of_an_engine_in_process(result):
    for found in result["alone"]:
        for name, (ours, theirs) in found.items():
            assert name == "candidates" or ours == theirs
    with_candidates = [found for found in result["alone"] if found["candidates"][0] is not None]
    assert len(with_candidates) == 4
    for found in with_candidates:
        ours, theirs = found["candidates"]
        assert ours[1] == theirs[1] and certain(ours) == certain(theirs)
        assert np.mean([len(each) for each in certain(ours)]) > 2
        ids, log_probs = (np.array(each) for each in ours)
        assert ids.shape == log_probs.shape == (len(found["tokens"][0]), NUM_TOP)
        assert (np.diff(log_probs) <= 0).all()
        # Sampled tokens among them have the same log-prob.
        is_sampled = ids == np.array(found["tokens"][0])[:, None]
        sampled = np.broadcast_to(np.array(found["log_probs"][0])[:, None], ids.shape)
        assert np.array_equal(log_probs[is_sampled], sampled[is_sampled])
    greedy = with_candidates[0]
    assert [each[0] for each in greedy["candidates"][0][1]] == greedy["log_probs"][0]
    stopping, rest = result["alone"][-2:]
    assert stopping["reasons"][0] == rest["reasons"][0] == "stop"
    assert len(stopping["tokens"][0]) - 8 == len(rest["tokens"][0])


def test_a_server_ends_responses_where_the_files_say(result):
    assert {by_files for by_files, _ in result["ends"]} == {True, False}
    assert all(by_files == on_server for by_files, on_server in result["ends"])


def test_a_server_names_the_weights_of_its_tokens(result):
    assert result["other version"]


def test_servers_that_do_not_return_experts_cannot_serve_r3(result):
    assert "no server is left" in result["r3"]
    assert "r3" in result["r3"] and "--enable-return-routed-experts" in result["r3"]


def test_cut_requests_keep_their_tokens_and_end_on_the_servers(result):
    found = result["cut"]
    assert len(found["num_tokens"]) == 20 and found["reasons"] == ["length"]
    assert all(5 <= number < LONG_TOKENS for number in found["num_tokens"])
    assert found["failures"] == [] and found["metrics"]["servers/excluded"] == 0
    assert found["mean"] < MEAN_DIFFERENCE and found["most"] < LARGEST_DIFFERENCE


def test_all_requests_of_a_server_that_hangs_finish_on_the_other_and_it_can_return(result):
    found = result["hung"]
    assert found["num_tokens"] == [LONG_TOKENS] * 20 and found["failures"] == []
    metrics = found["metrics"]
    assert metrics["servers/timeout"] >= 1 and metrics["servers/unreachable"] == 0
    assert metrics["servers/continued"] > 0 and metrics["servers/excluded"] == 1
    assert len(found["admitted"]) == 1 and found["after"] == [LONG_TOKENS] * 4
    assert "no answer within 1 s" in found["workers"]
    assert found["mean"] < MEAN_DIFFERENCE and found["most"] < LARGEST_DIFFERENCE


def test_all_requests_of_a_killed_server_finish_on_the_other(result):
    found = result["killed"]
    assert found["num_tokens"] == [LONG_TOKENS] * 20 and found["failures"] == []
    assert found["on_first"] and all(number >= 5 for number in found["on_first"])
    metrics = found["metrics"]
    assert metrics["servers/continued"] == metrics["servers/unreachable"] > 0
    assert metrics["servers/excluded"] == 1 and len(found["admitted"]) == 1
    # Tokens of both servers, the later ones of a prefill of the earlier ones.
    assert found["mean"] < MEAN_DIFFERENCE and found["most"] < LARGEST_DIFFERENCE
