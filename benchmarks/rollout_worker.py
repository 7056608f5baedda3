"""One rank of a case of `rollout.py`: the same requests in several ways, in turns; prints JSON.

    torchrun --nproc-per-node 2 benchmarks/rollout_worker.py CASE CHECKPOINT REPETITIONS

The length of each response is drawn beforehand and is the same in all ways: end-of-sequence tokens
are ignored. Each repetition has new lengths.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.processes import alternating  # noqa: E402
from mcore_rl.batching.types import Prompt, Rollout  # noqa: E402
from mcore_rl.common import objects  # noqa: E402
from mcore_rl.config import RLConfig  # noqa: E402
from mcore_rl.environments.conversation import ConversationTokens  # noqa: E402
from mcore_rl.environments.interface import EnvironmentSpec  # noqa: E402
from mcore_rl.hybrid_engine.vllm.generation import (  # noqa: E402
    Completion,
    Generation,
    Request,
    Sampling,
    seed_of,
)
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine  # noqa: E402
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig  # noqa: E402
from mcore_rl.model.config_json import read_model_shape  # noqa: E402
from mcore_rl.model.layout import RolloutLayout, TrainLayout  # noqa: E402
from mcore_rl.rewards.options import RewardOptions  # noqa: E402
from mcore_rl.rewards.specs import parse_rewards  # noqa: E402
from mcore_rl.rollout.conversations import Conversations  # noqa: E402
from mcore_rl.rollout.engines import RolloutWorkers  # noqa: E402
from mcore_rl.rollout.group_plan import GroupPlan  # noqa: E402
from mcore_rl.rollout.group_sampler import GroupSampler, Rules  # noqa: E402
from mcore_rl.rollout.sample_store import SampleStore  # noqa: E402
from mcore_rl.rollout.sampler import rules_of  # noqa: E402
from mcore_rl.rollout.sampling_state import StepCounts  # noqa: E402
from mcore_rl.rollout.segments import OpenGroup, extend_rollout, new_rollout  # noqa: E402
from mcore_rl.rollout.stream import StreamActions, step_engine  # noqa: E402

TOOL_CLASS = "benchmarks.slow_tool:SlowTool"
PROMPT_TOKENS = 16
SAMPLING = Sampling(ignore_eos=True)
TAIL = 10  # longest response / median; one response in a hundred reaches it
SIGMA = np.log(TAIL) / 2.326
STREAM, LONGEST = "stream", "stream, longest first"
BLOCKS, UNSEEDED, BARE = "blocks", "blocks without seeds", "bare"


@dataclass(frozen=True, slots=True)
class Load:
    """Samples of a step."""

    num_prompts: int
    num_samples: int
    median_tokens: int
    sigma: float = SIGMA  # of the logarithm of lengths; half of its variance is the prompt's
    max_num_seqs: int = 16  # of an engine
    tp_size: int = 1
    reward_seconds: float = 0.0  # duration of a reward
    num_reward_workers: int = 1  # of an engine
    keeps_unfinished: bool = False  # --rl-partial-rollouts
    turn_tokens: int | None = None  # of each of two turns, with a slow tool between them

    @property
    def most_tokens(self) -> int:
        return max(self.median_tokens, int(self.median_tokens * TAIL * (self.sigma > 0)))

    def lengths(self, seed: int) -> tuple[int, ...]:
        """Return the tokens of each response; responses to one prompt are adjacent."""
        rng = np.random.default_rng(seed)
        of_prompts = rng.standard_normal((self.num_prompts, 1))
        of_samples = rng.standard_normal((self.num_prompts, self.num_samples))
        drawn = self.median_tokens * np.exp(self.sigma * (of_prompts + of_samples) / np.sqrt(2))
        return tuple(np.clip(np.round(drawn), 2, self.most_tokens).astype(int).ravel().tolist())


# Enough waves that the longest response takes less time than all others together.
LONG_TAIL = Load(num_prompts=16, num_samples=8, median_tokens=32, max_num_seqs=8)
PARTIAL = Load(
    num_prompts=32, num_samples=4, median_tokens=32, max_num_seqs=128, keeps_unfinished=True
)
NUM_STEPS, NUM_LEFT_OUT = 8, 3  # of PARTIAL
# Scoring after the last token would take 3 s and 16 s; the last sample's reward is not hidden.
QUICK_REWARD = Load(
    num_prompts=32, num_samples=4, median_tokens=64, reward_seconds=0.05, num_reward_workers=1
)
SLOW_REWARD = Load(
    num_prompts=64, num_samples=8, median_tokens=64, reward_seconds=1.0, num_reward_workers=16
)
SHORT = Load(num_prompts=16, num_samples=8, median_tokens=6, sigma=0.0, max_num_seqs=128)
TOOL = Load(num_prompts=16, num_samples=8, median_tokens=112, sigma=0.0, turn_tokens=48)
STEPS = Load(num_prompts=32, num_samples=4, median_tokens=64, sigma=0.5)


def reward(*, prompt: str, response: str, answer: str) -> float:
    """Sleep for the seconds in the prompt's answer."""
    time.sleep(float(answer))
    return 1.0


