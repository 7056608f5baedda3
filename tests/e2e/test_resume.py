"""A run that is killed and resumed ends like an undisturbed one, bit for bit."""

from __future__ import annotations

import functools
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.observe import run_lock
from mcore_rl.observe.run_directory import read_config
from mcore_rl.rollout.bank import read_records
from mcore_rl.rollout.group_encoding import environments_in
from tests.conftest import load_script
from tests.e2e.recipe import (
    HOOKS,
    assert_pass_at_k_of_each_set,
    assert_same_metrics,
    exported_weights,
    run_job,
    seeded_metrics,
    task_flags,
    write_sources,
)
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, SAVED_AT, KILLED_AFTER = 4, 2, 2  # the third step is done twice
# What step 2 writes in the background is completed at the end of the third step, before which the
# kill comes: the second step is done twice as well. Steps 2 and 4 stay, as without it.
IN_BACKGROUND = "--async-save --save-interval 1 --save-retain-interval 2 "
COMMON = (
    *("--rl-num-steps", str(NUM_STEPS), "--save-interval", str(SAVED_AT)),
    *("--rl-num-prompts-per-step", "8", "--rl-num-samples-per-prompt", "4"),
    *("--rl-eval-interval", "4", "--rl-num-eval-prompts", "32"),
    *("--rl-reference-refresh-interval", "1"),
    # Else which engine samples what depends on their speed, and last bits on who shares a batch.
    "--rl-deterministic",
    # Draws from Megatron's generators in every forward pass of training, on every rank.
    *("--hidden-dropout", "0.1"),
    *("--lr-decay-style", "linear", "--lr-warmup-iters", "1", "--min-lr", "1e-6"),
)
RUNS = {
    # How many prompts a step draws depends on their rewards, and what is unfinished goes on, in
    # conversation with an environment.
    "grpo TP2 PP2 VPP2 EP2": (
        4,
        # What is unfinished is of either source.
        "--rl-prompts {task}/train.jsonl=0.7,{task}/heldout.jsonl=0.3 "
        "--rl-eval-prompts {task}/heldout.jsonl "
        "--rl-environment calculator --rl-reward environment --rl-max-turns 4 "
        "--rl-max-response-tokens 24 "
        "--rl-algorithm grpo --rl-kl-coef 0.05 --rl-dynamic-sampling --rl-max-refills 2 "
        "--rl-import {hooks}/picky_filter.py --rl-group-filter picky "
        "--rl-num-mini-batches 2 --moe-router-bias-update-rate 1e-3 --rl-routing-replay r3 "
        "--num-layers-per-virtual-pipeline-stage 1 "
        "--rl-partial-rollouts --rl-oversample 2 --rl-max-staleness 2",
    ),
    "ppo DP2, critic TP2, saved in the background": (
        2,
        IN_BACKGROUND
        + "--rl-algorithm ppo --rl-kl-reward-coef 0.05 --rl-kl-target 0.1 --rl-entropy-target 9 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--rl-critic-tp-size 2 --rl-critic-ep-size 2 --moe-token-dispatcher-type allgather "
        "--rl-prompts {sources}/train.yaml --rl-eval-prompts {sources}/eval.yaml "
        "--rl-curriculum less --rl-eval-samples 4 --rl-eval-temperature 0.7",
    ),
    # The reference becomes the base with the adapters of each step.
    "ppo of adapters, critic apart, saved in the background": (
        2,
        IN_BACKGROUND
        + "--rl-algorithm ppo --rl-kl-reward-coef 0.05 --rl-kl-target 0.1 --rl-critic-ranks 1 "
        "--rl-lora-rank 4 --lr 1e-3 "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--expert-model-parallel-size 1",
    ),
    "grpo, Megatron-FSDP": (
        2,
        "--rl-algorithm grpo --rl-kl-coef 0.05 --use-megatron-fsdp --ckpt-format fsdp_dtensor "
        "--data-parallel-sharding-strategy optim_grads_params "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--expert-model-parallel-size 1",
    ),
    # The reference is what the run began with, and no folder of Hugging Face has it. Every epoch
    # divides the samples anew.
    "grpo, begun with a Megatron checkpoint": (
        1,
        "--rl-algorithm grpo --rl-kl-coef 0.05 --rl-reference-refresh-interval 0 "
        "--rl-num-mini-batches 2 --rl-num-epochs 2 --pretrained-checkpoint {trained} "
        "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--expert-model-parallel-size 1",
    ),
}
TRAINED_BEFORE = (
    "--rl-num-steps 2 --lr 1e-3 --rl-reference-refresh-interval 0 --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 1 --expert-model-parallel-size 1"
)


