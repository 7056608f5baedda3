"""The command line of the main job, as tests cut it short."""

from __future__ import annotations

from pathlib import Path

from tests.rank_pool import ROOT


def task_flags(checkpoint: Path, run_dir: Path, *more: str) -> list[str]:
    """The main job's recipe, by its preset and its task; later flags win."""
    presets = ROOT / "scripts" / "presets"
    return [
        *("--rl-config", str(presets / "tiny.yaml")),
        *("--rl-config", str(presets / "tiny-task.yaml")),
        *("--rl-hf-checkpoint", str(checkpoint)),
        *("--rl-prompts", str(checkpoint / "prompts" / "train.jsonl")),
        *("--rl-eval-prompts", str(checkpoint / "prompts" / "heldout.jsonl")),
        *("--rl-run-dir", str(run_dir)),
        *more,
    ]
