"""What tells the bank of one run from that of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mcore_rl.data.drawn import Begin
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.trainer.sampling import Start, _environment_facts


def test_bank_is_told_by_the_classes_and_limits_of_environments() -> None:
    spec = EnvironmentSpec("tasks.chess:Chess", 1.0, of_sources={"b": "tasks.go:Go", "a": "none"})
    facts = _environment_facts(spec)
    others = [
        replace(spec, name="tasks.chess:Blitz"),
        replace(spec, of_sources={"b": "tasks.go:Go"}),
        replace(spec, max_turns=9),
        replace(spec, max_turn_tokens=9),
    ]
    assert all(_environment_facts(each) != facts for each in others) and facts
    assert _environment_facts(replace(spec, name="moved.py:Chess")) == facts
    assert _environment_facts(replace(spec, of_sources={**spec.of_sources}, max_open=3)) == facts
    assert _environment_facts(None) == []


def test_engines_are_told_what_the_run_began_with() -> None:
    prompts: Any = SimpleNamespace(begin=Begin(), fingerprint="")
    start = Start(prompts, None, "2026-11-26", 48, Path("rollout"), "5f2a", branch="6f1c")
    assert start.message()["began_with"] == "5f2a" and start.message()["branch"] == "6f1c"
