"""Quantisation that config.json describes: FP8 blocks and gpt-oss's MXFP4; others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

QUANTIZATION = "quantization_config"  # the field of config.json
FP8, MXFP4 = "fp8", "mxfp4"  # its quant_method
POWERS_OF_TWO = "ue8m0"  # a scale_fmt: DeepSeek-V3.1's scales
GIVE_FP8_BLOCKS = (
    "give the checkpoint in FP8 blocks as DeepSeek-V3 is published (quant_method fp8, fmt e4m3, "
    "weight_block_size [128, 128]), or dequantise it to bfloat16 first"
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


def quantization_method(values: Mapping[str, Any]) -> str | None:
    """Return the quant_method of a parsed config.json; None without quantised weights."""
    given = values.get(QUANTIZATION)
    return str(_settings(given).get("quant_method") or "an unnamed method") if given else None


def unsupported_quantization(values: Mapping[str, Any], *, is_mxfp4: bool) -> str | None:
    """Describe the quantisation of a parsed config.json if it is not supported, else return None.

    FP8 blocks of 128 x 128 are supported (as published for DeepSeek-V3 and Kimi-K2), or MXFP4 with
    `is_mxfp4` (gpt-oss)."""
    given = values.get(QUANTIZATION)
    if not given:
        return None
    if is_mxfp4:
        method = quantization_method(values)
        return None if method == MXFP4 else f"{QUANTIZATION} of {method}"
    settings = _settings(given)
    for name, (default, *others) in _FP8_BLOCKS.items():
        value = default if settings.get(name) is None else settings[name]
        if value is None or value not in (default, *others):
            field = "" if name == "quant_method" else f" with {name} {value}"
            return f"{QUANTIZATION} of {quantization_method(values)}{field}"
    return None


def _settings(given: Any) -> Mapping[str, Any]:
    return given if isinstance(given, dict) else {}
