"""Scoring of samples that are added while others are being scored.

No test relies on elapsed time: a slow reward waits for a pipe or an event.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.rewards import batches as batches_module
from mcore_rl.rewards.batches import Batch, BatchQueue
from mcore_rl.rewards.stack import Finished, RewardStack
from mcore_rl.rewards.worker import Outcome
from tests.reward_server import Server, rollouts, running_server
from tests.reward_specs import rewards_of

# The answer of a sample is a failure to cause, a pipe to read, or its reward.
FILE = """
import os, time
from mcore_rl.rewards.functions import reward

kept = []

@reward("streamed")
def streamed(*, prompt, response, answer):
    with open({begun!r}, "a") as file:
        file.write(response + "\\n")
    if answer.startswith("/"):
        open(answer).read()
        return 1.0
    if answer == "hang":
        time.sleep(600)
    if answer == "die":
        os._exit(1)
    if answer == "eat":
        kept.append(bytearray(2 << 30))
    if answer == "nonsense":
        return "1.0"
    time.sleep(float(answer) / 1000)
    return float(answer)

@reward("streamed_number")
def number(*, prompt, response, answer):
    return float(response)
"""
PATIENT_SECONDS = 300.0  # where a pipe ends the wait


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streamed")
    (folder / "streamed.py").write_text(FILE.format(begun=str(folder / "begun")))
    return folder


@pytest.fixture(scope="module")
def stack(folder: Path) -> Iterator[RewardStack]:
    """Two functions and a server, which returns a sample's answer, or 0.5 if it is a word."""

    def behave(body: dict) -> tuple[int, bytes]:
        words = [s["answer"] if s["answer"].isdigit() else "0.5" for s in body["samples"]]
        return 200, f'{{"rewards": [{", ".join(words)}]}}'.encode()

    with running_server() as server:
        server.behaviour = behave
        spec = rewards_of(
            "streamed,streamed_number,http",
            reward_url=server.url,
            reward_http_batch=4,
            reward_timeout_seconds=3.0,
            reward_memory_gib=0.5,
            reward_workers=2,
            imports=[str(folder / "streamed.py")],
        )
        with RewardStack(spec) as stack:
            yield stack


def patient_stack(folder: Path) -> RewardStack:
    """Two workers; the time of the function is not known yet, so samples are sent one by one."""
    file = str(folder / "streamed.py")
    return RewardStack(
        rewards_of(
            "streamed", reward_workers=2, reward_timeout_seconds=PATIENT_SECONDS, imports=[file]
        )
    )


