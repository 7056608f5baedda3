"""The saver of a run, the state that a resume reads, and the module of `-m mcore_rl.train`."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import runpy
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save as save_checkpoint

from mcore_rl import train
from mcore_rl.common import exits
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.data.demonstrations import Demonstrations
from mcore_rl.data.prompt_cache import SCHEMA
from mcore_rl.data.prompts import PromptSources
from mcore_rl.data.source_position import Begin, changes_between, continued
from mcore_rl.job import start as start_module
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.rng import RngState
from mcore_rl.observe.stage_timers import StageTimers
from mcore_rl.rollout.branch import Branch
from mcore_rl.rollout.sampling_state import SamplingState, write_groups
from mcore_rl.rollout.segments import OpenGroup
from mcore_rl.trainer import saver as saver_module
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.point import (
    log_dropped,
    lost_reference,
    misplaced_optimizer,
    warn_of_other_demonstrations,
    with_known_prompts,
)
from mcore_rl.trainer.resume.save_rule import MINUTES, SaveRule, scores_of
from mcore_rl.trainer.resume.trainer_state import (
    LOADED,
    TrainerState,
    load_trainer_state,
    read_facts,
    read_random_states,
    read_trainer_state,
)
from mcore_rl.trainer.saver import RunSaver
from tests.prompt_tables import sources
from tests.unit.test_checkpoint_folders import save


class CriticOnDisk:
    def save(self, num_steps: int, checkpoints: Path) -> None:
        save(folders.critic_folder(checkpoints), num_steps)

    def has_saved(self, *, waits: bool) -> bool:
        return True


class Checkpoint:
    """An empty checkpoint of the actor; in the background only `waits` completes it."""

    in_background = False

    def __init__(self, folder: Path, step: int, _: object, *, is_rolling: bool) -> None:
        self.complete = functools.partial(save, folder, step, is_rolling=is_rolling)

    def advance(self, *, waits: bool) -> bool:
        if waits or not self.in_background:
            self.complete()
        return waits or not self.in_background


@pytest.fixture
def make_saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunSaver]:
    """Make the saver of a run whose actor and critic write empty checkpoints, with a value for each
    flag."""
    monkeypatch.setattr(saver_module, "begin_checkpoint", Checkpoint)
    monkeypatch.setattr(saver_module.background, "reserve", lambda state: None)
    monkeypatch.setattr(RunSaver, "_writers", lambda *_: [])
    monkeypatch.setattr(saver_module.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saver_module.objects, "broadcast", lambda mine: mine)
    return functools.partial(saver_in, tmp_path)


def saver_in(
    folder: Path,
    *,
    interval: int | None = None,
    retain: int | None = None,
    is_async: bool = False,
    loaded: int | None = None,
    branch: Branch | None = None,
    saved: Callable[[], object] = lambda: None,
) -> RunSaver:
    nothing: dict[str, Any] = dict.fromkeys(("prompts", "eval_prompts"))
    args = Namespace(save=str(folder), save_retain_interval=retain, async_save=is_async)
    args.load, args.ckpt_step = (None, None) if loaded is None else (str(folder), loaded)
    spec = SimpleNamespace(save_interval=interval)
    config = RLConfig.of(run_dir=str(folder))
    return RunSaver(
        SimpleNamespace(args=args, config=config, spec=spec),  # type: ignore[arg-type]
        state=SimpleNamespace(iteration=0),  # type: ignore[arg-type]
        learner=SimpleNamespace(critic=CriticOnDisk()),  # type: ignore[arg-type]
        rollouts=SimpleNamespace(saved=saved),  # type: ignore[arg-type]
        timers=StageTimers(),
        has_loaded=False,
        began_with="",
        branch=branch,
        day="2026-01-01",
        log=None,
        **nothing,
    )


@pytest.fixture
def saver(make_saver: Callable[..., RunSaver]) -> RunSaver:
    return make_saver(interval=10, retain=100)


def steps(folder: Path) -> tuple[list[int], list[int]]:
    critic = folders.critic_folder(folder)
    return folders.complete_steps(folder), folders.complete_steps(critic)


def test_older_checkpoints_of_both_are_removed(tmp_path, saver):
    for step in (9, 19, 99, 109, 119):
        saver.save_if_due(step)
    assert steps(tmp_path) == ([120, 100], [120, 100])


@pytest.mark.parametrize(
    ("scores", "loaded", "deleted"),
    [
        ({}, None, [10, 20, 30]),
        ({}, 20, [10, 30]),
        # The last evaluation up to a checkpoint counts for it; that of step 31 is of 40 alone.
        ({0: 0.1, 20: 0.7, 31: 0.5}, None, [10, 20]),
        ({0: 0.9, 20: 0.7, 31: 0.5}, None, [20, 30]),
        ({25: 0.9, 50: 0.95}, None, [10, 20, 30]),
        ({60: 1.0}, None, [10, 20, 30]),  # no checkpoint has it
    ],
)
def test_newest_loaded_and_best_checkpoints_stay(scores, loaded, deleted):
    complete = [10, 20, 30, 40, 50]
    assert SaveRule().surplus(complete, complete, scores, loaded=loaded) == deleted
    # Others than the marked ones are never deleted, nor any with --save-interval.
    marked = SaveRule().surplus(complete, [20], scores, loaded=loaded)
    assert marked == sorted({20} & {*deleted})
    assert not SaveRule(interval=10).surplus(complete, complete, scores, loaded=loaded)
    assert SaveRule(10, 100).surplus(complete, [], scores, loaded=loaded) == [40]
    assert not SaveRule(10, 20).surplus(complete, complete, scores, loaded=loaded)


def test_best_evaluation_is_the_highest_accuracy_or_the_lowest_loss():
    metrics = {0: {"eval/accuracy": 0.5, "loss": 1.0}, 3: {"loss": 0.5}, 4: {"eval/loss": 2.0}}
    assert scores_of(metrics | {5: {"eval/loss": float("nan")}}) == {0: 0.5, 4: -2.0}


def evaluated(folder: Path, **accuracies: float) -> None:
    """Write metrics with these evaluations, `at_3=0.5` for instance."""
    lines = [{"step": int(at[3:]), "eval/accuracy": value} for at, value in accuracies.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_saves_go_by_time_and_keep_the_newest_the_best_and_the_loaded(
    tmp_path, make_saver, monkeypatch, caplog
):
    now = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    save(tmp_path, 7)  # by a run with --save-interval
    saver = make_saver()
    for step in range(10, 16):
        now += 60 * MINUTES - 1
        saver.save_if_due(2 * step)  # not yet due
        now += 1
        saver.save_if_due(2 * step + 1)
    assert steps(tmp_path) == ([32, 30, 7], [32, 30])
    evaluated(tmp_path, at_0=0.9, at_31=0.5)  # that of step 0 counts for 7 and 30
    saver = make_saver(loaded=32)
    for step in (40, 50, 60):
        now += 60 * MINUTES
        saver.save_if_due(step)
    assert steps(tmp_path)[0] == [61, 51, 32, 30, 7]
    monkeypatch.setattr(folders, "remove", read_only)
    saver.save(70)
    assert "the checkpoint of step 51 stays: [Errno 30]" in caplog.text


def read_only(*_: object) -> None:
    raise OSError(30, "Read-only file system")


def test_save_in_the_background_is_completed_by_a_later_one(tmp_path, make_saver, monkeypatch):
    """Until then neither the bank nor an older checkpoint loses anything."""
    monkeypatch.setattr(Checkpoint, "in_background", True)
    saved: list[list[int]] = []
    note = lambda: saved.append(steps(tmp_path)[0])  # noqa: E731
    saver = make_saver(interval=10, is_async=True, saved=note)
    saver.save_if_due(9)
    saver.save_if_due(12)
    assert steps(tmp_path) == ([], [10]) and not saved
    saver.save_if_due(19)
    assert steps(tmp_path) == ([10], [20, 10]) and saved == [[10]]
    saver.save(20)  # as at the end of a run: completes it, and does not write it again
    assert steps(tmp_path)[0] == [20, 10] and saved == [[10], [20, 10]]


def test_bank_knows_of_a_checkpoint_before_groups_are_removed(tmp_path, make_saver):
    """Otherwise a start from an earlier one could find the groups that are left."""
    known = []
    branch = Branch("6f1c", 0)
    saved = lambda: known.append(Branch.of_start(tmp_path / "bank", "6f1c", 19).name)  # noqa: E731
    saver = make_saver(interval=10, retain=100, branch=branch, saved=saved)
    branch.write(tmp_path / "bank")
    assert Branch.of_start(tmp_path / "bank", "6f1c", 0) == branch
    saver.save(20)
    assert Branch.of_start(tmp_path / "bank", "6f1c", 20) == Branch("6f1c", 20)
    assert len(known) == 1 and known != ["6f1c"]


def test_failed_save_of_the_actor_keeps_a_step_of_both(tmp_path, saver, monkeypatch):
    """The critic saves first."""
    saver.save(10)

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(saver_module, "begin_checkpoint", full)
    with pytest.raises(RuntimeError, match="No space left"):
        saver.save(20)
    assert steps(tmp_path) == ([10], [20, 10])


@pytest.mark.parametrize(
    ("began_with", "reason"),
    [
        ("ab12", ""),
        ("cd34", "--rl-hf-checkpoint hf/model has other weights"),
        (LOADED, "with the weights of a Megatron checkpoint and without a KL"),
        ("", "an earlier version of mcore_rl wrote it"),
    ],
)
def test_reference_with_other_weights_than_at_the_start_is_refused(began_with, reason):
    found = lost_reference(TrainerState(3, "TP1", began_with=began_with), "ab12", Path("hf/model"))
    assert reason in found and bool(reason) == bool(found)


def stored(content: bytes) -> torch.Tensor:
    """A row as it is stored: its length and its bytes."""
    data = bytearray(len(content).to_bytes(8, "little") + content)
    return torch.frombuffer(data, dtype=torch.uint8)


def row_of(facts: dict[str, Any]) -> torch.Tensor:
    return stored(json.dumps(facts).encode())


def test_state_of_an_older_version_is_read_unless_a_field_is_missing():
    facts = dataclasses.asdict(TrainerState(3, "TP1", weight_version=7, began_with="ab12"))
    assert read_facts(row_of(facts), Path("there")).began_with == "ab12"
    del facts["began_with"]
    assert read_facts(row_of(facts), Path("there")) == TrainerState(3, "TP1", weight_version=7)
    del facts["weight_version"]
    with pytest.raises(RuntimeError, match="another version .* \\['weight_version'\\] less"):
        read_facts(row_of(facts), Path("there"))


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        *(("step", value) for value in ("3", True, None, 0.5, -1, 10**30)),
        *(("date", value) for value in ("tomorrow", "2026-13-01", "20260101")),
        *(("layout", value) for value in (None, 3, ["TP1"])),
        *(("kl_controller", value) for value in (None, [], {"a": "b"}, {"a": float("nan")})),
        ("optimizer_by_parameter", 1),
        *(("sources_drawn", value) for value in (None, [], {"a": "b"}, {"a": -1}, {"a": 0.5})),
    ],
)
def test_state_with_invalid_values_is_refused(fact, value):
    facts = dataclasses.asdict(TrainerState(3, "TP1")) | {fact: value}
    with pytest.raises(UsageError, match=f"there does not hold .*{fact}.*load another"):
        read_facts(row_of(facts), Path("there"))


def resumed_with(before: PromptSources, now: PromptSources, choice: str) -> TrainerState:
    state = TrainerState(3, "TP1", prompts=before.fingerprint).drawing(12, before.begin)
    stored_state = read_facts(row_of(dataclasses.asdict(state)), Path("there"))
    assert stored_state == state
    config = RLConfig.of(prompts="a.jsonl,b.jsonl", on_changed_prompts=choice)
    return with_known_prompts(stored_state, config, now, None)


def test_other_sources_need_a_choice_which_keeps_or_drops_positions():
    def of(**sizes: int) -> PromptSources:
        return sources(sizes, per_step=4)

    before, now = of(a=6, b=6), of(a=6, b=6, c=12)
    with pytest.raises(UsageError, match="step 3 .*'c' is new.*restart, .*continue") as refusal:
        resumed_with(before, now, "stop")
    assert refusal.value.flag == "--rl-prompts a.jsonl,b.jsonl"
    assert resumed_with(before, now, "restart") == dataclasses.replace(
        TrainerState(3, "TP1", prompts=before.fingerprint), sampler_position=0
    )
    state = resumed_with(before, now, "continue")
    assert (state.sampler_position, state.begin) == (12, Begin(12, {"a": 6, "b": 6}))
    # A second time, from the checkpoint of that run.
    again = resumed_with(now.begun(state.begin), of(a=6, b=6), "continue")
    assert again.begin == Begin(12, {"a": 6, "b": 6})
    # Nothing has changed: no choice is asked for.
    same = resumed_with(now.begun(state.begin), now, "stop")
    assert (same.sampler_position, same.begin) == (12, state.begin)
    other_step = sources({"a": 6, "b": 6}, per_step=8)
    with pytest.raises(UsageError, match="a step has 8 prompts of all, and had 4"):
        resumed_with(before, other_step, "stop")


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_says_that_prompts_are_others(rank: int, monkeypatch, caplog) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    resumed_with(sources({"a": 6}), sources({"a": 7}), "restart")
    assert [record.getMessage() for record in caplog.records] == [
        "[Resume] --rl-prompts are others than before: they begin with the first"
    ] * (rank == 0)


@pytest.mark.parametrize("before", ["the same", "others", "none"])
def test_other_demonstrations_beside_a_resumed_run_are_noticed(before: str, caplog) -> None:
    rows = Demonstrations(SCHEMA.empty_table(), 64)
    known = {"the same": rows.fingerprint, "others": rows.fingerprint + "0", "none": ""}
    state = TrainerState(3, "TP1", demonstrations=known[before])
    stored_state = read_facts(row_of(dataclasses.asdict(state)), Path("there"))
    warn_of_other_demonstrations(stored_state, rows)
    warns = "--rl-sft-demonstrations are others than before step 3" in caplog.text
    assert warns == (before == "others")


@pytest.mark.parametrize("text", ["", "{", "[]", "[4, [[1, 2]]]", '[0, [["a", 1, "x"]]]', "[4, 5]"])
def test_sources_of_an_unreadable_checkpoint_begin_again(text):
    now = sources({"a": 6, "b": 6})
    assert continued(f"sources:{text}", Begin(), 12, now.fingerprint) == Begin(12)
    assert changes_between(f"sources:{text}", now.fingerprint) == "'a' is new, 'b' is new"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"[" * 100_000, b"\xff"])
def test_malformed_state_is_refused(content):
    with pytest.raises(UsageError, match="there does not hold the state of a trainer"):
        read_facts(stored(content), Path("there"))


@pytest.mark.parametrize(
    "tensors",
    [
        {"facts": b"{}"},
        {"facts": torch.zeros((), dtype=torch.uint8)},
        {"facts": torch.zeros(8, dtype=torch.uint8)},
        {"facts": torch.zeros((0, 8), dtype=torch.uint8)},
        {"random_states": torch.zeros((1, 8), dtype=torch.uint8)},
    ],
    ids=["an object", "a number", "one row", "no rows", "nothing"],
)
def test_checkpoint_without_rows_of_facts_is_refused(tensors, tmp_path):
    save_checkpoint(tensors, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(UsageError, match=r"does not hold the state of a trainer .*facts"):
        read_trainer_state(tmp_path)


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"facts": torch.zeros(8, dtype=torch.uint8)},
        {"facts": torch.zeros(0, 8, dtype=torch.uint8)},
        {"facts": torch.zeros(1, 8)},
    ],
)
def test_malformed_rows_are_refused(rows, monkeypatch):
    monkeypatch.setattr(megatron_checkpoint, "load_tensors", lambda folder: rows)
    with pytest.raises(UsageError, match="there does not hold the state of a trainer .*facts"):
        load_trainer_state(Path("there"))


def mutated_states() -> dict[str, dict[str, torch.Tensor]]:
    """The states of this process's generators, each time with one change."""
    sound = RngState.capture().to_tensors()
    position = sound["numpy/position"]
    changes: dict[str, dict[str, torch.Tensor | None]] = {
        # Python's generator keeps the second number of a pair only at times.
        **{f"no {name}": {name: None} for name in sound if name != "python/gauss"},
        **{f"short {name}": {name: value[:-1]} for name, value in sound.items()},
        **{f"wide {name}": {name: value[None]} for name, value in sound.items()},
        **{f"other dtype of {name}": {name: value.half()} for name, value in sound.items()},
        "zeros": {"cpu": torch.zeros_like(sound["cpu"])},
        "more": {"unknown": torch.zeros(1)},
        "beyond": {"numpy/position": position + torch.tensor([10**6, 0])},
        "before": {"numpy/position": position - torch.tensor([10**6, 0])},
        "negative words": {"python/words": -sound["python/words"] - 1},
        "large words": {"numpy/keys": sound["numpy/keys"] + (1 << 32)},
        "device": {"device/0": torch.zeros(7)},
        "tracker": {"tracker/model-parallel-rng": torch.zeros(2, 2, dtype=torch.uint8)},
    }
    return {
        what: {name: value for name, value in (sound | change).items() if value is not None}
        for what, change in changes.items()
    }


