"""Rewards over HTTP, against a server on the loopback device."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gzip
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.rewards import http as reward_http
from mcore_rl.rewards.http import DIALECTS, ServerReward
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from tests.reward_server import Server, answers_as_rewards, raw_server, rollouts, running_server
from tests.reward_specs import rewards_of

SECRET = "Bearer hush-hush"


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(reward_http, "FIRST_BACKOFF_SECONDS", 0.02)


def ask(url: str, *answers: str, timeout_seconds: float = 5.0, **options: int) -> list[Outcome]:
    spec = rewards_of("http", reward_url=url, reward_timeout_seconds=timeout_seconds, **options)
    with RewardStack(spec) as stack:
        return stack.outcomes(rollouts(*answers))["http"]


def in_turn(*behaviours: Callable[[dict], tuple[int, bytes]]):
    """Each request meets the next behaviour; the last one stays."""
    left = list(behaviours)
    lock = threading.Lock()

    def behave(body: dict) -> tuple[int, bytes]:
        with lock:
            current = left.pop(0) if len(left) > 1 else left[0]
        return current(body)

    return behave


def status(code: int):
    return lambda body: (code, b"{}")


def text(answer: str | bytes):
    return lambda body: (200, answer if isinstance(answer, bytes) else answer.encode())


def hanging(server: Server):
    def hang(body: dict) -> tuple[int, bytes]:
        server.released.wait(30)
        return 500, b"{}"

    return hang


# Valid answers ------------------------------------------------------------------------------------


def test_samples_are_sent_in_batches_and_rewards_return_in_order(server):
    answers = [str(i / 4) for i in range(11)]
    outcomes = ask(server.url, *answers, reward_http_batch=4, reward_http_concurrency=3)
    assert outcomes == [Outcome(i / 4) for i in range(11)]
    assert sorted(len(body["samples"]) for body in server.requests) == [3, 4, 4]
    sent = sorted(
        (s for b in server.requests for s in b["samples"]), key=lambda s: int(s["response"])
    )
    assert sent == [
        {"prompt": "question", "response": str(i), "answer": answer}
        for i, answer in enumerate(answers)
    ]
    row = {"level": 2, "answers": ["0"]}
    prompt = Prompt(0, "question", ["0"], np.zeros(0, np.int32), json.dumps(row))
    assert DIALECTS["http"].body([dataclasses.replace(rollouts("0")[0], prompt=prompt)]) == {
        "samples": [{"prompt": "question", "response": "0", "answer": ["0"], "row": row}]
    }
    assert set(server.paths) == {"/score/a"}
    server.requests.clear()
    assert ask(server.url) == server.requests == []
    assert {h["Content-Type"] for h in server.seen_headers} == {"application/json"}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_concurrency_limit_is_reached_and_kept(server, concurrency):
    def slow(body: dict) -> tuple[int, bytes]:
        until = time.monotonic() + 30
        while server.most_running < concurrency and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)  # in which one too many would arrive
        return answers_as_rewards(body)

    server.behaviour = slow
    limits = {"reward_http_batch": 1, "reward_http_concurrency": concurrency}
    outcomes = ask(server.url, *["1"] * 12, timeout_seconds=120, **limits)
    assert outcomes == [Outcome(1.0)] * 12
    assert server.most_running == concurrency


def test_any_text_arrives_unchanged(server):
    samples = rollouts("0", "0")
    odd = 'half a pair \ud800, "quotes", \x00 and \N{GREEK SMALL LETTER ALPHA}'
    object.__setattr__(samples[1], "text", odd)
    with RewardStack(rewards_of("http", reward_url=server.url)) as stack:
        assert stack.outcomes(samples) == {"http": [Outcome(0.0)] * 2}
    assert server.requests[0]["samples"][1]["response"] == odd


# Retries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [429, 500, 502, 503, 599])
def test_transient_status_is_retried(server, code):
    server.behaviour = in_turn(status(code), status(code), answers_as_rewards)
    assert ask(server.url, "0.5", reward_http_retries=2) == [Outcome(0.5)]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("code", "options", "num_requests"),
    [
        *((code, {}, 1) for code in (400, 401, 403, 404, 422)),
        (503, {"reward_http_retries": 2}, 3),
        (503, {"reward_http_retries": 0}, 1),
    ],
)
def test_permanent_status_fails_the_batch(server, code, options, num_requests):
    server.behaviour = status(code)
    assert ask(server.url, "1", "1", **options) == [Outcome(0.0, f"HTTP status {code}")] * 2
    assert len(server.requests) == num_requests


def test_failed_batch_leaves_the_others(server):
    server.behaviour = lambda body: (
        (400, b"") if body["samples"][0]["response"] == "2" else answers_as_rewards(body)
    )
    kinds = [o.kind for o in ask(server.url, *["1"] * 6, reward_http_batch=2)]
    assert kinds == [None, None, "HTTP status 400", "HTTP status 400", None, None]


@pytest.mark.slow
def test_hanging_server_times_out_at_each_attempt(server):
    server.behaviour = hanging(server)
    started = time.monotonic()
    outcomes = ask(server.url, "1", "1", timeout_seconds=2, reward_http_retries=1)
    assert outcomes == [Outcome(0.0, "timed out", "no answer within 2 s")] * 2
    assert time.monotonic() - started > 4
    assert len(server.requests) == 2


def test_server_that_hangs_once_is_asked_again(server):
    server.behaviour = in_turn(hanging(server), answers_as_rewards)
    assert ask(server.url, "0.5", timeout_seconds=2) == [Outcome(0.5)]


def test_answer_that_trickles_in_does_not_outlast_the_limit():
    """The time limit is for the whole answer, not for each byte."""

    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:  # until the client closes
                time.sleep(0.05)
                connection.sendall(b" ")

    with raw_server(trickle) as url:
        (outcome,) = ask(url, "1", timeout_seconds=0.4, reward_http_retries=0)
    assert outcome.kind == "timed out"


def test_absent_server_fails_its_samples():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    (outcome,) = ask(url, "1", reward_http_retries=1)
    assert outcome.kind == "connection failed"
    assert outcome.detail.startswith("ClientConnectorError, ")


def test_broken_connection_is_retried(server):
    def breaks(body: dict) -> tuple[int, bytes]:
        raise ConnectionAbortedError  # the handler ends without an answer

    server.handle_error = lambda *_: None  # it would print the traceback
    server.behaviour = in_turn(breaks, answers_as_rewards)
    assert ask(server.url, "0.5") == [Outcome(0.5)]
    assert len(server.requests) == 2


def test_retry_waits_grow_up_to_the_time_limit(monkeypatch):
    monkeypatch.setattr(reward_http, "FIRST_BACKOFF_SECONDS", 0.5)
    (spec,) = rewards_of("http", reward_url="http://127.0.0.1:9/").servers
    reward = ServerReward(spec, timeout_seconds=3.0)
    for attempt, longest in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 3.0), (5, 3.0), (9999, 3.0)):
        waits = {reward.backoff_seconds(attempt) for _ in range(100)}
        assert len(waits) > 90 and longest / 2 <= min(waits) and max(waits) <= longest


# Only the configured address is contacted ---------------------------------------------------------


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirect_is_not_followed(server, code):
    server.behaviour = status(code)
    server.headers_sent = {"Location": "/elsewhere"}
    (outcome,) = ask(server.url, "1")
    assert outcome.kind == f"HTTP status {code}"
    assert outcome.detail.endswith("; give the new URL")
    assert server.paths == ["/score/a"]


@pytest.mark.parametrize("code", [302, 307])
def test_redirect_to_another_server_sends_it_nothing(server, code, monkeypatch):
    monkeypatch.setenv("REWARD_HEADER", f"Authorization: {SECRET}")
    with running_server() as other:
        server.behaviour = status(code)
        server.headers_sent = {"Location": other.url}
        spec = rewards_of("http", reward_url=server.url, reward_http_header_env="REWARD_HEADER")
        with RewardStack(spec) as stack:
            (scored,) = stack.score(rollouts("1"))
    assert scored.failure.startswith(f"HTTP status {code}: ")
    assert scored.failure.endswith("; give the new URL")
    assert (len(server.requests), other.paths) == (1, [])


def test_proxies_netrc_and_cookies_are_not_used(server, monkeypatch, tmp_path):
    with running_server() as proxy:  # which would work: it answers as the server does
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.server_address[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "netrc").write_text("machine localhost login me password hush\n")
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        server.headers_sent = {"Set-Cookie": "a=1"}
        # Clients keep cookies for names, not for bare addresses.
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            outcomes = ask(url, "1", "1", reward_http_batch=1, reward_http_concurrency=1)
            assert outcomes == [Outcome(1.0)] * 2
    assert (len(server.requests), proxy.paths) == (4, [])
    for headers in server.seen_headers:
        assert "Authorization" not in headers and "Cookie" not in headers


def test_untrusted_certificate_ends_the_connection(server, tmp_path):
    certificate = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http://127.0.0.1", "https://localhost")
    (outcome,) = ask(url, "1", reward_http_retries=0)
    assert outcome.kind == "connection failed" and "Certificate" in outcome.detail
    assert server.requests == []


def self_signed(folder: Path) -> Path:
    """A certificate for localhost with its key, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), 1, now - datetime.timedelta(1), now + datetime.timedelta(1)
    ).add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    encoded = serialization.Encoding.PEM
    path = folder / "certificate.pem"
    path.write_bytes(
        key.private_bytes(encoded, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(encoded)
    )
    return path


# Invalid answers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ('{"rewards": [1.0]}', "answer has a wrong number of rewards"),
        ('{"rewards": [1.0, 2.0, 3.0]}', "answer has a wrong number of rewards"),
        ('{"rewards": []}', "answer has a wrong number of rewards"),
        ('{"rewards": "12"}', "answer has another form"),
        ('{"rewards": {"0": 1, "1": 2}}', "answer has another form"),
        ('{"reward": [1, 2]}', "answer has another form"),
        ("[1.0, 2.0]", "answer has another form"),
        ("null", "answer has another form"),
        ('"text"', "answer has another form"),
        ("", "answer is not JSON"),
        ("<html>busy</html>", "answer is not JSON"),
        (b"\xff\xfe\xfd", "answer is not JSON"),
        ("[" * 200_000, "answer is not JSON"),
        ('{"rewards": [1, ' + "9" * 5000 + "]}", "answer is not JSON"),
    ],
    ids=range(14),
)
def test_malformed_answer_fails_the_batch_without_a_retry(server, answer, kind):
    server.behaviour = text(answer)
    outcomes = ask(server.url, "1", "1")
    assert [(o.reward, o.kind) for o in outcomes] == [(0.0, kind)] * 2
    assert '{"rewards": [numbers]}' in outcomes[0].detail
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ("NaN", "returned nan"),
        ("Infinity", "returned inf"),
        ("-Infinity", "returned -inf"),
        ("1e999", "returned inf"),
        ("9" * 400, "returned inf"),
        ('"1.0"', "returned str"),
        ("null", "returned NoneType"),
        ("true", "returned bool"),
        ("[1.0]", "returned list"),
        ('{"score": 1}', "returned dict"),
    ],
)
def test_invalid_entry_fails_only_its_sample(server, entry, kind):
    server.behaviour = text(f'{{"rewards": [0.5, {entry}, -2]}}')
    good, bad, also_good = ask(server.url, "1", "1", "1")
    assert (good, also_good) == (Outcome(0.5), Outcome(-2.0))
    assert bad == Outcome(0.0, kind, "a reward is a finite number")


