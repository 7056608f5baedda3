"""Engines on ranks of their own: what these ranks do while the actor's ranks train."""

from __future__ import annotations

from functools import partial
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.sharding_manager import seed_sampling
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.observe.timeline import IDLE, UPDATE
from mcore_rl.trainer.hand_overs import engine_config, hand_over, make_canary
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.sampling import Start
from mcore_rl.trainer.sampling_ranks import SamplingRanks, serve_sampling

NAME = "engines"


class EngineRanks(SamplingRanks):
    """vLLM engines in this process, which receive weights from the actor's ranks."""

    _engine: VLLMEngine
    _hand_over: HandOver

    def __init__(self, job: Job, log: TextIO | None, start: Start) -> None:
        super().__init__(job, VLLMEngine(engine_config(job)), start, log)

    def connect(self, /, **start: Any) -> dict[str, Any]:
        """Also plan the hand-over, with the actor's ranks."""
        canary = make_canary(self._job, None, self._start.prompts)
        self._hand_over = hand_over(self._job, engine=self._engine, canary=canary)
        return super().connect(**start)

    def update(self, *, weight_version: int) -> dict[str, Any]:
        """Receive the actor's weights, with the actor's ranks. Returns the largest numbers of bytes
        and tensors of any engine."""
        self._sampler.pause()
        self._activity.begin(UPDATE)
        report = self._hand_over.run(weight_version)
        layout, seed = self._job.spec.rollout_layout, self._job.args.seed
        seed_sampling(self._engine, layout, seed, weight_version)
        names = ("received_bytes", "lower_bound_bytes", "saved_bytes", "num_tensors")
        numbers = torch.tensor([getattr(report, name) for name in names])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=objects.start())
        self._activity.begin(IDLE)
        return dict(zip(names, numbers.tolist(), strict=True))


def serve_engines(job: Job, *, log: TextIO | None = None) -> None:
    """Run engines on ranks of their own until the actor ends the run. Collective over these."""
    serve_sampling(job, NAME, partial(EngineRanks, job, log))
