"""What ranks of engines do in `test_ahead.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_rl.batching.types import Prompt, ScoredRollout
from mcore_rl.config import RLConfig
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.model.layout import RolloutLayout, TrainLayout
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.engines import RolloutWorkers
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.rollout.sampler import Sampler
from mcore_rl.rollout.sampling_state import SamplingState, write_groups
from mcore_rl.rollout.segments import OpenGroup
from tests.dist.partial_jobs import TwoPrompts, UnevenSampler, rescored, weights
from tests.engine_samples import small_engine
from tests.reward_specs import rewards_of

NUM_GROUPS, NUM_SAMPLES, MAX_TOKENS = 4, 3, 90
SAVED_AT, KILLED_AT, NUM_STEPS = 3, 5, 6
MAX_TURN_TOKENS = 25  # in conversation with an environment


def conversations() -> Conversations:
    spec = EnvironmentSpec(
        "tests.unit.misbehaving:Counting", timeout_seconds=60.0, memory_gib=0.0, max_turns=4
    )
    tokens = ConversationTokens(Words(), use_chat_template=False, ends=(), vocabulary=10_000)
    return Conversations(spec, tokens, max_prompt_tokens=30, max_tokens=MAX_TOKENS)


class Words:
    """A tokenizer of a small vocabulary."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [10 + len(word) for word in text.split()]}


class Job:
    """Engines, and samplers of the runs that follow each other on them."""

    def __init__(
        self,
        folder: Path,
        work: Path,
        config: RLConfig,
        *,
        tp_size: int,
        scale: int,
        dtype: str,
        has_environments: bool = False,
    ) -> None:
        world_size = dist.get_world_size()
        self.has_environments = has_environments
        self.folder, self.work, self.config, self.scale = folder, work, config, scale
        self.layout = RolloutLayout(world_size, tp_size, expert_parallel=False)
        sizes = {"tp_size": tp_size, "max_model_len": 128 * scale, "max_num_seqs": 16}
        keeps_kv = config.rollout.keeps_kv
        self.engine = VLLMEngine(small_engine(folder, dtype=dtype, keeps_kv=keeps_kv, **sizes))
        self.begun: list[dict[str, Any]] = []
        self.taken: list[ScoredRollout] = []
        self.version = 0
        self._watch()
        train_layout = TrainLayout(world_size, 1, 1, 1, 1, 1)
        self.sample_store = SampleStore(train_layout, self.layout, (((),),))
        UnevenSampler.scale = scale

    def _watch(self) -> None:
        """Note each request that begins, with the number of its tokens that are cached."""
        core = self.engine._llm.llm_engine.engine_core.engine_core
        manager = core.scheduler.kv_cache_manager
        asked = manager.get_computed_blocks

        def noted(request: Any) -> Any:
            found = asked(request)
            tokens = list(request.prompt_token_ids)
            self.begun.append({"tokens": tokens, "cached": found[1], "version": self.version})
            return found

        manager.get_computed_blocks = noted

    def sampler(
        self, position: int, folder: Path | None = None, origin: tuple[str, ...] = ("model",)
    ) -> Sampler:
        """A run's; it starts from nothing but what is on the disk."""
        rewards = rewards_of("environment" if self.has_environments else "exact_match")
        self.workers = RolloutWorkers(
            self.engine,
            self.layout,
            self.config.rollout,
            rewards,
            self.sample_store,
            conversations=conversations if self.has_environments else None,
            max_turn_tokens=MAX_TURN_TOKENS,
        )
        recipe = self.config.recipe
        return (Sampler if self.has_environments else UnevenSampler)(
            self.workers,
            TwoPrompts(self.scale),  # type: ignore[arg-type]
            recipe,
            self.config.rollout,
            rewards,
            num_prompts_per_step=NUM_GROUPS,
            seed=3,
            timers=StageTimers(),
            position=position,
            bank=self.work / "bank",
            folder=folder,
            origin=origin,
        )

    def step(self, sampler: Sampler, version: int) -> dict[str, Any]:
        """A step, and some sampling ahead of the next one."""
        sampler.pause()
        self.engine.reload(weights(self.folder, version).items())
        self.version = version
        collected = sampler.collect(version)
        table = collected.table
        mine = [
            self.sample_store._samples[int(number)]
            for number, home in zip(table.numbers, table.homes, strict=True)
            if home == self.sample_store.home
        ]
        self.taken.extend(mine)
        sampler.work_until(self._has_answered() if version == SAVED_AT else after(6))
        return {
            "draws": sorted(set(table.draws.tolist())),
            "num_samples": len(table),
            "staleness": (version - table.oldest_versions).tolist(),
            "metrics": collected.metrics,
            "rewarded": bool(table.has_reward.all()),
        }

    def _has_answered(self) -> Callable[[], bool]:
        """A call that begins once an environment has answered a turn; soon without environments."""
        is_late = after(5000 if self.has_environments else 6)
        episodes = (
            {} if self.workers.conversations is None else self.workers.conversations._episodes
        )
        return lambda: is_late() or any(each.rollout.turn_rewards for each in episodes.values())


