"""Samples of several turns: a scripted engine, and environments in real processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcore_rl.batching.table import SampleTokens
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.environments.wire import Started
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.conversations import Conversations, turns_of
from mcore_rl.rollout.group_sampler import Rules
from mcore_rl.rollout.sampling_state import read_groups, write_groups
from mcore_rl.rollout.segments import OpenGroup, new_rollout
from tests.unit.scripted_sampling import ScriptedEngine, Steps, token

SIZE, ROOM, MAX_TOKENS, TURN = 2, 6, 30, 3
BEHAVIOURS = ("good", "good", "hangs", "good", "dies", "floods", "nonsense", "raises", "good")


class TurnEngine(ScriptedEngine):
    """Ends every turn after three tokens; a token encodes the number of tokens before it."""

    def __init__(self) -> None:
        super().__init__(lambda number: -1)

    def step(self) -> list[Any]:
        ends = {n: len(request.token_ids) - 1 + TURN for n, (request, _) in self.running.items()}
        self._length_of = ends.__getitem__
        return super().step()

    def text_of(self, token_ids: np.ndarray, *, with_special: bool = False) -> str:
        return " ".join(map(str, token_ids.tolist()))


class Words:
    """A tokenizer that does not restore the ids that a text was decoded from."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [9000 + len(word) for word in text.split()]}


class NoRewards:
    """Returns each response at once, without a reward of its own."""

    names = ("environment",)

    def __init__(self) -> None:
        self._open: list[int] = []
        self.begun: list[Rollout] = []

    def sources(self) -> dict[str, str]:
        return {}

    find_sources = sources

    def begin(self, rollout: Rollout) -> int:
        self.begun.append(rollout)
        self._open.append(len(self.begun) - 1)
        return self._open[-1]

    def finished(self) -> list[tuple[int, dict[str, Outcome]]]:
        found, self._open = self._open, []
        return [(ticket, {}) for ticket in found]

    def wait(self) -> None:
        pass


def prompt_of(draw: int) -> Prompt:
    return prompt_with_behaviour(draw, BEHAVIOURS[draw])


def prompt_with_behaviour(draw: int, how: str) -> Prompt:
    return Prompt(draw, "add", "", np.array([draw], np.int32), f'{{"how": "{how}"}}')


def make_conversations(*, waits: bool = False, kind: str = "Misbehaving") -> Conversations:
    spec = EnvironmentSpec(
        f"tests.unit.misbehaving:{kind}", timeout_seconds=10.0, memory_gib=1.0, max_turns=4
    )
    tokens = ConversationTokens(Words(), use_chat_template=False, ends=(), vocabulary=10_000)
    return Conversations(spec, tokens, max_prompt_tokens=8, max_tokens=MAX_TOKENS, waits=waits)


@pytest.fixture(scope="module")
def conversations() -> Iterator[Conversations]:
    made = make_conversations()
    yield made
    made.close()


def steps_of(
    conversations: Conversations,
    rules: Rules,
    prompt_of: Callable[[int], Prompt] = prompt_of,
    next_draw: int = 0,
    **options: Any,
) -> tuple[Steps, NoRewards, TurnEngine]:
    engine, rewards = TurnEngine(), NoRewards()
    steps = Steps(
        rules,
        rewards,
        engine=engine,
        next_draw=next_draw,
        prompt_of=prompt_of,
        conversations=conversations,
        num_samples=SIZE,
        max_tokens=MAX_TOKENS,
        has_environments=True,
        **options,
    )
    return steps, rewards, engine


@pytest.fixture(scope="module")
def conversation_groups(
    conversations: Conversations,
) -> tuple[list[OpenGroup], NoRewards, TurnEngine]:
    steps, rewards, engine = steps_of(conversations, Rules(len(BEHAVIOURS)))
    return steps.step().taken, rewards, engine


Conversed = tuple[list[OpenGroup], NoRewards, TurnEngine]


def of_kind(groups: list[OpenGroup], kind: str) -> list[tuple[Rollout, Outcome]]:
    return [
        (rollout, group.outcomes[index]["environment"])
        for group in groups
        for index, rollout in enumerate(group.rollouts)
        if rollout is not None and BEHAVIOURS[group.draw] == kind
    ]


