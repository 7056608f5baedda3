"""The bank: bit for bit, after damage at any place, and after kills."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.batching.types import Prompt, Rollout, TurnReward
from mcore_rl.moe.routing import RoutedLayers, Routes
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout import bank as bank_module
from mcore_rl.rollout.bank import Bank, read_bank
from mcore_rl.rollout.branch import Branch
from mcore_rl.rollout.group_encoding import EngineLimits
from mcore_rl.rollout.segments import OpenGroup
from tests.rank_pool import ROOT

checksum = bank_module._checksum_before
RUN = "tokens:5f2a, seed 1, 2 samples"
MAGIC = b"\x89RLBANK\n"


def prompt_of(draw: int) -> Prompt:
    token_ids = np.arange(draw % 1000, draw % 1000 + 3, dtype=np.int32)
    return Prompt(draw % 5, f"prompt {draw}", ["é", draw], token_ids, row='{"a": 1}')


def rollout(draw: int, index: int, rng: np.random.Generator, num_tokens: int) -> Rollout:
    """A response of two versions and two turns. An environment has changed its prompt."""
    prompt = prompt_of(draw)
    prompt = dataclasses.replace(prompt, token_ids=np.append(prompt.token_ids, 9).astype(np.int32))
    num_routed = len(prompt.token_ids) + num_tokens - 1
    ids = rng.integers(0, 300, (num_routed, 2, 3)).astype(np.int16)
    return Rollout(
        prompt=prompt,
        sample_index=index,
        text='turn\n"two" \ud800 \x00 ' + MAGIC.decode("latin1"),
        response_token_ids=rng.integers(0, 2**31, num_tokens).astype(np.int32),
        rollout_log_probs=-rng.random(num_tokens, dtype=np.float32),
        finish_reason="length",
        weight_version=4,
        routes=Routes(ids, rng.random(num_routed) < 0.5),
        failure=None if index else "no experts",
        is_generated=rng.random(num_tokens) < 0.5,
        weight_versions=rng.integers(3, 5, num_tokens).astype(np.int32),
        turn_rewards=(TurnReward(1, 0.1), TurnReward(num_tokens, -1e-300)),
    )


def group_of(draw: int, seed: int = 0, num_tokens: int = 3) -> OpenGroup:
    """A finished group: a response with all fields, and one with the necessary ones."""
    rng = np.random.default_rng([draw, seed])
    plain = Rollout(
        prompt=prompt_of(draw),
        sample_index=1,
        text="",
        response_token_ids=np.array([seed, 2], np.int32),
        rollout_log_probs=np.array([-0.1, 0.0], np.float32),
        finish_reason="stop",
        weight_version=3,
    )
    outcomes: dict[int, Mapping[str, Outcome]] = {
        0: {"exact": Outcome(0.1 + 0.2), "environment": Outcome(0.5, "raised KeyError", "'x'")},
        1: {"exact": Outcome(1), "environment": Outcome(0.0)},
    }
    of_environments = {0: Outcome(0.5, "raised KeyError", "'x'"), 1: Outcome(0.0)}
    return OpenGroup(draw, [rollout(draw, 0, rng, num_tokens), plain], outcomes, of_environments)


def exact(value: Any) -> Any:
    """All bits of a value, with its types."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if dataclasses.is_dataclass(value):
        return {each.name: exact(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return [(key, exact(each)) for key, each in sorted(value.items())]
    if isinstance(value, list | tuple):
        return type(value), [exact(each) for each in value]
    return repr(value)


def bank_of(folder: Path, owner: int = 0, num_owners: int = 1, fingerprint: str = RUN) -> Bank:
    return Bank(folder, owner=owner, num_owners=num_owners, fingerprint=fingerprint)


def read(folder: Path) -> tuple[dict[int, OpenGroup], list[str]]:
    banked, skipped = read_bank(folder, prompt_of, fingerprint=RUN)
    groups = {draw: each.read() for draw, each in banked.items()}
    return {draw: group for draw, group in groups.items() if group is not None}, skipped


def check(found: dict[int, OpenGroup], expected: Mapping[int, int]) -> None:
    """Compare the groups with those that were written: the seed of each draw."""
    assert found.keys() == expected.keys()
    for draw, seed in expected.items():
        assert exact(found[draw]) == exact(group_of(draw, seed))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def three_records(folder: Path) -> tuple[Path, bytes, list[int]]:
    """A file with draws 0, 1, 2, its bytes, and where its header and records end."""
    bank, file = bank_of(folder), folder / "group_00000_1.bank"
    ends = []
    for draw in range(3):
        bank.append(group_of(draw))
        ends.append(file.stat().st_size)
    data = file.read_bytes()
    return file, data, [data.index(b"\n") + 1, *ends]


def test_groups_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "bank"
    banks = [bank_of(folder, owner, 2) for owner in range(2)]
    for draw in (7, 4, 2**40):
        banks[draw % 2].append(group_of(draw, seed=draw % 3))
    assert files(folder) == ["group_00000_1.bank", "group_00001_1.bank"]
    found, skipped = read(folder)
    check(found, {draw: draw % 3 for draw in (7, 4, 2**40)})
    assert skipped == []


def test_unfinished_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="draw 3 has not finished"):
        bank_of(tmp_path).append(OpenGroup.new(3, 2))


def test_bank_without_files_is_empty(tmp_path: Path) -> None:
    assert read(tmp_path / "bank") == ({}, [])


@pytest.mark.slow
def test_truncation_keeps_all_complete_records(tmp_path: Path) -> None:
    file, data, (header, *ends) = three_records(tmp_path)
    for size in range(len(data) + 1):
        file.write_bytes(data[:size])
        found, skipped = read(tmp_path)
        assert found.keys() == {draw for draw in range(3) if ends[draw] <= size}, size
        assert bool(skipped) == (size not in (header, *ends)), size
    check(found, {0: 0, 1: 0, 2: 0})


@given(st.integers(0, 2**32 - 1).map(random.Random))
@settings(max_examples=300)
def test_flipped_bits_lose_only_the_records_that_have_them(
    tmp_path_factory: pytest.TempPathFactory, rng: random.Random
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    file, data, ends = three_records(folder)
    damaged, places = bytearray(data), set()
    for _ in range(rng.randint(1, 3)):
        place = rng.choice([rng.randrange(len(data)), rng.choice(ends) + rng.randrange(-8, 28)])
        places.add(place := min(place, len(data) - 1))
        damaged[place] ^= 1 << rng.randrange(8)
    changed = {place for place in places if damaged[place] != data[place]}
    file.write_bytes(damaged)
    found, skipped = read(folder)
    check(found, dict.fromkeys(found, 0))
    intact = {
        draw
        for draw in range(3)
        if not any(ends[draw] <= place < ends[draw + 1] for place in changed)
    }
    assert found.keys() == intact
    assert bool(skipped) == bool(changed)
    file.unlink()


@pytest.mark.parametrize(
    ("damage", "lost", "why"),
    [
        ("zeros", {1}, "bytes to [0-9]+ are not a record"),
        ("garbage before", set(), "bytes to [0-9]+ are not a record"),
        ("magic before", set(), "it has [0-9]+ of [0-9]+ bytes"),
        ("torn", {1}, "it has [0-9]+ of [0-9]+ bytes|its checksum differs"),
        ("zeros after", set(), "bytes to [0-9]+ are not a record"),
        ("header", set(), "its header is damaged"),
        ("no header", set(), "its header is damaged"),
    ],
)
def test_damage_is_named_and_later_records_are_found(
    tmp_path: Path, damage: str, lost: set[int], why: str
) -> None:
    file, data, (header, first, second, _) = three_records(tmp_path)
    file.write_bytes(
        {
            "zeros": data[:first] + bytes(second - first) + data[second:],
            "garbage before": data[:first] + b"\x00garbage" + data[first:],
            "magic before": data[:first] + MAGIC + data[first:],
            "torn": data[: second - 20] + data[second:],
            "zeros after": data + bytes(4096),
            "header": data[: header - 3] + b"x" + data[header - 2 :],
            "no header": data[header:],
        }[damage]
    )
    found, skipped = read(tmp_path)
    check(found, dict.fromkeys({0, 1, 2} - lost, 0))
    assert len(skipped) == 1 and re.fullmatch(
        rf"group_00000_1.bank: (record at byte [0-9]+: )?({why})", skipped[0]
    )
    if "header" not in damage:
        place = len(data) if "after" in damage else first
        assert f"record at byte {place}: " in skipped[0]


def test_append_after_a_torn_record_is_found(tmp_path: Path) -> None:
    bank = bank_of(tmp_path)
    bank.append(group_of(0))
    with (tmp_path / "group_00000_1.bank").open("ab") as file:
        file.write(MAGIC + bytes(3))
    bank.append(group_of(1))
    found, skipped = read(tmp_path)
    check(found, {0: 0, 1: 0})
    assert len(skipped) == 1


def test_magic_within_tokens_is_not_a_record(tmp_path: Path) -> None:
    bank, group, file = bank_of(tmp_path), group_of(0), tmp_path / "group_00000_1.bank"
    assert group.rollouts[1] is not None
    tokens = np.frombuffer(MAGIC * 20, np.int32)
    group.rollouts[1] = dataclasses.replace(
        group.rollouts[1], response_token_ids=tokens, rollout_log_probs=np.zeros(40, np.float32)
    )
    bank.append(group)
    bank.append(group_of(1))
    found, skipped = read(tmp_path)
    assert exact(found.pop(0)) == exact(group) and skipped == []
    check(found, {1: 0})
    data = file.read_bytes()
    file.write_bytes(data.replace(MAGIC, b"x" + MAGIC[1:], 1))
    check(read(tmp_path)[0], {1: 0})


def test_groups_are_on_the_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, int]] = []

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((path, path.stat().st_size if path.is_file() else 0))

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "bank"
    bank, file = bank_of(folder), folder / "group_00000_1.bank"
    assert synced == [(tmp_path, 0)]
    for draw in range(2):
        synced.clear()
        bank.append(group_of(draw))
        assert synced == [(file, file.stat().st_size)] + [(folder, 0)] * (draw == 0)
    synced.clear()
    bank.forget({0})
    partial = folder / "group_00000_1.bank.partial"
    assert synced == [(partial, file.stat().st_size), (folder, 0)]


