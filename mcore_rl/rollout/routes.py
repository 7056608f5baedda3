"""Choices of experts, from the ranks that sampled to those that train: each gets its own alone.

Samples go to all ranks, the experts they were sampled with do not: at 464 bytes a token of
DeepSeek-V3 that would be a hundred times the tokens. They stay on the ranks of the engine that
sampled, until it is known which rank trains on which sample; then each rank gets those of its
samples and of the layers on its pipeline stage, once, as bytes. The ranks of an engine's TP group
have the same, so that each of them sends to its share of the receivers.

Shape legend: n computed tokens of a sample; m layers with experts (of a stage); k choices a token.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.types import Rollout
from mcore_rl.common import objects
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.moe.routing import RoutedLayers, Routes, load_of


class RouteKeeper:
    """Keeps what this rank's engine chose in the present step."""

    def __init__(
        self,
        routed: RoutedLayers,
        train: TrainLayout,
        rollout: RolloutLayout,
        layers: PipelineLayers,
    ) -> None:
        """`routed` is of the whole model, `layers` those of each stage and chunk."""
        self.routed, self._train, self._rollout = routed, train, rollout
        self._rank = dist.get_rank()
        self._kept: dict[int, Routes] = {}
        self._load = np.zeros((len(routed.layers), routed.num_experts), dtype=np.int64)
        of_stages = [sorted(layer for chunk in chunks for layer in chunk) for chunks in layers]
        # Of each stage, the columns of its layers among those of all layers with experts.
        self._columns = [
            [routed.layers.index(layer) for layer in stage if layer in routed.layers]
            for stage in of_stages
        ]

    @property
    def of_stage(self) -> RoutedLayers:
        """The layers with experts on this rank's pipeline stage."""
        columns = self._columns[self._train.pp_rank(self._rank)]
        layers = tuple(self.routed.layers[column] for column in columns)
        return RoutedLayers(layers, self.routed.topk, self.routed.num_experts)

    def forget(self) -> None:
        """A new step begins."""
        self._kept.clear()
        self._load[:] = 0

    def load(self) -> np.ndarray:
        """`[m, e]` int64: how often each expert was chosen in this step, dropped samples included.

        Of the whole model's layers; by one rank of those that sampled the same, zero on the others.
        """
        return self._load

    def keep(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts without their routes, which stay here."""
        group = self._rollout.tp_group_index(self._rank)
        first = self._rollout.rank(group * self._rollout.tp_size)
        left = []
        for rollout in rollouts:
            kept_by = None
            if rollout.routes is not None:
                kept_by = (first, len(self._kept))
                self._kept[kept_by[1]] = rollout.routes
                if first == self._rank:
                    self._load += load_of(rollout.routes, self.routed.num_experts)
            left.append(dataclasses.replace(rollout, routes=None, kept_by=kept_by))
        return left

    def digest(self) -> bytes:
        """Of all that is kept; the same on the ranks of an engine's TP group."""
        found = hashlib.blake2b(digest_size=16)
        for number, routes in self._kept.items():
            found.update(number.to_bytes(8, "little") + routes.digest())
        return found.digest()

    def require_agreement(self, digests: Sequence[bytes]) -> None:
        """RuntimeError, on all ranks, if ranks that sampled the same chose different experts.

        `digests` are those of all ranks.
        """
        for group in range(self._rollout.num_tp_groups):
            slots = range(group * self._rollout.tp_size, (group + 1) * self._rollout.tp_size)
            ranks = [self._rollout.rank(slot) for slot in slots]
            for rank in ranks[1:]:
                if digests[rank] != digests[ranks[0]]:
                    raise RuntimeError(
                        f"ranks {ranks[0]} and {rank} of one engine chose different experts for "
                        "the same tokens"
                    )

    def deliver(
        self,
        samples: Sequence[Rollout],
        lengths: Sequence[int],
        wanted: Sequence[Sequence[int]],
    ) -> dict[int, Routes]:
        """The routes of this rank's samples, by their number in the step, of its stage's layers.

        `samples` are all of the step, `lengths` their tokens; `wanted` is which of them each
        data-parallel rank trains on. Those that nobody keeps anything of are left out. Collective
        over the world.
        """
        outgoing = self._outgoing(samples, wanted)
        mine = self._by_source(samples, wanted[self._train.dp_rank(self._rank)])
        size, shape = self.of_stage.bytes_a_token, (len(self.of_stage.layers), self.routed.topk)
        incoming = [
            sum(int(lengths[sample]) - 1 for sample in mine.get(rank, ())) * size
            for rank in range(len(outgoing))
        ]
        found: dict[int, Routes] = {}
        for source, data in enumerate(objects.exchange(outgoing, incoming)):
            start = 0
            for sample in mine.get(source, ()):
                num_tokens = int(lengths[sample]) - 1
                piece = data[start : start + num_tokens * size]
                ids = piece[num_tokens:].view(self.routed.dtype).reshape(num_tokens, *shape)
                found[sample] = Routes(ids, piece[:num_tokens].view(np.bool_))
                start += len(piece)
        return found

    def _by_source(self, samples: Sequence[Rollout], wanted: Sequence[int]) -> dict[int, list[int]]:
        """Which of its samples this rank gets from which rank."""
        found: dict[int, list[int]] = {}
        source_of: dict[int, int] = {}  # first rank of a group -> the one that sends to this rank
        for sample in wanted:
            if (kept_by := samples[sample].kept_by) is None:
                continue
            first = kept_by[0]
            if first not in source_of:
                slot = self._rollout.slot(first) + self._rank % self._rollout.tp_size
                source_of[first] = self._rollout.rank(slot)
            found.setdefault(source_of[first], []).append(sample)
        return found

    def _outgoing(
        self, samples: Sequence[Rollout], wanted: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """What this rank sends to each."""
        first = self._rollout.rank(self._rollout.tp_group_index(self._rank) * self._rollout.tp_size)
        mine = [
            [samples[i] for i in of_rank if (samples[i].kept_by or (-1,))[0] == first]
            for of_rank in wanted
        ]
        packed: dict[tuple[int, int], np.ndarray] = {}
        outgoing = [np.empty(0, dtype=np.uint8)] * dist.get_world_size()
        for rank in range(len(outgoing)):
            if rank % self._rollout.tp_size != self._rollout.tp_rank(self._rank):
                continue
            where = self._train.dp_rank(rank), self._train.pp_rank(rank)
            if where not in packed:
                packed[where] = self._packed(mine[where[0]], where[1])
            outgoing[rank] = packed[where]
        return outgoing

    def _packed(self, samples: Sequence[Rollout], stage: int) -> np.ndarray:
        """Of each sample which tokens are known, and the choices of a stage."""
        columns = self._columns[stage]
        pieces = [np.empty(0, dtype=np.uint8)]
        for sample in samples:
            assert sample.kept_by is not None
            routes = self._kept[sample.kept_by[1]]
            pieces += [
                routes.known.view(np.uint8),
                np.ascontiguousarray(routes.ids[:, columns]).view(np.uint8).ravel(),
            ]
        return np.concatenate(pieces)
