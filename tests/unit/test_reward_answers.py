"""What a reward pool takes of what its workers write: each message fits what was asked, or ends it.

No process is started here but for one test: a worker is the other end of its pipe.
"""

from __future__ import annotations

import json
import os
import pickle
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pebble.common.types import ResultStatus
from pebble.pool.process import Acknowledgement, TaskResult

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common.errors import UsageError
from mcore_rl.common.http import HTTPFailure
from mcore_rl.rewards import answers as answers_module
from mcore_rl.rewards.answers import Answers, WorkerFault
from mcore_rl.rewards.http import PLAIN_DIALECT, POOLING_DIALECT, Dialect, ServerReward
from mcore_rl.rewards.pool import RewardPool
from mcore_rl.rewards.specs import ServerSpec
from mcore_rl.rewards.worker import Outcome
from tests import hostile

PID, TASK = 77, 3
VALUE = [[[1.0, None, ""], [0.0, "raised KeyError", "'a'"]], 0.25]
ANSWER = {"task": TASK, "value": VALUE}
# A pickle that would set Outcome.reward to 1 for good: the class itself is given a state.
CHANGES_A_CLASS = b"cmcore_rl.rewards.worker\nOutcome\n(N}Vreward\nG?\xf0\0\0\0\0\0\0stb."


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big", signed=True) + text


class Worker:
    """The other end of a worker's pipe, with task TASK of two samples open."""

    def __init__(self, answers: Answers, pid: int = PID) -> None:
        self._answers, self._end = answers, answers.opened(SimpleNamespace(pid=pid))

    def writes(self, *messages: bytes | dict[str, Any]) -> list[Any]:
        """Write them all; what comes of it, until the pool breaks or there is nothing more."""
        for message in messages:
            is_raw = isinstance(message, bytes)
            os.write(self._end, message if is_raw else framed(json.dumps(message).encode()))
        found = []
        try:
            while (message := self._answers.recv()) is not None:
                found.append(message)
        except OSError as error:
            found.append(error)
        return found

    def ends(self) -> None:
        os.close(self._end)


@contextmanager
def answers_of(*tasks: tuple[int, int | None]) -> Any:
    with closing(Answers()) as answers:
        for task, num_samples in tasks:
            answers.asked(task, num_samples)
        yield answers


@contextmanager
def busy_worker() -> Any:
    """A worker that has task TASK."""
    with answers_of((TASK, 2)) as answers:
        worker = Worker(answers)
        assert worker.writes({"worker": PID, "task": TASK}) == [Acknowledgement(PID, TASK)]
        yield worker
        worker.ends()


def kinds(found: list[Any]) -> list[str]:
    """The class of each message, or of what a task has failed with."""
    return [
        type(
            each.result.value
            if isinstance(each, TaskResult) and each.result.status is not ResultStatus.SUCCESS
            else each
        ).__name__
        for each in found
    ]


REFUSED = ["WorkerFault", "OSError"]


def test_an_answer_that_fits_is_taken_and_the_next_task_as_well():
    with answers_of((TASK, 2), (4, None)) as answers:
        worker = Worker(answers)
        found = worker.writes(
            {"worker": PID, "task": TASK}, ANSWER, {"worker": PID, "task": 4}, {"task": 4}
        )
        worker.ends()
        assert answers.recv() is None
    assert kinds(found) == ["Acknowledgement", "TaskResult"] * 2
    outcomes = [Outcome(1.0), Outcome(0.0, "raised KeyError", "'a'")]
    assert found[1].result.value == (outcomes, 0.25) and found[3].result.value is None