def test_files_of_another_run_are_ignored_and_kept(tmp_path: Path) -> None:
    bank_of(tmp_path, fingerprint="seed 2").append(group_of(0))
    bank = bank_of(tmp_path)
    bank.append(group_of(1))
    found, skipped = read(tmp_path)
    check(found, {1: 0})
    assert len(skipped) == 1 and re.match("1 in 1 file of another start .* may be", skipped[0])
    bank.forget({0, 1})
    assert files(tmp_path) == ["group_00000_1.bank"]


def test_groups_of_other_runs_are_counted_without_reading_them(tmp_path: Path) -> None:
    for owner, fingerprint, num_groups in ((0, "seed 2", 3), (1, "seed 3", 2), (2, RUN, 1)):
        bank = bank_of(tmp_path, owner, 3, fingerprint)
        for draw in range(num_groups):
            bank.append(group_of(draw))
    file = tmp_path / "group_00000_1.bank"
    file.write_bytes(file.read_bytes()[:-1])  # its last record is torn
    found, skipped = read(tmp_path)
    check(found, {0: 0})
    assert len(skipped) == 1 and skipped[0].startswith("4 in 2 files of another start")


def test_records_of_another_run_are_skipped_if_the_header_is_damaged(tmp_path: Path) -> None:
    bank_of(tmp_path, fingerprint="seed 2").append(group_of(0))
    file = tmp_path / "group_00000_1.bank"
    file.write_bytes(b"x" + file.read_bytes())
    found, skipped = read(tmp_path)
    assert not found and len(skipped) == 2
    bank_of(tmp_path).forget({0})
    assert files(tmp_path) == [file.name]


