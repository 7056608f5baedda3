"""The metrics of a step: rewards, losses, the mismatch of engine and actor, times, memory."""

from __future__ import annotations

import functools
import math
import operator
import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.algorithms.mismatch import MismatchSums
from mcore_rl.batching.table import SampleTable
from mcore_rl.data.prompts import PromptSources
from mcore_rl.hybrid_engine.memory.usage import (
    device_bytes,
    give_back_cached,
    highest_bytes,
    host_bytes,
)
from mcore_rl.hybrid_engine.switch_report import ReshardReport
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rewards.parts import part_metrics
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rollout.sampler import Collected
from mcore_rl.trainer.actor import UpdateStats
from mcore_rl.trainer.roles.critic import ValueUpdateStats


def rollout_metrics(table: SampleTable) -> dict[str, float]:
    """Return rewards and lengths of a step's samples, which are the same on all ranks.

    Mean and deviation are over the rewards that did not fail, at least one.
    """
    rewards = table.rewards[table.has_reward]
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/failures": float((~table.has_reward).sum()),
        "rollout/failures": float(table.has_failed.sum()),
        "response_tokens/mean": float(table.response_lengths.mean()),
        "response_tokens/cut_share": float(table.is_cut.mean()),
    }


def source_metrics(
    table: SampleTable, prompts: PromptSources, rewards: RewardSpec
) -> dict[str, float]:
    """Return the metrics of each reward, if there are several, and of each source of prompts, if
    there are several: `source/NAME/...`.

    Of a source: the prompts of the step, the mean reward and the accuracy (the share of rewards of
    at least 1) of samples with a reward, if any, and the mean length of responses, in tokens.
    """
    sources = prompts.sources_of(table.prompts)
    uses = [rewards.weights_of(spec.key) for spec in prompts.specs]

    def is_used(name: str) -> np.ndarray:
        return np.isin(sources, [n for n, weights in enumerate(uses) if name in weights])

    metrics = part_metrics(table, rewards.names, is_used) if len(rewards.names) > 1 else {}
    for number, name in enumerate(prompts.names):
        own = sources == number
        own_rewards = table.rewards[own & table.has_reward]
        metrics[f"source/{name}/prompts"] = float(len(np.unique(table.draws[own])))
        if own.any():
            metrics[f"source/{name}/response_tokens_mean"] = float(
                table.response_lengths[own].mean()
            )
        if len(own_rewards):
            metrics[f"source/{name}/reward_mean"] = float(own_rewards.mean())
            metrics[f"source/{name}/accuracy"] = float((own_rewards >= 1.0).mean())
    return metrics


def sampled_metrics(
    table: SampleTable,
    updates: Sequence[UpdateStats],
    *,
    prompts: PromptSources,
    rewards: RewardSpec,
) -> dict[str, float]:
    """Return the metrics of a step's samples and of the updates for them."""
    return {
        **rollout_metrics(table),
        **source_metrics(table, prompts, rewards),
        **update_metrics(updates),
    }


def update_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    """Return the actor's metrics over a step's updates: means over all loss tokens, the mean
    gradient norm, the number of skipped updates; nothing without an update."""
    if not updates:
        return {}
    total = functools.reduce(operator.add, (update.sums for update in updates))
    tokens = max(float(total.num_tokens), 1.0)
    clipped = float(total.clipped_lower + total.clipped_upper)
    norms = [u.result.grad_norm for u in updates]
    return {
        "loss/policy": float(total.policy_loss) / tokens,
        "kl/ref": float(total.kl) / tokens,
        "entropy": float(total.entropy) / tokens,
        "clip_fraction": clipped / tokens,
        "ratio/mean": float(total.ratio) / tokens,
        "grad_norm": float(np.mean(norms)),
        "skipped_updates": float(sum(u.result.skipped for u in updates)),
        "mismatch/off_policy_share": float(total.off_policy) / tokens,
        **(mismatch_metrics(updates[0].mismatch) if updates[0].mismatch is not None else {}),
        **_mtp_metrics(updates),
        **_demonstration_metrics(updates),
        **_indexer_metrics(updates),
        **_teacher_metrics(updates, tokens),
        **_centering_metrics(updates, tokens),
    }


def mean_entropy(updates: Sequence[UpdateStats]) -> float:
    """Return the entropy in nats per loss token over a step's updates; nan without a token."""
    tokens = sum(float(update.sums.num_tokens) for update in updates)
    return sum(float(u.sums.entropy) for u in updates) / tokens if tokens else math.nan


