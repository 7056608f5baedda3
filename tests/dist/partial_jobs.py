"""What ranks do in `test_partial_rollouts.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.types import UNFINISHED, Prompt, Rollout, ScoredRollout
from mcore_rl.config import RLConfig
from mcore_rl.data.prompts import prompt_indices
from mcore_rl.data.source_position import Begin
from mcore_rl.hybrid_engine.vllm.generation import Request
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.group_plan import GroupPlan
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Sampler
from tests.dist.rank_map_jobs import weights_of
from tests.engine_samples import small_engine
from tests.reward_specs import rewards_of

NUM_GROUPS, NUM_SAMPLES, NUM_STEPS, MAX_TOKENS, LIMIT = 4, 3, 5, 90, 2
OVERSAMPLE = 2.0


def prompt_of(draw: int, scale: int = 1) -> Prompt:
    """One of two."""
    rng = np.random.default_rng(draw % 2)
    return Prompt(draw, "", "", rng.integers(4, 60, size=20 * scale).astype(np.int32))


@dataclass(frozen=True, slots=True)
class Uneven(GroupPlan):
    """Responses of different lengths, those to one prompt too."""

    scale: int = 1

    def request(self, draw: int, so_far: Rollout, *observed: np.ndarray, **more: int) -> Request:
        found = GroupPlan.request(self, draw, so_far, *observed, **more)
        length = (10 + 8 * (found.number * 7 % 11)) * self.scale
        return replace(found, max_tokens=length - len(so_far.response_token_ids))


def weights(checkpoint: Path, version: int) -> dict[str, torch.Tensor]:
    """The checkpoint's, and a little off: others for each version."""
    noise = torch.Generator().manual_seed(version)
    return {
        name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
        for name, tensor in weights_of(checkpoint)[0].items()
    }


@dataclass(frozen=True)
class TwoPrompts:
    """The prompts of a run."""

    scale: int
    fingerprint: str = "tokens:two"
    begin: Begin = Begin()
    rows: Any = field(default_factory=lambda: np.arange(2))
    most_samples: int = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> Prompt:
        return prompt_of(row, self.scale)

    def keys_of(self, rows: Any) -> list[str]:
        return [""] * len(rows)

    def indices(self, start: int, count: int, *, seed: int) -> np.ndarray:
        return prompt_indices(len(self), start=start, count=count, seed=seed)

    def samples_of(self, start: int, count: int, num_samples: int) -> tuple[int, ...]:
        return (num_samples,) * count


class UnevenSampler(Sampler):
    """Samples responses of different lengths."""

    scale = 1

    def _plan(self) -> GroupPlan:
        plan = Sampler._plan(self)
        given = {each.name: getattr(plan, each.name) for each in fields(GroupPlan)}
        return Uneven(**given, scale=self.scale)


def partial_rollouts(
    checkpoint: str, *, tp_size: int = 1, keeps: bool, kv: str = "recompute", scale: int = 1
) -> dict[str, Any]:
    """Steps under weights of their own; then every token that a step took is scored under all of
    them."""
    dist.init_process_group("gloo")
    folder, world_size = Path(checkpoint), dist.get_world_size()
    layout = RolloutLayout(world_size, tp_size, expert_parallel=False)
    sizes: dict[str, Any] = {"tp_size": tp_size, "max_model_len": 128 * scale, "max_num_seqs": 16}
    engine = VLLMEngine(small_engine(folder, dtype="float32", keeps_kv=kv == "keep", **sizes))
    hits: list[tuple[list[int], int]] = []
    notes_hits(engine, hits)
    sample_store = SampleStore(TrainLayout(world_size, 1, 1, 1, 1, 1), layout, (((),),))
    config = RLConfig.of(
        partial_rollouts=keeps,
        max_staleness=LIMIT if keeps else None,
        oversample=OVERSAMPLE,
        kv_after_update=kv,
        num_samples_per_prompt=NUM_SAMPLES,
        max_response_tokens=MAX_TOKENS * scale,
    )
    rewards = rewards_of("exact_match")
    workers = RolloutWorkers(engine, layout, config.rollout, rewards, sample_store)
    UnevenSampler.scale = scale
    sampler = UnevenSampler(
        workers,
        TwoPrompts(scale),  # type: ignore[arg-type]
        config.recipe,
        config.rollout,
        rewards,
        num_prompts_per_step=NUM_GROUPS,
        seed=3,
        timers=StageTimers(),
        position=0,
    )
    steps, taken = [], []
    for version in range(1, NUM_STEPS + 1):
        engine.reload(weights(folder, version).items())
        num_before = len(hits)
        num_waiting = sum(
            each is not None and each.finish_reason == UNFINISHED
            for group in sampler.pending
            for each in group.rollouts
        )
        collected = sampler.collect(version)
        table = collected.table
        mine = [
            int(n)
            for n, home in zip(table.numbers, table.homes, strict=True)
            if home == sample_store.home
        ]
        taken += [sample_store._samples[number] for number in mine]
        steps.append(
            {
                "metrics": collected.metrics,
                "draws": table.draws.tolist(),
                "staleness": (version - table.oldest_versions).tolist(),
                "rewards": bool(table.has_reward.all()),
                "cached": cached(hits[num_before:], num_waiting, 20 * scale),
            }
        )
    found = {"steps": steps, **rescored(engine, folder, taken)}
    sampler.close()
    workers.close()
    engine.close()
    dist.destroy_process_group()
    return found


def cached(
    hits: list[tuple[list[int], int]], num_waiting: int, num_prompt: int
) -> dict[str, list[Any]]:
    """Tokens that there were, and that were cached, when a step's requests began: of those that go
    on, which are the first, and of the first to each prompt among those that begin."""
    first = {tuple(tokens[:num_prompt]): count for tokens, count in reversed(hits[num_waiting:])}
    continuing = [(len(tokens), count) for tokens, count in hits[:num_waiting]]
    return {"continuing": continuing, "beginning": list(first.values())}


def notes_hits(engine: VLLMEngine, hits: list[tuple[list[int], int]]) -> None:
    """Have `hits` get the tokens of each request that begins, and how many of them are cached."""
    manager = engine._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    asked = manager.get_computed_blocks

    def noted(request: Any) -> Any:
        found = asked(request)
        hits.append((list(request.prompt_token_ids), found[1]))
        return found

    manager.get_computed_blocks = noted


def rescored(
    engine: VLLMEngine, folder: Path, taken: list[ScoredRollout], num_versions: int = NUM_STEPS
) -> dict[str, Any]:
    """How far log-probs are from what weights of each version say, of the tokens that are said to
    be theirs and of the others."""
    rollouts = [each.rollout for each in taken]
    own, others, mixed = [], [], 0
    for version in range(1, num_versions + 1):
        engine.reload(weights(folder, version).items())
        sequences = [[*each.prompt.token_ids, *each.response_token_ids] for each in rollouts]
        for rollout, scores in zip(rollouts, engine.prompt_log_probs(sequences), strict=True):
            apart = np.abs(scores[len(rollout.prompt.token_ids) - 1 :] - rollout.rollout_log_probs)
            is_own = rollout.token_versions == version
            sampled = True if rollout.is_generated is None else rollout.is_generated
            own += apart[is_own & sampled].tolist()
            others += apart[~is_own & sampled].tolist()
    for rollout in rollouts:
        mixed += len(set(rollout.token_versions.tolist())) > 1
    return {"own": max(own), "others": float(np.median(others)), "mixed": mixed, "tokens": len(own)}
