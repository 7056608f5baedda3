"""Check of the reward: a trial on samples made of prompts' answers, in the processes of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import numpy as np

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.isolation.wire import Failed
from mcore_rl.job.value_models import Folder
from mcore_rl.rewards.functions import NO_REWARD, SERVED_REWARDS
from mcore_rl.rewards.pool import check_functions
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome
from mcore_rl.sandbox import PYTHON_SANDBOX
from mcore_rl.sandbox.code_rows import nothings
from mcore_rl.sandbox.code_tests import suite_of
from mcore_rl.sandbox.runner import check_sandbox, describe
from mcore_rl.tools.doctor.finding import REWARD, Finding, green, red, refusal, yellow

# Built-in rewards that compare with the answer, which must get more than anything else.
_EXACT = ("exact_match", "arithmetic", "gsm8k")
_MOST_SECONDS = 20.0  # for one sample
_MOST_SHOWN = 200
_OTHERS = "another prompt's answer"
_TIMED_OUT = "timed out"  # a kind of failure, of functions and of servers


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to try rewards on.

    Examples: Sample("right", prompt, "96"), the prompt's own answer; Sample("wrong", prompt,
    "967"); Sample("worthless", prompt, "", "an empty response"), one that should be worth nothing;
    Sample("idle", prompt, code, "empty code"), code that does nothing.
    """

    kind: Literal["right", "wrong", "worthless", "idle"]
    prompt: Prompt
    response: str
    what: str = ""


Scored = Sequence[tuple[Sample, Outcome]]  # samples with the outcomes of one reward


@dataclass(frozen=True, slots=True)
class Trial:
    """Outcomes of each reward that was tried, or why none was, and the output of functions."""

    outcomes: dict[str, list[Outcome]]
    refused: UsageError | None
    printed: str


def check_reward(
    spec: RewardSpec,
    environment: EnvironmentSpec | None,
    prompts: Sequence[Prompt],
    model: Folder | None,
) -> list[Finding]:
    """Try the reward on `prompts`: a few of each source whose answers differ, or without answers.
    `model` is the model of --rl-reward-model, if it could be read."""
    findings = []
    if model is not None:
        what = f"model: {model.checkpoint.folder}, {model.shape.architecture} with a score head"
        findings.append(green(REWARD, what))
    if environment is not None:
        findings.append(_environment(environment, prompts))
    if spec.names == (NO_REWARD,):
        findings.append(green(REWARD, "none: the run learns from a teacher alone"))
        return findings
    if not spec.functions and not spec.servers:
        return findings
    if not prompts:
        what = (
            "no prompt can be read to try the reward on, so functions are only imported and "
            "servers are not asked"
        )
        findings.append(yellow(REWARD, what, "correct the prompts first"))
    if not spec.of_sources:
        return [*findings, *_tried(spec, prompts)]
    for source in dict.fromkeys(prompt.source for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.source == source]
        findings += _tried(spec.of_source(source), own)
    return findings


def asks_loopback(config: RLConfig) -> bool:
    """Return whether a reward's server is on this machine."""
    urls = [url for url in (config.rewards.reward_url, config.rewards.reward_pooling_url) if url]
    with contextlib.suppress(ValueError):  # the check of the reward refuses such an address
        return any(is_loopback(urlsplit(url).hostname or "") for url in urls)
    return False


def _answers(prompts: Sequence[Prompt]) -> list[Sample]:
    """Return the prompts' own answers, and another response for each prompt."""
    answered = [each for each in prompts if each.answer_text.strip()]
    return [
        *(Sample("right", each, each.answer_text) for each in answered),
        *(Sample("wrong", each, f"{each.answer_text.rstrip()}7") for each in prompts),
    ]


def _worthless(prompts: Sequence[Prompt], spec: RewardSpec) -> list[Sample]:
    """Return responses that should be worth nothing, including code that does nothing."""
    if not prompts:
        return []
    first = prompts[0]
    samples = [
        Sample("worthless", first, "", "an empty response"),
        Sample("worthless", first, " \n", "a blank one"),
    ]
    texts = [each.answer_text for each in prompts if each.answer_text.strip()]
    others = [text for text in texts if text.strip() != first.answer_text.strip()]
    samples += [Sample("worthless", first, text, _OTHERS) for text in others[:1]]
    for prompt in prompts if PYTHON_SANDBOX in spec.functions else ():
        for what, code in nothings(_names_of(prompt)).items():
            samples.append(Sample("idle", prompt, f"```python\n{code}```", what))
    return samples


def _names_of(prompt: Prompt) -> frozenset[str]:
    """Return the names that a prompt's tests use from the code; empty without tests."""
    with contextlib.suppress(ValueError):
        suite = suite_of(prompt.answer, prompt=prompt.text, row=json.loads(prompt.row))
        return suite.names
    return frozenset()


