"""The optimizer is saved and loaded by shares, without gathering it, and with the same content."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.dist.layouts import job_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

OFFLOADED = "DP2, offloaded"  # with --optimizer-cpu-offload
LAYOUTS = {  # split, ranks
    "DP1": ("tp1_pp1_ep1", 1),
    "DP2": ("tp1_pp1_ep1", 2),
    "DP4": ("tp1_pp1_ep1", 4),
    "DP4 EP2": ("tp1_pp1_ep2", 4),
    "TP2 PP2 EP2": ("tp2_pp2_ep2", 4),
    OFFLOADED: ("dp2", 2),
}


@dataclass(frozen=True)
class Saved:
    """The files of one layout."""

    folder: Path
    flags: list[str]
    ranks: list[dict[str, Any]]


@pytest.fixture(scope="module")
def saved(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> Callable[[str], Saved]:
    @functools.cache
    def save(layout: str) -> Saved:
        split, world_size = LAYOUTS[layout]
        checkpoint, folder = checkpoint_factory("deepseek_v3"), tmp_path_factory.mktemp("saved")
        flags = job_flags(checkpoint, split, precision="bf16", micro_batch_size=1)
        found = ranks.run(
            "tests.dist.saving_jobs:learn_and_save",
            world_size=world_size,
            flags=flags,
            target=folder,
            is_offloaded=layout == OFFLOADED,
        )
        return Saved(folder, flags, found)

    return save


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    reader = FileSystemReader(folder / "iter_0000001")
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load_checkpoint(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.parametrize("layout", ["DP1", "DP4 EP2", "TP2 PP2 EP2", OFFLOADED])
def test_the_content_is_that_of_megatrons_own_code(
    layout: str, saved: Callable[[str], Saved]
) -> None:
    ours, megatrons = (tensors_in(saved(layout).folder / name) for name in ("ours", "megatrons"))
    assert ours.keys() == megatrons.keys()
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in ours)
    for name, tensor in megatrons.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def test_an_offloaded_optimizer_learns_the_same(saved: Callable[[str], Saved]) -> None:
    here, offloaded = (tensors_in(saved(layout).folder / "ours") for layout in ("DP2", OFFLOADED))
    assert here.keys() == offloaded.keys()
    for name, tensor in here.items():
        assert torch.equal(offloaded[name], tensor), name


def test_memory_to_save_does_not_grow_with_data_parallelism(
    saved: Callable[[str], Saved],
) -> None:
    whole = saved("DP1").ranks[0]["bytes"]
    for layout in ("DP1", "DP2", OFFLOADED, "DP4"):
        for found in saved(layout).ranks:
            assert found["ours peak"] < whole / 12  # less than a copy of the weights is a sixth
            assert found["megatrons peak"] > whole  # it gathers all of it on every rank


def test_flags_that_change_the_model_are_saved_and_loaded(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    """A residual stream in float32 between layers in bfloat16, and no rows of padding."""
    flags = job_flags(
        checkpoint_factory("deepseek_v3"),
        "tp1_pp1_ep1",
        *("--fp32-residual-connection", "--no-pad-vocab-size"),
        precision="bf16",
        micro_batch_size=1,
    )
    jobs, target = "tests.dist.saving_jobs", tmp_path / "saved"
    (before,) = ranks.run(f"{jobs}:learn_and_save", world_size=1, flags=flags, target=target)
    loads = [*flags, "--load", str(target / "ours")]
    (after,) = ranks.run(f"{jobs}:load", world_size=1, flags=loads)
    assert after["optimizer"] == before["optimizer"] != {}


# Other settings than before, and whether they count: of the derived flag, and of its opposite.
OTHERS = "--lr 3e-6 --min-lr 2e-6 --adam-beta2 0.9".split()
SETTINGS = {
    "ours": (OTHERS, {"lr": 3e-6, "max_lr": 3e-6, "min_lr": 2e-6, "betas": [0.9, 0.9]}),
    "megatrons": (
        [*OTHERS, "--use-checkpoint-opt_param-scheduler"],
        {"lr": 1e-6, "max_lr": 1e-6, "min_lr": 0.0, "betas": [0.9, 0.95]},
    ),
}


@pytest.mark.parametrize("written", ["ours", "megatrons"])
@pytest.mark.parametrize("layout", ["DP4 EP2", "TP2 PP2 EP2", OFFLOADED])
def test_loading_brings_back_every_bit_and_takes_no_second_copy(
    layout: str, written: str, saved: Callable[[str], Saved], ranks: RankPool
) -> None:
    """Also for checkpoints of earlier versions, which Megatron's own code wrote, and with other
    settings of the optimizer."""
    before, (flags, settings) = saved(layout), SETTINGS[written]
    results = ranks.run(
        "tests.dist.saving_jobs:load",
        world_size=LAYOUTS[layout][1],
        flags=[*before.flags, "--load", str(before.folder / written), *flags],
        is_offloaded=layout == OFFLOADED,
    )
    for rank, (found, expected) in enumerate(zip(results, before.ranks, strict=True)):
        assert found["optimizer"] == expected["optimizer"] != {}, rank
        assert found["beyond"] < expected["bytes"], rank
        assert found["settings"], rank
        for group in found["settings"]:
            assert group == {**settings, "step": 1, "fused": True}, rank
