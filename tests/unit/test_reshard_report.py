"""Log lines of a switch between training and rollout."""

from __future__ import annotations

import pytest

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.hybrid_engine.memory.offload import OffloadStats
from mcore_rl.hybrid_engine.switch_report import (
    TO_ROLLOUT,
    TO_TRAIN,
    OffloadLog,
    ReshardReport,
    offload_line,
)

GB = 10**9


def stats(*, on_gpu: bool, moments: int = 24 * GB) -> OffloadStats:
    moved = {"gradients": 0, "optimizer": moments, "parameters": 4 * GB}
    dropped = {"gradients": 8 * GB, "optimizer": 0, "parameters": 0}
    saved = {kind: dropped[kind] + (moved[kind] if on_gpu else 0) for kind in moved}
    return OffloadStats(moved, dropped, saved)


def test_offload_line_lists_each_kind_and_the_total():
    assert offload_line(stats(on_gpu=True)) == (
        "[Offload] of this rank, during rollout; "
        "parameters: 4.00 GB taken off (4.00 GB copied to the host), 4.00 GB of device memory "
        "saved; "
        "optimizer: 24.0 GB taken off (24.0 GB copied to the host), 24.0 GB of device memory "
        "saved; "
        "gradients: 8.00 GB taken off (8.00 GB dropped), 8.00 GB of device memory saved; "
        "together: 36.0 GB taken off (28.0 GB copied to the host, 8.00 GB dropped), 36.0 GB of "
        "device memory saved"
    )
    assert offload_line(OffloadStats()) is None


@pytest.mark.parametrize(
    ("offloaded", "parts"),
    [
        (
            stats(on_gpu=False),  # where copies save nothing
            [
                "optimizer: 24.0 GB taken off (24.0 GB copied to the host), 0 bytes of",
                "28.0 GB copied to the host, 8.00 GB dropped), 8.00 GB of device memory saved",
                "without a GPU the device is host memory",
            ],
        ),
        (
            OffloadStats({"optimizer": 0}, {"optimizer": 0}, {"optimizer": 0}),
            ["optimizer: 0 bytes taken off (nothing was there), 0 bytes"],
        ),
    ],
)
def test_offload_line_claims_no_saving_where_there_is_none(offloaded, parts):
    line = offload_line(offloaded)
    assert line is not None and [part for part in parts if part not in line] == []


def test_log_reports_the_first_switch_and_changes():
    log = OffloadLog()

    def report(offloaded: OffloadStats, direction: str = TO_ROLLOUT) -> ReshardReport:
        return ReshardReport(direction, 1, 0.0, offloaded=offloaded)

    first, then = stats(on_gpu=True, moments=8 * GB), stats(on_gpu=True)
    assert log.line(report(OffloadStats())) is None
    assert log.line(report(first)) == offload_line(first)
    assert log.line(report(OffloadStats(), TO_TRAIN)) is None
    assert log.line(report(first)) is None
    assert log.line(report(then)) == offload_line(then)
    assert log.line(report(then)) is None


def test_sizes_have_three_significant_digits():
    sizes = [0, 999, 1000, 12_345, 1_500_000, 123_400_000, 7_654_321_000, 1e12]
    shown = ["0 bytes", "999 bytes", "1.00 kB", "12.3 kB", "1.50 MB", "123 MB", "7.65 GB"]
    assert [shown_bytes(size) for size in sizes] == [*shown, "1000 GB"]
