"""Options of the engines and of weight syncs."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mcore_rl.common.parameters import Parameters, param
from mcore_rl.model.quantization import FP8

# Unless the launcher reports it: the number on most machines with GPUs.
_USUAL_RANKS_PER_NODE = 8
_NO_SHARED_DEVICES = "there engines and training do not share devices"


@dataclass(frozen=True, slots=True)
class EngineOptions(Parameters):
    """The flags of the vLLM engines."""

    rollout_tp_size: int = param(
        0, "TP size of a vLLM engine; 0: --tensor-model-parallel-size", least=0
    )
    rollout_ep_size: int = param(
        0,
        "EP size of a vLLM engine: TP size x its data-parallel ranks; 0: "
        "--expert-model-parallel-size if the engine supports it, else the TP size",
        least=0,
    )
    rollout_no_expert_parallel: bool = param(False, "split experts over TP instead of keeping EP")
    rollout_all2all_backend: str = param(
        "", "vLLM's all-to-all backend if experts span data-parallel ranks; empty: vLLM's default"
    )
    rollout_max_num_seqs: int = param(
        128,
        "maximum number of concurrent sequences per engine; a start chooses it by the plan",
        above=0,
    )
    rollout_kv_cache_gib: float = param(1.0, "KV cache per CPU rank, in GiB", above=0)
    rollout_gpu_memory_utilization: float = param(
        0.5,
        "share of GPU memory for vLLM; a start chooses it by the plan",
        above=0,
        most=1,
        advice="it is a share of the GPU's memory",
    )
    rollout_dtype: str = param(
        "auto",
        "dtype of the engines' weights; auto: of the actor; fp8: linear layers in FP8 blocks "
        "(E4M3, 128 x 128), quantised by the sender of a weight sync",
        choices=("auto", FP8),
    )
    accept_rollout_mismatch: bool = param(
        False, "accept --rl-rollout-dtype fp8 without --rl-mismatch-correction"
    )
    rollout_enforce_eager: bool = param(False, "disable CUDA graphs in vLLM (always on CPU)")
    rollout_offload_cuda_graphs: bool = param(
        False,
        "move vLLM's CUDA graphs to host memory during training",
        excludes={
            "rollout_enforce_eager": "there are no CUDA graphs",
            "rollout_ranks": _NO_SHARED_DEVICES,
            "rollout_servers": _NO_SHARED_DEVICES,
        },
    )
    speculate: str = param("off", "speculative decoding: mtp:N, ngram:N (N draft tokens), or off")
    ranks_per_node: int = param(
        0,
        "ranks per machine, which TP groups of engines do not cross; 0: as the launcher reports",
        least=0,
    )


def ranks_per_node(options: EngineOptions, world_size: int) -> int:
    """Return `--rl-ranks-per-node`, else the launcher's number, else 8; at most the world size."""
    launched = os.environ.get("LOCAL_WORLD_SIZE")
    num_ranks = options.ranks_per_node or (int(launched) if launched else _USUAL_RANKS_PER_NODE)
    return min(num_ranks, world_size)


@dataclass(frozen=True, slots=True)
class WeightSyncOptions(Parameters):
    """The flags of the hand-over of weights, its proof, and offloading."""

    reshard_bucket_mb: int = param(512, "bucket size of a weight sync, in MiB", above=0)
    reshard_dtype: str = param(
        "checkpoint",
        "dtype of weights in a weight sync, cast by the sender; checkpoint: fp16 with "
        "--rl-precision fp16, else the dtype of the checkpoint",
        choices=("checkpoint", "bf16", "fp16"),
    )
    reshard_delta: bool = param(
        False, "send only the blocks that changed since the last weight sync"
    )
    reshard_full_interval: int = param(
        20, "with --rl-reshard-delta, weight syncs between full transfers", above=0
    )
    offload: str = param(
        "auto",
        "training state offloaded to host memory during rollout: gradients (or grads), optimizer, "
        "parameters (or params), comma-separated; none; auto: gradients and optimizer with a GPU, "
        "nothing without one",
    )
    offload_keep_gradients: bool = param(
        False, "preserve gradients when they are offloaded, instead of zeroing them"
    )
    attest: str = param(
        "sample",
        "how much of each weight sync is verified: full: every element; sample: one row of 32, "
        "different rows each time; off: nothing",
        choices=("full", "sample", "off"),
    )
    canary_interval: int = param(
        50,
        "weight syncs between comparisons of engine and actor log-probs; 0 disables them",
        least=0,
    )
    canary_tolerance: float = param(
        0.3,
        "maximum mean |difference| of these log-probs over a prompt's tokens, in nats; above it "
        "the weight sync is repeated, then the run stops; 0 only reports",
        least=0,
    )
