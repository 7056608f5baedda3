"""Context parallelism on CPU: its attention, every kind of attention of a whole model, and a critic
beside it in another layout.

That updates are those of one process, test_invariance shows, of latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.dist.checkpoints import assert_log_probs_equal_transformers
from tests.dist.layouts import job_flags
from tests.dist.test_invariance import ALGORITHMS, COMMON_FLAGS
from tests.dist.updates import PPO_JOB, Outcome, differences_of, learned
from tests.rank_pool import RankPool


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    ("groups", "value_size", "window"),
    [(4, 8, None), (2, 16, None), (2, 16, 7)],
    ids=["latent", "grouped", "gpt_oss"],
)
@pytest.mark.parametrize("cp_size", [2, 3])
def test_attention_is_that_over_whole_samples(
    cp_size: int, groups: int, value_size: int, window: int | None, packed: bool, ranks: RankPool
) -> None:
    results = ranks.run(
        "tests.dist.context_parallel_jobs:attention",
        world_size=cp_size,
        lengths=[2 * cp_size * size for size in (3, 1, 5)],
        packed=packed,
        groups=groups,
        value_size=value_size,
        window=window,
    )
    # In float32, of numbers of the order of 1.
    num_compared = 4 if window is None else 5
    assert all(len(r) == num_compared and max(r) < 1e-5 for r in results), results


@pytest.mark.parametrize("division", ["padded", "packed"])
# Yarn and latent; grouped; yarn and grouped, with windows and sinks; delta nets.
@pytest.mark.parametrize("arch", ["kimi_k2", "qwen3_moe", "gpt_oss", "qwen3_next"])
def test_log_probs_equal_transformers_in_float32(
    arch: str,
    division: str,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    checkpoint = checkpoint_factory(arch)
    budget = ["--rl-max-tokens-per-microbatch", "128"] if division == "packed" else []
    flags = job_flags(
        checkpoint, "tp1_pp1_ep2", "--context-parallel-size", "2", *budget, micro_batch_size=1
    )
    results = ranks.run(
        "tests.dist.jobs:log_probs_and_export",
        world_size=2,
        flags=flags,
        target=tmp_path / "exported",
    )
    assert_log_probs_equal_transformers(results, checkpoint)


def test_ppo_update_is_the_same_where_actor_and_critic_differ_in_their_layouts(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    checkpoint = checkpoint_factory("deepseek_v3")

    def learn(name: str, world_size: int, *flags: str) -> Outcome:
        common = ["--rl-hf-checkpoint", str(checkpoint), *COMMON_FLAGS, *ALGORITHMS["ppo"].split()]
        # Drawn at random: on a processor with AVX2 alone a tie of the actor's router was decided
        # in another way in another layout.
        common += ["--rl-routing-replay", "r3"]
        return learned(ranks, [*common, *flags], world_size, tmp_path / name, job=PPO_JOB)

    # Actor CP2 x DP2, its critic TP2 x CP2: what a rank's row is a multiple of differs, too.
    different = learn(
        "different",
        4,
        *("--context-parallel-size", "2", "--expert-model-parallel-size", "2"),
        *("--rl-critic-tp-size", "2", "--rl-critic-ep-size", "1"),
        *("--rl-max-tokens-per-microbatch", "128"),
    )
    assert "TP2 x CP2 x DP1" in different.found["critic_layout"]
    differences_of(different, learn("one", 1)).assert_small()