class Pipe:
    """A named pipe that a reward reads until `close`."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / f"pipe{random.getrandbits(64)}")
        os.mkfifo(self.path)
        self._end: int | None = None

    def wait_for_reader(self, stack: RewardStack) -> None:
        """Wait until a worker reads the pipe, while the stack must not finish anything."""

        def is_there() -> bool:
            assert stack.finished() == []
            try:
                self._end = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                assert error.errno == errno.ENXIO
            return self._end is not None

        wait_until(is_there)

    def close(self) -> None:
        assert self._end is not None
        os.close(self._end)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def taken(stack: RewardStack, number: int) -> dict[int, dict[str, Outcome]]:
    """Poll for `number` finished samples."""
    found: list[Finished] = []

    def are_there() -> bool:
        found.extend(stack.finished())
        return len(found) >= number

    wait_until(are_there)
    assert len(dict(found)) == len(found) == number
    return dict(found)


# Completeness and order ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_each_sample_finishes_once_with_all_parts_in_any_order(stack, seed):
    """Bursts of any size, 0 to 30 ms a sample."""
    chance = random.Random(seed)
    samples = rollouts(*[str(chance.randrange(30)) for _ in range(120)])
    tickets: list[int] = []
    found: list[Finished] = []
    while len(tickets) < len(samples):
        for sample in samples[len(tickets) :][: chance.choice([0, 1, 1, 5, 30])]:
            tickets.append(stack.begin(sample))
        found += stack.finished()
        time.sleep(chance.random() / 100)
    assert stack.wait()
    found += stack.finished()
    assert stack.finished() == []

    assert tickets == list(range(tickets[0], tickets[0] + len(samples)))
    assert sorted(ticket for ticket, _ in found) == tickets
    for ticket, outcomes in found:
        index = ticket - tickets[0]
        value = float(samples[index].prompt.answer)
        assert list(outcomes.items()) == [
            ("streamed", Outcome(value)),
            ("streamed_number", Outcome(float(index))),
            ("http", Outcome(value)),
        ]


def test_outcomes_leaves_other_tickets_unfinished(stack):
    first, second = rollouts("1", "2")
    ticket = stack.begin(first)
    assert stack.outcomes([second, first]) == {
        "streamed": [Outcome(2.0), Outcome(1.0)],
        "streamed_number": [Outcome(1.0), Outcome(0.0)],
        "http": [Outcome(2.0), Outcome(1.0)],
    }
    assert taken(stack, 1)[ticket]["streamed"] == Outcome(1.0)


def test_stack_of_a_reward_model_finishes_at_once():
    with RewardStack(rewards_of("model")) as stack:
        ticket = stack.begin(rollouts("1")[0])
        assert stack.finished() == [(ticket, {})]


# Failures -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_failure_affects_only_its_sample_and_part(stack, caplog):
    """Some quick samples are in one batch with a failing one."""
    stack.outcomes(rollouts(*["0"] * 20))
    failures = {
        17: ("hang", "timed out: no value within 3 s"),
        18: ("die", "ended its process: exit code 1"),
        40: ("eat", "ran out of memory: its process may have 0.5 GiB (--rl-reward-memory-gib)"),
        41: ("nonsense", "returned str: a reward is a finite number"),
        59: ("die", "ended its process: exit code 1"),
    }
    samples = rollouts(*[failures.get(index, ("0", ""))[0] for index in range(60)])
    found: list[Finished] = []
    tickets: list[int] = []
    for start in range(0, 60, 20):
        tickets += [stack.begin(each) for each in samples[start : start + 20]]
        found += stack.finished()
    first = tickets[0]
    while not stack.wait(0.05):
        found += stack.finished()
    found += stack.finished()
    assert sorted(ticket for ticket, _ in found) == tickets == list(range(first, first + 60))
    for ticket, outcomes in found:
        index = ticket - first
        expected = failures[index][1] if index in failures else None
        assert outcomes["streamed"].failure == expected
        assert outcomes["streamed_number"] == Outcome(float(index))
        assert outcomes["http"].failure is None
    logged = [text.split("kind: ")[1] for text in caplog.messages if "reward streamed" in text]
    assert sorted(logged) == sorted({failure for _, failure in failures.values()})
    assert stack.failure_logs["streamed"].counts["ended its process"] == 2


def test_unknown_function_raises_and_cancels_everything(server_that_hangs):
    spec = rewards_of(
        "no_such_function,http",
        reward_url=server_that_hangs.url,
        reward_timeout_seconds=PATIENT_SECONDS,
    )
    with RewardStack(spec) as stack:
        for sample in rollouts(*["1"] * 10):
            stack.begin(sample)
        with pytest.raises(UsageError, match="no_such_function"):
            taken(stack, 10)
        assert (stack.wait(0.0), stack.finished()) == (True, [])
        assert not http_threads()


# Polling does not block ---------------------------------------------------------------------------


def test_finished_returns_while_a_reward_waits(folder, tmp_path):
    pipe = Pipe(tmp_path)
    with patient_stack(folder) as pool:
        waiting = pool.begin(rollouts(pipe.path)[0])
        pipe.wait_for_reader(pool)
        assert pool.wait(0.0) is False
        others = [pool.begin(each) for each in rollouts("1", "2", "3")]
        assert sorted(taken(pool, 3)) == others  # they do not wait for it or for a fuller batch
        assert pool.finished() == []
        pipe.close()
        assert taken(pool, 1) == {waiting: {"streamed": Outcome(1.0)}}


# The end ------------------------------------------------------------------------------------------


@pytest.fixture
def server_that_hangs() -> Iterator[Server]:
    def hang(body: dict) -> tuple[int, bytes]:
        server.released.wait(PATIENT_SECONDS)
        return 500, b""

    with running_server() as server:
        server.behaviour = hang
        yield server


def http_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "rewards over HTTP"]


def test_close_during_scoring_leaves_nothing(folder, server_that_hangs, tmp_path):
    def held() -> tuple[set[int], set[str], int, list[str]]:
        myself = psutil.Process()
        threads = {thread.name for thread in threading.enumerate()}
        links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
        return (
            {each.pid for each in myself.children(recursive=True)},
            {name for name in threads if "process_request" not in name},  # the server's
            sum(each.raddr[1:] == (port,) for each in myself.net_connections()),
            sorted(link for link in links if "pipe:" in link or "anon_inode" in link),
        )

    port = server_that_hangs.server_address[1]
    before = held()
    spec = rewards_of(
        "streamed,http",
        reward_url=server_that_hangs.url,
        reward_timeout_seconds=PATIENT_SECONDS,
        reward_workers=2,
        imports=[str(folder / "streamed.py")],
    )
    pipe = Pipe(tmp_path)
    with RewardStack(spec) as stack:
        for sample in rollouts(pipe.path, *["0"] * 30):
            stack.begin(sample)
        pipe.wait_for_reader(stack)
        wait_until(lambda: len(server_that_hangs.requests) > 0)
        during = held()
        assert len(during[0] - before[0]) >= 2
        assert "rewards over HTTP" in during[1] - before[1]
        assert during[2] > 0 and len(during[3]) > len(before[3])
    assert held() == before
    stack.close()
    for refused in (stack.finished, stack.wait, lambda: stack.begin(rollouts("0")[0])):
        with pytest.raises(RuntimeError, match="this RewardStack is closed"):
            refused()


# Requests to servers ------------------------------------------------------------------------------


def test_next_request_takes_all_waiting_samples():
    may_answer = threading.Semaphore(0)

    def behave(body: dict) -> tuple[int, bytes]:
        assert may_answer.acquire(timeout=PATIENT_SECONDS)
        rewards = ", ".join(sample["answer"] for sample in body["samples"])
        return 200, f'{{"rewards": [{rewards}]}}'.encode()

    with running_server() as server:
        server.behaviour = behave
        spec = rewards_of(
            "http",
            reward_url=server.url,
            reward_http_batch=4,
            reward_http_concurrency=1,
            reward_timeout_seconds=PATIENT_SECONDS,
        )
        with RewardStack(spec) as stack:
            samples = rollouts(*[str(index) for index in range(10)])
            stack.begin(samples[0])
            assert not http_threads()  # nothing is sent before the first poll
            assert stack.finished() == []
            wait_until(lambda: len(server.requests) == 1)
            for sample in samples[1:]:
                stack.begin(sample)
                assert stack.finished() == []
            may_answer.release(4)
            found = taken(stack, 10)
            assert found == {i: {"http": Outcome(float(i))} for i in range(10)}
            assert not http_threads()  # the thread ends with the last answer

            stack.begin(samples[0])  # and begins anew
            assert stack.finished() == []
            wait_until(lambda: len(server.requests) == 5)
            may_answer.release()
            assert taken(stack, 1) == {10: {"http": Outcome(0.0)}}
            assert not http_threads()
    numbers = [[int(s["response"]) for s in body["samples"]] for body in server.requests]
    assert numbers == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9], [0]]


# Batches of workers -------------------------------------------------------------------------------


def numbered(number: int) -> tuple[str, str, str, str]:
    return ("", str(number), "", "{}")


def quick_queue(seconds: float, *specs: str) -> BatchQueue:
    """A queue for two workers, after one sample of each function took `seconds`."""
    waiting = BatchQueue(specs, num_workers=2)
    waiting.add(-1, numbered(-1))
    for _ in specs:
        batch = waiting.next_batch()
        assert batch is not None
        waiting.sent(batch)
        waiting.back(batch)
        waiting.took(batch, seconds)
    return waiting


def sent(waiting: BatchQueue) -> list[Batch]:
    """All batches until the two workers have enough."""
    batches: list[Batch] = []
    while (batch := waiting.next_batch(only_quick=waiting.num_out >= 2)) is not None:
        waiting.sent(batch)
        batches.append(batch)
    return batches


@pytest.mark.parametrize(
    ("seconds", "num_before", "num_waiting", "sizes"),
    [
        (0.001, 0, 3, [1] * 3),  # no batch is filled while a worker is idle
        (0.001, 0, 80, [10] * 8),
        (0.001, 6, 80, [20] * 4),  # no more than are quick together
        (0.001, 6, 10, [5] * 2),
        (0.006, 0, 80, [3] * 12),  # which keeps two workers busy for 0.1 s
        (0.03, 0, 80, [1] * 7),
        (0.03, 5, 80, [1] * 2),
        (0.3, 0, 80, [1] * 4),  # one for each worker when it has done the first
        (0.3, 3, 80, [1]),
        (float("inf"), 0, 80, [1] * 2),  # nothing waits behind what may take long
    ],
)
def test_waiting_samples_are_split_among_workers_by_their_time(
    seconds, num_before, num_waiting, sizes
):
    """The workers already have `num_before` samples, sent one by one."""
    waiting = quick_queue(seconds, "f")
    for ticket in range(-num_before, 0):
        waiting.add(ticket, numbered(ticket))
        assert [list(batch.samples) for batch in sent(waiting)] == [[ticket]]
    for ticket in range(num_waiting):
        waiting.add(ticket, numbered(ticket))
    batches = sent(waiting)
    assert [len(batch) for batch in batches] == sizes
    assert [t for batch in batches for t in batch.samples] == list(range(sum(sizes)))


def test_each_returned_batch_is_replaced():
    waiting = quick_queue(0.3, "f")
    for ticket in range(20):
        waiting.add(ticket, numbered(ticket))
    out = sent(waiting)
    for ticket in range(4, 20):
        waiting.back(out.pop(0))
        out += sent(waiting)
        assert [list(batch.samples) for batch in out] == [
            [t] for t in range(ticket - 3, ticket + 1)
        ]


def test_time_of_a_function_is_that_of_its_slowest_recent_batch():
    waiting = quick_queue(0.001, "f")
    for ticket in range(batches_module._REMEMBERED_BATCHES + 40):
        waiting.add(ticket, numbered(ticket))
    waiting.took(waiting.next_batch(), float("inf"))  # one that hangs
    for _ in range(batches_module._REMEMBERED_BATCHES):
        assert len(batch := waiting.next_batch()) == 1
        waiting.sent(batch)
        waiting.back(batch)
        waiting.took(batch, 0.001)
    assert len(waiting.next_batch()) == 5


def test_oldest_ticket_is_sent_first_even_after_a_return():
    waiting = quick_queue(0.005, "f", "g")
    for ticket in range(32):
        waiting.add(ticket, numbered(ticket))
    first, second, *_ = out = sent(waiting)
    assert [(b.spec, list(b.samples)) for b in out[:3]] == [
        ("f", [0, 1, 2, 3]),
        ("g", [0, 1, 2, 3, 4][: len(second)]),
        ("f", [4, 5, 6, 7][: len(out[2])]),
    ]
    for batch in reversed(out):
        waiting.back(batch)
        waiting.put_back(batch, alone=batch is second)
    order: list[tuple[str, int, bool]] = []
    while batches := sent(waiting):
        for batch in batches:
            waiting.back(batch)
            order += [(batch.spec, ticket, batch.alone) for ticket in batch.samples]
    for spec in "fg":
        mine = [(ticket, alone) for name, ticket, alone in order if name == spec]
        assert mine == [(t, spec == "g" and t in second.samples) for t in range(32)]
