"""The whole program with a critic and a reward model on ranks of their own, and a run continued
with one more source of prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_value_model import reward_model
from tests.e2e.recipe import metrics_of, run_job, task_flags
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLES = tuple(
    "--rl-algorithm ppo --rl-critic-ranks 2 --rl-critic-tp-size 1 --rl-reward-ranks 3 "
    "--rl-reward-tp-size 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
    "--rl-critic-ep-size 1 --rl-reward-ep-size 1 --rl-num-eval-prompts 16".split()
)
# Of 16 prompts a step: 8 of a and b each in two steps, then 4, 8 and 4. No prompt is drawn twice.
NUM_PROMPTS = {"a": 8 + 8 + 4, "b": 8 + 8 + 8, "c": 4}
NUM_SAMPLES = 16 * 8  # of a step


@pytest.fixture(scope="module")
def folder(warmed_checkpoint: Path, tmp_path_factory: Any) -> Path:
    """A folder with a file of prompts of each source."""
    folder: Path = tmp_path_factory.mktemp("roles")
    lines = (warmed_checkpoint / "prompts" / "train.jsonl").read_text().splitlines()
    rest = iter(dict.fromkeys(lines))
    for name, number in NUM_PROMPTS.items():
        some = [next(rest) for _ in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in some))
    return folder


@pytest.fixture(scope="module")
def runs(
    warmed_checkpoint: Path, folder: Path, ranks: RankPool
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rank 0's output and the metrics of two steps, and of a third after resuming."""
    model = reward_model(warmed_checkpoint, folder / "reward", with_lm_head=False)
    a, b, c = (folder / f"{name}.jsonl" for name in NUM_PROMPTS)
    load = ("--load", str(folder / "first" / "checkpoints"))
    load += ("--rl-on-changed-prompts", "continue")
    found = []
    for name, prompts, flags in (
        ("first", f"{a}=0.5,{b}=0.5", ("--rl-num-steps", "2")),
        ("second", f"{a}=0.25,{c}=0.25,{b}=0.5", ("--rl-num-steps", "3", *load)),
    ):
        reward = ("--rl-reward", "arithmetic,model", "--rl-reward-weights", "1,0.01")
        more = (*ROLES, *reward, "--rl-reward-model", str(model), "--rl-prompts", prompts)
        more += ("--rl-num-logged-rollouts", str(NUM_SAMPLES), *flags)
        tokens = task_flags(warmed_checkpoint, folder / name, *more)
        ended = run_job(ranks, tokens, world_size=4)
        ended.require(0)
        found.append((ended.ranks[0].output, metrics_of(folder / name)))
    return found


def test_one_line_says_who_is_where(runs: list) -> None:
    lines = [line for line in runs[0][0].splitlines() if line.startswith("placement: ")]
    assert len(lines) == 1
    for words in ("in turn on ranks 0-1;", "critic (TP1", "on rank 2;", "reward model (TP1"):
        assert words in lines[0]
    assert lines[0].endswith("on rank 3")


def test_both_roles_do_their_part_in_every_step(runs: list) -> None:
    _, metrics = runs[0]
    for step in metrics[:2]:
        assert step["critic/update_seconds"] > 0 and step["critic/host_peak_bytes"] > 0
        assert step["critic/learning_rate"] > 0 and step["critic/grad_norm"] > 0
        assert math.isfinite(step["reward/model/mean"]) and step["reward/model/failures"] == 0
        parts = step["reward/arithmetic/mean"] + 0.01 * step["reward/model/mean"]
        assert step["reward/mean"] == pytest.approx(parts)


def test_a_run_resumes_with_its_critic(runs: list) -> None:
    (_, first), (said, second) = runs
    assert [step["step"] for step in second] == [2, 3]
    assert "no critic lies beside" not in said
    # A head of zeros explains nothing; the one that was saved is no longer of zeros.
    assert first[0]["critic/value_mean"] == 0.0 != second[0]["critic/value_mean"]


def test_sources_go_on_where_they_were_and_a_new_one_begins(runs: list, folder: Path) -> None:
    drawn: dict[str, dict[int, str]] = {name: {} for name in NUM_PROMPTS}
    for run in ("first", "second"):
        for line in (folder / run / "rollouts.jsonl").read_text().splitlines():
            row = json.loads(line)
            drawn[row["source"]][row["draw"]] = row["prompt"]
    for name, of_draws in drawn.items():  # an epoch of each, in the order of both runs
        rows = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        assert sorted(of_draws.values()) == sorted(row["prompt"] for row in rows)
    assert sorted(draw for of_draws in drawn.values() for draw in of_draws) == list(range(48))
    assert min(drawn["c"]) >= 32
    said, second = runs[1]
    assert "'a' after 16 prompts, 'b' after 16 prompts continues, others begin with the" in said
    quotas = [second[0][f"source/{name}/prompts"] for name in NUM_PROMPTS]
    assert quotas == [4, 8, 4]
