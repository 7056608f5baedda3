"""Megatron-FSDP: updates as without it, and a hand-over from sharded parameters, over gloo.

Every strategy and every way in which sharding over data parallelism meets TP and EP is compared
with Megatron's plain data parallelism in the same layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.checkpoints import tensors_of
from tests.dist.layouts import job_flags
from tests.rank_pool import RankPool

JOBS = "tests.dist.fsdp_jobs"
TOLERANCE = 1e-5
# Adam's epsilon is large, so that the weights show the gradient and not its sign.
RATES = ("--adam-eps", "1.0", "--lr", "0.1")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
TP2, EP2 = ("--tensor-model-parallel-size", "2"), ("--expert-model-parallel-size", "2")
CP2, ETP2 = ("--context-parallel-size", "2"), ("--expert-tensor-parallel-size", "2")
ALL_AWAY = ("--rl-offload", "parameters,gradients,optimizer")
FULL_RECOMPUTE = tuple(
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
)
DENSE_AND_TIED = (("arch", "qwen3"), ("tie_word_embeddings", True))
# Megatron-FSDP refuses one queue to the device.
ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def fsdp(strategy: str) -> tuple[str, ...]:
    return (
        "--use-megatron-fsdp",
        *("--ckpt-format", "fsdp_dtensor"),
        *("--data-parallel-sharding-strategy", strategy),
    )


@dataclass(frozen=True)
class Case:
    """A layout of `world_size` processes, and what is added to it; DP is what is left."""

    strategy: str
    world_size: int = 2
    layout: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    more_with_fsdp: tuple[str, ...] = ()
    model: tuple[tuple[str, object], ...] = (("arch", "deepseek_v3"),)


CASES = {
    "params dp2": Case("optim_grads_params"),
    "grads dp2": Case("optim_grads"),
    "optim dp2": Case("optim"),
    "optim dp2 overlap": Case("optim", more=OVERLAP),
    "params tp2 dp2": Case("optim_grads_params", 4, TP2),
    "params dp4 ep2": Case("optim_grads_params", 4, EP2),
    "params tp2 dp2 ep2": Case("optim_grads_params", 4, (*TP2, *EP2), OVERLAP),
    # Sharding groups of one rank: of experts, and of everything.
    "params dp2 ep2": Case("optim_grads_params", 2, EP2),
    "grads dp2 ep2": Case("optim_grads", 2, EP2),
    "optim dp2 ep2": Case("optim", 2, EP2),
    "params dp2 etp2": Case("optim_grads_params", 2, ETP2),
    "grads cp2 ep2": Case("optim_grads", 2, (*CP2, *EP2)),
    "params tp2": Case("optim_grads_params", 2, TP2),
    "params dp2 dense tied": Case("optim_grads_params", model=DENSE_AND_TIED),
    # Rows of one element: biases and sinks. With TP it is refused.
    "params dp4 ep2 gpt-oss": Case("optim_grads_params", 4, EP2, model=(("arch", "gpt_oss"),)),
    "params dp2 packed": Case("optim_grads_params", more=("--rl-max-tokens-per-microbatch", "128")),
    "params dp2 recompute": Case("optim_grads_params", more=FULL_RECOMPUTE),
    "params dp2 offload": Case("optim_grads_params", more_with_fsdp=ALL_AWAY),
    "optim dp2 offload": Case("optim", more_with_fsdp=ALL_AWAY),
}


@pytest.fixture(scope="module")
def learn(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path_factory: Any
) -> Callable[..., tuple[list[dict[str, Any]], Path]]:
    """What each rank measured, and the folder of the weights before and after; each job once."""
    done: dict[tuple, tuple[list[dict[str, Any]], Path]] = {}

    def learn(case: Case, *with_fsdp: str) -> tuple[list[dict[str, Any]], Path]:
        key = (case.world_size, case.layout, case.more, case.model, with_fsdp)
        if key not in done:
            target = tmp_path_factory.mktemp("fsdp")
            flags = job_flags(
                checkpoint_factory(**dict(case.model)),
                "tp1_pp1_ep1",
                *(*RATES, *case.layout, *case.more, *with_fsdp),
                micro_batch_size=1,
            )
            found = ranks.run(
                f"{JOBS}:learn",
                world_size=case.world_size,
                flags=flags,
                target=target,
                environment=ENVIRONMENT if with_fsdp else None,
            )
            done[key] = found, target
        return done[key]

    return learn


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_plain_data_parallelism(name: str, learn: Callable) -> None:
    case = CASES[name]
    expected, reference = learn(case)
    found, target = learn(case, *fsdp(case.strategy), *case.more_with_fsdp)
    for mine, other in zip(found, expected, strict=True):
        for update, as_before in zip(mine["updates"], other["updates"], strict=True):
            assert update == pytest.approx(as_before, rel=TOLERANCE, abs=TOLERANCE)
        # Before an update nothing is rounded otherwise.
        assert mine["log_probs"] == other["log_probs"]
        difference = torch.tensor(mine["log_probs_after"]) - torch.tensor(other["log_probs_after"])
        assert difference.abs().max() < TOLERANCE
        assert bool(case.more_with_fsdp) == (mine.get("offloaded", 0) > 0)
    before, unchanged = tensors_of(reference / "before"), tensors_of(target / "before")
    after, updated = tensors_of(reference / "after"), tensors_of(target / "after")
    assert before.keys() == unchanged.keys() == updated.keys()
    for tensor, value in before.items():
        assert torch.equal(unchanged[tensor], value), tensor
        assert (updated[tensor] - after[tensor]).abs().max() < TOLERANCE, tensor
    assert max(float((after[t] - before[t]).abs().max()) for t in before) > 100 * TOLERANCE


def test_a_rank_alone_adds_gradients_up_once_where_they_travel_in_another_type(
    learn: Callable,
) -> None:
    """In bfloat16, whose rounding is all that may be seen; each rank has 4 micro-batches."""
    case = CASES["params tp2"]
    expected, _ = learn(case)
    in_bf16 = ("--megatron-fsdp-grad-comm-dtype", "bf16")
    found, _ = learn(case, *fsdp(case.strategy), *in_bf16)
    for mine, other in zip(found, expected, strict=True):
        for update, plain in zip(mine["updates"], other["updates"], strict=True):
            assert update["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)


def test_overlap_changes_nothing_in_plain_data_parallelism(learn: Callable) -> None:
    """Several micro-batches, whose gradients are sent once."""
    (plain, reference), (overlapped, target) = (
        learn(CASES[name]) for name in ("params dp2", "optim dp2 overlap")
    )
    for mine, other in zip(overlapped, plain, strict=True):
        for update, expected in zip(mine["updates"], other["updates"], strict=True):
            assert update == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    expected, found = (tensors_of(folder / "after") for folder in (reference, target))
    assert max(float((found[t] - expected[t]).abs().max()) for t in expected) < TOLERANCE


def test_a_rank_holds_its_rows_only(learn: Callable) -> None:
    case = CASES["params dp2"]
    whole = [rank["held"] for rank in learn(case)[0]]
    sharded = [rank["held"] for rank in learn(case, *fsdp("optim_grads_params"))[0]]
    kept_whole = [rank["held"] for rank in learn(case, *fsdp("optim_grads"))[0]]
    # Beside its rows each rank has the routers' biases.
    assert whole == kept_whole and whole[0] <= sum(sharded) < whole[0] + 100
    assert max(sharded) < 0.51 * whole[0]


@pytest.mark.parametrize(
    ("world_size", "layout", "rollout"),
    [
        (2, (), ("--rl-rollout-tp-size", "2")),
        (2, (), ("--rl-rollout-tp-size", "1")),
        (4, TP2, ("--rl-rollout-tp-size", "2")),
        (4, (*TP2, *EP2), ("--rl-rollout-tp-size", "4")),
    ],
    ids=["dp2 to tp2", "dp2 to 2 of tp1", "tp2 dp2 to 2 of tp2", "tp2 dp2 ep2 to tp4"],
)
def test_hand_over_reads_sharded_parameters(
    world_size: int,
    layout: tuple[str, ...],
    rollout: tuple[str, ...],
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
) -> None:
    flags = job_flags(
        checkpoint_factory("deepseek_v3"),
        "tp1_pp1_ep1",
        *(*RATES, *layout, *rollout, *fsdp("optim_grads_params")),
        precision="bf16",
        micro_batch_size=1,
    )
    found = ranks.run(
        f"{JOBS}:hand_over", world_size=world_size, flags=flags, environment=ENVIRONMENT
    )
    for rank in found:
        assert rank["stored_equal"] and rank["attested"]
        assert rank["num_changed_by_update"] > 10
        # Every byte comes once, and nothing that is here already.
        assert rank["received"] == [rank["missing"]] * 2 and rank["missing"] > 0


def test_weights_that_were_written_count_in_the_next_forward(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    for strategy in ("optim_grads_params", "optim"):
        flags = job_flags(checkpoint_factory("deepseek_v3"), "tp1_pp1_ep1", *RATES, *fsdp(strategy))
        found = ranks.run(
            f"{JOBS}:written_weights_count", world_size=2, flags=flags, environment=ENVIRONMENT
        )
        assert found == [{"moved": True, "old_again": True, "new_again": True}] * 2, strategy


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_from_a_checkpoint_is_bitwise(
    strategy: str,
    precision: str,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    flags = job_flags(
        checkpoint_factory("deepseek_v3"),
        "tp1_pp1_ep1",
        *(*RATES, *fsdp(strategy)),
        precision=precision,
    )
    for job, result in (("save_and_continue", "iter_0000001"), ("load_and_continue", 1)):
        found = ranks.run(
            f"{JOBS}:{job}", world_size=2, flags=flags, target=tmp_path, environment=ENVIRONMENT
        )
        assert found == [result] * 2
    continued, resumed = tensors_of(tmp_path / "continued"), tensors_of(tmp_path / "resumed")
    assert all(torch.equal(resumed[tensor], value) for tensor, value in continued.items())


def test_a_nonfinite_gradient_of_one_rank_is_named_on_all(
    checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    flags = job_flags(checkpoint_factory("deepseek_v3"), "tp1_pp1_ep1", *fsdp("optim_grads_params"))
    found = ranks.run(
        f"{JOBS}:nonfinite_gradient", world_size=2, flags=flags, environment=ENVIRONMENT
    )
    assert found[0] == found[1]
    assert "non-finite gradient of the actor in rank 1: " in found[0]
