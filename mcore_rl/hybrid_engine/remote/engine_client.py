"""A vLLM server as the trainer drives it: the weight update calls, and pausing around them."""

from __future__ import annotations

from typing import Any, Protocol

from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient


class EngineClient(VLLMWeightSyncClient, Protocol):
    """vLLM's protocol, and what a trainer needs besides. All calls block until done, or raise."""

    def num_workers(self) -> int:
        """How many worker processes this vLLM has, over all its data parallel replicas."""
        ...

    def pause(self, mode: str) -> None:
        """Stop generating and drop the KV cache. `mode` says what happens to running requests:

        "keep" holds them until `resume`, which computes their KV cache anew with the new weights
        and goes on; "wait" lets them finish first; "abort" ends them.
        """
        ...

    def resume(self) -> None:
        """Generate again."""
        ...


class HTTPEngineClient(HTTPVLLMWeightSyncClient):
    """A `vllm serve` with VLLM_SERVER_DEV_MODE=1, which opens the routes used here.

    `timeout` bounds each call, in seconds, and must be longer than an update takes. A refused call
    raises RuntimeError with what the server said.
    """

    def _post(
        self, path: str, json: dict[str, Any] | None = None, params: dict[str, Any] | None = None
    ) -> None:
        self._request("POST", path, json=json, params=params)

    def _request(self, method: str, path: str, **options: Any) -> Any:
        import requests

        url = f"{self.base_url}/{path}"
        try:
            response = requests.request(method, url, timeout=self.timeout, **options)
        except requests.RequestException as error:
            raise RuntimeError(f"{method} {url} failed: {error}") from error
        if not response.ok:
            raise RuntimeError(f"{method} {url} gave {response.status_code}: {response.text}")
        return response.json()

    def num_workers(self) -> int:
        return int(self._request("GET", "get_world_size")["world_size"])

    def weight_version(self) -> str:
        """The version of the last finished update; "default" before the first."""
        return str(self._request("GET", "weight_info")["weight_version"])

    def pause(self, mode: str) -> None:
        # Without clear_cache, prompts seen before would be answered from the old weights' cache.
        self._post("pause", params={"mode": mode, "clear_cache": "true"})

    def is_paused(self) -> bool:
        return bool(self._request("GET", "is_paused")["is_paused"])

    def resume(self) -> None:
        self._post("resume")
