"""Environments in processes: many run at a time, and a fault in one fails its own sample only."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.environments import wire
from mcore_rl.environments.interface import (
    Environment,
    EnvironmentSpec,
    Response,
    keeps_state,
    resolve_environment,
)
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.environments.wire import Event, Started, Stepped, event_of
from mcore_rl.isolation import session
from mcore_rl.isolation.wire import Failed, answer_of
from tests.processes import lives
from tests.rank_pool import ROOT

PATIENT_SECONDS = 120  # longer is a fault

# What an episode is to do is its turn's text.
WORLD = """
import asyncio, contextlib, ctypes, os, random, re, signal, subprocess, sys, time
from pathlib import Path
from mcore_rl.api.environment import Environment, StepResult

IMPORTED_BY = os.getpid()
kept = []

class World(Environment):
    def start(self, prompt):
        self.prompt = prompt
        self.draw = random.random()
        if prompt.text in RETURNED:
            return RETURNED[prompt.text]
        if prompt.text in DEEDS:
            return getattr(self, prompt.text.replace(" ", "_"))()
        if prompt.text == "messages":
            return [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        return {"text": "other", "ids": [5, 6]}.get(prompt.text)

    async def step(self, response):
        deed = response.text
        if deed in RETURNED:
            return RETURNED[deed]
        if deed in DEEDS:
            value = getattr(self, deed.replace(" ", "_"))()
            return await value if asyncio.iscoroutine(value) else value
        if deed.startswith("meet "):
            _, folder, number = deed.split()
            (Path(folder) / str(os.getpid())).touch()
            while len(os.listdir(folder)) < int(number):
                await asyncio.sleep(0.01)
            return StepResult("met", 0.5)
        if deed == "tell":
            seen = [self.prompt.text, self.prompt.answer, self.prompt.row, response.turn,
                    response.token_ids, response.finish_reason]
            return repr(seen), 0.25, False
        if deed == "draw":
            return repr((self.prompt.seed, self.draw)), 0, False
        if deed == "environment":
            return " ".join(os.environ) + " ".join(os.environ.values()), 0, False
        if deed == "who":
            return f"{IMPORTED_BY} {os.getppid()} {os.getpid()}", 0, False
        if deed.startswith("signal "):
            done = []
            for pid in deed.split()[1:]:
                try:
                    os.kill(int(pid), 0)
                    done.append(pid)
                except PermissionError:
                    pass
            return " ".join(done), 0, False
        if deed.startswith("start "):
            sleep = "import subprocess, os; os.setsid() ; subprocess.Popen(['sleep', '600'])"
            subprocess.Popen(["sleep", "600"])
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            subprocess.run([sys.executable, "-c", sleep])  # of whom nobody is the parent
            if deed == "start and die":
                os._exit(3)
            return "started", 0, False
        if deed == "done":
            return StepResult(reward=1.0, done=True)
        return "observation", 0, False

    def close(self):
        if str(self.prompt.answer).startswith("/"):
            open(self.prompt.answer, "w").close()

    def hang(self):
        while True:
            pass
    def hang_in_c(self):
        signal.pthread_sigmask(signal.SIG_BLOCK, list(signal.Signals))
        re.match("(a+)+b", "a" * 100)
    def match(self):
        re.match("(a+)+b", "a" * 100)
    def take_the_signal(self):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(600)
    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
    async def sleep(self):
        await asyncio.sleep(600)
    def leave(self):
        os._exit(7)
    def leave_well(self):
        os._exit(0)
    def exit(self):
        sys.exit("enough")
    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)
    def crash(self):
        ctypes.string_at(0)
    def eat(self):
        while True:
            kept.append("x" * (1 << 20))
    def eat_in_c(self):
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        ctypes.memset(libc.malloc(ctypes.c_size_t(8 << 30)), 1, 8 << 30)
    def close_everything(self):
        os.closerange(0, 1000)
        return "closed", 0, False
    def close_and_hang(self):
        os.closerange(0, 1000)
        signal.pthread_sigmask(signal.SIG_BLOCK, list(signal.Signals))
        time.sleep(600)
    def flood_the_socket(self):
        for socket in sockets():
            try:
                while True:
                    os.write(socket, b"\\xff" * (1 << 20))
            except BlockingIOError:  # asyncio has one, too
                pass
    def fake(self):
        for socket in sockets():
            os.write(socket, (len(FAKE)).to_bytes(4, "big") + FAKE)
        time.sleep(600)
    def print_much(self):
        for _ in range(100):
            print("p" * (1 << 20))
        return "printed", 0, False
    def fork(self):
        os.fork()
    def unprintable(self):
        class Odd(Exception):
            def __str__(self):
                raise ValueError
        raise Odd

