"""Derived flags: what they are, what users may give beside them, and that Megatron accepts them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.common.platform import WITHOUT_CUDA, Platform
from mcore_rl.config import RLConfig
from mcore_rl.flags.derived import FREQUENCIES, NEEDS_CUDA, DerivedFlags, derive_flags, with_effect
from mcore_rl.flags.inert_flags import HYBRID_SPECS
from mcore_rl.flags.megatron_flags import ARCHITECTURE, WITHOUT_EFFECT_DESTS
from mcore_rl.flags.parsed_flags import expand_config, given_values, options_of
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.job.reading import make_parser
from mcore_rl.job.validation import check_megatron_accepts
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.model.architecture_flags import settings_without_flag
from mcore_rl.model.config_json import ModelShape, model_shape
from mcore_rl.model.hybrid_pattern import halves
from tests.unit.test_hf_config import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GLM4_AIR,
    GPT_OSS,
    KIMI_K2,
    LLAMA_1B,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_7B,
    QWEN3_30B_A3B,
    QWEN3_600M,
    TRAINABLE,
)

from megatron.core.models.gpt.experimental_attention_variant_module_specs import (  # isort: skip
    get_linear_attention_pattern,
    get_moe_layer_pattern,
)
from megatron.core.transformer.utils import is_layer_window_attention  # isort: skip

MOONLIGHT, GLM_FLASH = TRAINABLE["moonlight-16b-a3b"], TRAINABLE["glm-4.7-flash"]
NEMOTRON_H = TRAINABLE["nemotron-h-8b"]
WHOLE = Platform(cuda=True, transformer_engine=(2, 20, 2), fused_weight_gradients=True)
WITHOUT_APEX = dataclasses.replace(WHOLE, fused_weight_gradients=False)
WITHOUT_ENGINE = dataclasses.replace(WHOLE, transformer_engine=None)


@functools.cache
def parser() -> argparse.ArgumentParser:
    return make_parser()


@functools.cache
def shape_of(text: str) -> ModelShape:
    return model_shape(json.loads(text), Path("config.json"))


def derive(
    model: str | ModelShape, tokens: str = "", *, platform: Platform = WITHOUT_CUDA, **config: Any
) -> DerivedFlags:
    """The flags that a model, or the one with this config.json, needs beside `tokens`."""
    shape = shape_of(model) if isinstance(model, str) else model
    given = given_values(tokens.split(), parser())
    return derive_flags(shape, RLConfig.of(**config), given, parser=parser(), platform=platform)


def defaults_of(derived: DerivedFlags) -> dict[str, Any]:
    return given_values(derived.defaults, parser())


def test_architecture_flags_are_flags_of_megatron() -> None:
    """A misspelt name would never contradict anything."""
    known = {action.dest for action in options_of(parser()).values()}
    assert known >= ARCHITECTURE | NEEDS_CUDA.keys()


@pytest.mark.parametrize(
    ("text", "tokens", "says"),
    [
        (
            DEEPSEEK_V3,
            "--num-layers 60",
            "--num-layers 60 .* config.json, .* needs --num-layers 61;",
        ),
        (DEEPSEEK_V3, "--num-experts 128", "--num-experts 128 .* needs --num-experts 256;"),
        (DEEPSEEK_V3, "--norm-epsilon 1e-5", "--norm-epsilon 1e-05 .* needs --norm-epsilon 1e-06"),
        (DEEPSEEK_V3, "--rope-type rope", "--rope-type rope .* needs --rope-type yarn"),
        (DEEPSEEK_V3, "--moe-layer-freq 1", r"--moe-layer-freq 1 .* needs .* \[0, 0, 0, 1, 1"),
        (DEEPSEEK_V3, "--group-query-attention", "--group-query-attention .* no such part"),
        (DEEPSEEK_V2_LITE, "--q-lora-rank 1536", "--q-lora-rank 1536 .* no such part"),
        (DEEPSEEK_V2_LITE, "--moe-router-enable-expert-bias", "enable-expert-bias .* no such"),
        (QWEN3_30B_A3B, "--kv-channels 64", "--kv-channels 64 .* needs --kv-channels 128"),
        (QWEN3_30B_A3B, "--multi-latent-attention", "--multi-latent-attention .* no such part"),
        (QWEN3_600M, "--num-experts 8", "--num-experts 8 .* no such part"),
        (QWEN3_600M, "--untie-embeddings-and-output-weights", "--untie-embed.* no such part"),
        (QWEN3_600M, "--window-size 128,0", r"--window-size \(128, 0\) .* no such part"),
        (QWEN3_600M, "--squared-relu", "--squared-relu contradicts config.json"),
        (QWEN3_600M, "--rotary-percent 0.5", "--rotary-percent 0.5 .* no such part"),
        (QWEN3_600M, "--add-qkv-bias", "--add-qkv-bias .* no such part"),
        (QWEN2_7B, "--qk-layernorm", "--qk-layernorm .* no such part"),
        (LLAMA_1B, "--rope-scaling-factor 8", "factor 8.0 .* needs --rope-scaling-factor 32.0"),
        (QWEN2_7B, "--use-rope-scaling", "--use-rope-scaling .* no such part"),
        (MIXTRAL, "--moe-router-pre-softmax", "--moe-router-pre-softmax .* no such part"),
        (DEEPSEEK_V2, "--moe-router-fusion", "--moe-router-fusion ranks .* by its best one; drop"),
        (DEEPSEEK_V3, "--moe-mlp-glu-interleave-size 32", "interleave-size 32 .* no such part"),
        (QWEN3_600M, "--mamba-num-heads 8", "--mamba-num-heads 8 .* no such part"),
        (QWEN3_600M, "--linear-num-key-heads 8", "--linear-num-key-heads 8 .* no such part"),
        (NEMOTRON_H, "--mamba-num-heads 8", "--mamba-num-heads 8 .* needs --mamba-num-heads 128"),
    ],
)
def test_contradiction_of_config_names_both_values(text: str, tokens: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        derive(text, tokens)


@pytest.mark.parametrize("text", TRAINABLE.values(), ids=TRAINABLE)
def test_equal_architecture_is_accepted(text: str) -> None:
    """Launch scripts of published models give these flags."""
    alone = derive(text)
    assert derive(text, " ".join(alone.architecture)) == alone


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (DEEPSEEK_V3, "--norm-epsilon 0.000001"),
        (DEEPSEEK_V3, "--moe-layer-freq ([0]*3+[1]*58)"),
        (QWEN3_30B_A3B, "--moe-layer-freq 1"),  # of every layer
        # Megatron's defaults, spelt out
        (DEEPSEEK_V3, "--rotary-percent 1.0 --num-query-groups 1 --softmax-type vanilla"),
    ],
)
def test_same_architecture_in_other_words_is_accepted(text: str, tokens: str) -> None:
    assert derive(text, tokens) == derive(text)


@pytest.mark.parametrize("text", TRAINABLE.values(), ids=TRAINABLE)
def test_what_config_says_is_accepted_in_every_notation(text: str) -> None:
    """Patterns of a HybridModel, an older name of --num-layers, a list where a number will do."""
    shape, architecture = shape_of(text), derive(text).architecture
    pattern = "".join(halves(shape))
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        flag = f"--{name.replace('_', '-')}"
        assert derive(text, f"{flag} {pattern}").unread == {name}
        with pytest.raises(
            UsageError, match=f"config.json, which needs {flag} {re.escape(pattern)}"
        ):
            derive(text, f"{flag} M{pattern}")
    with_mtp = f"--mtp-num-layers 1 --hybrid-layer-pattern {pattern}/{halves(shape)[-1]}"
    assert derive(text, with_mtp).unread == {"hybrid_layer_pattern"}
    assert derive(text, f"--encoder-num-layers {shape.num_layers}").unread == {"encoder_num_layers"}
    with pytest.raises(UsageError, match="needs --encoder-num-layers"):
        derive(text, f"--encoder-num-layers {shape.num_layers + 1}")
    values = given_values(architecture, parser())
    for dest, is_marked in FREQUENCIES.items():
        for every in (1, 2, 4):
            layers = [int(is_marked(layer, every)) for layer in range(shape.num_layers)]
            if values.get(dest) in (every, layers):
                for form in (every, str(layers).replace(" ", "")):
                    assert derive(text, f"{as_flag(dest)} {form}").architecture == architecture


def test_frequencies_are_those_of_megatron() -> None:
    config = argparse.Namespace(num_layers=12, moe_layer_freq=4, linear_attention_freq=4)
    found = {
        "moe_layer_freq": get_moe_layer_pattern(config),
        "linear_attention_freq": get_linear_attention_pattern(config),
        "window_attn_skip_freq": [
            int(is_layer_window_attention((7, 0), 4, layer + 1)) for layer in range(12)
        ],
    }
    for dest, is_marked in FREQUENCIES.items():
        assert found[dest] == [int(is_marked(layer, 4)) for layer in range(12)], dest


def test_megatrons_own_layers_of_a_hybrid_model_are_accepted() -> None:
    """Its scripts for Nemotron name them by --spec; those of a user are left to the model class."""
    for module, name in HYBRID_SPECS:
        assert derive(NEMOTRON_H, f"--spec {module} {name}").unread == {"spec"}
    assert not derive(NEMOTRON_H, "--spec mine layers").unread
    assert not derive(QWEN3_600M, f"--spec {module} {name}").unread


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (
            "--transformer-impl transformer_engine",
            "without CUDA, .* needs --transformer-impl local",
        ),
        ("--distributed-backend nccl", "without CUDA, .* needs --distributed-backend gloo"),
        ("--cuda-graph-impl local", "--cuda-graph-impl local needs CUDA"),
        ("--enable-cuda-graph", "--enable-cuda-graph needs CUDA"),
        ("--init-model-with-meta-device", "--init-model-with-meta-device needs CUDA"),
        ("--use-sharp", "--use-sharp needs CUDA"),
        ("--use-nccl-ub", "--use-nccl-ub needs CUDA"),
        ("--high-priority-stream-groups dp_cp ep", "--high-priority-stream-groups .* needs CUDA"),
        ("--pipeline-model-parallel-comm-backend ucc", "-comm-backend ucc needs CUDA"),
        ("--cpu-offloading-num-layers 3", "--cpu-offloading-num-layers 3 needs CUDA"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex needs CUDA"),
        ("--recompute-modules core_attn layernorm", "--recompute-modules layernorm needs Trans"),
        ("--recompute-modules gdn_norm_out", "--recompute-modules gdn_norm_out needs Transformer"),
        ("--mamba-training-ssm-states-dtype fp32", "--mamba-training-.* fp32 needs CUDA"),
    ],
)
def test_contradiction_of_the_machine_is_an_error_only_there(tokens: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        derive(DEEPSEEK_V3, tokens)
    derive(DEEPSEEK_V3, tokens, platform=WHOLE)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (GPT_OSS, "gpt_oss's yarn of grouped attention"),
        (TRAINABLE["glm-5"], "glm_moe_dsa's sparse attention"),
        (TRAINABLE["qwen3.5-9b"], "qwen3_5_text's gated delta nets"),
        (NEMOTRON_H, "nemotron_h's Mamba-2 layers"),
    ],
)
def test_part_that_an_older_megatron_lacks_is_refused(text: str, part: str) -> None:
    older, shape = argparse.ArgumentParser(), shape_of(text)
    says = f"config.json describes {part}, .*; install megatron-core 0.19"
    with pytest.raises(UsageError, match=says):
        derive_flags(shape, RLConfig(), {}, parser=older, platform=WITHOUT_CUDA)


def test_context_parallelism_that_sinks_lack_is_refused() -> None:
    """On CPU attention is mcore_rl's own, whatever the flag says."""
    tokens, shape = "--context-parallel-size 2", shape_of(GPT_OSS)
    derive(shape, tokens)
    derive(shape, f"{tokens} --cp-comm-type a2a", platform=WHOLE)
    derive(QWEN3_600M, tokens, platform=WHOLE)
    for more in ("", " --cp-comm-type p2p"):
        says = "--context-parallel-size 2 needs --cp-comm-type a2a with attention sinks"
        with pytest.raises(UsageError, match=says):
            derive(shape, tokens + more, platform=WHOLE)


