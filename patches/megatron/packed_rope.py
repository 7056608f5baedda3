"""Rotary embeddings of packed samples are computed in one call.

Symptom: the backward pass of a packed row takes longer the more samples it has: 128 short samples
in one row of 2,300 tokens take a third longer than in five rows. Also, samples that share a prompt,
which the row has once, would each begin at position 0.

Cause: the unfused rotation, which latent attention always uses, loops over samples and copies each
result into one tensor. The gradient of every such copy is a clone of the full row, so that the cost
grows with tokens x samples; reading the bounds waits for the device. Shared prompts are a feature
of mcore_rl (`mcore_rl.batching.rows`) that upstream does not have.

Why safe: each token is rotated by the frequencies of its position in its sample, with the same
numbers as before, also under context parallelism; only the loop is gone. If the frequencies are for
the full row, upstream's function is called. The parts of samples after a shared prompt are rotated
by the positions that follow the prompt.

Upstream: 0.18 looks frequencies up by sample, 0.19 has the loop, main rotates all at once.

Drop when: `_apply_rotary_pos_emb_thd` takes a position for each token.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import Patch, parameters_of, require, require_parameters

# Parameters of the rotation of packed samples -> of one sample. Parameters after `freqs` are passed
# on by name, so they must have the same meaning in both.
_KNOWN = {
    "t cu_seqlens freqs rotary_interleaved multi_latent_attention mscale cp_group": (
        "t freqs rotary_interleaved multi_latent_attention mscale"
    ),
    "t cu_seqlens freqs rotary_interleaved mla_rotary_interleaved mscale cp_group "
    "multi_latent_attention": (
        "t freqs rotary_interleaved mla_rotary_interleaved mscale multi_latent_attention"
    ),
    "t cu_seqlens freqs rotary_interleaved mla_rotary_interleaved mscale inverse "
    "mla_output_remove_interleaving cp_group multi_latent_attention max_seqlen": (
        "t freqs rotary_interleaved mla_rotary_interleaved mscale inverse "
        "mla_output_remove_interleaving multi_latent_attention"
    ),
}


def apply() -> None:
    """Rotate all samples of a row by gathered frequencies."""
    from megatron.core.models.common.embeddings import rope_utils

    from mcore_rl.batching.rows import prefix_lengths, prefixes_of, samples_on_cp_rank

    upstream, rotate = rope_utils._apply_rotary_pos_emb_thd, rope_utils._apply_rotary_pos_emb_bshd
    parameters = parameters_of(upstream)
    names = " ".join(parameters)
    require(
        names in _KNOWN,
        "rope_utils._apply_rotary_pos_emb_thd",
        f"takes {', '.join(parameters)}, which matches no known list of parameters",
    )
    require_parameters(rotate, _KNOWN[names])

    def all_at_once(
        t: Any, cu_seqlens: Any, freqs: Any, *args: Any, cp_group: Any = None, **kwargs: Any
    ) -> Any:
        num_tokens = t.shape[0]
        cp_size = 1 if cp_group is None else cp_group.size()
        if cp_group is None or freqs.shape[0] == num_tokens * cp_size:
            return upstream(t, cu_seqlens, freqs, *args, cp_group=cp_group, **kwargs)
        kwargs.pop("max_seqlen", None)  # only tells upstream whether freqs are for the full row
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
    "megatron.packed_rope",
    "the rotation of packed samples costs as much as that of one long sample",
    apply,
)
