"""Which servers an update of the weights reaches, and what its waits count as."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.hybrid_engine.remote import engine_client
from mcore_rl.hybrid_engine.remote.engine_client import HealthWatch, HTTPEngineClient
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.timeline import Activity
from mcore_rl.trainer import servers
from mcore_rl.trainer.controller_ranks import Wait
from mcore_rl.trainer.rollouts import NoServersLeft
from mcore_rl.trainer.servers import ServerRollouts, ServerSync
from tests.unit.fake_servers import fake_servers
from tests.unit.server_engines import until

pytestmark = pytest.mark.usefixtures("alone")
A, B, C = (f"http://{name}:8000" for name in "abc")


class World:
    """Servers, controllers and a clock, as a test says."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.answering: list[str] = [A, B, C]
        self.misfits: dict[str, str] = {}  # what is wrong with a server's options
        self.failing: set[str] = set()  # servers that answer, but do not receive weights
        self.on_sleep: Callable[[], object] = lambda: None
        self.update_seconds = 0.0
        self.sent: list[tuple[str, ...]] = []  # servers of each transfer
        self.connections = 0
        self.admitted: dict[str, int] = {}
        self.without_since = self.now  # a token
        self.faults: dict[str, str] = {}  # of servers, as controllers have seen them
        self.hanging: set[str] = set()  # servers that stop answering while they receive weights
        self.hanging_workers: set[str] = set()  # that continue to answer, but end no call
        self.stuck_workers: set[str] = set()  # servers with a worker that hangs before an update
        self.answers: list[dict[str, Any]] = []  # of controllers, to calls that sample

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()

    def check(self, url: str, spec: Any) -> int:
        if url in self.misfits:
            raise UsageError(self.misfits[url], flag=f"--rl-rollout-servers {url}", remedy="no")
        return 32

    # As the role of controllers

    def call(self, method: Any, **arguments: Any) -> Any:
        return getattr(self, method.__name__)(**arguments)

    def begin_update(self) -> dict[str, Any]:
        self.admitted = {}
        waited = self.now - self.without_since
        return {"urls": list(self.answering), "seconds": waited, "faults": self.faults}

    def admit(self, *, capacities: dict[str, int], weight_version: int) -> None:
        self.admitted = capacities

    def sample_eval(self, **_: Any) -> dict[str, Any]:
        self.now += 7
        return self.answers.pop(0)

    collect = sample_eval

    def abandon_step(self) -> None:
        pass


class Connection:
    """As the trainer's end of a connection to servers."""

    def __init__(self, world: World, urls: Sequence[str]) -> None:
        self.world, self.urls = world, tuple(urls)
        self.hanging: list[int] = []

    def connect(self) -> None:
        self.world.connections += 1

    def send_weights(self, version: str) -> Any:
        self.world.sent.append(self.urls)
        self.world.now += self.world.update_seconds
        hanging = self.world.hanging_workers
        self.hanging = [number for number, url in enumerate(self.urls) if url in hanging]
        if {*self.urls} & (self.world.failing | self.world.hanging | hanging):
            raise RuntimeError("a worker is gone")
        return SimpleNamespace(received_bytes=[1], needed_bytes=[1], repeated=False)

    def shutdown(self) -> None:
        pass


class Sync(ServerSync):
    world: World

    def _engine(self, urls: Sequence[str]) -> Any:
        return Connection(self.world, urls)

    def _client(self, url: str) -> Any:
        def require_workers() -> None:
            if url in self.world.stuck_workers:
                raise RuntimeError("no answer within 30 s")

        return SimpleNamespace(require_workers=require_workers)

    def _watched(self, urls: Sequence[str]) -> HealthWatch:
        watch = HealthWatch(())
        watch.faults = {url: "no answer within 30 s" for url in urls if url in self.world.hanging}
        return watch


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setattr(servers, "check_server", found.check)
    monkeypatch.setattr(
        servers, "time", SimpleNamespace(sleep=found.sleep, perf_counter=lambda: found.now)
    )
    return found


@pytest.fixture
def sync(world: World) -> Sync:
    config = RLConfig.of(rollout_servers=",".join([A, B, C]), rollout_server_wait_minutes=120)
    job: Any = SimpleNamespace(config=config, spec=None)
    role: Any = world
    source: Any = None
    made = Sync(job, role, source)
    made.world = world
    return made


def sent(world: World, sync: Sync) -> list[tuple[str, ...]]:
    """The transfers of one more update."""
    world.sent = []
    with sync:
        return world.sent


def test_servers_that_fit_are_updated_together_by_one_connection(world, sync):
    assert [sent(world, sync) for _ in range(3)] == [[(A, B, C)]] * 3
    assert world.connections == 1 and world.admitted == {A: 32, B: 32, C: 32}


