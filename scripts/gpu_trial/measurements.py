"""Stages of measurements: the switch, the step, a trace, and layouts on several GPUs."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from scripts.gpu_trial.desk import ROOT, Desk
from scripts.gpu_trial.runs import shown_steps, train_run, verify_all

TP2 = ("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2")
TP2 = (*TP2, "--expert-tensor-parallel-size", "1")
PP2 = ("--pipeline-model-parallel-size", "2")


def switch(desk: Desk) -> None:
    """Time parts of the switch next to a copy on the device, by attestation and offload."""
    dense, moe = (desk.model or desk.sized("dense")), desk.sized("moe")
    everything = ("--rl-offload", "gradients,optimizer,parameters")
    _switches(
        desk,
        {
            "dense, no proof": (dense, 1, ("--rl-attest", "off", "--rl-offload", "none")),
            "dense": (dense, 1, ("--rl-offload", "none")),
            "MoE": (moe, 1, ("--rl-offload", "none")),
            "dense, all proved, all offloaded": (
                dense,
                1,
                ("--rl-attest", "full", *everything),
            ),
        },
    )


def _switches(desk: Desk, runs: dict[str, tuple[Path, int, tuple[str, ...]]]) -> None:
    """Record a row per run: medians over its switches except the first, of the slowest rank."""
    rows = desk.figures.setdefault("switches", [])
    for label, (checkpoint, processes, flags) in runs.items():
        out = desk.fresh("parts")
        out.mkdir()
        desk.environment["MCORE_RL_SWITCH_PARTS"] = str(out)
        watch = ("--rl-import", str(ROOT / "benchmarks" / "switch_parts.py"))
        steps = ("--rl-num-steps", "5", "--save-interval", "1000", "--rl-canary-interval", "0")
        few = ("--rl-num-prompts-per-step", "2", "--rl-num-samples-per-prompt", "2")
        eager = ("--rl-rollout-enforce-eager",) * desk.has_cuda
        tokens = (*steps, *few, *watch, *flags, *eager)
        train_run(desk, f"train, {label}", checkpoint, *tokens, processes=processes)
        rows.append({"run": label} | switch_row(out))
        desk.save()


def switch_row(folder: Path) -> dict[str, Any]:
    """Convert the output of benchmarks/switch_parts.py to the figures of one run."""
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()][1:]
        for file in sorted(folder.glob("*.jsonl"))
    ]
    switches = list(zip(*ranks, strict=True))

    def median(name: str) -> float:
        return statistics.median(max(rank[name] for rank in each) for each in switches)

    resident, copied = median("resident_bytes"), median("copy_bytes_per_second")
    return {
        "W' bytes": int(resident),
        "received bytes": int(median("received_bytes")),
        "switch s": median("seconds"),
        "of it reload s": median("reload_seconds"),
        "wake weights s": median("wake_weights_seconds"),
        "wake KV s": median("wake_kv_cache_seconds"),
        "sleep s": median("sleep_seconds"),
        "extra bytes": int(median("peak_extra_bytes")),
        "device copy GB/s": copied / 1e9,
        "W' / switch / copy": resident / median("seconds") / copied,
        "W' / reload / copy": resident / median("reload_seconds") / copied,
    }


def step_time(desk: Desk) -> None:
    """Time a step of mcore_rl and then, if installed, of TRL with vLLM colocated (CPU: without)."""
    from benchmarks import step_time as bench

    checkpoint = desk.model_with_prompts()
    (short,) = (workload for workload in bench.WORKLOADS if workload.name == "short")
    workload = dataclasses.replace(short, num_steps=6)
    if desk.model:
        workload = dataclasses.replace(
            workload, max_prompt_tokens=512, max_response_tokens=256, packed_tokens=8192
        )
    rows = desk.figures.setdefault("seconds of a step", [])

    def add(system: str, run: dict[str, Any]) -> None:
        seconds = run["step_seconds"][bench.LEFT_OUT_STEPS :]
        tokens = statistics.fmean(run["response_tokens"][bench.LEFT_OUT_STEPS :])
        median = statistics.median(seconds)
        samples = workload.samples_per_step
        rows.append(
            {
                "system": system,
                "median step s": median,
                "samples/s": samples / median,
                "response tokens a sample": tokens,
                "response tokens/s": samples * tokens / median,
                "setting": run["setting"],
            }
        )
        desk.save()

    with desk.timed("ours"):
        add("mcore_rl", bench.ours(workload, checkpoint, 1, "bf16", 1, desk.fresh("ours")))
    trl = desk.packages.get("trl", {})
    if not trl.get("imports"):
        why = trl.get("error", "not installed")
        desk.notes.append(f"without TRL: {why}; `pip install .[bench]` into the environment")
        return
    with desk.timed("TRL"):
        sizes = ["--steps", str(workload.num_steps)]
        sizes += ["--response-tokens", str(workload.max_response_tokens)]
        add("TRL", bench.trl(workload, checkpoint, "bf16", sizes, 1, desk.fresh("trl")))
    desk.figures["samples/s, ours over TRL's"] = rows[0]["samples/s"] / rows[1]["samples/s"]


def trace(desk: Desk) -> None:
    """Trace runs with everything offloaded, so that data returns during the last responses: with
    one queue to the device, as Megatron requires for TP, and with eight."""
    checkpoint = desk.model or (desk.sized("dense") if desk.has_cuda else desk.tiny())
    rows = desk.figures.setdefault("mean of the steps but the first", [])
    for queues in ("1", "8"):
        desk.environment["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
        run_dir = train_run(
            desk,
            f"train, CUDA_DEVICE_MAX_CONNECTIONS={queues}",
            checkpoint,
            *("--rl-num-steps", "3", "--rl-trace", "2", "--save-interval", "1000"),
            *("--rl-offload", "gradients,optimizer,parameters"),
            *("--rl-rollout-enforce-eager",) * desk.has_cuda,
        )
        steps = shown_steps(run_dir)[1:]
        means = {
            name: statistics.fmean(step[name] for step in steps)
            for name in steps[0]
            if name != "step" and all(name in step for step in steps)
        }
        rows.append({"queues": queues} | means)
        desk.texts[f"queues {queues}"] = (run_dir / "trace" / "table.txt").read_text()
        desk.save()


# ----------------------------------------------------------------------------------- several GPUs


def two_pp(desk: Desk) -> None:
    _several(desk, "PP2", PP2)


def two_tp(desk: Desk) -> None:
    _several(desk, "TP2 EP2", TP2)


def _several(desk: Desk, name: str, layout: tuple[str, ...]) -> None:
    """Verify a hand-over bit for bit, train two steps, and time a switch of the larger model."""
    verify_all(desk, {name: (desk.tiny(), 2, layout)})
    run_dir = train_run(
        desk, f"train, {name}", desk.tiny(), *layout, "--rl-num-steps", "2", processes=2
    )
    desk.figures["steps"] = shown_steps(run_dir)
    _switches(desk, {name: (desk.sized("moe"), 2, layout)})


def four_tp(desk: Desk) -> None:
    flags = (*TP2, *PP2, "--rl-rollout-tp-size")
    verify_all(
        desk,
        {
            "TP2 PP2 EP2 -> TP1": (desk.tiny(), 4, (*flags, "1")),
            "TP2 PP2 EP2 -> TP4": (desk.tiny(), 4, (*flags, "4")),
        },
    )


def four_ep_dp(desk: Desk) -> None:
    layout = ("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "4")
    layout = (*layout, "--expert-tensor-parallel-size", "1")
    rollout = ("--rl-rollout-tp-size", "2", "--rl-rollout-ep-size", "4")
    verify_all(desk, {"TP2 EP4 -> TP2 DP2 EP4": (desk.tiny(), 4, (*layout, *rollout))})
    _switches(desk, {"TP2 EP4 -> TP2 DP2 EP4": (desk.sized("moe"), 4, (*layout, *rollout))})
