"""Faults of servers: which responses they fail, and when a run waits no longer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mcore_rl.hybrid_engine.remote.server_engine import ServerEngine
from mcore_rl.hybrid_engine.remote.server_generation import may_end
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from tests.unit.fake_servers import FakeServer, fake_servers, response_to
from tests.unit.server_engines import (
    NUM_TOKENS,
    Make,
    Tokenizer,
    assert_expected,
    finished,
    making,
    nan_log_prob,
    request_of,
    sampled,
    set_token_timeout,
    until,
    until_no_server_runs,
    update,
    wrong_id,
)


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with fake_servers(3) as found:
        yield found


@pytest.fixture
def make() -> Iterator[Make]:
    with making() as made:
        yield made


FAILING: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "429": {"status": 429},
    "down": {"is_down": True},
    "no tokens": {"end_after": 0},
    "malformed": {"raw": lambda number: b"data: {"},
    "empty": {"raw": lambda number: b"data: [DONE]"},
    "log-prob NaN": {"change": nan_log_prob},
    "unknown token": {"change": wrong_id},
    "silent": {"hold_after": 0},
}


def begin_again(engine: ServerEngine, chosen: Sequence[FakeServer], fault: dict[str, Any]) -> None:
    """Give new weights to servers that answer probes, and fail what follows."""
    for each in chosen:
        version = each.weight_version
        each.reset()
        each.weight_version = version
    until(lambda: not engine.admitted or {*engine.admitted} == {each.url for each in chosen})
    until(lambda: len(engine.returned) + len(engine.admitted) == len(chosen))
    for each in chosen:
        set_token_timeout(engine, each, 0.1 if "hold_after" in fault else 60.0)
        for name, value in fault.items():
            setattr(each, name, value)
    # As the trainer does it: the weights are those of the step that continues.
    engine.admit(dict.fromkeys(engine.begin_update(), 100), 1)


@pytest.mark.parametrize("fault", FAILING.values(), ids=FAILING)
def test_faults_of_a_response_are_counted_across_updates(servers, make, fault):
    engine, request = make(servers[0]), request_of(0)
    failure = None
    for number in range(1, 4):
        begin_again(engine, servers[:1], fault)
        with engine.generation() as generation:
            generation.submit(request)
            until(lambda: not engine.admitted)
            if number < 3:
                until_no_server_runs(generation)
                generation.end_soon([0])
                assert generation.num_running == 0
            else:
                failure = finished(generation)[0].failure
    assert failure is not None and "failed it 3 times" in failure
    assert engine.take_metrics()["servers/failed"] == 1
    # With the same weights an evaluation that is repeated does not try it again.
    begin_again(engine, servers[:1], {})
    assert sampled(engine, [request])[0].failure == failure
    update(engine, servers[:1], 2)
    assert_expected(sampled(engine, [request]), [request])


def test_faults_are_forgotten_with_the_next_token_but_not_without_end(servers, make):
    engine = make(servers[0])
    completions: list[Completion] = []
    num_faults, fault = 0, {"end_after": 1}
    begin_again(engine, servers[:1], fault)
    with engine.generation() as generation:
        generation.submit(request_of(0, max_tokens=40))
        while not completions:
            until(lambda: not engine.admitted)
            until_no_server_runs(generation)
            num_faults += 1
            completions = generation.step()
            begin_again(engine, servers[:1], fault)
    assert completions[0].failure is not None and "failed it 12 times" in completions[0].failure
    assert num_faults == 12 and len(completions[0].token_ids) == 12


def test_a_server_that_fails_all_requests_loses_one_prompt_at_a_time(servers, make):
    engine = make(servers[0], patience_seconds=3600.0)
    requests = [request_of(0), request_of(10), request_of(1)]
    requests[1] = Request(10, requests[0].token_ids, NUM_TOKENS, Sampling(), seed=12)
    found: dict[int, Completion] = {}
    for _ in range(6):
        begin_again(engine, servers[:1], {"status": 500})
        with engine.generation() as generation:
            for request in requests:
                if request.number not in found:
                    generation.submit(request)
            until(lambda: not engine.admitted)
            until_no_server_runs(generation)
            found |= {each.number: each for each in generation.step()}
            generation.end_soon([each.number for each in requests])
    assert len(found) == 2 - (1 in found)
    assert all(each.failure for each in found.values())
    rest = [each for each in requests if each.number not in found]
    begin_again(engine, servers[:1], {})
    assert_expected(sampled(engine, rest), rest)


def test_a_server_that_refuses_all_requests_is_excluded_in_the_end(servers, make):
    servers[0].status = 400
    engine = make(servers[0], patience_seconds=3600.0)
    assert sampled(engine, [request_of(0)])[0].failure is not None
    assert engine.admitted == (servers[0].url,)  # this request was at fault, as far as is known
    with engine.generation() as generation:
        generation.submit(request_of(1))
        until(lambda: not engine.admitted)


def test_tokens_between_two_updates_are_progress_unless_they_are_wrong(servers, make):
    engine = make(servers[0])
    for change, has_sampled in ((lambda event: None, True), (nan_log_prob, False)):
        servers[0].change = change
        engine.begin_update()
        engine.admit({servers[0].url: 4}, 1)
        with engine.generation() as generation:
            generation.submit(request_of(0))
            until(lambda: generation.step() or not engine.admitted)
        engine.begin_update()
        assert engine.has_sampled == has_sampled
        engine.begin_update()
        assert not engine.has_sampled
    assert list(engine.faults) == [servers[0].url]


@pytest.mark.parametrize(("ends", "is_complete"), [((), False), ("last", True), ("others", False)])
def test_response_that_stops_early_ends_in_an_end_token(servers, make, ends, is_complete):
    tokens, _ = response_to([0, 5, 6], 3)
    ends = {"last": tokens[-1:], "others": tokens[:2]}.get(ends, ends)
    bad, good = servers[:2]
    engine = make(bad, good, end_tokens=tuple(ends))
    bad.stop_after = good.stop_after = 3
    requests = [request_of(0)]
    if not is_complete:
        good.stop_after = None
        update(engine, [bad], 1)
        with engine.generation() as generation:
            generation.submit(requests[0])
            until(lambda: not engine.admitted)
            update(engine, [good], 1)
            assert_expected(finished(generation), requests)
        assert engine.take_metrics()["servers/wrong_answer"] == 1
        return
    found = sampled(engine, requests)[0]
    assert found.token_ids.tolist() == tokens and found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("given", "num_own", "new", "is_end"),
    [
        ("xx", 0, "abc", True),
        ("abc", 0, "xx", False),  # the prompt's
        ("xab", 2, "c", True),  # it began in an earlier part
        ("xab", 0, "c", True),  # vLLM also reads the end of the prompt
        ("x", 0, "abcyyyy", True),  # tokens of a draft come together
        ("x", 0, "abc" + "y" * 60, False),
        ("x", 0, "ab", False),
        ("x", 0, "!", True),
    ],
)
def test_what_a_response_with_stop_texts_may_end_with(given, num_own, new, is_end):
    ids, more = ([ord(letter) - 33 for letter in text] for text in (given, new))
    request = Request(
        0, np.array(ids, dtype=np.int32), 99, Sampling(stop=("abc",)), num_own=num_own
    )
    assert may_end(request, more, {0}, Tokenizer()) == is_end
    without = replace(request, sampling=Sampling(ignore_eos=True))
    assert not may_end(without, more, {0}, Tokenizer())
