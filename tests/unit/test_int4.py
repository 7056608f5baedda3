"""INT4 groups of compressed-tensors: read as the bfloat16 weights that they represent."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_rl.common.errors import UsageError
from mcore_rl.megatron.hf_checkpoint import (
    HFCheckpoint,
    check_tensors,
    fingerprint,
    open_checkpoint,
    read_boxes,
    read_tensor,
)
from mcore_rl.model.config_json import read_model_shape
from tests.int4_checkpoint import make_int4
from tests.multimodal import make_multimodal

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"  # [64, 96]
STORED = f"language_model.{EXPERT}"


@pytest.fixture(scope="module")
def folders(
    checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """In INT4 groups, and their bfloat16 reference."""
    folder = tmp_path_factory.mktemp("int4")
    text = checkpoint_factory("kimi_k2", overrides={"moe_intermediate_size": 96})
    untied = {"tie_word_embeddings": False}
    return make_int4(make_multimodal(text, "kimi_k25", folder / "source", **untied), folder)


def opened(folder: Path) -> HFCheckpoint:
    return open_checkpoint(folder, read_model_shape(folder))


def test_folder_reads_as_its_bfloat16_reference(folders: tuple[Path, Path]) -> None:
    groups, reference = map(opened, folders)
    assert groups.tensors == reference.tensors
    assert groups.others == reference.others and len(groups.others) > 5
    assert len(groups.int4) > 10 and not reference.int4
    for folder, checkpoint in zip(folders, (groups, reference), strict=True):
        check_tensors(checkpoint, read_model_shape(folder), flag="--rl-hf-checkpoint")
    packed = sum(groups.tensors[name].num_bytes for name in groups.int4)
    # Four bits of sixteen, and a scale of two bytes for 32 weights.
    saved = packed - packed // 4 - packed // 32
    assert groups.stored_bytes == reference.stored_bytes - saved
    for name in groups.tensors:
        assert torch.equal(read_tensor(groups, name), read_tensor(reference, name)), name


def test_boxes_that_cut_groups_are_read_alone(folders: tuple[Path, Path]) -> None:
    groups, whole = opened(folders[0]), read_tensor(opened(folders[1]), EXPERT)
    chosen = random.Random(1)
    for _ in range(50):
        (top, bottom), (left, right) = (
            sorted(chosen.sample(range(size + 1), 2)) for size in whole.shape
        )
        (read,) = read_boxes(groups, EXPERT, [((top, bottom), (left, right))])
        assert read.is_contiguous() and torch.equal(read, whole[top:bottom, left:right])


def test_fingerprint_is_of_packed_values_and_scales(
    alone: None, folders: tuple[Path, Path]
) -> None:
    groups = opened(folders[0])
    assert fingerprint(groups) != fingerprint(opened(folders[1]))
    fewer = dict(list(groups.int4.items())[1:])
    tensors = {t: i for t, i in groups.tensors.items() if t in fewer or t not in groups.int4}
    assert fingerprint(dataclasses.replace(groups, int4=fewer, tensors=tensors)) != fingerprint(
        groups
    )


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        (f"{STORED}_scale", None, rf"lacks {EXPERT}_scale, the scales of {EXPERT}_packed"),
        (f"{STORED}_scale", torch.ones(64, 2), r"not groups of 32"),
        (f"{STORED}_packed", torch.ones(64, 12, dtype=torch.int64), "dtype int64"),
        (f"{STORED}_scale", torch.ones(64, 3).half(), "dtype float16"),
        (STORED, torch.ones(64, 96), "has both"),
        ("language_model.model.norm.weight", torch.ones(64, dtype=torch.int32), "not a packed"),
    ],
)
def test_odd_parts_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, name: str, changed: torch.Tensor | None, says: str
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in folders[0].glob("*.safetensors"):
        tensors |= load_file(file)
    tensors.pop(name, None)
    if changed is not None:
        tensors[name] = changed
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(UsageError, match=f"{says}.*; copy the checkpoint"):
        opened(tmp_path)


def test_folder_without_packed_weights_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(folders[1] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[0] / "config.json").read_text())
    with pytest.raises(UsageError, match="has no packed weight, but its config.json says so"):
        opened(tmp_path)
