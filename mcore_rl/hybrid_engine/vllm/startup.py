"""Start of an engine: its configuration, vLLM's environment, and the process state to preserve.

This module imports vLLM only after setting the environment that vLLM reads.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.common.errors import UsageError
from mcore_rl.common.garbage import nothing_collected
from mcore_rl.hybrid_engine.vllm.adapters import lora_arguments
from mcore_rl.hybrid_engine.vllm.all_reduce import Obstacle, all_reduce_obstacle
from mcore_rl.model.config_json import read_config_json
from mcore_rl.model.families import FAMILIES, left_to_defaults, text_values
from mcore_rl.model.float8_blocks import Float8Weights
from mcore_rl.model.lora import Lora
from mcore_rl.model.quantization import QUANTIZATION
from mcore_rl.model.speculation import MTP, NGRAM, Speculation
from mcore_rl.moe.routing import RoutedLayers

_CPU_BLOCK_TOKENS = 32  # the fewest with which vLLM's attention on CPU is fast
_DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
# An n-gram drafter continues as the text did after an earlier occurrence of its last tokens: the
# longest suffix within these lengths.
_FEWEST_ALIKE, _MOST_ALIKE = 2, 4

# These warn on every reload about rotary tables, which no checkpoint contains, and about parameters
# computed from others. `reload` checks by itself what was loaded.
_RELOAD_LOGGERS = (
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.model_loader.reload.inplace",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine.

    `load_format` is "dummy" (`reload` brings the weights) or "auto" (from `model_dir`, reading only
    safetensors files). A folder of quantised weights is served as the dequantised model in `dtype`,
    and requires "dummy". With `float8`, the engine holds these weights in FP8 blocks; `dtype` is
    that of the others and of activations. `trust_remote_code` allows code in that folder to run.
    `kv_cache_bytes` is per rank; None leaves it to `gpu_memory_utilization`, a share of the device,
    on GPUs, and to VLLM_CPU_KVCACHE_SPACE or 1 GiB on CPU.

    With `keeps_kv`, for engines that never sleep, keys and values survive a `reload`; requests that
    must not share them across it need a different `Request.cache_name`.

    With `lora`, requests are computed with an adapter beside the weights, which
    `VLLMEngine.adapters` receives.

    vLLM's positions are called slots: engine, then its data-parallel rank, then TP rank, innermost.
    An engine has `tp_size` x `dp_size` slots, and with expert parallelism experts spread over all
    of them. `rank_map[slot]` is the rank of the torch.distributed world in a slot; None or empty is
    the identity. With `ranks_per_node`, consecutive ranks, the ranks of a TP group must be in one
    node.
    """

    model_dir: Path
    tp_size: int = 1
    dp_size: int = 1
    rank_map: tuple[int, ...] | None = None
    ranks_per_node: int | None = None
    enable_expert_parallel: bool = False
    all2all_backend: str = ""  # for experts over data-parallel ranks; empty: vLLM's default
    dtype: str = "bfloat16"
    float8: Float8Weights | None = None
    head_in_float32: bool = False  # logits are products in float32
    num_top_tokens: int = 0  # most probable tokens that a request may ask for
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.5
    enable_prefix_caching: bool = True
    keeps_kv: bool = False
    enforce_eager: bool = True
    offload_graphs: bool = False  # CUDA graphs leave the device while the engine sleeps
    seed: int = 0
    speculation: Speculation | None = None
    lora: Lora | None = None
    load_format: str = "dummy"
    trust_remote_code: bool = False
    timeout_seconds: int | None = None  # of the engine's collectives; None: torch's default
    routed_layers: RoutedLayers | None = None  # layers whose chosen experts `generate` can return
    verbose: bool = False

    @property
    def slots_per_engine(self) -> int:
        return self.tp_size * self.dp_size

    def slot(self, rank: int) -> int:
        """Return the slot of a rank of the world."""
        return self.rank_map.index(rank) if self.rank_map else rank


