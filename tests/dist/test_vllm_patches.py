"""Each repair of vLLM: what happens without it, and that it does not happen with it.

What vLLM does is in `vllm_patches_worker`, which runs all cases once, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rank_pool import RankPool, run_python

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


@pytest.fixture(scope="module")
def cases(checkpoint_factory: Callable[..., Path], ranks: RankPool) -> dict[str, Any]:
    """Case -> what its ranks returned or how they ended, and the segments they left in /dev/shm."""
    # One model for all: routed experts, and an output layer tied to the embedding.
    checkpoint = checkpoint_factory("qwen3_moe", tie_word_embeddings=True)
    job = "tests.dist.vllm_patches_worker:run"
    (found,) = ranks.run(job, world_size=1, checkpoint=checkpoint, timeout_seconds=800)
    return found


def _scores(cases: dict[str, Any], case: str) -> np.ndarray:
    (rank,) = cases[case]["ranks"]
    assert "result" in rank, rank
    return np.array(rank["result"])


def test_a_reload_leaves_what_a_start_from_disk_leaves(cases):
    assert np.array_equal(_scores(cases, "reloaded"), _scores(cases, "started from disk"))


def test_a_reload_computes_with_other_weights_without_the_patch(cases):
    without = _scores(cases, "reloaded without vllm.repack_experts_on_reload")
    difference = without - _scores(cases, "started from disk")
    assert np.abs(difference).max() > 0.02


def test_expert_parallelism_crashes_without_the_patch(cases):
    ranks = cases["expert parallel unpatched"]["ranks"]
    assert any(rank.get("died_of") == "SIGSEGV" for rank in ranks)


def test_expert_parallelism_gives_the_scores_of_one_rank_with_the_patch(cases):
    """The ranks' partial sums are rounded to bf16: 8 bits, at log-probs of about 5."""
    expected = _scores(cases, "started from disk")
    for rank in cases["expert parallel"]["ranks"]:
        assert np.abs(np.array(rank["result"]) - expected).mean() < 0.03


@pytest.fixture(scope="module")
def shared_memory(cases: dict[str, Any]) -> None:
    if not cases["has shared memory"]:
        pytest.skip("vLLM's build for CPUs without AVX-512 has no shared memory: ranks use gloo")


@pytest.mark.usefixtures("shared_memory")
def test_a_leftover_segment_stops_the_next_run_without_the_patch(cases):
    errors = [rank.get("error", "") for rank in cases["beside a leftover unpatched"]["ranks"]]
    assert any("create shm in SHMManager failed. errno: 17" in error for error in errors)


@pytest.mark.usefixtures("shared_memory")
def test_a_leftover_segment_does_not_matter_with_the_patch(cases):
    ranks = cases["beside a leftover"]["ranks"]
    assert [rank["result"]["total"] for rank in ranks] == [[3.0] * 8] * 2
    first, second = (rank["result"]["name"] for rank in ranks)
    assert first == second
    assert first.startswith("mcore_rl-")


@pytest.mark.usefixtures("shared_memory")
def test_ranks_that_share_cores_do_not_wait_in_shared_memory(cases):
    ranks = cases["more ranks than cores"]["ranks"]
    assert [rank["result"] for rank in ranks] == [{"total": [3.0] * 8, "name": None}] * 2


@pytest.mark.usefixtures("shared_memory")
def test_a_killed_run_leaves_segments_without_the_patch_only(cases):
    for case in ("killed", "killed unpatched"):
        assert [rank["died_of"] for rank in cases[case]["ranks"]] == ["SIGKILL"] * 2
    assert len(cases["killed unpatched"]["left"]) == 2
    assert cases["killed"]["left"] == []


def test_only_what_dead_runs_of_ours_left_is_removed(cases):
    (rank,) = cases["leftovers"]["ranks"]
    assert rank["result"] == {
        "alive": True,
        "dead": False,
        "pid_reused": False,
        "other_namespace": True,
        "not_ours": True,
    }


def test_vllm_loads_the_patches_through_its_plugins_once(tmp_path):
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from vllm.plugins import load_general_plugins
load_general_plugins()
from mcore_rl.patches.registry import applied_patches
from mcore_rl.patches.vllm import patches, register
register()
# rank_map waits for an engine with such a map; which others are needed is up to the CPU, too.
needed = sorted(p.name for p in patches() if p.name != "vllm.rank_map" and p.needed())
assert sorted(applied_patches()) == needed, applied_patches()
assert len(needed) >= 5
print("needed", *needed)
import subprocess
def run(*args, **kwargs):
    raise AssertionError("a process was started")
subprocess.run = run
from vllm.model_executor.models.registry import ModelRegistry
info = ModelRegistry.models["DeepseekV3ForCausalLM"].inspect_model_cls()
assert (info.architecture, info.supports_pp) == ("DeepseekV3ForCausalLM", True)
"""
    # No model is known in the new cache yet.
    run = run_python("-c", code, VLLM_CONFIGURE_LOGGING="0", VLLM_CACHE_ROOT=str(tmp_path))
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    (needed,) = (line.split()[1:] for line in lines if line.startswith("needed "))
    said = [line.split()[1].rstrip(":") for line in lines if line.startswith("[Patch] ")]
    assert sorted(said) == needed
