"""The cached YaRN rotation of padded rows under context parallelism.

Symptom: with `--context-parallel-size`, latent attention, `--rope-type yarn` and padded rows the
fused rotation, which is the default with Transformer Engine, turns most positions by the angle of
another one, and nothing says so. Where 2 x CP does not divide the checkpoint's
original_max_position_embeddings, such a model cannot be built, on any machine ("shape is invalid").

Cause: sines and cosines are cached for the longest row so far, at first for
original_max_position_embeddings, and of that this rank's two chunks are kept. A shorter row then
gets their beginning, which is not its own two chunks. And that first row must come out even.

Why safe: where the cache is cut, it is filled anew for every other length of a row; the numbers are
those that it has for a row of just this length. The first row is rounded up to whole chunks, and is
never used unless a row has its length. Without context parallelism, and for packed rows, whose
cache is whole, upstream's functions get what they got before.

Upstream: no issue known; trainings whose rows all have one length above
original_max_position_embeddings do not meet it.

Drop when: `get_cached_cos_sin` cuts what it returns, and not what it keeps.

Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import Patch, parameters_of, require_parameters


def needed() -> bool:
    """True wherever the cache exists; without the fused rotation it is filled all the same."""
    return True


def apply() -> None:
    """Keep sines and cosines of rows of one length where they are cut into chunks."""
    import torch
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    from mcore_rl.batching.rows import chunks_of_sample, round_up

    fill, look_up = YarnRotaryEmbedding._set_cos_sin_cache, YarnRotaryEmbedding.get_cached_cos_sin
    parameters: tuple[str, ...] = ("self", "seq_len", "offset", "dtype", "packed_seq")
    if "cp_group" in parameters_of(fill):  # from 0.20 on
        parameters = (*parameters, "cp_group", "mscale")
    require_parameters(fill, *parameters)
    require_parameters(look_up, *parameters)

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
    name="megatron.yarn_context_parallel",
    package="megatron-core",
    reason="padded rows are rotated by their own positions under context parallelism",
    needed=needed,
    apply=apply,
)
