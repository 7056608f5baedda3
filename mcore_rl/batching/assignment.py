"""Assignment of a step's samples to mini-batches, data-parallel ranks and micro-batches.

A step's samples are cut into mini-batches. The samples of a mini-batch are assigned to
data-parallel ranks, and a rank's samples to micro-batches. `orders_of_epochs` shuffles the samples
for the first cut independently of the layout, so that an update trains on the same samples in every
layout. `plan_step` decides the rest from lengths alone. It gives all ranks the same number of
micro-batches, as different numbers would deadlock.

Shape legend: n samples of the step, in g groups; e epochs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import PCG64, SeedSequence

from mcore_rl.batching.rows import MicroBatching, chunks_of_sample, round_up
from mcore_rl.batching.sample_exchange import Division, Shares
from mcore_rl.batching.table import SampleTable
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.tensors import active_parameters


def partition(costs: Sequence[float] | np.ndarray, num_bins: int) -> list[np.ndarray]:
    """Return `num_bins` ascending arrays of indices into `costs`, with nearly equal sums.

    Karmarkar and Karp's largest differencing method for k bins ("The differencing method of set
    partitioning", UCB/CSD 82/113, 1982): every number starts as a separate partition of one full
    and k - 1 empty bins. Repeatedly, the two partitions with the largest differences of sums are
    joined, the fullest bin of one with the emptiest of the other.

    Every index is in exactly one bin; with fewer numbers than bins, some are empty. The same
    numbers give the same bins on every rank.
    """
    return _by_bin(bins_of(costs, num_bins), num_bins)


def _by_bin(bins: np.ndarray, num_bins: int) -> list[np.ndarray]:
    """Return the indices of each bin, ascending, given the bin of each index."""
    order = np.argsort(bins, kind="stable")
    return np.split(order, np.searchsorted(bins[order], np.arange(1, num_bins)))


def bins_of(costs: Sequence[float] | np.ndarray, num_bins: int) -> np.ndarray:
    """Return `[n]` int64: the bin of each of n numbers in `partition`."""
    costs = np.asarray(costs, dtype=np.float64)
    assert num_bins >= 1, f"{num_bins} bins"
    num_costs, bins = len(costs), np.full(len(costs), num_bins - 1)
    if num_bins == 1:
        return bins
    joins = _joins(costs.tolist(), num_bins)
    # Partition -> the result's bin for each of its bins, from the last join back to the first.
    places = {num_costs + len(joins) - 1: np.arange(num_bins)}
    for number in range(len(joins) - 1, -1, -1):
        one, other, order = joins[number]
        joined = places.pop(num_costs + number)
        if isinstance(order, int):
            bins[other] = emptiest = joined[order]
            joined[1 : order + 1] = joined[:order]
            joined[0] = emptiest
        else:
            unsorted = np.empty_like(order)
            unsorted[order] = joined
            joined, places[other] = unsorted, unsorted[::-1].copy()
        if one < num_costs:
            bins[one] = joined[-1]
        else:
            places[one] = joined
    return bins


def _joins(costs: Sequence[float], num_bins: int) -> list[tuple[int, int, int | np.ndarray]]:
    """Return the joins in order, as (one, other, order of the joined bins).

    Partitions 0 .. `len(costs)` - 1 hold one number each; join i makes partition `len(costs)` + i.
    The order sorts the joined bins by sum: for each bin, its place before sorting. If `other` is a
    single number, it joins the emptiest bin, and the order is the place that this bin moves to.
    """
    count, joins = len(costs), list[tuple[int, int, int | np.ndarray]]()
    # Ties are broken by age, so that arrays are never compared.
    heap = [(-cost, index) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    sums_of: dict[int, np.ndarray] = {}

    def sums(partition: int) -> np.ndarray:
        if partition >= count:
            return sums_of.pop(partition)
        bin_sums = np.zeros(num_bins)
        bin_sums[-1] = costs[partition]
        return bin_sums

    order: int | np.ndarray
    while len(heap) > 1:
        (_, one), (_, other) = heapq.heappop(heap), heap[0]
        joined = sums(one)  # ascending
        if other < count:  # nearly always so with many bins
            total = joined[0] + costs[other]
            order = int(joined[1:].searchsorted(total))
            joined[:order] = joined[1 : order + 1]
            joined[order] = total
        else:
            joined = joined + sums(other)[::-1]
            order = joined.argsort(kind="stable")
            joined = joined[order]
        sums_of[count + len(joins)] = joined
        heapq.heapreplace(heap, (float(joined[0] - joined[-1]), count + len(joins)))
        joins.append((one, other, order))
    return joins


@dataclass(frozen=True, slots=True)
class SampleFlops:
    """Floating-point operations of a forward pass over one sample, by its length.

    Example: `SampleFlops(per_token=1e9, per_token_pair=5e4)(np.array([100]))` is `[1.005e11]`.
    """

    per_token: float  # matrix products with weights
    per_token_pair: float  # attention; a causal mask needs half of all pairs

    @classmethod
    def of(cls, shape: ModelShape) -> SampleFlops:
        """Count two operations per active parameter and token, and attention's two products: of a
        query with each earlier key, and of the resulting weight with the key's value."""
        if shape.latent is not None:
            width = shape.latent.qk_nope_head_dim + shape.latent.qk_rope_head_dim
            width += shape.latent.v_head_dim
        else:
            width = 2 * shape.head_dim
        pairs = 2.0 * shape.num_layers * shape.num_heads * width / 2
        return cls(per_token=2.0 * active_parameters(shape), per_token_pair=pairs)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths, dtype=np.float64)
        return lengths * self.per_token + lengths**2 * self.per_token_pair


