"""The client of a server's route for token ids, and a server that does as the test says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from mcore_rl.common.http import client_session
from mcore_rl.hybrid_engine.remote import generate_client
from mcore_rl.hybrid_engine.remote.generate_client import (
    GenerateClient,
    OtherVersion,
    Received,
    Refused,
    ServerFault,
    ServerState,
    TimedOut,
    Unreachable,
    WrongAnswer,
)
from mcore_rl.hybrid_engine.vllm.generation import Request, Sampling
from mcore_rl.moe.routing import RoutedLayers
from tests import hostile
from tests.unit.fake_servers import VOCAB_SIZE, FakeServer, candidates_of, fake_servers, response_to

REQUEST = Request(7, np.array([3, 1, 4], dtype=np.int32), 6, Sampling(), seed=11)
TOKENS, LOG_PROBS = response_to([3, 1, 4], 6)
ROUTED = RoutedLayers(layers=(1, 2), topk=2, num_experts=8)


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeServer]]:
    with fake_servers(1) as found:
        yield found


@pytest.fixture
def server(servers: list[FakeServer]) -> FakeServer:
    servers[0].reset()
    servers[0].weight_version = "5"
    return servers[0]


def run(
    server: FakeServer,
    request: Request = REQUEST,
    *,
    received: Received | None = None,
    header: dict[str, str] | None = None,
    **options: Any,
) -> Received:
    """The response to a request, or a ServerFault."""
    found = Received() if received is None else received
    options = {"vocab_size": VOCAB_SIZE, "token_timeout_seconds": 60, **options}

    async def generate() -> None:
        async with client_session(header or {}) as session:
            client = GenerateClient(session, server.url, shows_refusals=not header, **options)
            await client.generate(request, found, 5)

    asyncio.run(generate())
    return found


def test_a_response_has_tokens_log_probs_and_a_reason(server):
    found = run(server)
    assert (found.token_ids, found.log_probs) == (TOKENS, LOG_PROBS)
    assert found.finish_reason == "length" and found.routes is None
    server.stop_after = 2
    found = run(server)
    assert (found.token_ids, found.finish_reason) == (TOKENS[:2], "stop")


def test_a_request_is_sent_as_vllm_reads_it(server):
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=4, stop=("##",))
    run(server, replace(REQUEST, sampling=sampling, cache_name="v5", seed=2**62 + 1))
    (body,) = server.bodies
    assert body.items() >= {"token_ids": [3, 1, 4], "stream": True, "cache_salt": "v5"}.items()
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 2**62 + 1}
    expected |= {"max_tokens": 6, "stop": ["##"], "logprobs": 0, "detokenize": True}
    assert body["sampling_params"].items() >= expected.items()
    run(server, replace(REQUEST, sampling=Sampling(temperature=0.0)))
    assert server.bodies[1]["sampling_params"]["seed"] is None
    assert server.bodies[1]["cache_salt"] is None


def test_vllm_accepts_the_fields_of_a_request():
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest

    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=4, stop=("##",))
    fields = generate_client.sampling_fields(replace(REQUEST, sampling=sampling))
    body = {"token_ids": [3, 1, 4], "sampling_params": fields, "stream": True, "cache_salt": None}
    params = GenerateRequest.model_validate_json(json.dumps(body)).sampling_params
    assert (params.seed, params.top_k, params.stop, params.logprobs) == (11, 4, ["##"], 0)


def changed(number: int, **fields: Any) -> Any:
    """Change fields of the choice of an event."""
    seen: list[int] = []

    def change(event: dict[str, Any]) -> None:
        if len(seen) == number:
            event["choices"][0] |= fields
        seen.append(number)

    return change


def entries(*log_probs: Any, token: int = TOKENS[2]) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": each} for each in log_probs]}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"token_ids": [VOCAB_SIZE]}, "token id"),
        ({"token_ids": [-1]}, "token id"),
        ({"token_ids": [True]}, "token id"),
        ({"token_ids": [1.0]}, "token id"),
        ({"token_ids": "12"}, "not a list"),
        ({"token_ids": [1] * 5}, "more than the 6 tokens"),
        ({"logprobs": None}, "one log-prob for each token"),
        ({"logprobs": {"content": None}}, "one log-prob for each token"),
        ({"logprobs": entries(-0.1, -0.1)}, "one log-prob for each token"),
        ({"logprobs": entries(-0.1, token=TOKENS[2] + 1)}, "another token"),
        ({"logprobs": entries(float("nan"))}, "finite"),
        ({"logprobs": entries(float("-inf"))}, "finite"),
        ({"logprobs": entries(-9999.0)}, "finite"),  # vLLM's word for NaN
        ({"logprobs": entries(0.001)}, "at most 0"),
        ({"logprobs": entries(None)}, "finite"),
        ({"finish_reason": "because"}, "unknown finish reason"),
        ({"finish_reason": 1}, "unknown finish reason"),
        ({"finish_reason": "length"}, "--max-model-len"),
    ],
)
def test_a_wrong_answer_is_found_at_its_token(server, fields, text):
    server.change = changed(2, **fields)
    received = Received()
    with pytest.raises(WrongAnswer, match=text) as fault:
        run(server, received=received)
    assert (received.token_ids, received.log_probs) == (TOKENS[:2], LOG_PROBS[:2])
    assert received.finish_reason is None
    assert not fault.value.keeps_tokens and not fault.value.is_of_request


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"data: {", "not JSON"),
        (b"data: [1]", "one choice"),
        (b'data: {"choices": [{}, {}]}', "one choice"),
        (b'data: {"choices": [7]}', "one choice"),
        (b"data: [DONE]", "not JSON"),
        (b"<html>", "not an event"),
        (b"data: " + b"x" * 2_000_000, "more than"),
    ],
)
def test_a_stream_of_something_else_is_a_wrong_answer(server, raw, text):
    server.raw = lambda number: raw
    with pytest.raises(WrongAnswer, match=text):
        run(server)


def test_comments_and_counts_are_passed_over(server):
    server.prefix = b': ping\n\ndata: {"choices": [], "usage": {}}\n\n'
    assert run(server).token_ids == TOKENS


def span(version: Any, start: Any, end: Any) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([span("4", 0, 6)], OtherVersion),
        ([span("4", 0, 2), span("5", 2, 6)], OtherVersion),
        ([span(5, 0, 6)], OtherVersion),
        ([span("5", 0, 5)], WrongAnswer),
        ([span("5", 1, 6)], WrongAnswer),
        ([span("5", 0, 7)], WrongAnswer),
        ([span("5", 0, 2), span("5", 3, 6)], WrongAnswer),
        ([], WrongAnswer),
        ("5", WrongAnswer),
        (None, WrongAnswer),
        ([span("5", 0, 2), span("5", 2, 6)], None),
    ],
)
def test_all_tokens_are_of_the_expected_weights(server, spans, fault):
    server.extra = {"weight_versions": spans}
    if fault is None:
        assert run(server).token_ids == TOKENS
        return
    with pytest.raises(fault) as raised:
        run(server)
    assert not raised.value.keeps_tokens


@pytest.mark.parametrize(
    ("version", "sends_them"),
    [("0.31.0", False), ("0.32.0", True), ("0.32.0+cpu", True), ("1.0rc1", True), ("main", True)],
)
def test_only_versions_of_vllm_that_name_weights_must_name_them(server, version, sends_them):
    server.vllm_version, server.extra = version, {"weight_versions": None}

    async def generate() -> Received:
        async with client_session({}) as session:
            client = GenerateClient(
                session, server.url, vocab_size=VOCAB_SIZE, token_timeout_seconds=60
            )
            await client.probe(60)
            await client.generate(REQUEST, found := Received(), 5)
            return found

    if not sends_them:
        assert asyncio.run(generate()).token_ids == TOKENS
        return
    with pytest.raises(WrongAnswer, match="weight versions"):
        asyncio.run(generate())


@pytest.mark.parametrize(
    ("status", "is_of_request"),
    [(400, True), (422, True), (302, False), (403, False), (404, False), (500, False)],
)
def test_a_refusal_has_its_status_and_a_bounded_text_on_one_line(server, status, is_of_request):
    server.status = status
    with pytest.raises(Refused, match=str(status)) as fault:
        run(server)
    assert fault.value.is_of_request == is_of_request
    assert len(str(fault.value)) < 700 and str(fault.value).isprintable()
    assert ("nothing for you" in str(fault.value)) == (status != 302)


def test_a_secret_header_is_sent_and_answers_are_not_shown(server):
    server.status = 403
    with pytest.raises(Refused) as fault:
        run(server, header={"Authorization": "Bearer hush"})
    assert server.headers[0]["Authorization"] == "Bearer hush"
    assert "nothing for you" not in str(fault.value)


@pytest.mark.parametrize(
    "event", [{"error": {"message": "engine\ndead", "code": 500}}, {"error": None}]
)
def test_an_error_within_a_stream_is_a_refusal(server, event):
    server.raw = lambda number: b"data: " + json.dumps(event).encode()
    with pytest.raises(Refused, match="within the stream") as fault:
        run(server)
    assert str(fault.value).isprintable() and not fault.value.is_of_request


def test_an_abort_by_the_server_keeps_the_tokens(server):
    server.change = changed(3, token_ids=[], logprobs=None, finish_reason="abort")
    received = Received()
    with pytest.raises(Refused, match="aborted") as fault:
        run(server, received=received)
    assert received.token_ids == TOKENS[:3] and fault.value.keeps_tokens


@pytest.mark.parametrize("how", ["close_after", "end_after"])
def test_a_broken_connection_keeps_the_tokens(server, how):
    setattr(server, how, 4)
    received = Received()
    with pytest.raises(Unreachable) as fault:
        run(server, received=received)
    assert received.token_ids == TOKENS[:4] and fault.value.keeps_tokens


def test_a_server_that_is_down_is_unreachable(server):
    server.is_down = True
    with pytest.raises(Unreachable):
        run(server)


def test_no_token_within_the_time_is_a_timeout_that_keeps_the_tokens(server):
    server.hold_after = 4
    received = Received()
    with pytest.raises(TimedOut, match=r"no token within 1 s") as fault:
        run(server, received=received, token_timeout_seconds=1)
    assert fault.value.keeps_tokens
    # At most 4: a machine that stands still for a second also looks like a server that does.
    assert received.token_ids == TOKENS[:4][: len(received.token_ids)]


def test_a_request_waits_for_its_turn_while_the_server_sends_tokens_of_others(server):
    server.turns = asyncio.Semaphore(1)
    limit, found = 60.0, [Received(), Received()]

    async def generate() -> None:
        loop, begin = asyncio.get_running_loop(), time.monotonic()
        # A clock that stands still, but for the tokens: they come just within the limit.
        loop.time = lambda: begin + 0.9 * limit * sum(len(each.token_ids) for each in found)
        async with client_session({}) as session:
            client = GenerateClient(
                session, server.url, vocab_size=VOCAB_SIZE, token_timeout_seconds=limit
            )
            await asyncio.gather(*(client.generate(REQUEST, each, 5) for each in found))

    asyncio.run(generate())
    assert [each.token_ids for each in found] == [TOKENS, TOKENS]


def test_the_caller_can_end_a_response_at_any_token(server):
    found = run(server, received=Received(ends=lambda tokens: len(tokens) == 3))
    assert (found.token_ids, found.finish_reason) == (TOKENS[:3], "stop")


def in_base64(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def of_header(text: str) -> str:
    """An array of NumPy with this header, and without values."""
    header = text.encode() + b"\n"
    return base64.b64encode(
        b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header
    ).decode()


def test_experts_come_with_the_last_event(server):
    reported = np.random.default_rng(0).integers(0, 8, size=(8, 3, 2)).astype(np.uint8)
    server.extra = {"routed_experts": in_base64(reported)}
    request = replace(REQUEST, with_routes=True)
    routes = run(server, request, routed=ROUTED).routes
    assert routes is not None and routes.known.all()
    np.testing.assert_array_equal(routes.ids, reported[:, 1:])
    assert run(server, request).routes is None  # the model has no experts


@pytest.mark.parametrize(
    "text",
    [
        "no base64!",
        "",
        base64.b64encode(b"\x93NUMPY" + b"\0" * 20).decode(),
        base64.b64encode(b"PK\x03\x04 is not an archive").decode(),
        of_header("{'descr': '<i4', 'fortran_order': False, 'shape': (1" + "0" * 25 + ",)}"),
        of_header("{'descr': '<i4', 'fortran_order': False, 'shape': (10000000000000,)}"),
        of_header("{'descr': '<i4', 'shape': (5L,"),
        of_header("{'descr': 'O', 'fortran_order': False, 'shape': (1,)}"),
        in_base64(np.zeros((8, 3, 2), dtype=np.float32)),
        in_base64(np.zeros((9, 3, 2), dtype=np.uint8)),
        in_base64(np.full((8, 3, 2), 8, dtype=np.uint8)),
        in_base64(np.zeros((8, 3), dtype=np.uint8)),
        7,
    ],
)
def test_wrong_experts_are_a_wrong_answer(server, text):
    server.extra = {"routed_experts": text}
    with pytest.raises(WrongAnswer):
        run(server, replace(REQUEST, with_routes=True), routed=ROUTED)


def test_missing_experts_are_a_wrong_answer_with_a_remedy(server):
    with pytest.raises(WrongAnswer, match="--enable-return-routed-experts"):
        run(server, replace(REQUEST, with_routes=True), routed=ROUTED)


def test_candidates_are_the_most_probable_tokens_whichever_was_sampled(server):
    tokens, log_probs = response_to([3, 1, 4], 6)
    assert {token % 2 for token in tokens} == {0, 1}
    found = run(server, replace(REQUEST, num_top=3))
    assert server.bodies[0]["sampling_params"]["logprobs"] == 4
    assert (found.token_ids, found.log_probs) == (tokens, log_probs)
    for token, log_prob, top in zip(tokens, log_probs, found.top_tokens, strict=True):
        ids, values = zip(*candidates_of(token, log_prob, 4)[:3], strict=True)
        assert (top.ids.dtype, top.log_probs.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(top.ids, [ids])
        np.testing.assert_array_equal(top.log_probs, np.array([values], np.float32))
    assert not run(server).top_tokens
    run(server, replace(REQUEST, num_top=VOCAB_SIZE))
    assert server.bodies[2]["sampling_params"]["logprobs"] == VOCAB_SIZE


@pytest.mark.parametrize(
    "top",
    [
        None,
        5,
        [],
        [{"token_id": 1, "logprob": -0.5, "rank": 1}],
        [{"token_id": n, "logprob": -0.5, "rank": 1} for n in range(3)],
        [{"token_id": n, "logprob": -0.5, "rank": 1 + n} for n in (0, 1, 1, 2)],
        [{"token_id": 1, "logprob": -0.5, "rank": 1 + n} for n in range(2)],
        [{"token_id": n, "logprob": -0.5, "rank": [1]} for n in range(2)],
        [{"token_id": n, "logprob": 0.5, "rank": 1 + n} for n in range(2)],
        [{"token_id": VOCAB_SIZE, "logprob": -0.5, "rank": 1 + n} for n in range(2)],
        ["a", "b"],
    ],
)
def test_wrong_candidates_are_a_wrong_answer(server, top):
    entry = {"token_id": TOKENS[2], "logprob": -0.5, "top_logprobs": top}
    server.change = changed(2, logprobs={"content": [entry]})
    received = Received()
    with pytest.raises(WrongAnswer, match="candidate"):
        run(server, replace(REQUEST, num_top=2), received=received)
    assert received.token_ids == TOKENS[:2] and len(received.top_tokens) == 2


def test_server_that_refuses_so_many_candidates_is_at_fault(server):
    server.status, server.refusal = 400, "Requested sample logprobs of 31, which is greater than 20"
    with pytest.raises(Refused, match="--max-logprobs 31") as refused:
        run(server, replace(REQUEST, num_top=30))
    assert not refused.value.is_of_request


def test_any_stream_is_a_response_or_a_server_fault(server):
    template = {"choices": [{"token_ids": [5], "logprobs": entries(-0.5, token=5)}]}
    experts = in_base64(np.zeros((3, 3, 2), dtype=np.uint8))
    template["choices"][0] |= {"finish_reason": "stop", "weight_versions": [span("5", 0, 1)]}
    template["choices"][0]["routed_experts"] = experts
    request = replace(REQUEST, with_routes=True)

    @settings(hostile.BOUNDED, max_examples=60)
    @given(hostile.messages(template))
    def check(event: bytes) -> None:
        server.raw = lambda number: b"data: " + event
        received = Received()
        try:
            run(server, request, received=received, routed=ROUTED)
        except ServerFault as fault:
            assert str(fault).isprintable() and len(str(fault)) < 1000
        assert all(0 <= token < VOCAB_SIZE for token in received.token_ids)
        assert all(-9999 < each <= 0 for each in received.log_probs)
        assert len(received.token_ids) == len(received.log_probs) <= 6

    check()


def probe(server: FakeServer) -> ServerState:
    async def ask() -> ServerState:
        async with client_session({}) as session:
            client = GenerateClient(
                session, server.url, vocab_size=VOCAB_SIZE, token_timeout_seconds=60
            )
            return await client.probe(60)

    return asyncio.run(ask())


def test_a_probe_asks_for_health_and_versions(server):
    assert probe(server) == ServerState(vllm_version="0.32.0", weight_version="5")
    assert server.num_probes == 3
    server.weight_version = 5  # type: ignore[assignment]
    with pytest.raises(WrongAnswer, match="weight_version"):
        probe(server)
    server.probe_status = 503
    with pytest.raises(Refused, match="503"):
        probe(server)
    server.is_down = True
    with pytest.raises(Unreachable):
        probe(server)


def test_any_answer_to_a_probe_is_a_state_or_a_server_fault(server):
    @settings(hostile.BOUNDED, max_examples=40)
    @given(hostile.values(), hostile.values())
    def check(vllm_version: Any, weight_version: Any) -> None:
        server.vllm_version, server.weight_version = vllm_version, weight_version
        with contextlib.suppress(ServerFault):
            probe(server)

    check()
