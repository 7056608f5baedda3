"""`mcore-rl report --live`: what its server answers while a run writes.

test_report_browser.py follows a run in a browser.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import pytest

from mcore_rl.cli import main
from mcore_rl.tools.report.live import LivePage, LiveServer
from mcore_rl.tools.report.run_files import read_run
from tests.report_runs import write_run


class Answer(NamedTuple):
    status: int
    tag: str | None
    headers: http.client.HTTPMessage
    text: str


@contextlib.contextmanager
def serving(*folders: Path) -> Iterator[LiveServer]:
    with LiveServer(LivePage(folders)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: LiveServer, path: str = "", *, tag: str | None = None) -> Answer:
    """The answer for a path that is relative to the page."""
    place = urlsplit(server.url)
    connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=120)
    path = path if path.startswith("/") else place.path + path
    connection.request("GET", path, headers={"If-None-Match": tag or ""})
    with contextlib.closing(connection):
        found = connection.getresponse()
        return Answer(found.status, found.headers["ETag"], found.headers, found.read().decode())


def steps_in(page: str) -> str:
    found = re.search(r'<p class="value [^>]*>(\d+ of \d+)</p>', page)
    assert found is not None
    return found[1]


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run after 3 of 50 steps."""
    return write_run(tmp_path / "run", num_steps=3, asked=50, finish=False)


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)


def test_page_follows_the_run(running: Path) -> None:
    with serving(running) as server:
        first = get(server)
        assert first.status == 200 and steps_in(first.text) == "3 of 50"
        assert first.tag is not None and first.tag.strip('"') in first.text
        assert "Live." in first.text and "connect-src 'self'" in first.text
        assert "Incomplete" not in first.text  # the summary is not due
        for path in ("", "update"):
            same = get(server, path, tag=first.tag)
            assert (same.status, same.text) == (304, "")
        append(running, '{"step": 3, "reward/mean": 0.5}\n')
        second = get(server, "update", tag=first.tag)
        assert second.status == 200 and second.tag != first.tag
        assert steps_in(second.text) == "4 of 50"
        assert len(second.text) < len(first.text) / 3 < len(get(server).text) / 3
        assert get(server, "update", tag=second.tag).status == 304


def test_half_written_lines_are_left_out(running: Path) -> None:
    line = '{"step": 3, "reward/mean": 0.5}\n'
    with serving(running) as server:
        for name in ("rollouts.jsonl", "timeline.jsonl", "run.log"):
            with (running / name).open("a") as file:
                file.write('{"step": 3, "ro')
        append(running, line[:12])
        cut = get(server)
        assert cut.status == 200 and steps_in(cut.text) == "3 of 50"
        append(running, line[12:])
        assert steps_in(get(server, "update", tag=cut.tag).text) == "4 of 50"


def test_page_of_an_ended_run_says_so_and_is_not_followed(running: Path) -> None:
    with serving(running) as server:
        tag = get(server).tag
        (running / "summary.json").write_text("{")  # half of it
        page = get(server, "update", tag=tag)
        assert "data-live" in page.text and "Live." in page.text
        (running / "summary.json").write_text('{"train_layout": "TP1"}')
        page = get(server, "update", tag=page.tag)
        assert "data-live" not in page.text and "Ended." in page.text
        os.utime(running / "config.yaml", (2**32, 2**32))  # a resumed run has begun
        page = get(server, "update", tag=page.tag)
        assert "data-live" in page.text and "Live." in page.text


def test_summary_from_before_a_resume_is_no_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", num_steps=2)
    assert read_run(folder, name="run").has_ended
    os.utime(folder / "config.yaml", (2**32, 2**32))
    assert not read_run(folder, name="run").has_ended


def test_two_runs_are_followed_until_both_have_ended(running: Path, tmp_path: Path) -> None:
    with serving(running, write_run(tmp_path / "ended", num_steps=2)) as server:
        page = get(server)
        assert "data-live" in page.text
        (running / "summary.json").write_text('{"train_layout": "TP1"}')
        page = get(server, "update", tag=page.tag)
        assert "data-live" not in page.text and "Both runs have ended" in page.text


def test_files_of_the_run_are_only_read(running: Path) -> None:
    def state() -> dict[str, Any]:
        return {
            str(path): (path.stat().st_mtime_ns, path.read_bytes())
            for path in running.rglob("*")
            if path.is_file()
        }

    before, folder = state(), running.stat().st_mtime_ns
    with serving(running) as server:
        assert get(server).status == get(server, "update").status == 200
    assert state() == before and running.stat().st_mtime_ns == folder


def test_other_addresses_have_nothing(running: Path) -> None:
    with serving(running) as server:
        for path in ("/", "/update", "/x/update", "/run.log", "run.log", "../run.log"):
            found = get(server, path)
            assert found.status == 404 and "run" not in found.text
        with serving(running) as other:
            assert get(other, urlsplit(server.url).path).status == 404
        listening = {
            connection.laddr.ip
            for connection in psutil.Process().net_connections("tcp")
            if connection.status == "LISTEN" and connection.laddr.port == server.server_port
        }
        assert listening == {"127.0.0.1"}
        assert get(server).headers["Cache-Control"] == "no-store"


def test_folder_that_is_gone_is_an_answer(running: Path) -> None:
    with serving(running) as server:
        tag = get(server).tag
        running.rename(running.with_name("elsewhere"))
        gone = get(server, "update", tag=tag)
        assert gone.status == 503 and "is not a folder" in gone.text
        assert gone.headers["Content-Type"] == "text/plain"
        running.with_name("elsewhere").rename(running)
        assert get(server, "update", tag="").status == 200


def test_only_a_browser_that_goes_is_not_reported(running: Path, capsys: Any) -> None:
    with serving(running) as server:
        for error in (ConnectionResetError(), BrokenPipeError(), ZeroDivisionError("a bug")):
            try:
                raise error
            except Exception:
                server.handle_error(None, ("127.0.0.1", 1))
    reported = capsys.readouterr().err
    assert "ZeroDivisionError: a bug" in reported
    assert "ResetError" not in reported and "PipeError" not in reported


def test_command_prints_the_address_and_ends_by_ctrl_c(running: Path) -> None:
    command = [sys.executable, "-m", "mcore_rl.cli", "report", str(running), "--live"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets commands in its background ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            place = urlsplit(line.split()[0])
            connection = http.client.HTTPConnection("127.0.0.1", place.port, timeout=120)
            connection.request("GET", place.path)
            with contextlib.closing(connection):
                assert steps_in(connection.getresponse().read().decode()) == "3 of 50"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, out.strip(), err) == (0, "", "")
    assert not (running / "report.html").exists()


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (["{run}/nowhere", "--live"], "{run}/nowhere is not a folder; name the folder"),
        (["{run}", "--live", "-o", "x"], "--output x is not written with --live; leave out one"),
        (["{run}", "--port", "8000"], "--port 8000 has an effect with --live only; add --live"),
        (["{run}", "--live", "--port", "{port}"], "--port {port} cannot be used (Address already"),
        (["{run}", "--live", "--port", "65536"], "--port 65536 cannot be used"),
        (["{run}", "--live", "--port", "-1"], "--port -1 cannot be used"),
        (["{run}", "--live", "--port", "x"], "--port"),
    ],
)
def test_mistake_is_one_sentence_and_exit_code_2(tokens, sentence, running, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"run": running, "port": taken.getsockname()[1]}
        assert main(["report", *(token.format(**places) for token in tokens)]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"mcore_rl: error: [^\n]+\n", error), error
    assert sentence.format(**places) in error
