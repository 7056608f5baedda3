"""Calls of roles, by one interface, whether on the actor's ranks or on ranks of their own.

A role is an object of any class; a caller names the method of the class, so that types are checked:

    finish = role.begin(ServedCritic.values, tokens=tokens, asked_by=shares)
    values = finish()["values"].rows

Arguments are keyword-only and the same on all of the actor's ranks; the answer is a typed dict that
is the same on all of the role's ranks, or None. Both hold tensors on the CPU, `Shares` of samples,
and JSON values: numbers per sample, but nothing per token. Data per token travel as a
`RowExchange`, from the ranks of one side that have them to the ranks of the other that need them,
which get an exchange with their rows. Its shares number each side's ranks within that side.
`LocalRole` calls the methods of an object in this process; with `RemoteRole`, `serve` calls them on
the role's ranks. The caller sees no difference.

The two sides of a `RemoteRole` are separate worlds, so what connects them belongs to neither. The
`Bridge`, over which the actor's first rank sends messages, and the `JointGroup` of all ranks, for
exchanges, are separate gloo groups over host memory, made from the job's store.
"""

from __future__ import annotations

import abc
import functools
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.common import objects
from mcore_rl.common.agreement import known_cause, leave_reason

logger = logging.getLogger(__name__)

Values = Mapping[str, Any]  # tensors on the CPU, shares, exchanges, and JSON values
P = ParamSpec("P")
Answer = TypeVar("Answer")  # Values or None
Method = Callable[Concatenate[Any, P], Answer]  # of the class of a role

# A role waits for the next step as long as a rollout lasts. The end of a side is noticed at once:
# its connections close, and the launcher ends the others.
_PATIENCE = timedelta(days=7)
_NEAR, _FAR = 0, 1  # the actor's first rank, and the role's
# Names of messages besides those of methods.
_BUILD, _CLOSE, _ANSWER, _NO_ANSWER, _FAILURE = "build", "close", "answer", "no answer", "failure"
_NUM_SENT = "num_sent"  # the store's counter of a bridge's messages to the role


class Role(abc.ABC):
    """A role as the actor's ranks call it. All methods but `abandon` are collective over these."""

    @abc.abstractmethod
    def begin(
        self, method: Method[P, Answer], *args: P.args, **arguments: P.kwargs
    ) -> Callable[[], Answer]:
        """Start a call; the returned function waits for its answer.

        Calls start in order, each after the answers to all before it. Raises RuntimeError on all
        ranks if the role failed in this call or in an earlier one.
        """

    def call(self, method: Method[P, Answer], *args: P.args, **arguments: P.kwargs) -> Answer:
        """Start a call and return its answer."""
        return self.begin(method, *args, **arguments)()

    @abc.abstractmethod
    def close(self) -> None:
        """End the calls. Idempotent."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Make `close` wait for no other rank, because this one has failed."""


class LocalRole(Role):
    """A role on the actor's ranks, which executes each call at once."""

    def __init__(self, served: Any) -> None:
        self.served = served

    def begin(
        self, method: Method[P, Answer], *args: P.args, **arguments: P.kwargs
    ) -> Callable[[], Answer]:
        call: Callable[..., Any] = getattr(self.served, method.__name__)  # as `serve` does
        answer = call(**_delivered(arguments, _within_world))
        delivered: Any = None if answer is None else _delivered(answer, _within_world)
        return lambda: cast("Answer", delivered)

    def close(self) -> None:
        """Do nothing: no other process waits for a call."""

    def abandon(self) -> None:
        """Do nothing: `close` does not wait."""


