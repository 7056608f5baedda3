"""Messages of reward workers and servers: each fits its request or is refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.common.http import HTTPFailure
from mcore_rl.common.readers import InvalidData
from mcore_rl.common.user_code import shortened
from mcore_rl.isolation.wire import Answer, answer_of
from mcore_rl.rewards.http import ServerReward
from mcore_rl.rewards.specs import ServerSpec
from mcore_rl.rewards.stack import RewardStack
from mcore_rl.rewards.worker import Outcome, as_outcomes
from tests import hostile
from tests.reward_server import responses
from tests.reward_specs import rewards_of

VALUE = [[[1.0, None, ""], [0.0, "raised KeyError", "'a'"]], 0.25]
# A pickle that would set Outcome.reward to 1 for good: the class itself is given a state.
CHANGES_A_CLASS = b"cmcore_rl.rewards.worker\nOutcome\n(N}Vreward\nG?\xf0\0\0\0\0\0\0stb."


def outcomes_in(message: bytes) -> list[Outcome] | None:
    """The outcomes of two samples in the answer to request 3; None if it is refused."""
    answer = answer_of(message, 3)
    if not isinstance(answer, Answer):
        str(answer).encode()
        return None
    try:
        outcomes, seconds = as_outcomes(answer.value, 2)
    except InvalidData as error:
        shortened(str(error)).encode()
        return None
    assert seconds >= 0
    return outcomes


def test_valid_answer_is_accepted():
    message = json.dumps({"turn": 3, "value": VALUE}).encode()
    assert outcomes_in(message) == [Outcome(1.0), Outcome(0.0, "raised KeyError", "'a'")]


@pytest.mark.parametrize(
    "message",
    [
        CHANGES_A_CLASS,
        b"",
        b"[1]",
        b"{}",
        b'{"turn": 3}',
        b'{"turn": 3, "value": null}',
        b'{"turn": true, "value": [[[1.0, null, ""], [1.0, null, ""]], 0.1]}',
        b'{"turn": "3", "value": [[[1.0, null, ""], [1.0, null, ""]], 0.1]}',
        b'{"turn": 4, "value": [[[1.0, null, ""], [1.0, null, ""]], 0.1]}',
        b'{"turn": 3, "value": [[], 0.1]}',
        b'{"turn": 3, "value": [[[1.0, null, ""]], 0.1]}',
        b'{"turn": 3, "value": [[[1.0, null, ""], [NaN, null, ""]], 0.1]}',
        b'{"turn": 3, "value": [[[1.0, null, ""], ["1", null, ""]], 0.1]}',
        b'{"turn": 3, "value": [[[1.0, null, ""], [true, null, ""]], 0.1]}',
        b'{"turn": 3, "value": [[[1.0, null, ""], [1.0, 7, ""]], 0.1]}',
        b'{"turn": 3, "value": [[[1.0, null, ""], [1.0, null]], 0.1]}',
        b'{"turn": 3, "value": [[[1.0, null, ""], [%s, null, ""]], 0.1]}' % (b"9" * 400),
        b'{"turn": 3, "value": [[[1.0, null, ""], [1.0, null, ""]], %s]}' % (b"9" * 400),
        b'{"turn": 3, "value": [[[1.0, null, ""], [1.0, null, ""]], -1]}',
        b'{"turn": 3, "refused": ["UsageError"]}',
        b'{"turn": 3, "failed": ["UsageError"]}',
        b"[" * 100_000,
    ],
)
def test_malformed_answer_is_refused(message):
    assert outcomes_in(message) is None
    assert not isinstance(Outcome.reward, float)


@hostile.BOUNDED
@given(hostile.messages({"turn": 3, "value": VALUE}))
def test_any_message_gives_two_finite_outcomes_or_is_refused(message):
    outcomes = outcomes_in(message)
    if outcomes is not None:
        assert len(outcomes) == 2 and all(np.isfinite(each.reward) for each in outcomes)
        "".join(each.failure or "" for each in outcomes).encode()


FORGER = """
import os, struct, sys
def f(*, prompt, response, answer):
    if response == "good":
        return 1.0
    frame = sys._getframe()
    while frame.f_code.co_name != "_serve":
        frame = frame.f_back
    text = response.replace("OWN", str(frame.f_locals["request"]["turn"])).encode()
    head = b"" if response.startswith("raw") else struct.pack("!i", len(text))
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            if "socket" in os.readlink(f"/proc/self/fd/{fd}"):
                os.write(fd, head + text)
        except OSError:
            pass
    return 1.0
"""
FORGED = [
    '{"turn": OWN, "refused": ["t", "f", "r"]}',
    '{"turn": OWN, "failed": ["raised ValueError", "t"]}',
    '{"turn": OWN, "value": [[], 0.0]}',
    '{"turn": 1000, "value": [[[1.0, null, ""]], 0.0]}',
    "raw",
]


def test_forged_messages_fail_only_their_own_samples(tmp_path, monkeypatch):
    (tmp_path / "a_forger.py").write_text(FORGER)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardStack(rewards_of("a_forger:f", reward_workers=2, reward_timeout_seconds=20)) as pool:
        assert pool.score(responses("good"))[0].failure is None
        scored = pool.score(responses(*(text for bad in FORGED for text in (bad, "good"))))
    assert [each.failure is None for each in scored] == [False, True] * len(FORGED)
    assert all(each.reward == 1.0 for each in scored[1::2])


SERVED = {
    "http": {"rewards": [1.0, 0.5]},
    "pooling": {"data": [{"index": 0, "data": [1.0]}, {"index": 1, "data": [[0.1], [2.0]]}]},
}


def outcomes_of(name: str, answer: bytes) -> list[Outcome]:
    """The outcomes of two samples in a server's answer."""
    server = ServerSpec(name, "http://127.0.0.1:1", None, "", 2, 1, 0)
    return ServerReward(server, timeout_seconds=1.0).parse(answer, 2)


@hostile.BOUNDED
@given(st.data())
def test_any_server_answer_gives_an_outcome_per_sample_or_fails(data):
    name = data.draw(st.sampled_from(list(SERVED)))
    try:
        outcomes = outcomes_of(name, data.draw(hostile.messages(SERVED[name])))
    except HTTPFailure as failure:
        assert failure.kind.startswith("answer") and not failure.may_pass
        return
    assert len(outcomes) == 2 and all(np.isfinite(each.reward) for each in outcomes)


def test_scores_out_of_order_are_refused():
    entries = SERVED["pooling"]["data"]
    in_order = json.dumps({"data": entries}).encode()
    assert outcomes_of("pooling", in_order) == [Outcome(1.0), Outcome(2.0)]
    with pytest.raises(HTTPFailure, match="another form"):
        outcomes_of("pooling", json.dumps({"data": entries[::-1]}).encode())


def test_pickle_changes_a_class_when_loaded():
    """Control for the first message that is refused above."""
    name = __name__.encode()
    renamed = CHANGES_A_CLASS.replace(b"Outcome", b"Victim")
    pickle.loads(renamed.replace(b"mcore_rl.rewards.worker", name))
    assert Victim.reward == 1.0


class Victim:
    reward = 0.0
