"""Rewards from a server of the user's, asked over HTTP.

The reward `http` sends batches of samples by POST to `--rl-reward-url`,

    {"samples": [{"prompt": "2+3=", "response": " 5", "answer": "5", "row": {...}}, ...]}

and expects one finite number for each sample, in the same order:

    {"rewards": [1.0, ...]}

A server fails in many ways: it is not there, hangs, answers with an error or with nonsense. That
costs the samples that were asked about, never the run. Only what may pass is tried again: a broken
connection, a timeout, and the statuses 429 and 5xx. Nothing but the configured address is ever
asked: redirects are not followed, and proxies, cookies and .netrc are not used.

The reward `pooling` is a reward model behind vLLM's own server.

    vllm serve MODEL --runner pooling

    POST /pooling  {"input": ["prompt and response", ...], "use_activation": false, ...}
    {"data": [{"index": 0, "data": [0.7]}, ...], ...}

The text of a sample is its prompt followed by its response, without a chat template. Models with
one score for a sequence (`...ForSequenceClassification` with one label; vLLM's task "classify")
answer with a list of one number, which is the reward. Models with one for each token (vLLM's task
"token_classify") answer with a list of such lists, and the reward is the last token's. Both give
the model's logit, whatever activation the server would put on it by default. Anything else, as the
scores of several classes, has no single number, and fails.

Written for vLLM 0.32. Its `--api-key` does not guard /pooling: a server that others can reach needs
a proxy before it, and `--rl-reward-pooling-header-env` holds what that wants to see.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from mcore_rl.batching.types import Rollout
from mcore_rl.rewards.specs import ServerSpec, header_of
from mcore_rl.rewards.worker import Outcome

_FIRST_BACKOFF_SECONDS = 0.5
_SHAPE = "the answer must be"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How samples become a request's JSON, and the answer's JSON one entry for each sample.

    `entries` raises KeyError, TypeError, IndexError or ValueError if the answer has another form
    than `form`, which is told to the user. An entry that is no finite number costs its own sample
    only.
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


PLAIN_DIALECT = Dialect('{"rewards": [numbers]}', _samples, _rewards, max_answer_bytes=1 << 20)


def _texts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    return {
        "input": [r.prompt.text + r.text for r in rollouts],
        "encoding_format": "float",
        "use_activation": False,
    }


def _scores(answer: Any) -> list[Any]:
    return [_score(entry["data"]) for entry in answer["data"]]


def _score(data: Any) -> Any:
    last = data[-1]
    scores = last if isinstance(last, list) else data
    if not isinstance(data, list) or len(scores) != 1:
        raise ValueError("not one score")
    return scores[0]


POOLING_DIALECT = Dialect(
    'that of vLLM\'s /pooling with one score: {"data": [{"data": [number]}, ...]} for a sequence '
    'or {"data": [{"data": [[number], ...]}, ...]} for its tokens',
    _texts,
    _scores,
    max_answer_bytes=1 << 24,  # a number for each token
)


class _Failed(Exception):
    """An attempt failed. Holds nothing that the server wrote: it may repeat the secret header."""

    def __init__(self, kind: str, detail: str = "", *, may_pass: bool = False) -> None:
        super().__init__(kind, detail)
        self.outcome = Outcome(0.0, kind, detail)
        self.may_pass = may_pass


class ServerReward:
    """Asks one server for rewards.

    Each attempt at a request has `timeout_seconds` in all, from connecting to the last byte of the
    answer. Before attempt n+1 come up to 0.5 x 2^(n-1) seconds, at most `timeout_seconds`; how much
    of the upper half of that is drawn at random, so that ranks do not come back together.
    """

    def __init__(self, server: ServerSpec, dialect: Dialect, *, timeout_seconds: float) -> None:
        """Raises UsageError if the environment does not hold the header that `server` names."""
        self.name = server.name
        self._server, self._dialect = server, dialect
        self._timeout_seconds = timeout_seconds
        self._header = header_of(server)
        # Not the global generator: its state is part of the training's.
        self._random = random.Random()

    async def answer(
        self,
        waiting: asyncio.Queue[tuple[int, Rollout]],
        wanted: Container[int],
        tell: Callable[[str, list[int], list[Outcome]], object],
    ) -> None:
        """Asks about what comes into the queue, rollouts by ticket, until it is cancelled.

        A request takes what waits at its moment, up to `batch_samples`, but for tickets that are
        no longer `wanted`; `tell` hears its name, tickets and outcomes. Raises nothing that a
        server can cause.
        """

        async def work() -> None:
            while True:
                ticket, rollout = await waiting.get()
                batch = {ticket: rollout} if ticket in wanted else {}
                while len(batch) < self._server.batch_samples and not waiting.empty():
                    ticket, rollout = waiting.get_nowait()
                    if ticket in wanted:
                        batch[ticket] = rollout
                if batch:
                    outcomes = await self._ask(session, list(batch.values()))
                    tell(self.name, list(batch), outcomes)

        async with (
            aiohttp.ClientSession(
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                # A small answer may unpack to a huge one: packed ones are neither wanted nor read.
                auto_decompress=False,
                headers={"Accept-Encoding": "identity", **self._header},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                connector=aiohttp.TCPConnector(limit=self._server.concurrency),
            ) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self._server.concurrency):
                tasks.create_task(work())

    async def _ask(self, session: aiohttp.ClientSession, batch: Sequence[Rollout]) -> list[Outcome]:
        """One batch, tried until it succeeds, cannot succeed or was tried often enough."""
        body = json.dumps(self._dialect.body(batch)).encode()
        for attempt in range(self._server.retries + 1):
            if attempt > 0:
                await asyncio.sleep(self._backoff_seconds(attempt))
            try:
                text = await self._attempt(session, body)
                return self._understood(text, len(batch))
            except _Failed as failed:
                outcome = failed.outcome
                if not failed.may_pass:
                    break
        return [outcome] * len(batch)

    def _backoff_seconds(self, attempt: int) -> float:
        longest = min(_FIRST_BACKOFF_SECONDS * 2.0 ** min(attempt - 1, 32), self._timeout_seconds)
        return longest * self._random.uniform(0.5, 1.0)

    async def _attempt(self, session: aiohttp.ClientSession, body: bytes) -> bytes:
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                session.post(
                    self._server.url,
                    data=body,
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,
                ) as response,
            ):
                self._check_status(response.status)
                return await self._read(response)
        except TimeoutError:
            limit = f"no answer within {self._timeout_seconds:g} s"
            raise _Failed("timed out", limit, may_pass=True) from None
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise _Failed("connection failed", _text_of(error), may_pass=True) from None
        except aiohttp.ClientError as error:
            raise _Failed("request failed", type(error).__name__) from None

    def _check_status(self, status: int) -> None:
        if 300 <= status < 400:
            raise _Failed(f"HTTP status {status}", "redirects are not followed; give the new URL")
        if not 200 <= status < 300:
            raise _Failed(f"HTTP status {status}", may_pass=status == 429 or status >= 500)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        text = bytearray()
        async for chunk in response.content.iter_any():
            text += chunk
            if len(text) > self._dialect.max_answer_bytes:
                response.close()  # else the rest might be read to keep the connection
                limit = f"more than {self._dialect.max_answer_bytes} bytes"
                raise _Failed("answer too long", limit)
        return bytes(text)

    def _understood(self, text: bytes, num_samples: int) -> list[Outcome]:
        form = f"{_SHAPE} {self._dialect.form}"
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            raise _Failed("answer is not JSON", form) from None
        try:
            entries = self._dialect.entries(answer)
        except (KeyError, TypeError, IndexError, ValueError):
            raise _Failed("answer has another form", form) from None
        if len(entries) != num_samples:
            detail = f"{len(entries)} for {num_samples} samples; {form}, one for each sample"
            raise _Failed("answer has a wrong number of rewards", detail)
        return [_number(entry) for entry in entries]


def _number(entry: Any) -> Outcome:
    if isinstance(entry, bool) or not isinstance(entry, (int, float)):
        return Outcome(0.0, f"returned {type(entry).__name__}", "a reward is a finite number")
    try:
        value = float(entry)
    except OverflowError:  # an integer of hundreds of digits
        value = math.inf
    if not math.isfinite(value):
        return Outcome(0.0, f"returned {value}", "a reward is a finite number")
    return Outcome(value)


def _text_of(error: aiohttp.ClientError) -> str:
    """What the operating system said, where it was the one to speak."""
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}, {reason}" if reason else type(error).__name__