def after(count: int) -> Callable[[], bool]:
    """A call that begins after `count` questions for it."""
    left = [count]

    def is_called() -> bool:
        left[0] -= 1
        return left[0] < 0

    return is_called


def sample_ahead(
    checkpoint: str,
    work: str,
    *,
    tp_size: int = 1,
    staleness: int = 2,
    kv: str = "recompute",
    scale: int = 1,
    spoils: bool = False,
    has_environments: bool = False,
) -> dict[str, Any]:
    """Steps under weights of their own, of which the last ones are lost, and a run that resumes
    from a checkpoint before these; then all tokens are scored under all weights."""
    dist.init_process_group("gloo")
    config = RLConfig.of(
        rollout_ranks="0-1",
        max_staleness=staleness,
        kv_after_update=kv,
        num_samples_per_prompt=NUM_SAMPLES,
        max_response_tokens=MAX_TOKENS * scale,
    )
    job = Job(
        Path(checkpoint),
        Path(work),
        config,
        tp_size=tp_size,
        scale=scale,
        dtype="float32",
        has_environments=has_environments,
    )
    sampler, steps, state = job.sampler(0), [], job.work / "saved"
    position = 0
    for version in range(1, KILLED_AT + 1):
        steps.append(job.step(sampler, version))
        if version == SAVED_AT:
            sampler.save(state)
            position = sampler.position
            dist.barrier()
            sampler.saved()
    sampler.pause()  # ends what runs; what it has is lost, but for the bank
    sampler.close()
    job.workers.close()
    dist.barrier()
    if has_environments and dist.get_rank() == 0:  # else nothing of the checkpoint is continued
        for file in (job.work / "bank").glob("*.bank"):
            file.unlink()
    if spoils and dist.get_rank() == 0:
        spoil(sorted((job.work / "bank").glob("*.bank"))[0])
    dist.barrier()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"  # the store is that of the first run
    other = job.sampler(position, state, ("another model",))
    of_another = other.num_banked, len(other.skipped)
    other.close()
    job.workers.close()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    resumed = job.sampler(position, state)
    found: dict[str, Any] = {"num_banked": resumed.num_banked, "skipped": resumed.skipped}
    found["of_another"] = of_another
    found["restored"] = count_restored(job.workers)
    again = [job.step(resumed, version) for version in range(SAVED_AT + 1, NUM_STEPS + 1)]
    resumed.save(job.work / "end")
    found["failures"] = [each.rollout.failure for each in job.taken if each.rollout.failure]
    found["turns"] = [len(each.rollout.turn_rewards) for each in job.taken]
    found |= {"lost": steps[SAVED_AT:], "steps": steps[:SAVED_AT] + again, "begun": job.begun}
    found["end"] = str(job.work / "end" / "ahead.json")
    resumed.pause()
    resumed.close()
    found |= rescored(job.engine, job.folder, job.taken, NUM_STEPS)
    job.workers.close()
    if spoils:
        found |= continue_colocated(job, NUM_STEPS + 1)
        job.workers.close()
    job.engine.close()
    dist.destroy_process_group()
    return found


def continue_colocated(job: Job, version: int) -> dict[str, Any]:
    """A step of a run that continues groups of colocated engines, one in each file: the first has
    no token, the second another size. Returns the states before and after it."""
    rank, folder = dist.get_rank(), job.work / "colocated"
    write_groups([OpenGroup.new(4 + rank, NUM_SAMPLES + rank)], folder, rank)
    if rank == 0:
        SamplingState(8, {4: version - 1, 5: version - 1}, version - 1).write(folder)
    dist.barrier()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "3"
    sampler = job.sampler(8, folder, ("another run",))
    places = [job.work / "colocated_before", job.work / "colocated_after"]
    sampler.save(places[0])
    step = job.step(sampler, version)
    sampler.save(places[1])
    sampler.pause()
    sampler.close()
    return {"colocated": [str(each / "ahead.json") for each in places], "colocated_step": step}


def count_restored(workers: RolloutWorkers) -> list[int]:
    """Have the result get the number of turns of each conversation that is restored."""
    found: list[int] = []
    if workers.conversations is not None:
        pool = workers.conversations._pool
        restore = pool.restore

        def noted(prompt: Prompt, seed: int, state: str, num_turns: int) -> int:
            found.append(num_turns)
            return restore(prompt, seed, state, num_turns)

        pool.restore = noted  # type: ignore[method-assign]
    return found


def spoil(file: Path) -> None:
    """Flip a bit in the middle of the first record."""
    data = bytearray(file.read_bytes())
    at = data.index(b"\x89RLBANK\n") + 60
    data[at] ^= 1
    file.write_bytes(bytes(data))