def test_huge_answer_is_not_read_to_its_end(server):
    server.behaviour = text(b" " * (DIALECTS["http"].max_answer_bytes + 1) + b'{"rewards": [1]}')
    (outcome,) = ask(server.url, "1")
    assert outcome == Outcome(0.0, "answer too long", "more than 1048576 bytes")
    assert len(server.requests) == 1


def test_endless_answer_is_not_read_to_its_end():
    num_sent = 0

    def pour(connection: socket.socket) -> None:
        nonlocal num_sent
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            while num_sent < 1 << 30:
                connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
                num_sent += 65536

    with raw_server(pour) as url:
        (outcome,) = ask(url, "1", timeout_seconds=20)
    assert outcome.kind == "answer too long" and num_sent < 1 << 26


def test_compressed_answer_is_not_decompressed(server):
    server.behaviour = text(gzip.compress(b'{"rewards": [1.0]}' + b" " * (1 << 22)))
    server.headers_sent = {"Content-Encoding": "gzip"}
    (outcome,) = ask(server.url, "1")
    assert outcome.kind == "answer is not JSON"
    assert server.seen_headers[0]["Accept-Encoding"] == "identity"


# The header from the environment ------------------------------------------------------------------


def test_header_is_sent_and_never_shown(server, monkeypatch, caplog, capfd):
    """Not even if the server repeats it in its answer."""
    monkeypatch.setenv("REWARD_HEADER", f"Authorization: {SECRET}")
    spec = rewards_of(
        "http", reward_url=server.url, reward_http_header_env="REWARD_HEADER", reward_http_retries=0
    )
    echoes = [
        (401, SECRET.encode()),
        (200, SECRET.encode()),
        (200, json.dumps({SECRET: SECRET}).encode()),
        (200, json.dumps({"rewards": [SECRET]}).encode()),
        (200, json.dumps({"rewards": [{SECRET: 1}]}).encode()),
        (200, json.dumps({"rewards": [SECRET, SECRET]}).encode()),
    ]
    server.headers_sent = {"Location": SECRET, "X-Echo": SECRET}
    with caplog.at_level(logging.DEBUG), RewardStack(spec) as stack:
        texts = [repr(spec), repr(vars(stack))]
        for echo in echoes:
            server.behaviour = lambda body, echo=echo: echo
            (scored,) = stack.score(rollouts("1"))
            assert scored.reward == 0.0 and scored.failure
            texts.append(scored.failure)
    assert [h["Authorization"] for h in server.seen_headers] == [SECRET] * len(echoes)
    captured = capfd.readouterr()
    everything = "\n".join([*texts, caplog.text, captured.out, captured.err])
    assert "hush" not in everything


