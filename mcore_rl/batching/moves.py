"""What of a step's samples lies where, and what moves to where it is wanted: rank to rank, once.

Two sides may divide the same samples in their own ways: engines, the actor, a critic. Each side
consists of places, and a place of ranks that all have the same: those of TP, CP and PP. Which rank
sends what to which follows from both divisions alone, so that sender and receiver need not ask
each other, and no rank ever has more than its own samples.

Shape legend: n samples of the step; t tokens of a place's samples, one sample after the other.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Bytes between ranks: (for each rank, how many will come from each) -> what came from each.
# Collective over all of them.
Exchange = Callable[[Sequence[np.ndarray], Sequence[int]], Sequence[np.ndarray]]

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Shares:
    """Which samples each place has, or wants, and which ranks a place is."""

    samples: tuple[np.ndarray, ...]  # int64, of each place, in its order, each once
    ranks: tuple[tuple[int, ...], ...]  # of each place; a rank is of one place at most

    def place(self, rank: int) -> int | None:
        """Which place a rank is of; None: another side's."""
        return next((at for at, ranks in enumerate(self.ranks) if rank in ranks), None)

    def of(self, rank: int) -> np.ndarray:
        """The samples of a rank."""
        at = self.place(rank)
        return _NOTHING if at is None else self.samples[at]

    def counted_from(self, first: int) -> Shares:
        """The same where rank 0 is called `first`."""
        ranks = tuple(tuple(first + rank for rank in place) for place in self.ranks)
        return Shares(self.samples, ranks)


@dataclass(frozen=True, slots=True)
class Division:
    """How a side divides a step's samples among its ranks, in all epochs."""

    lengths: np.ndarray  # [n] int64, tokens
    first: Shares  # of the first epoch, in the order of a rank's batch
    every: Shares  # of any epoch: those of the first, and behind them what later ones bring


@dataclass(frozen=True, slots=True)
class Moves:
    """A rank's part in a move: which samples go to which rank, and which come from which, in the
    order of the place that wants them. Ranks without any are left out."""

    outgoing: dict[int, np.ndarray]
    incoming: dict[int, np.ndarray]

    @classmethod
    def of(cls, rank: int, num_samples: int, source: Shares, target: Shares) -> Moves:
        """Every rank of `target` gets what its place wants, each sample from one rank of those in
        `source` that have it: itself if it is one, else they take turns. What nobody has does not
        come: an assertion."""
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
            assert (owner[samples] >= 0).all(), "samples are wanted that nobody has"
            for other in np.unique(owner[samples]).tolist():
                sender = _sender(source, other, target, here, rank)
                incoming[sender] = samples[owner[samples] == other]
        return cls(outgoing, incoming)


def _sender(source: Shares, of: int, target: Shares, place: int, receiver: int) -> int:
    """Which rank of the source's place `of` sends to a rank of the target's `place`."""
    ranks = source.ranks[of]
    if receiver in ranks:
        return receiver
    return ranks[(place + target.ranks[place].index(receiver)) % len(ranks)]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One row for every token, on its way from those who have it to those who want it.

    The same on all ranks of both sides, but for `rows`: what this rank has of `source`, sample
    after sample in its order, and no row on a rank that is not of the source.
    """

    lengths: np.ndarray  # [n] int64, tokens of each sample
    source: Shares
    target: Shares
    rows: np.ndarray  # [t, ...]

    def moved(self, rank: int, num_ranks: int, exchange: Exchange) -> np.ndarray:
        """`[t, ...]`: what this rank wants, sample after sample in its order of `target`.

        Collective over `num_ranks` ranks, those of both sides.
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
        came = exchange(outgoing, incoming)
        wanted = self.target.of(rank)
        shape = (int(self.lengths[wanted].sum()), *self.rows.shape[1:])
        found = SampleRows(wanted, self.lengths, np.empty(shape, dtype=self.rows.dtype))
        for other, samples in moves.incoming.items():
            if other == rank:
                found.put(samples, here.of(samples))
            else:
                rows = came[other].view(self.rows.dtype)
                found.put(samples, rows.reshape(int(self.lengths[samples].sum()), *shape[1:]))
        return found.rows


class SampleRows:
    """Rows of samples' tokens, one sample after the other, by the number of the sample."""

    def __init__(self, samples: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
        """`lengths` `[n]` are of all samples of the step, `samples` those that `rows` are of."""
        ends = lengths[samples].cumsum()
        assert len(rows) == (ends[-1] if len(ends) else 0), (
            f"{len(rows)} rows of {ends[-1:].sum()} tokens"
        )
        self.rows = rows
        starts = (ends - lengths[samples]).tolist()
        self._at = dict(zip(samples.tolist(), zip(starts, ends.tolist(), strict=True), strict=True))

    def __getitem__(self, sample: int) -> np.ndarray:
        """`[s, ...]`, a view: those of one sample of s tokens."""
        start, end = self._at[sample]
        return self.rows[start:end]

    def of(self, samples: np.ndarray) -> np.ndarray:
        """Those of some, in this order."""
        return np.concatenate([self.rows[:0], *(self[sample] for sample in samples.tolist())])

    def put(self, samples: np.ndarray, rows: np.ndarray) -> None:
        """Replace those of some by `rows`, which are in this order."""
        end = 0
        for sample in samples.tolist():
            start, stop = self._at[sample]
            begin, end = end, end + stop - start
            self.rows[start:stop] = rows[begin:end]
