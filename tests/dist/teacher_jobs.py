"""What a rank does in the tests of teachers; run by `tests.rank_pool`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.run_output import setup_logging
from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.job.start import start
from mcore_rl.model.roles import TEACHER
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import build_actor, build_learner, serve_role, teacher_roles
from tests.dist.ppo_jobs import step_samples
from tests.prompt_tables import dataset


def distil(flags: list[str], target: Path | None = None) -> dict[str, Any]:
    """A step that learns from a teacher; what the actor's ranks measured, alike on all of them. The
    weights after the step go to `target`."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(flags, log=log)
        found: dict[str, Any] = {}
        if job.world.role == TEACHER:
            serve_role(job, log=log)
        else:
            found = _act(job, log, target)
    dist.destroy_process_group()
    return {"role": job.world.role, **found}


def _act(job: Job, log: Any, target: Path | None) -> dict[str, Any]:
    state, shards = build_actor(job, log=log)
    roles = teacher_roles(job, log=log)
    prompts = None
    if job.config.data.prompts is not None:  # a source of each prompt of `step_samples`
        specs = job.config.data.train_sources()
        prompts = PromptSources([(spec, dataset(1, spec.name)) for spec in specs])
    learner = build_learner(job, state, shards, None, teachers=roles, prompts=prompts)
    table = step_samples(job, learner.sample_store)
    table = dataclasses.replace(table, rewards=0 * table.rewards)  # as --rl-reward none gives
    batch = learner.with_log_probs(learner.make_batch(0, table))
    samples = batch.actor
    assert samples.teacher_log_probs is not None and samples.old_log_probs is not None
    lengths = samples.lengths.tolist()
    columns = [samples.teacher_log_probs.split(lengths), samples.old_log_probs.split(lengths)]
    batch = learner.with_advantages(table, batch)
    assert batch.actor.advantages is not None
    columns.append(batch.actor.advantages.split(lengths))
    mine = {
        sample: [column[number].tolist() for column in columns]
        for number, sample in enumerate(samples.sample_ids.tolist())
    }
    everywhere: dict[int, list[list[float]]] = {}
    for part in objects.all_gather(mine):
        for sample, found in part.items():
            assert everywhere.setdefault(sample, found) == found, "ranks of a place disagree"
    (stats,) = learner.update(0, batch).actor
    for role in filter(None, roles):
        role.close()
    if target is not None:
        export(shards, job.spec.checkpoint, Path(target))
    names = ("teacher", "student", "advantages")
    by_name = {
        name: [everywhere[sample][number] for sample in sorted(everywhere)]
        for number, name in enumerate(names)
    }
    return {
        **by_name,
        "is_swapped": not any(roles),
        "metrics": dict(batch.metrics),
        "grad_norm": stats.result.grad_norm,
        "centering": None
        if stats.centering is None
        else stats.centering.metrics(float(stats.sums.num_tokens)),
        "kl": None if stats.teacher_kl is None else stats.teacher_kl / float(stats.sums.num_tokens),
    }
