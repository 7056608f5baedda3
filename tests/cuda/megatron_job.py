"""Megatron's models for CUDA: do they come out of the derived flags as `weight_map` expects them?

    python -m tests.cuda.megatron_job transformer_engine|local cases.json

A case has a published config, perhaps cut to its first layers, a job's flags and the ranks to be
built. Of each rank the names and shapes of all parameters are told, what of them `weight_map` and
Megatron's own distributed checkpoints (`sharded_state_dict`) place differently, and which ones the
optimizer would take for experts' and are not, or the other way round.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tests.cuda import megatron_models

with_engine = sys.argv[1] == "transformer_engine"
PLATFORM = megatron_models.prepare(transformer_engine=with_engine)

import torch  # noqa: E402

from mcore_rl.common.errors import UsageError  # noqa: E402
from mcore_rl.flags import derived as derived_flags  # noqa: E402
from mcore_rl.megatron.adapter import stage_layers  # noqa: E402
from mcore_rl.megatron.shards import ModelShards  # noqa: E402
from mcore_rl.model.boxes import Box, disjoint, full_box, uncovered  # noqa: E402
from mcore_rl.model.config_json import ModelShape  # noqa: E402
from mcore_rl.model.delta_net import DeltaNet  # noqa: E402
from mcore_rl.model.weight_map import ShardCoordinates, map_parameter  # noqa: E402
from mcore_rl.model.weight_rules import Piece  # noqa: E402
from tests.cuda.presets import shape_of, tensor_infos  # noqa: E402
from tests.model_shapes import published_shape  # noqa: E402

APEX = dataclasses.replace(PLATFORM, fused_weight_gradients=True)


def main() -> None:
    cases = json.loads(Path(sys.argv[2]).read_text())
    found = {name: examined(case) for name, case in cases.items()}
    print(json.dumps({"platform": str(PLATFORM), "cases": found, "said": without_flags()}))


def examined(case: Mapping[str, Any]) -> dict[str, Any]:
    """What Megatron makes of a case, with Apex's kernels and without."""
    shape = shape_of(case)
    derived = {}
    for platform in (APEX, PLATFORM):
        megatron_models.set_apex(platform.fused_weight_gradients)
        job = megatron_models.parsed(case["flags"], shape, platform, world_size=case["world_size"])
        key = "apex" if platform.fused_weight_gradients else "no_apex"
        derived[key] = [token for token in job.tokens if token not in case["flags"]]
        if platform is APEX:  # the model without Apex is built below
            with megatron_models.as_rank(job, case["world_size"] - 1):  # of the last stage
                megatron_models.build(job)
    assert case["world_size"] - 1 in case["ranks"]
    everywhere: dict[str, list[Box]] = defaultdict(list)
    of_class = "hybrid" if shape.blocks else "gpt"
    ranks = {rank: built(job, rank, of_class, everywhere) for rank in case["ranks"]}
    ends = {case["ranks"][0], case["ranks"][-1]}  # the first stage and the last
    again = sorted(ends) if of_class == "gpt" else []
    hybrid = {rank: built(job, rank, "hybrid", defaultdict(list)) for rank in again}
    lacking = [
        name
        for name, info in tensor_infos(shape).items()
        if uncovered(full_box(info.shape), disjoint(everywhere[name]))
    ]
    return {"derived": derived, "ranks": ranks, "hybrid": hybrid, "lacking": lacking}


def built(
    job: megatron_models.Job, rank: int, model_class: str, everywhere: dict[str, list[Box]]
) -> dict[str, Any]:
    """One rank's model; what it holds of the checkpoint is added to `everywhere`."""
    with megatron_models.as_rank(job, rank):
        model = megatron_models.build(job, model_class)
        layout, layers = job.layout, stage_layers(model)
        shards = ModelShards([model], job.shape, layout, rank, tensor_infos(job.shape))
        for tensor in shards.tensors():
            everywhere[tensor].extend(shards.boxes(tensor))
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())
        weights |= {name: b for name, b in model.named_buffers() if name in model.state_dict()}
        by_megatron = {
            name: shards_of(entry)
            for name, entry in cast(Any, model).sharded_state_dict().items()
            if name in weights
        }

        def elsewhere(rank: int) -> list[str]:
            """Parameters that `weight_map` would place elsewhere if this were `rank`."""
            at = ShardCoordinates.of(layout, rank, layers)
            return [
                name
                for name, weight in weights.items()
                # Megatron stores its two parts.
                if ".linear_qkv_down_proj." not in name
                and not is_same_place(
                    name,
                    map_parameter(name, tuple(weight.shape), job.shape, at),
                    by_megatron[name],
                    job.shape,
                )
            ]

        return {
            "layers": layers,
            "shapes": {name: list(weight.shape) for name, weight in weights.items()},
            "elsewhere": elsewhere(rank),
            "of_neighbour_elsewhere": len(elsewhere(rank ^ 1)),
            "checkpoint_keys": sorted({s.key for shards in by_megatron.values() for s in shards}),
            "wrong_optimizer": [
                name
                for name, parameter in model.named_parameters()
                if layout.ep_size > 1
                and (".experts." in name) == getattr(parameter, "allreduce", True)
            ],
            "sinks_not_split": [  # of gradients' norm only the first rank's would be a part
                name
                for name, parameter in model.named_parameters()
                if name.endswith("softmax_offset")
                and not getattr(parameter, "tensor_model_parallel", False)
            ],
            "devices": sorted({weight.device.type for weight in weights.values()}),
        }


