"""A Hugging Face folder that brings code with it: nothing of it is run, by us or by vLLM."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.rank_pool import RankPool
from tests.untrusted import Command, bring_code

pytestmark = pytest.mark.timeout(400)

START = "tests.dist.test_untrusted_model:start_engine"


def start_engine(folder: str, load_format: str) -> dict[str, str]:
    """Start an engine as training does (or as verification: "auto") and let it write a token."""
    from mcore_rl.hybrid_engine.vllm.startup import start_llm
    from tests.engine_samples import small_engine

    dist.init_process_group("gloo")
    try:
        llm = start_llm(small_engine(folder, load_format))
    except Exception as error:  # vLLM has one for each kind of what is wrong with a folder
        return {"error": f"{type(error).__name__}: {error}"}
    return {"tokenizer": type(llm.get_tokenizer()).__name__}


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
