"""Conversations of a TP group's samples with their environments.

While an environment works, its sample has no request in the engine, which continues with other
samples. Observations are tokenized here. They reach the other ranks of the TP group with the next
request.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from mcore_rl.batching.types import Rollout, TurnReward
from mcore_rl.environments.conversation import ConversationTokens
from mcore_rl.environments.interface import EnvironmentSpec, Response
from mcore_rl.environments.pool import EnvironmentPool
from mcore_rl.environments.wire import Started, Stepped
from mcore_rl.hybrid_engine.vllm.generation import Completion
from mcore_rl.isolation.wire import Failed
from mcore_rl.rewards.worker import Outcome
from mcore_rl.rollout.segments import KeptConversation, turn_start
from mcore_rl.rollout.turn_reader import TurnReader

_NO_TOKENS = np.empty(0, dtype=np.int32)
_TOO_LONG = "began with too much"
_POLLS_PER_STEP = 32  # a wait without an answer costs 3 % of a step


@dataclass(slots=True)
class _Episode:
    rollout: Rollout
    ticket: int
    kept: KeptConversation | None = None  # None: not started, or its state cannot be kept
    text: str = ""  # of a turn that a restored environment has to answer first
    num_turns: int = 0
    turn_tokens: list[int] = field(default_factory=list)  # of the last turn, as generated
    finish_reason: str = "stop"  # of the last turn
    tools: str | None = None  # `Started.tools`


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A sample that continues: its response so far and its new observation. A restored sample may
    be within a turn, whose observation its response contains.

    Example: `NextTurn(17, rollout, observed=array([220, 19]))`.
    """

    number: int
    so_far: Rollout
    observed: np.ndarray  # [o] int32


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """A sample that has ended; `outcome` is its environment's reward for all turns.

    Example: `EpisodeEnd(17, rollout, Outcome(1.0))`.
    """

    number: int
    rollout: Rollout
    outcome: Outcome


Event = NextTurn | EpisodeEnd