class Keeper(Environment):
    def start(self, prompt):
        self.seen = []
    async def state(self):
        return STATES.get(self.seen[-1] if self.seen else "", self.seen)
    async def restore(self, prompt, state):
        self.seen = [*state, prompt.text, random.random()]
    def step(self, response):
        self.seen.append(response.text)
        return repr(self.seen), 0.5, response.text == "done"

STATES = {
    "a set": {1},
    "not a number": float("nan"),
    "large": "x" * (1 << 18),
    "deep": eval("[" * 90 + "]" * 90),
}

def sockets():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket"):
                yield int(name)

FAKE = b'{"turn": 1, "value": [NaN, Infinity, true]}'
DEEDS = [name.replace("_", " ") for name, value in vars(World).items() if callable(value)]
DEEDS = [deed for deed in DEEDS if deed not in ("start", "step", "close")]
RETURNED = {
    "flood": ("x" * (3 << 20), 0, False),
    "nothing": None,
    "short": ("observation", 1.0),
    "no number": ("observation", float("nan"), False),
    "text reward": ("observation", "1.0", False),
    "odd done": ("observation", 1.0, "no"),
    "an object": (object(), 1.0, False),
    "a set": ({1, 2}, 1.0, False),
    "half a message": ([{"role": "user"}], 1.0, False),
    "mixed": (["a", 1], 1.0, False),
    "negative": ([-1], 1.0, False),
    "surrogate": ("\\ud800", 1.0, False),
    "no observation": StepResult(reward=1.0),
}
"""

HANGING = ("hang", "match", "sleep")  # which the process's own timer ends
HANGING_ON = ("hang in c", "take the signal", "stop", "close and hang")  # which it does not
FAILURES = {
    "leave": "ended its process: exit code 7",
    "leave well": "ended its process: exit code 0",
    "close everything": "ended its process: exit code 1",
    "exit": "raised SystemExit: enough",
    "kill": "ended its process: SIGKILL, which the kernel sends if memory runs out",
    "crash": "ended its process: SIGSEGV",
    "eat": "ran out of memory: its process may have 0.5 GiB (--rl-environment-memory-gib)",
    "eat in c": "ended its process: SIGSEGV",
    "flood": "answered too much: an answer has at most 1 MiB",
    "flood the socket": "answered too much: an answer has at most 1 MiB",
    "fake": "returned reward inf: a reward is a finite number",
    "nothing": "returned NoneType: a step gives a StepResult",
    "short": "returned tuple of 2: a step gives (observation, reward, done)",
    "no number": "returned reward nan: a reward is a finite number",
    "text reward": "returned reward of type str: a reward is a finite number",
    "odd done": "returned done of type str: done is True or False",
    "an object": "returned object: ",
    "a set": "returned set: ",
    "half a message": "returned invalid messages: a message has a role and a content, both texts",
    "mixed": "returned a list of other or mixed types: ",
    "negative": "returned invalid token ids: ",
    "surrogate": "returned invalid Unicode: ",
    "no observation": "returned NoneType: a step that is not done gives an observation: ",
    "unprintable": "raised Odd: (its text cannot be shown)",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("world")
    (folder / "a_world.py").write_text(WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.setenv("HF_TOKEN", "hush")
        yield "a_world:World"


@pytest.fixture(scope="module")
def only_pool(world: str) -> Iterator[EnvironmentPool]:
    limits = {"timeout_seconds": PATIENT_SECONDS, "memory_gib": 0.5, "max_open": 400}
    with EnvironmentPool(EnvironmentSpec(world, **limits)) as pool:  # type: ignore[arg-type]
        yield pool


@pytest.fixture
def pool(only_pool: EnvironmentPool) -> Iterator[EnvironmentPool]:
    """With nothing open before and after."""
    yield only_pool
    only_pool.end(list(only_pool._sessions))


@pytest.fixture
def new_pool(world: str) -> Iterator[EnvironmentPool]:
    """A pool that has started nothing yet."""
    with EnvironmentPool(EnvironmentSpec(world, timeout_seconds=PATIENT_SECONDS)) as pool:
        yield pool


def prompt(text: str = "question", answer: object = "7", row: str = '{"a": 1}') -> Prompt:
    return Prompt(0, text, answer, np.zeros(0, np.int32), row)


def turn(text: str, number: int = 1) -> Response:
    return Response(text, (3, 4), number, "stop")


def test_each_sample_gets_the_environment_of_its_source(world: str) -> None:
    of_sources = {"sums": "calculator", "eval/plain": "none"}
    spec = EnvironmentSpec(world, PATIENT_SECONDS, of_sources=of_sources)
    assert spec.names == (world, "calculator")
    with EnvironmentPool(spec) as pool:
        pool.check()
        tickets = [
            pool.start(dataclasses.replace(prompt(), source=source), 0)
            for source in ("sums", "eval/plain", "any")
        ]
        events_of(pool, tickets)
        for ticket in tickets:
            pool.step(ticket, turn("3*4"))
        found = events_of(pool, tickets)
        sums, plain, other = (found[ticket] for ticket in tickets)
    assert isinstance(sums, Stepped) and not sums.done and "12" in str(sums.observation)
    assert plain == Stepped(None, 0.0, True)
    assert other != sums


def events_of(pool: EnvironmentPool, tickets: Iterable[int]) -> dict[int, Event]:
    """The next event of each of these, and of no others."""
    wanted, found = set(tickets), {}
    while wanted - found.keys():
        assert pool.wait(PATIENT_SECONDS), f"nothing came of {wanted - found.keys()}"
        for ticket, event in pool.finished():
            assert ticket in wanted and ticket not in found
            found[ticket] = event
    return found


def started(pool: EnvironmentPool, count: int, **options: object) -> list[int]:
    tickets = [pool.start(prompt(**options), seed) for seed in range(count)]  # type: ignore[arg-type]
    assert set(events_of(pool, tickets).values()) == {Started(None)}
    return tickets


def asked(pool: EnvironmentPool, ticket: int, text: str, number: int = 1) -> Event:
    pool.step(ticket, turn(text, number))
    return events_of(pool, [ticket])[ticket]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENT_SECONDS
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.02)


def zygote_of(pool: EnvironmentPool) -> psutil.Process:
    return psutil.Process(pool.zygote_pid)


def descendants(process: psutil.Process) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if lives(each)]


# What works ---------------------------------------------------------------------------------------


def test_an_episode_answers_each_turn_until_it_is_done(pool, tmp_path):
    closed = tmp_path / "closed"
    ticket = pool.start(prompt(answer=str(closed), row='{"x": {"y": [1, "é"]}}'), 5)
    assert (pool.num_open, events_of(pool, [ticket])) == (1, {ticket: Started(None)})
    seen = ["question", str(closed), {"x": {"y": [1, "é"]}}, 1, (3, 4), "stop"]
    assert asked(pool, ticket, "tell") == Stepped(repr(seen), 0.25, False)
    assert asked(pool, ticket, "else", 2) == Stepped("observation", 0.0, False)
    assert not closed.exists()
    assert asked(pool, ticket, "done", 3) == Stepped(None, 1.0, True)
    assert pool.num_open == 0
    with pytest.raises(RuntimeError, match=f"environment {ticket} is not waiting for a turn"):
        pool.step(ticket, turn("else"))
    until(closed.exists)


@pytest.mark.parametrize("answer", ["x" * (4 << 20), [math.inf, {"a": None}]])
def test_a_prompt_may_be_larger_than_a_socket_and_hold_any_number(answer, pool):
    ticket = pool.start(prompt(answer=answer), 0)
    assert events_of(pool, [ticket]) == {ticket: Started(None)}
    seen = ["question", answer, {"a": 1}, 1, (3, 4), "stop"]
    if isinstance(answer, list):
        found = asked(pool, ticket, "tell").observation
        assert found == repr(seen)


def test_prompt_is_what_start_returns(pool):
    texts = ["messages", "text", "ids", "none"]
    tickets = [pool.start(prompt(text), 0) for text in texts]
    found = events_of(pool, tickets)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert [found[t].prompt for t in tickets] == [messages, "other", [5, 6], None]
    pool.end(tickets)


@pytest.mark.slow
def test_hundreds_of_episodes_run_at_the_same_time(pool, tmp_path):
    """Each waits for all others: they get on only if all of them are there together."""
    tickets = started(pool, 300)
    folder = tmp_path / "meeting"
    folder.mkdir()
    for ticket in tickets[:200]:
        pool.step(ticket, turn(f"meet {folder} 200"))
    found = events_of(pool, tickets[:200])
    assert set(found.values()) == {Stepped("met", 0.5, False)}
    assert len(os.listdir(folder)) == 200 and pool.num_open == 300
    pool.end(tickets)
    assert pool.num_open == 0 and not pool.wait(0.1) and pool.finished() == []


def test_modules_are_imported_once_and_episodes_differ_by_their_seeds_alone(pool):
    tickets = [pool.start(prompt(), seed) for seed in (1, 2, 1)]
    events_of(pool, tickets)
    draws = [asked(pool, ticket, "draw").observation for ticket in tickets]
    assert draws[0] == draws[2] != draws[1]
    who = [asked(pool, ticket, "who", 2).observation.split() for ticket in tickets]
    assert len({importer for importer, *_ in who}) == 1
    assert all(importer == parent for importer, parent, _ in who)
    assert len({pid for *_, pid in who}) == 3
    pool.end(tickets)


def test_episodes_beyond_max_open_wait(world, tmp_path):
    with EnvironmentPool(EnvironmentSpec(world, timeout_seconds=30, max_open=3)) as pool:
        tickets = [pool.start(prompt(), 0) for _ in range(8)]
        assert pool.is_working  # although no process is forked yet
        first = events_of(pool, tickets[:3])
        assert len(first) == 3 and not pool.wait(0.3) and pool.num_open == 8
        assert not pool.is_working
        assert len(descendants(zygote_of(pool))) == 3
        pool.end([tickets[0], tickets[7]])  # of which one never began
        pool.step(tickets[1], turn("done"))
        found = events_of(pool, [tickets[1], *tickets[3:5]])
        assert found.pop(tickets[1]) == Stepped(None, 1.0, True)
        pool.end(tickets)
        assert pool.num_open == 0


# What goes wrong ----------------------------------------------------------------------------------


def test_a_failing_step_fails_its_own_sample_only(pool, caplog):
    """All at once, among others of the same zygote that continue."""
    counts = pool.failure_counts.copy()
    good = started(pool, 20)
    bad = dict(zip(started(pool, len(FAILURES)), FAILURES, strict=True))
    for ticket, deed in bad.items():
        pool.step(ticket, turn(deed))
    for ticket in good:
        pool.step(ticket, turn("else"))
    found = events_of(pool, [*bad, *good])
    for ticket, deed in bad.items():
        event = found[ticket]
        assert isinstance(event, Failed), (deed, event)
        expected = FAILURES[deed]
        assert event.failure == expected or (
            expected.endswith(": ") and event.failure.startswith(expected)
        ), (deed, event.failure)
    assert {found[ticket] for ticket in good} == {Stepped("observation", 0.0, False)}
    assert sum((pool.failure_counts - counts).values()) == len(bad)
    logged = [text for text in caplog.messages if "kind: ended its process" in text]
    assert len(logged) == (0 if counts["ended its process"] else 1)
    # The trainer still works with the others, on the same zygote.
    assert {asked(pool, ticket, "else", 2) for ticket in good} == {found[good[0]]}
    assert pool.num_open == len(good)
    pool.end(good)


@pytest.mark.slow
@pytest.mark.parametrize(("deeds", "margin"), [(HANGING, 3 * PATIENT_SECONDS), (HANGING_ON, 3.0)])
def test_a_hanging_step_times_out_and_fails_its_own_sample_only(deeds, margin, world, monkeypatch):
    """Ended by a timer of the kernel's, or, later, by the trainer."""
    monkeypatch.setattr(session, "MARGIN_SECONDS", margin)
    with EnvironmentPool(EnvironmentSpec(world, timeout_seconds=5)) as pool:
        good = started(pool, 5)
        bad = dict(zip(started(pool, len(deeds)), deeds, strict=True))
        bad[pool.start(prompt(deeds[-1]), 0)] = deeds[-1]
        for ticket, deed in list(bad.items())[:-1]:
            pool.step(ticket, turn(deed))
        found = events_of(pool, bad)
        failed = Failed("timed out", "no answer within 5 s")
        assert {deed: found[ticket] for ticket, deed in bad.items()} == dict.fromkeys(deeds, failed)
        assert pool.failure_counts == {"timed out": len(deeds) + 1}
        assert {asked(pool, each, "else") for each in good} == {Stepped("observation", 0.0, False)}
        assert pool.num_open == len(good)


