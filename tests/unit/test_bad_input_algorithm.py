"""Parts of an algorithm that do not exist, do not fit or have no effect, and bad rewards and
critics; see bad_input_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input_cases import Case, assert_refused, parse_cases, table
from tests.bad_input_folder import reward_model, write

pytestmark = pytest.mark.usefixtures("restored_tables")  # of --rl-import

PARTS_TEXT = """
unknown_algorithm: --rl-algorithm grop
    --rl-algorithm grop ... did you mean grpo? ... dapo
    => --rl-algorithm grpo
unknown_loss: --rl-policy-loss ppo_clipp
    --rl-policy-loss ppo_clipp ... did you mean ppo_clip?
    => --rl-policy-loss ppo_clip
kl_in_both_places: --rl-kl-coef 0.1 --rl-kl-in-reward
    --rl-kl-coef 0.1 ... --rl-kl-in-reward ... count it twice ... give one
    => drop --rl-kl-in-reward | drop --rl-kl-coef
dynamic_sampling_of_one_sample: --rl-algorithm ppo --rl-dynamic-sampling
    --rl-num-samples-per-prompt 1 ... choose 2 or more
    => --rl-num-samples-per-prompt 2 | drop --rl-dynamic-sampling
filter_that_no_file_registers: --rl-group-filter solvable
    --rl-group-filter solvable is not known ... give --rl-import with the file that registers it
    => --rl-import {examples}/own_parts/filter.py
unknown_filter: --rl-import {examples}/own_parts/filter.py --rl-group-filter solvabel
    --rl-group-filter solvabel is not a known group filter (did you mean solvable?) ... solvable
    => --rl-group-filter solvable
parameter_of_no_filter: --rl-import {examples}/own_parts/filter.py --rl-solved-by arithmetic
    --rl-solved-by arithmetic has no effect without --rl-group-filter ... drop it
    => --rl-group-filter solvable | drop --rl-solved-by
sampler_that_no_file_registers: --rl-sampler forks
    --rl-sampler forks is not known ... give --rl-import with the file that registers it
    => --rl-import {examples}/own_parts/sampler.py
sampler_without_greedy_responses: --rl-import {examples}/own_parts/sampler.py --rl-sampler forks
  --rl-algorithm remax
    --rl-sampler forks samples no greedy response ... for example reinforce_pp
    => --rl-advantage reinforce_pp
sampler_of_turns: --rl-import {examples}/own_parts/sampler.py --rl-sampler forks
  --rl-environment calculator --rl-reward environment
    --rl-sampler forks samples whole responses itself ... drop it
    => drop --rl-sampler
refills_of_nothing: --rl-max-refills 3
    --rl-max-refills 3 has no effect without --rl-dynamic-sampling or --rl-group-filter ... drop it
    => --rl-dynamic-sampling | --rl-import {examples}/own_parts/filter.py --rl-group-filter solvable
    | drop --rl-max-refills
group_of_one: --rl-num-samples-per-prompt 1
    --rl-num-samples-per-prompt 1 leaves nothing to learn from ... choose 2 or more
    => --rl-num-samples-per-prompt 2
top_p_without_correction: --rl-top-p 0.9
    --rl-top-p 0.9 needs --rl-mismatch-correction ... renormalises ... token_tis
    => --rl-mismatch-correction token_tis | drop --rl-top-p
bounds_without_correction: --rl-mismatch-cap 2
    --rl-mismatch-cap 2.0 has no effect ... drop it
    => --rl-mismatch-correction token_tis
centered_scores_of_a_clipped_loss: --rl-score-centering 8
    --rl-score-centering 8 is for REINFORCE's loss ... --rl-policy-loss ppo_clip ... policy_gradient
    => --rl-policy-loss policy_gradient
centered_scores_weighed_by_response: --rl-score-centering 8 --rl-policy-loss policy_gradient
  --rl-mismatch-correction sequence_tis
    --rl-score-centering 8 cannot be ... --rl-mismatch-correction sequence_tis ... token_tis
    => --rl-mismatch-correction none | --rl-mismatch-correction icepop
centered_scores_with_a_veto: --rl-score-centering 8 --rl-policy-loss policy_gradient
  --rl-mismatch-correction icepop --rl-mismatch-veto 0.1
    --rl-score-centering 8 cannot be combined with --rl-mismatch-veto 0.1 ... drop one
    => drop --rl-mismatch-veto
centered_scores_of_some_tokens: --rl-score-centering 8 --rl-policy-loss policy_gradient
  --rl-mismatch-correction token_tis --rl-top-p 0.9
    --rl-score-centering 8 cannot be combined with --rl-top-p 0.9 ... whole vocabulary ... drop one
    => drop --rl-top-p
centered_scores_of_more_than_the_vocabulary: --rl-score-centering 100000
  --rl-policy-loss policy_gradient
    --rl-score-centering 100000 is more than the vocabulary ... choose
    => --rl-score-centering 128
