"""Placement of ranks in rollout slots, and the bytes that each rank then has to receive.

A rank that switches from training to rollout keeps what it holds and its slot needs, so the
placement decides how much must move. If TP' < TP, for example, consecutive ranks should not form an
engine: ranks 0 and 1 of TP4 hold the first half of every matrix, and both belong where the first
half is needed (HybridFlow, arXiv 2409.19256, section 5.3: generation groups at regular intervals).
`choose_rank_map` solves this for any two layouts as an assignment problem.

Tensors are fused here: all tensors of one kind, over the layers of a stage that have it and all
experts, are one fused tensor `[layers, experts, *shape]`, since every rank holds the same slice of
each. A fused tensor has few distinct slices, and the overlap of two slices is computed once, not
for every pair of ranks. 4,096 ranks and 47,000 tensors therefore take seconds.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mcore_rl.model.boxes import Box, full_box, volume
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.float8_blocks import FLOAT8, blocks_of, grid, scale_name, specs_in_float8
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.lora import is_adapted
from mcore_rl.model.tensors import (
    Cut,
    TensorInfo,
    TensorSpec,
    cut_range,
    embedding_specs,
    head_specs,
    layer_specs,
    parts_of,
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
    stages: tuple[int, ...]  # one stage; first and last for a tied embedding
    num_layers: int
    in_float8: bool = False  # in FP8 blocks for rollout
    has_scales: bool = False  # the scales of tensors `spec` in FP8 blocks

    @property
    def info(self) -> TensorInfo:
        """The `TensorInfo` of the fused tensor `[layers, experts, *shape]`."""
        layers, experts = self.num_layers, max(1, self.spec.num_experts)
        if self.has_scales:
            return TensorInfo((layers, experts, *grid(self.spec.shape)), "float32", 4)
        shape = (layers, experts, *self.spec.shape)
        if self.in_float8:
            return TensorInfo(shape, FLOAT8, 1)
        return TensorInfo(shape, self.spec.dtype, 4 if self.spec.dtype == "float32" else 2)


class Placement:
    """The two layouts of a model, and the boxes of fused tensors that ranks hold and slots need.

    The holdings of a rank depend only on its `train_class`, the needs of a slot only on its
    `slot_class`; there are far fewer classes than ranks.
    """

    def __init__(
        self,
        shape: ModelShape,
        train: TrainLayout,
        layers: PipelineLayers,
        rollout: RolloutLayout,
        *,
        tensors: Iterable[FusedTensor] | None = None,
    ) -> None:
        """`tensors` are by default the model's."""
        self.shape, self.train, self.layers, self.rollout = shape, train, layers, rollout
        if tensors is None:
            tensors = _fused(shape, layers, rollout)
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.infos = {name: tensor.info for name, tensor in self.tensors.items()}
        self._boxes: dict[tuple[Any, ...], tuple[Box, ...]] = {}

    def of_adapters(self, rank: int, targets: Sequence[str]) -> Placement:
        """Return the placement of the factors A and B of adapters, see `model.lora`."""
        weights = (t for t in self.tensors.values() if is_adapted(self.shape, t.spec, targets))
        factors = chain.from_iterable(_factors(weight, rank) for weight in weights)
        return Placement(self.shape, self.train, self.layers, self.rollout, tensors=factors)

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
        """Return the box that is cut out, one object per distinct box; none if it is empty."""
        spec = tensor.spec
        key = (tensor.name, expert if spec.num_experts else None, cut, vocabulary_rows)
        boxes = self._boxes.get(key)
        if boxes is None:
            box = self._box(tensor, expert, cut, vocabulary_rows)
            boxes = self._boxes[key] = (box,) if volume(box) else ()
        return boxes

    def _box(
        self,
        tensor: FusedTensor,
        expert: tuple[int, int],
        cut: tuple[int, int],
        vocabulary_rows: int,
    ) -> Box:
        spec = tensor.spec
        box = list(full_box((tensor.num_layers, max(1, spec.num_experts), *spec.shape)))
        if spec.num_experts:
            part = spec.num_experts // expert[1]
            box[1] = (expert[0] * part, (expert[0] + 1) * part)
        bounds = cut_range(
            spec, *cut, kv_heads=self.shape.num_kv_heads, vocabulary_rows=vocabulary_rows
        )
        if bounds is not None:
            dim, start, stop = bounds
            box[2 + dim] = (start, stop)
        if tensor.has_scales and volume(tuple(box)):
            box[2:] = blocks_of(tuple(box[2:]))
        return tuple(box)

    # bytes

    @cached_property
    def resident_bytes(self) -> Bytes:
        """`[slots]` int64: bytes that each slot needs, W' in the formulas."""
        of = {at: self._bytes(boxes) for at, boxes in self.needed.items()}
        return np.array([of[at] for at in self.slot_class], dtype=np.int64)

    @property
    def most_resident_bytes(self) -> int:
        """The largest of `resident_bytes`, computed for the first slot only.

        Slots differ only in the padding of the vocabulary, which the last slots have.
        """
        return self._bytes(dict(self._needed(0, 0)))

    @cached_property
    def trained_bytes(self) -> Bytes:
        """`[ranks]` int64: bytes that each rank holds in training, in the checkpoint's dtype."""
        of = {at: self._bytes(boxes) for at, boxes in self.held.items()}
        return np.array([of[at] for at in self.train_class], dtype=np.int64)

    def _bytes(self, boxes: Mapping[str, Sequence[Box]]) -> int:
        return sum(
            volume(box) * self.infos[name].itemsize for name, some in boxes.items() for box in some
        )

    def missing_bytes(self, ranks: Sequence[int], slots: Sequence[int]) -> Bytes:
        """Return `[ranks, slots]` int64: bytes that each rank must receive to take each slot."""
        table, of_rank, of_slot = self._missing
        missing: Bytes = table[np.ix_(of_rank[list(ranks)], of_slot[list(slots)])]
        return missing

    @cached_property
    def lower_bound_bytes(self) -> Bytes:
        """`[ranks]` int64: the minimum bytes that each rank must receive, over all slots."""
        table, of_rank, _ = self._missing
        bounds: Bytes = table.min(axis=1)[of_rank]
        return bounds

    def received_bytes(self, rank_map: Sequence[int]) -> Bytes:
        """Return `[ranks]` int64: bytes that each rank receives, for `rank_map` (slot -> rank)."""
        table, of_rank, of_slot = self._missing
        ranks = np.asarray(rank_map)
        received = np.empty(len(ranks), dtype=np.int64)
        received[ranks] = table[of_rank[ranks], of_slot]
        return received

    @cached_property
    def _missing(self) -> tuple[Bytes, _Numbers, _Numbers]:
        """Missing bytes `[train classes, slot classes]`, each rank's class, each slot's class."""
        whole = np.array([self._bytes(boxes) for boxes in self.needed.values()], dtype=np.int64)
        table = np.repeat(whole[None], len(self.held), axis=0)
        held, needed = _by_tensor(self.held), _by_tensor(self.needed)
        for name in held.keys() & needed.keys():
            rows, columns = held[name], needed[name]
            shared = _shared_elements(rows.boxes, columns.boxes) * self.infos[name].itemsize
            held_bytes = shared[np.ix_(rows.numbers, columns.numbers)]
            table[np.ix_(rows.classes, columns.classes)] -= held_bytes
        numbers = [{at: i for i, at in enumerate(classes)} for classes in (self.held, self.needed)]
        return (
            table,
            np.array([numbers[0][at] for at in self.train_class]),
            np.array([numbers[1][at] for at in self.slot_class]),
        )


