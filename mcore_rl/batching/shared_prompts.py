"""Conditions under which the samples of a prompt may share its tokens in training.

Sharing (see `rows`) changes results only by the order of sums, provided that each token's
computation depends only on the tokens before it, and that attention accepts a list of these tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.common.errors import UsageError

FLAG = "--rl-share-prompts"

# Destination -> why the setting would treat a shared token wrongly.
_COUNTS_TOKENS = {
    "moe_z_loss_coeff": "is a mean over tokens",
    "moe_expert_capacity_factor": "drops tokens depending on their number",
    "moe_input_jitter_eps": "draws random numbers per token",
    "mtp_num_layers": "predicts tokens of several samples from a shared one",
}


def obstacle(values: Mapping[str, Any], max_tokens: int) -> str:
    """Return why prompts cannot be shared, as text that begins with a flag; "" if they can.

    `values` are Megatron's arguments by destination, all or only those given; `max_tokens` is
    --rl-max-tokens-per-microbatch.
    """
    if not max_tokens:
        return "--rl-max-tokens-per-microbatch 0 packs no samples"
    if values.get("transformer_impl") != "local":
        return "--transformer-impl transformer_engine supports attention to whole samples only"
    variant = values.get("experimental_attention_variant")
    if variant == "dsa":
        return f"--experimental-attention-variant {variant} attends to whole samples only"
    if variant and values.get("distributed_backend") != "gloo":
        return f"--experimental-attention-variant {variant} keeps no state of a prompt on GPUs"
    if (heads := values.get("mamba_num_heads")) and values.get("distributed_backend") != "gloo":
        return f"--mamba-num-heads {heads} keeps no state of a prompt on GPUs"
    if (cp_size := values.get("context_parallel_size", 1)) > 1:
        return f"--context-parallel-size {cp_size} cuts every sample into chunks"
    for dest in ("hidden_dropout", "attention_dropout"):
        if values.get(dest, 0.1):  # Megatron's default
            return f"{_flag(dest)} {values.get(dest, 0.1)} drops other elements in each sample"
    for dest, reason in _COUNTS_TOKENS.items():
        if values.get(dest):
            return f"{_flag(dest)} {values[dest]} {reason}"
    return _balancing(values)


def _balancing(values: Mapping[str, Any]) -> str:
    """Return the flag of expert balancing that depends on token counts, with its reason."""
    coefficients = values.get("moe_aux_loss_coeff") or 0.0
    coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
    if any(coefficients):
        return f"--moe-aux-loss-coeff {max(coefficients)} counts the tokens of every expert"
    if values.get("moe_router_enable_expert_bias"):
        rate = values.get("moe_router_bias_update_rate", 1e-3)  # Megatron's default
        if rate:
            return f"--moe-router-bias-update-rate {rate} counts the tokens of every expert"
    return ""


def shares_prompts(choice: str, values: Mapping[str, Any], max_tokens: int) -> bool:
    """Resolve `--rl-share-prompts`; raise UsageError if "on" is not possible."""
    against = obstacle(values, max_tokens)
    if choice == "on" and against:
        # What is in the way may be derived, so that nobody could drop it.
        more = "" if max_tokens else ", or pack samples by --rl-max-tokens-per-microbatch"
        raise UsageError(f"on is not possible as {against}", flag=FLAG, remedy=f"drop it{more}")
    return choice != "off" and not against


def _flag(dest: str) -> str:
    return f"--{dest.replace('_', '-')}"
