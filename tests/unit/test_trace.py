"""Tracing: the table by hand, and real spans and collectives of one process by torch.profiler."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from mcore_rl.common import objects
from mcore_rl.observe import trace
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace import SCHEDULES, Tracer
from mcore_rl.observe.trace_table import (
    COMMUNICATION,
    MODEL,
    STAGE,
    Span,
    TracedStep,
    exclusive_times,
    make_table,
    render,
    row_of,
    traced_steps,
    with_waiting_apart,
)


@pytest.fixture
def make_tracer(tmp_path: Path) -> Iterator[Callable[..., Tracer]]:
    made: list[Tracer] = []

    def make(num_steps: int, num_steps_left: int = 100, **settings: Any) -> Tracer:
        defaults: dict[str, Any] = {"first_step": 0, "rank": 0, "folder": tmp_path}
        made.append(Tracer(num_steps, num_steps_left=num_steps_left, **{**defaults, **settings}))
        made[-1].start()
        return made[-1]

    yield make
    for tracer in made:
        tracer.close()
    assert trace._current is None
    assert not autograd_profiler._is_profiler_enabled


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# exclusive times


def span(row: str, start: int, end: int, category: str = STAGE) -> Span:
    return Span(row, category, row, start, end)


def test_nested_spans_are_counted_once() -> None:
    spans = [span("a", 10, 90), span("b", 20, 60), span("c", 30, 40), span("c", 60, 65)]
    times = exclusive_times(spans, 0, 100)
    assert times == {"idle": 20, "a": 35, "b": 30, "c": 15}


def test_span_of_a_thread_that_outlives_its_parent_is_counted_once() -> None:
    assert exclusive_times([span("a", 0, 50), span("b", 40, 70)], 0, 100) == {
        "a": 40,
        "b": 30,
        "idle": 30,
    }


def test_span_over_the_end_of_a_step_is_cut() -> None:
    assert exclusive_times([span("a", 0, 50), span("b", 90, 130)], 20, 100) == {
        "a": 30,
        "idle": 40,
        "b": 10,
    }


def test_times_are_those_of_every_moment_by_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    spans = []
    for index in range(40):
        start, length = torch.randint(0, 200, (2,), generator=generator).tolist()
        spans.append(span(f"row {index % 7}", start, start + length // 3))
    slow: dict[str, int] = {}
    for moment in range(20, 180):
        running = [(s.start, i) for i, s in enumerate(spans) if s.start <= moment < s.end]
        row = spans[max(running)[1]].row if running else "idle"
        slow[row] = slow.get(row, 0) + 1
    found = exclusive_times(spans, 20, 180)
    assert {row: spent for row, spent in found.items() if spent} == slow


@pytest.mark.parametrize(
    ("name", "category", "stage", "row"),
    [
        ("log_probs", STAGE, None, "log-probs"),
        ("reshard_to_train", STAGE, None, "hand-over to train"),
        ("own stage of a fork", STAGE, None, "own stage of a fork"),
        ("forward", MODEL, "train", "forward"),
        ("forward", MODEL, "log_probs", "log-probs"),
        ("all_reduce", COMMUNICATION, "train", "communication"),
        ("all_reduce", COMMUNICATION, "log_probs", "communication"),
        ("all_reduce", COMMUNICATION, None, "communication"),
        ("broadcast", COMMUNICATION, "reshard_to_rollout", "hand-over to rollout"),
        ("all_gather_object", COMMUNICATION, "reward", "reward"),
        ("barrier", COMMUNICATION, "checkpoint", "checkpoint"),
    ],
)
def test_row(name: str, category: str, stage: str | None, row: str) -> None:
    assert row_of(name, category, stage) == row


# waiting, table, bottleneck


def step(rows: dict[str, int], world: list[tuple[str, str, int]], number: int = 2) -> TracedStep:
    seconds = {row: value * 10**9 for row, value in rows.items()}
    waits = [(name, row, value * 10**9) for name, row, value in world]
    calls = {(row, name): (1, value) for name, row, value in waits}
    return TracedStep(number, sum(seconds.values()), seconds, waits, calls)


def test_waiting_for_the_slowest_rank_is_idle() -> None:
    fast = step({"rollout": 2, "reward": 9, "idle": 0}, [("all_gather_object", "reward", 8)])
    slow = step({"rollout": 9, "reward": 2, "idle": 0}, [("all_gather_object", "reward", 1)])
    found = with_waiting_apart([fast, slow])
    assert found[0] == {"rollout": 2 * 10**9, "reward": 2 * 10**9, "idle": 7 * 10**9}
    assert found[1] == {"rollout": 9 * 10**9, "reward": 2 * 10**9, "idle": 0}


def test_ranks_with_other_collectives_are_left_as_they_are() -> None:
    one = step({"reward": 5}, [("barrier", "reward", 4)])
    other = step({"reward": 5}, [])
    assert with_waiting_apart([one, other]) == [{"reward": 5 * 10**9}] * 2


def test_table_by_hand() -> None:
    of_rank_0 = [
        step({"rollout": 6, "forward": 1, "communication": 2, "idle": 1}, []),
        step({"rollout": 8, "forward": 1, "communication": 0, "idle": 1}, [], number=3),
    ]
    of_rank_1 = [
        step({"rollout": 4, "forward": 3, "communication": 2, "idle": 1}, []),
        step({"rollout": 6, "forward": 3, "communication": 0, "idle": 1}, [], number=3),
    ]
    table = make_table([of_rank_0, of_rank_1])
    rows = {row.name: row for row in table.rows}
    assert table.steps == (2, 3)
    assert rows["rollout"].by_step == (5.0, 7.0)
    assert (rows["rollout"].mean, rows["rollout"].low, rows["rollout"].high) == (6.0, 5.0, 7.0)
    assert rows["rollout"].share == pytest.approx(0.6)
    assert rows["communication"].by_step == (2.0, 0.0)
    assert rows["backward"].mean == 0.0  # a row that has to be there
    assert table.whole.mean == 10.0
    assert sum(row.mean for row in table.rows) == pytest.approx(10.0)
    assert sum(row.share for row in table.rows) == pytest.approx(1.0)
    assert table.bottleneck == "bottleneck: rollout, 60 % of the step"
    wanted = "data rollout reward log-probs advantages forward backward optimizer communication"
    assert [row.name for row in table.rows] == [
        *wanted.split(),
        "hand-over to rollout",
        "hand-over to train",
        "checkpoint",
        "idle",
    ]


def test_bottleneck_that_is_waiting_tells_for_what() -> None:
    world = "all_gather_object"
    fast = [step({"rollout": 1, "reward": 9}, [(world, "reward", 9)])] * 3
    slow = step({"rollout": 9, "reward": 1}, [(world, "reward", 1)])
    table = make_table([[rank] for rank in (*fast, slow)])
    assert table.bottleneck == (
        "bottleneck: idle, 60 % of the step (ranks differ most in rollout: 9.000 s on the slowest, "
        "3.000 s on average)"
    )


def test_stage_of_a_fork_has_a_row() -> None:
    table = make_table([[step({"filter": 5, "idle": 1}, [])]])
    assert [row.name for row in table.rows][-2:] == ["filter", "idle"]


def test_rendered_table_ends_with_the_bottleneck() -> None:
    steps = [
        step({"rollout": 6, "idle": 4}, [("barrier", "reward", 3)], number=n) for n in range(2, 12)
    ]
    text = render(make_table([steps]))
    assert text.splitlines()[-1] == "bottleneck: rollout, 60 % of the step"
    assert "steps 2 to 11" in text and "step 7" in text and "step 8 " not in text
    rollout = next(line for line in text.splitlines() if "rollout" in line)
    assert rollout.count("6.000") == 9 and "60.0 %" in rollout
    assert "barrier" in text
    assert max(map(len, text.splitlines())) <= 160


# the events of a trace


def event(name: str, start: int, end: int, kind: str = "user_annotation") -> dict[str, Any]:
    """A complete one; nanoseconds, where a trace has microseconds."""
    times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
    return {"ph": "X", "name": name, "cat": kind, "pid": 1, "tid": 1, **times}


def test_events_of_a_trace_become_rows() -> None:
    events = [
        event("ProfilerStep#1", 0, 100),
        event("rollout", 0, 20),
        event("gloo:all_reduce", 5, 10),  # of the engine
        event("first responses", 5, 18),
        event("train", 20, 90),
        event("forward", 25, 45),
        event("gloo:all_reduce", 30, 40),
        event("ncclDevKernel_AllReduce", 40, 44, "kernel"),
        event("gemm", 41, 42, "kernel"),
        event("optimizer", 50, 60),
        event("Optimizer.step#Adam.step", 51, 59),  # torch's own
        event("all ranks: barrier", 70, 75),
        event("gloo:barrier", 71, 75),
        event("ProfilerStep#2", 100, 130),
        event("all ranks: all_gather_object", 110, 120),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    one, two = traced_steps(events, {"rollout", "train"}, first_step=10)
    assert (one.number, one.duration, two.number, two.duration) == (11, 100, 12, 30)
    assert {row: spent for row, spent in one.rows.items() if spent} == {
        "rollout": 20,
        "update, other": 35,
        "forward": 6,
        "communication": 19,
        "optimizer": 10,
        "idle": 10,
    }
    assert one.world == [("all ranks: barrier", "communication", 5)]
    assert one.collectives["communication", "gloo:all_reduce"] == (1, 10)
    assert one.collectives["rollout", "gloo:all_reduce"] == (1, 5)
    assert two.rows == {"idle": 20, "communication": 10}


# the tracer


def one_step() -> None:
    """A step as training makes it."""
    timers = StageTimers()
    with timers("rollout"), record_function("first responses"):
        torch.ones(10).sum()
    with timers("train"):
        with record_function("forward"):
            torch.ones(10).sum()
        with record_function("optimizer"):
            torch.ones(10).sum()
    timers.finish_step()


STEP_ROWS = {"rollout", "update, other", "forward", "optimizer", "idle"}


def check_rows(tracer: Tracer, *numbers: int, rows: set[str] = STEP_ROWS) -> None:
    """Each step has these rows, and they are all of it."""
    assert [step.number for step in tracer._steps] == list(numbers)
    for step in tracer._steps:
        assert {row for row, spent in step.rows.items() if spent} == rows
        assert sum(step.rows.values()) == step.duration


def test_first_step_warms_up(make_tracer: Any) -> None:
    tracer = make_tracer(2, 4, first_step=10)
    for _ in range(4):
        one_step()
    check_rows(tracer, 11, 12)


@pytest.mark.parametrize("asked", [2, 5])
def test_short_run_is_traced_from_its_first_stage(make_tracer: Any, asked: int) -> None:
    tracer = make_tracer(asked, 2)
    for _ in range(2):
        one_step()
    check_rows(tracer, 0, 1)


def test_which_steps_are_traced_is_said(make_tracer: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mcore_rl")
    make_tracer(2, 4).close()
    make_tracer(4, 4).close()
    make_tracer(1, 4, rank=1).close()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "steps 1 to 2 are traced (the one before warms up)",
        "steps 0 to 3 are traced (the first one warms up as well)",
    ]


@pytest.mark.parametrize(("asked", "left"), [(0, 5), (3, 0)])
def test_nothing_to_trace_is_no_tracer(
    make_tracer: Any, tmp_path: Path, asked: int, left: int
) -> None:
    tracer = make_tracer(asked, left)
    assert trace._current is None and not autograd_profiler._is_profiler_enabled
    one_step()
    tracer.step_ended()
    tracer.report()
    tracer.close()
    assert not any(tmp_path.iterdir())


def test_kernels_of_a_rollout_are_left_out(
    make_tracer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tracer(1, 1)
    toggled: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(trace, "_synchronize", lambda: None)
    monkeypatch.setattr(
        autograd_profiler, "_toggle_collection_dynamic", lambda *args: toggled.append(args)
    )
    with trace.stage("train"):
        pass
    with trace.stage("rollout"):
        assert toggled == [(False, {torch.profiler.ProfilerActivity.CUDA})]
    assert [wanted for wanted, _ in toggled] == [False, True]
    trace.step_ended()
    with trace.stage("rollout"):  # nothing is traced any more
        pass
    assert len(toggled) == 2


def test_hand_over_is_traced_by_its_hooks(make_tracer: Any) -> None:
    tracer = make_tracer(1, 1)
    for direction in ("train_to_rollout", "rollout_to_train"):
        tracer.handover_started(direction)
        tracer.handover_ended()
    trace.step_ended()
    check_rows(tracer, 0, rows={"hand-over to rollout", "hand-over to train", "idle"})


def test_exception_inside_a_span_ends_it_and_is_passed_on(make_tracer: Any) -> None:
    tracer = make_tracer(1, 1)
    with pytest.raises(KeyError), trace.stage("train"), record_function("backward"):
        raise KeyError
    with trace.stage("data"):
        pass
    trace.step_ended()
    check_rows(tracer, 0, rows={"update, other", "backward", "data", "idle"})


# collectives


def test_collectives_are_timed(make_tracer: Any, group: None) -> None:
    tracer = make_tracer(1, 1)
    tensor, out = torch.ones(4), torch.zeros(4)
    with trace.stage("train"):
        dist.all_reduce(tensor)
        dist.all_gather([out], tensor)
        dist.reduce_scatter_tensor(out, tensor)
        dist.broadcast(tensor, src=0)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    with trace.stage("reward"):
        assert objects.all_gather("told") == ["told"]
        objects.all_gather("told", group=dist.group.WORLD)  # of a group: nobody's waiting
    with trace.stage("rollout"):
        dist.all_reduce(tensor)
    trace.step_ended()
    (step,) = tracer._steps
    assert step.world[0][:2] == ("all ranks: all_gather_object", "reward") and len(step.world) == 1
    calls = {key: calls for key, (calls, _) in step.collectives.items()}
    assert calls["communication", "gloo:all_reduce"] >= 2  # gloo scatters by reducing
    assert calls["rollout", "gloo:all_reduce"] == 1
    assert {name for row, name in calls if row == "communication"} >= {
        "gloo:all_reduce",
        "gloo:all_gather",
        "gloo:broadcast",
    }
    assert step.rows["communication"] > 0 and step.rows["reward"] > 0


def test_passes_of_megatron_are_timed(make_tracer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    megatron = types.ModuleType(SCHEDULES)
    source = """
