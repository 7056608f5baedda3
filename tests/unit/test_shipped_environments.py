"""The environments of the package: the calculator and its task, the sandbox, functions as tools."""

from __future__ import annotations

import asyncio
import json
from fractions import Fraction
from typing import Literal

import numpy as np
import pytest

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.data.prompt_file import PromptSource, read_rows
from mcore_rl.data.tokenizer import load_tokenizer
from mcore_rl.environments.calculator import CALL_REWARD, Calculator, evaluated
from mcore_rl.environments.interface import (
    EnvironmentPrompt,
    EnvironmentSpec,
    Response,
    StepResult,
    keeps_state,
)
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.environments.python_sandbox import PythonSandbox
from mcore_rl.environments.tools import ToolEnvironment
from mcore_rl.environments.wire import Event, Started, Stepped
from mcore_rl.isolation.client import Supervisor
from mcore_rl.isolation.levels import BUBBLEWRAP
from mcore_rl.rewards.stack import RewardStack
from tests.conftest import load_script
from tests.reward_specs import rewards_of

PATIENT_SECONDS = 120


def stepped(calculator: Calculator, text: str) -> StepResult:
    return asyncio.run(calculator.step(Response(text, (), 1, "stop")))


def display(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def started(answer: str, **row: object) -> Calculator:
    calculator = Calculator()
    calculator.start(EnvironmentPrompt("47 ?", answer, row, 0))
    return calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*(3+4)", "84"),
        ("1/3 + 1/6", "0.5"),
        ("1/3", "0.333333333333"),
        ("0.1+0.2", "0.3"),
        ("-3 - -4", "1"),
        ("M*2", "8"),
        ("1/0", "error"),
        ("1//2", "error"),
        ("2**9", "error"),
        ("9" * 180 + "*" + "9" * 180, "error"),
        ("(" * 190, "error"),
        ("3(4)", "error"),
        ("__import__('os')", "error"),
        ("True+1", "error"),
    ],
)
def test_expressions_are_evaluated(expression, value):
    assert evaluated(expression, Fraction(4)) == value


def test_expression_alone_is_a_call_and_other_text_the_answer():
    calculator = started("84")
    assert stepped(calculator, " 12*7\n") == StepResult(display("84"), CALL_REWARD)
    assert stepped(calculator, "84+0") == StepResult(display("84"))  # pays once
    assert stepped(calculator, "12/0") == StepResult(display("error"))
    assert stepped(calculator, "It is 84.") == StepResult(reward=1.0, done=True)
    assert stepped(started("84"), "84") == StepResult(reward=1.0, done=True)
    assert stepped(started("84"), "12 * 7 = 83") == StepResult(reward=0.0, done=True)
    assert stepped(started("84"), "12/0") == StepResult(display("error"))  # earns nothing


def test_answer_that_only_the_calculator_knows_pays_after_it_was_shown():
    calculator = started("4", memory=4)
    assert stepped(calculator, "the answer is 4") == StepResult(reward=0.0, done=True)
    for call, shown in (("47", "4"), ("M", "4"), ("M+1", "5")):
        calculator = started("4", memory=4)
        assert stepped(calculator, call) == StepResult(display(shown), CALL_REWARD)
        assert stepped(calculator, "4") == StepResult(reward=1.0, done=True)
    calculator = started("4", memory=4)
    shown = stepped(calculator, "1+1")  # not the answer
    assert shown == StepResult(display("2"), CALL_REWARD)
    assert stepped(calculator, "the 4") == StepResult(reward=0.0, done=True)


def test_restored_calculator_continues_where_the_other_was():
    for turns in ((), ("4",), ("1+1",), ("4", "1+1"), ("M*2",)):
        first, second = started("4", memory=4), Calculator()
        for turn in turns:
            stepped(first, turn)
        second.restore(EnvironmentPrompt("47 ?", "4", {"memory": 4}, 0), first.state())
        for turn in ("1/0", "2", "2+2", "4"):
            assert stepped(second, turn) == stepped(first, turn)


