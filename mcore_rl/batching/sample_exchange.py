"""Placement of a step's samples, and their moves between ranks; each sample moves once.

Engines, the actor and a critic each divide the same samples in their own way. Such a side consists
of places; a place is a set of TP, CP and PP ranks with the same samples. Both divisions determine
which rank sends which samples to which rank, so sender and receiver do not negotiate, and a rank
never receives samples other than its own.

Shape legend: n samples of the step; t tokens of a place's samples, one sample after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Exchange of bytes: (bytes for each rank, number of bytes from each) -> bytes from each rank.
# Collective over all ranks.
Exchange = Callable[[Sequence[np.ndarray], Sequence[int]], Sequence[np.ndarray]]

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Shares:
    """Samples that each place has or needs, and the ranks of each place.

    Example: `Shares((array([0, 2]), array([1])), ((0, 1), (2, 3)))`: ranks 0 and 1 have samples 0
    and 2.
    """

    samples: tuple[np.ndarray, ...]  # int64, per place, in its order, each sample once
    ranks: tuple[tuple[int, ...], ...]  # per place; a rank belongs to at most one place

    def place(self, rank: int) -> int | None:
        """Return the place of a rank; None if the rank does not belong to this side."""
        return next((at for at, ranks in enumerate(self.ranks) if rank in ranks), None)

    def of(self, rank: int) -> np.ndarray:
        """Return the samples of a rank."""
        at = self.place(rank)
        return _NOTHING if at is None else self.samples[at]

    def counted_from(self, first: int) -> Shares:
        """Return the same shares with ranks that count from `first`."""
        ranks = tuple(tuple(first + rank for rank in place) for place in self.ranks)
        return Shares(self.samples, ranks)


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a step's samples among the ranks of a side, in all epochs.

    Example: with lengths [7, 5], `first` may be ([0], [1]) and `every` ([0, 1], [1, 0]) on two
    places.
    """

    lengths: np.ndarray  # [n] int64, tokens
    first: Shares  # in the first epoch, in the order of a rank's batch
    every: Shares  # in any epoch: the samples of the first, then those that later epochs add


@dataclass(frozen=True, slots=True)
class Moves:
    """A rank's part in a move: samples by destination and by source.

    They are in the order of the receiving place. Ranks without samples are omitted.

    Example: rank 0 has samples 0 and 1, rank 1 needs 1: on rank 0 `Moves({1: array([1])}, {0:
    array([0])})`.
    """

    outgoing: dict[int, np.ndarray]
    incoming: dict[int, np.ndarray]

    @classmethod
    def of(cls, rank: int, num_samples: int, source: Shares, target: Shares) -> Moves:
        """Return the moves of `rank` that give every rank of `target` the samples of its place.

        A sample comes from one of the ranks in `source` that have it: from the receiver itself if
        possible, else the ranks take turns. AssertionError if no rank has it."""
        owner = np.full(num_samples, -1)
        for place, samples in enumerate(source.samples):
            owner[samples] = place
        outgoing, incoming = {}, {}
        mine = source.place(rank)
        if mine is not None:
            for place, samples in enumerate(target.samples):
                wanted = samples[owner[samples] == mine]
                if not len(wanted):
                    continue
                for receiver in target.ranks[place]:
                    if _sender(source, mine, target, place, receiver) == rank:
                        outgoing[receiver] = wanted
        here = target.place(rank)
        if here is not None:
            samples = target.samples[here]
            assert (owner[samples] >= 0).all(), "no rank has some of the samples that are needed"
            for other in np.unique(owner[samples]).tolist():
                sender = _sender(source, other, target, here, rank)
                incoming[sender] = samples[owner[samples] == other]
        return cls(outgoing, incoming)


def _sender(source: Shares, source_place: int, target: Shares, place: int, receiver: int) -> int:
    """Return the rank of `source_place` that sends to a rank of the target's `place`."""
    ranks = source.ranks[source_place]
    if receiver in ranks:
        return receiver
    return ranks[(place + target.ranks[place].index(receiver)) % len(ranks)]


@dataclass(frozen=True, slots=True)
class RowExchange:
    """Rows, one per token, to be moved from the ranks of `source` to the ranks of `target`.

    All ranks of both sides have the same values, except `rows`: this rank's part of `source`,
    sample after sample in its order, and empty on ranks outside the source. Once delivered, they
    are this rank's part of `target`.

    Example: the critic's values: `RowExchange(lengths, critic_shares, actor_shares, rows)`, `rows`
    `[t]` float32.
    """

    lengths: np.ndarray  # [n] int64, tokens of each sample
    source: Shares
    target: Shares
    rows: np.ndarray  # [t, ...]

    def moved(self, rank: int, num_ranks: int, exchange: Exchange) -> np.ndarray:
        """Return `[t, ...]`: this rank's rows of `target`, sample after sample in its order.

        Collective over the `num_ranks` ranks of both sides.
        """
        moves = Moves.of(rank, len(self.lengths), self.source, self.target)
        here = SampleRows(self.source.of(rank), self.lengths, self.rows)
        item_bytes = self.rows.dtype.itemsize * int(np.prod(self.rows.shape[1:], dtype=np.int64))
        outgoing = [np.empty(0, dtype=np.uint8)] * num_ranks
        incoming = [0] * num_ranks
        for other, samples in moves.outgoing.items():
            if other != rank:
                outgoing[other] = here.of(samples).view(np.uint8).ravel()
        for other, samples in moves.incoming.items():
            if other != rank:
                incoming[other] = int(self.lengths[samples].sum()) * item_bytes
        received = exchange(outgoing, incoming)
        wanted = self.target.of(rank)
        shape = (int(self.lengths[wanted].sum()), *self.rows.shape[1:])
        result = SampleRows(wanted, self.lengths, np.empty(shape, dtype=self.rows.dtype))
        for other, samples in moves.incoming.items():
            if other == rank:
                result.put(samples, here.of(samples))
            else:
                rows = received[other].view(self.rows.dtype)
                result.put(samples, rows.reshape(int(self.lengths[samples].sum()), *shape[1:]))
        return result.rows


class SampleRows:
    """Rows of samples' tokens, one sample after the other, accessed by sample number."""

    def __init__(self, samples: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
        """Index `rows`, which contain `samples`; `lengths` `[n]` covers all samples of the step."""
        ends = lengths[samples].cumsum()
        assert len(rows) == (ends[-1] if len(ends) else 0), (
            f"{len(rows)} rows of {ends[-1:].sum()} tokens"
        )
        self.rows = rows
        starts = (ends - lengths[samples]).tolist()
        self._at = dict(zip(samples.tolist(), zip(starts, ends.tolist(), strict=True), strict=True))

    def __getitem__(self, sample: int) -> np.ndarray:
        """Return the rows `[s, ...]` of one sample of s tokens, as a view."""
        start, end = self._at[sample]
        return self.rows[start:end]

    def of(self, samples: np.ndarray) -> np.ndarray:
        """Return the rows of `samples`, in this order."""
        return np.concatenate([self.rows[:0], *(self[sample] for sample in samples.tolist())])

    def put(self, samples: np.ndarray, rows: np.ndarray) -> None:
        """Replace the rows of `samples` by `rows`, in this order."""
        end = 0
        for sample in samples.tolist():
            start, stop = self._at[sample]
            begin, end = end, end + stop - start
            self.rows[start:stop] = rows[begin:end]
