"""Quantisation that config.json describes: FP8 blocks, INT4 groups, or MXFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUANTIZATION = "quantization_config"  # the field of config.json
FP8, MXFP4, INT4 = "fp8", "mxfp4", "compressed-tensors"  # its quant_method
READ_AS = {FP8: "FP8 blocks", MXFP4: "MXFP4", INT4: "INT4 groups"}
INT4_GROUP = 32  # consecutive columns with one scale
POWERS_OF_TWO = "ue8m0"  # a scale_fmt: DeepSeek-V3.1's scales
GIVE_BLOCKS_OR_GROUPS = (
    "give the checkpoint in FP8 blocks as DeepSeek-V3 is published (quant_method fp8, fmt e4m3, "
    "weight_block_size [128, 128]) or in INT4 groups as Kimi-K2-Thinking is (compressed-tensors, "
    f"pack-quantized, symmetric groups of {INT4_GROUP}), or dequantise it to bfloat16 first"
)
GIVE_MXFP4 = "give the checkpoint as it was published (quant_method mxfp4), or in bfloat16"

# Allowed values per field. A missing field takes the first value; None: the field is required.
_FP8_BLOCKS: dict[str, tuple[Any, ...]] = {
    "quant_method": (None, FP8),
    "weight_block_size": (None, [128, 128]),
    "fmt": ("e4m3", "float8_e4m3fn"),  # the latter: MiniMax-M2
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", POWERS_OF_TWO),
}
# Those of the only group in `config_groups` and of its `weights` included.
_INT4_GROUPS: dict[str, tuple[Any, ...]] = {
    "format": (None, "pack-quantized"),
    "num_bits": (None, 4),
    "type": (None, "int"),
    "strategy": (None, "group"),
    "group_size": (None, INT4_GROUP),
    "symmetric": (True,),
    "dynamic": (False,),
    "actorder": ("none",),
    "input_activations": ("none",),
    "output_activations": ("none",),
    "kv_cache_scheme": ("none",),
    "sparsity_config": ("none",),
    "transform_config": ("none",),
}


def quantization_method(values: Mapping[str, Any]) -> str | None:
    """Return the quant_method of a parsed config.json; None without quantised weights."""
    given = values.get(QUANTIZATION)
    return str(_settings(given).get("quant_method") or "an unnamed method") if given else None


def unsupported_quantization(values: Mapping[str, Any], *, is_mxfp4: bool) -> str | None:
    """Describe the quantisation of a parsed config.json if it is not supported, else return None.

    Supported are FP8 blocks of 128 x 128 (as published for DeepSeek-V3 and Kimi-K2) and INT4 groups
    of 32 (Kimi-K2-Thinking and later), or MXFP4 with `is_mxfp4` (gpt-oss)."""
    given = values.get(QUANTIZATION)
    if not given:
        return None
    method = quantization_method(values)
    if is_mxfp4:
        return None if method == MXFP4 else f"{QUANTIZATION} of {method}"
    settings, allowed = _settings(given), _FP8_BLOCKS
    if method == INT4:
        settings, allowed = _of_groups(settings), _INT4_GROUPS
    for name, (default, *others) in allowed.items():
        value = default if settings.get(name) in (None, {}) else settings[name]
        if value is None or value not in (default, *others):
            field = "" if name == "quant_method" else f" with {name} {value}"
            return f"{QUANTIZATION} of {method}{field}"
    return None


def _of_groups(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings with those of their only group, and of its weights."""
    groups = _settings(settings.get("config_groups"))
    if len(groups) != 1:
        return settings
    (group,) = map(_settings, groups.values())
    given = {**_settings(group.get("weights")), **group}
    return {**settings, **{name: value for name, value in given.items() if value is not None}}


def _settings(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, dict) else {}
