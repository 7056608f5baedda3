"""Which rank should play which rollout slot, and what it then has to receive.

A rank that changes from training to rollout keeps what its slot needs and it holds already, so that
the placement decides how much must move. Where TP' < TP, for instance, consecutive ranks would form
a wrong engine: ranks 0 and 1 of TP4 hold the first half of every matrix, and both belong where the
first half is needed (HybridFlow, arXiv 2409.19256, section 5.3: generation groups at regular
intervals). `choose_rank_map` solves it for any two layouts as an assignment problem.

Tensors are taken together here: those of one kind, over all layers of a stage that have it and all
experts, are one fused tensor `[layers, experts, *shape]`, since every rank holds the same slice of
each. Of a fused tensor there are few different slices, and what two of them share is computed once,
not for every pair of ranks. That is what makes 4,096 ranks and 47,000 tensors a matter of seconds.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_rl.hybrid_engine.plan.moves import TensorInfo
from mcore_rl.model.boxes import Box, full_box, volume
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.tensors import (
    TensorSpec,
    cut_range,
    embedding_specs,
    head_specs,
    layer_specs,
    served_vocabulary_rows,
    trained_vocabulary_rows,
)

Bytes = npt.NDArray[np.int64]
_Numbers = npt.NDArray[np.intp]
_Class = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FusedTensor:
    """All checkpoint tensors of one kind whose layers lie on one pipeline stage."""

    name: str
    spec: TensorSpec
    stages: tuple[int, ...]  # one; first and last for a tied embedding
    num_layers: int

    @property
    def info(self) -> TensorInfo:
        """As one tensor `[layers, experts, *shape]`."""
        itemsize = 4 if self.spec.dtype == "float32" else 2
        shape = (self.num_layers, max(1, self.spec.num_experts), *self.spec.shape)
        return TensorInfo(shape, self.spec.dtype, itemsize)


class Placement:
    """The two layouts of a model and what each position holds or needs, as boxes of fused tensors.

    The holdings of a rank depend only on its `train_class`, the needs of a slot only on its
    `slot_class`, and there are far fewer of those than ranks.
    """

    def __init__(
        self,
        shape: ModelShape,
        train: TrainLayout,
        layers: PipelineLayers,
        rollout: RolloutLayout,
    ) -> None:
        self.shape, self.train, self.layers, self.rollout = shape, train, layers, rollout
        self.tensors = {tensor.name: tensor for tensor in _fused(shape, layers)}
        self.infos = {name: tensor.info for name, tensor in self.tensors.items()}
        self._boxes: dict[tuple[Any, ...], tuple[Box, ...]] = {}

    # positions

    @cached_property
    def train_class(self) -> list[_Class]:
        """(stage, TP rank, EP rank, expert-TP rank) of each rank."""
        at = self.train
        return [
            (at.pp_rank(rank), at.tp_rank(rank), at.ep_rank(rank), at.etp_rank(rank))
            for rank in range(at.world_size)
        ]

    @cached_property
    def slot_class(self) -> list[_Class]:
        """(TP rank, EP rank) of each slot."""
        rollout = self.rollout
        per_engine: list[_Class] = [
            (slot % rollout.tp_size, slot if rollout.expert_parallel else 0)
            for slot in range(rollout.slots_per_engine)
        ]
        return per_engine * rollout.num_engines

    @cached_property
    def held(self) -> dict[_Class, dict[str, tuple[Box, ...]]]:
        """train class -> fused tensor -> box."""
        return {at: dict(self._held(*at)) for at in dict.fromkeys(self.train_class)}

    @cached_property
    def needed(self) -> dict[_Class, dict[str, tuple[Box, ...]]]:
        """slot class -> fused tensor -> box."""
        return {at: dict(self._needed(*at)) for at in dict.fromkeys(self.slot_class)}

    def _held(
        self, stage: int, tp_rank: int, ep_rank: int, etp_rank: int
    ) -> Iterator[tuple[str, tuple[Box, ...]]]:
        train = self.train
        rows = trained_vocabulary_rows(self.shape.vocab_size, train.tp_size)
        for name, tensor in self.tensors.items():
            if stage not in tensor.stages:
                continue
            is_expert = tensor.spec.num_experts > 0
            boxes = self._boxes_of(
                tensor,
                expert=(ep_rank, train.ep_size),
                cut=(etp_rank, train.etp_size) if is_expert else (tp_rank, train.tp_size),
                vocabulary_rows=rows,
            )
            if boxes:
                yield name, boxes

    def _needed(self, tp_rank: int, ep_rank: int) -> Iterator[tuple[str, tuple[Box, ...]]]:
        rollout = self.rollout
        rows = served_vocabulary_rows(self.shape.vocab_size, rollout.tp_size)
        for name, tensor in self.tensors.items():
            is_whole = (tensor.spec.num_experts > 0 and rollout.expert_parallel) or (
                tensor.spec.is_shared_expert and rollout.has_whole_shared_experts
            )
            boxes = self._boxes_of(
                tensor,
                expert=(ep_rank, rollout.ep_size),
                cut=(0, 1) if is_whole else (tp_rank, rollout.tp_size),
                vocabulary_rows=rows,
            )
            if boxes:
                yield name, boxes

    def _boxes_of(
        self,
        tensor: FusedTensor,
        *,
        expert: tuple[int, int],
        cut: tuple[int, int],
        vocabulary_rows: int,
    ) -> tuple[Box, ...]:
        """The box that is cut out, the same object for all that have it; none if it is empty."""
        spec = tensor.spec
        key = (tensor.name, expert if spec.num_experts else None, cut, vocabulary_rows)
        found = self._boxes.get(key)
        if found is None:
            box = self._box(tensor, expert, cut, vocabulary_rows)
            found = self._boxes[key] = (box,) if volume(box) else ()
        return found

    def _box(
        self,
        tensor: FusedTensor,
        expert: tuple[int, int],
        cut: tuple[int, int],
        vocabulary_rows: int,
    ) -> Box:
        spec = tensor.spec
        box = list(full_box(tensor.info.shape))
        if spec.num_experts:
            part = spec.num_experts // expert[1]
            box[1] = (expert[0] * part, (expert[0] + 1) * part)
        found = cut_range(
            spec, *cut, kv_heads=self.shape.num_kv_heads, vocabulary_rows=vocabulary_rows
        )
        if found is not None:
            dim, start, stop = found
            box[2 + dim] = (start, stop)
        return tuple(box)

    # bytes

    @cached_property
    def resident_bytes(self) -> Bytes:
        """`[slots]` int64: what a slot needs, W' in the formulas."""
        of = {at: self._bytes(boxes) for at, boxes in self.needed.items()}
        return np.array([of[at] for at in self.slot_class], dtype=np.int64)

    @property
    def most_resident_bytes(self) -> int:
        """The largest of `resident_bytes`, from the first slot alone.

        Slots differ in the padding of the vocabulary only, which the last ones have.
        """
        return self._bytes(dict(self._needed(0, 0)))

    @cached_property
    def trained_bytes(self) -> Bytes:
        """`[ranks]` int64: what a rank holds in training, in the checkpoint's dtype."""
        of = {at: self._bytes(boxes) for at, boxes in self.held.items()}
        return np.array([of[at] for at in self.train_class], dtype=np.int64)

    def _bytes(self, boxes: Mapping[str, Sequence[Box]]) -> int:
        return sum(
            volume(box) * self.infos[name].itemsize for name, some in boxes.items() for box in some
        )

    def missing_bytes(self, ranks: Sequence[int], slots: Sequence[int]) -> Bytes:
        """`[ranks, slots]` int64: what each rank must receive to play each slot."""
        table, of_rank, of_slot = self._missing
        found: Bytes = table[np.ix_(of_rank[list(ranks)], of_slot[list(slots)])]
        return found

    @cached_property
    def lower_bound_bytes(self) -> Bytes:
        """`[ranks]` int64: the least that a rank could receive, whichever slot it played."""
        table, of_rank, _ = self._missing
        bounds: Bytes = table.min(axis=1)[of_rank]
        return bounds

    def received_bytes(self, rank_map: Sequence[int]) -> Bytes:
        """`[ranks]` int64: what each rank receives under slot -> rank."""
        table, of_rank, of_slot = self._missing
        ranks = np.asarray(rank_map)
        received = np.empty(len(ranks), dtype=np.int64)
        received[ranks] = table[of_rank[ranks], of_slot]
        return received

    @cached_property
    def _missing(self) -> tuple[Bytes, _Numbers, _Numbers]:
        """`[train classes, slot classes]`, the class of each rank, the class of each slot."""
        whole = np.array([self._bytes(boxes) for boxes in self.needed.values()], dtype=np.int64)
        table = np.repeat(whole[None], len(self.held), axis=0)
        held, needed = _by_tensor(self.held), _by_tensor(self.needed)
        for name in held.keys() & needed.keys():
            rows, columns = held[name], needed[name]
            shared = _shared_elements(rows.boxes, columns.boxes) * self.infos[name].itemsize
            found = shared[np.ix_(rows.numbers, columns.numbers)]
            table[np.ix_(rows.classes, columns.classes)] -= found
        numbers = [{at: i for i, at in enumerate(classes)} for classes in (self.held, self.needed)]
        return (
            table,
            np.array([numbers[0][at] for at in self.train_class]),
            np.array([numbers[1][at] for at in self.slot_class]),
        )


