"""Experts kept evenly used: each kind against a slow reference, and the same in every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.checkpoints import tensors_of
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

TOLERANCE = 1e-5
RATE = 0.03125
COMMON = (
    "--rl-precision fp32 --rl-num-prompts-per-step 8 --rl-num-samples-per-prompt 2 "
    "--rl-num-mini-batches 2 --rl-max-prompt-tokens 64 --rl-max-response-tokens 64"
)
ONE = "one process"
# Of rows of different lengths, of a row of several samples, of samples cut in two: with padding
# each; with every kind of recomputation; with choices that are replayed.
LAYOUTS = {
    ONE: (1, "--micro-batch-size 1"),
    "rows": (
        4,
        "--micro-batch-size 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "packed": (
        4,
        "--micro-batch-size 1 --rl-max-tokens-per-microbatch 128 --context-parallel-size 2 "
        "--expert-model-parallel-size 2 --recompute-granularity selective --recompute-modules moe "
        "--rl-routing-replay r2",
    ),
    "chunks": (
        2,
        "--micro-batch-size 2 --pipeline-model-parallel-size 2 "
        "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity selective",
    ),
}


@pytest.fixture(scope="module")
def checkpoint(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("deepseek_v3", overrides={"num_hidden_layers": 4})


@pytest.fixture(scope="module")
def moved(
    checkpoint: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[dict[str, Any]]]:
    """What each rank saw of biases that moved, by layout."""

    @functools.cache
    def moved(layout: str) -> list[dict[str, Any]]:
        num_processes, flags = LAYOUTS[layout]
        flags += f" {COMMON} --rl-on-nonfinite-grad skip --moe-router-bias-update-rate {RATE}"
        return ranks.run(
            "tests.dist.balance_jobs:move_biases",
            world_size=num_processes,
            flags=[*flags.split(), "--rl-hf-checkpoint", str(checkpoint)],
            target=tmp_path_factory.mktemp("moved"),
            rate=RATE,
        )

    return moved


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_move_by_the_load_of_samples_tokens_once_each(
    layout: str, moved: Callable[[str], list[dict[str, Any]]]
) -> None:
    (expected, *_), results = moved(ONE), moved(layout)
    for found in results:
        assert found["wrong"] == []  # as the choices of the tokens of samples say
        assert found["layers"] == expected["layers"] == results[0]["layers"]
        assert found["exported"] and found["dtypes"] == ["torch.float32"]
    # Every layer moved, in both directions, in one update or two.
    assert len(expected["layers"]) == 3
    for _, steps, _, _ in expected["layers"].values():
        assert min(steps) < 0 < max(steps)
        assert {round(abs(step), 6) for step in steps} <= {0.0, RATE, 2 * RATE}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_update_that_is_skipped_and_the_reference_keep_their_biases(
    layout: str, moved: Callable[[str], list[dict[str, Any]]]
) -> None:
    for found in moved(layout):
        assert found["skipped"]
        assert found["of_reference"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_load_is_that_of_samples_tokens(
    layout: str, moved: Callable[[str], list[dict[str, Any]]]
) -> None:
    for found in moved(layout):
        metrics = found["metrics"]
        unused = []
        for layer, (_, _, busiest, share) in found["layers"].items():
            assert metrics[f"moe/imbalance/layer_{layer}"] == pytest.approx(busiest)
            assert metrics[f"moe/unused_experts/layer_{layer}"] == pytest.approx(share)
            unused.append(share)
        assert metrics["moe/most_unused_experts"] == pytest.approx(max(unused))


LOSSES = {
    "a sample": ("seq_aux_loss", "3.0", "--micro-batch-size 1"),
    "a micro-batch and an update": (
        "aux_loss global_aux_loss",
        "3.0 2.0",
        "--micro-batch-size 4",
    ),
}
SPREAD = {
    "a sample": (
        4,
        "--context-parallel-size 2 --expert-model-parallel-size 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    # The same micro-batches one after the other, as the last loss depends on their order.
    "a micro-batch and an update": (
        4,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--recompute-granularity selective --recompute-modules moe",
    ),
}


@pytest.mark.parametrize("of", LOSSES)
def test_auxiliary_losses_have_the_gradient_of_their_formulas_in_every_layout(
    of: str, checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    kinds, coefficients, division = LOSSES[of]
    flags = f"{COMMON} {division} --adam-eps 1.0 --lr 0.1 --clip-grad 0 "
    flags += f"--moe-router-load-balancing-type {kinds} --moe-aux-loss-coeff {coefficients}"
    found, weights = {}, {}
    for name, (num_processes, layout) in ((ONE, (1, "")), ("spread", SPREAD[of])):
        found[name] = ranks.run(
            "tests.dist.balance_jobs:learn_from_balance",
            world_size=num_processes,
            flags=[*f"{flags} {layout}".split(), "--rl-hf-checkpoint", str(checkpoint)],
            target=tmp_path / name,
            compares=name == ONE,
        )[0]
        weights[name] = tensors_of(tmp_path / name / "actor")
    assert found[ONE]["largest"] > 1e-2
    assert found[ONE]["apart"] <= TOLERANCE * max(1.0, found[ONE]["largest"])
    before = tensors_of(checkpoint)
    assert weights[ONE].keys() == weights["spread"].keys()
    apart = [(weights["spread"][n] - weights[ONE][n]).abs().max() for n in weights[ONE]]
    moved = [(weights[ONE][n] - before[n].float()).abs().max() for n in weights[ONE]]
    assert max(apart) <= TOLERANCE < max(moved) / 100