def test_a_failing_start_fails_its_own_sample_only(pool):
    deeds = ["leave", "eat", "exit", "a set"]
    tickets = [pool.start(prompt(deed), 0) for deed in deeds]
    found = events_of(pool, tickets)
    assert [found[ticket].kind for ticket in tickets] == [
        *("ended its process", "ran out of memory", "raised SystemExit"),
        "returned a list of other or mixed types",
    ]
    assert pool.num_open == 0


def test_a_process_that_prints_much_or_forks_continues(pool, capfd):
    (first,) = started(pool, 1)
    assert asked(pool, first, "print much") == Stepped("printed", 0.0, False)
    assert capfd.readouterr().out == ""
    second = pool.start(prompt("fork"), 0)
    assert events_of(pool, [second]) == {second: Started(None)}
    who = {asked(pool, second, "who", number) for number in range(1, 5)}
    assert len(who) == 1 and isinstance(who.pop(), Stepped)


def test_a_process_that_ends_between_turns_fails_the_next_turn(pool):
    (ticket,) = started(pool, 1)
    pid = int(asked(pool, ticket, "who").observation.split()[2])
    os.kill(pid, signal.SIGKILL)
    until(lambda: not psutil.pid_exists(pid))
    assert not pool.wait(0.2)
    failed = Failed("ended its process", "SIGKILL, which the kernel sends if memory runs out")
    assert asked(pool, ticket, "else", 2) == failed
    assert failed.failure.startswith("ended its process: SIGKILL")


