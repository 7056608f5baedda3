"""What a rank does in the tests of the critic's model; run by `tests.rank_pool`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_rl.batching.train_batches import split_mini_batches
from mcore_rl.common.run_output import setup_logging
from mcore_rl.job.start import start
from mcore_rl.megatron.adapter import megatron_output_to
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.roles.critic import Critic, build_critic
from tests.dist.jobs import random_batch, rank_part

NUM_SAVED_STEPS = 3


def _built(flags: list[str]) -> tuple[Job, Critic]:
    """Megatron running, with a critic and no actor, whose layout and batches the critic has."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(flags, log=log, has_engine=False)
        assert job.spec.critic is not None
        loaded = NUM_SAVED_STEPS if job.args.load else 0
        critic = build_critic(
            job.spec.critic, job.config, job.args, actor_iteration=loaded, log=log
        )
    assert critic.layout == job.spec.train_layout
    return job, critic


def _values(job: Job, critic: Critic) -> list[list[float]]:
    """The value of every token of `random_batch`, the same on every rank."""
    mine = rank_part(job, random_batch(job.spec.shape.vocab_size))
    parts: list[Any] = [None] * dist.get_world_size()
    pieces = critic.values(mine).split(mine.lengths.tolist())
    dist.all_gather_object(parts, (mine.sample_ids.tolist(), [p.tolist() for p in pieces]))
    found: dict[int, list[float]] = {}
    for samples, values in parts:
        for sample, of_sample in zip(samples, values, strict=True):
            # Pipeline stages and TP ranks have the same samples.
            assert found.setdefault(sample, of_sample) == of_sample, f"ranks disagree on {sample}"
    return [found[sample] for sample in sorted(found)]


def _update(job: Job, critic: Critic) -> list[float]:
    """Both mini-batches of `random_batch`; the gradient norms."""
    parts = split_mini_batches(rank_part(job, random_batch(job.spec.shape.vocab_size)))
    return [critic.update(part).result.grad_norm for part in parts]


def values_of_init(flags: list[str]) -> list[list[float]]:
    """What the critic says that `--rl-critic-init` fills."""
    job, critic = _built(flags)
    values = _values(job, critic)
    dist.destroy_process_group()
    return values


def update_and_save(flags: list[str], folder: str) -> dict[str, Any]:
    """Values at first, after an update and a save, and after another update."""
    job, critic = _built(flags)
    found: dict[str, Any] = {"first": _values(job, critic)}
    _update(job, critic)
    with open("/dev/null", "w") as log, megatron_output_to(log):
        critic.save(NUM_SAVED_STEPS, Path(folder))
        critic.has_saved(waits=True)
    return found | _before_and_after_an_update(job, critic)


def refuses_another_step(flags: list[str]) -> str:
    """The error of a critic beside an actor of a later step."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(flags, log=log, has_engine=False)
        assert job.spec.critic is not None
        step = NUM_SAVED_STEPS + 1
        with pytest.raises(RuntimeError) as raised:
            build_critic(job.spec.critic, job.config, job.args, actor_iteration=step, log=log)
    dist.destroy_process_group()
    return str(raised.value)


def load_and_update(flags: list[str]) -> dict[str, Any]:
    """Values of a critic that `--load` fills, and after an update."""
    job, critic = _built(flags)
    found: dict[str, Any] = {"iteration": critic.state.iteration}
    return found | _before_and_after_an_update(job, critic)


def _before_and_after_an_update(job: Job, critic: Critic) -> dict[str, Any]:
    found: dict[str, Any] = {
        "saved": _values(job, critic),
        "grad_norms": _update(job, critic),
        "learning_rate": critic.optimizer.learning_rate,
        "updated": _values(job, critic),
    }
    dist.destroy_process_group()
    return found
