"""Architectures that vLLM knows and mcore_rl does not support, and what each of them lacks where.

tests/unit/test_unsupported.py compares the tables with the registry of the installed vLLM: each of
its architectures belongs to a family or has a reason here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MULTIMODAL = "it is multimodal, and its config.json has no text_config of a supported family"
_DRAFTER = "it is a drafter, which is not trained"
_POOLING = "it is a pooling model, which generates nothing"
_ENCODER_DECODER = "it has an encoder, and mcore_rl trains decoders"
# Reason -> architectures.
NAMES: Mapping[str, str] = {
    "Megatron has no norms after attention and feed-forward layers": """
        AfmoeForCausalLM AXK1ForCausalLM Exaone4ForCausalLM FlexOlmoForCausalLM Gemma2ForCausalLM
        Gemma3ForCausalLM Gemma3nForCausalLM Gemma4ForCausalLM Glm4ForCausalLM
        MuseGlimmerForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM PanguProMoEV2ForCausalLM
        PanguUltraMoEForCausalLM Plamo3ForCausalLM Rnj1ForCausalLM
    """,
    "Megatron has no factors on its layers' outputs (residual_multiplier, scale_depth)": """
        GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeSharedForCausalLM
        GraniteMoeSWAForCausalLM GraniteSWAForCausalLM HyperCLOVAXForCausalLM MiniCPMForCausalLM
        MiniCPM3ForCausalLM
    """,
    "Megatron scales embeddings only by the rules of its own muP": """
        GemmaForCausalLM TeleFLMForCausalLM VaultGemmaForCausalLM
    """,
    "Megatron does not compute attention and feed-forward of a layer in parallel": """
        CohereForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM FalconForCausalLM
        GPTJForCausalLM GPTNeoXForCausalLM PhiForCausalLM
    """,
    "Megatron has no ALiBi positions": "BloomForCausalLM Step1ForCausalLM",
    "Megatron has no xIELU activation": "ApertusForCausalLM",
    "Megatron has a router bias for sigmoid scores, not for softmax": "Ernie4_5_MoeForCausalLM",
    "Megatron norms queries and keys before their rotation, not after it": """
        HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
    """,
    "Megatron does not scale queries by their position (llama_4_scaling)": """
        Ministral3ForCausalLM MistralLarge3ForCausalLM
    """,
    "Megatron has neither attention in chunks nor a router that scales inputs": "Llama4ForCausalLM",
    "Megatron has no layers with two attentions and experts that copy their input": """
        LongcatFlashForCausalLM LongcatFlashNgramForCausalLM
    """,
    "Megatron does not run its layers in a loop": "HrmTextForCausalLM IQuestLoopCoderForCausalLM",
    "Megatron rotates queries and keys of all layers alike": """
        LagunaForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM
        MiMoV2ForCausalLM Step3p5ForCausalLM
    """,
    "Megatron has no norm inside the projection of queries": "Step3TextForCausalLM",
    "Megatron has no short convolutions": """
        InklingForCausalLM InklingForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM
    """,
    "Megatron has Mamba-2 layers, and neither Mamba-1 nor a layer of both Mamba and attention": """
        FalconH1ForCausalLM FalconMambaForCausalLM JambaForCausalLM MambaForCausalLM
        Zamba2ForCausalLM
    """,
    "mcore_rl maps Mamba-2 layers of Nemotron-H only, with layers of one size": """
        GraniteMoeHybridForCausalLM Mamba2ForCausalLM NemotronHPuzzleForCausalLM
    """,
    "gated delta net: Megatron has it only with Transformer Engine and flash-linear-attention": """
        OlmoHybridForCausalLM
    """,
    "Megatron has no Kimi delta attention and no lightning attention": """
        BailingMoeV2_5ForCausalLM BailingMoeV3ForCausalLM Glm5NextForCausalLM KimiLinearForCausalLM
    """,
    "Megatron has no sparse attention but DSA, and no hyper-connections": """
        DeepseekV4ForCausalLM HYV4ForCausalLM MiniMaxM3SparseForCausalLM Qwen4ExpForCausalLM
    """,
    "mcore_rl maps neither LayerNorm nor feed-forward layers without a gate": """
        ArceeForCausalLM DbrxForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM Jais2ForCausalLM
        NemotronForCausalLM OlmoForCausalLM OPTForCausalLM OrionForCausalLM PhiMoEForCausalLM
        StableLmForCausalLM Starcoder2ForCausalLM
    """,
    "mcore_rl does not map rotations of neighbouring elements outside latent attention": """
        ChatGLMModel ChatGLMForConditionalGeneration Ernie4_5ForCausalLM GlmForCausalLM
    """,
    "mcore_rl maps windows only in every other layer, and no layers without rotation": """
        CwmForCausalLM ExaoneMoeForCausalLM ExaoneMoEForCausalLM SmolLM3ForCausalLM
    """,
    "mcore_rl does not map a checkpoint's stacked projections (qkv_proj, gate_up_proj)": """
        Phi3ForCausalLM
    """,
    "mcore_rl does not map layers of different sizes": "DeciLMForCausalLM",
    "transformers, with which every family is compared, has no class of it": """
        BailingMoeForCausalLM BailingMoeV2ForCausalLM DeepseekForCausalLM ExaoneForCausalLM
        IQuestCoderForCausalLM InternLM2ForCausalLM InternLM3ForCausalLM K2HorizonForCausalLM
        LLaMAForCausalLM MiMoForCausalLM NanbeigeForCausalLM PanguEmbeddedForCausalLM
        Param2MoEForCausalLM SarvamMLAForCausalLM SarvamMoEForCausalLM SolarForCausalLM
        TeleChat2ForCausalLM TeleChat3ForCausalLM
    """,
    "vLLM has removed its class": """
        AquilaForCausalLM AquilaModel ArcticForCausalLM BaiChuanForCausalLM BaichuanForCausalLM
        BambaForCausalLM Cheers Fairseq2LlamaForCausalLM FuyuForCausalLM GritLM
        Grok1ForCausalLM Grok1ModelForCausalLM HCXVisionForCausalLM InternLM2VEForCausalLM
        InternLMForCausalLM JAISLMHeadModel MPTForCausalLM MiniMaxForCausalLM MiniMaxM1ForCausalLM
        MiniMaxText01ForCausalLM MotifForCausalLM MptForCausalLM OuroForCausalLM
        PersimmonForCausalLM Phi3SmallForCausalLM Phi4FlashForCausalLM Phi4MultimodalForCausalLM
        Plamo2ForCausalLM PrithviGeoSpatialMAE QWenLMHeadModel RWForCausalLM
        StableLMEpochForCausalLM TeleChatForCausalLM XverseForCausalLM
    """,
    _ENCODER_DECODER: """
        BartForConditionalGeneration BartModel CohereAsrForConditionalGeneration
        Florence2ForConditionalGeneration MBartForConditionalGeneration Nemotron3_5AsrForRNNT
        NemotronParseForConditionalGeneration WhisperForConditionalGeneration
    """,
    _MULTIMODAL: """
        DeepseekV41ForCausalLM DeepseekVLV2ForCausalLM DiffusionGemmaForBlockDiffusion
        Dots3NoteForCausalLM GLM4VForCausalLM HCXVisionV2ForCausalLM HfMoondream
        Llama_Nemotron_Nano_VL MiDashengLMModel MiMoV2OmniForCausalLM MiniCPMO MiniCPMV
        MolmoForCausalLM Moondream3ForCausalLM MoonshotKimiaForCausalLM MossAudioModel NVLM_D
        OpenVLAForActionPrediction Ovis Ovis2_5 Ovis2_6ForCausalLM Ovis2_6_MoeForCausalLM
        Phi3VForCausalLM Phi4ForCausalLMV Phi4MMForCausalLM Qwen2_5OmniModel
        Qwen3ASRRealtimeGeneration UltravoxModel VoxtralRealtimeGeneration
    """,
    _POOLING: "HF_ColBERT ColQwen3 ColQwen3_5 Terratorch",
}
REASONS = {name: reason for reason, names in NAMES.items() for name in names.split()}
# Of names that are not above; the first pattern that matches the whole name counts.
PATTERNS = (
    (r"Transformers\w+", "it is vLLM's wrapper: name the class of transformers"),
    (r"\w+ForConditionalGeneration|\w+OCR2?ForCausalLM|\w+VL?ChatModel", _MULTIMODAL),
    (r"NemotronH_\w+", _MULTIMODAL),
    (r"\w*(MTP|Eagle|eagle|DFlash|DSpark|Draft|Medusa|Assistant|HiddenStates)\w*", _DRAFTER),
    (r"\w+(Model|ForMaskedLM|Classification|ForRanking|ForRetrieval|ForJointSchema)", _POOLING),
)


def why_unsupported(values: Mapping[str, Any]) -> str | None:
    """Return why vLLM's architecture of a parsed config.json is not supported, or None if vLLM does
    not know it."""
    named = values.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        reason = reason_of(named[0])
        return None if reason is None else f"{named[0]}: {reason}"
    wanted = _plain(str(values.get("model_type")).removesuffix("_text"))
    names = (name for name in REASONS if _plain(name.removesuffix("ForCausalLM")) == wanted)
    return next((f"{name}: {REASONS[name]}" for name in names), None)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def reason_of(architecture: str) -> str | None:
    """Return what an architecture lacks, and in which host; None if it is in no table."""
    if architecture in REASONS:
        return REASONS[architecture]
    reasons = (reason for pattern, reason in PATTERNS if re.fullmatch(pattern, architecture))
    return next(reasons, None)