def _tried(spec: RewardSpec, prompts: Sequence[Prompt]) -> list[Finding]:
    answers, worthless = _answers(prompts), _worthless(prompts, spec)
    trial = run_trial(spec, answers, worthless)
    findings = []
    if printed := " ".join(trial.printed.split()):
        if len(printed) > _MOST_SHOWN:
            printed = f"{printed[:_MOST_SHOWN]} ..."
        findings.append(green(REWARD, f"what is asked for prints: {printed}"))
    if trial.refused is not None:
        return [refusal(REWARD, trial.refused), *findings]
    for name in (*spec.functions, *(server.name for server in spec.servers)):
        outcomes = trial.outcomes.get(name)
        if outcomes is not None:
            # Without worthless ones if an answer failed.
            scored = list(zip([*answers, *worthless], outcomes, strict=False))
            judged = _judged(name, scored, spec.timeout_seconds)
            if name == PYTHON_SANDBOX:
                level = check_sandbox(f"--rl-reward {name}", spec.sandbox_accept)
                judged = dataclasses.replace(judged, found=f"{judged.found}; {describe(level)}")
            findings.append(judged)
        elif name in spec.functions:
            findings.append(green(REWARD, f"{name} can be imported"))
    return findings


def _environment(spec: EnvironmentSpec, prompts: Sequence[Prompt]) -> Finding:
    """Check that the environment starts with a few prompts, in its own processes."""
    confined, title = "", ",".join(spec.names)
    try:
        with EnvironmentPool(spec) as pool:
            pool.check()  # also checks --rl-import, whose files do not run in this process
            if PYTHON_SANDBOX in spec.names:
                level = check_sandbox(f"--rl-environment {PYTHON_SANDBOX}", spec.sandbox_accept)
                confined = f"; {describe(level)}"
            tickets = {pool.start(prompt, 0) for prompt in prompts}
            until = time.monotonic() + _MOST_SECONDS
            failed: list[Failed] = []
            while tickets and pool.wait(max(0.0, until - time.monotonic())):
                for ticket, event in pool.finished():
                    tickets.discard(ticket)
                    failed += [event] if isinstance(event, Failed) else []
    except UsageError as error:
        return refusal(REWARD, error)
    except RuntimeError as error:  # its processes die at once
        return red(REWARD, str(error), "correct what it imports")
    if failed:
        what = f"environment {title} cannot start with {len(failed)} of {len(prompts)} prompts"
        return red(REWARD, f"{what}: {failed[0].failure}", "correct it, or the prompts")
    if tickets:
        what = f"environment {title} has not started within {_MOST_SECONDS:g} s"
        return yellow(REWARD, what, "make sure that it needs no longer than its timeout")
    what = f"environment {title} starts with {len(prompts)} prompt(s){confined}"
    return green(REWARD, what)


def _judged(name: str, scored: Scored, timeout_seconds: float) -> Finding:
    """Judge a reward by its outcomes."""
    right, wrong = (
        [outcome for sample, outcome in scored if sample.kind == kind]
        for kind in ("right", "wrong")
    )
    # Only samples that training may also produce: an answer, right or wrong.
    outcomes = [*right, *wrong]
    failures = [each.failure for each in outcomes if each.failure is not None]
    if (
        failures
        and timeout_seconds > _MOST_SECONDS
        and all(each.kind in (None, _TIMED_OUT) for each in outcomes)
    ):
        what = (
            f"{name} gives no value within {_MOST_SECONDS:g} s and is not waited for longer here; "
            f"the run waits {timeout_seconds:g} s"
        )
        return yellow(REWARD, what, "make sure that it needs no longer than that")
    if failures:
        what = (
            f"{name} gives no value for {len(failures)} of {len(outcomes)} samples: {failures[0]}"
        )
        return red(REWARD, what, _remedy_of_failures(name, has_answers=bool(right)))
    if name == PYTHON_SANDBOX:  # the prompts' answers are tests, not code
        return _judged_sandbox(scored)
    if not right:
        return green(REWARD, f"{name} gives {_shown(wrong)} where prompts have no answer")
    what = f"{name} gives {_shown(right)} to the prompts' own answers and {_shown(wrong)} to others"
    if not all(r.reward > w.reward for r, w in zip(right, wrong, strict=True)):
        if name in _EXACT:
            remedy = "look at --rl-answer-column and at the form of its answers"
            return red(REWARD, what, remedy)
        return yellow(REWARD, what, "make sure that this is meant")
    if paid := _paid_for_nothing(name, scored, right[0].reward):
        return yellow(
            REWARD,
            f"{what}; it pays {paid}",
            "make sure that this is meant, as it may be for a reward of length or form: a policy "
            "finds what is paid for nothing",
        )
    return green(REWARD, what)