def test_last_intact_record_of_a_draw_counts(tmp_path: Path) -> None:
    """The third process records draw 5 for another owner; its record is then damaged."""
    for owner, seed in ((1, 10), (0, 11), (2, 12)):
        bank_of(tmp_path, owner, 3).append(group_of(5, seed))
    names = ["group_00000_2.bank", "group_00001_1.bank", "group_00002_3.bank"]
    assert files(tmp_path) == names
    check(read(tmp_path)[0], {5: 12})
    file = tmp_path / names[2]
    file.write_bytes(file.read_bytes()[:-1])
    found, skipped = read(tmp_path)
    check(found, {5: 11})
    assert len(skipped) == 1


def test_forget_removes_only_these_draws(tmp_path: Path) -> None:
    banks = [bank_of(tmp_path, owner, 2) for owner in range(2)]
    for draw in range(6):
        banks[draw % 2].append(group_of(draw))
    banks[0].forget({0, 1, 9})
    assert read(tmp_path)[0].keys() == {1, 2, 3, 4, 5}, "draw 1 is in the file of owner 1"
    banks[1].forget({1, 3, 5})
    assert files(tmp_path) == ["group_00000_1.bank"]
    for draw in (7, 8):
        banks[draw % 2].append(group_of(draw))
    found, skipped = read(tmp_path)
    check(found, dict.fromkeys((2, 4, 7, 8), 0))
    assert skipped == []


