"""Sinks besides the run directory's files: TensorBoard, and Weights & Biases on request.

Both get the names and steps of metrics.jsonl, and the samples of rollouts.jsonl as a table per
step. Neither may stop training: if one raises, this is logged once and it gets nothing further.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it imports torch, which `mcore-rl report` avoids
    from mcore_rl.batching.types import ScoredRollout

logger = logging.getLogger(__name__)

# Time limits of Weights & Biases: for its server or a login before the run begins, and for the last
# uploads at its end. Data that was not uploaded stays on disk.
_INIT_SECONDS = 60
_FINISH_SECONDS = 120
# File in the run directory with the id of the Weights & Biases run that a resumed run adds to.
_RUN_ID_FILE = "wandb_run_id"
# Name and bounds of the table of a step's samples; rollouts.jsonl has all steps, samples and texts.
# Weights & Biases makes an artifact of each table, so later steps have one less often.
_TABLE = "rollouts"
_TABLE_AT_EVERY_STEP_UP_TO, _LATER_INTERVAL = 100, 10
_TABLE_ROWS = 32
_TABLE_CHARACTERS = 2000  # of a prompt or a response
COLUMNS = (
    "step", "prompt", "response", "reward", "parts", "tokens", "oldest weights", "newest weights",
    "finish reason",
)  # fmt: skip
Row = tuple[int, str, str, float | None, str, int, int, int, str]  # as COLUMNS


class Backend(NamedTuple):
    """What a sink does. Each function may raise anything."""

    write: Callable[[int, Mapping[str, float]], object]  # a step's metrics
    write_table: Callable[[int, Sequence[Row]], object]  # a step's samples
    finish: Callable[[], object]


def table_rows(step: int, rollouts: Sequence[ScoredRollout]) -> list[Row]:
    """Return the table of a step's samples: the first ones, long texts cut with a mark. A sample
    without a reward has None. Empty for a step that has no table."""
    if step > _TABLE_AT_EVERY_STEP_UP_TO and step % _LATER_INTERVAL:
        return []
    return [
        (
            step,
            _beginning(scored.rollout.prompt.text),
            _beginning(scored.rollout.text),
            scored.reward if scored.failure is None else None,
            json.dumps(dict(scored.parts)),
            len(scored.rollout.response_token_ids),
            scored.rollout.oldest_version,
            scored.rollout.weight_version,
            scored.rollout.finish_reason,
        )
        for scored in rollouts[:_TABLE_ROWS]
    ]


def _beginning(text: str) -> str:
    left_out = len(text) - _TABLE_CHARACTERS
    if left_out > 0:
        text = f"{text[:_TABLE_CHARACTERS]} [{left_out:,} more characters in rollouts.jsonl]"
    return text.encode(errors="replace").decode()  # half of a pair of surrogates is not UTF-8


def markdown_table(rows: Sequence[Row]) -> str:
    """Return a table in TensorBoard's Markdown, whose cells show their texts unchanged."""
    cells = [COLUMNS, ["---"] * len(COLUMNS), *([_escaped(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _escaped(cell: object) -> str:
    text = "" if cell is None else str(cell)
    text = re.sub(r"\r\n?", "\n", text)
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)  # HTML has none of them
    # References to characters mean nothing to Markdown and to the table.
    text = re.sub(r"[!-&*+:<-@\[-`{-~-]", lambda match: f"&#{ord(match[0])};", text)
    return text.replace("\n", "<br>")


class MetricSink:
    """A backend that gets each step's metrics and samples until it fails for the first time. Never
    raises.

    `title` and `place` are for the warning about the failure.
    """

    def __init__(self, title: str, place: str, start: Callable[[], Backend]) -> None:
        self._title, self._place = title, place
        self._backend: Backend | None = None
        with self._ending_on_failure():
            self._backend = start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one point per metric."""
        if self._backend is not None:
            with self._ending_on_failure():
                self._backend.write(step, metrics)

    def write_table(self, step: int, rows: Sequence[Row]) -> None:
        """Write the table of a step's samples."""
        if self._backend is not None:
            with self._ending_on_failure():
                self._backend.write_table(step, rows)

    def close(self) -> None:
        """Finish the backend, which gets nothing afterwards."""
        backend, self._backend = self._backend, None
        if backend is not None:
            with self._ending_on_failure():
                backend.finish()

    @contextlib.contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # training must continue
            self._backend = None
            logger.warning(
                "%s gets no further points in %s (%r); metrics.jsonl has them all",
                self._title,
                self._place,
                error,
            )


def tensorboard_sink(folder: Path, first_step: int) -> MetricSink:
    """Return a sink of event files in `folder`; a resume replaces points from `first_step` on."""

    def start() -> Backend:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder), purge_step=first_step or None)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        def write_table(step: int, rows: Sequence[Row]) -> None:
            writer.add_text(_TABLE, markdown_table(rows), step)

        return Backend(write, write_table, writer.close)

    return MetricSink("TensorBoard", str(folder), start)


@dataclass(frozen=True, slots=True)
class WandbRun:
    """Values of Megatron's `--wandb-*` flags."""

    project: str
    name: str | None = None  # default: the run directory's name
    entity: str | None = None  # default: the user's entity
    save_dir: str | None = None  # default: the run directory

    @staticmethod
    def from_flags(values: Mapping[str, Any]) -> WandbRun | None:
        """Read the flags; None without a project."""
        if not values.get("wandb_project"):
            return None
        return WandbRun(
            project=values["wandb_project"],
            name=values.get("wandb_exp_name") or None,
            entity=values.get("wandb_entity") or None,
            save_dir=values.get("wandb_save_dir") or None,
        )


def wandb_sink(
    run: WandbRun, folder: Path, config: Mapping[str, Any], first_step: int
) -> MetricSink:
    """Return a sink that is a Weights & Biases run, for the run directory `folder`.

    A resumed run continues its former Weights & Biases run, which keeps the first values of a step
    that is done twice. Waits up to `_INIT_SECONDS` for a server.
    """

    def start() -> Backend:
        import wandb

        save_dir = Path(run.save_dir or folder)
        save_dir.mkdir(parents=True, exist_ok=True)
        wandb_run = wandb.init(
            project=run.project,
            entity=run.entity,
            name=run.name or folder.absolute().name,
            id=id_of_run(folder / _RUN_ID_FILE, resumes=first_step > 0),
            resume="allow",
            dir=save_dir,
            config=dict(config),
            # A fork may have another run in this process.
            reinit="create_new",
            settings=wandb.Settings(
                init_timeout=_INIT_SECONDS,
                login_timeout=_INIT_SECONDS,
                finish_timeout=_FINISH_SECONDS,
                # The progress bar owns the console; run.log has its text.
                console="off",
                quiet=True,
            ),
        )

        def write_table(step: int, rows: Sequence[Row]) -> None:
            table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
            wandb_run.log({_TABLE: table}, step=step)

        return Backend(
            lambda step, metrics: wandb_run.log(dict(metrics), step=step),
            write_table,
            wandb_run.finish,
        )

    return MetricSink("Weights & Biases", f"project {run.project}", start)


def id_of_run(path: Path, *, resumes: bool) -> str:
    """Return the id of the run that is resumed, or a new id for a run that starts at step 0."""
    if resumes and path.is_file():
        with contextlib.suppress(OSError, ValueError):  # a damaged id starts another run
            if (stored_id := path.read_text(encoding="utf-8").strip()) and stored_id.isprintable():
                return stored_id
    run_id = secrets.token_hex(4)
    with contextlib.suppress(OSError):  # without the file, a resumed run gets a new id
        path.write_text(run_id + "\n", encoding="utf-8")
    return run_id
