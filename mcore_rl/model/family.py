"""The table that describes a model family: its fields, with the value that most families have.

`families` has the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Router:
    """Fields of config.json that describe the routed experts, and what a family leaves implicit."""

    num_experts: str  # name of the field
    also_called: str | None = None  # name under which transformers 5 saves the field
    expert_size: str = "moe_intermediate_size"  # name of the field
    score_function: str = "softmax"  # or "sigmoid", with a bias per expert (arXiv 2408.15664)
    always_normalizes: bool = False  # otherwise norm_topk_prob decides whether weights sum to 1
    # DeepSeek's values of topk_method, the usual one first. If there are any, config.json also
    # describes groups, a scaling factor and shared experts; otherwise those fields are not read.
    methods: tuple[str, ...] = ()
    # Name of the field with the size of a shared expert that has its own gate.
    gated_shared_size: str | None = None
    # Name of the field with the size of a shared expert, where it differs from a routed one's.
    shared_size: str | None = None
    # Name of the field that tells transformers for each layer whether it is dense. vLLM uses
    # first_k_dense_replace.
    layer_types: str | None = None
    # Names of fields that are read if there are `methods`.
    shared_experts: str = "n_shared_experts"
    scaling_factor: str = "routed_scaling_factor"


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of tensors in which families differ; those of a layer follow `layers` and "N."."""

    layers: str = "model.layers."
    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    input_norm: str = "input_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    attention: str = "self_attn."
    dense: str = "mlp."
    block: str = "mlp."  # of experts
    gate: str = "gate_proj.weight"
    up: str = "up_proj.weight"
    down: str = "down_proj.weight"
    shared: str = "shared_experts."
    bias: str = "gate.e_score_correction_bias"
    scorer: str = "gate."

    @property
    def router(self) -> str:
        """Weight of the layer that scores the experts."""
        return f"{self.block}{self.scorer}weight"

    @property
    def scorer_bias(self) -> str:
        """Bias of the layer that scores the experts, where linear layers have biases."""
        return f"{self.block}{self.scorer}bias"

    @property
    def router_bias(self) -> str:
        """Bias added to the scores only for choosing experts."""
        return f"{self.block}{self.bias}"

    @property
    def expert(self) -> str:
        """Prefix of one routed expert's tensors; `{expert}` stands for its number."""
        return f"{self.block}experts.{{expert}}."

    @property
    def shared_experts(self) -> str:
        """Prefix of the shared experts' tensors."""
        return f"{self.block}{self.shared}"

    @property
    def shared_gate(self) -> str:
        """Weight of the gate on the shared expert's output."""
        return f"{self.block}shared_expert_gate.weight"


def bias_of(weight: str) -> str:
    """Return the name of the bias that belongs to a linear layer's weight."""
    return weight.removesuffix("weight") + "bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One `model_type` of config.json, or of the `text_config` in a multimodal one."""

    model_type: str
    class_name: str  # in transformers and in vLLM; the `architectures` of config.json
    models: str = ""  # published ones, for docs/using/families.md
    # Fields that must be present, null or not. For a missing field transformers fills in the value
    # of a published model and vLLM sometimes another; mcore_rl refuses it. transformers writes all
    # these fields; fields that it does not write have one value per family (`Router.methods`).
    spelt_out: tuple[str, ...] = ()
    also_refused: tuple[str, ...] = ()  # fields that no supported checkpoint sets
    # Fields for which a host uses one fixed value, whatever config.json contains.
    fixed: Mapping[str, Any] = field(default_factory=dict)
    latent_attention: bool = False
    # Indexers choose the keys that a query sees (DSA); `fixed` tells whether their rope is
    # interleaved.
    sparse_attention: bool = False
    # Norms of the heads, or of the latents with latent attention. This and the biases are True,
    # False, or the name of the config.json field that decides.
    qk_norm: bool | str = False
    qkv_bias: bool | str = False
    norms_whole_projection: bool = False  # with qk_norm: over all heads together
    # In every linear layer: attention, router, experts.
    linear_biases: bool = False
    attention_sinks: bool = False  # a logit per head that takes a share of its attention
    # Every other layer, from the first, sees only the last sliding_window positions.
    alternates_windows: bool = False
    # gpt-oss's SwiGLU: both halves clamped, a gain in the sigmoid, 1 added to the other half.
    clamps_glu: bool = False
    # Layers of the type "linear_attention" have a gated delta net, the others attention. The value
    # is how the rows of its input projections are ordered in a checkpoint (see `delta_net`).
    delta_net: Literal["by_key_head", "by_part"] | None = None
    # The output of attention is multiplied by the sigmoid of a gate; q_proj has both, head by head.
    output_gate: bool = False
    # A layer has one block: a Mamba-2 layer, attention or feed-forward (see `mamba`).
    one_block_a_layer: bool = False
    # Feed-forward layers and experts square the ReLU of up_proj, without a gate.
    squared_relu: bool = False
    norm_epsilon: str = "rms_norm_eps"  # name of the field
    # Norms multiply by 1 + weight, except for the one in the delta net.
    zero_centered_norms: bool = False
    dense_size: str = "intermediate_size"  # name of the field
    # Folders may hold all experts of a layer in one tensor; `names` then name its parts. Rows of
    # gate and up-projection alternate, or those of the gate come first (see `stacked_experts`).
    stacked_experts: Literal["alternating", "in_halves"] | None = None
    router: Router | None = None
    names: TensorNames = field(default_factory=TensorNames)
    rope_types: tuple[str, ...] = ("default",)  # empty: heads are not rotated
    default_rope_theta: float | None = 10000.0  # None: config.json must contain it
    # vLLM's name of a field -> the name under which transformers saves it.
    vllm_names: Mapping[str, str] = field(default_factory=dict)
    # Share of each head; the default if config.json has no value. With 1 no other value is allowed.
    # None: config.json must contain it, or rotary_dim, the number of elements.
    partial_rotary_factor: float | None = 1.0
    # Fields of rope_parameters that change nothing where all positions are of text.
    rope_of_images: tuple[str, ...] = ()
    has_drafter: bool = False  # vLLM can draft with the checkpoint's MTP layers

    @property
    def has_mxfp4(self) -> bool:
        """Whether experts may be stored in MXFP4, and not in FP8 blocks: gpt-oss."""
        return self.stacked_experts == "alternating"
