"""A calculator for a policy that is bad at sums, with tasks that need more than one turn.

A turn that is only an expression (`12*(3+4)`) is evaluated, and the policy reads the display next,
in a message of role user. Any other turn is the answer, right if its last number equals the
prompt's (reward 1, see `ends_in_number`).

If the row has a column `memory`, the calculator holds that number, which the prompt does not
reveal: a number alone recalls it, and `M` stands for it in expressions. Until it was shown, an
answer has no reward; afterwards a number alone is an answer. The first call of an episode earns
`CALL_REWARD`, so that a policy finds the tool before it finds the answer.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from mcore_rl.common.numbers_in_text import ends_in_number
from mcore_rl.environments.interface import Environment, EnvironmentPrompt, Response, StepResult

CALL_REWARD = 0.25
ERROR = "error"
_MAX_CHARACTERS = 200
_MAX_BITS = 512  # of a numerator or a denominator
_EXPRESSION = re.compile(r"[0-9M.+*/() \t-]+")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator(Environment, name="calculator"):
    """One problem and a calculator."""

    def start(self, prompt: EnvironmentPrompt) -> None:
        self._prompt = prompt
        memory = prompt.row.get("memory")
        self._memory = None if memory is None else Fraction(str(memory))
        self._is_known = memory is None
        self._has_called = False

    def state(self) -> list[bool]:
        return [self._is_known, self._has_called]

    def restore(self, prompt: EnvironmentPrompt, state: list[bool]) -> None:
        self.start(prompt)
        self._is_known, self._has_called = state

    async def step(self, response: Response) -> StepResult:
        text = response.text.strip()
        if not self._is_known and _NUMBER.fullmatch(text):
            assert self._memory is not None
            self._is_known = True
            return self._shown(_written(self._memory))
        if _is_expression(text):
            if "M" in text:
                self._is_known = True
            return self._shown(evaluated(text, self._memory))
        if not self._is_known:
            return StepResult(done=True)
        right = float(ends_in_number(text, self._prompt.answer))
        return StepResult(reward=right, done=True)

    def _shown(self, display: str) -> StepResult:
        reward = 0.0 if self._has_called or display == ERROR else CALL_REWARD
        self._has_called |= display != ERROR
        return StepResult([{"role": "user", "content": display}], reward)


def evaluated(expression: str, memory: Fraction | None = None) -> str:
    """Evaluate `+ - * /`, brackets, numbers and M, exactly if decimals end; else return `ERROR`."""
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, memory)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return ERROR
    return _written(value)


def _is_expression(text: str) -> bool:
    """Return whether a text is to be calculated; a number alone is an answer."""
    if len(text) > _MAX_CHARACTERS or not _EXPRESSION.fullmatch(text):
        return False
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(tree, (ast.BinOp, ast.Name)) or "(" in text


def _value(node: ast.expr, memory: Fraction | None) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.Name) and node.id == "M" and memory is not None:
        value = memory
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        sign = -1 if isinstance(node.op, ast.USub) else 1
        value = sign * _value(node.operand, memory)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, memory), _value(node.right, memory)
        value = _OPERATORS[type(node.op)](left, right)
    else:
        raise ValueError("it is not of a calculator's keys")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise OverflowError("the display is too small")
    return value


def _written(value: Fraction) -> str:
    """Format an integer unchanged, other values as a decimal of twelve digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