def test_an_episode_can_be_ended_in_any_state(new_pool):
    pool = new_pool
    idle, busy, hanging = started(pool, 3)
    pool.step(busy, turn("sleep"))
    pool.step(hanging, turn("hang in c"))
    fresh = pool.start(prompt(), 0)
    zygote = zygote_of(pool)
    theirs = descendants(zygote)
    assert len(theirs) >= 3
    pool.end([idle, busy, hanging, fresh, 10**6])
    assert (pool.num_open, pool.wait(0.1), pool.finished()) == (0, False, [])
    # The others end, too, but for what a look at them is needed for.
    until(lambda: pool.finished() == [] and not any(lives(each) for each in theirs))


def test_the_next_episodes_have_processes_that_were_forked_ahead(new_pool):
    """As many as were there at a time, once none is. Each is used once."""
    pool = new_pool

    def pids_of(tickets):
        return {int(asked(pool, each, "who").observation.split()[2]) for each in tickets}

    def forked_ahead(used):
        return {each.pid for each in descendants(zygote_of(pool))} - used

    tickets = started(pool, 3)
    first = pids_of(tickets)
    assert not forked_ahead(first)
    pool.end(tickets)
    until(lambda: pool.finished() == [] and len(forked_ahead(first)) == 3)
    ahead = forked_ahead(first)
    killed = psutil.Process(min(ahead))
    killed.kill()  # which costs nothing
    until(lambda: not lives(killed))
    tickets = started(pool, 3)
    second = pids_of(tickets)
    assert len(second) == 3 and not second & first
    assert len(second & ahead) == 2
    processes = [psutil.Process(pid) for pid in second]
    pool.close()
    assert not any(lives(each) for each in processes)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[1]",
        b"{}",
        b"\xff",
        b'{"turn": 2, "value": ["", 1, true]}',
        b'{"turn": 1, "value": ["", 1]}',
        b'{"turn": 1, "value": ["", 1, 1]}',
        b'{"turn": 1, "value": [null, 1, false]}',
        b'{"turn": 1, "value": ["", 1e999, true]}',
        b'{"turn": 1, "value": ["\\ud800", 1, false]}',
        b'{"turn": 1, "value": [[4294967296], 1, false]}',
        b'{"turn": 1, "value": [[true], 1, false]}',
        b'{"turn": 1, "value": [[{"role": "user", "content": 1}], 1, false]}',
        b'{"turn": 1, "failed": [1, 2]}',
        b'{"turn": 1, "value": ["", 1' + b"0" * 400 + b", true]}",
        b"[" * 100_000,
    ],
)
def test_a_malformed_answer_is_a_failure(message):
    answer = answer_of(message, 1)
    assert not isinstance(answer, UsageError)
    assert isinstance(event_of(answer, is_first=False), Failed)