def test_sparse_attention_gathers_keys_under_context_parallelism() -> None:
    shape = shape_of(TRAINABLE["glm-5"])
    assert "--cp-comm-type" not in derive(shape).defaults
    derived = derive(shape, "--context-parallel-size 2").defaults
    assert derived[derived.index("--cp-comm-type") + 1] == "allgather"
    derive(shape, "--context-parallel-size 2 --cp-comm-type all_gather")
    says = "--cp-comm-type a2a is not a way in which sparse attention .*; drop"
    with pytest.raises(UsageError, match=says):
        derive(shape, "--context-parallel-size 2 --cp-comm-type a2a")


def test_machine_flags_are_accepted_and_left_out_with_cuda() -> None:
    alone = derive(QWEN3_600M)
    assert derive(QWEN3_600M, " ".join(alone.machine)) == alone
    assert "--transformer-impl" in alone.machine
    assert derive(QWEN3_600M, platform=WHOLE).machine == ()


@pytest.mark.parametrize(
    ("name", "platform", "wanted"),
    [
        ("deepseek-v3", WHOLE, ""),
        ("moonlight-16b-a3b", WHOLE, "--no-rope-fusion"),  # latent attention without YaRN
        ("deepseek-v3.2", WHOLE, "--no-rope-fusion"),  # sparse attention
        ("gpt-oss-20b", WHOLE, "--no-bias-dropout-fusion"),  # experts with biases
        ("llama-3.2-1b", WITHOUT_APEX, "--no-gradient-accumulation-fusion"),
        ("moonlight-16b-a3b", WITHOUT_APEX, "--no-rope-fusion --no-gradient-accumulation-fusion"),
        (
            "qwen3-0.6b",
            WITHOUT_ENGINE,
            "--transformer-impl local --no-masked-softmax-fusion --no-rope-fusion "
            "--no-persist-layer-norm",
        ),
        (
            "deepseek-v3",
            Platform(cuda=True),
            "--transformer-impl local --no-masked-softmax-fusion --no-rope-fusion "
            "--no-persist-layer-norm --no-gradient-accumulation-fusion",
        ),
    ],
)
def test_fusions_without_their_package_are_switched_off_with_cuda(
    name: str, platform: Platform, wanted: str
) -> None:
    shape = shape_of(TRAINABLE[name])
    derived = derive(shape, platform=platform)
    assert " ".join(derived.machine) == wanted
    assert derive(shape, wanted, platform=platform) == derived  # by the user as well
    experts_at_once = "--moe-grouped-gemm" in derived.defaults
    assert experts_at_once == bool(shape.experts and platform.transformer_engine)