@dataclass(frozen=True, slots=True)
class _Slices:
    """The distinct boxes of a fused tensor on one side, and the classes that have one."""

    boxes: Bytes  # `[boxes, dimensions, 2]`
    classes: _Numbers  # ascending
    numbers: _Numbers  # the box of each of `classes`


def _by_tensor(classes: Mapping[_Class, Mapping[str, Sequence[Box]]]) -> dict[str, _Slices]:
    """Return the slices of every tensor that some class has."""
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
    """Return `[held boxes, needed boxes]` int64: the number of elements that each pair shares."""
    shared = np.ones((len(held), len(needed)), dtype=np.int64)
    for dim in range(held.shape[1]):
        stops = np.minimum.outer(held[:, dim, 1], needed[:, dim, 1])
        starts = np.maximum.outer(held[:, dim, 0], needed[:, dim, 0])
        shared *= np.maximum(stops - starts, 0)
    return shared


def _fused(
    shape: ModelShape, layers: PipelineLayers, rollout: RolloutLayout
) -> Iterator[FusedTensor]:
    last = len(layers) - 1
    ends = (0, last) if shape.tied_embeddings and last else (0,)
    for spec in embedding_specs(shape):
        yield FusedTensor(spec.name, spec, ends, 1)
    for stage, chunks in enumerate(layers):
        numbers = [layer for chunk in chunks for layer in chunk]
        for kind, count in sorted(Counter(shape.layer_kinds[n] for n in numbers).items()):
            quantised = specs_in_float8(shape, rollout, kind) if rollout.float8 else ()
            for spec in chain.from_iterable(map(parts_of, layer_specs(shape, kind))):
                name = f"stage{stage}.{kind.name}.{spec.name}"
                yield FusedTensor(name, spec, (stage,), count, in_float8=spec in quantised)
                if spec in quantised:
                    yield FusedTensor(scale_name(name), spec, (stage,), count, has_scales=True)
    for spec in head_specs(shape):
        yield FusedTensor(spec.name, spec, (last,), 1)


def _factors(weight: FusedTensor, rank: int) -> tuple[FusedTensor, FusedTensor]:
    """Return A `[rank, columns]` and B `[rows, rank]`: one is cut as the weight is, the other is
    whole on every rank."""
    (rows, columns), cut = weight.spec.shape, weight.spec.cut
    cut_a, cut_b = Cut.REPLICATED, cut
    if cut is Cut.COLUMNS:
        cut_a, cut_b = cut, Cut.REPLICATED
    a = replace(weight.spec, shape=(rank, columns), cut=cut_a)
    b = replace(weight.spec, shape=(rows, rank), cut=cut_b)
    return (
        replace(weight, name=f"{weight.name}.lora_A", spec=a),
        replace(weight, name=f"{weight.name}.lora_B", spec=b),
    )


