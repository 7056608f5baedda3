"""Rows, verdicts and the page of the resharding benchmark. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from benchmarks.pages import Verdict, fact_list, paired_ratio, section, verdict_table

Row = dict[str, Any]
SECTION = "reshard"
SWITCH, UNPROVED = "switch", "switch, unproved"


class Measured(Protocol):
    """Measurements of one path on one rank (see measuring.Samples)."""

    received_bytes: int
    num_calls: int
    control_bytes: int
    control_calls: int
    peak_extra_bytes: int
    seconds: list[float]
    cpu_seconds: list[float]
    differing: list[str]


def rows_of(
    samples: Mapping[str, Sequence[Measured]],
    *,
    model: str,
    layout: str,
    model_bytes: int,
    lower_bound_bytes: int,
    resident_bytes: int,
    notes: Mapping[str, str],
) -> list[Row]:
    """Return one row per path. Seconds are those of the slowest rank, CPU seconds means of ranks.

    A path with a note but without samples could not run, and its row only has the note. Ratios of
    seconds are paired within repetitions, so that the machine's load affects both alike.
    """
    common = {
        "model": model,
        "layout": layout,
        "model_bytes": model_bytes,
        "lower_bound_bytes_max": lower_bound_bytes,
        "resident_bytes_max": resident_bytes,
    }
    seconds = {
        path: [max(times) for times in zip(*(rank.seconds for rank in ranks), strict=True)]
        for path, ranks in samples.items()
    }
    cpu_seconds = {
        path: [statistics.fmean(t) for t in zip(*(r.cpu_seconds for r in ranks), strict=True)]
        for path, ranks in samples.items()
    }
    received = {path: max(r.received_bytes for r in ranks) for path, ranks in samples.items()}
    rows = [
        {
            "path": path,
            **common,
            "received_bytes_max": received[path],
            "peak_extra_bytes_max": max(r.peak_extra_bytes for r in ranks),
            "median_seconds": statistics.median(seconds[path]),
            "min_seconds": min(seconds[path]),
            "max_seconds": max(seconds[path]),
            "quartile_spread": quartile_spread(seconds[path]),
            "median_cpu_seconds": statistics.median(cpu_seconds[path]),
            "repetitions": len(seconds[path]),
            "collectives_max": max(r.num_calls for r in ranks),
            "control_calls_max": max(r.control_calls for r in ranks),
            "control_bytes_max": max(r.control_bytes for r in ranks),
            "received_over_lower_bound": _ratio(received[path], lower_bound_bytes),
            "received_over_ours": _ratio(received[path], received["ours"]),
            "seconds_over_ours": paired_ratio(seconds[path], seconds["ours"]),
            "seconds_over_memcpy": paired_ratio(seconds[path], seconds["memcpy"]),
            "bit_identical": not any(rank.differing for rank in ranks),
            "note": notes.get(path, ""),
        }
        for path, ranks in samples.items()
    ]
    _add_references(rows, seconds, cpu_seconds)
    rows += [
        {"path": path, **common, "note": why} for path, why in notes.items() if path not in samples
    ]
    return rows


def _add_references(
    rows: Sequence[Row],
    seconds: Mapping[str, Sequence[float]],
    cpu_seconds: Mapping[str, Sequence[float]],
) -> None:
    """Add ratios to the paths that did not run in all cases."""
    for row in rows:
        if "vllm_load" in seconds:
            row["seconds_over_vllm_load"] = paired_ratio(seconds[row["path"]], seconds["vllm_load"])
        if row["path"].startswith(SWITCH) and UNPROVED in seconds:
            path = row["path"]
            row["seconds_over_unproved"] = paired_ratio(seconds[path], seconds[UNPROVED])
            row["cpu_seconds_over_unproved"] = paired_ratio(
                cpu_seconds[path], cpu_seconds[UNPROVED]
            )


def quartile_spread(seconds: Sequence[float]) -> float:
    """Return the width of the middle half as a share of the median."""
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return the verdict on every target that the rows cover."""
    found: list[Verdict] = []
    measured = [row for row in rows if "median_seconds" in row]
    by_case: dict[tuple[str, str], dict[str, Row]] = {}
    for row in measured:
        by_case.setdefault((row["model"], row["layout"]), {})[row["path"]] = row

    def add(target: str, case: tuple[str, str], measure: str, met: bool) -> None:
        found.append((f"{target} ({case[0]}, {case[1]})", measure, met))

    for case, paths in by_case.items():
        ours = paths["ours"]
        received, bound = ours["received_bytes_max"], ours["lower_bound_bytes_max"]
        add("ours receives the lower bound", case, f"{received:,} of {bound:,}", received == bound)
        if "EP4" in case[1]:
            for name in ("gather", "mbridge"):
                if name in paths:
                    ratio = paths[name]["received_over_ours"]
                    add(f"4x fewer bytes than {name}", case, f"{ratio:.2f}x", ratio >= 4)
        if "core.resharding" in paths and "-> TP4" in case[1]:
            share = 1 - 1 / paths["core.resharding"]["received_over_ours"]
            add(
                "a third fewer bytes than core.resharding",
                case,
                f"{100 * share:.1f} % fewer",
                share >= 1 / 3,
            )
        if "mbridge" in paths:
            ratio = paths["mbridge"]["seconds_over_ours"]
            add("3x faster than mbridge's export", case, f"{ratio:.2f}x", ratio >= 3)
        for name in paths:
            if name.startswith(SWITCH):
                ratio = paths[name]["seconds_over_vllm_load"]
                add(f"{name}: at most 2x vLLM's own load", case, f"{ratio:.2f}x", ratio <= 2)
        if "seconds_over_unproved" in paths.get(SWITCH, {}):
            clock, cpu = (
                100 * (paths[SWITCH][f"{kind}_over_unproved"] - 1)
                for kind in ("seconds", "cpu_seconds")
            )
            add(
                "proof: at most 5 % of the switch",
                case,
                f"{clock:.1f} % of its time, {cpu:.1f} % of its CPU time",
                max(clock, cpu) <= 5,
            )
    return found


