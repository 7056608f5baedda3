"""Parts of an algorithm that do not exist, do not fit or have no effect, and bad rewards and
critics; see bad_input_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input_cases import Case, assert_refused, table
from tests.bad_input_folder import write

PARTS = [
    Case(
        "unknown_algorithm",
        ["--rl-algorithm grop", "did you mean grpo?", "dapo"],
        more="--rl-algorithm grop",
    ),
    Case(
        "unknown_estimator",
        ["--rl-advantage rlo", "did you mean rloo?"],
        more="--rl-advantage rlo",
    ),
    Case(
        "unknown_loss",
        ["--rl-policy-loss ppo_clipp", "did you mean ppo_clip?"],
        more="--rl-policy-loss ppo_clipp",
    ),
    Case(
        "critic_flag_without_a_critic",
        ["--rl-critic-lr 0.001 has no effect", "uses no critic", "--rl-advantage gae"],
        more="--rl-critic-lr 1e-3",
    ),
    Case(
        "kl_in_both_places",
        ["--rl-kl-coef 0.1", "--rl-kl-in-reward", "count it twice", "give one"],
        more="--rl-kl-coef 0.1 --rl-kl-in-reward",
    ),
    Case(
        "dynamic_sampling_of_one_sample",
        ["--rl-num-samples-per-prompt 1", "choose 2 or more"],
        more="--rl-algorithm ppo --rl-dynamic-sampling",
    ),
    Case(
        "group_of_one",
        ["--rl-num-samples-per-prompt 1 leaves nothing to learn from", "choose 2 or more"],
        more="--rl-num-samples-per-prompt 1",
    ),
    Case(
        "top_p_without_correction",
        ["--rl-top-p 0.9 needs --rl-mismatch-correction", "renormalises", "token_tis"],
        more="--rl-top-p 0.9",
    ),
    Case(
        "bounds_without_correction",
        ["--rl-mismatch-cap 2.0 has no effect", "drop it"],
        more="--rl-mismatch-cap 2",
    ),
    Case(
        "overlong_buffer_beyond_the_budget",
        ["--rl-overlong-buffer-tokens 65", "--rl-max-response-tokens 64", "choose"],
        more="--rl-overlong-buffer-tokens 65",
    ),
    Case(
        "refresh_without_a_reference",
        ["--rl-reference-refresh-interval 5 has no effect", "--rl-kl-coef"],
        more="--rl-reference-refresh-interval 5",
    ),
    Case(
        "token_budget_below_the_longest_sample",
        ["--rl-max-tokens-per-microbatch 100 is less than the longest sample", "= 128", "raise it"],
        more="--rl-max-tokens-per-microbatch 100",
    ),
    Case(
        "micro_batches_counted_in_samples_and_in_tokens",
        ["--micro-batch-size 2 has no effect", "--rl-max-tokens-per-microbatch 128", "set it to 1"],
        more="--rl-max-tokens-per-microbatch 128 --micro-batch-size 2",
    ),
    Case(
        "shared_prompts_without_packing",
        ["--rl-share-prompts on", "--rl-max-tokens-per-microbatch 0", "drop one of the two"],
        more="--rl-share-prompts on",
    ),
    Case(
        "shared_prompts_with_dropout",
        ["--rl-share-prompts on", "--attention-dropout 0.1", "drop one of the two"],
        more="--rl-share-prompts on --rl-max-tokens-per-microbatch 128 --attention-dropout 0.1",
    ),
    Case(
        "import_that_raises",
        ["--rl-import {here}/mine.py", "ZeroDivisionError"],
        more="--rl-import {here}/mine.py",
        change=write("mine.py", "1 / 0\n"),
    ),
]
CRITIC = [
    Case(
        "layout_that_does_not_divide",
        ["of the critic: --tensor-model-parallel-size 3", "divide the world of 2", "change"],
        more="--rl-algorithm ppo --rl-critic-tp-size 3",
    ),
    Case(
        "layout_of_zero",
        ["--rl-critic-pp-size 0 must be at least 1"],
        more="--rl-algorithm ppo --rl-critic-pp-size 0",
    ),
    Case(
        "no_such_checkpoint",
        ["--rl-critic-init {here}/absent"],
        more="--rl-algorithm ppo --rl-critic-init {here}/absent",
    ),
]
ROLES = [
    Case(
        "critic_on_ranks_that_do_not_exist",
        ["--rl-critic-ranks 1-2 names rank 2", "ranks 0 to 1", "change"],
        more="--rl-algorithm ppo --rl-critic-ranks 1-2",
    ),
    Case(
        "critic_on_all_ranks",
        ["--rl-critic-ranks 0-1 leave none of the 2 ranks to the actor", "drop"],
        more="--rl-algorithm ppo --rl-critic-ranks 0-1",
    ),
    Case(
        "critic_ranks_without_a_critic",
        ["--rl-critic-ranks 1 has no effect", "uses no critic"],
        more="--rl-critic-ranks 1",
    ),
    Case(
        "critic_that_does_not_fit_its_ranks",
        ["of the critic: --tensor-model-parallel-size 2", "does not divide the world of 1"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--rl-algorithm ppo --rl-critic-ranks 1 --rl-critic-tp-size 2",
    ),
    Case(
        "actor_that_does_not_fit_the_ranks_left",
        ["of the actor, on rank 0: --tensor-model-parallel-size 2", "divide the world of 1"],
        more="--rl-algorithm ppo --rl-critic-ranks 1 --rl-critic-tp-size 1",
    ),
    Case(
        "reward_model_without_a_folder",
        ["--rl-reward model names model", "--rl-reward-model is missing", "score head"],
        flags={"--rl-reward": "model"},
    ),
    Case(
        "reward_model_that_no_reward_is",
        ["--rl-reward-model {here} has no effect", "add model to it"],
        more="--rl-reward-model {here}",
    ),
    Case(
        "reward_ranks_without_a_model",
        ["--rl-reward-ranks 1 has no effect", "add model to it"],
        more="--rl-reward-ranks 1",
    ),
    Case(
        "reward_model_without_a_head",
        ["--rl-reward-model {here}/checkpoint has no score.weight", "one label"],
        flags={"--rl-reward": "model"},
        more="--rl-reward-model {here}/checkpoint",
    ),
]
REWARDS = [
    Case(
        "weights_of_another_number",
        ["--rl-reward-weights 1,2", "arithmetic"],
        more="--rl-reward-weights 1,2",
    ),
    Case(
        "http_without_url",
        ["--rl-reward http", "--rl-reward-url"],
        flags={"--rl-reward": "http"},
    ),
    Case(
        "url_without_http",
        ["--rl-reward-url", "no effect"],
        more="--rl-reward-url http://127.0.0.1:1/score",
    ),
]


@pytest.mark.parametrize("case", table(parts=PARTS, critic=CRITIC, roles=ROLES, rewards=REWARDS))
def test_bad_algorithm_is_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
