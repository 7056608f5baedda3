"""Servers as one engine: which of them get requests, and what becomes of those that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from mcore_rl.hybrid_engine.remote.server_generation import ServerGeneration, StopSearch
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling, seed_of
from mcore_rl.moe.routing import RoutedLayers
from mcore_rl.rollout.stream import StreamActions
from tests.streams import run_stream
from tests.unit.fake_servers import FakeServer, fake_servers, response_to
from tests.unit.server_engines import (
    NUM_TOKENS,
    Make,
    Tokenizer,
    assert_expected,
    finished,
    making,
    nan_log_prob,
    old_weights,
    request_of,
    sampled,
    set_token_timeout,
    tokens_of,
    until,
    until_no_server_runs,
    update,
    wrong_id,
)

ROUTED = RoutedLayers(layers=(0,), topk=1, num_experts=2)


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    with fake_servers(3) as found:
        yield found


@pytest.fixture
def make() -> Iterator[Make]:
    with making() as made:
        yield made


# What servers sample


def test_requests_spread_over_all_servers_within_their_capacity(servers, make):
    engine = make(*servers)
    requests = [request_of(number) for number in range(40)]
    assert_expected(sampled(engine, requests), requests)
    assert all(0 < server.most_running <= 4 for server in servers)
    assert sum(len(server.bodies) for server in servers) == 40
    assert engine.config.max_num_seqs == 12


def test_server_gets_no_more_requests_than_it_runs_at_a_time(servers, make):
    engine = make(*servers)
    urls = [each.url for each in servers]
    requests = [request_of(number) for number in range(30)]
    for first, most in ((1, [1, 4, 4]), (100, [4, 4, 4])):
        for server in servers:
            server.hold_after, server.most_running = 3, 0
        engine.begin_update()
        engine.admit(dict.fromkeys(urls, 100) | {urls[0]: first}, 1)
        with engine.generation() as generation:
            for request in requests:
                generation.submit(request)
            until(lambda most=most: [each.num_running for each in servers] == most)
            for server in servers:
                server.hold_after = None
            assert_expected(finished(generation), requests)
        assert [each.most_running for each in servers] == most


def test_samples_of_a_group_run_on_one_server_while_it_has_room(servers, make):
    engine = make(*servers)
    prompts = [np.array([prompt, 1, 2], dtype=np.int32) for prompt in range(3)]
    requests = [
        Request(number, prompts[number // 4], NUM_TOKENS, Sampling()) for number in range(12)
    ]
    sampled(engine, requests)
    seen = [{body["token_ids"][0] for body in server.bodies} for server in servers]
    assert sorted(map(sorted, seen)) == [[0], [1], [2]]


def test_the_loop_over_an_engines_steps_runs_on_servers(servers, make):
    engine = make(*servers)
    requests = [request_of(number) for number in range(9)]
    found: dict[int, Completion] = {}

    class Scheduler:
        """Submits requests one step after the other."""

        to_do = list(requests)
        restored = dropped = between_steps = lambda self, *_: None

        def schedule(self, num_running: int) -> StreamActions:
            submit = tuple(self.to_do.pop() for _ in range(min(2, len(self.to_do))))
            return StreamActions(submit, more=bool(self.to_do))

        def finished(self, completion: Completion) -> None:
            found[completion.number] = completion

    run_stream(engine, Scheduler())
    assert_expected(found, requests)
    assert engine.text_of(found[0].token_ids) == Tokenizer().decode(found[0].token_ids, True)


# Faults


FAULTS = [
    ({"close_after": 3}, "unreachable", 3),
    ({"end_after": 3}, "unreachable", 3),
    ({"is_down": True}, "unreachable", 0),
    ({"status": 500}, "refused", 0),
    ({"status": 403}, "refused", 0),
    ({"hold_after": 3}, "timeout", 3),
    ({"hold_after": 0}, "timeout", 0),
    ({"change": nan_log_prob}, "wrong_answer", 0),
    ({"change": wrong_id}, "wrong_answer", 0),
    ({"change": old_weights}, "other_version", 0),
]


@pytest.mark.parametrize(("fault", "kind", "num_kept"), FAULTS)
def test_a_request_whose_server_fails_continues_on_another(servers, make, fault, kind, num_kept):
    bad, good = servers[:2]
    # Requests find the fault, not a probe.
    engine = make(bad, good, admits=False, probe_interval_seconds=3600)
    until(lambda: len(engine.returned) == 2)
    update(engine, servers[:2], 1)
    for name, value in fault.items():
        setattr(bad, name, value)
    if kind == "timeout":
        set_token_timeout(engine, bad, 0.5)
    requests = [request_of(number) for number in range(8)]
    found = sampled(engine, requests)
    assert_expected(found, requests)
    metrics = engine.take_metrics()
    # 4 requests were on it, or fewer if it was excluded before the last of them came.
    assert metrics[f"servers/{kind}"] == metrics["servers/continued"] == len(bad.bodies) > 0
    assert metrics["servers/excluded"] == metrics["servers/admitted"] == 1
    assert metrics["servers/failed"] == 0
    assert engine.admitted == (good.url,)
    # What arrived is not sampled again, unless it was wrong.
    kept = [len(body["token_ids"]) - 3 for body in good.bodies]
    if kind == "timeout":  # on a machine that stands still, it comes before a token
        assert max(kept) <= num_kept
    else:
        assert sorted(kept) == sorted([0] * (8 - len(bad.bodies)) + [num_kept] * len(bad.bodies))
    for body, so_far in zip(good.bodies, kept, strict=True):
        params = body["sampling_params"]
        assert params["max_tokens"] == NUM_TOKENS - so_far
        assert params["seed"] == (seed_of(11, "after", so_far) if so_far else 11)


def test_a_restarted_server_is_excluded_though_it_is_healthy(servers, make):
    engine = make(*servers[:2])
    servers[0].weight_version = "default"
    until(lambda: engine.admitted == (servers[1].url,))
    assert engine.take_metrics()["servers/other_version"] == 1
    # It answers, so the next update can include it.
    until(lambda: engine.returned == (servers[0].url,))


def test_no_server_tells_the_version_of_vllm_for_others(servers, make):
    servers[0].vllm_version, servers[0].extra = "0.31.0", {"weight_versions": None}
    engine = make(*servers[:2])  # with both
    requests = [request_of(number) for number in range(8)]
    assert_expected(sampled(engine, requests), requests)
    servers[1].extra = servers[0].extra  # its vLLM names the weights of tokens
    sampled(engine, requests)
    assert engine.admitted == (servers[0].url,)


@pytest.mark.parametrize("probe_status", [400, 503])
def test_a_server_that_does_not_answer_probes_is_excluded(servers, make, probe_status):
    engine = make(*servers[:2])
    servers[0].probe_status = probe_status
    until(lambda: engine.admitted == (servers[1].url,))
    assert engine.returned == ()
    assert engine.take_metrics()["servers/refused"] == 1


def test_the_first_update_has_all_servers_that_answer(servers, make):
    """It begins before the first probes have ended."""
    urls = {each.url for each in servers[:2]}
    assert set(make(*servers[:2], admits=False).begin_update()) == urls


def test_a_server_that_comes_back_gets_requests_after_an_update_alone(servers, make):
    engine = make(*servers[:2])
    servers[0].is_down = True
    until(lambda: engine.admitted == (servers[1].url,))
    assert engine.begin_update() == (servers[1].url,)
    update(engine, servers[1:2], 2)
    servers[0].is_down, servers[0].weight_version = False, "2"  # even with the right version
    until(lambda: engine.returned == (servers[0].url,))
    requests = [request_of(number) for number in range(8)]
    assert_expected(sampled(engine, requests), requests)
    assert servers[0].bodies == []
    assert set(engine.begin_update()) == {servers[0].url, servers[1].url}
    assert engine.admitted == ()
    update(engine, servers[:2], 3)
    sampled(engine, requests)
    assert len(servers[0].bodies) == 4
    metrics = engine.take_metrics()
    assert metrics["servers/returned"] == 3 and metrics["servers/admitted"] == 2


def test_no_request_runs_before_the_first_update(servers, make):
    engine = make(*servers, admits=False)
    until(lambda: len(engine.returned) == 3)
    with pytest.raises(RuntimeError, match="admit"), engine.generation():
        pass
    with pytest.raises(KeyError):
        engine.admit({"http://127.0.0.1:1": 1}, 1)


def test_a_server_that_missed_the_update_is_not_admitted(servers, make):
    engine = make(*servers[:2])
    update(engine, servers[:1], 2)
    requests = [request_of(number) for number in range(8)]
    assert_expected(sampled(engine, requests), requests)
    assert servers[1].bodies == []


def test_requests_wait_while_there_is_no_server(servers, make):
    engine = make(servers[0])
    servers[0].hold_after = 3
    requests = [request_of(number) for number in range(2)]
    with engine.generation() as generation:
        for request in requests:
            generation.submit(request)
        until(lambda: all(tokens_of(generation, number) == 3 for number in range(2)))
        servers[0].is_down = True
        until(lambda: engine.admitted == ())
        servers[0].close_after, servers[0].hold_after = 3, None  # the streams break
        until_no_server_runs(generation)
        servers[0].close_after, servers[0].is_down = None, False
        until(lambda: engine.returned == (servers[0].url,))
        update(engine, servers[:1], 2)
        assert_expected(finished(generation), requests)


# Requests that no server completes


def test_three_wrong_answers_from_different_servers_fail_a_response(servers, make):
    for server in servers:
        server.change = nan_log_prob
    engine = make(*servers)
    completion = sampled(engine, [request_of(0)])[0]
    assert completion.failure is not None and "failed it 3 times" in completion.failure
    assert not completion.is_cut_short and len(completion.token_ids) == 0
    metrics = engine.take_metrics()
    assert metrics["servers/failed"] == 1 and metrics["servers/wrong_answer"] == 3
    assert metrics["servers/admitted"] == 0


def test_a_request_at_fault_excludes_no_server(servers, make):
    for server in servers:
        server.status = 400
    engine = make(*servers)
    completion = sampled(engine, [request_of(0)])[0]
    assert completion.failure is not None and "400" in completion.failure
    assert len(engine.admitted) == 3 and engine.take_metrics()["servers/refused"] == 3
    assert [len(each.bodies) for each in servers] == [1, 1, 1]


# Requests that are cut or dropped


def test_end_soon_completes_with_the_tokens_so_far(servers, make):
    engine = make(servers[0], seqs_per_server=2)
    servers[0].hold_after = 3
    requests = [request_of(number) for number in range(4)]
    with engine.generation() as generation:
        for request in requests:
            generation.submit(request)
        until(lambda: all(tokens_of(generation, number) == 3 for number in range(2)))
        generation.end_soon([0, 1, 2, 77])  # 2 has no room on the server, hence no token
        assert generation.num_running == 3
        found = finished_of(generation, 2)
        for number in range(2):
            tokens, _ = response_to([number, 5, 6], 3)
            assert found[number].token_ids.tolist() == tokens
            assert found[number].is_cut_short and found[number].failure is None
        until(lambda: servers[0].num_hung_up == 2)  # a server aborts a request then
        generation.end_soon([0, 1, 2])
        generation.submit(requests[0])
        servers[0].hold_after = None
        again = finished(generation)
    assert_expected(again, [requests[0], requests[3]])


def finished_of(generation: ServerGeneration, count: int) -> dict[int, Completion]:
    found: dict[int, Completion] = {}

    def step() -> bool:
        found.update({each.number: each for each in generation.step()})
        return len(found) >= count

    until(step)
    return found


def test_what_is_cut_continues_from_its_tokens(servers, make):
    engine = make(servers[0])
    servers[0].hold_after = 2
    whole = request_of(0)
    with engine.generation() as generation:
        generation.submit(whole)
        until(lambda: tokens_of(generation, 0) == 2)
        generation.end_soon([0])
        first = finished(generation)[0]
    update(engine, servers[:1], 2)
    servers[0].hold_after = None
    so_far = np.concatenate([whole.token_ids, first.token_ids])
    rest = Request(0, so_far, NUM_TOKENS - 2, Sampling(), num_own=2)
    second = sampled(engine, [rest])[0]
    tokens, _ = response_to(whole.token_ids.tolist(), NUM_TOKENS)
    assert [*first.token_ids, *second.token_ids] == tokens


def test_tokens_of_a_server_with_other_weights_are_not_kept(servers, make):
    engine = make(servers[0])
    servers[0].hold_after = 3
    with engine.generation() as generation:
        generation.submit(request_of(0))
        until(lambda: tokens_of(generation, 0) == 3)
        servers[0].weight_version = "default"
        until(lambda: engine.admitted == ())
        generation.end_soon([0])
        assert generation.num_running == 0 and generation.step() == []


def test_dropped_requests_tell_their_tokens_and_never_complete(servers, make):
    engine = make(servers[0])
    servers[0].hold_after = 4
    requests = [request_of(number) for number in range(3)]
    with engine.generation() as generation:
        for request in requests:
            generation.submit(request)
        with pytest.raises(ValueError, match="runs already"):
            generation.submit(requests[0])
        until(lambda: all(tokens_of(generation, number) == 4 for number in range(3)))
        assert generation.drop([1, 99]) == [(requests[1], 4)]
        generation.end_soon([2])
        assert generation.drop() == [(requests[0], 4), (requests[2], 4)]
        assert generation.num_running == 0 and generation.step() == []
        assert generation.drop() == []
        generation.submit(requests[0])
    servers[0].hold_after = None
    assert_expected(sampled(engine, requests[2:]), requests[2:])


# Stop texts, experts, mistakes


def test_a_stop_text_that_began_in_an_earlier_part_ends_the_response(servers, make):
    engine = make(servers[0])
    tokens, _ = response_to([0, 5, 6], NUM_TOKENS)
    stop = Tokenizer().decode(tokens[1:3], False)
    own = np.array([0, 5, 6, *tokens[:2]], dtype=np.int32)
    for num_own, expected in ((2, tokens[2:3]), (1, tokens[2:3]), (0, tokens[2:])):
        request = Request(
            num_own, own, NUM_TOKENS - 2, Sampling(stop=("never", stop)), num_own=num_own
        )
        found = sampled(engine, [request])[num_own]
        assert found.token_ids.tolist() == expected
        assert found.finish_reason == ("stop" if num_own else "length")


@pytest.mark.parametrize(
    ("earlier", "new", "stop", "ends_at"),
    [
        ("xab", "cab", "abc", 1),
        ("xab", "abc", "abc", 3),
        ("abc", "xyz", "abc", None),  # it was not the end then
        ("aaa", "aab", "aab", 3),
        ("a", "bcdefabc", "abc", 2),
        ("x", "abcabc", "cab", None),  # the server finds it
    ],
)
def test_the_search_for_stop_texts(earlier, new, stop, ends_at):
    ids = [ord(letter) - 33 for letter in earlier]
    request = Request(0, np.array(ids, dtype=np.int32), 9, Sampling(stop=(stop,)), num_own=len(ids))
    search, found = StopSearch(request, Tokenizer()), None
    for number in range(1, len(new) + 1):
        if found is None and search([ord(letter) - 33 for letter in new[:number]]):
            found = number
    assert found == ends_at


class ByteTokenizer:
    """A byte for each token."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("stop", ["好!", "!"])