def test_server_that_comes_late_is_compared_with_the_job_before_it_is_connected(
    world, sync, caplog
):
    world.answering = [A, B]
    assert sent(world, sync) == [(A, B)]
    world.answering, world.misfits = [A, B, C], {C: "returns raw_logprobs"}
    for _ in range(2):
        assert sent(world, sync) == [(A, B)]
        assert world.admitted.keys() == {A, B}
    assert f"{C} gets no requests: returns raw_logprobs" in caplog.text
    assert world.connections == 1
    world.misfits = {}
    assert sent(world, sync) == [(A, B), (C,)]
    assert world.admitted.keys() == {A, B, C}
    assert sent(world, sync) == [(A, B, C)]


def test_server_that_returns_with_other_options_is_excluded(world, sync):
    sent(world, sync)
    # It has restarted between two updates, and has lost its connection.
    world.failing, world.misfits = {B}, {B: "returns raw_logprobs"}
    assert sent(world, sync) == [(A, B, C), (A,), (C,)]
    assert world.admitted.keys() == {A, C}


def test_only_misfits_end_a_run_with_their_names(world, sync):
    world.misfits = {A: "runs vLLM 0.1.0", B: "takes 12 tokens"}
    world.answering = [A, B]
    with pytest.raises(NoServersLeft, match=r"runs vLLM 0\.1\.0.*takes 12 tokens"):
        sent(world, sync)
    assert world.sent == [] and sync.weight_version == 0


def test_server_that_fails_updates_is_left_out_for_longer_each_time(world, sync):
    world.failing = {C}
    assert sent(world, sync) == [(A, B, C), (A,), (B,), (C,)]
    tried = [number for number in range(2, 50) if (C,) in sent(world, sync)]
    assert tried == [3, 6, 11, 20, 37]  # after 1, 2, 4, 8, 16 updates
    assert world.admitted.keys() == {A, B}
    world.failing = set()
    tried = [number for number in range(50, 71) if (C,) in sent(world, sync)]
    assert tried == [70] and world.admitted.keys() == {A, B, C}
    assert sent(world, sync) == [(A, B, C)]


def test_server_that_was_away_is_tried_at_once(world, sync):
    world.failing = {C}
    for _ in range(4):
        sent(world, sync)
    world.answering, world.failing = [A, B], set()
    sent(world, sync)
    world.answering = [A, B, C]
    assert sent(world, sync) == [(A, B, C)]


@pytest.mark.parametrize("answers", [False, True])
def test_server_that_hangs_in_an_update_is_blamed_and_the_others_get_the_weights_together(
    world, sync, caplog, answers
):
    hanging = world.hanging_workers if answers else world.hanging
    hanging.add(B)
    assert sent(world, sync) == [(A, B, C), (A, C)]
    assert world.admitted.keys() == {A, C}
    blamed = [line for line in caplog.messages if "gets no requests" in line]
    assert len(blamed) == 1 and f"{B} gets no requests: it hung" in blamed[0]
    assert ("no answer within 30 s" in blamed[0]) != answers
    assert sent(world, sync) == [(A, C)]
    hanging.clear()
    assert sent(world, sync) == [(A, C), (B,)]
    assert sent(world, sync) == [(A, B, C)]


def test_server_with_a_worker_that_hangs_gets_no_weights_until_it_answers(world, sync):
    assert sent(world, sync) == [(A, B, C)]
    world.stuck_workers = {B}
    assert sent(world, sync) == [(A, C)] and world.admitted.keys() == {A, C}
    world.stuck_workers = set()
    sent(world, sync)
    assert sent(world, sync) == [(A, C), (B,)]


def test_failing_servers_are_tried_all_the_time_while_no_other_is_left(world, sync):
    world.failing = {A, B, C}
    tries: list[int] = []

    def on_sleep() -> None:
        tries.append(len(world.sent))
        if len(tries) == 20:
            world.failing = {A, B}

    world.on_sleep = on_sleep
    with sync:
        assert world.admitted.keys() == {C}
    assert len(tries) == 20 and tries[-1] == 1 + 3 * 20
    # The pause grows with updates, not with tries.
    world.sent = []
    assert [(A,) in sent(world, sync) for _ in range(4)] == [False, True, False, False]


def test_wait_counts_from_the_last_token_and_only_while_trainers_wait():
    now = 100.0
    wait = Wait(lambda: now)
    wait.begin()
    now += 5  # an update
    wait.begin()
    now += 7  # another one, since no server was left
    assert wait.seconds == 12
    wait.end()
    now += 1000  # training
    assert wait.seconds == 12
    wait.begin()
    now += 3
    assert wait.seconds == 15
    wait.forget()  # a token
    now += 2
    assert wait.seconds == 2
    wait.end()
    wait.forget()
    now += 2
    assert wait.seconds == 0


