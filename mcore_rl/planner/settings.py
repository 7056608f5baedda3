"""What a plan takes as given, beside the model and the two layouts. Bytes are plain bytes.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GB = 10**9
MIB = 1 << 20


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

    @property
    def micro_batch_tokens(self) -> int:
        """Of the largest micro-batch, over all context-parallel ranks."""
        return self.packed_tokens or self.micro_batch_size * self.positions

    def micro_batches_of(self, samples: int, dp_size: int, multiple_of: int = 1) -> int:
        """Of a mini-batch of `samples`, on each data-parallel rank, all samples being full length;
        packed, their number is rounded up to `multiple_of`. As in `mcore_rl.batching.accounting`.
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
    distributed_optimizer: bool
    optimizer_instances: int  # --num-distributed-optimizer-instances: copies of the sharded state
    optimizer_host_share: float  # of the optimizer's state, what --optimizer-cpu-offload moves


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How rollout and hand-over use memory."""

    gpu_memory_utilization: float  # share of the device that vLLM may take
    max_num_seqs: int  # in flight on each data-parallel rank of an engine
    max_model_tokens: int  # prompt and response
    max_response_tokens: int
    batched_tokens: int  # that the engine works on at one time
    bucket_bytes: int
    delta: bool  # both ends keep a copy of what travels
    may_spread_experts: bool  # no --rl-rollout-no-expert-parallel
    offloaded: frozenset[str]  # kinds of hybrid_engine.offload that leave the device for rollout
    keeps_gradients: bool  # of offloaded ones a copy, instead of zeros afterwards
    keeps_reference: bool  # weights of the initial policy, in host memory
    saves_checkpoints: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the job runs on. Rates are bytes per second, of one rank and one direction."""

    ranks_per_node: int
    gpu_bytes: int
    reserved_bytes: int  # of a device: contexts, communicators, CUDA graphs, fragmentation
    host_bytes: int  # of a node
    own_node_rate: float
    other_nodes_rate: float

    @property
    def usable_bytes(self) -> int:
        return self.gpu_bytes - self.reserved_bytes
