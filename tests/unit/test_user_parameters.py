"""User-defined losses, metrics, prompts and families, and the contract of mcore_rl.api."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mcore_rl
import mcore_rl.api as api
import mcore_rl.api.environment as environment
from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.algorithms.total_loss import policy_loss_total
from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.config import RLConfig, config_from, flags
from mcore_rl.data.options import DataOptions
from mcore_rl.data.prompt_file import read_rows
from mcore_rl.data.prompts import prompt_source
from mcore_rl.data.sources import SourceSpec
from mcore_rl.flags.pages import BEGIN, END, flags_page, help_text, parameter_table
from mcore_rl.flags.parsed_flags import as_config, expand_config, given_values, import_given_files
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.job import preflight, resolver
from mcore_rl.job.facts import Source
from mcore_rl.launch.launcher import main as launch
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.observe import user_metrics
from mcore_rl.observe.run_directory import RunConfig, RunDirectory, read_config
from tests.unit.algorithms.ragged import ragged, random_ragged
from tests.unit.algorithms.test_estimators import inputs_of

ROOT = Path(__file__).resolve().parents[2]
MINE = """
from dataclasses import dataclass

from mcore_rl.api import (
    AdvantageOutputs, Discount, Parameters, Recipe, TokenLosses,
    advantage, param, policy_loss, recipe,
)


@dataclass(frozen=True)
class Width(Parameters):
    spo_width: float = param(0.25, "how far ratios are pulled back", above=0, most=2)
    spo_shape: str = param("round", "of the pull", choices=("round", "square"))


@dataclass(frozen=True)
class Decay(Discount):
    decay_steps: int = param(3, "tokens that count in full", least=1)


@policy_loss("spo", Width())
def spo(inputs, config):
    none = inputs.loss_mask & False
    factor = -1 if config.spo_shape == "square" else 1
    return TokenLosses(factor * config.spo_width * inputs.log_probs, none, none)


@advantage("decayed", Decay(gamma=0.5), compares_group=True)
def decayed(inputs, config):
    return AdvantageOutputs(inputs.loss_mask.float() * config.gamma * config.decay_steps)


