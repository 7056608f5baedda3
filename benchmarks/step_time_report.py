"""Rows, verdicts and the page's section of `step_time.py`. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages import Verdict, fact_list, paired_ratio, section, verdict_table

Row = dict[str, Any]
Run = Mapping[str, Any]
OURS, TRL, TRL_BF16_WEIGHTS = "mcore_rl", "trl", "trl, bf16 weights"
DEFAULTS, BEST = ", defaults", ", best settings"  # of a system, where both are measured
MEMORY_RATIO = 2.0  # ours over TRL's, all processes
PACKED_RATIO, MEMORY_SHARE_SAVED = 1.4, 0.2
SECTION, SMOLLM2 = "step_time", "smollm2_steps"  # also the names of their records


def training_row(
    workload: str,
    system: str,
    runs: Sequence[Run],
    *,
    samples_per_step: int,
    left_out_steps: int,
    accuracy_at_start: float | None,
) -> Row:
    """Return a system's row of a workload. A run has `step_seconds`, `response_tokens` (means of
    steps) and the final `accuracy`, or None.

    Samples per second use the mean step without the first `left_out_steps`, averaged over runs.
    Accuracy per minute is the gain over all steps, divided by their time at this pace. Raises
    ValueError for a run without counted steps.
    """
    paces, gains = [], []
    for run in runs:
        counted = run["step_seconds"][left_out_steps:]
        if not counted:
            raise ValueError(
                f"{system} made {len(run['step_seconds'])} steps of workload {workload}, of which "
                f"the first {left_out_steps} do not count"
            )
        mean = statistics.fmean(counted)
        paces.append(samples_per_step / mean)
        if accuracy_at_start is not None and run["accuracy"] is not None:
            minutes = mean * len(run["step_seconds"]) / 60
            gains.append((run["accuracy"] - accuracy_at_start) / minutes)
    ends = [run["accuracy"] for run in runs if run["accuracy"] is not None]
    return {
        "workload": workload,
        "system": system,
        "samples_per_second": statistics.fmean(paces),
        "accuracy_per_minute": statistics.fmean(gains) if gains else None,
        "samples_per_second_of_runs": paces,
        "step_seconds_of_runs": [list(run["step_seconds"]) for run in runs],
        "response_tokens_of_runs": [list(run["response_tokens"]) for run in runs],
        "accuracy_at_start": accuracy_at_start,
        "accuracy_at_end": statistics.fmean(ends) if ends else None,
        "accuracy_at_end_of_runs": ends,
        "response_tokens_mean": statistics.fmean(
            statistics.fmean(run["response_tokens"]) for run in runs
        ),
        "peak_bytes": max(run.get("peak_bytes", 0) for run in runs),
        "setting": runs[0]["setting"],
    }


def packing_row(model: str, kind: str, runs: Sequence[Run]) -> Row:
    """Return the row of packed or padded updates. A run has `seconds`, `cpu_seconds`, `tokens` and
    `peak_bytes`."""
    paces = [run["tokens"] / statistics.median(run["seconds"]) for run in runs]
    return {
        "workload": "packing",
        "system": f"{kind}, {model}",
        "samples_per_second": None,
        "accuracy_per_minute": None,
        "model": model,
        "kind": kind,
        "tokens_per_second": statistics.fmean(paces),
        "tokens_per_second_of_runs": paces,
        "tokens_per_cpu_second": statistics.fmean(
            run["tokens"] / statistics.median(run["cpu_seconds"]) for run in runs
        ),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "setting": runs[0]["setting"],
    }


def verdicts(rows: Sequence[Row], aimed: Mapping[str, float]) -> list[Verdict]:
    """Return the verdicts; `aimed` is the target ratio of each workload."""
    found = []
    for workload, wanted in aimed.items():
        by_system = {row["system"]: row for row in rows if row["workload"] == workload}
        for way in ("", DEFAULTS, BEST):
            if not {OURS, TRL + way} <= by_system.keys():
                continue
            ours, theirs = by_system[OURS], by_system[TRL + way]
            ratio = paired_ratio(*(row["samples_per_second_of_runs"] for row in (ours, theirs)))
            target = f"{workload}: {wanted:g}x the samples per second of TRL{way}"
            found.append((target, f"{ratio:.2f}x", ratio >= wanted))
            if way:
                ratio = ours["peak_bytes"] / theirs["peak_bytes"]
                target = f"{workload}: memory at most {MEMORY_RATIO:g}x that of TRL{way}"
                found.append((target, f"{ratio:.2f}x", ratio <= MEMORY_RATIO))
    packing = [row for row in rows if row["workload"] == "packing"]
    for model in dict.fromkeys(row["model"] for row in packing):
        kinds = {row["kind"]: row for row in packing if row["model"] == model}
        if not {"packed", "padded"} <= kinds.keys():
            continue
        packed, padded = kinds["packed"], kinds["padded"]
        ratio = paired_ratio(
            packed["tokens_per_second_of_runs"], padded["tokens_per_second_of_runs"]
        )
        saved = 1 - packed["peak_bytes"] / padded["peak_bytes"]
        target = f"packing, {model}: {PACKED_RATIO:g}x the tokens per second of padding"
        found.append((target, f"{ratio:.2f}x", ratio >= PACKED_RATIO))
        target = f"packing, {model}: {100 * MEMORY_SHARE_SAVED:.0f} % less memory"
        found.append((target, f"{100 * saved:.1f} % less", saved >= MEMORY_SHARE_SAVED))
    return found


def part_of(name: str, record: Mapping[str, Any]) -> str:
    """Return the section `name` of a record."""
    return section_of(name, record["rows"], record["facts"], record["aimed"])


def section_of(
    name: str, rows: Sequence[Row], facts: Mapping[str, str], aimed: Mapping[str, float]
) -> str:
    """Return the section of the page."""
    lines = [*_INTRODUCTIONS[name], ""]
    lines += [*fact_list(facts), "", *verdict_table(verdicts(rows, aimed))]
    training = [row for row in rows if row["workload"] != "packing"]
    if training:
        lines += [
            "",
            "| workload | system | samples/s (runs) | accuracy/min |"
            " accuracy, start to end (runs) | tokens per answer | peak GB | setting |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        ]
        lines += [_training_line(row) for row in training]
    packing = [row for row in rows if row["workload"] == "packing"]
    if packing:
        lines += [
            "",
            "| packing | tokens/s (runs) | tokens per CPU second | peak extra MB | setting |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
        lines += [
            f"| {row['system']} | {row['tokens_per_second']:.0f} "
            f"({_of_runs(row['tokens_per_second_of_runs'], 0)}) | "
            f"{row['tokens_per_cpu_second']:.0f} | "
            f"{row['peak_bytes'] / 1e6:.1f} | {row['setting']} |"
            for row in packing
        ]
    return section(name, lines)


def _training_line(row: Row) -> str:
    gain = row["accuracy_per_minute"]
    cells = (
        row["workload"],
        row["system"],
        f"{row['samples_per_second']:.2f} ({_of_runs(row['samples_per_second_of_runs'], 2)})",
        "-" if gain is None else f"{gain:.3f}",
        _accuracy(row),
        f"{row['response_tokens_mean']:.1f}",
        f"{row['peak_bytes'] / 1e9:.1f}" if row.get("peak_bytes") else "-",
        row["setting"],
    )
    return "| " + " | ".join(cells) + " |"


def _accuracy(row: Row) -> str:
    end = row["accuracy_at_end"]
    if end is None:
        return "-"
    ends = _of_runs(row["accuracy_at_end_of_runs"], 3)
    return f"{row['accuracy_at_start']:.3f} to {end:.3f} ({ends})"


def _of_runs(values: Sequence[float], digits: int) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


_STEP_TIME = """\
Generated by `benchmarks/step_time.py`. Each run is a job of its own, the systems take turns, and
ratios are medians of those within a repetition. Same model, prompts, group size, lengths, learning
rate and number of steps; start-up and the first two steps do not count. Accuracy is greedy, on
held-out prompts, by our reward, of the saved checkpoints, with one function for both; its gain is
divided by the minutes of all steps. After the 16 steps of `short` it has a standard deviation of
about 0.04 over seeds, so that two runs of each system do not compare what they learn.

