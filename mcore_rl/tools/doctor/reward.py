"""One trial call of each reward, and one start of the environment, with prompts of the run."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.data.prompts import PromptSources
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.isolation.wire import Failed
from mcore_rl.rewards.functions import NO_REWARD, SERVED_REWARDS
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.sandbox import PYTHON_SANDBOX
from mcore_rl.sandbox.runner import check_sandbox, describe
from mcore_rl.tools.doctor.finding import Finding, green, red, yellow

# Built-in rewards that compare with the answer, which must get more than anything else.
_EXACT = ("exact_match", "arithmetic", "gsm8k")
_FEW = 2
_MOST_SECONDS = 20.0  # for all samples of a reward
_MOST_SHOWN = 200
_OWN, _OTHER, _NEIGHBOUR = "the prompts' own answers", "others", "another prompt's answer"
_TIMED_OUT = "timed out"  # a kind of failure, of functions and of servers
_LOOK_AT_ROWS = "look at --rl-answer-column and at the form of its answers"


class Sample(NamedTuple):
    """A response to a prompt: Sample(prompt, "an empty response", "")."""

    prompt: Prompt
    what: str
    text: str


Tried = Sequence[tuple[Sample, Outcome]]


def few_of(rows: PromptSources) -> list[Prompt]:
    """Return for each source a few prompts whose answers differ, or any without answers."""
    few: dict[str, tuple[dict[str, Prompt], list[Prompt]]] = {}
    for position in range(len(rows)):
        row = rows[position]
        answered, blank = few.setdefault(row.source, ({}, []))
        if text := row.answer_text.strip():
            if len(answered) < _FEW:
                answered.setdefault(text, row)
        elif len(blank) < _FEW:
            blank.append(row)
    return [row for answered, blank in few.values() for row in answered.values() or blank]


def try_rewards(spec: RewardSpec, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Score responses to `prompts` by every reward of their source, in the processes of a run and
    by its requests, without a second attempt."""
    if spec.names == (NO_REWARD,):
        yield green("reward", "none: the run learns from a teacher alone")
    for source in dict.fromkeys(prompt.source for prompt in prompts):
        own = spec.of_source(source)
        samples = _samples([prompt for prompt in prompts if prompt.source == source])
        for name in (*own.functions, *(server.name for server in own.servers)):
            with tempfile.TemporaryFile() as printed:
                tried = _tried(own, name, samples, printed.fileno())
                printed.seek(0)
                text = " ".join(printed.read().decode(errors="replace").split())
            if text:
                more = " ..." if len(text) > _MOST_SHOWN else ""
                yield green("reward", f"{name} prints: {text[:_MOST_SHOWN]}{more}")
            yield _judged(name, tried, spec)


def _samples(prompts: Sequence[Prompt]) -> list[Sample]:
    """Return the prompts' answers, another response to each, and responses worth nothing."""
    first, answers = prompts[0], [each for each in prompts if each.answer_text.strip()]
    return [
        *(Sample(each, _OWN, each.answer_text) for each in answers),
        *(Sample(each, _OTHER, f"{each.answer_text.rstrip()}7") for each in prompts),
        *(Sample(first, _NEIGHBOUR, each.answer_text) for each in answers if each is not first),
        Sample(first, "an empty response", ""),
        Sample(first, "a blank one", " \n"),
    ]


def _tried(spec: RewardSpec, name: str, samples: Sequence[Sample], output: int) -> Tried:
    """Score samples by one reward; return those that were scored in time, or the first one."""
    servers = tuple(
        dataclasses.replace(server, retries=0) for server in spec.servers if server.name == name
    )
    seconds = min(spec.timeout_seconds, _MOST_SECONDS)
    alone = dataclasses.replace(
        spec, names=(name,), weights=(1.0,), servers=servers, timeout_seconds=seconds, num_workers=1
    )
    with RewardStack(alone, output) as stack:
        stack.find_sources()  # the limit is not for imports
        of_ticket = {stack.begin(_rollout(sample)): sample for sample in samples}
        stack.wait(_MOST_SECONDS)
        found = sorted(stack.collect())
    late = Outcome(0.0, _TIMED_OUT, f"no value within {seconds:g} s")
    return [(of_ticket[ticket], each[name]) for ticket, each in found] or [(samples[0], late)]


