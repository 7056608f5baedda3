"""Rollouts to tensors and rows: each token in its place, each sample exactly once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.batching.assignment import Cuts, orders_of_epochs, plan_step
from mcore_rl.batching.rows import (
    MicroBatching,
    chunks_of_sample,
    lay_out,
    positions_on_cp_rank,
    round_up,
    row_length,
)
from mcore_rl.batching.table import SampleTokens
from mcore_rl.batching.train_batches import (
    batch_of_tokens,
    split_micro_batches,
    split_mini_batches,
    take,
)
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, TrainBatch
from tests.held import train_batch


def scored_rollout(prompt_ids: list[int], response_ids: list[int]) -> ScoredRollout:
    prompt = Prompt(index=5, text="", answer="", token_ids=np.array(prompt_ids, dtype=np.int32))
    rollout = Rollout(
        prompt=prompt,
        sample_index=2,
        text="",
        response_token_ids=np.array(response_ids, dtype=np.int32),
        # Each log-prob encodes its token.
        rollout_log_probs=np.array([-float(token) for token in response_ids], dtype=np.float32),
        finish_reason="stop",
        weight_version=0,
    )
    return ScoredRollout(rollout=rollout, reward=1.0)


TOKENS = st.lists(st.integers(1, 50), max_size=9)
SAMPLES = st.lists(st.tuples(TOKENS.filter(bool), TOKENS), min_size=1, max_size=8)


def one_cut(num_samples: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return ((tuple(range(num_samples)),),)


def batch_of(samples: list[tuple[list[int], list[int]]]) -> TrainBatch:
    return train_batch([scored_rollout(*s) for s in samples], one_cut(len(samples)))


@given(samples=SAMPLES)
def test_build_train_batch_aligns_tokens_to_scoring_positions(
    samples: list[tuple[list[int], list[int]]],
) -> None:
    batch = batch_of(samples)
    assert batch.token_ids.dtype == torch.int64 and batch.loss_mask.dtype == torch.bool
    assert batch.rollout_log_probs.dtype == torch.float32
    assert batch.sample_ids.tolist() == list(range(len(samples)))
    end = 0
    for (prompt, response), length in zip(samples, batch.lengths.tolist(), strict=True):
        tokens = prompt + response
        start, end = end, end + length
        assert batch.token_ids[start:end].tolist() == tokens
        for position in range(length):
            is_response = len(prompt) <= position + 1 < len(tokens)
            assert batch.loss_mask[start + position].item() == is_response
            expected = -float(tokens[position + 1]) if is_response else 0.0
            assert batch.rollout_log_probs[start + position].item() == expected
    assert end == batch.num_tokens


def test_sample_tokens_refuse_an_empty_prompt() -> None:
    with pytest.raises(RuntimeError, match="prompt 5, sample 2: the prompt has no token"):
        SampleTokens.of(scored_rollout([], [1]))


def test_sample_tokens_refuse_log_probs_of_another_length() -> None:
    sample = scored_rollout([1, 2], [3, 4, 5])
    sample.rollout.rollout_log_probs.resize(1, refcheck=False)
    with pytest.raises(RuntimeError, match="sample 2: expected 3 rollout_log_probs.* got 1"):
        SampleTokens.of(sample)


BATCHINGS = st.builds(
    MicroBatching,
    max_tokens=st.integers(40, 100),
    count_multiple_of=st.integers(1, 4),
    cp_size=st.sampled_from([1, 2, 4]),
    cost=st.sampled_from([np.asarray, lambda lengths: lengths.astype(float) ** 2]),
)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    num_mini_batches=st.integers(1, 3),
    dp_size=st.integers(1, 5),
    batching=BATCHINGS,
)
def test_packed_plan_assigns_every_sample_once_within_the_budget(
    lengths: list[int], num_mini_batches: int, dp_size: int, batching: MicroBatching
) -> None:
    lengths = lengths * num_mini_batches
    plan = plan_step(lengths, num_mini_batches=num_mini_batches, dp_size=dp_size, batching=batching)
    assert len(plan) == dp_size
    size = len(lengths) // num_mini_batches
    for k in range(num_mini_batches):
        micro_batches = [micro_batch for cuts in plan for micro_batch in cuts[k]]
        assigned = sorted(sample for micro_batch in micro_batches for sample in micro_batch)
        assert assigned == list(range(k * size, (k + 1) * size))
        counts = {len(cuts[k]) for cuts in plan}
        assert len(counts) == 1 and counts.pop() % batching.count_multiple_of == 0
        for micro_batch in micro_batches:
            in_row = [round_up(lengths[s], chunks_of_sample(batching.cp_size)) for s in micro_batch]
            assert sum(in_row) <= batching.max_tokens


@pytest.mark.parametrize("dp_size", [1, 2, 3, 6])
@pytest.mark.parametrize("num_mini_batches", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_padded_plan_assigns_every_sample_once_independently_of_dp(
    dp_size: int, num_mini_batches: int, micro_batch_size: int
) -> None:
    batching = MicroBatching(micro_batch_size=micro_batch_size)
    plan = plan_step(
        [7] * 24, num_mini_batches=num_mini_batches, dp_size=dp_size, batching=batching
    )
    size = 24 // num_mini_batches
    for k in range(num_mini_batches):
        micro_batches = [micro_batch for cuts in plan for micro_batch in cuts[k]]
        assert {len(micro_batch) for micro_batch in micro_batches} == {micro_batch_size}
        assigned = sorted(sample for micro_batch in micro_batches for sample in micro_batch)
        assert assigned == list(range(k * size, (k + 1) * size))


@given(
    informative=st.lists(st.booleans(), min_size=1, max_size=12),
    groups_per_mini_batch=st.integers(1, 3),
    num_mini_batches=st.integers(1, 4),
    samples_per_group=st.integers(1, 4),
    batching=BATCHINGS,
    seed=st.integers(0, 9),
    step=st.integers(0, 9),
)
def test_epochs_order_every_sample_once_and_agree_on_all_ranks(
    informative: list[bool],
    groups_per_mini_batch: int,
    num_mini_batches: int,
    samples_per_group: int,
    batching: MicroBatching,
    seed: int,
    step: int,
) -> None:
    num_groups = groups_per_mini_batch * num_mini_batches
    informative = (informative * num_groups)[:num_groups]
    num_samples = num_groups * samples_per_group
    orders = orders_of_epochs(
        informative,
        group_sizes=np.full(num_groups, samples_per_group),
        num_mini_batches=num_mini_batches,
        num_epochs=3,
        seed=seed,
        step=step,
    )
    lengths = np.arange(num_samples) % 13 + 1
    for order in orders:
        assert sorted(order) == list(range(num_samples))
        of_layouts = []
        for dp_size in (1, 2, 3):
            plan = plan_step(
                lengths,
                num_mini_batches=num_mini_batches,
                dp_size=dp_size,
                batching=batching,
                order=order,
            )
            of_layouts.append(
                [
                    sorted(sample for cuts in plan for micro in cuts[k] for sample in micro)
                    for k in range(num_mini_batches)
                ]
            )
        assert of_layouts[0] == of_layouts[1] == of_layouts[2]
        idle = []
        for samples in of_layouts[0]:
            groups = sorted({sample // samples_per_group for sample in samples})
            assert len(groups) == groups_per_mini_batch, "a group is in two mini-batches"
            idle.append(sum(not informative[group] for group in groups))
        assert max(idle) - min(idle) <= 1, idle
    if num_mini_batches == 1:
        assert (orders == np.arange(num_samples)).all()


def test_orders_differ_between_epochs_and_steps_but_not_after_resume() -> None:
    def orders(**changes: int) -> np.ndarray:
        given = {"num_mini_batches": 4, "num_epochs": 3, "seed": 1, "step": 0, **changes}
        return orders_of_epochs([True] * 16, group_sizes=np.full(16, 2), **given)

    found = [
        order.tolist() for change in ({}, {"step": 1}, {"seed": 2}) for order in orders(**change)
    ]
    assert len({tuple(order) for order in found}) == 9
    mini_batches = {frozenset(order[:8]) for order in found}
    assert len(mini_batches) == 9, "other mini-batches, and not these in another order"
    assert (orders(num_epochs=4, step=1)[:3] == orders(step=1)).all()
    # Literal values: the order of a run must not change between versions.
    expected = [8, 15, 1, 13, 3, 11, 6, 4, 14, 10, 7, 9, 12, 5, 2, 0]
    assert (orders()[0][::2] // 2).tolist() == expected
    # Groups that do not divide into mini-batches are cut. No group is lost.
    sizes = {"odd": np.full(3, 2), "different": np.array([1, 4, 3])}
    odd, different = (
        orders_of_epochs(
            *([True, False, True],),
            group_sizes=each,
            num_mini_batches=2,
            num_epochs=1,
            seed=0,
            step=0,
        )[0].tolist()
        for each in sizes.values()
    )
    assert sorted(odd) == list(range(6))
    groups = [[0], [1, 2, 3, 4], [5, 6, 7]]
    order = [samples[0] // 2 for samples in zip(odd[::2], odd[1::2], strict=True)]
    assert different == [sample for group in order for sample in groups[group]]


def test_plan_refuses_indivisible_numbers_and_samples_over_budget() -> None:
    def plan(num_mini_batches: int, dp_size: int, batching: MicroBatching) -> list[Cuts]:
        return plan_step(
            [9] * 6, num_mini_batches=num_mini_batches, dp_size=dp_size, batching=batching
        )

    with pytest.raises(AssertionError, match="6 samples do not divide into 4 mini-batches"):
        plan(4, 1, MicroBatching())
    with pytest.raises(AssertionError, match="6 samples do not divide into 2 ranks x .* of 2"):
        plan(1, 2, MicroBatching(micro_batch_size=2))
    with pytest.raises(RuntimeError, match="sample 0 has 9 tokens, more than the 8 of --rl-max-"):
        plan(1, 1, MicroBatching(max_tokens=8))
    with pytest.raises(RuntimeError, match="has 9 tokens, padded to 12 for .* than the 11 of --rl"):
        plan(1, 1, MicroBatching(max_tokens=11, cp_size=2))
    assert len(plan(1, 1, MicroBatching(max_tokens=12, cp_size=2))[0][0]) == 6


def gsm8k_like_lengths(num_samples: int) -> np.ndarray:
    """Return lengths of about 100 prompt tokens and 200 answer tokens, log-normal."""
    rng = np.random.default_rng(0)
    prompts = rng.lognormal(4.6, 0.35, num_samples).clip(20, 300)
    answers = rng.lognormal(5.2, 0.5, num_samples).clip(5, 1024)
    return (prompts + answers).astype(np.int64)


@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("dp_size", [1, 8])
def test_packing_pads_less_than_5_percent_and_balances_ranks(
    dp_size: int, same_length: bool
) -> None:
    lengths = gsm8k_like_lengths(1024)
    batching = MicroBatching(
        max_tokens=4096,
        multiple_of=8,
        same_length=same_length,
        cost=lambda x: 7e9 * x + 4096 * 32 * 2.0 * x**2,
    )
    plan = plan_step(lengths, num_mini_batches=1, dp_size=dp_size, batching=batching)
    tokens = [[int(lengths[list(micro)].sum()) for micro in cuts[0]] for cuts in plan]
    rows = 0
    for of_rank in tokens:
        rounded = [-(-count // 8) * 8 for count in of_rank]
        rows += max(rounded) * len(rounded) if same_length else sum(rounded)
    padding = 1 - lengths.sum() / rows
    assert 0 <= padding < 0.05
    # Without packing two thirds would be padding.
    assert 1 - lengths.mean() / lengths.max() > 0.6
    costs = [
        sum(float(batching.cost(lengths[list(micro)]).sum()) for micro in cuts[0]) for cuts in plan
    ]
    assert max(costs) / min(costs) < 1.001


@given(samples=SAMPLES, data=st.data(), multiple_of=st.integers(1, 8), packed=st.booleans())
def test_lay_out_places_every_token_with_its_position(
    samples: list[tuple[list[int], list[int]]], data: st.DataObject, multiple_of: int, packed: bool
) -> None:
    batch = batch_of(samples)
    batching = MicroBatching(max_tokens=1000 if packed else 0, multiple_of=multiple_of)
    needed = batch.num_tokens if packed else int(batch.lengths.max())
    least = -(-needed // multiple_of) * multiple_of
    more = data.draw(st.sampled_from([0, multiple_of, 5 * multiple_of]))
    rows = lay_out(batch, batching, least + more if more else None)
    assert rows.token_ids.shape == (1 if packed else len(samples), least + more)
    assert (rows.token_ids.flatten()[rows.places] == batch.token_ids).all()
    assert int((rows.token_ids != 0).sum()) <= batch.num_tokens
    positions = rows.position_ids.flatten()[rows.places]
    expected = [i for length in batch.lengths.tolist() for i in range(length)]
    assert positions.tolist() == expected
    assert rows.position_ids.min() >= 0
    # The target of every position that scores a token is that token.
    targets = rows.target_ids.flatten()[rows.places]
    following = torch.tensor([*batch.token_ids.tolist()[1:], 0])
    assert (targets[batch.loss_mask] == following[batch.loss_mask]).all()
    if packed:
        assert rows.cu_seqlens is not None and rows.cu_seqlens.dtype == torch.int32
        bounds = rows.cu_seqlens.tolist()
        assert bounds[0] == 0 and bounds[-1] == least + more
        assert np.diff(bounds[: len(samples) + 1]).tolist() == batch.lengths.tolist()
        assert rows.longest == max(np.diff(bounds))
    else:
        assert rows.cu_seqlens is None


def on_cp_rank(whole: list[int], bounds: list[int], cp_size: int, cp_rank: int) -> list[int]:
    """Return the two chunks of each sample that a context-parallel rank takes, one by one."""
    taken = []
    for start, end in itertools.pairwise(bounds):
        sample = whole[start:end]
        size, rest = divmod(len(sample), 2 * cp_size)
        assert rest == 0
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            taken += sample[chunk * size : (chunk + 1) * size]
    return taken


@given(chunks=st.lists(st.integers(1, 5), min_size=1, max_size=6), cp_size=st.integers(2, 5))
def test_positions_on_cp_ranks_are_two_chunks_of_every_sample(
    chunks: list[int], cp_size: int
) -> None:
    bounds = [0, *itertools.accumulate(2 * cp_size * size for size in chunks)]
    share = bounds[-1] // cp_size
    for dtype in (torch.int32, torch.int64):
        found = [
            positions_on_cp_rank(
                torch.tensor(bounds, dtype=dtype), share, cp_size=cp_size, cp_rank=rank
            )
            for rank in range(cp_size)
        ]
        for rank, positions in enumerate(found):
            assert positions.dtype == torch.int64
            whole = list(range(bounds[-1]))
            assert positions.tolist() == on_cp_rank(whole, bounds, cp_size, rank)
        assert torch.cat(found).sort().values.tolist() == whole


def test_positions_without_context_parallelism_are_the_whole_row() -> None:
    positions = positions_on_cp_rank(torch.tensor([0, 3, 4, 11]), 11, cp_size=1, cp_rank=0)
    assert positions.tolist() == list(range(11))


@given(
    samples=SAMPLES,
    data=st.data(),
    tp_size=st.integers(1, 3),
    cp_size=st.integers(2, 4),
    packed=st.booleans(),
)
def test_rows_of_cp_ranks_are_the_whole_rows(
    samples: list[tuple[list[int], list[int]]],
    data: st.DataObject,
    tp_size: int,
    cp_size: int,
    packed: bool,
) -> None:
    batch = batch_of(samples)
    chunks = 2 * cp_size
    batching = MicroBatching(
        max_tokens=1000 if packed else 0, multiple_of=tp_size * cp_size, cp_size=cp_size
    )
    in_row = [-(-length // chunks) * chunks for length in batch.lengths.tolist()]
    multiple = math.lcm(tp_size * cp_size, chunks)
    least = -(-(sum(in_row) if packed else max(in_row)) // multiple) * multiple
    more = data.draw(st.sampled_from([0, multiple, 5 * multiple]))
    length = least + more
    # Sequence-parallel ranks divide the row evenly.
    assert length % (tp_size * cp_size) == 0
    of_ranks = [lay_out(batch, batching, length if more else None, r) for r in range(cp_size)]

    # The whole rows, by hand: padding of samples belongs to them, padding of the row does not.
    rows, positions, bounds = [], [], [0, length]
    if packed:
        bounds = sorted({0, *itertools.accumulate(in_row), length})
        rows.append([])
        for (prompt, response), count in zip(samples, in_row, strict=True):
            rows[0] += [*prompt, *response, *[0] * (count - len(prompt) - len(response))]
        rows[0] += [0] * (length - len(rows[0]))
        positions = [p for start, end in itertools.pairwise(bounds) for p in range(end - start)]
    else:
        for prompt, response in samples:
            rows.append([*prompt, *response, *[0] * (length - len(prompt) - len(response))])
        positions = list(range(length))
    targets = [[*row[1:], row[0]] for row in rows]

    for rank, found in enumerate(of_ranks):
        assert found.token_ids.shape == (len(rows), length // cp_size)
        for whole, part in ((rows, found.token_ids), (targets, found.target_ids)):
            expected = [on_cp_rank(row, bounds, cp_size, rank) for row in whole]
            assert part.tolist() == expected
        expected_positions = on_cp_rank(positions, bounds, cp_size, rank)
        assert found.position_ids.tolist() == [expected_positions] * len(rows)
        assert torch.equal(found.places, of_ranks[0].places)
        assert (found.cu_seqlens is not None) == packed
        if found.cu_seqlens is not None:
            assert found.cu_seqlens.tolist() == bounds
        assert found.longest == max(np.diff(bounds))
    # Outputs gathered over ranks: of tokens, and of the targets that they score.
    gathered = torch.cat([found.token_ids for found in of_ranks]).flatten()
    assert torch.equal(gathered[found.places], batch.token_ids)
    scored = torch.cat([found.target_ids for found in of_ranks]).flatten()[found.places]
    following = torch.tensor([*batch.token_ids.tolist()[1:], 0])
    assert torch.equal(scored[batch.loss_mask], following[batch.loss_mask])
    # Outputs are computed for exactly these.
    marks = [
        torch.zeros(found.token_ids.numel(), dtype=torch.bool)
        .index_fill(0, found.scored, True)
        .view(found.token_ids.T.shape)
        .T.flatten()
        for found in of_ranks
    ]
    assert torch.equal(torch.cat(marks)[of_ranks[0].places], batch.loss_mask)
    assert sum(len(found.scored) for found in of_ranks) == int(batch.loss_mask.sum())


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_context_parallelism_pads_packed_rows_by_less_than_5_percent(cp_size: int) -> None:
    """All padding together, with sequence parallelism over 8 ranks."""
    lengths = gsm8k_like_lengths(1024)
    batching = MicroBatching(max_tokens=4096, multiple_of=8 * cp_size, cp_size=cp_size)
    plan = plan_step(lengths, num_mini_batches=1, dp_size=8, batching=batching)
    positions = 0
    for cuts in plan:
        batch = take(batch_of_tokens([[1] * length for length in lengths]), cuts)
        for micro_batch in split_micro_batches(batch):
            row = lay_out(micro_batch, batching, None)
            own = row.token_ids.shape[1] * cp_size
            assert own <= 4096
            # Less padding per sample than its chunks, and per row than its multiple.
            limit = micro_batch.num_samples * (2 * cp_size - 1) + batching.row_multiple - 1
            assert own - micro_batch.num_tokens <= limit
            positions += own
    assert 0 <= 1 - lengths.sum() / positions < 0.05


def test_an_empty_micro_batch_is_a_row_of_padding() -> None:
    batching = MicroBatching(max_tokens=16, multiple_of=4)
    empty = take(batch_of([([1], [2])]), (((),),))
    rows = lay_out(empty, batching, None)
    assert rows.token_ids.tolist() == [[0] * 4] and len(rows.places) == 0
    assert rows.cu_seqlens is not None and rows.cu_seqlens.tolist() == [0, 4]
    rows = lay_out(empty, MicroBatching(max_tokens=16, multiple_of=6, cp_size=2), None, 1)
    assert rows.token_ids.tolist() == [[0] * 6] and len(rows.places) == 0
    assert rows.cu_seqlens is not None and rows.cu_seqlens.tolist() == [0, 12]


@given(samples=SAMPLES.filter(lambda s: len(s) > 1), data=st.data())
def test_take_and_splits_equal_building_from_the_same_samples(
    samples: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(samples))))
    first, second = tuple(order[:1]), tuple(order[1:])
    cuts = ((first, ()), (second,))
    scored = [scored_rollout(*sample) for sample in samples]
    taken, built = take(batch_of(samples), cuts), train_batch(scored, cuts)
    assert taken.cuts == built.cuts == ((1, 0), (len(second),))
    for name in ("token_ids", "lengths", "sample_ids", "loss_mask", "rollout_log_probs"):
        assert torch.equal(getattr(taken, name), getattr(built, name)), name
    mini_batches = split_mini_batches(built)
    assert [m.sample_ids.tolist() for m in mini_batches] == [list(first), list(second)]
    assert [m.cuts for m in mini_batches] == [((1, 0),), ((len(second),),)]
    micro_batches = split_micro_batches(built)
    assert [m.num_samples for m in micro_batches] == [1, 0, len(second)]
    assert torch.equal(torch.cat([m.token_ids for m in micro_batches]), built.token_ids)
    base = built.token_ids.untyped_storage().data_ptr()
    assert all(m.token_ids.untyped_storage().data_ptr() == base for m in micro_batches)


def test_rows_have_one_length_with_a_pipeline() -> None:
    micro_batches = split_micro_batches(batch_of_tokens([[1, 2, 3], [4] * 9, [5]]))
    assert row_length(micro_batches, MicroBatching(multiple_of=4)) is None
    assert row_length(micro_batches, MicroBatching(multiple_of=4, same_length=True)) == 12
    packed = MicroBatching(max_tokens=16, multiple_of=4, same_length=True)
    assert row_length(micro_batches, packed) == 12
    in_chunks = MicroBatching(multiple_of=4, same_length=True, cp_size=4)
    assert row_length(micro_batches, in_chunks) == 16


def test_batch_of_tokens_repeats_the_last_sequence() -> None:
    batch = batch_of_tokens([[1, 2], [3, 4, 5]], count_multiple_of=4)
    assert batch.token_ids.tolist() == [1, 2, *[3, 4, 5] * 3]
    assert batch.lengths.tolist() == [2, 3, 3, 3] and batch.cuts == ((1, 1, 1, 1),)
