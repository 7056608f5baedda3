"""Verdicts on the cases of `rollout.py`, and their section of the page. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.pages import Verdict, fact_list, paired_ratio, section, verdict_table

Found = Mapping[str, Sequence[Mapping[str, float]]]  # way -> measurements of each repetition
SECTION = "rollout"

BEFORE = "blocks"
LONG_TAIL_RATIO = 1.25
PARTIAL_RATIO = 1.6
HIDDEN_SHARE = 0.9
SHORT_RATIO = 0.98  # "no slower", within the difference of two equal runs
OVERHEAD_SHARE = 0.03
BUSY_SHARE = 0.85


def paired(found: Found, one: str, other: str, what: str = "seconds") -> float:
    """Return the paired ratio of a measured value in two ways."""
    return paired_ratio([each[what] for each in found[one]], [each[what] for each in found[other]])


def of_long_tail(found: Found) -> list[Verdict]:
    verdicts = []
    for way in found:
        if not way.startswith(BEFORE):
            ratio = paired(found, BEFORE, way)
            target = f"long-tailed lengths, {way}: {LONG_TAIL_RATIO:g}x the samples/s of blocks"
            verdicts.append((target, f"{ratio:.2f}x", ratio >= LONG_TAIL_RATIO))
    return verdicts


def of_partial(found: Found) -> list[Verdict]:
    way, *_ = (way for way in found if way != BEFORE)
    ratio = paired(found, BEFORE, way)
    of_tokens = ratio * paired(found, way, BEFORE, "tokens")
    target = f"long-tailed lengths, {way}: {PARTIAL_RATIO:g}x the samples/s of blocks"
    return [(target, f"{ratio:.2f}x; {of_tokens:.2f}x the tokens/s", ratio >= PARTIAL_RATIO)]


def of_reward(found: Found, seconds: str) -> list[Verdict]:
    """Hidden: the share of scoring after the last token that the stream does not wait for."""
    hidden = 1 - paired(found, "stream", BEFORE, "after_last_token")
    target = f"a reward of {seconds}: {HIDDEN_SHARE:.0%} of its time behind generation"
    return [(target, f"{hidden:.1%}", hidden >= HIDDEN_SHARE)]


def of_short(found: Found) -> list[Verdict]:
    verdicts = []
    for way in (way for way in found if way.startswith(BEFORE)):
        ratio = paired(found, way, "stream")
        verdicts.append(
            (f"short answers: no slower than {way}", f"{ratio:.2f}x", ratio >= SHORT_RATIO)
        )
    return verdicts


def of_overhead(found: Found) -> list[Verdict]:
    """Judge the time of a loop outside of the engine's steps."""
    verdicts = []
    outside = {
        way: statistics.median(1 - each["in_steps"] / each["own_seconds"] for each in repetitions)
        for way, repetitions in found.items()
    }
    for way, share in outside.items():
        kind, layout = way.split()
        if kind != "bare":
            target = f"{kind}, {layout}: under {OVERHEAD_SHARE:.0%} outside the engine's steps"
            measured = f"{share:.1%}; of vLLM's own loop {outside[f'bare {layout}']:.1%}"
            verdicts.append((target, measured, share < OVERHEAD_SHARE))
    return verdicts


def of_tool(found: Found) -> list[Verdict]:
    (repetitions,) = found.values()
    busy = statistics.median(each["busy"] for each in repetitions)
    target = f"a tool of 0.2 s between two turns: engines busy {BUSY_SHARE:.0%} of rollout"
    return [(target, f"{busy:.1%}", busy >= BUSY_SHARE)]


OF_CASE = {
    "long_tail": of_long_tail,
    "partial": of_partial,
    "quick_reward": partial(of_reward, seconds="50 ms"),
    "slow_reward": partial(of_reward, seconds="1 s"),
    "short": of_short,
    "overhead": of_overhead,
    "tool": of_tool,
}


def part_of(record: Mapping[str, Any]) -> str:
    """Return the section of a record."""
    return section_of(record["cases"], record["facts"])


def section_of(cases: Mapping[str, Found], facts: Mapping[str, str]) -> str:
    """Return the section of the page."""
    verdicts = [verdict for case, found in cases.items() for verdict in OF_CASE[case](found)]
    lines = ["# Rollout: a stream beside fixed blocks", "", _INTRODUCTION, ""]
    lines += [*fact_list(facts), "", *verdict_table(verdicts)]
    lines += [
        "",
        "| case | way | median s (min-max) | of these after the last token | tokens, engine with"
        " most / all |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for case, found in cases.items():
        lines += [_line(case, way, repetitions) for way, repetitions in found.items()]
    return section(SECTION, lines)


def _line(case: str, way: str, repetitions: Sequence[Mapping[str, float]]) -> str:
    seconds = [each.get("seconds", each["own_seconds"]) for each in repetitions]
    cells = [case, way, f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"]
    if "tokens" in repetitions[0]:
        after = statistics.median(each["after_last_token"] for each in repetitions)
        share = statistics.median(each["most_tokens"] / each["tokens"] for each in repetitions)
        cells += [f"{after:.3f}", f"{share:.2f}"]
    else:
        cells += ["-", "-"]
    return f"| {' | '.join(cells)} |"


_INTRODUCTION = """\
Generated by `benchmarks/rollout.py`. Two processes on two cores, a tiny DeepSeek-V3 with random
weights, and the same responses in all ways: their lengths are drawn beforehand and differ between
repetitions. The ways take turns in the same processes; ratios are medians of those within a
repetition, the first of which does not count.

- `stream`: as a step does it. The engines draw prompts as they have room, and responses go to their
  reward as they end. `blocks`: as it was done before. Each engine gets a fixed half of the prompts
  and all its requests at once; rewards begin after the last token of the slowest engine. Before,
  responses had no seeds of their own, either.
- `long_tail`: 16 prompts with 8 responses each; lengths are log-normal with a median of 32, one in
  a hundred reaches 10 times the median, where they are cut. Half of the variance is the prompt's.
  An engine has 8 sequences at a time. `longest first`: as it is where an earlier step has drawn the
  same prompts, so that their lengths are known; what is drawn for the first time has no order, and
  then it is chance which way ends first.
- `partial`: such lengths, 32 x 4 a step, in five steps with `--rl-partial-rollouts`: a step begins
  48 groups, ends with 32 of them, and later ones continue the others. Three steps before are left
  out. An engine has room for all of its sequences at a time, so that blocks wait for the longest.
- `quick_reward`: 32 x 4 responses with a median of 64 tokens; a reward sleeps for 50 ms, in one
  process an engine. `slow_reward`: 64 x 8 of them, one second, 16 processes. The hidden share is
  1 - (seconds from the last token to the last reward) / (the same of `blocks`); the last sample's
  own reward cannot be hidden.
- `short`: 16 x 8 responses of 6 tokens, all of which an engine has room for.
- `overhead`: 128 responses of about 64 tokens, two engines of one rank or one of two; of the time
  until an engine has no more to do, what is not inside `engine.step()`. `stream`: as above, with
  rewards; `loop`: ours, with the requests of a block and nothing else; `bare`: the same with
  `while engine.has_unfinished_requests(): engine.step()`.
- `tool`: 16 x 8 conversations of two turns of 48 tokens, between which an environment sleeps for
  0.2 s; 16 sequences at a time. Busy is the time inside `engine.step()`, of the time until the
  engine has no more to do; of the less busy of the two engines."""
