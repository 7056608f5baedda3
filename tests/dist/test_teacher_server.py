"""A teacher on a real `vllm serve`, against transformers and the checks of a start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.dist.layouts import job_flags
from tests.dist.test_teacher import ALONE, distilled, log_probs_of, model_of, tokens_of
from tests.rank_pool import RankPool
from tests.vllm_servers import VLLMServer, running

# The server computes in bfloat16, whose rounding moves a log-prob by about 2^-8 of a logit.
NOISE = 0.05


@pytest.fixture(scope="module")
def teacher(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("qwen3", "tiny", seed=6)


@pytest.fixture(scope="module")
def student(checkpoint_factory: Callable[..., Path]) -> Path:
    return checkpoint_factory("qwen3")


@pytest.fixture(scope="module")
def server(teacher: Path, warm_python: Path) -> Iterator[VLLMServer]:
    with running(teacher, 1, max_len=129, python=warm_python) as servers:
        yield servers[0]


def test_log_probs_of_a_server_equal_transformers_within_its_dtype(
    server: VLLMServer, teacher: Path, student: Path, ranks: RankPool
) -> None:
    found, *_ = distilled(ranks, student, "tp2_pp2_ep1", "--rl-teacher", server.url)
    model, differences = model_of(teacher), []
    for mine, tokens in zip(found["teacher"], tokens_of(student), strict=True):
        with torch.no_grad():
            differences.append(torch.tensor(mine)[:-1] - log_probs_of(model, tokens))
    difference = torch.cat(differences).abs()
    assert difference.max() <= NOISE and difference.mean() <= NOISE / 10


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--rl-max-response-tokens", "65"), "takes 129 tokens"),
        (("--rl-temperature", "0.7"), "--rl-temperature 0.7"),
        (("--rl-teacher-form", "topk"), "--rl-teacher-form topk is for a teacher in a folder"),
    ],
)
def test_a_start_refuses_what_the_server_cannot_give(
    more: tuple[str, ...], expected: str, server: VLLMServer, student: Path, ranks: RankPool
) -> None:
    flags = job_flags(student, "tp1_pp1_ep1", *ALONE, "--rl-teacher", server.url, *more)
    (ended,) = ranks.run_raw("tests.dist.teacher_jobs:distil", world_size=1, flags=flags)
    assert ended.exit_code == 2
    assert expected in ended.output and server.url in ended.output
