"""Session of trainer ranks and engine workers: they agree on a plan, and execute it.

Both sides run this code in one joined world: trainer ranks first, then engine workers. Trainers
report what they hold, workers what their loaders read, and every rank makes the same plan. In an
update all ranks agree on the start, stream the slices, and agree on the end.

    Session(...)   hello and holdings -> needs -> plan -> are all plans the same?
    update(...)    same plan, same version? -> slices -> did everyone succeed? -> attest

Failures are reported before any rank leaves. A rank whose own work fails (a loader, a read) takes
part until the end of the stream and then reports the failure to all. Only a lost connection ends a
stream early: the rank then closes its own connections, which ends the other ranks' calls, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_rl.hybrid_engine.plan.transfer_plan import Plan, make_plan
from mcore_rl.hybrid_engine.plan.trees import Neighbourhoods, Tree
from mcore_rl.hybrid_engine.proof.attest import OFF, Attestor, ReadSlice
from mcore_rl.hybrid_engine.transfer.transfer import Pieces, Transfer
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, PeerFailure
from mcore_rl.hybrid_engine.vllm.sliced_tensor import WriteObserver
from mcore_rl.model.boxes import Box, Boxes, show, volume
from mcore_rl.model.tensors import TensorInfo
from mcore_rl.model.weight_map import layer_order

PROTOCOL = 3  # version of a session's messages; raise it with every change
LearnNeeds = Callable[[Mapping[str, TensorInfo]], Boxes]
Load = Callable[[Iterator[tuple[str, Pieces]], WriteObserver | None], None]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """One update, by rank of the joined world: trainers, then workers.

    Example: one trainer and one worker: `UpdateReport("17", (4096, 0), (0, 4096), (0, 4096))`.
    """

    weight_version: str
    sent_bytes: tuple[int, ...]  # counted at the calls
    received_bytes: tuple[int, ...]  # counted at the calls
    needed_bytes: tuple[int, ...]  # read by each rank's loaders: the lower bound


class Session:
    """A plan agreed in a joined world. The constructor and `update` are collective over the world.

    Trainers give `tensors`, the same on each, and `have`, the boxes this rank holds; workers give
    `learn`, which returns what this rank needs of the tensors that exist. `attest` is a mode of
    `proof.attest`; trainer rank 0's applies.

    Raises RuntimeError on all ranks, naming the one at fault, if a worker's model does not fit the
    tensors, if the ranks' protocols, tensors or plans differ, or if no rank holds what a worker
    needs.
    """

    def __init__(
        self,
        world: JoinedWorld,
        *,
        bucket_bytes: int,
        device: torch.device | str,
        tensors: Mapping[str, TensorInfo] | None = None,
        have: Boxes | None = None,
        learn: LearnNeeds | None = None,
        attest: str = OFF,
    ) -> None:
        self._world, self._updates = world, 0
        holdings, self.tensors, near, attest = self._holdings(tensors, have, attest)
        need = self._needs(learn)
        self.need: Boxes = need[world.rank]
        self._needed_bytes = tuple(_num_bytes(boxes, self.tensors) for boxes in need)
        plans: list[Plan] = []

        def plan_id() -> str:
            order = layer_order(self.tensors)
            plans.append(make_plan(self.tensors, order=order, have=holdings, need=need, near=near))
            moves = [[m.tensor, m.box, _ways(m.tree)] for m in plans[0].moves]
            return _digest([*moves, bucket_bytes])

        self.plan_id = _require_same(self._agree(plan_id), "plan")
        self._transfer: Transfer | None = Transfer(
            plans[0],
            self.tensors,
            bucket_bytes=bucket_bytes,
            device=device,
            world=world,
        )
        self._attestor: Attestor | None = None
        if attest != OFF:
            self._attestor = Attestor(
                self.tensors, holdings, need, mode=attest, device=device, world=world
            )

    def _holdings(
        self, tensors: Mapping[str, TensorInfo] | None, have: Boxes | None, attest: str
    ) -> tuple[list[Boxes], dict[str, TensorInfo], Neighbourhoods, str]:
        """Return each rank's holdings, the tensors that any rank holds, the neighbourhoods, and the
        mode of attestation."""
        mine = {
            "protocol": PROTOCOL,
            "tensors": _described(tensors or {}) if self._world.rank == 0 else None,
            "described": _digest(_described(tensors)) if tensors is not None else None,
            "have": have or {},
            "host": socket.gethostname(),
            "attest": attest,
        }
        everyone = self._world.exchange(mine)
        _require_same([reply["protocol"] for reply in everyone], "version of the protocol")
        described = [reply["described"] for reply in everyone if reply["described"] is not None]
        _require_same(described, "list of tensors")
        holdings: list[Boxes] = [_boxes(reply["have"]) for reply in everyone]
        held = set[str]().union(*(boxes for boxes in holdings))
        infos = {
            name: TensorInfo(tuple(shape), dtype, itemsize)
            for name, (shape, dtype, itemsize) in everyone[0]["tensors"].items()
            if name in held
        }
        hosts = [reply["host"] for reply in everyone]
        near = Neighbourhoods(tuple(map(hosts.index, hosts)), (0,) * len(hosts))
        return holdings, infos, near, everyone[0]["attest"]

    def _needs(self, learn: LearnNeeds | None) -> list[Boxes]:
        def mine() -> Boxes:
            needs = learn(self.tensors) if learn is not None else {}
            return {name: boxes for name, boxes in needs.items() if boxes}

        return [_boxes(needs) for needs in self._agree(mine)]

    def update(
        self, weight_version: str, *, plan_id: str, read: ReadSlice | None, load: Load | None
    ) -> UpdateReport:
        """Move the weights once. Collective; all ranks give the same version and plan.

        Trainers give `read`, workers `load`, which takes (tensor, some of its pieces) in the order
        of the layers, and what to call with each element that it has written; pieces are valid
        until it requests the next item. Raises RuntimeError on all ranks, naming the first that
        failed or a slice that did not arrive, or its subclass PeerFailure if the connection is
        lost.
        """
        self._updates += 1
        mine = [self.plan_id, plan_id, weight_version, self._updates]
        everyone = self._world.meet(mine)
        what = ("plan", "plan of the update", "weight version", "number of updates")
        for at, name in enumerate(what):
            _require_same([reply[at] for reply in everyone], name)
        if plan_id != self.plan_id:
            raise RuntimeError(f"the update is of plan {plan_id}, all ranks have {self.plan_id}")
        if self._attestor is not None:
            with self._or_fail("the attestation"):
                self._attestor.begin(self._updates, read or _no_source)
                # A rank that fails in the stream can close no group in which a collective runs.
                self._attestor.wait()
        sent, received = zip(*self._agree(lambda: self._move(read, load)), strict=True)
        if self._attestor is not None:
            with self._or_fail("the attestation"):
                attestation = self._attestor.finish()
            if not attestation.ok:
                raise RuntimeError(
                    f"weight version {weight_version} did not arrive: {attestation.findings}"
                )
        return UpdateReport(weight_version, sent, received, self._needed_bytes)

    def _move(self, read: ReadSlice | None, load: Load | None) -> tuple[int, int]:
        """Take part in the stream to its end; return (sent, received) bytes, or raise the error."""
        assert self._transfer is not None, "the session is closed"
        fault: Exception | None = None
        arriving = self._arriving(read or _no_source)
        try:
            if load is not None:
                load(arriving, None if self._attestor is None else self._attestor.note)
        except PeerFailure:
            raise
        except Exception as error:  # reported to the other ranks after the stream
            fault = error
        for _ in arriving:
            pass
        if fault is not None:
            raise fault
        return self._transfer.stats.sent_bytes, self._transfer.stats.received_bytes

    def _arriving(self, read: ReadSlice) -> Iterator[tuple[str, Pieces]]:
        """Yield the transfer's stream; an error in it ends the connection."""
        assert self._transfer is not None
        with self._or_fail("the transfer"):
            yield from self._transfer.stream(read)

    @contextlib.contextmanager
    def _or_fail(self, what: str) -> Iterator[None]:
        """Within it an error ends the connection."""
        try:
            yield
        except Exception as error:  # `fail` reports it to the other ranks
            self._transfer = self._attestor = None
            # The frames of the failed calls hold the process groups, which keep open the
            # connections that the other ranks wait on.
            traceback.clear_frames(error.__traceback__)
            reason = str(error).split(". This is typically")[0]  # without gloo's guesses
            raise PeerFailure(self._world.fail(f"{what} broke: {reason}")) from None

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
        """Run `work`, whose result is JSON, and return its result on each rank.

        Raises RuntimeError on all ranks if it raises on one.
        """
        result, fault = None, None
        try:
            result = work()
        except PeerFailure:
            raise
        except Exception as error:  # of any type: it must be reported to the other ranks
            fault = error
        mine = None if fault is None else str(fault) or repr(fault)
        everyone = self._world.exchange({"fault": mine, "reported": result})
        for rank, reply in enumerate(everyone):
            if reply["fault"] is not None:
                raise RuntimeError(f"rank {rank} of the joined world: {reply['fault']}") from fault
        return [reply["reported"] for reply in everyone]

    def close(self) -> None:
        """Release the transfer and close the connections. Not collective."""
        self._transfer = self._attestor = None
        self._world.close()