class Conversations:
    """Open episodes by the number of their sample. Not thread-safe.

    Each `start`, `restore` and `turn` leads to one event.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        tokens: ConversationTokens,
        *,
        max_prompt_tokens: int,
        max_tokens: int,
        waits: bool = False,
        reader: TurnReader | None = None,
    ) -> None:
        """`max_tokens` bounds a response: its turns and observations together. With `waits`, events
        are returned when all have arrived, ordered by number, so that the engine's batches do not
        depend on the speed of environments. `reader` reads the turns of environments with tools;
        None: the model has no format for these."""
        spec = dataclasses.replace(spec, has_tool_format=reader is not None)
        self._pool, self._tokens, self._spec = EnvironmentPool(spec), tokens, spec
        self._reader = reader
        self._max_prompt_tokens, self._max_tokens = max_prompt_tokens, max_tokens
        self._waits = waits
        self._episodes: dict[int, _Episode] = {}
        self._numbers: dict[int, int] = {}  # ticket -> number

    @property
    def num_open(self) -> int:
        """Number of samples that have not ended."""
        return len(self._episodes)

    def has_room(self, count: int) -> bool:
        """Return whether `count` more samples may be open. One group is always allowed."""
        return not self._episodes or len(self._episodes) + count <= self._spec.max_open

    def start(self, number: int, so_far: Rollout, seed: int) -> None:
        """Create the environment of a sample without tokens."""
        ticket = self._pool.start(so_far.prompt, seed)
        self._episodes[number] = _Episode(so_far, ticket)
        self._numbers[ticket] = number

    def restore(
        self, number: int, so_far: Rollout, seed: int, kept: KeptConversation, text: str
    ) -> None:
        """Create the environment of a sample that continues. `text` is that of its last turn, if
        the environment has not answered it."""
        num_turns = len(so_far.turn_rewards)
        ticket = self._pool.restore(so_far.prompt, seed, kept.state, num_turns)
        self._episodes[number] = _Episode(so_far, ticket, kept, text, num_turns)
        self._numbers[ticket] = number

    def kept(self, number: int) -> KeptConversation | None:
        """Return how a sample continues in another process; None if it starts again, as its
        environment has not started, or cannot be kept."""
        episode = self._episodes.get(number)
        return None if episode is None else episode.kept

    def turn(self, completion: Completion, rollout: Rollout, text: str) -> None:
        """Pass a generated turn to its environment. `rollout` is the response including the turn;
        `text` is the turn's text."""
        episode = self._episodes[completion.number]
        episode.rollout = rollout
        self._ask(episode, completion.token_ids, completion.finish_reason, text)

    def _ask(self, episode: _Episode, token_ids: np.ndarray, finish_reason: str, text: str) -> None:
        episode.num_turns += 1
        episode.turn_tokens, episode.finish_reason = token_ids.tolist(), finish_reason
        if episode.kept is not None:
            episode.kept = dataclasses.replace(episode.kept, unanswered=finish_reason)
        in_parts = None
        if self._reader is not None and episode.tools is not None:
            rollout = episode.rollout
            num_before = len(rollout.response_token_ids) - len(token_ids)
            before = [rollout.prompt.token_ids, rollout.response_token_ids[:num_before]]
            in_parts = self._reader.read(
                np.concatenate(before), token_ids, episode.tools, is_cut=finish_reason == "length"
            )
        response = Response(
            text=text,
            token_ids=tuple(episode.turn_tokens),
            turn=episode.num_turns,
            finish_reason=finish_reason,
            in_parts=in_parts,
        )
        self._pool.step(episode.ticket, response)

    def events(self, num_running: int = 0, step_seconds: float = 0.0) -> list[Event]:
        """Return the events since the last call, and those that arrive shortly after.

        Fast environments answer at nearly the same time, and a step of the engine takes about as
        long for few sequences as for many. Waiting pays while more answers arrive than the engine
        would sample tokens: in `step_seconds` it samples one for each of `num_running` and of the
        answers so far.
        """
        if self._waits:
            return self._wait_for_all()
        events = self._poll()
        poll_seconds = step_seconds / _POLLS_PER_STEP
        while events and poll_seconds and self._pool.num_busy:
            time.sleep(poll_seconds)
            new = self._poll()
            events += new
            if len(new) * _POLLS_PER_STEP < num_running + len(events):
                break
        return events

    def _wait_for_all(self) -> list[Event]:
        events: list[Event] = []
        while self._pool.is_working:
            self._pool.wait()
            events += self._poll()
        return sorted(events + self._poll(), key=attrgetter("number"))

    def _poll(self) -> list[Event]:
        events: list[Event] = []
        for ticket, event in self._pool.finished():
            number = self._numbers[ticket]
            episode = self._episodes[number]
            if isinstance(event, Started):
                if (begun := self._begun(number, episode, event)) is not None:
                    events.append(begun)
            elif isinstance(event, Stepped):
                events.append(self._stepped(number, episode, event))
            else:
                events.append(self._end_of(number, episode, event))
        return events

    def end(self, numbers: Iterable[int]) -> None:
        """End these samples. Numbers that are not open are ignored."""
        tickets = [self._episodes.pop(n).ticket for n in numbers if n in self._episodes]
        for ticket in tickets:
            del self._numbers[ticket]
        self._pool.end(tickets)

    def close(self) -> None:
        """End all processes. A second call has no effect."""
        self._episodes.clear()
        self._pool.close()

    def _begun(self, number: int, episode: _Episode, event: Started) -> Event | None:
        """Return the event of an environment that is ready; None if it has a turn to answer."""
        kept, rollout, episode.tools = episode.kept, episode.rollout, event.tools
        if kept is None:
            return self._started(number, episode, event)
        start = turn_start(rollout)
        if kept.unanswered is not None:
            turn = rollout.response_token_ids[start:]
            self._ask(episode, turn, kept.unanswered, episode.text)
            return None
        is_within = start < len(rollout.response_token_ids)
        return NextTurn(number, rollout, _NO_TOKENS if is_within else kept.observed)

    def _started(self, number: int, episode: _Episode, event: Started) -> Event:
        prompt = episode.rollout.prompt
        ids = self._tokens.first(prompt.token_ids, event.prompt, event.tools)
        if isinstance(ids, np.ndarray) and len(ids) > self._max_prompt_tokens:
            ids = Failed(
                _TOO_LONG, f"{len(ids)} tokens; --rl-max-prompt-tokens is {self._max_prompt_tokens}"
            )
        if isinstance(ids, Failed):
            return self._end_of(number, episode, ids)
        episode.rollout = dataclasses.replace(
            episode.rollout, prompt=dataclasses.replace(prompt, token_ids=ids)
        )
        return self._next_turn(number, episode, event.state, _NO_TOKENS)

    def _stepped(self, number: int, episode: _Episode, event: Stepped) -> Event:
        rollout = episode.rollout
        turn_reward = TurnReward(len(rollout.response_token_ids), event.reward)
        rollout = dataclasses.replace(rollout, turn_rewards=(*rollout.turn_rewards, turn_reward))
        episode.rollout = rollout
        if event.done:
            return self._end_of(number, episode)
        generated = np.array(episode.turn_tokens, dtype=np.int32)
        observed = self._tokens.observed(generated, event.observation)
        if isinstance(observed, Failed):
            return self._end_of(number, episode, observed)
        limit = rollout.prompt.limit(self._max_tokens)
        left = limit - len(rollout.response_token_ids) - len(observed)
        if left < 1 or episode.num_turns >= self._spec.max_turns:
            episode.finish_reason = "length"  # it would have continued
            return self._end_of(number, episode)
        return self._next_turn(number, episode, event.state, observed)

    def _next_turn(
        self, number: int, episode: _Episode, state: str | None, observed: np.ndarray
    ) -> NextTurn:
        episode.kept = None
        if state is not None:
            environment = self._spec.class_for(episode.rollout.prompt.source)
            episode.kept = KeptConversation(state, observed, environment=environment)
        return NextTurn(number, episode.rollout, observed)

    def _end_of(self, number: int, episode: _Episode, failed: Failed | None = None) -> EpisodeEnd:
        del self._episodes[number], self._numbers[episode.ticket]
        reward = sum(turn.reward for turn in episode.rollout.turn_rewards)
        outcome = Outcome(reward) if failed is None else Outcome(0.0, failed.kind, failed.detail)
        rollout = dataclasses.replace(
            episode.rollout,
            finish_reason=episode.finish_reason,
            failure=episode.rollout.failure or (None if failed is None else failed.failure),
        )
        self._pool.end([episode.ticket])
        return EpisodeEnd(number, rollout, outcome)


def turns_of(rollout: Rollout) -> Sequence[np.ndarray]:
    """Return the token ids of each generated turn, without the observations."""
    ids, generated = rollout.response_token_ids, rollout.is_generated
    if generated is None:
        return [ids]
    ends = np.flatnonzero(np.diff(generated)) + 1
    parts = np.split(np.arange(len(ids)), ends)
    return [ids[part] for part in parts if len(part) and generated[part[0]]]
