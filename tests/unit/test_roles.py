"""Ranks of each role, and calls between roles on different ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.batching.sample_exchange import RowExchange, Shares
from mcore_rl.batching.table import rows_to_tokens, tokens_to_rows
from mcore_rl.batching.train_batches import build_train_batch
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common import agreement
from mcore_rl.common.errors import UsageError
from mcore_rl.job import controllers
from mcore_rl.job.validation import world_of_size
from mcore_rl.model.roles import ACTOR, CRITIC, REWARD, ROLLOUT, Roles, describe_ranks, parse_roles
from mcore_rl.trainer.job import enter_role
from mcore_rl.trainer.roles.remote import Bridge, JointGroup, LocalRole, Message, RemoteRole, serve
from mcore_rl.trainer.roles.samples import table_to_tensors, tensors_to_table
from tests.held import table_of, tokens_of, train_batch


def test_all_ranks_have_all_roles_without_flags():
    roles = parse_roles(4)
    assert roles.actor == roles.ranks(CRITIC) == roles.ranks(REWARD) == (0, 1, 2, 3)
    assert not roles.is_separate(CRITIC) and not roles.is_separate(REWARD)
    assert [roles.role_of(rank) for rank in range(4)] == [ACTOR] * 4


def test_ranges_take_ranks_from_the_actor():
    roles = parse_roles(10, "4-5,8", "9")
    assert roles.critic == (4, 5, 8) and roles.reward == (9,)
    assert roles.actor == (0, 1, 2, 3, 6, 7)
    assert roles.is_separate(CRITIC) and roles.is_separate(REWARD) and not roles.is_separate(ACTOR)
    assert [roles.role_of(rank) for rank in (3, 5, 9)] == [ACTOR, CRITIC, REWARD]
    assert describe_ranks(roles.actor) == "ranks 0-3, 6-7"
    assert describe_ranks(roles.reward) == "rank 9"


def test_engines_take_ranks_from_the_actor():
    roles = parse_roles(8, critic="3", rollout="4-7")
    assert roles.actor == (0, 1, 2) and roles.rollout == roles.ranks(ROLLOUT) == (4, 5, 6, 7)
    assert roles.is_separate(ROLLOUT) and [roles.role_of(rank) for rank in (3, 7)] == [
        CRITIC,
        ROLLOUT,
    ]
    assert not parse_roles(8).is_separate(ROLLOUT)


@pytest.mark.parametrize(
    ("critic", "reward", "words"),
    [
        ("4-8", None, ["--rl-critic-ranks 4-8", "rank 8", "0 to 7"]),
        ("7-4", None, ["'7-4' is not a range", "4-7"]),
        ("x", None, ["'x' is not a range"]),
        ("", None, ["'' is not a range"]),
        ("-1", None, ["'-1' is not a range"]),
        ("4-6,6", None, ["names a rank twice"]),
        ("0-7", None, ["leave none of the 8 ranks to the actor", "drop the flag"]),
        ("0-3", "4-7", ["--rl-critic-ranks 0-3 and --rl-reward-ranks 4-7 leave none"]),
        ("4-5", "5-6", ["rank 5 is in --rl-critic-ranks 4-5 and in --rl-reward-ranks 5-6"]),
        (None, "8", ["--rl-reward-ranks 8", "rank 8"]),
    ],
)
def test_invalid_ranges_are_refused(critic, reward, words):
    with pytest.raises(UsageError) as refusal:
        parse_roles(8, critic, reward)
    for word in words:
        assert word in str(refusal.value)


def test_world_of_size_restores_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with world_of_size(2):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "2")
    assert os.environ["RANK"] == "3" and "WORLD_SIZE" not in os.environ


def test_job_of_one_role_keeps_its_world(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    store = dist.HashStore()
    world = enter_role(Roles(4), store)
    assert (world.role, world.store, world.bridges, world.joint_groups) == (ACTOR, store, {}, {})
    assert os.environ["RANK"] == "3"


def bridge_ends(num_far_ranks: int) -> list[Bridge]:
    """All ends of a bridge; each waits for the others when it is made."""
    store = dist.PrefixStore("bridge", dist.HashStore())
    places = range(1 + num_far_ranks)
    return all_at_once(
        *(partial(Bridge, store, place=place, num_far_ranks=num_far_ranks) for place in places)
    )


def group_ends(num_near_ranks: int, num_far_ranks: int) -> list[JointGroup]:
    """The ends of the actor's ranks, followed by those of the role's ranks."""
    store = dist.PrefixStore("group", dist.HashStore())
    sizes = {"num_near_ranks": num_near_ranks, "num_far_ranks": num_far_ranks}
    sides = [(True, rank) for rank in range(num_near_ranks)]
    sides += [(False, rank) for rank in range(num_far_ranks)]
    return all_at_once(
        *(partial(JointGroup, store, is_near=near, rank=rank, **sizes) for near, rank in sides)
    )


def all_at_once(*calls):
    """The results of calls that run in one thread each."""
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return [future.result(timeout=60) for future in futures]


def test_messages_reach_every_rank_of_the_role_and_answers_the_actor():
    near, *far = bridge_ends(2)
    message = Message(
        "samples",
        {
            "step": 3,
            "scale": 0.5,
            "name": "ä",
            "tokens": torch.arange(7),
            "values": torch.randn(2, 3),
            "mask": torch.tensor([True, False]),
            "none": torch.empty(0, dtype=torch.float64),
            "shares": Shares((np.array([4, 1]), np.array([], np.int64)), ((0, 2), (1,))),
        },
    )
    _, *received = all_at_once(lambda: near.send(message), *(end.receive for end in far))
    answer = Message("sums", {"sums": torch.tensor([1 / 3], dtype=torch.float64)})
    answered, *_ = all_at_once(
        near.receive_answer, *(partial(end.send_answer, answer) for end in far)
    )
    for sent, found in ((message, received[0]), (message, received[1]), (answer, answered)):
        assert found.name == sent.name and found.values.keys() == sent.values.keys()
        for name, value in sent.values.items():
            if isinstance(value, torch.Tensor):
                assert found.values[name].dtype == value.dtype
                assert torch.equal(found.values[name], value)
            elif isinstance(value, Shares):
                assert found.values[name].ranks == value.ranks
                arrived = found.values[name].samples
                assert [each.tolist() for each in arrived] == [s.tolist() for s in value.samples]
                assert all(each.dtype == np.int64 for each in arrived)
            else:
                assert found.values[name] == value


class Teacher:
    """A role that mcore_rl does not have."""

    def __init__(self, *, subject: str) -> None:
        self.subject, self.lessons = subject, 0

    def mark(self, *, work: torch.Tensor, scale: float) -> dict:
        self.lessons += 1
        if not work.numel():
            raise ValueError("no work\nto mark")
        return {"marks": work * scale, "by": f"{self.subject} {self.lessons}"}

    def correct(self, *, pages: RowExchange, to: Shares) -> dict:
        """Marks for samples 2 and 3 of 0 to 3, which are sent to `to`."""
        mine = Shares((np.array([2, 3]),), ((0,),))
        return {"marks": RowExchange(LENGTHS, mine, to, pages.rows[:, 1] * 2)}

    def rest(self) -> None:
        """Returns nothing."""


def apart(num_ranks: int, ask: Callable[[RemoteRole], object]) -> tuple[object, list[str]]:
    """The result of `ask` with a teacher on other ranks, and the errors of these ranks."""
    near, *far = bridge_ends(num_ranks)
    group, *groups = group_ends(1, num_ranks)
    ends = [""] * num_ranks

    def serving(rank: int) -> None:
        try:
            serve("teacher", far[rank], groups[rank], Teacher)
        except (RuntimeError, ValueError) as error:
            ends[rank] = str(error)

    found, *_ = all_at_once(
        lambda: ask(RemoteRole("teacher", near, group, subject="Latin")),
        *(partial(serving, rank) for rank in range(num_ranks)),
    )
    return found, ends


def lessons(role: LocalRole | RemoteRole) -> list[tuple[list[float], str]]:
    """Two calls at a time, whose answers are read in reverse order, and a single one."""
    first = role.begin(Teacher.mark, work=torch.tensor([1.0, 2.0]), scale=0.5)
    second = role.begin(Teacher.mark, work=torch.tensor([3.0]), scale=2.0)
    answers = [second(), first()]
    assert role.call(Teacher.rest) is None
    answers.append(role.call(Teacher.mark, work=torch.ones(1), scale=-1.0))
    role.begin(Teacher.mark, work=torch.ones(1), scale=1.0)  # its answer is not read
    role.close()
    role.close()
    return [(answer["marks"].tolist(), answer["by"]) for answer in answers]


@pytest.mark.usefixtures("world_of_one")
def test_local_and_remote_role_give_the_same_answers():
    here = lessons(LocalRole(Teacher(subject="Latin")))
    assert here == [([6.0], "Latin 2"), ([0.5, 1.0], "Latin 1"), ([-1.0], "Latin 3")]
    assert apart(2, lessons) == (here, ["", ""])


LENGTHS = np.array([2, 0, 3, 1])  # of samples


def marks_of_pages(role: LocalRole | RemoteRole) -> list[float]:
    """Send samples 3 and 2 of 4 to a teacher, and get marks back in another order."""
    wanted = Shares((np.array([2, 3]),), ((0,),))
    have = Shares((np.array([3, 0, 2]),), ((0,),))
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    back = Shares((np.array([3, 2]),), ((0,),))
    exchange = RowExchange(LENGTHS, have, wanted, rows)
    answer = role.begin(Teacher.correct, pages=exchange, to=back)
    role.call(Teacher.rest)  # an earlier answer is kept
    role.close()
    return answer()["marks"].rows.tolist()


@pytest.mark.usefixtures("world_of_one")
def test_local_and_remote_role_exchange_rows_alike():
    # Sample 3 is row 0, sample 2 rows 3 to 5.
    expected = [2.0, 14.0, 18.0, 22.0]
    assert marks_of_pages(LocalRole(Teacher(subject="Latin"))) == expected
    assert apart(1, marks_of_pages) == (expected, [""])


def closed(*_: object) -> NoReturn:
    raise RuntimeError("Connection closed by peer")


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("lost", ["bridge", "group"])
def test_lost_ranks_of_a_role_end_its_calls(lost, monkeypatch):
    near, far = bridge_ends(1)
    group, _ = group_ends(1, 1)
    if lost == "bridge":
        monkeypatch.setattr(near, "receive_answer", closed)
    monkeypatch.setattr(group, "exchange", closed)

    def ask() -> None:
        role = RemoteRole("teacher", near, group, subject="Latin")
        if lost == "group":
            role._num_answered = role._num_begun  # it is built
        with pytest.raises(RuntimeError, match="^the teacher failed: its ranks are gone .Connect"):
            role.call(Teacher.rest) if lost == "bridge" else marks_of_pages(role)

    all_at_once(ask, far.receive if lost == "bridge" else lambda: (far.receive(), far.receive()))


def test_lost_controller_is_named_with_its_signal(monkeypatch, tmp_path):
    error_file, exit_codes = tmp_path / "error.json", []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    monkeypatch.setattr(agreement, "_has_cause", threading.Event())
    monkeypatch.setattr(agreement, "_cause", [])
    monkeypatch.setattr(controllers, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    controllers.end_with_controller(process, 3)
    said = agreement.known_cause()
    assert said is not None
    assert exit_codes == [1]
    assert said.startswith("controller 3 of --rl-rollout-servers ended by SIGKILL")
    agreement.leave_reason("RuntimeError: Connection closed by peer")  # as a rank that misses it
    assert json.loads(error_file.read_text())["message"]["message"] == said


@pytest.mark.usefixtures("world_of_one")
def test_error_of_a_role_is_raised_by_the_actor(caplog):
    def ask(role: RemoteRole) -> None:
        finish = role.begin(Teacher.mark, work=torch.empty(0), scale=1.0)
        with pytest.raises(RuntimeError, match="^the teacher failed: ValueError: no work$"):
            finish()
        role.abandon()
        role.close()  # does not wait

    _, ends = apart(2, ask)
    assert ends == ["no work\nto mark"] * 2
    assert "of the teacher failed" in caplog.text


@pytest.mark.usefixtures("world_of_one")
def test_error_of_building_a_role_is_raised_at_the_first_call():
    near, far = bridge_ends(1)
    group, of_teacher = group_ends(1, 1)

    def ask() -> None:
        role = RemoteRole("teacher", near, group, hobby="chess")
        with pytest.raises(RuntimeError, match="^the teacher failed: TypeError: .*hobby"):
            role.begin(Teacher.rest)

    def serving() -> None:
        with pytest.raises(TypeError):
            serve("teacher", far, of_teacher, Teacher)

    all_at_once(ask, serving)


def samples() -> list[ScoredRollout]:
    found, token = [], 0
    for number, (prompt, response) in enumerate([(3, 2), (1, 0), (2, 4)]):
        ids = np.arange(token, token + prompt + response, dtype=np.int32)
        token += len(ids)
        asked = Prompt(number, "text", "answer", ids[:prompt])
        log_probs = -np.ones(response, np.float32)
        rollout = Rollout(asked, 1, "response", ids[prompt:], log_probs, "stop", 2)
        found.append(ScoredRollout(rollout, reward=1.0))
    return found


def test_samples_and_tokens_survive_the_transport():
    table, tokens = table_of(samples()), tokens_of(samples())
    there = tensors_to_table(table_to_tensors(table))
    rows = tokens_to_rows([tokens[row] for row in range(3)])
    assert rows.shape == (12, 5)
    of_rows = dict(enumerate(rows_to_tokens(rows, table.lengths)))
    cuts = (((2, 0, 1),),)
    expected = train_batch(samples(), cuts)
    found = build_train_batch(there, of_rows, cuts)
    for name in ("token_ids", "lengths", "sample_ids", "loss_mask"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert len(tensors_to_table(table_to_tensors(table.take([])))) == 0
    assert rows_to_tokens(tokens_to_rows([]), np.empty(0, dtype=np.int64)) == []
