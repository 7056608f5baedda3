"""What the actor's first rank and the ranks of another role tell each other.

The two sides are worlds of their own, so this is no group of theirs: a gloo group by itself, over
host memory, made from the job's store. Messages are a name, numbers and tensors; what they carry is
a few numbers per token of a step, and never a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A role waits for the next step as long as a rollout lasts. A side that dies is noticed at once:
# its connections close, and the launcher ends the others.
_PATIENCE = timedelta(days=7)
_NEAR, _FAR = 0, 1  # the actor's first rank, and the role's


@dataclass(frozen=True, slots=True)
class Message:
    """`numbers` are JSON; `tensors` of any shape, on the CPU."""

    name: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Bridge:
    """One end of it: that of the actor's first rank, or that of one of the role's ranks.

    Creating one is collective over these processes. Messages of the actor reach all ranks of the
    role; those back come from the role's first rank.
    """

    def __init__(self, store: dist.Store, *, place: int, num_far_ranks: int) -> None:
        """`place` is 0 for the actor's end, else 1 + the rank within the role."""
        self._place = place
        self._group = dist.ProcessGroupGloo(store, place, 1 + num_far_ranks, _PATIENCE)

    def tell(self, message: Message) -> None:
        """From the actor to all ranks of the role."""
        assert self._place == _NEAR
        for part in _encoded(message):
            self._broadcast(part)

    def hear(self) -> Message:
        """What the actor tells; on every rank of the role."""
        assert self._place != _NEAR
        return _decoded(self._broadcast)

    def answer(self, message: Message) -> None:
        """From the role to the actor; on every rank of the role, of which the first one speaks."""
        if self._place == _FAR:
            for part in _encoded(message):
                self._group.send([part], _NEAR, 0).wait()

    def hear_answer(self) -> Message:
        """What the role answers; on the actor's first rank."""

        def receive(part: torch.Tensor) -> None:
            self._group.recv([part], _FAR, 0).wait()

        return _decoded(receive)

    def _broadcast(self, part: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = _NEAR, 0
        self._group.broadcast([part], options).wait()


def _encoded(message: Message) -> list[torch.Tensor]:
    """The length of a header, the header, the tensors."""
    header = {
        "name": message.name,
        "numbers": message.numbers,
        "tensors": [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in message.tensors.items()
        ],
    }
    text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    full = [tensor.contiguous() for tensor in message.tensors.values() if tensor.numel()]
    return [torch.tensor([text.numel()]), text, *full]


def _decoded(receive: Any) -> Message:
    """A message of which `receive` fills one tensor after the other."""
    length = torch.zeros(1, dtype=torch.int64)
    receive(length)
    text = torch.empty(int(length), dtype=torch.uint8)
    receive(text)
    header = json.loads(text.numpy().tobytes())
    tensors = {}
    for name, dtype, shape in header["tensors"]:
        tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if tensors[name].numel():
            receive(tensors[name])
    return Message(header["name"], header["numbers"], tensors)
