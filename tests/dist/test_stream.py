"""Requests that come and go between the steps of an engine, on one engine of two ranks and on two.

What the ranks do is in `stream_jobs`; it runs once a layout, and each test looks at a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.stream_jobs import DROP, END, MAX_TOKENS, NUM_REQUESTS
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

ORDERS = ("few", "alone", "backwards", "after all")


# Of a dense model prompts may be cut, and beginnings that are shared are computed once.
@pytest.fixture(
    scope="module", params=[("qwen3", 1), ("deepseek_v3", 2)], ids=["dense TP1", "MoE TP2"]
)
def found(
    request: pytest.FixtureRequest, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> dict[str, Any]:
    architecture, tp_size = request.param
    of_ranks = ranks.run(
        "tests.dist.stream_jobs:streamed",
        world_size=2,
        checkpoint=checkpoint_factory(architecture),
        # In bfloat16 a batch of another size rounds otherwise, by which one sample in some
        # hundreds of tokens goes another way.
        dtype="float32",
        tp_size=tp_size,
    )
    assert of_ranks[0] == of_ranks[1]  # of one engine, or of two that got the same
    return of_ranks[0]


def tokens(completions: list[dict[str, Any]]) -> dict[int, list[int]]:
    return {each["number"]: each["tokens"] for each in completions}


def test_every_request_is_answered_once_and_within_its_length(found: dict[str, Any]) -> None:
    assert [each["number"] for each in found["all"]] == list(range(NUM_REQUESTS))
    limits = [8 + number * 5 % MAX_TOKENS for number in range(NUM_REQUESTS)]
    for limit, each in zip(limits, found["all"], strict=True):
        ended = len(each["tokens"]) < limit
        assert len(each["tokens"]) <= limit and (each["finish_reason"] == "stop" or not ended)
        assert len(each["log_probs"]) == len(each["tokens"])


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_depend_on_neither_order_nor_company(found: dict[str, Any], order: str) -> None:
    assert tokens(found[order]) == tokens(found["all"])
    for one, other in zip(found[order], found["all"], strict=True):
        np.testing.assert_allclose(one["log_probs"], other["log_probs"], atol=1e-5)


def test_requests_draw_from_streams_of_their_own(found: dict[str, Any]) -> None:
    """Three numbers have one beginning each, but other seeds."""
    assert len({tuple(each[:8]) for each in tokens(found["all"]).values()}) == NUM_REQUESTS


def test_what_is_ended_early_has_the_same_tokens_as_far_as_it_came(found: dict[str, Any]) -> None:
    cut, whole = tokens(found["cut short"]), tokens(found["all"])
    assert set(whole) - set(cut) == set(DROP)
    shorter = {number for number in cut if len(cut[number]) < len(whole[number])}
    assert shorter and shorter <= set(END)
    assert all(cut[number] == whole[number][: len(cut[number])] for number in cut)
    # What is dropped in the same step is as long as that, but for the token that ends the others.
    dropped = {int(number): length for number, length in found["dropped"].items()}  # by JSON
    assert set(dropped) == set(DROP)
    assert all(0 < length <= len(whole[number]) for number, length in dropped.items())
    reasons = {each["number"]: each["finish_reason"] for each in found["cut short"]}
    assert all(reasons[number] == "length" for number in shorter)


def test_a_fault_in_the_middle_leaves_no_request_behind(found: dict[str, Any]) -> None:
    sink, twice = found["faulty"]
    assert sink == "'a sink that fails'"
    assert twice == "a request of number 0 runs already"


def test_a_response_ends_with_the_token_that_completes_a_stop_string(found: dict[str, Any]) -> None:
    """Also where an earlier part of the response has begun that string."""
    stopped = found["stopped"]
    assert len(stopped["expected"]) > 4
    assert [each["tokens"] for each in stopped["at once"]] == stopped["expected"]
    assert all(map(len, stopped["first parts"]))
    joined = [
        [*first, *second["tokens"]]
        for first, second in zip(stopped["first parts"], stopped["second parts"], strict=True)
    ]
    assert joined == stopped["expected"]
    for each in (*stopped["at once"], *stopped["second parts"]):
        assert each["finish_reason"] == "stop" and len(each["log_probs"]) == len(each["tokens"])