def _rollout(sample: Sample) -> Rollout:
    nothing = np.zeros(0)
    return Rollout(
        prompt=sample.prompt,
        sample_index=0,
        text=sample.text,
        response_token_ids=nothing.astype(np.int32),
        rollout_log_probs=nothing.astype(np.float32),
        finish_reason="stop",
        weight_version=0,
    )


def _judged(name: str, tried: Tried, spec: RewardSpec) -> Finding:
    """Judge a reward by what it gives to answers, to other responses, and to nothing."""
    right, wrong = (
        [outcome for sample, outcome in tried if sample.what == what] for what in (_OWN, _OTHER)
    )
    failed = [each for each in (*right, *wrong) if each.kind is not None]
    if failed and spec.timeout_seconds > _MOST_SECONDS and {f.kind for f in failed} == {_TIMED_OUT}:
        what = f"{name} gives no value within {_MOST_SECONDS:g} s and is not waited for longer here"
        remedy = f"make sure that it needs no longer than the {spec.timeout_seconds:g} s of the run"
        return yellow("reward", what, remedy)
    if failed:
        what = f"{name} gives no value for {len(failed)} of {len(right) + len(wrong)} samples: "
        return red("reward", f"{what}{failed[0].failure}", _remedy(name, bool(right)))
    if name == PYTHON_SANDBOX:  # answers are tests, which a start has tried
        level = check_sandbox(f"--rl-reward {name}", spec.sandbox_accept)
        return green("reward", f"{name} runs; {describe(level)}")
    if not right:
        return green("reward", f"{name} gives {_shown(wrong)} where prompts have no answer")
    what = f"{name} gives {_shown(right)} to {_OWN} and {_shown(wrong)} to {_OTHER}"
    if any(r.reward <= w.reward for r, w in zip(right, wrong, strict=False)):
        remedy = _LOOK_AT_ROWS if name in _EXACT else "make sure that this is meant"
        return (red if name in _EXACT else yellow)("reward", what, remedy)
    paid = []
    for sample, outcome in tried:
        # Only the scores of pooling have no zero; a neighbour's answer may resemble the right one.
        may_be_paid = name == "pooling" or sample.what == _NEIGHBOUR
        is_paid = outcome.reward >= right[0].reward or (outcome.reward > 0 and not may_be_paid)
        if sample.what not in (_OWN, _OTHER) and outcome.kind is None and is_paid:
            paid.append(f"{outcome.reward:g} for {sample.what}")
    if paid:
        remedy = "make sure that this is meant: a policy finds what is paid for nothing"
        return yellow("reward", f"{what}; it pays {' and '.join(paid)}", remedy)
    return green("reward", what)


def _remedy(name: str, has_answers: bool) -> str:
    if name in SERVED_REWARDS:
        return "start the server, or correct its address and its answer"
    if name == PYTHON_SANDBOX:
        return f"{_LOOK_AT_ROWS}, which must be tests (docs/using/rewards.md)"
    return "correct the function" + ("" if has_answers else ", or fill in the answers it needs")


def _shown(outcomes: Sequence[Outcome]) -> str:
    return " and ".join(dict.fromkeys(f"{outcome.reward:g}" for outcome in outcomes))


def try_environment(spec: EnvironmentSpec, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Start the environment with each of the prompts, in its own processes."""
    title, until = f"environment {','.join(spec.names)}", time.monotonic() + _MOST_SECONDS
    failed: list[Failed] = []
    with EnvironmentPool(spec) as pool:
        tickets = {pool.start(prompt, 0) for prompt in prompts}
        while tickets and pool.wait(max(0.0, until - time.monotonic())):
            for ticket, event in pool.finished():
                tickets.discard(ticket)
                failed += [event] if isinstance(event, Failed) else []
    if failed:
        what = f"{title} cannot start with {len(failed)} of {len(prompts)} prompts: "
        yield red("reward", f"{what}{failed[0].failure}", "correct it, or the prompts")
    elif tickets:
        what = f"{title} has not started within {_MOST_SECONDS:g} s"
        yield yellow("reward", what, "make sure that it needs no longer than its timeout")
    else:
        confined = ""
        if PYTHON_SANDBOX in spec.names:
            level = check_sandbox(f"--rl-environment {PYTHON_SANDBOX}", spec.sandbox_accept)
            confined = f"; {describe(level)}"
        yield green("reward", f"{title} starts with {len(prompts)} prompt(s){confined}")
