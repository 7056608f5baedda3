"""Tracing: times by hand with a clock that tests move, and real collectives of one process."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.report import TO_ROLLOUT, TO_TRAIN, ReshardReport
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace import tracer as trace
from mcore_rl.observe.trace.hooks import COLLECTIVES, SCHEDULES
from mcore_rl.observe.trace.table import (
    Span,
    TracedStep,
    exclusive_times,
    make_table,
    render,
    row_of,
    with_waiting_apart,
)
from mcore_rl.observe.trace.tracer import COMMUNICATION, MODEL, STAGE, Tracer
from mcore_rl.patches.megatron.cpu_torch import _make_torch


class FakeClock:
    """Nanoseconds that pass when told; a reading itself takes no time."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now

    def passes(self, nanoseconds: int) -> None:
        self.now += nanoseconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_tracer(clock: FakeClock, tmp_path: Path) -> Iterator[Callable[..., Tracer]]:
    made: list[Tracer] = []

    def make(num_steps: int, num_steps_left: int = 100, **settings: Any) -> Tracer:
        defaults: dict[str, Any] = {"first_step": 0, "rank": 0, "clock": clock, "folder": tmp_path}
        made.append(Tracer(num_steps, num_steps_left=num_steps_left, **{**defaults, **settings}))
        made[-1].start()
        return made[-1]

    yield make
    for tracer in made:
        tracer.close()
    assert trace._current is None


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def functions() -> dict[str, Any]:
    found = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}
    return {**found, "wait": vars(dist.Work)["wait"]}


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    before = functions()
    yield
    assert functions() == before


def spans_of(tracer: Tracer, category: str = COMMUNICATION) -> list[tuple[str, str]]:
    return [(span.name, span.row) for span in tracer._spans if span.category == category]


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


# the tracer


def one_step(clock: FakeClock) -> None:
    """A step of 100 ns, as training makes it: 10 rollout, 60 train, 30 of nothing."""
    timers = StageTimers()
    with timers("rollout"):
        clock.passes(10)
    with timers("train"):
        clock.passes(5)
        with trace.span("forward", MODEL):
            clock.passes(20)
        with trace.span("backward", MODEL):
            clock.passes(30)
        with trace.span("optimizer", MODEL):
            clock.passes(5)
    clock.passes(30)
    timers.finish_step()


STEP_ROWS = {
    "rollout": 10,
    "update, other": 5,
    "forward": 20,
    "backward": 30,
    "optimizer": 5,
    "idle": 30,
}


def test_first_step_warms_up(make_tracer: Any, clock: FakeClock) -> None:
    tracer = make_tracer(2, 4, first_step=10)
    assert functions()["all_reduce"] is dist.all_reduce
    for _ in range(4):
        one_step(clock)
    assert [step.number for step in tracer._steps] == [11, 12]
    assert [dict(step.rows) for step in tracer._steps] == [STEP_ROWS, STEP_ROWS]
    assert [step.duration for step in tracer._steps] == [100, 100]


@pytest.mark.parametrize("asked", [2, 5])
def test_short_run_is_traced_from_its_first_stage(
    make_tracer: Any, clock: FakeClock, asked: int
) -> None:
    tracer = make_tracer(asked, 2)
    clock.passes(77)  # building the run
    for _ in range(2):
        one_step(clock)
    assert [step.number for step in tracer._steps] == [0, 1]
    assert [dict(step.rows) for step in tracer._steps] == [STEP_ROWS, STEP_ROWS]


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
    make_tracer: Any, clock: FakeClock, tmp_path: Path, asked: int, left: int
) -> None:
    tracer = make_tracer(asked, left)
    assert trace._current is None
    one_step(clock)
    tracer.step_ended()
    tracer.report()
    tracer.close()
    assert not any(tmp_path.iterdir())


def test_without_a_tracer_spans_are_one_object() -> None:
    assert trace.span("a", STAGE) is trace.span("b", MODEL)


def test_timed_function_keeps_name_and_result(make_tracer: Any, clock: FakeClock) -> None:
    @trace.timed("optimizer", MODEL)
    def update(value: int) -> int:
        clock.passes(3)
        return value + 1

    assert update.__name__ == "update" and update(1) == 2
    tracer = make_tracer(1, 1)
    with trace.span("train", STAGE):
        assert update(2) == 3
    trace.step_ended()
    assert tracer._steps[0].rows["optimizer"] == 3


