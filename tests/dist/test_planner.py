"""The exact part of a plan against what real Megatron models and optimizers hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.planner.command_line import read_command_line
from mcore_rl.planner.parameters import stage_parameters
from mcore_rl.planner.phases import stage_state
from tests.dist.layouts import SPLITS, job_flags
from tests.rank_pool import RankPool

SPLITS.setdefault("dp2", (1, 1, 1, 2))

# name -> architecture, options of the checkpoint, split, precision
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "latent_moe": ("deepseek_v3", {}, "tp2_pp2_ep2", "bf16"),
    "tied_dense": ("qwen3", {"tie_word_embeddings": True}, "tp1_pp2_ep1", "bf16"),
    "shared_out": ("qwen3_moe", {}, "dp2", "bf16"),
    "float32": ("qwen3", {}, "tp2_pp1_ep1", "fp32"),
}


@pytest.mark.parametrize("name", list(CASES))
def test_plan_equals_what_training_holds(
    name: str, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    arch, options, split, precision = CASES[name]
    world_size = SPLITS[split][3]
    flags = job_flags(checkpoint_factory(arch, **options), split)
    flags[flags.index("fp32")] = precision
    case = read_command_line([*flags, "--world-size", str(world_size)]).case
    planned = stage_state(case)
    parameters = stage_parameters(case.shape, case.train, case.layers, case.training)

    measured = ranks.run(
        "tests.dist.planner_jobs:measured_bytes", world_size=world_size, arguments={"flags": flags}
    )
    for rank, held in enumerate(measured):
        stage = case.train.pp_rank(rank)
        padding = held["padding_elements"]
        assert held["weights"] == planned[stage]["weights"]
        in_buffers = held["gradients"] - planned[stage]["gradients"]
        assert 0 <= in_buffers <= padding * case.training.gradient_bytes
        # Padding moves the borders between data-parallel ranks.
        of_rank = abs(held["optimizer"] - planned[stage]["optimizer"])
        limit = padding if case.train.dp_size > 1 else 0
        assert of_rank <= limit * case.training.optimizer_bytes
    # All data-parallel ranks together hold the state of every parameter once.
    for stage, of_stage in enumerate(parameters):
        members = [r for r in range(world_size) if case.train.pp_rank(r) == stage]
        state = sum(measured[rank]["optimizer"] for rank in members)
        dense = of_stage.dense * len(members) // case.train.dp_size
        experts = of_stage.experts * len(members) // case.train.edp_size
        expected = (dense + experts) * case.training.optimizer_bytes
        assert state == expected
