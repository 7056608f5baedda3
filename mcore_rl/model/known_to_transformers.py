"""Tell transformers of families whose config.json it does not know.

Kimi-K2 publishes code beside its weights instead of being a part of transformers; its model_type is
DeepSeek-V3's under another name. Without this even its tokenizer cannot be loaded, since
transformers wants to understand config.json first. vLLM does the same for itself.
"""

from __future__ import annotations

from mcore_rl.model.families import FAMILIES


def register_families() -> None:
    """Register the configuration of each family that transformers lacks. Idempotent, cheap."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for family in FAMILIES.values():
        if family.model_type in CONFIG_MAPPING:
            continue
        config_class = model_class(family.model_type).config_class
        known = type(config_class.__name__, (config_class,), {"model_type": family.model_type})
        AutoConfig.register(family.model_type, known)


def model_class(model_type: str) -> type:
    """transformers' class of a family."""
    import transformers

    return getattr(transformers, FAMILIES[model_type].class_name)
