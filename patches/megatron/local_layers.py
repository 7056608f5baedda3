"""Layers that Megatron's local spec lacks without Transformer Engine.

Symptom: with `--transformer-impl local`, DeepSeek's attention cannot be built
(`DotProductAttention` takes no `k_channels`/`v_channels`, and `isinstance(x, TELinear)` fails on
None), the norm refuses sequence parallelism, and the MLA down-projections are split over TP where
Transformer Engine's are replicated. A query without a latent is refused, because the spec names a
norm for one ("q_layernorm").

Cause: upstream uses the local spec only for tests; MLA, and MoE with TP, which needs sequence
parallelism, are used only with Transformer Engine.

Why safe: every model built from the local spec, also by `--spec` and a fork's builder, gets these
layers instead of `WrappedTorchNorm` and a causal `DotProductAttention`; a subclass of the latter,
another mask and another norm stay upstream's. Three names in Megatron's modules that are None,
missing or useless without Transformer Engine are bound: `multi_latent_attention.TELinear`,
`moe_utils.te_general_gemm`, and the `TENorm` of `hybrid_block`, which its
stack uses regardless of its spec. Parameter names and shapes match the (unfused) Transformer
Engine spec, so that weights move in the same way on CPU and GPU.

Upstream: no issue; the local spec is documented as for testing.

Drop when: Transformer Engine installs without CUDA, or the local spec supports MLA.

Versions: megatron-core 0.18 to 0.20.

Shape legend: s positions (of this rank's share under sequence or context parallelism), b samples, t
tokens of a packed row (likewise), n heads of this rank, g key/value groups of this rank, d head
size, h hidden.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from mcore_rl.batching.attention_batches import batches_of
from mcore_rl.batching.rows import positions_on_cp_rank
from mcore_rl.common.platform import MOST_KEYS_IN_FLOAT32
from mcore_rl.patches.registry import Patch, require, require_parameters, require_source
from mcore_rl.patches.torch import narrow_products


class SDPACoreAttention(torch.nn.Module):
    """Core attention with `torch.nn.functional.scaled_dot_product_attention`.

    Takes query `[s, b, n, d]`, key `[s, b, g, d]`, value `[s, b, g, dv]` with dv != d allowed
    (MLA), and returns `[s, b, n * dv]`. Causal: padding must be on the right. With packed samples
    (`packed_seq_params` of format thd) it takes `[t, n, d]`, `[t, g, d]`, `[t, g, dv]` and returns
    `[t, n * dv]`. A sample attends only to itself and to a prompt that it shares with others
    (`mcore_rl.batching.rows.prefixes_of`).

    Packed samples are computed in batches of similar lengths, because one call costs more than the
    attention of a short sample.

    In layers with a window (--window-size, --window-attn-skip-freq) a query sees only the last
    positions. With --softmax-type learnable, `softmax_offset` `[n]`, split over TP, is the score of
    a key that every query of a head sees and whose value is 0 (the sinks of gpt-oss).

    With context parallelism the inputs are this rank's chunks of each sample (`rows`), while
    `packed_seq_params` describe full rows. It is then collective over CP: each rank gathers the
    keys and values of the full row, for any `--cp-comm-type`, and keeps them for backward.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.window = _window(config, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type != "vanilla":
            self._add_softmax_offset(config, pg_collection)
        self.cp_size = config.context_parallel_size
        self.cp_group = pg_collection.cp if self.cp_size > 1 else None
        self.softmax_scale = softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.dropout_p = float(dropout)
        self.widened = narrow_products.widened_dtypes()

    def _add_softmax_offset(self, config: Any, pg_collection: Any) -> None:
        from megatron.core import parallel_state, tensor_parallel

        if config.softmax_type != "learnable":
            raise ValueError(
                f"--softmax-type {config.softmax_type} is not supported without Transformer "
                "Engine; it must be vanilla or learnable"
            )
        group = getattr(pg_collection, "tp", None)
        self.tp_group = group or parallel_state.get_tensor_model_parallel_group()
        num_heads = config.num_attention_heads // self.tp_group.size()
        self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
        if config.perform_initialization:
            config.init_method(self.softmax_offset)
        # Each rank has the offsets of its heads; all count in the norm of the gradient.
        tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the offsets as upstream's core attention stores them."""
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        if self.softmax_offset is None:
            return {}
        stored: dict[str, Any] = DotProductAttention.sharded_state_dict(
            self, prefix, sharded_offsets, metadata
        )
        return stored

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Compute causal attention; `attention_mask` is ignored, the causal mask is implied."""
        if attention_bias is not None:
            raise RuntimeError("the CPU core attention takes no bias")
        if packed_seq_params is None:
            bounds = torch.tensor([0, query.shape[0] * self.cp_size], device=query.device)
            return self._attend_by_sample(query, key, value, bounds).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q
        if self.cp_group is None:
            return self._attend_in_batches(query, key, value, bounds).flatten(1)
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        return self._attend_by_sample(query, key, value, bounds).squeeze(1).flatten(1)

    def _attend_by_sample(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Return `[s, b, n, dv]`; samples begin at `bounds` of the full row."""
        if self.cp_group is not None:
            key, value = self._in_order_of_the_row(key, value, bounds)
        # Split instead of slicing: the gradient of every slice would be a full row.
        lengths = bounds.diff().tolist()
        queries = query.split([length // self.cp_size for length in lengths])
        samples = zip(queries, key.split(lengths), value.split(lengths), strict=True)
        context = [self._attend(*sample) for sample in samples]
        return torch.cat(context) if len(context) > 1 else context[0]

    def _attend_in_batches(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor
    ) -> torch.Tensor:
        """Return `[t, n, dv]`; samples, or their parts after a shared prompt, begin at `bounds`."""
        row, dtype = batches_of(bounds), query.dtype
        batches = row.batches
        if self._is_faster_in_float32(query, max(batch.keys.shape[1] for batch in batches)):
            # Once, before prompts are repeated.
            query, key, value = (x.float() for x in (query, key, value))
        if len(batches) == 1 and batches[0].is_whole_row:
            context = self._attend(*(x.unsqueeze(1) for x in (query, key, value)))
            return context.squeeze(1).to(dtype)
        # Selected for all batches at once: each selection has a gradient of the whole row.
        selected = zip(
            batches,
            query.index_select(0, row.queries).split(row.query_sizes),
            key.index_select(0, row.keys).split(row.key_sizes),
            value.index_select(0, row.keys).split(row.key_sizes),
            strict=True,
        )
        outputs = []
        for batch, *of_batch in selected:
            shapes = (batch.queries.shape, batch.keys.shape, batch.keys.shape)
            queries, keys, values = (
                x.unflatten(0, shape).transpose(1, 2)
                for x, shape in zip(of_batch, shapes, strict=True)
            )
            context = self._attended(queries, keys, values, batch.visible)
            outputs.append(context.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, row.outputs).to(dtype)

    def _is_faster_in_float32(self, query: torch.Tensor, most_keys: int) -> bool:
        is_narrow = query.device.type == "cpu" and query.itemsize == 2
        return is_narrow and (query.dtype in self.widened or most_keys <= MOST_KEYS_IN_FLOAT32)

    def _in_order_of_the_row(
        self, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys and values of all CP ranks; their gradients are summed over these ranks."""
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        order = [self._positions(bounds, len(key), rank) for rank in range(self.cp_size)]
        nth = torch.cat(order).argsort()
        gathered = (
            gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (key, value)
        )
        key, value = (x.index_select(0, nth) for x in gathered)
        return key, value

    def _positions(self, bounds: torch.Tensor, share: int, cp_rank: int) -> torch.Tensor:
        return positions_on_cp_rank(bounds, share, cp_size=self.cp_size, cp_rank=cp_rank)

    def _mask(self, num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
        """Return which keys of a sample this rank's queries see; None: all up to their own."""
        if self.cp_group is None:
            return None
        bounds = torch.tensor([0, num_keys], device=device)
        positions = self._positions(bounds, num_queries, self.cp_group.rank())
        return positions[:, None] >= torch.arange(num_keys, device=device)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = self._mask(len(query), len(key), query.device)
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = self._attended(query, key, value, mask)
        return context.permute(2, 0, 1, 3)

    def _attended(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return `[b, n, s, dv]` for `[b, n, s, d]`, `[b, g, s', d]`, `[b, g, s', dv]`.
        A mask of None means causal."""
        if self.window is not None:
            mask = _last_visible(_causal(query, key) if mask is None else mask, self.window)
        if self.softmax_offset is None:
            return self._by_sdpa(query, key, value, mask)
        mask = _causal(query, key) if mask is None else mask
        # Each head gets one more element: the offset in queries, 0 in keys, and 1 in an extra first
        # key. Its score is then the offset, and its gradient needs no stored probabilities.
        scale = query.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        offset = (self.softmax_offset.to(query.dtype) / scale).view(-1, 1, 1)
        query = torch.cat((query, offset.expand(*query.shape[:3], 1)), dim=-1)
        key = F.pad(key, (0, 1, 1, 0))
        key[:, :, 0, -1] = 1.0
        value = F.pad(value, (0, 1, 1, 0))  # as wide as keys, which kernels require
        mask = F.pad(mask, (1, 0), value=True)
        return self._by_sdpa(query, key, value, mask, scale)[..., :-1]

    def _by_sdpa(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float | None = None,
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout_p if self.training else 0.0,
            scale=self.softmax_scale if scale is None else scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )


def _window(config: Any, layer_number: int) -> int | None:
    """Return the number of positions that a query sees, with its own; None: no window."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, max(1, layer_number)
    ):
        return None
    before = config.window_size[0]
    return None if before < 0 else before + 1


def _causal(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    shape = (query.shape[2], key.shape[2])
    return torch.ones(shape, dtype=torch.bool, device=query.device).tril()


def _last_visible(mask: torch.Tensor, window: int) -> torch.Tensor:
    """Return a mask in which a query sees only the last `window` of its keys in `mask`."""
    place = torch.arange(mask.shape[-1], device=mask.device)
    return mask & (place >= mask.sum(-1, keepdim=True) - window)


class LocalRMSNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467) that supports sequence parallelism.

    `weight` `[hidden_size]` is replicated over TP. Under sequence parallelism each TP rank has its
    share of the positions; the weight's attribute makes Megatron sum the partial gradients. With
    --apply-layernorm-1p the factor is 1 + weight, added in float32. The result has the parameters'
    dtype, also of a residual stream in float32 (--fp32-residual-connection).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"--normalization {config.normalization} is not supported without Transformer "
                "Engine; it must be RMSNorm"
            )
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.is_zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of `x`."""
        if self.is_zero_centered:
            factor = 1.0 + self.weight.float()
            return F.rms_norm(x.float(), (x.shape[-1],), factor, self.eps).to(self.weight.dtype)
        normed = F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)
        return normed.to(self.weight.dtype)


class DuplicatedLinear(torch.nn.Module):
    """A linear layer replicated over TP, like Transformer Engine's `parallel_mode="duplicated"`.

    `weight` is `[out, in]`; it has no bias. Under sequence parallelism input and output are this
    rank's share of the positions.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        parallel_mode: str,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert parallel_mode == "duplicated" and not bias, (parallel_mode, bias)
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        if config.perform_initialization:
            init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Map `[..., in]` to `[..., out]`; the second value is Megatron's bias, always None."""
        return F.linear(x, self.weight), None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return one replicated entry, for Megatron's distributed checkpoints."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {}, sharded_offsets
        )
        return tensors


def needed() -> bool:
    """Return whether Transformer Engine is missing."""
    from megatron.core.transformer import multi_latent_attention

    return not multi_latent_attention.HAVE_TE


def apply() -> None:
    """Replace Megatron's local layers by these, and bind the names that it leaves empty."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    require_source(
        multi_latent_attention.MLASelfAttention.__init__,
        "if submodules.linear_kv_down_proj in [TELinear]:",
    )
    require_source(moe_utils.RouterGatingLinearFunction.forward, "if te_general_gemm is not None")
    stack: Any = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    require(hasattr(stack, "TENorm"), stack.__name__, "has no TENorm")
    multi_latent_attention.TELinear = DuplicatedLinear
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    stack.TENorm = LocalRMSNorm
    _replace_norm()
    _replace_core_attention()
    _replicate_down_projections()
    # Up to 0.18 this module does not exist, and a missing query latent is not normed.
    if importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config") is not None:
        _allow_direct_query()


def _replace_norm() -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    make = WrappedTorchNorm.__new__
    require_parameters(
        make, "cls config hidden_size eps persist_layer_norm zero_centered_gamma normalization"
    )

    def make_norm(
        cls: Any, config: Any, hidden_size: Any, eps: Any = 1e-5, *unused: Any, **by_name: Any
    ) -> Any:
        if config.normalization == "RMSNorm":
            return LocalRMSNorm(config, hidden_size, eps)
        return make(cls, config, hidden_size, eps, *unused, **by_name)

    WrappedTorchNorm.__new__ = make_norm


def _replace_core_attention() -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    require_parameters(
        DotProductAttention.__init__,
        "self config layer_number attn_mask_type attention_type attention_dropout softmax_scale "
        "cp_comm_type pg_collection",
    )

    def make_attention(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # The class is not `cls`, so that its __init__ is not called. A fork's own subclass does not
        # change.
        if cls is DotProductAttention and kwargs.get("attn_mask_type") is AttnMaskType.causal:
            return SDPACoreAttention(*args, **kwargs)
        return torch.nn.Module.__new__(cls)

    DotProductAttention.__new__ = make_attention


def _replicate_down_projections() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    make = gpt_layer_specs.get_gpt_layer_local_submodules

    @functools.wraps(make)
    def make_submodules(*args: Any, **kwargs: Any) -> Any:
        layer = make(*args, **kwargs)
        attention = layer.self_attention.submodules
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(attention, name):
                setattr(attention, name, DuplicatedLinear)
        return layer

    gpt_layer_specs.get_gpt_layer_local_submodules = make_submodules


def _allow_direct_query() -> None:
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    initialize = QKNormConfigResolver.__init__
    require_parameters(initialize, "self config submodules")

    def initialize_without_query_latent(self: Any, config: Any, submodules: Any) -> None:
        initialize(self, config, submodules)
        # The local spec norms a query latent, which such a model lacks.
        if config.q_lora_rank is None and submodules.q_layernorm is self.qk_norm_impl:
            self.submodules = dataclasses.replace(submodules, q_layernorm=IdentityOp)

    QKNormConfigResolver.__init__ = initialize_without_query_latent


PATCH = Patch("megatron.local_layers", "MLA can be built without Transformer Engine", apply, needed)
