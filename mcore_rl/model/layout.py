"""Parallel degrees of training and rollout, and the ranks that follow from them.

Degrees multiply as in Megatron:

    world = tp x cp x dp x pp          (dense part, innermost first: tp, cp, dp, pp)
    world = etp x ep x edp x pp        (experts, innermost first: etp, ep, edp, pp)

and rollout engines of `tp x dp` slots each fill the world. The rank map assigns ranks to slots; the
identity fills slots in rank order. PP is outermost in Megatron and absent in rollout, so the ranks
of one pipeline stage form complete engines: PP becomes additional DP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mcore_rl.common.errors import UsageError

# The all-to-all backends of vLLM 0.32.0 with which experts do not work on token shards of their TP
# group, so that shared experts are split over TP like any dense layer. "moonep" is another, but its
# experts' weights cannot be replaced (see NOT_RELOADABLE).
SPLITS_SHARED_EXPERTS = ("flashinfer_all2allv", "flashinfer_nvlink_two_sided")
# Backends that vLLM accepts from users, except NOT_RELOADABLE.
ALL2ALL_BACKENDS = (
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "flashinfer_nvlink_one_sided",
    *SPLITS_SHARED_EXPERTS,
    "mori_high_throughput",
    "mori_low_latency",
    "nixl_ep",
)
# With this backend vLLM puts experts into memory into which no second checkpoint can be loaded.
NOT_RELOADABLE = "moonep"

# stage -> model chunk (one without virtual stages) -> global numbers (from 0) of its decoder layers
PipelineLayers = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Megatron's parallel degrees; `dp_size` and `edp_size` follow from the world size.

    Example: `TrainLayout(256, tp_size=8, pp_size=8, ep_size=32)` has `dp_size` 4.
    """

    world_size: int
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    etp_size: int = 1

    def __post_init__(self) -> None:
        dense = self.tp_size * self.pp_size * self.cp_size
        if min(dense, self.ep_size, self.etp_size) < 1:
            raise UsageError(
                "parallel sizes must be at least 1", remedy="correct the --*-parallel-size flag"
            )
        if self.world_size % dense:
            raise UsageError(
                f"x --pipeline-model-parallel-size {self.pp_size} x --context-parallel-size "
                f"{self.cp_size} = {dense} does not divide the world of {self.world_size} "
                "processes",
                flag=f"--tensor-model-parallel-size {self.tp_size}",
                remedy="change a size or the number of processes",
            )
        expert = self.etp_size * self.ep_size * self.pp_size
        if self.world_size % expert:
            raise UsageError(
                f"x --expert-model-parallel-size {self.ep_size} x --pipeline-model-parallel-size "
                f"{self.pp_size} = {expert} does not divide the world of {self.world_size} "
                "processes",
                flag=f"--expert-tensor-parallel-size {self.etp_size}",
                remedy="change a size or the number of processes",
            )

    @property
    def dp_size(self) -> int:
        return self.world_size // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def edp_size(self) -> int:
        return self.world_size // (self.etp_size * self.ep_size * self.pp_size)

    @property
    def ranks_per_stage(self) -> int:
        return self.world_size // self.pp_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def pp_rank(self, rank: int) -> int:
        return rank // self.ranks_per_stage

    def cp_rank(self, rank: int) -> int:
        return rank // self.tp_size % self.cp_size

    def dp_rank(self, rank: int) -> int:
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    def dp_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Return the TP, CP and PP ranks of each data-parallel rank, which train on its samples."""
        by_dp_rank: list[list[int]] = [[] for _ in range(self.dp_size)]
        for rank in range(self.world_size):
            by_dp_rank[self.dp_rank(rank)].append(rank)
        return tuple(tuple(ranks) for ranks in by_dp_rank)

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp_size

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp_size % self.ep_size

    def pp_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the stages of `rank`'s pipeline, `rank` included."""
        first = rank % self.ranks_per_stage
        return tuple(first + stage * self.ranks_per_stage for stage in range(self.pp_size))

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Return Megatron's process groups that can broadcast weights, over all ranks of the world.

        Names: `pp`, `ep`, `dp` (with CP), `tp`. Groups that span machines come first.
        """
        tp, etp, stage = self.tp_size, self.etp_size, self.ranks_per_stage
        first = range(0, self.world_size, stage)  # of each stage
        experts = range(0, stage, etp * self.ep_size)
        return {
            "pp": tuple(self.pp_group(rank) for rank in range(stage)),
            "ep": tuple(
                tuple(range(at + block + i, at + block + etp * self.ep_size, etp))
                for at in first
                for block in experts
                for i in range(etp)
            ),
            "dp": tuple(tuple(range(at + i, at + stage, tp)) for at in first for i in range(tp)),
            "tp": tuple(tuple(range(at, at + tp)) for at in range(0, self.world_size, tp)),
        }

    def describe(self) -> str:
        """Return for example "TP2 x CP1 x DP1 x PP2, experts ETP1 x EP2 x EDP1"."""
        return (
            f"TP{self.tp_size} x CP{self.cp_size} x DP{self.dp_size} x PP{self.pp_size}, "
            f"experts ETP{self.etp_size} x EP{self.ep_size} x EDP{self.edp_size}"
        )


def pipeline_layers(
    num_layers: int,
    pp_size: int,
    *,
    vp_size: int = 1,
    first: int | None = None,
    last: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
) -> PipelineLayers:
    """Return the decoder layers of each stage and model chunk, split as Megatron does.

    `first` and `last` are the layer counts of an uneven first or last stage
    (`--decoder-first-pipeline-num-layers`, `--decoder-last-...`). With `embedding_counts` and
    `loss_counts` (`--account-for-*-in-pipeline-split`) the embedding and the loss each count as one
    layer. Raises UsageError if the layers cannot be divided evenly.
    """
    per_stage = _layers_per_stage(
        num_layers + embedding_counts + loss_counts, pp_size, first=first, last=last
    )
    for stage, count in enumerate(per_stage):
        if count % vp_size:
            raise UsageError(
                f"{vp_size} model chunks do not divide the {count} layers of pipeline stage "
                f"{stage}",
                remedy="change --num-layers-per-virtual-pipeline-stage, "
                "--num-virtual-stages-per-pipeline-rank or the stages",
            )
    counts = [[per_stage[stage] // vp_size] * vp_size for stage in range(pp_size)]
    counts[0][0] -= embedding_counts
    counts[-1][-1] -= loss_counts
    return layers_of_chunks(counts)


def layers_of_chunks(counts: Sequence[Sequence[int]]) -> PipelineLayers:
    """Return the layers of each stage and chunk, given the number of layers of each.

    Layers go to the first chunk of every stage, then to the second chunk of every stage, and so on.
    """
    pp_size, vp_size = len(counts), len(counts[0])
    in_turn = [counts[stage][chunk] for chunk in range(vp_size) for stage in range(pp_size)]
    starts = [0, *accumulate(in_turn)]
    return tuple(
        tuple(
            tuple(range(starts[chunk * pp_size + stage], starts[chunk * pp_size + stage + 1]))
            for chunk in range(vp_size)
        )
        for stage in range(pp_size)
    )


def _layers_per_stage(
    num_layers: int, pp_size: int, *, first: int | None, last: int | None
) -> list[int]:
    ends = (first or 0) + (last or 0)
    middle = pp_size - (first is not None) - (last is not None)
    left = num_layers - ends
    if middle < 0 or (middle == 0 and left) or (middle and (left < 0 or left % middle)):
        uneven = "" if not ends else f", of which {ends} are in an uneven first or last stage,"
        raise UsageError(
            f"{num_layers} layers{uneven} do not divide into {{flag}} stages",
            flag=f"--pipeline-model-parallel-size {pp_size}",
            remedy="change it or set --decoder-last-pipeline-num-layers",
        )
    stages = [left // middle] * middle if middle else []
    return [*([] if first is None else [first]), *stages, *([] if last is None else [last])]


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """vLLM's degrees: engines of `tp_size` x `dp_size` slots, experts complete (EP) or split (TP).

    Slots are vLLM's positions, in its order: engine, then DP rank, then TP rank (innermost). With
    `expert_parallel` experts are distributed over all slots of an engine, so that EP = `tp_size` x
    `dp_size`; without it `dp_size` is 1. `rank_map[slot]` is the torch rank at a slot; empty means
    the identity. `all2all_backend` is vLLM's; empty means its default. With `float8`, engines hold
    linear layers in FP8 blocks (see `float8_blocks`).

    Example: `RolloutLayout(4, tp_size=2, expert_parallel=True, rank_map=(0, 2, 1, 3))`: two
    engines.
    """

    world_size: int
    tp_size: int
    expert_parallel: bool
    dp_size: int = 1
    rank_map: tuple[int, ...] = ()
    all2all_backend: str = ""
    float8: bool = False

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.world_size % self.tp_size:
            raise UsageError(
                f"does not divide the world of {self.world_size} processes",
                flag=f"--rl-rollout-tp-size {self.tp_size}",
                remedy=f"choose a divisor of {self.world_size}",
            )
        slots = self.tp_size * self.dp_size
        if self.dp_size < 1 or self.world_size % slots:
            raise UsageError(
                f"(--rl-rollout-tp-size {self.tp_size} x {self.dp_size} data-parallel ranks of an "
                f"engine) does not divide the world of {self.world_size} processes",
                flag=f"--rl-rollout-ep-size {slots}",
                remedy=f"choose a divisor of {self.world_size}",
            )
        if self.dp_size > 1 and not self.expert_parallel:
            raise UsageError(
                f"leaves no use for an engine of {self.dp_size} data-parallel ranks",
                flag="--rl-rollout-no-expert-parallel",
                remedy="drop it",
            )
        if self.rank_map and sorted(self.rank_map) != list(range(self.world_size)):
            raise RuntimeError(
                f"the rank map {self.rank_map} is not a permutation of {self.world_size} ranks"
            )

    @classmethod
    def without_engines(cls, world_size: int) -> RolloutLayout:
        """Return the layout of a job that starts no engine: every rank stands alone."""
        return cls(world_size, tp_size=1, expert_parallel=False)

    @property
    def num_engines(self) -> int:
        return self.world_size // self.slots_per_engine

    @property
    def slots_per_engine(self) -> int:
        return self.tp_size * self.dp_size

    @property
    def ep_size(self) -> int:
        return self.slots_per_engine if self.expert_parallel else 1

    @property
    def has_whole_shared_experts(self) -> bool:
        """Whether vLLM replicates shared experts on every TP rank.

        It does so if experts span data-parallel ranks and TP is above 1: each TP rank then runs the
        complete MoE layer on a shard of the tokens (vLLM's use_sequence_parallel_moe).
        """
        spans = self.expert_parallel and self.tp_size > 1 and self.dp_size > 1
        return spans and self.all2all_backend not in SPLITS_SHARED_EXPERTS

    @property
    def is_identity(self) -> bool:
        return self.rank_map in ((), tuple(range(self.world_size)))

    def rank(self, slot: int) -> int:
        """Return the torch rank at a slot."""
        return self.rank_map[slot] if self.rank_map else slot

    def slot(self, rank: int) -> int:
        """Return the slot of a torch rank."""
        return self.rank_map.index(rank) if self.rank_map else rank

    @property
    def num_tp_groups(self) -> int:
        return self.world_size // self.tp_size

    def tp_group_index(self, rank: int) -> int:
        """Return the index of a rank's TP group, in slot order; prompts are assigned by it."""
        return self.slot(rank) // self.tp_size

    def tp_rank(self, rank: int) -> int:
        return self.slot(rank) % self.tp_size

    def describe(self) -> str:
        """Return for example "2 engines of TP2, EP2"."""
        dp = f" x DP{self.dp_size}" if self.dp_size > 1 else ""
        mapped = "" if self.is_identity else f", ranks {_ranges(self.rank_map)}"
        return f"{self.num_engines} engines of TP{self.tp_size}{dp}, EP{self.ep_size}{mapped}"


def _ranges(ranks: Sequence[int], limit: int = 16) -> str:
    shown = ",".join(map(str, ranks[:limit]))
    return shown + (",..." if len(ranks) > limit else "")