def test_a_well_formed_answer_is_what_was_returned():
    answer = json.dumps({"turn": 1, "value": [[1, 2], 1, False]}).encode()
    assert event_of(answer_of(answer, 1), is_first=False) == Stepped([1, 2], 1.0, False)
    assert wire.as_stepped((np.asarray([1, 2]), np.float32(0.5), np.bool_(False))) == [
        *([1, 2], 0.5, False)
    ]
    assert wire.as_started(np.asarray([3])) == [[3]]


# State -------------------------------------------------------------------------------------------

STATE_FAILURES = {
    "a set": "returned a state that is not JSON: Object of type set is not JSON serializable",
    "not a number": "returned a state that is not JSON: Out of range float values",
    "large": "returned too large a state: a state has at most 256 KiB as JSON",
    "deep": "returned a state that is not JSON: is nested deeper than",
}


@pytest.fixture(scope="module")
def keepers(world: str) -> Iterator[EnvironmentPool]:
    spec = EnvironmentSpec("a_world:Keeper", timeout_seconds=PATIENT_SECONDS, needs_state=True)
    with EnvironmentPool(spec) as pool:
        pool.check()
        yield pool


def test_state_comes_with_each_answer_and_another_process_continues_from_it(keepers):
    ticket = keepers.start(prompt(), 5)
    assert events_of(keepers, [ticket]) == {ticket: Started(None, "[]")}
    answered = asked(keepers, ticket, "a")
    assert answered == Stepped("['a']", 0.5, False, '["a"]')
    again = [keepers.restore(prompt("q"), seed, answered.state, 1) for seed in (5, 5, 6)]
    assert events_of(keepers, again) == dict.fromkeys(again, Started(None, '["a"]'))
    seen = [json.loads(asked(keepers, each, "b", 2).state) for each in again]
    assert [each[:2] + each[3:] for each in seen] == [["a", "q", "b"]] * 3
    assert seen[0] == seen[1] and seen[0][2] != seen[2][2]  # seeded by the sample's seed
    assert asked(keepers, ticket, "done", 2) == Stepped(None, 0.5, True)


