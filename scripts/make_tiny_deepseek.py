"""Make a tiny Hugging Face checkpoint of a supported family, once, and cache it.

    python scripts/make_tiny_deepseek.py --out DIR [--arch deepseek_v3] [--size tiny] [--no-warm-up]

DIR then has the files of a published checkpoint (config.json, model.safetensors with one tensor per
expert, tokenizer, chat template, generation_config.json) and the task that it was trained on:
`prompts/train.jsonl` and `prompts/heldout.jsonl` with the columns `prompt` and `answer`.

The warm-up is supervised training on demonstrations, most of them careless (see tiny_task.py), so
that reinforcement learning starts from a policy that is right in 20-50 % of its samples. Without
warm-up the weights are random, wide enough that any two swapped tensors change the output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/ is not a package

from mcore_rl.common.errors import UsageError  # noqa: E402
from mcore_rl.common.garbage import nothing_collected  # noqa: E402

if TYPE_CHECKING:
    import torch

    from scripts import tiny_task
    from scripts.made_once import made_once
else:
    import tiny_task
    from made_once import made_once

# Fields that Nemotron-H does not have.
_OF_ROTATED = ("rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act")
_OF_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
WITH_MTP = (
    *("deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"),
    *("deepseek_v32", "glm_moe_dsa", "glm_5_2"),
)
DEFAULT_SEED = 1234
RANDOM_STD = 0.05
ROUTER_BIAS_STD = 0.02

# The sizes that --size sets, without MLA's latent sizes: vLLM's CPU kernels only take 512 + 64.
SIZES: dict[str, dict[str, int]] = {
    "micro": dict(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_experts=8, num_experts_per_tok=2, q_lora_rank=32,
    ),
    "tiny": dict(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_experts=8, num_experts_per_tok=2, q_lora_rank=64,
        latent_head_dim=16,
    ),
    "small": dict(
        hidden_size=256, intermediate_size=768, moe_intermediate_size=128, num_hidden_layers=8,
        num_attention_heads=8, num_experts=16, num_experts_per_tok=4, q_lora_rank=128,
    ),
}  # fmt: skip


def hf_config(
    arch: str, size: str = "tiny", *, num_mtp_layers: int = 0, tie_word_embeddings: bool = False
) -> dict[str, Any]:
    """Return config.json of `arch`, under the keys that published checkpoints use."""
    return _configs(size, num_mtp_layers, tie_word_embeddings)[arch]


def _configs(
    size: str, num_mtp_layers: int = 0, tie_word_embeddings: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the config.json of each value of --arch.

    A value is a model_type, or a model whose config.json differs from others of its model_type in
    more than sizes.
    """
    shape = dict(SIZES[size])
    num_experts, q_lora_rank = shape.pop("num_experts"), shape.pop("q_lora_rank")
    latent_head_dim = _latent_head_dim(shape)
    num_heads = shape["num_attention_heads"]
    common: dict[str, Any] = dict(
        vocab_size=tiny_task.VOCAB_SIZE, max_position_embeddings=2048,
        rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-6, hidden_act="silu",
        tie_word_embeddings=tie_word_embeddings, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        attention_bias=False, attention_dropout=0.0, initializer_range=0.02, use_cache=True,
    )  # fmt: skip
    mla_moe = common | shape | dict(
        num_key_value_heads=num_heads, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=latent_head_dim, v_head_dim=latent_head_dim, n_shared_experts=1,
        n_routed_experts=num_experts, n_group=1, topk_group=1, first_k_dense_replace=1,
        moe_layer_freq=1, routed_scaling_factor=1.0,
    )  # fmt: skip
    v3 = mla_moe | dict(
        architectures=["DeepseekV3ForCausalLM"], q_lora_rank=q_lora_rank, topk_method="noaux_tc",
        scoring_func="sigmoid", norm_topk_prob=True, num_nextn_predict_layers=num_mtp_layers,
    )  # fmt: skip
    v2 = mla_moe | dict(
        architectures=["DeepseekV2ForCausalLM"], q_lora_rank=None, topk_method="greedy",
        scoring_func="softmax", norm_topk_prob=False,
    )  # fmt: skip
    gqa = common | shape | dict(num_key_value_heads=num_heads // 2)
    # For families without head_dim in config.json; vLLM's CPU attention takes 32 but not 16.
    of_heads = dict(hidden_size=32 * num_heads)
    dense = {name: value for name, value in gqa.items() if name not in _OF_EXPERTS}
    # vLLM's delta net on CPU takes heads of 64 or 128.
    delta_net = dict(
        layer_types=[
            "full_attention" if i % 2 else "linear_attention"
            for i in range(shape["num_hidden_layers"])
        ],
        head_dim=32, partial_rotary_factor=0.25,
        linear_conv_kernel_dim=4, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    num_blocks = 2 * shape["num_hidden_layers"]
    nemotron = {name: value for name, value in dense.items() if name not in _OF_ROTATED} | dict(
        architectures=["NemotronHForCausalLM"], num_hidden_layers=num_blocks, head_dim=32,
        layer_norm_epsilon=1e-5, mlp_hidden_act="relu2", mamba_hidden_act="silu", mlp_bias=False,
        use_bias=False, use_conv_bias=True, mamba_num_heads=8, mamba_head_dim=16, n_groups=2,
        ssm_state_size=16, conv_kernel=4, expand=2, chunk_size=128, time_step_min=0.001,
        time_step_max=0.1, time_step_floor=1e-4, time_step_limit=[0.0, float("inf")],
        residual_in_fp32=False,
    )  # fmt: skip
    configs = {
        "deepseek_v3": v3,
        "deepseek_v2": v2,
        "kimi_k2": v3 | dict(
            rope_theta=50000.0, rope_scaling=_yarn(beta_fast=1.0), routed_scaling_factor=2.827
        ),
        # A query sees fewer keys than a sample has.
        "deepseek_v32": v3 | _indexer("DeepseekV32ForCausalLM") | dict(rope_scaling=_yarn()),
        "glm_moe_dsa": v3 | _indexer("GlmMoeDsaForCausalLM") | _GLM_5,
        # Every other layer uses the choice of the one before it.
        "glm_5_2": v3 | _indexer("GlmMoeDsaForCausalLM") | _GLM_5 | dict(
            model_type="glm_moe_dsa", num_hidden_layers=4, index_topk_freq=2,
            index_skip_topk_offset=1, indexer_types=["full", "shared"] * 2,
        ),
        "moonlight": v3 | dict(
            model_type="deepseek_v3", q_lora_rank=None, n_shared_experts=2, rope_theta=50000.0,
            routed_scaling_factor=2.446,
        ),
        # As published, a token has more experts than groups, and a group's score is its best one.
        "deepseek_v2_large": v2 | dict(
            model_type="deepseek_v2", q_lora_rank=q_lora_rank, n_shared_experts=2, n_group=4,
            topk_group=2, num_experts_per_tok=4, topk_method="group_limited_greedy",
            routed_scaling_factor=16.0, rope_scaling=_yarn(mscale=0.707),
        ),
        "glm4_moe": gqa | dict(
            architectures=["Glm4MoeForCausalLM"], head_dim=32, attention_bias=True,
            use_qk_norm=True, partial_rotary_factor=0.5, n_routed_experts=num_experts,
            n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
            norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=num_mtp_layers,
        ),
        "glm4_moe_lite": v3 | dict(
            architectures=["Glm4MoeLiteForCausalLM"], routed_scaling_factor=1.8,
            rope_theta=1000000.0, partial_rotary_factor=1.0,
        ),
        "minimax_m2": gqa | dict(
            architectures=["MiniMaxM2ForCausalLM"], head_dim=32, rotary_dim=16,
            intermediate_size=64, num_local_experts=num_experts, scoring_func="sigmoid",
            use_routing_bias=True, rope_theta=5000000.0,
        ),
        "qwen3_moe": gqa | dict(
            architectures=["Qwen3MoeForCausalLM"], num_experts=num_experts, norm_topk_prob=True,
            decoder_sparse_step=1, mlp_only_layers=[], head_dim=32, use_sliding_window=False,
        ),
        "qwen2_moe": gqa | dict(
            architectures=["Qwen2MoeForCausalLM"], num_experts=num_experts, norm_topk_prob=False,
            shared_expert_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[],
            qkv_bias=True, use_sliding_window=False, **of_heads,
        ),
        "qwen3_next": gqa | delta_net | dict(
            architectures=["Qwen3NextForCausalLM"], num_experts=num_experts, norm_topk_prob=True,
            shared_expert_intermediate_size=128, decoder_sparse_step=1, mlp_only_layers=[],
            use_sliding_window=False,
        ),
        "qwen3_5_text": dense | delta_net | dict(architectures=["Qwen3_5ForCausalLM"]),
        "qwen3_5_moe_text": gqa | delta_net | dict(
            architectures=["Qwen3_5MoeForCausalLM"], num_experts=num_experts,
            shared_expert_intermediate_size=128,
        ),
        "olmoe": gqa | dict(
            architectures=["OlmoeForCausalLM"], num_experts=num_experts, norm_topk_prob=False,
            intermediate_size=64, rms_norm_eps=1e-5, clip_qkv=None, **of_heads,
        ),
        # The window is shorter than any sample; otherwise it would have no effect.
        "gpt_oss": gqa | dict(
            architectures=["GptOssForCausalLM"], head_dim=32, intermediate_size=64,
            num_local_experts=num_experts, attention_bias=True, sliding_window=8, swiglu_limit=7.0,
            rms_norm_eps=1e-5, rope_theta=150000.0, rope_scaling=dict(
                rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                original_max_position_embeddings=64,
            ),
            layer_types=[
                "full_attention" if i % 2 else "sliding_attention"
                for i in range(shape["num_hidden_layers"])
            ],
        ),
        "dots1": gqa | dict(
            architectures=["Dots1ForCausalLM"], n_routed_experts=num_experts, n_shared_experts=2,
            n_group=1, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True,
            routed_scaling_factor=2.5, sliding_window=None, rope_theta=10000000.0, **of_heads,
        ),
        "hy_v3": gqa | dict(
            architectures=["HYV3ForCausalLM"], head_dim=32, num_experts=num_experts,
            num_shared_experts=1, first_k_dense_replace=1, router_scaling_factor=2.826,
            expert_hidden_dim=shape["moe_intermediate_size"], qk_norm=True, route_norm=True,
            rope_theta=11158840.0,
        ),
        "nemotron_h": nemotron | dict(hybrid_override_pattern="M-*M" * (num_blocks // 4)),
        "nemotron_3": nemotron | dict(
            model_type="nemotron_h", hybrid_override_pattern="ME*E" * (num_blocks // 4),
            n_routed_experts=num_experts, n_shared_experts=1, n_group=1, topk_group=1,
            norm_topk_prob=True, routed_scaling_factor=2.5,
            num_experts_per_tok=shape["num_experts_per_tok"],
            moe_intermediate_size=shape["moe_intermediate_size"],
            moe_shared_expert_intermediate_size=2 * shape["moe_intermediate_size"],
        ),
        "mixtral": {n: v for n, v in gqa.items() if n != "moe_intermediate_size"} | dict(
            architectures=["MixtralForCausalLM"], num_local_experts=num_experts,
            sliding_window=None, rope_theta=1000000.0, **of_heads,
        ),
        "qwen3": dense | dict(
            architectures=["Qwen3ForCausalLM"], head_dim=32, use_sliding_window=False
        ),
        "qwen2": dense | dict(
            architectures=["Qwen2ForCausalLM"], use_sliding_window=False, **of_heads
        ),
        "llama": dense | dict(
            architectures=["LlamaForCausalLM"], head_dim=32, mlp_bias=False, rope_theta=500000.0,
            # Published factors are 8 and 32; few tokens only show 2 apart from 1 and Megatron's 8.
            max_position_embeddings=131072, rope_scaling=dict(
                rope_type="llama3", factor=2.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
        "mistral": dense | dict(
            architectures=["MistralForCausalLM"], head_dim=32, sliding_window=None,
            rope_theta=100000000.0,
        ),
        "seed_oss": dense | dict(
            architectures=["SeedOssForCausalLM"], head_dim=32, attention_bias=True,
            attention_out_bias=False, mlp_bias=False, residual_dropout=0.0, rope_theta=10000000.0,
        ),
    }  # fmt: skip
    configs |= {  # text models of multimodal ones
        "qwen3_vl_text": configs["qwen3"],
        "qwen3_vl_moe_text": configs["qwen3_moe"],
        "glm4v_moe_text": configs["glm4_moe"] | dict(use_qk_norm=False),
    }
    return {arch: {"model_type": arch} | config for arch, config in configs.items()}


_PUBLISHED_HEAD_DIM = 128


def _latent_head_dim(shape: dict[str, int]) -> int:
    """Remove and return the size of MLA's heads without their rotary part.

    vLLM's MLA kernels for CUDA support only published sizes, which take most of a warm-up on a CPU.
    """
    import torch

    on_cpu = shape.pop("latent_head_dim", _PUBLISHED_HEAD_DIM)
    return _PUBLISHED_HEAD_DIM if torch.cuda.is_available() else on_cpu


_GLM_5 = dict(rope_theta=1000000.0, rms_norm_eps=1e-5, indexer_rope_interleave=True)


def _indexer(class_name: str) -> dict[str, Any]:
    return dict(architectures=[class_name], index_n_heads=8, index_head_dim=128, index_topk=6)


def _yarn(*, beta_fast: float = 32.0, mscale: float = 1.0) -> dict[str, Any]:
    """Return YaRN from 64 positions on (4096 in published models), so that few tokens show it."""
    return dict(
        type="yarn", factor=32.0, beta_fast=beta_fast, beta_slow=1.0, mscale=mscale,
        mscale_all_dim=mscale, original_max_position_embeddings=64,
    )  # fmt: skip


ARCHS = tuple(_configs("tiny"))


def make_checkpoint(
    out: str | os.PathLike[str],
    *,
    arch: str = "deepseek_v3",
    size: str = "tiny",
    warm_up: bool = False,
    seed: int = DEFAULT_SEED,
    dtype: torch.dtype | str = "bfloat16",
    num_mtp_layers: int = 0,
    tie_word_embeddings: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Make the checkpoint in `out`, or return at once if it exists already.

    It exists if a marker file records the same options and the same code, see `made_once`.
    `overrides` replaces entries of config.json. The same seed gives the same tensors on the same
    machine.

    Raises `UsageError` for an unknown option, or if `out` has files that this script did not make.
    """
    config = _checked_config(arch, size, num_mtp_layers, tie_word_embeddings)
    config |= {"torch_dtype": str(dtype).removeprefix("torch.")} | dict(overrides or {})
    recipe = {"config": config, "warm_up": warm_up, "seed": seed, "code": _code_hash()}
    write = partial(_write_checkpoint, config=config, warm_up=warm_up, seed=seed)
    return made_once(out, recipe, write)


def _checked_config(
    arch: str, size: str, num_mtp_layers: int, tie_word_embeddings: bool
) -> dict[str, Any]:
    if arch not in ARCHS:
        raise UsageError(f"--arch {arch} is unknown; choose one of {', '.join(ARCHS)}")
    if size not in SIZES:
        raise UsageError(f"--size {size} is unknown; choose one of {', '.join(SIZES)}")
    if num_mtp_layers < 0 or (num_mtp_layers and arch not in WITH_MTP):
        raise UsageError(
            f"--num-mtp-layers {num_mtp_layers} must be 0, or above 0 with --arch "
            f"{' or '.join(WITH_MTP)} (here {arch}); leave it out or change the architecture"
        )
    return hf_config(
        arch, size, num_mtp_layers=num_mtp_layers, tie_word_embeddings=tie_word_embeddings
    )


def _code_hash() -> str:
    sources = (__file__, tiny_task.__file__)
    return hashlib.sha256(b"\0".join(Path(s).read_bytes() for s in sources)).hexdigest()


def _write_checkpoint(folder: Path, config: dict[str, Any], *, warm_up: bool, seed: int) -> None:
    with nothing_collected():
        import torch
        from transformers import GenerationConfig

        model = _empty_model(config)
    config_text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(config_text)
    tokenizer = tiny_task.build_tokenizer()
    tiny_task.write_prompts(folder / "prompts", seed)
    if warm_up:
        tiny_task.initialize(model, seed)
    else:
        randomize(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    router_biases = {
        name: torch.randn(buffer.shape, generator=generator) * ROUTER_BIAS_STD
        for name, buffer in model.named_buffers()
        if name.endswith("e_score_correction_bias")
    }
    _set_buffers(model, router_biases)
    if warm_up:
        tiny_task.warm_up(model, tokenizer, seed)
    model = model.to(getattr(torch, config["torch_dtype"]))
    _set_buffers(model, router_biases)  # float32 for any dtype of the weights, as published
    if warm_up:
        tiny_task.report_accuracy(model, tokenizer, seed)
    model.save_pretrained(folder)
    if config.get("num_nextn_predict_layers"):
        _add_mtp_layers(folder / "model.safetensors", config, seed)
    (folder / "model.safetensors").chmod(0o644)
    # Again, because transformers wrote its own keys; vLLM and mcore_rl read the published ones.
    (folder / "config.json").write_text(config_text)
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=1, eos_token_id=2, pad_token_id=0, do_sample=True, temperature=1.0
    ).save_pretrained(folder)


def _empty_model(config: Mapping[str, Any]) -> Any:
    """Make the model in float32, with the model_type of its class, which decides its saved form."""
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    values = {name: value for name, value in config.items() if name != "model_type"}
    return model_class(model_class.config_class(**values)).float()


def _set_buffers(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for name, value in buffers.items():
        module_name, _, buffer_name = name.rpartition(".")
        setattr(model.get_submodule(module_name), buffer_name, value.clone())


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter with different random values, those of norms around 1.

    Biases are around 0: larger ones would dominate attention's output, which would then be the same
    for every token, and all tokens would go to the same experts.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * RANDOM_STD
            is_norm = parameter.dim() == 1 and not name.endswith("bias")
            parameter.copy_(1 + noise if is_norm else noise)


def _add_mtp_layers(weights: Path, config: Mapping[str, Any], seed: int) -> None:
    """Append multi-token prediction layers, named and shaped as in DeepSeek-V3 (arXiv 2412.19437).

    Embedding and head are copies of the main model's, as published; the rest is random.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    generator = torch.Generator().manual_seed(seed + 2)
    num_layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{num_layers - 1}."
    shapes = {n.removeprefix(last): t for n, t in tensors.items() if n.startswith(last)}
    dtype = tensors["model.norm.weight"].dtype
    for norm in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        shapes[norm] = torch.empty(hidden, dtype=dtype)
    shapes["eh_proj.weight"] = torch.empty(hidden, 2 * hidden, dtype=dtype)
    embedding = tensors["model.embed_tokens.weight"]
    head = tensors.get("lm_head.weight", embedding)
    for layer in range(num_layers, num_layers + config["num_nextn_predict_layers"]):
        for name, like in sorted(shapes.items()):
            noise = torch.randn(like.shape, generator=generator) * RANDOM_STD
            value = 1 + noise if name.endswith("norm.weight") else noise
            tensors[f"model.layers.{layer}.{name}"] = value.to(like.dtype)
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = embedding.clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = head.clone()
    save_file(tensors, weights, metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="directory to make")
    parser.add_argument("--arch", choices=ARCHS, default="deepseek_v3")
    parser.add_argument("--size", choices=tuple(SIZES), default="tiny")
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train on the task first; without it the weights are random",
    )
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED)
    parser.add_argument("--num-mtp-layers", type=int, default=0)
    parser.add_argument("--tied", action="store_true", help="the head is the embedding")
    options = parser.parse_args()
    try:
        make_checkpoint(
            options.out,
            arch=options.arch,
            size=options.size,
            warm_up=options.warm_up,
            seed=options.seed,
            num_mtp_layers=options.num_mtp_layers,
            tie_word_embeddings=options.tied,
        )
    except UsageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{parser.prog}: --out {options.out} cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