# What waits count as


class Watchdog:
    """The seconds of the longest time without `enter` and `leave`, and the stages."""

    def __init__(self, world: World) -> None:
        self.world, self.longest, self.since = world, 0.0, world.now
        self.stages: list[str] = []

    def enter(self, stage: str) -> None:
        self._note()
        self.stages.append(stage)

    def leave(self) -> None:
        self._note()
        self.stages.pop()

    def _note(self) -> None:
        if self.stages:
            self.longest = max(self.longest, self.world.now - self.since)
        self.since = self.world.now


class Waiting:
    """A run's rollouts, whose clock is the world's."""

    def __init__(self, world: World, sync: Sync) -> None:
        self.world, self.sync = world, sync
        self.watchdog: Any = Watchdog(world)
        self.timers = StageTimers(self.watchdog)
        role: Any = world
        store: Any = SimpleNamespace(set_load=lambda load: None)
        self.rollouts = ServerRollouts(role, sync, store, self.timers, 0)
        self.rollouts._activity = self.activity = Activity(lambda: world.now)
        self.activity.begin("training")
        self.reported: list[float] = []

        def note(report: Any) -> None:
            self.watchdog.leave()
            self.reported.append(report.duration_seconds)
            self.timers.add("reshard_to_rollout", report.duration_seconds)

        sync.on_reshard_start.append(lambda _: self.watchdog.enter("hand-over"))
        sync.on_reshard_end.append(note)

    def no_server_for(self, seconds: float) -> None:
        """The next wait is so long."""
        self.world.answering, slept = [], [0]

        def on_sleep() -> None:
            slept[0] += 2
            if slept[0] >= seconds:
                self.world.answering = [A]

        self.world.on_sleep = on_sleep


@pytest.fixture
def waiting(world: World, sync: Sync, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    monkeypatch.setattr(time, "perf_counter", lambda: world.now)
    world.update_seconds = 3.0
    yield Waiting(world, sync)


def test_wait_for_servers_is_neither_a_hang_nor_training_nor_a_hand_over(waiting):
    waiting.no_server_for(5000)
    with waiting.sync:
        pass
    assert waiting.watchdog.longest <= 3 and waiting.watchdog.stages == []
    assert waiting.reported == [3.0]
    assert waiting.timers["rollout"] == 5000 and waiting.timers["reshard_to_rollout"] == 3
    _, idle_share = waiting.activity.take()
    assert idle_share == pytest.approx(5000 / 5003)


@pytest.mark.parametrize("stage", ["rollout", "eval"])
def test_run_without_a_token_ends_though_servers_take_the_weights(waiting, stage):
    waiting.world.answers = [{} for _ in range(2000)]
    waiting.world.faults = {B: "HTTP status 500"}
    sample = {"rollout": waiting.rollouts._collect, "eval": waiting.rollouts._sample_eval}[stage]
    arguments = {"rollout": {}, "eval": {"step": 0}}[stage]
    began = waiting.world.now
    with pytest.raises(NoServersLeft, match="HTTP status 500"):
        sample(weight_version=1, **arguments)
    assert 7200 <= waiting.world.now - began <= 7220
    # The next step's update tries the servers before it ends the run.
    with waiting.sync:
        pass


@pytest.mark.parametrize("stage", ["rollout", "eval"])
def test_update_within_a_stage_is_counted_once(waiting, stage):
    waiting.world.answers = [{}, {"is_done": True}]
    waiting.no_server_for(100)
    sample = {"rollout": waiting.rollouts._collect, "eval": waiting.rollouts._sample_eval}[stage]
    arguments = {"rollout": {}, "eval": {"step": 0}}[stage]
    with waiting.timers(stage), waiting.rollouts._doing("idle"):
        sample(weight_version=1, **arguments)
    assert waiting.timers["reshard_to_rollout"] == 3
    # Two calls of seven seconds; the wait for servers is one for samples.
    expected = {"rollout": 0.0, "eval": 0.0, stage: 14.0}
    expected["rollout"] += 100
    assert {name: waiting.timers[name] for name in expected} == expected
    _, idle_share = waiting.activity.take()
    assert idle_share == pytest.approx(114 / 117)


def test_health_watch_names_the_server_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(engine_client, "PAUSE_SECONDS", 0.005)
    with fake_servers(2) as found:
        clients = [HTTPEngineClient(each.url, 60) for each in found]
        with HealthWatch(clients) as watch:
            until(lambda: all(each.num_probes > 2 for each in found))
            watch.check()
            found[1].is_down = True
            until(lambda: watch.faults)
            assert [*watch.faults] == [found[1].url]
            with pytest.raises(RuntimeError, match=found[1].url):
                watch.check()
