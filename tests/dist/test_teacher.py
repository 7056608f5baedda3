"""Teachers on the actor's ranks and on ranks of their own, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.dist.checkpoints import tensors_of
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.ppo_jobs import CANDIDATE_MASS, scored_samples, with_candidates
from tests.dist.test_lora import random_adapter, start_from
from tests.rank_pool import RankPool
from tests.scoring_server import log_prob_of, scoring_server

# float32 on both sides, added up in another order.
TOLERANCE = 1e-4
ALONE = ("--rl-num-mini-batches", "1", "--rl-reward", "none", "--clip-grad", "0")
COEF = 0.5
LR = 100.0  # so large that rounding of weights does not matter
UPDATE = ("--lr", str(LR), "--adam-eps", "1")


@pytest.fixture(scope="module")
def student(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("qwen3", dtype="float32")  # also that of the exported weights


@pytest.fixture(scope="module")
def same_shape(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("qwen3", seed=5)


@pytest.fixture(scope="module")
def larger(checkpoint_factory: Callable[..., Path]) -> Path:
    """With more layers, wider ones, and experts."""
    return checkpoint_factory("qwen3_moe", "tiny", seed=6)


def rollouts_of(student: Path) -> list[Any]:
    """Those of `step_samples`."""
    vocab_size = json.loads((student / "config.json").read_text())["vocab_size"]
    return [sample.rollout for sample in scored_samples(vocab_size, num_samples=8)]


def tokens_of(student: Path) -> list[torch.Tensor]:
    """The samples of `step_samples`."""
    return [
        torch.from_numpy(np.concatenate([each.prompt.token_ids, each.response_token_ids])).long()
        for each in rollouts_of(student)
    ]


def log_probs_of(model: Any, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """`[t - 1]`, of every token but the first."""
    logits = model(tokens[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def model_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def distilled(
    ranks: RankPool,
    student: Path,
    split: str,
    *more: str,
    world_size: int | None = None,
    precision: str = "fp32",
    target: Path | None = None,
) -> list[dict[str, Any]]:
    """What each of the actor's ranks found; the weights after the step go to `target`."""
    results = ranks.run(
        "tests.dist.teacher_jobs:distil",
        world_size=world_size or SPLITS[split][3],
        flags=job_flags(student, split, *ALONE, *more, precision=precision, micro_batch_size=1),
        target=target,
    )
    of_actor = [found for found in results if found["role"] == "actor"]
    assert all(found == of_actor[0] for found in of_actor)
    return of_actor


