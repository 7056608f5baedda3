"""Who sits where: the parallel degrees of training and rollout, and the ranks they give.

Pure integers: neither Megatron nor vLLM nor torch is imported. Degrees multiply as in Megatron:

    world = tp x cp x dp x pp          (dense part, innermost first: tp, cp, dp, pp)
    world = etp x ep x edp x pp        (experts, innermost first: etp, ep, edp, pp)

and rollout engines of `tp` ranks each fill the world in rank order. PP is outermost in Megatron and
absent in rollout, so the ranks of one pipeline stage become whole engines: PP becomes extra DP.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.errors import UsageError


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Megatron's degrees. `dp_size` and `edp_size` follow from the world size."""

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
                "parallel sizes must be at least 1; correct the --*-parallel-size flag"
            )
        if self.world_size % dense:
            raise UsageError(
                f"--tensor-model-parallel-size {self.tp_size} x --pipeline-model-parallel-size "
                f"{self.pp_size} x --context-parallel-size {self.cp_size} = {dense} does not "
                f"divide the world of {self.world_size} processes; change a size or the number of "
                "processes"
            )
        expert = self.etp_size * self.ep_size * self.pp_size
        if self.world_size % expert:
            raise UsageError(
                f"--expert-tensor-parallel-size {self.etp_size} x --expert-model-parallel-size "
                f"{self.ep_size} x --pipeline-model-parallel-size {self.pp_size} = {expert} does "
                f"not divide the world of {self.world_size} processes; change a size or the number "
                "of processes"
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

    def dp_rank(self, rank: int) -> int:
        return rank // (self.tp_size * self.cp_size) % self.dp_size

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp_size

    def ep_rank(self, rank: int) -> int:
        return rank // self.etp_size % self.ep_size

    def pp_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other stages of `rank`'s pipeline, `rank` included."""
        first = rank % self.ranks_per_stage
        return tuple(first + stage * self.ranks_per_stage for stage in range(self.pp_size))

    def describe(self) -> str:
        """TP2 x PP2 x DP1, EP2 x ETP1 x EDP1."""
        return (
            f"TP{self.tp_size} x CP{self.cp_size} x DP{self.dp_size} x PP{self.pp_size}, "
            f"experts ETP{self.etp_size} x EP{self.ep_size} x EDP{self.edp_size}"
        )


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """vLLM's degrees: engines of `tp_size` consecutive ranks, experts whole (EP) or split (TP)."""

    world_size: int
    tp_size: int
    expert_parallel: bool

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.world_size % self.tp_size:
            raise UsageError(
                f"--rl-rollout-tp-size {self.tp_size} does not divide the world of "
                f"{self.world_size} processes; choose a divisor of {self.world_size}"
            )

    @property
    def num_engines(self) -> int:
        return self.world_size // self.tp_size

    @property
    def ep_size(self) -> int:
        return self.tp_size if self.expert_parallel else 1

    def engine_index(self, rank: int) -> int:
        return rank // self.tp_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp_size

    def describe(self) -> str:
        """2 engines of TP2, EP2."""
        return f"{self.num_engines} engines of TP{self.tp_size}, EP{self.ep_size}"
