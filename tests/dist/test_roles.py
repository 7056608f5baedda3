"""Critic and reward model on the actor's ranks in turn and on ranks of their own: the same numbers.

`tests.e2e.test_roles` runs the whole program so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.layouts import SPLITS, job_flags
from tests.dist.ppo_jobs import scored_samples
from tests.dist.test_ppo import PACKED, PPO_FLAGS
from tests.dist.test_value_model import TOLERANCE as SCORE_TOLERANCE
from tests.dist.test_value_model import reference_values, reward_model
from tests.dist.updates import PPO_JOB, Outcome, assert_alike, learned
from tests.rank_pool import RankPool

# Rank 0 and 1 act in two stages, 2 to 5 criticise by TP2 and DP2, 6 rewards.
APART = tuple(
    "--rl-critic-ranks 2-5 --rl-critic-tp-size 2 --rl-critic-pp-size 1 --rl-reward-ranks 6 "
    "--rl-reward-pp-size 1".split()
)
# actor's split -> further flags of the reward model
IN_TURN = {
    "tp1_pp1_ep1": (),
    "tp2_pp2_ep2": ("--rl-reward-tp-size", "1", "--rl-reward-pp-size", "1", *PACKED),
}


@pytest.fixture(scope="module")
def checkpoint(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("deepseek_v3")


@pytest.fixture(scope="module")
def reward(checkpoint: Path, tmp_path_factory: Any) -> Path:
    return reward_model(checkpoint, tmp_path_factory.mktemp("r") / "reward", with_lm_head=False)


@pytest.fixture(scope="module")
def reward_flags(reward: Path) -> tuple[str, ...]:
    return ("--rl-reward", "exact_match,model", "--rl-reward-model", str(reward))


@pytest.fixture(scope="module")
def apart(
    checkpoint: Path, reward_flags: tuple[str, ...], ranks: RankPool, tmp_path_factory: Any
) -> tuple[list[dict], Path]:
    """What ranks of three roles found, and where the weights are."""
    target = tmp_path_factory.mktemp("apart")
    flags = job_flags(
        checkpoint,
        "tp1_pp2_ep1",
        *(*PPO_FLAGS, *PACKED, *reward_flags, *APART),
        micro_batch_size=1,
    )
    job = "tests.dist.roles_jobs:learn_apart"
    return ranks.run(job, world_size=7, flags=flags, target=target), target


@pytest.fixture(scope="module")
def expected_scores(checkpoint: Path, reward: Path) -> torch.Tensor:
    samples = scored_samples(
        json.loads((checkpoint / "config.json").read_text())["vocab_size"], num_samples=8
    )
    tokens = [
        torch.from_numpy(
            np.concatenate([s.rollout.prompt.token_ids, s.rollout.response_token_ids])
        ).long()
        for s in samples
    ]
    return torch.stack([values[-1] for values in reference_values(reward, tokens)])


def test_each_rank_has_its_role(apart: tuple[list[dict], Path]) -> None:
    results, target = apart
    assert [found["role"] for found in results] == [*["actor"] * 2, *["critic"] * 4, "reward"]
    assert results[0]["steps"] == results[1]["steps"]
    assert results[2] == results[3] and results[4] == results[5]
    assert results[2]["layout"].startswith("TP2 x CP1 x DP2 x PP1,")
    assert {"critic/learning_rate", "critic/update_seconds"} <= set(results[0]["rates"])
    assert (target / "saved" / "critic" / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_no_rank_receives_what_others_learn_from(apart: tuple[list[dict], Path]) -> None:
    *results, _ = apart[0]
    num_tokens = results[0]["num_tokens"]
    for found in results:
        assert found["received_bytes"] == found["expected_bytes"]
        # A number for each of 8 samples in two epochs, eight of each of four updates.
        assert 0 < found["most_told"] <= 32 < num_tokens / 4
    # In two steps a token and its return, and what later epochs bring: less than all to each.
    for found in results[2:]:
        assert found["received_bytes"] < 0.8 * 2 * 9 * num_tokens


def test_a_critic_of_its_own_ranks_learns_while_the_actor_does_and_the_same(
    apart: tuple[list[dict], Path], checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """That they are in every update together is what `learn_apart` waits for."""
    results, target = apart
    flags = job_flags(checkpoint, "tp1_pp1_ep1", *PPO_FLAGS, micro_batch_size=1)
    expected = learned(ranks, flags, 1, tmp_path, job=PPO_JOB)
    assert_alike(Outcome.of([{"steps": results[0]["steps"]}], target), expected)


def test_scores_of_ranks_of_their_own_equal_transformers(
    apart: tuple[list[dict], Path], expected_scores: torch.Tensor
) -> None:
    found = torch.tensor(apart[0][0]["scores"])
    assert (found - expected_scores).abs().max() <= SCORE_TOLERANCE


@pytest.mark.parametrize("split", IN_TURN)
def test_scores_in_turn_with_the_actor_equal_transformers(
    split: str,
    checkpoint: Path,
    reward_flags: tuple[str, ...],
    ranks: RankPool,
    expected_scores: torch.Tensor,
) -> None:
    flags = job_flags(checkpoint, split, *reward_flags, *IN_TURN[split], micro_batch_size=1)
    results = ranks.run("tests.dist.roles_jobs:scores", world_size=SPLITS[split][3], flags=flags)
    assert expected_scores.std() > 0.1, "scores that hardly differ show nothing"
    for found in results:
        assert (torch.tensor(found) - expected_scores).abs().max() <= SCORE_TOLERANCE
