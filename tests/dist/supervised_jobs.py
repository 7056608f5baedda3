"""What a rank does in `test_supervised.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from mcore_rl.trainer.mixed import MixedDemonstrations, read_mixed
from mcore_rl.trainer.step_metrics import update_metrics
from tests.dist.ppo_jobs import build_models, export_models


def learn_both(flags: list[str], target: str, *, equal_rewards: bool) -> dict[str, Any]:
    """Steps from given samples with demonstrations beside them; with `equal_rewards` samples have
    no advantages, so that demonstrations alone are learned."""
    models = build_models(flags)
    rows = read_mixed(models.job.config, models.job.spec.checkpoint.folder)
    assert rows is not None
    models.learner.demonstrations = MixedDemonstrations(models.job, rows)
    table = models.samples()
    if equal_rewards:
        table = dataclasses.replace(table, rewards=np.ones(len(table)))
    learner, steps = models.learner, []
    for step in range(models.job.config.trainer.num_steps):
        batch = learner.with_log_probs(learner.make_batch(step, table))
        updates = learner.update(step, learner.with_advantages(table, batch))
        steps.append(update_metrics(updates.actor))
    export_models(models, Path(target))
    dist.destroy_process_group()
    return {"steps": steps}
