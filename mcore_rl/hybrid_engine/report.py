"""What one direction of a switch did, and the line that is logged of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.hybrid_engine.memory.offload import KINDS, OffloadStats

TO_ROLLOUT, TO_TRAIN = "train_to_rollout", "rollout_to_train"


@dataclass(frozen=True, slots=True)
class ReshardReport:
    """One direction of one switch, as this rank saw it. Bytes are of this rank.

    What is said of bytes and of proof belongs to the hand-over, that is to TO_ROLLOUT.
    """

    direction: str  # TO_ROLLOUT or TO_TRAIN
    weight_version: int
    duration_seconds: float
    received_bytes: int = 0  # counted at the calls
    lower_bound_bytes: int = 0  # the least, over all placements
    saved_bytes: int = 0  # by a narrower dtype and by sending changes only
    hidden_share: float = 0.0  # of the time that transfers took, during which the engine loaded
    peak_extra_bytes: int = 0  # of the process, above where it stood before
    num_tensors: int = 0
    attested: bool = False  # proved to have arrived; a hand-over that is not raises
    attest_seconds: float = 0.0  # of this rank's hashing
    repeated: bool = False  # by the plain gather, whose bytes are in `received_bytes` too
    # What of training is away during rollout; nothing without an offloader.
    offloaded: OffloadStats = field(default_factory=OffloadStats)


Hook = Callable[[ReshardReport], None]


def log_reshard(report: ReshardReport, share_of_step: float | None = None) -> str:
    """The `[Reshard]` line of a report."""
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
    """The `[Offload]` line of a switch, of this rank; None if nothing was to be taken off.

    Says plainly where a host copy saves nothing.
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
    """Says what offload saved, once: after the first switch to rollout, and again when it changes.

    It does after the first update, which makes the optimizer's moments.
    """

    def __init__(self) -> None:
        self._said: str | None = None

    def line(self, report: ReshardReport) -> str | None:
        """The line of `report` if there is something new to say, else None."""
        line = offload_line(report.offloaded) if report.direction == TO_ROLLOUT else None
        if line is None or line == self._said:
            return None
        self._said = line
        return line