@dataclass(frozen=True)
class Run:
    """What a run has left behind, and what its first rank has said."""

    folder: Path
    said: str
    starts: list[Any]  # what `starts_watched` has seen on each rank, if it ended well

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        return seeded_metrics(self.folder)

    @property
    def weights(self) -> dict[str, str]:
        return exported_weights(self.folder)


def run(
    ranks: RankPool,
    checkpoint: Path,
    folder: Path,
    num_ranks: int,
    flags: str,
    *,
    like: Run | None = None,
    ends_after: int | None = None,
    goes_on: bool = False,
) -> Run:
    """With `like` all flags but the folders come from that run's config.yaml."""
    tokens = task_flags(checkpoint, folder, *COMMON, *flags.split())
    if like is not None:
        tokens = ["--rl-config", str(like.folder / "config.yaml"), "--rl-run-dir", str(folder)]
    tokens += ["--rl-export-hf", str(folder / "exported"), "--rl-export-interval", "4"]
    # Megatron-FSDP refuses one queue to the device.
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"} if "fsdp" in flags else {}
    if ends_after is not None:
        tokens += ["--rl-import", str(HOOKS / "end_at_step.py"), str(HOOKS / "picky_filter.py")]
        environment["MCORE_RL_TEST_END_AT_STEP"] = str(ends_after)
    if goes_on:
        tokens += ["--load", str(folder / "checkpoints")]
    options: dict[str, Any] = {"world_size": num_ranks, "environment": environment}
    ended = run_job(ranks, tokens, job="watched_train", timeout_seconds=400, **options)
    if ends_after is None:
        ended.require(0)
    else:
        codes = {rank.exit_code for rank in ended.ranks}
        assert -signal.SIGKILL in codes and 0 not in codes, ended.said[-3000:]
    return Run(folder, ended.ranks[0].output, [rank.result for rank in ended.ranks])


@pytest.fixture(scope="module")
def sources(warmed_checkpoint: Path, tmp_path_factory: Any) -> Path:
    """A folder of `write_sources`."""
    folder: Path = tmp_path_factory.mktemp("sources")
    return write_sources(warmed_checkpoint, folder)


@pytest.fixture(scope="module", params=RUNS, ids=list(RUNS))
def runs(
    request: Any, warmed_checkpoint: Path, sources: Path, ranks: RankPool, tmp_path_factory: Any
) -> tuple[Run, Run, Run]:
    """Undisturbed; the same by its config.yaml, and killed; and continuing after that."""
    num_ranks, flags = RUNS[request.param]
    folder = tmp_path_factory.mktemp("resume")
    if "{trained}" in flags:
        run(ranks, warmed_checkpoint, folder / "before", num_ranks, TRAINED_BEFORE)
    if "{task}" in flags:
        load_script("calculator_task").write_prompts(folder / "task", 0)
    flags = flags.format(
        trained=folder / "before" / "checkpoints",
        sources=sources,
        task=folder / "task",
        hooks=HOOKS,
    )
    whole = run(ranks, warmed_checkpoint, folder / "whole", num_ranks, flags)
    again = functools.partial(
        run, ranks, warmed_checkpoint, folder / "cut", num_ranks, flags, like=whole
    )
    killed = again(ends_after=KILLED_AFTER)
    resumed = again(goes_on=True)
    return whole, killed, resumed


def test_metrics_and_weights_are_those_of_an_undisturbed_run(runs: tuple[Run, Run, Run]) -> None:
    """The first steps, done before the kill, show that config.yaml gives the same metrics twice."""
    whole, _, resumed = runs
    assert whole.metrics.keys() == resumed.metrics.keys() == set(range(NUM_STEPS + 1))
    for step, metrics in whole.metrics.items():
        assert_same_metrics(resumed.metrics[step], metrics)
    assert whole.weights == resumed.weights and whole.weights
    # The only export, of the last step, is the best.
    assert exported_weights(whole.folder, "exported-best") == whole.weights


def test_responses_were_pending_at_the_checkpoint_and_continued(runs: tuple[Run, Run, Run]) -> None:
    whole, _, resumed = runs
    if "rollout/pending_groups" not in whole.metrics[0]:
        pytest.skip("this run ends every response in the step that began it")
    assert whole.metrics[SAVED_AT - 1]["rollout/pending_groups"] > 0
    assert max(resumed.metrics[step]["rollout/staleness_max"] for step in (2, 3)) > 0
    saved = whole.folder / "checkpoints" / f"iter_{SAVED_AT:07d}" / "rollout"
    groups = [data for file in saved.glob("group_*.bank") for _, data in read_records(file)]
    assert groups and any(environments_in(data) for data in groups)
    assert [resumed.metrics[step]["rollout/failures"] for step in range(NUM_STEPS)] == [0] * 4