@pytest.mark.parametrize(
    ("tokens", "platform", "says"),
    [
        (
            "--transformer-impl transformer_engine",
            WITHOUT_ENGINE,
            "without Transformer Engine, which needs --transformer-impl local; drop the flag",
        ),
        ("--transformer-impl local", WHOLE, "--transformer-impl local .* here it can; drop"),
        ("--moe-grouped-gemm", WITHOUT_ENGINE, "--moe-grouped-gemm needs Transformer Engine"),
        ("--moe-grouped-gemm", WITHOUT_CUDA, "--moe-grouped-gemm needs Transformer Engine"),
        ("--fp8-format hybrid", WITHOUT_ENGINE, "--fp8-format hybrid needs Transformer Engine"),
        (
            "--recompute-granularity selective --recompute-modules mla_up_proj",
            WITHOUT_ENGINE,
            "--recompute-modules mla_up_proj needs Transformer Engine",
        ),
        (
            "--optimizer muon",
            dataclasses.replace(WHOLE, emerging_optimizers=False),
            "--optimizer muon needs the package emerging-optimizers, .*; install it, or give",
        ),
    ],
)
def test_flag_for_a_missing_package_is_refused_with_cuda(
    tokens: str, platform: Platform, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        derive(DEEPSEEK_V3, tokens, platform=platform)


def test_grouped_gemm_is_off_with_no_moe_grouped_gemm() -> None:
    shape = shape_of(DEEPSEEK_V3)
    derived = derive(shape, platform=WHOLE, no_moe_grouped_gemm=True)
    assert "--moe-grouped-gemm" not in derived.tokens
    with pytest.raises(UsageError, match="contradicts --rl-no-moe-grouped-gemm; drop one"):
        derive(shape, "--moe-grouped-gemm", platform=WHOLE, no_moe_grouped_gemm=True)


@pytest.mark.parametrize(
    ("tokens", "precision", "says"),
    [
        ("--fp16", "bf16", "--fp16 contradicts --rl-precision bf16"),
        ("--bf16", "fp32", "--bf16 contradicts --rl-precision fp32"),
        ("--bf16 --fp16", "bf16", "--fp16 contradicts --rl-precision bf16"),
    ],
)
def test_other_precision_than_the_engines_is_refused(
    tokens: str, precision: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        derive(QWEN3_600M, tokens, precision=precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_precision_becomes_a_flag_of_megatron(precision: str) -> None:
    derived = derive(QWEN3_600M, precision=precision)
    flags = {"--bf16", "--fp16"} & set(derived.defaults)
    assert flags == ({f"--{precision}"} if precision != "fp32" else set())
    if precision != "fp32":
        assert derive(QWEN3_600M, f"--{precision}", precision=precision)


def test_defaults_follow_the_rl_flags() -> None:
    config = {
        "num_prompts_per_step": 6,
        "num_samples_per_prompt": 4,
        "num_mini_batches": 3,
        "num_steps": 10,
        "max_prompt_tokens": 100,
        "max_response_tokens": 28,
    }
    derived = derive(QWEN3_600M, **config)
    values = defaults_of(derived)
    assert values["global_batch_size"] == 8
    assert values["train_iters"] == 30
    # As many as there are updates: of the actor fewer while a critic warms up.
    config |= {"algorithm": "ppo", "num_epochs": 4, "critic_warmup_steps": 2}
    of_critic = dataclasses.replace(shape_of(QWEN3_600M), value_head=True)
    for shape, expected in ((shape_of(QWEN3_600M), 8 * 3 * 4), (of_critic, 10 * 3 * 4)):
        derived = derive(shape, **config)
        assert defaults_of(derived)["train_iters"] == expected
    all_warm_up = derive(QWEN3_600M, **config | {"critic_warmup_steps": 10})
    assert defaults_of(all_warm_up)["train_iters"] == 1
    assert values["seq_length"] == 128
    assert "sequence_parallel" not in values
    assert not [dest for dest in values if dest.startswith("moe_")]


def test_defaults_yield_to_the_user() -> None:
    tokens = (
        "--lr 3e-4 --micro-batch-size 2 --clip-grad 0.5 --moe-router-load-balancing-type aux_loss "
        "--expert-tensor-parallel-size 2"
    )
    before = defaults_of(derive(DEEPSEEK_V3))
    derived = derive(DEEPSEEK_V3, tokens)
    given = given_values(tokens.split(), parser())
    left = defaults_of(derived)
    assert left == {dest: value for dest, value in before.items() if dest not in given}
    assert given_values([*derived.tokens, *tokens.split()], parser()).items() >= given.items()


@pytest.mark.parametrize("platform", [WITHOUT_CUDA, WHOLE])
@pytest.mark.parametrize("text", [DEEPSEEK_V3, QWEN3_30B_A3B, QWEN3_600M])
def test_derived_switch_set_to_false_is_off_or_refused(
    text: str, platform: Platform, tmp_path: Path
) -> None:
    tokens = "--tensor-model-parallel-size 2 --save folder"
    derived = derive(text, tokens, platform=platform)
    options = options_of(parser())
    switches = [token for token in derived.tokens if token in options]
    switches = [
        flag
        for flag in switches
        if options[flag].nargs == 0 and options[flag].dest not in WITHOUT_EFFECT_DESTS
    ]
    refused = set()
    for flag in switches:
        (tmp_path / "off.yaml").write_text(f"{flag[2:]}: false")
        expanded = expand_config(["--rl-config", str(tmp_path / "off.yaml")], parser())
        assert given_values(expanded, parser()) == {
            options[flag].dest: not options[flag].const  # type: ignore[operator]
        }
        try:
            found = derive(text, f"{tokens} {' '.join(expanded)}", platform=platform)
        except UsageError as error:
            assert error.flag == expanded[0] and error.remedy
            refused.add(flag)
        else:
            assert flag not in found.tokens
    assert refused >= {*derived.architecture, *derived.machine} & {*switches}
    assert {"--dist-ckpt-optim-fully-reshardable", "--sequence-parallel"} <= {*switches} - refused


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        # Flag lists that launch scripts share between models.
        (DEEPSEEK_V3, "--moe-router-pre-softmax --kv-channels 128 --mscale 1 --mscale-all-dim 1"),
        (DEEPSEEK_V3, "--group-query-attention --num-query-groups 128"),
        (DEEPSEEK_V2_LITE, "--kv-channels 16 --moe-router-topk-scaling-factor 1.0"),
        (
            MOONLIGHT,
            "--moe-router-pre-softmax --moe-router-num-groups 1 --moe-router-group-topk 1 "
            "--rotary-scaling-factor 1 --mscale 1.0 --mscale-all-dim 1.0 --kv-channels 64",
        ),
        (
            KIMI_K2,
            "--moe-router-pre-softmax --moe-router-num-groups 1 --moe-router-group-topk 1 "
            "--kv-channels 64",
        ),
        (GLM4_AIR, "--moe-router-pre-softmax"),
        (GLM_FLASH, "--kv-channels 192 --add-qkv-bias --moe-router-pre-softmax"),
        (MINIMAX_M2, "--moe-router-pre-softmax --ffn-hidden-size 12288"),
        (MIXTRAL, "--moe-router-topk-scaling-factor 1.0"),
        (QWEN3_30B_A3B, "--ffn-hidden-size 768 --rotary-seq-len-interpolation-factor 1"),
        (OLMOE, "--group-query-attention --num-query-groups 16"),
        (LLAMA_1B, "--use-rope-scaling --rotary-scaling-factor 32.0 --rope-type rope"),
        (QWEN3_600M, "--moe-router-topk 8 --moe-ffn-hidden-size 768 --rope-scaling-factor 8.0"),
        (QWEN3_600M, "--kv-lora-rank 512 --yarn-beta-fast 32 --window-attn-skip-freq 2"),
    ],
)
def test_flags_that_the_model_does_not_read_change_nothing(text: str, tokens: str) -> None:
    alone, found = derive(text), derive(text, tokens)
    assert found.tokens == alone.tokens
    for_it = (*found.tokens, *with_effect(found, tokens.split(), parser()))
    assert given_values(for_it, parser()) == given_values(alone.tokens, parser())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (QWEN3_30B_A3B, "--moe-router-pre-softmax"),
        (QWEN3_600M, "--kv-channels 64"),
        (QWEN3_600M, "--use-rope-scaling --rope-scaling-factor 8"),
        (QWEN3_600M, "--ffn-hidden-size 768"),
        (DEEPSEEK_V3, "--moe-router-num-groups 1"),
        (DEEPSEEK_V3, "--ffn-hidden-size 2048"),
        (DEEPSEEK_V3, "--num-query-groups 8"),
        (DEEPSEEK_V3, "--rotary-scaling-factor 32"),
        (MOONLIGHT, "--rotary-scaling-factor 40"),
        (MOONLIGHT, "--mscale-all-dim 1.0"),
        (MOONLIGHT, "--moe-router-num-groups 8 --moe-router-group-topk 4"),
        (MIXTRAL, "--moe-router-topk-scaling-factor 2.5"),
        (OLMOE, "--num-query-groups 4"),
        (LLAMA_1B, "--rope-scaling-factor 8.0"),
        (LLAMA_1B, "--add-qkv-bias"),
    ],
)
def test_flags_that_the_model_reads_contradict_it(text: str, tokens: str) -> None:
    with pytest.raises(UsageError, match="contradicts config.json") as refusal:
        derive(text, tokens)
    assert refusal.value.flag.split()[0] in tokens and refusal.value.remedy.startswith("drop")