def part_of(record: Mapping[str, Any]) -> str:
    """Return the section of a record: method, targets, and a table per case."""
    rows, facts = record["rows"], record["facts"]
    lines = ["# Resharding, measured beside the peers", "", _INTRODUCTION, ""]
    lines += [*fact_list(facts), "", "## Targets", "", *verdict_table(verdicts(rows))]
    cases = dict.fromkeys((row["model"], row["layout"]) for row in rows)
    for model, layout in cases:
        some = [row for row in rows if (row["model"], row["layout"]) == (model, layout)]
        first = some[0]
        lines += [
            "",
            f"## {model}: {layout}",
            "",
            f"Model {_mb(first['model_bytes'])} MB; W' {_mb(first['resident_bytes_max'])} MB; "
            f"lower bound {_mb(first['lower_bound_bytes_max'])} MB on the rank that needs most.",
            "",
            "| path | received MB | / bound | / ours | calls (control) | peak extra MB | median s |"
            " min-max s | spread | CPU s | x ours | x memcpy | same bits |",
            "| --- " + "| ---: " * 11 + "| --- |",
        ]
        lines += [_line(row) for row in some if "median_seconds" in row]
        notes = [f"- {row['path']}: {row['note']}" for row in some if row["note"]]
        lines += ["", *notes] if notes else []
    return section(SECTION, lines)


def _line(row: Row) -> str:
    cells = (
        row["path"],
        _mb(row["received_bytes_max"]),
        _times(row["received_over_lower_bound"]),
        _times(row["received_over_ours"]),
        f"{row['collectives_max']} ({row['control_calls_max']})",
        _mb(row["peak_extra_bytes_max"]),
        f"{row['median_seconds']:.3f}",
        f"{row['min_seconds']:.3f}-{row['max_seconds']:.3f}",
        f"{100 * row['quartile_spread']:.0f} %",
        f"{row['median_cpu_seconds']:.3f}",
        _times(row["seconds_over_ours"]),
        _times(row["seconds_over_memcpy"]),
        "yes" if row["bit_identical"] else "**NO**",
    )
    return "| " + " | ".join(cells) + " |"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


_INTRODUCTION = """\
Generated by `benchmarks/reshard.py`. All paths of a case ran in the same processes, on the same
Megatron modules, one after the other in every repetition, and end at the same point: the tensors
that a vLLM rank stores, allocated before, hold the checkpoint's bits (compared once per path). Of
every figure the rank with the largest counts.

- `ours`: the stream of planned slices that feeds vLLM. `gather`: every tensor, whole, to every rank
  (mcore_rl's own way back). `mbridge`: `export_weights`. `core.resharding`: `swap_model_weights`
  over gloo into a second Megatron model, then a local copy. `memcpy`: W' from memory to memory.
- `switch`: the whole switch into vLLM as it is by default, vLLM's loaders and the proof of arrival
  included; also with the proof over every byte and with none. `vllm_load`: vLLM's own reload of the
  same tensors, whole in memory already. These end in vLLM's model, packed for its CPU kernels.
- Received bytes are counted at the calls of torch.distributed; pickled metadata and reductions are
  control and counted apart. Peak extra is of the process, above where it stood before, in the
  second run; there malloc returns what is freed at once, so that what it would keep for later
  counts for nobody. That of a switch, and of vLLM's own load, contains the largest module in the
  checkpoint's shape, of which the CPU kernels want a packed copy. Spread is the width of the middle
  half over the median. CPU seconds are the mean of the ranks. Ratios of seconds are
  medians of the ratios within a repetition."""
