"""Every family of docs/using/families.md, on random tiny checkpoints of it: all ways of weights.

`mcore_rl.verify` of a folder that transformers has made, saved, loaded and saved again; on the way
checkpoint -> Megatron -> checkpoint, with log-probs held against transformers'; and vLLM on the
same weights beside the config.json that is published.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.data.tokenizer import register_families
from mcore_rl.megatron.hf_checkpoint import open_checkpoint
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.model.families import family_of
from mcore_rl.model.tensors import (
    checkpoint_tensors,
    is_mtp_copy,
    is_mtp_tensor,
    mtp_tensors,
)
from scripts.make_tiny_deepseek import ARCHS
from tests.dist.checkpoints import (
    assert_log_probs_equal_transformers,
    differing,
    loaded,
    log_probs_of,
    run_all_ways,
    tensors_of,
)
from tests.dist.test_family_invariance import FEWER
from tests.megatron_parameters import SPECS, stage_parameters
from tests.model_shapes import (
    has_engine_on_cpu,
    has_experts,
    has_one_block_a_layer,
    made_values,
    model_class,
)
from tests.multimodal import PUBLISHED_STACKED, load_multimodal, make_multimodal
from tests.rank_pool import RankPool

# From 64 positions on, so that few tokens show it; with the fields that Qwen's model cards name.
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}

# Options of make_tiny_deepseek that show more of a model.
OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_mtp_layers": 1,  # as published, and with groups, too
        "overrides": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    },
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), {"num_mtp_layers": 1}),
    **dict.fromkeys(("qwen3", "llama"), {"tie_word_embeddings": True}),
    "qwen3_vl_moe": {"overrides": {"moe_intermediate_size": 128}},  # of no square matrices
}
# Published as a part of a multimodal model only.
PARTS = ("qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_moe_text")
# name -> (--arch of make_tiny_deepseek, options). vLLM runs the others on GPUs only: see
# test_sparse_attention.py and test_nemotron.py.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        arch: (arch, OPTIONS.get(arch, {}))
        for arch in ARCHS
        if has_engine_on_cpu(arch) and arch not in PARTS
    },
    "qwen3_yarn": ("qwen3", {"overrides": {"rope_scaling": YARN}}),
}
# Text models in the folders of multimodal ones: model_type -> (--arch, further fields of its
# config.json, which count and not those of the text model). A text model of its own has been shown.
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "qwen3_vl": ("qwen3_vl_text", {"tie_word_embeddings": True}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {}),
    "glm4v_moe": ("glm4v_moe_text", {}),
    "mistral3": ("mistral", {"tie_word_embeddings": False}),
    "internvl": ("qwen3", {"tie_word_embeddings": False}),
}
CASES |= {name: (arch, OPTIONS.get(name, {})) for name, (arch, _) in MULTIMODAL.items()}


# The others are a GPTModel.
HYBRID_MODELS = (
    "deepseek_v3 deepseek_v2 kimi_k2 glm4_moe_lite minimax_m2 qwen3_moe qwen3_next gpt_oss qwen3 "
    "llama"
).split()


# Of modules that another model has; their own stages are in test_family_invariance.py.
WITHOUT_STAGES = (*FEWER, *MULTIMODAL, "qwen3_yarn")


@dataclass(frozen=True)
class Outcome:
    spec: str  # of `SPECS`
    pp_size: int
    checkpoint: Path  # as published
    saved: Path  # by transformers
    exported: Path
    results: list[dict[str, Any]]  # each rank's


@pytest.fixture(scope="module", params=list(CASES))
def outcome(
    request: pytest.FixtureRequest,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcome:
    """One start of Megatron and of the engines a family, many assertions."""
    arch, options = CASES[request.param]
    pp_size = 1 if request.param in WITHOUT_STAGES else 2
    split = f"tp2_pp{pp_size}_ep{2 if has_experts(arch) else 1}"
    checkpoint = checkpoint_factory(arch, **options)
    if request.param == "llama":
        checkpoint = with_position_tables(checkpoint, tmp_path_factory.mktemp("llama"))
    if request.param == "qwen3_next":
        checkpoint = with_new_norms(checkpoint, tmp_path_factory.mktemp("qwen3_next"))
    folder = tmp_path_factory.mktemp("families")
    if request.param in MULTIMODAL:
        more = MULTIMODAL[request.param][1]
        checkpoint = make_multimodal(checkpoint, request.param, folder / "published", **more)
    is_other = request.param in PUBLISHED_STACKED
    saved = checkpoint if is_other else saved_by_transformers(checkpoint, folder)
    if request.param == "mistral3":  # published beside it: the same in Mistral's own format
        save_file({}, saved / "consolidated.safetensors")
        (saved / "params.json").write_text("{}")
    # As many as the model has positions, less the one that scoring takes.
    longest = ("--rl-max-prompt-tokens", str(read_model_shape(saved).max_positions - 1))
    has_blocks = has_one_block_a_layer(arch)
    is_hybrid = has_blocks or request.param in HYBRID_MODELS
    of_class = ("--rl-model-class", "hybrid" if is_hybrid else "gpt")
    results = run_all_ways(ranks, saved, split, folder, *longest, *of_class, published=checkpoint)
    spec = "local, blocks" if has_blocks else "local, hybrid" if is_hybrid else "local"
    return Outcome(spec, pp_size, checkpoint, saved, folder / "exported", results)


def saved_by_transformers(published: Path, folder: Path) -> Path:
    """The model with a configuration made by its class, which has fewer fields than config.json;
    saved, loaded by the name that it then has, and saved again in several files."""
    register_families()  # transformers knows no Kimi-K2
    AutoTokenizer.from_pretrained(published).save_pretrained(folder / "saved")
    if (published / "preprocessor_config.json").is_file():
        model = load_multimodal(published, torch.bfloat16)
        model.save_pretrained(folder / "saved", max_shard_size="200KB")
        return folder / "saved"
    model_type = json.loads((published / "config.json").read_text())["model_type"]
    # All others have it so: a router's bias is float32. transformers would round MiniMax-M2's.
    model_class(model_type)._keep_in_fp32_modules_strict = ["e_score_correction_bias"]
    model = loaded(published, torch.bfloat16)
    values = made_values(json.loads((published / "config.json").read_text()))
    model.config = type(model.config)(**values)
    model.save_pretrained(folder / "made")
    again = AutoModelForCausalLM.from_pretrained(folder / "made")
    again.save_pretrained(folder / "saved", max_shard_size="200KB")
    assert len(list((folder / "saved").glob("*.safetensors"))) > 1
    return folder / "saved"


def with_position_tables(checkpoint: Path, folder: Path) -> Path:
    """A copy that stores what earlier versions of transformers stored beside the weights."""
    copy = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
    weights = copy / "model.safetensors"
    table = torch.arange(16) / 16
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": table.clone() for i in range(2)}
    save_file(load_file(weights) | tables, weights, metadata={"format": "pt"})
    return copy


def with_new_norms(checkpoint: Path, folder: Path) -> Path:
    """A copy whose norms are as transformers initialises them: zeros, offsets from 1."""
    copy = Path(shutil.copytree(checkpoint, folder / "checkpoint"))
    weights = copy / "model.safetensors"
    tensors = {
        name: torch.zeros_like(tensor) if name.endswith("layernorm.weight") else tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    return copy


def test_log_probs_equal_transformers_in_float32(outcome: Outcome) -> None:
    log_probs = [result["log_probs"] for result in outcome.results]
    assert_log_probs_equal_transformers(log_probs, outcome.checkpoint)


def test_export_is_the_checkpoint_bit_for_bit(outcome: Outcome) -> None:
    """Exports of a multimodal model have every tensor, and config.json."""
    mtp_layer = f"model.layers.{read_model_shape(outcome.checkpoint).num_layers}."
    left_out = [
        name
        for name in sorted(tensors_of(outcome.checkpoint))
        if name.startswith(mtp_layer) or name.endswith("inv_freq")
    ]
    assert differing(outcome.checkpoint, outcome.exported) == left_out
    loaded(outcome.exported)
    if read_model_shape(outcome.checkpoint).is_multimodal:
        configs = [folder / "config.json" for folder in (outcome.saved, outcome.exported)]
        assert configs[0].read_bytes() == configs[1].read_bytes()


def test_verify_finds_equal_what_transformers_saved(outcome: Outcome) -> None:
    shape = read_model_shape(outcome.saved)
    checkpoint = open_checkpoint(outcome.saved, shape)
    stack = checkpoint.stack
    num_tensors = len(tensors_of(outcome.saved)) - len(checkpoint.others)
    num_tensors += len(stack.parts) - len(stack.stored)  # of experts, by expert
    assert bool(checkpoint.others) == shape.is_multimodal
    for result in outcome.results:
        assert result["num_stored"] > 15
        assert result["verification"]["stored_equal"], result["verification"]["differing"]
        assert result["verification"]["num_tensors"] == num_tensors


def test_engine_is_the_same_beside_the_published_config(outcome: Outcome) -> None:
    before, after = tensors_of(outcome.checkpoint), tensors_of(outcome.saved)
    assert after.keys() <= before.keys()
    assert [name for name in after if not torch.equal(after[name], before[name])] == []
    for result in outcome.results:
        assert result["published_stored_otherwise"] == []
        assert result["published_log_probs"] == result["verification"]["vllm_log_probs"]


def test_engine_computes_the_same_model(outcome: Outcome) -> None:
    """vLLM in bfloat16 is as far from Megatron in float32 as transformers is from itself.

    Twice as far is allowed. Another yarn, another choice or scale of experts is three times as far
    and more. Medians are compared: a tie of a router that bfloat16 decides in another way moves
    single tokens far, and which do depends on the processor.
    """
    verified = [result["verification"] for result in outcome.results]
    prompts = verified[0]["token_ids"]
    exact, rounded = (
        torch.cat([log_probs_of(model, torch.tensor([ids]))[0] for ids in prompts])
        for model in (loaded(outcome.checkpoint, d) for d in (torch.float32, torch.bfloat16))
    )
    rounding = (exact - rounded).abs().median()
    assert 0.0005 < rounding < 0.02
    for each in verified:
        megatron, engine = (
            torch.tensor([value for row in each[name] for value in row], dtype=torch.float64)
            for name in ("megatron_log_probs", "vllm_log_probs")
        )
        assert (megatron - engine).abs().median() < 2 * rounding


def test_parameters_are_called_as_the_unit_tests_say(outcome: Outcome) -> None:
    shape = read_model_shape(outcome.checkpoint)
    per_stage = shape.num_layers // outcome.pp_size
    for rank, result in enumerate(outcome.results):
        first = rank // 2 * per_stage
        expected = stage_parameters(
            shape,
            SPECS[outcome.spec],
            tp_size=2,
            ep_size=2 if shape.experts else 1,
            layers=tuple(range(first, first + per_stage)),
        )
        parameters = {name: tuple(size) for name, size in result["parameters"].items()}
        for layer in range(per_stage):  # a buffer
            expected.pop(SPECS[outcome.spec].place(layer, "mlp.router.expert_bias"), None)
        assert parameters == expected


@pytest.mark.parametrize("case", [case for case in CASES if case not in MULTIMODAL])
def test_table_of_tensors_is_that_of_the_checkpoint(
    case: str, checkpoint_factory: Callable[..., Path]
) -> None:
    """Names, shapes and dtypes; the MTP layers' copies of embedding and head aside. Of experts that
    the file has stacked it is what they are read as."""
    arch, options = CASES[case]
    folder = checkpoint_factory(arch, **options)
    shape = read_model_shape(folder)
    if family_of(shape.architecture).has_mxfp4:
        found = open_checkpoint(folder, shape).tensors
        assert {name: (info.shape, info.dtype) for name, info in found.items()} == {
            name: (spec.shape, spec.dtype) for name, spec in checkpoint_tensors(shape)
        }
        return
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        held = {name: (tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    in_layers = {n for n in held if is_mtp_tensor(n, shape.num_layers)}
    copies = {n for n in in_layers if is_mtp_copy(n)}
    assert len(copies) == 2 * shape.num_mtp_layers
    names_of_dtypes = {"bfloat16": "BF16", "float32": "F32"}
    for names, table in (
        (held.keys() - in_layers, checkpoint_tensors(shape)),
        (in_layers - copies, mtp_tensors(shape)),
    ):
        assert {name: held[name] for name in names} == {
            name: (spec.shape, names_of_dtypes[spec.dtype]) for name, spec in table
        }
