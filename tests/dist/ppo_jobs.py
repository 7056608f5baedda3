"""What a rank does in the tests of PPO and its critic; run by `tests.rank_pool`."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.batching.rows import lay_out, row_length
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.train_batches import split_micro_batches
from mcore_rl.batching.types import (
    Baseline,
    Prompt,
    Rollout,
    ScoredRollout,
    StepBatch,
    TopTokens,
    TrainBatch,
)
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.peft_export import export_adapter
from mcore_rl.job.start import start
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.router_layout import RouterLayout
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.moe.routing import RoutedLayers, Routes
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.learner import Learner
from mcore_rl.trainer.models import build_actor, build_learner
from mcore_rl.trainer.resume.checkpoint_writer import write_checkpoint
from mcore_rl.trainer.resume.folders import iteration_name
from mcore_rl.trainer.resume.point import ResumePoint
from mcore_rl.trainer.resume.trainer_state import TrainerState
from mcore_rl.trainer.roles.critic import Critic, ServedCritic, build_critic
from mcore_rl.trainer.roles.remote import LocalRole
from mcore_rl.trainer.step_metrics import mismatch_metrics
from tests.dist.jobs import as_float32, random_tokens
from tests.held import sampled_by_engines


def step_samples(job: Job, sample_store: SampleStore) -> SampleTable:
    """A step's samples, of different lengths and rewards; the same in every layout.

    They are stored as after a rollout. If `sample_store` stores experts or candidates, too, they
    are random. Collective.
    """
    scored = scored_samples(job.spec.shape.vocab_size, job.config.samples_per_step)
    if sample_store.num_top:
        scored = with_candidates(scored, sample_store.num_top, job.spec.shape.vocab_size)
    if sample_store.routed is not None:
        routed = with_routes([sample.rollout for sample in scored], sample_store.routed)
        scored = [
            dataclasses.replace(sample, rollout=rollout)
            for sample, rollout in zip(scored, routed, strict=True)
        ]
    return sampled_by_engines(sample_store, job.spec.rollout_layout, scored)


def with_routes(rollouts: list[Rollout], routed: RoutedLayers) -> list[Rollout]:
    """Experts at random for every computed token, one in eight of which nothing is known of; those
    of a prompt are the same for all of its samples."""
    rng, of_prompt, found = np.random.default_rng(7), {}, []

    def drawn(num_tokens: int) -> Routes:
        scores = rng.random((num_tokens, len(routed.layers), routed.num_experts))
        ids = scores.argsort(axis=-1)[..., : routed.topk].astype(routed.dtype)
        return Routes(ids, rng.random(num_tokens) > 0.125)

    for rollout in rollouts:
        prompt = rollout.prompt
        if prompt.index not in of_prompt:
            of_prompt[prompt.index] = drawn(len(prompt.token_ids))
        first, then = of_prompt[prompt.index], drawn(len(rollout.response_token_ids) - 1)
        routes = Routes(
            np.concatenate([first.ids, then.ids]), np.concatenate([first.known, then.known])
        )
        found.append(dataclasses.replace(rollout, routes=routes))
    return found


CANDIDATE_MASS = 0.9


def with_candidates(
    scored: list[ScoredRollout], num_top: int, vocab_size: int
) -> list[ScoredRollout]:
    """With random tokens as the engine's most probable ones at each position of a response."""
    rng, found = np.random.default_rng(8), []
    for sample in scored:
        shape = (len(sample.rollout.response_token_ids), vocab_size)
        ids = rng.random(shape).argsort(axis=1)[:, :num_top].astype(np.int32)
        shares = rng.dirichlet(np.ones(num_top), size=shape[0])
        top = TopTokens(ids, np.log(CANDIDATE_MASS * shares).astype(np.float32))
        rollout = dataclasses.replace(sample.rollout, top_tokens=top)
        found.append(dataclasses.replace(sample, rollout=rollout))
    return found