class Block:
    """Schedules requests that all start at once."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = tuple(requests)
        self.completions: dict[int, Completion] = {}

    def schedule(self, num_running: int) -> StreamActions:
        submit, self._requests = self._requests, ()
        return StreamActions(submit)

    def finished(self, completion: Completion) -> None:
        self.completions[completion.number] = completion

    def dropped(self, request: Request, num_tokens: int) -> None:
        raise AssertionError("nothing is dropped")

    def between_steps(self, num_running: int, step_seconds: float) -> None:
        pass


class Bench:
    """Engine and rewards of this rank, and several ways to sample a load. Collective."""

    def __init__(self, checkpoint: Path, load: Load) -> None:
        self.load = load
        world = dist.get_world_size()
        self.engine = VLLMEngine(
            EngineConfig(
                model_dir=checkpoint,
                load_format="auto",
                tp_size=load.tp_size,
                max_model_len=PROMPT_TOKENS + load.most_tokens,
                max_num_seqs=load.max_num_seqs,
                kv_cache_bytes=1 << 28,
            )
        )
        self.layout = RolloutLayout(world, load.tp_size, False)
        layers = tuple(range(read_model_shape(checkpoint).num_layers))
        self.sample_store = SampleStore(TrainLayout(world), self.layout, ((layers,),))
        self.config = config = RLConfig.of(
            num_prompts_per_step=load.num_prompts,
            max_response_tokens=load.most_tokens,
            partial_rollouts=load.keeps_unfinished,
            environment=TOOL_CLASS if load.turn_tokens else None,
            max_turn_tokens=load.turn_tokens,
        )
        rewards = parse_rewards(
            "environment" if load.turn_tokens else "benchmarks.rollout_worker:reward",
            RewardOptions(reward_workers=load.num_reward_workers),
        )
        self.workers = RolloutWorkers(
            self.engine,
            self.layout,
            config.rollout,
            rewards,
            self.sample_store,
            conversations=self._conversations if load.turn_tokens else None,
            max_turn_tokens=config.environments.max_turn_tokens,
        )
        self._num_calls = 0
        self._lengths: dict[tuple[bytes, int], int] = {}  # prompt, sample -> tokens to the end
        self._submit = submit = Generation.submit

        def of_length(generation: Generation, request: Request) -> None:
            prompt, so_far = np.split(request.token_ids, [PROMPT_TOKENS])
            length = self._lengths[prompt.tobytes(), request.number % load.num_samples]
            left = min(request.max_tokens, length - len(so_far))
            submit(generation, dataclasses.replace(request, max_tokens=left))

        Generation.submit = of_length  # type: ignore[method-assign]

    def _conversations(self) -> Conversations:
        tokens = ConversationTokens(self.engine.tokenizer, use_chat_template=False, ends=())
        spec = EnvironmentSpec(TOOL_CLASS, timeout_seconds=60.0)
        most = self.load.most_tokens
        return Conversations(spec, tokens, max_prompt_tokens=PROMPT_TOKENS, max_tokens=most)

    def close(self) -> None:
        Generation.submit = self._submit  # type: ignore[method-assign]
        self.workers.close()
        self.engine.close()

    def plan(self, seed: int) -> GroupPlan:
        return GroupPlan(
            num_samples=self.load.num_samples,
            sampling=SAMPLING,
            max_tokens=self.load.most_tokens,
            seed=seed,
        )

    def prompts(self, seed: int, *, num_steps: int = 1) -> list[Prompt]:
        """Return the prompts of a repetition, and set the lengths of all responses."""
        rng = np.random.default_rng(seed)
        load = dataclasses.replace(self.load, num_prompts=self.load.num_prompts * num_steps)
        shape = (load.num_prompts, PROMPT_TOKENS)
        tokens = rng.integers(6, 400, size=shape).astype(np.int32)
        lengths = iter(load.lengths(seed))
        self._lengths = {
            (row.tobytes(), sample): next(lengths)
            for row in tokens
            for sample in range(self.load.num_samples)
        }
        return [Prompt(i, "", str(load.reward_seconds), row) for i, row in enumerate(tokens)]

    def requests(
        self, prompts: Sequence[Prompt], seed: int, *, seeded: bool = True
    ) -> list[Request]:
        """Return the requests of this TP group's block."""
        blocks = np.array_split(np.arange(len(prompts)), self.layout.num_tp_groups)
        mine = blocks[self.layout.tp_group_index(dist.get_rank())].tolist()
        size = self.load.num_samples
        return [
            Request(
                number=draw * size + sample,
                token_ids=prompts[draw].token_ids,
                max_tokens=self.load.most_tokens,
                sampling=SAMPLING,
                seed=seed_of(seed, draw, sample) if seeded else None,
            )
            for draw in mine
            for sample in range(size)
        ]

    def stream(self, seed: int, *, longest_first: bool = False) -> dict[str, float]:
        """Sample like a step. `longest_first`: as if the lengths were known from earlier steps."""
        prompts, started = self.prompts(seed), self._begin()
        longest = np.array(self.load.lengths(seed)).reshape(len(prompts), -1).max(axis=1)
        order = tuple(np.argsort(-longest, kind="stable").tolist())
        sampler = self._sampler(seed, prompts, Rules(self.load.num_prompts))
        sampler.begin_step(1, order_of=(lambda count: order[:count]) if longest_first else None)
        return self._sampled(sampler, started)[0]

    def _sampler(self, seed: int, prompts: Sequence[Prompt], rules: Rules) -> GroupSampler:
        name, plan = f"{self._num_calls}", self.plan(seed)
        return GroupSampler(self.workers, plan, prompts.__getitem__, rules, name=name)

    def _sampled(self, sampler: GroupSampler, started: float) -> tuple[dict[str, float], int]:
        """Sample and score a step that has begun. Return its times, and where the next begins."""
        decision = sampler.sample()
        assert decision is not None
        end, scheduler = sampler.end_step(), sampler.scheduler
        last_token = time.perf_counter() - scheduler.take_wait_seconds()
        groups = sampler.groups_of(decision.taken)
        scheduler.forget(decision.taken)
        num_tokens = sum(each.num_tokens(self.load.num_samples) for each in groups)
        table, _ = self.workers.score(scheduler.plan, groups, StepCounts(), scheduler.error)
        measured = self._measured(started, last_token, num_tokens, len(table))
        return measured, end.next_draw

    def partial_steps(self, seed: int) -> dict[str, float]:
        """Sample consecutive steps with partial rollouts. The first ones do not count, because they
        resume fewer responses."""
        prompts, position = self.prompts(seed, num_steps=2 * NUM_STEPS), 0
        config, measured, sampler = self.config, [], None
        rules = rules_of(config.recipe, config.rollout, self.load.num_prompts, compares=True)
        for version in range(1, NUM_STEPS + 1):
            started = self._begin()
            sampler = sampler or self._sampler(seed, prompts, rules)
            start = sampler.begin_step(version, next_draw=position)
            sampler.load(list(sampler.scheduler.open.values()), start.restarted, is_resumed=False)
            times, position = self._sampled(sampler, started)
            measured.append(times)
        return _together(measured[NUM_LEFT_OUT:])

    def block_steps(self, seed: int) -> dict[str, float]:
        """Sample as many steps as `partial_steps` counts."""
        prompts = self.prompts(seed, num_steps=2 * NUM_STEPS)
        size = self.load.num_prompts
        return _together(
            [
                self.blocks(seed, of=prompts[step * size : (step + 1) * size])
                for step in range(NUM_STEPS - NUM_LEFT_OUT)
            ]
        )

    def blocks(
        self,
        seed: int,
        *,
        seeded: bool = True,
        of: Sequence[Prompt] | None = None,
    ) -> dict[str, float]:
        """Sample fixed blocks: all requests at once, and rewards after the last token."""
        prompts = self.prompts(seed) if of is None else of
        started = self._begin()
        block = Block(self.requests(prompts, seed, seeded=seeded))
        self._run(block)
        done = time.perf_counter()
        rollouts: list[Rollout] = []
        groups: dict[int, OpenGroup] = {}
        for number, completion in sorted(block.completions.items()):
            draw, sample = divmod(number, self.load.num_samples)
            rollouts.append(extend_rollout(new_rollout(prompts[draw], sample, 1), completion, 1))
            group = groups.setdefault(draw, OpenGroup.new(draw, self.load.num_samples))
            group.rollouts[sample] = rollouts[-1]
        objects.barrier()  # scoring begins when all engines are done
        outcomes = self.workers.rewards.outcomes(rollouts)
        for row, number in enumerate(sorted(block.completions)):
            draw, sample = divmod(number, self.load.num_samples)
            groups[draw].outcomes[sample] = {name: of[row] for name, of in outcomes.items()}
        table, _ = self.workers.score(self.plan(seed), [*groups.values()], StepCounts())
        num_tokens = sum(len(each.response_token_ids) for each in rollouts)
        return self._measured(started, done, num_tokens, len(table))

    def bare(self, seed: int) -> dict[str, float]:
        """Run the shortest possible loop of vLLM over this group's block."""
        requests, started = self.requests(self.prompts(seed), seed), self._begin()
        engine = self.engine._llm.llm_engine
        with self.engine.generation() as generation:
            for request in requests:
                generation.submit(request)
            while engine.has_unfinished_requests():
                for each in engine.step():
                    if each.finished:
                        generation._running.pop(int(each.request_id))
        return {"own_seconds": time.perf_counter() - started}

    def one_loop(self, seed: int) -> dict[str, float]:
        """Run our loop over the same block."""
        requests, started = self.requests(self.prompts(seed), seed), self._begin()
        self._run(Block(requests))
        return {"own_seconds": time.perf_counter() - started}

    def _run(self, block: Block) -> None:
        with self.engine.generation() as generation:
            step_engine(self.engine, block, generation)

    @contextmanager
    def steps_timed(self) -> Iterator[list[float]]:
        """Yield the seconds of each call of the engine's step."""
        engine, seconds = self.engine._llm.llm_engine, list[float]()
        step = engine.step

        def timed() -> Any:
            began = time.perf_counter()
            found = step()
            seconds.append(time.perf_counter() - began)
            return found

        engine.step = timed
        try:
            yield seconds
        finally:
            del engine.step

    def _begin(self) -> float:
        self._num_calls += 1
        self.sample_store.clear()
        objects.barrier()
        return time.perf_counter()

    def _measured(
        self, started: float, sampled: float, num_tokens: int, num_samples: int
    ) -> dict[str, float]:
        """Combine the times of all ranks, which share one clock."""
        ended = time.perf_counter()
        everyone = objects.all_gather((started, sampled, ended, num_tokens))
        first, last = min(each for each, *_ in everyone), max(each for _, each, *_ in everyone)
        assert num_samples == self.load.num_prompts * self.load.num_samples
        return {
            "seconds": max(each for *_, each, _ in everyone) - first,
            "own_seconds": sampled - started,  # of this rank's engine, until it has no more to do
            "to_last_token": last - first,
            "after_last_token": max(each for *_, each, _ in everyone) - last,
            "first_engine_done": min(each for _, each, *_ in everyone) - first,
            "tokens": float(sum(each for *_, each in everyone)) / self.load.tp_size,
            "most_tokens": float(max(each for *_, each in everyone)),
        }


