"""The report of one direction of a switch, and the lines logged for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.hybrid_engine.memory.offload import KINDS, OffloadStats

TO_ROLLOUT, TO_TRAIN = "train_to_rollout", "rollout_to_train"


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """One direction of one switch, as measured on this rank. Bytes are this rank's.

    The fields on bytes and attestation describe the hand-over: they are set for TO_ROLLOUT only.

    Example: `ReshardReport(TO_ROLLOUT, weight_version=5, duration_seconds=1.2, received_bytes=41 <<
    30)`.
    """

    direction: str  # TO_ROLLOUT or TO_TRAIN
    weight_version: int
    duration_seconds: float
    received_bytes: int = 0  # counted at the calls
    lower_bound_bytes: int = 0  # the minimum over all placements
    saved_bytes: int = 0  # by a narrower dtype and by sending changes only
    hidden_share: float = 0.0  # share of the transfer time during which the engine was loading
    peak_extra_bytes: int = 0  # the process's peak above its level before the hand-over
    num_tensors: int = 0
    attested: bool = False  # all slices arrived unchanged; a failed attestation raises
    repeated: bool = False  # by the plain gather, whose bytes `received_bytes` includes
    # Training state that is offloaded during rollout; empty without an offloader.
    offloaded: OffloadStats = field(default_factory=OffloadStats)


Hook = Callable[[ReshardReport], None]


def log_reshard(report: ReshardReport, share_of_step: float | None = None) -> str:
    """Return the `[Reshard]` line of a report."""
    parts = [f"direction={report.direction}", f"duration={report.duration_seconds:.3f}s"]
    if report.direction == TO_ROLLOUT:
        parts += [
            f"received={report.received_bytes / 1e9:.6f}GB",
            f"lower_bound={report.lower_bound_bytes / 1e9:.6f}GB",
            f"saved={report.saved_bytes / 1e9:.6f}GB",
            f"hidden={100 * report.hidden_share:.0f}%",
            f"peak={report.peak_extra_bytes / 1e9:.6f}GB",
            f"attested={'yes' if report.attested else 'no'}",
        ]
        if report.repeated:
            parts.append("repeated=yes")
    if share_of_step is not None:
        parts.append(f"share_of_step={100 * share_of_step:.1f}%")
    return "[Reshard] " + " ".join(parts)


def offload_line(stats: OffloadStats) -> str | None:
    """Return this rank's `[Offload]` line of a switch, or None if nothing was to be offloaded.

    The line states where a host copy saves nothing.
    """
    kinds = [kind for kind in KINDS if kind in stats.moved]
    if not kinds:
        return None
    parts = [
        f"{kind}: {_what_became(stats.moved[kind], stats.dropped[kind], stats.saved[kind])}"
        for kind in kinds
    ]
    whole = _what_became(stats.moved_bytes, stats.dropped_bytes, stats.saved_bytes)
    parts.append(f"together: {whole}")
    if stats.saved_bytes < stats.moved_bytes + stats.dropped_bytes:
        parts.append(
            "without a GPU the device is host memory, where a host copy saves nothing and only "
            "dropped gradients do"
        )
    return "[Offload] of this rank, during rollout; " + "; ".join(parts)


def _what_became(moved: int, dropped: int, saved: int) -> str:
    taken = [f"{shown_bytes(moved)} copied to the host"] if moved else []
    taken += [f"{shown_bytes(dropped)} dropped"] if dropped else []
    return (
        f"{shown_bytes(moved + dropped)} taken off ({', '.join(taken) or 'nothing was there'}), "
        f"{shown_bytes(saved)} of device memory saved"
    )


class OffloadLog:
    """Log of what offload saved: once after the first switch to rollout, then when it changes.

    It changes after the first update, which creates the optimizer's moments.
    """

    def __init__(self) -> None:
        self._said: str | None = None

    def line(self, report: ReshardReport) -> str | None:
        """Return the line of `report` if it is new, else None."""
        line = offload_line(report.offloaded) if report.direction == TO_ROLLOUT else None
        if line is None or line == self._said:
            return None
        self._said = line
        return line
