"""Remedies that a plan advises pass the checks of a start, Megatron's own validation included."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.platform import Platform
from mcore_rl.job.facts import Refusals, Source
from mcore_rl.job.reading import make_parser
from mcore_rl.job.resolver import examine
from mcore_rl.planner.plan import plan_case
from mcore_rl.tools.plan.command_line import read_command_line, read_named_shape

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "tests" / "data" / "configs").glob("*.json"))
PRESETS = {"v2-lite": 8, "v3": 256}
GPUS = Platform(cuda=True, transformer_engine=(2, 20), fused_weight_gradients=False)
# GB of a device in which phases of training, or of engines, lack little or much.
SIZES = (12, 40)
BATCH = ("--rl-num-prompts-per-step", "256")


@functools.cache
def parser() -> Any:
    return make_parser()


def remedies(config: Path, world_size: int, flags: Sequence[str]) -> set[str]:
    """The flags of all remedies on devices of several sizes."""
    found = set()
    for size in SIZES:
        tokens = ["--hf-config", str(config), "--world-size", str(world_size), *flags]
        case = read_command_line([*tokens, "--gpu-memory-gb", str(size)]).case
        problems = plan_case(case).problems
        found |= {remedy.flags for problem in problems for remedy in problem.remedies}
    return {flags for flags in found if flags.startswith("--")}  # others say what to drop


def assert_accepted(config: Path, world_size: int, flags: Sequence[str]) -> None:
    source = Source(
        # Megatron's validation imports the fusion's kernel, which is Transformer Engine's.
        tokens=[*BATCH, "--rl-ranks-per-node", "8", "--no-rope-fusion", *flags],
        platform=GPUS,
        world_size=world_size,
        parser=parser(),
        read_shape=functools.partial(read_named_shape, str(config)),
        has_files=False,
        has_engine=False,
    )
    assert examine(source, Refusals()).is_accepted, flags


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_remedies_for_a_model_are_accepted(config: Path) -> None:
    for flags in remedies(config, 16, BATCH):
        assert_accepted(config, 16, flags.split())


@pytest.mark.parametrize("preset", PRESETS)
def test_remedies_for_a_preset_are_accepted(preset: str) -> None:
    config = ROOT / "scripts" / "presets" / f"{preset}.json"
    flags = ("--rl-config", str(config.with_suffix(".yaml")), *BATCH)
    found = remedies(config, PRESETS[preset], flags)
    assert any("--optimizer-cpu-offload" in each for each in found)
    for remedy in found:
        assert_accepted(config, PRESETS[preset], [*flags, *remedy.split()])
