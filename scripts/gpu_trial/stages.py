"""What the stages do; a process for each, in the environment that they are to try.

    python scripts/gpu_trial/stages.py ORDER.json

ORDER names the stage and what there is (see `driver.Trial._command`). What a stage found goes to
the file `result` after every command, so that one that is ended at its limit has told what it knew.
Only commands of the product, of scripts/, of tests/ and of benchmarks/ are run.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from scripts.gpu_trial.desk import Desk, Failed, Skipped  # noqa: E402

# Of the metrics of a step that are shown; those that a run does not have are left out.
SHOWN = {
    "time/step_seconds": "step s",
    "time/rollout_seconds": "rollout s",
    "time/train_seconds": "train s",
    "time/reshard_to_rollout_seconds": "to rollout s",
    "time/reshard_to_train_seconds": "to train s",
    "throughput/rollout_tokens_per_second": "rollout tokens/s",
    "throughput/train_tokens_per_second": "train tokens/s",
    "memory/device_peak_bytes": "device peak bytes",
    "memory/host_peak_bytes": "host peak bytes",
    "reshard/peak_extra_bytes_max": "switch's extra bytes",
    "reshard/received_bytes_max": "received bytes",
    "kl/rollout_actor": "kl engine to trainer",
    "grad_norm": "grad norm",
}
# By a clock or the kernel: no function of the seed.
MEASURED = ("time/", "throughput/", "memory/", "health/", "reshard/peak_extra_bytes_max")
LARGEST_MEAN_DIFFERENCE = 0.1  # of log-probs; the canary's own bound
TP2 = ("--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2")
TP2 = (*TP2, "--expert-tensor-parallel-size", "1")
PP2 = ("--pipeline-model-parallel-size", "2")


def doctor(desk: Desk) -> None:
    """All findings of the doctor; fails where it says that something must be mended."""
    command = [desk.python, "-m", "mcore_rl.cli", "doctor", "--json", "--world-size", "1", "--"]
    done = desk.run("mcore-rl doctor", [*command, *desk.task(desk.tiny())], check=False)
    text = done.output
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    desk.figures["counts"] = ", ".join(f"{n} {level}" for level, n in found["counts"].items())
    desk.figures["findings"] = [
        {"level": f["level"], "area": f["area"], "found": f["found"], "remedy": f["remedy"] or ""}
        for f in found["findings"]
        if f["level"] != "green"
    ]
    if done.exit_code:
        fails = [f["found"] for f in found["findings"] if f["level"] == "red"]
        raise Failed("; ".join(fails) or f"the doctor ended with {done.exit_code}")


def gpu_tests(desk: Desk) -> None:
    """What of tests/gpu needs no engine."""
    _pytest(desk, *(f"--ignore={file}" for file in _OF_ENGINES), "tests/gpu")


def gpu_engine(desk: Desk) -> None:
    """And what does."""
    _pytest(desk, *_OF_ENGINES)


_OF_ENGINES = ("tests/gpu/test_engine.py", "tests/gpu/test_switch.py")


def _pytest(desk: Desk, *words: str) -> None:
    """What became of each test."""
    report = desk.work / f"{desk.stage}.xml"
    report.unlink(missing_ok=True)
    if not desk.has_cuda:
        desk.environment["MCORE_RL_GPU_TESTS"] = "cpu"
    command = [desk.python, "-m", "pytest", "-v", "-p", "no:cacheprovider", *words]
    done = desk.run("pytest", [*command, f"--junitxml={report}"], check=False)
    if not report.is_file():
        raise Failed(done.last_error())
    rows = [_outcome(case) for case in ElementTree.parse(report).iter("testcase")]
    counts = {kind: sum(row["outcome"] == kind for row in rows) for kind in _OUTCOMES}
    desk.figures["counts"] = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    desk.figures["tests"] = rows
    if done.exit_code:
        failed = [row["test"] for row in rows if row["outcome"] in ("failed", "error")]
        raise Failed(f"{len(failed)} of {len(rows)} tests failed: {', '.join(failed)[:400]}")
    if not counts["passed"]:
        raise Skipped("every test was skipped: see their reasons")


_OUTCOMES = ("passed", "failed", "error", "skipped")


def _outcome(case: ElementTree.Element) -> dict[str, Any]:
    name = f"{(case.get('classname') or '').split('.')[-1]}::{case.get('name')}"
    for kind, element in (("failed", "failure"), ("error", "error"), ("skipped", "skipped")):
        found = case.find(element)
        if found is not None:
            why = (found.get("message") or "")[:200]
            return {"test": name, "outcome": kind, "s": float(case.get("time") or 0), "why": why}
    return {"test": name, "outcome": "passed", "s": float(case.get("time") or 0), "why": ""}


# ------------------------------------------------------------------------------------------ verify


def verify_eager(desk: Desk) -> None:
    """`mcore_rl.verify` on both tiny models, and on the real one where there is one."""
    _verify_each(desk, "--rl-rollout-enforce-eager")


def verify_graphs(desk: Desk) -> None:
    """The same with CUDA graphs, which vLLM takes by itself."""
    if not desk.has_cuda:
        desk.notes.append("without a GPU vLLM is eager either way: the same code, no graphs")
    _verify_each(desk)


def _verify_each(desk: Desk, *flags: str) -> None:
    models = {"tiny deepseek_v3": desk.tiny(), "tiny qwen3": desk.tiny("qwen3")}
    if desk.model:
        models["the model given"] = desk.model
    _verify_all(desk, {name: (checkpoint, 1, flags) for name, checkpoint in models.items()})


def _verify_all(desk: Desk, runs: dict[str, tuple[Path, int, tuple[str, ...]]]) -> None:
    """A row for each; what one has to complain of does not keep the next from running."""
    wrong = []
    rows = desk.figures.setdefault("verify", [])
    for name, (checkpoint, processes, flags) in runs.items():
        out = desk.work / "verify.json"
        out.unlink(missing_ok=True)
        tokens = [*desk.task(checkpoint), *flags, "--rl-verify-out", str(out)]
        done = desk.launch(f"verify, {name}", processes, "mcore_rl.verify", tokens, check=False)
        if not out.is_file():
            wrong.append(f"{name}: {done.last_error()}")
            continue
        found = json.loads(out.read_text())
        rows.append(
            {
                "model": name,
                "stored by vLLM equal": found["stored_equal"],
                "mean |difference| of log-probs": found["mean_abs_difference"],
                "max": found["max_abs_difference"],
                "received bytes": found["received_bytes_max"],
                "s": done.seconds,
            }
        )
        if done.exit_code:
            wrong.append(f"{name}: stored otherwise by a hand-over: {found['differing'][:3]}")
        if found["mean_abs_difference"] > LARGEST_MEAN_DIFFERENCE:
            wrong.append(f"{name}: log-probs differ by {found['mean_abs_difference']:.3f}")
        desk.save()
    if wrong:
        raise Failed("; ".join(wrong))


# ------------------------------------------------------------------------------------------- train


def train(desk: Desk) -> None:
    """Three steps with everything offloaded and every byte proved; the export is complete."""
    checkpoint = desk.tiny()
    exported = desk.fresh("exported")
    run_dir = _train(
        desk,
        "train, everything offloaded, proved in full",
        checkpoint,
        *("--rl-num-steps", "3", "--rl-offload", "gradients,optimizer,parameters"),
        *("--rl-attest", "full", "--rl-export-hf", str(exported)),
    )
    desk.figures["steps"] = shown_steps(run_dir)
    desk.figures["offload"] = said(run_dir, "[Offload]") or "nothing was said of it"
    names = tensor_names(checkpoint) ^ tensor_names(exported)
    desk.figures["tensors exported"] = len(tensor_names(exported))
    if names:
        raise Failed(f"the export and the checkpoint differ in names: {sorted(names)[:5]}")


def _train(desk: Desk, label: str, checkpoint: Path, *flags: str, processes: int = 1) -> Path:
    """A small run; its directory."""
    run_dir = desk.fresh("run")
    tokens = [
        *desk.task(checkpoint),
        *("--rl-reward", "scripts.varied_reward:score", "--rl-reward-workers", "1"),
        *("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "4"),
        *("--rl-eval-interval", "0", "--lr", "1e-4", "--rl-run-dir", str(run_dir), *flags),
    ]
    desk.launch(label, processes, "mcore_rl.train", tokens)
    return run_dir


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of `metrics.jsonl`, the last line of each step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        by_step.setdefault(int(line["step"]), {}).update(line)
    return [by_step[step] for step in sorted(by_step)]


def shown_steps(run_dir: Path) -> list[dict[str, Any]]:
    """A row for each step, with what of SHOWN it has."""
    return [
        {"step": int(step["step"])}
        | {short: step[name] for name, short in SHOWN.items() if step.get(name) is not None}
        for step in metrics_of(run_dir)
    ]


def said(run_dir: Path, mark: str) -> str | None:
    """The last line of the log that has the mark."""
    lines = [x for x in (run_dir / "run.log").read_text().splitlines() if mark in x]
    return lines[-1][lines[-1].index(mark) :] if lines else None


def tensor_names(folder: Path) -> set[str]:
    """Of all safetensors files of a checkpoint, by their headers."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as content:
            names |= json.loads(content.read(int.from_bytes(content.read(8), "little"))).keys()
    return names - {"__metadata__"}


