"""Whole runs: four processes, the real Megatron, the real vLLM, the real task."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.config import RLConfig
from mcore_rl.flags.derived import derive_flags
from mcore_rl.job.reading import make_parser
from mcore_rl.model.architecture_flags import megatron_flags
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.observe import run_lock
from mcore_rl.observe.run_directory import read_config
from mcore_rl.observe.timeline import TRAINER, read_timeline
from tests.e2e.recipe import metrics_of, run_job, task_flags
from tests.rank_pool import ROOT, RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
LAYOUT = [
    *("--tensor-model-parallel-size", "2"),
    *("--pipeline-model-parallel-size", "2"),
    *("--expert-model-parallel-size", "2"),
]


@pytest.fixture(scope="module")
def short_run(warmed_checkpoint: Path, ranks: RankPool, tmp_path_factory: Any) -> Path:
    """The main job, cut to 12 steps, with a checkpoint and an export at the end."""
    run_dir = tmp_path_factory.mktemp("runs") / "short"
    flags = task_flags(
        warmed_checkpoint,
        run_dir,
        *("--rl-num-steps", "12", "--rl-eval-interval", "12"),
        *("--rl-trace", "1", "--rl-offload", "gradients,optimizer,parameters"),
        *("--rl-export-hf", str(run_dir / "exported")),
    )
    ended = run_job(ranks, flags, world_size=4, timeout_seconds=600)
    ended.require(0)
    (run_dir / "stdout.txt").write_text(ended.ranks[0].output)
    return run_dir


def test_held_out_accuracy_rises(short_run: Path) -> None:
    accuracies = [m["eval/accuracy"] for m in metrics_of(short_run) if "eval/accuracy" in m]
    assert len(accuracies) == 2
    assert 0.15 <= accuracies[0] <= 0.5
    assert accuracies[1] >= accuracies[0] + 0.2


def test_its_result_is_distilled_without_rewards(
    short_run: Path, warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The policy that it began with learns from the one that it made."""
    flags = task_flags(
        warmed_checkpoint,
        tmp_path / "run",
        *("--rl-num-steps", "16", "--rl-eval-interval", "0", "--rl-reward", "none"),
        *("--rl-teacher", str(short_run / "exported")),
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1"),
        *("--expert-model-parallel-size", "1"),
    )
    run_job(ranks, flags, world_size=2).require(0)
    steps = metrics_of(tmp_path / "run")[:16]
    assert {metrics["reward/mean"] for metrics in steps} == {0}
    found = [metrics["teacher/reverse_kl"] for metrics in steps]
    assert found[0] > 0.05 and sum(found[-4:]) / 4 < 0.2 * found[0]


def test_engine_and_actor_agree_at_every_step(short_run: Path) -> None:
    mismatch = [m["kl/rollout_actor"] for m in metrics_of(short_run)[:-1]]
    assert len(mismatch) == 12 and max(mismatch) < 0.01


def test_hand_over_moves_the_lower_bound_at_every_step(short_run: Path) -> None:
    for metrics in metrics_of(short_run)[:-1]:
        received = metrics["reshard/received_bytes_max"]
        assert received == metrics["reshard/lower_bound_bytes_max"] > 0
        assert metrics["reshard/weight_version"] == metrics["step"] + 1


