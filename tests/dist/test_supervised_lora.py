"""Supervised training of adapters against PEFT with torch's AdamW, and what continues from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.dist.checkpoints import differing, loaded, tensors_of
from tests.dist.test_supervised import (
    NUM_STEPS,
    SPLITS,
    Learned,
    Task,
    cross_entropy,
    dpo_loss,
    learned,
    learned_by_transformers,
    sft_flags,
    task_of,
)
from tests.e2e.recipe import Ended, metrics_of, run_job
from tests.rank_pool import RankPool

peft = pytest.importorskip("peft", reason="the extra test is not installed")

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

RANK, ALPHA = 4, 6
LORA = ("--rl-lora-rank", str(RANK), "--rl-lora-alpha", str(ALPHA))
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def task(checkpoint_factory: Callable[..., Path], tmp_path_factory: Any) -> Task:
    overrides = {"num_hidden_layers": 4}  # of which each stage has two chunks
    checkpoint = checkpoint_factory("qwen3", dtype="float32", overrides=overrides)
    return task_of(tmp_path_factory.mktemp("supervised_lora"), checkpoint)


def peft_model(task: Task, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(loaded(task.checkpoint), adapter, is_trainable=True)


def adapter_by_peft(task: Task, name: str, scale: float) -> Path:
    """A folder that PEFT writes, with B of random values up to `scale`."""
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(loaded(task.checkpoint), config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.uniform_(parameter, -scale, scale)
    folder = task.folder / name
    model.save_pretrained(folder)
    return folder


def learned_by_peft(
    task: Task, adapter: Path, loss_of: Callable[[Any, Any], torch.Tensor], count: int, **how: Any
) -> Learned:
    """What PEFT and torch's AdamW make of the adapters; its `weights` are these."""
    model = peft_model(task, adapter)
    found = learned_by_transformers(task, loss_of, count, model=model, **how)
    return dataclasses.replace(found, weights=peft.get_peft_model_state_dict(model))


def learned_adapters(
    ranks: RankPool, task: Task, name: str, split: str, *flags: str, loss: str
) -> Learned:
    """As `learned`, with the adapters as `weights`; the exported model is the base's bits, and the
    base's plus the adapters where there are any."""
    more, world_size = SPLITS[split]
    export = task.folder / name / "adapter"
    flags = (*LORA, "--rl-lora-export", str(export), *more, *flags)
    found = learned(ranks, task, name, world_size, *flags, loss=loss)
    adapters = tensors_of(export)
    for weight_name, base in tensors_of(task.checkpoint).items():
        layer = f"base_model.model.{weight_name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapters:
            a, b = (adapters[f"{layer}.lora_{factor}.weight"].double() for factor in "AB")
            base = (base.double() + ALPHA / RANK * b @ a).float()
        assert torch.equal(found.weights[weight_name], base), weight_name
    return dataclasses.replace(found, weights=adapters)


@pytest.fixture(scope="module")
def sft_adapter(task: Task) -> Path:
    return adapter_by_peft(task, "random", 0.1)


@pytest.fixture(scope="module")
def expected(task: Task, sft_adapter: Path) -> Learned:
    rows = task.taught(task.train)
    return learned_by_peft(
        task,
        sft_adapter,
        lambda model, at: cross_entropy(model, rows, at),
        len(rows),
        evaluates=True,
    )


@pytest.fixture(scope="module")
def sft(task: Task, sft_adapter: Path, ranks: RankPool) -> Learned:
    """A run on one process; its checkpoint is in the run's folder "sft"."""
    start = ("--rl-lora-adapter", str(sft_adapter))
    return learned_adapters(ranks, task, "sft", "padded", *sft_flags(task), *start, loss="loss/sft")


def test_sft_of_adapters_equals_peft(expected: Learned, sft: Learned) -> None:
    assert sft.losses[-1] < sft.losses[0]
    sft.assert_equals(expected)


@pytest.mark.parametrize("split", ["dp2", "tp2", "vpp2"])
def test_sft_of_adapters_equals_peft_in_every_split(
    task: Task, sft_adapter: Path, expected: Learned, ranks: RankPool, split: str
) -> None:
    flags = (*sft_flags(task), "--rl-lora-adapter", str(sft_adapter))
    learned_adapters(ranks, task, split, split, *flags, loss="loss/sft").assert_equals(expected)


@pytest.mark.parametrize(("split", "scale"), [("padded", 0.0), ("tp2", 0.1)])
def test_dpo_of_adapters_has_the_base_as_its_reference(
    task: Task, ranks: RankPool, split: str, scale: float
) -> None:
    """Whether B begins at 0, where the policy is the base, or not."""
    adapter = adapter_by_peft(task, f"dpo_{scale}_start", scale)
    rows = task.taught(task.train, pairs=True)
    base = loaded(task.checkpoint).eval()
    expected = learned_by_peft(
        task,
        adapter,
        lambda model, at: dpo_loss(model, base, rows, at, smoothing=0.0, is_normalized=False),
        len(rows),
        evaluates=False,
    )
    flags = ("--rl-algorithm", "dpo", "--rl-lora-adapter", str(adapter))
    found = learned_adapters(ranks, task, f"dpo_{scale}", split, *flags, loss="loss/dpo")
    assert (found.losses[0] == pytest.approx(np.log(2), abs=1e-7)) == (scale == 0.0)
    found.assert_equals(expected)