def forward_step(tensor):
    return tensor

def backward_step(tensor):
    return tensor

def forward_backward(tensor):
    backward_func = backward_step
    return backward_func(forward_step(tensor))
"""
    exec(source, vars(megatron))
    monkeypatch.setitem(sys.modules, SCHEDULES, megatron)
    before = dict(vars(megatron))
    tracer = make_tracer(1, 1)
    with trace.stage("train"):
        assert megatron.forward_backward(3) == 3
    trace.step_ended()
    assert dict(vars(megatron)) == before
    check_rows(tracer, 0, rows={"update, other", "forward", "backward", "idle"})


def test_schedules_of_megatron_have_the_functions() -> None:
    import inspect

    schedules = pytest.importorskip(SCHEDULES)
    for name in ("forward_step", "backward_step", "backward_step_multimodule"):
        assert callable(getattr(schedules, name))
    for name in (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_with_interleaving",
        "forward_backward_pipelining_without_interleaving",
    ):
        # Looked up when called, so that a replacement is seen.
        source = inspect.getsource(getattr(schedules, name))
        assert "forward_step(" in source and "backward_step" in source


# failures


def test_profiler_that_fails_ends_tracing_with_one_warning(
    make_tracer: Any, group: None, caplog: pytest.LogCaptureFixture
) -> None:
    tracer = make_tracer(2, 5, rank=3)

    def fail() -> None:
        raise OSError("no")

    tracer._profile.step = fail
    results = []
    for _ in range(4):
        with trace.stage("train"):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            results.append(tensor.item())
        trace.step_ended()
        tracer.report()
    assert results == [1.0] * 4
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["rank 3: tracing failed, training goes on: OSError: no"]
    assert tracer._reported  # with all the others


def test_torch_that_records_otherwise_ends_tracing(
    make_tracer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def enable(config: Any, activities: Any) -> None:
        pytest.fail("called without scopes, every operation would be recorded")

    monkeypatch.setattr(autograd_profiler, "_enable_profiler", enable)
    make_tracer(1, 1)
    one_step()
    assert "tracing failed, training goes on: TypeError" in caplog.text
    assert autograd_profiler._enable_profiler is enable


def test_unwritable_folder_is_a_warning(
    make_tracer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    tracer = make_tracer(1, 1, folder=tmp_path / "file" / "trace")
    one_step()
    tracer.report()
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1


# files


def check_chrome(events: list[dict[str, Any]], ranks: set[int] = {0}) -> None:  # noqa: B006
    """What a viewer needs: complete events of named processes, nesting in a thread."""
    assert {e["pid"] for e in events if e["name"] == "process_name"} == ranks
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}  # begin, -end in nanoseconds
    for event in events:
        assert event["ph"] in ("M", "X") and event["pid"] in ranks
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
        times = round(1e3 * event["ts"]), -round(1e3 * (event["ts"] + event["dur"]))
        threads.setdefault((event["pid"], event["tid"]), []).append(times)
    for times_of_thread in threads.values():
        for one, other in itertools.combinations(sorted(times_of_thread), 2):
            assert other[0] >= -one[1] or -other[1] <= -one[1], (one, other)


def test_files_of_a_run(
    make_tracer: Any, group: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcore_rl")
    folder = tmp_path / "run" / "trace"
    tracer = make_tracer(2, 9, folder=folder, label="tp0 pp0 dp0")
    for number in range(4):
        one_step()
        tracer.report()
        assert folder.exists() == (number >= 2)
    names = {path.name for path in folder.iterdir()}
    assert names == {"rank0.json", "trace.json", "table.txt"}
    for name in ("rank0.json", "trace.json"):
        events = json.loads((folder / name).read_text())["traceEvents"]
        check_chrome(events)
        process = next(e for e in events if e["name"] == "process_name")
        assert process["args"] == {"name": "rank 0 (tp0 pp0 dp0)"}
        at = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
        assert {e["name"] for e in events if e.get("cat") == "step"} == {"step 1", "step 2"}
        assert not any(name.startswith("aten::") for name in at)
        step, train, forward = at["step 2"], at["train"], at["forward"]
        assert step[0] <= train[0] <= forward[0] <= forward[1] <= train[1] <= step[1]
        rollout, responses = at["rollout"], at["first responses"]
        assert rollout[0] <= responses[0] <= responses[1] <= rollout[1]
    table = (folder / "table.txt").read_text()
    assert table.splitlines()[-1].startswith("bottleneck: ")
    assert table.removesuffix("\n") in [record.message for record in caplog.records]


def test_merged_trace_has_a_process_for_each_rank(make_tracer: Any, tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        tracer = make_tracer(1, 1, rank=rank)
        one_step()
        tracer.report()
        paths.append(tmp_path / f"rank{rank}.json")
    trace.merge(paths, tmp_path / "both.json")
    check_chrome(json.loads((tmp_path / "both.json").read_text())["traceEvents"], {0, 1})


def test_run_that_ends_early_leaves_what_it_traced(make_tracer: Any, tmp_path: Path) -> None:
    tracer = make_tracer(5, 9)
    one_step()
    one_step()
    tracer.close()
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    check_chrome(events)
    assert "step 1" in [e["name"] for e in events if e.get("cat") == "step"]


def test_rank_that_failed_is_named_and_left_out(
    make_tracer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = make_tracer(1, 1)
    one_step()
    gather = tracer._gather

    def of_two() -> list[Any]:
        return [*gather(), trace._Report("elsewhere", [], None, "OSError: disk full")]

    monkeypatch.setattr(tracer, "_gather", of_two)
    tracer.report()
    lines = (tmp_path / "table.txt").read_text().splitlines()
    assert lines[0] == "rank 1: OSError: disk full"
    assert lines[-1].startswith("bottleneck: ")
    assert not (tmp_path / "trace.json").exists()  # another machine
