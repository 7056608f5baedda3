"""What a rank does in the tests of roles with ranks of their own; run by `tests.rank_pool`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.types import TrainBatch
from mcore_rl.common import objects
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.job.start import start
from mcore_rl.megatron.optimizer import CheckedOptimizer
from mcore_rl.megatron.runner import ModelRunner
from mcore_rl.model.roles import CRITIC, REWARD
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.models import (
    build_actor,
    build_learner,
    critic_role,
    new_sample_store,
    reward_role,
    serve_role,
)
from mcore_rl.trainer.roles.critic import Critic, ServedCritic, build_critic
from mcore_rl.trainer.roles.remote import Message, serve
from mcore_rl.trainer.roles.reward_model import ModelReward
from tests.dist.jobs import as_float32
from tests.dist.ppo_jobs import step_samples, take_step

MEETING_SECONDS = 300


class Received:
    """What reaches this rank while samples are learned from: bytes from each side, and the largest
    tensor of all that is told to every rank, in numbers."""

    def __init__(self, job: Job) -> None:
        """From now on."""
        self.exchanged = 0  # from other ranks, of this rank's own world and beyond
        self.most_told = 0
        self._in_model = False
        objects.exchange = self._counting(objects.exchange, lambda: dist.get_rank())
        for group in job.world.joint_groups.values():
            group.exchange = self._counting(group.exchange, lambda group=group: group._rank)
        for bridge in job.world.bridges.values():
            for name in ("receive", "receive_answer"):
                setattr(bridge, name, self._noting(getattr(bridge, name)))
        for name in ("all_reduce", "all_gather", "all_gather_into_tensor"):
            setattr(dist, name, self._told(getattr(dist, name)))
        # What models and optimizers tell each other is none of samples.
        ModelRunner._run = self._of_model(ModelRunner._run)
        CheckedOptimizer.step = self._of_model(CheckedOptimizer.step)

    def _counting(self, exchange: Callable, own_rank: Callable[[], int]) -> Callable:
        def counted(outgoing: Any, incoming: Any) -> Any:
            self.exchanged += sum(incoming) - incoming[own_rank()]
            return exchange(outgoing, incoming)

        return counted

    def _noting(self, hear: Callable) -> Callable:
        def heard() -> Message:
            message = hear()
            for value in message.values.values():
                if isinstance(value, torch.Tensor):
                    self.most_told = max(self.most_told, value.numel())
            return message

        return heard

    def _told(self, collective: Callable) -> Callable:
        def told(tensor: Any, *args: Any, **how: Any) -> Any:
            if not self._in_model and isinstance(tensor, torch.Tensor):
                self.most_told = max(self.most_told, tensor.numel())
            return collective(tensor, *args, **how)

        return told

    def _of_model(self, method: Callable) -> Callable:
        def of_model(*args: Any, **how: Any) -> Any:
            self._in_model = True
            try:
                return method(*args, **how)
            finally:
                self._in_model = False

        return of_model


def tokens_of_rank(batch: TrainBatch) -> tuple[int, int]:
    """Tokens that a rank trains on in the first epoch, and those that later epochs add."""
    first = dict(zip(batch.sample_ids.tolist(), batch.lengths.tolist(), strict=True))
    every = dict(first)
    for each in batch.later:
        every |= dict(zip(each.sample_ids.tolist(), each.lengths.tolist(), strict=True))
    return sum(first.values()), sum(every.values()) - sum(first.values())


def scores(flags: list[str]) -> list[float]:
    """The reward model's scores of `step_samples`, on the actor's ranks."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(flags, log=log)
        role = reward_role(job, log=log)
    model = ModelReward(role)
    sample_store = new_sample_store(job)
    table = step_samples(job, sample_store)
    found = model.scores(sample_store, table).tolist()
    # Any number of samples; divided otherwise, they round otherwise.
    few = model.scores(sample_store, table.take(range(3)))
    np.testing.assert_allclose(few, found[:3], atol=1e-5)
    assert model.scores(sample_store, table.take([])).tolist() == []
    role.close()
    dist.destroy_process_group()
    return found


