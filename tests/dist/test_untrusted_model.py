"""A Hugging Face folder that brings code with it: nothing of it is run, by us or by vLLM."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rank_pool import RankPool
from tests.untrusted import Command, bring_code

pytestmark = pytest.mark.timeout(400)

START = "tests.dist.untrusted_model_jobs:start_engine"


def with_code(source: Path, target: Path, marker: Path) -> Path:
    """The same checkpoint, which names classes of its own, and has pickled weights as well."""
    shutil.copytree(source, target)
    bring_code(target, marker)
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(Command(marker)))
    return target


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_an_engine_runs_no_code_of_the_folder(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path, load_format: str
) -> None:
    marker = tmp_path / "was_here"
    folder = with_code(checkpoint_factory("deepseek_v3"), tmp_path / "model", marker)
    (found,) = ranks.run(START, world_size=1, folder=folder, load_format=load_format)
    assert "error" not in found and found["tokenizer"] not in ("Evil", "")
    assert not marker.exists()


def test_an_engine_opens_no_pickled_weights(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    marker = tmp_path / "was_here"
    folder = with_code(checkpoint_factory("deepseek_v3"), tmp_path / "model", marker)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (found,) = ranks.run(START, world_size=1, folder=folder, load_format="auto")
    assert "Cannot find any model weights" in found["error"]
    assert not marker.exists()
