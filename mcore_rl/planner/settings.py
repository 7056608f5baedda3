"""What a plan takes as given, beside the model and the two layouts. Bytes are plain bytes.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GB, MB = 10**9, 10**6
MIB = 1 << 20

# What a plan assumes of a device unless it is told otherwise.
GPU_RESERVED_GB = 4.0
COMMUNICATOR_MB = 100.0
BATCHED_TOKENS = 16384  # that vLLM works on at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Megatron's --recompute-*: what of the activations is computed again in the backward pass."""

    granularity: str | None = None  # None, "selective" or "full"
    method: str | None = None  # of "full": "uniform" or "block"
    num_layers: int = 1
    modules: frozenset[str] = frozenset({"core_attn"})  # of "selective"
    spread_over_tp: bool = False  # --distribute-saved-activations

    def describe(self) -> str:
        """full, uniform, 1 layer at a time."""
        if self.granularity == "full":
            return f"full, {self.method}, --recompute-num-layers {self.num_layers}"
        if self.granularity == "selective":
            return f"selective: {', '.join(sorted(self.modules))}"
        return "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """What decides, beside model and layout, how large activations are."""

    weight_bytes: int  # per parameter; activations have the same dtype
    vocabulary_multiple: int | None  # --make-vocab-size-divisible-by; None: as it is derived
    micro_batch_size: int  # samples of a padded one
    num_micro_batches: int  # of a mini-batch, on each data-parallel rank
    positions: int  # of the longest sample: prompt and response
    packed_tokens: int = 0  # that a micro-batch holds at most; 0: it is padded
    sequence_parallel: bool
    recompute: Recompute
    chunk_tokens: int  # whose logits exist at one time
    expert_load: float  # tokens of the busiest rank's experts over the mean
    mtp_layers: int = 0  # --mtp-num-layers: trained ones, on the last stage

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch, over all context-parallel ranks."""
        return self.packed_tokens or self.micro_batch_size * self.positions

    def micro_batches_of(self, samples: int, dp_size: int, multiple_of: int = 1) -> int:
        """Micro-batches of a mini-batch of `samples`, on each data-parallel rank, all samples being
        full length; packed, their number is rounded up to `multiple_of`. As in
        `mcore_rl.batching.accounting`.
        """
        if not self.packed_tokens:
            return samples // dp_size // self.micro_batch_size
        together = max(self.packed_tokens // self.positions, 1)
        count = math.ceil(math.ceil(samples / dp_size) / together)
        return math.ceil(count / multiple_of) * multiple_of

    def describe_micro_batch(self) -> str:
        """1 x 8,192 tokens; or, packed, up to 8,192 tokens."""
        if self.packed_tokens:
            return f"up to {self.packed_tokens:,} tokens"
        return f"{self.micro_batch_size} x {self.positions:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(ActivationSettings):
    """How training stores what it has. `*_bytes` are per parameter."""

    gradient_bytes: int
    optimizer_bytes: int  # main parameter and moments
    moment_bytes: int  # of these, what --load or the first update makes
    distributed_optimizer: bool
    optimizer_instances: int  # --num-distributed-optimizer-instances: copies of the sharded state
    optimizer_host_share: float  # of the optimizer's state, what --optimizer-cpu-offload moves
    # Checkpoints are written and read in pieces of a few MB: those of the distributed optimizer
    # that --dist-ckpt-optim-fully-reshardable names by parameter.
    saved_in_pieces: bool = False
    # What is held in fact, byte by byte: a run is refused for these alone.
    exact: frozenset[str] = frozenset({"weights", "gradients", "optimizer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How a run uses memory beside training itself: rollout, hand-over, start and end."""

    gpu_memory_utilization: float  # share of the device that vLLM may take
    max_num_seqs: int  # in flight on each data-parallel rank of an engine
    max_model_tokens: int  # prompt and response
    max_response_tokens: int
    batched_tokens: int  # that the engine works on at one time
    bucket_bytes: int
    delta: bool  # both ends keep a copy of what travels
    may_spread_experts: bool  # no --rl-rollout-no-expert-parallel
    offloaded: frozenset[str]  # kinds of hybrid_engine.offload that leave the device for rollout
    away_at_start: frozenset[str]  # kinds that are off the device while the engine starts
    keeps_gradients: bool  # of offloaded ones a copy, instead of zeros afterwards
    keeps_reference: bool  # weights of the initial policy, in host memory
    saves_checkpoints: bool
    loads_checkpoint: bool = False  # --load: the optimizer's state is there from the start
    exports: bool = False  # --rl-export-hf
    has_canary: bool = False
    drafter_layers: int = 0  # MTP layers that draft for it
    # Of a step's samples, prompts included: those of the TP group that generates most, and all.
    sampled_tokens: int = 0
    sampled_tokens_in_all: int = 0
    replays_experts: bool = False  # --rl-routing-replay r3


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the job runs on. Rates are bytes per second, of one rank and one direction."""

    ranks_per_node: int
    gpu_bytes: int
    reserved_bytes: int  # of a device: contexts, CUDA graphs, fragmentation
    communicator_bytes: int = 0  # of a device, what NCCL takes for each communicator
    host_bytes: int  # of a node
    own_node_rate: float
    other_nodes_rate: float

    @property
    def usable_bytes(self) -> int:
        return self.gpu_bytes - self.reserved_bytes