def shards_of(entry: Any) -> list[Any]:
    """Megatron's ShardedTensors of one entry of a sharded state dict."""
    return entry.build() if hasattr(entry, "build") else [entry]


def is_same_place(
    name: str, pieces: tuple[Piece, ...], shards: list[Any], shape: ModelShape
) -> bool:
    """Whether our boxes of the checkpoint are where Megatron says that the parameter belongs.

    Megatron speaks of the whole parameter: gate over up projection; queries, keys and values of one
    group after the other; the padded vocabulary; experts and layers in dimensions of their own.
    Stacked parts that TP cuts, of layers that keep a state, it stores one by one.
    """
    boxes = [piece.checkpoint_box for piece in pieces]
    if len(shards) > 2 and shape.delta_net and shape.delta_net.by_key_head and "in_proj" in name:
        return are_rows_of_same_heads(pieces, shards, shape.delta_net)
    if len(shards) > 2:
        return boxes == boxes_of_parts(pieces, shards)
    if len(shards) == 2:
        gate, up = map(box_of, shards)
        half = global_shape(shards[0])[0] // 2
        return boxes == [gate, ((up[0][0] - half, up[0][1] - half), *up[1:])]
    box, whole = box_of(shards[0]), global_shape(shards[0])
    if "linear_qkv." in name and "norm" not in name:
        queries = shape.num_heads * shape.head_dim * (2 if shape.output_gate else 1)
        starts_alike = boxes[0][0][0] * whole[0] == box[0][0] * queries
        rows = sum(piece[0][1] - piece[0][0] for piece in boxes)
        return starts_alike and rows == box[0][1] - box[0][0] and boxes[0][1:] == box[1:]
    if "word_embeddings" in name or (name == "output_layer.weight" and not shape.value_head):
        box = ((box[0][0], min(box[0][1], shape.vocab_size)), *box[1:])
        return boxes == ([box] if box[0][0] < box[0][1] else [])
    return boxes == [box]


def boxes_of_parts(pieces: tuple[Piece, ...], shards: list[Any]) -> list[Box]:
    """In the checkpoint's tensors, where a part follows the one before."""
    boxes, first = [], Counter[str]()
    for piece, shard in zip(pieces, shards, strict=True):
        (begin, end), *others = box_of(shard)
        start = first[piece.tensor]
        boxes.append(((start + begin, start + end), *others))
        first[piece.tensor] += global_shape(shard)[0]
    return boxes


def are_rows_of_same_heads(
    pieces: tuple[Piece, ...], shards: list[Any], delta_net: DeltaNet
) -> bool:
    """Qwen3-Next's projections have all rows of a head together, so that a rank has one range."""
    (begin, end), whole = box_of(shards[0])[0], global_shape(shards[0])[0]
    rows = {name: sum(parts) for name, parts in delta_net.projections().items()}
    num_rows = 0
    for piece in pieces:
        (of_tensor,) = (size for name, size in rows.items() if piece.tensor.endswith(name))
        first, last = (row * whole for row in piece.checkpoint_box[0])
        if first < begin * of_tensor or last > end * of_tensor:
            return False
        num_rows += (last - first) // whole
    return num_rows == sum(end - begin for (begin, end), *_ in map(box_of, shards))


def box_of(shard: Any) -> Box:
    offset = shard.global_offset[shard.prepend_axis_num :]
    return tuple((o, o + size) for o, size in zip(offset, shard.local_shape, strict=True))


def global_shape(shard: Any) -> tuple[int, ...]:
    return tuple(shard.global_shape[shard.prepend_axis_num :])


def without_flags() -> dict[str, str]:
    """What Megatron says where a flag that is derived is left out; it is derived for a reason."""
    llama, moonlight = (published_shape(name) for name in ("llama-3.2-1b", "moonlight-16b-a3b"))
    said = {}
    megatron_models.set_apex(True)
    job = megatron_models.parsed([], llama, APEX, world_size=1)
    megatron_models.set_apex(False)
    with megatron_models.as_rank(job, 0):
        said["gradient_accumulation_fusion"] = raised(lambda: megatron_models.build(job))
    derive = derived_flags.machine_flags
    derived_flags.machine_flags = lambda shape, platform: {
        source: [token for token in tokens if token != "--no-rope-fusion"]
        for source, tokens in derive(shape, platform).items()
    }
    for name, shape in {"llama": llama, "moonlight": moonlight}.items():
        said[f"rope_fusion of {name}"] = raised(
            lambda shape=shape: megatron_models.parsed([], shape, PLATFORM, world_size=1)
        )
    derived_flags.machine_flags = derive
    return said


def raised(action: Any) -> str:
    try:
        action()
    except (RuntimeError, UsageError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
