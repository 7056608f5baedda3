"""Main parameters at the start: dithered, rounding to the weights, the same on every replica."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.layouts import job_flags
from tests.dist.test_fsdp import ENVIRONMENT, fsdp
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {  # split, ranks, more flags
    "DP1": ("tp1_pp1_ep1", 1, ()),
    "DP2": ("tp1_pp1_ep1", 2, ()),
    "DP2, whole": ("tp1_pp1_ep1", 2, ("--no-use-distributed-optimizer",)),
    "FSDP": ("tp1_pp1_ep1", 2, fsdp("optim_grads_params")),
    "PP2 DP2": ("tp1_pp2_ep1", 4, ()),
    "off": ("tp1_pp1_ep1", 1, ("--no-rl-dither",)),
}
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"

Shares = dict[str, dict[str, Any]]  # by the parameter's name: first, copies, weights


@pytest.fixture(scope="module")
def shares(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> Callable[[str], list[Shares]]:
    @functools.cache
    def of_ranks(case: str) -> list[Shares]:
        split, world_size, more = CASES[case]
        target = tmp_path_factory.mktemp("shares")
        checkpoint = checkpoint_factory("qwen3", tie_word_embeddings=True)
        ranks.run(
            "tests.dist.dither_jobs:main_parameters_at_the_start",
            world_size=world_size,
            flags=job_flags(checkpoint, split, *more, precision="bf16"),
            target=target,
            environment=ENVIRONMENT if case == "FSDP" else None,
        )
        return [torch.load(target / f"{rank}.pt") for rank in range(world_size)]

    return of_ranks


def whole(ranks: list[Shares], name: str) -> torch.Tensor:
    """A parameter's copies, from the shares of ranks that may repeat each other's."""
    found = {
        share["first"]: share["copies"]
        for rank in ranks
        if (share := rank.get(name)) and share["copies"].numel()
    }
    return torch.cat([found[first] for first in sorted(found)])


@pytest.mark.parametrize("case", [case for case in CASES if case != "off"])
def test_main_parameters_round_to_the_weights(
    case: str, shares: Callable[[str], list[Shares]]
) -> None:
    num_moved = num_all = 0
    for rank in shares(case):
        for name, share in rank.items():
            copies, weights = share["copies"], share["weights"]
            assert torch.equal(copies.to(weights.dtype), weights), name
            num_moved += int((copies != weights).sum())
            num_all += int((weights != 0).sum())
    assert num_moved > 0.99 * num_all > 1000


@pytest.mark.parametrize("case", ["DP2", "DP2, whole", "FSDP"])
def test_main_parameters_do_not_depend_on_data_parallelism(
    case: str, shares: Callable[[str], list[Shares]]
) -> None:
    (alone,) = shares("DP1")
    found = shares(case)
    for name, share in alone.items():
        assert torch.equal(whole(found, name), share["copies"]), name


def test_a_rank_without_the_distributed_optimizer_has_whole_parameters(
    shares: Callable[[str], list[Shares]],
) -> None:
    """What the case is for."""
    sizes = [[sum(s["copies"].numel() for s in r.values()) for r in shares(c)] for c in CASES]
    by_case = dict(zip(CASES, sizes, strict=True))
    assert by_case["DP2, whole"] == 2 * by_case["DP1"]
    assert sum(by_case["DP2"]) == sum(by_case["FSDP"]) == by_case["DP1"][0]


def test_tied_embeddings_of_two_stages_agree(shares: Callable[[str], list[Shares]]) -> None:
    """Their shares begin elsewhere on each stage."""
    found = shares("PP2 DP2")
    first = whole([rank for rank in found if EMBEDDING in rank], EMBEDDING)
    last = whole([rank for rank in found if HEAD in rank], HEAD)
    assert torch.equal(first, last)


def test_without_dither_they_are_the_weights(shares: Callable[[str], list[Shares]]) -> None:
    for rank in shares("off"):
        for name, share in rank.items():
            assert torch.equal(share["copies"], share["weights"].float()), name


@pytest.mark.parametrize(("more", "low", "high"), [((), 0.9, 1.1), (("--no-rl-dither",), 0.0, 0.7)])
def test_small_updates_of_float32_weights_arrive_in_what_engines_get(
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    more: tuple[str, ...],
    low: float,
    high: float,
) -> None:
    checkpoint = checkpoint_factory("qwen3", tie_word_embeddings=True)
    flags = job_flags(checkpoint, "tp1_pp1_ep1", *more)
    job = "tests.dist.dither_jobs:reads_of_float32_weights"
    (found,) = ranks.run(job, world_size=1, flags=flags)
    assert low < found["arrived"] < high and found["unlike"] == [] and found["num"] > 10
