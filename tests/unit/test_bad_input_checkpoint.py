"""Checkpoints that cannot be trained are refused in one sentence; see bad_input_cases.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bad_input_cases import Case, assert_refused, parse_cases, table
from tests.bad_input_folder import FIRST, INDEX, SECOND, Change, config, model, remove, write


def truncate(name: str) -> Change:
    def change(here: Path) -> None:
        os.truncate(here / name, (here / name).stat().st_size - 64)

    return change


def without_embedding(here: Path) -> None:
    index = json.loads((here / "checkpoint" / INDEX).read_text())
    del index["weight_map"]["model.embed_tokens.weight"]
    (here / "checkpoint" / INDEX).write_text(json.dumps(index))
    tensors = load_file(here / "checkpoint" / FIRST)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, here / "checkpoint" / FIRST)


def in_float8(here: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.zeros(300, 32).to(torch.float8_e4m3fn)}
    save_file(tensors, here / "checkpoint" / FIRST)


WITH_MTP = config(num_nextn_predict_layers=1)
LONG_NAME = "x" * 5000
CHECKPOINT_TEXT = """
index_nested_too_deep:
    checkpoint/model.safetensors.index.json is not a safetensors index ... copy
flag_missing: without --rl-hf-checkpoint
    --rl-hf-checkpoint is missing ... give the folder
folder_missing: --rl-hf-checkpoint {here}/nowhere
    --rl-hf-checkpoint {here}/nowhere is not a directory ... give the folder
folder_is_its_config: --rl-hf-checkpoint {here}/checkpoint/config.json
    --rl-hf-checkpoint {here}/checkpoint/config.json is not a directory ... give the folder
folder_is_a_shard: --rl-hf-checkpoint {here}/checkpoint/model-00001-of-00002.safetensors
    --rl-hf-checkpoint {here}/checkpoint/model-00001-of-00002.safetensors is not a directory ...
    give the folder
without_config:
    --rl-hf-checkpoint {here}/checkpoint has no config.json ... give the folder
config_not_json:
    {here}/checkpoint/config.json cannot be read as JSON ... line 1 ... copy
config_not_an_object:
    {here}/checkpoint/config.json is not a JSON object ... use the published
architecture:
    config.json has model_type 'gpt2' ... supported are deepseek_v3 ... qwen3 ... give
    => again
drafter_not_there: --rl-speculate mtp:1
    --rl-speculate mtp:1 needs model.layers.2. ... {here}/checkpoint lacks it ... copy the
    => --rl-speculate ngram:1
mtp_not_described: --mtp-num-layers 1
    --mtp-num-layers 1 trains multi ... config.json has none ... drop it; MTP layers are then
mtp_of_more_layers: --mtp-num-layers 2
    --mtp-num-layers 2 trains multi ... config.json has 1 (num_nextn ... drop it
mtp_not_there: --mtp-num-layers 1
    --mtp-num-layers 1 trains model.layers.2.enorm ... [32] ... {here}/checkpoint lacks ... drop
mtp_of_no_layers: --mtp-num-layers 0
    --mtp-num-layers 0 must be greater than 0
mtp_beside_cp: without --tensor-model-parallel-size without --expert-model-parallel-size
  --mtp-num-layers 1 --context-parallel-size 2 --rl-rollout-tp-size 1
    --mtp-num-layers 1 is not possible with ... --context-parallel ... drop it
mtp_beside_critic: --mtp-num-layers 1 --rl-algorithm ppo
    --mtp-num-layers 1 is not possible with ... whose critic has none ... drop it
mtp_beside_layout: without --tensor-model-parallel-size without --expert-model-parallel-size
  --pipeline-model-parallel-size 2 --mtp-num-layers 1 --pipeline-model-parallel-layout Et|tmL
    --mtp-num-layers 1 is not possible with ... follow the last ... drop it and the m
    => drop --mtp-num-layers --pipeline-model-parallel-layout Et|tL
mtp_beside_overlap: without --tensor-model-parallel-size without --expert-model-parallel-size
  --pipeline-model-parallel-size 2 --mtp-num-layers 1 --overlap-grad-reduce
    --mtp-num-layers 1 is not possible with ... --overlap-grad-reduce, which waits for a
    gradient ... drop it
fp8_export_of_another_checkpoint: --rl-export-dtype fp8 --rl-export-hf {here}/exported
    --rl-export-dtype fp8 writes ... FP8 blocks ... {here}/checkpoint has none ... drop it
tensor_quantised:
    model.embed_tokens.weight in {here}/checkpoint/model-00001-of-00002.safetensors ... F8_E4M3
    ... dequantise
    => again
shard_missing:
    {here}/checkpoint/model-00002-of-00002.safetensors is missing ...
    model.safetensors.index.json ... copy the checkpoint again
shard_cut_short:
    {here}/checkpoint/model-00002-of-00002.safetensors is corrupt or cut short ... copy this
    file again
tensor_missing:
    lacks model.embed_tokens.weight ... [300, 32] ... copy the checkpoint again
config_of_another_model:
    has model.embed_tokens.weight of shape [300, 32] ... one of shape [512, 32] ... copy
latent_that_cpu_engines_lack:
    kv_lora_rank 256 with qk_rope_head_dim 64 ... without a GPU ... 512 and 64 ... use
    => again
"""
CHANGES_CHECKPOINT = {
    "index_nested_too_deep": write(f"checkpoint/{INDEX}", "[" * 100_000),
    "without_config": remove("checkpoint/config.json"),
    "config_not_json": write("checkpoint/config.json", "{'model_type': "),
    "config_not_an_object": write("checkpoint/config.json", "[]"),
    "architecture": config(model_type="gpt2"),
    "drafter_not_there": WITH_MTP,
    "mtp_of_more_layers": WITH_MTP,
    "mtp_not_there": WITH_MTP,
    "mtp_beside_cp": WITH_MTP,
    "mtp_beside_critic": WITH_MTP,
    "mtp_beside_layout": WITH_MTP,
    "mtp_beside_overlap": WITH_MTP,
    "tensor_quantised": in_float8,
    "shard_missing": remove("checkpoint/" + SECOND),
    "shard_cut_short": truncate("checkpoint/" + SECOND),
    "tensor_missing": without_embedding,
    "config_of_another_model": config(vocab_size=512),
    "latent_that_cpu_engines_lack": model(kv_lora_rank=256),
}
CHECKPOINT = [
    *parse_cases(CHECKPOINT_TEXT, CHANGES_CHECKPOINT),
    Case(
        "folder_is_no_name",
        [f"--rl-hf-checkpoint {{here}}/{LONG_NAME} is not a directory", "give the folder"],
        flags={"--rl-hf-checkpoint": "{here}/" + LONG_NAME},
    ),
]


@pytest.mark.parametrize("case", table(checkpoint=CHECKPOINT))
def test_bad_checkpoint_is_refused_in_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
