"""From scored rollouts to the tensors that a model eats, and their split into ranks and batches.

Samples are right-padded here, one a row. Packing several into one row is another way to build a
`TrainBatch` from the same arguments; nothing downstream of `build_train_batch` assumes padding
beyond what `TrainBatch` says.

The order of cutting matters. `shard_for_data_parallel` deals samples out like cards (rank d takes
every dp_size-th), and the splits cut consecutive slices. Mini-batch k of all ranks together is
therefore the same set of samples for every dp_size, as is what an update learns from.

Shape legend: b samples, s positions, r response tokens.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar, overload

import numpy as np
import torch

from mcore_rl.types import ScoredRollout, TrainBatch

T = TypeVar("T")


def build_train_batch(
    scored: Sequence[ScoredRollout],
    advantages: Sequence[float] | np.ndarray,
    *,
    pad_token_id: int,
    multiple_of: int,
) -> TrainBatch:
    """Samples in the given order as one `TrainBatch` on the CPU, without old and ref log-probs.

    `advantages` `[n]` belongs to `scored` one to one. s is the length of the longest prompt plus
    response, rounded up to `multiple_of`: sequence parallelism needs a multiple of tp_size, context
    parallelism one of 2 * cp_size. Because of the causal mask padding on the right changes no
    earlier position, and all of it is masked.

    A response of r tokens after a prompt of p is scored by positions p-1 .. p+r-2. An empty
    response contributes no loss token.

    RuntimeError: a prompt is empty (its first response token would have nothing to be scored by),
    or a response and its log-probs differ in length.
    """
    assert len(scored) == len(advantages) > 0, (
        f"{len(scored)} samples need as many advantages, got {len(advantages)}"
    )
    assert multiple_of >= 1, f"multiple_of must be positive, got {multiple_of}"
    num_positions = _round_up(max(_num_tokens(sample) for sample in scored), multiple_of)
    shape = (len(scored), num_positions)
    token_ids = np.full(shape, pad_token_id, dtype=np.int64)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    rollout_log_probs = np.zeros(shape, dtype=np.float32)
    for row, sample in enumerate(scored):
        rollout = sample.rollout
        prompt_tokens = len(rollout.prompt.token_ids)
        end = _num_tokens(sample)
        scoring = slice(prompt_tokens - 1, end - 1)
        token_ids[row, :prompt_tokens] = rollout.prompt.token_ids
        token_ids[row, prompt_tokens:end] = rollout.response_token_ids
        loss_mask[row, scoring] = True
        rollout_log_probs[row, scoring] = rollout.rollout_log_probs
    return TrainBatch(
        token_ids=torch.from_numpy(token_ids),
        loss_mask=torch.from_numpy(loss_mask),
        rollout_log_probs=torch.from_numpy(rollout_log_probs),
        advantages=torch.from_numpy(np.array(advantages, dtype=np.float32)),
    )


def split_mini_batches(batch: TrainBatch, num_mini_batches: int) -> list[TrainBatch]:
    """This rank's samples as `num_mini_batches` consecutive equal parts, one per optimizer step."""
    assert num_mini_batches >= 1 and batch.num_samples % num_mini_batches == 0, (
        f"{batch.num_samples} samples do not divide into {num_mini_batches} mini-batches"
    )
    return split_micro_batches(batch, batch.num_samples // num_mini_batches)


def split_micro_batches(batch: TrainBatch, micro_batch_size: int) -> list[TrainBatch]:
    """Consecutive slices of `micro_batch_size` samples; the tensors are views of the batch's."""
    assert micro_batch_size >= 1 and batch.num_samples % micro_batch_size == 0, (
        f"{batch.num_samples} samples do not divide into micro-batches of {micro_batch_size}"
    )
    starts = range(0, batch.num_samples, micro_batch_size)
    return [_select(batch, slice(start, start + micro_batch_size)) for start in starts]


@overload
def shard_for_data_parallel(items: TrainBatch, dp_rank: int, dp_size: int) -> TrainBatch: ...


@overload
def shard_for_data_parallel(items: Sequence[T], dp_rank: int, dp_size: int) -> list[T]: ...


def shard_for_data_parallel(
    items: TrainBatch | Sequence[T], dp_rank: int, dp_size: int
) -> TrainBatch | list[T]:
    """The samples of one data-parallel rank: numbers dp_rank, dp_rank + dp_size, and so on.

    `items` are the samples of the global batch in an order all ranks agree on, as a batch or as a
    list of anything (of whole prompt groups, to keep a group on one rank). Their number must divide
    by dp_size: ranks with different numbers of micro-batches would wait for each other forever.
    """
    num_items = items.num_samples if isinstance(items, TrainBatch) else len(items)
    assert 0 <= dp_rank < dp_size, f"dp_rank {dp_rank} is outside dp_size {dp_size}"
    assert num_items % dp_size == 0, f"{num_items} samples do not divide by dp_size {dp_size}"
    mine = slice(dp_rank, None, dp_size)
    return _select(items, mine) if isinstance(items, TrainBatch) else list(items[mine])


def _num_tokens(sample: ScoredRollout) -> int:
    """Prompt and response tokens of a sample whose parts fit together."""
    rollout = sample.rollout
    num_prompt, num_response = len(rollout.prompt.token_ids), len(rollout.response_token_ids)
    name = f"prompt {rollout.prompt.index}, sample {rollout.sample_index}"
    if num_prompt == 0:
        raise RuntimeError(f"{name}: the prompt has no token")
    if len(rollout.rollout_log_probs) != num_response:
        raise RuntimeError(
            f"{name}: expected {num_response} rollout_log_probs, one per response token, "
            f"got {len(rollout.rollout_log_probs)}"
        )
    return num_prompt + num_response


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def _select(batch: TrainBatch, samples: slice) -> TrainBatch:
    selected: dict[str, Any] = {}
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        selected[field.name] = None if tensor is None else tensor[samples]
    return TrainBatch(**selected)
