"""What runs learn with one flag or another, on the task of the tiny preset: tables of the docs.

    python benchmarks/learning.py --run critic lora    # runs these studies, then draws
    python benchmarks/learning.py                      # draws again, from the records alone

`critic`: how much a critic explains of the returns. `lora`: adapters beside all weights.
`routing_replay`: a small mixture of experts with noisy routers. The rows of every router are scaled
by 0.1, and one common row is added to all of them. In exact arithmetic neither changes the choice
of experts. But in bfloat16 the rounding of scores is now as large as their differences, so the
engine's router, which computes in bfloat16, chooses other experts than the trainer's in float32.
The runs of a study begin with the same weights and prompts.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import records  # noqa: E402
from benchmarks.facts import facts_of_run  # noqa: E402
from benchmarks.line_charts import Chart, Line, svg  # noqa: E402
from benchmarks.pages import fact_list, section, write_section  # noqa: E402
from benchmarks.records import Record, series  # noqa: E402

DOCS = ROOT / "docs" / "using"
ONE_PROCESS = (
    "--nproc 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--expert-model-parallel-size 1"
)
METRICS = {
    "reward": "reward/mean",
    "accuracy": "eval/accuracy",
    "explained": "critic/explained_variance",
    "disagreement": "moe/routing_disagreement",
    "mismatch": "mismatch/mean_abs_difference",
    "kl": "kl/rollout_actor",
    "clipped": "clip_fraction",
    "gradient": "grad_norm",
}
MODEL = "MODEL"  # in flags: the folder of the study's model


@dataclass(frozen=True, slots=True)
class Study:
    """Runs that differ in `cases`, and the page that shows them."""

    page: Path
    flags: str
    cases: Mapping[str, str]
    seeds: Sequence[int]
    metrics: Sequence[str]
    table: Callable[[Record], list[str]]
    makes_model: Callable[[Path], None] | None = None  # None: the preset's
    figure: Path | None = None


def critic_table(record: Record) -> list[str]:
    """Return the table of algorithms.md."""
    lines = [
        "| flags | held-out accuracy | last 20 of 100 steps | best four steps in a row |",
        "| --- | --- | ---: | ---: |",
    ]
    for run in record["runs"]:
        explained, accuracy = series(run, "explained")[1], series(run, "accuracy")[1]
        best = max(statistics.fmean(explained[at : at + 4]) for at in range(len(explained) - 3))
        lines.append(
            f"| `{run['case']}` | {accuracy[0]:.2f} to {accuracy[-1]:.2f} | "
            f"{statistics.fmean(explained[-20:]):.2f} | {best:.2f} |"
        )
    return lines


def lora_table(record: Record) -> list[str]:
    """Return the table of lora.md."""
    cases = list(dict.fromkeys(run["case"] for run in record["runs"]))
    runs = {case: [run for run in record["runs"] if run["case"] == case] for case in cases}
    lines = [
        f"| accuracy on held-out prompts | {' | '.join(f'`{case}`' for case in cases)} |",
        f"| --- |{' --- |' * len(cases)}",
    ]
    # An evaluation comes before a step, or after the last one.
    num_steps = 1 + max(step["step"] for step in record["runs"][0]["steps"])
    at = series(record["runs"][0], "accuracy")[0]
    for place, step in enumerate(at):
        after = num_steps if step == num_steps - 1 else step
        cells = [
            ", ".join(f"{series(run, 'accuracy')[1][place]:.3f}" for run in runs[case])
            for case in cases
        ]
        lines.append(f"| after {after:.0f} steps | {' | '.join(cells)} |")
    return lines


# (title, metric, format)
_REPLAY_ROWS = (
    ("tokens and layers that get other experts", "disagreement", ".2%"),
    ("mean &#124;log-prob difference&#124;", "mismatch", ".5f"),
    ("KL of engine and trainer (k3)", "kl", ".2e"),
    ("clipped share", "clipped", ".3%"),
    ("gradient norm", "gradient", ".3f"),
    ("reward of samples", "reward", ".3f"),
)
_REPLAY_PANELS = (
    ("mean |log-prob difference|, engine and trainer", "mismatch"),
    ("clipped share of tokens", "clipped"),
    ("held-out accuracy", "accuracy"),
)
_REPLAY_COLORS = {"off": "#8a8f98", "r2": "#d9731a", "r3": "#3d7fd6"}


def replay_table(record: Record) -> list[str]:
    """Return the table of moe.md."""
    runs = record["runs"]
    lines = [f"| | {' | '.join(_mode(run) for run in runs)} |", f"| --- |{' ---: |' * len(runs)}"]
    for title, metric, form in _REPLAY_ROWS:
        values = [series(run, metric)[1] for run in runs]
        cells = [f"{statistics.fmean(each):{form}}" if each else "" for each in values]
        lines.append(f"| {title}, mean of the steps | {' | '.join(cells)} |")
    for title, place in (("before", 0), ("after", -1)):
        accuracies = [f"{series(run, 'accuracy')[1][place]:.3f}" for run in runs]
        lines.append(f"| held-out accuracy {title} | {' | '.join(accuracies)} |")
    return lines


def replay_figure(record: Record) -> str:
    """Draw the panels of moe.md, a line per run; long lines are means over nine steps."""
    charts = []
    for title, metric in _REPLAY_PANELS:
        found = {_mode(run): _smoothed(series(run, metric)) for run in record["runs"]}
        last = max(x[-1] for x, _ in found.values())
        charts.append(Chart(title, found, "step 0", f"{last:.0f}"))
    return svg(charts, _REPLAY_COLORS)


def _mode(run: Mapping[str, Any]) -> str:
    return str(run["case"]).split()[-1]


def _smoothed(line: tuple[list[float], list[float]]) -> Line:
    steps, values = line
    if len(values) < 20:
        return steps, values
    padded = [values[0]] * 4 + values + [values[-1]] * 4
    return steps, [statistics.fmean(padded[at : at + 9]) for at in range(len(values))]


def noisy_mixture(folder: Path) -> None:
    """Make the checkpoint of `routing_replay`, as the module describes it."""
    import make_tiny_deepseek
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny_deepseek.make_checkpoint(
        folder,
        arch="qwen3_moe",
        size="tiny",
        warm_up=True,
        overrides={"num_experts": 32, "num_experts_per_tok": 4},
    )
    generator = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            common = torch.randn(1, weight.shape[1], generator=generator)
            weights[name] = (0.1 * weight.float() + common).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


STUDIES = {
    "critic": Study(
        DOCS / "algorithms.md",
        f"{ONE_PROCESS} --rl-algorithm ppo --rl-num-prompts-per-step 128 "
        "--rl-num-samples-per-prompt 1 --rl-num-mini-batches 4 --rl-num-steps 100 --rl-gamma 1 "
        "--rl-critic-lr 5e-4 --rl-critic-warmup-steps 4",
        {
            flags: flags
            for flags in (
                "--lr 0 --rl-gae-lambda 1",
                "--lr 5e-5 --rl-gae-lambda 1",
                "--lr 2e-5 --rl-gae-lambda 0.95",
                "--lr 5e-5 --rl-gae-lambda 0.95",
            )
        },
        seeds=(1234,),
        metrics=("reward", "accuracy", "explained"),
        table=critic_table,
    ),
    "lora": Study(
        DOCS / "lora.md",
        f"{ONE_PROCESS} --rl-num-steps 45 --rl-eval-interval 15",
        {flags: flags for flags in ("--lr 1e-4", "--rl-lora-rank 8 --lr 1e-3")},
        seeds=(1234, 4321, 999),
        metrics=("reward", "accuracy"),
        table=lora_table,
    ),
    "routing_replay": Study(
        DOCS / "moe.md",
        f"--rl-hf-checkpoint {MODEL} --rl-config scripts/presets/tiny-model.yaml "
        "--rl-config scripts/presets/tiny-task.yaml "
        f"--rl-prompts {MODEL}/prompts/train.jsonl --rl-eval-prompts {MODEL}/prompts/heldout.jsonl "
        "--rl-num-steps 100 --rl-num-mini-batches 4 --rl-eval-interval 10 --rl-canary-tolerance 0",
        {flags: flags for flags in (f"--rl-routing-replay {mode}" for mode in _REPLAY_COLORS)},
        seeds=(1234,),
        metrics=(*(metric for _, metric, _ in _REPLAY_ROWS), "accuracy"),
        table=replay_table,
        makes_model=noisy_mixture,
        figure=ROOT / "docs" / "assets" / "routing_replay.svg",
    ),
}


def measure(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the runs of a study; a run that exists already is not repeated."""
    study, found = STUDIES[name], []
    model = folder / name / "model"
    if study.makes_model is not None and not model.exists():
        study.makes_model(model)
    for seed in study.seeds:
        for number, (case, more) in enumerate(study.cases.items()):
            run = folder / name / f"{number}_{seed}"
            if not (run / "summary.json").is_file():
                shutil.rmtree(run, ignore_errors=True)
                flags = f"{study.flags} {more}".replace(MODEL, str(model)).split()
                script = ["bash", "scripts/run_deepseek_moe.sh", *flags]
                script += ["--seed", str(seed), "--rl-run-dir", str(run)]
                environment = os.environ | {"MCORE_RL_SKIP_SETUP": "1"}
                subprocess.run(script, cwd=ROOT, check=True, env=environment)
            metrics = {metric: METRICS[metric] for metric in study.metrics}
            steps = records.steps_of(run, metrics)
            found.append({"case": case, "seed": seed, "steps": steps})
    return found


def part(name: str, record: Record) -> str:
    """Return the section of the study's page."""
    lines = ["", *STUDIES[name].table(record), ""]
    facts = {key: record["facts"][key] for key in ("commit", "date", "machine", "versions")}
    source = f"From `benchmarks/records/{name}.json`, by `benchmarks/learning.py`:"
    return section(name, [*lines, source, "", *fact_list(facts), ""])


def draw(name: str) -> None:
    study, record = STUDIES[name], records.read(name)
    write_section(study.page, name, part(name, record))
    if study.figure is not None:
        study.figure.write_text(replay_figure(record))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", nargs="+", choices=list(STUDIES), default=[], metavar="STUDY")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "learning")
    options = parser.parse_args(arguments)
    for name in options.run:
        facts = facts_of_run("learning.py", arguments, ())
        records.write(name, facts, runs=measure(name, options.folder))
    for name in STUDIES:
        if records.file_of(name).is_file():
            draw(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