def test_folder_of_checkpoints_brings_an_interval() -> None:
    """Megatron insists on one."""
    shape = shape_of(QWEN3_600M)
    derived = derive(shape, "--save folder", num_steps=9)
    assert defaults_of(derived)["save_interval"] == 9
    assert "--save-interval" not in derive(shape, "--save folder --save-interval 2").tokens
    check_megatron_accepts([*derived.tokens, "--save", "folder"], shape)


def test_tensor_parallelism_brings_sequence_parallelism() -> None:
    derived = derive(DEEPSEEK_V3, "--tensor-model-parallel-size 2")
    assert "--sequence-parallel" in derived.defaults


def test_token_dispatcher_supports_uneven_token_counts() -> None:
    """HybridEP does so only with its padding flag."""
    shape, pads = shape_of(DEEPSEEK_V3), "--moe-hybridep-pad-uneven-dispatch-inputs"
    derived = derive(shape)
    assert defaults_of(derived)["moe_token_dispatcher_type"] == "alltoall"
    flex = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend"
    assert pads in derive(shape, f"{flex} hybridep", platform=WHOLE).defaults
    for tokens in ("", f"{flex} deepep", f"{flex} hybridep {pads}"):
        assert pads not in derive(shape, tokens, platform=WHOLE).defaults


