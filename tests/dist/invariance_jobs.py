"""What a rank does in `test_invariance.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.batching.rows import lay_out, row_length
from mcore_rl.batching.train_batches import split_micro_batches
from mcore_rl.batching.types import TrainBatch
from mcore_rl.hybrid_engine.memory.offload import Offloader
from mcore_rl.trainer.hand_overs import build_offloader
from tests.dist.ppo_jobs import ChosenExperts, build_models, export_models, take_step


def learn(flags: list[str], target: str, num_steps: int = 2) -> dict[str, Any]:
    """Whole steps from given rollouts, the training state going away before each as in rollout.

    Returns what they measured, and what shows that the flags had their effect: the classes of the
    decoders (`stacks`), the `offloaded` kinds, of each model the `forwards` per layer and
    micro-batch of an update (2 with recomputation), the numbers of micro-batches in which samples
    share a prompt (`sharing`) and in which data-parallel ranks have different numbers of tokens
    (`uneven`), and of how many given choices of experts the scoring pass made how many
    (`replayed`). The weights go to `target`.
    """
    models = build_models(flags)
    job, learner = models.job, models.learner
    offloader = build_offloader(job, models.state, models.role)
    samples, batching = models.samples(), job.micro_batching()
    num_epochs = job.config.trainer.num_epochs
    forwards = [Forwards(models.state.chunks, num_epochs)]
    if models.critic is not None:
        forwards.append(Forwards(models.critic.state.chunks, num_epochs))
    chosen = ChosenExperts(models) if models.learner.sample_store.routed is not None else None
    cp_rank = learner.actor.runner.groups["cp"].rank()
    steps, sharing, uneven, replayed = [], 0, 0, torch.zeros(2)
    for step in range(num_steps):
        _there_and_back(offloader)
        batch = learner.make_batch(step, samples)
        steps.append(take_step(learner, step, batch, samples))
        parts = split_micro_batches(batch.actor)
        rows = [lay_out(part, batching, row_length(parts, batching), cp_rank) for part in parts]
        sharing += sum(each.prefix_of is not None for each in rows)
        uneven += _num_uneven([each.token_ids.numel() for each in rows])
        if chosen is not None:
            replayed += as_given(chosen.take(batch.actor), batch.actor)
        learned_from = [batch.actor]
        if models.role is not None:
            learned_from.append(models.role.served.batch)
        for counter, part in zip(forwards, learned_from, strict=True):
            counter.expect(part)
    export_models(models, Path(target))
    chunks = [*models.state.chunks, *(models.critic.state.chunks if models.critic else [])]
    found = {
        "steps": steps,
        "stacks": sorted({type(chunk.decoder).__name__ for chunk in chunks}),
        "offloaded": sorted(offloader.what),
        "forwards": [counter.per_micro_batch() for counter in forwards],
        "sharing": float(learner.actor.runner.global_sum(torch.tensor([float(sharing)]))),
        "uneven": uneven,
    }
    if chosen is not None:
        dist.all_reduce(replayed)
        found["replayed"] = replayed.tolist()
    dist.destroy_process_group()
    return found


def _num_uneven(num_tokens: list[int]) -> int:
    """Micro-batches of which some ranks have more tokens than others."""
    bounds = torch.tensor([num_tokens, [-number for number in num_tokens]])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    return int((bounds.sum(dim=0) > 0).sum())


def _there_and_back(offloader: Offloader) -> None:
    """The calls of the sharding manager in a switch to rollout and back."""
    offloader.offload("gradients", "optimizer")
    offloader.offload("parameters")
    assert offloader.offloaded == offloader.what
    assert not offloader.what or offloader.stats.moved_bytes > 0
    if offloader.offloaded:
        offloader.prefetch()
        offloader.onload()
    assert not offloader.offloaded


def as_given(choices: list[torch.Tensor], batch: TrainBatch) -> torch.Tensor:
    """`[2]`: how many tokens and layers have got the experts that were given, and how many were to
    get them."""
    found = torch.zeros(2)
    if not choices:  # no routers on this stage
        return found
    for part, ids in zip(split_micro_batches(batch), choices, strict=True):
        assert part.routes is not None and part.routes_known is not None
        # Of samples that share a prompt the first one's is used.
        same = (ids.sort(dim=-1).values == part.routes.sort(dim=-1).values).all(dim=-1)
        found += torch.tensor([same[part.routes_known].sum(), same[part.routes_known].numel()])
    return found


class Forwards:
    """Counts how often an update runs the attention of a layer, beside how often it must.

    A gated delta net and a Mamba-2 layer have an input projection instead."""

    def __init__(self, chunks: list[torch.nn.Module], num_epochs: int) -> None:
        self._found = self._expected = 0
        self._num_epochs = num_epochs
        layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
        attention = [getattr(each, "self_attention", None) or each.mixer for each in layers]
        counted = (
            getattr(each, "core_attention", None) or getattr(each, "in_proj", None)
            for each in attention
        )
        # In a HybridModel every other layer has neither.
        self._layers = [module for module in counted if module is not None]
        for layer in self._layers:
            layer.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, _: Any) -> None:
        self._found += module.training  # scoring is done in evaluation mode

    def expect(self, batch: TrainBatch) -> None:
        """`batch` was trained on in all epochs."""
        epochs = (batch, *(batch.later or [batch] * (self._num_epochs - 1)))
        num_micro_batches = sum(len(split_micro_batches(each)) for each in epochs)
        self._expected += len(self._layers) * num_micro_batches

    def per_micro_batch(self) -> float:
        return self._found / self._expected
