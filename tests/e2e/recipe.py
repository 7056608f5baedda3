"""The command line of the main job, as tests cut it short, and runs of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.observe.run_directory import read_metrics
from tests.rank_pool import ENVIRONMENT, ROOT, RankOutcome, RankPool

# Whether each recipe runs until it has learned; scripts/run_tests.sh --all sets it.
LONG = os.environ.get("MCORE_RL_LONG_TESTS") == "1"
# The first steps of short runs, as this machine's processor computed them:
# `MCORE_RL_WRITE_CURVES=1 pytest tests/e2e/test_recipes.py tests/e2e/test_training.py`.
CURVES = ROOT / "tests" / "data" / "curves.json"
# Kernels of other processors round otherwise, and some sampled tokens then differ: of 128 rewards
# of 0 or 1 the mean may be off by 3 standard deviations of their difference, if all are others.
CURVE_TOLERANCES = {"reward/mean": 0.15, "entropy": 0.15, "response_tokens/mean": 0.6}
HOOKS = ROOT / "tests" / "e2e"  # files for --rl-import
# One process per model, no evaluation.
SMALL = (
    *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-eval-interval", "0", "--rl-max-response-tokens", "8"),
)
TRAIN_YAML = """
easy: {path: easy.jsonl, weight: 0.75}
hard:
  path: hard.jsonl
  weight: 0.25
  prompt_column: question
  reward: exact_match,arithmetic
  reward_weights: 0.5,0.5
  max_response_tokens: 4
"""
EVAL_YAML = """
same: {path: easy.jsonl}
other: {path: hard.jsonl, prompt_column: question, reward: exact_match}
"""
# By a clock or the kernel: no function of the seed.
MEASURED = (
    *("time/", "throughput/", "idle/", "memory/", "health/"),
    "reshard/peak_extra_bytes_max",
)


def task_flags(checkpoint: Path, run_dir: Path, *more: str) -> list[str]:
    """The main job's recipe, by its preset and its task; later flags win."""
    presets = ROOT / "scripts" / "presets"
    return [
        *("--rl-config", str(presets / "tiny.yaml")),
        *("--rl-config", str(presets / "tiny-model.yaml")),
        *("--rl-config", str(presets / "tiny-task.yaml")),
        *("--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl")),
        *("--rl-eval-prompts", str(checkpoint / "prompts" / "heldout.jsonl")),
        # It is filled with zeros at each start of an engine.
        *("--rl-run-dir", str(run_dir), "--rl-rollout-kv-cache-gib", "0.0625"),
        *more,
    ]


def write_sources(checkpoint: Path, folder: Path) -> Path:
    """Write two files of the task's prompts, YAML files that name them, and demonstrations."""
    lines = (checkpoint / "prompts" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:60]]
    asked = [row | {"question": row["prompt"]} for row in rows[20:]]
    taught = [{"prompt": row["prompt"], "response": str(row["answer"])} for row in rows[:20]]
    for name, some in (("easy", rows[:20]), ("hard", asked), ("taught", taught)):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "train.yaml").write_text(TRAIN_YAML)
    (folder / "eval.yaml").write_text(EVAL_YAML)
    return folder


def assert_pass_at_k_of_each_set(metrics: dict[str, float]) -> None:
    """The metrics of an evaluation with four samples, of all sets of EVAL_YAML and of each."""
    for name in ("eval", "eval/same", "eval/other"):
        accuracy = metrics[f"{name}/accuracy"]
        for mean in ("avg@4", "pass@1"):
            assert abs(metrics[f"{name}/{mean}"] - accuracy) < 1e-6
        assert metrics[f"{name}/pass@1"] <= metrics[f"{name}/pass@2"]
        assert metrics[f"{name}/pass@2"] <= metrics[f"{name}/pass@4"]
        assert 0 <= metrics[f"{name}/maj@4"] <= metrics[f"{name}/pass@4"]
        assert metrics[f"{name}/maj@4_low"] < metrics[f"{name}/maj@4_high"]


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    ranks: list[RankOutcome]

    @property
    def said(self) -> str:
        """The output of all ranks."""
        return "".join(rank.output for rank in self.ranks)

    def require(self, exit_code: int) -> None:
        assert {rank.exit_code for rank in self.ranks} == {exit_code}, self.said[-6000:]


def run_job(
    ranks: RankPool, tokens: list[str], *, world_size: int = 2, job: str = "train", **options: Any
) -> Ended:
    """Run a function of `tests.e2e.jobs`; `options` are those of `RankPool.run_raw`."""
    job = f"tests.e2e.jobs:{job}"
    return Ended(ranks.run_raw(job, world_size=world_size, tokens=tokens, **options))


def run_example(name: str, *arguments: object, python: Path, folder: Path, **more: str) -> None:
    """Run a script of examples/ in `folder` by a warm python; `more` goes to its environment."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHON_EXEC": str(python), **more}
    del environment["MASTER_ADDR"]
    run = subprocess.run(
        ["bash", ROOT / "examples" / name / "run.sh", *map(str, arguments)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-6000:]


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def follows_curve(
    name: str, steps: list[dict[str, Any]], metrics: Iterable[str] = tuple(CURVE_TOLERANCES)
) -> None:
    """In the first steps of a run, `metrics` are those that are stored under its name."""
    curves = json.loads(CURVES.read_text())
    # Steps that train the critic alone have no entropy.
    now = {m: [step[m] for step in steps if m in step] for m in CURVE_TOLERANCES}
    if os.environ.get("MCORE_RL_WRITE_CURVES") == "1":
        rounded = {m: [round(value, 4) for value in values] for m, values in now.items()}
        CURVES.write_text(json.dumps(curves | {name: rounded}, indent=1, sort_keys=True) + "\n")
        return
    for metric in metrics:
        tolerance = CURVE_TOLERANCES[metric]
        for value, stored in zip(now[metric], curves[name][metric], strict=True):
            assert abs(value - stored) <= tolerance, (metric, now[metric], curves[name][metric])


def seeded_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Each step's metrics, except what a clock or the kernel measured."""

    def is_measured(name: str) -> bool:
        return name.startswith(MEASURED) or name.endswith(("_seconds", "_peak_bytes"))

    return {
        step: {name: v for name, v in metrics.items() if not is_measured(name)}
        for step, metrics in read_metrics(run_dir / "metrics.jsonl").items()
    }


def assert_same_metrics(found: dict[str, float], expected: dict[str, float]) -> None:
    """Both are `seeded_metrics` of one step."""
    differing = {n: (v, found.get(n)) for n, v in expected.items() if found.get(n) != v}
    assert not differing and found.keys() == expected.keys(), differing


def exported_weights(run_dir: Path, name: str = "exported") -> dict[str, str]:
    """A hash of each file in the folder of an export."""
    files = sorted((run_dir / name).glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
