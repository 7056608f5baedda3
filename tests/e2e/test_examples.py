"""What examples/ shows, on a tiny random Qwen3 and a few prompts.

`fork/` has test_fork.py, the Slurm files tests/unit/test_examples.py.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.checkpoints import differing, tensors_of
from tests.e2e.recipe import metrics_of, run_example
from tests.rank_pool import ROOT, RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "examples"
# As many steps, prompts and tokens as a machine with 2 cores does in seconds.
SHORT = (
    *("--rl-num-steps", "2", "--rl-max-prompt-tokens", "64", "--rl-max-response-tokens", "8"),
    *("--rl-max-tokens-per-microbatch", "512", "--rl-rollout-kv-cache-gib", "0.25"),
    *("--rl-eval-interval", "0", "--save-interval", "2"),
)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the form of GSM8K, and with a "prompt" for the example that names no column."""
    file = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    questions = [f"Ann has {n} apples and eats one. How many?" for n in range(2, 18)]
    rows = [
        {"question": question, "prompt": question, "answer": f"{n} - 1 = {n - 1}\n#### {n - 1}"}
        for n, question in enumerate(questions, start=2)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def lines_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_gsm8k_with_qwen3_runs_by_its_script(
    checkpoint_factory: Callable[..., Path], prompts: Path, warm_python: Path, tmp_path: Path
) -> None:
    more = [*SHORT, "--rl-num-prompts-per-step", "2", "--rl-num-samples-per-prompt", "4"]
    more += ["--rl-run-dir", str(tmp_path / "run"), "--rl-cache-dir", str(tmp_path / "cache")]
    arguments = (checkpoint_factory("qwen3"), prompts, *more)
    run_example("gsm8k_qwen3", *arguments, python=warm_python, folder=tmp_path, NPROC="1")
    steps = metrics_of(tmp_path / "run")
    assert [metrics["step"] for metrics in steps] == [0, 1]
    for metrics in steps:
        assert metrics["reward/failures"] == 0 and metrics["kl/rollout_actor"] < 0.01
        gsm8k, form = metrics["reward/gsm8k/mean"], metrics["reward/ends_in_answer/mean"]
        assert metrics["reward/mean"] == pytest.approx(gsm8k + 0.1 * form)
    texts = {rollout["prompt"] for rollout in lines_of(tmp_path / "run", "rollouts.jsonl")}
    assert texts and all("apples" in text for text in texts)


def test_two_sources_run_by_their_script(
    checkpoint_factory: Callable[..., Path], prompts: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The command that two_sources/run.sh makes, with its YAML files beside small data, and more
    samples of each task than of each question. No reward of these differs, so steps draw as many
    prompts as they may."""
    folder, rows = tmp_path / "all", prompts.read_text().splitlines()
    (folder / "data").mkdir(parents=True)
    for name in ("sources.yaml", "heldout.yaml"):
        text = (EXAMPLES / "two_sources" / name).read_text()
        (folder / name).write_text(
            text.replace(
                "max_response_tokens: 512", "max_response_tokens: 4\n  samples_per_prompt: 4"
            )
        )
    tasks = [
        {"text": f"Return x + {n}.", "test_list": [f"assert add(1) == {n + 1}"]}
        for n in range(1, 9)
    ]
    for part in ("train", "test"):
        (folder / "data" / f"gsm8k_{part}.jsonl").write_text("\n".join(rows))
        lines = map(json.dumps, tasks)
        (folder / "data" / f"mbpp_{part}.jsonl").write_text("\n".join(lines))
    more = [*SHORT, "--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "2"]
    more += ["--rl-max-prompt-tokens", "192"]
    more += ["--rl-run-dir", str(tmp_path / "run"), "--rl-cache-dir", str(tmp_path / "cache")]
    more += ["--rl-eval-interval", "2", "--rl-num-eval-prompts", "2"]
    more += ["--rl-num-logged-rollouts", "16", "--rl-oversample", "1.5"]
    more += ["--rl-dynamic-sampling", "--rl-max-refills", "1"]
    script = EXAMPLES / "two_sources" / "run.sh"
    said = run_with_echo(tmp_path, script, checkpoint_factory("qwen3"), folder, *more)
    tokens = said.partition("mcore_rl.train\n")[2].splitlines()
    config = EXAMPLES / "gsm8k_qwen3" / "config.yaml"
    tokens[tokens.index("--rl-config") + 1] = str(config)
    ranks.run("tests.e2e.jobs:train", world_size=1, tokens=tokens)
    first, _, last = metrics_of(tmp_path / "run")
    assert (first["source/math/prompts"], first["source/code/prompts"]) == (3, 1)
    assert first["source/code/response_tokens_mean"] <= 4
    lines = map(json.loads, (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines())
    groups = Counter((each["step"], each["draw"], each["source"]) for each in lines)
    for step in (0, 1):
        sizes = [(source, size) for (at, _, source), size in groups.items() if at == step]
        assert sorted(sizes) == [("code", 4), *[("math", 2)] * 3]
    assert first["rollout/uninformative_share"] == 1 and first["rollout/dropped_samples"] > 0
    for name in ("gsm8k", "python_sandbox"):
        assert first[f"reward/{name}/failures"] == 0
    for name in ("math", "code"):
        assert 0 <= last[f"eval/{name}/pass@1"] <= last[f"eval/{name}/pass@4"] <= 1
    assert "eval/math/maj@4" in last and "eval/code/maj@4" not in last


def test_ppo_with_own_reward_and_loss(
    checkpoint_factory: Callable[..., Path], prompts: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The command that ppo/run.sh makes, with the files of own_parts/ beside it."""
    own = EXAMPLES / "own_parts"
    more = [*SHORT, "--rl-num-prompts-per-step", "8", "--rl-critic-warmup-steps", "1"]
    more += ["--rl-import", *(str(own / f"{part}.py") for part in ("reward", "loss", "sampler"))]
    more += ["--rl-reward", "gsm8k,brevity", "--rl-policy-loss", "spo"]
    more += ["--rl-sampler", "forks", "--rl-fork-at", "2", "--rl-num-samples-per-prompt", "2"]
    more += ["--rl-num-logged-rollouts", "100"]
    more += ["--rl-run-dir", str(tmp_path / "run"), "--rl-cache-dir", str(tmp_path / "cache")]
    said = run_with_echo(
        tmp_path, EXAMPLES / "ppo" / "run.sh", checkpoint_factory("qwen3"), prompts, *more
    )
    launch, _, tokens = said.partition("mcore_rl.train\n")
    assert launch.split() == ["-m", "mcore_rl.launch", "--nproc-per-node", "2", "-m"]
    ranks.run("tests.e2e.jobs:train", world_size=2, tokens=tokens.splitlines())
    warm_up, step = metrics_of(tmp_path / "run")
    assert "loss/policy" not in warm_up and "loss/policy" in step
    assert all("loss/value" in metrics for metrics in (warm_up, step))
    assert 0 < step["reward/brevity/mean"] <= 1
    assert step["reward/mean"] == step["reward/brevity/mean"] + step["reward/gsm8k/mean"]
    # The engine's log-probs, and those of the responses that the function has put together.
    assert step["kl/rollout_actor"] < 0.01
    lines = [*map(json.loads, (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines())]
    pairs = [[each["response"] for each in lines if each["draw"] == draw] for draw in range(16)]
    assert all(first[:1] == second[:1] for first, second in pairs)
    assert any(first != second for first, second in pairs)


def test_a_larger_teacher_is_learned_from_without_rewards(
    checkpoint_factory: Callable[..., Path], prompts: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The command that distillation/run.sh makes; the prompts' answers are not read."""
    teacher = checkpoint_factory("qwen3", "tiny", seed=6)
    more = [*SHORT, "--rl-num-prompts-per-step", "8", "--lr", "2e-3", "--rl-num-steps", "12"]
    more += ["--rl-run-dir", str(tmp_path / "run"), "--rl-cache-dir", str(tmp_path / "cache")]
    more += ["--rl-teacher-form", "topk", "--rl-teacher-top-k", "32"]
    script = EXAMPLES / "distillation" / "run.sh"
    said = run_with_echo(tmp_path, script, checkpoint_factory("qwen3"), teacher, prompts, *more)
    _, _, tokens = said.partition("mcore_rl.train\n")
    ranks.run("tests.e2e.jobs:train", world_size=2, tokens=tokens.splitlines())
    steps = [metrics for metrics in metrics_of(tmp_path / "run") if "loss/teacher" in metrics]
    assert len(steps) == 12 and all(metrics["reward/mean"] == 0 for metrics in steps)
    # Not teacher/reverse_kl: the estimate from the 128 sampled tokens of a step is mostly noise.
    assert 0 < steps[-1]["loss/teacher"] < 0.5 * steps[0]["loss/teacher"]
    assert (tmp_path / "run" / "checkpoints").is_dir()


def test_lora_trains_an_adapter_and_exports_it(
    checkpoint_factory: Callable[..., Path], prompts: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Engines have ranks of their own, and get the base once and adapters at each step."""
    checkpoint, adapter = checkpoint_factory("qwen3"), tmp_path / "adapter"
    more = "--rl-lora-rollout adapters --rl-rollout-ranks 2".split()
    more += ["--rl-rollout-tp-size", "1", "--rl-max-staleness", "0"]
    more += [*SHORT, "--rl-num-prompts-per-step", "2", "--rl-export-hf", str(tmp_path / "merged")]
    more += ["--rl-import", str(EXAMPLES / "own_parts" / "reward.py"), "--rl-reward", "brevity"]
    more += ["--rl-run-dir", str(tmp_path / "run"), "--rl-cache-dir", str(tmp_path / "cache")]
    more += ["--no-rl-dither"]  # so that the sum below is rounded as the export is
    said = run_with_echo(
        tmp_path, EXAMPLES / "lora" / "run.sh", checkpoint, prompts, adapter, *more
    )
    _, _, tokens = said.partition("mcore_rl.train\n")
    ranks.run("tests.e2e.jobs:train", world_size=3, tokens=tokens.splitlines())
    steps = metrics_of(tmp_path / "run")
    assert all(metrics["kl/rollout_actor"] < 0.01 for metrics in steps)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (32, 64)
    factors = load_file(adapter / "adapter_model.safetensors")
    assert any(value.any() for name, value in factors.items() if "lora_B" in name)
    base, merged = tensors_of(checkpoint), tensors_of(tmp_path / "merged")
    first, second = (metrics["reshard/received_bytes_max"] for metrics in steps)
    assert second == sum(2 * factor.numel() for factor in factors.values())
    assert first == second + sum(weight.nbytes for weight in base.values())
    for name, value in merged.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base[name]
        if f"{layer}.lora_A.weight" in factors:
            a, b = (factors[f"{layer}.lora_{factor}.weight"].double() for factor in "AB")
            expected = (expected.double() + 2.0 * b @ a).to(expected.dtype)
        assert torch.equal(value, expected), name


def test_ppo_continues_from_supervised_training(
    checkpoint_factory: Callable[..., Path], prompts: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Both commands of sft_then_grpo/run.sh, with a critic, which begins then. With a rate of 0,
    the policy keeps its weights."""
    taught = tmp_path / "taught.jsonl"
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    answers = [{"prompt": row["prompt"], "response": row["answer"]} for row in rows]
    taught.write_text("".join(json.dumps(row) + "\n" for row in answers))
    short = [*SHORT, "--rl-num-steps", "3", "--rl-num-prompts-per-step", "4"]
    short += ["--rl-max-response-tokens", "48", "--rl-cache-dir", str(tmp_path / "cache")]
    script, folder = EXAMPLES / "sft_then_grpo" / "run.sh", checkpoint_factory("qwen3")
    said = run_with_echo(tmp_path, script, folder, taught, prompts, *short, RUNS=str(tmp_path))
    _, first, second = said.split("mcore_rl.train\n")
    sft = first.removesuffix("-m\nmcore_rl.launch\n--nproc-per-node\n2\n-m\n").splitlines()
    exported = [tmp_path / "sft_hf", tmp_path / "ppo_hf"]
    # SHORT would have the engine's flag, which supervised training refuses.
    at = sft.index("--rl-rollout-kv-cache-gib")
    del sft[at : at + 2]
    sft += ["--lr", "1e-2", "--rl-export-hf", str(exported[0])]
    ppo = [*second.splitlines(), "--rl-num-steps", "5", "--rl-num-samples-per-prompt", "4"]
    ppo += ["--rl-algorithm", "ppo", "--rl-critic-lr", "1e-3", "--rl-critic-warmup-steps", "4"]
    ppo += ["--lr", "0", "--rl-kl-coef", "0.1", "--rl-export-hf", str(exported[1])]
    for tokens in (sft, ppo):
        ranks.run("tests.e2e.jobs:train", world_size=2, tokens=tokens)
    taught_steps, steps = (metrics_of(tmp_path / name) for name in ("sft", "grpo"))
    losses = [metrics["loss/sft"] for metrics in taught_steps]
    assert len(losses) == 3 and losses[2] < losses[0] - 1
    assert [metrics["step"] for metrics in steps] == [3, 4]
    assert ["loss/policy" in metrics for metrics in steps] == [False, True]
    assert steps[0]["critic/value_mean"] == 0.0 != steps[1]["critic/value_mean"]
    checkpoints = tmp_path / "grpo" / "checkpoints"
    assert (checkpoints / "critic" / "iter_0000005").is_dir()
    # The engine has the weights, and the reference is the same policy.
    assert steps[0]["kl/rollout_actor"] < 0.01 and steps[1]["kl/ref"] == 0.0
    assert differing(*exported, at_least=10) == []
    assert differing(folder, exported[0], at_least=10) != []


def run_with_echo(folder: Path, script: Path, *arguments: object, **environment: str) -> str:
    """What a script's `python` is given, a line for each word; NPROC is 2."""
    copy = folder / "examples" / script.parent.name  # without the .venv of a checkout
    copy.mkdir(parents=True)
    for file in script.parent.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "python").chmod(0o755)
    run = subprocess.run(
        ["bash", copy / script.name, *arguments],
        env={"PATH": f"{folder}:{os.defpath}", "NPROC": "2"} | environment,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout
