"""A step's samples in the layouts of several models, and a number per token of them.

Roles are told of samples by their tokens and nothing else. A number per token goes from the ranks
and order of one layout to those of another; in between each token has its place among all of the
step's: sample by sample, in their order.
Shape legend: n samples and T tokens of the step, t tokens of a rank's samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.dealing import Prompts, plan_step
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.train_batches import build_train_batch, split_mini_batches
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, TrainBatch
from mcore_rl.model.layout import TrainLayout


def samples_to_tensors(scored: Sequence[ScoredRollout]) -> dict[str, torch.Tensor]:
    """`token_ids` `[T]`, all samples one after the other; `prompt` and `response` `[n]`, how many
    of them are which; `valid` `[n]`, 1 for what can be learnt from; all int64."""
    pieces: list[np.ndarray] = [np.empty(0, dtype=np.int64)]
    for sample in scored:
        pieces += [
            np.asarray(sample.rollout.prompt.token_ids),
            np.asarray(sample.rollout.response_token_ids),
        ]
    return {
        "token_ids": torch.from_numpy(np.concatenate(pieces).astype(np.int64)),
        "prompt": torch.tensor(
            [len(s.rollout.prompt.token_ids) for s in scored], dtype=torch.int64
        ),
        "response": torch.tensor(
            [len(s.rollout.response_token_ids) for s in scored], dtype=torch.int64
        ),
        "valid": torch.tensor([s.is_valid for s in scored], dtype=torch.int64),
    }


def tensors_to_samples(tensors: Mapping[str, torch.Tensor]) -> list[ScoredRollout]:
    """The samples again, without texts, log-probs and rewards."""
    token_ids = tensors["token_ids"].numpy()
    scored, end = [], 0
    for prompt, response, valid in zip(
        *(tensors[name].tolist() for name in ("prompt", "response", "valid")), strict=True
    ):
        start, middle, end = end, end + prompt, end + prompt + response
        rollout = Rollout(
            prompt=Prompt(len(scored), "", "", token_ids[start:middle]),
            sample_index=0,
            text="",
            response_token_ids=token_ids[middle:end],
            rollout_log_probs=np.zeros(response, dtype=np.float32),
            finish_reason="",
            weight_version=0,
        )
        failure = None if valid else "as told by the actor"
        scored.append(ScoredRollout(rollout, reward=0.0, failure=failure))
    return scored


def batch_of_rank(
    scored: Sequence[ScoredRollout],
    lengths: np.ndarray,
    *,
    num_mini_batches: int,
    layout: TrainLayout,
    batching: MicroBatching,
    rank: int,
    orders: np.ndarray | None = None,
) -> TrainBatch:
    """What a rank of `layout` gets of a step's samples; `lengths` `[n]` are their tokens.

    `orders` `[e, n]` are those of the epochs (default: one, as they are). With a single mini-batch
    all epochs learn from the same one.
    """
    prompts, dp_rank = Prompts.of(scored), layout.dp_rank(rank)

    def of_epoch(order: np.ndarray | None) -> TrainBatch:
        plan = plan_step(
            lengths,
            num_mini_batches=num_mini_batches,
            dp_size=layout.dp_size,
            batching=batching,
            prompts=prompts,
            order=order,
        )
        return build_train_batch(scored, plan[dp_rank])

    if orders is None:
        return of_epoch(None)
    later = orders[1:] if num_mini_batches > 1 else ()
    return dataclasses.replace(of_epoch(orders[0]), later=tuple(of_epoch(order) for order in later))


def mini_batches(
    batch: TrainBatch,
    num_epochs: int,
    lengths: np.ndarray,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Iterator[TrainBatch]:
    """The mini-batches of a step, one optimizer update each, in order, as this rank has them.

    Where an epoch deals samples out to other ranks, what the stages before have found of them goes
    there first, one number per token after the other: collective over `group`, the data-parallel
    one of the layout that `batch` is of. `lengths` `[n]` are the tokens of all samples.
    """
    later = batch.later
    assert not later or len(later) == num_epochs - 1, f"{len(later)} later of {num_epochs} epochs"
    for field in dataclasses.fields(batch) if later else ():
        value = getattr(batch, field.name)
        if value is None or getattr(later[0], field.name) is not None:
            continue  # not found, or made of the samples themselves
        everywhere = to_all(value, batch, lengths, group, device)
        later = tuple(
            dataclasses.replace(each, **{field.name: of_batch(everywhere, each, lengths)})
            for each in later
        )
    for epoch in (batch, *(later or [batch] * (num_epochs - 1))):
        yield from split_mini_batches(epoch)


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
