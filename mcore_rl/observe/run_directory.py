"""The run directory: metrics, samples, configuration, summary.

Only rank 0 writes. The names of files and metrics are a contract with users: `metrics.jsonl` (one
object per step), `rollouts.jsonl`, `run.log`, `config.yaml`, `summary.json`, `tensorboard/`, and
`timeline.jsonl` of `mcore_rl.observe.timeline`.
Failures do not stop training: lines are buffered until they can be written, and other failures are
logged once. `metric_sinks` writes metrics and samples to TensorBoard and Weights & Biases.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from mcore_rl.common.disk import replace_text
from mcore_rl.common.readers import (
    InvalidData,
    integer_within,
    lines_of,
    number,
    parse_json,
    parse_yaml,
)
from mcore_rl.observe.metric_sinks import WandbRun, table_rows, tensorboard_sink, wandb_sink

if TYPE_CHECKING:  # it imports torch, which `mcore-rl report` avoids
    from mcore_rl.batching.types import ScoredRollout, StepStats

logger = logging.getLogger(__name__)

# In the summary.
MAIN_METRICS = (
    *("reward/mean", "eval/accuracy", "kl/rollout_actor", "loss/sft", "loss/dpo", "dpo/accuracy"),
    *("eval/loss", "entropy", "grad_norm"),
)
# Metrics that have a best value; other metrics have none.
HIGHEST_IS_BEST = (
    "reward/mean",
    "eval/accuracy",
    "throughput/rollout_tokens_per_second",
    "throughput/train_tokens_per_second",
    "critic/explained_variance",
)
LOWEST_IS_BEST = ("kl/rollout_actor", "loss/sft", "loss/dpo", "eval/loss", "time/step_seconds")
CONFIG_FILE = "config.yaml"
_MAX_LINE_BYTES = 1 << 20  # of metrics.jsonl and timeline.jsonl
_MAX_STEP = (1 << 31) - 1
# What JSON does not escape, and other readers than a JSON parser take for the end of a line.
_LINE_BREAKS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Contents of config.yaml. `given` is flag -> value, as in a file of `--rl-config`."""

    given: Mapping[str, Any] = field(default_factory=dict)
    resolved: Mapping[str, Any] = field(default_factory=dict)  # all arguments, given or not
    about: Mapping[str, Any] = field(default_factory=dict)  # command, ranks, versions

    def text(self) -> str:
        """Return the text of config.yaml: the given flags as a file of `--rl-config`, which starts
        the same run in a new directory. The rest is YAML in comments."""
        given = {key: value for key, value in self.given.items() if key != "rl-run-dir"}
        return "".join(
            [
                "## The flags of this run. Passed as --rl-config, this file starts the same run\n"
                "## in a new directory, because --rl-run-dir is left out.\n",
                _commented({"about": self.about}),
                _dumped(given) if given else "",
                "## All arguments, with derived values and defaults.\n",
                _commented({"resolved": self.resolved}),
            ]
        )


