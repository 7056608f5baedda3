"""Calls of the trainer to several servers, one of which does not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_rl.hybrid_engine.remote import trainer as module
from mcore_rl.hybrid_engine.remote.trainer import (
    MegatronTrainerInitInfo,
    MegatronTrainerWeightTransferEngine,
)


def trainer_of(*engines: Any, timeout_seconds: float = 60.0) -> Any:
    source: Any = SimpleNamespace(shards=SimpleNamespace(device=torch.device("cpu")))
    info = MegatronTrainerInitInfo(rank=0, timeout_seconds=timeout_seconds)
    return MegatronTrainerWeightTransferEngine(info, source=source, engines=engines)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.usefixtures("alone")
def test_server_that_does_not_answer_ends_a_connection_after_the_timeout(over):
    sound, hanging = SimpleNamespace(num_workers=lambda: 1), SimpleNamespace(num_workers=over.wait)
    trainer = trainer_of(sound, hanging, timeout_seconds=0.2)
    with pytest.raises(RuntimeError, match=r"engines \[1\] did not answer a call within 0\.2 s"):
        trainer.connect()


@pytest.mark.usefixtures("alone")
def test_servers_are_called_at_once(over):
    def answers_after_the_other() -> int:
        assert over.wait(60), "the other was not called"
        return 1

    def fails() -> int:
        over.set()
        raise RuntimeError("this one fails")

    first = SimpleNamespace(num_workers=answers_after_the_other)
    with pytest.raises(RuntimeError, match="this one fails"):
        trainer_of(first, SimpleNamespace(num_workers=fails)).connect()


@pytest.mark.parametrize(("seconds", "num_started"), [(1.0, 2), (301.0, 1)])
def test_update_is_not_begun_again_once_the_trainer_has_given_up(seconds, num_started, monkeypatch):
    now, calls = [0.0], []

    def start() -> None:
        calls.append("start")
        now[0] += seconds
        raise RuntimeError("an update has begun already")

    def record(name: str) -> Any:
        return lambda *_: calls.append(name)

    engine: Any = SimpleNamespace(
        pause=record("pause"), start_weight_update=start, update_weights=record("end")
    )
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(RuntimeError, match="begun already"):
        module._start_update("keep", 300.0, engine)
    assert calls[0] == "pause" and calls.count("start") == num_started
    assert ("end" in calls) == (num_started > 1)