def test_state_that_cannot_be_kept_fails_its_sample(keepers):
    for deed, reason in STATE_FAILURES.items():
        (ticket,) = [keepers.start(prompt(), 0)]
        events_of(keepers, [ticket])
        failed = asked(keepers, ticket, deed)
        assert isinstance(failed, Failed) and failed.failure.startswith(reason)
    ticket = keepers.restore(prompt(), 0, "5", 1)
    assert events_of(keepers, [ticket])[ticket].kind == "raised TypeError"


def test_class_that_keeps_no_state_is_refused_by_name(world):
    spec = EnvironmentSpec(world, timeout_seconds=PATIENT_SECONDS, needs_state=True)
    says = f"--rl-partial-rollouts cannot .* --rl-environment {world}: .* give the class state"
    with EnvironmentPool(spec) as pool, pytest.raises(UsageError, match=says):
        pool.check()
    half = type("Half", (Environment,), {"step": lambda *_: None, "state": lambda _: None})
    assert not keeps_state(half)


@pytest.mark.parametrize("state", ['"{"', "5", '"\\u00e4"', f'"{"1" * (1 << 19)}"', '"1", 5'])
def test_malformed_state_is_a_failure(state):
    for fields in ("null", '["o", 1, false]'):
        is_first = fields == "null"
        value = f"[{fields.strip('[]')}, {state}]"
        answer = answer_of(f'{{"turn": 1, "value": {value}}}'.encode(), 1)
        assert isinstance(event_of(answer, is_first=is_first), Failed)


