"""Tracing: spans, the table, and the files of one process."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from mcore_rl.common import objects, spans
from mcore_rl.common.spans import (
    COLLECTIVE,
    PART,
    PASS,
    STAGE,
    WORLD,
    MegatronTimers,
    Span,
    events_of,
    span,
)
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.observe.trace import Tracer, merge
from mcore_rl.observe.trace_table import (
    TracedStep,
    exclusive_times,
    table_of,
    traced_step,
    with_rows,
    with_waiting_apart,
)

MakeTracer = Callable[..., Tracer]


@pytest.fixture
def make_tracer(tmp_path: Path) -> Iterator[MakeTracer]:
    made: list[Tracer] = []

    def make(num_steps: int, num_steps_left: int = 100, **settings: Any) -> Tracer:
        defaults: dict[str, Any] = {"first_step": 0, "rank": 0, "folder": tmp_path}
        made.append(Tracer(num_steps, num_steps_left=num_steps_left, **{**defaults, **settings}))
        made[-1].start()
        return made[-1]

    yield make
    for tracer in made:
        tracer.close()


# the table


def test_exclusive_times_match_a_count_of_moments():
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(0, 200, (40, 2), generator=generator).tolist()
    found = sorted((start, start + length // 3, i) for i, (start, length) in enumerate(starts))
    slow: dict[str, int] = {}
    for moment in range(20, 180):
        running = [i for start, end, i in found if start <= moment < end]
        row = f"row {running[-1] % 7}" if running else "idle"
        slow[row] = slow.get(row, 0) + 1
    named = [(f"row {i % 7}", start, end) for start, end, i in found]
    times = exclusive_times(named, 20, 180)
    assert {row: spent for row, spent in times.items() if spent} == slow


@pytest.mark.parametrize(
    ("name", "kind", "stage", "row"),
    [
        ("own stage of a fork", STAGE, None, "own stage of a fork"),
        ("reward", STAGE, "rollout", "reward"),
        ("forward", PASS, "train", "forward"),
        ("forward", PASS, "log_probs", "log_probs"),
        ("ncclDevKernel_AllReduce", COLLECTIVE, "train", "communication"),
        ("ncclDevKernel_AllReduce", COLLECTIVE, "log_probs", "log_probs"),
        ("barrier", WORLD, None, "communication"),
        ("broadcast", WORLD, "reshard_to_rollout", "reshard_to_rollout"),
    ],
)
def test_row_of_a_span(name, kind, stage, row):
    found = [Span("before", STAGE, 0, 10), Span(name, kind, 12, 14)]
    found += [Span(stage, STAGE, 11, 20)] if stage else []
    assert with_rows(found)[-1][0] == row


def test_step_of_nested_spans():
    found = [
        Span("rollout", STAGE, 0, 20),
        Span("first responses", PART, 5, 18),
        Span("train", STAGE, 20, 90),
        Span("forward", PASS, 25, 45),
        Span("all-grads-sync", COLLECTIVE, 30, 40),
        Span("optimizer", PASS, 50, 60),
        Span("barrier", WORLD, 70, 75),
        Span("barrier", WORLD, 110, 120),  # of the next step
    ]
    step = traced_step(11, found, 0, 100)
    assert step.rows == {
        "rollout": 20, "train": 35, "forward": 10, "communication": 15, "optimizer": 10, "idle": 10
    }  # fmt: skip
    assert step.world == [("communication", 5)]


def traced(rows: dict[str, int], *world: tuple[str, int], number: int = 2) -> TracedStep:
    second = 10**9
    waits = [(row, value * second) for row, value in world]
    return TracedStep(number, {row: value * second for row, value in rows.items()}, waits)


def test_waiting_for_the_slowest_rank_is_idle():
    fast = traced({"rollout": 2, "reward": 9, "idle": 0}, ("reward", 8))
    slow = traced({"rollout": 9, "reward": 2, "idle": 0}, ("reward", 1))
    found = with_waiting_apart([fast, slow])
    assert found[0] == {"rollout": 2 * 10**9, "reward": 2 * 10**9, "idle": 7 * 10**9}
    assert found[1] == {"rollout": 9 * 10**9, "reward": 2 * 10**9, "idle": 0}


def test_ranks_with_different_waits_are_unchanged():
    ranks = [traced({"reward": 5}, ("reward", 4)), traced({"reward": 5})]
    assert with_waiting_apart(ranks) == [{"reward": 5 * 10**9}] * 2


def cells(table: str) -> dict[str, list[str]]:
    lines = [line.strip("│┃║").split("│") for line in table.splitlines() if "│" in line]
    return {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}


def test_table_has_means_extremes_and_shares():
    rank_0 = [
        traced({"rollout": 6, "forward": 1, "communication": 2, "idle": 1}),
        traced({"rollout": 8, "forward": 1, "idle": 1}, number=3),
    ]
    rank_1 = [
        traced({"rollout": 4, "forward": 3, "communication": 2, "idle": 1}),
        traced({"rollout": 6, "forward": 3, "idle": 1}, number=3),
    ]
    table = table_of([rank_0, rank_1])
    # step 2, step 3, mean, min rank, max rank, share
    assert cells(table) == {
        "rollout": ["5.000", "7.000", "6.000", "5.000", "7.000", "60.0%"],
        "forward": ["2.000", "2.000", "2.000", "1.000", "3.000", "20.0%"],
        "communication": ["2.000", "-", "1.000", "1.000", "1.000", "10.0%"],
        "idle": ["1.000", "1.000", "1.000", "1.000", "1.000", "10.0%"],
        "step": ["10.000", "10.000", "10.000", "10.000", "10.000", "100.0%"],
    }
    assert table.splitlines()[-1] == "bottleneck: rollout, 60% of the step"


def test_idle_bottleneck_names_the_slowest_stage():
    fast = traced({"rollout": 1, "reward": 9}, ("reward", 9))
    slow = traced({"rollout": 9, "reward": 1}, ("reward", 1))
    last = table_of([[fast], [fast], [fast], [slow]]).splitlines()[-1]
    assert last.startswith("bottleneck: idle, 60% of the step")
    assert "rollout: 9.000 s on the slowest, 3.000 s on average" in last


def test_table_of_many_steps_fits_a_page():
    table = table_of([[traced({"rollout": 6, "idle": 4}, number=n) for n in range(2, 12)]])
    assert "steps 2 to 11" in table and "step 7" in table and "step 8 " not in table
    assert max(map(len, table.splitlines())) <= 160


# spans


def test_span_is_recorded_only_while_a_recording_runs(tmp_path):
    with span("before"):
        pass
    recording = spans.Recording()
    recording.start()
    with pytest.raises(KeyError), span("fails", STAGE):
        raise KeyError
    with span("data", STAGE):
        time.sleep(0.01)
    recording.stop(tmp_path)
    with span("after"):
        pass
    [found] = recording.spans
    assert (found.name, found.kind) == ("data", STAGE)
    assert 10**7 <= found.end - found.start < 600 * 10**9


def test_waits_for_all_ranks_are_distinguished_from_those_for_a_group(world_of_one, tmp_path):
    recording = spans.Recording()
    recording.start()
    assert objects.all_gather("one") == ["one"]
    objects.all_gather("one", group=dist.group.WORLD)
    objects.barrier()
    recording.stop(tmp_path)
    assert [(found.name, found.kind) for found in recording.spans] == [
        ("all_gather_object", WORLD),
        ("all_gather_object", COLLECTIVE),
        ("barrier", WORLD),
    ]


def test_schedule_of_megatron_is_recorded_by_its_timers(tmp_path):
    megatron_adapter.prepare()
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    from megatron.core.model_parallel_config import ModelParallelConfig

    config = ModelParallelConfig(timers=MegatronTimers())
    weight = torch.ones(3, requires_grad=True)
    recording = spans.Recording()
    recording.start()
    config.timers("forward-backward", log_level=1).start(barrier=True)
    schedules.backward_step(None, (weight * 2).sum(), None, config)
    config.timers("forward-backward").stop()
    config.timers("all-grads-sync", log_level=1).start(barrier=True)
    config.timers("all-grads-sync").stop()
    recording.stop(tmp_path)
    assert weight.grad is not None and weight.grad.tolist() == [2.0] * 3
    assert [(found.name, found.kind) for found in recording.spans] == [
        ("backward", PASS),
        ("forward and backward", PART),
        ("all-grads-sync", COLLECTIVE),
    ]


def test_events_of_torch_have_the_clock_of_spans(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = time.time_ns() / 1e3
        with record_function("an event"):
            time.sleep(0.01)
        end = time.time_ns() / 1e3
    [event] = [e for e in events_of(profiler, tmp_path) if e["name"] == "an event"]
    # Both clocks agree within microseconds on an idle machine.
    assert start - 1e5 < event["ts"] and event["ts"] + event["dur"] < end + 1e5
    assert not list(tmp_path.iterdir())


class FakeProfile:
    """torch.profiler on a machine with a GPU: it exports one NCCL kernel, from 1 to 3 s."""

    def __init__(self, activities: list[ProfilerActivity]) -> None:
        assert activities == [ProfilerActivity.CUDA]
        self.toggled: list[bool] = []
        profiles.append(self)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def toggle_collection_dynamic(self, wanted: bool, activities: list[ProfilerActivity]) -> None:
        assert activities == [ProfilerActivity.CUDA]
        self.toggled.append(wanted)

    def export_chrome_trace(self, path: str) -> None:
        times = {"ph": "X", "pid": 0, "tid": 7, "ts": 0.0, "dur": 2e6}
        kernel = {"name": "ncclDevKernel_AllReduce", "cat": "kernel", **times}
        whole = {"name": "PyTorch Profiler (0)", "cat": "Trace", **times}
        trace = {"baseTimeNanoseconds": 10**9, "traceEvents": [kernel, whole]}
        Path(path).write_text(json.dumps(trace))


profiles: list[FakeProfile] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles.clear()
    monkeypatch.setattr(spans, "profile", FakeProfile)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_kernels_of_a_rollout_are_left_out(gpu, tmp_path):
    recording = spans.Recording()
    recording.start()
    with span("train", STAGE):
        pass
    with span("rollout", STAGE):
        assert profiles[0].toggled == [False]
    assert profiles[0].toggled == [False, True]
    [event] = recording.stop(tmp_path)
    assert (event["name"], event["ts"]) == ("ncclDevKernel_AllReduce", 1e6)


def test_kernels_of_collectives_are_communication(gpu, make_tracer, tmp_path, monkeypatch):
    clock = iter([0, 0, 10**9, 4 * 10**9, 5 * 10**9])
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    tracer = make_tracer(1, 1)
    with span("train", STAGE):
        pass
    tracer.end_step()
    rows = cells((tmp_path / "table.txt").read_text())
    assert {name: row[0] for name, row in rows.items()} == {
        "train": "1.000", "communication": "2.000", "idle": "2.000", "step": "5.000"
    }  # fmt: skip
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    assert "ncclDevKernel_AllReduce" in [event["name"] for event in events]


def test_clock_that_is_set_back_moves_no_span(monkeypatch, tmp_path):
    recording = spans.Recording()
    recording.start()
    started = recording.now()
    with span("train"):
        now = time.time_ns() - 3600 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: now)
    recording.stop(tmp_path)
    [found] = recording.spans
    assert started < found.start < found.end < started + 60 * 10**9


def test_failing_profiler_loses_only_the_kernels(gpu, make_tracer, tmp_path, monkeypatch, caplog):
    def fail(self: FakeProfile, *args: Any) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(FakeProfile, "toggle_collection_dynamic", fail)
    tracer = make_tracer(1, 1)
    run_step(tracer)
    [warning] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "no CUPTI" in warning
    assert "rollout" in (tmp_path / "table.txt").read_text()


# the tracer


def run_step(tracer: Tracer) -> None:
    """A step as training makes it."""
    timers = StageTimers()
    with timers("rollout"), span("first responses"):
        time.sleep(0.001)
    with timers("train"):
        with span("forward", PASS):
            time.sleep(0.001)
        with span("optimizer", PASS):
            time.sleep(0.001)
    tracer.end_step()


@pytest.mark.parametrize(
    ("num_steps", "left", "steps"),
    [(2, 4, [11, 12]), (2, 2, [10, 11]), (5, 2, [10, 11])],
    ids=["first one warms up", "whole run", "more than the run has"],
)
def test_traced_steps_follow_the_warm_up(make_tracer, tmp_path, num_steps, left, steps, caplog):
    caplog.set_level(logging.INFO, "mcore_rl")
    tracer = make_tracer(num_steps, left, first_step=10)
    for _ in range(left):
        run_step(tracer)
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e.get("cat") == "step"] == [f"step {n}" for n in steps]
    assert f"steps {steps[0]} to {steps[-1]}" in caplog.records[0].message
    rows = cells((tmp_path / "table.txt").read_text())
    assert list(rows) == ["rollout", "train", "forward", "optimizer", "idle", "step"]
    assert all(float(rows[name][0]) > 0 for name in ("rollout", "forward", "optimizer"))


@pytest.mark.parametrize(("num_steps", "left"), [(0, 5), (3, 0)])
def test_no_steps_write_no_files(make_tracer, tmp_path, num_steps, left):
    run_step(make_tracer(num_steps, left))
    assert not any(tmp_path.iterdir())


def check_chrome(events: list[dict[str, Any]], ranks: set[int]) -> None:
    """What a viewer needs: complete events of named processes, nesting in a thread."""
    assert {e["pid"] for e in events if e["name"] == "process_name"} == ranks
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}  # begin, -end in microseconds
    for event in events:
        assert event["ph"] in ("M", "X") and event["pid"] in ranks
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0 and event["dur"] >= 0 and event["name"] and event["cat"]
        times = round(event["ts"]), -round(event["ts"] + event["dur"])
        threads.setdefault((event["pid"], event["tid"]), []).append(times)
    for times_of_thread in threads.values():
        for one, other in itertools.combinations(sorted(times_of_thread), 2):
            assert other[0] >= -one[1] or -other[1] <= -one[1], (one, other)


def test_run_writes_traces_and_table(make_tracer, world_of_one, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mcore_rl")
    folder = tmp_path / "run" / "trace"
    tracer = make_tracer(2, 9, folder=folder, label="tp0 pp0 dp0")
    for number in range(4):
        run_step(tracer)
        assert folder.exists() == (number >= 2)
    assert {path.name for path in folder.iterdir()} == {"rank0.json", "trace.json", "table.txt"}
    for name in ("rank0.json", "trace.json"):
        events = json.loads((folder / name).read_text())["traceEvents"]
        check_chrome(events, {0})
        process = next(e for e in events if e["name"] == "process_name")
        assert process["args"] == {"name": "rank 0 (tp0 pp0 dp0)"}
        at = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
        step, train, forward = at["step 2"], at["train"], at["forward"]
        assert step[0] <= train[0] <= forward[0] <= forward[1] <= train[1] <= step[1]
        rollout, responses = at["rollout"], at["first responses"]
        assert rollout[0] <= responses[0] <= responses[1] <= rollout[1]
    table = (folder / "table.txt").read_text()
    assert table.splitlines()[-1].startswith("bottleneck: ")
    assert table.removesuffix("\n") in [record.message for record in caplog.records]


def test_merged_trace_has_a_process_for_each_rank(make_tracer, tmp_path):
    for rank in range(2):
        run_step(make_tracer(1, 1, rank=rank))
    events = json.loads(merge([tmp_path / "rank0.json", tmp_path / "rank1.json"]))["traceEvents"]
    check_chrome(events, {0, 1})


def test_ranks_of_several_machines_are_in_one_table_without_a_merged_trace(
    make_tracer, world_of_one, tmp_path, monkeypatch
):
    def two_machines(mine: Any) -> list[Any]:
        return [mine, ("another machine", mine[1])]

    monkeypatch.setattr(objects, "all_gather", two_machines)
    run_step(make_tracer(1, 1))
    assert (tmp_path / "table.txt").exists() and not (tmp_path / "trace.json").exists()


def test_run_that_ends_early_leaves_what_it_traced(make_tracer, tmp_path):
    tracer = make_tracer(5, 9)
    run_step(tracer)
    run_step(tracer)
    tracer.close()
    events = json.loads((tmp_path / "rank0.json").read_text())["traceEvents"]
    check_chrome(events, {0})
    assert "step 1" in [e["name"] for e in events if e.get("cat") == "step"]


def test_unwritable_folder_is_a_warning(make_tracer, tmp_path, caplog):
    (tmp_path / "file").touch()
    run_step(make_tracer(1, 1, folder=tmp_path / "file" / "trace"))
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings and all("training continues" in warning for warning in warnings)