def test_groups_stay_on_the_disk_until_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile their owner forgets others, which moves them, and then one of them."""
    bank = bank_of(tmp_path)
    for draw in range(4):
        bank.append(group_of(draw))
    decoded = []
    decode = bank_module.group_from_bytes
    monkeypatch.setattr(
        bank_module, "group_from_bytes", lambda *given: decoded.append(0) or decode(*given)
    )
    banked, skipped = read_bank(tmp_path, prompt_of, fingerprint=RUN)
    assert banked.keys() == set(range(4)) and not skipped and not decoded
    for forgotten in (0, 2):
        assert exact(banked[3].read()) == exact(group_of(3))
        bank.forget({forgotten})
    assert exact(banked[1].read()) == exact(group_of(1)) and not caplog.messages
    assert banked[2].read() is None
    bank.forget({1, 3})
    assert banked[3].read() is None
    gone, no_file = caplog.messages
    assert "draw 2 of group_00000_1.bank is sampled again: ValueError: its record is gone" in gone
    assert "draw 3 of group_00000_1.bank" in no_file and "FileNotFoundError" in no_file


def test_forget_drops_what_is_damaged(tmp_path: Path) -> None:
    file, data, (_, first, *_) = three_records(tmp_path)
    file.write_bytes(data[: first + 50] + b"??" + data[first + 52 :])
    bank_of(tmp_path).forget({0})
    found, skipped = read(tmp_path)
    check(found, {2: 0})
    assert skipped == []


def test_files_of_lost_owners_are_passed_on(tmp_path: Path) -> None:
    """Four owners become two; the files of the others are read and emptied."""
    for owner in range(4):
        bank_of(tmp_path, owner, 4).append(group_of(owner))
    (tmp_path / "group_00003_4.bank.partial").write_bytes(b"of a killed process")
    assert read(tmp_path)[0].keys() == {0, 1, 2, 3}
    banks = [bank_of(tmp_path, owner, 2) for owner in range(2)]
    banks[0].forget(range(4))
    assert read(tmp_path)[0].keys() == {1, 3}
    banks[1].forget(range(4))
    assert files(tmp_path) == []


def test_pipes_devices_and_folders_are_passed_over(tmp_path: Path) -> None:
    bank = bank_of(tmp_path)
    bank.append(group_of(1))
    os.mkfifo(tmp_path / "group_00000_2.bank")
    (tmp_path / "group_00000_3.bank").symlink_to("/dev/zero")
    (tmp_path / "group_00000_4.bank").mkdir()
    (tmp_path / "group_00000_5.bank").symlink_to("gone")
    found, skipped = read(tmp_path)
    check(found, {1: 0})
    assert [text.partition(": ")[2] for text in skipped] == [
        *["it is not a regular file"] * 3,
        "No such file or directory",
    ]
    bank.forget({1})
    bank.append(group_of(2))
    check(read(tmp_path)[0], {2: 0})


def test_false_frames_are_passed_over_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them claims to reach far into the file; the record behind them is found."""
    file, data, (header, first, _, _) = three_records(tmp_path)
    frames = (MAGIC + struct.pack("<QQI", 3 << 20, 0, 0)) * 2000
    file.write_bytes(data[:header] + frames + bytes(4 << 20) + data[header:first])
    num_read, pread = [0], os.pread

    def counted(handle: int, count: int, at: int) -> bytes:
        found = pread(handle, count, at)
        num_read[0] += len(found)
        return found

    monkeypatch.setattr(os, "pread", counted)
    banked, skipped = read_bank(tmp_path, prompt_of, fingerprint=RUN)
    assert banked.keys() == {0} and num_read[0] < 8 * file.stat().st_size
    assert "checksum differs" in skipped[0] and len(skipped) < 20
    assert re.search("[0-9]+ more places are damaged", skipped[-1])