engine_log_probs_without_experts_to_reuse: --rl-old-log-probs rollout --rl-routing-replay r2
    --rl-old-log-probs rollout ... --rl-routing-replay r2 ... r3
    => --rl-routing-replay r3 | drop --rl-routing-replay
overlong_buffer_beyond_the_budget: --rl-overlong-buffer-tokens 65
    --rl-overlong-buffer-tokens 65 ... --rl-max-response-tokens 64 ... choose
    => --rl-overlong-buffer-tokens 12
refresh_without_a_reference: --rl-reference-refresh-interval 5
    --rl-reference-refresh-interval 5 has no effect ... --rl-kl-coef
    => --rl-kl-coef 0.1 | --rl-kl-in-reward
token_budget_below_the_longest_sample: --rl-max-tokens-per-microbatch 100
    --rl-max-tokens-per-microbatch 100 is less than the longest sample ... = 128 ... raise it
    => --rl-max-tokens-per-microbatch 128
micro_batches_counted_in_samples_and_in_tokens: --rl-max-tokens-per-microbatch 128
  --micro-batch-size 2
    --micro-batch-size 2 has no effect ... --rl-max-tokens-per-microbatch 128 ... set it to 1
    => --micro-batch-size 1 | --rl-max-tokens-per-microbatch 0
shared_prompts_without_packing: --rl-share-prompts on
    --rl-share-prompts on ... --rl-max-tokens-per-microbatch 0 ... drop it, or pack
    => --rl-max-tokens-per-microbatch 128
shared_prompts_with_dropout: --rl-share-prompts on --rl-max-tokens-per-microbatch 128
  --attention-dropout 0.1
    --rl-share-prompts on ... --attention-dropout 0.1 ... drop it
    => drop --attention-dropout
import_that_raises: --rl-import {here}/mine.py
    --rl-import {here}/mine.py ... ZeroDivisionError
    => --rl-import {here}/mine.py
"""
PARTS = parse_cases(
    PARTS_TEXT,
    {"import_that_raises": write("mine.py", "1 / 0\n")},
    {"import_that_raises": write("mine.py", "")},
)
CRITIC = parse_cases("""
layout_that_does_not_divide: --rl-algorithm ppo --rl-critic-tp-size 3
    of the critic: --tensor-model-parallel-size 3 ... divide the world of 2 ... change
    => --rl-critic-tp-size 2
layout_of_zero: --rl-algorithm ppo --rl-critic-pp-size 0
    --rl-critic-pp-size 0 must be at least 1
no_such_checkpoint: --rl-algorithm ppo --rl-critic-init {here}/absent
    --rl-critic-init {here}/absent
    => --rl-critic-init {here}/checkpoint
""")
ROLES_TEXT = """
critic_on_ranks_that_do_not_exist: --rl-algorithm ppo --rl-critic-ranks 1-2
    --rl-critic-ranks 1-2 names rank 2 ... ranks 0 to 1 ... change
    => --rl-critic-ranks 1 --tensor-model-parallel-size 1 --expert-model-parallel-size 1
critic_on_all_ranks: --rl-algorithm ppo --rl-critic-ranks 0-1
    --rl-critic-ranks 0-1 leave none of the 2 ranks to the actor ... drop
    => --rl-critic-ranks 1 --tensor-model-parallel-size 1 --expert-model-parallel-size 1
critic_ranks_without_a_critic: --rl-critic-ranks 1
    --rl-critic-ranks 1 has no effect ... uses no critic
    => --rl-advantage gae --tensor-model-parallel-size 1 --expert-model-parallel-size 1
critic_that_does_not_fit_its_ranks: --tensor-model-parallel-size 1 --expert-model-parallel-size 1
  --rl-algorithm ppo --rl-critic-ranks 1 --rl-critic-tp-size 2
    of the critic: --tensor-model-parallel-size 2 ... does not divide the world of 1
    => --rl-critic-tp-size 1
actor_that_does_not_fit_the_ranks_left: --rl-algorithm ppo --rl-critic-ranks 1 --rl-critic-tp-size 1
    of the actor, on rank 0: --tensor-model-parallel-size 2 ... divide the world of 1
    => --tensor-model-parallel-size 1 --expert-model-parallel-size 1
reward_model_without_a_folder: --rl-reward model
    --rl-reward model names model ... --rl-reward-model is missing ... score head
    => --rl-reward-model {here}/scores
reward_model_that_no_reward_is: --rl-reward-model {here}
    --rl-reward-model {here} has no effect ... add model to it
    => --rl-reward arithmetic,model --rl-reward-model {here}/scores
reward_ranks_without_a_model: --rl-reward-ranks 1
    --rl-reward-ranks 1 has no effect ... add model to it
    => --rl-reward model --rl-reward-model {here}/scores --tensor-model-parallel-size 1
    --expert-model-parallel-size 1
reward_model_without_a_head: --rl-reward model --rl-reward-model {here}/checkpoint
    --rl-reward-model {here}/checkpoint has no score.weight ... one label
    => --rl-reward-model {here}/scores
