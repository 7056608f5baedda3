"""What tells the bank of one run from that of another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.config import RLConfig
from mcore_rl.data.source_position import Begin
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.rollout.branch import Branch
from mcore_rl.trainer import sampling as sampling_module
from mcore_rl.trainer.resume.point import ResumePoint
from mcore_rl.trainer.resume.trainer_state import TrainerState
from mcore_rl.trainer.sampling import Start, bank_folder, branch_of, environment_facts


def test_bank_is_told_by_the_classes_and_limits_of_environments() -> None:
    spec = EnvironmentSpec("tasks.chess:Chess", 1.0, of_sources={"b": "tasks.go:Go", "a": "none"})
    facts = environment_facts(spec)
    others = [
        replace(spec, name="tasks.chess:Blitz"),
        replace(spec, of_sources={"b": "tasks.go:Go"}),
        replace(spec, max_turns=9),
        replace(spec, max_turn_tokens=9),
    ]
    assert all(environment_facts(each) != facts for each in others) and facts
    assert environment_facts(replace(spec, name="moved.py:Chess")) == facts
    assert environment_facts(replace(spec, of_sources={**spec.of_sources}, max_open=3)) == facts
    assert environment_facts(None) == []


def test_engines_are_told_what_the_run_began_with() -> None:
    prompts: Any = SimpleNamespace(begin=Begin(), fingerprint="")
    start = Start(prompts, None, "2026-11-26", 48, Path("rollout"), "5f2a", branch="6f1c")
    assert start.message()["began_with"] == "5f2a" and start.message()["branch"] == "6f1c"


def test_branch_of_a_start_is_that_of_the_newest_checkpoint_or_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(sampling_module.objects, "broadcast", lambda value: value)
    ahead = RLConfig.of(run_dir=str(tmp_path), rollout_ranks="1", max_staleness=1)
    job: Any = SimpleNamespace(config=ahead)
    folder = bank_folder(job)

    def branch(step: int | None, name: str = "") -> str:
        state = TrainerState(step or 0, "TP1", branch=name)
        found = branch_of(job, None if step is None else ResumePoint(tmp_path, state, None))
        assert found is not None
        found.write(folder)
        return found.name

    first = branch(None)
    Branch(first, 4).write(folder)
    assert branch(4, first) == first  # resumed twice
    assert branch(4, first) == first
    second = branch(2, first)  # later checkpoints were moved away
    assert second not in ("", first)
    third = branch(None)  # as without --load
    assert third not in ("", first, second)
    assert branch(4, "") != third  # of a run that sampled nothing ahead
    of_steps = RLConfig.of(run_dir=str(tmp_path))
    assert branch_of(SimpleNamespace(config=of_steps), None) is None  # type: ignore[arg-type]