def _require_same(values: Sequence[Any], what: str) -> Any:
    if any(other != values[0] for other in values):
        ranks = [rank for rank, other in enumerate(values) if other != values[0]]
        raise RuntimeError(
            f"the {what} is not the same on all ranks of the joined world: {values[0]!r} on "
            f"rank 0, {values[ranks[0]]!r} on ranks {ranks}"
        )
    return values[0]


def _no_source(tensor: str, box: Box, at: Any = ...) -> torch.Tensor:
    raise RuntimeError(f"{tensor}{show(box)} was requested from an engine, which only receives")


def _described(tensors: Mapping[str, TensorInfo]) -> dict[str, list[Any]]:
    return {name: [list(i.shape), i.dtype, i.itemsize] for name, i in sorted(tensors.items())}


def _boxes(received: Mapping[str, Any]) -> dict[str, tuple[Box, ...]]:
    """Convert boxes from JSON, which has no tuples."""
    return {
        name: tuple(tuple((start, stop) for start, stop in box) for box in boxes)
        for name, boxes in received.items()
    }


def _num_bytes(boxes: Boxes, tensors: Mapping[str, TensorInfo]) -> int:
    return sum(volume(box) * tensors[name].itemsize for name, held in boxes.items() for box in held)


def _ways(tree: Tree) -> list[Any]:
    return [[[leg.sender, leg.receivers] for leg in hop] for hop in tree.hops]


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
