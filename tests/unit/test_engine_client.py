"""The client of an engine in another process, and a server that does as the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import entry_points

import pytest
from hypothesis import given, settings

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.remote import engine_client
from mcore_rl.hybrid_engine.remote.engine_client import HTTPEngineClient
from tests import hostile

SECRET = "Bearer hush-hush"
Behaviour = Callable[[BaseHTTPRequestHandler], None]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour: Behaviour = answers(200, b"{}")
        self.asked: list[tuple[str, str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.command, self.path, body))
        self.server.headers.append(dict(self.headers))
        self.server.behaviour(self)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


def answers(status: int, body: bytes, **headers: str) -> Behaviour:
    def behaviour(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return behaviour


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    found = [Server(), Server()]
    for each in found:
        threading.Thread(target=each.serve_forever, args=(0.02,), daemon=True).start()
    yield found
    for each in found:
        each.over.set()
        each.shutdown()
        each.server_close()


@pytest.fixture
def server(servers: list[Server]) -> Server:
    for each in servers:
        each.behaviour = answers(200, b"{}")
        each.asked.clear(), each.headers.clear()
    return servers[0]


def test_calls_say_what_vllm_expects(server):
    client = HTTPEngineClient(server.url + "/")
    server.behaviour = answers(200, b'{"world_size": 4, "weight_version": "7", "is_paused": true}')
    assert (client.num_workers(), client.weight_version(), client.is_paused()) == (4, "7", True)
    server.behaviour = answers(200, b"")
    client.pause("keep")
    client.update_weights({"plan_id": "a"})
    client.finish_weight_update("8")
    client.require_workers()
    told = [(path, json.loads(body) if body else None) for _, path, body in server.asked[3:]]
    assert told == [
        ("/pause?mode=keep&clear_cache=true", None),
        ("/update_weights", {"update_info": {"plan_id": "a"}}),
        ("/finish_weight_update", {"weight_version": "8"}),
        ("/collective_rpc", {"method": "check_health"}),
    ]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_refused_and_not_followed(server, servers, status):
    server.behaviour = answers(status, b"", Location=f"{servers[1].url}/secret")
    client = HTTPEngineClient(server.url)
    for call in (client.num_workers, client.resume):
        with pytest.raises(RuntimeError, match=f"{status}: redirects are not followed"):
            call()
    assert servers[1].asked == []


def test_proxies_of_the_environment_are_not_used(server, servers, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, servers[1].url)
    monkeypatch.delenv("no_proxy", raising=False)
    HTTPEngineClient(server.url).resume()
    assert len(server.asked) == 1 and servers[1].asked == []


def test_endless_answer_ends_at_the_deadline(server):
    def drips(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not server.over.wait(0.05):
                handler.wfile.write(b" ")
        except OSError:
            pass  # the client has hung up

    server.behaviour = drips
    with pytest.raises(RuntimeError, match=r"no answer within 0\.5 s"):
        HTTPEngineClient(server.url, timeout=0.5).resume()


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_is_read_to_a_limit(server, status, monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_ANSWER_BYTES", 1000)
    server.behaviour = answers(status, b"x" * 100_000)
    with pytest.raises(RuntimeError, match="more than 1000 bytes"):
        HTTPEngineClient(server.url).resume()


def test_refusal_quotes_the_server_on_one_line(server):
    server.behaviour = answers(500, b"no\n[Health] step 7, kl: forged\n" + b"x" * 5000)
    with pytest.raises(RuntimeError) as refused:
        HTTPEngineClient(server.url).resume()
    assert "HTTP status 500: no [Health]" in str(refused.value) and len(str(refused.value)) < 700


def test_a_header_comes_from_a_variable_and_stands_in_no_message(server, monkeypatch):
    monkeypatch.setenv("ENGINE_HEADER", f"Authorization: {SECRET}")
    client = HTTPEngineClient(server.url, header_env="ENGINE_HEADER")
    client.resume()
    assert server.headers[0]["Authorization"] == SECRET
    server.behaviour = answers(403, f"not with {SECRET}".encode())
    with pytest.raises(RuntimeError) as refused:
        client.resume()
    assert SECRET not in str(refused.value) and "403" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "variable", "flag"),
    [
        ("ftp://engine", None, "base_url"),
        ("http://.", None, "base_url"),
        ("http://eng\x00ine", None, "base_url"),
        ("http://user:word@engine", None, "base_url"),
        ("http://engine:8000/?key=1", None, "base_url"),
        ("http://engine", "NOT_SET_ANYWHERE", "header_env NOT_SET_ANYWHERE"),
        ("http://engine", "PATH", "header_env PATH"),
    ],
)
def test_unusable_address_or_header_is_a_usage_error(url, variable, flag):
    with pytest.raises(UsageError) as refused:
        HTTPEngineClient(url, header_env=variable)
    assert flag in refused.value.flag and refused.value.remedy


def test_any_answer_is_a_number_of_workers_or_a_runtime_error(server):
    client = HTTPEngineClient(server.url)

    @settings(hostile.BOUNDED, max_examples=40)
    @given(hostile.messages({"world_size": 2}))
    def check(body: bytes) -> None:
        server.behaviour = answers(200, body)
        try:
            assert 1 <= client.num_workers() <= 1 << 20
        except RuntimeError as error:
            assert str(error).isprintable() and len(str(error)) < 1000

    check()


def test_every_name_that_the_plugin_registers_is_there():
    from vllm.distributed.weight_transfer import factory

    for plugin in entry_points(group="vllm.general_plugins"):
        if plugin.name.startswith("mcore_rl"):
            plugin.load()()
    engine = factory.WeightTransferEngineFactory._registry["mcore_rl"]()
    trainer = factory.WeightTransferTrainerFactory._registry["mcore_rl"]()
    assert issubclass(engine, factory.WeightTransferEngine)
    assert issubclass(trainer, factory.TrainerWeightTransferEngine)
