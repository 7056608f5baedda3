"""The reward, tried in a process of its own on samples made of the prompts' own answers.

Where the prompts have none, as for a reward model, it is only seen whether there is a value.
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
from mcore_rl.common.errors import UsageError
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.environments.wire import Failed
from mcore_rl.flags.options import RLConfig
from mcore_rl.job.value_models import Folder
from mcore_rl.patches.torch.loopback_stores import is_loopback
from mcore_rl.rewards.functions import PYTHON_SANDBOX, SERVED_REWARDS
from mcore_rl.rewards.sandbox import check_sandbox, describe
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.tools.doctor.finding import REWARD, Finding, green, red, refusal, yellow
from mcore_rl.trainer.inputs import environment_spec, reward_spec

# Built-in rewards that compare with the answer: it must get more than anything else.
_EXACT = ("exact_match", "arithmetic", "gsm8k")
_MOST_SECONDS = 20.0  # for one sample
_START_SECONDS = 60.0  # for the process and its worker to import what they need
_MOST_SHOWN = 200
_TIMED_OUT = "timed out"  # as the kind of a failure, of functions and of servers


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it: JSON of `reward_trial`, and what the reward has written."""

    answer: dict[str, Any]
    printed: str


def check_reward(
    config: RLConfig, prompts: Sequence[Prompt], model: Folder | None
) -> list[Finding]:
    """`prompts` are a few whose answers differ, or without one; `model` is that of
    --rl-reward-model, once read."""
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
    """Whether a reward's server is on this machine."""
    urls = [url for url in (config.reward_url, config.reward_pooling_url) if url]
    with contextlib.suppress(ValueError):  # an address that the reward's own check refuses
        return any(is_loopback(urlsplit(url).hostname or "") for url in urls)
    return False


def _tried(spec: RewardSpec, prompts: Sequence[Prompt]) -> list[Finding]:
    samples = []
    for prompt in prompts:
        # The answer itself, and one that is not it, number or text.
        right = prompt.answer_text
        if right.strip():
            samples.append((prompt, right))
        samples.append((prompt, f"{right.rstrip()}7"))
    trial = run_trial(spec, samples)
    findings = _output(trial)
    if refused := trial.answer.get("refused"):
        error = UsageError(refused["found"], flag=refused["flag"], remedy=refused["remedy"])
        return [refusal(REWARD, error), *findings]
    for name in (*spec.functions, *(server.name for server in spec.servers)):
        outcomes = trial.answer["outcomes"].get(name)
        if outcomes is not None:
            has_answers = len(samples) > len(prompts)
            judged = _judged(name, outcomes, spec.timeout_seconds, has_answers=has_answers)
            if name == PYTHON_SANDBOX:
                level = check_sandbox(f"--rl-reward {name}", spec.sandbox_accept)
                judged = dataclasses.replace(judged, found=f"{judged.found}; {describe(level)}")
            findings.append(judged)
        elif name in spec.functions:
            findings.append(green(REWARD, f"{name} can be imported"))
    return findings


def _environment(config: RLConfig, prompts: Sequence[Prompt]) -> list[Finding]:
    """Whether that of the flags starts with a few prompts, in processes of its own."""
    if config.environment is None:
        return []
    confined = ""
    try:
        spec = environment_spec(config)
        assert spec is not None
        with EnvironmentPool.of(spec) as pool:
            pool.check()  # of --rl-import too, whose files are not run here
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


def _judged(
    name: str, outcomes: Sequence[Sequence[Any]], timeout_seconds: float, *, has_answers: bool
) -> Finding:
    """Outcomes of right and wrong answers in turn; without answers, of any responses."""
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
        if name in SERVED_REWARDS:
            return red(REWARD, what, "start the server, or correct its address and its answer")
        if not has_answers:
            return red(REWARD, what, "correct the function, or fill in the answers that it needs")
        return red(REWARD, what, "correct the function: it is given the prompt's own answer here")
    rewards = [reward for reward, _, _ in outcomes]
    if not has_answers:
        return green(REWARD, f"{name} gives {_shown(rewards)} where prompts have no answer")
    right, wrong = rewards[::2], rewards[1::2]
    what = f"{name} gives {_shown(right)} to the prompts' own answers and {_shown(wrong)} to others"
    if name == PYTHON_SANDBOX:  # its answers are tests, and no code
        return green(REWARD, f"{name} runs")
    if all(r > w for r, w in zip(right, wrong, strict=True)):
        return green(REWARD, what)
    if name in _EXACT:
        remedy = "look at --rl-answer-column and at the form of its answers"
        return red(REWARD, what, remedy)
    return yellow(REWARD, what, "make sure that this is meant")


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


def run_trial(spec: RewardSpec, samples: Sequence[tuple[Prompt, str]]) -> Trial:
    """Start a process for the trial, and end it with everything that it has started."""
    seconds = min(spec.timeout_seconds, _MOST_SECONDS)
    once = tuple(dataclasses.replace(server, retries=0) for server in spec.servers)
    spec = dataclasses.replace(spec, num_workers=1, timeout_seconds=seconds, servers=once)
    limit = _START_SECONDS + seconds * max(1, len(samples)) * len(spec.names)
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as printed, os.fdopen(read_end, "rb") as answers:
        process = subprocess.Popen(
            [sys.executable, "-m", "mcore_rl.tools.doctor.reward_trial", str(write_end)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        try:
            process.communicate(pickle.dumps((spec, list(samples))), timeout=limit)
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
    """As the process would have answered."""
    return json.dumps({"refused": {"found": found, "flag": "", "remedy": remedy}}).encode()