# ------------------------------------------------------------------------------------------ resume


def resume(desk: Desk) -> None:
    """Undisturbed; killed in an update; gone on with: the same metrics, the same weights."""
    import kill_test

    num_steps = 4
    folder = desk.fresh("resume")
    folder.mkdir()
    setting = kill_test.Setting(desk.tiny(), folder, 1, num_steps)
    more = ("--rl-rollout-enforce-eager",) * desk.has_cuda
    kill = kill_test.Kill("train", 2, 0.0, "SIGKILL", (0,))
    endings = {}
    for label, where, when in (
        ("undisturbed", "whole", None),
        ("killed in the update of step 3", "killed", kill),
        ("gone on with", "killed", None),
    ):
        with desk.timed(label):
            ending = kill_test.run(setting, folder / where, when, more)
            print(ending.output[-3000:], flush=True)
        if when is None and ending.exit_code:
            raise Failed(f"{label}: ended with {ending.exit_code}", ending.output)
        endings[label] = ending
    killed = endings["killed in the update of step 3"]
    faults = kill_test.faults_of_kill(killed, kill, folder / "killed")
    faults += endings["undisturbed"].faults + endings["gone on with"].faults
    whole, resumed = (_functions_of_seed(folder / where) for where in ("whole", "killed"))
    other = sorted({name for a, b in zip(whole, resumed, strict=True) for name in _unequal(a, b)})
    desk.figures |= {
        "metrics compared": len(whole[0]) * num_steps,
        "metrics equal, bit for bit": not other,
        "weights equal, bit for bit": kill_test.weights(folder / "whole")
        == kill_test.weights(folder / "killed"),
        "seconds from the kill to its end": killed.seconds_after_kill,
    }
    if other:
        faults.append(f"metrics of the two runs differ: {', '.join(other[:8])}")
    if not desk.figures["weights equal, bit for bit"]:
        faults.append("the exported weights of the two runs differ")
    if faults:
        raise Failed("; ".join(faults))


