"""A vLLM engine inside the training processes: one worker in each, and no other processes.

vLLM's external launcher uses the existing torch.distributed world and fills it with engines of
`tp_size` x `dp_size` ranks each, in the order of slots. All ranks of one engine must make the same
calls with the same arguments in the same order; different engines need to agree only on `close`.

This module adds guarantees that vLLM does not give: the engine refuses to generate unless all its
weights are new, a tensor without a place or a parameter without a tensor is an error, and starting
or closing an engine changes neither the process's random state nor its process group.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.hybrid_engine.memory.usage import give_back_cached
from mcore_rl.hybrid_engine.vllm.adapters import AdapterSlot, adapter_request
from mcore_rl.hybrid_engine.vllm.drafter import DraftCounts, DraftedReloader, DraftRecord
from mcore_rl.hybrid_engine.vllm.generation import (
    Completion,
    Generation,
)
from mcore_rl.hybrid_engine.vllm.needs import Metadata, Needs
from mcore_rl.hybrid_engine.vllm.reload import Load, Reloader, load_together
from mcore_rl.hybrid_engine.vllm.sliced_tensor import WriteObserver
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig, on_cuda, start_llm
from mcore_rl.model.float8_blocks import Float8Weights
from mcore_rl.moe.routing_capture import SlotCapture

_DRAFTER = "drafter."


class Receiver(Protocol):
    """What a hand-over fills: an engine's weights, or its adapter."""

    @property
    def float8(self) -> Float8Weights | None:
        """See `VLLMEngine.float8`."""

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """Return the boxes that this rank stores of each tensor. Not collective."""

    def reload(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        on_write: WriteObserver | None = None,
    ) -> None:
        """See `VLLMEngine.reload`."""


class ServedEngine(Receiver, Protocol):
    """An engine's rank, in this process or a worker of a server."""

    @property
    def adapters(self) -> Receiver | None:
        """What receives adapters; None without."""