def start_llm(config: EngineConfig) -> Any:
    """Start vLLM's `LLM` for this process's rank. Collective over the world.

    The random states of torch, numpy and Python do not change, though vLLM seeds all of them.
    """
    is_new = "vllm" not in sys.modules
    with nothing_collected(), starting(config):
        from vllm import LLM

        if is_new:
            gc.freeze()  # vLLM collects garbage, and must not walk over all imported objects
        _require_runnable(config)
        llm = LLM(str(config.model_dir), **engine_arguments(config))
    # The client's finalizer, which garbage collection would also run, destroys the default process
    # group, which belongs to training. VLLMEngine.close frees the engine's own groups. Older
    # versions have no finalizer.
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    return llm


def on_cuda() -> bool:
    """Return whether vLLM's platform in this process is CUDA."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


@contextmanager
def starting(config: EngineConfig) -> Iterator[None]:
    """Set up our environment and patches while vLLM starts, and preserve the process's state."""
    require_placement(config)
    _prepare_environment(config)
    from mcore_rl.patches.vllm import rank_map, register

    with (
        rank_map.in_use(config.rank_map),
        _slot_as_rank(config),
        _random_state_kept(),
        _start_up_logging(config.verbose),
    ):
        register()  # the plugin does so too, unless VLLM_PLUGINS leaves it out
        yield


