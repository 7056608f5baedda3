"""Calls of the trainer to several servers, one of which does not answer."""

from __future__ import annotations

import contextlib
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


def trainer_of(*engines: Any, timeout_seconds: float = 60.0, **options: Any) -> Any:
    source: Any = SimpleNamespace(shards=SimpleNamespace(device=torch.device("cpu")))
    info = MegatronTrainerInitInfo(rank=0, timeout_seconds=timeout_seconds)
    return MegatronTrainerWeightTransferEngine(info, source=source, engines=engines, **options)


@pytest.fixture
def over() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)


@pytest.mark.usefixtures("alone")
def test_server_that_does_not_answer_ends_a_connection_after_the_timeout(over):
    sound, hanging = SimpleNamespace(num_workers=lambda: 1), SimpleNamespace(num_workers=over.wait)
    trainer = trainer_of(sound, hanging, timeout_seconds=0.2)
    with pytest.raises(RuntimeError, match=r"engines \[1\] did not answer a call within 0\.2 s"):
        trainer.connect()
    assert trainer.hanging == [1]


@pytest.mark.usefixtures("alone")
def test_check_ends_the_wait_for_a_server_before_the_timeout(over):
    hanging, calls = SimpleNamespace(num_workers=over.wait), []

    def check() -> None:
        calls.append("check")
        if len(calls) == 3:
            raise RuntimeError("http://b does not answer")

    with pytest.raises(RuntimeError, match="http://b does not answer"):
        trainer_of(hanging, timeout_seconds=3600.0, check=check).connect()


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


@pytest.mark.parametrize(
    ("closed_by", "expected"),
    [
        (None, ["pause", "start", "end", "start"]),
        ("start", ["pause", "start"]),
        ("pause", ["pause"]),
    ],
)
def test_update_is_not_begun_again_once_the_trainer_has_given_up(closed_by, expected):
    calls, is_closed = [], threading.Event()

    def start() -> None:
        record("start")()
        raise RuntimeError("an update has begun already")

    def record(name: str) -> Any:
        def call(*_: Any) -> None:
            calls.append(name)
            if name == closed_by:  # the server answers after a long time
                is_closed.set()

        return call

    engine: Any = SimpleNamespace(
        pause=record("pause"), start_weight_update=start, update_weights=record("end")
    )
    with contextlib.suppress(RuntimeError):
        module.start_update("keep", is_closed, engine)
    assert calls == expected