def _mtp_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    of_mtp = [update.mtp for update in updates if update.mtp is not None]
    if not of_mtp:
        return {}
    return {"loss/mtp": sum(m.loss for m in of_mtp) / max(sum(m.num_tokens for m in of_mtp), 1.0)}


def _teacher_metrics(updates: Sequence[UpdateStats], num_tokens: float) -> dict[str, float]:
    divergences = [update.teacher_kl for update in updates if update.teacher_kl is not None]
    return {"loss/teacher": sum(divergences) / num_tokens} if divergences else {}


def _centering_metrics(updates: Sequence[UpdateStats], num_tokens: float) -> dict[str, float]:
    sums = [update.centering for update in updates if update.centering is not None]
    return functools.reduce(operator.add, sums).metrics(num_tokens) if sums else {}


def _demonstration_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    sums = [update.demonstrations for update in updates if update.demonstrations is not None]
    if not sums:
        return {}
    return {"loss/sft": sum(t.loss for t in sums) / max(sum(t.num_tokens for t in sums), 1.0)}


def _indexer_metrics(updates: Sequence[UpdateStats]) -> dict[str, float]:
    of_updates = {
        "loss/indexer": [update.indexer_loss for update in updates],
        "mismatch/indexer_replaced": [update.indexer_replaced for update in updates],
    }
    known = {
        name: [value for value in values if value is not None]
        for name, values in of_updates.items()
    }
    return {name: float(np.mean(values)) for name, values in known.items() if values}


def mismatch_metrics(sums: MismatchSums) -> dict[str, float]:
    """Return the mismatch of engine and actor with equal weights, and the correction's effect."""
    metrics = {f"mismatch/{name}": value for name, value in sums.metrics().items()}
    metrics["kl/rollout_actor"] = metrics.pop("mismatch/kl")
    return metrics


def value_metrics(updates: Sequence[ValueUpdateStats]) -> dict[str, float]:
    """Return the critic's metrics over a step's updates, as `update_metrics`."""
    if not updates:
        return {}
    total = functools.reduce(operator.add, (update.sums for update in updates))
    tokens = max(float(total.num_tokens), 1.0)
    return {
        "loss/value": float(total.value_loss) / tokens,
        "critic/clip_fraction": float(total.clipped) / tokens,
        "critic/grad_norm": float(np.mean([u.result.grad_norm for u in updates])),
        "critic/skipped_updates": float(sum(u.result.skipped for u in updates)),
    }


def measured(
    collected: Collected,
    report: ReshardReport | None,
    timers: StageTimers,
    device: torch.device,
) -> dict[str, float]:
    """Return the ranks' maxima of bytes and memory, this rank's times, and tokens per second.

    `report` is the step's hand-over, None without engines, `device` the groups' communication
    device. Ends the step of `timers`. Collective over the world.
    """
    host_peak_bytes, device_peak_bytes = highest_bytes()
    give_back_cached()  # as the next switch does; if the rest grows, it is a leak
    train_seconds, rollout_seconds = timers["train"], timers["rollout"]
    if collected.sampling_seconds is not None:
        rollout_seconds = collected.sampling_seconds
    of_hand_over = {}
    if report is not None:
        of_hand_over = {
            "reshard/received_bytes_max": report.received_bytes,
            "reshard/lower_bound_bytes_max": report.lower_bound_bytes,
            "reshard/peak_extra_bytes_max": report.peak_extra_bytes,
            "offload/moved_bytes_max": report.offloaded.moved_bytes,
            "offload/saved_bytes_max": report.offloaded.saved_bytes,
        }
    mine = {
        **of_hand_over,
        "memory/host_peak_bytes": host_peak_bytes,
        "memory/device_peak_bytes": device_peak_bytes,
        "memory/host_bytes": host_bytes("RssAnon"),
        "memory/device_bytes": device_bytes(),
        "memory/open_files": len(os.listdir("/proc/self/fd")),
    }
    values = torch.tensor(list(mine.values()), dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    metrics = dict(zip(mine, values.tolist(), strict=True))
    if report is not None:
        metrics["reshard/weight_version"] = float(report.weight_version)
        metrics["reshard/attested"] = float(report.attested)
        metrics["throughput/rollout_tokens_per_second"] = collected.num_generated_tokens / max(
            rollout_seconds, 1e-9
        )
    trained = int(collected.table.lengths.sum())
    metrics["throughput/train_tokens_per_second"] = trained / max(train_seconds, 1e-9)
    metrics.update(timers.finish_step())
    return metrics
