"""Measurements that `mcore-rl plan --simulate` reads: runs, lengths, speeds of engines."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_rl.common.errors import CORRECT, UsageError
from mcore_rl.common.readers import InvalidData, finite_number, integer_within, lines_of, parse_json
from mcore_rl.observe.run_directory import read_config, read_metrics
from mcore_rl.planner.simulated_workload import EngineSpeed, Response, even_turns

_MAX_LINE_BYTES = 1 << 24  # of rollouts.jsonl
_MAX_TOKENS = 1 << 30
_NO_TIME = 1e12  # tokens per second, where earlier versions did not measure them
_NUM_SAMPLES = ("prompts_per_step", "samples_per_prompt")


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Averages of a run's steps but the first.

    Example: `RecordedRun(folder=Path("runs/a"), train_rate=3000.0, switch_seconds=4.1,
    reward_seconds=0.2, other_seconds=0.1, mean_tokens=1200.0, prompt_tokens=130.0)`.
    """

    folder: Path
    train_rate: float  # tokens per second and trainer, log-probs included
    switch_seconds: float  # with separate engines, of a hand-over
    reward_seconds: float  # for which a step waited
    other_seconds: float  # of a step outside all stages
    mean_tokens: float  # of a response
    prompt_tokens: float  # on average
    max_staleness: int = 0


def read_run(folder: Path, *, is_separate: bool = False) -> RecordedRun:
    """Read the directory of a colocated run, or of one with separate engines. Raises
    UsageError."""
    flag = f"{'--from-separate-run' if is_separate else '--from-run'} {folder}"
    try:
        config = read_config(folder / "config.yaml")
        metrics = read_metrics(folder / "metrics.jsonl")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"is not the directory of a run ({error})", flag=flag, remedy="give another"
        ) from error
    if is_separate != (config.resolved.get("rl_rollout_ranks") is not None):
        raise UsageError(
            f"is a run {'without' if is_separate else 'with'} --rl-rollout-ranks",
            flag=flag,
            remedy=f"give it to {'--from-run' if is_separate else '--from-separate-run'}",
        )
    needed = "train log_probs advantages reshard_to_rollout reshard_to_train reward".split()
    names = [f"time/{name}_seconds" for name in needed]
    names += ["time/step_seconds", "throughput/train_tokens_per_second", "response_tokens/mean"]
    steps = [step for step in list(metrics.values())[1:] if step.keys() >= set(names)]
    # With separate engines, Megatron's world are the trainers.
    ranks = integer_within(config.about.get("ranks"), 1, _MAX_TOKENS)
    counts = [config.resolved.get(f"rl_num_{name}") for name in _NUM_SAMPLES]
    prompts, samples = (integer_within(count, 1, _MAX_TOKENS) for count in counts)
    if not steps or ranks is None or prompts is None or samples is None:
        raise UsageError(
            "has no complete step after the first one", flag=flag, remedy="give a longer run"
        )
    columns = np.array([[step[name] for name in names] for step in steps]).T
    train, log_probs, advantages, to_rollout, to_train, reward, whole, rate, tokens = columns
    seconds = train + log_probs + advantages
    trained = rate * train
    stages = [[step[name] for name in step if _is_stage(name)] for step in steps]
    return RecordedRun(
        folder,
        train_rate=float(trained.sum() / seconds.sum() / ranks),
        switch_seconds=float((to_rollout + to_train).mean()),
        reward_seconds=float(np.maximum(reward, 0.0).mean()),
        other_seconds=max(0.0, float((whole - [sum(each) for each in stages]).mean())),
        mean_tokens=float(tokens.mean()),
        prompt_tokens=max(0.0, float((trained / (prompts * samples) - tokens).mean())),
        max_staleness=integer_within(config.resolved.get("rl_max_staleness"), 0, _MAX_TOKENS) or 0,
    )


def _is_stage(name: str) -> bool:
    return name.startswith("time/") and name != "time/step_seconds"


def read_responses(file: Path, turns: int | None = None) -> tuple[Response, ...]:
    """Read the responses of a rollouts.jsonl, with their turns, or with `turns` of equal length.
    Raises UsageError if there are none."""
    responses = []
    try:
        for line in lines_of(file, _MAX_LINE_BYTES):
            fields: Any = None
            with contextlib.suppress(InvalidData):
                fields = parse_json(line)
            if type(fields) is dict and (response := _response(fields, turns)) is not None:
                responses.append(response)
    except OSError as error:
        raise UsageError(
            f"cannot be read ({error.strerror})", flag=f"--lengths {file}", remedy=CORRECT
        ) from error
    if not responses:
        raise UsageError(
            "has no line with response_tokens",
            flag=f"--lengths {file}",
            remedy="give the rollouts.jsonl of a run, or --length-mean and --length-sigma",
        )
    return tuple(responses)


def _response(fields: dict[str, Any], turns: int | None) -> Response | None:
    """Return the response of a line; None without valid numbers of tokens."""
    tokens = integer_within(fields.get("response_tokens"), 1, _MAX_TOKENS)
    if tokens is None:
        return None
    sampled = fields.get("turn_tokens", [tokens])  # earlier versions did not write them
    if turns is not None:
        return Response(even_turns(tokens, turns))
    if type(sampled) is not list or not sampled:
        return None
    counts = [integer_within(each, 1, _MAX_TOKENS) for each in sampled]
    of_turns = tuple(each for each in counts if each is not None)
    is_valid = None not in counts and sum(of_turns) <= tokens
    return Response(of_turns, tokens - sum(of_turns)) if is_valid else None


def read_engine_speed(file: Path) -> EngineSpeed:
    """Read a file that --measure-engine wrote. Raises UsageError."""
    try:
        fields = parse_json(file.read_bytes())
        running = [integer_within(each, 1, _MAX_TOKENS) for each in fields["running"]]
        seconds = [finite_number(each) for each in fields["step_seconds"]]
        rate = finite_number(fields["prefill_tokens_per_second"])
        repeated = finite_number(fields.get("repeated_tokens_per_second", _NO_TIME))
        is_table = len(running) == len(seconds) > 0 and None not in running
        if not is_table or not all(seconds) or not rate or not repeated:
            raise InvalidData("has no complete table of positive numbers")
        if min(*filter(None, seconds), rate, repeated) <= 0:
            raise InvalidData("has a number that is not positive")
        rows = sorted(zip(map(int, filter(None, running)), filter(None, seconds), strict=True))
        if len({count for count, _ in rows}) < len(rows):
            raise InvalidData("has a number of sequences twice")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"does not hold the speed of an engine ({type(error).__name__}: {error})",
            flag=f"--engine-speed {file}",
            remedy="write one by --measure-engine",
        ) from error
    return EngineSpeed(tuple(n for n, _ in rows), tuple(each for _, each in rows), rate, repeated)