def read_config(path: Path) -> RunConfig:
    """Read a config.yaml. Raises OSError, and ValueError for a truncated or damaged file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    comments = "\n".join(line[2:] for line in text.split("\n") if line.startswith("# "))
    given, others = (parse_yaml(part) or {} for part in (text, comments))
    if not (isinstance(given, dict) and isinstance(others, dict) and (given or others)):
        raise ValueError(f"{path} is empty or is not a mapping")
    about, resolved = (others.get(key) or {} for key in ("about", "resolved"))
    if not (isinstance(about, dict) and isinstance(resolved, dict)):
        raise InvalidData(f"{path} has comments that are not those of a run")
    if not others:  # from an older version, which wrote the arguments without comments
        given, resolved = {}, given
    return RunConfig(_plain(given), _plain(resolved), _plain(about))


def _dumped(mapping: Mapping[str, Any]) -> str:
    # ASCII only: some other characters end a line, and so a comment, in YAML.
    return yaml.safe_dump(_plain(mapping), sort_keys=False, width=float("inf"))


def _commented(mapping: Mapping[str, Any]) -> str:
    return "".join(f"# {line}\n" for line in _dumped(mapping).splitlines())


class RunDirectory:
    """Writer of a run's files, for one process only.

    A run resumed at `first_step` appends. Steps that a run had written before it was killed, and
    repeats, appear twice; the later line of a step counts, as in TensorBoard.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        first_step: int = 0,
        tensorboard: str | None = None,
        wandb: WandbRun | None = None,
    ) -> None:
        """Open the files. `tensorboard` replaces the folder `tensorboard/`; `wandb` also sends the
        metrics to Weights & Biases."""
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._main: dict[str, dict[str, float]] = {}
        for metrics in self.steps_before(first_step).values():
            self._note_main(metrics)
        self._metrics = PatientFile(self.folder / "metrics.jsonl")
        self._rollouts = PatientFile(self.folder / "rollouts.jsonl")
        self._replace(CONFIG_FILE, config.text())
        self._log = _LogHandler(PatientFile(self.folder / "run.log"))
        logging.getLogger("mcore_rl").addHandler(self._log)
        # After the log, which records their messages.
        points = Path(tensorboard) if tensorboard else self.folder / "tensorboard"
        self._sinks = [tensorboard_sink(points, first_step)]
        if wandb is not None:
            self._sinks.append(wandb_sink(wandb, self.folder, _plain(config.resolved), first_step))

    def write_step(self, stats: StepStats) -> None:
        """Append one line to metrics.jsonl, and one point per metric to each sink."""
        self._metrics.write(json.dumps({"step": stats.step, **stats.metrics}) + "\n")
        for sink in self._sinks:
            sink.write(stats.step, stats.metrics)
        self._note_main(stats.metrics)

    def steps_before(self, first_step: int) -> dict[int, dict[str, float]]:
        """Return the metrics of earlier runs in this folder, in the order of the steps."""
        damaged: list[int] = []
        metrics = read_metrics(self.folder / "metrics.jsonl", damaged)
        if damaged:
            logger.warning("%s", damage_note("metrics.jsonl", damaged))
        return {step: metrics[step] for step in sorted(metrics) if step < first_step}

    def _note_main(self, metrics: Mapping[str, float]) -> None:
        for name in MAIN_METRICS:
            if name not in metrics:
                continue
            value = metrics[name]
            noted = self._main.setdefault(name, {"first": value})
            noted["last"] = value
            if name in HIGHEST_IS_BEST:
                noted["best"] = max(noted.get("best", value), value)
            elif name in LOWEST_IS_BEST:
                noted["best"] = min(noted.get("best", value), value)

    def write_rollouts(
        self, step: int, rollouts: Sequence[ScoredRollout], draws: Sequence[int]
    ) -> None:
        """Append sampled texts with their rewards and weight versions to rollouts.jsonl, and send
        them to each sink as a table. `draws` are those of the samples' prompts."""
        lines = []
        for scored, draw in zip(rollouts, draws, strict=True):
            rollout = scored.rollout
            line = {
                "step": step,
                "draw": draw,
                "source": rollout.prompt.source,
                "prompt_index": rollout.prompt.index,
                "prompt": rollout.prompt.text,
                "response": rollout.text,
                "answer": rollout.prompt.answer,
                "reward": scored.reward,
                "parts": dict(scored.parts),
                "failure": scored.failure,
                "filtered": None if scored.dropped is None else scored.dropped.reason,
                "finish_reason": rollout.finish_reason,
                "response_tokens": len(rollout.response_token_ids),
                "turn_tokens": rollout.turn_tokens,
                "weight_version": rollout.weight_version,
                "oldest_weight_version": rollout.oldest_version,
            }
            text = json.dumps(line, ensure_ascii=False)
            lines.append(text.translate(_LINE_BREAKS) + "\n")
        self._rollouts.write("".join(lines))
        rows = table_rows(step, rollouts)
        for sink in self._sinks if rows else ():
            sink.write_table(step, rows)

    def write_summary(self, facts: Mapping[str, Any]) -> dict[str, dict[str, float]]:
        """Write `facts` and the main metrics' first and last values, and best where defined.
        Return these values."""
        main = {name: dict(self._main[name]) for name in MAIN_METRICS if name in self._main}
        summary = {**_plain(facts), "metrics": main}
        self._replace("summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
        return main

    def close(self) -> None:
        """Close the files; nothing may be written afterwards."""
        self._metrics.close()
        self._rollouts.close()
        for sink in self._sinks:
            sink.close()
        logging.getLogger("mcore_rl").removeHandler(self._log)
        self._log.close()

    def _replace(self, name: str, text: str) -> None:
        try:
            # Half of a pair of surrogates, which a text of the user may have, is not UTF-8.
            replace_text(self.folder / name, text.encode(errors="replace").decode())
        except OSError as error:
            logger.warning("%s cannot be written (%s)", self.folder / name, error)


class PatientFile:
    """An append-only file of lines. Text that a full disk rejects is kept for the next call.

    A line that a killed run left incomplete is ended first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None
        self._waiting = bytearray()
        self._has_begun = self._has_warned = False

    def write(self, text: str) -> None:
        """Append the buffered text and `text`. Errors of the disk are not raised."""
        self._waiting += text.encode(errors="replace")
        try:
            if self._file is None:
                self._file = self._opened()
            while self._waiting:
                written = self._file.write(self._waiting)
                del self._waiting[:written]
        except OSError as error:
            self._give_up()
            if not self._has_warned:
                self._has_warned = True  # first, because this may be the log's own file
                logger.warning(
                    "%s: %s; its lines wait until they can be written", self._path, error.strerror
                )
            return
        if self._has_warned:
            self._has_warned = False
            logger.warning("%s can be written again, and nothing is missing in it", self._path)

    def close(self) -> None:
        """Try once more to write the buffered text, and close the file."""
        if self._waiting:
            self.write("")
        if self._waiting:
            logger.warning("%s lacks its last %d bytes", self._path, len(self._waiting))
        self._give_up()

    def _give_up(self) -> None:
        """Close the file, so that reopening it works on a disk that was mounted again."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file = None

    def _opened(self) -> io.FileIO:
        if not self._has_begun and self._path.is_file():
            with self._path.open("rb") as before:
                size = before.seek(0, io.SEEK_END)
                before.seek(max(0, size - 1))
                if size and before.read(1) != b"\n":
                    self._waiting[:0] = b"\n"
        self._has_begun = True
        return io.FileIO(self._path, "a")


class _LogHandler(logging.Handler):
    """Handler for run.log. It indents a message's further lines, so that none looks like a
    message: an exception of a reward may contain untrusted text."""

    def __init__(self, file: PatientFile) -> None:
        super().__init__()
        self._file = file
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        # Text readers also end a line at a lone carriage return.
        self._file.write(re.sub(r"\r\n?|\n", "\n  ", self.format(record)) + "\n")

    def close(self) -> None:
        self._file.close()
        super().close()


def read_metrics(path: Path, damaged: list[int] | None = None) -> dict[int, dict[str, float]]:
    """Return each step's metrics in a metrics.jsonl; the later ones if a step was done twice.

    Values are floats, finite or not. The numbers (from 1) of lines that are not a step's metrics,
    and of lines with a value that was skipped, are appended to `damaged`. The evaluation after the
    last step has a separate line, whose step no other line has.
    """
    by_step: dict[int, dict[str, float]] = {}
    for line_number, step, fields in step_lines(path, damaged):
        values = {name: number(value) for name, value in fields.items() if name != "step"}
        by_step[step] = {name: value for name, value in values.items() if value is not None}
        if None in values.values() and damaged is not None:
            damaged.append(line_number)
    return by_step


def step_lines(path: Path, damaged: list[int] | None) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the number (from 1), the step and the fields of each line with a "step"; nothing if the
    file is missing. The numbers of other lines are appended to `damaged`."""
    if not path.is_file():
        return
    for line_number, line in enumerate(lines_of(path, _MAX_LINE_BYTES), start=1):
        fields: Any = None
        with contextlib.suppress(InvalidData):
            fields = parse_json(line)
        step = integer_within(fields.get("step"), 0, _MAX_STEP) if type(fields) is dict else None
        if step is not None:
            yield line_number, step, fields
        # A line without a newline was left incomplete by a killed run.
        elif line.strip() and line.endswith(b"\n") and damaged is not None:
            damaged.append(line_number)


def damage_note(name: str, damaged: Sequence[int]) -> str:
    """Return a sentence about the lines of a file that could not be read."""
    lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
    return f"{name} is damaged in line {lines}; what cannot be read there is left out"


def _plain(value: Any) -> Any:
    """Convert a value to types of JSON and YAML; other types become their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    # Exact types: YAML would write an enum that is also an int as an object.
    return value if type(value) in (str, int, float, bool, type(None)) else str(value)
