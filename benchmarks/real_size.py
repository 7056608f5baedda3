"""Runs of models of realistic size on this machine: seconds and host memory of each phase.

    python benchmarks/real_size.py --case dense --folder DIR
    python benchmarks/real_size.py --case medium --folder DIR --saves [--record]

A random model is made in DIR, trained, saved and exported. A second run resumes after the first
step and must end with the same weights. Prints seconds, measured and planned peak in GB by phase.
With `--flags --async-save`, "save" is the time that training waits, and "last save" what is left at
the end. `tests/real_size` asserts these measurements. Needs about 20 GB of host memory and 40 GB of
disk, in the background 30 GB of memory.

With `--saves` a run saves twice in the foreground, and another one in the background, with three
steps between saves, in which the files are written.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.pages import fact_list, section, verdict_table  # noqa: E402

ENVIRONMENT = {
    **{"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TOKENIZERS_PARALLELISM": "false"},
    "HF_HUB_OFFLINE": "1",
}
SAMPLING_SECONDS = 0.05


@dataclass(frozen=True)
class RealSize:
    """A model and the settings of its run."""

    arch: str
    overrides: Mapping[str, Any]  # of config.json
    num_ranks: int
    flags: str


CASES = {
    # Qwen3-0.6B.
    "dense": RealSize(
        "qwen3",
        dict(
            hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True,
        ),
        1,
        "",
    ),
    # The same with fewer layers and a smaller vocabulary, within 20 and 10 GB.
    "medium": RealSize(
        "qwen3",
        dict(
            hidden_size=1024, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, intermediate_size=3072, vocab_size=98304, tie_word_embeddings=True,
        ),
        1,
        "",
    ),
    "small": RealSize(
        "qwen3",
        dict(
            hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
            head_dim=128, intermediate_size=3072, vocab_size=32768, tie_word_embeddings=True,
        ),
        1,
        "",
    ),
    # DeepSeek-V3 with fewer and narrower layers: 0.55 billion parameters.
    "moe": RealSize(
        "deepseek_v3",
        dict(
            hidden_size=1024, num_hidden_layers=6, num_attention_heads=8, intermediate_size=3072,
            moe_intermediate_size=512, n_routed_experts=32, num_experts_per_tok=4,
            q_lora_rank=512, vocab_size=129280,
        ),
        2,
        "--pipeline-model-parallel-size 2 --rl-routing-replay r3",
    ),
}  # fmt: skip
SAVES = "real_size_saves"  # the section and the record of --saves
BACKGROUND = "--async-save"
SAVING = "--rl-num-steps 7 --save-interval 3"  # and at the end, which is not counted
KV_CACHE_GIB = 0.5
COMMON = (
    "--rl-reward arithmetic --rl-max-prompt-tokens 24 --rl-max-response-tokens 8 "
    "--rl-num-prompts-per-step 4 --rl-num-samples-per-prompt 2 --rl-eval-interval 0 "
    "--micro-batch-size 1 --rl-entropy-coef 0.01 --lr 1e-5 "
    "--rl-num-steps 2 --save-interval 1 --rl-deterministic --rl-canary-tolerance 1 "
    "--rl-attest full"
)


@dataclass
class Measured:
    """The phases of a run in order, each with its seconds and peak bytes.

    Bytes are anonymous and shared memory of all processes of the run together.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[float]] = field(default_factory=dict)  # seconds of each, on rank 0
    peak_bytes: dict[str, int] = field(default_factory=dict)


def make_checkpoint(case: RealSize, folder: Path) -> Path:
    """Make a random checkpoint with the tiny task's prompts and tokenizer."""
    file = ROOT / "scripts" / "make_tiny_deepseek.py"
    spec = importlib.util.spec_from_file_location("make_tiny_deepseek", file)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.make_checkpoint(folder, arch=case.arch, size="micro", overrides=case.overrides)


def flags_of(case: RealSize, checkpoint: Path, run_dir: Path) -> list[str]:
    """Return the command line of a run."""
    prompts = checkpoint / "prompts"
    return [
        *("--rl-hf-checkpoint", str(checkpoint), "--rl-prompts", str(prompts / "train.jsonl")),
        *("--rl-run-dir", str(run_dir), "--rl-export-hf", str(run_dir / "exported")),
        *("--rl-rollout-kv-cache-gib", str(KV_CACHE_GIB)),
        *COMMON.split(),
        *case.flags.split(),
    ]


def run(case: RealSize, flags: list[str], phases: Path) -> Measured:
    """Run and measure. Raises RuntimeError if the run fails."""
    phases.unlink(missing_ok=True)
    command = [sys.executable, "-m", "mcore_rl.launch", "--nproc-per-node", str(case.num_ranks)]
    command += ["-m", "mcore_rl.train", *flags]
    command += ["--rl-import", str(Path(__file__).with_name("real_size_phases.py"))]
    environment = {**os.environ, **ENVIRONMENT, "MCORE_RL_PHASES": str(phases)}
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    samples: list[tuple[float, int]] = []
    thread = threading.Thread(target=_sample, args=(process.pid, samples), daemon=True)
    thread.start()
    if code := process.wait():
        raise RuntimeError(f"the run ended with {code}")
    thread.join()
    return _by_phase(phases, samples)


def _sample(pid: int, samples: list[tuple[float, int]]) -> None:
    """Sample until the process has ended."""
    while psutil.pid_exists(pid):
        try:
            root = psutil.Process(pid)
            found = [_held_bytes(p.pid) for p in (root, *root.children(recursive=True))]
        except psutil.NoSuchProcess:
            return
        samples.append((time.time(), sum(found)))
        time.sleep(SAMPLING_SECONDS)


