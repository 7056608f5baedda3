"""Environments that send arbitrary messages: each sample is settled once, every token is counted.

No process is started: the test plays the zygote at the other end of the real pool's sockets.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec, Response
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.environments.wire import Event, Started, Stepped
from mcore_rl.environments.wire import event_of as event_of_answer
from mcore_rl.hybrid_engine.vllm.generation import Completion
from mcore_rl.isolation import wire, zygote_process
from mcore_rl.isolation.wire import Failed, answer_of
from mcore_rl.isolation.zygote import Program
from mcore_rl.rewards.parts import weighed
from mcore_rl.rollout.comparison import Selection
from mcore_rl.rollout.conversations import Conversations
from mcore_rl.rollout.group_sampler import Rules
from tests import hostile
from tests.unit.scripted_sampling import Steps
from tests.unit.test_conversation import chatml
from tests.unit.test_conversations import NoRewards, TurnEngine

MAX_TOKENS, MAX_PROMPT_TOKENS, SIZE = 30, 8, 2
STARTED = {"turn": 0, "value": [None]}
STEPPED = {"turn": 1, "value": ["sum 1", 0.5, False]}
ENDED = {"ended": 0, "code": 1}
ENDS = b""  # in the place of an answer: the process ends
PROMPT = Prompt(0, "add", "", np.array([5], np.int32))


def pool_of() -> EnvironmentPool:
    return EnvironmentPool(EnvironmentSpec("a:B", timeout_seconds=60))


def event_of(message: bytes, turn: int) -> Event:
    """The event of a message; environments send no refusals."""
    answer = answer_of(message, turn)
    failed = Failed("refused", str(answer)) if isinstance(answer, UsageError) else answer
    return event_of_answer(failed, is_first=turn == 0)


def good(turn: int) -> bytes:
    """An answer that fits; the third ends the episode."""
    value = [None] if turn == 0 else [f"sum {turn}", 0.25 * turn, turn == 3]
    return json.dumps({"turn": turn, "value": value}).encode()


class FakeProcess:
    """Replaces a zygote's process and all of its episodes.

    Episodes send `answers` one after the other, and then valid ones. Between them, the zygote sends
    `control` to the trainer.
    """

    def __init__(self, theirs: socket.socket, answers: Iterator[bytes], control: Iterator[bytes]):
        self._theirs, self._answers, self._says = theirs, answers, control
        self._episodes: dict[int, tuple[socket.socket, wire.Reader]] = {}
        self.exitcode: int | None = None
        self._control = self._theirs.dup()
        self._control.setblocking(False)
        self._tell({"ready": True})

    def act(self) -> None:
        """Handle all pending messages."""
        if self.exitcode is not None:
            return
        with contextlib.suppress(BlockingIOError, OSError):
            while message := socket.recv_fds(self._control, 1 << 16, 1):
                if not message[0]:
                    break
                self._obey(json.loads(message[0]), message[1])
        for ticket in list(self._episodes):
            self._serve(ticket)
        messages = next(self._says, None)
        if messages:
            self._send(messages[: 1 << 15])

    def _obey(self, order: dict[str, Any], descriptors: list[int]) -> None:
        if "fork" in order:
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            self._episodes[order["fork"]] = connection, wire.Reader(wire.MAX_REQUEST_BYTES)
            self._tell({"forked": order["fork"]})
        elif "kill" in order:
            self._end(order["kill"], -9)

    def _serve(self, ticket: int) -> None:
        connection, reader = self._episodes[ticket]
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            data = connection.recv(1 << 16)
            if not data:
                self._end(ticket, 0)
                return
            reader.add(data)
        while (message := reader.next()) is not None:
            asked = json.loads(message)
            if "ask" not in asked:
                self._end(ticket, 0)
                return
            answer = next(self._answers, None)
            answer = good(asked["turn"]) if answer is None else answer
            if answer == ENDS or len(answer) > 1 << 15:
                self._end(ticket, 3)
                return
            with contextlib.suppress(OSError):
                connection.sendall(len(answer).to_bytes(4, "big") + answer)

    def _end(self, ticket: int, code: int) -> None:
        if ticket in self._episodes:
            self._episodes.pop(ticket)[0].close()
        self._tell({"ended": ticket, "code": code})

    def _tell(self, fields: dict[str, Any]) -> None:
        self._send(json.dumps(fields).encode())

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the trainer has hung up
            self._control.send(message or b" ")

    def terminate(self) -> None:
        self.exitcode = 0
        for connection, _ in self._episodes.values():
            connection.close()
        self._control.close()

    def kill(self) -> None:
        """Nothing runs."""

    def wait(self, timeout: float | None = None) -> int:
        return self.exitcode or 0


@contextmanager
def zygotes(answers: Sequence[bytes], control: Sequence[bytes]) -> Iterator[list[FakeProcess]]:
    """The zygotes that start meanwhile; they share the messages."""
    made: list[FakeProcess] = []
    says, tells = iter(answers), iter(control)

    def start(program: Program, control: socket.socket) -> FakeProcess:
        made.append(FakeProcess(control, says, tells))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote_process, "start_process", start)
        yield made


def answers() -> st.SearchStrategy[list[bytes]]:
    """Messages of episodes: valid, nearly valid, arbitrary, and the end of the process."""
    fitting = st.sampled_from([good(turn) for turn in range(4)])
    one = fitting | hostile.messages(STARTED) | hostile.messages(STEPPED) | st.just(ENDS)
    return st.lists(one, max_size=25)


@pytest.mark.slow
@hostile.BOUNDED
@given(hostile.messages(STARTED), hostile.messages(STEPPED))
def test_any_answer_becomes_valid_event(first, second):
    for turn, message in ((0, first), (1, second)):
        event = event_of(message, turn)
        if isinstance(event, Failed):
            event.failure.encode()
        elif isinstance(event, Stepped):
            assert turn == 1 and np.isfinite(np.float32(event.reward))
            assert event.observation is not None or event.done
        else:
            assert turn == 0 and isinstance(event, Started)


@hostile.BOUNDED
@given(hostile.messages(STARTED), hostile.messages(STEPPED), st.booleans())
def test_any_observation_becomes_token_ids_or_failure(first, second, is_chat):
    tokenizer = chatml()
    ends = [tokenizer.eos_token_id]
    tokens = ConversationTokens(tokenizer, use_chat_template=is_chat, ends=ends, vocabulary=200)
    begun, stepped = event_of(first, 0), event_of(second, 1)
    found = []
    if isinstance(begun, Started):
        found.append(tokens.first(PROMPT.token_ids, begun.prompt))
        assert not isinstance(found[0], np.ndarray) or len(found[0])
    if isinstance(stepped, Stepped) and not stepped.done:
        found.append(tokens.observed(np.array([3, ends[0]], np.int32), stepped.observation))
    for ids in found:
        if isinstance(ids, Failed):
            ids.failure.encode()
        else:
            assert ids.dtype == np.int32 and ((ids >= 0) & (ids < 200)).all()


@pytest.mark.slow
@hostile.BOUNDED
@given(answers(), st.lists(hostile.messages(ENDED) | st.just(b""), max_size=10))
def test_every_request_to_environment_has_one_event(messages, control):
    response = Response(text="a", token_ids=(1,), turn=1, finish_reason="stop")
    with zygotes(messages, control) as made, pool_of() as pool:
        open_ones = {pool.start(PROMPT, seed) for seed in range(4)}
        asked = set(open_ones)
        try:
            for _ in range(300):
                for ticket, event in pool.finished():
                    asked.remove(ticket)  # KeyError: it has not been asked anything
                    if isinstance(event, Failed) or (isinstance(event, Stepped) and event.done):
                        open_ones.remove(ticket)
                    else:
                        pool.step(ticket, response)
                        asked.add(ticket)
                for each in made:
                    each.act()
                if not open_ones:
                    break
            assert not open_ones and pool.num_open == 0
            pool.finished()
        except RuntimeError as error:
            assert "were started 3 times" in str(error)


@pytest.mark.parametrize(
    "messages",
    [b'{"ended": 1e999}', b"[" * 5000, b'{"ended": 0, "code": 1e999}', b'{"ready": true}'],
)
def test_zygote_with_invalid_message_is_replaced(messages):
    with zygotes([], [messages]) as made, pool_of() as pool:
        lost = {pool.start(PROMPT, 0), pool.start(PROMPT, 1)}
        assert {ticket for ticket, _ in events(pool, made)} == lost
        again = pool.start(PROMPT, 2)
        assert events(pool, made) == [(again, Started(None))] and len(made) == 2


def events(pool: EnvironmentPool, made: list[FakeProcess]) -> list[tuple[int, Event]]:
    """All events of 20 rounds."""
    found = []
    for _ in range(20):
        found += pool.finished()
        for each in made:
            each.act()
    return found


def test_refusal_is_accepted_only_as_first_message(monkeypatch):
    refused = json.dumps({"refused": ["cannot be found", "--rl-environment", "do so"]}).encode()
    with zygotes([], [refused]) as made, pool_of() as pool:
        pool.start(PROMPT, 0)
        assert events(pool, made)  # raises nothing
    monkeypatch.setattr(FakeProcess, "_tell", lambda self, fields: self._send(refused))
    with zygotes([], []), pool_of() as pool:
        pool.start(PROMPT, 0)
        with pytest.raises(UsageError):
            pool.finished()


class CountingEngine(TurnEngine):
    """Lets environments act between its steps, and counts tokens."""

    def __init__(self, made: list[FakeProcess]) -> None:
        super().__init__()
        self._made = made
        self.num_tokens = self.num_looks = 0
        self.length: dict[int, int] = {}  # of responses, what was observed included
        self._prompt_lengths: dict[int, int] = {}

    def step(self) -> list[Completion]:
        running = dict(self.running)
        self.num_tokens += len(running)
        found = super().step()
        for number, (request, tokens) in running.items():
            prompt = self._prompt_lengths.setdefault(number, len(request.token_ids))
            self.length[number] = len(request.token_ids) + len(tokens) - prompt
        return found

    def any_rank(self, here: bool) -> bool:
        self.num_looks += 1
        assert self.num_looks < 3000, "the engine waits forever"
        for each in self._made:
            each.act()
        return here


class Words:
    """A tokenizer that takes any text."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [9000 + len(word) for word in text.split()]}


