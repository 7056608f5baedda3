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
from tests.e2e.recipe import task_flags
from tests.rank_pool import RankPool
from tests.untrusted import Command, edit_json, need_code_of_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = (
    *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-eval-interval", "0", "--rl-max-response-tokens", "8"),
)


def reseal(place: Path, file: str) -> None:
    """What whoever has changed a file would do: its size and digest as a save would write them."""
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

    def run(job: str, *more: str) -> tuple[set[int], str]:
        outcomes = ranks.run_raw(
            f"tests.e2e.jobs:{job}",
            world_size=2,
            tokens=task_flags(model, tmp_path / "run", *SMALL, *cache, *more),
            environment={"HF_MODULES_CACHE": str(tmp_path / "modules")},
        )
        return {outcome.exit_code for outcome in outcomes}, outcomes[0].output

    def refused(found: tuple[set[int], str], sentence: Sequence[str]) -> None:
        codes, said = found
        assert codes == {2}, said[-6000:]
        assert all(part in said for part in sentence), said[-6000:]
        assert "Traceback" not in said, said[-6000:]
        assert not marker.exists()  # whichever it is then

    trusted = ("--trust-remote-code",)
    unasked = [f"--rl-hf-checkpoint {model} holds a tokenizer with code", *trusted]
    refused(run("train", "--rl-num-steps", "1"), unasked)
    refused(run("verify"), unasked)
    codes, said = run("verify", *trusted)
    assert codes == {0}, said[-6000:]
    assert marker.exists()
    marker.unlink()
    codes, said = run("train", "--rl-num-steps", "1", *trusted)
    assert codes == {0}, said[-6000:]
    assert marker.exists()

    # The tokenizer is trusted, the checkpoint of the actor is not.
    marker = tmp_path / "was_here_as_well"
    checkpoints = tmp_path / "run" / "checkpoints"
    place = checkpoints / folders.iteration_name(1)
    metadata = pickle.loads((place / ".metadata").read_bytes())
    metadata.planner_data = Command(marker)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    load = ("--load", str(checkpoints), "--rl-num-steps", "2", *trusted)
    codes, said = run("train", *load)
    assert codes == {2} and ".metadata: " in said, said[-6000:]  # its digest has changed
    reseal(place, ".metadata")
    attack = [f"{place / '.metadata'} holds builtins.exec, which is not part of a checkpoint"]
    refused(run("train", *load), attack)
    pickle.loads((place / ".metadata").read_bytes())
    assert marker.exists(), "the attack would work on torch itself"