def _held_bytes(pid: int) -> int:
    """Return anonymous and shared bytes, without file pages, which the kernel can drop."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in text.splitlines())
    return sum(int(lines.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def _by_phase(phases: Path, samples: list[tuple[float, int]]) -> Measured:
    found = Measured()
    lines = [json.loads(line) for line in phases.read_text().splitlines()]
    for line in sorted(lines, key=lambda line: line["begin"]):
        name, begin, end = line["phase"], line["begin"], line["end"]
        inside = [held for at, held in samples if begin <= at <= end]
        if line["rank"] == 0:
            found.seconds[name] = found.seconds.get(name, 0.0) + end - begin
            found.calls.setdefault(name, []).append(round(end - begin, 3))
        if inside:  # a phase may be shorter than the time between two samples
            found.peak_bytes[name] = max([found.peak_bytes.get(name, 0), *inside])
    return found


def planned_bytes(case: RealSize, flags: list[str]) -> dict[str, int]:
    """Return the planned bytes of each phase for the same flags."""
    from mcore_rl.planner.host import host_phases
    from mcore_rl.planner.plan import plan_case
    from mcore_rl.tools.plan.command_line import read_command_line
    from mcore_rl.trainer.plan_inputs import has_slow_products

    outcome = plan_case(read_command_line([*flags, "--world-size", str(case.num_ranks)]).case)
    phases = host_phases(
        outcome.case,
        kv_cache_bytes=int(KV_CACHE_GIB * (1 << 30)),
        widens=has_slow_products("bf16"),
    )
    return {phase.name: phase.total_bytes for phase in phases}


def rows(run: str, found: Measured, planned: Mapping[str, int]) -> list[str]:
    """Return lines of a table: run, phase, seconds, peak and planned GB."""
    return [
        f"| {run} | {phase} | {seconds:.1f} | {found.peak_bytes.get(phase, 0) / 1e9:.2f} | "
        f"{planned.get(phase, 0) / 1e9:.2f} |"
        for phase, seconds in found.seconds.items()
    ]


def exported(run_dir: Path) -> dict[str, str]:
    """Return digests of the exported weights."""
    files = sorted((run_dir / "exported").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def saves_of(case: RealSize, checkpoint: Path, folder: Path) -> list[dict[str, Any]]:
    """Run with saves in the foreground and in the background. Return the seconds of each step's
    calls of the saver, for which training waits, and the peak of all processes."""
    found = []
    for flags in ("", BACKGROUND):
        run_dir = folder / "saves"
        shutil.rmtree(run_dir, ignore_errors=True)
        given = [*flags_of(case, checkpoint, run_dir), *SAVING.split(), *flags.split()]
        measured = run(case, given, folder / "phases.jsonl")
        files = (run_dir / "checkpoints" / "iter_0000006").glob("*.distcp")
        found.append(
            {
                "flags": flags,
                "waited": measured.calls["save"],
                "last": measured.calls["last save"],
                "train": measured.calls["train"],
                "peak_bytes": max(measured.peak_bytes.values()),
                "file_bytes": max(file.stat().st_size for file in files),
            }
        )
    shutil.rmtree(run_dir)
    return found


def saves_part(record: records.Record) -> str:
    """Return the section of `--saves`."""
    lines = [
        "# Seconds for which training waits for a save",
        "",
        f"Drawn from `benchmarks/records/{SAVES}.json`. Runs of {SAVING.split()[1]} steps of a",
        "dense model, which save after steps 3 and 6, in the foreground and with `--async-save`.",
        "Seconds include those in which later steps complete the checkpoint. Three steps pass",
        "between saves, in which the files of the first are written. GB is the peak of all",
        "processes.",
        "",
        *fact_list(record["facts"]),
        "",
        "| case | a file, GB | saves | first, s | second, s | peak GB |",
        "| --- | ---: | --- | ---: | ---: | ---: |",
    ]
    verdicts = []
    for case, runs in record["runs"].items():
        waited = [(sum(each["waited"][2:5]), sum(each["waited"][5:])) for each in runs]
        for each, (first, second) in zip(runs, waited, strict=True):
            size, peak = each["file_bytes"] / 1e9, each["peak_bytes"] / 1e9
            how = "in the background" if each["flags"] else "in the foreground"
            lines.append(
                f"| {case} | {size:.2f} | {how} | {first:.2f} | {second:.2f} | {peak:.1f} |"
            )
        shares = [there / here for here, there in zip(*waited, strict=True)]
        shown = " and ".join(f"1/{1 / share:.1f}" for share in shares)
        verdicts.append((f"{case}: at most a fifth", shown, max(shares) <= 0.2))
    return section(SAVES, [*lines, "", *verdict_table(verdicts)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--flags", default="", help="more flags, such as --async-save")
    parser.add_argument("--saves", action="store_true", help="compare saves alone")
    records.add_flag(parser)
    options = parser.parse_args()
    case, folder = CASES[options.case], options.folder
    checkpoint = make_checkpoint(case, folder / options.case)
    if options.saves:
        facts = facts_of_run("real_size.py", None, ())
        runs = {options.case: saves_of(case, checkpoint, folder)}
        records.report(SAVES, saves_part, facts, to=options.record, runs=runs)
        return
    first, again = folder / f"{options.case}-run", folder / f"{options.case}-resumed"
    load = ("--load", str(first / "checkpoints"), "--ckpt-step", "1")
    for run_dir, more in ((first, ()), (again, load)):
        flags = [*flags_of(case, checkpoint, run_dir), *more, *options.flags.split()]
        found, planned = run(case, flags, folder / "phases.jsonl"), planned_bytes(case, flags)
        print(*rows(run_dir.name, found, planned), sep="\n", flush=True)
    assert exported(first) == exported(again) != {}, "the resumed run ended with other weights"


if __name__ == "__main__":
    main()
