"""Check of the reward: a trial in a separate process on samples made of the prompts' answers.

If the prompts have no answers, as for a reward model, it only checks that there is a value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mcore_rl.batching.types import Prompt
from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.environments.wire import Failed
from mcore_rl.job.value_models import Folder
from mcore_rl.rewards.code_rows import nothings
from mcore_rl.rewards.code_tests import suite_of
from mcore_rl.rewards.functions import PYTHON_SANDBOX, SERVED_REWARDS
from mcore_rl.rewards.sandbox import check_sandbox, describe
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.tools.doctor.finding import REWARD, Finding, green, red, refusal, yellow
from mcore_rl.trainer.inputs import environment_spec, reward_spec

# Built-in rewards that compare with the answer, which must get more than anything else.
_EXACT = ("exact_match", "arithmetic", "gsm8k")
_MOST_SECONDS = 20.0  # for one sample
_START_SECONDS = 60.0  # for the imports of the process and its worker
_MOST_SHOWN = 200
_OTHERS = "another prompt's answer"
_TIMED_OUT = "timed out"  # a kind of failure, of functions and of servers


Sample = tuple[Prompt, str]  # prompt and response


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a trial: JSON of `reward_trial`, and the reward's output."""

    answer: dict[str, Any]
    printed: str


def check_reward(
    config: RLConfig, prompts: Sequence[Prompt], model: Folder | None
) -> list[Finding]:
    """Try the reward on `prompts`: a few whose answers differ, or without answers. `model` is the
    model of --rl-reward-model, if it could be read."""
    try:
        spec = reward_spec(config)
    except UsageError as error:
        return [refusal(REWARD, error)]
    findings = []
    if model is not None:
        what = f"model: {model.checkpoint.folder}, {model.shape.architecture} with a score head"
        findings.append(green(REWARD, what))
    findings += _environment(config, prompts)
    if not spec.functions and not spec.servers:
        return findings
    if not prompts:
        what = (
            "no prompt can be read to try the reward on, so functions are only imported and "
            "servers are not asked"
        )
        findings.append(yellow(REWARD, what, "correct the prompts first"))
    return [*findings, *_tried(spec, prompts)]


def asks_loopback(config: RLConfig) -> bool:
    """Return whether a reward's server is on this machine."""
    urls = [url for url in (config.rewards.reward_url, config.rewards.reward_pooling_url) if url]
    with contextlib.suppress(ValueError):  # the check of the reward refuses such an address
        return any(is_loopback(urlsplit(url).hostname or "") for url in urls)
    return False


@dataclass(frozen=True, slots=True)
class _Samples:
    """Samples of a trial; the same for all rewards of a job."""

    rights: list[Sample]  # the prompts' own answers
    wrongs: list[Sample]  # another response for each prompt
    unworthy: dict[str, Sample]  # responses that should be worth nothing, by description
    idle: dict[str, list[Sample]]  # code that does nothing, by description, if code is run

    @classmethod
    def of(cls, prompts: Sequence[Prompt], spec: RewardSpec) -> _Samples:
        """Make samples for a few prompts."""
        rights = [(each, each.answer_text) for each in prompts if each.answer_text.strip()]
        wrongs = [(each, f"{each.answer_text.rstrip()}7") for each in prompts]
        unworthy = {}
        if prompts:
            unworthy = {"an empty response": (prompts[0], ""), "a blank one": (prompts[0], " \n")}
            others = [text for _, text in rights if text.strip() != prompts[0].answer_text.strip()]
            if others:
                unworthy[_OTHERS] = (prompts[0], others[0])
        idle: dict[str, list[Sample]] = {}
        if PYTHON_SANDBOX in spec.functions:
            for prompt in prompts:
                for what, code in nothings(_names_of(prompt)).items():
                    idle.setdefault(what, []).append((prompt, f"```python\n{code}```"))
        return cls(rights, wrongs, unworthy, idle)

    @property
    def answers(self) -> list[Sample]:
        """The right and the wrong answers."""
        return [*self.rights, *self.wrongs]

    @property
    def worthless(self) -> list[Sample]:
        """Responses that should be worth nothing."""
        idle = [sample for samples in self.idle.values() for sample in samples]
        return [*self.unworthy.values(), *idle]