def require_placement(config: EngineConfig) -> None:
    """Raise UsageError for sizes or a rank map that do not fit this world."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; the engine uses its world")
    world_size, tp_size = dist.get_world_size(), config.tp_size
    if tp_size < 1 or world_size % tp_size:
        raise UsageError(
            f"a rollout tensor parallel size of {tp_size} does not divide the world of "
            f"{world_size} processes",
            remedy="choose a divisor",
        )
    if config.dp_size < 1 or world_size % config.slots_per_engine:
        raise UsageError(
            f"a rollout tensor parallel size of {tp_size} x {config.dp_size} data-parallel ranks "
            f"= {config.slots_per_engine} does not divide the world of {world_size} processes",
            remedy="choose a divisor",
        )
    ranks = config.rank_map or tuple(range(world_size))
    if sorted(ranks) != list(range(world_size)):
        raise UsageError(
            f"the rank map {','.join(map(str, ranks))} does not name each of the {world_size} "
            "ranks exactly once",
            remedy="correct it",
        )
    if config.ranks_per_node is None:
        return
    for first in range(0, world_size, tp_size):
        group = ranks[first : first + tp_size]
        nodes = sorted({rank // config.ranks_per_node for rank in group})
        if len(nodes) > 1:
            raise UsageError(
                f"the rank map puts ranks {','.join(map(str, group))} into one rollout TP group, "
                f"but they are in {len(nodes)} nodes of {config.ranks_per_node} ranks "
                f"({','.join(map(str, nodes))})",
                remedy=f"keep each group of {tp_size} in one node",
            )


def _require_runnable(config: EngineConfig) -> None:
    if config.dp_size > 1 and not on_cuda():
        raise UsageError(
            f"vLLM on CPU cannot run experts over {config.dp_size} data-parallel ranks",
            remedy="choose EP equal to the rollout tensor parallel size",
        )


@contextmanager
def _slot_as_rank(config: EngineConfig) -> Iterator[None]:
    """Set RANK while vLLM starts to the value from which it derives its data-parallel rank.

    vLLM divides RANK by the TP size to get the data-parallel rank, so RANK must count within one
    engine. Otherwise vLLM uses it only in names of files and traces.
    """
    if config.dp_size == 1 and not config.rank_map:
        yield
        return
    before = os.environ["RANK"]
    slot = config.slot(dist.get_rank())
    os.environ["RANK"] = str(slot % config.slots_per_engine if config.dp_size > 1 else slot)
    try:
        yield
    finally:
        os.environ["RANK"] = before


def _prepare_environment(config: EngineConfig) -> None:
    """Set the variables that vLLM reads when it is imported and when an engine starts."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise UsageError(
            "puts the engine into a process of its own, but it must share its weights' process",
            flag="VLLM_ENABLE_V1_MULTIPROCESSING=1",
            remedy="unset it",
        )
    rank = str(dist.get_rank())
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Without verbose, vLLM's messages use the job's logging and the levels set at the start.
        "VLLM_CONFIGURE_LOGGING": "1" if config.verbose else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RANK": rank,
        "LOCAL_RANK": str(torch.cuda.current_device()) if torch.cuda.is_available() else rank,
    }
    if not torch.cuda.is_available():
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several ranks share the cores
        if config.enforce_eager:
            # vLLM still compiles some functions to C++: half a minute at the first token.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
    if "numba" not in sys.modules:
        # vLLM finds n-grams with one numba thread; more would compete with torch's threads.
        defaults["NUMBA_NUM_THREADS"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available() and config.kv_cache_bytes is not None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would win over the flag


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """Return the arguments of vLLM's engine, except the model."""
    whole = read_config_json(config.model_dir)
    config_json = text_values(whole)
    overrides = left_to_defaults(config_json)
    if config.float8 is not None:
        overrides[QUANTIZATION] = config.float8.quantization_config()
    elif config_json.get(QUANTIZATION) is not None:
        # The hand-over brings dequantised weights, since these are trained. vLLM's own loader would
        # take FP8 blocks for weights.
        if config.load_format != "dummy":
            raise RuntimeError(f"{config.model_dir} is quantised: start with dummy weights, reload")
        overrides[QUANTIZATION] = None
    if config.head_in_float32:
        overrides["head_dtype"] = "float32"
    options: dict[str, Any] = {"hf_overrides": overrides}
    if config_json is not whole:
        overrides["tie_word_embeddings"] = config_json.get("tie_word_embeddings", False)
        options["hf_overrides"] = functools.partial(with_fields, overrides)
    if config.num_top_tokens:
        options["max_logprobs"] = config.num_top_tokens
    options |= _platform_options(config, config_json)
    if config.speculation is not None:
        options |= _speculative(config.speculation, options)
    if config.lora is not None:
        options |= lora_arguments(config.lora)
    if config.dp_size > 1:
        options["data_parallel_size"] = config.dp_size
        if config.all2all_backend:
            options["all2all_backend"] = config.all2all_backend
    if config.timeout_seconds is not None:
        from vllm.engine.arg_utils import EngineArgs

        known = {spec.name for spec in dataclasses.fields(EngineArgs)}  # older versions lack them
        names = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")
        options |= {name: config.timeout_seconds for name in names if name in known}
    return dict(
        runner="generate",  # vLLM's own choice may be a pooling model
        config_format="hf",  # also where a folder has them in Mistral's own format
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=config.tp_size,
        enable_expert_parallel=config.enable_expert_parallel,
        dtype=config.dtype,
        max_model_len=_max_model_len(config, config_json),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        seed=config.seed,
        # vLLM's own "auto" falls back to pickled weights if there is no safetensors file.
        load_format="safetensors" if config.load_format == "auto" else config.load_format,
        trust_remote_code=config.trust_remote_code,
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=config.verbose,
        **options,
    )


def _platform_options(config: EngineConfig, config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ between CUDA and the CPU."""
    if not on_cuda():
        options: dict[str, Any] = {"kv_cache_memory_bytes": config.kv_cache_bytes}
        if config.kv_cache_bytes is None and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            options["kv_cache_memory_bytes"] = _DEFAULT_CPU_KV_CACHE_BYTES
        if "kv_lora_rank" in config_json:
            # The AMX backend packs kv_b_proj and drops the weight, which prevents a reload.
            options["attention_backend"] = "CPU_MLA"
        else:
            # Samples share the whole blocks of their prompt. vLLM's default is 128 tokens.
            options["block_size"] = _CPU_BLOCK_TOKENS
        return options
    options = {
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "enable_sleep_mode": True,
        # With scheduling one step ahead, a data-parallel rank ends in a step without tokens. Model
        # runner V2, the default, leaves this step without the collective in which the other ranks
        # wait. Their collective then meets a different one: gloo aborts at the end of the first
        # generation.
        "async_scheduling": config.dp_size == 1,
        "disable_custom_all_reduce": _all_reduce_obstacle(config) is not None,
    }
    if "index_topk" in config_json and config.dtype == "bfloat16":
        # Otherwise vLLM stores GLM-5's keys and values in FP8 on Blackwell, without a word.
        options["kv_cache_dtype"] = "bfloat16"
    if config.dtype == "float16":
        # Otherwise vLLM chooses TRTLLM's experts on Blackwell, which support only bfloat16.
        options["moe_backend"] = "triton"
    if config.routed_layers is not None:
        options["enable_return_routed_experts"] = True
    if config.offload_graphs:
        options["sleep_mode_offload_cudagraph"] = True
    return options


def _all_reduce_obstacle(config: EngineConfig) -> Obstacle | None:
    return all_reduce_obstacle(
        config.tp_size,
        config.rank_map,
        os.environ,
        captures_graphs=not config.enforce_eager,
        offloads_graphs=config.offload_graphs,
    )


def _max_model_len(config: EngineConfig, config_json: Mapping[str, Any]) -> int | None:
    """Return the model length with room for two drafts after the longest sequence: without it, vLLM
    skips drafting for all sequences of a step if one of them is nearly that long."""
    length = config.max_model_len
    if length is None or config.speculation is None:
        return length
    most = max(length, config_json.get("max_position_embeddings") or 0)
    return min(length + 2 * config.speculation.num_tokens, most)


def _speculative(speculation: Speculation, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that speculative decoding adds to `options` or changes."""
    drafter: dict[str, Any] = {
        "method": speculation.method,
        "num_speculative_tokens": speculation.num_tokens,
    }
    changes: dict[str, Any] = {"speculative_config": drafter}
    if speculation.method == NGRAM:
        drafter |= {"prompt_lookup_min": _FEWEST_ALIKE, "prompt_lookup_max": _MOST_ALIKE}
        if options.get("async_scheduling"):
            changes["async_scheduling"] = False  # n-gram drafts need known tokens
    if speculation.method == MTP:
        # The drafter does not inherit these options from the model.
        if "attention_backend" in options:
            drafter["attention_backend"] = options["attention_backend"]
        changes["hf_overrides"] = functools.partial(with_fields, options["hf_overrides"])
    return changes


def with_fields(fields: Mapping[str, Any], config: Any) -> Any:
    """Apply `hf_overrides` like the mapping, but to the text model of a multimodal one, which takes
    its place, and to the drafter's configuration, which keeps its own architecture."""
    config = config.get_text_config()
    family = FAMILIES.get(config.model_type)
    kept = ("architectures",) if family is None else ()  # a drafter's
    config.update({name: value for name, value in fields.items() if name not in kept})
    if family is not None and getattr(config, "rope_parameters", None):
        # With them vLLM would expect a position in an image of each token.
        of_text = config.rope_parameters.items()
        config.rope_parameters = {n: v for n, v in of_text if n not in family.rope_of_images}
    return config


@contextmanager
def _start_up_logging(verbose: bool) -> Iterator[None]:
    """Without `verbose`, log only errors while the engine starts, and warnings afterwards.

    vLLM's warnings at the start follow from how it is started here: eager, in process, without
    Triton on CPU, with threads not bound.
    """
    if verbose:
        yield
        return
    vllm = logging.getLogger("vllm")
    vllm.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            yield
    finally:
        vllm.setLevel(logging.WARNING)
        for name in _RELOAD_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def _random_state_kept() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if device is not None:
            torch.cuda.set_rng_state(device)
