"""Clients with which the trainer drives a vLLM server: weight updates, and pausing around them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol, Self

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from mcore_rl.common.addresses import checked_url, header_from
from mcore_rl.common.http import HTTPFailure, client_session, quoted, request
from mcore_rl.common.readers import InvalidData, integer_within, parse_json

_MOST_WORKERS = 1 << 20
MAX_ANSWER_BYTES = 1 << 20
_GENERATE = "inference/v1/generate"
PAUSE_SECONDS = 1.0  # between two probes


class EngineClient(VLLMWeightSyncClient, Protocol):
    """vLLM's protocol plus a trainer's other calls. All calls block until done, or raise."""

    def num_workers(self) -> int:
        """Return the number of this vLLM's worker processes, over all data-parallel replicas."""

    def pause(self, mode: str) -> None:
        """Stop generating and drop the KV cache. `mode` determines the fate of running requests:

        "keep" holds them until `resume`, which recomputes their KV cache with the new weights and
        continues; "wait" lets them finish first; "abort" ends them.
        """

    def resume(self) -> None:
        """Continue generating."""


class HTTPEngineClient(HTTPVLLMWeightSyncClient):
    """Client of a `vllm serve` with VLLM_SERVER_DEV_MODE=1, which opens the routes used here.

    `timeout` bounds each call in seconds, from connecting to the last byte of the answer, and must
    be longer than an update takes. `header_env` names an environment variable that holds a header
    to send ("Authorization: Bearer ..."). Requests go only to `base_url` (`common.http`). Raises
    UsageError for an unusable address or variable. A call that fails raises RuntimeError with the
    server's answer, unless a header is sent, which the answer might repeat.
    """

    def __init__(
        self, base_url: str, timeout: float = 360.0, *, header_env: str | None = None
    ) -> None:
        checked_url(base_url, "HTTPEngineClient base_url")
        super().__init__(base_url, timeout)
        self._header = header_from(header_env, "HTTPEngineClient header_env")

    def _post(
        self, path: str, json: dict[str, Any] | None = None, params: dict[str, str] | None = None
    ) -> None:
        self._answer("POST", path, json, params)

    def _get(self, path: str, field: str, params: dict[str, str] | None = None) -> Any:
        """Return one field of a JSON answer."""
        answer = self._answer("GET", path, params=params)
        try:
            fields = parse_json(answer)
        except InvalidData as error:
            raise self._failed("GET", path, "returned invalid JSON", answer) from error
        if not isinstance(fields, dict) or field not in fields:
            raise self._failed("GET", path, f"returned no {field}", answer)
        return fields[field]

    def _answer(
        self,
        method: str,
        path: str,
        fields: dict[str, Any] | None = None,
        params: dict[str, str] | None = None,
    ) -> bytes:
        """Return the answer to a request. Raises RuntimeError."""
        try:
            return self._request(method, path, fields, params)
        except HTTPFailure as failure:
            raise self._failed(method, path, f"failed: {failure}", failure.answer) from None

    def _request(
        self,
        method: str,
        path: str,
        fields: dict[str, Any] | None,
        params: dict[str, str] | None = None,
    ) -> bytes:
        async def send() -> bytes:
            async with client_session(self._header) as session:
                return await request(
                    session,
                    method,
                    f"{self.base_url}/{path}",
                    timeout_seconds=self.timeout,
                    max_answer_bytes=MAX_ANSWER_BYTES,
                    body=None if fields is None else json.dumps(fields).encode(),
                    params=params,
                    keeps_refusal=True,
                )

        return asyncio.run(send())

    def _failed(self, method: str, path: str, how: str, answer: bytes) -> RuntimeError:
        text = "" if self._header else quoted(answer)
        shown = f": {text}" if text else ""
        return RuntimeError(f"{method} {self.base_url}/{path} {how}{shown}")

    def num_workers(self) -> int:
        count = integer_within(self._get("get_world_size", "world_size"), 1, _MOST_WORKERS)
        if count is None:
            raise self._failed("GET", "get_world_size", "returned no number of workers", b"")
        return count

    def require_health(self) -> None:
        """Raise RuntimeError if the server does not answer, or its engine is dead."""
        self._answer("GET", "health")

    def require_workers(self) -> None:
        """Raise RuntimeError if a worker does not answer. Not during an update: workers then answer
        at its end."""
        # Without vLLM's own timeout, after which it would take late answers for those to the next
        # call.
        self._post("collective_rpc", {"method": "check_health"})

    def vllm_version(self) -> str:
        """Return the version of the server's vLLM."""
        return str(self._get("version", "version"))

    def configuration(self) -> dict[str, Any]:
        """Return vLLM's configuration: the fields of `VllmConfig` as JSON."""
        configuration = self._get("server_info", "vllm_config", {"config_format": "json"})
        if not isinstance(configuration, dict):
            raise self._failed("GET", "server_info", "returned no configuration", b"")
        return configuration

    def generates_tokens(self) -> bool:
        """Return whether the server has the route that takes and returns token ids."""
        try:
            self._request("GET", _GENERATE, None)
        except HTTPFailure as failure:
            # Elsewhere 404. Unlike an empty request it leaves no traceback in the server's log.
            return failure.status == HTTPStatus.METHOD_NOT_ALLOWED
        return False

    def ends_at(self, token: int) -> bool | None:
        """Return whether a response ends at a token; None if the server does not sample now, or not
        as asked."""
        if self.is_paused():
            return None
        sampling = {"max_tokens": 2, "allowed_token_ids": [token], "detokenize": False}
        body = {"token_ids": [token], "sampling_params": sampling, "stream": False}
        try:
            answer = parse_json(self._request("POST", _GENERATE, body))
        except HTTPFailure as failure:
            if failure.status == HTTPStatus.BAD_REQUEST:
                return None
            raise self._failed("POST", _GENERATE, f"failed: {failure}", failure.answer) from None
        (choice,) = answer["choices"]
        return bool(choice["finish_reason"] == "stop")

    def weight_version(self) -> str:
        """Return the version of the last finished update; "default" before the first."""
        return str(self._get("weight_info", "weight_version"))

    def pause(self, mode: str) -> None:
        # Without clear_cache, known prompts would be answered from the old weights' cache.
        self._post("pause", params={"mode": mode, "clear_cache": "true"})

    def is_paused(self) -> bool:
        """Return whether the server holds requests back."""
        return self._get("is_paused", "is_paused") is True

    def resume(self) -> None:
        self._post("resume")


class HealthWatch:
    """Probes servers in threads of its own, within a context: a server that hangs in the midst of
    an update is known before the update's messages time out.

    Example: after `with HealthWatch(clients) as watch: ...`, `watch.faults` is
    `{"http://b:8000": "GET http://b:8000/health failed: timed out: no answer within 30 s"}`.
    """

    def __init__(self, clients: Sequence[HTTPEngineClient]) -> None:
        """The timeout of `clients` is that of a probe."""
        self._clients = clients
        self.faults: dict[str, str] = {}  # by URL
        self._has_ended = threading.Event()

    def __enter__(self) -> Self:
        for client in self._clients:
            threading.Thread(target=self._watch, args=(client,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()

    def check(self) -> None:
        """Raise RuntimeError if a server has not answered."""
        for fault in self.faults.values():
            raise RuntimeError(fault)

    def _watch(self, client: HTTPEngineClient) -> None:
        while not self._has_ended.wait(PAUSE_SECONDS):
            try:
                client.require_health()
            except RuntimeError as error:
                self.faults[client.base_url] = str(error)
                return
