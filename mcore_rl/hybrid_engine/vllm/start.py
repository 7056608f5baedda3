"""How an engine is started: its configuration, and what vLLM must find and must not disturb.

Nothing here is imported from vLLM before the environment it reads is set.
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
from mcore_rl.model.config_json import read_config_json
from mcore_rl.model.families import left_to_defaults
from mcore_rl.model.quantization import QUANTIZATION
from mcore_rl.model.speculation import MTP, NGRAM, Speculation
from mcore_rl.moe.routing import RoutedLayers

_DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
# An n-gram drafter goes on as the text did after the last tokens stood there before: the longest
# stretch of so many tokens.
_FEWEST_ALIKE, _MOST_ALIKE = 2, 4

# These warn on every reload, of rotary tables that no checkpoint holds and of parameters that are
# computed from others. `reload` finds out for itself what was loaded.
_RELOAD_LOGGERS = (
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.model_loader.reload.inplace",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine is started with.

    `load_format` is "dummy" (weights come by `reload`) or "auto" (from `model_dir`, where files of
    safetensors are all that is read). A folder of quantised weights is served as the model of
    `dtype` that they stand for, and has to be "dummy". `trust_remote_code` lets code in that folder
    run.
    `kv_cache_bytes` is per rank; None leaves it to `gpu_memory_utilization`, a share of the device,
    on GPUs, and to VLLM_CPU_KVCACHE_SPACE or 1 GiB on CPU.

    With `keeps_kv`, for engines that never sleep, keys and values outlive a `reload`: what must not
    be shared across it has a `Request.cache_name` of its own.

    vLLM's positions are called slots: engine, then its data-parallel rank, then TP rank, innermost.
    An engine has `tp_size` x `dp_size` slots, and with expert parallelism experts spread over all
    of them. `rank_map[slot]` is the rank of the torch.distributed world that plays a slot; None, or
    an empty one, is the identity. With `ranks_per_node`, consecutive ranks, the ranks of a TP group
    must be in one node.
    """

    model_dir: Path
    tp_size: int = 1
    dp_size: int = 1
    rank_map: tuple[int, ...] | None = None
    ranks_per_node: int | None = None
    enable_expert_parallel: bool = False
    all2all_backend: str = ""  # of experts over data-parallel ranks; empty: vLLM's default
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.5
    enable_prefix_caching: bool = True
    keeps_kv: bool = False
    enforce_eager: bool = True
    seed: int = 0
    speculation: Speculation | None = None
    load_format: str = "dummy"
    trust_remote_code: bool = False
    timeout_seconds: int | None = None  # of its collectives; None: torch's
    routed_layers: RoutedLayers | None = None  # whose choices of experts `generate` can tell
    verbose: bool = False

    @property
    def slots_per_engine(self) -> int:
        return self.tp_size * self.dp_size

    def slot(self, rank: int) -> int:
        """The slot that a rank of the world plays."""
        return self.rank_map.index(rank) if self.rank_map else rank


def start_llm(config: EngineConfig) -> Any:
    """Start vLLM's `LLM` for this process's rank. Collective over the world.

    The random states of torch, numpy and Python stay as they are, though vLLM seeds all of them.
    """
    is_new = "vllm" not in sys.modules
    with nothing_collected(), _starting(config):
        from vllm import LLM

        if is_new:
            gc.freeze()  # vLLM collects by itself, and need not walk over all that imports made
        _require_runnable(config)
        llm = LLM(str(config.model_dir), **_arguments(config))
    # Its client's finalizer, which garbage collection would run too, destroys the default process
    # group, and that is the training's. VLLMEngine.close frees what is the engine's. Older versions
    # have none.
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()
    return llm


def start_executor(config: EngineConfig) -> Any:
    """Start vLLM's executor alone: its worker with the model, which nothing can run yet.

    Without a KV cache, a scheduler and a profiling run, and therefore in layouts too in which vLLM
    cannot run on this platform. Collective over the world; random states stay as they are.
    """
    with _starting(config):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.executor.abstract import Executor

        arguments = EngineArgs(model=str(config.model_dir), **_arguments(config))
        vllm_config = arguments.create_engine_config(UsageContext.LLM_CLASS)
        return Executor.get_class(vllm_config)(vllm_config)