def _judged_sandbox(scored: Scored) -> Finding:
    idle = [(sample, outcome) for sample, outcome in scored if sample.kind == "idle"]
    if paid := [sample.what for sample, outcome in idle if outcome.reward > 0]:
        what = f"{PYTHON_SANDBOX} pays {paid[0]}: tests that it passes check nothing"
        return red(REWARD, what, "correct the answers (--rl-answer-column) or remove such rows")
    if failures := [each.failure for _, each in idle if each.failure is not None]:
        what = f"{PYTHON_SANDBOX} gives no value to code that does nothing: {failures[0]}"
        return red(REWARD, what, _remedy_of_failures(PYTHON_SANDBOX, has_answers=True))
    return green(REWARD, f"{PYTHON_SANDBOX} runs")


def _remedy_of_failures(name: str, *, has_answers: bool) -> str:
    if name in SERVED_REWARDS:
        return "start the server, or correct its address and its answer"
    if name == PYTHON_SANDBOX:
        return "look at --rl-answer-column: its answers must be tests (docs/using/rewards.md)"
    if not has_answers:
        return "correct the function, or fill in the answers that it needs"
    return "correct the function: it is given the prompt's own answer here"


def _paid_for_nothing(name: str, scored: Scored, right: float) -> str:
    """Describe rewards for responses that should be worth nothing; empty if there are none.

    For a response without content any reward above 0 counts, except from `pooling`, whose scores
    have no zero. Another prompt's answer may resemble the right one: it counts if its reward is at
    least that of the right answer, `right`.
    """
    paid = []
    for sample, outcome in scored:
        least = right if name == "pooling" or sample.what == _OTHERS else 0.0
        is_paid = outcome.reward >= right or outcome.reward > least
        if sample.kind == "worthless" and outcome.failure is None and is_paid:
            paid.append(f"{outcome.reward:g} for {sample.what}")
    return " and ".join(paid)


def _shown(outcomes: Sequence[Outcome]) -> str:
    return " and ".join(dict.fromkeys(f"{outcome.reward:g}" for outcome in outcomes))


def run_trial(spec: RewardSpec, samples: Sequence[Sample], more: Sequence[Sample] = ()) -> Trial:
    """Score samples as a run does, with less time and one worker.

    A function that fails on `samples` is not tried on `more`, whose output is discarded.
    """
    seconds = min(spec.timeout_seconds, _MOST_SECONDS)
    once = tuple(dataclasses.replace(server, retries=0) for server in spec.servers)
    spec = dataclasses.replace(spec, num_workers=1, timeout_seconds=seconds, servers=once)
    outcomes: dict[str, list[Outcome]] = {}
    refused = None
    with tempfile.TemporaryFile() as printed, open(os.devnull, "w") as silent:
        try:
            check_functions(spec)
            servers = [server.name for server in spec.servers]
            outcomes |= _outcomes(spec, servers, [*samples, *more])  # in one request if they fit
            outcomes |= _outcomes(spec, spec.functions, samples, printed.fileno())
            working = [
                name
                for name in spec.functions
                if all(each.failure is None for each in outcomes.get(name, []))
            ]
            for name, more_outcomes in _outcomes(spec, working, more, silent.fileno()).items():
                outcomes[name] += more_outcomes
        except UsageError as error:
            refused = error
        except RuntimeError as error:  # workers that die at once
            refused = UsageError(str(error), remedy="correct what it imports")
        printed.seek(0)
        return Trial(outcomes, refused, printed.read().decode(errors="replace"))


def _outcomes(
    spec: RewardSpec, names: Sequence[str], samples: Sequence[Sample], output: int | None = None
) -> dict[str, list[Outcome]]:
    """Return the outcomes of the rewards `names` for samples; logs nothing."""
    if not names or not samples:
        return {}
    servers = tuple(server for server in spec.servers if server.name in names)
    weights = (1.0,) * len(names)
    some = dataclasses.replace(spec, names=tuple(names), weights=weights, servers=servers)
    with RewardStack(some, output) as stack:
        tickets = [stack.begin(_rollout(sample)) for sample in samples]
        stack.wait()
        outcomes = dict(stack.collect())
    return {name: [outcomes[ticket][name] for ticket in tickets] for name in names}


def _rollout(sample: Sample) -> Rollout:
    return Rollout(
        prompt=sample.prompt,
        sample_index=0,
        text=sample.response,
        response_token_ids=np.zeros(0, dtype=np.int32),
        rollout_log_probs=np.zeros(0, dtype=np.float32),
        finish_reason="stop",
        weight_version=0,
    )
