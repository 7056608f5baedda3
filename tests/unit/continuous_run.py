"""Engines that sample ahead, scripted and in one process, whose weights change at any moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec, Response
from mcore_rl.environments.wire import Event, Started, Stepped
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request
from mcore_rl.rollout.admission import Admission
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.draws import Draws
from mcore_rl.rollout.scheduler import Scheduler
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.rollout.stream import step_engine
from tests.unit.scripted_sampling import (
    MAX_TOKENS,
    SIZE,
    ScriptedEngine,
    ScriptedRewards,
    lengths,
    log_probs_of,
    plan,
    prompt_of,
    select,
)
from tests.unit.test_conversations import Words

NUM_GROUPS, MOST_PER_TURN = 2, 5


def long_lengths(seed: int) -> Callable[[int], int]:
    """Lengths of responses that are often running when the weights change."""
    length_of = lengths(seed)
    return lambda number: 3 * length_of(number)


class Engine(ScriptedEngine):
    """Responses of given lengths, or turns of `MOST_PER_TURN` tokens, whatever the weights. Some
    requests wait for a while."""

    def __init__(self, length_of: Callable[[int], int]) -> None:
        super().__init__(length_of)
        self.version = 0
        self._waiting: dict[int, int] = {}  # steps until a request begins
        self.versions: dict[int, list[int]] = {}  # of each generated token, by request number

    def end_soon(self, numbers: Sequence[int]) -> None:
        super().end_soon([number for number in numbers if number in self.running])

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._waiting[request.number] = len(self.submitted) % 4

    def step(self) -> list[Completion]:
        waiting = {n: self.running[n] for n in self._waiting if n in self.running}
        self._waiting = {n: self._waiting[n] - 1 for n in waiting if self._waiting[n] > 1}
        for number in waiting:
            del self.running[number]
        found = self._step()
        self.running = waiting | self.running
        return found

    def _step(self) -> list[Completion]:
        for number, (request, tokens) in self.running.items():
            assert len(tokens) < request.max_tokens
            self.versions.setdefault(number, []).append(self.version)
        found = super().step()
        for number, (request, tokens) in list(self.running.items()):
            if len(tokens) == request.max_tokens:
                del self.running[number]
                ids = np.array(tokens, np.int32)
                found.append(Completion(request, ids, log_probs_of(ids), "length"))
        return found


class Pool:
    """Environments that answer after a random number of questions, some of them late, and end at a
    given turn."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._open = rng, {}
        self._waiting: list[tuple[int, Event]] = []
        self._share: dict[int, float] = {}  # of the questions that have an answer
        self.num_busy, self.is_working = 0, False
        self.turns: dict[int, list[Response]] = {}
        self.restored: dict[int, int] = {}  # turns before, by ticket

    def start(self, prompt: Prompt, seed: int) -> int:
        ticket = len(self.turns)
        self.turns[ticket] = []
        self._share[ticket] = 0.2 if prompt.index % 4 else 0.01
        self._open[ticket] = 1 + prompt.index % 3
        self._waiting.append((ticket, Started(None, "0")))
        return ticket

    def restore(self, prompt: Prompt, seed: int, state: str, num_turns: int) -> int:
        assert state == str(num_turns)
        self.restored[self.start(prompt, seed)] = num_turns
        return len(self.turns) - 1

    def step(self, ticket: int, response: Response) -> None:
        self.turns[ticket].append(response)
        turn = self.restored.get(ticket, 0) + len(self.turns[ticket])
        assert response.turn == turn
        is_last = turn == self._open[ticket]
        text, state = (None, None) if is_last else ("a " + "b" * turn, str(turn))
        self._waiting.append((ticket, Stepped(text, 1.0, is_last, state)))

    def finished(self) -> list[tuple[int, Event]]:
        ready = [each for each in self._waiting if self._rng.random() < self._share[each[0]]]
        self._waiting = [each for each in self._waiting if each not in ready]
        return ready

    def end(self, tickets: Iterable[int]) -> None:
        for ticket in tickets:
            self._waiting = [each for each in self._waiting if each[0] != ticket]

    def close(self) -> None:
        pass