def learn_apart(flags: list[str], target: str, num_steps: int = 2) -> dict[str, Any]:
    """As `ppo_jobs.learn`, each role on its own ranks. Actor and critic wait for each other in
    every update, which only ends if they are in it at the same time."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = as_float32(start(flags, log=log))
        if job.world.role == REWARD:
            serve_role(job, log=log)
            found: dict[str, Any] = {}
        elif job.world.role == CRITIC:
            found = _criticise(job, Path(target), log)
        else:
            found = _act(job, Path(target), num_steps, log)
    dist.destroy_process_group()
    return {"role": job.world.role, **found}


def _criticise(job: Job, target: Path, log: Any) -> dict[str, Any]:
    built: list[Critic] = []
    assert job.spec.critic is not None

    def build(iteration: int) -> ServedCritic:
        built.append(build_critic(job.spec.critic, job.config, job.args, log=log))
        critic = ServedCritic(built[0], job.config.trainer, is_separate=True, log=log)
        critic.model.update = _meeting(critic.model.update, target, CRITIC, "actor")
        update = critic.update

        def updated(**returns: torch.Tensor) -> Any:
            first, later = tokens_of_rank(critic.batch)
            # Tokens as they are told to roles, returns; in later epochs returns and values, too.
            expected.append((5 + 4) * first + (5 + 4 + 4) * later)
            return update(**returns)

        critic.update = updated
        return critic

    expected: list[int] = []
    received = Received(job)
    serve("critic", job.world.bridges[CRITIC], job.world.joint_groups[CRITIC], build)
    export(built[0].shards, job.spec.critic.checkpoint, target / "critic")
    return {
        "layout": built[0].world.layout.describe(),
        "expected_bytes": sum(expected),
        "received_bytes": received.exchanged,
        "most_told": received.most_told,
    }


def _act(job: Job, target: Path, num_steps: int, log: Any) -> dict[str, Any]:
    state, shards = build_actor(job, log=log)
    critic, reward_model = critic_role(job, log=log), reward_role(job, log=log)
    learner = build_learner(job, state, shards, critic)
    learner.actor.update = _meeting(learner.actor.update, target, "actor", CRITIC)
    assert learner.critic is not None and critic is not None and reward_model is not None
    samples = step_samples(job, learner.sample_store)
    scores = ModelReward(reward_model).scores(learner.sample_store, samples)
    found: dict[str, Any] = {"scores": scores.tolist()}
    found["num_tokens"] = int(samples.lengths.sum())
    received, expected = Received(job), 0
    steps = []
    for step in range(num_steps):
        batch = learner.make_batch(step, samples)
        # Values of its samples, and with their log-probs the tokens of those sampled elsewhere.
        from_others = samples.homes[batch.actor.sample_ids] != learner.sample_store.home
        expected += int((4 + 9 * from_others) @ batch.actor.lengths.numpy())
        steps.append(take_step(learner, step, batch, samples))
    found["steps"] = steps
    found["expected_bytes"], found["received_bytes"] = expected, received.exchanged
    found["most_told"] = received.most_told
    found["rates"] = sorted(learner.rates())
    learner.critic.save(num_steps, target / "saved")
    learner.critic.has_saved(waits=True)
    export(shards, job.spec.checkpoint, target / "actor")
    critic.close()
    reward_model.close()
    return found


def _meeting(update: Callable, folder: Path, me: str, other: str) -> Callable:
    """`update` that first waits until the other role is in its update of the same number."""
    count = 0

    def meet(batch: Any) -> Any:
        nonlocal count
        count += 1
        (folder / f"{me} {count}").touch()
        deadline = time.monotonic() + MEETING_SECONDS
        while not (folder / f"{other} {count}").exists():
            assert time.monotonic() < deadline, f"{other} was not in update {count}"
            time.sleep(0.01)
        return update(batch)

    return meet