def test_run_directory_holds_what_its_contract_names(short_run: Path) -> None:
    names = """step reward/mean reward/std loss/policy kl/ref kl/rollout_actor entropy grad_norm
        clip_fraction response_tokens/mean time/data_seconds time/rollout_seconds
        time/reward_seconds time/log_probs_seconds time/advantages_seconds time/train_seconds
        time/reshard_to_rollout_seconds time/reshard_to_train_seconds time/checkpoint_seconds
        time/step_seconds reshard/received_bytes_max reshard/lower_bound_bytes_max
        reshard/peak_extra_bytes_max reshard/weight_version
        throughput/rollout_tokens_per_second throughput/train_tokens_per_second
        memory/host_peak_bytes memory/device_peak_bytes""".split()
    for metrics in metrics_of(short_run)[:-1]:
        assert metrics.keys() >= set(names)
    config = read_config(short_run / "config.yaml")
    assert config.resolved["num_layers"] == 4 and config.resolved["rl_reward"] == "arithmetic"
    assert "reward" not in config.resolved and config.given["rl-num-steps"] == 12
    summary = json.loads((short_run / "summary.json").read_text())
    assert summary["metrics"]["eval/accuracy"].keys() == {"first", "last", "best"}
    assert summary["versions"]["megatron-core"] == "0.19.2"
    rollouts = [json.loads(r) for r in (short_run / "rollouts.jsonl").read_text().splitlines()]
    assert {r["weight_version"] for r in rollouts} == set(range(1, 13))
    assert any((short_run / "tensorboard").iterdir())
    assert any((short_run / "checkpoints").glob("iter_0000012"))
    shown = (short_run / "stdout.txt").read_text()
    assert "what was learned" in shown and "continue" in shown and "[Reshard]" in shown


def test_timeline_has_the_stages_of_metrics(short_run: Path) -> None:
    *steps, last = read_timeline(short_run / "timeline.jsonl")
    assert [(line.role, line.step) for line in steps] == [(TRAINER, step) for step in range(12)]
    assert last.step == 12 and "eval" in {span.what for span in last.spans}
    for metrics, line in zip(metrics_of(short_run)[:-1], steps, strict=True):
        seconds: dict[str, float] = {}
        for what, start, end in line.spans:
            stage = {"reward": "rollout"}.get(what, what)  # its wait for an engine is rollout
            seconds[stage] = seconds.get(stage, 0.0) + end - start
        expected = {what: metrics[f"time/{what}_seconds"] for what in seconds}
        expected["rollout"] += metrics["time/reward_seconds"]
        assert seconds.keys() >= {"reshard_to_rollout", "rollout", "reshard_to_train", "train"}
        assert seconds == pytest.approx(expected, abs=2e-3)
        # One after the other; a clock that is set does not run evenly.
        assert all(one.end <= other.start + 0.1 for one, other in pairwise(line.spans))


def test_trace_has_passes_and_the_prefetch_during_the_rollout(short_run: Path) -> None:
    events = json.loads((short_run / "trace" / "rank0.json").read_text())["traceEvents"]
    at = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"}
    assert at.keys() >= {"forward", "backward", "optimizer", "all-grads-sync", "reshard_to_rollout"}
    order = [at[name] for name in ("first responses", "prefetch", "last responses")]
    assert all(begin <= end for begin, end in order)
    assert all(one[1] <= other[0] for one, other in pairwise(order))
    rollout = at["rollout"]
    assert rollout[0] <= order[0][0] and order[-1][1] <= rollout[1]