# What is kept apart -------------------------------------------------------------------------------


def test_episode_sees_no_secrets_and_cannot_signal_other_processes(pool):
    one, other = started(pool, 2)
    seen = asked(pool, one, "environment").observation
    assert "PATH" in seen and "hush" not in seen and "HF_TOKEN" not in seen
    zygote, _, neighbour = asked(pool, other, "who").observation.split()
    reached = asked(pool, one, f"signal {os.getpid()} {zygote} {neighbour}", 2)
    landlock_version = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
    if landlock_version >= 6:  # which has scopes of signals
        assert reached == Stepped("", 0.0, False)
    pool.end([one, other])


def test_processes_started_by_an_episode_end_with_it(pool):
    zygote = zygote_of(pool)
    dying, ending = started(pool, 2)
    assert isinstance(asked(pool, dying, "start and die"), Failed)
    assert asked(pool, ending, "start and stay") == Stepped("started", 0.0, False)
    until(lambda: len(sleepers(zygote)) == 3)  # of the one that stays
    pool.end([ending])
    until(lambda: not sleepers(zygote))


def sleepers(process: psutil.Process) -> list[psutil.Process]:
    def sleeps(child: psutil.Process) -> bool:
        try:
            return child.cmdline()[:1] == ["sleep"]
        except psutil.NoSuchProcess:
            return False

    return [each for each in descendants(process) if sleeps(each)]


@pytest.mark.slow
def test_a_zygote_that_dies_costs_its_episodes_and_is_replaced(world):
    with EnvironmentPool(EnvironmentSpec(world, timeout_seconds=30, max_open=4)) as pool:
        idle, busy = started(pool, 2)
        pool.step(busy, turn("sleep"))
        first = zygote_of(pool)
        until(lambda: len(descendants(first)) == 2)
        children = descendants(first)
        first.kill()
        assert events_of(pool, [busy])[busy].kind == "ended its process"
        assert asked(pool, idle, "else").kind == "ended its process"
        psutil.wait_procs(children, timeout=PATIENT_SECONDS)
        assert not any(each.is_running() for each in children)
        (ticket,) = started(pool, 1)
        assert asked(pool, ticket, "done") == Stepped(None, 1.0, True)