class RemoteRole(Role):
    """The actor's side of a role with ranks of its own; `serve` is the other side."""

    def __init__(self, name: str, bridge: Bridge | None, group: JointGroup, **how: Any) -> None:
        """`bridge` is given on the actor's first rank only. The role's ranks begin to build the
        role from `how`; the first call waits for that."""
        self._name, self._bridge, self._group = name, bridge, group
        self._answers: dict[int, Values | None] = {}
        self._num_begun = self._num_answered = 0
        self._lost: str | None = None
        self._is_closed = False
        self._begin(Message(_BUILD, how))

    def begin(
        self, method: Method[P, Answer], *args: P.args, **arguments: P.kwargs
    ) -> Callable[[], Answer]:
        number = self._begin(Message(method.__name__, arguments))

        def finish() -> Answer:
            self._receive_until(number + 1)
            return cast("Answer", self._answers.pop(number))

        return finish

    def _begin(self, message: Message) -> int:
        """Send a call; return its number."""
        # The other side sends only while this one listens: fetch its answers first.
        self._receive_until(self._num_begun)
        number = self._num_begun
        self._num_begun += 1
        self._send(message)
        self._exchange(message.values, to_role=True)
        return number

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._receive_until(self._num_begun)
            self._send(Message(_CLOSE))

    def abandon(self) -> None:
        """Send nothing: the role may be sending an answer that no rank receives, and receive
        nothing itself. It notices this rank's end by its connection, or from the launcher."""
        self._is_closed = True

    def _send(self, message: Message) -> None:
        if self._bridge is not None:
            try:
                self._bridge.send(message)
            except RuntimeError as error:  # all of the actor's ranks raise it on the next answer
                self._lost = str(error)

    def _receive_until(self, num_answered: int) -> None:
        while self._num_answered < num_answered:
            answer = objects.broadcast(
                None if self._bridge is None else self._receive(self._bridge)
            )
            if answer.name == _FAILURE:
                raise RuntimeError(f"the {self._name} failed: {answer.values['reason']}")
            values = self._exchange(answer.values, to_role=False)
            self._answers[self._num_answered] = None if answer.name == _NO_ANSWER else values
            self._num_answered += 1

    def _exchange(self, values: Values, *, to_role: bool) -> Values:
        """Carry out the exchanges. Collective over the ranks of both sides if there is one."""
        try:
            return _delivered(values, functools.partial(self._group.delivered, to_role=to_role))
        except RuntimeError as error:
            raise RuntimeError(f"the {self._name} failed: {_gone(str(error))}") from error

    def _receive(self, bridge: Bridge) -> Message:
        try:
            if self._lost is None:
                return bridge.receive_answer()
        except RuntimeError as error:
            self._lost = str(error)
        return Message(_FAILURE, {"reason": _gone(self._lost)})


def _gone(error: str) -> str:
    """Return why a role does not answer: why one of its processes ended, if this one knows."""
    return known_cause() or f"its ranks are gone ({error})"


@runtime_checkable
class WorksBetweenCalls(Protocol):
    """A served object that has work of its own while no call runs."""

    def work_until(self, is_called: Callable[[], bool]) -> None:
        """Work until a call has begun. `is_called` is a request to a store."""


def serve(name: str, bridge: Bridge, group: JointGroup, build: Callable[..., Any]) -> Any:
    """Be a rank of a role until its caller closes it, and return the served object. Collective over
    the role's ranks.

    `build` makes the object whose methods are called, from the arguments of `RemoteRole`. An
    exception in it or in a method ends this rank, after a message to the caller.
    """
    served: Any = None
    while True:
        if isinstance(served, WorksBetweenCalls):
            try:
                served.work_until(bridge.is_called)
            except Exception as error:
                _leave_failure(name, error)
                raise  # no call waits for an answer; the launcher ends the others
        message = bridge.receive()
        if message.name == _CLOSE:
            return served
        values = _delivered(message.values, functools.partial(group.delivered, to_role=True))
        try:
            if message.name == _BUILD:
                served, answer = build(**values), None
            else:
                answer = getattr(served, message.name)(**values)
        except Exception as error:
            bridge.send_answer(Message(_FAILURE, {"reason": _leave_failure(name, error)}))
            raise
        bridge.send_answer(Message(_NO_ANSWER) if answer is None else Message(_ANSWER, answer))
        _delivered(answer or {}, functools.partial(group.delivered, to_role=False))


def _leave_failure(name: str, error: Exception) -> str:
    """Log why this rank fails and leave it to the launcher, which ends this process while others
    are still being torn down. Return the reason."""
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    leave_reason(f"the {name} failed: {reason}")
    logger.exception("rank %s of the %s failed", os.environ.get("RANK", "0"), name)
    return reason


def _delivered(values: Values, deliver: Callable[[RowExchange], np.ndarray]) -> dict[str, Any]:
    """Return `values` with the rows that this rank gets in each exchange."""
    return {
        name: replace(value, rows=deliver(value)) if isinstance(value, RowExchange) else value
        for name, value in values.items()
    }


def _within_world(exchange: RowExchange) -> np.ndarray:
    return exchange.moved(dist.get_rank(), dist.get_world_size(), objects.exchange)


class JointGroup:
    """A group of all of the actor's ranks and all of a role's. Creating one and all methods are
    collective over them. Raises RuntimeError if one of these processes is gone."""

    def __init__(
        self,
        store: dist.Store,
        *,
        is_near: bool,
        rank: int,
        num_near_ranks: int,
        num_far_ranks: int,
    ) -> None:
        """`rank` is the rank within its side: near is the actor's."""
        self._num_near, self._num_ranks = num_near_ranks, num_near_ranks + num_far_ranks
        self._rank = rank if is_near else num_near_ranks + rank
        # Any: torch's stub leaves out its operations.
        self._group: Any = dist.ProcessGroupGloo(store, self._rank, self._num_ranks, _PATIENCE)

    def delivered(self, exchange: RowExchange, *, to_role: bool) -> np.ndarray:
        """Return the rows that this rank gets from the other side; none on the sending side."""
        if to_role:
            bound = replace(exchange, target=exchange.target.counted_from(self._num_near))
        else:
            bound = replace(exchange, source=exchange.source.counted_from(self._num_near))
        return bound.moved(self._rank, self._num_ranks, self.exchange)

    def exchange(
        self, outgoing: Sequence[np.ndarray], incoming_bytes: Sequence[int]
    ) -> list[np.ndarray]:
        """Exchange bytes as `objects.exchange`, between both sides' ranks, the actor's first."""
        sent = torch.from_numpy(np.concatenate(outgoing))
        received = torch.empty(sum(incoming_bytes), dtype=torch.uint8)
        splits = [len(each) for each in outgoing]
        self._group.alltoall_base(received, sent, list(incoming_bytes), splits).wait()
        return np.split(received.numpy(), np.cumsum(incoming_bytes)[:-1])


