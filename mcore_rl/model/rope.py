"""Rotary positions, read from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_rl.common.parameters import Bounds
from mcore_rl.common.readers import finite_number
from mcore_rl.model.config_fields import Fields
from mcore_rl.model.family import Family

# Values that Megatron's --use-rope-scaling fixes and no flag sets.
_LLAMA3_FIXED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Settings that Megatron's latent attention reads and no flag sets, with its defaults.
YARN_WITHOUT_FLAG = {
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
# YaRN of grouped attention; no other attention factor can be given. The hosts agree on the defaults
# of the other fields, except where a family always uses YaRN.
_YARN_SPELT_OUT = ("factor", "original_max_position_embeddings")
_ROPE_FIELDS = {
    "default": frozenset[str](),
    "llama3": frozenset({"factor", *_LLAMA3_FIXED}),
    "yarn": frozenset({"factor", "mscale", "mscale_all_dim", *YARN_WITHOUT_FLAG}),
}
# Bounds of the numbers that are not counts. Megatron and vLLM take their logarithms and quotients.
_BOUNDS = {
    "factor": Bounds(least=1),
    **dict.fromkeys(("beta_fast", "beta_slow"), Bounds(above=0)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Bounds(above=0)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Bounds(least=0)),
}


def read_rope(fields: Fields, family: Family) -> dict[str, Any]:
    """Read rope_type, rope_theta, the type's fields, and partial_rotary_factor if it is not 1.
    Without rotation the type is "none".

    Raises UsageError for a type or a value that the family or Megatron does not support.
    """
    if not family.rope_types:  # in no host, whatever these fields contain
        for name in ("rope_parameters", "rope_scaling", "rope_theta"):
            fields.get(name)
        return {"rope_type": "none"}
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    where = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    given = fields.get(where) or {}
    if not isinstance(given, dict):
        raise fields.refuse(f"rope scaling {given!r}")
    given = {
        name: value
        for name, value in given.items()
        if value is not None and name not in family.rope_of_images
    }
    inside = fields.within(where, dict(given))
    rope_type = given.pop("type", None)
    rope_type = given.pop("rope_type", rope_type) or "default"
    if not given and "default" not in family.rope_types:
        fields["rope_scaling"]  # raises: transformers would choose a default of its own
    theta = (inside if given.pop("rope_theta", None) is not None else fields).number(
        "rope_theta", family.default_rope_theta, bounds=Bounds(above=1)
    )
    if theta != int(theta):
        raise fields.refuse(f"rope_theta {theta} (Megatron's --rotary-base is an integer)")
    of_heads = rope_type == "yarn" and not family.latent_attention
    if rope_type not in family.rope_types:
        raise fields.refuse(
            f"rope scaling of type '{rope_type}' with model_type '{family.model_type}'"
        )
    share = _partial_rotary_factor(fields, family, given)
    known = {"factor", *YARN_WITHOUT_FLAG, "truncate"} if of_heads else _ROPE_FIELDS[rope_type]
    for name in given.keys() - known:
        raise fields.refuse(f"{rope_type} rope scaling with {name} {given[name]}")
    if rope_type != "default" and "factor" not in given:
        raise fields.refuse(f"{rope_type} rope scaling without a factor")
    if of_heads:
        given = _yarn_of_heads(fields, family, given)
    for name, value in given.items():
        if name in _BOUNDS:
            inside.number(name, value, bounds=_BOUNDS[name])
        elif name == "truncate":
            inside.switch(name)
        else:
            inside.count(name, value)
    fast, slow = (given.get(name, YARN_WITHOUT_FLAG[name]) for name in ("beta_fast", "beta_slow"))
    if slow > fast:
        raise inside.invalid("beta_slow", slow, f"at most beta_fast, which is {fast}")
    if rope_type == "llama3":
        for name, fixed in _LLAMA3_FIXED.items():
            if given.get(name, fixed) != fixed:
                raise fields.refuse(f"llama3 rope with {name} {given[name]} (Megatron has {fixed})")
    return {"rope_type": rope_type, "rope_theta": theta, **given, **share}


def _yarn_of_heads(fields: Fields, family: Family, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return YaRN's fields with the defaults of those that may be left out."""
    is_optional = "default" in family.rope_types
    for name in _YARN_SPELT_OUT if is_optional else ("factor", *YARN_WITHOUT_FLAG):
        if name not in given:
            raise fields.refuse(f"yarn rope scaling without {name}")
    return {**YARN_WITHOUT_FLAG, **given}


def _partial_rotary_factor(
    fields: Fields, family: Family, given: dict[str, Any]
) -> dict[str, float]:
    """Remove the rotated share of a head from `given` and return it; return {} if it is 1."""
    outside = fields.get("partial_rotary_factor", family.partial_rotary_factor)
    factor = given.pop("partial_rotary_factor", outside)
    if factor is None:
        factor = fields.count("rotary_dim") / fields.count("head_dim")
    share, bounds = finite_number(factor), Bounds(above=0, most=1)
    if share is None or not bounds.hold(share):
        raise fields.invalid("partial_rotary_factor", factor, f"in {bounds.interval()}")
    if share == 1.0:
        return {}
    if family.partial_rotary_factor == 1.0:
        raise fields.refuse(f"partial_rotary_factor {share} with model_type '{family.model_type}'")
    return {"partial_rotary_factor": share}
