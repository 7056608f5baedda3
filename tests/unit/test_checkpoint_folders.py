"""Checkpoint folders: saves that are killed at any moment, and files that are damaged later."""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import save as torch_save

from mcore_rl.common.errors import UsageError
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.point import check_warmup
from mcore_rl.trainer.resume.trainer_state import check_mtp

FILES = {"__0_0.distcp": b"weights" * 100, ".metadata": b"m", "trainer/.metadata": b"t" * 7}


class Killed(BaseException):
    """A kill: nothing of ours may catch it."""


def write_files(folder: Path, step: int, content: bytes = b"") -> Path:
    place = folders.saving_folder(folder) / folders.iteration_name(step)
    for name, data in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data + content)
    (folders.saving_folder(folder) / folders.TRACKER).write_text(str(step))  # as Megatron does
    return place


def save(
    folder: Path,
    step: int,
    content: bytes = b"",
    retain_interval: int | None = None,
    is_rolling: bool = False,
) -> Path:
    folders.clear_saving(folder)
    place = write_files(folder, step, content)
    digests = folders.sealed(place, folders.files_of(place))
    saved = folders.complete(folder, step, digests, is_rolling=is_rolling)
    for before in folders.complete_steps(folder) if retain_interval else ():
        if before < step and before % retain_interval:
            folders.remove(folder, before)
    return saved


def test_only_marked_checkpoints_are_rolling_and_a_link_is_not_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, is_rolling=step > 10)
    assert folders.rolling_steps(tmp_path) == [30, 20]
    save(tmp_path, 20)  # again, and to stay
    assert folders.rolling_steps(tmp_path) == [30]
    (tmp_path / "iter_0000020").rename(tmp_path / "elsewhere")
    (tmp_path / "iter_0000020").symlink_to("elsewhere")
    for step in (20, 30, 40):
        folders.remove(tmp_path, step)
    assert folders.complete_steps(tmp_path) == [20, 10]
    assert not folders.saving_folder(tmp_path).exists()


def damage_of(folder: Path, step: int, world_size: int = 1) -> list[str]:
    found = [folders.damage(folder, step, rank=r, world_size=world_size) for r in range(world_size)]
    return sorted({str(damage.file.name) for part in found for damage in part})


def test_a_saved_checkpoint_is_complete_and_nothing_else_is_left(tmp_path: Path) -> None:
    place = save(tmp_path, 10)
    assert place == tmp_path / "iter_0000010"
    assert {p.name for p in tmp_path.iterdir()} == {place.name, folders.TRACKER}
    assert folders.complete_steps(tmp_path) == [10]
    assert folders.tracked_step(tmp_path) == 10
    assert folders.damage(tmp_path, 10) == []
    assert (place / "trainer/.metadata").read_bytes() == FILES["trainer/.metadata"]


def test_manifest_passes_megatrons_integrity_check(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import verify_integrity_manifest

    place = save(tmp_path, 10)
    verify_integrity_manifest(str(place))
    (place / ".metadata").write_bytes(b"n")
    with pytest.raises(CheckpointingException, match=r"\.metadata: hash mismatch"):
        verify_integrity_manifest(str(place))


def test_warmup_of_critic_that_begins_later_counts_steps_before(tmp_path: Path) -> None:
    check_warmup(None, 30, tmp_path)
    check_warmup(31, 30, tmp_path)
    for steps in (5, 30):
        with pytest.raises(UsageError, match=f"--rl-critic-warmup-steps {steps} .*{30 + steps}"):
            check_warmup(steps, 30, tmp_path)


def test_complete_steps_are_sorted_newest_first(tmp_path: Path) -> None:
    for step in (10, 30, 20):
        save(tmp_path, step)
    write_files(tmp_path, 40)
    (tmp_path / "iter_0000050").mkdir()
    (tmp_path / "iter_0000060").mkdir()
    (tmp_path / "iter_0000060" / folders.COMPLETE).write_text('{"format": 1, "step": 60, "by')
    shutil.copytree(tmp_path / "iter_0000030", tmp_path / "iter_0000070")  # of another step
    assert folders.complete_steps(tmp_path) == [30, 20, 10]
    assert folders.complete_steps(tmp_path / "missing") == []


@pytest.mark.parametrize("content", [None, "", "release", "ten", "10"])
def test_tracker_without_the_newest_step_is_repaired(tmp_path: Path, content: str | None) -> None:
    assert folders.recover(tmp_path) == [] and not any(tmp_path.iterdir())
    for step in (10, 20):
        save(tmp_path, step)
    tracker = tmp_path / folders.TRACKER
    tracker.unlink() if content is None else tracker.write_text(content)
    assert folders.tracked_step(tmp_path) == (10 if content == "10" else None)
    assert folders.recover(tmp_path) == []
    assert folders.tracked_step(tmp_path) == 20


def test_file_without_a_digest_is_refused(tmp_path: Path) -> None:
    place = write_files(tmp_path, 10)
    digests = folders.sealed(place, folders.files_of(place)[1:])
    with pytest.raises(RuntimeError, match=r"\.metadata of .* has no digest"):
        folders.complete(tmp_path, 10, digests)
    assert folders.complete_steps(tmp_path) == []


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["flipped", "cut", "longer", "missing"])
def test_damage_names_the_file(tmp_path: Path, name: str, how: str, world_size: int) -> None:
    place = save(tmp_path, 10)
    file = place / name
    if how == "flipped":
        flip(file, file.stat().st_size // 2)
    elif how == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if how == "cut" else file.read_bytes() + b"x")
    assert damage_of(tmp_path, 10, world_size) == [file.name]