def test_restored_sandbox_has_the_tests_of_its_prompt():
    prompt = EnvironmentPrompt("write f", "assert f(1) == 2", {}, 0)
    environment = PythonSandbox()
    environment.restore(prompt, sandbox(prompt.answer).state())
    right = "```python\ndef f(x): return x + 1\n```"
    assert tried(environment, right) == StepResult(reward=1.0, done=True)


def test_functions_as_tools_are_continued_if_the_class_names_its_state():
    class Stateless(Shop):
        def state(self) -> None:
            return None

    assert keeps_state(Stateless) and not keeps_state(Shop)
    shop = Stateless()
    shop.restore(EnvironmentPrompt("how much?", "5", {}, 0), None)
    result = asyncio.run(shop.step(Response("it is 5", (), 2, "stop")))
    assert result == StepResult(reward=1.0, done=True)


def test_prompts_of_the_task_do_not_reveal_their_answers(tmp_path):
    task = load_script("calculator_task")
    task.write_prompts(tmp_path / "prompts", seed=1)
    again = tmp_path / "again"
    task.write_prompts(again, seed=1)
    files = [tmp_path / "prompts" / f"{name}.jsonl" for name in ("train", "heldout")]
    assert [f.read_text() for f in files] == [(again / f.name).read_text() for f in files]
    train, heldout = (
        [row.columns for row in read_rows(PromptSource(file, max_prompt_tokens=24))]
        for file in files
    )
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in heldout}
    answers = {row["answer"] for row in train}
    assert answers == {row["answer"] for row in heldout} and len(answers) == task.NUM_DIGITS
    for rows in (train, heldout):
        assert len(rows) >= 80
        for prompt in {row["prompt"] for row in rows}:  # a prompt does not reveal its answer
            assert {row["answer"] for row in rows if row["prompt"] == prompt} == answers
        assert len({json.dumps(row) for row in rows}) == len(rows)
        assert all(row["answer"] == str(row["memory"]) for row in rows)
    # Prompts are short for the tiny checkpoint's tokenizer.
    folder = tmp_path / "tokenizer"
    load_script("tiny_task").build_tokenizer().save_pretrained(folder)
    tokenizer = load_tokenizer(folder, trust_remote_code=False, needs_template=True)
    assert max(len(tokenizer.encode(row["prompt"])) for row in train) <= 6


def sandbox(answer: object) -> PythonSandbox:
    environment = PythonSandbox()
    environment.start(EnvironmentPrompt("write f", answer, {}, 0))
    return environment


def tried(environment: PythonSandbox, text: str) -> StepResult:
    return environment.step(Response(text, (), 1, "stop"))


def test_sandbox_takes_several_turns():
    environment = sandbox(["assert f(1) == 2", "assert f(2) == 3"])
    wrong = tried(environment, "```python\ndef f(x): return 2\nprint('tried')\n```")
    assert (wrong.reward, wrong.done) == (0.0, False)
    (message,) = wrong.observation
    assert message["role"] == "user" and message["content"].startswith("tried\nTraceback")
    assert message["content"].endswith("AssertionError\ntests passed: 1 of 2")
    right = tried(environment, "so: ```python\ndef f(x): return x + 1\n```")
    assert right == StepResult(reward=1.0, done=True)
    assert tried(environment, "I give up") == StepResult(done=True)


def test_sandbox_without_tests_shows_the_output():
    environment = sandbox("")
    found = tried(environment, "```python\nprint(6 * 7)\n```")
    assert found == StepResult([{"role": "user", "content": "42"}])
    found = tried(environment, "```python\nx = 1\n```")
    assert found.observation == [{"role": "user", "content": "(no output)"}]