def on_cuda() -> bool:
    """Whether vLLM's platform in this process is CUDA."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


@contextmanager
def _starting(config: EngineConfig) -> Iterator[None]:
    """In which vLLM starts: with our environment and patches, and with the process left alone."""
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
    """Refuse sizes and a rank map that this world cannot have."""
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
            remedy="choose EP equal to the rollout tensor parallel size, or VLLMModelOnly, which "
            "does not generate",
        )


@contextmanager
def _slot_as_rank(config: EngineConfig) -> Iterator[None]:
    """In which RANK, from which vLLM derives its data-parallel rank, says what it expects to find.

    It divides RANK by the TP size and wants to get a data-parallel rank, so that it counts within
    one engine; nothing but names of files and traces comes from it otherwise.
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
    """Set what vLLM reads from the environment when it is imported and when an engine starts."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise UsageError(
            "puts the engine into a process of its own, but it must share its weights' process",
            flag="VLLM_ENABLE_V1_MULTIPROCESSING=1",
            remedy="unset it",
        )
    rank = str(dist.get_rank())
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Without verbose vLLM's messages go the way of all others, by the levels set at the start.
        "VLLM_CONFIGURE_LOGGING": "1" if config.verbose else "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RANK": rank,
        "LOCAL_RANK": str(torch.cuda.current_device()) if torch.cuda.is_available() else rank,
    }
    if not torch.cuda.is_available():
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # several ranks share the cores
        if config.enforce_eager:
            # Some of vLLM's functions are compiled even so: C++, half a minute at the first token.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
    if "numba" not in sys.modules:
        # vLLM finds n-grams with one of its threads; the others take turns with torch's.
        defaults["NUMBA_NUM_THREADS"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available() and config.kv_cache_bytes is not None:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would win over the flag


def _arguments(config: EngineConfig) -> dict[str, Any]:
    """What vLLM's engine is asked for, but for the model."""
    config_json = read_config_json(config.model_dir)
    overrides = left_to_defaults(config_json)
    if config_json.get(QUANTIZATION) is not None:
        # The hand-over brings what FP8 blocks stand for, which is what is trained. vLLM's own
        # loader would take the blocks for weights.
        if config.load_format != "dummy":
            raise RuntimeError(f"{config.model_dir} is quantised: start with dummy weights, reload")
        overrides[QUANTIZATION] = None
    options: dict[str, Any] = {"hf_overrides": overrides}
    kv_cache_bytes = config.kv_cache_bytes
    if on_cuda():
        options["enable_sleep_mode"] = True
        # Scheduled one step ahead, a data-parallel rank ends in a step without tokens. Model runner
        # V2, the default, leaves it without the collective in which the others wait, and theirs
        # then meets another one: gloo aborts at the end of the first generation.
        options["async_scheduling"] = config.dp_size == 1
        if config.dtype == "float16":
            # Else vLLM chooses TRTLLM's experts on Blackwell, which take bfloat16 only.
            options["moe_backend"] = "triton"
        if config.routed_layers is not None:
            options["enable_return_routed_experts"] = True
    else:
        if kv_cache_bytes is None and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            kv_cache_bytes = _DEFAULT_CPU_KV_CACHE_BYTES
        if "kv_lora_rank" in config_json:
            # The AMX one packs kv_b_proj and throws the weight away: no reload.
            options["attention_backend"] = "CPU_MLA"
    if config.speculation is not None:
        options |= _speculative(config.speculation, options)
    if config.dp_size > 1:
        options["data_parallel_size"] = config.dp_size
        if config.all2all_backend:
            options["all2all_backend"] = config.all2all_backend
    if config.timeout_seconds is not None:
        from vllm.engine.arg_utils import EngineArgs

        known = {spec.name for spec in dataclasses.fields(EngineArgs)}  # an older vLLM lacks them
        names = ("distributed_timeout_seconds", "cpu_distributed_timeout_seconds")
        options |= {name: config.timeout_seconds for name in names if name in known}
    return dict(
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=config.tp_size,
        enable_expert_parallel=config.enable_expert_parallel,
        dtype=config.dtype,
        max_model_len=_max_model_len(config, config_json),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enable_prefix_caching=config.enable_prefix_caching,
        enforce_eager=config.enforce_eager,
        seed=config.seed,
        # vLLM's own "auto" goes on to pickled weights where there is no safetensors file.
        load_format="safetensors" if config.load_format == "auto" else config.load_format,
        trust_remote_code=config.trust_remote_code,
        logprobs_mode="processed_logprobs",
        use_tqdm_on_load=config.verbose,
        **options,
    )


def _max_model_len(config: EngineConfig, config_json: Mapping[str, Any]) -> int | None:
    """With room behind the longest sequence for drafts that are verified and for those that come
    next: without, vLLM drafts for no sequence of a step in which one is nearly as long."""
    length = config.max_model_len
    if length is None or config.speculation is None:
        return length
    most = max(length, config_json.get("max_position_embeddings") or 0)
    return min(length + 2 * config.speculation.num_tokens, most)


def _speculative(speculation: Speculation, options: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for otherwise, or besides `options`, with somebody who drafts."""
    drafter: dict[str, Any] = {
        "method": speculation.method,
        "num_speculative_tokens": speculation.num_tokens,
    }
    changes: dict[str, Any] = {"speculative_config": drafter}
    if speculation.method == NGRAM:
        drafter |= {"prompt_lookup_min": _FEWEST_ALIKE, "prompt_lookup_max": _MOST_ALIKE}
        if options.get("async_scheduling"):
            changes["async_scheduling"] = False  # drafts are made of tokens that are known
    if speculation.method == MTP:
        # Of the model's options the drafter takes these from nowhere but here.
        if "attention_backend" in options:
            drafter["attention_backend"] = options["attention_backend"]
        changes["hf_overrides"] = functools.partial(_with_fields, options["hf_overrides"])
    return changes


def _with_fields(fields: Mapping[str, Any], config: Any) -> Any:
    """What `hf_overrides` does as a mapping, for the drafter's configuration as well."""
    config.update(fields)
    return config


@contextmanager
def _start_up_logging(verbose: bool) -> Iterator[None]:
    """Without `verbose`, errors only while the engine starts, and warnings afterwards.

    What vLLM warns of at a start is the consequence of how it is started here: eager, in process,
    without Triton on CPU, with threads left alone.
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
