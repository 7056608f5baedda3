"""Checkpoints that cannot be trained are refused in one sentence; see bad_input_cases.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bad_input_cases import Case, assert_refused, table
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


def in_float8_blocks(scales: torch.Tensor | None) -> Change:
    """The embedding, which has 3 x 1 blocks, with these factors."""

    def change(here: Path) -> None:
        quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        config(quantization_config=quantization)(here)
        in_float8(here)
        weight_map = {"model.embed_tokens.weight": FIRST}
        if scales is not None:
            name, file = "model.embed_tokens.weight_scale_inv", "scales.safetensors"
            save_file({name: scales}, here / "checkpoint" / file)
            weight_map[name] = file
        (here / "checkpoint" / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


STAGES: dict[str, str | None] = {
    "--tensor-model-parallel-size": None,
    "--expert-model-parallel-size": None,
    "--pipeline-model-parallel-size": "2",
}
NO_TP: dict[str, str | None] = {
    "--tensor-model-parallel-size": None,
    "--expert-model-parallel-size": None,
}
CHECKPOINT = [
    Case(
        "index_nested_too_deep",
        ["checkpoint/model.safetensors.index.json is not a safetensors index", "copy"],
        change=write(f"checkpoint/{INDEX}", "[" * 100_000),
    ),
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
    *(
        Case(
            f"folder_is_{name}",
            [f"--rl-hf-checkpoint {path} is not a directory", "give the folder"],
            flags={"--rl-hf-checkpoint": path},
        )
        for name, path in (
            ("its_config", "{here}/checkpoint/config.json"),
            ("a_shard", "{here}/checkpoint/" + FIRST),
            ("no_name", "{here}/" + "x" * 5000),
        )
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
        ["{here}/checkpoint/config.json is not a JSON object", "use the published"],
        change=write("checkpoint/config.json", "[]"),
    ),
    Case(
        "architecture",
        ["config.json has model_type 'gpt2'", "supported are deepseek_v3", "qwen3", "give"],
        change=config(model_type="gpt2"),
    ),
    Case(
        "drafter_not_described",
        ["--rl-speculate mtp:1 needs multi", "config.json has none", "give ngram:1"],
        flags={"--rl-speculate": "mtp:1"},
        change=config(num_nextn_predict_layers=0),
    ),
    Case(
        "drafter_not_there",
        ["--rl-speculate mtp:1 needs model.layers.2.", "{here}/checkpoint lacks it", "copy the"],
        flags={"--rl-speculate": "mtp:1"},
        change=config(num_nextn_predict_layers=1),
    ),
    Case(
        "drafter_unknown",
        ["--rl-speculate eagle:3 is not off, mtp:N or ngram:N", "give for example"],
        flags={"--rl-speculate": "eagle:3"},
    ),
    Case(
        "mtp_not_described",
        ["--mtp-num-layers 1 trains multi", "config.json has none", "drop it; MTP layers are then"],
        more="--mtp-num-layers 1",
    ),
    Case(
        "mtp_of_more_layers",
        ["--mtp-num-layers 2 trains multi", "config.json has 1 (num_nextn", "drop it"],
        more="--mtp-num-layers 2",
        change=config(num_nextn_predict_layers=1),
    ),
    Case(
        "mtp_not_there",
        [
            "--mtp-num-layers 1 trains model.layers.2.enorm",
            "[32]",
            "{here}/checkpoint lacks",
            "drop",
        ],
        more="--mtp-num-layers 1",
        change=config(num_nextn_predict_layers=1),
    ),
    Case(
        "mtp_of_no_layers",
        ["--mtp-num-layers 0 must be greater than 0"],
        more="--mtp-num-layers 0",
    ),
    *(
        Case(
            f"mtp_beside_{name}",
            ["--mtp-num-layers 1 is not possible with", says, "drop it"],
            flags=flags,
            more=f"--mtp-num-layers 1 {more}",
            change=config(num_nextn_predict_layers=1),
        )
        for name, flags, more, says in (
            ("cp", NO_TP, "--context-parallel-size 2 --rl-rollout-tp-size 1", "--context-parallel"),
            ("critic", {}, "--rl-algorithm ppo", "whose critic has none"),
            ("layout", STAGES, "--pipeline-model-parallel-layout Et|tmL", "follow the last"),
            (
                "overlap",
                STAGES,
                "--overlap-grad-reduce",
                "--overlap-grad-reduce, which waits for a gradient",
            ),
        )
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
        ["asks for quantised weights (quantization_config of compressed-tensors)", "give", "FP8"],
        change=config(quantization_config={"quant_method": "compressed-tensors"}),
    ),
    Case(
        "scales_missing",
        ["{here}/checkpoint lacks model.embed_tokens.weight_scale_inv", "float8; copy"],
        change=in_float8_blocks(None),
    ),
    Case(
        "scales_of_another_block_size",
        ["weight_scale_inv of shape [5, 1]", "[300, 32] has [3, 1] blocks of 128 x 128", "[128, 1"],
        change=in_float8_blocks(torch.ones(5, 1)),
    ),
    Case(
        "fp8_export_of_another_checkpoint",
        ["--rl-export-dtype fp8 writes", "FP8 blocks", "{here}/checkpoint has none", "drop it"],
        more="--rl-export-dtype fp8 --rl-export-hf {here}/exported",
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
        "without_index",
        ["{here}/checkpoint has neither model.safetensors nor " + INDEX, "copy " + INDEX],
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
        change=model(kv_lora_rank=256),
    ),
]


@pytest.mark.parametrize("case", table(checkpoint=CHECKPOINT))
def test_bad_checkpoint_is_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