def test_a_group_filter_decides_the_same_again(runs: tuple[Run, Run, Run]) -> None:
    """`assert_same_metrics` compares the counts of the runs."""
    _, _, resumed = runs
    if "rollout/filtered/odd" not in resumed.metrics[0]:
        pytest.skip("this run has no filter")
    steps = [resumed.metrics[step] for step in range(SAVED_AT, NUM_STEPS)]
    assert sum(each[f"rollout/filtered/{why}"] for each in steps for why in ("odd", "third")) > 0


def test_sources_keep_their_shares_rewards_and_limits(runs: tuple[Run, Run, Run]) -> None:
    """The two held-out sets have metrics of their own."""
    _, _, resumed = runs
    if "eval/same/accuracy" not in resumed.metrics[0]:
        pytest.skip("this run has one source, or a step takes those groups that end first")
    for metrics in (resumed.metrics[step] for step in range(NUM_STEPS)):
        assert [metrics[f"source/{name}/prompts"] for name in ("easy", "hard")] == [6, 2]
        assert metrics["source/hard/response_tokens_mean"] <= 4
        assert "reward/exact_match/failures" in metrics and metrics["reward/failures"] == 0
    assert resumed.metrics[NUM_STEPS - 1]["curriculum/settled_share"] > 0
    for metrics in (resumed.metrics[0], resumed.metrics[NUM_STEPS]):
        assert_pass_at_k_of_each_set(metrics)
    state = resumed.folder / "checkpoints" / f"iter_{SAVED_AT:07d}" / "rollout"
    assert (state / "curriculum.safetensors").is_file()


def test_the_run_directory_says_how_it_was_made(runs: tuple[Run, Run, Run]) -> None:
    whole, _, resumed = runs
    first, again = (read_config(run.folder / "config.yaml") for run in (whole, resumed))
    assert first.given["hidden-dropout"] == 0.1 and first.resolved["hidden_dropout"] == 0.1
    assert (
        again.given.items() >= {**first.given, "rl-export-hf": again.given["rl-export-hf"]}.items()
    )
    assert again.about["versions"]["megatron-core"] == "0.19.2"
    assert again.about["ranks"] >= 1 and again.about["command"]


def test_training_is_away_while_engines_start(runs: tuple[Run, Run, Run]) -> None:
    """With all that a run has by then: critic, reference, what a checkpoint brought."""
    whole, _, resumed = runs
    for run_, has_moments in ((whole, False), (resumed, True)):
        with_engines = [starts for starts in run_.starts if starts]  # not a critic's own ranks
        assert with_engines
        for (start,) in with_engines:
            assert min(start["before"].values()) > 0
            assert start["while_starting"] == dict.fromkeys(start["before"], 0)
            assert start["same_state"] and start["same_draws"]
        if has_moments:
            (before,), (now,) = whole.starts[0], resumed.starts[0]
            assert now["num_tensors"] > before["num_tensors"]


def test_the_reference_is_in_checkpoints_where_no_folder_has_it(
    runs: tuple[Run, Run, Run],
) -> None:
    """It was renewed, or is a Megatron checkpoint's."""
    for each in runs[::2]:
        for step in (SAVED_AT, NUM_STEPS):
            assert (each.folder / "checkpoints" / f"iter_{step:07d}" / "reference").is_dir()


def test_the_run_says_where_it_resumes(runs: tuple[Run, Run, Run]) -> None:
    _, killed, resumed = runs
    given = read_config(killed.folder / "config.yaml").given
    first = given["save-interval"] if "async-save" in given else SAVED_AT
    assert "[Resume] nothing is complete" not in killed.said
    assert f"[Resume] resuming from step {first} of {resumed.folder}/checkpoints" in resumed.said
    lines = (resumed.folder / "metrics.jsonl").read_text().splitlines()
    num_repeated = KILLED_AFTER + 1 - first
    assert len(lines) == NUM_STEPS + 1 + num_repeated


def test_nothing_is_left_in_the_folder_of_checkpoints_but_checkpoints(
    runs: tuple[Run, Run, Run],
) -> None:
    *_, resumed = runs
    names = {"iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"}
    folder = resumed.folder / "checkpoints"
    assert {path.name for path in folder.iterdir()} - {"critic"} == {*names, run_lock.LOCK}
    if (folder / "critic").is_dir():
        assert {path.name for path in (folder / "critic").iterdir()} == names