def assert_scored(
    found: dict[str, Any], teacher: Path, student: Path, temperature: float = 1.0
) -> None:
    """The log-probs of generated tokens are those of transformers, and no others are computed."""
    model = model_of(teacher)
    samples = zip(found["teacher"], tokens_of(student), rollouts_of(student), strict=True)
    for mine, tokens, rollout in samples:
        with torch.no_grad():
            expected = log_probs_of(model, tokens, temperature)
        num_given = len(rollout.prompt.token_ids) - 1
        assert not any(mine[:num_given])
        difference = torch.tensor(mine)[num_given:-1] - expected[num_given:]
        assert difference.abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("split", "has_adapters"),
    [("tp1_pp1_ep1", False), ("tp1_pp1_ep1", True), ("tp2_pp2_ep1", False)],
)
def test_a_teacher_of_the_actors_shape_is_swapped_in_and_scores_as_transformers(
    split: str,
    has_adapters: bool,
    student: Path,
    same_shape: Path,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    adapters = start_from(random_adapter(student, tmp_path / "adapter")) if has_adapters else ()
    teacher = ("--rl-teacher", str(same_shape), "--rl-temperature", "0.7")
    found, *_ = distilled(ranks, student, split, *teacher, *adapters)
    assert found["is_swapped"]
    assert_scored(found, same_shape, student, temperature=0.7)


@pytest.mark.parametrize(
    ("split", "world_size", "more"),
    [
        ("tp1_pp1_ep1", 1, ()),
        ("tp2_pp1_ep1", 2, ("--rl-teacher-tp-size", "1", "--rl-teacher-ep-size", "2")),
        ("tp1_pp1_ep1", 3, ("--rl-teacher-ranks", "1-2", "--rl-teacher-tp-size", "2")),
    ],
)
def test_a_larger_teacher_scores_as_transformers_in_turn_and_on_ranks_of_its_own(
    split: str,
    world_size: int,
    more: tuple[str, ...],
    student: Path,
    larger: Path,
    ranks: RankPool,
) -> None:
    flags = ("--rl-teacher", str(larger), "--rl-temperature", "1.3", *more)
    found, *_ = distilled(ranks, student, split, *flags, world_size=world_size)
    assert not found["is_swapped"]
    assert_scored(found, larger, student, temperature=1.3)


TOP_K = ("--rl-teacher-form", "topk", "--rl-teacher-top-k", "8")
FULL = ("--rl-teacher-form", "full")


def test_the_head_of_a_teacher_with_a_model_of_its_own_is_in_float32(
    student: Path, ranks: RankPool
) -> None:
    """In bfloat16 it rounds as the actor does, whose logits are not rounded."""
    flags = ("--rl-teacher", str(student), "--rl-teacher-ranks", "1", "--rl-fp32-lm-head")
    found, *_ = distilled(ranks, student, "tp1_pp1_ep1", *flags, world_size=2, precision="bf16")
    assert not found["is_swapped"] and found["teacher"] == found["student"]


@pytest.mark.parametrize("form", [(), TOP_K, FULL])
def test_the_student_as_its_own_teacher_gives_exactly_nothing(
    form: tuple[str, ...], student: Path, ranks: RankPool
) -> None:
    found, *_ = distilled(ranks, student, "dp2", "--rl-teacher", str(student), *form)
    assert found["teacher"] == found["student"]
    assert found["metrics"]["teacher/reverse_kl"] == 0.0
    assert found["grad_norm"] == 0.0 and not found["kl"]
    assert not any(any(advantages) for advantages in found["advantages"])


def responses(student: Path) -> Iterator[tuple[torch.Tensor, slice]]:
    """The samples of `step_samples`, and the positions that score their responses."""
    samples = scored_samples(json.loads((student / "config.json").read_text())["vocab_size"], 8)
    for tokens, sample in zip(tokens_of(student), samples, strict=True):
        yield tokens, slice(len(sample.rollout.prompt.token_ids) - 1, len(tokens) - 1)


def assert_gradient(found: dict[str, Any], target: Path, student: Path, model: Any) -> None:
    """The update to `target` was by the gradients of `model`; with UPDATE the first one by Adam of
    a gradient g is LR g / (|g| + 1)."""
    assert found["grad_norm"] == pytest.approx(gradient_norm(model), rel=TOLERANCE)
    before, after = tensors_of(student), tensors_of(target)
    expected = {name: p.grad for name, p in model.named_parameters()}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert expected.keys() == before.keys() == after.keys()
    for name, gradient in expected.items():
        assert before[name].dtype == after[name].dtype == torch.float32
        change = (before[name] - after[name]) / LR
        difference = float((change / (1 - change.abs()) - gradient).abs().max())
        assert difference <= TOLERANCE * largest, name


def gradient_norm(model: Any) -> float:
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm())