def test_server_that_does_not_speak_http_fails_its_samples_and_its_text_is_not_shown():
    with raw_server(lambda c: c.sendall(f"{SECRET}\r\n\r\n".encode())) as url:
        (outcome,) = ask(url, "1", reward_http_retries=0)
    assert outcome.kind in ("request failed", "connection failed")
    assert "hush" not in outcome.detail


def test_unset_header_variable_is_refused_at_the_start(server, monkeypatch):
    monkeypatch.delenv("REWARD_HEADER", raising=False)
    spec = rewards_of("http", reward_url=server.url, reward_http_header_env="REWARD_HEADER")
    with pytest.raises(UsageError, match="REWARD_HEADER"):
        RewardStack(spec)


# Together with functions --------------------------------------------------------------------------


def test_stack_sums_functions_and_server_and_returns_parts(server, caplog):
    def fails_on_two(body: dict) -> tuple[int, bytes]:
        entries = ["null" if s["response"] == "2" else "0.5" for s in body["samples"]]
        return 200, f'{{"rewards": [{", ".join(entries)}]}}'.encode()

    server.behaviour = fails_on_two
    spec = rewards_of(
        "http,exact_match,arithmetic", reward_weights="-0.5,1,2", reward_url=server.url
    )
    samples = rollouts("0", "one", "2", "8")
    with RewardStack(spec) as stack:
        scored = stack.score(samples)
        assert stack.score([]) == []
    assert [s.rollout for s in scored] == samples
    assert [s.reward for s in scored] == [-0.25 + 1 + 2, 0.0, 0.0, -0.25]
    assert [list(s.parts) for s in scored] == [
        ["http", "exact_match", "arithmetic"],
        ["http", "exact_match"],
        ["exact_match", "arithmetic"],
        ["http", "exact_match", "arithmetic"],
    ]
    assert scored[0].parts == {"http": 0.5, "exact_match": 1.0, "arithmetic": 1.0}
    assert scored[1].failure == "arithmetic: raised ValueError: the answer 'one' is not a number"
    assert scored[2].failure == "http: returned NoneType: a reward is a finite number"
    logged = [message.split(" failed")[0] for message in caplog.messages]
    assert sorted(logged) == ["reward arithmetic", "reward http"]