def test_sandbox_runs_in_workers_of_environments_and_rewards(tmp_path):
    """These processes have dropped the privileges that the sandbox drops."""
    right = "```python\ndef f(x): return x + 1\n```"
    # With this machine's protection, in processes that cannot make namespaces.
    with Supervisor() as supervisor:
        is_confined = supervisor.level().name == BUBBLEWRAP
    right += f"\n{right[:-3]}import os; assert (os.getcwd() == '/sandbox') == {is_confined}\n```"
    connects = "```python\nimport socket; socket.socket()\n```"
    row = Prompt(0, "write f", ["assert f(1) == 2"], np.zeros(0, np.int32))
    with EnvironmentPool(EnvironmentSpec("python_sandbox", PATIENT_SECONDS, 2.0)) as pool:
        tickets = [pool.start(row, 0) for _ in range(2)]
        found = events_of(pool, 2)
        assert found == dict.fromkeys(tickets, Started(None, "null"))
        for ticket, text in zip(tickets, (right, connects), strict=True):
            pool.step(ticket, Response(text, (), 1, "stop"))
        found = events_of(pool, 2)
        assert found[tickets[0]] == Stepped(None, 1.0, True)
        assert "PermissionError" in found[tickets[1]].observation[0]["content"]
    none = np.zeros(0, np.float32)
    rollouts = [Rollout(row, 0, text, none, none, "stop", 0) for text in (right, connects)]
    with RewardStack(
        rewards_of("python_sandbox", reward_workers=1, reward_timeout_seconds=60)
    ) as pool:
        scored = pool.score(rollouts)
    assert [(each.reward, each.failure) for each in scored] == [(1.0, None), (0.0, None)]


def events_of(pool: EnvironmentPool, count: int) -> dict[int, Event]:
    found: dict[int, Event] = {}
    while len(found) < count:
        assert pool.wait(PATIENT_SECONDS)
        found |= pool.finished()
    return found


# Functions as tools -------------------------------------------------------------------------------


def shout(text: str) -> str:
    return text.upper()


class Shop(ToolEnvironment):
    async def price(
        self,
        item: str,
        count: int = 1,
        how: Literal["net", "all"] = "all",
        of: list[int] | None = None,
    ) -> float:
        """The price of some pieces."""
        return {"apple": 2.5}[item] * count

    tools = (price, shout)

    def answered(self, text: str) -> float:
        return float(self.prompt.answer in text)


def test_system_prompt_describes_functions_by_their_signatures():
    start = Shop().start(EnvironmentPrompt("how much?", "5", {}, 0))
    assert [message["role"] for message in start] == ["system", "user"]
    tools = start[0]["content"].partition("<tools>\n")[2].partition("\n</tools>")[0]
    price, other = map(json.loads, tools.splitlines())
    assert price == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "The price of some pieces.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer"},
                    "how": {"enum": ["net", "all"]},
                    "of": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["item"],
            },
        },
    }
    assert other["function"]["name"] == "shout"


NOT_CALLS = ("price(apple)", "[]", '{"arguments": {}}', '"price"', "[" * 100_000)


def test_calls_of_tools_are_answered_and_wrong_ones_get_an_error():
    shop = Shop()
    shop.start(EnvironmentPrompt("how much?", "5", {}, 0))

    def results(*calls: str) -> list[str]:
        text = "".join(f"so <tool_call>\n{call}\n</tool_call>" for call in calls)
        found = asyncio.run(shop.step(Response(text, (), 1, "stop")))
        assert not found.done and found.reward == 0.0
        assert {message["role"] for message in found.observation} == {"tool"}
        return [message["content"] for message in found.observation]

    apple = '{"name": "price", "arguments": {"item": "apple", "count": 2}}'
    assert results(apple, '{"name": "shout", "arguments": {"text": "a"}}') == ["5.0", "A"]
    for wrong, error in (
        ('{"name": "price", "arguments": {"item": "pear"}}', "KeyError: 'pear'"),
        ('{"name": "prize"}', "there is no function 'prize', but price, shout"),
        *((text, 'a call is {"name": ..., "arguments": {...}}') for text in NOT_CALLS),
    ):
        assert results(wrong) == [f"error: {error}"]
    assert results('{"name": "price"}')[0].startswith("error: missing a required argument: 'item'")
    assert results('{"name": "price", "arguments": [1]}')[0].startswith("error: ")
    answer = asyncio.run(shop.step(Response("It is 5.", (), 2, "stop")))
    assert answer == StepResult(reward=1.0, done=True)