def scored_samples(vocab_size: int, num_samples: int) -> list[ScoredRollout]:
    """Samples, two after each prompt."""
    rng = random.Random(3)
    generator = torch.Generator().manual_seed(4)
    scored = []
    rows = random_tokens(vocab_size, samples=num_samples)
    for number, row in enumerate(rows):
        length, response = rng.randint(14, 32), rng.randint(4, 10)
        tokens = row[:length].numpy().astype(np.int32)
        noise = torch.randn(response, generator=generator) * 0.1
        if number % 2 == 0:
            prompt = Prompt(number // 2, "", "", tokens[: length - response])
        rollout = Rollout(
            prompt=prompt,
            sample_index=0,
            text="",
            response_token_ids=tokens[length - response :],
            rollout_log_probs=(noise - 6).numpy(),
            finish_reason="stop",
            weight_version=1,
        )
        reward, baseline = rng.random(), Baseline(rng.random(), num_tokens=response)
        scored.append(ScoredRollout(rollout, reward, baseline=baseline))
    return scored


@dataclass(frozen=True)
class Models:
    """What a job trains, and what trains it."""

    job: Job
    state: megatron_adapter.TrainState
    shards: ModelShards
    critic: Critic | None
    role: LocalRole | None  # what the critic is to the learner
    learner: Learner

    def samples(self) -> SampleTable:
        return step_samples(self.job, self.learner.sample_store)

    def take_step(self, step: int, samples: SampleTable) -> dict[str, float]:
        return take_step(self.learner, step, self.learner.make_batch(step, samples), samples)


def build_models(flags: list[str], point: ResumePoint | None = None) -> Models:
    """Megatron running, with the checkpoint in actor and critic; resumed from `point` if given."""
    setup_logging()
    with open("/dev/null", "w") as log:
        return models_of(as_float32(start(flags, log=log, has_engine=False)), point)


def models_of(job: Job, point: ResumePoint | None = None) -> Models:
    with open("/dev/null", "w") as log:
        state, shards = build_actor(job, log=log)
        critic = None
        if job.spec.critic is not None:
            critic = build_critic(
                job.spec.critic, job.config, job.args, actor_iteration=state.iteration, log=log
            )
    role = None
    if critic is not None:
        role = LocalRole(ServedCritic(critic, job.config.trainer, is_separate=False))
    learner = build_learner(job, state, shards, role, point)
    return Models(job, state, shards, critic, role, learner)


def routers_of(models: Models) -> dict[int, Any]:
    """The actor's routers on this stage, by layer from 0."""
    return {
        layer.layer_number - 1: layer.mlp.router
        for chunk in models.state.chunks
        for layer in chunk.decoder.layers
        if hasattr(layer.mlp, "router")
    }


class ChosenExperts:
    """Notes what the actor's routers choose when it scores, as the experts get it."""

    def __init__(self, models: Models) -> None:
        self._job, self._runner = models.job, models.learner.actor.runner
        routers = routers_of(models)
        whole = models.job.spec.routed_layers
        assert whole is not None
        self.routed = dataclasses.replace(whole, layers=tuple(sorted(routers)))  # on this stage
        self._layout = RouterLayout.of(models.job.args, self._runner.groups, self._runner.device)
        self._found: dict[int, list[torch.Tensor]] = {layer: [] for layer in routers}
        for router in routers.values():
            router.register_forward_hook(self._note)

    def _note(self, router: Any, _: Any, output: tuple[torch.Tensor, Any]) -> None:
        if not router.training:
            ids = output[1].nonzero()[:, 1].view(-1, self.routed.topk)
            self._found[router.layer_number - 1].append(ids)

    def take(self, batch: TrainBatch) -> list[torch.Tensor]:
        """`[t, m, k]` of each micro-batch of `batch` in the first pass since the last call; none if
        there are no routers on this stage."""
        batching, parts = self._job.micro_batching(), split_micro_batches(batch)
        length, cp_rank = row_length(parts, batching), self._runner.groups["cp"].rank()
        taken = []
        for number, part in enumerate(parts if self.routed.layers else ()):
            noted = {i: self._found[layer][number] for i, layer in enumerate(self.routed.layers)}
            rows = lay_out(part, batching, length, cp_rank)
            taken.append(self._layout.gathered(noted, rows, self.routed).long())
        for found in self._found.values():
            found.clear()
        return taken


def export_models(models: Models, target: Path) -> None:
    """The weights of actor and critic, into folders of these names."""
    export(models.shards, models.job.spec.checkpoint, target / "actor")
    if models.critic is not None:
        assert models.job.spec.critic is not None
        export(models.critic.shards, models.job.spec.critic.checkpoint, target / "critic")


def learn(
    flags: list[str], target: str, num_steps: int = 2, scores_in_update: bool | None = None
) -> dict[str, Any]:
    """Whole steps from given rollouts; what they measured, and both models afterwards.

    `scores_in_update` replaces what the learner decides about it.
    """
    models = build_models(flags)
    learner, critic = models.learner, models.critic
    if scores_in_update is not None:
        assert learner.scores_in_update, "it would be no choice"
        learner.scores_in_update = scores_in_update
    samples = models.samples()
    found: dict[str, Any] = {
        "steps": [models.take_step(step, samples) for step in range(num_steps)]
    }
    export_models(models, Path(target))
    if critic is not None:
        critic.save(num_steps, Path(target) / "saved")
        critic.has_saved(waits=True)
        found["critic_layout"] = critic.world.layout.describe()
    dist.destroy_process_group()
    return found


def learning_rates(flags: list[str]) -> dict[str, list[float]]:
    """Learning rates of actor and critic that are reported for every update of a whole run, and
    the ones after the last update."""
    models = build_models(flags)
    samples = models.samples()
    assert models.critic is not None
    optimizers = {
        "actor": models.learner.actor.optimizer,
        "critic": models.critic.optimizer,
    }
    found: dict[str, list[float]] = {name: [] for name in optimizers}

    def noting(name: str, optimizer: Any) -> Any:
        step = optimizer.step

        def noted(**how: Any) -> Any:
            result = step(**how)
            found[name].append(optimizer.learning_rate)
            return result

        return noted

    for name, optimizer in optimizers.items():
        optimizer.step = noting(name, optimizer)  # type: ignore[method-assign]
    for step in range(models.job.config.trainer.num_steps):
        models.take_step(step, samples)
    for name, optimizer in optimizers.items():
        found[name].append(max(g["lr"] for g in optimizer._state.optimizer.param_groups))
    dist.destroy_process_group()
    return found


def take_step(
    learner: Learner, step: int, batch: StepBatch, samples: SampleTable
) -> dict[str, float]:
    """One step of the algorithm on `samples`, of which `batch` is made; what it measured."""
    batch = learner.with_advantages(samples, learner.with_log_probs(batch))
    learned = learner.update(step, batch)
    found = dict(batch.metrics)
    for stats in learned.actor:
        if stats.mismatch is not None:
            found.update(mismatch_metrics(stats.mismatch))
    for number, stats in enumerate([*learned.actor, *learned.critic]):
        found[f"{number} grad_norm"] = stats.result.grad_norm
        if getattr(stats, "indexer_loss", None) is not None:
            found[f"{number} indexer_loss"] = stats.indexer_loss
        for name in type(stats.sums).__slots__:
            mean = getattr(stats.sums, name) / stats.sums.num_tokens
            found[f"{number} {name}"] = float(mean)
    return found


def learn_save_and_learn(flags: list[str], target: str) -> dict[str, float]:
    """A step, a checkpoint in `saved`, and another step; what that one measured."""
    models = build_models(flags)
    models.take_step(0, models.samples())
    folder = Path(target) / "saved"
    if models.critic is not None:
        models.critic.save(1, folder)
        models.critic.has_saved(waits=True)

    def write_actor(saving: Path) -> None:
        megatron_checkpoint.save_checkpoint(models.job.args, models.state, 1, saving)

    with open("/dev/null", "w") as log, megatron_adapter.megatron_output_to(log):
        write_checkpoint(folder, 1, [write_actor])
    return _step_and_export(models, 1, target)


def load_and_learn(flags: list[str], target: str) -> dict[str, float]:
    """That second step, after `--load`, of a run whose reference is the Hugging Face folder."""
    saved = Path(flags[flags.index("--load") + 1])
    point = ResumePoint(saved / iteration_name(1), TrainerState(step=1, layout=""), rng=None)
    models = build_models(flags, point)
    assert models.state.iteration == 1
    return _step_and_export(models, 1, target)


def _step_and_export(models: Models, step: int, target: str) -> dict[str, float]:
    found = models.take_step(step, models.samples())
    export_models(models, Path(target))
    spec = models.job.spec
    if spec.lora is not None:
        base = spec.checkpoint.folder
        export_adapter(models.state.chunks, spec.lora, base, Path(target) / "adapter")
    dist.destroy_process_group()
    return found


def refuses_a_reward(flags: list[str], sample: int) -> str:
    """The error of a step in which a reward is nan."""
    models = build_models(flags)
    samples = models.samples()
    samples.rewards[sample] = float("nan")
    with pytest.raises(RuntimeError) as raised:
        models.take_step(0, samples)
    dist.destroy_process_group()
    return str(raised.value)