@dataclass(frozen=True, slots=True)
class _Slices:
    """The different boxes of a fused tensor on one side, and the classes that have one."""

    boxes: Bytes  # `[boxes, dimensions, 2]`
    classes: _Numbers  # ascending
    numbers: _Numbers  # which box each of `classes` has


def _by_tensor(classes: Mapping[_Class, Mapping[str, Sequence[Box]]]) -> dict[str, _Slices]:
    """The slices of every tensor of which some class has any."""
    boxes: dict[str, dict[Box, int]] = defaultdict(dict)
    having: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, of in enumerate(classes.values()):
        for name, (box,) in of.items():
            known = boxes[name]
            having[name].append((i, known.setdefault(box, len(known))))
    return {
        name: _Slices(np.array(list(boxes[name]), dtype=np.int64), *np.array(pairs).T)
        for name, pairs in having.items()
    }


def _shared_elements(held: Bytes, needed: Bytes) -> Bytes:
    """`[held boxes, needed boxes]` int64: how many elements each two of them share."""
    shared = np.ones((len(held), len(needed)), dtype=np.int64)
    for dim in range(held.shape[1]):
        stops = np.minimum.outer(held[:, dim, 1], needed[:, dim, 1])
        starts = np.maximum.outer(held[:, dim, 0], needed[:, dim, 0])
        shared *= np.maximum(stops - starts, 0)
    return shared