def test_stack_asks_the_server_while_functions_run(server, tmp_path):
    """Each waits for the other, so one after the other would never end."""
    asked, running = tmp_path / "asked", tmp_path / "running"
    (tmp_path / "waits.py").write_text(
        "import pathlib, time\nfrom mcore_rl.rewards.functions import reward\n"
        "@reward('waits_for_the_server')\ndef f(**_):\n"
        f"    pathlib.Path({str(running)!r}).touch()\n"
        f"    while not pathlib.Path({str(asked)!r}).exists():\n        time.sleep(0.01)\n"
        "    return 1.0\n"
    )

    def wait(body: dict) -> tuple[int, bytes]:
        asked.touch()
        while not running.exists() and not server.released.wait(0.01):
            pass
        return answers_as_rewards(body)

    server.behaviour = wait
    names, imports = "http,waits_for_the_server", [str(tmp_path / "waits.py")]
    spec = rewards_of(names, reward_url=server.url, reward_timeout_seconds=120, imports=imports)
    with RewardStack(spec) as stack:
        assert [s.reward for s in stack.score(rollouts("0"))] == [1.0]


def test_requests_are_cancelled_when_a_function_raises(server):
    answered = threading.Event()

    def hang(body: dict) -> tuple[int, bytes]:
        server.released.wait(300)
        answered.set()
        return status(500)(body)

    server.behaviour = hang
    spec = rewards_of("http,no_such_function", reward_url=server.url, reward_timeout_seconds=300)
    with RewardStack(spec) as stack, pytest.raises(UsageError, match="no_such_function"):
        stack.score(rollouts("1"))
    assert not answered.is_set()
    assert "rewards over HTTP" not in {thread.name for thread in threading.enumerate()}


