"""What a rank does to measure the memory of reloads: by vLLM's own way, and by ours.

The model has no checkpoint: its tensors are drawn chunk by chunk, always the same, in as little
memory as asked for, so that what is measured is what loading needs.
"""

from __future__ import annotations

import ctypes
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.memory.usage import PeakMemory
from mcore_rl.hybrid_engine.vllm.sliced_tensor import SlicedTensor
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.model.tensors import checkpoint_tensors
from mcore_rl.model.weight_map import layer_order
from mcore_rl.verify import stored_digests
from tests.footprint import Footprint
from tests.model_only import VLLMModelOnly

NOISE_ELEMENTS = 3 << 20  # of which a chunk is a cut-out
_M_MMAP_THRESHOLD = -3  # of glibc's mallopt

Metadata = dict[str, tuple[tuple[int, ...], torch.dtype]]
Weights = Iterable[tuple[str, torch.Tensor]]


@functools.cache
def _noise(num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.empty(num_elements, dtype=torch.bfloat16).normal_(0, 0.05, generator=generator)


def draw(into: torch.Tensor, name: str, version: int, row: int) -> torch.Tensor:
    """Fill `into` with what the rows from `row` on of a tensor hold in a version of the weights."""
    noise = _noise(NOISE_ELEMENTS)
    start = zlib.crc32(f"{name}/{version}/{row}".encode()) % (NOISE_ELEMENTS - into.numel())
    return into.copy_(noise[start : start + into.numel()].view(into.shape))


def chunks(metadata: Metadata, chunk_bytes: int) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(tensor, first row, shape of the chunk): whole rows, never more than `chunk_bytes`."""
    for name, (shape, _) in metadata.items():
        rows = max(1, chunk_bytes // (2 * math.prod(shape[1:])))
        for row in range(0, shape[0], rows):
            yield name, row, (min(rows, shape[0] - row), *shape[1:])


def arriving(
    metadata: Metadata, version: int, chunk_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parts of tensors in one buffer, which is overwritten as soon as the next is asked for."""
    buffer = torch.empty(chunk_bytes // 2, dtype=torch.bfloat16)
    for name, row, shape in chunks(metadata, chunk_bytes):
        part = draw(buffer[: math.prod(shape)].view(shape), name, version, row)
        box = ((row, row + shape[0]), *((0, n) for n in shape[1:]))
        yield name, SlicedTensor(name, *metadata[name], [(box, part)])
        part.fill_(float("nan"))


def whole(metadata: Metadata, version: int, chunk_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights as `arriving`, a tensor at a time, each in memory of its own."""
    name, tensor = "", torch.empty(0)
    for of, row, shape in chunks(metadata, chunk_bytes):
        if of != name:
            if name:
                yield name, tensor
            name, tensor = of, torch.empty(metadata[of][0], dtype=torch.bfloat16)
        draw(tensor[row : row + shape[0]], name, version, row)
    yield name, tensor


def measure(model_dir: str, chunk_bytes: int, repetitions: int) -> dict[str, Any]:
    """Peaks and digests of reloads by vLLM's own layerwise reload and by ours."""
    # glibc gives freed memory back at once from 32 MB on, and keeps smaller pieces for a while:
    # with a limit of 1 MB from 1 to 9 MB of them, by chance. The model is a small one: its tensors
    # are treated as those of a large one would be.
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 17)
    dist.init_process_group("gloo")
    shapes = {
        name: spec.shape for name, spec in checkpoint_tensors(read_model_shape(Path(model_dir)))
    }
    metadata = {name: (shapes[name], torch.bfloat16) for name in layer_order(shapes)}
    engine = VLLMModelOnly(EngineConfig(model_dir=Path(model_dir), max_model_len=128))
    needs = engine.learn_needs(metadata)
    assert all(needs.values()), "this rank needs everything"

    def upstream(weights: Weights) -> None:
        engine._worker.reload_weights(weights_iterator=iter(weights))

    def peak_of(reload: Callable[[Weights], None], weights: Weights) -> int:
        Footprint.now()  # gives back what was freed
        with PeakMemory() as peak:
            reload(weights)
        return peak.extra_bytes

    found: dict[str, Any] = {
        "module_bytes": largest_modules(engine.model),
        "computed": sorted(engine._reloader._record.computed),
    }
    upstream(whole(metadata, 1, chunk_bytes))
    found["upstream_peaks"] = [peak_of(upstream, whole(metadata, 1, chunk_bytes)) for _ in range(2)]
    expected = stored_digests(engine)
    engine.reload(arriving(metadata, 2, chunk_bytes))
    found["same_as_version_2"] = same(expected, stored_digests(engine))
    found["peaks"], found["resident"] = [], []
    for _ in range(repetitions):
        found["peaks"].append(peak_of(engine.reload, arriving(metadata, 1, chunk_bytes)))
        found["resident"].append(Footprint.now().resident_bytes)
    digests = stored_digests(engine)
    found["differing"] = sorted(digests.keys() - set(same(expected, digests)))
    engine.close()
    return found


def same(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    assert expected.keys() == found.keys()
    return sorted(name for name, digest in found.items() if digest == expected[name])


def largest_modules(model: torch.nn.Module) -> dict[str, int]:
    """Bytes of the parameters of the largest module of each class, as they are loaded."""
    from mcore_rl.hybrid_engine.vllm.needs import loadable_parameters

    sizes: dict[str, int] = {}
    for module in model.modules():
        size = sum(tensor.nbytes for tensor in loadable_parameters(module).values())
        kind = type(module).__name__
        if size > sizes.get(kind, 0):
            sizes[kind] = size
    return sizes
