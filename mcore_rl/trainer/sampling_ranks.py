"""What samples on other ranks than the actor's, as the actor's ranks call it.

    the actor's ranks (`separate`, `servers`)       ranks of engines, controllers of servers

    update ── message, then the weights ──────────► `EngineRanks`; of servers see `ControllerRanks`
    sample_eval, evaluate, collect ── message ────► Sampling; answers with a table of samples
    deliver ── message ── tokens of the samples ◄── SampleStore
    save, undo, close ── message ─────────────────► state of the sampling

The actor waits for each answer. Between two calls these ranks wait for the next one, or sample
ahead (`rollout.sampler`).
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
from mcore_rl.data.source_position import Begin
from mcore_rl.data.tokenizer_process import close_all
from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine
from mcore_rl.model.roles import ROLLOUT
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import EVALUATION, IDLE, Activity
from mcore_rl.rollout.sampler import Collected, Sampler
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import new_sample_store, reward_role
from mcore_rl.trainer.roles.remote import serve
from mcore_rl.trainer.sampling import Sampling, Start, build_sampling


class SamplingRanks:
    """What samples, as the actor's ranks call it. Methods are collective over the ranks of engines
    or controllers; all their arguments and results are values of a `Role`."""

    _sampling: Sampling

    def __init__(self, job: Job, engine: SamplingEngine, start: Start, log: TextIO | None) -> None:
        """`connect` must be called before anything else."""
        self._job, self._start, self._engine = job, start, engine
        self._sample_store = new_sample_store(job)
        self._reward_model = reward_role(job, log=log)
        self._timers = StageTimers()
        self._table: SampleTable | None = None  # of the last step
        self._activity = Activity()
        self._is_connected = False

    def connect(
        self,
        *,
        position: int,
        begin: dict[str, Any],
        folder: str | None,
        began_with: str,
        branch: str,
    ) -> dict[str, Any]:
        """Prepare the sampling of a run that has drawn `position` prompts, whose state is in
        `folder`. `begin` has the fields of `Begin`; `began_with` and `branch` are those of
        `TrainerState`. Returns the bank's contents."""
        prompts = self._start.prompts.begun(Begin(**begin))
        path = None if folder is None else Path(folder)
        start = replace(
            self._start,
            prompts=prompts,
            position=position,
            folder=path,
            began_with=began_with,
            branch=branch,
        )
        self._sampling = build_sampling(
            self._job, self._engine, self._sample_store, self._reward_model, start, self._timers
        )
        self._activity, self._is_connected = self._sampler.activity, True
        return {"num_banked": self._sampler.num_banked, "skipped": self._sampler.skipped}

    @property
    def _sampler(self) -> Sampler:
        return self._sampling.sampler

    def sample_eval(self, *, step: int, weight_version: int) -> dict[str, Any]:
        """Sample the held-out prompts. Returns nothing if that needs another update."""
        assert self._sampling.evaluator is not None, "there are no held-out prompts"
        self._activity.begin(EVALUATION)
        self._sampling.evaluator.sample(step, weight_version)
        self._activity.begin(IDLE)
        return {"is_done": True}

    def evaluate(self) -> dict[str, Any]:
        """Return the metrics of the last `sample_eval`; none without one."""
        evaluator = self._sampling.evaluator
        return {"metrics": {} if evaluator is None else evaluator.metrics()}

    def collect(self, *, weight_version: int) -> dict[str, Any]:
        """Sample a step. Returns a `Collected` for all ranks, and the seconds that rewards took
        beyond sampling; nothing if the sampling cannot continue without an update."""
        self._timers.finish_step()
        collected = self._collected(weight_version)
        if collected is None:
            return {}
        self._table = collected.table
        spans, idle_share = self._activity.take()
        idle = {"idle/engines": float(np.mean(objects.all_gather(idle_share)))}
        collected = replace(collected, metrics=collected.metrics | idle, engine_spans=spans)
        return {
            "collected": torch.from_numpy(objects.as_bytes(collected).copy()),
            "position": self._sampler.position,
            "reward_seconds": self._timers["reward"],
            "load": self._load(),
        }

    def _collected(self, weight_version: int) -> Collected | None:
        """Return a step's samples."""
        return self._sampler.collect(weight_version)

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
        self._sampler.undo()
        return {"position": self._sampler.position}

    def save(self, *, folder: str) -> None:
        """Write the state of the sampling."""
        self._sampler.save(Path(folder))
        objects.barrier()  # the answer, which the first rank sends, says that all have written

    def saved(self) -> None:
        """Remove from the bank what the checkpoint that is now complete has trained on."""
        self._sampler.saved()

    def work_until(self, is_called: Callable[[], bool]) -> None:
        """Sample ahead until a call has begun; nothing before `connect`."""
        if self._is_connected:
            self._sampler.work_until(is_called)

    def close(self) -> None:
        """End the engine, and processes of rewards and environments. Not called by the actor."""
        if self._reward_model is not None:
            self._reward_model.close()
        self._sampling.close()


def serve_sampling(job: Job, name: str, make: Callable[[Start], SamplingRanks]) -> None:
    """Serve what `make` returns until the actor ends the run. Collective over the role's ranks."""
    note_stage(f"serving as {name}")
    bridge, group = job.world.bridges[ROLLOUT], job.world.joint_groups[ROLLOUT]
    served = serve(name, bridge, group, partial(_build, job, name, make))
    served.close()


def _build(
    job: Job,
    name: str,
    make: Callable[[Start], SamplingRanks],
    *,
    day: str,
    prompts: list[str],
) -> SamplingRanks:
    """Start what samples. `prompts` are the fingerprints of the actor's prompts."""
    mine, eval_prompts = load_prompt_files(
        job.config.data,
        job.spec.checkpoint.folder,
        per_step=job.config.trainer.num_prompts_per_step,
        trust_remote_code=job.spec.trust_remote_code,
        date=day,
    )
    close_all()  # of the tokenizer
    start = Start(mine, eval_prompts, day)
    if start.fingerprints != prompts:
        raise UsageError(
            f"gives other prompts on the ranks of {name} than on the actor's (files, tokenizers or "
            "libraries differ)",
            flag=f"--rl-prompts {job.config.data.prompts}",
            remedy="give all machines the same",
        )
    return make(start)