@pytest.mark.parametrize(
    "message",
    [
        CHANGES_A_CLASS,
        b"",
        b"[1]",
        b"{}",
        b'{"task": 3}',
        b'{"task": true, "value": null}',
        b'{"task": "3", "value": null}',
        b'{"task": 4, "value": [[[1.0, null, ""], [1.0, null, ""]], 0.1]}',
        b'{"task": 3, "value": [[], 0.1]}',
        b'{"task": 3, "value": [[[1.0, null, ""]], 0.1]}',
        b'{"task": 3, "value": [[[1.0, null, ""], [NaN, null, ""]], 0.1]}',
        b'{"task": 3, "value": [[[1.0, null, ""], ["1", null, ""]], 0.1]}',
        b'{"task": 3, "value": [[[1.0, null, ""], [true, null, ""]], 0.1]}',
        b'{"task": 3, "value": [[[1.0, null, ""], [1.0, 7, ""]], 0.1]}',
        b'{"task": 3, "value": [[[1.0, null, ""], [1.0, null]], 0.1]}',
        b'{"task": 3, "value": [[[1.0, null, ""], [%s, null, ""]], 0.1]}' % (b"9" * 400),
        b'{"task": 3, "value": [[[1.0, null, ""], [1.0, null, ""]], %s]}' % (b"9" * 400),
        b'{"task": 3, "value": [[[1.0, null, ""], [1.0, null, ""]], -1]}',
        b'{"task": 3, "error": "UsageError"}',
        b'{"worker": 77, "task": 3}',
        b'{"worker": 78, "task": 3}',
        b'{"worker": 77, "task": 9}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_answer_fails_the_task_of_its_worker_and_breaks_the_pool(message):
    with busy_worker() as worker:
        assert kinds(worker.writes(framed(message)[:60_000])) in (REFUSED, [])
        if len(message) < 60_000:
            assert worker._answers.fault is not None
    assert not isinstance(Outcome.reward, float)


@pytest.mark.parametrize("size", [-1, -(2**31), 2**31 - 1])
def test_a_message_of_a_length_that_no_answer_has_is_not_waited_for(size):
    with busy_worker() as worker:
        assert kinds(worker.writes(size.to_bytes(4, "big", signed=True))) == REFUSED


def test_a_message_that_stops_halfway_is_not_waited_for(monkeypatch):
    with busy_worker() as worker:
        assert worker.writes(framed(b"x" * 1000)[:50]) == []
        monkeypatch.setattr(answers_module, "_STALLED_SECONDS", -1.0)
        worker._answers.check_clocks()
        assert kinds(worker.writes()) == REFUSED


def test_a_worker_cannot_answer_or_take_the_task_of_another():
    for forged in (ANSWER, {"worker": PID + 1, "task": TASK}, {"worker": PID, "task": TASK}):
        with answers_of((TASK, 2), (4, 1)) as answers:
            one, other = Worker(answers), Worker(answers, PID + 1)
            one.writes({"worker": PID, "task": TASK})
            other.writes({"worker": PID + 1, "task": 4})
            found = other.writes(forged)
            assert kinds(found) == REFUSED and found[0].task == 4
            one.ends(), other.ends()


def test_a_worker_that_ends_within_a_message_breaks_nothing():
    with busy_worker() as worker:
        assert worker.writes(framed(b"x" * 10)[:6]) == []
        worker.ends()
        assert worker._answers.recv() is None
        worker._end = os.open(os.devnull, os.O_WRONLY)


@hostile.BOUNDED
@given(message=hostile.messages(ANSWER), is_busy=st.booleans())
def test_any_message_fits_or_breaks_the_pool(message, is_busy):
    with busy_worker() if is_busy else answers_of((TASK, 2)) as place:
        worker = place if is_busy else Worker(place)
        found = worker.writes(framed(message)) if len(message) < 60_000 else []
        for each in found:
            if isinstance(each, TaskResult) and each.result.status is ResultStatus.SUCCESS:
                outcomes, seconds = each.result.value
                assert is_busy and each.task == TASK and len(outcomes) == 2 and seconds >= 0
                assert all(np.isfinite(outcome.reward) for outcome in outcomes)
                "".join(outcome.failure or "" for outcome in outcomes).encode()
            elif isinstance(each, TaskResult):
                assert is_busy and each.task == TASK
                assert isinstance(each.result.value, (WorkerFault, UsageError))
                str(each.result.value).encode()
            else:
                assert isinstance(each, OSError)
        assert len([each for each in found if isinstance(each, TaskResult)]) <= 1


FORGER = """
import fcntl, os, struct, sys
def f(*, prompt, response, answer):
    if response == "good":
        return 1.0
    frame = sys._getframe()
    while "task" not in frame.f_locals:
        frame = frame.f_back
    text = response.replace("OWN", str(frame.f_locals["task"].id)).encode()
    head = b"" if response.startswith("raw") else struct.pack("!i", len(text))
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            is_writer = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            if fd > 2 and is_writer and "pipe" in os.readlink(f"/proc/self/fd/{fd}"):
                os.write(fd, head + text)
        except OSError:
            pass
    return 1.0
"""
FORGED = [
    '{"task": OWN, "error": "UsageError", "text": "t", "flag": "f", "remedy": "r"}',
    '{"task": OWN, "error": "ValueError", "text": "t"}',
    '{"task": OWN, "value": [[], 0.0]}',
    '{"worker": 1, "task": OWN}',
    "raw",
]


def rollouts(*texts: str) -> list[Rollout]:
    none = np.zeros(0, np.float32)
    prompt = Prompt(0, "question", "7", none.astype(np.int32))
    return [
        Rollout(prompt, i, t, none.astype(np.int32), none, "stop", 0) for i, t in enumerate(texts)
    ]


def test_a_reward_that_forges_messages_costs_its_samples_and_no_others(tmp_path, monkeypatch):
    (tmp_path / "a_forger.py").write_text(FORGER)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool("a_forger:f", num_workers=2, timeout_seconds=20) as pool:
        assert pool.score(rollouts("good"))[0].failure is None
        scored = pool.score(rollouts(*(text for bad in FORGED for text in (bad, "good"))))
    assert [each.failure is None for each in scored] == [False, True] * len(FORGED)
    assert all(each.reward == 1.0 for each in scored[1::2])


SERVED = {
    PLAIN_DIALECT: {"rewards": [1.0, 0.5]},
    POOLING_DIALECT: {"data": [{"index": 0, "data": [1.0]}, {"index": 1, "data": [[0.1], [2.0]]}]},
}


def understood(dialect: Dialect, answer: bytes) -> list[Outcome]:
    """What a server's answer about two samples is taken for."""
    server = ServerSpec("http", "http://127.0.0.1:1", None, "", 2, 1, 0)
    return ServerReward(server, dialect, timeout_seconds=1.0)._understood(answer, 2)


@hostile.BOUNDED
@given(st.data())
def test_any_answer_of_a_server_is_an_outcome_for_each_sample_or_a_failure(data):
    dialect = data.draw(st.sampled_from(list(SERVED)))
    try:
        outcomes = understood(dialect, data.draw(hostile.messages(SERVED[dialect])))
    except HTTPFailure as failure:
        assert failure.kind.startswith("answer") and not failure.may_pass
        return
    assert len(outcomes) == 2 and all(np.isfinite(each.reward) for each in outcomes)


def test_scores_in_another_order_than_the_samples_are_refused():
    entries = SERVED[POOLING_DIALECT]["data"]
    in_order = json.dumps({"data": entries}).encode()
    assert understood(POOLING_DIALECT, in_order) == [Outcome(1.0), Outcome(2.0)]
    with pytest.raises(HTTPFailure, match="another form"):
        understood(POOLING_DIALECT, json.dumps({"data": entries[::-1]}).encode())


def test_the_pickle_would_change_the_class():
    """Else the first message that is refused above would show nothing."""
    name = __name__.encode()
    renamed = CHANGES_A_CLASS.replace(b"Outcome", b"Victim")
    pickle.loads(renamed.replace(b"mcore_rl.rewards.worker", name))
    assert Victim.reward == 1.0


class Victim:
    reward = 0.0
