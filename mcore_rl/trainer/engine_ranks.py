"""Engines on ranks of their own: what these ranks do while the actor's ranks train.

    the actor's ranks (`separate`)                      the engines' ranks (`EngineRanks`)

    update ── message, then the weights ──────────────► HandOver.run
    sample_eval, evaluate, collect ── message ────────► Sampling; answers with a table of samples
    deliver ── message ─── tokens of the samples ◄───── SampleStore
    save, undo, close ── message ─────────────────────► state of the sampling

The actor waits for each answer. Between two calls engines wait for the next one, or, with
--rl-max-staleness 1 or more, sample ahead (`rollout.ahead`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import SampleTable
from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError
from mcore_rl.common.kills import note_stage
from mcore_rl.data.prompts import load_prompt_files
from mcore_rl.data.tokenizer_process import close_all
from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.sharding_manager import seed_sampling
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.model.roles import ROLLOUT
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import EVALUATION, IDLE, SAMPLING, UPDATE, Activity
from mcore_rl.rollout.ahead import AheadSampler
from mcore_rl.rollout.collector import Collector
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import new_sample_store, reward_role
from mcore_rl.trainer.roles.remote import serve
from mcore_rl.trainer.rollouts import (
    Sampling,
    Start,
    build_sampling,
    engine_config,
    hand_over,
    make_canary,
)

NAME = "engines"


class EngineRanks:
    """Engines as the actor's ranks call them. Methods are collective over the engines' ranks; all
    their arguments and results are values of a `Role`."""

    _sampling: Sampling
    _hand_over: HandOver

    def __init__(self, job: Job, start: Start, log: TextIO | None) -> None:
        """Start the engines. `connect` must be called before anything else."""
        self._job, self._start = job, start
        self._engine = VLLMEngine(engine_config(job))
        self._sample_store = new_sample_store(job)
        self._reward_model = reward_role(job, log=log)
        self._timers = StageTimers()
        self._table: SampleTable | None = None  # of the last step
        self._ahead: AheadSampler | None = None
        self._activity = Activity()

    def connect(self, *, position: int, folder: str | None) -> dict[str, Any]:
        """Plan the hand-over, with the actor's ranks, and prepare the sampling of a run that has
        drawn `position` prompts, whose state is in `folder`. Returns what the bank has."""
        job, start = self._job, self._start
        canary = make_canary(job, None, start.prompts)
        self._hand_over = hand_over(job, engine=self._engine, canary=canary)
        start = replace(start, position=position, folder=None if folder is None else Path(folder))
        self._sampling = build_sampling(
            job, self._engine, self._sample_store, self._reward_model, start, self._timers
        )
        if isinstance(self._sampling.collector, AheadSampler):
            self._ahead = self._sampling.collector
            self._activity = self._ahead.activity
        ahead = self._ahead
        return {
            "num_banked": 0 if ahead is None else ahead.num_banked,
            "skipped": [] if ahead is None else ahead.skipped,
        }

    def update(self, *, weight_version: int) -> dict[str, Any]:
        """Receive the actor's weights, with the actor's ranks. Returns the largest numbers of bytes
        and tensors of any engine."""
        if self._ahead is not None:
            self._ahead.pause()
        self._activity.begin(UPDATE)
        report = self._hand_over.run(weight_version)
        layout, seed = self._job.spec.rollout_layout, self._job.args.seed
        seed_sampling(self._engine, layout, seed, weight_version)
        names = ("received_bytes", "lower_bound_bytes", "saved_bytes", "num_tensors")
        numbers = torch.tensor([getattr(report, name) for name in names])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=objects.start())
        self._activity.begin(IDLE)
        return dict(zip(names, numbers.tolist(), strict=True))

    def sample_eval(self, *, step: int, weight_version: int) -> None:
        """Sample the held-out prompts."""
        assert self._sampling.evaluator is not None, "there are no held-out prompts"
        self._activity.begin(EVALUATION)
        self._sampling.evaluator.sample(step, weight_version)
        self._activity.begin(IDLE)

    def evaluate(self) -> dict[str, Any]:
        """Return the accuracy of the last `sample_eval`; None without one."""
        evaluator = self._sampling.evaluator
        return {"accuracy": None if evaluator is None else evaluator.accuracy()}

    def collect(self, *, weight_version: int) -> dict[str, Any]:
        """Sample a step. Returns a `Collected` for all ranks, and the seconds that rewards took
        beyond sampling."""
        self._timers.finish_step()
        if self._ahead is not None:
            collected = self._ahead.collect(weight_version)
        else:
            assert isinstance(self._sampling.collector, Collector)
            self._activity.begin(SAMPLING)
            collected = self._sampling.collector.collect(weight_version, lambda: None)
            self._activity.begin(IDLE)
        self._table = collected.table
        spans, idle_share = self._activity.take()
        idle = {"idle/engines": float(np.mean(objects.all_gather(idle_share)))}
        collected = replace(collected, metrics=collected.metrics | idle, engine_spans=spans)
        return {
            "collected": torch.from_numpy(objects.as_bytes(collected).copy()),
            "position": self._sampling.collector.position,
            "reward_seconds": self._timers["reward"],
            "load": self._load(),
        }

    def _load(self) -> torch.Tensor:
        """Return `[m, e]` int64: how often all engines chose each expert in the last step."""
        load = torch.from_numpy(self._sample_store.load().copy())
        dist.all_reduce(load, group=objects.start())
        return load

    def deliver(self, *, wanted: Shares) -> None:
        """Send the last step's samples to the actor's ranks that want them, which receive them in
        `SampleStore.deliver`."""
        assert self._table is not None, "no step has been sampled"
        self._sample_store.deliver(self._table, wanted)

    def samples(self, *, rows: list[int]) -> dict[str, Any]:
        """Return samples of the last step, pickled, to the actor's first rank."""
        assert self._table is not None, "no step has been sampled"
        samples = self._sample_store.on_first_rank(self._table, rows)
        data = objects.as_bytes(samples)
        size = np.array([objects.broadcast(len(data))])
        first = Shares((np.array([0]),), ((0,),))
        return {
            "samples": RowExchange(size, first, first, data if dist.get_rank() == 0 else data[:0])
        }

    def undo(self) -> dict[str, Any]:
        """Discard the last step. Returns the position before it."""
        self._sampling.collector.undo()
        return {"position": self._sampling.collector.position}

    def save(self, *, folder: str) -> None:
        """Write the state of the sampling."""
        self._sampling.collector.save(Path(folder))
        objects.barrier()  # the answer, which the first rank sends, says that all have written

    def saved(self) -> None:
        """Remove from the bank what the checkpoint that is now complete has trained on."""
        if self._ahead is not None:
            self._ahead.saved()

    def work_until(self, is_called: Callable[[], bool]) -> None:
        """Sample ahead until a call has begun."""
        if self._ahead is not None:
            self._ahead.work_until(is_called)

    def close(self) -> None:
        """End the engine, and processes of rewards and environments. Not called by the actor."""
        if self._reward_model is not None:
            self._reward_model.close()
        self._sampling.close()


def serve_engines(job: Job, *, log: TextIO | None = None) -> None:
    """Run engines on ranks of their own until the actor ends the run. Collective over these."""
    note_stage(f"serving as {NAME}")
    bridge, group = job.world.bridges[ROLLOUT], job.world.joint_groups[ROLLOUT]
    served = serve(NAME, bridge, group, partial(_build, job, log))
    served.close()


def _build(job: Job, log: TextIO | None, *, day: str, prompts: list[str]) -> EngineRanks:
    """Start the engines. `prompts` are the fingerprints of the actor's prompts."""
    mine, eval_prompts = load_prompt_files(
        job.config.data,
        job.spec.checkpoint.folder,
        trust_remote_code=job.spec.trust_remote_code,
        date=day,
    )
    close_all()  # of the tokenizer
    start = Start(mine, eval_prompts, day)
    if start.fingerprints != prompts:
        raise UsageError(
            "gives other prompts on the engines' ranks than on the actor's (files, tokenizers or "
            "libraries differ)",
            flag=f"--rl-prompts {job.config.data.prompts}",
            remedy="give all machines the same",
        )
    return EngineRanks(job, start, log)
