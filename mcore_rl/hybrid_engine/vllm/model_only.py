"""vLLM's model of this rank, built and loaded, but never run.

It tests the loading of layouts that vLLM cannot run on a platform: on CPU, experts over its own
data-parallel ranks. It also serves callers that need a layout's needs and stored weights but no
text: it starts in a second, without a KV cache, a scheduler and a profiling run.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.hybrid_engine.vllm.engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.start import on_cuda, start_executor


class VLLMModelOnly(VLLMEngine):
    """A `VLLMEngine` that does not generate: it learns needs, reloads, sleeps and shows weights.

    It is vLLM's own worker, built by vLLM's own executor in its own groups. It supports every
    layout; methods that generate raise RuntimeError. Constructing and closing are collective over
    the world; close one before creating the next.
    """

    def _start(self) -> None:
        gc.freeze()  # vLLM collects garbage twice, which is slow with all imported modules
        self._executor = start_executor(self.config)

    @property
    def tokenizer(self) -> NoReturn:
        self._refuse()

    def generate(self, prompts: Sequence[Prompt], **options: Any) -> list[Rollout]:
        """Always raises RuntimeError."""
        self._refuse()

    def prompt_log_probs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Always raises RuntimeError."""
        self._refuse()

    def _free(self, keep_weights: bool) -> None:
        pass  # the model keeps its memory until `close`

    def _allocate(self, what: str) -> None:
        pass

    def close(self) -> None:
        """Free the model and vLLM's process groups; the world and everything else stays."""
        if self._executor is None:
            return
        if on_cuda():
            # On CPU a worker that never ran has nothing to shut down, and trying takes a second.
            self._executor.shutdown()
        self._groups.destroy_model_parallel()
        self._executor = None
        gc.collect()
        gc.unfreeze()

    @property
    def _vllm_config(self) -> Any:
        return self._executor.vllm_config

    @property
    def _worker(self) -> Any:
        return self._executor.driver_worker.worker

    def _drop_kv_cache(self) -> bool:
        return True

    def _refuse(self) -> NoReturn:
        raise RuntimeError(
            "this engine holds vLLM's model only and cannot generate: it was started without a KV "
            "cache and a scheduler, for a layout that vLLM does not run here; start a VLLMEngine"
        )