def test_an_environment_that_cannot_start_raises_and_closes_cleanly(world, tmp_path):
    (tmp_path / "a_dead_end.py").write_text(
        textwrap.dedent("""
        import os
        class Dead:
            def start(self, prompt): pass
            def step(self, response): pass
        os._exit(4)
        """)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        patch.syspath_prepend(tmp_path)
        with EnvironmentPool(EnvironmentSpec("a_dead_end:Dead", timeout_seconds=3)) as pool:
            with pytest.raises(UsageError, match="ended or gave no answer within 60 s .*code 4"):
                pool.check()
            pool.start(prompt(), 0)
            with pytest.raises(RuntimeError, match="started 3 times and answered nothing: .*4"):
                while pool.wait(PATIENT_SECONDS):
                    pass
            assert pool.num_open == 0
    with EnvironmentPool(EnvironmentSpec("a_world:Wrold", timeout_seconds=3)) as pool:
        with pytest.raises(UsageError, match=r"no attribute 'Wrold' \(did you mean World\?\)"):
            pool.check()
        pool.start(prompt(), 0)
        with pytest.raises(UsageError, match="no attribute 'Wrold'"):
            pool.wait(PATIENT_SECONDS)


# What is left -------------------------------------------------------------------------------------

TRAINER = """
import sys
import numpy as np
from mcore_rl.batching.types import Prompt
from mcore_rl.environments.interface import EnvironmentSpec, Response
from mcore_rl.environments.pool import EnvironmentPool

def main():
    pool = EnvironmentPool(EnvironmentSpec("a_world:World", timeout_seconds=600, max_open=100))
    deeds = ["sleep", "hang in c", "start and stay", "stop", "take the signal", "else"]
    tickets = [pool.start(Prompt(0, "q", "7", np.zeros(0, np.int32)), 0) for _ in deeds]
    seen = []
    while len(seen) < len(tickets):
        pool.wait(60)
        seen += pool.finished()
    for ticket, deed in zip(tickets, deeds):
        pool.step(ticket, Response(deed, (), 1, "stop"))
    seen = []
    while len(seen) < 2:
        pool.wait(60)
        seen += pool.finished()
    # Busy again, or its end would be its own.
    pool.step(tickets[deeds.index("start and stay")], Response("sleep", (), 2, "stop"))
    print("ready", flush=True)
    sys.stdin.readline()
    if sys.argv[1] == "close":
        pool.close()
        print("closed", flush=True)
        sys.stdin.readline()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "leave", "be killed"])
def test_nothing_outlives_the_trainer(how, world, tmp_path):
    """Closed; left by a trainer that forgets to; and left by one that is killed."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "trainer.py"), how],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    seen: list[psutil.Process] = []
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        trainer = psutil.Process(process.pid)
        until(lambda: len(sleepers(trainer)) == 3 and len(descendants(trainer)) == 1 + 6 + 3)
        seen = descendants(trainer)
        for pid in (*(each.pid for each in seen), trainer.pid):  # others use the machine's, too
            assert "/dev/shm" not in Path(f"/proc/{pid}/maps").read_text()
        if how == "be killed":
            process.kill()
        else:
            process.stdin.write("go on\n")
            process.stdin.flush()
        if how == "close":
            assert process.stdout.readline() == "closed\n"
            assert [each for each in seen if each.is_running()] == []  # no zombie either
            process.stdin.write("go on\n")
            process.stdin.flush()
        process.wait(PATIENT_SECONDS)
        until(lambda: not any(lives(each) for each in seen))
    finally:
        process.kill()
        process.communicate()
        for each in seen:
            if lives(each):
                each.kill()


# How it is found ----------------------------------------------------------------------------------


class Good:
    def start(self, prompt: object) -> None: ...

    def step(self, response: object) -> None: ...


class NoStep(Environment):
    pass


class Narrow(Good):
    def step(self) -> None: ...


class Wide(Good):
    def __init__(self, size: int) -> None: ...


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("calculater", r"is not an environment \(did you mean calculator\?\); there are calc"),
        ("worlds.py", r"is not an environment \(did you mean worlds.py:NAME\?\); there are calc"),
        ("my.worlds.World", r"is not an environment \(did you mean my.worlds:World\?\)"),
        ("no_such_module:World", "there is no module 'no_such_module'"),
        (f"{__name__}:Goood", "has no attribute 'Goood'"),
        (f"{__name__}:prompt", "is of type function, not a class; name a class"),
        (f"{__name__}:NoStep", "has no method step; give it start"),
        (f"{__name__}:Narrow", "has step.self., which is called with one argument"),
        (f"{__name__}:Wide", "has __init__.self, size., which is called with no arg"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_sentence(spec, says, monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    with pytest.raises(UsageError, match=f"^--rl-environment {spec} .*{says}"):
        resolve_environment(spec)


@pytest.mark.usefixtures("restored_tables")
def test_a_registered_name_belongs_to_one_class(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert resolve_environment(f"{__name__}:Good") is Good
    file = tmp_path / "mine.py"
    file.write_text(
        "from mcore_rl.api import Environment\n"
        "class Mine(Environment, name='mine'):\n"
        "    def step(self, response):\n"
        "        return 'more', 0, False\n"
    )
    assert resolve_environment("mine", [str(file)]).__name__ == "Mine"
    with EnvironmentPool(EnvironmentSpec("mine", timeout_seconds=30, imports=[str(file)])) as pool:
        assert asked(pool, started(pool, 1)[0], "x") == Stepped("more", 0.0, False)
    for name in ("mine", "calculator"):
        with pytest.raises(ValueError, match=f"two environments are called '{name}'"):
            type("Other", (Environment,), {}, name=name)
    with pytest.raises(ValueError, match="cannot be called 'a b'"):
        type("Other", (Environment,), {}, name="a b")