def test_invalid_random_states_are_refused():
    random.gauss(0, 1)
    sound = RngState.capture().to_tensors()
    before = {name: value.clone() for name, value in sound.items()}
    found = read_random_states(stored(safetensors.torch.save(sound)), Path("there"))
    found.restore()
    message = "there does not hold random states .*load another checkpoint, or give --no-load-rng"
    for what, tensors in mutated_states().items():
        with pytest.raises(UsageError, match=message):
            read_random_states(stored(safetensors.torch.save(tensors)), Path("there"))
            pytest.fail(what)
    for blob in (b"", b"{}", bytes(100), safetensors.torch.save(sound)[:-3]):
        with pytest.raises(UsageError, match="does not hold random states"):
            read_random_states(stored(blob), Path("there"))
    # Checks neither draw numbers nor restore a state.
    after = RngState.capture().to_tensors()
    assert all(before[name].equal(after[name]) for name in before)


RESUMED = {
    "no_load_optim": None,
    "use_distributed_optimizer": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "untie_embeddings_and_output_weights": True,
    "mtp_num_layers": None,
    "overlap_grad_reduce": False,
}
PP2 = TrainerState(3, "TP1 x CP1 x DP1 x PP2, experts ETP1 x EP1 x EDP1")
PP1 = dataclasses.replace(PP2, layout=PP2.layout.replace("PP2", "PP1"))


