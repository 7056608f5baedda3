"""The numbers of a run: by hand, and by the plan that training follows."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from mcore_rl.batching.accounting import BatchAccounting, batch_accounting, describe
from mcore_rl.batching.assignment import plan_step
from mcore_rl.batching.rows import MicroBatching


def of_run(**changes: Any) -> BatchAccounting:
    settings: dict[str, Any] = {
        "num_prompts": 16,
        "samples_per_prompt": 8,
        "num_mini_batches": 2,
        "num_epochs": 3,
        "num_steps": 100,
        "max_sequence_tokens": 1024,
        "actor": (4, MicroBatching(micro_batch_size=2)),
    }
    return batch_accounting(**{**settings, **changes})


def test_padded_numbers_by_hand() -> None:
    found = of_run()
    assert found.sequences_per_step == 128
    assert found.sequences == 12_800
    actor = found.actor
    assert actor.sequences_per_mini_batch == 64
    assert actor.sequences_per_rank == 16
    assert (actor.least_micro_batches, actor.full_micro_batches) == (8, 8)
    assert actor.optimizer_steps_per_step == 6
    assert actor.optimizer_steps == 600
    assert found.critic is None


@pytest.mark.parametrize(
    ("batching", "least", "full"),
    [
        # 64 sequences over 3 ranks are at most 22; 3 of 1000 tokens go into 3072.
        (MicroBatching(max_tokens=3072), 1, 8),
        (MicroBatching(max_tokens=3072, count_multiple_of=5), 5, 10),
        # 3023 tokens have room for 3 samples of 1000, and not for 3 of 1008, a multiple of 2 x 8.
        (MicroBatching(max_tokens=3023, cp_size=1), 1, 8),
        (MicroBatching(max_tokens=3023, cp_size=4), 1, 8),
        (MicroBatching(max_tokens=3023, cp_size=8), 1, 11),
    ],
)
def test_packed_numbers_by_hand(batching: MicroBatching, least: int, full: int) -> None:
    actor = of_run(max_sequence_tokens=1000, actor=(3, batching)).actor
    assert (actor.least_micro_batches, actor.full_micro_batches) == (least, full)
    assert actor.sequences_per_rank == pytest.approx(21.333, abs=1e-3)


def test_critic_batches_follow_its_own_layout_and_warmup() -> None:
    found = of_run(critic=(2, MicroBatching(micro_batch_size=4)), critic_warmup_steps=10)
    assert found.critic is not None
    assert found.critic.sequences_per_rank == 32
    assert found.critic.full_micro_batches == 8
    assert found.critic.optimizer_steps == 600
    assert found.actor.optimizer_steps == 540
    assert found.critic_warmup_steps == 10


@pytest.mark.parametrize(
    ("critic", "warmup_steps", "optimizer_steps"),
    [(None, 10, 600), ((4, MicroBatching()), 101, 0)],
    ids=["without a critic", "longer than the run"],
)
def test_actor_skips_the_steps_of_a_critics_warmup(
    critic: tuple[int, MicroBatching] | None, warmup_steps: int, optimizer_steps: int
) -> None:
    found = of_run(critic=critic, critic_warmup_steps=warmup_steps)
    assert found.actor.optimizer_steps == optimizer_steps


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize(
    "batching",
    [
        MicroBatching(micro_batch_size=2),
        MicroBatching(max_tokens=100),
        MicroBatching(max_tokens=250),
        MicroBatching(max_tokens=350, count_multiple_of=4),
        MicroBatching(max_tokens=10_000, count_multiple_of=2),
        MicroBatching(max_tokens=310, multiple_of=6, cp_size=3),  # 100 tokens are padded to 102
        MicroBatching(micro_batch_size=2, multiple_of=6, cp_size=3),
    ],
)
def test_accounting_matches_the_plan_of_a_step(batching: MicroBatching, dp_size: int) -> None:
    found = of_run(max_sequence_tokens=100, actor=(dp_size, batching))
    full = plan_step([100] * 128, num_mini_batches=2, dp_size=dp_size, batching=batching)
    assert {len(mini_batch) for cuts in full for mini_batch in cuts} == {
        found.actor.full_micro_batches
    }
    samples = [sum(map(len, mini_batch)) for cuts in full for mini_batch in cuts]
    assert np.mean(samples) == found.actor.sequences_per_rank
    rng = np.random.default_rng(0)
    for _ in range(5):
        lengths = rng.integers(2, 101, size=128)
        plan = plan_step(lengths, num_mini_batches=2, dp_size=dp_size, batching=batching)
        for mini_batch in (mini_batch for cuts in plan for mini_batch in cuts):
            assert len(mini_batch) >= found.actor.least_micro_batches
            assert len(mini_batch) <= found.actor.full_micro_batches


def test_sequences_that_do_not_divide_are_refused() -> None:
    with pytest.raises(AssertionError, match="128 sequences do not divide into 3 mini-batches"):
        of_run(num_mini_batches=3)


def test_accounting_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        of_run().num_steps = 1  # type: ignore[misc]


def test_description_of_a_padded_run() -> None:
    assert describe(of_run()) == [
        "a step: 16 prompts x 8 samples = 128 sequences of up to 1,024 tokens, in 2 mini-batches "
        "of 64, 3 epochs",
        "actor: 4 data-parallel ranks with 16 sequences of a mini-batch each, in micro-batches of "
        "2: 8, that is 192 a step on all ranks; 6 optimizer steps a step",
        "the run: 100 steps, 12,800 sequences, 600 optimizer steps of the actor",
    ]
    assert 8 * 4 * 6 == 192


def test_description_of_a_packed_run_with_a_critic() -> None:
    lines = describe(
        of_run(
            num_mini_batches=1,
            num_epochs=1,
            actor=(8, MicroBatching(max_tokens=4096)),
            critic=(3, MicroBatching(micro_batch_size=1, max_tokens=2048)),
            critic_warmup_steps=10,
            max_draws=4,
        )
    )
    assert math.ceil(math.ceil(128 / 3) / 2) == 22
    assert lines == [
        "a step: 16 prompts x 8 samples = 128 sequences of up to 1,024 tokens, in 1 mini-batch of "
        "128, 1 epoch",
        "groups may be replaced, in 4 times a step's draws: up to 512 sequences, of which 128 are "
        "kept",
        "actor: 8 data-parallel ranks with 16 sequences of a mini-batch each, in packed "
        "micro-batches of at most 4,096 tokens: 1 at least and 4 with all sequences at full "
        "length, that is 8 to 32 a step on all ranks; 1 optimizer step a step",
        "critic: 3 data-parallel ranks with about 42.7 sequences of a mini-batch each, in packed "
        "micro-batches of at most 2,048 tokens: 1 at least and 22 with all sequences at full "
        "length, that is 3 to 66 a step on all ranks; 1 optimizer step a step",
        "the run: 100 steps, 12,800 sequences, 90 optimizer steps of the actor (none in the first "
        "10 steps), 100 of the critic",
    ]
