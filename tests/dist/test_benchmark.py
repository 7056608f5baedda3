"""`python benchmarks/reshard.py --quick` as a user runs it: every path delivers the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rank_pool import run_python

KEYS = (
    "path model layout received_bytes_max lower_bound_bytes_max peak_extra_bytes_max median_seconds"
).split()


@pytest.mark.slow
def test_quick_benchmark_runs_all_paths_to_the_same_bits(tmp_path: Path) -> None:
    done = run_python("benchmarks/reshard.py", "--quick", "--record", tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    record = json.loads((tmp_path / "records" / "reshard.json").read_text())
    rows = {row["path"]: row for row in record["rows"]}
    # mbridge is there where the bench extra is; else its row says why it is not.
    if "median_seconds" not in rows["mbridge"]:
        assert "bench" in rows.pop("mbridge")["note"]
    assert rows.keys() - {"mbridge"} == {
        *("ours", "gather", "core.resharding", "memcpy"),
        *("switch", "switch, proved in full", "switch, unproved", "vllm_load"),
    }
    for row in rows.values():
        assert all(key in row for key in KEYS)
        assert row["bit_identical"], row["path"]
    for path in ("ours", "switch", "switch, unproved"):
        assert rows[path]["received_bytes_max"] == rows[path]["lower_bound_bytes_max"]
    assert rows["gather"]["received_over_ours"] > 4
    page = (tmp_path / "RESULTS.md").read_text()
    assert str(tmp_path) not in page
    assert "| ours |" in page


@pytest.mark.slow
def test_what_a_rank_gets_of_samples_does_not_grow_with_the_ranks() -> None:
    """`benchmarks/data_plane.py --quick`; bytes are counted, and the same on every machine."""
    flags = ("--quick", "--world-sizes", "64", "256", "--gloo-megabytes", "1")
    done = run_python("benchmarks/data_plane.py", *flags, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    cells = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if "MB" in line]
    rows = {title: [float(cell.replace(",", "")) for cell in of] for title, *of in cells[:7]}
    samples = rows.pop("all tokens, with log-probs, MB (computed)")
    assert samples[1] > 3.9 * samples[0]
    for name, (small, large) in rows.items():
        if name.startswith("tokens and log-probs"):
            # Of one DP rank's share what its own engine has not sampled: more, the more engines.
            assert 0.7 * samples[0] < small < 1.3 * samples[0], name
            assert 0.7 * small < large < 1.3 * small, name