def _together(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) for name in steps[0]}


Ways = dict[str, Callable[[int], dict[str, float]]]  # of sampling a repetition
Found = dict[str, list[dict[str, float]]]


def in_turns(ways: Ways, repetitions: int) -> Found:
    """Measure each way in every repetition, after one that does not count."""
    found: Found = {name: [] for name in ways}
    for number in range(repetitions + 1):
        for name in alternating(ways, number):
            measured = ways[name](number)
            if number:
                found[name].append(measured)
    return found


def stream_and_blocks(bench: Bench) -> Ways:
    return {
        STREAM: bench.stream,
        LONGEST: partial(bench.stream, longest_first=True),
        BLOCKS: bench.blocks,
        UNSEEDED: partial(bench.blocks, seeded=False),
    }


def partial_and_blocks(bench: Bench) -> Ways:
    return {"stream, partial rollouts": bench.partial_steps, BLOCKS: bench.block_steps}


def reward_hidden(bench: Bench) -> Ways:
    return {STREAM: bench.stream, BLOCKS: bench.blocks}


def overhead(bench: Bench) -> Ways:
    """The loop over steps, with the time inside of the engine's steps."""

    def timed(way: Callable[[int], dict[str, float]], seed: int) -> dict[str, float]:
        with bench.steps_timed() as seconds:
            whole = way(seed)
        return whole | {"in_steps": sum(seconds), "steps": len(seconds)}

    ways = {STREAM: bench.stream, "loop": bench.one_loop, BARE: bench.bare}
    return {f"{name} TP{bench.load.tp_size}": partial(timed, way) for name, way in ways.items()}


