"""Supervised training against transformers with torch's AdamW, in every split of the model."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mcore_rl.data.demonstrations import Demonstrations, load_demonstrations, load_pairs
from mcore_rl.data.options import DataOptions, SupervisedOptions
from mcore_rl.data.prompts import prompt_indices
from tests.dist import updates
from tests.dist.checkpoints import loaded, tensors_of
from tests.dist.updates import Outcome, assert_alike
from tests.e2e.recipe import metrics_of, run_job
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

TOLERANCE = 1e-5
NUM_STEPS, ROWS_PER_STEP, NUM_HELD_OUT, SEED = 3, 8, 5, 1234
LR, EPS, BETAS = 1e-2, 1e-3, (0.9, 0.95)
MAX_TOKENS = {"--rl-max-prompt-tokens": 40, "--rl-max-response-tokens": 24}
PACKED = ("--rl-max-tokens-per-microbatch", "128")
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "1")  # in padded rows
# Name, flags and number of processes.
SPLITS = {
    "padded": (("--micro-batch-size", "2"), 1),
    "dp2": (PACKED, 2),
    "tp2": (("--tensor-model-parallel-size", "2", *PACKED), 2),
    "vpp2": (("--pipeline-model-parallel-size", "2", *VIRTUAL), 2),
    "cp2": (("--context-parallel-size", "2", *PACKED), 2),
}


def rows_of(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Demonstrations of one or two turns, and pairs."""
    rng = random.Random(seed)
    for number in range(count):
        a, b = rng.randint(10, 49), rng.randint(10, 49)
        right, wrong = str(a + b), str(a + b - 10) + " or so" * (number % 3)
        row = {"prompt": f"{a}+{b}", "response": right, "chosen": right, "rejected": wrong}
        if number % 2:
            asked, answered = {"role": "user", "content": f"{b}"}, f"{b} what?"
            turns = [asked, {"role": "assistant", "content": answered}]
            row["prompt"] = [*turns, {"role": "user", "content": f"+{a}"}]
        yield row


@dataclass(frozen=True)
class Task:
    checkpoint: Path
    train: Path
    held_out: Path
    folder: Path

    def flags(self, name: str, *more: str) -> list[str]:
        return [
            *("--rl-hf-checkpoint", str(self.checkpoint), "--rl-prompts", str(self.train)),
            *("--rl-precision", "fp32", "--rl-num-steps", str(NUM_STEPS), "--seed", str(SEED)),
            *("--rl-num-prompts-per-step", str(ROWS_PER_STEP)),
            *(str(word) for flag in MAX_TOKENS.items() for word in flag),
            *("--lr", str(LR), "--adam-eps", str(EPS)),
            *("--rl-run-dir", str(self.folder / name / "run")),
            *("--rl-export-hf", str(self.folder / name / "exported")),
            *("--rl-cache-dir", str(self.folder / "cache")),
            *more,
        ]

    def taught(self, path: Path, *, pairs: bool = False) -> Demonstrations:
        load = load_pairs if pairs else load_demonstrations
        data = DataOptions(max_prompt_tokens=40, cache_dir=str(self.folder / "cache"))
        options = SupervisedOptions()
        return load(
            *(str(path), "--rl-prompts", self.checkpoint, data, options), max_response_tokens=24
        )


def task_of(folder: Path, checkpoint: Path) -> Task:
    for name, count, seed in (("train", 20, 1), ("held_out", 7, 2)):
        lines = map(json.dumps, rows_of(count, seed))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return Task(checkpoint, folder / "train.jsonl", folder / "held_out.jsonl", folder)


@pytest.fixture(scope="module")
def task(checkpoint_factory: Callable[..., Path], tmp_path_factory: Any) -> Task:
    overrides = {"num_hidden_layers": 4}  # of which each stage has two chunks
    checkpoint = checkpoint_factory("qwen3", dtype="float32", overrides=overrides)
    return task_of(tmp_path_factory.mktemp("supervised"), checkpoint)


def log_probs_of(model: Any, rows: Demonstrations, position: int, sample: int = 0) -> torch.Tensor:
    """The log-probs of the tokens to learn of one sample, which the model sees alone."""
    tokens = rows.tokens(position, sample)
    ids = torch.from_numpy(tokens.token_ids).long()
    log_probs = F.log_softmax(model(ids[None]).logits[0, :-1].float(), dim=-1)
    found = log_probs.gather(-1, ids[1:, None])[:, 0]
    return found[torch.from_numpy(tokens.is_generated[1:])]


