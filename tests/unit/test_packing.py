"""Rollouts to padded tensors, and the splits: each token in its place, each sample exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.packing import (
    build_train_batch,
    shard_for_data_parallel,
    split_micro_batches,
    split_mini_batches,
)
from mcore_rl.types import Prompt, Rollout, ScoredRollout, TrainBatch

PAD = 99


def scored_rollout(prompt_ids: list[int], response_ids: list[int]) -> ScoredRollout:
    prompt = Prompt(index=5, text="", answer="", token_ids=np.array(prompt_ids, dtype=np.int32))
    rollout = Rollout(
        prompt=prompt,
        sample_index=2,
        text="",
        response_token_ids=np.array(response_ids, dtype=np.int32),
        # A log-prob that tells which token it belongs to.
        rollout_log_probs=np.array([-float(token) for token in response_ids], dtype=np.float32),
        finish_reason="stop",
        weight_version=0,
    )
    return ScoredRollout(rollout=rollout, reward=1.0)


def numbered_batch(num_samples: int) -> TrainBatch:
    """A batch in which every value of sample i is i."""
    ids = torch.arange(num_samples)[:, None].expand(-1, 4)
    return TrainBatch(
        token_ids=ids.clone(),
        loss_mask=torch.ones(num_samples, 4, dtype=torch.bool),
        rollout_log_probs=ids.float(),
        advantages=torch.arange(num_samples).float(),
        old_log_probs=ids.float(),
    )


def sample_numbers(batch: TrainBatch) -> list[int]:
    """Which samples a batch holds, once all of its fields have been found to agree on that."""
    numbers = batch.advantages.long()
    assert (batch.token_ids == numbers[:, None]).all()
    assert (batch.rollout_log_probs == numbers[:, None]).all()
    assert batch.old_log_probs is not None and (batch.old_log_probs == numbers[:, None]).all()
    assert batch.loss_mask.shape == (len(numbers), 4)
    assert batch.ref_log_probs is None
    return numbers.tolist()


TOKENS = st.lists(st.integers(1, 50), max_size=9)


@given(
    samples=st.lists(st.tuples(TOKENS.filter(bool), TOKENS), min_size=1, max_size=6),
    multiple_of=st.integers(1, 8),
)
def test_build_train_batch_puts_every_token_where_it_is_scored(
    samples: list[tuple[list[int], list[int]]], multiple_of: int
) -> None:
    advantages = [0.5 * row for row in range(len(samples))]
    batch = build_train_batch(
        [scored_rollout(*sample) for sample in samples],
        advantages,
        pad_token_id=PAD,
        multiple_of=multiple_of,
    )
    longest = max(len(prompt) + len(response) for prompt, response in samples)
    num_positions = batch.token_ids.shape[1]
    assert num_positions % multiple_of == 0 and longest <= num_positions < longest + multiple_of
    assert batch.token_ids.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
    assert batch.rollout_log_probs.dtype == batch.advantages.dtype == torch.float32
    assert batch.advantages.tolist() == advantages
    for row, (prompt, response) in enumerate(samples):
        tokens = prompt + response + [PAD] * (num_positions - len(prompt) - len(response))
        assert batch.token_ids[row].tolist() == tokens
        for t in range(num_positions):
            is_response = len(prompt) <= t + 1 < len(prompt) + len(response)
            assert batch.loss_mask[row, t].item() == is_response
            expected = -float(tokens[t + 1]) if is_response else 0.0
            assert batch.rollout_log_probs[row, t].item() == expected


def test_build_train_batch_copies_advantages() -> None:
    advantages = np.ones(1, dtype=np.float32)
    batch = build_train_batch(
        [scored_rollout([1], [2])], advantages, pad_token_id=PAD, multiple_of=1
    )
    advantages[0] = 7.0
    assert batch.advantages.tolist() == [1.0]


def test_build_train_batch_names_the_sample_without_prompt() -> None:
    with pytest.raises(RuntimeError, match="prompt 5, sample 2: the prompt has no token"):
        build_train_batch([scored_rollout([], [1])], [0.0], pad_token_id=PAD, multiple_of=1)


def test_build_train_batch_names_the_sample_whose_log_probs_do_not_fit() -> None:
    sample = scored_rollout([1, 2], [3, 4, 5])
    sample.rollout.rollout_log_probs.resize(1, refcheck=False)
    with pytest.raises(RuntimeError, match="sample 2: expected 3 rollout_log_probs.* got 1"):
        build_train_batch([sample], [0.0], pad_token_id=PAD, multiple_of=1)


def test_build_train_batch_refuses_other_number_of_advantages() -> None:
    with pytest.raises(AssertionError, match="1 samples need as many advantages, got 2"):
        build_train_batch([scored_rollout([1], [2])], [0.0, 1.0], pad_token_id=PAD, multiple_of=1)


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("num_mini_batches", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3])
def test_splits_cover_every_sample_once_and_mini_batches_do_not_depend_on_dp(
    dp_size: int, num_mini_batches: int, micro_batch_size: int
) -> None:
    num_samples = 2 * 12 * micro_batch_size
    batch = numbered_batch(num_samples)
    in_mini_batch: list[list[int]] = [[] for _ in range(num_mini_batches)]
    for dp_rank in range(dp_size):
        shard = shard_for_data_parallel(batch, dp_rank, dp_size)
        as_list = shard_for_data_parallel(list(range(num_samples)), dp_rank, dp_size)
        assert sample_numbers(shard) == as_list
        for seen, mini_batch in zip(
            in_mini_batch, split_mini_batches(shard, num_mini_batches), strict=True
        ):
            for micro_batch in split_micro_batches(mini_batch, micro_batch_size):
                assert micro_batch.num_samples == micro_batch_size
                seen += sample_numbers(micro_batch)
    size = num_samples // num_mini_batches
    expected = [list(range(k * size, (k + 1) * size)) for k in range(num_mini_batches)]
    assert [sorted(seen) for seen in in_mini_batch] == expected


def test_split_micro_batches_copies_nothing() -> None:
    batch = numbered_batch(4)
    second = split_micro_batches(batch, 2)[1]
    assert second.token_ids.untyped_storage().data_ptr() == (
        batch.token_ids.untyped_storage().data_ptr()
    )


def test_splits_refuse_sizes_that_do_not_divide() -> None:
    batch = numbered_batch(6)
    with pytest.raises(AssertionError, match="6 samples do not divide into micro-batches of 4"):
        split_micro_batches(batch, 4)
    with pytest.raises(AssertionError, match="6 samples do not divide into 4 mini-batches"):
        split_mini_batches(batch, 4)
    with pytest.raises(AssertionError, match="6 samples do not divide by dp_size 4"):
        shard_for_data_parallel(batch, 0, 4)
    with pytest.raises(AssertionError, match="dp_rank 2 is outside dp_size 2"):
        shard_for_data_parallel(batch, 2, 2)
