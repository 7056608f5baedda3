"""Capture of vLLM's choices of experts for each token of prompt and response.

On CUDA vLLM returns them itself (`enable_return_routed_experts`): a worker keeps choices by the
hash of KV blocks, so it has them for a cached prefix, too. This needs its model runner V2, which
needs Triton. On CPU `SlotCapture` keeps choices by KV slot, exactly as long as the keys and values
that were computed with them. With prefix-cache hits, preempted and recomputed requests, chunked
prefill and rejected drafts, the last choices in a slot are those that computed the response.

Both return the choices in `CompletionOutput.routed_experts`.

Shape legend: n tokens of a request; l decoder layers, m of them with experts; k choices per token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mcore_rl.moe.routing import RoutedLayers, Routes

_UNKNOWN = -1


class SlotCapture:
    """Store of the choices per KV slot of this rank's worker; read for a request when it ends.

    For model runner V1, with scheduler and worker in this process.
    """

    def __init__(self, llm: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self._group, self._block_size = _group_of_all_tokens(runner.kv_cache_config)
        self._num_slots = runner.kv_cache_config.num_blocks * self._block_size
        self._topk = llm.llm_engine.vllm_config.model_config.get_num_experts_per_tok()
        self._layers: dict[int, torch.Tensor] = {}  # layer -> [slots, k] int16
        self._layer_name = runner.kv_cache_config.kv_cache_groups[self._group].layer_names[0]
        self._ended: dict[str, np.ndarray] = {}
        bind_routed_experts_capturer(runner.get_model(), self)  # calls `capture`
        self._watch(llm.llm_engine.engine_core.engine_core.scheduler)

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Store `[tokens, k]` experts; every router calls this in a forward pass."""
        from vllm.forward_context import get_forward_context

        mapping = get_forward_context().slot_mapping
        slots = mapping.get(self._layer_name) if isinstance(mapping, dict) else None
        if slots is None:  # a memory-profiling or warm-up run, without a cache
            return
        if len(slots) != len(topk_ids):
            raise RuntimeError(
                f"layer {layer_id}: {len(topk_ids)} tokens have experts, but {len(slots)} have a "
                "place in the KV cache"
            )
        if layer_id not in self._layers:
            shape = (self._num_slots, self._topk)
            self._layers[layer_id] = torch.full(shape, _UNKNOWN, dtype=torch.int16)
        if (slots < 0).any():  # padding
            topk_ids, slots = topk_ids[slots >= 0], slots[slots >= 0]
        self._layers[layer_id][slots] = topk_ids.to(torch.int16)

    def _watch(self, scheduler: Any) -> None:
        """Read a request's slots before its blocks are reused, and attach them to its output."""
        free, update = scheduler._free_request, scheduler.update_from_output

        def free_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in self._ended:
                self._ended[request.request_id] = self._read(scheduler, request)
            return free(request, *args, **kwargs)

        def update_from_output(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            for of_client in outputs.values():
                for output in of_client.outputs:
                    output.routed_experts = self._ended.get(output.request_id)
            self._ended.clear()
            return outputs

        scheduler._free_request = free_request  # on this instance only
        scheduler.update_from_output = update_from_output

    def _read(self, scheduler: Any, request: Any) -> np.ndarray:
        """Return `[n, l, k]` int16 for all tokens except the last, which has not been computed."""
        num_tokens = max(request.num_tokens - 1, 0)
        blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._group]
        starts = torch.tensor(blocks, dtype=torch.int64) * self._block_size
        slots = (starts[:, None] + torch.arange(self._block_size)).flatten()[:num_tokens]
        num_layers = max(self._layers, default=-1) + 1
        experts = torch.full((num_tokens, num_layers, self._topk), _UNKNOWN, dtype=torch.int16)
        for layer, of_slots in self._layers.items():
            experts[: len(slots), layer] = of_slots[slots]
        return experts.numpy()

    def forget(self) -> None:
        """Drop all choices; call it when the KV cache has been emptied."""
        self._layers.clear()


def _group_of_all_tokens(kv_cache_config: Any) -> tuple[int, int]:
    """Return index and block size of a group of layers that keep every token of a request."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        several = getattr(spec, "kv_cache_specs", None)  # layers of several sizes in one group
        specs = [spec] if several is None else several.values()
        if all(isinstance(each, FullAttentionSpec) for each in specs):
            return number, spec.block_size
    raise RuntimeError("no layer of vLLM's model keeps every token in its KV cache")


def routes_of(reported: np.ndarray | None, of: RoutedLayers, num_tokens: int) -> Routes | str:
    """Convert `CompletionOutput.routed_experts` to routes; return the problem if it is invalid.

    `num_tokens` counts the computed tokens of prompt and response. A token that lacks choices in
    any layer counts as unknown.
    """
    if reported is None:
        reported = np.empty((0, of.layers[-1] + 1, of.topk), dtype=of.dtype)
    if reported.ndim != 3 or len(reported) > num_tokens or reported.shape[1] <= of.layers[-1]:
        expected = f"[{num_tokens}, more than {of.layers[-1]}, {of.topk}]"
        return f"the engine reported experts in shape {list(reported.shape)}, expected {expected}"
    if reported.shape[2] != of.topk:
        return f"the engine reported {reported.shape[2]} experts a token, expected {of.topk}"
    ids = reported[:, list(of.layers)]
    if ids.size and int(ids.max()) >= of.num_experts:
        return f"the engine reported expert {int(ids.max())}, of which there are {of.num_experts}"
    known = np.zeros(num_tokens, dtype=np.bool_)
    known[: len(ids)] = True
    if np.issubdtype(ids.dtype, np.signedinteger):
        known[: len(ids)] = (ids >= 0).all(axis=(1, 2))
    chosen = np.zeros((num_tokens, *ids.shape[1:]), dtype=of.dtype)
    chosen[: len(ids)] = ids.astype(of.dtype, copy=False)
    return Routes(chosen, known)
