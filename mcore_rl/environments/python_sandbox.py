"""A Python that the policy may try its code in, turn by turn, with the tests of the prompt.

A turn with a block of Python (```python ... ```) is run, with the tests that the prompt's answer
holds: a text of assertions, or a list of them. If all pass the episode is done and its reward 1;
else the policy reads what was printed and raised, in a message of role user. A turn without a block
ends it without reward. A prompt whose answer is empty has no tests: its code is only run, and the
episode ends with the turn that has none. Each turn's code has a new process and an empty folder;
see `rewards.sandbox`.
"""

from __future__ import annotations

from mcore_rl.environments.interface import Environment, EnvironmentPrompt, Response, StepResult
from mcore_rl.rewards.sandbox import code_in, report_of, run_python, seconds_left, tests_in


class PythonSandbox(Environment, name="python_sandbox"):
    """One problem, and a sandbox to try code in."""

    def start(self, prompt: EnvironmentPrompt) -> None:
        self._tests = tests_in(prompt.answer)

    def step(self, response: Response) -> StepResult:
        code = code_in(response.text)
        if code is None:
            return StepResult(done=True)
        ran = run_python(code, self._tests, timeout_seconds=seconds_left())
        if self._tests and ran.all_passed:
            return StepResult(reward=1.0, done=True)
        return StepResult([{"role": "user", "content": report_of(ran)}])