class VLLMEngine:
    """This process's rank of an engine. Constructing it is collective over the world.

    torch.distributed must be initialised; random states and the world do not change. Raises
    UsageError for a version of vLLM that a patch in `mcore_rl.patches` does not know, and if
    `tp_size` x `dp_size` does not divide the world.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._drafts: DraftRecord | None = None
        self._start()
        self._asleep: set[str] = set()
        self._weights_complete = config.load_format != "dummy"
        self._reloader = self._make_reloader()
        self.adapters: EngineAdapters | None = None
        if config.lora is not None:
            slot = AdapterSlot(self._worker.model_runner, config.lora)
            self.adapters = EngineAdapters(self, slot)

    def _start(self) -> None:
        self._llm = start_llm(self.config)
        self._capture = None
        if self.config.routed_layers is not None and not on_cuda():
            self._capture = SlotCapture(self._llm)
        if self.config.speculation is not None:
            core = self._llm.llm_engine.engine_core.engine_core
            self._drafts = DraftRecord(core.scheduler)

    def _make_reloader(self) -> Reloader:
        if self.drafter is None:
            return Reloader(self.model, self._vllm_config)
        return DraftedReloader(self.model, self.drafter, self._vllm_config)

    # Position of this process

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank, within the engine's data-parallel rank."""
        return int(self._groups.get_tensor_model_parallel_rank())

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's model of this rank."""
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    @property
    def drafter(self) -> torch.nn.Module | None:
        """vLLM's drafter on this rank, a second model; None without a drafter that has weights."""
        speculation = self.config.speculation
        if speculation is None or not speculation.has_drafter:
            return None
        model: torch.nn.Module = self._worker.model_runner.get_draft_model()
        return model

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer that decodes texts."""
        return self._llm.get_tokenizer()

    @property
    def kv_cache_tokens(self) -> int:
        """The tokens for which this rank has room in its KV cache."""
        cache = self._vllm_config.cache_config
        return int(cache.num_gpu_blocks * cache.block_size)

    # Generation

    def seed_sampling(self, seed: int) -> None:
        """Seed every generator vLLM samples from: torch's (CPU and device), numpy's, Python's.

        Ranks of one engine must use one seed; engines with different seeds sample different tokens.
        """
        from vllm.utils.torch_utils import set_random_seed

        set_random_seed(seed)

    @contextmanager
    def generation(self) -> Iterator[Generation]:
        """Open a context for adding and removing requests; those left at its end are dropped."""
        self.require_ready()
        routed, adapter = self.config.routed_layers, self._adapter_request
        generation = Generation(self._llm.llm_engine, routed, adapter)
        try:
            yield generation
        finally:
            generation.drop()

    def any_rank(self, here: bool) -> bool:
        """Return whether `here` is true on any data-parallel rank of the engine.

        These ranks step together, so call it before each step: if it is true only on other ranks,
        the next step here is empty.
        """
        engine = self._llm.llm_engine
        if engine.dp_group is None:
            return here
        on_any: bool = engine.has_unfinished_requests_dp(here)
        return on_any

    def of_first_rank(self, mine: Any) -> Any:
        """Broadcast `mine` from the first rank of this TP group to all its ranks."""
        return self._groups.get_tp_group().broadcast_object(mine)

    def text_of(self, token_ids: np.ndarray, *, with_special: bool = False) -> str:
        """Decode a response for its rewards, without special tokens; with them for a log."""
        ids = token_ids.tolist()
        text: str = self.tokenizer.decode(ids, skip_special_tokens=not with_special)
        return text

    def rollout(
        self, prompt: Prompt, sample_index: int, completion: Completion, weight_version: int
    ) -> Rollout:
        """Return a request's completion as the response to a prompt."""
        return Rollout(
            prompt=prompt,
            sample_index=sample_index,
            text=self.text_of(completion.token_ids),
            response_token_ids=completion.token_ids,
            rollout_log_probs=completion.log_probs,
            finish_reason=completion.finish_reason,
            weight_version=weight_version,
            routes=completion.routes,
            failure=completion.failure,
            top_tokens=completion.top_tokens,
        )

    def take_draft_counts(self) -> DraftCounts:
        """Return this data-parallel rank's draft counts since the last call."""
        return DraftCounts() if self._drafts is None else self._drafts.take()

    def prompt_log_probs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Score sequences: returns per sequence `[s - 1]` float32, entry i scores token i + 1."""
        from vllm import SamplingParams

        self.require_ready()
        outputs = self._llm.generate(
            [{"prompt_token_ids": [int(token) for token in tokens]} for tokens in token_ids],
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
            lora_request=self._adapter_request,
        )
        return [
            np.array(
                [
                    entry[int(token)].logprob
                    for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
                ],
                dtype=np.float32,
            )
            for tokens, output in zip(token_ids, outputs, strict=True)
        ]

    # Weights

    @property
    def float8(self) -> Float8Weights | None:
        """The weights that it holds in FP8 blocks; None: none.

        Where DeepGEMM computes with scales that are powers of two, the sender must round scales
        up to these. vLLM would else do so, and quantise the weights a second time.
        """
        quantised = self.config.float8
        if quantised is None:
            return None
        from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

        rounds = quantised.powers_of_two or is_deep_gemm_e8m0_used()
        return dataclasses.replace(quantised, powers_of_two=rounds)

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """Call `Reloader.learn_needs`; `reload` then knows when a layer is complete."""
        return self._reloader.learn_needs(tensor_metadata)

    def reload(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        on_write: WriteObserver | None = None,
    ) -> None:
        """Replace all weights in place by checkpoint tensors, as `Reloader.load` describes.

        Collective over the engine's ranks. `weights` is exhausted even on failure, so it may be
        collective. Raises RuntimeError on all ranks of the engine if `load` raises on one. The
        engine then refuses to generate until a reload succeeds.
        """
        self._require_weights("reload")
        self._weights_complete = False
        self._load_together(self._reloader.load, weights, on_write)
        self._weights_complete = True

    def _load_together(
        self,
        load: Load,
        weights: Iterable[tuple[str, torch.Tensor]],
        on_write: WriteObserver | None,
    ) -> None:
        load_together(load, weights, self._engine_group, on_write)
        if not self._drop_kv_cache():
            raise RuntimeError("the prefix cache of the old weights could not be dropped")

    def stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of all weights that this rank stores, for comparison bit by bit.

        Yields parameters and buffers under their names. On CPU, linear layers compute with packed
        copies that nothing else can access; for these it yields the layer's output for the identity
        matrix, which is exactly the weight it computes with. Rotary tables are yielded in the
        model's dtype, to which vLLM converts them in the first forward pass. A drafter's names
        begin with "drafter.", and include what it shares with the model. The tensors are vLLM's
        own, or views of them: copy what must survive the next reload.

        Raises RuntimeError while the weights sleep: their memory is not mapped then, and on CUDA
        the process could not continue after reading it.
        """
        self._require_weights("stored_tensors")
        return self._stored_tensors()

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        drafter = self.drafter
        models = {"": self.model} | ({} if drafter is None else {_DRAFTER: drafter})
        for prefix, model in models.items():
            for name, tensor in (
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ):
                if name.endswith("cos_sin_cache"):
                    tensor = tensor.to(self._vllm_config.model_config.dtype)
                if tensor.numel():  # a weight that is packed elsewhere is empty here
                    yield prefix + name, tensor.detach()
            for name, module in model.named_modules():
                if hasattr(module, "cpu_linear"):
                    yield f"{prefix}{name}.cpu_linear(identity)", _packed_weight(module)

    # Sleep

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the KV cache and the weights; with `keep_weights` the weights move to host memory.

        Without it, `reload` must follow `wake_weights`. On CPU, where vLLM cannot sleep, nothing is
        freed, but the same order of calls is required, and sleeping memory must not be read.
        """
        if self._asleep:
            raise RuntimeError(f"the engine already sleeps ({', '.join(sorted(self._asleep))})")
        self._free(keep_weights)
        give_back_cached()
        self._asleep = {"weights", "kv_cache"}
        self._weights_complete &= keep_weights
        if self.adapters is not None:
            self.adapters.is_complete &= keep_weights

    def wake_weights(self) -> None:
        """Allocate the weights' memory again; before `reload`."""
        self._wake("weights")

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again; before requests run."""
        self._wake("kv_cache")

    def _wake(self, what: str) -> None:
        if what not in self._asleep:
            raise RuntimeError(f"{what} does not sleep")
        give_back_cached()  # some versions of vLLM also do it, but none documents it
        self._allocate(what)
        self._asleep.remove(what)

    def _free(self, keep_weights: bool) -> None:
        if not self._drop_kv_cache():
            raise RuntimeError("the KV cache could not be dropped; a request is still running")
        if on_cuda():
            self._llm.sleep(level=1 if keep_weights else 2)

    def _allocate(self, what: str) -> None:
        if on_cuda():
            self._llm.wake_up(tags=[what])

    def close(self) -> None:
        """Free the engine and vLLM's process groups; the world and everything else stays.

        Collective over the world. After closing, only `close` may be called again.
        """
        if self._llm is None:
            return
        core = self._llm.llm_engine.engine_core.engine_core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        self._groups.destroy_model_parallel()
        self._llm = None
        gc.unfreeze()  # vLLM froze all objects that were alive when it started
        gc.collect()
        give_back_cached()

    # Internals

    @property
    def _groups(self) -> Any:
        from vllm.distributed import parallel_state

        return parallel_state

    @property
    def _adapter_request(self) -> Any:
        return None if self.adapters is None else adapter_request()

    @property
    def _engine_group(self) -> Any:
        """The ranks that share a model: the engine's if experts span DP ranks, else a TP group."""
        groups = self._groups
        spread = self.config.dp_size > 1 and self._vllm_config.model_config.is_moe
        return groups.get_ep_group() if spread else groups.get_tp_group()

    @property
    def _vllm_config(self) -> Any:
        return self._llm.llm_engine.vllm_config

    @property
    def _worker(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker

    def _drop_kv_cache(self) -> bool:
        """Drop what the old weights computed; return False if a request is still running."""
        engine = self._llm.llm_engine
        if engine.get_num_unfinished_requests():
            return False
        # If the last requests ended by a stop token or were dropped, vLLM has scheduled one more
        # step. Its routes must be read before the cache is reset; the next step fails otherwise.
        while engine.engine_core.engine_core.batch_queue:
            engine.step()
        if self.config.keeps_kv:
            return True
        if not self._llm.reset_prefix_cache():
            return False
        if self._capture is not None:
            self._capture.forget()
        return True

    def _require_weights(self, call: str) -> None:
        if "weights" in self._asleep:
            raise RuntimeError(f"{call} while the weights sleep; call wake_weights first")

    def require_ready(self) -> None:
        """Raise RuntimeError unless the engine is awake and has a complete set of weights."""
        if self._asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self._asleep))}); wake it")
        if not self._weights_complete:
            raise RuntimeError("the engine has no complete set of weights; call reload first")
        if self.adapters is not None and not self.adapters.is_complete:
            raise RuntimeError("the engine has no complete adapter; call adapters.reload first")