def test_stack_logs_the_first_failure_of_a_kind_once(server, caplog):
    server.behaviour = status(404)
    with RewardStack(rewards_of("http", reward_url=server.url, reward_http_batch=1)) as stack:
        for _ in range(2):
            assert [s.failure for s in stack.score(rollouts("1", "1"))] == ["HTTP status 404"] * 2
    assert len([m for m in caplog.messages if "HTTP status 404" in m]) == 1


# The dialect of vLLM's pooling server -------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([0.75], Outcome(0.75)),
        ([[9.0], [-0.5]], Outcome(-0.5)),
        ([[0.25]], Outcome(0.25)),
        ([None], Outcome(0.0, "returned NoneType", "a reward is a finite number")),
    ],
)
def test_pooling_takes_the_score_of_a_sequence_or_of_its_last_token(server, data, expected):
    answer = {"object": "list", "data": [{"index": 0, "object": "pooling", "data": data}]}
    server.behaviour = text(json.dumps(answer))
    spec = rewards_of("pooling", reward_pooling_url=server.url.removesuffix("/score/a"))
    with RewardStack(spec) as stack:
        assert stack.outcomes(rollouts("1", "1")) == {"pooling": [expected] * 2}
    assert server.paths == ["/pooling"] * 2
    bodies = sorted(server.requests, key=lambda body: body["input"])
    assert [body["input"] for body in bodies] == [["question0"], ["question1"]]
    assert all(body["use_activation"] is False for body in bodies)


@pytest.mark.parametrize(
    "data",
    [[0.1, 0.9], [[0.1, 0.9]], [[1.0], [0.1, 0.9]], [], [[]], "AACAPw==", None, {"a": 1}, 1.0],
)
def test_pooling_refuses_anything_but_one_score(server, data):
    server.behaviour = text(json.dumps({"data": [{"index": 0, "data": data}]}))
    spec = rewards_of("pooling", reward_pooling_url=server.url)
    with RewardStack(spec) as stack:
        (scored,) = stack.score(rollouts("1"))
    assert scored.reward == 0.0
    assert scored.failure and scored.failure.startswith("answer has another form: ")
