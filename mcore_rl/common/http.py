"""HTTP to the one address that the user gave: rewards, and engines in other processes.

Redirects are errors. Proxies from the environment, `.netrc` and cookies are not used. A request
has one deadline, from connecting to the last byte, and its answer is read up to a limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp


class HTTPFailure(Exception):
    """A failed request. `kind` and `detail` contain nothing that the server wrote, which may repeat
    a secret header; `answer` is the body of a response with an error status."""

    def __init__(
        self,
        kind: str,
        detail: str = "",
        *,
        may_pass: bool = False,
        answer: bytes = b"",
        status: int | None = None,
    ) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail
        self.status = status  # of the response, if it was an error
        self.may_pass = may_pass  # a later attempt may succeed
        self.answer = answer


def client_session(
    header: Mapping[str, str], *, concurrency: int = 1, keeps_connections: bool = True
) -> aiohttp.ClientSession:
    """Return a session for `request` of up to `concurrency` connections. Needs an event loop.

    A server closes a kept connection after seconds of rest, perhaps while a request is sent on it:
    that request fails."""
    return aiohttp.ClientSession(
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        # A small answer may decompress to a huge one, so compressed answers are not requested.
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", **header},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        connector=aiohttp.TCPConnector(limit=concurrency, force_close=not keeps_connections),
    )


async def request(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_seconds: float,
    max_answer_bytes: int,
    body: bytes | None = None,
    params: Mapping[str, str] | None = None,
    keeps_refusal: bool = False,
) -> bytes:
    """Return the body of a successful answer. Whatever the server does, any failure is an
    HTTPFailure; with `keeps_refusal` it carries the body of an answer with an error status."""
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            answer_to(
                session,
                method,
                url,
                body=body,
                params=params,
                kept_refusal_bytes=max_answer_bytes if keeps_refusal else None,
            ) as response,
        ):
            return await _read(response, max_answer_bytes)
    except TimeoutError:
        limit = f"no answer within {timeout_seconds:g} s"
        raise HTTPFailure("timed out", limit, may_pass=True) from None


@contextlib.asynccontextmanager
async def answer_to(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    body: bytes | None = None,
    params: Mapping[str, str] | None = None,
    kept_refusal_bytes: int | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request; yield the response with a success status, to be read within the context.

    Sets no deadline. Whatever else the server does, while the context is open, is an HTTPFailure;
    with `kept_refusal_bytes` it carries the body of an answer with an error status, up to a limit.
    """
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        async with session.request(
            method, url, data=body, params=params, headers=headers, allow_redirects=False
        ) as response:
            if 300 <= response.status < 400:
                raise _of_status(response.status, "redirects are not followed; give the new URL")
            if not 200 <= response.status < 300:
                kept = kept_refusal_bytes
                answer = b"" if kept is None else await _read(response, kept)
                raise _of_status(response.status, answer=answer)
            yield response
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise HTTPFailure("connection failed", _text_of(error), may_pass=True) from None
    except aiohttp.ClientError as error:
        raise HTTPFailure("request failed", type(error).__name__) from None


async def lines_of(response: aiohttp.ClientResponse, max_line_bytes: int) -> AsyncIterator[bytes]:
    """Yield the lines of an answer as they arrive, without their newlines. A longer line is an
    HTTPFailure; an unfinished last line is left out."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        rest += chunk
        if b"\n" in chunk:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield bytes(line)
        if len(rest) > max_line_bytes:
            raise HTTPFailure("answer too long", f"a line of more than {max_line_bytes} bytes")


def quoted(answer: bytes, max_characters: int = 500) -> str:
    """Return a server's text on one line, because logs are read line by line, and cut short."""
    text = " ".join(answer.decode(errors="replace").split())
    text = "".join(each if each.isprintable() else "?" for each in text)
    return text if len(text) <= max_characters else text[:max_characters] + " ..."


def _of_status(status: int, detail: str = "", **options: Any) -> HTTPFailure:
    may_pass = status == 429 or status >= 500
    return HTTPFailure(f"HTTP status {status}", detail, may_pass=may_pass, status=status, **options)


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    text = bytearray()
    async for chunk in response.content.iter_any():
        text += chunk
        if len(text) > max_bytes:
            response.close()  # otherwise the rest may be read to keep the connection
            raise HTTPFailure("answer too long", f"more than {max_bytes} bytes")
    return bytes(text)


def _text_of(error: aiohttp.ClientError) -> str:
    """Return the error's type, with the operating system's reason if there is one."""
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}, {reason}" if reason else type(error).__name__
