"""The stack that the contract tests run on."""

from __future__ import annotations

import pytest

from tests.cuda import stack


@pytest.fixture(scope="session")
def cuda_stack() -> stack.Stack:
    """Built first if it is not there; see tests/cuda/stack.py."""
    return stack.chosen()