- `short`: prompts of 8 tokens, answers of six, at most 16. `short_instructed`: the same behind an
  instruction, prompts of 53 tokens. `long`: lengths are geometric, cut at 200. A step has 128 and
  64 samples, `short_512` and `long_256` as many as their names say. `real_size`: the shape of
  Qwen3-0.6B with random weights, 16 samples of up to 32 tokens.
- `trl` is its GRPO with the fastest generation that runs here, in the faster precision;
  `benchmarks/step_time_trl.py` tells which were tried. `trl, bf16 weights` trains without
  float32 weights, which ours keeps: it is no comparison, and here for completeness.
- `packing`: what a step does after its rewards, on 64 samples of log-normal lengths (median 64,
  sigma 0.8, at most 512), packed rows of up to 640 tokens against 4 padded rows (632
  positions in the mean). Memory is what a step takes above the model and its optimizer, the peak
  of the resident set."""

_SMOLLM2 = """\
Drawn by `benchmarks/step_time.py --only smollm2` from `benchmarks/records/smollm2_steps.json`. The
example, 16 prompts of 8 samples of up to 24 tokens a step at the same learning rate, ours by its
defaults, which are its best settings, TRL by its defaults and by its best settings. The systems
take turns, ratios are medians of those within a repetition, and the first two steps of a run do not
count. Peak GB is the memory of all processes of a run, shared pages once."""

_INTRODUCTIONS = {
    SECTION: ("# Step time, measured beside TRL", "", _STEP_TIME),
    SMOLLM2: ("# Steps of SmolLM2-135M-Instruct, beside TRL", "", _SMOLLM2),
}
