"""Exchange of token rows between ranks: each rank gets its rows, each row is sent once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mcore_rl.batching.sample_exchange import Moves, RowExchange, SampleRows, Shares

NUM_RANKS = 12
LENGTHS = np.random.default_rng(5).integers(0, 6, size=40)


def shares(
    rng: np.random.Generator, places: int, ranks: list[int], *, overlap: bool = False
) -> Shares:
    """Assign all samples at random; with `overlap` some places need the same samples."""
    owner = rng.integers(0, places, size=len(LENGTHS))
    samples = []
    for place in range(places):
        wanted = owner == place
        if overlap:
            wanted |= rng.random(len(LENGTHS)) < 0.3
        samples.append(rng.permutation(np.flatnonzero(wanted)))
    size = len(ranks) // places
    return Shares(
        tuple(samples), tuple(tuple(ranks[p * size : (p + 1) * size]) for p in range(places))
    )


# Source and target: the number of places, and their ranks.
SIDES = {
    "one layout to another on the same ranks": ((3, range(12)), (2, range(12))),
    "in one layout": ((4, range(12)), (4, range(12))),
    "to ranks of their own": ((2, range(8)), (4, range(8, 12))),
    "from a single rank": ((1, [3]), (3, range(12))),
}


def exchange_all(exchanges: list[RowExchange]) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the rows that every rank gets, and `[from, to]` the bytes sent between ranks."""
    sent: list[list[np.ndarray]] = []

    def noting(outgoing: list[np.ndarray], incoming: list[int]) -> list[np.ndarray]:
        sent.append(outgoing)
        return [np.zeros(count, dtype=np.uint8) for count in incoming]

    for rank, exchange in enumerate(exchanges):
        exchange.moved(rank, NUM_RANKS, noting)

    def giving(rank: int) -> Callable:
        def give(_: list[np.ndarray], incoming: list[int]) -> list[np.ndarray]:
            came = [sent[other][rank] for other in range(NUM_RANKS)]
            assert [len(each) for each in came] == incoming, "sides plan differently"
            return came

        return give

    found = [each.moved(rank, NUM_RANKS, giving(rank)) for rank, each in enumerate(exchanges)]
    return found, np.array([[len(each) for each in row] for row in sent])


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.int16])
@pytest.mark.parametrize("sides", SIDES)
def test_every_rank_gets_its_rows_and_each_is_sent_once(sides, dtype):
    rng = np.random.default_rng(1)
    (of_source, source_ranks), (of_target, target_ranks) = SIDES[sides]
    source = shares(rng, of_source, list(source_ranks))
    target = shares(rng, of_target, list(target_ranks), overlap=True)
    values = rng.integers(0, 120, size=(LENGTHS.sum(), 3)).astype(dtype)
    everything = SampleRows(np.arange(len(LENGTHS)), LENGTHS, values)
    exchanges = [
        RowExchange(LENGTHS, source, target, everything.of(source.of(rank)))
        for rank in range(NUM_RANKS)
    ]
    found, sent = exchange_all(exchanges)
    width = 3 * np.dtype(dtype).itemsize
    for rank in range(NUM_RANKS):
        wanted, had = target.of(rank), source.of(rank)
        assert np.array_equal(found[rank], everything.of(wanted)) and found[rank].dtype == dtype
        assert sent[:, rank].sum() == LENGTHS[np.setdiff1d(wanted, had)].sum() * width
    assert not sent.diagonal().any()
    for ranks in source.ranks:  # they share the work
        busy = sent[list(ranks)].sum(axis=1)
        assert busy.max() <= 2 * busy.mean() + LENGTHS.max() * width


def test_missing_sample_is_an_error() -> None:
    has = Shares((np.array([0, 1]),), ((0,),))
    wants = Shares((np.array([1, 2]),), ((1,),))
    assert Moves.of(0, 3, has, wants).outgoing[1].tolist() == [1]
    with pytest.raises(AssertionError, match="no rank has"):
        Moves.of(1, 3, has, wants)
    with pytest.raises(AssertionError, match="3 rows of 2 tokens"):
        SampleRows(np.array([0]), np.array([2]), np.zeros((3, 1)))
