"""The cached YaRN rotation is right for padded rows under context parallelism.

Symptom: with `--context-parallel-size`, latent attention, `--rope-type yarn` and padded rows the
fused rotation, the default with Transformer Engine, silently rotates most positions by the angle of
another position. If 2 x CP does not divide the checkpoint's original_max_position_embeddings, such
a model cannot be built, on any machine ("shape is invalid").

Cause: sines and cosines are cached for the longest row so far, initially for
original_max_position_embeddings, and only this rank's two chunks of that row are kept. A shorter
row then gets the beginning of these, not its own two chunks. The initial row must divide evenly.

Why safe: if the cache is cut into chunks, it is refilled whenever a row's length changes, with the
values for a row of exactly this length. The initial row is rounded up to full chunks, and is only
used for rows of its length. Without context parallelism, and for packed rows, whose cache is not
cut, upstream's functions get the same arguments as before.

Upstream: no issue known; it does not occur in training with rows of one length above
original_max_position_embeddings.

Drop when: `get_cached_cos_sin` cuts what it returns, and not what it keeps.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.patches.registry import Patch, parameters_of, require_parameters


def apply() -> None:
    """Cache sines and cosines for one row length if they are cut into chunks."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    from mcore_rl.batching.rows import chunks_of_sample, round_up

    fill, look_up = YarnRotaryEmbedding._set_cos_sin_cache, YarnRotaryEmbedding.get_cached_cos_sin
    parameters = "self seq_len offset dtype packed_seq"
    if "cp_group" in parameters_of(fill):  # from 0.20 on
        parameters += " cp_group mscale"
    require_parameters(fill, parameters)
    require_parameters(look_up, parameters)

    def chunks(embedding: Any, packed_seq: bool, cp_group: Any = None, mscale: Any = None) -> int:
        group = embedding.cp_group if cp_group is None else cp_group
        return 1 if packed_seq or group is None else chunks_of_sample(group.size())

    def fill_with_whole_chunks(
        self: Any,
        seq_len: Any,
        offset: Any,
        dtype: Any,
        packed_seq: Any = False,
        *more: Any,
        **named: Any,
    ) -> None:
        length = round_up(seq_len, chunks(self, packed_seq, *more, **named))
        fill(self, length, offset, dtype, packed_seq, *more, **named)

    default = torch.get_default_dtype()

    def look_up_of_this_length(
        self: Any,
        seq_len: Any,
        offset: Any = 0,
        dtype: Any = default,
        packed_seq: Any = False,
        *more: Any,
        **named: Any,
    ) -> Any:
        is_cut = chunks(self, packed_seq, *more, **named) > 1
        if is_cut and seq_len != getattr(self, "max_seq_len_cached", None):
            fill_with_whole_chunks(self, seq_len, offset, dtype, packed_seq, *more, **named)
        return look_up(self, seq_len, offset, dtype, packed_seq, *more, **named)

    YarnRotaryEmbedding._set_cos_sin_cache = fill_with_whole_chunks
    YarnRotaryEmbedding.get_cached_cos_sin = look_up_of_this_length


PATCH = Patch(
    "megatron.yarn_context_parallel",
    "padded rows are rotated by their own positions under context parallelism",
    apply,
)