recipe("mine", Recipe(advantage="decayed", policy_loss="spo", parameters={"spo_width": 0.75}))
"""

pytestmark = pytest.mark.usefixtures("restored_tables")


@pytest.fixture
def mine(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return str(file)


def config_of(*tokens: str):
    """Read a command line as a start does: files first, then flags."""
    import_given_files(tokens)
    parser = add_rl_args(argparse.ArgumentParser())
    config = config_from(given_values(expand_config(tokens, parser), parser))
    preflight.check_ranges(config)
    return config


def width_of(recipe) -> float:
    return recipe.policy_loss_config(8).parameters.spo_width


def test_user_parameters_reach_the_loss_and_the_estimator(mine):
    parts = ("--rl-advantage", "decayed", "--rl-policy-loss", "spo", "--rl-import", mine)
    default = config_of(*parts).recipe
    assert width_of(default) == 0.25
    assert (default.advantage_config.gamma, default.advantage_config.decay_steps) == (0.5, 3)
    given = ("--rl-spo-width", "0.5", "--rl-spo-shape", "square", "--rl-decay-steps=4")
    config = config_of(*parts, *given, "--rl-gamma", "1")
    one = ragged([2], [1])
    output = policy_loss_total(
        torch.tensor([2.0, 3.0, 0.0]),
        torch.zeros(3),
        old_log_probs=torch.zeros(3),
        advantages=torch.zeros(3),
        loss_mask=one.loss_mask,
        lengths=one.lengths,
        denominators=Denominators(1, 1),
        config=config.recipe.policy_loss_config(8),
    )
    assert output.loss.item() == -0.5 * (2.0 + 3.0)
    batch = random_ragged(0)
    found = find_advantage_estimator("decayed").function(
        inputs_of(batch), config.recipe.advantage_config
    )
    assert torch.equal(found.advantages, 4.0 * batch.loss_mask.float())
    # A recipe sets other defaults, and flags override them.
    own = ("--rl-import", mine, "--rl-algorithm", "mine")
    assert width_of(config_of(*own).recipe) == 0.75
    assert width_of(config_of(*own, "--rl-spo-width", "1").recipe) == 1.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--rl-spo-width 0", "--rl-spo-width 0.0 must be greater than 0; choose"),
        ("--rl-spo-width nan", "--rl-spo-width nan must be greater than 0"),
        ("--rl-decay-steps 0", "--rl-decay-steps 0 must be at least 1; choose for example 3"),
        ("--rl-decay-steps 1" + 30 * "0", f"--rl-decay-steps {10**30} must be at most 2147483647;"),
        ("--rl-decay-steps x", "--rl-decay-steps: invalid int value: 'x'; see --help"),
        ("--rl-spo-shape flat", "--rl-spo-shape: invalid choice: 'flat'"),
        ("--rl-spo-widht 1", "unknown flag --rl-spo-widht; did you mean '--rl-spo-width'?"),
        ("--rl-policy-loss ppo_clip --rl-spo-width 1", "--rl-spo-width 1.0 has no effect, because"),
        ("--rl-clip-eps-lower 0.1", "--rl-clip-eps-lower 0.1 has no effect, because"),
    ],
)
def test_invalid_value_of_a_user_parameter_is_refused(more, message, mine):
    with pytest.raises(UsageError) as caught:
        config_of("--rl-import", mine, "--rl-algorithm", "mine", *more.split())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("spelling", ["rl-import: {file}", "rl_import: [{file}]"])
def test_file_and_its_parameters_can_be_given_in_rl_config(spelling, mine, tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text(spelling.format(file=mine) + "\nrl_algorithm: mine\n")
    second.write_text("rl_spo_width: 0.125\nrl-decay-steps: 7\n")
    config = config_of("--rl-config", str(first), f"--rl-config={second}")
    assert width_of(config.recipe) == 0.125
    # The config.yaml of a run has them as flags, and can be given again.
    parser = add_rl_args(argparse.ArgumentParser())
    tokens = expand_config(["--rl-config", str(first), "--rl-config", str(second)], parser)
    resolved = {f"rl_{name}": value for name, value in config.as_dict().items()}
    RunDirectory(tmp_path / "run", RunConfig(as_config(tokens, parser), resolved)).close()
    written = tmp_path / "run" / "config.yaml"
    read = read_config(written)
    assert read.given["rl-spo-width"] == 0.125
    names = ("rl_spo_width", "rl_decay_steps", "rl_spo_shape")
    assert [read.resolved[name] for name in names] == [0.125, 7, None]
    assert config_of("--rl-config", str(written)).recipe == config.recipe


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("num_steps", "--rl-num-steps is a flag already"),
        ("config", "--rl-config is a flag already"),
        ("clip_eps_upper", "--rl-clip-eps-upper is a flag already"),
    ],
)
def test_parameter_named_like_a_flag_is_refused(name, message, mine):
    Path(mine).write_text(MINE.replace("spo_width", name))
    with pytest.raises(UsageError, match=message):
        config_of("--rl-import", mine)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Width())", "Width)", "parameters of 'spo' are <class .*Width'>, not an object of"),
        ("@dataclass(frozen=True)\nclass Width", "class Width", "Width, .* lacks @dataclass"),
        ("spo_width: float", "spo_width: list", "parameter spo_width is of type <class 'list'>"),
        ("0.25, ", "0, ", "--rl-spo-width 0 must be"),
    ],
)
def test_invalid_declaration_is_a_usage_error(before, after, message, mine):
    assert before in MINE
    Path(mine).write_text(MINE.replace(before, after))
    with pytest.raises(UsageError, match=f"^--rl-import {mine} cannot be used, .*{message}"):
        import_given_files(["--rl-import", mine])


def test_help_rl_lists_our_flags_and_the_users_with_defaults_and_bounds(mine, capsys):
    assert launch(["-m", "mcore_rl.train", "--rl-import", mine, "--help-rl"]) == 0
    help_rl = " ".join(capsys.readouterr().out.split())
    width = "--rl-spo-width NUMBER how far ratios are pulled back [default: 0.25; in (0, 2]]"
    assert width in help_rl and "--num-layers" not in help_rl
    assert "--rl-spo-shape {round,square} of the pull [default: round]" in help_rl
    assert [p.flag for p in flags().values() if p.flag not in help_rl] == []
    with pytest.raises(SystemExit) as left:  # of train and verify
        resolver.resolve(Source(tokens=["--help-rl"], platform=None))  # type: ignore[arg-type]
    assert left.value.code == 0 and "--rl-spo-width" in capsys.readouterr().out
    assert launch(["--rl-import", f"{mine}.txt", "--help-rl"]) == 2
    assert "is not a .py file" in capsys.readouterr().err


def test_help_lists_the_users_flags(mine, capsys):
    with pytest.raises(SystemExit) as left:
        resolver.resolve(Source(tokens=["--help", "--rl-import", mine], platform=WITHOUT_CUDA))
    assert left.value.code == 0
    output = capsys.readouterr().out
    assert "--rl-spo-width" in output and "--num-layers" in output


def test_parser_of_a_fork_has_the_users_flags(mine, monkeypatch):
    tokens = ["--rl-import", mine, "--rl-policy-loss", "spo", "--rl-spo-width", "0.5"]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *tokens])
    args = mcore_rl.add_rl_args(argparse.ArgumentParser()).parse_args()
    assert width_of(RLConfig.from_args(args).recipe) == 0.5


# Pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**31, -(10**400), 10**400])
def test_no_integer_flag_takes_any_number_of_digits(number):
    integers = [each for each in flags().values() if each.kind is int]
    assert len(integers) > 30
    for each in integers:
        with pytest.raises(UsageError, match=f"{each.flag} .*must be (at|greater)"):
            each.check(number)


def test_pages_match_the_declarations():
    how = "run python scripts/document_flags.py"
    assert (ROOT / "docs" / "using" / "flags.md").read_text() == flags_page(), how
    text = (ROOT / "docs" / "using" / "algorithms.md").read_text()
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == parameter_table().strip(), how
    assert "| `--rl-gae-lambda` | gae 0.95 | [0, 1] |" in parameter_table()
    assert all(f"`{parameter.flag}`" in flags_page() for parameter in flags().values())
    assert len(help_text()) < 40_000


# mcore_rl.api -------------------------------------------------------------------------------------

SIGNATURES = {
    "advantage": "(name, parameters, *, needs_critic, needs_greedy_baseline, compares_group, "
    "needs_reward_parts)",
    "bounded_ratio": "(log_ratio)",
    "family": "(table)",
    "group_filter": "(name, parameters, *, reasons)",
    "masked": "(loss_mask, values)",
    "metric": "(name)",
    "param": "(default, help, *, least, most, above, below, choices, advice, needs, excludes)",
    "policy_loss": "(name, parameters, *, select)",
    "prompts": "(name)",
    "recipe": "(name, parts)",
    "reward": "(name)",
    "sampler": "(name, parameters)",
}
FIELDS = {
    "AdvantageInputs": "scores group_ids response_lengths rows token_rewards loss_mask lengths "
    "baselines values global_sum reward_parts reward_weights",
    "AdvantageOutputs": "advantages returns",
    "Clip": "clip_eps_lower clip_eps_upper",
    "Discount": "gamma",
    "EnvironmentPrompt": "text answer row seed has_tool_format",
    "Drop": "reason refill",
    "DualClip": "clip_eps_lower clip_eps_upper dual_clip",
    "Family": "model_type class_name models spelt_out also_refused fixed latent_attention "
    "sparse_attention qk_norm qkv_bias norms_whole_projection linear_biases attention_sinks "
    "alternates_windows clamps_glu delta_net output_gate one_block_a_layer squared_relu "
    "norm_epsilon zero_centered_norms dense_size "
    "stacked_experts router names rope_types default_rope_theta vllm_names partial_rotary_factor "
    "rope_of_images has_drafter",
    "Generate": "token_ids max_tokens",
    "Generated": "token_ids log_probs finish_reason",
    "Parameters": "",
    "PolicyLossInputs": "log_probs old_log_probs advantages loss_mask lengths selected",
    "Prompt": "index text answer token_ids row source max_response_tokens num_samples",
    "Recipe": "advantage policy_loss parameters loss_aggregation loss_constant kl_place kl_coef "
    "kl_estimator entropy_coef entropy_target entropy_step value_clip_eps "
    "mismatch_correction score_centering off_policy_threshold old_log_probs num_samples_per_prompt "
    "dynamic_sampling group_filter sampler max_refills overlong_buffer_tokens "
    "overlong_buffer_share missing_eos_penalty mask_truncated reward_clip trains_on",
    "Response": "text token_ids turn finish_reason in_parts",
    "Rollout": "prompt sample_index text response_token_ids rollout_log_probs finish_reason "
    "weight_version routes failure is_generated weight_versions turn_rewards top_tokens",
    "Router": "num_experts also_called expert_size score_function always_normalizes methods "
    "gated_shared_size shared_size layer_types shared_experts scaling_factor",
    "Sampled": "token_ids log_probs is_generated finish_reason",
    "SamplerInputs": "prompt num_samples max_tokens decode",
    "ScoredRollout": "rollout reward failure parts baseline dropped",
    "Segments": "sample_ids loss_mask counts",
    "SelectionInputs": "old_log_probs advantages loss_mask random global_sum",
    "StepResult": "observation reward done",
    "TensorNames": "layers embedding final_norm input_norm mlp_norm attention dense block gate up "
    "down shared bias scorer",
    "TokenLosses": "loss clipped_lower clipped_upper",
}
METHODS = {  # of Environment and ToolEnvironment
    "answered": "(self, text)",
    "start": "(self, prompt)",
    "step": "(self, response)",
    "close": "(self)",
    "__init_subclass__": "(*, name, more)",
}


def signature_of(function) -> str:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters]
    first = [p.kind is p.KEYWORD_ONLY for p in parameters] + [True]
    if (at := first.index(True)) < len(names):
        names.insert(at, "*")
    return f"({', '.join(names)})"


def test_names_and_signatures_of_the_api_are_a_contract():
    """A change here changes users' files and needs a new version."""
    classes = {name for name in api.__all__ if isinstance(getattr(api, name), type)}
    assert {n: signature_of(getattr(api, n)) for n in set(api.__all__) - classes} == SIGNATURES
    fields = classes - {"UsageError", "Environment", "ToolEnvironment"}
    assert {n: " ".join(getattr(api, n).__dataclass_fields__) for n in fields} == FIELDS
    tools = api.ToolEnvironment
    assert {name: signature_of(getattr(tools, name)) for name in METHODS} == METHODS
    assert (tools.tools, tools.role) == ((), "tool")
    assert all(getattr(environment, n) == getattr(api, n) for n in environment.__all__)
    assert all(getattr(api, name).__doc__ for name in api.__all__)
    with pytest.raises(AttributeError, match="no attribute 'policy_losses'"):
        _ = api.policy_losses
    # A type checker sees the same names.
    tree = ast.parse(Path(api.__file__).read_text())
    seen = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mcore_rl.")
        for alias in node.names
    }
    assert seen == set(api.__all__)


