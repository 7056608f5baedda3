"""The run directory: metrics, samples, configuration, summary; and the clocks of the stages.

Rank 0 writes, the others keep silent. Names of files and metrics are the run directory's contract:
`metrics.jsonl` (one object a step), `rollouts.jsonl`, `run.log`, `config.yaml`, `summary.json`,
`tensorboard/`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mcore_rl.trace import tracer as trace
from mcore_rl.types import ScoredRollout, StepStats

STAGES = ("data", "rollout", "reward", "log_probs", "advantages", "train", "checkpoint", "eval")
# In the summary table and the progress line.
MAIN_METRICS = ("reward/mean", "eval/accuracy", "kl/rollout_actor", "entropy", "grad_norm")


class StageTimers:
    """Seconds spent in each stage of a step, of which `--rl-trace` makes spans as well."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time of a `with` block to `stage`; a stage may be entered several times."""
        started = time.perf_counter()
        with trace.span(stage, trace.STAGE):
            yield
        self.add(stage, time.perf_counter() - started)

    def add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def __getitem__(self, stage: str) -> float:
        return self._seconds.get(stage, 0.0)

    def finish_step(self) -> dict[str, float]:
        """`time/<stage>_seconds` of the step that ends here, and start the next."""
        now = time.perf_counter()
        metrics = {f"time/{stage}_seconds": self._seconds.get(stage, 0.0) for stage in STAGES}
        for stage in set(self._seconds) - set(STAGES):
            metrics[f"time/{stage}_seconds"] = self._seconds[stage]
        metrics["time/step_seconds"] = now - self._started
        self._seconds.clear()
        self._started = now
        trace.step_ended()
        return metrics


class RunDirectory:
    """Writes the files of a run; only one process may."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        # A resumed run appends; a step that was done twice stands there twice, in order.
        self._metrics = open(self.folder / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._rollouts = open(self.folder / "rollouts.jsonl", "a", encoding="utf-8")  # noqa: SIM115
        self._tensorboard = SummaryWriter(str(self.folder / "tensorboard"))
        text = yaml.safe_dump(_plain(config), sort_keys=True, allow_unicode=True)
        (self.folder / "config.yaml").write_text(text, encoding="utf-8")
        self._log = logging.FileHandler(self.folder / "run.log", encoding="utf-8")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("mcore_rl").addHandler(self._log)
        self.history: dict[str, list[tuple[int, float]]] = {}

    def write_step(self, stats: StepStats) -> None:
        """Append one line to metrics.jsonl and one point a metric to TensorBoard."""
        self._metrics.write(json.dumps({"step": stats.step, **stats.metrics}) + "\n")
        self._metrics.flush()
        for name, value in stats.metrics.items():
            self._tensorboard.add_scalar(name, value, stats.step)
            self.history.setdefault(name, []).append((stats.step, value))

    def write_rollouts(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        """Append sampled texts with their rewards and weight versions to rollouts.jsonl."""
        for scored in rollouts:
            rollout = scored.rollout
            line = {
                "step": step,
                "prompt_index": rollout.prompt.index,
                "prompt": rollout.prompt.text,
                "response": rollout.text,
                "answer": rollout.prompt.answer,
                "reward": scored.reward,
                "parts": dict(scored.parts),
                "failure": scored.failure,
                "finish_reason": rollout.finish_reason,
                "weight_version": rollout.weight_version,
            }
            self._rollouts.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._rollouts.flush()

    def write_summary(self, facts: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Write `facts` and first, last, best of the main metrics; returns the latter."""
        main = {}
        for name in MAIN_METRICS:
            values = [value for _, value in self.history.get(name, ())]
            if values:
                best = min(values) if name.startswith("kl/") else max(values)
                main[name] = {"first": values[0], "last": values[-1], "best": best}
        summary = {**_plain(facts), "metrics": main}
        text = json.dumps(summary, indent=2, ensure_ascii=False)
        (self.folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        return main

    def close(self) -> None:
        """Close the files; nothing may be written afterwards."""
        logging.getLogger("mcore_rl").removeHandler(self._log)
        self._log.close()
        self._metrics.close()
        self._rollouts.close()
        self._tensorboard.close()


def _plain(value: Any) -> Any:
    """What JSON and YAML can hold; anything else by its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    # The exact types: an enum that is an int as well would be written as an object.
    return value if type(value) in (str, int, float, bool, type(None)) else str(value)