class EngineAdapters:
    """The adapter of an engine, for hand-overs: it learns needs and reloads as the engine does.

    Its memory sleeps with the engine's weights. After a failed `reload` the engine refuses to
    generate until one succeeds.
    """

    float8: Float8Weights | None = None  # none of its tensors is quantised

    def __init__(self, engine: VLLMEngine, slot: AdapterSlot) -> None:
        self._engine, self._slot = engine, slot
        self.is_complete = False

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """Call `AdapterSlot.learn_needs`."""
        return self._slot.learn_needs(tensor_metadata)

    def reload(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        on_write: WriteObserver | None = None,
    ) -> None:
        """Replace the adapter by `AdapterSlot.load`. Collective over the engine's ranks; the
        contracts are those of `VLLMEngine.reload`."""
        self._engine._require_weights("adapters.reload")
        self.is_complete = False
        self._engine._load_together(self._slot.load, weights, on_write)
        self.is_complete = True

    def stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `AdapterSlot.stored` does. Raises RuntimeError while the weights sleep."""
        self._engine._require_weights("adapters.stored_tensors")
        return self._slot.stored()


def _packed_weight(module: Any) -> torch.Tensor:
    """Return `[o, i]`, a linear layer's effective weight: identity @ w.T is exact in any dtype."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded_as = get_layerwise_info(module).restore_metadata[0]["weight"]
    identity = torch.eye(loaded_as.shape[1], dtype=loaded_as.dtype)
    weight: torch.Tensor = module.cpu_linear(identity, module.weight, None).t()
    return weight
