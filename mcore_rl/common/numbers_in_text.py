"""Numbers that a model has written in a text; pure."""

from __future__ import annotations

import re
from decimal import Decimal

# A sign counts only where it cannot be a minus between two operands ("7-3" ends in 3, not -3).
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])-)?\\?\$?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)


def number_of(answer: object) -> Decimal:
    """Return the number that an answer is; ValueError if it is not one."""
    text = str(answer)
    match = _NUMBER.fullmatch(_ascii_minus(text).strip().rstrip("%."))
    if match is None:
        raise ValueError(f"the answer {text[-40:]!r} is not a number")
    return _value(match)


def numbers_in(text: str) -> list[Decimal]:
    """Return all numbers of a text, in order."""
    return [_value(match) for match in _NUMBER.finditer(_ascii_minus(text))]


def last_number(response: str) -> Decimal | None:
    """Return the integer or decimal number that a response ends in; None if anything but white
    space and punctuation follows its last number, or without one."""
    matches = list(_NUMBER.finditer(_ascii_minus(response)))
    if not matches or any(character.isalnum() for character in response[matches[-1].end() :]):
        return None
    return _value(matches[-1])


def ends_in_number(response: str, answer: object) -> bool:
    """Return whether a response ends in the number of the answer.

    The last integer or decimal number of the response counts, compared by value: 7, 7.0 and 007 are
    equal, 1,000 is 1000. Only white space and punctuation may follow it, so a policy that continues
    after its result gets no reward. An answer that is not a number raises ValueError.
    """
    expected = number_of(answer)
    return last_number(response) == expected


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] else value


def _ascii_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
