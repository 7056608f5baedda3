"""Samples to be rewarded, and reward servers on the loopback device."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout


def rollouts(*answers: str) -> list[Rollout]:
    """Samples of a prompt each, with their numbers as responses."""
    return [
        _rollout(Prompt(i, "question", answer, np.zeros(0, np.int32)), 0, str(i))
        for i, answer in enumerate(answers)
    ]


def responses(*texts: str, prompt: str = "question") -> list[Rollout]:
    """Responses to one prompt, whose answer is 7."""
    asked = Prompt(0, prompt, "7", np.zeros(0, np.int32))
    return [_rollout(asked, i, text) for i, text in enumerate(texts)]


def _rollout(prompt: Prompt, sample_index: int, text: str) -> Rollout:
    none = np.zeros(0, np.float32)
    return Rollout(prompt, sample_index, text, none.astype(np.int32), none, "stop", 0)


def answers_as_rewards(body: dict) -> tuple[int, bytes]:
    """Gives each sample the reward that its answer is."""
    rewards = [float(sample["answer"]) for sample in body["samples"]]
    return 200, json.dumps({"rewards": rewards}).encode()


@contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that passes one connection to `serve` once it has the request."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(60)  # a test that fails before it connects must not wait for ever

    def accept() -> None:
        connection, _ = listener.accept()
        connection.settimeout(None)
        with connection:
            connection.recv(65536)
            serve(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        thread.join()
        listener.close()


class Server(ThreadingHTTPServer):
    """Answers by `behaviour(body) -> status, text`; notes requests and how many run at one time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour: Callable[[dict], tuple[int, bytes]] = answers_as_rewards
        self.headers_sent: dict[str, str] = {}
        self.requests: list[dict] = []
        self.paths: list[str] = []
        self.seen_headers: list[dict[str, str]] = []
        self.num_running = self.most_running = 0
        self.lock = threading.Lock()
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score/a"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.paths.append(self.path)
            self.server.requests.append(body)
            self.server.seen_headers.append(dict(self.headers))
            self.server.num_running += 1
            self.server.most_running = max(self.server.most_running, self.server.num_running)
        try:
            status, text = self.server.behaviour(body)
        finally:
            with self.server.lock:
                self.server.num_running -= 1
        self.send_response(status)
        for name, value in self.server.headers_sent.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        try:
            self.wfile.write(text)
        except ConnectionError:  # the client did not want to read it all
            self.close_connection = True

    def do_GET(self) -> None:  # what a followed redirect would do
        self.server.paths.append(self.path)
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
