"""The folder of a good run, and changes that spoil it; for test_bad_input*.py.

The model is a checkpoint of zeros.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcore_rl.model.config_json import model_shape
from mcore_rl.model.tensors import checkpoint_tensors

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
    "eos_token_id": 0,
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
    "eos_token_id": 0,
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def make_good_folder(here: Path) -> None:
    """A checkpoint and prompts that pass all checks, in the new folder `here`."""
    checkpoint = here / "checkpoint"
    checkpoint.mkdir(parents=True)
    model()(here)
    save_tokenizer(checkpoint)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    for name in ("prompts.jsonl", "eval.jsonl"):
        (here / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def save_weights(checkpoint: Path, config: dict[str, Any]) -> None:
    """Two shards with all tensors of the model, the head in the second."""
    shape = model_shape(config, checkpoint / "config.json")
    shards: dict[str, dict[str, torch.Tensor]] = {FIRST: {}, SECOND: {}}
    for name, spec in checkpoint_tensors(shape):
        shard = SECOND if name == "lm_head.weight" else FIRST
        shards[shard][name] = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
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


def reward_model(here: Path) -> None:
    """A folder `scores` beside the checkpoint: the same model with a head of one label."""
    folder = shutil.copytree(here / "checkpoint", here / "scores")
    save_file({"score.weight": torch.zeros(1, 32)}, folder / SECOND)
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    del index["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": index | {"score.weight": SECOND}}))


def write(name: str, content: str | bytes) -> Change:
    def change(here: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (here / name).write_bytes(data)

    return change


def remove(name: str) -> Change:
    return lambda here: (here / name).unlink()
