"""Every architecture that the installed vLLM knows is supported or refused with a reason."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest
from vllm.model_executor.models import registry

from mcore_rl.megatron import adapter  # noqa: F401  (prepares Megatron)
from mcore_rl.model import unsupported
from mcore_rl.model.families import FAMILIES
from mcore_rl.model.unsupported import reason_of

import megatron.core  # isort: skip
from megatron.core.transformer import TransformerConfig  # isort: skip

KNOWN = {
    *registry.ModelRegistry.get_supported_archs(),
    *registry._PREVIOUSLY_SUPPORTED_MODELS,
    *registry._OOT_SUPPORTED_MODELS,
}
SUPPORTED = {family.class_name for family in FAMILIES.values()}
# vLLM's table -> what the reasons of its architectures say. Text models have reasons of their own.
OF_TABLE = {
    "_REWARD_MODELS": "pooling model",
    "_TOKEN_CLASSIFICATION_MODELS": "pooling model",
    "_SEQUENCE_CLASSIFICATION_MODELS": "pooling model",
    "_LATE_INTERACTION_MODELS": "pooling model",
    "_EMBEDDING_MODELS": "pooling model",
    "_MULTIMODAL_MODELS": "multimodal|has an encoder",
    "_SPECULATIVE_DECODING_MODELS": "drafter",
    "_PREVIOUSLY_SUPPORTED_MODELS": "removed|multimodal|pooling model",
    "_TRANSFORMERS_BACKEND_MODELS": "wrapper",
}
OTHERS = "pooling model|multimodal|has an encoder|drafter|wrapper|removed"


def test_every_architecture_of_vllm_is_supported_or_has_a_reason() -> None:
    without = {name for name in KNOWN - SUPPORTED if reason_of(name) is None}
    assert without == set()
    assert {name for name in SUPPORTED if name in unsupported.REASONS} == set()


@pytest.mark.parametrize("table", OF_TABLE)
def test_reason_is_of_the_kind_of_vllms_table(table: str) -> None:
    also = {*registry._TEXT_GENERATION_MODELS, *registry._MULTIMODAL_MODELS}
    names = set(getattr(registry, table))
    if table != "_MULTIMODAL_MODELS":
        names -= also  # vLLM can pool with a model that generates
    assert names
    for name in names - SUPPORTED:
        assert re.search(OF_TABLE[table], reason_of(name) or ""), name


def test_models_of_text_have_a_reason_of_their_own() -> None:
    """None of those of another kind of model, which patterns give by mistake."""
    texts = registry._TEXT_GENERATION_MODELS.keys() | {
        name
        for name, (_, kind) in registry._TRANSFORMERS_SUPPORTED_MODELS.items()
        if "MultiModal" not in kind
    }
    for name in texts - SUPPORTED - {"HCXVisionV2ForCausalLM"}:  # a vision model among them
        assert not re.search(OTHERS, reason_of(name) or ""), name


def test_tables_have_no_name_that_vllm_does_not_know() -> None:
    counts = Counter(name for names in unsupported.NAMES.values() for name in names.split())
    assert [name for name, count in counts.items() if count > 1] == []
    assert counts.keys() - KNOWN == set()
    for pattern, reason in unsupported.PATTERNS:
        assert any(re.fullmatch(pattern, name) for name in KNOWN), reason


LACKING = (
    "post_(self_)?(attn|attention|mlp|feedforward)_.*norm xielu alibi residual_mul llama_4 "
    "(^|_)kda lightning_?att short_?conv hyper_connection"
).split()


@pytest.mark.parametrize("lacking", LACKING)
def test_megatron_lacks_what_reasons_say_it_lacks(lacking: str) -> None:
    """In the names of its modules and settings."""
    found = [name for name in _names_in_megatron() if re.search(lacking, name.lower())]
    assert found == []


@functools.cache
def _names_in_megatron() -> frozenset[str]:
    core = Path(megatron.core.__file__).parent
    files = [core / "activations.py", *(core / "transformer").rglob("*.py")]
    files += [*(core / "ssm").rglob("*.py"), *(core / "models").rglob("*.py")]
    return frozenset().union(*(re.findall(r"\w+", file.read_text()) for file in files))


def test_megatron_refuses_a_router_bias_with_softmax() -> None:
    with pytest.raises(ValueError, match="only supports 'sigmoid'"):
        TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=1,
            num_moe_experts=2,
            moe_router_enable_expert_bias=True,
            moe_router_score_function="softmax",
        )


def test_reason_without_a_class_in_transformers_is_true() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    lacking = "transformers, with which every family is compared, has no class of it"
    names = unsupported.NAMES[lacking].split()
    assert names and not {*names} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