def _fused(shape: ModelShape, layers: PipelineLayers) -> Iterator[FusedTensor]:
    last = len(layers) - 1
    ends = (0, last) if shape.tied_embeddings and last else (0,)
    for spec in embedding_specs(shape):
        yield FusedTensor(spec.name, spec, ends, 1)
    for stage, chunks in enumerate(layers):
        numbers = [layer for chunk in chunks for layer in chunk]
        for is_moe, count in sorted(Counter(shape.is_moe_layer[n] for n in numbers).items()):
            kind = "moe" if is_moe else "dense"
            for spec in layer_specs(shape, is_moe=is_moe):
                yield FusedTensor(f"stage{stage}.{kind}.{spec.name}", spec, (stage,), count)
    for spec in head_specs(shape):
        yield FusedTensor(spec.name, spec, (last,), 1)


def choose_rank_map(placement: Placement, *, ranks_per_node: int) -> tuple[int, ...]:
    """slot -> rank, such that as little as possible must be received in all.

    The TP' ranks of a slot group stay inside a node, or fill whole nodes where TP' is larger. The
    identity is taken where nothing is better. Deterministic. Raises RuntimeError where the world
    does not divide into nodes and groups.

    Exact where every rank can have a slot for which it need receive only its lower bound, and where
    a node holds one TP' group; otherwise groups are given to nodes by the best that each group
    could do there by itself, then ranks to slots within each node.
    """
    rollout, world = placement.rollout, placement.train.world_size
    identity = tuple(range(world))
    if np.array_equal(placement.received_bytes(identity), placement.lower_bound_bytes):
        return identity
    size = max(min(ranks_per_node, world), rollout.tp_size)  # of what holds whole TP' groups
    if world % size or size % rollout.tp_size:
        raise RuntimeError(
            f"groups of {rollout.tp_size} ranks do not fill nodes of {ranks_per_node} in a world "
            f"of {world}"
        )
    nodes = [range(first, first + size) for first in range(0, world, size)]
    groups = [range(first, first + rollout.tp_size) for first in range(0, world, rollout.tp_size)]
    rank_map = [0] * world
    for node, slots in zip(nodes, _groups_to_nodes(placement, nodes, groups), strict=True):
        costs = _costs(placement, node, slots)
        rows, columns = _assignment(costs)
        for row, column in zip(rows, columns, strict=True):
            rank_map[slots[column]] = node[row]
    chosen = tuple(rank_map)
    better = _total(placement, chosen) < _total(placement, identity)
    return chosen if better else identity


