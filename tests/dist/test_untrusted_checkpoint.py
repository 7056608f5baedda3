"""A checkpoint that somebody else has made is read without running what is in it."""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.rank_pool import RankPool
from tests.untrusted import Command

pytestmark = pytest.mark.timeout(300)

JOBS = "tests.dist.untrusted_checkpoint_jobs"
FORCE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "was_here"


def save(ranks: RankPool, folder: Path, marker: Path | None = None) -> None:
    marked = None if marker is None else str(marker)
    ranks.run(f"{JOBS}:save", world_size=1, folder=folder, marker=marked)


def load(ranks: RankPool, folder: Path, **environment: str) -> dict[str, Any]:
    return ranks.run(f"{JOBS}:load", world_size=1, environment=environment, folder=folder)[0]


def assert_refused(
    ranks: RankPool, folder: Path, marker: Path, sentence: str, **environment: str
) -> None:
    """The attack, which has just been shown to work on torch itself, does not work on us."""
    assert marker.exists(), "the attack would work without a guard"
    marker.unlink()
    assert load(ranks, folder, **environment)["error"].startswith(sentence)
    assert not marker.exists()


EXPECTED = {
    "weight": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0],
    "seed": 7,
    "iteration": 3,
    "rng": [["numpy", "random", "torch"], "MT19937"],
}


def test_a_checkpoint_of_megatron_is_read(ranks: RankPool, tmp_path: Path) -> None:
    save(ranks, tmp_path / "saved")
    assert load(ranks, tmp_path / "saved") == EXPECTED
    # As older versions have written it.
    common = {"args": Namespace(seed=8, path=Path("x")), "iteration": 4}
    torch.save(common, tmp_path / "saved" / "common.pt")
    assert load(ranks, tmp_path / "saved") == {**EXPECTED, "seed": 8, "iteration": 4}


def test_code_in_metadata_is_not_run(ranks: RankPool, tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "saved"
    save(ranks, folder)
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Command(marker)
    path.write_bytes(pickle.dumps(metadata))
    pickle.loads(path.read_bytes())
    sentence = f"{path} holds builtins.exec, which is not part of a checkpoint"
    assert_refused(ranks, folder, marker, sentence)


def test_invalid_metadata_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    save(ranks, tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    path.write_bytes(b"<html>not found</html>")
    assert load(ranks, tmp_path / "saved")["error"].startswith(
        f"{path} is not the metadata of a check"
    )


@pytest.mark.parametrize("environment", [{}, {FORCE: "1"}], ids=["as it is", "switched off"])
def test_code_in_the_common_state_is_not_run(
    ranks: RankPool, tmp_path: Path, marker: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "saved"
    save(ranks, folder)
    path = folder / "common.pt"
    torch.save({"args": Command(marker)}, path)
    torch.load(path, weights_only=False)
    sentence = f"{path} holds exec, which is not part of a checkpoint"
    assert_refused(ranks, folder, marker, sentence, **environment)


def test_code_in_an_object_is_not_run(ranks: RankPool, tmp_path: Path, marker: Path) -> None:
    """Objects, as random states, lie between the tensors in the .distcp files."""
    folder = tmp_path / "saved"
    save(ranks, folder, marker)
    assert not marker.exists()
    (file,) = folder.glob("*.distcp")
    stored = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    (place,) = [info for index, info in stored.items() if index.fqn.startswith("rng_state")]
    content = file.read_bytes()[place.offset : place.offset + place.length]
    torch.load(io.BytesIO(content), weights_only=False)
    sentence = "the object rng_state/shard_0_1 of the checkpoint holds exec, which"
    assert_refused(ranks, folder, marker, sentence)