def test_observation_follows_each_turn(conversation_groups: Conversed) -> None:
    groups, _, _ = conversation_groups
    for rollout, outcome in of_kind(groups, "good"):
        # Three turns of three tokens; two tokens are observed after each of the first two.
        assert rollout.is_generated is not None
        assert "".join("x" if each else "o" for each in rollout.is_generated) == "xxxooxxxooxxx"
        observed = rollout.response_token_ids[~rollout.is_generated].tolist()
        assert observed == [9003, 9001, 9003, 9001]  # "sum 1", "sum 2"
        assert outcome == Outcome(0.25 + 0.5 + 1.0)
        assert [(turn.end, turn.reward) for turn in rollout.turn_rewards] == [
            (3, 0.25),
            (8, 0.5),
            (13, 1.0),
        ]
        assert rollout.finish_reason == "stop" and rollout.failure is None
        assert rollout.text == "\n".join(
            " ".join(map(str, turn.tolist())) for turn in turns_of(rollout)
        )


def test_generated_tokens_return_to_the_engine_unchanged(conversation_groups: Conversed) -> None:
    """The tokenizer would encode the text to other ids."""
    groups, _, engine = conversation_groups
    (rollout, _), *_ = of_kind(groups, "good")
    draw = rollout.prompt.index
    number = draw * SIZE + rollout.sample_index
    whole = [*rollout.prompt.token_ids, *rollout.response_token_ids]
    asked = [each for each in engine.submitted if each.number == number]
    assert [len(each.token_ids) for each in asked] == [1, 6, 11]
    for each in asked:
        assert each.token_ids.tolist() == whole[: len(each.token_ids)]
        assert each.max_tokens == MAX_TOKENS + 1 - len(each.token_ids)
    assert len({each.seed for each in asked}) == 3


def test_turn_rewards_are_at_the_last_token_of_the_turn(conversation_groups: Conversed) -> None:
    (rollout, _), *_ = of_kind(conversation_groups[0], "good")
    tokens = SampleTokens.of(ScoredRollout(rollout, 1.75))
    assert tokens.turn_rewards is not None
    places = np.flatnonzero(tokens.turn_rewards).tolist()
    assert places == [3, 8, 13] and tokens.turn_rewards[places].tolist() == [0.25, 0.5, 1.0]
    assert tokens.is_generated[places].all()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("hangs", "timed out"),
        ("dies", "ended"),
        ("floods", "answered too much"),
        ("nonsense", "returned"),
        ("raises", "raised KeyError"),
    ],
)
def test_failing_environment_fails_its_sample(
    conversation_groups: Conversed, kind: str, reason: str
) -> None:
    for rollout, outcome in of_kind(conversation_groups[0], kind):
        assert outcome.failure is not None and reason in outcome.failure
        assert rollout.failure == outcome.failure
        assert len(rollout.response_token_ids) == TURN  # the turn before the failure


def test_every_sample_is_rewarded_once(conversation_groups: Conversed) -> None:
    groups, rewards, _ = conversation_groups
    counts = Counter((each.prompt.index, each.sample_index) for each in rewards.begun)
    assert len(counts) == len(BEHAVIOURS) * SIZE and set(counts.values()) == {1}
    assert all(len(group.outcomes) == SIZE for group in groups)


def test_stopped_group_is_dropped_during_a_call(
    conversations: Conversations,
) -> None:
    """The first two groups are enough; the third's environments would hang for ten seconds."""
    failures = conversations._pool.failure_counts.total()
    steps, _, _ = steps_of(conversations, Rules(2, extra_groups=1))
    step = steps.step()
    assert [group.draw for group in step.taken] == [0, 1] and not steps.pending
    assert (step.end.started, [group.draw for group in step.dropped]) == (3, [2])
    assert conversations.num_open == 0
    # No environment was waited for until its timeout.
    assert conversations._pool.failure_counts.total() == failures


