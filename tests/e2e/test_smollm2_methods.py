"""Each way of training, with a real instruct model of 135 million parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_rl.megatron.dither import dithered
from tests.dist.checkpoints import log_probs_of
from tests.e2e.recipe import metrics_of, run_job
from tests.rank_pool import RankPool

peft = pytest.importorskip("peft", reason="the extra test is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Of three steps, which learn from 16 samples or rows.
NUM_STEPS = 3
SUPERVISED = ("--rl-num-prompts-per-step", "16")
SAMPLED = (
    *("--rl-num-prompts-per-step", "4", "--rl-num-samples-per-prompt", "4"),
    *("--rl-eval-interval", "0", "--rl-rollout-kv-cache-gib", "0.25"),
)
GRPO = (*SAMPLED, "--rl-reward", "arithmetic", "--lr", "1e-5")
NUM_TEXTS = 12


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    lines = (folder / "prompts" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def taught(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demonstrations, which are pairs as well: the answer alone, and a wrong one in a sentence."""
    file = tmp_path_factory.mktemp("taught") / "train.jsonl"
    rows = [
        {
            "prompt": row["prompt"],
            "response": row["answer"],
            "chosen": row["answer"],
            "rejected": f"The answer is {int(row['answer']) + 1}.",
        }
        for row in rows_of(smollm2, "train")[:64]
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def run(
    smollm2: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Run three steps with more flags; return the run's directory."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, *more: str, world_size: int = 1) -> Path:
        tokens = [
            *("--rl-hf-checkpoint", str(smollm2), "--rl-run-dir", str(folder / name)),
            *("--rl-prompts", str(smollm2 / "prompts" / "train.jsonl")),
            *("--rl-num-steps", str(NUM_STEPS), "--rl-max-tokens-per-microbatch", "512"),
            *("--rl-max-prompt-tokens", "64", "--rl-max-response-tokens", "24"),
            *("--rl-export-hf", str(folder / name / "exported"), *more),
        ]
        run_job(ranks, tokens, world_size=world_size, timeout_seconds=800).require(0)
        return folder / name

    return run


@pytest.fixture(scope="module")
def sft(run: Callable[..., Path], taught: Path) -> Path:
    flags = ("--rl-algorithm", "sft", "--rl-prompts", str(taught), "--lr", "1e-4")
    return run("sft", *flags, *SUPERVISED)


@pytest.fixture(scope="module")
def grpo(run: Callable[..., Path]) -> Path:
    return run("grpo", *GRPO)


def test_demonstrations_are_learned(sft: Path) -> None:
    first, second, third = (metrics["loss/sft"] for metrics in metrics_of(sft))
    # By half, give or take what processors round differently.
    assert third < second < first and third < 0.6 * first, (first, second, third)


def test_preferences_are_learned(run: Callable[..., Path], taught: Path) -> None:
    flags = ("--rl-algorithm", "dpo", "--rl-prompts", str(taught), "--lr", "2e-5")
    steps = metrics_of(run("dpo", *flags, *SUPERVISED))
    assert steps[0]["loss/dpo"] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-3)
    assert steps[-1]["dpo/margin"] > 0.1 and steps[-1]["dpo/accuracy"] == 1


def test_a_teacher_is_learned(run: Callable[..., Path], sft: Path) -> None:
    """The teacher answers by a number alone, and so do more and more responses."""
    flags = ("--rl-teacher", str(sft / "exported"), "--rl-teacher-form", "full")
    steps = metrics_of(
        run(
            "teacher",
            *flags,
            *SAMPLED,
            "--rl-reward",
            "none",
            "--lr",
            "2e-5",
            "--rl-num-steps",
            "6",
        )
    )
    divergences = [metrics["teacher/reverse_kl"] for metrics in steps]
    assert divergences[-1] < divergences[0] / 2, divergences


def test_engines_of_their_own_give_the_same_model(run: Callable[..., Path], grpo: Path) -> None:
    flags = ("--rl-rollout-ranks", "1", "--rl-max-staleness", "0")
    apart = run("apart", *GRPO, *flags, world_size=2)
    found, expected = (
        AutoModelForCausalLM.from_pretrained(each / "exported", dtype=torch.bfloat16).state_dict()
        for each in (apart, grpo)
    )
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_an_adapter_is_loaded_by_peft(
    run: Callable[..., Path], smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Merged by it in float32, and rounded from dithered weights as the export is, it computes the
    same."""
    adapter = tmp_path_factory.mktemp("adapter") / "adapter"
    flags = ("--rl-lora-rank", "8", "--rl-lora-export", str(adapter))
    merged = run("lora", *GRPO, *flags, "--lr", "1e-3") / "exported"
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    texts = [row["prompt"] for row in rows_of(smollm2, "heldout")[::NUM_TEXTS]]
    encoded = tokenizer(texts)["input_ids"]
    tokens = torch.tensor([ids[: min(map(len, encoded))] for ids in encoded])

    def load(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    base, expected = (log_probs_of(load(folder), tokens) for folder in (smollm2, merged))
    model = peft.PeftModel.from_pretrained(load(smollm2), adapter)
    apart = (log_probs_of(model, tokens) - expected).abs().mean()
    weights, rounded = load(smollm2).state_dict(), model.merge_and_unload()
    for name, value in rounded.state_dict().items():
        if not torch.equal(value, weights[name]):
            places = [torch.arange(size) for size in value.shape]
            copies = dithered(weights[name], torch.bfloat16, places)
            value.copy_((copies + (value - weights[name])).bfloat16())
    off, moved = (log_probs_of(rounded, tokens) - expected).abs(), (base - expected).abs().mean()
    print(f"the adapter moves log-probs by {moved:.2e}, of which rounding is {apart:.2e}")
    # Some elements of a sum are rounded to the other side.
    assert off.max() < apart < moved / 2, (off.max(), apart, moved)


def test_an_export_says_the_same_in_transformers_and_vllm(
    smollm2: Path, grpo: Path, ranks: RankPool
) -> None:
    """Greedily, in float32."""
    exported = grpo / "exported"
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    prompts, expected = [], []
    for row in rows_of(smollm2, "heldout")[::NUM_TEXTS]:
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        answer = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        prompts.append(ids)
        expected.append(tokenizer.decode(answer[0, len(ids) :], skip_special_tokens=True))
    (found,) = ranks.run(
        "tests.e2e.jobs:greedy_texts", world_size=1, folder=str(exported), prompts=prompts
    )
    assert found == expected and len(set(expected)) > NUM_TEXTS / 2
