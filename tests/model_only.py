"""vLLM's model of this rank, built and loaded, but never run: for tests and benchmarks.

It tests the loading of layouts that vLLM cannot run on a platform: on CPU, experts over its own
data-parallel ranks. It also serves callers that need a layout's needs and stored weights but no
text: it starts in a second, without a KV cache, a scheduler and a profiling run.
"""

from __future__ import annotations

import gc
from typing import Any

from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.startup import engine_arguments, on_cuda, starting


class VLLMModelOnly(VLLMEngine):
    """A `VLLMEngine` that does not generate: it learns needs, reloads, sleeps and shows weights.

    It is vLLM's own worker, built by vLLM's own executor in its own groups. It supports every
    layout. Constructing and closing are collective over
    the world; close one before creating the next.
    """

    def _start(self) -> None:
        gc.freeze()  # vLLM collects garbage twice, which is slow with all imported modules
        with starting(self.config):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.executor.abstract import Executor

            model, options = str(self.config.model_dir), engine_arguments(self.config)
            arguments = EngineArgs(model=model, **options)
            vllm_config = arguments.create_engine_config(UsageContext.LLM_CLASS)
            self._executor = Executor.get_class(vllm_config)(vllm_config)

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
