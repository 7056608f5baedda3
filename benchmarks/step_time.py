"""Samples per second and accuracy per minute beside TRL's GRPO, and packing beside padding.

    python benchmarks/step_time.py [--record] [--only NAME ...] [--quick]

Needs the `bench` extra. The first call makes the checkpoints, in the cache folder of
scripts/run_deepseek_moe.sh (MCORE_RL_CACHE). The rest takes over an hour on 2 cores, half of it
for TRL's steps of `long_256` (`--only short long packing`: 20 to 30 minutes). `real_size` needs
20 GB of host memory, and `smollm2` half an hour; both only run if --only names them, and
`smollm2` alone has a record and a section of its own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records  # noqa: E402
from benchmarks import step_time_report as report  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.processes import (  # noqa: E402
    ENVIRONMENT,
    PeakMemory,
    alternating,
    in_a_process,
    run_python,
    train,
)
from benchmarks.step_time_task import (  # noqa: E402
    LEFT_OUT_STEPS,
    WORKLOADS,
    Workload,
    checkpoint_of,
    held_out_accuracy,
    quick,
)

PACKING = "packing"
NAMED_ONLY = ("real_size", "smollm2")
# Models for the packed and the padded update.
MODELS = {"dense (qwen3)": "qwen3", "MoE (deepseek_v3)": "deepseek_v3"}
# Fastest on two cores, since such small products gain little from a second thread. A step of
# `short` (with heads of 128): 2 processes 0.74 s, 1 process 1.03 s, with two threads 1.17 s.
OURS_PROCESSES = 2
# `smollm2`: precision and flags of TRL, of the fastest of the settings that were tried, and what it
# does without settings. Ours is fastest by its defaults: two processes were slower.
TRL_BEST = ("bf16", "--batch", "32")
TRL_DEFAULTS = ("--batch", "8", "--recompute")

# A run: seed, folder of the trained checkpoint -> measurements.
_System = Callable[[int, Path], dict[str, Any]]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*(workload.name for workload in WORKLOADS), PACKING]
    records.add_flag(parser)
    parser.add_argument("--repetitions", type=int, default=2, help="runs of each, in turns")
    parser.add_argument("--processes", type=int, default=OURS_PROCESSES, help="of ours: 1, 2 or 4")
    usual = [name for name in names if name not in NAMED_ONLY]
    parser.add_argument("--only", nargs="+", choices=names, default=usual, help="some workloads")
    parser.add_argument("--quick", action="store_true", help="one repetition, few steps")
    return parser


def main(tokens: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(tokens)
    fault = _fault(options)
    if fault:
        print(f"step_time.py: {fault}", file=sys.stderr)
        return 2
    os.environ.update(ENVIRONMENT)
    repetitions = 1 if options.quick else options.repetitions
    started = time.monotonic()
    facts = facts_of_run("step_time.py", tokens, ("trl", "accelerate"))
    rows: list[report.Row] = []
    with tempfile.TemporaryDirectory(prefix="mcore_rl_step_time_") as folder:
        for workload in WORKLOADS:
            if workload.name in options.only:
                rows += _compared(workload, options, repetitions, Path(folder))
        if PACKING in options.only:
            rows += _packing(repetitions, Path(folder))
    facts["time"] = f"{(time.monotonic() - started) / 60:.0f} minutes in all"
    name = report.SMOLLM2 if options.only == ["smollm2"] else report.SECTION
    aimed = {workload.name: workload.aimed_ratio for workload in WORKLOADS}
    part_of = partial(report.part_of, name)
    records.report(name, part_of, facts, to=options.record, rows=rows, aimed=aimed)
    return 0


def _fault(options: argparse.Namespace) -> str:
    """Return what is wrong with the arguments or the environment, or ""."""
    if options.repetitions < 1:
        return f"--repetitions {options.repetitions} must be at least 1; raise it"
    if options.processes not in (1, 2, 4):
        return f"--processes {options.processes} must be 1, 2 or 4"
    if options.only != [PACKING] and importlib.util.find_spec("trl") is None:
        return "trl is not installed; pip install .[bench] or take --only packing"
    return ""


def _compared(
    workload: Workload, options: argparse.Namespace, repetitions: int, folder: Path
) -> list[report.Row]:
    """Measure all systems of a workload in turns."""
    checkpoint = in_a_process(checkpoint_of, workload)
    workload = quick(workload) if options.quick else workload
    way = ["--quick"] if options.quick else []

    def our(short: Workload, precision: str) -> _System:
        num_processes = workload.num_processes or options.processes
        return partial(ours, short, checkpoint, num_processes, precision)

    def theirs(extent: Sequence[str], precision: str) -> _System:
        return partial(trl, workload, checkpoint, precision, extent)

    if workload.is_published:
        systems = {
            report.OURS: our(workload, "bf16"),
            report.TRL + report.DEFAULTS: theirs([*way, *TRL_DEFAULTS], "bf16"),
            report.TRL + report.BEST: theirs([*way, *TRL_BEST[1:]], TRL_BEST[0]),
        }
        return _measured(workload, systems, checkpoint, repetitions, folder)
    trls = workload.precision or _faster(report.TRL, folder, partial(theirs, ["--trial"]))
    our_own = workload.precision or _faster(report.OURS, folder, partial(our, quick(workload)))
    systems = {report.OURS: our(workload, our_own), report.TRL: theirs(way, trls)}
    if workload.name == "short" and trls == "bf16":  # where it is quick to tell
        systems[report.TRL_BF16_WEIGHTS] = theirs(way, "bf16_weights")
    return _measured(workload, systems, checkpoint, repetitions, folder)


def _measured(
    workload: Workload,
    systems: Mapping[str, _System],
    checkpoint: Path,
    repetitions: int,
    folder: Path,
) -> list[report.Row]:
    """Run the systems in turns; return their rows."""
    heldout = checkpoint / "prompts" / "heldout.jsonl"
    accuracy = partial(in_a_process, held_out_accuracy)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for number in range(repetitions):
        for name in alternating(systems, number):
            trained = folder / f"{workload.name}_{name}_{number}".replace(" ", "_")
            run = systems[name](number + 1, trained)
            run["accuracy"] = accuracy(trained, heldout, workload)
            shutil.rmtree(trained)
            pace = [round(seconds, 2) for seconds in run["step_seconds"]]
            print(f"{workload.name}, {name}: accuracy {run['accuracy']}, {pace}", flush=True)
            runs[name].append(run)
    at_start = accuracy(checkpoint, heldout, workload)
    return [
        report.training_row(
            workload.name,
            name,
            found,
            samples_per_step=workload.samples_per_step,
            left_out_steps=LEFT_OUT_STEPS,
            accuracy_at_start=at_start,
        )
        for name, found in runs.items()
    ]


def ours(
    workload: Workload, checkpoint: Path, processes: int, precision: str, seed: int, out: Path
) -> dict[str, Any]:
    """Run mcore_rl on all cores: data parallel with up to two processes, with TP beyond that."""
    run_dir = out.with_name(out.name + ".run")
    tp_size = max(1, processes // 2) if processes > 2 else 1
    dp_size = processes // tp_size
    if workload.is_published:
        micro_batch = ""
    elif workload.packed_tokens:
        micro_batch = f"--rl-max-tokens-per-microbatch {workload.packed_tokens}"
    else:
        micro_batch = f"--micro-batch-size {workload.samples_per_step // dp_size}"
    flags = (
        f"--rl-prompts {checkpoint}/prompts/train.jsonl "
        f"--rl-reward {workload.reward_name} "
        f"--rl-num-steps {workload.num_steps} --rl-eval-interval 0 "
        f"--tensor-model-parallel-size {tp_size} --expert-model-parallel-size {tp_size} "
        f"--expert-tensor-parallel-size 1 {micro_batch} --rl-export-hf {out}"
    ).split()
    flags += workload.flags(checkpoint, run_dir, precision=precision, seed=seed)
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    memory = PeakMemory()
    lines = train(processes, flags, run_dir, memory=memory, OMP_NUM_THREADS=str(threads))
    steps = [line for line in lines if "time/step_seconds" in line]
    shutil.rmtree(run_dir)
    return {
        "step_seconds": [step["time/step_seconds"] for step in steps],
        "response_tokens": [step["response_tokens/mean"] for step in steps],
        "peak_bytes": memory.num_bytes,
        "setting": f"{processes} x {threads} threads, TP{tp_size} DP{dp_size}, {precision}, "
        f"{micro_batch[2:] or 'packed'}",
    }


def _faster(system: str, folder: Path, with_precision: Callable[[str], _System]) -> str:
    """Return the faster of the two precisions with float32 weights in the optimizer.

    It depends on the CPU: many have no instruction for bf16 products.
    """
    seconds = {}
    for precision in ("bf16", "fp32"):
        out = folder / f"trial_{system}_{precision}"
        run = with_precision(precision)(1, out)
        shutil.rmtree(out)
        seconds[precision] = min(run["step_seconds"][1:])
    print(f"{system}'s step by precision: {seconds}", flush=True)
    return min(seconds, key=seconds.__getitem__)


def trl(
    workload: Workload, checkpoint: Path, precision: str, way: Sequence[str], seed: int, out: Path
) -> dict[str, Any]:
    """Run TRL, with a thread on each core."""
    script = str(ROOT / "benchmarks" / "step_time_trl.py")
    flags = ["--precision", precision, "--seed", str(seed), *way]
    threads = str(len(os.sched_getaffinity(0)))
    memory = PeakMemory()
    output = run_python(
        [script, workload.name, str(checkpoint), str(out), *flags],
        memory=memory,
        OMP_NUM_THREADS=threads,
    )
    run = json.loads(output.splitlines()[-1])
    run["peak_bytes"] = memory.num_bytes
    named = " ".join(("", *way)).replace(" --", ", ")
    run["setting"] = f"1 process, {run['threads']} threads, {precision.replace('_', ' ')}{named}"
    return run


def _packing(repetitions: int, folder: Path) -> list[report.Row]:
    """Measure packed and padded updates of every model in turns, each in a new process."""
    script = str(ROOT / "benchmarks" / "step_time_packing.py")
    rows = []
    for model, arch in MODELS.items():
        checkpoint = folder / arch
        make = str(ROOT / "scripts" / "make_tiny_deepseek.py")
        run_python([make, "--out", str(checkpoint), "--arch", arch, "--no-warm-up"])
        runs: dict[str, list[dict[str, Any]]] = {"packed": [], "padded": []}
        for number in range(repetitions):
            for kind in alternating(runs, number):
                run = json.loads(run_python([script, str(checkpoint), kind]).splitlines()[-1])
                run["setting"] = "1 process, 1 thread, bf16"
                print(f"packing, {model}, {kind}: {run}", flush=True)
                runs[kind].append(run)
        rows += [report.packing_row(model, kind, found) for kind, found in runs.items()]
    return rows


if __name__ == "__main__":
    sys.exit(main())
