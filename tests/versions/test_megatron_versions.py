"""The tiny job on other Megatrons: it trains, hands over bit for bit, saves and goes on.

Each is the source of a release, as a package index has it, made a checkout that stands first on
Python's path. By default the oldest alone; `-m versions` takes all of them, and
MCORE_RL_MEGATRON_SOURCES="folder:folder" adds checkouts that no index has, such as Megatron-LM's
main.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recipe import task_flags
from tests.megatron_sources import RELEASES, git, other_sources, release
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.versions, pytest.mark.timeout(1500)]

SMALL = (
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-num-steps", "2", "--save-interval", "1", "--rl-eval-interval", "0"),
    *("--rl-attest", "full"),
    # So that there is a gradient where all responses to each prompt are worth the same.
    *("--rl-entropy-coef", "0.01"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "tried" in metafunc.fixturenames:
        asked_for = "versions" in metafunc.config.option.markexpr
        names = [*(RELEASES if asked_for else RELEASES[:1]), *other_sources()]
        metafunc.parametrize("tried", names, indirect=True, scope="module")


@dataclass(frozen=True)
class Tried:
    """What a Megatron has left behind, in a run of two steps and one that goes on after its first.

    `commit` is that of its checkout, None where it is none.
    """

    version: str | None
    commit: str | None
    first: Path
    resumed: Path
    verified: dict[str, Any]


@pytest.fixture(scope="module")
def tried(request: Any, warmed_checkpoint: Path, tmp_path_factory: Any) -> Iterator[Tried]:
    name = request.param
    source = release(name) if name in RELEASES else Path(name)
    folder = tmp_path_factory.mktemp("versions")
    first, resumed, verified = (folder / name for name in ("first", "resumed", "verified.json"))
    pool = RankPool(megatron=source)
    try:
        for run_dir, more in (
            (first, ()),
            (resumed, ("--load", str(first / "checkpoints"), "--ckpt-step", "1")),
        ):
            flags = task_flags(warmed_checkpoint, run_dir, *SMALL, *more)
            flags += ["--rl-export-hf", str(run_dir / "exported")]
            pool.run("tests.e2e.jobs:train", world_size=4, tokens=flags)
        flags = task_flags(warmed_checkpoint, folder / "unused", "--rl-verify-out", str(verified))
        codes = pool.run("tests.e2e.jobs:verify", world_size=4, tokens=flags)
    finally:
        pool.close()
    assert codes == [0] * 4
    yield Tried(
        version=name if name in RELEASES else None,
        commit=git(source, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"),
        first=first,
        resumed=resumed,
        verified=json.loads(verified.read_text()),
    )


def steps_of(run_dir: Path) -> dict[int, dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {metrics["step"]: metrics for metrics in map(json.loads, lines)}


def exported(run_dir: Path) -> dict[str, str]:
    files = sorted((run_dir / "exported").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_every_hand_over_is_proven_and_the_models_agree(tried: Tried) -> None:
    for step, metrics in steps_of(tried.first).items():
        assert metrics["reshard/weight_version"] == step + 1
        assert metrics["reshard/received_bytes_max"] == metrics["reshard/lower_bound_bytes_max"] > 0
        assert metrics["kl/rollout_actor"] < 0.01 and metrics["grad_norm"] > 0


def test_what_vllm_stores_is_what_its_own_loader_stores(tried: Tried) -> None:
    assert tried.verified["stored_equal"] is True and tried.verified["differing"] == []
    assert tried.verified["mean_abs_difference"] < 0.05  # bfloat16


def test_a_run_goes_on_bit_for_bit(tried: Tried) -> None:
    first, resumed = steps_of(tried.first), steps_of(tried.resumed)
    (last,) = resumed
    same = ("reward/mean", "loss/policy", "grad_norm", "entropy", "kl/rollout_actor")
    assert {name: first[last][name] for name in same} == {n: resumed[last][n] for n in same}
    assert exported(tried.first) == exported(tried.resumed) != {}


def test_the_summary_names_the_code_that_ran(tried: Tried) -> None:
    versions = json.loads((tried.first / "summary.json").read_text())["versions"]
    assert versions.get("megatron-core commit") == tried.commit
    if tried.version is not None:
        assert versions["megatron-core"] == tried.version
