"""The samples of demonstrations and pairs, which every rank reads from the file's cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.sample_exchange import Shares
from mcore_rl.batching.table import SampleTable, SampleTokens
from mcore_rl.batching.types import ScoredRollout
from mcore_rl.data.demonstrations import Demonstrations
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.trainer.job import Job


class DemonstrationStore(SampleStore):
    """The samples of rows, by number: row position x samples per row + place in the row."""

    def __init__(self, job: Job, rows: Demonstrations) -> None:
        super().__init__(job.spec.train_layout, job.spec.rollout_layout, job.spec.layers)
        self.rows = rows

    def table_of(self, positions: Sequence[int] | np.ndarray, first_draw: int = 0) -> SampleTable:
        """Return the table of the samples of rows at `positions`, which have no reward."""
        rows, per_row = self.rows, self.rows.samples_per_row
        lengths = [each for position in positions for each in rows.lengths(int(position))]
        before, others = np.array(lengths, dtype=np.int64).T
        table = SampleTable.of_lengths(
            before, others, draws=np.repeat(first_draw + np.arange(len(positions)), per_row)
        )
        numbers = np.asarray(positions)[:, None] * per_row + np.arange(per_row)
        return dataclasses.replace(
            table,
            numbers=numbers.ravel(),
            generated_lengths=np.array(
                [each for at in positions for each in rows.num_learned(int(at))], dtype=np.int64
            ),
            prompts=np.repeat(rows.rows[positions], per_row),
            has_reward=np.zeros(len(table), dtype=np.bool_),
        )

    def deliver(self, table: SampleTable, wanted: Shares) -> dict[int, SampleTokens]:
        """Return this rank's samples of `wanted`, by their row in the table. Local."""
        return self.tokens_of(table, wanted.of(dist.get_rank()).tolist())

    def tokens_of(self, table: SampleTable, samples: Sequence[int]) -> dict[int, SampleTokens]:
        """Return the tokens of samples, by their row in the table."""
        per_row = self.rows.samples_per_row
        return {
            sample: self.rows.tokens(*divmod(int(table.numbers[sample]), per_row))
            for sample in samples
        }

    def on_first_rank(self, table: SampleTable, rows: Sequence[int]) -> list[ScoredRollout]:
        """Return no samples: what they show is in the file."""
        return []