def test_api_for_rewards_metrics_and_prompts_does_not_import_torch():
    program = (
        "import sys, mcore_rl.api\n"
        "from mcore_rl.api import Family, Parameters, family, metric, param, policy_loss, prompts\n"
        "from mcore_rl.api import UsageError, advantage, reward\n"
        "from mcore_rl.api.environment import Environment, StepResult\n"
        "assert not {'torch', 'numpy', 'megatron', 'vllm'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_user_metrics_are_recorded_and_failures_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(user_metrics, "_logged", set())
    samples: list = ["a", "bbb"]
    api.metric("longest")(lambda samples: max(map(len, samples)))
    api.metric("lengths")(lambda samples: {"first": len(samples[0]), "last": len(samples[-1])})
    api.metric("none")(lambda samples: float("nan"))
    api.metric("fails")(lambda samples: 1 / 0)
    expected = {"user/longest": 3.0, "user/lengths/first": 1.0, "user/lengths/last": 3.0}
    with caplog.at_level("WARNING"):
        assert user_metrics.user_metrics(samples) == expected
        assert user_metrics.user_metrics(samples) == expected
    nan, error = caplog.messages
    assert "user/none is nan" in nan and "ZeroDivisionError" in error
    with pytest.raises(ValueError, match="two metrics are called 'longest'"):
        api.metric("longest")(len)


def test_user_prompts_become_a_file_named_by_content(tmp_path):
    rows = [{"prompt": f"{a} + 1 =", "answer": a + 1} for a in range(3)]
    api.prompts("sums")(lambda: iter(rows))
    options = DataOptions(prompts="sums", cache_dir=str(tmp_path))
    sums = SourceSpec("", "sums")
    source = prompt_source(options, sums)
    found = [(row.prompt, row.answer) for row in read_rows(source)]
    assert found == [("0 + 1 =", "1"), ("1 + 1 =", "2"), ("2 + 1 =", "3")]
    assert prompt_source(options, sums) == source and len(list(source.path.parent.iterdir())) == 1
    rows.pop()
    assert prompt_source(options, sums).path != source.path
    assert prompt_source(options, SourceSpec("", "other.jsonl")).path == Path("other.jsonl")
    api.prompts("none")(lambda: [])
    with pytest.raises(UsageError, match="^--rl-eval-prompts none gives no row"):
        prompt_source(options, SourceSpec("", "none", is_eval=True))
    api.prompts("broken")(lambda: [{"prompt": object()}])
    with pytest.raises(UsageError, match="^--rl-prompts broken cannot be used, .* TypeError"):
        prompt_source(options, SourceSpec("", "broken"))
    with pytest.raises(ValueError, match="two sources of prompts are called 'sums'"):
        api.prompts("sums")(lambda: [])
    with pytest.raises(ValueError, match="cannot be called 'a/b.jsonl'"):
        api.prompts("a/b.jsonl")(lambda: [])


def test_user_family_is_read_by_its_table(tmp_path):
    published = ROOT / "tests" / "data" / "configs" / "qwen3-0.6b.json"
    values = json.loads(published.read_text()) | {"model_type": "qwen3_mine"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match="model_type 'qwen3_mine'.*supported are"):
        read_model_shape(tmp_path)
    heads = ("num_key_value_heads", "head_dim")
    names = {"model_type": "qwen3_mine", "class_name": "MineForCausalLM"}
    api.family(api.Family(**names, spelt_out=heads, qk_norm=True))
    assert read_model_shape(tmp_path).architecture == "qwen3_mine"
    with pytest.raises(ValueError, match="there is a family 'llama' already"):
        api.family(api.Family(model_type="llama", class_name="x"))