def test_a_character_that_was_cut_is_searched_for_without_the_server(stop):
    first, rest = "!a!好".encode()[:-1], "好b!c".encode()[2:]
    request = Request(
        0, np.array([*first], dtype=np.int32), 99, Sampling(stop=(stop,)), num_own=len(first)
    )
    search = StopSearch(request, ByteTokenizer())
    assert search.is_alone
    text = rest[:1] + (b"!" if stop == "好!" else b"b!")
    found = [search([*text[: number + 1]]) for number in range(len(text))]
    assert found == [False] * (len(text) - 1) + [True]
    # Long after the cut, too.
    search = StopSearch(request, ByteTokenizer())
    later = rest[:1] + b"c" * 40 + stop.encode()
    found = [search([*later[: number + 1]]) for number in range(len(later))]
    assert found == [False] * (len(later) - 1) + [True]


def test_missing_experts_exclude_the_server(servers, make, caplog):
    engine = make(servers[0], routed_layers=ROUTED)
    with engine.giving_up():
        failure = sampled(engine, [request_of(0, with_routes=True)])[0].failure
    assert failure is not None and "--enable-return-routed-experts" in failure
    assert not engine.admitted and "--enable-return-routed-experts" in caplog.text


def test_the_experts_of_a_cut_response_are_unknown(servers, make):
    engine = make(servers[0], routed_layers=ROUTED)
    servers[0].hold_after = 3
    with engine.generation() as generation:
        generation.submit(request_of(0, with_routes=True))
        until(lambda: tokens_of(generation, 0) == 3)
        generation.end_soon([0])
        routes = finished(generation)[0].routes
    assert routes is not None and routes.ids.shape == (5, 1, 1) and not routes.known.any()


def test_requests_wait_for_servers_unless_the_engine_gives_up(servers, make):
    engine = make(servers[0])
    servers[0].is_down = True
    with engine.generation() as generation:
        generation.submit(request_of(0))
        until(lambda: not engine.admitted)
        assert generation.step() == [] and generation.num_running == 1
        with engine.giving_up():
            failure = finished(generation)[0].failure
    assert failure is not None and "none is admitted" in failure


def test_closing_ends_what_runs(servers, make):
    engine = make(servers[0])
    servers[0].hold_after = 0
    generation = engine.generation().__enter__()
    generation.submit(request_of(0))
    until(lambda: servers[0].num_running == 1)
    engine.close()
    engine.close()
    until(lambda: servers[0].num_hung_up == 1)
    assert not engine._loop._thread.is_alive()
