"""A file for --rl-import: an engine beside other processes on its GPU.

Its KV cache has a fixed size, since vLLM would measure what others take, and it exchanges by NCCL
alone: its own all-reduce needs a device for each rank.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.hybrid_engine.vllm import startup

KV_CACHE_BYTES = 1 << 30

_arguments = startup.engine_arguments


def engine_arguments(config: startup.EngineConfig) -> dict[str, Any]:
    fixed = {"kv_cache_memory_bytes": KV_CACHE_BYTES, "gpu_memory_utilization": 0.1}
    return _arguments(config) | fixed | {"disable_custom_all_reduce": True}


startup.engine_arguments = engine_arguments
