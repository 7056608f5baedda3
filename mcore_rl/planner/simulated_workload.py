"""What simulated runs sample, and the speed of the engines that sample it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_LEAST_ADDED = 0.01  # of a step's seconds, by a prefill that takes no measurable time


@dataclass(frozen=True, slots=True)
class Response:
    """The tokens of a response, which waits for a tool after each turn but the last.

    Example, three turns and two answers of tools of ten tokens: `Response((16, 9, 30), 20)`.
    """

    turns: tuple[int, ...]  # sampled tokens of each
    observed_tokens: float = 0.0  # of all answers together

    @property
    def num_tokens(self) -> float:
        return sum(self.turns) + self.observed_tokens

    @property
    def tokens_per_answer(self) -> float:
        return self.observed_tokens / max(1, len(self.turns) - 1)

    def cut(self, most: float) -> Response:
        """Return the response without what is beyond `most` tokens."""
        turns: list[int] = []
        for tokens in self.turns:
            if most <= 0:
                break
            turns.append(min(tokens, math.ceil(most)))
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
        return [Response(even_turns(length, self.turns)) for length in whole]


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
    environment_seconds: float = 0.0  # until the environment of a response has started
    reward_seconds: float = 0.0  # of a response; any number of rewards run at the same time
    seed: int = 1
    _drawn: dict[int, list[Response]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def responses(self, draw: int) -> list[Response]:
        """Return the responses to a draw, the same in every simulation."""
        responses = self._drawn.get(draw)
        if responses is None:
            responses = self.lengths.of_draw(draw, self.samples_per_group, self.seed)
            self._drawn[draw] = responses
        return responses


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
        interpolated = np.interp(wanted, numbers, seconds)
        if len(numbers) > 1 and most > numbers[-1]:
            slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
            interpolated += np.maximum(wanted - numbers[-1], 0) * max(slope, 0.0)
        return [float(each) for each in interpolated]


def prefill_rate(
    steps: Sequence[tuple[float, int]], num_tokens: int, step_seconds: Mapping[int, float]
) -> float:
    """Return the tokens of prompts per second of the time that computing them adds to steps.

    `steps`, in which `num_tokens` tokens of prompts are computed, have their seconds and the number
    of prompts that get a token. `step_seconds`, ascending, are those of steps that compute nothing
    else, by the number of sequences."""
    usual = np.interp([got for _, got in steps], list(step_seconds), list(step_seconds.values()))
    seconds = sum(seconds for seconds, _ in steps)
    return num_tokens / max(seconds - float(usual.sum()), _LEAST_ADDED * seconds)


def even_turns(num_tokens: int, num_turns: int) -> tuple[int, ...]:
    """Return the tokens of as many turns, none of which is empty."""
    num_turns = min(num_turns, num_tokens)
    return tuple(num_tokens // num_turns + (i < num_tokens % num_turns) for i in range(num_turns))
