"""Code that comes with files, in whole runs: run if asked for, else refused by all ranks."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mcore_rl.trainer.resume import folders
from tests.e2e.recipe import SMALL, Ended, run_job, task_flags
from tests.rank_pool import RankPool
from tests.untrusted import Command, edit_json, need_code_of_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def reseal(place: Path, file: str) -> None:
    """Write the size and digest of a changed file as a save would."""
    content = (place / file).read_bytes()
    sizes = json.loads((place / folders.COMPLETE).read_text())["bytes"]
    edit_json(place / folders.COMPLETE, bytes={**sizes, file: len(content)})
    digests = json.loads((place / folders.INTEGRITY).read_text())["files"]
    digest = hashlib.sha256(content).hexdigest()
    edit_json(place / folders.INTEGRITY, files={**digests, file: digest})


def test_code_is_run_where_it_is_asked_for_and_out_of_a_checkpoint_never(
    tmp_path: Path, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    marker = tmp_path / "was_here"
    model = Path(shutil.copytree(checkpoint_factory("kimi_k2"), tmp_path / "model"))
    need_code_of_tokenizer(model, marker)
    cache = ("--rl-cache-dir", str(tmp_path / "cache"))

    def run(job: str, *more: str) -> Ended:
        tokens = task_flags(model, tmp_path / "run", *SMALL, *cache, *more)
        modules = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
        return run_job(ranks, tokens, job=job, environment=modules)

    def refused(ended: Ended, sentence: Sequence[str]) -> None:
        ended.require(2)
        said = ended.ranks[0].output
        assert all(part in said for part in sentence), said[-6000:]
        assert "Traceback" not in said, said[-6000:]
        assert not marker.exists()  # whichever it is then

    trusted = ("--trust-remote-code",)
    unasked = [f"--rl-hf-checkpoint {model} holds a tokenizer with code", *trusted]
    refused(run("train", "--rl-num-steps", "1"), unasked)
    refused(run("verify"), unasked)
    run("verify", *trusted).require(0)
    assert marker.exists()
    marker.unlink()
    run("train", "--rl-num-steps", "1", *trusted).require(0)
    assert marker.exists()

    # The tokenizer is trusted, the checkpoint of the actor is not.
    marker = tmp_path / "was_here_as_well"
    checkpoints = tmp_path / "run" / "checkpoints"
    place = checkpoints / folders.iteration_name(1)
    metadata = pickle.loads((place / ".metadata").read_bytes())
    metadata.planner_data = Command(marker)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    load = ("--load", str(checkpoints), "--rl-num-steps", "2", *trusted)
    ended = run("train", *load)
    ended.require(2)
    assert ".metadata: " in ended.ranks[0].output, ended.said[-6000:]  # its digest has changed
    reseal(place, ".metadata")
    attack = [f"{place / '.metadata'} holds builtins.exec, which is not part of a checkpoint"]
    refused(run("train", *load), attack)
    pickle.loads((place / ".metadata").read_bytes())
    assert marker.exists(), "the attack would work on torch itself"
