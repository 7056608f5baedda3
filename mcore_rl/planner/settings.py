"""Inputs of a plan besides the models and their layouts. All sizes are in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mcore_rl.common.errors import UsageError
from mcore_rl.common.near_names import did_you_mean

GB, MB = 10**9, 10**6
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device: its memory as the driver reports it, which is not what the name says; dense bf16
    products and memory traffic as published, of which a job achieves 0.4 and 0.9."""

    memory_gb: float
    peak_tflops: float
    peak_gb_per_second: float

    @property
    def tflops(self) -> float:
        return round(0.4 * self.peak_tflops)

    @property
    def gb_per_second(self) -> float:
        return round(0.9 * self.peak_gb_per_second)


GPUS = {
    "a100-40gb": Gpu(42.3, 312, 1555),
    "a100": Gpu(85.0, 312, 2039),
    "h100": Gpu(85.0, 989, 3350),
    "h200": Gpu(150.1, 989, 4800),
    "b200": Gpu(191.5, 2250, 7670),
    "l40s": Gpu(47.7, 362, 864),
    "rtx4090": Gpu(25.4, 165, 1008),
}


def gpu_named(name: str) -> Gpu:
    """Return the device that `--gpu` names. Raises UsageError."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UsageError(
            f"is not a known device{did_you_mean(name.lower(), GPUS)}",
            flag=f"--gpu {name}",
            remedy=f"choose one of {', '.join(GPUS)}, or give --gpu-memory-gb in its place",
        )
    return gpu


# Defaults of a plan.
GPU = "h100"
# Of a device: contexts and kernels, states of parameters in blocks of their own, buffers of NVLS,
# workspaces of GEMMs, fragmentation.
GPU_RESERVED_GB = 6.0
HOST_RESERVED_GB = 4.0  # without devices
COMMUNICATOR_MB = 100.0
CUDA_GRAPHS_GB = 1.0  # an assumption: depends on the model and the sizes that vLLM captures
BATCHED_TOKENS = 16384  # in one step of vLLM
USUAL_RANKS_PER_NODE = 8
# Of a node, and of a rank in each direction.
HOST_GB, OWN_NODE_GB_PER_SECOND, OTHER_NODES_GB_PER_SECOND = 2000.0, 400.0, 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Megatron's --recompute-*: the activations that the backward pass recomputes."""

    granularity: str | None = None  # None, "selective" or "full"
    method: str | None = None  # of "full": "uniform" or "block"
    num_layers: int = 1
    modules: frozenset[str] = frozenset({"core_attn"})  # of "selective"
    spread_over_tp: bool = False  # --distribute-saved-activations

    def describe(self) -> str:
        """Return for example "full, uniform, --recompute-num-layers 1"."""
        if self.granularity == "full":
            return f"full, {self.method}, --recompute-num-layers {self.num_layers}"
        if self.granularity == "selective":
            return f"selective: {', '.join(sorted(self.modules))}"
        return "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a model is trained. Settings of the training state have defaults, for those who only
    compute activations. `gradient_bytes`, `optimizer_bytes` and `moment_bytes` are per parameter.

    Example: TrainSettings(weight_bytes=2, vocabulary_multiple=None, micro_batch_size=1,
    num_micro_batches=32, positions=4096, sequence_parallel=True, recompute=Recompute(),
    chunk_tokens=1024, expert_load=1.5, gradient_bytes=4, optimizer_bytes=12, moment_bytes=8,
    distributed_optimizer=True)
    """

    weight_bytes: int  # per parameter; activations have the same dtype
    vocabulary_multiple: int | None  # --make-vocab-size-divisible-by; None: derived
    micro_batch_size: int  # samples of a padded micro-batch
    num_micro_batches: int  # of a mini-batch's samples, on each data-parallel rank
    num_demonstration_micro_batches: int = 0  # of demonstrations, behind these
    positions: int  # of the longest sample: prompt and response
    packed_tokens: int = 0  # limit of a packed micro-batch; 0: micro-batches are padded
    sequence_parallel: bool
    recompute: Recompute
    chunk_tokens: int  # tokens whose logits exist at once
    head_in_float32: bool = False  # --rl-fp32-lm-head
    attention_in_float32: bool = False  # of weights in 16 bits, without a GPU
    num_top_tokens: int = 0  # --rl-score-centering
    expert_load: float  # tokens of the busiest rank's experts over the mean
    lora_rank: int = 0  # of adapters, which are all that is trained; 0: without LoRA
    lora_targets: tuple[str, ...] = ()  # see `model.lora.matches`
    mtp_layers: int = 0  # --mtp-num-layers: trained ones, on the last stage
    trains_indexers: bool = False  # --dsa-indexer-loss-coeff
    # What the loss has of a teacher at each token: its most probable tokens, or the size of its
    # hidden state.
    teacher_top_k: int = 0
    teacher_hidden: int = 0
    # Whether sparse attention keeps its scores: without --dsa-kernel-backend.
    keeps_sparse_scores: bool = True
    gradient_bytes: int = 0
    optimizer_bytes: int = 0  # main parameter and moments
    moment_bytes: int = 0  # the part of these that --load or the first update creates
    distributed_optimizer: bool = False
    optimizer_instances: int = 1  # --num-distributed-optimizer-instances: copies of the shards
    optimizer_host_share: float = 0.0  # share of the state that --optimizer-cpu-offload moves
    # Whether checkpoints are written and read in pieces of a few MB: those of the distributed
    # optimizer that --dist-ckpt-optim-fully-reshardable names by parameter.
    saved_in_pieces: bool = False
    saves_in_background: bool = False  # --async-save
    # Parts whose size is exact: a run is refused only because of these.
    exact: frozenset[str] = frozenset({"weights", "gradients", "optimizer"})

    @property
    def num_micro_batches_in_all(self) -> int:
        return self.num_micro_batches + self.num_demonstration_micro_batches

    @property
    def teacher_outputs(self) -> int:
        """Float32 numbers of a teacher for each token: log-probs and ids, or its hidden state."""
        return 2 * self.teacher_top_k + self.teacher_hidden

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch, over all context-parallel ranks."""
        return self.packed_tokens or self.micro_batch_size * self.positions

    def without_state(self) -> TrainSettings:
        """Return the settings of a model that is not trained."""
        return replace(self, gradient_bytes=0, optimizer_bytes=0, moment_bytes=0)

    def micro_batches_of(self, samples: int, dp_size: int, multiple_of: int = 1) -> int:
        """Return each data-parallel rank's micro-batches in a mini-batch of `samples` of full
        length. If packed, the number is rounded up to `multiple_of`."""
        if not self.packed_tokens:
            return samples // dp_size // self.micro_batch_size
        together = max(self.packed_tokens // self.positions, 1)
        count = math.ceil(math.ceil(samples / dp_size) / together)
        return math.ceil(count / multiple_of) * multiple_of

    def describe_micro_batch(self) -> str:
        """Return for example "1 x 8,192 tokens" or, if packed, "up to 8,192 tokens"."""
        if self.packed_tokens:
            return f"up to {self.packed_tokens:,} tokens"
        return f"{self.micro_batch_size} x {self.positions:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of memory that is not for training: rollout, hand-over, start and end."""

    gpu_memory_utilization: float  # share of the device that vLLM may take
    max_num_seqs: int  # in flight on each data-parallel rank of an engine
    max_model_tokens: int  # prompt and response
    max_response_tokens: int
    batched_tokens: int  # in one step of the engine
    bucket_bytes: int
    delta: bool  # both ends keep a copy of the transferred weights
    loads_adapters: bool = False  # --rl-lora-rollout adapters
    may_spread_experts: bool  # no --rl-rollout-no-expert-parallel
    # Whether they may be spread over data-parallel ranks of an engine, which vLLM does on GPUs.
    may_span_ranks: bool = True
    offloaded: frozenset[str]  # kinds that leave the device for rollout, see `offload`
    away_at_start: frozenset[str]  # kinds that are off the device while the engine starts
    keeps_gradients: bool  # offload copies gradients, instead of zeroing them afterwards
    keeps_reference: bool  # weights of the initial policy, in host memory
    saves_checkpoints: bool
    loads_checkpoint: bool = False  # --load: the optimizer's state exists from the start
    exports: bool = False  # --rl-export-hf
    exports_between: bool = False  # --rl-export-interval
    has_canary: bool = False
    drafter_layers: int = 0  # MTP layers that draft for it
    # Tokens of a step's samples with prompts: of the TP group that generates most, and of all.
    sampled_tokens: int = 0
    sampled_tokens_in_all: int = 0
    replays_experts: bool = False  # --rl-routing-replay r3
    graph_bytes: int = 0  # of vLLM's CUDA graphs on a device; 0: eager
    offloads_graphs: bool = False  # while the engine sleeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware of a job. Rates are bytes per second, of one rank and one direction."""

    ranks_per_node: int
    gpu_bytes: int
    reserved_bytes: int  # of a device: contexts, fragmentation
    communicator_bytes: int = 0  # of a device, for each of NCCL's communicators
    host_bytes: int  # of a node
    own_node_rate: float
    other_nodes_rate: float

    @property
    def usable_bytes(self) -> int:
        return self.gpu_bytes - self.reserved_bytes
