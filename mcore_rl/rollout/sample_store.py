"""Storage of samples on the ranks that sampled them, and delivery to the ranks that train on them.

These are the same ranks, or engines have ranks of their own (`JointRanks`).

All ranks have a table with a few numbers per sample. Tokens, log-probs and chosen experts stay on
the ranks of the sampling engine until the assignment of samples to training ranks is known. Then
each rank receives its samples once, as bytes, with the experts of its pipeline stage only. All
ranks of a TP group store the same samples, so each sends to a part of the receivers.

Shape legend: n samples of the step; t tokens of a sample; m layers with experts (of a stage); k
choices a token; r tokens of a response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.sample_exchange import Exchange, Moves, RowExchange, Shares
from mcore_rl.batching.table import SampleTable, SampleTokens, tokens_to_rows
from mcore_rl.batching.types import ScoredRollout, TopTokens
from mcore_rl.common import objects
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.moe.routing import RoutedLayers, Routes, load_of

_NOTHING = np.empty(0, dtype=np.uint8)
_TOKEN_BYTES = 4 + 4 + 1  # id, log-prob, flags (generated, experts known)
_TOP_BYTES = 4 + 4  # id and log-prob, of each of the most probable tokens of the response
_TURN_BYTES = 4  # with environments: the reward of the turn that ends with the token
_GENERATED, _KNOWN = 1, 2


@dataclass(frozen=True, slots=True)
class JointRanks:
    """The ranks of training and engines together, and this rank among them.

    If both have the same ranks, these are the ranks of the world. Otherwise the ranks of training
    come first, and engine rank e is joint rank `first_engine` + e.

    Example: on engine rank 1, beside 4 ranks of training: `JointRanks(5, 6, 4, group.exchange)`.
    """

    rank: int
    num_ranks: int
    first_engine: int
    joint_exchange: Exchange | None = None  # collective over all of them; None: over the world

    @classmethod
    def of_world(cls) -> JointRanks:
        """Return the ranks of the world, where training and engines have the same ranks."""
        return cls(dist.get_rank(), dist.get_world_size(), 0)

    def exchange(
        self, outgoing: Sequence[np.ndarray], incoming_bytes: Sequence[int]
    ) -> Sequence[np.ndarray]:
        """Exchange bytes between the joint ranks, as `objects.exchange`."""
        return (self.joint_exchange or objects.exchange)(outgoing, incoming_bytes)

    @property
    def engine_rank(self) -> int | None:
        """This rank among those of the engines; None if it has none."""
        return self.rank - self.first_engine if self.rank >= self.first_engine else None


class SampleStore:
    """The current step's samples of this rank's engine.

    On a rank without an engine it is empty, and only `deliver` and `of_stage` may be called."""

    def __init__(
        self,
        train: TrainLayout,
        rollout: RolloutLayout,
        layers: PipelineLayers,
        routed: RoutedLayers | None = None,
        *,
        has_turns: bool = False,
        num_top: int = 0,
        ranks: JointRanks | None = None,
    ) -> None:
        """`layers` are the layers of each stage and chunk. `routed` describes the experts of the
        complete model, if samples carry their experts. `has_turns`: samples carry the rewards of
        their turns. `num_top` is the number of most probable tokens that come with each token of a
        response. `ranks` are by default those of the world."""
        self._has_turns, self.num_top = has_turns, num_top
        self.routed, self._train, self._rollout = routed, train, rollout
        self._ranks = ranks or JointRanks.of_world()
        self._trains = self._ranks.rank < train.world_size
        self.home = -1
        if (engine_rank := self._ranks.engine_rank) is not None:
            group = rollout.tp_group_index(engine_rank)
            self.home = rollout.rank(group * rollout.tp_size)
        self._samples: list[ScoredRollout] = []
        shape = (0, 0) if routed is None else (len(routed.layers), routed.num_experts)
        self._load = np.zeros(shape, dtype=np.int64)
        layers_of_stages = [
            sorted(layer for chunk in chunks for layer in chunk) for chunks in layers
        ]
        # For each stage, the columns of its layers among all layers with experts.
        self._columns = [
            [] if routed is None else [routed.layers.index(x) for x in stage if x in routed.layers]
            for stage in layers_of_stages
        ]

    def of_stage(self, stage: int | None = None) -> RoutedLayers:
        """Return the layers with experts of a pipeline stage, by default of this rank's."""
        assert self.routed is not None, "samples come without their experts"
        columns = self._columns[self._train.pp_rank(self._ranks.rank) if stage is None else stage]
        layers = tuple(self.routed.layers[column] for column in columns)
        return RoutedLayers(layers, self.routed.topk, self.routed.num_experts)

    # This rank's samples

    def clear(self) -> None:
        """Remove the samples and the expert load of the last step."""
        self._samples.clear()
        self._load[:] = 0

    def add(self, scored: Sequence[ScoredRollout]) -> int:
        """Store samples and return the number of the first. Local; called in the same order on all
        ranks of a TP group, of which only the first may know rewards."""
        first = len(self._samples)
        self._samples += scored
        if self.routed is not None and self._is_home:
            for sample in scored:
                if sample.rollout.routes is not None:
                    self._load += load_of(sample.rollout.routes, self.routed.num_experts)
        return first

    def set_rewards(self, first: int, scored: Sequence[ScoredRollout]) -> None:
        """Replace the samples from number `first` on by scored ones."""
        self._samples[first : first + len(scored)] = scored

    def first(self, count: int) -> list[ScoredRollout]:
        """Return the first samples that are stored here, at most `count`. Local."""
        return self._samples[:count]

    def table(self, first: int, draws: Sequence[int]) -> SampleTable:
        """Return the table of the samples from number `first` on; `draws` has the draw of each."""
        numbers = range(first, first + len(draws))
        scored = self._samples[first : first + len(draws)]
        return SampleTable.of(scored, home=self.home, numbers=numbers, draws=draws)

    def load(self) -> np.ndarray:
        """Return `[m, e]` int64: how often each expert was chosen, including dropped samples.

        m covers the complete model. One rank per TP group counts; the others return zeros.
        """
        return self._load

    def digest(self) -> bytes:
        """Return a digest of all stored samples; equal on the ranks of an engine's TP group."""
        hasher = hashlib.blake2b(digest_size=16)
        for number, sample in enumerate(self._samples):
            hasher.update(number.to_bytes(8, "little"))
            hasher.update(np.ascontiguousarray(sample.rollout.response_token_ids).tobytes())
            if sample.rollout.routes is not None:
                hasher.update(sample.rollout.routes.digest())
        return hasher.digest()

    def require_agreement(self, digests: Sequence[bytes]) -> None:
        """Raise RuntimeError, on all ranks, if the ranks of a TP group store different samples.

        `digests` has one digest per rank of the world.
        """
        for group in range(self._rollout.num_tp_groups):
            slots = range(group * self._rollout.tp_size, (group + 1) * self._rollout.tp_size)
            ranks = [self._rollout.rank(slot) for slot in slots]
            for rank in ranks[1:]:
                if digests[rank] != digests[ranks[0]]:
                    raise RuntimeError(
                        f"ranks {ranks[0]} and {rank} of one engine sampled different tokens, or "
                        "chose different experts"
                    )

    # Delivery

    @property
    def _is_home(self) -> bool:
        return self.home == self._ranks.engine_rank

    def deliver(self, table: SampleTable, wanted: Shares) -> dict[int, SampleTokens]:
        """Return this rank's samples of `wanted`, by their row in the table, with the experts of
        its stage. Collective over the joint ranks."""
        sampled = self._sampled(table).counted_from(self._ranks.first_engine)
        moves = Moves.of(self._ranks.rank, len(table), sampled, wanted)
        outgoing = [_NOTHING] * self._ranks.num_ranks
        packed: dict[tuple[int, int | None], np.ndarray] = {}
        for rank, samples in moves.outgoing.items():
            stage = None if self.routed is None else self._train.pp_rank(rank)
            key = id(samples), stage  # the same for all ranks of a place
            if key not in packed:
                kept = (self._samples[number] for number in table.numbers[samples].tolist())
                packed[key] = np.concatenate([self.pack(each, stage) for each in kept])
            outgoing[rank] = packed[key]
        stage = None
        if self.routed is not None and self._trains:
            stage = self._train.pp_rank(self._ranks.rank)
        width, incoming = self.bytes_per_token(stage), [0] * len(outgoing)
        top_width = _TOP_BYTES * self.num_top
        for rank, samples in moves.incoming.items():
            incoming[rank] = int(table.lengths[samples].sum()) * width
            incoming[rank] += int(table.response_lengths[samples].sum()) * top_width
        received = self._ranks.exchange(outgoing, incoming)
        tokens: dict[int, SampleTokens] = {}
        for rank, samples in moves.incoming.items():
            lengths, responses = table.lengths[samples], table.response_lengths[samples]
            sizes = lengths * width + responses * top_width
            parts = np.split(received[rank], sizes.cumsum()[:-1])
            for sample, length, data in zip(samples.tolist(), lengths, parts, strict=True):
                tokens[sample] = self.unpack(data, int(length), stage)
        return tokens

    def row_exchange(self, table: SampleTable, wanted: Shares) -> RowExchange:
        """Return the tokens of samples as the rows of `tokens_to_rows`, from the ranks of the
        engines in their world, for ranks of any world. Local."""
        sampled = self._sampled(table)
        numbers = table.numbers[sampled.of(dist.get_rank())].tolist()
        rows = tokens_to_rows([SampleTokens.of(self._samples[number]) for number in numbers])
        return RowExchange(table.lengths, sampled, wanted, rows)

    def _sampled(self, table: SampleTable) -> Shares:
        """Return which samples the ranks of each TP group store, by their ranks as engines."""
        slots = np.arange(self._rollout.world_size).reshape(-1, self._rollout.tp_size)
        ranks = [tuple(self._rollout.rank(slot) for slot in group) for group in slots.tolist()]
        return Shares(
            tuple(np.flatnonzero(table.homes == place[0]) for place in ranks), tuple(ranks)
        )

    def on_first_rank(self, table: SampleTable, rows: Sequence[int]) -> list[ScoredRollout]:
        """Return these samples with texts and rewards on rank 0 of the engines, an empty list on
        the others. Collective over the engines' ranks."""
        samples_here = {}
        if self._is_home:
            samples_here = {
                row: self._samples[int(table.numbers[row])]
                for row in rows
                if table.homes[row] == self.home
            }
        samples: dict[int, ScoredRollout] = {}
        for part in objects.gather(samples_here) or []:
            samples |= part
        return [samples[row] for row in rows] if dist.get_rank() == 0 else []

    def bytes_per_token(self, stage: int | None) -> int:
        """Return the bytes per token."""
        turn_bytes = _TURN_BYTES if self._has_turns else 0
        route_bytes = 0 if stage is None else self.of_stage(stage).bytes_a_token - 1
        return _TOKEN_BYTES + turn_bytes + route_bytes

    def pack(self, sample: ScoredRollout, stage: int | None) -> np.ndarray:
        """Return the bytes of a sample for a rank of this pipeline stage, None: without experts."""
        tokens = SampleTokens.of(sample)
        flags = tokens.is_generated.astype(np.uint8) * np.uint8(_GENERATED)
        pieces = [tokens.token_ids.view(np.uint8), tokens.log_probs.view(np.uint8), flags]
        if stage is not None:
            assert self.routed is not None
            size = len(tokens.token_ids), len(self._columns[stage]), self.routed.topk
            ids = np.zeros(size, dtype=self.routed.dtype)
            if tokens.routes is not None:
                flags[:-1] |= tokens.routes.known * np.uint8(_KNOWN)
                ids[:-1] = tokens.routes.ids[:, self._columns[stage]]
            pieces.append(ids.view(np.uint8).ravel())
        if self._has_turns:
            assert tokens.turn_rewards is not None
            pieces.append(tokens.turn_rewards.view(np.uint8))
        if self.num_top:
            pieces += self._packed_top(sample)
        return np.concatenate(pieces)

    def _packed_top(self, sample: ScoredRollout) -> list[np.ndarray]:
        top, num_response = sample.rollout.top_tokens, len(sample.rollout.response_token_ids)
        if top is None and (sample.rollout.failure is not None or not num_response):
            return [np.zeros(num_response * self.num_top * _TOP_BYTES, dtype=np.uint8)]
        assert top is not None and top.ids.shape == (num_response, self.num_top), (
            f"a sample has other most probable tokens than {self.num_top} at each position"
        )
        pieces = (np.ascontiguousarray(each) for each in (top.ids, top.log_probs))
        return [each.view(np.uint8).ravel() for each in pieces]

    def unpack(self, data: np.ndarray, length: int, stage: int | None) -> SampleTokens:
        """Return the tokens in the bytes of `pack`, which may lie anywhere in a message."""
        turn_rewards, routes, top = None, None, None
        if self.num_top:
            data, of_top = np.split(data, [length * self.bytes_per_token(stage)])
            ids, log_probs = np.split(of_top.copy(), 2)
            top = TopTokens(
                ids.view(np.int32).reshape(-1, self.num_top),
                log_probs.view(np.float32).reshape(-1, self.num_top),
            )
        if self._has_turns:
            data, turn_data = np.split(data, [len(data) - _TURN_BYTES * length])
            turn_rewards = turn_data.copy().view(np.float32)
        token_ids, log_probs, flags, ids = np.split(data, np.array([4, 8, 9]) * length)
        if stage is not None:
            layers = self.of_stage(stage)
            shape = (length, len(layers.layers), layers.topk)
            known = flags[:-1] & _KNOWN != 0
            routes = Routes(ids.copy().view(layers.dtype).reshape(shape)[:-1], known)
        return SampleTokens(
            # Copies, because a slice of bytes may be unaligned.
            token_ids=token_ids.copy().view(np.int32),
            is_generated=flags & _GENERATED != 0,
            log_probs=log_probs.copy().view(np.float32),
            routes=routes,
            turn_rewards=turn_rewards,
            top_tokens=top,
        )
