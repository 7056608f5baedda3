"""The device below vLLM's scheduler, played: it computes nothing, and compares TP ranks at a step.

Above it everything is vLLM's own: executor, futures, engine core, scheduler, block pool, and both
sides of the connector that reports experts. It takes the steps of model runner V2, which needs
Triton: requests come and go as its `execute_model` and `sample_tokens` treat them, and the result
is read later.

A request's `seed` tells how many tokens it wants; 0: more than it may have. Then it samples the end
of its sequence, or, if it has a stop string, the token of that.
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.distributed import parallel_state
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
from vllm.forward_context import set_forward_context
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

EOS, STOP = 2, 9  # token ids; EOS is that of the tests' tokenizer
BLOCK_SIZE = 16


def token(number: int, index: int) -> int:
    """The token `index` of the response to request `number`, if it is not the last."""
    return 10 + (31 * number + 7 * index) % 40


def experts(token_id: int, position: int, layer: int, topk: int) -> list[int]:
    """Which experts a token has."""
    return [(token_id + position + layer + choice) % 4 for choice in range(topk)]


def number_of(request_id: str) -> int:
    """Our number of a request, of which vLLM's id has a random end that differs by rank."""
    return int(request_id.partition("-")[0])


class _Layer(torch.nn.Module):
    """A layer that reports which experts it takes."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.capture_fn = layer_id, None


@dataclasses.dataclass
class _Running:
    """A request on the device."""

    number: int
    token_ids: list[int]
    prompt_length: int
    stop: bool
    scores_prompt: bool
    length: int

    def next_token(self) -> int:
        index = len(self.token_ids) - self.prompt_length
        if index + 1 == self.length:
            return STOP if self.stop else EOS
        return token(self.number, index)


class _Output(AsyncModelRunnerOutput):
    """A step's result, whose routes are processed once it is read."""

    def __init__(self, output: ModelRunnerOutput, pending: Any) -> None:
        self._output, self._pending = output, pending

    def get_output(self) -> ModelRunnerOutput:
        self._output.aux_output_connector_output = self._pending.process_output()
        return self._output


