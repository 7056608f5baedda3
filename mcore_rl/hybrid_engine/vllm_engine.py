"""A vLLM engine inside the training processes: one worker per process, no process of its own.

vLLM's external launcher takes the torch.distributed world as it is and fills it with engines of
`tp_size` ranks each, in rank order. All ranks of one engine must make the same calls with the same
arguments in the same order; different engines need not agree on anything but `close`.

What upstream leaves open is closed here: weights are either all new or the engine refuses to
generate, a tensor without a place or a parameter without a tensor is an error, and starting or
closing an engine disturbs neither the process's random state nor its process group.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.errors import UsageError
from mcore_rl.hybrid_engine.boxes import Box, show, uncovered
from mcore_rl.hybrid_engine.needs import Metadata, learn_needs
from mcore_rl.hybrid_engine.sliced_tensor import SlicedTensor
from mcore_rl.hybrid_engine.vllm_start import EngineConfig, on_cuda, start_llm
from mcore_rl.types import Prompt, Rollout

__all__ = ["EngineConfig", "VLLMEngine"]


class VLLMEngine:
    """This process's rank of an engine. Constructing it is collective over the whole world.

    torch.distributed must be initialised; random states and the world stay as they are. Raises
    UsageError on a version of vLLM that a repair in `mcore_rl.patches` does not know, and where
    `tp_size` does not divide the world.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._llm = start_llm(config)
        self._asleep: set[str] = set()
        self._weights_complete = config.load_format != "dummy"
        self._metadata: dict[str, tuple[tuple[int, ...], torch.dtype]] | None = None
        self._needs: dict[str, tuple[Box, ...]] = {}

    # Where this process sits

    @property
    def tp_rank(self) -> int:
        return self._groups.get_tensor_model_parallel_rank()

    @property
    def ep_size(self) -> int:
        return self._groups.get_ep_group().world_size if self._has_expert_parallel else 1

    @property
    def ep_rank(self) -> int:
        return self._groups.get_ep_group().rank_in_group if self._has_expert_parallel else 0

    @property
    def engine_index(self) -> int:
        """Which engine of the world this rank belongs to, counted in rank order."""
        return self._groups.get_tp_group().ranks[0] // self.config.tp_size

    @property
    def num_engines(self) -> int:
        return self._groups.get_world_group().world_size // self.config.tp_size

    @property
    def model(self) -> torch.nn.Module:
        """vLLM's model of this rank."""
        return self._worker.model_runner.get_model()

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer with which texts are decoded."""
        return self._llm.get_tokenizer()

    # Generation

    def seed_sampling(self, seed: int) -> None:
        """Seed every generator vLLM samples from: torch's (CPU and device), numpy's, Python's.

        Ranks of one engine must use one seed; engines with different seeds draw different tokens.
        """
        from vllm.utils.torch_utils import set_random_seed

        set_random_seed(seed)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        temperature: float,
        max_tokens: int,
        weight_version: int,
        top_p: float = 1.0,
        top_k: int = -1,
        ignore_eos: bool = False,
    ) -> list[Rollout]:
        """Sample `num_samples` responses to each prompt, in the order of the prompts.

        `rollout_log_probs` are those of the distribution that was sampled from, after temperature,
        top-p and top-k; at temperature 0 those of the untempered distribution. Tokens depend on the
        process's random state, the order of the prompts and the weights, and on nothing else.
        """
        from vllm import SamplingParams

        self._require_ready()
        self._require_room(prompts, max_tokens)
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt.token_ids.tolist()} for prompt in prompts],
            SamplingParams(
                n=num_samples,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                logprobs=0,  # of the sampled token only
                detokenize=False,  # vLLM's, token by token, keeps back unfinished characters
            ),
            use_tqdm=False,
        )
        tokenizer = self.tokenizer
        return [
            _rollout(prompt, completion, tokenizer, weight_version)
            for prompt, output in zip(prompts, outputs, strict=True)
            for completion in output.outputs
        ]

    def prompt_log_probs(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Score given sequences: per sequence `[s - 1]` float32, entry i scores token i + 1."""
        from vllm import SamplingParams

        self._require_ready()
        outputs = self._llm.generate(
            [{"prompt_token_ids": [int(token) for token in tokens]} for tokens in token_ids],
            SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
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

    @contextmanager
    def loading_context(self) -> Iterator[None]:
        """In which the model's `load_weights` may be called."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._llm.llm_engine.vllm_config), torch.no_grad():
            yield

    def learn_needs(self, tensor_metadata: Metadata) -> dict[str, tuple[Box, ...]]:
        """`needs.learn_needs`, remembered, so that `reload` can name a tensor that is missing."""
        if self._metadata != dict(tensor_metadata):
            self._needs = learn_needs(self, tensor_metadata)
            self._metadata = dict(tensor_metadata)
        return self._needs

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by checkpoint tensors, whole ones or `SlicedTensor`s, layer by layer.

        What this rank needs must come, each tensor once; what it does not need may be left out. Any
        order will do; ordered by layer the memory held at a time is least, because a tensor is kept
        until the layer it belongs to is complete. `weights` is exhausted even on failure, so that
        it may be collective. Collective over the engine's ranks.

        Raises RuntimeError, on all ranks of the engine, naming the tensor that has no place in the
        model, comes twice, is missing or was not loaded in full, or the parameter that remains
        unfilled. The engine then refuses to generate until a reload succeeds.
        """
        if "weights" in self._asleep:
            raise RuntimeError("reload while the weights sleep; call wake_weights first")
        self._weights_complete = False
        remaining = iter(weights)
        fault: Exception | None = None
        unread: list[str] = []
        try:
            unread = self._load(remaining)
        except Exception as error:  # whatever it is, the other ranks must hear of it first
            fault = error
            self._abandon_reload()
            for _ in remaining:
                pass
        self._agree_on_reload(fault, unread)
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache of the old weights could not be dropped")
        self._weights_complete = True

    def _load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[str]:
        """Load `weights`, check that all arrived, and return those not needed on this rank."""
        reads: dict[str, list[Box]] = defaultdict(list)
        metadata: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        try:
            self._worker.reload_weights(weights_iterator=_observed(weights, metadata, reads))
        except (ValueError, LookupError, AttributeError, AssertionError) as error:
            last = next(reversed(metadata), "the first tensor")
            raise RuntimeError(f"vLLM's loader failed at {last}: {error}") from error
        missing = [n for n, boxes in self._needs.items() if boxes and n not in metadata]
        if missing:
            raise RuntimeError(f"not given to reload, though vLLM needs them: {_some(missing)}")
        needs = self.learn_needs(metadata)
        for name, boxes in needs.items():
            for box in boxes:
                gaps = uncovered(box, reads[name])
                if gaps:
                    raise RuntimeError(
                        f"vLLM's loader took {show(box)} of {name} for this rank, but did not load "
                        f"{show(gaps[0])}"
                    )
        return [name for name, boxes in needs.items() if not boxes]

    def _abandon_reload(self) -> None:
        """Give the layers that were not complete their old tensors back, as before the reload."""
        from vllm.model_executor.model_loader.reload import layerwise

        for module in self.model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(module, info)
            info.reset()

    def _agree_on_reload(self, fault: Exception | None, unread: list[str]) -> None:
        """Raise on all ranks of the engine if one failed or if a tensor has no place on any."""
        group = self._groups.get_tp_group()
        all_results: list[Any] = [None] * group.world_size
        mine = (None if fault is None else str(fault), unread)
        dist.all_gather_object(all_results, mine, group=group.cpu_group)
        if fault is not None:
            raise fault
        for rank, (text, _) in zip(group.ranks, all_results, strict=True):
            if text is not None:
                raise RuntimeError(f"reload failed on rank {rank}: {text}")
        nowhere = set(unread).intersection(*(other for _, other in all_results))
        if nowhere:
            raise RuntimeError(
                f"no rank of the engine has a place for: {_some(sorted(nowhere))}; leave them out"
            )

    def stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything this rank stores of the weights, for comparison bit by bit.

        Parameters and buffers under their names, and on CPU, where linear layers compute with
        packed copies that nothing else reaches, what each of them makes of the identity matrix:
        exactly the weight it computes with. The tensors are vLLM's own, or views of them: copy what
        must survive the next reload.
        """
        model = self.model
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            if tensor.numel():  # of a weight that is packed elsewhere nothing is left here
                yield name, tensor.detach()
        for name, module in model.named_modules():
            if hasattr(module, "cpu_linear"):
                yield f"{name}.cpu_linear(identity)", _packed_weight(module)

    # Sleep

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the KV cache and the weights; with `keep_weights` those move to host memory.

        Without, `reload` must follow `wake_weights`. On CPU, where vLLM cannot sleep, nothing is
        freed, but the same order of calls is asked for.
        """
        if self._asleep:
            raise RuntimeError(f"the engine already sleeps ({', '.join(sorted(self._asleep))})")
        if on_cuda():
            self._llm.sleep(level=1 if keep_weights else 2)
        elif not self._llm.reset_prefix_cache():
            raise RuntimeError("the KV cache could not be dropped; a request is still running")
        self._asleep = {"weights", "kv_cache"}
        self._weights_complete &= keep_weights

    def wake_weights(self) -> None:
        """Allocate the weights' memory again; before `reload`."""
        self._wake("weights")

    def wake_kv_cache(self) -> None:
        """Allocate the KV cache again; before `generate`."""
        self._wake("kv_cache")

    def _wake(self, what: str) -> None:
        if what not in self._asleep:
            raise RuntimeError(f"{what} does not sleep")
        if on_cuda():
            self._llm.wake_up(tags=[what])
        self._asleep.remove(what)

    def close(self) -> None:
        """Free the engine and vLLM's process groups; the world and everything else stays.

        Collective over the world. Closing twice is allowed; anything else afterwards is not.
        """
        if self._llm is None:
            return
        core = self._llm.llm_engine.engine_core.engine_core
        core.structured_output_manager.clear_backend()
        core.model_executor.shutdown()
        core.scheduler.shutdown()
        self._groups.destroy_model_parallel()
        self._llm = None
        gc.unfreeze()  # vLLM froze all that was alive when it started
        gc.collect()
        if on_cuda():
            torch.cuda.empty_cache()

    # Inside

    @property
    def _groups(self) -> Any:
        from vllm.distributed import parallel_state

        return parallel_state

    @property
    def _has_expert_parallel(self) -> bool:
        config = self._llm.llm_engine.vllm_config
        return config.parallel_config.enable_expert_parallel and config.model_config.is_moe

    @property
    def _worker(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker

    def _require_ready(self) -> None:
        if self._asleep:
            raise RuntimeError(f"the engine sleeps ({', '.join(sorted(self._asleep))}); wake it")
        if not self._weights_complete:
            raise RuntimeError("the engine has no complete set of weights; call reload first")

    def _require_room(self, prompts: Sequence[Prompt], max_tokens: int) -> None:
        limit = self._llm.llm_engine.vllm_config.model_config.max_model_len
        for prompt in prompts:
            if len(prompt.token_ids) + max_tokens > limit:
                raise UsageError(
                    f"prompt {prompt.index} has {len(prompt.token_ids)} tokens, which with "
                    f"{max_tokens} new ones exceeds the engine's {limit}; shorten one of the two "
                    "or raise the engine's length"
                )


def _observed(
    weights: Iterable[tuple[str, torch.Tensor]],
    metadata: dict[str, tuple[tuple[int, ...], torch.dtype]],
    reads: Mapping[str, list[Box]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """`weights`, with note taken of each tensor's metadata and of what is read of it."""
    for name, tensor in weights:
        if name in metadata:
            raise RuntimeError(f"{name} was given to reload twice")
        metadata[name] = (tuple(tensor.shape), tensor.dtype)
        yield name, SlicedTensor.observed(name, tensor, lambda of, box: reads[of].append(box))


def _rollout(prompt: Prompt, completion: Any, tokenizer: Any, weight_version: int) -> Rollout:
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(
            f"prompt {prompt.index}, sample {completion.index} ended with "
            f"{completion.finish_reason!r}, not by a stop token or its length"
        )
    tokens = completion.token_ids
    log_probs = [entry[t].logprob for t, entry in zip(tokens, completion.logprobs, strict=True)]
    return Rollout(
        prompt=prompt,
        sample_index=completion.index,
        text=tokenizer.decode(list(tokens), skip_special_tokens=True),
        response_token_ids=np.asarray(tokens, dtype=np.int32),
        rollout_log_probs=np.asarray(log_probs, dtype=np.float32),
        finish_reason=completion.finish_reason,
        weight_version=weight_version,
    )


def _packed_weight(module: torch.nn.Module) -> torch.Tensor:
    """`[o, i]`, the weight a linear layer computes with: identity @ w.T is exact in any dtype."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded_as = get_layerwise_info(module).restore_metadata[0]["weight"]
    identity = torch.eye(loaded_as.shape[1], dtype=loaded_as.dtype)
    return module.cpu_linear(identity, module.weight, None).t()


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