def test_hand_over_is_traced_by_its_hooks(make_tracer: Any, clock: FakeClock) -> None:
    tracer = make_tracer(1, 1)
    for direction, nanoseconds in ((TO_ROLLOUT, 7), (TO_TRAIN, 4)):
        report = ReshardReport(direction, 1, 0.0)
        tracer.handover_started(report)
        clock.passes(nanoseconds)
        tracer.handover_ended(report)
    clock.passes(1)
    trace.step_ended()
    assert dict(tracer._steps[0].rows) == {
        "hand-over to rollout": 7,
        "hand-over to train": 4,
        "idle": 1,
    }


def test_exception_inside_a_span_ends_it_and_is_passed_on(
    make_tracer: Any, clock: FakeClock
) -> None:
    tracer = make_tracer(1, 1)
    with pytest.raises(KeyError), trace.span("train", STAGE), trace.span("backward", MODEL):
        clock.passes(5)
        raise KeyError
    assert (tracer._stages, tracer._num_backward) == ([], 0)
    trace.step_ended()
    assert tracer._steps[0].rows["backward"] == 5


# collectives


def test_collectives_are_timed_and_restored(make_tracer: Any, group: None) -> None:
    before = functions()
    tracer = make_tracer(1, 1, clock=itertools.count(1, 10).__next__)
    tensor, out = torch.ones(4), torch.zeros(4)
    with trace.span("train", STAGE):
        assert dist.all_reduce.__name__ == "all_reduce"
        dist.all_reduce(tensor)
        dist.all_gather([out], tensor)
        dist.all_gather_into_tensor(out, tensor)
        dist.reduce_scatter_tensor(out, tensor)
        dist.all_to_all_single(out, tensor)
        dist.broadcast(tensor, src=0)
        dist.barrier()
        gathered = [None]
        dist.all_gather_object(gathered, "told")  # calls all_gather itself
    trace.step_ended()
    assert gathered == ["told"]
    assert functions() == before
    names = "all_reduce all_gather all_gather_into_tensor reduce_scatter_tensor all_to_all_single"
    assert [name for name, _ in spans_of(tracer)] == [
        *names.split(),
        "broadcast",
        "barrier",
        "all_gather_object",
    ]
    assert {row for _, row in spans_of(tracer)} == {"communication"}
    assert [name for name, _, _ in tracer._steps[0].world] == [n for n, _ in spans_of(tracer)]
    assert all(span.end - span.start == 10 for span in tracer._spans if span.category != STAGE)


def test_asynchronous_collective_is_timed_where_it_is_waited_for(
    make_tracer: Any, group: None
) -> None:
    tracer = make_tracer(1, 1)
    with trace.span("train", STAGE):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert isinstance(work, dist.Work)  # what torch returned, nothing around it
        work.wait()
        work = dist.broadcast(torch.ones(2), 0, None, True)  # by position
        work.wait()
    trace.step_ended()
    assert [name for name, _ in spans_of(tracer)] == [
        "all_reduce",
        "wait all_reduce",
        "broadcast",
        "wait broadcast",
    ]
    assert tracer._steps[0].world == []  # ranks need not leave these together


def test_work_that_outlives_tracing_can_be_waited_for(make_tracer: Any, group: None) -> None:
    make_tracer(1, 1)
    with trace.span("train", STAGE):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        kept = dist.all_reduce
    trace.step_ended()
    assert work.wait()
    tensor = torch.full((1,), 3.0)
    kept(tensor)  # a reference that somebody took meanwhile still works
    assert tensor.item() == 3.0


def test_batch_of_sends_is_no_error(make_tracer: Any, group: None) -> None:
    tracer = make_tracer(1, 1)
    with trace.span("train", STAGE):
        # One process cannot send to itself; torch checks the operations before it finds out.
        operation = dist.P2POp(dist.isend, torch.ones(1), 0)
        with pytest.raises((RuntimeError, ValueError)):
            for work in dist.batch_isend_irecv([operation]):
                work.wait()
    trace.step_ended()
    assert spans_of(tracer)[0][0] == "batch_isend_irecv"