class Device(WorkerBase):
    """A worker of vLLM."""

    scheduler: Any = None  # set by the test, as is which parts of its state are compared
    compared: tuple[str, ...] = (
        *("step", "new", "cached", "tokens", "finished", "preempted"),
        *("tables", "free", "found", "waiting", "running"),
    )
    num_steps = num_preempted = num_hits = num_evicted = 0
    _found: frozenset[int] = frozenset()  # blocks found by their content, as of the last step

    def init_device(self) -> None:
        os.environ["VLLM_DIST_IDENT"] = "played"  # of the shared memory of vLLM's groups on CPU
        rank = (self.rank, self.distributed_init_method, self.local_rank)
        init_worker_distributed_environment(self.vllm_config, *rank, "gloo")
        self._model = torch.nn.ModuleList([])
        self.model_runner = SimpleNamespace(get_model=lambda: self._model)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        layers = self.model_config.get_total_num_hidden_layers()
        self._model.extend([_Layer(layer) for layer in range(layers)])

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = dict(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
        return {"layer": FullAttentionSpec(**spec)}

    def determine_available_memory(self) -> int:
        return self.cache_config.kv_cache_memory_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._connector = AuxOutputWorkerConnector(
            vllm_config=self.vllm_config, model=self._model, kv_cache_config=kv_cache_config
        )
        self._running: dict[str, _Running] = {}

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def reset_encoder_cache(self) -> None:
        pass

    def sleep(self, level: int = 1) -> None:
        self._found = frozenset()

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        self._compare(scheduled)
        self._count(scheduled)
        for request_id in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self._running.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            sampling = new.sampling_params
            self._running[new.req_id] = _Running(
                number_of(new.req_id),
                list(new.prefill_token_ids),
                len(new.prompt_token_ids),
                bool(sampling.stop),
                sampling.prompt_logprobs is not None,
                sampling.seed or 0,
            )
        self._connector.begin_step(scheduled.aux_output_connector_metadata)
        self._scheduled = scheduled
        return None if scheduled.total_num_scheduled_tokens else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar_output: Any) -> AsyncModelRunnerOutput:
        scheduled = self._scheduled
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ids, counts = zip(*scheduled.num_scheduled_tokens.items(), strict=True)
        starts = [computed[each] for each in ids]
        self._capture(ids, starts, counts)
        sampled = [self._sample(*each) for each in zip(ids, starts, counts, strict=True)]
        pending = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=list(ids),
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=np.array(starts),
            )
        )
        num_sampled = np.array([len(tokens) for tokens in sampled])
        pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
        padded = np.array([tokens or [0] for tokens in sampled])
        log_probs = LogprobsLists(padded, -padded / 100, np.zeros(len(ids), dtype=np.int32))
        indices = {each: index for index, each in enumerate(ids)}
        scored = self._prompt_log_probs(
            [each for each, has in zip(ids, num_sampled, strict=True) if has]
        )
        output = ModelRunnerOutput(list(ids), indices, sampled, log_probs, scored)
        return _Output(output, pending)

    def _prompt_log_probs(self, ids: list[str]) -> dict[str, LogprobsTensors]:
        """Return a log-prob per token of each complete prompt whose request asks for them."""
        found = {}
        for each in ids:
            if (request := self._running[each]).scores_prompt:
                tokens = torch.tensor(request.token_ids[1 : request.prompt_length])[:, None]
                found[each] = LogprobsTensors(tokens, -tokens / 100, torch.zeros(len(tokens)))
        return found

    def _capture(self, ids: Any, starts: Any, counts: Any) -> None:
        """Report the experts of a step's tokens, as the layers do while they run."""
        topk = self.model_config.get_num_experts_per_tok()
        tokens = [
            (self._running[each].token_ids[position], position)
            for each, start, count in zip(ids, starts, counts, strict=True)
            for position in range(start, start + count)
        ]
        with set_forward_context(None, self.vllm_config):
            for layer in self._model:
                rows = [experts(*each, layer.layer_id, topk) for each in tokens]
                layer.capture_fn(torch.tensor(rows))

    def _sample(self, request_id: str, start: int, count: int) -> list[int]:
        """The next token, unless the step ends before the last known one."""
        request = self._running[request_id]
        if start + count < len(request.token_ids):
            return []
        request.token_ids.append(request.next_token())
        return request.token_ids[-1:]

    def _count(self, scheduled: SchedulerOutput) -> None:
        """Count what happens where many requests share few blocks."""
        self.num_preempted += len(scheduled.preempted_req_ids or ())
        self.num_hits += sum(new.num_computed_tokens > 0 for new in scheduled.scheduled_new_reqs)
        found = frozenset(pool_state(self.scheduler)["found"])
        self.num_evicted += len(self._found - found)
        self._found = found

    def _compare(self, scheduled: SchedulerOutput) -> None:
        """Raise on all ranks if they are not in the same state, as their collectives would hang."""
        self.num_steps += 1
        mine = {"step": self.num_steps, **as_scheduled(scheduled), **pool_state(self.scheduler)}
        states: list[Any] = [None, None]
        dist.all_gather_object(states, mine, group=parallel_state.get_tp_group().cpu_group)
        for part in self.compared:
            if states[0][part] != states[1][part]:
                differing = f"{states[0][part]} and {states[1][part]}"
                raise RuntimeError(f"step {self.num_steps}: {part} differ by rank: {differing}")


def as_scheduled(scheduled: SchedulerOutput) -> dict[str, Any]:
    """What a step computes, without the random parts of the requests' ids."""
    cached = scheduled.scheduled_cached_reqs
    return {
        "new": [
            (number_of(new.req_id), new.num_computed_tokens, new.block_ids, new.prefill_token_ids)
            for new in scheduled.scheduled_new_reqs
        ],
        "cached": [
            (number_of(request_id), *rest)
            for request_id, *rest in zip(
                cached.req_ids,
                cached.num_computed_tokens,
                cached.new_block_ids,
                cached.num_output_tokens,
                strict=True,
            )
        ],
        "tokens": [(number_of(each), n) for each, n in scheduled.num_scheduled_tokens.items()],
        "finished": sorted(map(number_of, scheduled.finished_req_ids)),
        "preempted": sorted(map(number_of, scheduled.preempted_req_ids or ())),
    }


def pool_state(scheduler: Any) -> dict[str, Any]:
    """The KV blocks: those of each request, the free ones in the order in which they are taken, and
    those that are found by their content."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    return {
        "tables": {number_of(each): manager.get_block_ids(each) for each in scheduler.requests},
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "found": [block.block_id for block in pool.blocks if block.block_hash is not None],
        "waiting": [number_of(each.request_id) for each in scheduler.waiting],
        "running": [number_of(each.request_id) for each in scheduler.running],
    }
