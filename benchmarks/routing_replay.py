"""Runs with and without routing replay, on a small mixture of experts with noisy routers.

    python benchmarks/routing_replay.py --steps 100 --markdown docs/using/moe.md \
        --svg docs/assets/routing_replay.svg

The model is a Qwen3-MoE of 4 layers with 32 experts, 4 per token, warmed up on the task of the tiny
preset. Then the rows of every router are scaled by 0.1, and one common row is added to all of them.
In exact arithmetic neither changes the choice of experts. But in bfloat16 the rounding of scores is
now as large as their differences, so the engine's router, which computes in bfloat16, chooses other
experts than the trainer's in float32. All runs begin with the same weights, prompts and seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.line_charts import Chart, svg  # noqa: E402

SCALE = 0.1
MODES = {"off": "#8a8f98", "r2": "#d9731a", "r3": "#3d7fd6"}
PANELS = (
    ("mean |log-prob difference|, engine and trainer", "mismatch/mean_abs_difference"),
    ("clipped share of tokens", "clip_fraction"),
    ("held-out accuracy", "eval/accuracy"),
)
# (title, metric, over the second half of the steps alone, format)
ROWS = (
    ("tokens and layers that get other experts", "moe/routing_disagreement", ".2%"),
    ("mean &#124;log-prob difference&#124;", "mismatch/mean_abs_difference", ".5f"),
    ("KL of engine and trainer (k3)", "kl/rollout_actor", ".2e"),
    ("clipped share", "clip_fraction", ".3%"),
    ("gradient norm", "grad_norm", ".3f"),
    ("reward of samples", "reward/mean", ".3f"),
)
BEGIN, END = "<!-- benchmarks/routing_replay.py -->", "<!-- end -->"


def make_model(folder: Path, common: float) -> None:
    """Make the checkpoint in `folder`; `common` is the deviation of the added row."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import make_tiny_deepseek

    calm = folder.with_name("calm")
    make_tiny_deepseek.make_checkpoint(
        calm,
        arch="qwen3_moe",
        size="tiny",
        warm_up=True,
        overrides={"num_experts": 32, "num_experts_per_tok": 4},
    )
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(calm, folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(calm / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            row = torch.randn(1, weight.shape[1], generator=generator) * common
            weights[name] = (SCALE * weight.float() + row).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def run(mode: str, model: Path, target: Path, num_steps: int) -> dict[int, dict[str, float]]:
    """Return a run's metrics by step; a run that exists already is not repeated."""
    metrics = target / "metrics.jsonl"
    if not (target / "summary.json").is_file():
        shutil.rmtree(target, ignore_errors=True)
        command = [
            *("bash", "scripts/run_deepseek_moe.sh", "--rl-hf-checkpoint", str(model)),
            *("--rl-config", "scripts/presets/tiny-model.yaml"),
            *("--rl-config", "scripts/presets/tiny-task.yaml"),
            *("--rl-prompts", str(model / "prompts" / "train.jsonl")),
            *("--rl-eval-prompts", str(model / "prompts" / "heldout.jsonl")),
            *("--rl-num-steps", str(num_steps), "--rl-num-mini-batches", "4"),
            *("--rl-eval-interval", "10", "--rl-canary-tolerance", "0"),
            *("--rl-routing-replay", mode, "--rl-run-dir", str(target)),
        ]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"MCORE_RL_SKIP_SETUP": "1"})
    lines = (json.loads(line) for line in metrics.read_text().splitlines())
    return {line["step"]: line for line in lines}


def series(steps: Mapping[int, Mapping[str, float]], metric: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(step, line[metric]) for step, line in steps.items() if metric in line]
    return np.array([step for step, _ in found]), np.array([value for _, value in found])


def table(runs: Mapping[str, Mapping[int, Mapping[str, float]]]) -> list[str]:
    lines = [f"| | {' | '.join(runs)} |", f"| --- |{' ---: |' * len(runs)}"]
    for title, metric, form in ROWS:
        values = [series(steps, metric)[1] for steps in runs.values()]
        cells = [f"{each.mean():{form}}" if each.size else "" for each in values]
        lines.append(f"| {title}, mean of the steps | {' | '.join(cells)} |")
    accuracies = [series(steps, "eval/accuracy")[1] for steps in runs.values()]
    for title, pick in (("before", 0), ("after", -1)):
        cells = " | ".join(f"{each[pick]:.3f}" for each in accuracies)
        lines.append(f"| held-out accuracy {title} | {cells} |")
    return lines


def drawn(runs: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    """Draw the panels side by side, a line per run; long lines are means over nine steps."""
    charts = []
    for title, metric in PANELS:
        found = {mode: series(steps, metric) for mode, steps in runs.items()}
        lines = {mode: (x, smoothed(y)) for mode, (x, y) in found.items() if y.size}
        last = max(x.max() for x, _ in lines.values())
        charts.append(Chart(title, lines, "step 0", str(last)))
    return svg(charts, {mode: MODES[mode] for mode in runs})


def smoothed(values: np.ndarray) -> np.ndarray:
    if values.size < 20:
        return values
    padded = np.pad(values, 4, mode="edge")
    return np.convolve(padded, np.ones(9) / 9, mode="valid")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--common", type=float, default=1.0, help="deviation of the added row")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=["off", "r3"])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "routing_replay")
    parser.add_argument("--markdown", type=Path, help="page whose marked part is replaced")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args(arguments)
    model = options.folder / "noisy"
    options.folder.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").is_file():
        make_model(model, options.common)
    runs = {mode: run(mode, model, options.folder / mode, options.steps) for mode in options.modes}
    lines = table(runs)
    print("\n".join(lines))
    if options.svg:
        options.svg.write_text(drawn(runs))
    if options.markdown:
        text = options.markdown.read_text()
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        page = "\n".join([BEGIN, "", *lines, "", END])
        options.markdown.write_text(before + page + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