@dataclass(frozen=True, slots=True)
class Message:
    """A call or its answer.

    Example: `Message("save", {"num_steps": 3, "folder": "/run/checkpoints"})`.
    """

    name: str
    values: Values = field(default_factory=dict)


class Bridge:
    """One end of a bridge: the actor's first rank, or one of the role's ranks.

    Creating one is collective over these processes. The actor's messages reach all ranks of the
    role; the role's first rank sends the answers. A counter in the store tells ranks that do not
    wait that a message has been sent. Raises RuntimeError if a process at another end is gone.
    """

    def __init__(self, store: dist.Store, *, place: int, num_far_ranks: int) -> None:
        """`place` is 0 for the actor's end, else 1 + the rank within the role."""
        self._place, self._store, self._num_received = place, store, 0
        # Any: torch's stub leaves out its operations.
        self._group: Any = dist.ProcessGroupGloo(store, place, 1 + num_far_ranks, _PATIENCE)

    def send(self, message: Message) -> None:
        """Send from the actor to all ranks of the role."""
        assert self._place == _NEAR
        self._store.add(_NUM_SENT, 1)
        for part in _encoded(message):
            self._broadcast(part)

    def receive(self) -> Message:
        """Receive the actor's message; on every rank of the role."""
        assert self._place != _NEAR
        self._num_received += 1
        return _decoded(self._broadcast)

    def is_called(self) -> bool:
        """Return whether a message waits to be received; on a rank of the role. Does not block."""
        return self._store.add(_NUM_SENT, 0) > self._num_received

    def send_answer(self, message: Message) -> None:
        """Send from the role's first rank to the actor; called on every rank of the role."""
        if self._place == _FAR:
            for part in _encoded(message):
                self._group.send([part], _NEAR, 0).wait()

    def receive_answer(self) -> Message:
        """Receive the role's answer; on the actor's first rank."""

        def receive(part: torch.Tensor) -> None:
            self._group.recv([part], _FAR, 0).wait()

        return _decoded(receive)

    def _broadcast(self, part: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _NEAR, 0
        self._group.broadcast([part], options).wait()


def _encoded(message: Message) -> list[torch.Tensor]:
    """Return the length of a header, the header, and the tensors."""
    tensors: list[torch.Tensor] = []

    def described(value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
        if isinstance(value, Shares):
            samples = np.concatenate([np.empty(0, np.int64), *value.samples])
            counts = [len(each) for each in value.samples]
            return ["shares", value.ranks, counts, described(torch.from_numpy(samples))]
        if isinstance(value, RowExchange):
            lengths = described(torch.from_numpy(value.lengths))
            sides = described(value.source), described(value.target)
            return ["exchange", lengths, *sides, value.rows.dtype.str, value.rows.shape[1:]]
        return ["plain", value]

    header = {"name": message.name, "values": {n: described(v) for n, v in message.values.items()}}
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    full = [tensor.contiguous() for tensor in tensors if tensor.numel()]
    return [torch.tensor([text.numel()]), text, *full]


def _decoded(receive: Callable[[torch.Tensor], None]) -> Message:
    """Return a message whose tensors `receive` fills in turn; exchanges have no rows."""
    length = torch.zeros(1, dtype=torch.int64)
    receive(length)
    text = torch.empty(int(length), dtype=torch.uint8)
    receive(text)
    header = json.loads(text.numpy().tobytes())

    def received(kind: str, *how: Any) -> Any:
        """Receive in the order of the descriptions."""
        if kind == "plain":
            return how[0]
        if kind == "shares":
            ranks, counts, samples = how
            ends = np.cumsum(counts, dtype=np.int64)
            parts = np.split(received(*samples).numpy(), ends)[:-1]
            return Shares(tuple(parts), tuple(tuple(place) for place in ranks))
        if kind == "exchange":
            lengths, source, target, dtype, shape = how
            described = received(*lengths).numpy(), received(*source), received(*target)
            return RowExchange(*described, np.empty((0, *shape), dtype=dtype))
        tensor = torch.empty(how[1], dtype=getattr(torch, how[0]))
        if tensor.numel():
            receive(tensor)
        return tensor

    return Message(header["name"], {n: received(*value) for n, value in header["values"].items()})