def cross_entropy(model: Any, rows: Demonstrations, positions: Any) -> torch.Tensor:
    """The mean over all tokens to learn."""
    return -torch.cat([log_probs_of(model, rows, int(at)) for at in positions]).mean()


def dpo_loss(
    model: Any,
    reference: Any,
    rows: Demonstrations,
    positions: Any,
    *,
    smoothing: float,
    is_normalized: bool,
) -> torch.Tensor:
    """Equation 7 of arXiv 2305.18290, the mean over pairs; with a share of labels flipped, and with
    the means over each response's tokens in place of the sums."""
    losses = []
    for at in positions:
        ratios = []
        for sample in (0, 1):
            with torch.no_grad():
                of_reference = log_probs_of(reference, rows, int(at), sample)
            ratio = log_probs_of(model, rows, int(at), sample) - of_reference
            ratios.append(ratio.mean() if is_normalized else ratio.sum())
        margin = 0.1 * (ratios[0] - ratios[1])
        losses.append(-(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin))
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class Learned:
    """What a run has measured and exported."""

    losses: list[float]
    grad_norms: list[float]
    held_out: list[float]
    weights: dict[str, torch.Tensor]

    def assert_equals(self, expected: Learned) -> None:
        assert self.losses == pytest.approx(expected.losses, abs=TOLERANCE)
        assert self.grad_norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
        assert self.held_out == pytest.approx(expected.held_out, abs=TOLERANCE)
        assert self.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            assert weight.dtype == self.weights[name].dtype == torch.float32
            assert float((self.weights[name] - weight).abs().max()) <= TOLERANCE, name


def learned_by_transformers(
    task: Task,
    loss_of: Callable[[Any, Any], torch.Tensor],
    count: int,
    *,
    evaluates: bool,
    rows_per_step: int = ROWS_PER_STEP,
    model: Any = None,
) -> Learned:
    """What torch's AdamW makes of the same rows, with Megatron's clipping of the gradient; `model`
    is by default the checkpoint."""
    model = (loaded(task.checkpoint) if model is None else model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, betas=BETAS, weight_decay=0.0)
    held_out = task.taught(task.held_out)
    losses, norms, of_held_out = [], [], []

    def evaluate() -> None:
        if evaluates:
            with torch.no_grad():
                of_held_out.append(float(cross_entropy(model, held_out, range(NUM_HELD_OUT))))

    for step in range(NUM_STEPS):
        if step % 2 == 0:
            evaluate()
        rows = prompt_indices(count, start=step * rows_per_step, count=rows_per_step, seed=SEED)
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    evaluate()
    weights = {k: v for k, v in model.state_dict().items() if k in tensors_of(task.checkpoint)}
    return Learned(losses, norms, of_held_out, weights)


def learned(
    ranks: RankPool, task: Task, name: str, world_size: int, *flags: str, loss: str
) -> Learned:
    run_job(ranks, task.flags(name, *flags), world_size=world_size).require(0)
    metrics = metrics_of(task.folder / name / "run")
    steps = metrics[:NUM_STEPS]
    assert not any(name.startswith(("reshard/", "reward/", "mismatch/")) for name in steps[0])
    return Learned(
        [step[loss] for step in steps],
        [step["grad_norm"] for step in steps],
        [step["eval/loss"] for step in metrics if "eval/loss" in step],
        tensors_of(task.folder / name / "exported"),
    )


def sft_flags(task: Task) -> tuple[str, ...]:
    evaluation = ("--rl-eval-interval", "2", "--rl-num-eval-prompts", str(NUM_HELD_OUT))
    return ("--rl-algorithm", "sft", "--rl-eval-prompts", str(task.held_out), *evaluation)


@pytest.fixture(scope="module")
def expected(task: Task) -> Learned:
    rows = task.taught(task.train)
    assert max(sum(rows.lengths(at)[0]) for at in range(len(rows))) > 12
    return learned_by_transformers(
        task, lambda model, at: cross_entropy(model, rows, at), len(rows), evaluates=True
    )


@pytest.mark.parametrize("split", SPLITS)
def test_sft_equals_transformers(
    task: Task, expected: Learned, ranks: RankPool, split: str
) -> None:
    flags, world_size = SPLITS[split]
    found = learned(ranks, task, split, world_size, *sft_flags(task), *flags, loss="loss/sft")
    assert len(found.held_out) == 3 and found.losses[-1] < found.losses[0]
    found.assert_equals(expected)


