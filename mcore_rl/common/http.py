"""HTTP to the one address that the user gave: rewards, and engines in other processes.

Redirects are errors. Proxies from the environment, `.netrc` and cookies are not used. A request
has one deadline, from connecting to the last byte, and its answer is read up to a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp


class HTTPFailure(Exception):
    """A failed request. `kind` and `detail` contain nothing that the server wrote, which may repeat
    a secret header; `answer` is the body of a response with an error status."""

    def __init__(
        self, kind: str, detail: str = "", *, may_pass: bool = False, answer: bytes = b""
    ) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail
        self.may_pass = may_pass  # a later attempt may succeed
        self.answer = answer


def client_session(header: Mapping[str, str], *, concurrency: int = 1) -> aiohttp.ClientSession:
    """Return a session for `request` of up to `concurrency` connections. Needs an event loop."""
    return aiohttp.ClientSession(
        trust_env=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        # A small answer may decompress to a huge one, so compressed answers are not requested.
        auto_decompress=False,
        headers={"Accept-Encoding": "identity", **header},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        connector=aiohttp.TCPConnector(limit=concurrency),
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
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        async with (
            asyncio.timeout(timeout_seconds),
            session.request(
                method, url, data=body, params=params, headers=headers, allow_redirects=False
            ) as response,
        ):
            if 300 <= response.status < 400:
                raise _of_status(response.status, "redirects are not followed; give the new URL")
            is_refusal = not 200 <= response.status < 300
            if is_refusal and not keeps_refusal:
                raise _of_status(response.status)
            text = await _read(response, max_answer_bytes)
            if is_refusal:
                raise _of_status(response.status, answer=text)
            return text
    except TimeoutError:
        limit = f"no answer within {timeout_seconds:g} s"
        raise HTTPFailure("timed out", limit, may_pass=True) from None
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise HTTPFailure("connection failed", _text_of(error), may_pass=True) from None
    except aiohttp.ClientError as error:
        raise HTTPFailure("request failed", type(error).__name__) from None


def _of_status(status: int, detail: str = "", **options: Any) -> HTTPFailure:
    may_pass = status == 429 or status >= 500
    return HTTPFailure(f"HTTP status {status}", detail, may_pass=may_pass, **options)


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
