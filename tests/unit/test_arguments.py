"""The `--rl-*` flags in Megatron's real parser: names, defaults, files, and what is refused."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameter, check_combinations, flag_of
from mcore_rl.config import RLConfig, flags, run_flags
from mcore_rl.flags.megatron_flags import SHARED_RL
from mcore_rl.flags.parsed_flags import expand_config, given_values, options_of
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.job import reading
from mcore_rl.megatron.adapter import make_parser

FLAGS = tuple(flags().values())
# Flags of Megatron's RL loop in any of its versions, which ours must not redefine.
TAKEN = """
    --perform-rl-step --refit-method --langrl-env-config --grpo-prompts-per-step --grpo-group-size
    --grpo-iterations --grpo-clamp-eps-lower --grpo-clamp-eps-upper --grpo-kl-beta
    --grpo-entropy-term-weight --grpo-filter-groups-with-same-reward --grpo-default-temperature
    --rl-prompts-per-eval --rl-generation-lag --rl-default-temperature --rl-default-top-p
    --rl-skip-bos-token --rl-offload-optimizer-during-inference
    --rl-importance-sampling-truncation-coef --rl-use-sequence-packing --rl-profile --rl-profile-dir
    --rl-generation-batch-size --rl-num-parallel-generations --rl-verify-model-weights-swap
    --rl-inference-tensor-model-parallel-size --rl-training-cuda-graphs
""".split()


@functools.cache
def megatron() -> argparse.ArgumentParser:
    """Megatron's parser alone."""
    return make_parser()


@functools.cache
def parser() -> argparse.ArgumentParser:
    """Megatron's parser with our flags."""
    return make_parser(add_rl_args)


def another_value(parameter: Parameter) -> tuple[list[str], Any]:
    """Tokens that set a flag to something else than its default, and what they set it to."""
    flag, choices = parameter.flag, parameter.choices
    if parameter.kind is bool:
        if parameter.default is True and parameter.name in run_flags():
            return [flag.replace("--", "--no-", 1)], False
        return [flag], True
    if parameter.several:
        return [flag, "one", flag, "two"], ("one", "two")
    value: Any = {int: 17, float: 0.125, str: "other"}[parameter.kind]
    if parameter.bounds.least is not None:
        value = max(value, parameter.kind(parameter.bounds.least))
    if choices:
        value = choices[-1] if choices[-1] != parameter.default else choices[0]
    return [flag, str(value)], value


def test_every_field_has_a_flag_in_the_parser_of_megatron() -> None:
    actions = list(dict.fromkeys(options_of(parser(), "mcore_rl").values()))
    flags = [action.option_strings[0] for action in actions]
    theirs = {
        f"--{dest.replace('_', '-')}" for dest in SHARED_RL
    }  # Megatron's, which mean the same
    ours = [parameter.flag for parameter in FLAGS if parameter.flag not in theirs]
    assert flags == [*ours, "--rl-config"] and len(ours) == len(FLAGS) - len(theirs)
    assert all(action.help for action in actions)


def test_flags_left_out_give_the_defaults() -> None:
    assert RLConfig.from_args(make_parser(add_rl_args).parse_args([])) == RLConfig()


@pytest.mark.parametrize("parameter", FLAGS, ids=lambda parameter: parameter.name)
def test_flag_sets_its_value_alone(parameter: Parameter) -> None:
    tokens, value = another_value(parameter)
    args = add_rl_args(argparse.ArgumentParser()).parse_args(tokens)
    assert RLConfig.from_args(args) == RLConfig.of(**{parameter.name: value})
    expected = RLConfig().as_dict() | {parameter.name: value}
    if parameter.name == "environment":
        expected["reward"] = "environment"  # by default it is that of the environment
    assert RLConfig.from_args(args).as_dict() == expected


def test_partial_rollouts_have_no_effect_without_staleness() -> None:
    """Every response then ends in the step that began it, and a step takes all that it begins."""
    config = RLConfig.of(partial_rollouts=True, max_staleness=0)
    assert not config.rollout.keeps_unfinished and config.rollout.groups_at_a_time == 1.0
    assert RLConfig.of(partial_rollouts=True).rollout.groups_at_a_time == 1.5


def test_kv_after_update_keep_is_refused_on_gpus() -> None:
    config = RLConfig.of(partial_rollouts=True, kv_after_update="keep")
    config.rollout.check_kv_after_update(has_cuda=False)
    with pytest.raises(UsageError, match="--rl-kv-after-update keep is not possible on GPUs"):
        config.rollout.check_kv_after_update(has_cuda=True)


def test_config_from_args_raises_without_a_flag() -> None:
    with pytest.raises(AttributeError, match="rl_hf_checkpoint"):
        RLConfig.from_args(argparse.Namespace())