def test_bank_is_trimmed_and_read_record_by_record(tmp_path: Path) -> None:
    bank, file = bank_of(tmp_path), tmp_path / "group_00000_1.bank"
    for draw in range(8):
        bank.append(group_of(draw, num_tokens=200_000))
    size = file.stat().st_size
    tracemalloc.start()
    try:
        bank.forget({0, 7})
        banked, _ = read_bank(tmp_path, prompt_of, fingerprint=RUN)
        (_, peak) = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert banked.keys() == set(range(1, 7)) and size > 32 << 20
    assert peak < size / 8


def test_groups_in_a_trimmed_file_are_read_without_reading_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = bank_of(tmp_path)
    for draw in range(50):
        bank.append(group_of(draw))
    banked, _ = read_bank(tmp_path, prompt_of, fingerprint=RUN)
    bank.forget({0})
    checked = []
    monkeypatch.setattr(
        bank_module, "_checksum_before", lambda *given: checked.append(0) or checksum(*given)
    )
    assert exact(banked[49].read()) == exact(group_of(49))
    assert len(checked) <= 2


def test_groups_that_are_appended_while_others_are_removed_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, trim = bank_of(tmp_path), Bank._trim
    for draw in range(3):
        bank.append(group_of(draw))

    def slow(bank: Bank, path: Path, draws: Any) -> None:
        bank.append(group_of(0, seed=7))  # as another thread does
        trim(bank, path, draws)

    monkeypatch.setattr(Bank, "_trim", slow)
    bank.forget({0, 1})
    check(read(tmp_path)[0], {0: 7, 2: 0})


