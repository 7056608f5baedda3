"""vLLM in the trainer's processes: what sleep keeps and frees, and weights that graphs must see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.machine import HAS_CUDA, anywhere, not_on_cpu, play, with_vllm

pytestmark = [*anywhere, with_vllm, pytest.mark.timeout(900)]

HALF_OF_IT = 0.15  # of the share of the device that the engine may take, see jobs.py
SAME = 0.01  # of log-probs; one rounding of a logit in bfloat16 is less
Said = list[list[tuple[int, float]]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (arch, graphs),
            id=f"{arch}-{'graphs' if graphs else 'eager'}",
            marks=[not_on_cpu] * ((arch, graphs) != ("deepseek_v3", False)),
        )
        for arch in ("deepseek_v3", "qwen3")
        for graphs in (False, True)
    ],
)
def life(
    request: pytest.FixtureRequest,
    checkpoint_factory: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """One engine, and all that it went through."""
    arch, graphs = request.param
    folders = [str(checkpoint_factory(arch, "tiny", seed=seed)) for seed in (1, 2)]
    (found,) = play(
        "tests.gpu.jobs:life_of_an_engine",
        tmp_path_factory.mktemp("engine"),
        checkpoint=folders[0],
        other=folders[1],
        graphs=graphs,
    )
    return found


def apart(a: Said, b: Said) -> float:
    """The largest difference of log-probs up to the first token that differs; inf if the first."""
    largest = 0.0
    for one, other in zip(a, b, strict=True):
        if one[0][0] != other[0][0]:
            return float("inf")
        for (token, x), (other_token, y) in zip(one, other, strict=True):
            if token != other_token:
                break
            largest = max(largest, abs(x - y))
    return largest


def test_weights_that_are_kept_come_back_bit_for_bit(life: dict[str, Any]) -> None:
    assert life["kept"]
    assert apart(life["said"]["at first"], life["said"]["weights kept"]) < SAME


def test_weights_that_are_dropped_must_be_reloaded(life: dict[str, Any]) -> None:
    assert "call reload first" in life["refusal"]
    assert apart(life["said"]["at first"], life["said"]["first ones"]) < SAME


def test_a_reload_in_place_changes_what_is_generated(life: dict[str, Any]) -> None:
    said = life["said"]
    assert apart(said["at first"], said["others"]) > 10 * SAME
    assert apart(said["at first"], said["once more"]) < SAME
    assert life["same bytes"]
    assert not life.get("moved")


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device: on CPU vLLM does not sleep")
def test_sleep_gives_memory_to_the_driver_and_metrics_do_not_count_it(life: dict[str, Any]) -> None:
    free, used, total = life["free"], life["used"], life["total"]
    for asleep in ("asleep", "asleep, weights kept"):
        assert free[asleep] - free["awake"] > HALF_OF_IT * total, free
    assert used["awake"] - used["asleep"] > HALF_OF_IT * total, used