@dataclass(frozen=True, slots=True)
class _Outcomes:
    """A reward's outcomes for `_Samples`: [reward, kind of failure, failure] of each sample."""

    rights: list[Any]
    wrongs: list[Any]
    unworthy: dict[str, Any]
    idle: dict[str, list[Any]]

    @classmethod
    def of(cls, samples: _Samples, outcomes: Sequence[Any]) -> _Outcomes:
        """Group `outcomes`: of the answers and, if no answer failed, of the worthless responses."""
        missing = len(samples.answers) + len(samples.worthless) - len(outcomes)
        left = iter([*outcomes, *([0.0, "not tried", "it was not tried"] for _ in range(missing))])
        return cls(
            [next(left) for _ in samples.rights],
            [next(left) for _ in samples.wrongs],
            {what: next(left) for what in samples.unworthy},
            {what: [next(left) for _ in each] for what, each in samples.idle.items()},
        )


def _names_of(prompt: Prompt) -> frozenset[str]:
    """Return the names that a prompt's tests use from the code; empty without tests."""
    with contextlib.suppress(ValueError):
        suite = suite_of(prompt.answer, prompt=prompt.text, row=json.loads(prompt.row))
        return suite.names
    return frozenset()


def _tried(spec: RewardSpec, prompts: Sequence[Prompt]) -> list[Finding]:
    samples = _Samples.of(prompts, spec)
    trial = run_trial(spec, samples.answers, samples.worthless)
    findings = _output(trial)
    if refused := trial.answer.get("refused"):
        error = UsageError(refused["found"], flag=refused["flag"], remedy=refused["remedy"])
        return [refusal(REWARD, error), *findings]
    for name in (*spec.functions, *(server.name for server in spec.servers)):
        outcomes = trial.answer["outcomes"].get(name)
        if outcomes is not None:
            sorted_out = _Outcomes.of(samples, outcomes)
            judged = _judged(name, sorted_out, spec.timeout_seconds)
            if name == PYTHON_SANDBOX:
                level = check_sandbox(f"--rl-reward {name}", spec.sandbox_accept)
                judged = dataclasses.replace(judged, found=f"{judged.found}; {describe(level)}")
            findings.append(judged)
        elif name in spec.functions:
            findings.append(green(REWARD, f"{name} can be imported"))
    return findings


def _environment(config: RLConfig, prompts: Sequence[Prompt]) -> list[Finding]:
    """Check that the environment of the flags starts with a few prompts, in its own processes."""
    if config.environments.environment is None:
        return []
    confined = ""
    try:
        spec = environment_spec(config)
        assert spec is not None
        with EnvironmentPool.of(spec) as pool:
            pool.check()  # also checks --rl-import, whose files do not run in this process
            if spec.name == PYTHON_SANDBOX:
                level = check_sandbox(f"--rl-environment {spec.name}", spec.sandbox_accept)
                confined = f"; {describe(level)}"
            tickets = {pool.start(prompt, 0) for prompt in prompts}
            until = time.monotonic() + _MOST_SECONDS
            failed: list[Failed] = []
            while tickets and pool.wait(max(0.0, until - time.monotonic())):
                for ticket, event in pool.finished():
                    tickets.discard(ticket)
                    failed += [event] if isinstance(event, Failed) else []
    except UsageError as error:
        return [refusal(REWARD, error)]
    except RuntimeError as error:  # its processes die at once
        return [red(REWARD, str(error), "correct what it imports")]
    if failed:
        what = f"environment {spec.name} cannot start with {len(failed)} of {len(prompts)} prompts"
        return [red(REWARD, f"{what}: {failed[0].failure}", "correct it, or the prompts")]
    if tickets:
        what = f"environment {spec.name} has not started within {_MOST_SECONDS:g} s"
        return [yellow(REWARD, what, "make sure that it needs no longer than its timeout")]
    what = f"environment {spec.name} starts with {len(prompts)} prompt(s){confined}"
    return [green(REWARD, what)]


