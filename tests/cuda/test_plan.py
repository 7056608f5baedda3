"""The hand-over of the large presets, planned from the models that run on GPUs.

What the ranks hold comes from Megatron's model with Transformer Engine's layers, what the engines
need from vLLM's own loaders in its build for CUDA; both by the code of a run, every rank of it.
Between them there is the code of a run as well: `Holdings` and `make_plan`. All ranks' boxes are
collected here, as torch's fake process group, in which the models are built, exchanges none.

Shared is what holdings_job.py and needs_job.py say and compare: a build of Megatron's model between
the ranks of a stage, and the layers of one kind in vLLM's. Each runs once a preset.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.hybrid_engine.plan.transfer_plan import Plan, make_plan
from mcore_rl.hybrid_engine.weight_stream import Holdings
from mcore_rl.model.boxes import Boxes, disjoint, volume
from mcore_rl.model.float8_blocks import Float8Weights, blocks_of, float8_weights, scale_name
from mcore_rl.model.tensors import TensorInfo
from mcore_rl.model.weight_map import layer_order
from mcore_rl.planner.links import neighbourhoods
from mcore_rl.planner.plan import Outcome, as_json, plan_case
from mcore_rl.planner.report import make_console, print_plan
from mcore_rl.planner.settings import GB
from mcore_rl.tools.plan.command_line import read_command_line
from tests.cuda.presets import ROOT, preset_flags, tensor_infos, trainable_shape
from tests.cuda.stack import Stack

# preset -> published config, ranks
PRESETS = {"v2-lite": ("deepseek-v2-lite", 8), "v3": ("deepseek-v3", 256)}
FORMATS = {"v2-lite": ("bfloat16",), "v3": ("bfloat16", "float8")}  # of engines
FLOAT8 = ["--rl-rollout-dtype", "fp8", "--rl-mismatch-correction", "token_tis"]


@dataclass(frozen=True)
class Planned:
    """The hand-over of a preset, by the models and by `mcore-rl plan`."""

    tensors: dict[str, TensorInfo]
    holdings: Holdings
    plan: Plan
    by_planner: Outcome
    of_models: dict[str, Any]  # what the jobs say of themselves


@pytest.fixture(scope="module")
def held_by(
    cuda_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, list[Boxes]]]:
    """What holdings_job.py says of a preset, and what each rank holds."""

    @functools.cache
    def held_by(preset: str) -> tuple[Any, list[Boxes]]:
        config, world_size = PRESETS[preset]
        file = tmp_path_factory.mktemp(preset) / "held"
        said = cuda_stack.run(
            "holdings_job",
            *(config, str(world_size), str(file)),
            *(["all"] if cuda_stack.name == "full" else []),  # it takes its time
            *("--", *preset_flags(preset)),
            timeout=3000,
        )
        return said, pickle.loads(file.read_bytes())

    return held_by


@pytest.fixture(scope="module")
def needed_by(
    cuda_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int, int], tuple[Any, Path]]:
    """What needs_job.py says of a preset, and the folder of what each slot needs."""

    @functools.cache
    def needed_by(preset: str, tp_size: int, dp_size: int) -> tuple[Any, Path]:
        folder, num_slots = tmp_path_factory.mktemp(preset), tp_size * dp_size
        slots = range(num_slots) if cuda_stack.name == "full" else [num_slots - 1]
        said = cuda_stack.run(
            "needs_job",
            *(PRESETS[preset][0], str(tp_size), str(dp_size), str(folder)),
            *(",".join(FORMATS[preset]), *map(str, slots)),
            timeout=7200,
        )
        return said, folder

    return needed_by


@pytest.fixture(
    scope="module",
    params=[(preset, name) for preset in FORMATS for name in FORMATS[preset]],
    ids=" ".join,
)
def planned(
    request: pytest.FixtureRequest,
    held_by: Callable[[str], tuple[Any, list[Boxes]]],
    needed_by: Callable[[str, int, int], tuple[Any, Path]],
) -> Planned:
    preset, format = request.param
    in_float8 = format == "float8"
    config, world_size = PRESETS[preset]
    flags = preset_flags(preset) + (FLOAT8 if in_float8 else [])
    named = ["--hf-config", str(ROOT / "scripts" / "presets" / f"{preset}.json")]
    case = read_command_line([*named, "--world-size", str(world_size), *flags]).case
    rollout = case.rollout
    held, have = held_by(preset)
    needed, folder = needed_by(preset, rollout.tp_size, rollout.dp_size)
    needs = [
        {name: boxes for name, boxes in needs.items() if boxes}
        for needs in pickle.loads((folder / format).read_bytes())
    ]
    shape = trainable_shape(config)
    tensors = tensor_infos(shape)
    if in_float8:
        quantised = float8_weights(shape, rollout)
        have = [with_scales(boxes, quantised) for boxes in have]
        tensors = quantised.in_blocks(tensors)
    ranks = range(world_size)
    holdings = Holdings(
        have=tuple(have),
        need=tuple(needs[rollout.slot(rank) % rollout.slots_per_engine] for rank in ranks),
    )
    plan = make_plan(
        tensors,
        order=layer_order(tensors),
        have=holdings.have,
        need=holdings.need,
        near=neighbourhoods(case.train, case.machine.ranks_per_node),
    )
    return Planned(
        tensors, holdings, plan, plan_case(case), {"held": held, "needed": needed[format]}
    )


def with_scales(boxes: Boxes, quantised: Float8Weights) -> Boxes:
    """A rank's boxes with those of its weights' scales, as `Float8Shards` has them."""
    return dict(boxes) | {
        scale_name(name): disjoint(map(blocks_of, some))
        for name, some in boxes.items()
        if name in quantised.weights
    }


@pytest.mark.timeout(10800)
def test_ranks_and_layers_that_share_a_model_are_alike(planned: Planned) -> None:
    assert planned.of_models["held"]["unlike"] == []
    assert planned.of_models["needed"]["unlike"] == []


def test_every_tensor_has_a_place(planned: Planned) -> None:
    """Held by some rank and needed by some: the same tensors, those of the checkpoint."""
    for boxes in (planned.holdings.have, planned.holdings.need):
        assert {name for of_rank in boxes for name in of_rank} == planned.tensors.keys()


def test_each_rank_receives_what_it_lacks_and_no_more(planned: Planned) -> None:
    """By the boxes themselves: nothing less than the lower bound can be received."""
    received = received_bytes(planned)
    holdings, tensors = planned.holdings, planned.tensors
    step = 1 if len(received) < 16 else len(received) // 16 + 1
    for rank in range(0, len(received), step):
        assert received[rank] == holdings.lower_bound_bytes(rank, tensors), rank


def test_plan_is_that_of_the_planner(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    """For every rank, and in what is printed, to the byte."""
    traffic, received = planned.by_planner.traffic, received_bytes(planned)
    assert traffic is not None
    assert np.array_equal(received, traffic.received)
    assert np.array_equal(received, traffic.lower_bound)
    resident = [needed_bytes(planned.tensors, need) for need in planned.holdings.need]
    assert np.array_equal(resident, traffic.resident)
    printed = as_json(planned.by_planner)
    assert printed["received_bytes_max"] == received.max()
    assert printed["received_bytes_mean"] == received.mean()
    assert printed["received_over_lower_bound"] == 1.0
    print_plan(planned.by_planner, (), make_console())
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [f"{size / GB:.2f}" for size in (received.max(), received.mean())]
    assert ["received", *shown] in rows and ["lower", "bound", "of", "received", *shown] in rows


def received_bytes(planned: Planned) -> np.ndarray:
    """`[ranks]`, by the moves."""
    received = np.zeros(len(planned.holdings.have), dtype=np.int64)
    for move in planned.plan.moves:
        received[list(move.receivers)] += move.num_bytes
    return received


def needed_bytes(tensors: dict[str, TensorInfo], need: Boxes) -> int:
    return sum(
        volume(box) * tensors[name].itemsize for name, boxes in need.items() for box in boxes
    )