@settings(hostile.BOUNDED, max_examples=80)
@given(
    messages=answers(),
    oversample=st.sampled_from([1.0, 2.0]),
    compares=st.booleans(),
    with_greedy=st.booleans(),
)
def test_conversations_are_settled_once_and_tokens_counted(
    messages, oversample, compares, with_greedy
):
    spec = EnvironmentSpec("a:B", timeout_seconds=60.0, memory_gib=1.0, max_turns=4)
    tokens = ConversationTokens(Words(), use_chat_template=False, ends=(), vocabulary=10_000)
    limits = {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_tokens": MAX_TOKENS}
    rules = Rules(2, max_refills=1 if compares else None, extra_groups=int(2 * oversample) - 2)
    with zygotes(messages, []) as made:
        conversations = Conversations(spec, tokens, **limits)
        engine, rewards = CountingEngine(made), _Rewards()
        steps = Steps(
            rules,
            rewards,
            engine=engine,
            next_draw=0,
            prompt_of=lambda draw: Prompt(draw, "add", "", np.array([draw], np.int32)),
            conversations=conversations,
            select=_select,
            num_samples=SIZE,
            max_tokens=MAX_TOKENS,
            with_greedy=with_greedy,
            has_environments=True,
        )
        step = steps.step()
        assert conversations.num_open == 0
        conversations.close()
    size = SIZE + with_greedy
    generated, left_tokens = step.num_tokens
    assert generated == engine.num_tokens
    settled = [(each.prompt.index, each.sample_index) for each in rewards.begun]
    assert len(settled) == len(set(settled))
    scored = [*step.taken, *step.replaced]
    assert {(each.draw, index) for each in scored for index in range(size)} <= set(settled)
    numbers = [each.draw * size + index for each in step.dropped for index in range(SIZE)]
    left_tokens += sum(each.num_tokens(SIZE) for each in step.dropped)
    assert left_tokens == sum(engine.length.get(number, 0) for number in numbers)
    for group in scored:
        for index, rollout in enumerate(group.rollouts):
            assert len(rollout.response_token_ids) <= MAX_TOKENS
            length = engine.length.get(group.draw * size + index, 0)
            assert len(rollout.response_token_ids) == length
            assert np.isfinite(sum(turn.reward for turn in rollout.turn_rewards))


class _Rewards(NoRewards):
    def weigh(self, rollouts: Any, outcomes: Any) -> Any:
        return weighed(rollouts, outcomes, {"environment": 1.0})


def _select(scored: Any) -> Selection:
    return Selection(len({each.reward for each in scored if each.is_valid}) > 1)
