"""Progress output on rank 0: a bar with the main metrics, and a final table.

On a terminal the bar is live; elsewhere (a log file, CI) each step prints one line. Output that
cannot be written does not raise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from mcore_rl.common.run_output import patient_stdout

_VALUES = ("first", "last", "best")
_FIELDS = "reward {reward} · accuracy {accuracy} · {tokens} tok/s · reshard {reshard}"
_OF_SUPERVISED = "loss {loss} · held-out loss {held_out} · {tokens} tok/s"
_SUPERVISED_LOSSES = ("loss/sft", "loss/dpo")


class RunProgress:
    """Progress line of a run of `num_steps` steps that starts at `first_step`."""

    def __init__(self, *, num_steps: int, first_step: int, enabled: bool) -> None:
        self._enabled = enabled
        self._num_steps, self._first_step = num_steps, first_step
        self._started = time.perf_counter()
        self._accuracy = "-"
        self.console = Console(file=patient_stdout())
        self._bar: Progress | None = None
        if enabled and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("steps done"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=num_steps, completed=first_step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step's metrics; `step` counts from 0, as in metrics.jsonl."""
        if not self._enabled:
            return
        for name in ("eval/accuracy", "eval/loss"):
            if name in metrics:
                self._accuracy = f"{metrics[name]:.3f}"
        text = self._described(metrics)
        if self._bar is not None:
            text = f"step {step} · {text}"
            self._bar.update(self._task, completed=step + 1, description=text)
            return
        done = step + 1 - self._first_step
        left = (time.perf_counter() - self._started) / done * (self._num_steps - step - 1)
        # On stdout, like the bar and the table; loggers write to stderr and run.log.
        counts = f"step {step} ({step + 1}/{self._num_steps})"
        self._show_line(f"{counts} · {text} · {left:.0f} s left")

    def _described(self, metrics: Mapping[str, float]) -> str:
        if "reward/mean" not in metrics:
            loss = next(metrics[name] for name in _SUPERVISED_LOSSES if name in metrics)
            return _OF_SUPERVISED.format(
                loss=f"{loss:.4f}",
                held_out=self._accuracy,
                tokens=f"{metrics['throughput/train_tokens_per_second']:.0f}",
            )
        return _FIELDS.format(
            reward=f"{metrics['reward/mean']:.3f}",
            accuracy=self._accuracy,
            tokens=f"{metrics['throughput/rollout_tokens_per_second']:.0f}",
            reshard=f"{100 * reshard_share(metrics):.1f}%",
        )

    def close(self) -> None:
        """End the live bar, if there is one. Idempotent."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def show_summary(
        self, main: Mapping[str, Mapping[str, float]], facts: Mapping[str, str]
    ) -> None:
        """Print the final table: main metrics, paths of the files, how to continue."""
        if not self._enabled:
            return
        self.close()
        table = Table(title="what was learned")
        for column in ("metric", *_VALUES):
            table.add_column(column, justify="left" if column == "metric" else "right")
        for name, values in main.items():
            table.add_row(
                name,
                *(f"{values[key]:.4f}" if key in values else "–" for key in _VALUES),
            )
        self.console.print(table)
        for name, value in facts.items():
            self._show_line(f"{name}: {value}")

    def _show_line(self, line: str) -> None:
        # Users copy commands from here, so no wrapping and no markup.
        self.console.print(line, soft_wrap=True, markup=False, highlight=False)


def reshard_share(metrics: Mapping[str, float]) -> float:
    """Return the share of a step's time spent on switching between rollout and training."""
    spent = metrics["time/reshard_to_rollout_seconds"] + metrics["time/reshard_to_train_seconds"]
    return spent / metrics["time/step_seconds"]


def run_facts(
    folder: Path, checkpoints: Path, export: str | None, tensorboard: str | None = None
) -> dict[str, str]:
    """Return the paths of a finished run's files, and how to continue it."""
    facts = {
        "files": str(folder),
        "tensorboard": f"tensorboard --logdir {tensorboard or folder / 'tensorboard'}",
        "continue": f"the same command with --load {checkpoints} and a larger --rl-num-steps",
    }
    if export:
        facts["Hugging Face checkpoint"] = export
    return facts
