"""The stages, each a process in the environment under test.

    python scripts/gpu_trial/stages.py ORDER.json

ORDER names the stage, devices and packages (see `driver.Trial._command`). The file `result` is
updated after every command, so that a stage that is ended at its limit has reported its findings.
Stages only run commands of the product, of scripts/, of tests/ and of benchmarks/.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from scripts.gpu_trial import measurements  # noqa: E402
from scripts.gpu_trial.desk import Desk, Failed, Skipped  # noqa: E402
from scripts.gpu_trial.runs import metrics_of, shown_steps, train_run, verify_all  # noqa: E402

# Measured by a clock or the kernel, so not a function of the seed.
MEASURED = ("time/", "throughput/", "memory/", "health/", "reshard/peak_extra_bytes_max")


def doctor(desk: Desk) -> None:
    """Record all findings of the doctor; fail if one is red."""
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
    """Run the tests of tests/gpu that need no engine."""
    _pytest(desk, *(f"--ignore={file}" for file in _OF_ENGINES), "tests/gpu")


def gpu_engine(desk: Desk) -> None:
    """Run the tests of tests/gpu that need an engine."""
    _pytest(desk, *_OF_ENGINES)


_OF_ENGINES = ("tests/gpu/test_engine.py", "tests/gpu/test_switch.py")


def _pytest(desk: Desk, *words: str) -> None:
    """Run pytest, and record the outcome of each test."""
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
    """Run `mcore_rl.verify` on both tiny models, and on the real one if given."""
    _verify_each(desk, "--rl-rollout-enforce-eager")


def verify_graphs(desk: Desk) -> None:
    """Do the same with CUDA graphs, vLLM's default."""
    if not desk.has_cuda:
        desk.notes.append("without a GPU vLLM is eager either way: the same code, no graphs")
    _verify_each(desk)


def _verify_each(desk: Desk, *flags: str) -> None:
    models = {"tiny deepseek_v3": desk.tiny(), "tiny qwen3": desk.tiny("qwen3")}
    if desk.model:
        models["the model given"] = desk.model
    verify_all(desk, {name: (checkpoint, 1, flags) for name, checkpoint in models.items()})


# ------------------------------------------------------------------------------------------- train


def train(desk: Desk) -> None:
    """Train three steps with everything offloaded and full attestation; check the export."""
    checkpoint = desk.tiny()
    exported = desk.fresh("exported")
    run_dir = train_run(
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


def said(run_dir: Path, mark: str) -> str | None:
    """Return the last line of the log that has the mark."""
    lines = [x for x in (run_dir / "run.log").read_text().splitlines() if mark in x]
    return lines[-1][lines[-1].index(mark) :] if lines else None


def tensor_names(folder: Path) -> set[str]:
    """Return the tensor names in the headers of all safetensors files of a checkpoint."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as content:
            names |= json.loads(content.read(int.from_bytes(content.read(8), "little"))).keys()
    return names - {"__metadata__"}


# ------------------------------------------------------------------------------------------ resume


def resume(desk: Desk) -> None:
    """Kill a run in an update and resume it; metrics and weights equal an undisturbed run's."""
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
    """Return the metrics of each step, without those measured by a clock or the kernel."""

    def measured(name: str) -> bool:
        return name.startswith(MEASURED) or name.endswith(("_seconds", "_peak_bytes"))

    return [{n: v for n, v in step.items() if not measured(n)} for step in metrics_of(run_dir)]


def _unequal(a: dict[str, Any], b: dict[str, Any]) -> set[str]:
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}


FUNCTIONS: dict[str, Callable[[Desk], None]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(doctor, gpu_tests, gpu_engine, verify_eager, verify_graphs, train, resume),
        *(measurements.switch, measurements.step_time, measurements.trace),
        *(measurements.two_pp, measurements.two_tp),
        *(measurements.four_tp, measurements.four_ep_dp),
    )
}


def main(order: str) -> int:
    desk = Desk(json.loads(Path(order).read_text()))
    return desk.at_work(FUNCTIONS[desk.stage])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