def test_flags_and_dests_differ_from_those_of_megatron() -> None:
    flags = {parameter.flag for parameter in FLAGS} | {"--rl-config"}
    assert len(options_of(megatron(), "rl")) >= 39, "Megatron's own RL flags have moved"
    shared = {f"--{dest.replace('_', '-')}" for dest in SHARED_RL}
    assert flags & options_of(megatron()).keys() == shared
    assert not flags & set(TAKEN)
    dests = {f"rl_{parameter.name}" for parameter in FLAGS} | {"rl_config"}
    assert dests & {action.dest for action in options_of(megatron()).values()} == SHARED_RL


def test_parser_that_already_has_our_flag_is_refused() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rl-num-steps", dest="rounds")
    with pytest.raises(UsageError, match=r"--rl-num-steps is already defined .*'rounds'.*; rename"):
        add_rl_args(parser)


def test_help_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["mcore_rl.train", "--help"])
    text = reading.make_parser().format_help()
    assert "--rl-num-samples-per-prompt" in text and "--tensor-model-parallel-size" in text


def test_batch_and_directory_follow_from_the_flags() -> None:
    config = RLConfig.of(num_prompts_per_step=6, num_samples_per_prompt=4, run_name="a")
    assert config.samples_per_step == 24
    assert config.run.directory == Path("runs/a-<date>-<time>.<n>")
    assert config.replaced(run_dir="/b").run.directory == Path("/b")


# What a command line sets ------------------------------------------------------------------------


def test_given_values_are_those_on_the_command_line() -> None:
    tokens = "--num-layers 2 --swiglu --rl-temperature=0.5 --disable-bias-linear".split()
    expected = {"num_layers": 2, "swiglu": True, "rl_temperature": 0.5, "add_bias_linear": False}
    assert given_values(tokens, parser()) == expected
    # Again with the same parser, and nothing is left of the last time.
    assert given_values(["--lr", "1e-3", "--lr", "1e-4"], parser()) == {"lr": 1e-4}


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ("--rl-num-step 3", "unknown flag --rl-num-step; did you mean '--rl-num-steps'"),
        ("--rl-num-step=3", "unknown flag --rl-num-step; did you mean '--rl-num-steps'"),
        ("--num_layers 3", "unknown flag --num_layers; did you mean '--num-layers'"),
        ("--qqqqqq", "unknown flag --qqqqqq; see --help"),
        ("--num-layers 3 4", "'4' belongs to no flag"),
        ("--num-layers", "--num-layers: expected one argument; see --help"),
        ("--num-layers two", "--num-layers: invalid int value: 'two'; see --help"),
        ("--rl-kl-estimator k9", "--rl-kl-estimator: invalid choice: 'k9' (choose from "),
        ("--attention-backend slow", "--attention-backend: invalid value: 'slow'; see --help"),
        ("--moe-layer-freq [0,a]", "--moe-layer-freq: invalid value: '[0,a]'; see --help"),
    ],
)
def test_command_line_is_refused_in_one_sentence(tokens: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        given_values(tokens.split(), parser())
    assert str(caught.value).startswith(says)


# Files of flags, with Megatron's whole parser; their rules: test_arguments_config -----------------


def test_every_flag_of_megatron_is_a_key(tmp_path: Path) -> None:
    """With dashes and with underscores."""
    for spell in (str, lambda flag: flag[2:].replace("-", "_")):
        keys = {}
        for option, action in options_of(parser()).items():
            if action.dest not in ("help", "rl_config"):
                keys[spell(option)] = True if action.nargs == 0 else "value"
        # A file for each name of a flag that has several: within a file the last one counts.
        for chunk in (dict([item]) for item in keys.items()):
            (tmp_path / "keys.yaml").write_text(yaml.safe_dump(chunk))
            ((key, value),) = chunk.items()
            tokens = expand_config(["--rl-config", str(tmp_path / "keys.yaml")], parser())
            flag = tokens[0]
            assert flag.lstrip("-").replace("_", "-") == key.lstrip("-").replace("_", "-")
            assert flag in options_of(parser())
            assert tokens[1:] == ([] if value is True else ["value"])


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "rl.yaml").write_text("rl_num_steps: 3\nnum_layers: 4\nswiglu: true\n")
    tokens = ["--num-layers", "5", "--rl-config", str(tmp_path / "rl.yaml")]
    expected = {"rl_num_steps": 3, "num_layers": 5, "swiglu": True}
    assert given_values(expand_config(tokens, parser()), parser()) == expected


