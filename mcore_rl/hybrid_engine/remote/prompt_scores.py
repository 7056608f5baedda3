"""Client of a server that scores tokens: POST /v1/completions with `prompt_logprobs`.

Any `vllm serve` answers it. The log-probs of a prompt are those of the model at temperature 1,
whatever temperature the request has:

    {"choices": [{"prompt_logprobs": [null, {"17": {"logprob": -0.1, "rank": 1}}]}]}

Nothing in an answer is believed unchecked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import operator
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mcore_rl.common.http import HTTPFailure, client_session, quoted, request
from mcore_rl.common.readers import InvalidData, finite_number, integer_within, parse_json

T = TypeVar("T")

_NO_LOG_PROB = -9999.0  # vLLM's floor, also in place of NaN
_ROUNDING = 1e-6  # above 0, of the log-prob of a certain token
_BYTES_PER_TOKEN, _MORE_BYTES = 512, 1 << 16  # of an answer
_CONCURRENCY = 16  # requests at a time
_REQUEST_SECONDS = 300.0
FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 10.0
_MOST_TOKENS = 1 << 31


class ScoringFailed(Exception):
    """A server did not score all samples within the time. The message fits on one line."""


class PromptScores:
    """Client of the server at `url`. `header` is sent with each request; a server's text is shown
    only without one, since it may repeat it. A request may take `request_seconds`."""

    def __init__(
        self, url: str, header: Mapping[str, str], *, request_seconds: float = _REQUEST_SECONDS
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._header, self._request_seconds = header, request_seconds

    def log_probs(self, samples: Sequence[np.ndarray], wait_seconds: float) -> list[np.ndarray]:
        """Return, for each of `samples` `[t]` int32, `[t]` float32: position j has the log-prob of
        token j+1, the last one 0. A failed request is repeated for `wait_seconds`. Raises
        ScoringFailed, and nothing else, whatever the server answers."""
        return asyncio.run(self._scored(samples, time.monotonic() + wait_seconds))

    def max_tokens(self) -> int | None:
        """Return the server's --max-model-len; None if it does not tell. Raises HTTPFailure."""
        models = asyncio.run(self._once("GET", "v1/models"))
        with _reading("no list of models"):
            for model in models["data"]:
                if "max_model_len" in model:
                    return integer_within(model["max_model_len"], 1, _MOST_TOKENS)
        return None

    def tokens_of(self, text: str) -> list[int]:
        """Return the server's tokens of `text`, without special ones. Raises HTTPFailure."""
        body = {"prompt": text, "add_special_tokens": False}
        answer = asyncio.run(self._once("POST", "tokenize", body))
        with _reading("no list of tokens"):
            return [operator.index(token) for token in answer["tokens"]]

    async def _once(self, method: str, path: str, body: Any = None) -> Any:
        async with client_session(self._header) as session:
            return await self._answer(session, method, path, body, _MORE_BYTES)

    async def _answer(
        self, session: Any, method: str, path: str, body: Any, max_answer_bytes: int
    ) -> Any:
        text = await request(
            session,
            method,
            f"{self.url}/{path}",
            body=None if body is None else json.dumps(body).encode(),
            timeout_seconds=self._request_seconds,
            max_answer_bytes=max_answer_bytes,
            keeps_refusal=True,
        )
        try:
            return parse_json(text)
        except InvalidData:
            raise HTTPFailure("answer is not JSON") from None

    async def _scored(self, samples: Sequence[np.ndarray], deadline: float) -> list[np.ndarray]:
        free = asyncio.Semaphore(_CONCURRENCY)

        async def scored(tokens: np.ndarray) -> np.ndarray:
            async with free:
                return await self._repeated(session, tokens, deadline)

        async with client_session(
            self._header, concurrency=_CONCURRENCY, keeps_connections=False
        ) as session:
            return await _all([scored(tokens) for tokens in samples])

    async def _repeated(self, session: Any, tokens: np.ndarray, deadline: float) -> np.ndarray:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._sample(session, tokens)
            except HTTPFailure as failure:
                left = deadline - time.monotonic()
                if not failure.may_pass or left <= 0:
                    shown = "" if self._header or not failure.answer else quoted(failure.answer)
                    why = f"{failure}: {shown}" if shown else str(failure)
                    raise ScoringFailed(f"{self.url}: {why}") from None
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _sample(self, session: Any, tokens: np.ndarray) -> np.ndarray:
        body = {
            "prompt": tokens.tolist(),
            "prompt_logprobs": 0,  # of the tokens themselves, and no others
            "max_tokens": 1,
            "temperature": 1.0,
        }
        limit = _MORE_BYTES + _BYTES_PER_TOKEN * len(tokens)
        answer = await self._answer(session, "POST", "v1/completions", body, limit)
        scores = np.zeros(len(tokens), dtype=np.float32)
        scores[:-1] = log_probs_in(answer, tokens.tolist())
        return scores


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Within it, whatever an answer causes is an HTTPFailure: it has `what`."""
    try:
        yield
    except Exception:  # of any type: an answer may have anything at any place
        raise HTTPFailure("answer has another form", f"it has {what}") from None


async def _all(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order, or raise the first failure after cancelling the rest."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def log_probs_in(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Return the log-probs of all tokens but the first. Raises HTTPFailure for another answer than
    that to a request with these tokens."""
    with _reading("not one log-prob for each token"):
        entries = answer["choices"][0]["prompt_logprobs"]
        values = [
            finite_number(entry[str(token)]["logprob"])
            for entry, token in zip(entries[1:], tokens[1:], strict=True)
        ]
    checked = [value for value in values if value is not None and _NO_LOG_PROB < value <= _ROUNDING]
    if len(checked) != len(values):
        raise HTTPFailure("answer has a log-prob that is not a finite number of at most 0")
    return checked
