"""Engines in simulated time, and the groups that they sample; `simulation` runs jobs on them.

An engine is one TP group. As in `rollout.stream`, it takes requests, reports groups and answers
calls at the schedules between its steps: after a step in which a request ended, and after every
fourth one. All its running sequences get a token in each step, so that it counts the steps since
its start, and a request ends at a known count. Between two schedules with work to do, the duration
of a step is constant. An engine therefore has a few events per request, and none per token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from mcore_rl.planner.simulated_workload import EngineSpeed, Response, Workload

if TYPE_CHECKING:
    import simpy

STEPS_BETWEEN_SCHEDULES = 4  # of `rollout.stream`, which imports more than a plan needs
_ROUNDING = 1e-6  # of a step


@dataclass(slots=True, eq=False)
class Request:
    """A response that is being sampled."""

    group: Group
    parts: deque[int]  # tokens of the current turn that are left, and of each later turn
    tokens_per_answer: float = 0.0  # of tools, between turns
    done_tokens: float = 0.0  # before `parts`
    observed_tokens: float = 0.0  # of these, an answer that no keys and values are computed of
    cached_at: int = -1  # update of the engine for which it has keys and values of its tokens
    awaits_tool: bool = False
    num_asked: int = 0  # how often a tool was asked: an earlier answer no longer counts


@dataclass(slots=True, eq=False)
class Group:
    """All responses to one draw, on one engine."""

    draw: int
    engine: Engine
    prompt_tokens: float
    responses: Sequence[Response]
    version: int | None  # of the weights with which it began; None: no token yet
    requests: list[Request] = field(default_factory=list)  # those that have not ended
    cached_at: int = -1  # as in `Request`, of the prompt

    @property
    def is_sampled(self) -> bool:
        return not self.requests

    @property
    def has_tokens(self) -> bool:
        """Whether any token was sampled; only of a stopped group."""
        some = len(self.requests) < len(self.responses)
        return some or any(request.done_tokens for request in self.requests)

    @property
    def num_tokens(self) -> float:
        """Tokens to train on: prompts and responses."""
        return self.prompt_tokens * len(self.responses) + self.response_tokens

    @property
    def response_tokens(self) -> float:
        return sum(each.num_tokens for each in self.responses)


class Engine:
    """One TP group of an engine."""

    def __init__(
        self,
        env: simpy.Environment,
        speed: EngineSpeed,
        most_running: int,
        ended: Callable[[Request], None],
        start_groups: Callable[[Engine], None],
    ) -> None:
        """`ended` is called with each request whose current turn has ended, `start_groups` in each
        schedule in which requests may start."""
        self._env, self._ended, self._start_groups = env, ended, start_groups
        self._prefill_rate, self._repeated_rate = speed.prefill_rate, speed.repeated_rate
        self._step_seconds = speed.table(most_running)
        self._most_running = most_running
        # Heap of (count at the end of the current turn, order of submission, request).
        self._running: list[tuple[int, int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._reports: deque[Callable[[], None]] = deque()
        self._count = 0.0  # steps, the current one in part
        self._scheduled_at = 0  # the count from which every fourth step is followed by a schedule
        self._prefill_seconds = 0.0  # left in the current step
        self._at = env.now
        self._num_submitted = self._num_wakes = 0
        self._has_work = self._is_scheduling = False  # for the next schedule; now
        self._stopped: Callable[[], None] | None = None  # to be told when it has stopped
        self._last_steps = 0  # before it stops
        self._is_stopped = self._is_updating = False
        self._updates = 0
        self._busy_seconds = 0.0
        self.num_groups = 0  # that are being sampled
        self.num_starting = 0  # requests whose environments are being started

    @property
    def num_requests(self) -> int:
        """Requests that run, or wait for a place or an environment."""
        return len(self._running) + len(self._waiting) + self.num_starting

    def busy_seconds(self) -> float:
        """Return the seconds so far in which it had requests and no update."""
        self._advance()
        return self._busy_seconds

    # Work for the next schedule, which is now if nothing runs

    def submit(self, requests: Sequence[Request]) -> None:
        """Start the requests as soon as there is room."""
        self._waiting.extend(requests)
        self._notify()

    def report(self, call: Callable[[], None]) -> None:
        """Call this in the next schedule."""
        self._reports.append(call)
        self._notify()

    def stop(self, stopped: Callable[[], None], *, last_steps: int = 0) -> None:
        """Stop in the next schedule, and call `stopped`; if requests run then, after `last_steps`
        more steps."""
        self._stopped, self._last_steps = stopped, last_steps
        self._notify()

    # While it is stopped

    def resume(self) -> None:
        """Continue, with a schedule."""
        self._advance()
        self._is_stopped = False
        self._scheduled_at = round(self._count)
        self._schedule([])
        self._go_on()

    def begin_update(self) -> None:
        """Take part in a hand-over."""
        self._advance()
        self._is_updating = True

    def update(self) -> None:
        """Have new weights: keys and values of running requests are computed anew."""
        self._advance()
        self._is_updating = False
        self._updates += 1
        self._prefill_seconds = 0.0
        for ends_at, _, request in self._running:
            self._prefill(request, ends_at - self._count)

    def drop(self) -> None:
        """Drop all requests; they can be submitted again."""
        self._advance()
        for ends_at, _, request in self._running:
            left = round(ends_at - self._count)
            request.done_tokens += request.parts[0] - left
            request.parts[0] = left
        self._running = []
        self._waiting.clear()

    # Internal

    def _notify(self) -> None:
        is_planned, self._has_work = self._has_work, True
        if not is_planned and not self._is_stopped and not self._is_scheduling:
            self._go_on()

    def _go_on(self) -> None:
        """Plan the next schedule: at the end of a request, or before, if there is work to do; if
        nothing runs, at the end of this moment, with all that arrives in it."""
        if self._is_stopped or not (self._running or self._has_work):
            return
        self._advance()
        count = round(self._count)
        if self._running:
            count = self._running[0][0]
        if self._running and self._has_work:
            since = math.floor(self._count + _ROUNDING) - self._scheduled_at
            wait = STEPS_BETWEEN_SCHEDULES - since % STEPS_BETWEEN_SCHEDULES
            count = min(count, self._scheduled_at + since + wait)
        steps = max(0.0, count - self._count)
        seconds = self._prefill_seconds + steps * self._step_seconds[len(self._running)]
        self._num_wakes += 1
        wake = self._env.timeout(seconds, (self._num_wakes, count))
        assert wake.callbacks is not None, "it is new"
        wake.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        number, count = cast("tuple[int, int]", event.value)
        if number != self._num_wakes or self._is_stopped:
            return  # something else happened in between
        self._advance()
        self._count, self._prefill_seconds = float(count), 0.0  # without the error of rounding
        ended = []
        while self._running and self._running[0][0] <= count:
            request = heapq.heappop(self._running)[2]
            request.done_tokens += request.parts.popleft()
            ended.append(request)
        self._schedule(ended)
        self._go_on()

    def _schedule(self, ended: Sequence[Request]) -> None:
        """Do what happens between two steps."""
        self._is_scheduling = True
        for request in ended:
            self._ended(request)
        while self._reports:
            self._reports.popleft()()
        if self._stopped is None:
            self._start_groups(self)
            self._start_waiting()
        self._is_scheduling = self._has_work = False
        if self._stopped is None:
            return
        if self._last_steps and self._running:
            self._last_steps -= 1
            self._has_work = True
            self._scheduled_at = round(self._count) + 1 - STEPS_BETWEEN_SCHEDULES
            return
        stopped, self._stopped, self._is_stopped = self._stopped, None, True
        stopped()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < self._most_running:
            request = self._waiting.popleft()
            self._prefill(request, request.parts[0])
            self._num_submitted += 1
            ends_at = round(self._count) + request.parts[0]
            heapq.heappush(self._running, (ends_at, self._num_submitted, request))

    def _advance(self) -> None:
        """Bring the state to the present."""
        seconds, self._at = self._env.now - self._at, self._env.now
        if not seconds or self._is_updating or not self._running:
            return
        self._busy_seconds += seconds
        if self._is_stopped:
            return
        prefill = min(seconds, self._prefill_seconds)
        self._prefill_seconds -= prefill
        self._count += (seconds - prefill) / self._step_seconds[len(self._running)]

    def _prefill(self, request: Request, left: float) -> None:
        """Add the prefill of a request, if `left` tokens of its current turn are left. Tokens that
        were computed with the same weights, by this request or, of a prompt, by another one, are
        repeated ones."""
        group = request.group
        prompt, response = group.prompt_tokens, request.done_tokens + request.parts[0] - left
        repeated = prompt if group.cached_at == self._updates else 0.0
        if request.cached_at == self._updates:
            repeated += response - request.observed_tokens
        request.observed_tokens = 0.0
        group.cached_at = request.cached_at = self._updates
        self._prefill_seconds += repeated / self._repeated_rate
        self._prefill_seconds += (prompt + response - repeated) / self._prefill_rate


class Sampling:
    """All engines of a job, the groups on them, and the assignment of draws.

    An engine takes the next draw below `limit` when it has room for a request, as in
    `rollout.draws`; engines with fewer requests come first.
    """

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        speed: EngineSpeed,
        num_engines: int,
        most_running: int,
    ) -> None:
        self._env, self._workload, self._most_running = env, workload, most_running
        self.most_groups = math.inf  # of an engine that are being sampled
        self.engines = [
            Engine(env, speed, most_running, self._ended, self._start_groups)
            for _ in range(num_engines)
        ]
        self.limit = self.next_draw = 0
        self.version = 1
        self.started: Callable[[Group], None] = lambda group: None
        self.finished: Callable[[Group], None] = lambda group: None  # and all rewards are there

    def offer(self, limit: int) -> None:
        """Let draws below `limit` start."""
        self.limit = limit
        loads = [(engine.num_requests, number) for number, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        while self.next_draw < self.limit and loads:
            number = heapq.heappop(loads)[1]
            engine = self.engines[number]
            if self._has_room(engine):
                self._start_group(engine)
                heapq.heappush(loads, (engine.num_requests, number))

    def stop(self, groups: Iterable[Group]) -> None:
        """Stop these groups, on engines that have stopped; none starts until `offer`. No answer of
        a tool counts that has not arrived."""
        self.limit = self.next_draw
        for engine in self.engines:
            engine.drop()
        for group in groups:
            if not group.has_tokens:  # it has not begun
                group.version = None
            for request in group.requests:
                request.num_asked += 1

    def resume(self, group: Group) -> None:
        """Continue a stopped group on its engine. Tools that had not answered are asked again."""
        if group.version is None:
            group.version = self.version
        self._start(group)

    def busy_seconds(self) -> float:
        """Return the seconds that an engine computed so far, on average."""
        return sum(engine.busy_seconds() for engine in self.engines) / len(self.engines)

    def _has_room(self, engine: Engine) -> bool:
        return engine.num_requests < self._most_running and engine.num_groups < self.most_groups

    def _start_groups(self, engine: Engine) -> None:
        while self.next_draw < self.limit and self._has_room(engine):
            self._start_group(engine)

    def _start_group(self, engine: Engine) -> None:
        workload = self._workload
        responses = workload.responses(self.next_draw)
        group = Group(self.next_draw, engine, workload.prompt_tokens, responses, self.version)
        group.requests = [
            Request(group, deque(each.turns), each.tokens_per_answer) for each in responses
        ]
        self.next_draw += 1
        engine.num_groups += 1
        self.started(group)
        self._start(group)

    def _start(self, group: Group) -> None:
        """Submit the requests of a group that begins or continues, once their environments have
        started; or ask their tools."""
        engine, requests = group.engine, tuple(group.requests)

        def submit() -> None:
            engine.num_starting -= len(requests)
            engine.submit([each for each in requests if not each.awaits_tool])
            for request in requests:
                if request.awaits_tool:
                    self._ask_tool(request)

        engine.num_starting += len(requests)
        if self._workload.environment_seconds:
            self._after(self._workload.environment_seconds, submit)
        else:
            submit()

    def _ended(self, request: Request) -> None:
        group = request.group
        if request.parts:
            request.observed_tokens = request.tokens_per_answer
            request.done_tokens += request.tokens_per_answer
            self._ask_tool(request)
            return
        group.requests.remove(request)
        if group.is_sampled:  # its other rewards are there when the last one is
            group.engine.num_groups -= 1
            self._after(self._workload.reward_seconds, partial(self.finished, group))

    def _ask_tool(self, request: Request) -> None:
        request.awaits_tool = True
        request.num_asked += 1
        number = request.num_asked

        def answer() -> None:
            if request.num_asked == number:
                request.awaits_tool = False
                request.group.engine.submit([request])

        self._after(self._workload.tool_seconds, answer)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call later, even if no time passes until then: a schedule that continues is over."""
        event = self._env.timeout(seconds)
        assert event.callbacks is not None, "it is new"
        event.callbacks.append(lambda _: call())