def _groups_to_nodes(
    placement: Placement, nodes: Sequence[range], groups: Sequence[range]
) -> list[list[int]]:
    """The slots of each node: whole TP' groups, as many as fit."""
    per_node = len(groups) // len(nodes)
    if placement.rollout.dp_size == 1:  # all groups need the same
        found = [groups[i * per_node : (i + 1) * per_node] for i in range(len(nodes))]
        return [[slot for group in some for slot in group] for some in found]
    first_nodes, of_node = _alike(placement.train_class, nodes)
    first_groups, of_group = _alike(placement.slot_class, groups)
    ranks, slots_of_all = (list(chain(*first)) for first in (first_nodes, first_groups))
    blocks = _costs(placement, ranks, slots_of_all).reshape(
        len(first_nodes), len(nodes[0]), len(first_groups), len(groups[0])
    )
    best = np.array([[_least(block) for block in row] for row in blocks.swapaxes(1, 2)])
    costs = best[np.ix_(of_node, of_group)]
    rows, columns = _assignment(np.repeat(costs, per_node, axis=0))
    slots: list[list[int]] = [[] for _ in nodes]
    for row, column in zip(rows, columns, strict=True):
        slots[row // per_node].extend(groups[column])
    return slots


def _alike(classes: Sequence[_Class], parts: Sequence[range]) -> tuple[list[range], list[int]]:
    """The first of all parts whose positions are of the same classes; which one each part is as."""
    numbers: dict[tuple[_Class, ...], int] = {}
    of_part = [numbers.setdefault(tuple(classes[i] for i in part), len(numbers)) for part in parts]
    return [parts[of_part.index(number)] for number in range(len(numbers))], of_part


def _assignment(costs: npt.NDArray[Any]) -> tuple[_Numbers, _Numbers]:
    """The rows and columns of the cheapest one."""
    from scipy.optimize import linear_sum_assignment  # late: the identity mostly needs none

    rows, columns = linear_sum_assignment(costs)
    return rows, columns


def _least(costs: npt.NDArray[np.float64]) -> float:
    """The sum of the best assignment."""
    return float(costs[_assignment(costs)].sum())


def _costs(
    placement: Placement, ranks: Sequence[int], slots: Sequence[int]
) -> npt.NDArray[np.float64]:
    """`[ranks, slots]` bytes to receive; a trifle more away from the identity, to break ties."""
    away = np.not_equal.outer(np.asarray(ranks), np.asarray(slots))
    costs: npt.NDArray[np.float64] = placement.missing_bytes(ranks, slots) + 0.25 * away
    return costs


def _total(placement: Placement, rank_map: Sequence[int]) -> int:
    return int(placement.received_bytes(rank_map).sum())


def with_rank_map(placement: Placement, *, ranks_per_node: int) -> RolloutLayout:
    """The rollout layout under the best rank map."""
    return replace(
        placement.rollout, rank_map=choose_rank_map(placement, ranks_per_node=ranks_per_node)
    )