def test_sft_of_experts_equals_one_rank(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    task = task_of(tmp_path, checkpoint_factory("deepseek_v3", dtype="float32"))
    one, spread = (
        learned(ranks, task, name, size, *sft_flags(task), *flags, loss="loss/sft")
        for name, flags, size in (
            ("one", PACKED, 1),
            ("spread", ("--expert-model-parallel-size", "2", *PACKED), 2),
        )
    )
    spread.assert_equals(one)


@pytest.mark.parametrize(
    ("split", "smoothing", "is_normalized"),
    [("padded", 0.0, False), ("dp2", 0.1, True), ("tp2", 0.0, True), ("vpp2", 0.1, False)],
)
def test_dpo_equals_its_formula(
    task: Task, ranks: RankPool, split: str, smoothing: float, is_normalized: bool
) -> None:
    rows = task.taught(task.train, pairs=True)
    reference = copy.deepcopy(loaded(task.checkpoint)).eval()
    expected = learned_by_transformers(
        task,
        lambda model, at: dpo_loss(
            model, reference, rows, at, smoothing=smoothing, is_normalized=is_normalized
        ),
        len(rows),
        evaluates=False,
    )
    flags, world_size = SPLITS[split]
    flags = ("--rl-algorithm", "dpo", "--rl-dpo-label-smoothing", str(smoothing), *flags)
    flags += ("--rl-dpo-length-normalized",) if is_normalized else ()
    found = learned(ranks, task, f"dpo_{split}", world_size, *flags, loss="loss/dpo")
    assert found.losses[0] == pytest.approx(np.log(2), abs=TOLERANCE)
    found.assert_equals(expected)


# Demonstrations beside reinforcement learning ----------------------------------------------------

BOTH_JOB = "tests.dist.supervised_jobs:learn_both"
COEF, MIXED_ROWS = 0.5, 4


def both_flags(task: Task, *more: str) -> list[str]:
    return [
        *task.flags("both", *more),
        *("--rl-sft-demonstrations", str(task.train), "--rl-sft-coef", str(COEF)),
        *("--rl-sft-rows-per-step", str(MIXED_ROWS), "--rl-num-samples-per-prompt", "2"),
    ]


@pytest.mark.parametrize("split", ["padded", "dp2", "tp2", "cp2"])
def test_demonstrations_alone_have_their_weight(
    task: Task, ranks: RankPool, tmp_path: Path, split: str
) -> None:
    """Samples with equal rewards teach nothing; the rows of a step are those of its number."""
    flags, world_size = SPLITS[split]
    outcome = updates.learned(
        *(ranks, both_flags(task, *flags), world_size, tmp_path), job=BOTH_JOB, equal_rewards=True
    )
    rows = task.taught(task.train)
    expected = learned_by_transformers(
        task,
        lambda model, at: COEF * cross_entropy(model, rows, at),
        len(rows),
        evaluates=False,
        rows_per_step=MIXED_ROWS,
    )
    losses = [COEF * step["loss/sft"] for step in outcome.found["steps"]]
    assert losses == pytest.approx(expected.losses, abs=TOLERANCE)
    norms = [step["grad_norm"] for step in outcome.found["steps"]]
    assert norms == pytest.approx(expected.grad_norms, rel=TOLERANCE)
    for name, weight in expected.weights.items():
        difference = (outcome.weights[f"actor/{name}"] - weight).abs().max()
        assert float(difference) <= TOLERANCE, name


@pytest.fixture(scope="module")
def both(task: Task, ranks: RankPool, tmp_path_factory: Any) -> Outcome:
    flags = both_flags(task, *SPLITS["padded"][0], "--rl-num-mini-batches", "2")
    target = tmp_path_factory.mktemp("both")
    return updates.learned(ranks, flags, 1, target, job=BOTH_JOB, equal_rewards=False)


@pytest.mark.parametrize("split", ["dp2", "tp2", "vpp2", "cp2"])
def test_both_losses_are_the_same_in_every_split(
    task: Task, both: Outcome, ranks: RankPool, tmp_path: Path, split: str
) -> None:
    flags, world_size = SPLITS[split]
    flags = both_flags(task, *flags, "--rl-num-mini-batches", "2")
    found = updates.learned(ranks, flags, world_size, tmp_path, job=BOTH_JOB, equal_rewards=False)
    assert all(step["loss/sft"] > 0 and step["loss/policy"] != 0 for step in both.found["steps"])
    assert_alike(found, both)