def test_forget_names_a_file_that_it_cannot_rewrite_and_rewrites_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for draw in (0, 10):
        bank = bank_of(tmp_path)
        bank.append(group_of(draw))
        bank.append(group_of(draw + 1))
    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if target.name == "group_00000_1.bank":
            raise OSError(30, "Read-only file system", str(path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(OSError, match="Read-only file system: group_00000_1.bank"):
        bank.forget({0, 10})
    check(read(tmp_path)[0], {0: 0, 1: 0, 11: 0})


def test_groups_with_values_that_no_engine_of_the_run_gives_are_sampled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bank, group = bank_of(tmp_path), group_of(1)
    bank.append(group)
    bank.append(dataclasses.replace(group, draw=2, rollouts=group.rollouts[:1], outcomes={}))
    for limits, fits in (
        (EngineLimits(vocab_size=1 << 20), lambda group: True),
        (EngineLimits(routed=RoutedLayers((1, 2), 3, 50)), lambda group: True),
        (EngineLimits(routed=RoutedLayers((1, 2), 4, 300)), lambda group: True),
        (EngineLimits(), lambda group: len(group.rollouts) == 3),
    ):
        banked, _ = read_bank(tmp_path, prompt_of, fingerprint=RUN, limits=limits, fits=fits)
        assert banked[1].read() is None
        assert "draw 1 of group_00000_1.bank is sampled again" in caplog.messages[-1]
    limits = EngineLimits(routed=RoutedLayers((1, 2), 3, 300))
    banked, _ = read_bank(tmp_path, prompt_of, fingerprint=RUN, limits=limits)
    assert exact(banked[1].read()) == exact(group)


def test_a_start_continues_the_branch_of_the_newest_checkpoint_alone(tmp_path: Path) -> None:
    folder = tmp_path / "bank"
    first = Branch.of_start(folder, "", 0)
    first.write(folder)
    assert Branch.of_start(folder, first.name, 10) == Branch(first.name, 10)
    Branch(first.name, 20).write(folder)  # with the checkpoint of step 20
    assert Branch.of_start(folder, first.name, 20) == Branch(first.name, 20)
    assert Branch.of_start(folder, first.name, 30) == Branch(first.name, 30)  # killed before that
    begun = [
        Branch.of_start(folder, *start)
        for start in (("", 0), ("", 20), (first.name, 10), ("another", 20), ("another", 30))
    ]
    assert [each.step for each in begun] == [0, 20, 10, 20, 30]
    assert len({each.name for each in begun} | {first.name}) == 6
    begun[2].write(folder)  # from step 10; the checkpoint of step 20 then comes back
    assert Branch.of_start(folder, first.name, 20).name != first.name
    assert Branch.of_start(folder, begun[2].name, 10) == begun[2]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"name": "a"}', '{"name": 5, "step": 1}', '{"name": "a", "step": -1}']
)
def test_a_damaged_branch_is_not_continued(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "branch.json"
    file.write_text(content)
    assert Branch.of_start(tmp_path, "a", 1).name != "a"
    file.unlink()
    os.mkfifo(file)
    assert Branch.of_start(tmp_path, "a", 1).name != "a"
    file.unlink()
    file.mkdir()
    Branch("a", 1).write(tmp_path)  # the run continues
    assert "branch.json cannot be written" in caplog.text


def append_for_ever(folder: str) -> None:
    """Append groups, and sometimes forget some; say before what is forgotten, after what is
    written."""
    bank = bank_of(Path(folder))
    first = 1 + max(read(Path(folder))[0], default=-1)
    for draw in range(first, first + 10**6):
        bank.append(group_of(draw, num_tokens=20_000))
        print("wrote", draw, flush=True)
        if draw % 5 == 4:
            print("forget", *range(draw - 4, draw - 1), flush=True)
            bank.forget(range(draw - 4, draw - 1))


@pytest.mark.slow
def test_killed_process_loses_nothing_that_it_has_written(tmp_path: Path) -> None:
    code = f"from tests.unit.test_bank import append_for_ever; append_for_ever({str(tmp_path)!r})"
    wrote: set[int] = set()
    forgotten: set[int] = set()
    for num_lines in (7, 10):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(num_lines)]
            process.kill()
            lines += process.stdout.readlines()
        assert process.returncode == -9
        for line in lines:
            what, *draws = line.split()
            (wrote if what == "wrote" else forgotten).update(map(int, draws))
        found, _ = read(tmp_path)
        assert wrote - forgotten <= found.keys()
        for draw, group in found.items():
            assert exact(group) == exact(group_of(draw, num_tokens=20_000))
