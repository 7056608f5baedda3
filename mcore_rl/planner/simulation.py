"""Simulation of whole runs: colocated, with partial rollouts, and with engines on separate ranks.

The events are those of a run. Its `Admission` decides which draws start and which groups a step
takes. How draws go to engines and when the two sides wait for each other follows `rollout`.
Durations come from measured or planned speeds (`Speeds`), and engines are those of
`simulated_engines`. All candidates sample the same lengths for the same draws. See
docs/using/planner.md for what is left out.

    colocated   hand-over; N groups are sampled and rewarded; all ranks train on them
    partial     as colocated, with 1.5 N groups; the first N that finish are trained on, the others
                continue in later steps, and ask tools again that have not answered
    separate    engine ranks sample up to (K + 1) N groups ahead, fewer where trainers are slower;
                trainers train on N as soon as they have them; then both take part in the hand-over

A step calls separate engines four times: for its groups, their tokens, the samples that are logged,
and the hand-over. An engine answers in a schedule, and all engines wait until the last one does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mcore_rl.common.garbage import nothing_collected
from mcore_rl.planner.simulated_engines import Group, Sampling
from mcore_rl.planner.simulated_workload import EngineSpeed, Workload
from mcore_rl.rollout.admission import Admission

if TYPE_CHECKING:
    import simpy

    Events = Generator[simpy.Event, object, None]

COLOCATED, PARTIAL, SEPARATE = "colocated", "partial", "separate"
MODES = (COLOCATED, PARTIAL, SEPARATE)  # the simplest first
OVERSAMPLE = 1.5  # the default of --rl-partial-rollouts
_LEAST_STEPS, _MOST_STEPS, _RESPONSES = 6, 20, 40_000


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to use the ranks of a job.

    Example, 16 engines of TP2 on half of 64 ranks:

        Candidate("separate", num_ranks=64, num_trainers=32, num_engines=16, most_running=256,
                  hand_over_seconds=0.8, max_staleness=1)
    """

    mode: str
    num_ranks: int
    num_trainers: int  # all ranks, unless separate
    num_engines: int  # TP groups
    most_running: int  # sequences on an engine at the same time
    hand_over_seconds: float  # of a step; if colocated, of both switches
    max_staleness: int = 0
    memory_share: float | None = None  # of a device, for engines on ranks of their own

    @property
    def name(self) -> str:
        """The name in sentences."""
        if self.mode == COLOCATED:
            return "colocated"
        if self.mode == PARTIAL:
            return f"partial rollouts, K={self.max_staleness}"
        engines = self.num_ranks - self.num_trainers
        return f"{self.num_trainers} trainers and {engines} engine ranks, K={self.max_staleness}"

    @property
    def short_name(self) -> str:
        """The name in tables: "colocated", or "32 + 32, K=1": trainers and engine ranks."""
        if self.mode != SEPARATE:
            return self.name
        engines = self.num_ranks - self.num_trainers
        return f"{self.num_trainers} + {engines}, K={self.max_staleness}"

    @property
    def flags(self) -> str:
        """The flags that select it; without any, a job is colocated."""
        if self.mode == PARTIAL:
            oversample = f"--rl-oversample {OVERSAMPLE:g}"
            return f"--rl-partial-rollouts {oversample} --rl-max-staleness {self.max_staleness}"
        if self.mode == SEPARATE:
            ranks = f"{self.num_trainers}-{self.num_ranks - 1}"
            flags = f"--rl-rollout-ranks {ranks} --rl-max-staleness {self.max_staleness}"
            share = self.memory_share
            flag = "--rl-rollout-gpu-memory-utilization"
            return flags if share is None else f"{flags} {flag} {share:g}"
        return ""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Example: Speeds(engine=EngineSpeed((1, 64), (0.010, 0.018), 40_000.0), train_rate=3000.0)"""

    engine: EngineSpeed
    train_rate: float  # tokens of prompts and responses per second and trainer, all passes included
    other_seconds: float = 0.0  # of a step besides: batches are made, metrics written

    def train_seconds(self, groups: Sequence[Group], num_trainers: int) -> float:
        """Return the seconds in which a step's groups are trained on."""
        return sum(group.num_tokens for group in groups) / (self.train_rate * num_trainers)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A candidate's run, on average over the measured steps. Samples and tokens are those trained
    on; tokens are of responses. Idle ranks neither compute nor take part in a hand-over."""

    candidate: Candidate
    samples_per_second: float
    tokens_per_second: float
    step_seconds: float
    trainer_idle: float  # share of the time; colocated ranks have one share for both sides
    engine_idle: float
    staleness_mean: float  # versions between a group's first token and the step that trains on it
    staleness_max: int
    trained: tuple[int, ...]  # draws of all simulated steps, in order

    @property
    def samples_per_second_and_rank(self) -> float:
        return self.samples_per_second / self.candidate.num_ranks


def simulate(
    candidate: Candidate,
    workload: Workload,
    speeds: Speeds,
    *,
    warm_up_steps: int | None = None,
    steps: int | None = None,
) -> Simulated:
    """Simulate a run; the first `warm_up_steps` do not count. Deterministic. Without numbers of
    steps, they suffice for the staleness of the candidate, and are fewer if a step has many
    responses."""
    import simpy  # late: only this command needs it

    if warm_up_steps is None:
        # Separate engines start as many groups as they may for K + 1 steps, which train on them in
        # K more.
        rounds = 2 if candidate.mode == SEPARATE else 1
        warm_up_steps = rounds * candidate.max_staleness + 2
    if steps is None:
        responses = workload.groups_per_step * workload.samples_per_group
        steps = max(_LEAST_STEPS, min(_MOST_STEPS, _RESPONSES // responses))
    env = simpy.Environment()
    run = _Run(env, candidate, workload, speeds, warm_up_steps + steps)
    events = run.separate() if candidate.mode == SEPARATE else run.colocated()
    with nothing_collected():  # groups and requests are freed without it
        env.run(until=env.process(events))
    return run.result(warm_up_steps)


@dataclass(frozen=True, slots=True)
class _Step:
    """The end of a step, and what it trained on."""

    ended_at: float
    call_seconds: float  # so far
    train_seconds: float  # so far
    busy_seconds: float  # of an engine so far, on average
    groups: tuple[Group, ...]
    staleness: tuple[int, ...]


class _Run:
    """A run in simulated time."""

    def __init__(
        self,
        env: simpy.Environment,
        candidate: Candidate,
        workload: Workload,
        speeds: Speeds,
        num_steps: int,
    ) -> None:
        self._env, self._candidate, self._workload = env, candidate, workload
        self._speeds, self._num_steps = speeds, num_steps
        self._sampling = Sampling(
            env, workload, speeds.engine, candidate.num_engines, candidate.most_running
        )
        self._sampling.finished = self._finish
        self._finished: set[int] = set()  # draws with all rewards that are not trained on
        self._opened: dict[int, Group] = {}  # all draws that are not trained on
        self._sampling.started = self._open
        num, most, extra = workload.groups_per_step, candidate.max_staleness, None
        if candidate.mode != SEPARATE:
            extra = math.ceil(num * OVERSAMPLE) - num if candidate.mode == PARTIAL else 0
        self._admission = Admission(
            groups_per_step=num, max_staleness=most, next_draw=0, extra_groups=extra
        )
        at_a_time = num + (num * most if extra is None else extra)
        self._sampling.most_groups = math.ceil(at_a_time / candidate.num_engines)
        self._taken: tuple[int, ...] | None = ()  # by the step; None: undecided
        self._all_stopped = env.event()
        self._steps: list[_Step] = []
        self._train_seconds = 0.0
        self._call_seconds = 0.0  # in which trainers waited for answers of separate engines
        self._changed = env.event()  # a group is sampled or finished

    def colocated(self) -> Events:
        """Engines that stop when a step is decided, with partial rollouts, too."""
        admission, sampling = self._admission, self._sampling
        for _ in range(self._num_steps):
            yield from self._hand_over()
            admission.begin_step(sampling.version, next_draw=sampling.next_draw)
            self._taken = self._decided()
            if self._taken is None:
                for group in sorted(self._opened.values(), key=lambda each: each.draw):
                    if not group.is_sampled:
                        sampling.resume(group)
                sampling.offer(admission.limit)
                yield from self._until_decided()
                sampling.stop(self._opened.values())
                self._resume_engines()
            while not self._sampled <= self._finished:
                yield self._changed
            admission.end_step()
            groups = self._take()
            yield from self._train(groups)
            yield from self._end_step(groups)

    @property
    def _sampled(self) -> set[int]:
        """The draws whose responses have all ended."""
        return {draw for draw, group in self._opened.items() if group.is_sampled}

    def _until_decided(self) -> Events:
        """Wait until the step is decided, and all engines have stopped."""
        while self._taken is None:
            yield self._changed
        yield self._all_stopped

    def separate(self) -> Events:
        admission, sampling = self._admission, self._sampling
        yield self._stop_engines()
        for _ in range(self._num_steps):
            admission.begin_step(sampling.version)
            self._taken = self._decided()
            sampling.offer(admission.limit)
            if self._taken is None:
                self._resume_engines()
                yield from self._until_decided()
            self._resume_engines()
            yield from self._call()
            self._resume_engines()
            groups = self._take()
            yield from self._train(groups)
            yield from self._call()
            self._resume_engines()
            yield from self._end_step(groups)
            yield from self._call(last_steps=1)  # running requests end with their next token
            yield from self._hand_over()

    def _call(self, last_steps: int = 0) -> Events:
        """Wait until all engines have stopped to answer a call."""
        began = self._env.now
        yield self._stop_engines(last_steps)
        self._call_seconds += self._env.now - began

    def _stop_engines(self, last_steps: int = 0) -> simpy.Event:
        """Let all engines stop; return the event that they have."""
        all_stopped, left = self._env.event(), len(self._sampling.engines)

        def stopped() -> None:
            nonlocal left
            left -= 1
            if not left:
                all_stopped.succeed()

        for engine in self._sampling.engines:
            engine.stop(stopped, last_steps=last_steps)
        return all_stopped

    def _resume_engines(self) -> None:
        for engine in self._sampling.engines:
            engine.resume()

    def _hand_over(self) -> Events:
        for engine in self._sampling.engines:
            engine.begin_update()
        yield self._env.timeout(self._candidate.hand_over_seconds)
        self._sampling.version += 1
        for engine in self._sampling.engines:
            engine.update()

    def _take(self) -> tuple[Group, ...]:
        """Return the groups that a step trains on."""
        assert self._taken is not None, "the step is not decided"
        self._finished -= {*self._taken}
        return tuple(self._opened.pop(draw) for draw in self._taken)

    def _train(self, groups: Sequence[Group]) -> Events:
        seconds = self._speeds.train_seconds(groups, self._candidate.num_trainers)
        yield self._env.timeout(seconds)
        self._train_seconds += seconds

    def _end_step(self, groups: tuple[Group, ...]) -> Events:
        yield self._env.timeout(self._speeds.other_seconds)
        self._train_seconds += self._speeds.other_seconds
        busy, staleness = self._sampling.busy_seconds(), tuple(self._age(each) for each in groups)
        step = _Step(
            self._env.now, self._call_seconds, self._train_seconds, busy, groups, staleness
        )
        self._steps.append(step)

    def _age(self, group: Group) -> int:
        return 0 if group.version is None else self._sampling.version - group.version

    def _open(self, group: Group) -> None:
        self._opened[group.draw] = group
        self._admission.start(group.draw, self._sampling.version)

    def _finish(self, group: Group) -> None:
        group.engine.report(functools.partial(self._report, group))

    def _report(self, group: Group) -> None:
        """Tell the first engine of a finished group; it decides in a schedule."""
        self._finished.add(group.draw)
        self._admission.finish(group.draw)
        first = self._sampling.engines[0]
        if self._taken is None:
            first.report(self._decide)
        self._wake()

    def _decide(self) -> None:
        if self._taken is None and (taken := self._decided()) is not None:
            ends = self._candidate.mode == PARTIAL  # running requests, with their next token
            self._taken, self._all_stopped = taken, self._stop_engines(last_steps=int(ends))
            self._wake()

    def _decided(self) -> tuple[int, ...] | None:
        decision = self._admission.decide()
        return None if decision is None else decision.taken

    def _wake(self) -> None:
        self._changed.succeed()
        self._changed = self._env.event()

    def result(self, warm_up_steps: int) -> Simulated:
        """Return the averages from the end of step `warm_up_steps` on."""
        measured = self._steps[warm_up_steps:]
        before = (
            self._steps[warm_up_steps - 1] if warm_up_steps else _Step(0.0, 0.0, 0.0, 0.0, (), ())
        )
        seconds = measured[-1].ended_at - before.ended_at
        groups = [group for step in measured for group in step.groups]
        staleness = [age for step in measured for age in step.staleness]
        size, switches = self._workload.samples_per_group, len(measured)
        training = measured[-1].train_seconds - before.train_seconds
        sampling = measured[-1].busy_seconds - before.busy_seconds
        moving = self._candidate.hand_over_seconds * switches
        is_separate = self._candidate.mode == SEPARATE
        calls = measured[-1].call_seconds - before.call_seconds
        trainers_busy = training + calls + moving + (0.0 if is_separate else sampling)
        engines_busy = sampling + moving + (0.0 if is_separate else training)
        return Simulated(
            self._candidate,
            samples_per_second=len(groups) * size / seconds,
            tokens_per_second=sum(group.response_tokens for group in groups) / seconds,
            step_seconds=seconds / switches,
            trainer_idle=max(0.0, 1 - trainers_busy / seconds),
            engine_idle=max(0.0, 1 - engines_busy / seconds),
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            trained=tuple(group.draw for step in self._steps for group in step.groups),
        )
