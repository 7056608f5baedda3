"""What ranks do in `test_schedule.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from mcore_rl.hybrid_engine.vllm import in_process_engine, startup
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.moe.routing import RoutedLayers, routed_layers
from mcore_rl.patches import registry
from mcore_rl.rollout.stream import StreamActions
from tests.dist.schedule_device import BLOCK_SIZE, EOS, STOP, Device, experts, token
from tests.dist.vllm_engine_worker import scheduling_ahead
from tests.engine_samples import small_engine
from tests.streams import run_stream

BLOCK_BYTES = BLOCK_SIZE * 2 * 16 * 2  # keys and values of one head of 16, in bfloat16
ENDINGS = ("all", "end", "drop", "error")  # how a rollout ends


class EndsBySink(Exception):
    """A failure on all ranks in the middle of a rollout."""


class Chaos:
    """Submits, ends and drops requests at random; ends a rollout in one of `ENDINGS`."""

    def __init__(self, rng: random.Random, ending: str, stop: str) -> None:
        self._rng, self._ending, self._stop = rng, ending, stop
        self._prompts = [
            [rng.randrange(10, 50) for _ in range(rng.randrange(4, 60))] for _ in range(5)
        ]
        self._left = rng.randrange(1, 30)
        self._limit = rng.randrange(0, self._left + 1)  # completions before an early end
        self._next = 0
        self._alive: set[int] = set()
        self.completions: list[Completion] = []
        self.dropped_numbers: list[int] = []

    def schedule(self, num_running: int) -> StreamActions:
        rng = self._rng
        if self._ending in ("end", "drop") and len(self.completions) >= self._limit:
            self._left = 0
            everything = tuple(self._alive)
            end, drop = (everything, ()) if self._ending == "end" else ((), everything)
            return StreamActions(end=end, drop=drop)
        submit = tuple(self._request() for _ in range(min(self._left, rng.randrange(12))))
        self._left -= len(submit)
        share = rng.choice([0.15, 0.15, 0.15, 0.8])
        some = [n for n in sorted(self._alive) if rng.random() < share]
        middle = rng.randrange(len(some) + 1)
        end, drop = tuple(some[:middle]), tuple(some[middle:])
        return StreamActions(submit, end, drop, more=self._left > 0)

    def _request(self) -> Request:
        rng, number = self._rng, self._next
        self._next += 1
        self._alive.add(number)
        prompt = rng.choice(self._prompts)[: rng.choice([60, rng.randrange(1, 60)])]
        stop = (self._stop,) if rng.random() < 0.3 else ()
        return Request(
            number,
            np.array(prompt, dtype=np.int32),
            max_tokens=rng.randrange(1, 60),
            sampling=Sampling(stop=stop),
            seed=rng.choice([0, 0, 1, 5, rng.randrange(1, 60)]),
            with_routes=True,
        )

    def finished(self, completion: Completion) -> None:
        self.completions.append(completion)
        self._alive.discard(completion.number)
        if self._ending == "error" and len(self.completions) >= self._limit:
            raise EndsBySink

    def dropped(self, request: Request, num_tokens: int) -> None:
        self.dropped_numbers.append(request.number)
        self._alive.discard(request.number)

    def between_steps(self, num_running: int, step_seconds: float) -> None:
        """Nothing."""


@contextmanager
def as_on_cuda(ahead: bool) -> Iterator[None]:
    """In which engines start and sleep as on CUDA, on a `Device`; scheduling ahead or not."""
    arguments = startup.engine_arguments

    def with_device(config: Any) -> dict[str, Any]:
        worker = f"{Device.__module__}.{Device.__qualname__}"
        options = {"worker_cls": worker, "block_size": BLOCK_SIZE, "max_num_batched_tokens": 64}
        return {**arguments(config), **options, "enable_return_routed_experts": True}

    with (
        scheduling_ahead() if ahead else nullcontext(),
        patch("vllm.config.vllm.HAS_TRITON", True),
        patch.object(startup, "engine_arguments", with_device),
        patch.object(in_process_engine, "on_cuda", lambda: True),
    ):
        yield


def scheduled(
    checkpoint: str,
    ahead: bool,
    num_blocks: int,
    seeds: Sequence[int],
    without_patch: str = "",
    compared: Sequence[str] = Device.compared,
) -> dict[str, Any]:
    """Rollouts of random requests, most of them followed by a sleep."""
    if without_patch:
        registry._applied[without_patch] = "left out"
    dist.init_process_group("gloo")
    routed = routed_layers(read_model_shape(Path(checkpoint)))
    config = small_engine(
        checkpoint,
        tp_size=2,
        max_num_seqs=8,
        kv_cache_bytes=num_blocks * BLOCK_BYTES,
        routed_layers=routed,
    )
    with as_on_cuda(ahead):
        engine = VLLMEngine(config)
        device = engine._worker
        device.scheduler, device.compared = _core(engine).scheduler, compared
        rollouts = [rollout(engine, random.Random(seed), routed) for seed in seeds]
        engine.close()
    dist.destroy_process_group()
    counts = ("num_steps", "num_preempted", "num_hits", "num_evicted")
    return {"rollouts": rollouts, **{name: getattr(device, name) for name in counts}}


def rollout(engine: VLLMEngine, rng: random.Random, routed: RoutedLayers) -> dict[str, Any]:
    ending, scores, sleeps = rng.choice(ENDINGS), rng.random() < 0.3, rng.random() < 0.7
    if scores:  # as the canary does
        texts = [[rng.randrange(10, 50) for _ in range(length)] for length in (3, 50, 100)]
        scored = engine.prompt_log_probs(texts)
        assert [len(each) for each in scored] == [2, 49, 99]
    chaos = Chaos(rng, ending, engine.tokenizer.decode([STOP]))
    failed = False
    try:
        run_stream(engine, chaos)
    except EndsBySink:
        failed = True
    steps_left = len(_core(engine).batch_queue or ())
    if sleeps:
        engine.sleep(keep_weights=True)
        engine.wake_weights()
        engine.wake_kv_cache()
    return {
        "ending": "error" if failed else "all" if ending == "error" else ending,
        "steps_left": steps_left,
        "wrong": [each.number for each in chaos.completions if not is_right(each, routed)],
        "reasons": sorted({each.finish_reason for each in chaos.completions}),
        "answered": sorted([each.number for each in chaos.completions] + chaos.dropped_numbers),
    }


def _core(engine: VLLMEngine) -> Any:
    return engine._llm.llm_engine.engine_core.engine_core


def is_right(completion: Completion, routed: RoutedLayers) -> bool:
    """Whether tokens and experts are those of the device, for this request."""
    request, length = completion.request, len(completion.token_ids)
    tokens = [token(request.number, index) for index in range(length)]
    if completion.finish_reason == "stop":
        tokens[-1] = STOP if request.sampling.stop else EOS
    if length != request.seed and completion.finish_reason == "stop":
        return False
    positions = range(len(request.token_ids) + length - 1)
    whole = [*request.token_ids.tolist(), *tokens]
    expected = [
        [experts(whole[at], at, layer, routed.topk) for layer in routed.layers] for at in positions
    ]
    return (
        completion.token_ids.tolist() == tokens
        and completion.failure is None
        and completion.routes is not None
        and completion.routes.known.all()
        and np.array_equal(completion.routes.ids, np.array(expected))
    )
