"""Reports about stuck ranks, and their time; tests/dist has jobs with stuck ranks."""

from __future__ import annotations

import re
import threading
import time
from functools import partial
from typing import Any

import pytest
from torch.distributed import HashStore

from mcore_rl.observe import watchdog
from mcore_rl.observe.watchdog import Report, StageWatchdog, describe


def waiting_in(name: str) -> Report:
    return Report("reward", 61.0, ("train.py:30 in train", f"rollout.py:97 in {name}"))


def test_ranks_in_the_same_place_are_grouped_after_the_exception():
    reports = {0: waiting_in("gather"), 1: waiting_in("score"), 3: waiting_in("gather")}
    lines = describe(reports, 5, 60.0).splitlines()
    assert lines[0].startswith("mcore_rl: error: a stage took longer than ")
    assert "--rl-stage-timeout-seconds 60;" in lines[0]
    assert lines[1].startswith("ranks 2, 4 gave no answer")
    assert lines[2] == "rank 1, 61 s in reward:"
    assert lines[4].strip() == "rollout.py:97 in score"
    assert lines[5] == "ranks 0, 3, 61 s in reward:"


def test_ranks_of_other_roles_come_last():
    reports = {0: waiting_in("call"), 1: waiting_in("call"), 2: Report("", 0.0, ("receive",))}
    lines = describe(reports, 3, 60.0).splitlines()
    assert lines[1] == "ranks 0, 1, 61 s in reward:"
    assert lines[4:] == ["rank 2, outside the stages:", "    receive"]


class Rank:
    """A rank in a thread, with the exit codes of its watchdog."""

    def __init__(self, rank: int, store: Any, limit: float, world_size: int) -> None:
        self.codes: list[int] = []
        self._watchdog = partial(
            StageWatchdog,
            limit,
            rank=rank,
            world_size=world_size,
            connect=None if store is None else lambda: store,
            leave=self.codes.append,
        )

    def stage(self, seconds: float = 60.0, name: str | None = "rollout") -> None:
        """Run a stage of `seconds`, or until the watchdog ends this rank; None: of another role."""
        dog = self._watchdog()
        if name is not None:
            dog.enter(name)
        until = time.monotonic() + seconds
        while not self.codes and time.monotonic() < until:
            time.sleep(0.02)
        if name is not None:
            dog.leave()
        dog.close()


class Clock:
    """The time of a watchdog, which passes where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and the watchdog look at it a few times."""
        self.now += seconds
        time.sleep(0.5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def test_stages_within_the_limit_end_nothing(clock, capsys):
    codes: list[int] = []
    dog = StageWatchdog(3.0, rank=0, world_size=1, leave=codes.append)
    for _ in range(3):
        dog.enter("rollout")
        clock.pass_by(2.0)  # longer than the limit together
        dog.leave()
    dog.close()
    assert codes == [] and capsys.readouterr().err == ""


def test_nested_stage_has_its_own_limit(clock):
    codes: list[int] = []
    dog = StageWatchdog(3.0, rank=0, world_size=1, leave=codes.append)
    dog.enter("outer")
    for _ in range(3):
        dog.enter("inner")
        clock.pass_by(2.0)
        dog.leave()
    dog.leave()
    clock.pass_by(4.0)  # nothing is watched between stages
    assert codes == []
    dog.close()


def test_stuck_rank_is_ended_with_its_stack(capsys):
    rank = Rank(0, None, limit=0.5, world_size=1)
    rank.stage()
    assert rank.codes == [watchdog.EXIT_STUCK]
    report = capsys.readouterr().err
    assert re.search(r"rank 0, \d+ s in rollout:", report)
    assert "test_watchdog.py" in report and "in stage" in report.splitlines()[-1]


@pytest.mark.slow
def test_other_ranks_are_asked_and_one_rank_reports(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(watchdog, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 5.0)
    store = HashStore()
    ranks = [Rank(rank, store, limit, 4) for rank, limit in enumerate((0.5, 60, 0.5))]
    threads = [
        threading.Thread(target=rank.stage, args=(60.0, name))
        for rank, name in zip(ranks, ("rollout", "reward", None), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [rank.codes for rank in ranks] == [[watchdog.EXIT_STUCK]] * 3
    report = capsys.readouterr().err
    assert report.count("mcore_rl: error:") == 1
    assert "rank 3 gave no answer" in report and "rank 2, outside the stages:" in report
    assert "rank 3 gave no answer" in (tmp_path / "error.json").read_text()  # for the launcher
    assert re.search(r"rank 0, \d+ s in rollout:", report) and "s in reward:" in report


class StoreOfReporter:
    """The store of another rank, which prints the report once this rank has answered, and ends."""

    def __init__(self) -> None:
        self.is_gone = False

    def check(self, keys: list[str]) -> bool:
        self._need()
        return True

    def add(self, key: str, amount: int) -> int:
        self._need()
        return 1 + amount

    def set(self, key: str, value: str) -> None:
        self._need()
        self.is_gone = True

    def _need(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")


def test_rank_ignores_a_store_that_ended_with_the_reporting_rank(capsys, monkeypatch):
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.1)
    store = StoreOfReporter()
    rank = Rank(2, store, limit=0.5, world_size=3)
    rank.stage()
    assert rank.codes == [watchdog.EXIT_STUCK] and store.is_gone
    assert capsys.readouterr().err == ""
