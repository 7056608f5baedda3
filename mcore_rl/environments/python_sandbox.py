"""An environment in which the policy runs Python code, turn by turn, against the prompt's tests.

A turn with a block of Python (```python ... ```) is run with the tests that the prompt's answer
holds (`sandbox.code_tests`). If all pass, the episode is done with reward 1; otherwise the policy
reads the output and the exceptions in a message of role user. A turn without a block ends the
episode without reward. A prompt with an empty answer has no tests: its code is only run, until a
turn has no block. Each turn's code runs in a new process and an empty folder; see
`sandbox.runner`.
"""

from __future__ import annotations

from mcore_rl.environments.interface import Environment, EnvironmentPrompt, Response, StepResult
from mcore_rl.sandbox.code_blocks import code_in
from mcore_rl.sandbox.code_tests import Suite, is_blank, suite_of
from mcore_rl.sandbox.runner import report_of, run_python, seconds_left


class PythonSandbox(Environment, name="python_sandbox"):
    """One problem, and a sandbox to try code in."""

    def start(self, prompt: EnvironmentPrompt) -> None:
        self._suite = Suite()
        if not is_blank(prompt.answer):
            self._suite = suite_of(prompt.answer, prompt=prompt.text, row=prompt.row)

    def state(self) -> None:
        return None  # each turn's code runs in a new process

    def restore(self, prompt: EnvironmentPrompt, state: None) -> None:
        self.start(prompt)

    def step(self, response: Response) -> StepResult:
        code = code_in(response.text)
        if code is None:
            return StepResult(done=True)
        ran = run_python(code, self._suite, timeout_seconds=seconds_left())
        if self._suite.tests and ran.all_passed:
            return StepResult(reward=1.0, done=True)
        return StepResult([{"role": "user", "content": report_of(ran)}])