def test_stopped_conversations_continue_in_later_steps_and_after_a_checkpoint(
    tmp_path: Path,
) -> None:
    """Every second group has slow environments, most of which are at work when a step stops."""

    def prompt_of(draw: int) -> Prompt:
        return prompt_with_behaviour(draw, "slow" if draw % 2 else "fast")

    conversations = make_conversations(kind="Counting")
    trained: list[OpenGroup] = []
    stopped = Counter[bool]()
    rules = Rules(2, max_staleness=9, extra_groups=2)
    steps, _, _ = steps_of(conversations, rules, prompt_of)
    for version in range(1, 7):
        trained += steps.step().taken
        assert conversations.num_open == 0  # the processes end with the step
        kept = [each for group in steps.pending for each in group.conversations.values()]
        stopped.update(each.unanswered is not None for each in kept)
        if version % 2:
            write_groups(steps.pending, tmp_path, 0)
            pending = read_groups(
                tmp_path, prompt_of, tp_group=0, num_tp_groups=1, has_environments=True
            )
            steps, _, _ = steps_of(
                conversations,
                rules,
                prompt_of,
                steps.position,
                version=version,
                continuing=pending,
            )
    conversations.close()
    assert len(trained) == 12 and len({group.draw for group in trained}) == 12
    assert stopped[True] > 2 and not conversations._pool.failure_counts
    mixed = 0
    for group in trained:
        for index, rollout in enumerate(group.rollouts):
            assert rollout is not None and rollout.is_generated is not None
            assert group.outcomes[index]["environment"] == Outcome(1.0 + 2.0 + 3.0)
            observed = rollout.response_token_ids[~rollout.is_generated].tolist()
            assert observed == [9003, 9001, 9003, 9002]
            assert [len(turn) >= TURN for turn in turns_of(rollout)] == [True] * 3
            number = group.draw * SIZE + index
            for at in np.flatnonzero(rollout.is_generated):  # as if sampled at once
                assert rollout.response_token_ids[at] == token(number, at + 1)
            ends = [turn.end for turn in rollout.turn_rewards]
            assert [rollout.is_generated[end - 1] for end in ends] == [True] * 3
            mixed += len(set(rollout.token_versions.tolist())) > 1
    assert mixed > 2


@pytest.mark.slow
def test_batches_do_not_depend_on_the_speed_of_environments_with_waits() -> None:
    conversations, batches = make_conversations(waits=True), []
    for how in ("good", "hesitates", "hesitates"):
        steps, _, engine = steps_of(
            conversations,
            Rules(6, deterministic=True),
            lambda draw, how=how: prompt_with_behaviour(draw, how),
        )
        steps.step()
        batches.append(engine.batches)
    conversations.close()
    assert batches[0] == batches[1] == batches[2]
    assert max(map(len, batches[0])) == ROOM


class ScriptedPool:
    """Replaces a pool: a given number of events arrives with each poll."""

    def __init__(self, arriving: list[int]) -> None:
        self._arriving, self.num_polls = arriving, 0

    @property
    def num_busy(self) -> int:
        return sum(self._arriving[self.num_polls :])

    def finished(self) -> list[tuple[int, Any]]:
        self.num_polls += 1
        first = sum(self._arriving[: self.num_polls - 1])
        return [(first + n, Started(None)) for n in range(self._arriving[self.num_polls - 1])]

    def start(self, prompt: Prompt, seed: int) -> int:
        return seed

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("arriving", "num_running", "num_found"),
    [
        ([8, 8, 8, 8, 8], 0, 40),  # more than 40 / 32 per poll: waits for all
        ([0, 8, 8], 0, 0),  # no answer yet
        ([8, 0, 8, 8], 0, 8),  # no answer in the second poll
        ([8, 1, 8], 100, 9),  # one answer per poll is slower than 109 tokens per step
        ([8, 8, 8], 100, 24),
    ],
)
def test_events_waits_while_answers_arrive_faster_than_tokens(
    arriving: list[int], num_running: int, num_found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, slept = ScriptedPool(arriving), list[float]()
    monkeypatch.setattr("mcore_rl.rollout.conversations.EnvironmentPool", lambda spec: pool)
    monkeypatch.setattr("mcore_rl.rollout.conversations.time.sleep", slept.append)
    tokens = ConversationTokens(Words(), use_chat_template=False, ends=(), vocabulary=10_000)
    spec = EnvironmentSpec("any", timeout_seconds=1.0)
    conversations = Conversations(spec, tokens, max_prompt_tokens=8, max_tokens=9)
    for number in range(sum(arriving)):
        conversations.start(number, new_rollout(prompt_of(0), 0, 1), number)
    assert len(conversations.events(num_running, step_seconds=0.032)) == num_found
    assert slept == [0.001] * (pool.num_polls - 1)
