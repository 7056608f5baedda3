"""What surely does not fit a device is refused at the start; what may not is warned of."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import Platform
from mcore_rl.job.facts import Source
from mcore_rl.job.resolver import resolve
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.planner.checks import check_device
from mcore_rl.planner.models import stage_state
from mcore_rl.planner.phases import Case
from mcore_rl.planner.settings import GB
from tests.unit.test_planner import MACHINE, case_of, deepseek_v3

ALL = frozenset({"gradients", "optimizer", "parameters"})


def llama(gpu_bytes: int = 80 * GB, **changes: Any) -> Case:
    train, rollout = TrainLayout(8, tp_size=2, pp_size=4), RolloutLayout(8, 4, False)
    machine = dataclasses.replace(MACHINE, gpu_bytes=gpu_bytes)
    return case_of("llama-3.1-8b", train, rollout, machine, **changes)


def state(case: Case, *, with_moments: bool = False) -> int:
    """Bytes of weights and states on the fullest rank."""
    return max(sum(h.values()) for h in stage_state(case.actor, with_moments=with_moments))


def test_start_is_refused_to_the_byte_without_offloading() -> None:
    """vLLM needs its whole share free; contexts, NCCL and activations are not counted."""
    make: Callable[..., Case] = functools.partial(
        llama, away_at_start=frozenset(), offloaded=ALL, gpu_memory_utilization=0.5
    )
    fits = 2 * state(make())  # half for training, half for the engine
    (*_, line) = check_device(make(fits))
    assert line.startswith("phase ") and "may lack" in line and "mcore-rl plan" in line
    with pytest.raises(UsageError) as refused:
        check_device(make(2 * state(make()) - 2))
    said = str(refused.value)
    size = r"[\d.]+ [kMG]?B(?:ytes)?"
    assert re.match(
        rf"phase start does not fit a device of {size}: rank \d would hold weights {size}, "
        rf"gradients {size}, optimizer {size}, vLLM's share {size} "
        r"\(--rl-rollout-gpu-memory-utilization 0.5\), and lacks 1 bytes at least; give "
        r"--rl-rollout-gpu-memory-utilization 0.2\d",
        said,
    ), said


def test_offloaded_memory_does_not_count_at_the_start() -> None:
    make: Callable[..., Case] = functools.partial(llama, offloaded=ALL, gpu_memory_utilization=0.9)
    assert check_device(make(40 * GB))  # of 40 GB training takes 17, the engine 36
    assert not check_device(make(80 * GB))


@pytest.mark.parametrize(
    ("gpu_bytes", "changes", "phase"),
    [
        (9 * GB, {}, "build"),
        (16 * GB, {"offloaded": ALL}, "log-probs"),  # fits until there are moments
        (16 * GB, {"offloaded": ALL, "loads_checkpoint": True}, "resume"),
        (80 * GB, {"gpu_memory_utilization": 0.05}, "start"),  # not even its weights
        (80 * GB, {"gpu_memory_utilization": 0.99}, "rollout"),  # beside the parameters
    ],
)
def test_first_phase_that_does_not_fit_is_named(
    gpu_bytes: int, changes: dict[str, Any], phase: str
) -> None:
    with pytest.raises(UsageError, match=rf"^phase {phase} does not fit a device of .*; \w+"):
        check_device(llama(gpu_bytes, **changes))


def test_scoring_needs_no_memory_for_an_update() -> None:
    case = llama(16 * GB, offloaded=ALL)
    with pytest.raises(UsageError, match="phase log-probs "):
        check_device(case)
    check_device(case, scores_only=True)


def test_inexact_figures_refuse_nothing() -> None:
    """Megatron-FSDP shards what the plan counts whole; other optimizers keep less."""
    case = llama(9 * GB, offloaded=ALL)
    check_device(
        dataclasses.replace(case, training=dataclasses.replace(case.training, exact=frozenset()))
    )


def test_the_preset_of_256_ranks_fits() -> None:
    case = deepseek_v3().case
    assert check_device(case) == ()


def test_command_line_is_checked_against_the_device_size(
    checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    """The device's size is asked last, and only where there is CUDA."""
    tokens = [
        *("--rl-hf-checkpoint", str(checkpoint_factory()), "--rl-prompts", "prompts.jsonl"),
        *("--rl-reward", "length", "--rl-run-dir", str(tmp_path), "--rl-offload", "none"),
        *("--rl-max-prompt-tokens", "8", "--rl-max-response-tokens", "8"),
        *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    ]
    asked: list[int] = []

    def of(num_bytes: int, *, has_cuda: bool = True) -> None:
        def device_bytes() -> int:
            asked.append(num_bytes)
            return num_bytes

        resolve(Source(tokens=tokens, platform=Platform(cuda=has_cuda), device_bytes=device_bytes))

    of(1, has_cuda=False)
    assert asked == []
    of(80 * GB)
    with pytest.raises(UsageError, match=r"^phase build does not fit a device of 100 kB: rank 0"):
        of(100_000)
    assert asked == [80 * GB, 100_000]