def _functions_of_seed(run_dir: Path) -> list[dict[str, Any]]:
    """Of each step, but what a clock or the kernel has measured."""

    def measured(name: str) -> bool:
        return name.startswith(MEASURED) or name.endswith(("_seconds", "_peak_bytes"))

    return [{n: v for n, v in step.items() if not measured(n)} for step in metrics_of(run_dir)]


def _unequal(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


# ------------------------------------------------------------------------------------ measurements


def switch(desk: Desk) -> None:
    """Parts of the switch beside a copy on the device in the same process, by proof and offload."""
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
    """A row for each run: medians over its switches but the first, of the slowest rank."""
    rows = desk.figures.setdefault("switches", [])
    for label, (checkpoint, processes, flags) in runs.items():
        out = desk.fresh("parts")
        out.mkdir()
        desk.environment["MCORE_RL_SWITCH_PARTS"] = str(out)
        watch = ("--rl-import", str(ROOT / "benchmarks" / "switch_parts.py"))
        steps = ("--rl-num-steps", "5", "--save-interval", "1000", "--rl-canary-interval", "0")
        eager = ("--rl-rollout-enforce-eager",) * desk.has_cuda
        _train(
            desk, f"train, {label}", checkpoint, *steps, *watch, *flags, *eager, processes=processes
        )
        rows.append({"run": label} | switch_row(out))
        desk.save()


def switch_row(folder: Path) -> dict[str, Any]:
    """What benchmarks/switch_parts.py wrote, as the figures of one run."""
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
    """Ours and, where it is installed, TRL with vLLM colocated (on CPU: without) by turns."""
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
    """Everything offloaded, so that there is something to bring back beside the last responses;
    with one queue to the device, as Megatron wants it for TP, and with eight."""
    checkpoint = desk.model or (desk.sized("dense") if desk.has_cuda else desk.tiny())
    rows = desk.figures.setdefault("mean of the steps but the first", [])
    for queues in ("1", "8"):
        desk.environment["CUDA_DEVICE_MAX_CONNECTIONS"] = queues
        run_dir = _train(
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
    """Hand-over bit for bit, two steps, and what a switch of the larger model takes."""
    _verify_all(desk, {name: (desk.tiny(), 2, layout)})
    run_dir = _train(
        desk, f"train, {name}", desk.tiny(), *layout, "--rl-num-steps", "2", processes=2
    )
    desk.figures["steps"] = shown_steps(run_dir)
    _switches(desk, {name: (desk.sized("moe"), 2, layout)})


def four_tp(desk: Desk) -> None:
    flags = (*TP2, *PP2, "--rl-rollout-tp-size")
    _verify_all(
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
    _verify_all(desk, {"TP2 EP4 -> TP2 DP2 EP4": (desk.tiny(), 4, (*layout, *rollout))})
    _switches(desk, {"TP2 EP4 -> TP2 DP2 EP4": (desk.sized("moe"), 4, (*layout, *rollout))})


FUNCTIONS: dict[str, Callable[[Desk], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(
            doctor,
            gpu_tests,
            gpu_engine,
            verify_eager,
            verify_graphs,
            train,
            resume,
            switch,
            step_time,
            trace,
        ),
        *(two_pp, two_tp, four_tp, four_ep_dp),
    )
}


def main(order: str) -> int:
    desk = Desk(json.loads(Path(order).read_text()))
    return desk.at_work(FUNCTIONS[desk.stage])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
