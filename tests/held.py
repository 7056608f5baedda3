"""Given samples in place of a rollout's: what every rank trains on."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.assignment import Cuts
from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import SampleTable, SampleTokens, tokens_to_rows
from mcore_rl.batching.train_batches import build_train_batch
from mcore_rl.batching.types import ScoredRollout, TrainBatch
from mcore_rl.common import objects
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.rollout.sample_store import SampleStore


class HeldHere:
    """In the place of a `SampleStore`, whose samples are elsewhere; tokens and log-probs only."""

    routed, num_top = None, 0

    def __init__(self) -> None:
        self._tokens: dict[int, SampleTokens] = {}

    def hold(self, scored: Sequence[ScoredRollout]) -> SampleTable:
        """The table of these, which are now what there is."""
        self._tokens = tokens_of(scored)
        return table_of(scored)

    def clear(self) -> None:
        pass

    def deliver(self, table: SampleTable, wanted: Shares) -> dict[int, SampleTokens]:
        return self._tokens

    def row_exchange(self, table: SampleTable, wanted: Shares) -> RowExchange:
        rows = tokens_to_rows([self._tokens[row] for row in range(len(table))])
        return RowExchange(table.lengths, Shares((np.arange(len(table)),), ((0,),)), wanted, rows)


def table_of(scored: Sequence[ScoredRollout]) -> SampleTable:
    """Neighbours with one prompt answer one draw of it."""
    prompts = [sample.rollout.prompt for sample in scored]
    is_new = [now is not before and now.index != before.index for before, now in pairwise(prompts)]
    draws = np.cumsum([0, *is_new])[: len(scored)].tolist()
    return SampleTable.of(scored, draws=draws)


def tokens_of(scored: Sequence[ScoredRollout]) -> dict[int, SampleTokens]:
    return {row: SampleTokens.of(sample) for row, sample in enumerate(scored)}


def sampled_by_engines(
    sample_store: SampleStore, layout: RolloutLayout, scored: Sequence[ScoredRollout]
) -> SampleTable:
    """The table of samples, the same on all ranks, after each engine has sampled its block of them.

    Collective over the world.
    """
    blocks = np.array_split(np.arange(len(scored)), layout.num_tp_groups)
    mine = blocks[layout.tp_group_index(dist.get_rank())].tolist()
    draws = table_of(scored).draws[mine].tolist()
    return table_of_engines(sample_store, [scored[row] for row in mine], draws)


def table_of_engines(
    sample_store: SampleStore, scored: Sequence[ScoredRollout], draws: Sequence[int]
) -> SampleTable:
    """The table of what all engines have sampled, of which this rank's engine has `scored`.

    Collective over the world.
    """
    table = sample_store.table(sample_store.add(scored), draws)
    is_home = sample_store.home == dist.get_rank()
    everyone = objects.all_gather((table if is_home else None, sample_store.digest()))
    sample_store.require_agreement([digest for _, digest in everyone])
    found = SampleTable.joined([each for each, _ in everyone if each is not None])
    return found.take(np.argsort(found.draws, kind="stable"))


def train_batch(scored: Sequence[ScoredRollout], cuts: Cuts) -> TrainBatch:
    """`build_train_batch` of samples that are here."""
    return build_train_batch(table_of(scored), tokens_of(scored), cuts)