"""
ROLES = parse_cases(
    ROLES_TEXT,
    repairs={
        "reward_model_without_a_folder": reward_model,
        "reward_model_that_no_reward_is": reward_model,
        "reward_ranks_without_a_model": reward_model,
        "reward_model_without_a_head": reward_model,
    },
)
TEACHER = parse_cases("""
coefficient_without_a_teacher: --rl-teacher-coef 0.5
    --rl-teacher-coef 0.5 has no effect without --rl-teacher
    => --rl-teacher {here}/checkpoint
coefficient_of_zero: --rl-teacher {here}/checkpoint --rl-teacher-coef 0
    --rl-teacher-coef 0.0 must be greater than 0
    => --rl-teacher-coef 1.0
no_such_teacher: --rl-teacher {here}/absent
    --rl-teacher {here}/absent
    => --rl-teacher {here}/checkpoint
teacher_that_is_no_address: --rl-teacher http://user:word@host
    --rl-teacher has a user or password
    => --rl-teacher http://host
header_of_a_folder: --rl-teacher {here}/checkpoint --rl-teacher-header-env HOME
    --rl-teacher-header-env HOME has no effect ... is a folder
layout_of_a_server: --rl-teacher http://localhost:9 --rl-teacher-tp-size 2
    --rl-teacher-tp-size 2 has no effect ... is a server
temperature_of_a_server: --rl-teacher http://localhost:9 --rl-temperature 0.7
    --rl-teacher http://localhost:9 cannot be combined with --rl-temperature 0.7 ... folder
    => --rl-temperature 1 | --rl-teacher {here}/checkpoint
form_of_a_server: --rl-teacher http://localhost:9 --rl-teacher-form topk
    --rl-teacher-form topk is for a teacher in a folder ... token
    => --rl-teacher-form token | --rl-teacher {here}/checkpoint
top_k_of_another_form: --rl-teacher {here}/checkpoint --rl-teacher-top-k 8
    --rl-teacher-top-k 8 has no effect with --rl-teacher-form token ... topk
    => --rl-teacher-form topk
full_with_fp32_head: --rl-teacher {here}/checkpoint --rl-teacher-form full --rl-fp32-lm-head
    --rl-teacher-form full cannot be combined with --rl-fp32-lm-head ... topk
    => --rl-teacher-form topk | drop --rl-fp32-lm-head
topk_with_centered_scores: --rl-teacher {here}/checkpoint --rl-teacher-form topk
  --rl-score-centering 8 --rl-policy-loss policy_gradient
    --rl-teacher-form topk cannot be combined with --rl-score-centering 8 ... token
    => --rl-teacher-form token | drop --rl-score-centering
more_than_the_vocabulary: --rl-teacher {here}/checkpoint --rl-teacher-form topk
  --rl-teacher-top-k 100000
    --rl-teacher-top-k 100000 is more than the vocabulary ... lower it
    => --rl-teacher-top-k 8
teacher_on_all_ranks: --rl-teacher {here}/checkpoint --rl-teacher-ranks 0-1
    --rl-teacher-ranks 0-1 leave none of the 2 ranks to the actor ... drop
    => --rl-teacher-ranks 1 --tensor-model-parallel-size 1 --expert-model-parallel-size 1
teacher_that_does_not_fit_its_ranks: --tensor-model-parallel-size 1 --expert-model-parallel-size 1
  --rl-teacher {here}/checkpoint --rl-teacher-ranks 1 --rl-teacher-tp-size 2
    of the teacher: --tensor-model-parallel-size 2 ... does not divide the world of 1
    => --rl-teacher-tp-size 1
nothing_to_learn_from: --rl-reward none
    --rl-reward none leaves nothing to learn from ... --rl-teacher
    => --rl-teacher {here}/checkpoint | --rl-reward arithmetic
none_and_a_reward: --rl-reward none,arithmetic --rl-teacher {here}/checkpoint
    --rl-reward none,arithmetic names none next to other rewards ... leave it out
    => --rl-reward arithmetic
none_with_selected_groups: --rl-reward none --rl-teacher {here}/checkpoint --rl-dynamic-sampling
    --rl-reward none cannot be combined with --rl-dynamic-sampling ... drop one
    => drop --rl-dynamic-sampling
none_with_filtered_groups: --rl-reward none --rl-teacher {here}/checkpoint
  --rl-import {examples}/own_parts/filter.py --rl-group-filter solvable
    --rl-reward none leaves --rl-group-filter solvable no rewards ... drop one
    => drop --rl-group-filter
""")
REWARDS = parse_cases("""
weights_of_another_number: --rl-reward-weights 1,2
    --rl-reward-weights 1,2 ... arithmetic
    => --rl-reward-weights 1
http_without_url: --rl-reward http
    --rl-reward http ... --rl-reward-url
    => --rl-reward-url http://localhost:9
""")


@pytest.mark.parametrize(
    "case", table(parts=PARTS, critic=CRITIC, roles=ROLES, teacher=TEACHER, rewards=REWARDS)
)
def test_bad_algorithm_is_refused_in_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
