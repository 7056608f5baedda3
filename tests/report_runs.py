"""Run directories with plausible numbers, written by RunDirectory."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, StepStats
from mcore_rl.config import RLConfig
from mcore_rl.observe.run_directory import RunConfig, RunDirectory
from mcore_rl.observe.timeline import ENGINES, TRAINER, Timeline

GB = 10**9
SECONDS = {
    **{"data": 0.01, "rollout": 1.2, "reward": 0.15, "log_probs": 0.4, "advantages": 0.02},
    **{"train": 1.1, "checkpoint": 0.0, "eval": 0.0},
}
BEGAN = 1_790_000_000.0  # seconds since 1970
STEP_SECONDS = 3.0


def step_metrics(step: int, num_steps: int, rng: random.Random) -> dict[str, float]:
    """Metrics of a step of PPO with a mixture of experts."""
    done = step / max(1, num_steps - 1)
    reward = 0.35 + 0.55 * (1 - math.exp(-3 * done)) + rng.gauss(0, 0.03)
    seconds = {stage: value * rng.uniform(0.9, 1.2) for stage, value in SECONDS.items()}
    seconds |= {"eval": 1.1 if step % 15 == 0 else 0.0, "checkpoint": 0.6 if step % 20 == 19 else 0}
    seconds |= {"reshard_to_rollout": 0.25, "reshard_to_train": 0.01}
    metrics = {
        "reward/mean": reward,
        "reward/std": math.sqrt(max(0.0, reward * (1 - reward))),
        "reward/failures": 0.0,
        "response_tokens/mean": 120 + 90 * done + rng.gauss(0, 4),
        "response_tokens/cut_share": 0.01,
        "loss/policy": rng.gauss(0, 0.01),
        "kl/ref": 0.02 * done + 0.002 * rng.random(),
        "entropy": 0.9 - 0.5 * done + rng.gauss(0, 0.02),
        "clip_fraction": 0.04,
        "grad_norm": rng.uniform(0.6, 1.4),
        "mismatch/mean_weight": 1.0,
        "kl/rollout_actor": 2e-4 * rng.uniform(0.5, 2),
        "learning_rate": 1e-6,
        "reshard/received_bytes_max": 41.1 * GB,
        "reshard/lower_bound_bytes_max": 41.1 * GB,
        "reshard/peak_extra_bytes_max": 0.5 * GB,
        "reshard/weight_version": step + 1.0,
        "reshard/attested": 1.0,
        "memory/host_peak_bytes": 61 * GB,
        "memory/host_bytes": 52 * GB,
        "memory/device_peak_bytes": 71 * GB,
        "memory/device_bytes": 64 * GB,
        "throughput/rollout_tokens_per_second": 9000 * rng.uniform(0.9, 1.1),
        "throughput/train_tokens_per_second": 21000 * rng.uniform(0.9, 1.1),
        "loss/value": 0.2 * (1 - done) + 0.05,
        "critic/explained_variance": 0.8 * done,
        "moe/imbalance": 1.9 + 0.2 * rng.random(),
        "moe/routing_disagreement": 0.1 - 0.05 * done,
        **{
            f"moe/{name}/layer_{layer}": value * (1 + layer / 10 + done)
            for name, value in (("routing_disagreement", 0.03), ("imbalance", 1.1))
            for layer in (1, 2, 10)
        },
        "health/alarms": 1.0 if step >= 30 else 0.0,
        **{f"time/{stage}_seconds": value for stage, value in seconds.items()},
        "time/step_seconds": sum(seconds.values()) + 0.05,
    }
    if step % 15 == 0:
        metrics["eval/accuracy"] = 0.3 + 0.5 * done
    return metrics


def add_spans(timeline: Timeline, step: int, *, engines: bool) -> None:
    """A step of 3 seconds. Engines wait 10 % of the time."""
    at = BEGAN + STEP_SECONDS * step
    if engines:
        spans = {"update": 0.3, "sampling": 2.4, "idle": 0.3}
        for what, start in zip(spans, (at, at + 0.3, at + 2.7), strict=True):
            timeline.add(ENGINES, step, what, start, start + spans[what])
    for what, seconds in {"reshard_to_rollout": 0.1, **SECONDS}.items():
        timeline.add(TRAINER, step, what, at, at + seconds)
        at += seconds


def scored(text: str, reward: float, *, prompt: str = "19+77", answer: str = "96") -> ScoredRollout:
    ids = np.arange(3, dtype=np.int32)
    rollout = Rollout(
        Prompt(4, prompt, answer, ids), 0, text, ids, ids.astype(np.float32), "stop", 1
    )
    return ScoredRollout(rollout, reward, None, {"arithmetic": reward})


def write_run(
    folder: Path,
    *,
    num_steps: int = 60,
    asked: int | None = None,
    seed: int = 0,
    rollouts: Sequence[ScoredRollout] = (),
    config: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
    finish: bool = True,
    engines: bool = False,
) -> Path:
    """A run of `num_steps` steps of `asked`, with `rollouts` at every fifth step."""
    rng = random.Random(seed)
    logger = logging.getLogger("mcore_rl.trainer.recorder")
    fields = {f"rl_{name}": value for name, value in RLConfig().as_dict().items()}
    settings = {"lr": 1e-6, "tensor_model_parallel_size": 8, **fields, "rl_kl_coef": 0.01}
    settings |= {"rl_num_steps": asked or num_steps, **(config or {})}
    directory = RunDirectory(folder, RunConfig(resolved=settings, about=about or {}))
    timeline = Timeline(folder / "timeline.jsonl")
    logger.warning("a step: 4 prompts x 2 samples = 8 sequences")
    for step in range(num_steps):
        if step == 30:
            logger.warning(
                "[Health] step 30, entropy: the entropy is 0.08, less than 0.1 of what it was "
                "(0.9) (over 10 steps): lower --lr, raise --rl-entropy-coef"
            )
        directory.write_step(StepStats(step, step_metrics(step, num_steps, rng)))
        add_spans(timeline, step, engines=engines)
        timeline.write_step(step)
        if step % 5 == 0:
            shown = rollouts or [scored("96", 1.0), scored("16 86", 0.0)]
            directory.write_rollouts(step, shown, range(len(shown)))
    if finish:
        directory.write_step(StepStats(num_steps, {"eval/accuracy": 0.81}))
        versions = {"mcore_rl": "0.1.0", "torch": "2.13.0"}
        directory.write_summary({"train_layout": "TP8 x PP8", "versions": versions})
    timeline.close()
    directory.close()
    return folder


_ACTS = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'
_RIGHT_TO_LEFT = "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627"
HOSTILE_TEXTS = (
    f"{_ACTS}</script></details><b-hostile onclick=alert(1)>{{{{ 7 * 7 }}}} {{% for %}} &lt;",
    f"\x00\x1b[31mred\x7f \u202eoverride\u202d \u2066open {_RIGHT_TO_LEFT}",
    "\U0001f469\u200d\U0001f4bb " + "Z\u0351\u0363\u036b\u0334\u0335" * 40 + " \ud83d \u2028",
    "w" * 5000,
    "line\n" * 3000,
)


def write_hostile_run(place: Path) -> Path:
    """A run with texts that would act on a page that does not escape them."""
    rollouts = [
        scored(text, float(row), prompt=text, answer=text) for row, text in enumerate(HOSTILE_TEXTS)
    ]
    folder = place / '<img src=x onerror="window.hacked = 3">'
    write_run(folder, num_steps=1, rollouts=rollouts[:1], config={_ACTS: _ACTS, "lr": _ACTS})
    directory = RunDirectory(
        folder, RunConfig(resolved={"rl_num_steps": 50, _ACTS: _ACTS}), first_step=1
    )
    for step, rollout in enumerate([*rollouts, rollouts[0]], 1):
        parts = {f"reward/{_ACTS}/mean": 0.5, f"{_ACTS}/{_ACTS}": 1.0, "reward/mean": 0.5}
        parts["entropy"] = 0.5
        directory.write_step(StepStats(step, parts))
        directory.write_rollouts(step, [rollout], [step])
        logging.getLogger("mcore_rl").warning("[Health] step %d, entropy: %s", step, _ACTS)
        logging.getLogger("mcore_rl").warning("[Resume] %s", HOSTILE_TEXTS[1])
    timeline = Timeline(folder / "timeline.jsonl")
    for role in (TRAINER, _ACTS):
        timeline.add(role, 2, _ACTS, BEGAN, BEGAN + 1)
        timeline.add(role, 2, "idle", BEGAN + 1, BEGAN + 2)
    timeline.close()
    directory.write_summary({_ACTS: _ACTS, "versions": {_ACTS: _ACTS}})
    directory.close()
    return folder
