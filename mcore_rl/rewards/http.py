"""Rewards from a user's server, requested over HTTP.

The reward `http` sends batches of samples by POST to `--rl-reward-url`,

    {"samples": [{"prompt": "2+3=", "response": " 5", "answer": "5", "row": {...}}, ...]}

and expects one finite number for each sample, in the same order:

    {"rewards": [1.0, ...]}

A server that is missing, hangs, or answers with an error or invalid data fails the requested
samples, never the run. Only a broken connection, a timeout, and the statuses 429 and 5xx are
retried. Only the configured address is ever requested (`common.http`).

The reward `pooling` is a reward model behind vLLM's own server.

    vllm serve MODEL --runner pooling

    POST /pooling  {"input": ["prompt and response", ...], "use_activation": false, ...}
    {"data": [{"index": 0, "data": [0.7]}, ...], ...}

The text of a sample is its prompt followed by its response, without a chat template. vLLM's task
"classify" (`...ForSequenceClassification` with one label) answers with a list of one number, the
reward; its task "token_classify" answers with a list of such lists, one per token, and the reward
is the last token's. Both return the model's logit. Any other answer, such as the scores of several
classes, fails.

Written for vLLM 0.32. Its `--api-key` does not guard /pooling: a server that others can reach needs
a proxy; `--rl-reward-pooling-header-env` names the header that the proxy requires.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mcore_rl.batching.types import Rollout
from mcore_rl.common.addresses import header_from
from mcore_rl.common.http import HTTPFailure, client_session, request
from mcore_rl.common.readers import InvalidData, finite_number, parse_json
from mcore_rl.rewards.specs import ServerSpec
from mcore_rl.rewards.worker import Outcome

FIRST_BACKOFF_SECONDS = 0.5

Answered = list[tuple[int, str, Outcome]]  # ticket, name of the reward, outcome


@dataclass(frozen=True, slots=True)
class Dialect:
    """The conversion of samples into a request's JSON, and of the answer into one entry per sample.

    `entries` raises LookupError, TypeError, AttributeError or ValueError if the answer is not of
    `form`, a text for the user. An entry that is not a finite number fails only its sample.
    """

    form: str
    body: Callable[[Sequence[Rollout]], dict[str, Any]]
    entries: Callable[[Any], list[Any]]
    max_answer_bytes: int


def _samples(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "samples": [
            {
                "prompt": r.prompt.text,
                "response": r.text,
                "answer": r.prompt.answer,
                **({"row": json.loads(r.prompt.row)} if r.prompt.row != "{}" else {}),
            }
            for r in rollouts
        ]
    }


def _rewards(answer: Any) -> list[Any]:
    rewards = answer["rewards"]
    if not isinstance(rewards, list):
        raise TypeError("not a list")
    return rewards


_PLAIN = Dialect('{"rewards": [numbers]}', _samples, _rewards, max_answer_bytes=1 << 20)


def _texts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "input": [r.prompt.text + r.text for r in rollouts],
        "encoding_format": "float",
        "use_activation": False,
    }


def _scores(answer: Any) -> list[Any]:
    entries = answer["data"]
    if not isinstance(entries, list):
        raise TypeError("not a list")
    if any(entry.get("index", at) != at for at, entry in enumerate(entries)):
        raise ValueError("in another order than the samples")
    return [_score(entry["data"]) for entry in entries]


def _score(data: Any) -> Any:
    last = data[-1]
    scores = last if isinstance(last, list) else data
    if not isinstance(data, list) or len(scores) != 1:
        raise ValueError("not one score")
    return scores[0]


_POOLING = Dialect(
    'that of vLLM\'s /pooling with one score: {"data": [{"data": [number]}, ...]} for a sequence '
    'or {"data": [{"data": [[number], ...]}, ...]} for its tokens',
    _texts,
    _scores,
    max_answer_bytes=1 << 24,  # a number for each token
)

DIALECTS = {"http": _PLAIN, "pooling": _POOLING}  # by the name of the reward


class ServerReward:
    """The client of one reward server.

    Each attempt at a request has `timeout_seconds` in total, from connecting to the last byte of
    the answer. Attempt n+1 is delayed by up to 0.5 x 2^(n-1) seconds, at most `timeout_seconds`;
    the upper half of the delay is random, so that ranks do not return together.
    """

    def __init__(self, server: ServerSpec, *, timeout_seconds: float) -> None:
        """Raises UsageError if the environment does not hold the header that `server` names."""
        self.name = server.name
        self._server, self._dialect = server, DIALECTS[server.name]
        self._timeout_seconds = timeout_seconds
        self._header = header_from(server.header_env, server.header_flag)
        # Not the global generator, whose state belongs to training.
        self._random = random.Random()

    async def answer(
        self,
        waiting: asyncio.Queue[tuple[int, Rollout]],
        on_answers: Callable[[Answered], None],
    ) -> None:
        """Request rewards for queued rollouts, by ticket, until cancelled.

        A request takes what is queued at its moment, up to `batch_samples`; `on_answers` receives
        the outcomes. No server causes an exception.
        """

        async def work() -> None:
            while True:
                batch = [await waiting.get()]
                while len(batch) < self._server.batch_samples and not waiting.empty():
                    batch.append(waiting.get_nowait())
                outcomes = await self._request(session, [rollout for _, rollout in batch])
                on_answers(
                    [
                        (ticket, self._server.name, outcome)
                        for (ticket, _), outcome in zip(batch, outcomes, strict=True)
                    ]
                )

        async with (
            client_session(self._header, concurrency=self._server.concurrency) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self._server.concurrency):
                tasks.create_task(work())

    async def _request(
        self, session: aiohttp.ClientSession, batch: Sequence[Rollout]
    ) -> list[Outcome]:
        """Request one batch until it succeeds, cannot succeed or has used all attempts."""
        body = json.dumps(self._dialect.body(batch)).encode()
        for attempt in range(self._server.retries + 1):
            if attempt > 0:
                await asyncio.sleep(self.backoff_seconds(attempt))
            try:
                text = await request(
                    session,
                    "POST",
                    self._server.url,
                    body=body,
                    timeout_seconds=self._timeout_seconds,
                    max_answer_bytes=self._dialect.max_answer_bytes,
                )
                return self.parse(text, len(batch))
            except HTTPFailure as failed:
                outcome = Outcome(0.0, failed.kind, failed.detail)
                if not failed.may_pass:
                    break
        return [outcome] * len(batch)

    def backoff_seconds(self, attempt: int) -> float:
        """Return a random pause before the next attempt; it doubles up to the timeout."""
        longest = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(attempt - 1, 32), self._timeout_seconds)
        return longest * self._random.uniform(0.5, 1.0)

    def parse(self, text: bytes, num_samples: int) -> list[Outcome]:
        """Return the outcomes in a server's answer. HTTPFailure: its form is wrong."""
        form = f"the answer must be {self._dialect.form}"
        try:
            answer = parse_json(text)
        except InvalidData:
            raise HTTPFailure("answer is not JSON", form) from None
        try:
            entries = self._dialect.entries(answer)
        except (LookupError, TypeError, AttributeError, ValueError):
            raise HTTPFailure("answer has another form", form) from None
        if len(entries) != num_samples:
            detail = f"{len(entries)} for {num_samples} samples; {form}, one for each sample"
            raise HTTPFailure("answer has a wrong number of rewards", detail)
        return [_number(entry) for entry in entries]


def _number(entry: Any) -> Outcome:
    value = finite_number(entry)
    if value is not None:
        return Outcome(value)
    kind = f"returned {type(entry).__name__}"
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        # An integer of hundreds of digits counts as inf.
        kind = f"returned {entry if isinstance(entry, float) else math.inf}"
    return Outcome(0.0, kind, "a reward is a finite number")
