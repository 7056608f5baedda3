"""The class of Megatron's that a model is built as: GPTModel or HybridModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.common.megatron_version import PACKAGE, MegatronSource, check_megatron

# Values of --rl-model-class. Of a model class: a line that shows that Megatron has it, its file,
# and what it is called in messages.
AUTO, GPT, HYBRID = "auto", "gpt", "hybrid"
_GPT_FILE = "megatron/core/models/gpt/gpt_model.py"
_CLASSES = {
    GPT: ("\nclass GPTModel(", _GPT_FILE, "GPTModel"),
    HYBRID: (
        '\n    MLA = "+"',
        "megatron/core/models/hybrid/hybrid_layer_allocation.py",
        "HybridModel with latent attention",  # 0.18 has one without
    ),
}
_DEPRECATION = "GPTModel IS DEPRECATED"  # what Megatron logs when it builds one

# What HybridModel does not do, by Megatron's arguments; where a value is named, with it alone.
_WITHOUT_HYBRID: tuple[tuple[str, str | None, str], ...] = (
    ("spec", None, "which describes the layers of a GPTModel"),
    ("cpu_offloading_num_layers", None, "which GPTModel's block does"),
    ("first_last_layers_bf16", None, "whose layers HybridModel counts in two ways"),
    ("te_precision_config_file", None, "whose layers are numbered as in a GPTModel"),
    ("ckpt_format", "torch", "which stores the names of a GPTModel's modules"),
)


@dataclass(frozen=True, slots=True)
class ModelClass:
    """A model class and why it is used: ModelClass("gpt", "--spec is given, which ...")."""

    name: str
    reason: str

    def describe(self) -> str:
        """Return for example "GPTModel, as --rl-model-class gpt is given"."""
        return f"{'HybridModel' if self.name == HYBRID else 'GPTModel'}, as {self.reason}"


def choose_model_class(
    requested: str, values: Mapping[str, Any], *, has_mamba: bool = False
) -> ModelClass:
    """Return the class for a value of --rl-model-class and Megatron's flags, by destination.

    `AUTO` is HybridModel where the installed Megatron has it and has deprecated or removed
    GPTModel, unless other flags need a GPTModel. A model that has Mamba-2 layers (`has_mamba`) is
    always one. Raises UsageError if Megatron lacks the class, or if other flags do not work with
    it.
    """
    source = check_megatron()
    available = [name for name, (line, file, _) in _CLASSES.items() if _has(source, file, line)]
    chosen = _recommended(source, available)
    if has_mamba and requested == GPT:
        raise UsageError(
            "has no Mamba-2 layers, which the model has",
            flag=f"--rl-model-class {requested}",
            remedy=f"give {AUTO} or {HYBRID}",
        )
    if has_mamba:
        requested, chosen = HYBRID, ModelClass(HYBRID, "GPTModel has no Mamba-2 layers")
    elif requested != AUTO:
        chosen = ModelClass(requested, f"--rl-model-class {requested} is given")
    if chosen.name not in available:
        raise UsageError(
            f"asks for what {PACKAGE} {source.version} lacks, {_CLASSES[chosen.name][2]}",
            flag=f"--rl-model-class {requested}",
            remedy="install megatron-core 0.19" if has_mamba else f"give {' or '.join(available)}",
        )
    obstacle = _obstacle(values)
    if chosen.name == GPT or obstacle is None:
        return chosen
    flag, reason = obstacle
    if requested == AUTO and GPT in available:
        return ModelClass(GPT, f"{flag} is given, {reason}")
    raise UsageError(
        f"is not possible with {flag}, {reason}",
        flag=f"--rl-model-class {requested}",
        remedy="drop one of the two" if GPT in available and not has_mamba else f"drop {flag}",
    )


def _recommended(source: MegatronSource, available: list[str]) -> ModelClass:
    release = f"{PACKAGE} {source.version}"
    if GPT not in available:
        return ModelClass(HYBRID, f"{release} has no GPTModel")
    if HYBRID in available and _has(source, _GPT_FILE, _DEPRECATION):
        return ModelClass(HYBRID, f"{release} has deprecated GPTModel")
    lacks = "not deprecated it" if HYBRID in available else f"no {_CLASSES[HYBRID][2]}"
    return ModelClass(GPT, f"{release} has {lacks}")


def _obstacle(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first given flag that HybridModel does not support, and why."""
    for dest, only, reason in _WITHOUT_HYBRID:
        value = values.get(dest)
        if value and only in (None, value):
            given = value if isinstance(value, list) else [] if value is True else [value]
            return " ".join(map(str, [as_flag(dest), *given])), reason
    return None


def _has(source: MegatronSource, file: str, text: str) -> bool:
    place = source.folder / file
    return place.is_file() and text in place.read_text(encoding="utf-8")