def _judged(name: str, found: _Outcomes, timeout_seconds: float) -> Finding:
    """Judge a reward by its outcomes."""
    # Only samples that training may also produce: an answer, right or wrong.
    outcomes = [*found.rights, *found.wrongs]
    failures = [failure for _, _, failure in outcomes if failure is not None]
    if failures and timeout_seconds > _MOST_SECONDS and _only_timeouts(outcomes):
        what = (
            f"{name} gives no value within {_MOST_SECONDS:g} s and is not waited for longer here; "
            f"the run waits {timeout_seconds:g} s"
        )
        return yellow(REWARD, what, "make sure that it needs no longer than that")
    if failures:
        what = (
            f"{name} gives no value for {len(failures)} of {len(outcomes)} samples: {failures[0]}"
        )
        return red(REWARD, what, _remedy_of_failures(name, has_answers=bool(found.rights)))
    right, wrong = ([reward for reward, _, _ in each] for each in (found.rights, found.wrongs))
    if name == PYTHON_SANDBOX:  # the prompts' answers are tests, not code
        return _judged_sandbox(found)
    if not right:
        return green(REWARD, f"{name} gives {_shown(wrong)} where prompts have no answer")
    what = f"{name} gives {_shown(right)} to the prompts' own answers and {_shown(wrong)} to others"
    if not all(r > w for r, w in zip(right, wrong, strict=True)):
        if name in _EXACT:
            remedy = "look at --rl-answer-column and at the form of its answers"
            return red(REWARD, what, remedy)
        return yellow(REWARD, what, "make sure that this is meant")
    if paid := _paid_for_nothing(name, found, right):
        return yellow(
            REWARD,
            f"{what}; it pays {paid}",
            "make sure that this is meant, as it may be for a reward of length or form: a policy "
            "finds what is paid for nothing",
        )
    return green(REWARD, what)


def _judged_sandbox(found: _Outcomes) -> Finding:
    idle = [(what, outcome) for what, each in found.idle.items() for outcome in each]
    if paid := [what for what, (reward, _, _) in idle if reward > 0]:
        what = f"{PYTHON_SANDBOX} pays {paid[0]}: tests that it passes check nothing"
        return red(REWARD, what, "correct the answers (--rl-answer-column) or remove such rows")
    if failures := [failure for _, (_, _, failure) in idle if failure is not None]:
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


def _paid_for_nothing(name: str, found: _Outcomes, right: Sequence[float]) -> str:
    """Describe rewards for responses that should be worth nothing; empty if there are none.

    For a response without content any reward above 0 counts, except from `pooling`, whose scores
    have no zero. Another prompt's answer may resemble the right one: it counts if its reward is at
    least as high.
    """
    paid = []
    for what, (reward, _, failure) in found.unworthy.items():
        least = right[0] if name == "pooling" or what == _OTHERS else 0.0
        is_paid = reward >= right[0] or reward > least
        if failure is None and is_paid:
            paid.append(f"{reward:g} for {what}")
    return " and ".join(paid)


def _only_timeouts(outcomes: Sequence[Sequence[Any]]) -> bool:
    return all(kind in (None, _TIMED_OUT) for _, kind, _ in outcomes)


def _shown(rewards: Sequence[float]) -> str:
    return " and ".join(dict.fromkeys(f"{reward:g}" for reward in rewards))


def _output(trial: Trial) -> list[Finding]:
    printed = " ".join(trial.printed.split())
    if not printed:
        return []
    if len(printed) > _MOST_SHOWN:
        printed = f"{printed[:_MOST_SHOWN]} ..."
    return [green(REWARD, f"what is asked for prints: {printed}")]


def run_trial(spec: RewardSpec, samples: Sequence[Sample], more: Sequence[Sample] = ()) -> Trial:
    """Run the trial in a process, and end it with everything that it started."""
    seconds = min(spec.timeout_seconds, _MOST_SECONDS)
    once = tuple(dataclasses.replace(server, retries=0) for server in spec.servers)
    spec = dataclasses.replace(spec, num_workers=1, timeout_seconds=seconds, servers=once)
    limit = _START_SECONDS + seconds * max(1, len(samples) + len(more)) * len(spec.names)
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as printed, os.fdopen(read_end, "rb") as answers:
        process = subprocess.Popen(
            [sys.executable, "-m", "mcore_rl.tools.doctor.reward_trial", str(write_end)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            pass_fds=(write_end,),
            start_new_session=True,
            # A worker may be killed before it flushes what a reward has printed.
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        os.close(write_end)
        try:
            process.communicate(pickle.dumps((spec, list(samples), list(more))), timeout=limit)
            answer = answers.read()
        except subprocess.TimeoutExpired:
            answer = _refused(f"no end within {limit:g} s", remedy="mend what hangs")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        text = printed.read().decode(errors="replace")
    if not answer:
        what = f"its process ended with exit code {process.returncode}"
        answer = _refused(what, remedy="mend what it imports")
    return Trial(json.loads(answer), text)


def _refused(found: str, *, remedy: str) -> bytes:
    """Return a refusal in the format of the process's answer."""
    return json.dumps({"refused": {"found": found, "flag": "", "remedy": remedy}}).encode()