# Samples of one prompt are assigned in pieces. A data-parallel rank, and a micro-batch, has room
# for at least this many pieces, as larger pieces are hard to balance.
PIECES = 2


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a step's samples and their lengths.

    Example: two samples of one prompt and one of another: `Prompts(array([0, 0, 1]), array([40, 40,
    25]))`.
    """

    ids: np.ndarray  # [n] int64, equal for consecutive samples of one prompt, else different
    lengths: np.ndarray  # [n] int64, tokens of the sample's prompt

    @classmethod
    def of(cls, table: SampleTable) -> Prompts:
        return cls(
            ids=table.group_ids,
            lengths=table.prompt_lengths,
        )

    @classmethod
    def all_different(cls, num_samples: int) -> Prompts:
        """Return prompts for samples that share nothing."""
        return cls(ids=np.arange(num_samples), lengths=np.zeros(num_samples, dtype=np.int64))


Cuts = tuple[tuple[tuple[int, ...], ...], ...]  # mini-batch -> micro-batch -> sample of the step


def orders_of_epochs(
    informative: Sequence[bool] | np.ndarray,
    *,
    group_sizes: np.ndarray,
    num_mini_batches: int,
    num_epochs: int,
    seed: int,
    step: int,
) -> np.ndarray:
    """Return `[e, n]` int64: the order of samples that each epoch cuts into mini-batches.

    It depends only on (seed, step, epoch): a resume needs no state, and ranks agree. `informative`
    `[g]` marks the groups with a gradient, `group_sizes` `[g]` int64 are their numbers of samples.
    Groups are shuffled as units, as samples of one prompt can share its tokens; groups of different
    sizes may be cut by mini-batches. Groups without a gradient are spread evenly: their numbers in
    equal parts of complete groups of one size differ by at most one. A single mini-batch keeps the
    order of samples.
    """
    is_informative = np.asarray(informative, dtype=np.bool_)
    num_groups = len(is_informative)
    samples = np.arange(group_sizes.sum())
    members = np.split(samples, np.cumsum(group_sizes)[:-1])
    orders = np.tile(samples, (num_epochs, 1))
    if num_mini_batches == 1 or not num_groups:
        return orders
    for epoch in range(num_epochs):
        # numpy guarantees the raw bits across versions, but not the results of `permutation`.
        raw = PCG64(SeedSequence([seed, step, epoch])).random_raw(num_groups + 1)
        groups = _spread(np.argsort(raw[1:]), is_informative, int(raw[0] % num_groups))
        orders[epoch] = np.concatenate([members[group] for group in groups])
    return orders


def _spread(groups: np.ndarray, is_informative: np.ndarray, first: int) -> np.ndarray:
    """Spread the groups without a gradient evenly over `groups`, starting at `first` / their
    number. Groups with and without a gradient keep their order."""
    idle = groups[~is_informative[groups]]
    if not len(idle):
        return groups
    is_idle = np.zeros(len(groups), dtype=np.bool_)
    is_idle[(np.arange(len(idle)) * len(groups) + first) // len(idle)] = True
    spread = np.empty_like(groups)
    spread[is_idle], spread[~is_idle] = idle, groups[is_informative[groups]]
    return spread


def plan_step(
    lengths: Sequence[int] | np.ndarray,
    *,
    num_mini_batches: int,
    dp_size: int,
    batching: MicroBatching,
    prompts: Prompts | None = None,
    order: np.ndarray | None = None,
) -> list[Cuts]:
    """Return for each data-parallel rank its samples by mini-batch and micro-batch.

    `lengths` `[n]` are prompt plus response tokens of the step's samples. Mini-batch k is the k-th
    of `num_mini_batches` equal, consecutive parts of `order` `[n]` (default: unchanged). Every
    sample is assigned exactly once. All ranks have equally many micro-batches in a mini-batch, a
    multiple of `count_multiple_of`.

    Packed: ranks, then micro-batches are balanced by cost (Karmarkar-Karp, see `partition`). There
    are as few micro-batches as the token budget allows; some are empty if there are fewer samples.
    The budget counts samples as padded for context parallelism; a longer sample raises a
    RuntimeError that names it. If prompts are shared, `prompts` describes them, and samples of one
    prompt stay together as far as budget and balance allow.
    Padded: samples are assigned round-robin, and their number must be divisible.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if not batching.share_prompts or prompts is None:
        prompts = Prompts.all_different(len(lengths))
    assert num_mini_batches >= 1 and len(lengths) % num_mini_batches == 0, (
        f"{len(lengths)} samples do not divide into {num_mini_batches} mini-batches"
    )
    assert dp_size >= 1, f"dp_size {dp_size}"
    order = np.arange(len(lengths)) if order is None else order
    assert np.array_equal(np.sort(order), np.arange(len(lengths))), "not an order of the samples"
    mini_batches = np.split(order, num_mini_batches)
    if batching.packed:
        by_mini_batch = [
            _assign_packed(samples, lengths, prompts, dp_size, batching) for samples in mini_batches
        ]
    else:
        by_mini_batch = [_assign_padded(samples, dp_size, batching) for samples in mini_batches]
    return [tuple(ranks[dp_rank] for ranks in by_mini_batch) for dp_rank in range(dp_size)]


