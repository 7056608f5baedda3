"""Comparison of the ways to use a job's ranks, and the one to take; see `simulation`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mcore_rl.model.tensors import active_parameters
from mcore_rl.planner.memory import Memory
from mcore_rl.planner.phases import Case
from mcore_rl.planner.simulated_workload import EngineSpeed, Workload
from mcore_rl.planner.simulation import (
    MODES,
    SEPARATE,
    Candidate,
    Simulated,
    Speeds,
    simulate,
)
from mcore_rl.planner.step_seconds import Step, engine_step_seconds, token_rate

# A simpler way is taken if it reaches this share of the most samples per second.
GOOD_ENOUGH = 0.95
_NOTABLE = 0.1  # share of the time


@dataclass(frozen=True, slots=True)
class Comparison:
    """All simulated candidates, and what was left out.

    Example: `Comparison(rows, left_out=("8 + 56: phase train lacks 12.00 GB",))`.
    """

    rows: tuple[Simulated, ...]
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Simulated:
        """The simplest way that is good enough: colocated before partial rollouts before separate
        ranks, a small staleness before a large one."""
        most = max(row.samples_per_second for row in self.rows)
        enough = [row for row in self.rows if row.samples_per_second >= GOOD_ENOUGH * most]
        return min(enough, key=lambda row: (*_simplicity(row), -row.samples_per_second))

    @property
    def recommendation(self) -> str:
        """The best way and the reason, in one sentence."""
        if not self.rows:
            return "Nothing fits: take more ranks, or other flags for memory."
        best = self.best
        others = [row for row in self.rows if row.candidate.mode != best.candidate.mode]
        flags = f" ({best.candidate.flags})" if best.candidate.flags else ""
        start = (
            f"Take {best.candidate.name}{flags}: {shown_rate(best.samples_per_second)} samples/s"
        )
        if best.candidate.mode == SEPARATE:
            return f"{start}, {self._gain(best)}."
        separate = [row for row in others if row.candidate.mode == SEPARATE]
        if not separate:
            why = "no division of the ranks fits" if self.left_out else "nothing else was simulated"
            return f"{start}; {why}."
        rival = max(separate, key=lambda row: row.samples_per_second)
        ratio = rival.samples_per_second / best.samples_per_second
        return (
            f"{start}, where the best separate ranks, {rival.candidate.name}, reach {ratio:.2f} "
            f"times as many, {_loss(rival)}."
        )

    def _gain(self, best: Simulated) -> str:
        """Describe why separate ranks are better."""
        shared = [row for row in self.rows if row.candidate.mode != SEPARATE]
        if not shared:
            return "the most of the separate ranks"
        rival = max(shared, key=lambda row: row.samples_per_second)
        ratio = best.samples_per_second / rival.samples_per_second
        times = f"{ratio:.2f} times those of {rival.candidate.name}, "
        if rival.trainer_idle > _NOTABLE:
            return (
                f"{times}whose ranks wait {rival.trainer_idle:.0%} of the time for the last "
                "responses, tools and rewards"
            )
        moving = rival.candidate.hand_over_seconds / rival.step_seconds
        if moving > _NOTABLE:
            return f"{times}whose switches take {moving:.0%} of the time"
        return f"{times}since fewer engines with larger batches need fewer seconds per token"


def planned_speeds(case: Case, memory: Memory, step: Step, context_tokens: float) -> Speeds:
    """Return the speeds of a case by formula, where none were measured.

    Training takes 6 (with full recomputation 8) x active parameters for a token, log-probs 2, and
    the pipeline's bubble.
    """
    train, training, active = case.train, case.training, active_parameters(case.shape)

    def seconds(running: int) -> float:
        return engine_step_seconds(case, memory, step, running, context_tokens)

    most = case.engine.max_num_seqs
    running = sorted({1 << power for power in range(most.bit_length())} | {most})
    passes = 10 if training.recompute.granularity == "full" else 8
    bubble = (train.pp_size - 1) / (training.num_micro_batches * len(case.layers[0]))
    engine = EngineSpeed(
        tuple(running), tuple(map(seconds, running)), prefill_rate=token_rate(case, step)
    )
    return Speeds(engine, step.flops / (passes * active * (1 + bubble)))


def compare(
    candidates: Iterable[Candidate],
    workload: Workload,
    speeds: Speeds,
    *,
    separate_speeds: Speeds | None = None,
    left_out: Sequence[str] = (),
) -> Comparison:
    """Simulate all candidates. `separate_speeds` are those of separate engines and trainers, if
    they are known to differ."""
    rows = tuple(
        simulate(
            candidate,
            workload,
            separate_speeds if separate_speeds and candidate.mode == SEPARATE else speeds,
        )
        for candidate in candidates
    )
    return Comparison(rows, tuple(left_out))


def shown_rate(rate: float) -> str:
    """Return for example "0.0457", "40.0" or "4,320"."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:#.3g}"


def _simplicity(row: Simulated) -> tuple[int, int]:
    return MODES.index(row.candidate.mode), row.candidate.max_staleness


def _loss(rival: Simulated) -> str:
    """Describe why the best separate ranks are not better."""
    side, idle = max(
        ("engines", rival.engine_idle), ("trainers", rival.trainer_idle), key=lambda each: each[1]
    )
    if idle > _NOTABLE:
        return f"since its {side} wait {idle:.0%} of the time"
    return "which is not worth a second kind of ranks"
