"""The exports of a run to `--rl-export-hf`, and the best of them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import torch.distributed as dist

from mcore_rl.common.disk import replace_folder
from mcore_rl.common.readers import finite_number, parse_json, read_regular
from mcore_rl.config import TrainerOptions
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.megatron.hf_files import EXPORT_MARKER, best_export
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.model.quantization import FP8
from mcore_rl.trainer.resume.save_rule import scores_of

logger = logging.getLogger(__name__)

_SCORE = "score"


class RunExports:
    """The exports of a run: the newest has the folder's name, the best that of `best_export`.

    An export is best by the evaluation of the same weights, which `--rl-eval-interval` divides
    `--rl-export-interval` for. Files of both are links to one copy where the file system can.
    """

    def __init__(
        self,
        options: TrainerOptions,
        shards: ModelShards,
        checkpoint: HFCheckpoint,
        *,
        apart_from: Collection[Path],
    ) -> None:
        """`shards`, `checkpoint` and `apart_from` are those of `hf_export.export`."""
        self._options, self._shards, self._checkpoint = options, shards, checkpoint
        self._apart_from = apart_from
        self._newest = -1  # steps that the last export of this process had done

    def export_if_due(self, num_steps: int) -> None:
        """Export after every `--rl-export-interval` steps. Collective."""
        interval = self._options.export_interval
        if interval and num_steps % interval == 0:
            self.export(num_steps)

    def export(self, num_steps: int) -> None:
        """Export the weights after `num_steps` steps, unless they are exported. Collective."""
        if self._options.export_hf is None or self._newest == num_steps:
            return
        export(
            self._shards,
            self._checkpoint,
            Path(self._options.export_hf),
            as_float8=self._options.export_dtype == FP8,
            apart_from=self._apart_from,
        )
        self._newest = num_steps

    def note(self, num_steps: int, evaluation: Mapping[str, float]) -> None:
        """Keep the newest export as the best if `evaluation`, of the weights after `num_steps`
        steps, is of its weights and at least as good as the best one's. Not collective."""
        score = scores_of({num_steps: evaluation}).get(num_steps)
        if not self._options.export_interval or num_steps != self._newest or score is None:
            return
        assert self._options.export_hf is not None, "refused by preflight"
        newest, best = Path(self._options.export_hf), best_export(self._options.export_hf)
        if dist.get_rank() == 0 and not _score_of(best) > score:
            keep(newest, best, score)
            logger.info("[Export] %s has step %d, the best so far", best, num_steps)


def keep(newest: Path, best: Path, score: float) -> None:
    """Make `best` the same as `newest`, with its score. Raises OSError."""
    partial = best.with_name(best.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(newest, partial, copy_function=_linked)
    marker = partial / EXPORT_MARKER
    facts = parse_json(marker.read_bytes())
    marker.unlink()  # the other folder's, too
    marker.write_text(json.dumps(facts | {_SCORE: score}, indent=2), encoding="utf-8")
    replace_folder(partial, best)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _score_of(best: Path) -> float:
    """Return the score of the best export, lower than any without one."""
    score = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        score = finite_number(parse_json(read_regular(best / EXPORT_MARKER))[_SCORE])
    return -math.inf if score is None else score
