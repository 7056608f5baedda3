"""`mcore-rl report --live`: the page of runs that are still being written, on this machine only.

    browser ── GET ──────────────────► page
       └── GET update, every seconds ─► 304 while the files are as they were, else the new page

The server only reads, and only when a browser asks. It listens on 127.0.0.1. Its address has a
random part, without which it answers 404: other users of the machine and other pages in the
browser do not know it.
"""

from __future__ import annotations

import hashlib
import http.server
import secrets
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from mcore_rl.common.errors import UsageError
from mcore_rl.tools.report.page import render, without_plotly
from mcore_rl.tools.report.run_files import FILES, read_runs

_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class LivePage:
    """The page of the runs in `folders`, rendered anew when a file has changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._lock = folders, threading.Lock()
        self._tag = self._page = ""

    def tag(self) -> str:
        """Return the ETag of the files: another one after each change of size or time."""
        stamps = []
        for file in (folder / name for folder in self._folders for name in FILES):
            try:
                stat = file.stat()
                stamps.append((stat.st_mtime_ns, stat.st_size))
            except OSError:
                stamps.append((0, 0))
        return f'"{hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]}"'

    def current(self) -> tuple[str, str]:
        """Return the ETag and the page. Raises UsageError for a folder that is gone."""
        with self._lock:
            tag = self.tag()  # first: what is written during the rendering is a change
            if tag != self._tag:
                self._page = render(read_runs(self._folders), live=tag)
                self._tag = tag
            return tag, self._page


class LiveServer(http.server.ThreadingHTTPServer):
    """The server of a page. Raises OSError if `port` is not free; 0 takes a free one."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page, self.path = page, f"/{secrets.token_urlsafe(16)}/"
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}{self.path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Report an error on stderr, unless a browser has just gone."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: LiveServer
    timeout = 30  # seconds for a request

    def do_GET(self) -> None:
        if self.path not in (self.server.path, f"{self.server.path}update"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        page = self.server.page
        if self.headers.get("If-None-Match") == page.tag():
            self._answer(HTTPStatus.NOT_MODIFIED)
            return
        try:
            tag, text = page.current()
        except UsageError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, str(error), {"Content-Type": "text/plain"})
            return
        if self.path.endswith("update"):
            text = without_plotly(text)
        self._answer(HTTPStatus.OK, text, {"ETag": tag})

    def _answer(
        self, status: HTTPStatus, text: str = "", headers: dict[str, str] | None = None
    ) -> None:
        content = text.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def serve(folders: Sequence[Path], port: int) -> None:
    """Serve the page until Ctrl-C, and print its address. Raises UsageError."""
    page = LivePage(folders)
    page.current()  # a mistake is reported now
    try:
        server = LiveServer(page, port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"cannot be used ({getattr(error, 'strerror', None) or error})",
            flag=f"--port {port}",
            remedy="name another port, or leave it out for a free one",
        ) from error
    with server:
        print(f"{server.url} (Ctrl-C ends the page, not the run)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