def test_exported_policy_is_a_checkpoint_for_transformers(short_run: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(short_run / "exported")
    assert AutoTokenizer.from_pretrained(short_run / "exported").chat_template


def test_engine_scores_the_warmed_up_model_as_megatron_does(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    out = tmp_path / "verify.json"
    flags = task_flags(warmed_checkpoint, tmp_path / "unused", "--rl-verify-out", str(out))
    watched = ranks.run("tests.e2e.jobs:watched_verify", world_size=4, tokens=flags)
    for rank in watched:
        assert rank["code"] == 0
        (start,) = rank["starts"]
        assert min(start["before"].values()) > 0
        assert set(start["while_starting"].values()) == {0}
        assert start["same_state"] and start["same_draws"]
    result = json.loads(out.read_text())
    assert result["stored_equal"] is True and result["differing"] == []
    assert result["mean_abs_difference"] <= 0.03
    assert result["num_tensors"] > 100 and result["received_bytes_max"] > 0
    for ids, megatron, vllm in zip(
        result["token_ids"],
        result["megatron_log_probs"],
        result["vllm_log_probs"],
        strict=True,
    ):
        assert len(megatron) == len(vllm) == len(ids) - 1
    assert result["max_abs_difference"] >= result["mean_abs_difference"] > 0


def test_engines_on_ranks_of_their_own_are_verified(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    out = tmp_path / "verify.json"
    more = ("--rl-rollout-ranks", "2-3", "--rl-verify-out", str(out))
    one_stage = ("--pipeline-model-parallel-size", "1")
    flags = task_flags(warmed_checkpoint, tmp_path / "unused", *one_stage, *more)
    run_job(ranks, flags, world_size=4, job="verify").require(0)
    result = json.loads(out.read_text())
    assert result["stored_equal"] is True and result["differing"] == []
    # All that an engine's rank stores came from the actor's ranks: half of each split tensor.
    assert result["received_bytes_max"] > 1_000_000
    assert 0 < result["mean_abs_difference"] <= 0.03
    for ids, values in zip(result["token_ids"], result["vllm_log_probs"], strict=True):
        assert len(values) == len(ids) - 1


@pytest.mark.skipif(not GSM8K.is_dir(), reason="../shared/data/gsm8k is not there")
def test_two_steps_on_gsm8k(warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path) -> None:
    flags = [
        *("--rl-hf-checkpoint", str(warmed_checkpoint)),
        *("--rl-prompts", str(GSM8K / "train.jsonl")),
        *("--rl-eval-prompts", str(GSM8K / "test.jsonl")),
        *("--rl-prompt-column", "question", "--rl-answer-column", "answer"),
        *("--rl-reward", "gsm8k", "--rl-num-steps", "2", "--rl-num-eval-prompts", "4"),
        *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "2"),
        *("--rl-max-prompt-tokens", "400", "--rl-max-response-tokens", "16"),
        *("--rl-run-dir", str(tmp_path / "gsm8k"), "--micro-batch-size", "2"),
        *LAYOUT,
    ]
    ranks.run("tests.e2e.jobs:train", world_size=4, tokens=flags)
    *steps, final = metrics_of(tmp_path / "gsm8k")
    assert [m["step"] for m in steps] == [0, 1]
    assert all(m["reward/failures"] == 0 and m["kl/rollout_actor"] < 0.01 for m in steps)
    assert "eval/accuracy" in final


def test_fork_brings_its_own_parser_and_model(
    warmed_checkpoint: Path, ranks: RankPool, tmp_path: Path
) -> None:
    ours = [
        *("--rl-hf-checkpoint", str(warmed_checkpoint)),
        *("--rl-prompts", str(warmed_checkpoint / "prompts" / "train.jsonl")),
        *("--rl-reward", "arithmetic", "--rl-num-steps", "1"),
        *("--rl-num-prompts-per-step", "2", "--rl-num-samples-per-prompt", "2"),
        *("--rl-max-prompt-tokens", "32", "--rl-max-response-tokens", "8"),
        *("--rl-run-dir", str(tmp_path / "fork")),
    ]
    shape = read_model_shape(warmed_checkpoint)
    given = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    config = RLConfig.of(
        num_prompts_per_step=2,
        num_samples_per_prompt=2,
        num_steps=1,
        max_prompt_tokens=32,
        max_response_tokens=8,
    )
    derived = derive_flags(shape, config, given, parser=make_parser(), platform=WITHOUT_CUDA)
    megatron = [*derived.tokens, "--tensor-model-parallel-size", "2"]
    assert set(megatron_flags(shape)) <= set(megatron)
    built = ranks.run(
        "tests.e2e.jobs:train_in_a_fork", world_size=2, tokens=ours, megatron_tokens=megatron
    )
    assert built == [["GPTModel"]] * 2
    assert metrics_of(tmp_path / "fork")[0]["kl/rollout_actor"] < 0.01
    for held in (tmp_path / "fork", tmp_path / "fork" / "checkpoints"):
        assert (held / run_lock.LOCK).is_file()
