"""Session of trainer ranks and engine workers: the hand-overs of one connection.

Both sides run this code in one joined world: trainer ranks first, then engine workers. The trainer
offers the hand-over that it makes: tensors, shape and options. Every rank then makes the same plan,
and `HandOver` does the rest.

    Session(...)   same protocol? -> offer -> holdings and needs -> plan -> are all plans the same?
    update(...)    same plan, same version? -> the hand-over -> what has every rank received?

Any failure ends the connection: the rank reports it in the world's store, where the others read it,
and closes its connections, which ends their calls.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, PeerFailure
from mcore_rl.hybrid_engine.vllm.in_process_engine import ServedEngine
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions, WeightStream
from mcore_rl.model.boxes import volume
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.tensors import TensorInfo

if TYPE_CHECKING:
    from mcore_rl.megatron.shards import ModelShards

PROTOCOL = 4  # version of a session's messages; raise it with every change


@dataclass(frozen=True, slots=True)
class Offer:
    """The hand-over that a trainer makes: arguments of `HandOver`, the same on all its ranks."""

    tensors: dict[str, TensorInfo]
    shape: ModelShape
    options: HandOverOptions


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update, by rank of the joined world: trainers, then workers.

    Example: one trainer and one worker: `UpdateReport("17", (4096, 0), (0, 4096), (0, 4096))`.
    """

    weight_version: str
    sent_bytes: tuple[int, ...]  # counted at the calls
    received_bytes: tuple[int, ...]  # counted at the calls
    needed_bytes: tuple[int, ...]  # read by each rank's loaders: the lower bound
    repeated: bool = False  # by the plain gather, as the first attempt did not arrive


class Session:
    """A plan agreed in a joined world. The constructor and `update` are collective over the world.

    Trainers give their `offer` and their `shards`, workers an `engine`. Both raise PeerFailure on
    all ranks, naming the first that failed: if a worker's model does not fit the tensors, if the
    ranks' protocols, offers or plans differ, or if no rank holds what a worker needs.
    """

    def __init__(
        self,
        world: JoinedWorld,
        *,
        device: torch.device | str,
        offer: Offer | None = None,
        shards: ModelShards | None = None,
        engine: ServedEngine | None = None,
    ) -> None:
        self._world, self._updates = world, 0
        self._hand_over: HandOver | None = None
        with self._or_fail():
            self._require_same({"version of the protocol": PROTOCOL})
            offers = [each for each in world.gather(offer, of=Offer | None) if each is not None]
            if any(each != offers[0] for each in offers):
                raise RuntimeError("the trainer's ranks offer different tensors or options")
            self._hand_over = HandOver(
                offers[0].tensors,
                None,
                offers[0].options,
                shards=shards,
                engine=engine,
                shape=offers[0].shape,
                device=torch.device(device),
                world=world,
            )
            self.plan_id = _plan_id(self.stream)
            self._require_same({"plan": self.plan_id})
            self._needed_bytes = _needed_bytes(self.stream)

    @property
    def stream(self) -> WeightStream:
        """What an update streams."""
        assert self._hand_over is not None, "the session is closed"
        return self._hand_over.stream

    def update(self, weight_version: str, *, plan_id: str) -> UpdateReport:
        """Move the weights once. Collective; all ranks give the same version and plan.

        Raises PeerFailure on all ranks, naming the first that failed, or a slice that did not
        arrive, not even by the plain gather.
        """
        assert self._hand_over is not None, "the session is closed"
        self._updates += 1
        with self._or_fail():
            self._require_same(
                {
                    "plan": self.plan_id,
                    "plan of the update": plan_id,
                    "weight version": weight_version,
                    "number of updates": self._updates,
                }
            )
            if plan_id != self.plan_id:
                raise RuntimeError(f"the update is of plan {plan_id}, not of {self.plan_id}")
            self._hand_over.move(self._updates)
            moved = self._hand_over.sent_and_received_bytes()
            sent, received = zip(*self._world.gather(moved, of=tuple[int, int]), strict=True)
            repeated = self._hand_over.repeated
        return UpdateReport(weight_version, sent, received, self._needed_bytes, repeated)

    def _require_same(self, mine: dict[str, Any]) -> None:
        """Raise RuntimeError if one of these values is not the same on all ranks."""
        everyone = self._world.meet(mine)
        for what in mine:
            # Earlier protocols have other messages.
            values = [each.get(what) if isinstance(each, dict) else None for each in everyone]
            ranks = [rank for rank, other in enumerate(values) if other != values[0]]
            if ranks:
                raise RuntimeError(
                    f"the {what} is not the same on all ranks of the joined world: {values[0]!r} "
                    f"on rank 0, {values[ranks[0]]!r} on ranks {ranks}"
                )

    @contextlib.contextmanager
    def _or_fail(self) -> Iterator[None]:
        """Within it an error ends the connection, and becomes the error of all ranks."""
        try:
            yield
        except PeerFailure:
            self._hand_over = None
            raise
        except Exception as error:  # of any type: the other ranks wait for this one
            self._hand_over = None  # it holds process groups
            raise self._world.failure(error) from error

    def close(self) -> None:
        """Close the connections. Not collective."""
        self._hand_over = None
        self._world.close()


def _plan_id(stream: WeightStream) -> str:
    """Return a digest of what moves, between whom and in which buckets."""
    moves = [
        (move.tensor, move.box, [(leg.sender, leg.receivers) for leg in move.tree.legs])
        for move in stream.plan.moves
    ]
    content = (sorted(stream.tensors.items()), moves)
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()[:16]


def _needed_bytes(stream: WeightStream) -> tuple[int, ...]:
    """Return what each rank's engine reads, in bytes."""
    sizes: Sequence[int] = [
        sum(volume(box) * stream.tensors[name].itemsize for name in need for box in need[name])
        for need in stream.holdings.need
    ]
    return tuple(sizes)