# As the model card of Qwen3 describes it.
WITH_YARN = {
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
BUILT = {**TRAINABLE, "qwen3 yarn": json.dumps({**json.loads(QWEN3_600M), **WITH_YARN})}


@pytest.mark.parametrize("text", BUILT.values(), ids=BUILT)
def test_megatron_builds_the_published_architecture(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own validation and its TransformerConfig, from the derived flags."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.training.arguments import parse_args, validate_args

    shape = shape_of(text)
    tokens = derive(shape).tokens
    check_megatron_accepts(tokens, shape)
    monkeypatch.setattr("sys.argv", ["test", *tokens])
    with open(os.devnull, "w") as log, contextlib.redirect_stdout(log):
        args = parse_args(add_rl_args)
        validate_args(args)
        for name, value in settings_without_flag(shape).items():
            setattr(args, name, value)  # as `startup` does
        config = megatron_adapter.transformer_config(args)
    rope = shape.rope
    expected: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "layernorm_epsilon": shape.norm_epsilon,
        "params_dtype": torch.bfloat16,
        "add_bias_linear": shape.linear_biases,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "window_size": None,
        "softmax_type": "vanilla",
        "num_moe_experts": None,
    }
    if mamba := shape.mamba:
        expected |= {
            **{"gated_linear_unit": False, "activation_func": squared_relu},
            **{"mamba_num_heads": mamba.num_heads, "mamba_head_dim": mamba.head_dim},
            **{"mamba_num_groups": mamba.num_groups, "mamba_state_dim": mamba.state_size},
        }
    if shape.sliding_window:  # of gpt-oss
        expected |= {
            **{"window_size": (127, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
            **{"gated_linear_unit": True, "activation_func": quick_gelu, "glu_linear_offset": 1.0},
            **{"activation_func_clamp_value": 7.0, "yarn_rotary_scaling_factor": 32.0},
            **{"yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0},
            **{"yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0},
            "yarn_correction_range_round_to_int": False,
        }
    elif rope["rope_type"] == "yarn" and not shape.latent:
        expected |= {
            **{"yarn_rotary_scaling_factor": 4.0, "yarn_beta_fast": 32, "yarn_beta_slow": 1},
            "yarn_original_max_position_embeddings": 32768,
            **{"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0},
            "yarn_correction_range_round_to_int": True,
        }
    if shape.latent:
        expected |= {
            "multi_latent_attention": True,
            "q_lora_rank": shape.latent.q_lora_rank,
            "kv_lora_rank": shape.latent.kv_lora_rank,
            "qk_head_dim": shape.latent.qk_nope_head_dim,
            "qk_pos_emb_head_dim": shape.latent.qk_rope_head_dim,
            "v_head_dim": shape.latent.v_head_dim,
            "rope_type": "yarn" if rope["rope_type"] == "yarn" else "rope",
        }
    else:
        expected["kv_channels"] = shape.head_dim
    if shape.latent and rope["rope_type"] == "yarn":
        names = "beta_fast beta_slow original_max_position_embeddings mscale mscale_all_dim"
        expected |= {name: rope[name] for name in names.split()}
        expected["rotary_scaling_factor"] = rope["factor"]
    if shape.experts:
        expected |= {
            "num_moe_experts": shape.experts.num_experts,
            "moe_router_topk": shape.experts.topk,
            "moe_ffn_hidden_size": shape.experts.hidden_size,
            "moe_layer_freq": [int(is_moe) for is_moe in shape.is_moe_layer],
            "moe_shared_expert_intermediate_size": shape.experts.shared_hidden_size,
            "moe_router_score_function": shape.experts.score_function,
            "moe_router_num_groups": shape.experts.num_groups,
            "moe_router_group_topk": shape.experts.topk_groups,
            "moe_router_bias_update_rate": 0 if shape.experts.has_bias else 1e-3,
        }
    assert {name: getattr(config, name) for name in expected} == expected
    assert args.use_rope_scaling == (rope["rope_type"] == "llama3")
    assert args.untie_embeddings_and_output_weights is not shape.tied_embeddings
    kind = "none" if rope["rope_type"] == "none" else args.position_embedding_type
    assert args.position_embedding_type == kind
    assert kind == "none" or args.rotary_base == rope["rope_theta"]


def test_tokenizer_with_too_few_tokens_is_refused(tmp_path: Path) -> None:
    """Megatron pads its tokenizer's vocabulary to what it builds; config.json may say more."""
    from tests.bad_input_folder import save_tokenizer

    save_tokenizer(tmp_path)
    tokens = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    shape = shape_of(QWEN3_600M)
    derived = derive(shape, tokens)
    says = "--tokenizer-type HuggingFaceTokenizer gives Megatron 256 tokens, but .* is 151936; drop"
    with pytest.raises(UsageError, match=says):
        check_megatron_accepts([*derived.tokens, *tokens.split()], shape)


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (
            "--padded-vocab-size 7",
            "--padded-vocab-size 7 gives Megatron 7 tokens, but .* is 151936",
        ),
        (
            "--padded-vocab-size 151937 --tensor-model-parallel-size 2",
            "--padded-vocab-size 151937 leaves 151937 tokens, which .* 2 does not divide; drop it",
        ),
        ("--pipeline-model-parallel-layout=", r"Megatron refuses these flags \(list index out of"),
    ],
)
def test_values_that_megatron_cannot_use_are_refused(tokens: str, says: str) -> None:
    shape = shape_of(QWEN3_600M)
    derived = derive(shape, tokens)
    with pytest.raises(UsageError, match=says):
        check_megatron_accepts([*derived.tokens, *tokens.split()], shape, world_size=2)


def test_vocabulary_is_that_of_the_checkpoint_without_padding() -> None:
    shape = shape_of(QWEN3_600M)
    derived = derive(shape, "--no-pad-vocab-size")
    assert "--padded-vocab-size 151936" in " ".join(derived.defaults)
    check_megatron_accepts([*derived.tokens, "--no-pad-vocab-size"], shape)