class Bank:
    """Keeps groups in memory, or fails like a full disk."""

    def __init__(self, fails: Callable[[], bool] = lambda: False) -> None:
        self.groups: dict[int, OpenGroup] = {}
        self._fails = fails

    def append(self, group: OpenGroup) -> None:
        if self._fails():
            raise OSError(28, "No space left on device")
        assert group.is_sampled and len(group.outcomes) == SIZE
        self.groups[group.draw] = replace(group, rollouts=list(group.rollouts))

    def forget(self, draws: Collection[int]) -> None:
        if self._fails():
            raise OSError(30, "Read-only file system")
        for draw in draws:
            self.groups.pop(draw, None)


class LateWriter:
    """Replaces the thread that writes: a write is done when it has been asked for often enough."""

    def __init__(self, num_threads: int) -> None:
        self._rng = random.Random(num_threads)

    def submit(self, write: Callable[..., None], *args: Any) -> LateWrite:
        return LateWrite(partial(write, *args), self._rng)

    def shutdown(self) -> None:
        pass


class LateWrite:
    """A future of `LateWriter`."""

    def __init__(self, write: Callable[[], None], rng: random.Random) -> None:
        self._write, self._rng, self._is_done = write, rng, False
        self._error: Exception | None = None

    def done(self) -> bool:
        if self._rng.random() < 0.3:
            self._end()
        return self._is_done

    def result(self) -> None:
        self._end()
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        if not self._is_done:
            self._is_done = True
            try:
                self._write()
            except Exception as error:
                self._error = error