def test_damage_names_an_unreadable_record(tmp_path: Path) -> None:
    place = save(tmp_path, 10)
    (place / folders.INTEGRITY).write_text("{")
    assert damage_of(tmp_path, 10) == [folders.INTEGRITY]
    (place / folders.COMPLETE).write_text("[]")
    assert damage_of(tmp_path, 10) == [folders.COMPLETE]


def test_retention_deletes_the_newest_before_as_megatron_does(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, retain_interval=20)
    assert folders.complete_steps(tmp_path) == [40, 20]


def check_load(load: Path | None, **changes: object) -> None:
    said = {"asked": None, "pretrained": None, "may_begin": False, "exits": False, **changes}
    folders.check_load(load, **said)


def test_load_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """A mistyped path would begin a run from scratch."""
    load, own = tmp_path / "load", tmp_path / "megatrons"
    check_load(None)

    def refused(says: str, **changes: object) -> None:
        with pytest.raises(UsageError, match=says):
            check_load(load, **changes)

    refused("--load .*load does not exist; correct the path, or give --rl-load-or-start to begin")
    refused("or drop --exit-on-missing-checkpoint and give --rl-load-or", exits=True)
    refused("or drop --exit-on-missing-checkpoint and give", exits=True, may_begin=True)
    refused("--ckpt-step 10 is not in .*, which does not exist; ", asked=10, may_begin=True)
    refused(
        "--pretrained-checkpoint .*megatrons does not exist .*; correct the path or drop the flag",
        pretrained=str(own),
        may_begin=True,
    )
    check_load(load, may_begin=True)
    load.mkdir()
    refused("--load .*load is an empty folder; correct")
    write_files(load, 10)  # a save that was killed before it was complete
    refused("--load .*load has no complete checkpoint; correct")

    own.mkdir()
    (own / folders.TRACKER).write_text("7")
    (own / folders.iteration_name(7)).mkdir()
    refused("--load .*load has no complete checkpoint; correct", pretrained=str(own))
    check_load(load, pretrained=str(own), may_begin=True)
    check_load(own)
    check_load(None, pretrained=str(own))
    (own / folders.TRACKER).unlink()
    check_load(own, asked=7)  # which needs no tracker

    place = save(load, 10)
    check_load(load, pretrained="nowhere, and not read")
    folders.saving_folder(load).mkdir(exist_ok=True)
    place.rename(folders.saving_folder(load) / place.name)  # killed before the last rename
    check_load(load)


@pytest.mark.parametrize(
    "content",
    [b"", b"ten", b"\0\0\0", b"\xff\xfe", b"-1", b"7.0", b"8", b"1e1", b"9" * 5000, b"release"],
)
def test_tracker_without_its_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    """Megatron would end with exit code 0, or raise on each rank."""
    (tmp_path / folders.iteration_name(7)).mkdir()
    (tmp_path / folders.TRACKER).write_bytes(content)
    says = f"{folders.TRACKER} there has '.*', which names no checkpoint"
    with pytest.raises(UsageError, match=f"--load {tmp_path}: {says}"):
        check_load(tmp_path, may_begin=True)
    with pytest.raises(UsageError, match=f"--pretrained-checkpoint {tmp_path}: {says}"):
        check_load(None, pretrained=str(tmp_path))


def test_pipes_in_place_of_records_do_not_block(tmp_path: Path) -> None:
    place = save(tmp_path, 10)
    for file in (place / folders.INTEGRITY, tmp_path / folders.TRACKER):
        file.unlink()
        os.mkfifo(file)
    assert damage_of(tmp_path, 10) == [folders.INTEGRITY]
    assert folders.tracked_step(tmp_path) is None
    (place / folders.COMPLETE).unlink()
    os.mkfifo(place / folders.COMPLETE)
    assert folders.complete_steps(tmp_path) == []
    assert folders.recover(tmp_path) == []


@pytest.mark.parametrize("name", ["7", " 0000007\n", "release"])
def test_tracker_of_a_megatron_checkpoint_is_accepted(tmp_path: Path, name: str) -> None:
    for place in (folders.iteration_name(7), "release"):
        (tmp_path / place).mkdir()
    (tmp_path / folders.TRACKER).write_text(name)
    check_load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0" * 200, b"{}", b'{"format": 1, "step": 20}'])