def division_of(
    epochs: Sequence[Sequence[Cuts]], lengths: np.ndarray, ranks: Sequence[tuple[int, ...]]
) -> Division:
    """Return the division of samples under the plans of all epochs, each made by `plan_step`.

    `ranks` are the ranks of each data-parallel rank, which have the same samples."""
    samples_of_epochs = [[samples_of(cuts) for cuts in plan] for plan in epochs]
    samples_by_rank = []
    for epochs_of_rank in zip(*samples_of_epochs, strict=True):
        samples = np.concatenate(epochs_of_rank)
        _, firsts = np.unique(samples, return_index=True)
        samples_by_rank.append(samples[np.sort(firsts)])
    first = Shares(tuple(samples_of_epochs[0]), tuple(ranks))
    return Division(lengths, first, Shares(tuple(samples_by_rank), tuple(ranks)))


def samples_of(cuts: Cuts) -> np.ndarray:
    """Return the samples of `cuts`, one after the other."""
    samples = [sample for mini_batch in cuts for part in mini_batch for sample in part]
    return np.array(samples, dtype=np.int64)


def _assign_padded(
    samples: np.ndarray, dp_size: int, batching: MicroBatching
) -> list[tuple[tuple[int, ...], ...]]:
    size = batching.micro_batch_size
    assert size >= 1 and len(samples) % (dp_size * size) == 0, (
        f"{len(samples)} samples do not divide into {dp_size} ranks x micro-batches of {size}"
    )
    return [
        tuple(tuple(int(i) for i in mine[at : at + size]) for at in range(0, len(mine), size))
        for mine in (samples[dp_rank::dp_size] for dp_rank in range(dp_size))
    ]


