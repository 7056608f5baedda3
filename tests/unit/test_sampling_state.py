"""What a run that samples ahead counts, also across its checkpoints, and by which lengths it
chooses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from mcore_rl.batching.table import SampleTable
from mcore_rl.common.errors import UsageError
from mcore_rl.rollout.admission import AdmissionCounts
from mcore_rl.rollout.sampler import length_bias
from mcore_rl.rollout.sampling_state import AheadMetrics, SamplingState, StepCounts


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def table(*lengths: int) -> SampleTable:
    return SampleTable.of_lengths(np.ones(len(lengths), np.int64), np.array(lengths))


def admitted(started: int, uninformative: int, stale: int) -> AdmissionCounts:
    """All that are replaced but the first are filtered."""
    reasons = {"short": uninformative - 1} if uninformative > 1 else {}
    return AdmissionCounts(started, uninformative, stale, 0, 0, reasons)


def counted(metrics: AheadMetrics, now: AdmissionCounts) -> list[float]:
    """Started, replaced, stale and filtered groups in the metrics of a step."""
    found = metrics.of_step(table(3), 1, now, [], 0.0)
    names = ("started", "uninformative", "stale")
    short = found.get("rollout/filtered/short", 0)
    return [*(found[f"rollout/{name}_groups"] for name in names), short]


def test_a_resumed_run_counts_the_groups_since_the_last_step_of_the_one_before(
    tmp_path: Path,
) -> None:
    before = AheadMetrics()
    assert counted(before, admitted(12, 2, 0)) == [12, 2, 0, 1]
    later = admitted(17, 5, 1)  # at the checkpoint
    SamplingState(20, {19: 3}, 3, before.since(later)).write(tmp_path)
    state = SamplingState.read(tmp_path, 0)
    uncounted = {"filtered/short": 3, "started_groups": 5, "uninformative_groups": 3}
    assert state == SamplingState(20, {19: 3}, 3, {**uncounted, "stale_groups": 1})
    after = AheadMetrics(uncounted=state.uncounted)
    assert counted(after, admitted(4, 1, 0)) == [9, 4, 1, 3]
    assert counted(after, admitted(6, 1, 2)) == [2, 0, 2, 0]
    assert counted(before, later) == [5, 3, 1, 3], "as if there had been no checkpoint"


def test_a_step_that_is_repeated_is_counted_again() -> None:
    metrics = AheadMetrics(uncounted={"started_groups": 1, "uninformative_groups": 1})
    assert counted(metrics, admitted(4, 0, 0)) == [5, 1, 0, 0]
    assert counted(metrics, admitted(9, 2, 1)) == [5, 2, 1, 1]
    metrics.undo()
    found = metrics.since(admitted(11, 2, 1))
    assert [found["started_groups"], found["filtered/short"], found["stale_groups"]] == [7, 1, 1]


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    state = SamplingState(20, {19: 3}, 3)
    state.write(tmp_path)
    file = tmp_path / "ahead.json"
    facts = json.loads(file.read_text())
    del facts["uncounted"]
    file.write_text(json.dumps(facts))
    assert SamplingState.read(tmp_path, 0) == state
    file.write_text(json.dumps({**facts, "uncounted": [5, 3, 1]}))
    counts = {"started_groups": 5, "uninformative_groups": 3, "stale_groups": 1}
    assert SamplingState.read(tmp_path, 0).uncounted == counts


@pytest.mark.parametrize(
    "wrong", [3, [1, 2], [1, 2, -1], [1, 2, 0.5], "123", {"filtered/a b": 1}, {"x": -1}]
)
def test_other_counts_are_refused(tmp_path: Path, wrong: object) -> None:
    facts = {"next_draw": 20, "outstanding": {}, "weight_version": 3, "uncounted": wrong}
    (tmp_path / "ahead.json").write_text(json.dumps(facts))
    with pytest.raises(UsageError, match=r"ahead\.json"):
        SamplingState.read(tmp_path, 0)


def test_dropped_groups_count_in_the_length_bias_with_their_tokens_so_far() -> None:
    dropped = StepCounts(left_samples=2, left_tokens=50)
    assert length_bias(table(4, 6), dropped) == 5 - (4 + 6 + 50) / 4
    assert length_bias(table(4, 6), StepCounts()) == 0.0
