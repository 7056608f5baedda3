"""A number per token of a step, from the ranks and order of one layout to those of another.

In between each token has its place among all of the step's: sample by sample, in their order.
Shape legend: n samples and T tokens of the step, t tokens of a rank's samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.dealing import Prompts, plan_step
from mcore_rl.batching.micro_batching import MicroBatching
from mcore_rl.batching.train_batches import build_train_batch
from mcore_rl.hybrid_engine.layout import TrainLayout
from mcore_rl.types import ScoredRollout, TrainBatch


def batch_of_rank(
    scored: Sequence[ScoredRollout],
    lengths: np.ndarray,
    *,
    num_mini_batches: int,
    layout: TrainLayout,
    batching: MicroBatching,
    rank: int,
) -> TrainBatch:
    """What a rank of `layout` gets of a step's samples; `lengths` `[n]` are their tokens."""
    plan = plan_step(
        lengths,
        num_mini_batches=num_mini_batches,
        dp_size=layout.dp_size,
        batching=batching,
        prompts=Prompts.of(scored),
    )
    return build_train_batch(scored, plan[layout.dp_rank(rank)])


def to_all(
    values: torch.Tensor,
    batch: TrainBatch,
    lengths: np.ndarray,
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """`[t]` of the samples in `batch` -> `[T]` of all samples, on the CPU of every rank.

    Collective over `group`, the data-parallel one of the layout that `batch` is of.
    """
    everywhere = torch.zeros(int(lengths.sum()), device=device)
    everywhere[_places(batch, lengths)] = values.to(device)
    dist.all_reduce(everywhere, group=group)
    return everywhere.cpu()


def of_batch(everywhere: torch.Tensor, batch: TrainBatch, lengths: np.ndarray) -> torch.Tensor:
    """`[T]` of all samples -> `[t]` of those in `batch`."""
    return everywhere[_places(batch, lengths)]


def _places(batch: TrainBatch, lengths: np.ndarray) -> torch.Tensor:
    """`[t]`: where a batch's tokens are among all of the step's."""
    starts = torch.from_numpy(lengths.cumsum() - lengths)
    own = batch.lengths.cumsum(0) - batch.lengths
    shift = starts[batch.sample_ids] - own
    return torch.arange(batch.num_tokens) + shift.repeat_interleave(batch.lengths)