@pytest.mark.parametrize(
    ("state", "changes", "is_affected"),
    [
        (PP2, {}, False),
        (PP2, {"untie_embeddings_and_output_weights": False}, True),
        (PP2, {"mtp_num_layers": 1}, True),
        (PP1, {"mtp_num_layers": 1}, False),
        (PP1, {"overlap_grad_reduce": True}, True),
        (PP1, {"overlap_grad_reduce": True, "no_load_optim": True}, False),
        (PP1, {"overlap_grad_reduce": True, "use_distributed_optimizer": False}, False),
        (PP2, {"mtp_num_layers": 1, "dist_ckpt_optim_fully_reshardable": False}, False),
        (dataclasses.replace(PP2, optimizer_by_parameter=True), {"mtp_num_layers": 1}, False),
    ],
)
def test_misplaced_optimizer_states_are_reported(state, changes, is_affected):
    found = misplaced_optimizer(state, Namespace(**RESUMED | changes))
    assert bool(found) == is_affected and ("--no-load-optim" in found) == is_affected


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_main_program_is_the_imported_module(monkeypatch):
    """`-m mcore_rl.train` does not run a second copy of the module."""

    def second_module(*_: object, **__: object) -> None:
        raise AssertionError("the text was run as a module of its own")

    started: list[str] = []
    monkeypatch.setattr(train, "main", lambda: started.append("by name"))
    monkeypatch.setattr(exits, "end_at_once", lambda code: started.append(f"ended with {code}"))
    monkeypatch.setattr(start_module, "start", second_module)
    runpy.run_module("mcore_rl.train", run_name="__main__")
    assert started == ["by name", "ended with 0"]


def test_groups_that_other_prompts_drop_are_counted(tmp_path, caplog):
    folder = tmp_path / "iter_0000003"
    log_dropped(folder)
    assert not caplog.messages
    write_groups([OpenGroup.new(draw, 2) for draw in (4, 7)], folder / "rollout", 0)
    write_groups([OpenGroup.new(5, 2)], folder / "rollout", 1)
    # Two had not started.
    SamplingState(9, dict.fromkeys(range(4, 9), 3), 3).write(folder / "rollout")
    log_dropped(folder)
    (said,) = caplog.messages
    assert f"5 groups in {folder}" in said and "are dropped" in said


@pytest.mark.parametrize(("clock", "ends"), [("time", False), ("clock_gettime", True)])
def test_exit_duration_follows_no_clock_that_is_set(
    clock: str, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module.objects, "on_any", bool)
    now = getattr(time, clock)
    monkeypatch.setattr(time, clock, lambda *which: now(*which) + 7200)
    args = Namespace(exit_signal_handler=False, exit_interval=None, exit_duration_in_mins=60)
    reason = saver_module.early_exit(args, 1)
    assert reason == ("--exit-duration-in-mins 60" if ends else None)
