"""A Python that the policy may try its code in, turn by turn, with the tests of the prompt.

A turn with a block of Python (```python ... ```) is run, with the tests that the prompt's answer
holds (`rewards.code_tests`). If all pass the episode is done and its reward 1; else the policy
reads what was printed and raised, in a message of role user. A turn without a block ends it without
reward. A prompt whose answer is empty has no tests: its code is only run, and the episode ends with
the turn that has none. Each turn's code has a new process and an empty folder; see
`rewards.sandbox`.
"""

from __future__ import annotations

from mcore_rl.environments.interface import Environment, EnvironmentPrompt, Response, StepResult
from mcore_rl.rewards.code_tests import Suite, is_blank, suite_of
from mcore_rl.rewards.sandbox import code_in, report_of, run_python, seconds_left


class PythonSandbox(Environment, name="python_sandbox"):
    """One problem, and a sandbox to try code in."""

    def start(self, prompt: EnvironmentPrompt) -> None:
        self._suite = Suite()
        if not is_blank(prompt.answer):
            self._suite = suite_of(prompt.answer, prompt=prompt.text, row=prompt.row)

    def step(self, response: Response) -> StepResult:
        code = code_in(response.text)
        if code is None:
            return StepResult(done=True)
        ran = run_python(code, self._suite, timeout_seconds=seconds_left())
        if self._suite.tests and ran.all_passed:
            return StepResult(reward=1.0, done=True)
        return StepResult([{"role": "user", "content": report_of(ran)}])
