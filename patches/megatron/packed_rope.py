"""Rotary embeddings of packed samples in one go.

Symptom: the backward pass of a packed row takes longer the more samples are in it: 128 short ones
in a row of 2,300 tokens take a third longer than in five rows.

Cause: the unfused rotation, which latent attention always uses, goes sample by sample and copies
each result into its place of one tensor. The gradient of every such copy is a clone of the whole
row, so that the cost grows with tokens x samples; and reading the bounds waits for the device.

Why safe: each token is rotated by the frequencies of its position in its sample, the same numbers
as before, with context parallelism, too; only the loop is gone. Where the frequencies are those of
the whole row, upstream's function is called. What is left of samples that share a prompt
(`mcore_rl.batching.rows`), which upstream knows nothing of, is rotated as what follows that prompt.

Upstream: no issue known.

Drop when: `_apply_rotary_pos_emb_thd` rotates all samples at once.

Versions: megatron-core 0.19.2.
"""

from __future__ import annotations

from mcore_rl.patches.registry import Patch, require_parameters


def needed() -> bool:
    """True wherever the unfused rotation exists."""
    return True


def apply() -> None:
    """Rotate by gathered frequencies."""
    from megatron.core.models.common.embeddings import rope_utils

    from mcore_rl.batching.context_chunks import samples_on_cp_rank
    from mcore_rl.batching.prefixes import prefix_lengths, prefixes_of

    one_by_one = rope_utils._apply_rotary_pos_emb_thd
    require_parameters(
        one_by_one,
        *("t", "cu_seqlens", "freqs", "rotary_interleaved", "mla_rotary_interleaved", "mscale"),
        *("cp_group", "multi_latent_attention"),
    )
    rotate = rope_utils._apply_rotary_pos_emb_bshd
    require_parameters(
        rotate,
        *("t", "freqs", "rotary_interleaved", "mla_rotary_interleaved", "mscale"),
        "multi_latent_attention",
    )

    def all_at_once(t, cu_seqlens, freqs, *args, cp_group=None, **kwargs):
        num_tokens = t.shape[0]
        cp_size = 1 if cp_group is None else cp_group.size()
        if cp_group is None or freqs.shape[0] == num_tokens * cp_size:
            return one_by_one(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
        _, positions = samples_on_cp_rank(
            cu_seqlens, num_tokens, cp_size=cp_size, cp_rank=cp_group.rank()
        )
        prefix_of = prefixes_of(cu_seqlens)
        if prefix_of is not None:
            before = prefix_lengths(cu_seqlens, prefix_of)
            positions = positions + before.repeat_interleave(cu_seqlens.diff())
        return rotate(t.unsqueeze(1), freqs[positions], *args, **kwargs).squeeze(1)

    rope_utils._apply_rotary_pos_emb_thd = all_at_once


PATCH = Patch(
    name="megatron.packed_rope",
    package="megatron-core",
    versions=("0.19.2",),
    reason="the rotation of packed samples costs as much as that of one long sample",
    needed=needed,
    apply=apply,
)
