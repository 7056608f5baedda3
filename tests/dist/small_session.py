"""A session of one tensor between trainers without Megatron and workers without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_rl.hybrid_engine.proof.attest import FULL
from mcore_rl.hybrid_engine.remote.session import Offer, Session
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld
from mcore_rl.hybrid_engine.vllm.sliced_tensor import Pieces, SlicedTensor, pieces_of
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions
from mcore_rl.model.boxes import Box
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.model.tensors import TensorInfo

TENSOR = "weight"
_CONFIG = Path(__file__).parents[2] / "scripts" / "presets" / "v2-lite.json"


class Shards:
    """A trainer's boxes of the tensor."""

    def __init__(self, boxes: Sequence[Box], read: Callable[..., torch.Tensor]) -> None:
        self._boxes, self.read = tuple(boxes), read

    def tensors(self) -> tuple[str, ...]:
        return (TENSOR,)

    def boxes(self, tensor: str) -> tuple[Box, ...]:
        return self._boxes


class Engine:
    """A worker that needs a box of the tensor; `load` gets its pieces."""

    float8 = adapters = None

    def __init__(self, box: Box, load: Callable[[str, Pieces, Any], None]) -> None:
        self._box, self._load = box, load

    def learn_needs(self, _: Any) -> dict[str, tuple[Box, ...]]:
        return {TENSOR: (self._box,)}

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]], on_write: Any) -> None:
        for name, tensor in weights:
            assert isinstance(tensor, SlicedTensor)
            self._load(name, pieces_of(tensor), on_write)


def session(
    world: JoinedWorld,
    shape: tuple[int, ...],
    *,
    shards: Shards | None = None,
    engine: Engine | None = None,
    device: Any = "cpu",
    **options: Any,
) -> Session:
    """Return a rank's session; trainers give `shards`, workers an `engine`. `options` are those of
    `HandOverOptions`."""
    offer = Offer(
        {TENSOR: TensorInfo(shape, "float32", 4)},
        read_model_shape(_CONFIG),
        HandOverOptions(seed=0, bucket_bytes=1 << 20, attest=FULL, **options),
    )
    given: Any = {"shards": shards, "engine": engine}
    return Session(world, device=device, offer=None if shards is None else offer, **given)


def attestor_of(of: Session) -> Any:
    """Return what compares the hashes of a session's updates."""
    assert of._hand_over is not None
    return of._hand_over._last.proof._attestor
