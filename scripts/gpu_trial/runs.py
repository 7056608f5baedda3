"""The two kinds of run in stages: a verification and a short training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.gpu_trial.desk import Desk, Failed

# The metrics of a step that are shown if the run has them.
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
LARGEST_MEAN_DIFFERENCE = 0.1  # of log-probs


def verify_all(desk: Desk, runs: dict[str, tuple[Path, int, tuple[str, ...]]]) -> None:
    """Verify every run, with a row for each; a failure does not stop the next one."""
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


def train_run(desk: Desk, label: str, checkpoint: Path, *flags: str, processes: int = 1) -> Path:
    """Do a small run; return its directory."""
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
    """Return the steps of `metrics.jsonl`; if a step has several lines, the later values count."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step: dict[int, dict[str, Any]] = {}
    for line in lines:
        by_step.setdefault(int(line["step"]), {}).update(line)
    return [by_step[step] for step in sorted(by_step)]


def shown_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return a row for each step, with its metrics of SHOWN."""
    return [
        {"step": int(step["step"])}
        | {short: step[name] for name, short in SHOWN.items() if step.get(name) is not None}
        for step in metrics_of(run_dir)
    ]