def test_gradient_equals_that_of_the_published_form(
    student: Path, same_shape: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Each token's advantage is -coef times the log ratio; GRPO adds 0 for equal rewards."""
    flags = ("--rl-teacher", str(same_shape), "--rl-teacher-coef", str(COEF))
    flags += ("--rl-loss-aggregation", "token_mean", *UPDATE)
    found, *_ = distilled(ranks, student, "dp2", *flags, target=tmp_path / "after")
    teacher, model = model_of(same_shape), model_of(student)
    terms, ratios = [], []
    for tokens, scored in responses(student):
        log_probs = log_probs_of(model, tokens)[scored]
        with torch.no_grad():
            ratio = log_probs - log_probs_of(teacher, tokens)[scored]
        terms.append(COEF * ratio * (log_probs - log_probs.detach()).exp())
        ratios.append(ratio)
    torch.cat(terms).mean().backward()
    assert gradient_norm(model) > 0.1, "a small gradient shows nothing"
    assert_gradient(found, tmp_path / "after", student, model)
    assert found["metrics"]["teacher/reverse_kl"] == pytest.approx(
        float(torch.cat(ratios).mean()), abs=TOLERANCE
    )


def test_gradient_with_centered_scores_equals_that_of_whole_distributions(
    student: Path, same_shape: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """The engine's distribution is its candidates, and beyond them the trainer's in proportion. The
    advantages are the teacher's."""
    k, temperature, parallel = 8, 0.8, ("--context-parallel-size", "2")
    flags = ("--rl-teacher", str(same_shape), "--rl-teacher-coef", str(COEF), *parallel)
    flags += ("--rl-policy-loss", "policy_gradient", "--rl-score-centering", str(k))
    flags += ("--rl-temperature", str(temperature), "--rl-loss-aggregation", "token_mean", *UPDATE)
    after = tmp_path / "after"
    found, *_ = distilled(ranks, student, "tp1_pp2_ep1", *flags, world_size=4, target=after)
    model, teacher = model_of(student), model_of(same_shape)
    vocab_size = model.config.vocab_size
    samples = with_candidates(scored_samples(vocab_size, 8), k, vocab_size)
    terms, plain, sizes, masses = [], [], [], []
    for (tokens, scored), sample in zip(responses(student), samples, strict=True):
        log_p = (model(tokens[None]).logits[0, scored] / temperature).log_softmax(-1)
        sampled = log_p.gather(1, tokens[1:][scored, None])[:, 0]
        top = sample.rollout.top_tokens
        assert top is not None
        ids = torch.from_numpy(top.ids).long()
        with torch.no_grad():
            theirs = log_probs_of(teacher, tokens, temperature)[scored]
            advantages = COEF * (theirs - sampled)
            mass = log_p.exp().gather(1, ids).sum(1, keepdim=True)
            rho = (1 - CANDIDATE_MASS) / (1 - mass)
            q = (rho * log_p.exp()).scatter(1, ids, torch.from_numpy(top.log_probs).exp())
            assert (q.sum(1) - 1).abs().max() < TOLERANCE
            sizes.append((q - rho * log_p.exp()).abs().sum(1))
            masses.append(mass)
        plain.append(-advantages * sampled)
        terms.append(-advantages * (sampled - (q * log_p).sum(1)))
    torch.cat(plain).mean().backward(retain_graph=True)
    uncentered = gradient_norm(model)
    model.zero_grad()
    torch.cat(terms).mean().backward()
    assert gradient_norm(model) > 0.1 and abs(uncentered / gradient_norm(model) - 1) > 0.01
    assert_gradient(found, after, student, model)
    assert found["centering"] == {
        "centering/engine_mass": pytest.approx(CANDIDATE_MASS, abs=TOLERANCE),
        "centering/actor_mass": pytest.approx(float(torch.cat(masses).mean()), rel=TOLERANCE),
        "centering/coefficients_l1": pytest.approx(float(torch.cat(sizes).mean()), rel=TOLERANCE),
    }


@pytest.mark.parametrize(
    ("split", "form", "more", "is_swapped"),
    [
        ("tp2_pp2_ep1", TOP_K, ("--rl-max-tokens-per-microbatch", "128"), True),
        ("tp2_pp1_ep1", TOP_K, ("--rl-teacher-tp-size", "1"), False),
        ("tp1_pp2_ep1", TOP_K, ("--context-parallel-size", "2"), True),
        ("tp2_pp2_ep1", FULL, (), True),
        ("tp2_pp1_ep1", FULL, ("--rl-teacher-tp-size", "1"), False),
    ],
)
def test_gradient_equals_that_of_whole_distributions(
    split: str,
    form: tuple[str, ...],
    more: tuple[str, ...],
    is_swapped: bool,
    student: Path,
    same_shape: Path,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """With `topk` all tokens but the teacher's k likeliest ones are one outcome."""
    k, temperature = 8, 0.8
    flags = ("--rl-teacher", str(same_shape), "--rl-teacher-coef", str(COEF), *more)
    flags += (*form, "--rl-temperature", str(temperature), "--rl-loss-aggregation", "token_mean")
    world_size = 4 if "--context-parallel-size" in more else None
    after = tmp_path / "after"
    found, *_ = distilled(
        ranks, student, split, *flags, *UPDATE, world_size=world_size, target=after
    )
    assert found["is_swapped"] == is_swapped
    teacher, model = model_of(same_shape), model_of(student)
    terms = []
    for tokens, scored in responses(student):
        p = (model(tokens[None]).logits[0, scored] / temperature).softmax(-1)
        with torch.no_grad():
            q = (teacher(tokens[None]).logits[0, scored] / temperature).softmax(-1)
        top = q.topk(k).indices
        if form == TOP_K:
            p, q = (
                torch.cat([e.gather(1, top), 1 - e.gather(1, top).sum(1, keepdim=True)], dim=1)
                for e in (p, q)
            )
        terms.append((p * (p / q).log()).sum(dim=1))
    expected = torch.cat(terms).mean()
    (COEF * expected).backward()
    assert found["kl"] == pytest.approx(float(expected), rel=TOLERANCE)
    assert_gradient(found, after, student, model)
    assert gradient_norm(model) > 0.01 and float(expected) > 0.01
    assert not any(any(advantages) for advantages in found["advantages"])


def sources_of(folder: Path, *teachers: str) -> tuple[str, ...]:
    """The flag of one source for each prompt of the samples, with these teachers."""
    lines = [
        f"s{n}: {{path: {n}.jsonl, teacher: '{each}'"
        + (", reward: exact_match}" if each == "none" else "}")
        for n, each in enumerate(teachers)
    ]
    (folder / "sources.yaml").write_text("\n".join(lines))
    return ("--rl-prompts", str(folder / "sources.yaml"))


@pytest.mark.parametrize(
    ("split", "more"),
    [
        ("dp2", ()),
        ("tp2_pp2_ep1", ("--rl-max-tokens-per-microbatch", "128", "--rl-teacher-ep-size", "1")),
    ],
)
def test_each_source_has_the_scores_of_its_teacher_alone(
    split: str,
    more: tuple[str, ...],
    student: Path,
    same_shape: Path,
    larger: Path,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """One teacher is swapped in, one takes turns, one is a server, and a source has none."""
    with scoring_server(student) as server:
        flags = sources_of(tmp_path, str(same_shape), str(larger), "none", server.url)
        found, *_ = distilled(ranks, student, split, *flags, *more)
    for number, teacher in enumerate((same_shape, larger)):
        alone = ("--rl-teacher", str(teacher))
        if more:  # packed: a called teacher rounds differently in rows with other samples
            others = [str(teacher) if n == number else "none" for n in range(4)]
            alone = sources_of(tmp_path, *others)
        expected, *_ = distilled(ranks, student, split, *alone, *more)
        for name in ("teacher", "student", "advantages"):
            mine = slice(2 * number, 2 * number + 2)
            assert found[name][mine] == expected[name][mine], (number, name)
    assert not any(any(each) for each in (*found["teacher"][4:6], *found["advantages"][4:6]))
    for scores, tokens in zip(found["teacher"][6:], tokens_of(student)[6:], strict=True):
        ids = tokens.tolist()
        assert scores[:-1] == [log_prob_of(ids, at) for at in range(1, len(ids))]
        assert any(found["advantages"][6])
    kl = [
        s - t
        for sample in (0, 1, 2, 3, 6, 7)
        for s, t, a in zip(
            *(found[name][sample] for name in ("student", "teacher", "advantages")), strict=True
        )
        if a
    ]
    assert found["metrics"]["teacher/reverse_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-5)


def test_gradient_of_top_tokens_is_that_of_each_samples_teacher(
    student: Path,
    same_shape: Path,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    other = checkpoint_factory("qwen3", seed=7)
    flags = sources_of(tmp_path, str(same_shape), str(other), "none", str(other))
    flags += (*TOP_K, "--rl-teacher-coef", str(COEF), "--rl-loss-aggregation", "token_mean")
    after = tmp_path / "after"
    found, *_ = distilled(ranks, student, "tp2_pp1_ep1", *flags, *UPDATE, target=after)
    assert found["is_swapped"]
    model, total, num_tokens = model_of(student), torch.zeros(()), 0
    teachers = [model_of(same_shape), model_of(other), None, model_of(other)]
    for number, (tokens, scored) in enumerate(responses(student)):
        num_tokens += scored.stop - scored.start
        if (teacher := teachers[number // 2]) is None:
            continue
        p = model(tokens[None]).logits[0, scored].softmax(-1)
        with torch.no_grad():
            q = teacher(tokens[None]).logits[0, scored].softmax(-1)
        top = q.topk(8).indices
        p, q = (
            torch.cat([e.gather(1, top), 1 - e.gather(1, top).sum(1, keepdim=True)], dim=1)
            for e in (p, q)
        )
        total = total + (p * (p / q).log()).sum()
    expected = total / num_tokens
    (COEF * expected).backward()
    assert found["kl"] == pytest.approx(float(expected.detach()), rel=TOLERANCE)
    assert_gradient(found, after, student, model)
