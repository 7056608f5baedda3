"""Curricula: which prompts draws get, given the outcomes of earlier ones."""

from __future__ import annotations

import numpy as np
import pytest

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompts import PromptSources
from mcore_rl.rollout.curriculum import Curriculum
from mcore_rl.rollout.segments import new_rollout
from tests.prompt_tables import one_source, sources

SEED, PER_STEP = 3, 6
NAMES = {"a": 20, "b": 10}
WEIGHTS = {"a": "0.5", "b": "0.5"}


def two() -> PromptSources:
    return sources(NAMES, WEIGHTS)


def table(prompts: PromptSources, positions: list[int], right: set[int], wrong: set[int]):
    """Two responses to each prompt: both right, both wrong, or one of each; by `Prompt.index`."""
    scored = []
    for position in positions:
        prompt: Prompt = prompts[position]
        pair = (1.0, 1.0) if prompt.index in right else (0.0, 1.0)
        pair = (0.0, 0.0) if prompt.index in wrong else pair
        for index, reward in enumerate(pair):
            rollout: Rollout = new_rollout(prompt, index, 0)
            scored.append(ScoredRollout(rollout, reward))
    return SampleTable.of(scored)


class Run:
    """Steps of PER_STEP draws with fixed outcomes."""

    def __init__(self, prompts, kind, right=(), wrong=(), position=0):
        self.prompts, self.right, self.wrong = prompts, set(right), set(wrong)
        self.position = position
        self.curriculum = Curriculum(prompts, kind, seed=SEED, position=position)

    def step(self) -> list[int]:
        """Return the rows of a step's prompts."""
        self.curriculum.begin_step()
        draws = range(self.position, self.position + PER_STEP)
        positions = [self.curriculum.position_of(draw) for draw in draws]
        self.position += PER_STEP
        found = table(self.prompts, positions, self.right, self.wrong)
        differing = found.prompts[1::2][found.rewards[::2] != found.rewards[1::2]]
        self.curriculum.settle(self.position, found, differing)
        return [int(self.prompts.rows[position]) for position in positions]


def test_without_outcomes_that_settle_prompts_are_drawn_as_without_a_curriculum():
    run = Run(two(), "drop")
    drawn = [row for _ in range(20) for row in run.step()]
    assert drawn == two().rows[two().indices(0, 120, seed=SEED)].tolist()
    assert run.curriculum.metrics() == {
        "curriculum/passed_over": 0.0,
        "curriculum/settled_share": 0.0,
    }
    # A run that begins a curriculum later continues where it was.
    later = Run(two(), "drop", position=60)
    assert [row for _ in range(10) for row in later.step()] == drawn[60:]


@pytest.mark.parametrize("kind", ["drop", "less"])
def test_settled_prompts_are_drawn_once_or_in_one_of_four_epochs_and_shares_stay(kind):
    right, wrong = {0, 3, 4, 22}, {7, 25}
    run = Run(two(), kind, right, wrong)
    steps = [run.step() for _ in range(160)]  # 480 draws of each source
    for step in steps:
        assert sum(row < NAMES["a"] for row in step) == PER_STEP // 2
    counts = np.bincount([row for step in steps for row in step], minlength=30)
    for row in right | wrong:
        size = NAMES["a"] if row < NAMES["a"] else NAMES["b"]
        others = [r for r in range(30) if (r < 20) == (row < 20) and r not in right | wrong]
        epochs = counts[others].mean()
        if kind == "drop":
            assert counts[row] == 1
        else:
            assert epochs / 4 - 2 <= counts[row] <= epochs / 4 + 2, (row, size)
    assert run.curriculum.metrics()["curriculum/settled_share"] == 6 / 30


def test_prompts_passed_over_are_counted():
    run = Run(one_source(12), "drop", right=range(6))
    run.step(), run.step()
    run.step()
    passed_over = run.curriculum.metrics()["curriculum/passed_over"]
    order = one_source(12).indices(12, 12, seed=SEED).tolist()
    taken = [place for place, row in enumerate(order) if row >= 6]
    assert passed_over == taken[5] + 1 - 6