def test_group_that_is_not_the_world_says_nothing_of_waiting(make_tracer: Any, group: None) -> None:
    other = dist.new_group([0])
    tracer = make_tracer(1, 1)
    with trace.span("train", STAGE):
        dist.all_reduce(torch.ones(1), group=other)
        dist.all_reduce(torch.ones(1), group=dist.group.WORLD)
    trace.step_ended()
    assert [span.of_world for span in tracer._spans if span.category == COMMUNICATION] == [
        False,
        True,
    ]


@pytest.mark.parametrize("stage", ["rollout", "eval"])
def test_collectives_of_the_engine_are_not_traced(
    make_tracer: Any, group: None, stage: str
) -> None:
    tracer = make_tracer(1, 1)
    with trace.span(stage, STAGE):
        dist.all_reduce(torch.ones(1))
    trace.step_ended()
    assert spans_of(tracer) == []


def test_threads_count_only_while_this_one_waits_for_autograd(
    make_tracer: Any, group: None
) -> None:
    tracer = make_tracer(1, 1)

    def elsewhere() -> None:
        with trace.span("elsewhere", MODEL):
            dist.all_reduce(torch.ones(1))

    def run() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with trace.span("train", STAGE):
        run()
        assert spans_of(tracer) == []
        with trace.span("backward", MODEL):
            run()
    trace.step_ended()
    assert spans_of(tracer) == [("all_reduce", "communication")]
    assert spans_of(tracer, MODEL) == [("backward", "backward")]
    assert tracer._steps[0].world == []


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Schedules that call as Megatron's do, on the stand-in that it has without CUDA."""
    module = types.ModuleType(SCHEDULES)
    source = """
def forward_step(tensor):
    torch.distributed.all_reduce(tensor)
    return tensor

def backward_step(tensor):
    torch.distributed.all_to_all_single(tensor, tensor.clone())
    dist_all_gather_func([tensor], tensor.clone())

def forward_backward(tensor):
    backward_func = backward_step
    backward_func(forward_step(tensor))
"""
    module.torch = _make_torch()  # type: ignore[attr-defined]
    module.dist_all_gather_func = dist.all_gather  # type: ignore[attr-defined]
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, SCHEDULES, module)
    return module


def test_passes_and_collectives_of_megatron_are_timed(
    make_tracer: Any, group: None, megatron: types.ModuleType
) -> None:
    before = dict(vars(megatron))
    tracer = make_tracer(1, 1, clock=itertools.count(0, 1).__next__)
    with trace.span("train", STAGE):
        megatron.forward_backward(torch.ones(2))
    trace.step_ended()
    assert dict(vars(megatron)) == before
    assert spans_of(tracer, MODEL) == [("forward", "forward"), ("backward", "backward")]
    assert [name for name, _ in spans_of(tracer)] == [
        "all_reduce",
        "all_to_all_single",
        "all_gather",
    ]
    # Readings 2 to 5 are the forward pass and the collective in it, 6 to 11 the backward pass.
    rows = tracer._steps[0].rows
    assert (rows["forward"], rows["backward"], rows["communication"]) == (2, 3, 3)


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


def test_exception_of_a_collective_is_passed_on_and_everything_restored(
    make_tracer: Any, group: None
) -> None:
    before = functions()
    tracer = make_tracer(1, 1)
    with pytest.raises((RuntimeError, TypeError, ValueError)), trace.span("train", STAGE):
        dist.all_reduce("no tensor")
    assert functions() != before
    dist.all_reduce(torch.ones(1))  # the next one is no part of the failed one
    assert [name for name, _ in spans_of(tracer)] == ["all_reduce", "all_reduce"]
    tracer.close()
    assert functions() == before


def test_failing_clock_ends_tracing_with_one_warning(
    make_tracer: Any, clock: FakeClock, group: None, caplog: pytest.LogCaptureFixture
) -> None:
    before = functions()
    readings = iter(range(3))
    tracer = make_tracer(2, 5, clock=readings.__next__, rank=3)
    results = []
    for _ in range(4):
        with trace.span("train", STAGE):
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            results.append(tensor.item())
        trace.step_ended()
        tracer.report()
    assert results == [1.0] * 4
    assert functions() == before
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == ["rank 3: tracing failed, training goes on: StopIteration: "]
    assert tracer._reported  # with all the others