def choose_rank_map(placement: Placement, *, ranks_per_node: int) -> tuple[int, ...]:
    """Return slot -> rank such that the ranks receive as few bytes as possible in total.

    The TP' ranks of a slot group stay inside a node, or fill complete nodes if TP' is larger. The
    identity is returned unless another map is better. Among equal maps, lower slots of a node get
    lower ranks, so that the ranks of a TP' group ascend where they can: see `vllm.all_reduce`.
    Deterministic. Raises RuntimeError if the world does not divide into nodes and groups.

    Exact in two cases: every rank can take a slot for which it receives only its lower bound, or a
    node holds one TP' group. Otherwise groups are assigned to nodes in order, or by the best that
    each group could achieve there alone, then ranks to slots within each node.
    """
    rollout, world = placement.rollout, placement.train.world_size
    identity = tuple(range(world))
    if np.array_equal(placement.received_bytes(identity), placement.lower_bound_bytes):
        return identity
    size = max(min(ranks_per_node, world), rollout.tp_size)  # ranks that hold complete TP' groups
    if world % size or size % rollout.tp_size:
        raise RuntimeError(
            f"groups of {rollout.tp_size} ranks do not fill nodes of {ranks_per_node} in a world "
            f"of {world}"
        )
    nodes = [range(first, first + size) for first in range(0, world, size)]
    groups = [range(first, first + rollout.tp_size) for first in range(0, world, rollout.tp_size)]
    in_order = _within_nodes(placement, nodes, nodes)
    by_best = _within_nodes(placement, nodes, _groups_to_nodes(placement, nodes, groups))
    return min(identity, in_order, by_best, key=lambda rank_map: _total(placement, rank_map))


def _within_nodes(
    placement: Placement, nodes: Sequence[range], slots_of_nodes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """Return the best rank map that gives each node these slots."""
    rank_map = [0] * placement.train.world_size
    for node, slots in zip(nodes, map(sorted, slots_of_nodes), strict=True):
        costs = placement.missing_bytes(node, slots)
        rows, columns = _assignment(costs + _out_of_order(costs))
        for row, column in zip(rows, columns, strict=True):
            rank_map[slots[column]] = node[row]
    return tuple(rank_map)


def _groups_to_nodes(
    placement: Placement, nodes: Sequence[range], groups: Sequence[range]
) -> list[list[int]]:
    """Return the slots of each node: as many complete TP' groups as fit."""
    per_node = len(groups) // len(nodes)
    if placement.rollout.dp_size == 1:  # all groups need the same
        shares = [groups[i * per_node : (i + 1) * per_node] for i in range(len(nodes))]
        return [[slot for group in some for slot in group] for some in shares]
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
    """Return the first of the parts with the same classes, and the number of each part's first."""
    numbers: dict[tuple[_Class, ...], int] = {}
    of_part = [numbers.setdefault(tuple(classes[i] for i in part), len(numbers)) for part in parts]
    return [parts[of_part.index(number)] for number in range(len(numbers))], of_part


def _assignment(costs: npt.NDArray[Any]) -> tuple[_Numbers, _Numbers]:
    """Return the rows and columns of the cheapest assignment."""
    from scipy.optimize import linear_sum_assignment  # late: the identity usually returns first

    rows, columns = linear_sum_assignment(costs)
    return rows, columns


def _least(costs: npt.NDArray[np.float64]) -> float:
    """Return the cost of the cheapest assignment."""
    return float(costs[_assignment(costs)].sum())


def _costs(
    placement: Placement, ranks: Sequence[int], slots: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return `[ranks, slots]` bytes to receive, plus 0.25 off the identity to break ties."""
    away = np.not_equal.outer(np.asarray(ranks), np.asarray(slots))
    costs: npt.NDArray[np.float64] = placement.missing_bytes(ranks, slots) + 0.25 * away
    return costs


def _out_of_order(costs: Bytes) -> npt.NDArray[np.float64]:
    """Return additions to `[ranks, slots]` costs that prefer lower ranks at lower slots among equal
    assignments. They add up to less than the smallest difference between costs."""
    number = np.arange(len(costs))
    step = max(1, np.gcd.reduce(costs, axis=None))
    away: npt.NDArray[np.float64] = np.subtract.outer(number, number) ** 2.0
    away *= step / len(costs) ** 3
    return away


def _total(placement: Placement, rank_map: Sequence[int]) -> int:
    return int(placement.received_bytes(rank_map).sum())


def with_rank_map(placement: Placement, *, ranks_per_node: int) -> RolloutLayout:
    """Return the rollout layout with the best rank map."""
    return replace(
        placement.rollout, rank_map=choose_rank_map(placement, ranks_per_node=ranks_per_node)
    )