# What continues from the checkpoint --------------------------------------------------------------


def continued(
    ranks: RankPool, task: Task, name: str, load: str, num_steps: int, *flags: str
) -> Ended:
    """A run of one process in the folder `name` from the last step of another, without updates
    unless `flags` give a rate."""
    return run_job(
        ranks,
        task.flags(
            name,
            *("--load", str(task.folder / load / "run" / "checkpoints")),
            *("--rl-lora-export", str(task.folder / name / "adapter"), *SPLITS["padded"][0]),
            *("--rl-num-steps", str(num_steps), "--lr", "0", *flags),
        ),
        world_size=1,
    )


def same_adapters(task: Task, *names: str) -> bool:
    first, second = (task.folder / name / "adapter" for name in names)
    return differing(first, second) == []


def test_resumed_sft_of_adapters_learns_the_same_bits(
    task: Task, sft_adapter: Path, sft: Learned, ranks: RankPool
) -> None:
    flags = (*sft_flags(task), *LORA)
    start = ("--rl-lora-adapter", str(sft_adapter), "--rl-num-steps", str(NUM_STEPS - 1))
    run_job(ranks, task.flags("begun", *flags, *SPLITS["padded"][0], *start), world_size=1).require(
        0
    )
    continued(ranks, task, "resumed", "begun", NUM_STEPS, *flags, "--lr", "1e-2").require(0)
    assert same_adapters(task, "resumed", "sft")
    (step,) = (each for each in metrics_of(task.folder / "resumed" / "run") if "loss/sft" in each)
    assert (step["step"], step["loss/sft"]) == (NUM_STEPS - 1, sft.losses[-1])


@pytest.mark.usefixtures("sft")
def test_dpo_continues_from_the_adapters_of_sft(task: Task, ranks: RankPool) -> None:
    """They are its reference, too, unless --finetune begins a run whose reference is the base."""
    flags = (*LORA, "--rl-algorithm", "dpo")
    for name, load, done in (("dpo_after", "sft", NUM_STEPS), ("again", "dpo_after", 4)):
        ended = continued(ranks, task, name, load, done + 1, *flags)
        ended.require(0)
        (step,) = metrics_of(task.folder / name / "run")
        assert step["loss/dpo"] == pytest.approx(np.log(2), abs=1e-7)
        assert same_adapters(task, name, "sft") and "[Reference]" not in ended.said
    new = continued(ranks, task, "dpo_new", "sft", 1, *flags, "--finetune")
    new.require(0)
    (step,) = metrics_of(task.folder / "dpo_new" / "run")
    assert abs(step["loss/dpo"] - np.log(2)) > 1e-3
    assert same_adapters(task, "dpo_new", "sft")
    assert new.said.count("[Reference] the run begins with trained adapters") == 1


@pytest.mark.usefixtures("sft")
def test_grpo_continues_from_the_adapters_of_sft(task: Task, ranks: RankPool) -> None:
    flags = [*LORA, "--rl-algorithm", "grpo", "--rl-answer-column", "response"]
    flags += ["--rl-num-samples-per-prompt", "2", "--rl-num-prompts-per-step", "2"]
    flags += ["--rl-kl-coef", "0.1", "--rl-rollout-kv-cache-gib", "0.0625"]
    continued(ranks, task, "grpo", "sft", NUM_STEPS + 1, *flags).require(0)
    step = metrics_of(task.folder / "grpo" / "run")[0]
    assert step["step"] == NUM_STEPS and step["kl/ref"] == 0.0
    assert step["kl/rollout_actor"] < 1e-4  # the engine has the adapters
    assert same_adapters(task, "grpo", "sft")


@pytest.mark.usefixtures("sft")
def test_finetune_from_adapters_refuses_another_alpha_and_base(
    task: Task, checkpoint_factory: Callable[..., Path], ranks: RankPool
) -> None:
    overrides = {"num_hidden_layers": 4}
    other = checkpoint_factory("qwen3", dtype="float32", overrides=overrides, seed=77)
    for more, words in (
        (("--rl-lora-alpha", "16"), "give --rl-lora-rank, --rl-lora-alpha"),
        (("--rl-hf-checkpoint", str(other)), f"--rl-hf-checkpoint {other} has other weights"),
    ):
        flags = (*sft_flags(task), *LORA, "--finetune", *more)
        ended = continued(ranks, task, "refused", "sft", 1, *flags)
        ended.require(2)
        assert words in ended.said