def test_failing_installation_leaves_nothing_replaced(
    make_tracer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = functions()
    tracer = make_tracer(1, 1)

    def fail(original: Any) -> Any:
        raise OSError("no")

    monkeypatch.setattr(tracer._hooks, "_timed_wait", fail)
    with trace.span("train", STAGE):
        assert functions() == before
    assert "OSError: no" in caplog.text


def test_unwritable_folder_is_a_warning(
    make_tracer: Any, clock: FakeClock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    tracer = make_tracer(1, 1, folder=tmp_path / "file" / "trace")
    one_step(clock)
    tracer.report()
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1


# files


def check_chrome(events: list[dict[str, Any]]) -> None:
    """What a viewer needs: complete events, named processes and threads, nesting in a thread."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}  # begin, -end in nanoseconds
    for event in events:
        assert event["ph"] in ("M", "X")
        if event["ph"] == "M":
            continue
        assert event["pid"] in processes and (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
        times = round(1e3 * event["ts"]), -round(1e3 * (event["ts"] + event["dur"]))
        threads.setdefault((event["pid"], event["tid"]), []).append(times)
    for times_of_thread in threads.values():
        for one, other in itertools.combinations(sorted(times_of_thread), 2):
            assert other[0] >= -one[1] or -other[1] <= -one[1], (one, other)


def test_files_of_a_run(
    make_tracer: Any,
    clock: FakeClock,
    group: None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mcore_rl")
    folder = tmp_path / "run" / "trace"
    tracer = make_tracer(2, 9, folder=folder, label="tp0 pp0 dp0")
    for number in range(4):
        one_step(clock)
        tracer.report()
        assert folder.exists() == (number >= 2)
    names = {path.name for path in folder.iterdir()}
    assert names == {"rank0.json", "trace.json", "table.txt"}
    for name in ("rank0.json", "trace.json"):
        found = json.loads((folder / name).read_text())
        events = found["traceEvents"]
        check_chrome(events)
        process = next(e for e in events if e["name"] == "process_name")
        assert process["args"] == {"name": "rank 0 (tp0 pp0 dp0)"}
        rows = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
        assert rows == ["stages", "model", "communication"]
        complete = [e for e in events if e["ph"] == "X"]
        assert [e["name"] for e in complete if e["cat"] == "step"] == ["step 1", "step 2"]
        forward = next(e for e in complete if e["name"] == "forward")
        # The clock starts at 1000 ns; 100 of the first step, 10 rollout and 5 before it.
        assert (forward["ts"], forward["dur"], forward["tid"]) == (1.115, 0.02, 1)
    table = (folder / "table.txt").read_text()
    assert table.splitlines()[-1] == "bottleneck: backward, 30 % of the step"
    assert table.removesuffix("\n") in [record.message for record in caplog.records]


def test_merged_trace_has_a_process_for_each_rank(tmp_path: Path, clock: FakeClock) -> None:
    from mcore_rl.observe.trace.files import merge

    paths = []
    for rank in range(2):
        tracer = Tracer(1, first_step=0, num_steps_left=1, folder=tmp_path, rank=rank, clock=clock)
        tracer.start()
        one_step(clock)
        tracer.report()
        paths.append(tmp_path / f"rank{rank}.json")
    merge(paths, tmp_path / "both.json")
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    check_chrome(events)
    assert {event["pid"] for event in events} == {0, 1}


def test_run_that_ends_early_leaves_what_it_traced(
    make_tracer: Any, clock: FakeClock, tmp_path: Path
) -> None:
    tracer = make_tracer(5, 9)
    one_step(clock)
    one_step(clock)
    tracer.close()
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    check_chrome(events)
    assert [e["name"] for e in events if e.get("cat") == "step"] == ["step 1"]


def test_rank_that_failed_is_named_and_left_out(
    make_tracer: Any, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracer = make_tracer(1, 1)
    one_step(clock)
    gather = tracer._gather

    def of_two(written: Path | None) -> list[Any]:
        return [*gather(written), trace._Report("elsewhere", [], None, "OSError: disk full")]

    monkeypatch.setattr(tracer, "_gather", of_two)
    tracer.report()
    lines = (tmp_path / "table.txt").read_text().splitlines()
    assert lines[0] == "rank 1: OSError: disk full"
    assert lines[-1] == "bottleneck: backward, 30 % of the step"
    assert not (tmp_path / "trace.json").exists()  # another machine