def behind_a_tool(bench: Bench) -> Ways:
    """A rollout whose samples all wait for a tool, with the share of the engine's steps."""

    def timed(seed: int) -> dict[str, float]:
        with bench.steps_timed() as seconds:
            whole = bench.stream(seed)
        busy = min(objects.all_gather(sum(seconds) / whole["own_seconds"]))
        return whole | {"busy": busy}

    return {STREAM: timed}


# Name -> ways of sampling, and the loads of the engines that are measured in turn.
CASES: dict[str, tuple[Callable[[Bench], Ways], tuple[Load, ...]]] = {
    "long_tail": (stream_and_blocks, (LONG_TAIL,)),
    "partial": (partial_and_blocks, (PARTIAL,)),
    "quick_reward": (reward_hidden, (QUICK_REWARD,)),
    "slow_reward": (reward_hidden, (SLOW_REWARD,)),
    "short": (stream_and_blocks, (SHORT,)),
    "overhead": (overhead, (STEPS, dataclasses.replace(STEPS, tp_size=2))),
    "tool": (behind_a_tool, (TOOL,)),
}


def main(tokens: Sequence[str]) -> None:
    case, checkpoint, repetitions = tokens
    dist.init_process_group("gloo")
    ways_of, loads = CASES[case]
    found: Found = {}
    for load in loads:
        bench = Bench(Path(checkpoint), load)
        found |= in_turns(ways_of(bench), int(repetitions))
        bench.close()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
