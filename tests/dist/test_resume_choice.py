"""Ranks agree on the checkpoint to continue from, and get back what each of them was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rl.trainer.resume import folders
from tests.rank_pool import RankPool
from tests.unit.test_checkpoint_folders import flip, save, write_files

WORLD_SIZE = 3

pytestmark = pytest.mark.timeout(300)


def chosen(
    ranks: RankPool, folder: Path, *, beside: tuple[Path, ...] = (), step: int | None = None
) -> tuple[dict[str, Any], str]:
    """What all ranks found, and what the first one said."""
    job = "tests.dist.resume_jobs:choose_step"
    outcomes = ranks.run_raw(job, world_size=WORLD_SIZE, folder=folder, beside=beside, step=step)
    results = [outcome.result for outcome in outcomes]
    assert results[0] is not None and results == [results[0]] * WORLD_SIZE, outcomes[0].output
    return results[0], outcomes[0].output


def test_the_newest_complete_one_is_chosen_and_named(ranks: RankPool, tmp_path: Path) -> None:
    assert chosen(ranks, tmp_path / "missing")[0] == {"step": None}
    for step in (10, 20):
        save(tmp_path, step)
    write_files(tmp_path, 30)
    result, said = chosen(ranks, tmp_path)
    assert result == {"step": 20}
    assert f"[Resume] resuming from step 20 of {tmp_path}" in said


def test_a_mistyped_load_ends_all_ranks_unless_the_run_may_begin(
    ranks: RankPool, tmp_path: Path
) -> None:
    def outcomes(may_begin: bool) -> list[Any]:
        return ranks.run_raw(
            "tests.dist.resume_jobs:find",
            world_size=WORLD_SIZE,
            load=tmp_path / "mistyped",
            run_dir=tmp_path / "run",
            may_begin=may_begin,
        )

    ended = outcomes(may_begin=False)
    assert [outcome.exit_code for outcome in ended] == [2] * WORLD_SIZE
    said = "".join(outcome.output for outcome in ended)
    assert said.count(f"mcore_rl: error: --load {tmp_path / 'mistyped'} does not exist; ") == 1
    assert "give --rl-load-or-start to begin where nothing is saved yet" in said
    begun = outcomes(may_begin=True)
    assert [outcome.result for outcome in begun] == [False] * WORLD_SIZE
    assert "nothing is complete in" in begun[0].output


def test_a_damaged_one_is_named_and_the_one_before_taken(ranks: RankPool, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    # Each file is read by another rank.
    cut = tmp_path / "iter_0000030" / "trainer" / ".metadata"
    cut.write_bytes(cut.read_bytes()[:-1])
    flipped = tmp_path / "iter_0000020" / "__0_0.distcp"
    flip(flipped, 350)
    before = sorted(tmp_path.rglob("*"))
    result, said = chosen(ranks, tmp_path)
    assert result == {"step": 10}
    assert f"step 30 is bad: {cut}: 6 bytes instead of 7" in said
    assert f"step 20 is bad: {flipped}: its content has changed" in said
    assert sorted(tmp_path.rglob("*")) == before  # nothing was deleted

    asked = chosen(ranks, tmp_path, step=20)[0]["error"]
    assert asked.startswith(
        f"--ckpt-step 20: no checkpoint can be read, the newest because of {flipped}: "
    )
    assert chosen(ranks, tmp_path, step=10)[0] == {"step": 10}
    absent = chosen(ranks, tmp_path, step=15)[0]["error"]
    assert absent.startswith(f"--ckpt-step 15 is not in {tmp_path}, which has steps 10, 20, 30")


def test_no_readable_checkpoint_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "iter_0000010" / ".metadata").unlink()
    error = chosen(ranks, tmp_path)[0]["error"]
    assert error.startswith(f"--load {tmp_path}: no checkpoint can be read")
    assert ".metadata: it is missing" in error


def test_a_critic_must_have_the_step_too(ranks: RankPool, tmp_path: Path) -> None:
    critic = folders.critic_folder(tmp_path)
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(critic, 40)  # its first save, and the actor's was killed
    assert chosen(ranks, tmp_path, beside=(critic,))[0] == {"step": 30}
    for step in (10, 20):
        save(critic, step)
    assert chosen(ranks, tmp_path, beside=(critic,))[0] == {"step": 20}
    flip(critic / "iter_0000020" / ".metadata", 0)
    assert chosen(ranks, tmp_path, beside=(critic,))[0] == {"step": 10}


def test_a_save_that_was_killed_when_complete_is_finished(ranks: RankPool, tmp_path: Path) -> None:
    place = save(tmp_path, 10)
    saving = folders.saving_folder(tmp_path)
    saving.mkdir()
    place.rename(saving / place.name)
    result, said = chosen(ranks, tmp_path)
    assert result == {"step": 10} and "[Resume] the save of step 10" in said
    assert place.is_dir() and not saving.exists()


def test_every_rank_gets_its_own_generators_back(ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"folder": tmp_path, "step": 5}
    write, read = (f"tests.dist.resume_jobs:{name}_state" for name in ("write", "read"))
    drawn = ranks.run(write, world_size=WORLD_SIZE, **arguments)
    assert len({tuple(values) for values in drawn}) == WORLD_SIZE
    found = ranks.run(read, world_size=WORLD_SIZE, **arguments)
    assert [values.pop("drawn") for values in found] == drawn
    facts = {"weight_version": 7, "position": 123, "coef": 0.1 + 0.2, "reference_version": 3}
    facts["entropy_coef"] = 0.01
    assert found == [facts] * WORLD_SIZE
    # As many ranks as did not write it read the rest of it.
    (alone,) = ranks.run(read, world_size=1, **arguments)
    assert alone == {**facts, "drawn": None}


def test_a_failure_on_one_rank_is_raised_on_all(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, 10)
    errors = ranks.run(
        "tests.dist.resume_jobs:write_and_fail",
        world_size=WORLD_SIZE,
        folder=tmp_path,
        step=20,
        failing_rank=1,
    )
    assert errors == [errors[0]] * WORLD_SIZE
    assert errors[0] == (
        f"the checkpoint of step 20 could not be written to {tmp_path}: on rank 1: [Errno 28] No "
        "space left on device; that of step 10 is complete: repair the disk and resume with "
        f"--load {tmp_path}"
    )
    assert folders.complete_steps(tmp_path) == [10]


def test_states_of_generators_survive_being_tensors(ranks: RankPool) -> None:
    assert ranks.run("tests.dist.resume_jobs:state_of_generators", world_size=1) == [True]