class Run:
    """Engines that sample ahead, one after the other in this process."""

    def __init__(
        self,
        seed: int,
        *,
        num_engines: int = 1,
        most: int = 2,
        compares: bool = False,
        rewards: Callable[[], ScriptedRewards] = lambda: ScriptedRewards(float),
        turns: bool = False,
        banks: Sequence[Bank] | None = None,
        groups: dict[int, int] | None = None,
        next_draw: int = 0,
        banked: dict[int, OpenGroup | None] | None = None,  # None: it cannot be read
        drops_stale: bool = False,
    ) -> None:
        self.rng, self.most = random.Random(seed), most
        self.admission = Admission(
            groups_per_step=NUM_GROUPS,
            max_staleness=most,
            next_draw=next_draw,
            max_refills=1 if compares else None,
            groups=groups,
            drops_stale=drops_stale,
        )
        store = dist.HashStore()
        admissions = [self.admission, *[None] * (num_engines - 1)]
        self.draws = [Draws(store, next_draw, each) for each in admissions]
        self.engines = [Engine(long_lengths(seed)) for _ in self.draws]
        self.banks = [Bank() for _ in self.draws] if banks is None else banks
        self.pools: list[Pool] = []
        self.schedulers = [
            Scheduler(
                engine,  # type: ignore[arg-type]
                plan(
                    has_environments=turns,
                    max_turn_tokens=MOST_PER_TURN if turns else None,
                ),
                prompt_of,
                draws=draws,
                bank=bank,  # type: ignore[arg-type]
                rewards=rewards(),  # type: ignore[arg-type]
                select=select if compares else None,
                most_groups=-(-NUM_GROUPS * (most + 1) // num_engines),
                conversations=self._conversations() if turns else None,
                banked={
                    draw: SimpleNamespace(read=partial(copy, group))
                    for draw, group in (banked or {}).items()
                },
            )
            for engine, draws, bank in zip(self.engines, self.draws, self.banks, strict=True)
        ]
        self.trained: dict[int, tuple[int, OpenGroup]] = {}  # draw -> version of the step, group
        self.dropped: set[int] = set()
        self.version = 0

    def _conversations(self) -> Conversations:
        tokens = ConversationTokens(Words(), use_chat_template=False, ends=(), vocabulary=10_000)
        spec = EnvironmentSpec("any", timeout_seconds=1.0, max_turns=4)
        made = Conversations(spec, tokens, max_prompt_tokens=8, max_tokens=MAX_TOKENS)
        self.pools.append(made._pool)  # type: ignore[arg-type]
        return made

    def sample(self, engine: int, until: Callable[[], bool]) -> None:
        scheduler = self.schedulers[engine]
        scheduler.until = until
        step_engine(self.engines[engine], scheduler, self.engines[engine])  # type: ignore[arg-type]
        if scheduler.error is not None:
            raise scheduler.error

    def sample_a_little(self) -> None:
        """Some steps of each engine, in any order."""
        for _ in range(self.rng.randint(0, 3)):
            left = [self.rng.randint(1, 2)]

            def is_over(left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] < 0

            self.sample(self.rng.randrange(len(self.engines)), is_over)

    def pause(self) -> None:
        for engine, scheduler in enumerate(self.schedulers):
            scheduler.pause()
            self.sample(engine, lambda: False)
            assert not self.engines[engine].running

    def begin_step(self, version: int) -> None:
        for draws in (*self.draws, self.draws[0]):
            draws.flush()
        self.version = version
        stale = self.draws[0].begin_step(version).stale
        self.dropped |= set(stale)
        for engine, scheduler in zip(self.engines, self.schedulers, strict=True):
            engine.version = version
            scheduler.forget(stale)
            scheduler.resume(version)
        for number, draw in enumerate(self.admission.restarted):
            here = self.schedulers[number % len(self.schedulers)]
            here.load([OpenGroup.new(draw, SIZE)], is_resumed=True)

    def train(self) -> None:
        """Sample until the step is decided, and take its groups."""
        decisions: dict[int, Any] = {}
        while len(decisions) < len(self.engines):
            for engine, draws in enumerate(self.draws):
                if engine in decisions:
                    continue
                left = [5]

                def is_decided(
                    engine: int = engine, draws: Draws = draws, left: list[int] = left
                ) -> bool:
                    left[0] -= 1
                    if (decision := draws.decision()) is not None:
                        decisions[engine] = decision
                    return engine in decisions or left[0] < 0

                self.sample(engine, is_decided)
        assert len(set(decisions.values())) == 1
        decision = decisions[0]
        for scheduler in self.schedulers:
            for group in scheduler.groups_of(scheduler.held(decision.taken)):
                assert group.draw not in self.trained and group.draw not in self.dropped
                self.trained[group.draw] = self.version, group
            scheduler.forget({*decision.taken, *decision.dropped})
        assert set(decision.taken) <= self.trained.keys()
        self.dropped |= set(decision.dropped)

    def step(self, version: int) -> None:
        self.pause()
        self.begin_step(version)
        self.train()
        self.sample_a_little()

    def close(self) -> None:
        for scheduler in self.schedulers:
            scheduler.close()


def check_rollouts(run: Run) -> None:
    """Each token as the engine has made it, with the version of the weights that it had then."""
    for step_version, group in run.trained.values():
        oldest = step_version
        for index, rollout in enumerate(group.rollouts):
            assert rollout is not None and rollout.finish_reason in ("stop", "length")
            number = group.draw * SIZE + index
            versions = [v for engine in run.engines for v in engine.versions.get(number, ())]
            assert rollout.token_versions[generated(rollout)].tolist() == versions
            oldest = min(oldest, *versions)
            assert rollout.weight_version == versions[-1]
        assert step_version - oldest <= run.most


def generated(rollout: Rollout) -> np.ndarray:
    if rollout.is_generated is None:
        return np.ones(len(rollout.response_token_ids), np.bool_)
    return rollout.is_generated


def check_draws(run: Run, first: int = 0) -> None:
    """Every draw was trained or dropped, or is outstanding, and none twice."""
    for draws in (*run.draws, run.draws[0]):
        draws.flush()
    run.dropped |= set(run.draws[0]._dropped)
    places = [*run.trained, *run.dropped, *run.admission.outstanding]
    assert sorted(places) == list(range(first, run.admission.limit))