def test_list_of_a_flag_with_several_values(tmp_path: Path) -> None:
    (tmp_path / "rl.yaml").write_text(
        "moe_layer_freq: [0, 1, 1]\nrecompute_modules: [core_attn, moe]\n"
    )
    values = given_values(
        expand_config(["--rl-config", str(tmp_path / "rl.yaml")], parser()), parser()
    )
    assert values == {"moe_layer_freq": [0, 1, 1], "recompute_modules": ["core_attn", "moe"]}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("num_layer: 3", "unknown key 'num_layer'; did you mean '--num-layers'"),
        ("rl_num_stepz: 3", "unknown key 'rl_num_stepz'; did you mean '--rl-num-steps'"),
        ("swiglu: 3", "'swiglu' is a switch; its value is true or false"),
    ],
)
def test_key_is_refused_in_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "rl.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        expand_config(["--rl-config", str(file)], parser())
    assert str(caught.value).startswith(f"--rl-config {file}: {says}")


@pytest.mark.parametrize("flag", ["temperature", "eval_temperature"])
def test_temperature_is_accepted_iff_vllm_samples_at_it(flag: str) -> None:
    from vllm import SamplingParams

    def taken(value: float) -> bool:
        """By vLLM, as it is."""
        try:
            return SamplingParams(temperature=value).temperature == value
        except Exception:  # of another class in other versions
            return False

    for value in (0.001, 0.0099, 0.01, 0.5, 1.0, 2.0, 2.5):
        if taken(value):
            RLConfig.of(**{flag: value})
            continue
        name = f"--rl-{flag.replace('_', '-')} {value}"
        with pytest.raises(UsageError, match=rf"^{name} is not in \[0.01, 2\]: .* for example 1"):
            RLConfig.of(**{flag: value})
    if flag == "eval_temperature":
        RLConfig.of(eval_temperature=0.0)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("num_steps", 0, "must be greater than 0"),
        ("reward_timeout_seconds", float("nan"), "must be greater than 0"),
        ("reward_timeout_seconds", float("inf"), "must be greater than 0"),
        ("reward_workers", 0, "must be greater than 0"),
        ("reward_http_batch", 0, "must be at least 1"),
        ("reward_http_concurrency", 0, "must be at least 1"),
        ("reward_http_retries", -1, "must be at least 0"),
        ("reward_memory_gib", float("nan"), "must be at least 0"),
        ("alarm_kl", -1.0, "must be at least 0"),
        ("alarm_window", 1, "must be at least 2; one step is not a trend"),
        ("rollout_gpu_memory_utilization", 1.5, "must be at most 1; it is a share of the GPU"),
        ("top_p", 0.0, "must be greater than 0; give 1 to sample all tokens"),
        ("top_p", 1.5, "must be at most 1; give 1 to sample all tokens"),
        ("critic_tp_size", 0, "must be at least 1; drop it for the actor's"),
    ],
)
def test_a_number_out_of_its_bounds_is_refused(name: str, value: float, says: str) -> None:
    with pytest.raises(UsageError, match=f"^{flags()[name].flag} {value} {says}"):
        RLConfig.of(**{name: value})


def test_defaults_are_within_bounds_and_numbers_have_bounds() -> None:
    for parameter in FLAGS:
        parameter.check(parameter.default)
        of_two = parameter.name.startswith(("mismatch_", "overlong_"))  # bounded by each other
        if parameter.kind in (int, float) and not of_two:
            assert parameter.bounds, parameter.flag


def given_as(*names: str) -> dict[str, Any]:
    """Another value than the default for each of these flags."""
    return {name: another_value(run_flags()[name])[1] for name in names}


@pytest.mark.parametrize("name", [name for name, each in run_flags().items() if each.needs])
def test_a_flag_without_what_it_needs_is_refused(name: str) -> None:
    parameter = run_flags()[name]
    shown = " or ".join(flag_of(each) for each in parameter.needs[-2:])
    with pytest.raises(UsageError, match=f"^{parameter.flag}.* has no effect without .*{shown};"):
        check_combinations(RLConfig.of(**given_as(name)).values())
    for needed in parameter.needs:
        check_combinations(RLConfig.of(**given_as(name, needed)).values())


@pytest.mark.parametrize(
    ("name", "excluded"),
    [(name, other) for name, each in run_flags().items() for other in each.excludes],
)
def test_flags_that_exclude_each_other_are_refused(name: str, excluded: str) -> None:
    parameter, other = run_flags()[name], run_flags()[excluded]
    with pytest.raises(UsageError) as caught:
        check_combinations(RLConfig.of(**given_as(name, excluded)).values())
    sentence = str(caught.value)
    assert sentence.startswith(parameter.flag) and other.flag in sentence
    assert sentence.endswith("; drop this flag")
