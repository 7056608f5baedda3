"""Engines in simulated time, and the groups that they sample; `simulation` runs jobs on them.

An engine is one TP group. All its running sequences get a token in each of its steps, so that it
counts the tokens of a sequence that never ends, and a request ends at a known count. Between two
events (a request starts or ends, an update) the duration of a step is constant. An engine therefore
has an event per request, not per token.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import simpy

_ROUNDING = 1e-6  # of a token


@dataclass(frozen=True, slots=True)
class Response:
    """The tokens of a response, which waits for a tool after each turn but the last.

    Example, three turns and two answers of tools of ten tokens: `Response((16, 9, 30), 20)`.
    """

    turns: tuple[float, ...]  # sampled tokens of each
    observed_tokens: float = 0.0  # of all answers together

    @property
    def num_tokens(self) -> float:
        return sum(self.turns) + self.observed_tokens

    @property
    def tokens_per_answer(self) -> float:
        return self.observed_tokens / max(1, len(self.turns) - 1)

    def cut(self, most: float) -> Response:
        """Return the response without what is beyond `most` tokens."""
        turns: list[float] = []
        for tokens in self.turns:
            if most <= 0:
                break
            turns.append(min(tokens, most))
            most -= tokens + self.tokens_per_answer
        return Response(tuple(turns), self.tokens_per_answer * (len(turns) - 1))


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """The distribution of responses: recorded ones, or log-normal with this mean.

    Example: `ResponseLengths(most=8192, mean=1500.0, sigma=1.0, turns=4)`, or those of a run
    `ResponseLengths(most=8192, recorded=(Response((812,)), Response((77, 40), 20)))`.
    """

    most: int  # longer responses are cut
    mean: float = 0.0
    sigma: float = 0.0  # standard deviation of the logarithm; 0: all have the mean
    turns: int = 1  # of equal length, unless recorded
    recorded: tuple[Response, ...] = ()

    @property
    def mean_tokens(self) -> float:
        if self.recorded:
            return sum(each.num_tokens for each in self.recorded) / len(self.recorded)
        return self.mean

    def of_draw(self, draw: int, count: int, seed: int) -> list[Response]:
        """Return `count` responses, which depend on nothing but the arguments."""
        random = np.random.default_rng((seed, draw))
        if self.recorded:
            chosen = random.integers(len(self.recorded), size=count)
            return [self.recorded[index].cut(self.most) for index in chosen]
        center = np.log(self.mean) - self.sigma**2 / 2
        lengths = random.lognormal(center, self.sigma, count).tolist()
        whole = [min(max(round(length), 1), self.most) for length in lengths]
        return [Response((length / self.turns,) * self.turns) for length in whole]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The samples of a step.

    Example: Workload(groups_per_step=128, samples_per_group=16, prompt_tokens=300,
    lengths=ResponseLengths(8192, 1500.0, 1.0, turns=4), tool_seconds=1.0)
    """

    groups_per_step: int
    samples_per_group: int
    prompt_tokens: float
    lengths: ResponseLengths
    tool_seconds: float = 0.0
    reward_seconds: float = 0.0  # of a response; any number of rewards run at the same time
    seed: int = 1
    _drawn: dict[int, list[Response]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def responses(self, draw: int) -> list[Response]:
        """Return the responses to a draw, the same in every simulation."""
        found = self._drawn.get(draw)
        if found is None:
            found = self.lengths.of_draw(draw, self.samples_per_group, self.seed)
            self._drawn[draw] = found
        return found


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Seconds of an engine's step by the number of running sequences, and its prefill.

    Example: EngineSpeed(running=(1, 64), step_seconds=(0.010, 0.018), prefill_rate=40_000.0)
    """

    running: tuple[int, ...]  # ascending
    step_seconds: tuple[float, ...]
    prefill_rate: float  # tokens per second
    repeated_rate: float = math.inf  # of tokens before: the engine's cache may hold them, or not

    def table(self, most: int) -> list[float]:
        """Return the seconds of a step with 0 to `most` sequences: linear between two measured
        numbers, and beyond the last as between the last two."""
        numbers, seconds = np.array(self.running), np.array(self.step_seconds)
        wanted = np.arange(most + 1)
        found = np.interp(wanted, numbers, seconds)
        if len(numbers) > 1 and most > numbers[-1]:
            slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
            found += np.maximum(wanted - numbers[-1], 0) * max(slope, 0.0)
        return [float(each) for each in found]


@dataclass(slots=True, eq=False)
class Request:
    """A response that is being sampled."""

    group: Group
    parts: deque[float]  # tokens of the current turn that are left, and of each later turn
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
    ) -> None:
        """`ended` is called with each request whose current turn has ended."""
        self._env, self._ended = env, ended
        self._prefill_rate, self._repeated_rate = speed.prefill_rate, speed.repeated_rate
        self._step_seconds = speed.table(most_running)
        self._most_running = most_running
        # Heap of (count at the end of the current turn, order of submission, request).
        self._running: list[tuple[float, int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._count = 0.0  # tokens of a sequence that never ends
        self._prefill_seconds = 0.0  # left before the next token
        self._at = env.now
        self._num_submitted = self._num_wakes = 0
        self._is_paused = False
        self._updates = 0
        self._busy_seconds = 0.0

    @property
    def num_requests(self) -> int:
        """Requests that run or wait for a place."""
        return len(self._running) + len(self._waiting)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step of what runs now; 0 if nothing does."""
        return self._step_seconds[len(self._running)] if self._running else 0.0

    def busy_seconds(self) -> float:
        """Return the seconds so far in which it computed."""
        self._advance()
        return self._busy_seconds

    def submit(self, requests: Sequence[Request]) -> None:
        """Start the requests as soon as there is room."""
        self._waiting.extend(requests)
        self._go_on()

    def pause(self) -> None:
        """Stop between two steps."""
        self._advance()
        self._is_paused = True

    def update(self) -> None:
        """Continue with new weights: keys and values of running requests are computed anew."""
        self._advance()
        self._is_paused = False
        self._updates += 1
        self._prefill_seconds = 0.0
        for ends_at, _, request in self._running:
            self._prefill(request, ends_at - self._count)
        self._go_on()

    def stop(self, keep: Container[int] = ()) -> None:
        """End the current step for all requests but those of the draws in `keep`. Stopped requests
        can be submitted again."""
        self._advance()
        kept = [entry for entry in self._running if entry[2].group.draw in keep]
        for ends_at, _, request in self._running:
            if request.group.draw not in keep:
                left = max(0.0, ends_at - self._count)
                request.done_tokens += request.parts[0] - left
                request.parts[0] = left
        heapq.heapify(kept)
        self._running = kept
        self._waiting = deque(each for each in self._waiting if each.group.draw in keep)
        self._go_on()

    def _advance(self) -> None:
        """Bring the state to the present."""
        seconds, self._at = self._env.now - self._at, self._env.now
        if not seconds or self._is_paused or not self._running:
            return
        self._busy_seconds += seconds
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

    def _go_on(self) -> None:
        """Start what waits, and plan the next event."""
        self._advance()
        while self._waiting and len(self._running) < self._most_running:
            request = self._waiting.popleft()
            self._prefill(request, request.parts[0])
            self._num_submitted += 1
            ends_at = self._count + request.parts[0]
            heapq.heappush(self._running, (ends_at, self._num_submitted, request))
        if self._is_paused or not self._running:
            return
        steps = max(0.0, self._running[0][0] - self._count)
        seconds = self._prefill_seconds + steps * self._step_seconds[len(self._running)]
        self._num_wakes += 1
        wake = self._env.timeout(seconds, self._num_wakes)
        assert wake.callbacks is not None, "it is new"
        wake.callbacks.append(self._wake)

    def _wake(self, event: simpy.Event) -> None:
        if event.value != self._num_wakes or self._is_paused or not self._running:
            return  # something else happened in between
        self._advance()
        self._count = max(self._count, self._running[0][0])  # without the error of rounding
        ended = []
        while self._running and self._running[0][0] <= self._count + _ROUNDING:
            request = heapq.heappop(self._running)[2]
            request.done_tokens += request.parts.popleft()
            ended.append(request)
        self._go_on()
        for request in ended:
            self._ended(request)


class Sampling:
    """All engines of a job, the groups on them, and the assignment of draws.

    An engine takes the next draw below `limit` when it has room for a request, as in
    `rollout.dispatch`; engines with fewer requests come first.
    """

    def __init__(
        self,
        env: simpy.Environment,
        workload: Workload,
        speed: EngineSpeed,
        num_engines: int,
        most_running: int,
    ) -> None:
        self._env, self._workload = env, workload
        self.most_running = self.room = most_running
        self.engines = [Engine(env, speed, most_running, self._ended) for _ in range(num_engines)]
        self.limit = self.next_draw = 0
        self.version = 1
        self.started: Callable[[Group], None] = lambda group: None
        self.sampled: Callable[[Group], None] = lambda group: None  # all responses have ended
        self.finished: Callable[[Group], None] = lambda group: None  # and have their rewards

    def offer(self, limit: int, groups_at_once: float) -> None:
        """Let draws below `limit` start. Engines share `groups_at_once` groups evenly."""
        self.limit = limit
        share = max(1, int(np.ceil(groups_at_once / len(self.engines))))
        self.room = min(self.most_running, share * self._workload.samples_per_group)
        loads = [(engine.num_requests, number) for number, engine in enumerate(self.engines)]
        heapq.heapify(loads)
        while self.next_draw < self.limit and loads and loads[0][0] < self.room:
            number = loads[0][1]
            self._start_group(self.engines[number])
            heapq.heapreplace(loads, (self.engines[number].num_requests, number))

    def stop(self, groups: Sequence[Group], keep: Container[int]) -> None:
        """Stop these groups, except the draws in `keep`: requests end with their current step, and
        no answer of a tool counts that has not arrived."""
        for engine in self.engines:
            engine.stop(keep)
        for group in groups:
            if group.draw in keep:
                continue
            if not group.has_tokens:  # it has not begun
                group.version = None
            for request in group.requests:
                request.num_asked += 1

    def resume(self, group: Group) -> None:
        """Continue a stopped group on its engine. Tools that had not answered are asked again."""
        if group.version is None:
            group.version = self.version
        if group.is_sampled:
            self.sampled(group)
            return
        asking = [request for request in group.requests if request.awaits_tool]
        group.engine.submit([each for each in group.requests if not each.awaits_tool])
        for request in asking:
            self._ask_tool(request)

    def busy_seconds(self) -> float:
        """Return the seconds that an engine computed so far, on average."""
        return sum(engine.busy_seconds() for engine in self.engines) / len(self.engines)

    def _start_group(self, engine: Engine) -> None:
        workload = self._workload
        responses = workload.responses(self.next_draw)
        group = Group(self.next_draw, engine, workload.prompt_tokens, responses, self.version)
        group.requests = [
            Request(group, deque(each.turns), each.tokens_per_answer) for each in responses
        ]
        self.next_draw += 1
        self.started(group)
        engine.submit(group.requests)

    def _ended(self, request: Request) -> None:
        group = request.group
        if request.parts:
            request.observed_tokens = request.tokens_per_answer
            request.done_tokens += request.tokens_per_answer
            self._ask_tool(request)
        else:
            group.requests.remove(request)
            if group.is_sampled:  # its other rewards are there when the last one is
                self._after(self._workload.reward_seconds, lambda: self.finished(group))
                self.sampled(group)
        while self.next_draw < self.limit and group.engine.num_requests < self.room:
            self._start_group(group.engine)

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
        if not seconds:
            call()
            return
        event = self._env.timeout(seconds)
        assert event.callbacks is not None, "it is new"
        event.callbacks.append(lambda _: call())
