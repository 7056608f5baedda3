"""A hand-over in FP8 blocks by the ranks of a job, to engines whose needs are given.

vLLM has no kernels for FP8 blocks on CPUs, and does not build such a model there. What its classes
for CUDA need and store is tested in tests/cuda.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.hybrid_engine.proof.attest import FULL, Attestor
from mcore_rl.hybrid_engine.transfer.gather import GatherPath
from mcore_rl.hybrid_engine.vllm.sliced_tensor import pieces_of
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions, WeightStream
from mcore_rl.megatron.float8 import quantised_weights
from mcore_rl.model.boxes import Box, full_box, slices
from mcore_rl.model.float8_blocks import Float8Weights, float8_weights
from mcore_rl.model.layout import RolloutLayout
from tests.dist.jobs import first_mini_batch, started


@dataclasses.dataclass
class GivenNeeds:
    """What a `WeightStream` asks of an engine of one rank: everything is needed."""

    float8: Float8Weights | None

    def learn_needs(self, metadata: Mapping[str, Any]) -> dict[str, tuple[Box, ...]]:
        return {name: (full_box(shape),) for name, (shape, _) in metadata.items()}


def hand_overs(flags: list[str], powers_of_two: bool) -> dict[str, Any]:
    """Two hand-overs with an update between them; each by the plan and by the plain gather."""
    job, actor, shards = started(flags)
    batch = first_mini_batch(job, has_reference=False)
    layout = RolloutLayout(dist.get_world_size(), 1, False, float8=True)
    quantised = float8_weights(job.spec.shape, layout, powers_of_two=powers_of_two)
    options = HandOverOptions(seed=1, delta=True, full_every=100)
    streams = {
        name: WeightStream(
            job.spec.checkpoint.tensors,
            job.spec.train_layout,
            options,
            shards=shards,
            engine=GivenNeeds(float8),
            shape=shards.shape,
            device=shards.device,
        )
        for name, float8 in (("float8", quantised), ("bf16", None))
    }
    stream = streams["float8"]
    gather = GatherPath(
        stream.tensors,
        order=stream.order,
        have=stream.holdings.have,
        wanted=list(stream.tensors),
        bucket_bytes=1 << 20,
        device="cpu",
    )
    attestor = Attestor(
        stream.tensors,
        stream.holdings.have,
        stream.holdings.need,
        mode=FULL,
    )
    found: dict[str, Any] = {
        "quantised": len(quantised.weights),
        "cut_blocks": stream._float8._num_shared,
        "lower_bound": [stream.lower_bound_bytes, streams["bf16"].lower_bound_bytes],
        "equal": [],
        "gathered_equal": [],
        "attested": [],
        "received": [],
    }
    for version in (1, 2):
        expected = dict(quantised_weights(whole_weights(shards).items(), quantised))
        stream.prepare()
        attestor.begin(version, stream.read)
        arrived = collected(stream, attestor)
        found["attested"].append(str(attestor.finish(None)))
        found["equal"].append(unlike(arrived, expected))
        found["gathered_equal"].append(unlike(dict(gather.weights(stream.read)), expected))
        stats = stream.transfer.stats
        found["received"].append(stats.received_bytes - stats.header_bytes)
        actor.update(batch)
    dist.destroy_process_group()
    return found


def collected(stream: WeightStream, attestor: Attestor) -> dict[str, torch.Tensor]:
    """The complete tensors that arrive."""
    found: dict[str, torch.Tensor] = {}
    for name, part in stream.weights():
        whole = found.setdefault(name, torch.empty(part.shape, dtype=part.dtype))
        for box, data in pieces_of(part):
            whole[slices(box)] = data
            attestor.note(name, box, data)
    return found


def whole_weights(shards: Any) -> dict[str, torch.Tensor]:
    """The model's complete tensors, by all ranks' shares."""

    def held() -> Iterator[tuple[str, Box, torch.Tensor]]:
        for name in shards.tensors():
            for box in shards.boxes(name):
                yield name, box, shards.read(name, box).clone()

    found: dict[str, torch.Tensor] = {}
    for share in objects.all_gather(list(held())):
        for name, box, data in share:
            shape = shards._infos[name].shape
            found.setdefault(name, torch.empty(shape, dtype=data.dtype))[slices(box)] = data
    return found


def unlike(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that only one side has, or that differ in dtype or in any byte."""
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found
        or name not in expected
        or found[name].dtype is not expected[name].dtype
        or not torch.equal(found[name].view(torch.uint8), expected[name].view(torch.uint8))
    )
