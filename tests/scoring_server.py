"""A server that scores tokens as `vllm serve` does, and fails when a test says so."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def log_prob_of(tokens: Sequence[int], position: int) -> float:
    """The log-prob of a token after those before it."""
    return -((31 * tokens[position - 1] + tokens[position]) % 97 + 1) / 64


class ScoringServer:
    """Attributes may change at any time."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.num_to_fail = 0  # requests, from now on
        self.answer: Any = None  # in place of the right one
        self.models: Any = None  # answer to /v1/models; None: there is none
        self.tokens: Any = None  # the same of /tokenize
        self.encode: Callable[[str], Any] = lambda text: self.tokens
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.max_num_requests: int | None = None  # after which all fail

    def answered(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.requests.append(body)
        is_over = self.max_num_requests is not None and len(self.requests) > self.max_num_requests
        if self.num_to_fail > 0 or is_over:
            self.num_to_fail -= 1
            return 503, {"error": "starting"}
        if self.answer is not None:
            return self.status, self.answer
        tokens = body["prompt"]
        scores = [
            {str(token): {"logprob": log_prob_of(tokens, at), "rank": 1}}
            for at, token in enumerate(tokens)
        ]
        return self.status, {"choices": [{"text": "x", "prompt_logprobs": [None, *scores[1:]]}]}


@contextlib.contextmanager
def scoring_server(checkpoint: Path | None = None) -> Iterator[ScoringServer]:
    """With a checkpoint it tokenizes, so that the start of a job accepts it."""
    found = ScoringServer()
    if checkpoint is not None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        found.models = {"data": []}
        found.encode = lambda text: {"tokens": tokenizer.encode(text, add_special_tokens=False)}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.headers.append(dict(self.headers))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize" and (tokens := found.encode(body["prompt"])) is not None:
                self._send(200, tokens)
            else:
                self._send(*found.answered(body) if self.path == "/v1/completions" else (404, {}))

        def do_GET(self) -> None:
            self._send(*(404, {}) if self.path != "/v1/models" else (200, found.models))

        def _send(self, status: int, answer: Any) -> None:
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
