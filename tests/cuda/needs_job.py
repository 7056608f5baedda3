"""What every slot of an engine needs of the checkpoint, by the loaders of vLLM's model for CUDA.

    python -m tests.cuda.needs_job CONFIG TP DP FOLDER FORMATS [SLOT ...]

Writes a pickle to FOLDER for each of FORMATS, under its name: for each slot, checkpoint tensor ->
boxes, as `learn_needs` has them. Every slot is built with two layers of full width, a dense one and
one with experts; the needs of the model's other layers are taken to be those of the layer of the
same kind. The SLOTs named are built with all their layers, and their needs are compared with that.
FORMATS are `bfloat16,float8` or one of them; in `float8` linear layers are in FP8 blocks.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cuda import vllm_model

vllm_model.pretend((9, 0))

import torch  # noqa: E402

from mcore_rl.model.boxes import Box  # noqa: E402
from mcore_rl.model.config_json import model_shape  # noqa: E402
from mcore_rl.model.families import FAMILIES  # noqa: E402
from mcore_rl.model.float8_blocks import float8_weights  # noqa: E402
from mcore_rl.model.layout import RolloutLayout  # noqa: E402
from mcore_rl.model.tensors import TensorInfo  # noqa: E402
from tests.model_shapes import CONFIGS  # noqa: E402

Needs = dict[str, tuple[Box, ...]]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def main() -> None:
    config, tp_size, dp_size, folder, formats, *whole_slots = sys.argv[1:]
    published = json.loads((CONFIGS / f"{config}.json").read_text())
    # Without it vLLM takes the model for one that embeds texts, and leaves its head out.
    published["architectures"] = [FAMILIES[published["model_type"]].class_name]
    short = {**published, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    layout: dict[str, Any] = {"tp_size": int(tp_size), "dp_size": int(dp_size)}
    said = {}
    for name in formats.split(","):
        layout["in_float8"] = name == "float8"
        needs, unlike = [], []
        for slot in range(int(tp_size) * int(dp_size)):
            learned = learn(short, Path(folder) / "short", slot, **layout)
            needs.append(of_all_layers(learned, published))
        for slot in map(int, whole_slots):
            learned = learn(published, Path(folder) / "whole", slot, **layout)
            unlike += [tensor for tensor in learned if learned[tensor] != needs[slot].get(tensor)]
            unlike += [tensor for tensor in needs[slot] if tensor not in learned]
        (Path(folder) / name).write_bytes(pickle.dumps(needs))
        said[name] = {"unlike": unlike[:10]}
    print(json.dumps(said))


def learn(
    config_json: Mapping[str, Any],
    folder: Path,
    slot: int,
    *,
    tp_size: int,
    dp_size: int,
    in_float8: bool,
) -> Needs:
    model_dir = vllm_model.write_config(folder, config_json)
    metadata, float8 = vllm_model.metadata_of(config_json), None
    if in_float8:
        shape = model_shape(config_json, Path("config.json"), for_planning=True)
        float8 = float8_weights(shape, RolloutLayout(tp_size * dp_size, tp_size, True, dp_size))
        infos = {n: TensorInfo(size, str(d)[6:], d.itemsize) for n, (size, d) in metadata.items()}
        metadata = {
            name: (info.shape, getattr(torch, info.dtype))
            for name, info in float8.in_blocks(infos).items()
        }
    with vllm_model.build(
        model_dir,
        tp_size=tp_size,
        dp_size=dp_size,
        expert_parallel=True,
        rank=slot,
        large_on_meta=True,
        float8=float8,
    ) as engine:
        return engine.learn_needs(metadata)


def of_all_layers(short: Needs, config_json: Mapping[str, Any]) -> Needs:
    """Needs of a model of one dense layer and one with experts, for all layers of `config_json`."""
    found: Needs = {}
    for name, boxes in short.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            found[name] = boxes
            continue
        first_moe = config_json["first_k_dense_replace"]
        layers = range(first_moe) if match[1] == "0" else range(
            first_moe, config_json["num_hidden_layers"]
        )  # fmt: skip
        found |= {f"model.layers.{layer}.{match[2]}": boxes for layer in layers}
    return found


if __name__ == "__main__":
    main()