def _assign_packed(
    samples: np.ndarray,
    lengths: np.ndarray,
    prompts: Prompts,
    dp_size: int,
    batching: MicroBatching,
) -> list[tuple[tuple[int, ...], ...]]:
    in_row = round_up(lengths, chunks_of_sample(batching.cp_size))
    too_long = samples[in_row[samples] > batching.max_tokens]
    if len(too_long):
        tokens, positions = lengths[too_long[0]], in_row[too_long[0]]
        padded = f", padded to {positions} for context parallelism" if positions > tokens else ""
        raise RuntimeError(
            f"sample {too_long[0]} has {tokens} tokens{padded}, more than the "
            f"{batching.max_tokens} of --rl-max-tokens-per-microbatch"
        )
    together = np.maximum(prompts.lengths[samples] - 1, 0)  # shared tokens, once per piece
    costs_together = np.asarray(batching.cost(together), dtype=np.float64)
    own = in_row[samples] - together
    own_costs = np.asarray(batching.cost(lengths[samples]), dtype=np.float64) - costs_together
    is_first = np.diff(prompts.ids[samples], prepend=-1) != 0
    all_costs = own_costs.sum() + costs_together[is_first].sum()
    starts = _piece_starts(
        prompts.ids[samples],
        _Amounts(own_costs, costs_together, all_costs / (PIECES * dp_size)),
        _Amounts(own, together, batching.max_tokens / PIECES),
    )
    pieces = np.split(samples, starts[1:])
    costs = np.add.reduceat(own_costs, starts) + costs_together[starts]
    tokens = np.add.reduceat(own, starts) + together[starts]
    pieces_of_ranks = partition(costs, dp_size)
    most = max(int(tokens[mine].sum()) for mine in pieces_of_ranks)
    count = round_up(max(1, -(-most // batching.max_tokens)), batching.count_multiple_of)
    ranks = list(range(dp_size))
    assigned: dict[int, list[np.ndarray]] = {}
    while len(assigned) < dp_size:
        assigned.clear()
        for rank in ranks:
            mine = pieces_of_ranks[rank]
            bins = bins_of(costs[mine], count)
            if np.bincount(bins, tokens[mine]).max(initial=0) > batching.max_tokens:
                # The next `count` is likely too small for this rank, too: try it first.
                ranks.remove(rank)
                ranks.insert(0, rank)
                count += batching.count_multiple_of
                break
            assigned[rank] = [mine[indices] for indices in _by_bin(bins, count)]
    return [
        tuple(tuple(int(i) for piece in bin_ for i in pieces[piece]) for bin_ in assigned[rank])
        for rank in range(dp_size)
    ]


@dataclass(frozen=True, slots=True)
class _Amounts:
    """Costs or tokens of samples: own, shared (`together`), and the most per piece."""

    own: np.ndarray
    together: np.ndarray
    most: float


def _piece_starts(prompt_ids: np.ndarray, *amounts: _Amounts) -> np.ndarray:
    """Return the starts of runs of samples that are assigned together: the samples of a prompt, or
    a part of them within the limits of `amounts`."""
    starts = [0]
    sums = [amount.together[0] + amount.own[0] for amount in amounts]
    for i in range(1, len(prompt_ids)):
        longer = [total + amount.own[i] for total, amount in zip(sums, amounts, strict=True)]
        fits = all(total <= amount.most for total, amount in zip(longer, amounts, strict=True))
        if fits and prompt_ids[i] == prompt_ids[starts[-1]]:
            sums = longer
        else:
            starts.append(i)
            sums = [amount.together[i] + amount.own[i] for amount in amounts]
    return np.array(starts)