def test_checkpoint_with_a_damaged_record_is_refused(tmp_path: Path, content: bytes) -> None:
    place = save(tmp_path, 10)
    check_load(None, pretrained=str(tmp_path))  # its weights can begin another run
    (place / folders.COMPLETE).write_bytes(content)
    says = "iter_0000010/complete.json is damaged; load another"
    for asked in (None, 10):
        with pytest.raises(UsageError, match=says):
            check_load(tmp_path, asked=asked, may_begin=True)
    with pytest.raises(UsageError, match=says):
        check_load(None, pretrained=str(tmp_path))


def test_mtp_layers_to_train_must_be_in_the_checkpoint(tmp_path: Path) -> None:
    held = {3: "decoder.layers.0.weight", 4: "mtp.layers.0.weight"}
    for step, name in held.items():
        place = tmp_path / folders.iteration_name(step)
        torch_save({name: torch.zeros(1)}, checkpoint_id=place, no_dist=True)
        check_mtp(tmp_path, step, None)
    check_mtp(tmp_path, 4, 1)
    with pytest.raises(UsageError, match="the checkpoint of step 3 in --load") as refusal:
        check_mtp(tmp_path, 3, 1)
    assert refusal.value.flag == "--mtp-num-layers 1" and "drop it" in refusal.value.remedy


def test_saving_below_the_newest_step_is_refused(tmp_path: Path) -> None:
    folders.refuse_to_fall_behind(tmp_path / "missing", 0)
    write_files(tmp_path, 50)  # not complete
    for step in (10, 20):
        save(tmp_path, step)
    for first_step in (20, 30):
        folders.refuse_to_fall_behind(tmp_path, first_step)
    with pytest.raises(UsageError, match="step 20, and this run begins at step 10: --load would"):
        folders.refuse_to_fall_behind(tmp_path, 10)


def test_save_removes_the_remains_of_killed_saves(tmp_path: Path) -> None:
    """Saves off the interval, by a signal, are never written again under their name."""
    saving = folders.saving_folder(tmp_path)
    for step in (17, 25):
        write_files(tmp_path, step)
    (saving / "iter_0000030.replaced").mkdir()
    (saving / "of_somebody").mkdir()
    save(tmp_path, 40)
    assert sorted(p.name for p in saving.iterdir()) == ["of_somebody"]
    assert folders.complete_steps(tmp_path) == [40]


def content_of(folder: Path, step: int) -> str:
    place = folder / folders.iteration_name(step)
    return hashlib.sha256(b"".join((place / name).read_bytes() for name in FILES)).hexdigest()


class KillAt:
    """Ends the process, so to say, before the n-th operation that changes something on the disk."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for name in ("rename", "replace", "mkdir", "rmdir", "unlink", "fsync"):
            self._guard(patch, os, name)
        opened = io.open

        def guarded_open(file, mode="r", *args, **keywords):
            if set(mode) & set("wax+"):
                self.count()
            return opened(file, mode, *args, **keywords)

        patch.setattr(io, "open", guarded_open)
        patch.setattr(builtins, "open", guarded_open)

    def count(self) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1

    def _guard(self, patch: pytest.MonkeyPatch, module, name: str) -> None:
        real = getattr(module, name)

        def guarded(*args, **keywords):
            self.count()
            return real(*args, **keywords)

        patch.setattr(module, name, guarded)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["next step", "the same step again"])
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path: Path, again: bool) -> None:
    """Every operation on the disk is the last one, in turn; then the run continues and saves."""
    step = 10 if again else 20
    for number in range(1000):
        folder = tmp_path / str(number)
        folder.mkdir()
        save(folder, 10)
        old = content_of(folder, 10)
        killed = False
        with pytest.MonkeyPatch.context() as patch:
            KillAt(patch, number)
            try:
                save(folder, step, b"new", retain_interval=None if again else 100)
            except Killed:
                killed = True
        folders.recover(folder)
        newest = folders.complete_steps(folder)[0]
        assert folders.damage(folder, newest) == []
        assert folders.tracked_step(folder) == newest  # what Megatron would load
        if newest == 10 and not (again and content_of(folder, 10) != old):
            assert content_of(folder, 10) == old
        else:
            assert newest == step and folders.damage(folder, step) == []
        # The run continues, and leaves nothing of the attempt.
        save(folder, step, b"new")
        assert content_of(folder, step) != old
        left = {p.name for p in folder.iterdir()}
        assert left <= {"iter_0000010", "iter_0000020", folders.TRACKER}
        if not killed:
            assert number > 10  # the guard counts
            return
    raise AssertionError("the save never came to its end")


@settings(max_examples=50, deadline=None)
@given(num_files=st.integers(0, 20), world_size=st.integers(1, 9))
def test_shares_cover_every_file_once(num_files: int, world_size: int) -> None:
    files = [Path(str(i)) for i in range(num_files)]
    shares = [folders.share(files, rank, world_size) for rank in range(world_size)]
    assert sorted(sum(shares, [])) == sorted(files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_records_are_plain_json(tmp_path: Path) -> None:
    place = save(tmp_path, 10)
    record = json.loads((place / folders.COMPLETE).read_text())
    assert record["step"] == 10 and record["bytes"].keys() == FILES.keys()