def test_a_source_whose_prompts_are_all_settled_is_drawn_as_before():
    run = Run(one_source(8), "drop", right=range(8))
    for _ in range(3):
        run.step()
    (passed,) = run.curriculum.state.cursors
    drawn = [row for _ in range(4) for row in run.step()]
    assert drawn == run.prompts.in_source(0, passed, 24, seed=SEED).tolist()


def test_the_order_of_questions_does_not_matter():
    """Ranks ask for the draws of their own engines only."""
    one, other = (Curriculum(two(), "drop", seed=SEED, position=4) for _ in range(2))
    assert [one.position_of(d) for d in (9, 4, 6)] == [other.position_of(d) for d in range(4, 10)][
        5:6
    ] + [other.position_of(4), other.position_of(6)]
    empty = table(two(), [0], set(), {0})
    for each in (one, other):
        each.settle(12, empty, np.empty(0, np.int64))
    assert one.state.cursors == other.state.cursors and sum(one.state.cursors) == 12


@pytest.mark.parametrize("kind", ["drop", "less"])
def test_a_resumed_or_repeated_step_draws_the_same(kind, tmp_path):
    run = Run(two(), kind, right=range(0, 30, 3), wrong={1, 21})
    for _ in range(12):
        run.step()
    run.curriculum.save(tmp_path)
    resumed = Run(two(), kind, run.right, run.wrong, position=run.position)
    resumed.curriculum.restore(tmp_path)
    first = run.step()
    metrics = run.curriculum.metrics()
    run.position -= PER_STEP
    run.curriculum.undo(run.position)
    assert run.step() == first == resumed.step()
    assert run.curriculum.metrics() == metrics == resumed.curriculum.metrics()
    assert [run.step() for _ in range(10)] == [resumed.step() for _ in range(10)]


def test_failed_samples_do_not_count():
    prompts = one_source(2)
    curriculum = Curriculum(prompts, "drop", seed=SEED, position=0)
    good, bad = (new_rollout(prompts[0], index, 0) for index in range(2))
    failed = new_rollout(prompts[1], 0, 0)
    samples = [
        ScoredRollout(good, 1.0),
        ScoredRollout(bad, 0.0, "timed out"),
        ScoredRollout(failed, 0.0, "timed out"),
    ]
    curriculum.settle(2, SampleTable.of(samples), np.empty(0, np.int64))
    assert curriculum.state.accuracy[0] == 1.0 and np.isnan(curriculum.state.accuracy[1])


def test_prompts_whose_responses_differ_are_not_passed_over():
    """All of them may be right, or all wrong: rewards are not only 0 and 1."""
    prompts = one_source(3)
    curriculum = Curriculum(prompts, "drop", seed=SEED, position=0)
    pairs = {0: (0.1, 0.9), 1: (1.0, 2.0), 2: (0.5, 0.5)}
    samples = [
        ScoredRollout(new_rollout(prompts[position], index, 0), reward)
        for position, pair in pairs.items()
        for index, reward in enumerate(pair)
    ]
    curriculum.settle(3, SampleTable.of(samples), np.array([0, 1]))
    assert curriculum.state.accuracy.tolist() == [0.5, 0.5, 0.0]
    assert curriculum.metrics()["curriculum/settled_share"] == pytest.approx(1 / 3)


def test_the_state_of_other_prompts_is_refused(tmp_path):
    Curriculum(two(), "drop", seed=SEED, position=0).save(tmp_path)
    with pytest.raises(UsageError, match="does not hold the curriculum of 12 prompts"):
        Curriculum(one_source(12), "drop", seed=SEED, position=0).restore(tmp_path)
    (tmp_path / "curriculum.safetensors").write_bytes(b"nothing")
    with pytest.raises(UsageError, match="does not hold"):
        Curriculum(two(), "drop", seed=SEED, position=0).restore(tmp_path)
