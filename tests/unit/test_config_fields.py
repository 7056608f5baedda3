"""Numbers of a config.json: of the right type and within the range that a model can be made of."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.model.config_json import model_shape
from tests.unit.test_hf_config import DEEPSEEK_V3, GLM4_AIR, TRAINABLE, YARN, read

# Numeric fields of the ropes of published models, beside the common ones.
ROPES = {
    "deepseek-v3": ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
    "gpt-oss-20b": ("factor", "beta_fast", "beta_slow", "truncate"),
    "llama-3.2-1b": ("factor", "low_freq_factor", "high_freq_factor"),
}


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("published", ROPES)
def test_numbers_of_rope_are_numbers_in_their_range(
    published: str, where: str, tmp_path: Path
) -> None:
    base = json.loads(TRAINABLE[published])
    rope = base.pop("rope_scaling")
    base["rope_theta"] = 10000
    model_shape({**base, where: rope}, tmp_path)
    for name in (*ROPES[published], "original_max_position_embeddings", "rope_theta"):
        for value in ("1", "x", True, -1, 0, nan, inf, 10**400, [1], {"a": 1}):
            if value == 0 and name.startswith("mscale") or value is True and name == "truncate":
                continue
            says = f"has {where}.{name} .*, which must be |{name} .* \\(Megatron has "
            with pytest.raises(UsageError, match=says):
                model_shape({**base, where: {**rope, name: value}}, tmp_path)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        *[({"rms_norm_eps": value}, "has rms_norm_eps") for value in ("1e-6", -1e-6, 0, 1, nan)],
        *[({"rope_theta": value}, "has rope_theta") for value in ("1e6", -10000, 0, 1, nan)],
        *[({"routed_scaling_factor": value}, "has routed_scaling") for value in ("2", -1, 0, inf)],
        (
            {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}},
            "has rope_scaling.beta_slow 32",
        ),
    ],
)
def test_number_out_of_its_range_is_named(fields: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{says}.*, which must be .*; use the config.json"):
        read(tmp_path, DEEPSEEK_V3, **fields)


@pytest.mark.parametrize("value", ["0.5", -0.5, 0, 1.5, nan, True])
def test_share_of_rotated_elements_is_a_share(value: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="partial_rotary_factor .*, which must be in"):
        read(tmp_path, GLM4_AIR, partial_rotary_factor=value)
