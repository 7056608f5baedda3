"""Runs on the folder of a multimodal model, as Qwen3.5 is published: its text model is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rl.megatron.hf_checkpoint import open_checkpoint
from mcore_rl.model.config_json import read_model_shape
from tests.dist.checkpoints import tensors_of
from tests.e2e.recipe import (
    SMALL,
    assert_same_metrics,
    exported_weights,
    metrics_of,
    run_job,
    seeded_metrics,
    task_flags,
)
from tests.multimodal import load_multimodal, make_multimodal
from tests.rank_pool import RankPool
from tests.vllm_servers import RECEIVES, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS, SAVED_AT = 3, 2
EP2 = ("--expert-model-parallel-size", "2", "--rl-deterministic")


@pytest.fixture(scope="module")
def checkpoint(
    checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    text = checkpoint_factory("qwen3_5_moe_text")
    return make_multimodal(text, "qwen3_5_moe", tmp_path_factory.mktemp("whole") / "published")


@pytest.fixture(scope="module")
def run(
    checkpoint: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Run the job with more flags; return the run's directory."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, *more: str, trained: Path = checkpoint) -> Path:
        flags = task_flags(
            trained,
            folder / name,
            *(*SMALL, "--rl-routing-replay", "off", "--rl-reward", "tests.e2e.vowels_reward:score"),
            *("--rl-num-steps", str(NUM_STEPS), "--save-interval", str(SAVED_AT), "--lr", "1e-2"),
            *("--rl-export-hf", str(folder / name / "exported"), *more),
        )
        run_job(ranks, flags, timeout_seconds=800).require(0)
        return folder / name

    return run


@pytest.fixture(scope="module")
def whole(run: Callable[..., Path]) -> Path:
    return run("whole", *EP2, "--rl-attest", "full")


def test_export_has_the_trained_text_model_and_all_else_bit_for_bit(
    checkpoint: Path, whole: Path
) -> None:
    exported = whole / "exported"
    before, after = tensors_of(checkpoint), tensors_of(exported)
    others = open_checkpoint(checkpoint, read_model_shape(checkpoint)).others.keys()
    assert after.keys() == before.keys() and len(others) > 15
    unchanged = {name for name, tensor in before.items() if torch.equal(after[name], tensor)}
    assert unchanged == others
    for name in ("config.json", "preprocessor_config.json", "chat_template.jinja"):
        assert (exported / name).read_bytes() == (checkpoint / name).read_bytes()
    load_multimodal(exported)


def test_engines_sample_from_the_trained_model(whole: Path) -> None:
    metrics = metrics_of(whole)[:NUM_STEPS]
    assert max(each["kl/rollout_actor"] for each in metrics) < 0.01
    assert [each["reshard/attested"] for each in metrics] == [1] * NUM_STEPS


def test_resumed_run_repeats_the_last_step_bit_for_bit(
    run: Callable[..., Path], whole: Path
) -> None:
    checkpoint = ("--load", str(whole / "checkpoints"), "--ckpt-step", str(SAVED_AT))
    resumed = run("resumed", *EP2, *checkpoint)
    expected, found = seeded_metrics(whole), seeded_metrics(resumed)
    assert list(found) == [step for step in expected if step >= SAVED_AT]
    for step, metrics in found.items():
        assert_same_metrics(metrics, expected[step])
    assert exported_weights(resumed) == exported_weights(whole) != {}


def test_servers_of_the_multimodal_class_receive_the_text_model(
    checkpoint_factory: Callable[..., Path],
    warm_python: Path,
    run: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Not Qwen3.5: vLLM's delta net on CPUs fails with a prompt of one token."""
    text = checkpoint_factory("qwen3_vl_moe_text")
    trained = make_multimodal(text, "qwen3_vl_moe", tmp_path / "published")
    options = (*RECEIVES, "--language-model-only")
    with running(trained, 1, *options, python=warm_python) as (server,):
        more = ("--rl-rollout-servers", server.url, "--rl-max-staleness", "0")
        more += ("--expert-model-parallel-size", "1", "--rl-attest", "full")
        found = run("served", *more, trained=trained)
    for metrics in metrics_of(found)[:NUM_STEPS]:
        assert metrics["reshard/attested"] == 1
        assert metrics["mismatch/mean_abs_difference"] < 0.02
