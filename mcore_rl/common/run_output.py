"""The output of a rank: our messages go to the console, Megatron's output to a file.

Output must never end a run: if a log file is on a full disk, a pipe's reader has ended or a
terminal is gone, the output is dropped and training continues.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

logger = logging.getLogger(__name__)


class PatientStream:
    """A text stream whose `write` and `flush` never raise what the operating system reports.

    Characters that the encoding lacks are escaped. After the first failure, which is logged, its
    descriptor is /dev/null, so that neither Python's flush at exit nor libraries that write to the
    descriptor fail. All other attributes come from the wrapped stream.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        """Write `text`, or drop it; return its length."""
        with self._patiently():
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # nothing was written yet
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write the texts in turn."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush, or drop what is buffered."""
        with self._patiently():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _patiently(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._discard()
            logger.warning(
                "%s cannot be written (%s); the run continues without it", self._name, error
            )

    def _discard(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(nothing, self._stream.fileno())
                return
        finally:
            os.close(nothing)
        self._stream = open(os.devnull, "w", encoding="utf-8")


def patient(stream: TextIO | None, name: str) -> TextIO:
    """Return `stream` wrapped so that it never raises. None (closed descriptor) discards output."""
    if isinstance(stream, PatientStream):
        return cast(TextIO, stream)
    return cast(TextIO, PatientStream(stream or open(os.devnull, "w", encoding="utf-8"), name))


def patient_stdout() -> TextIO:
    """Return standard output as a stream that never raises."""
    return patient(sys.stdout, "standard output")


def patient_stderr() -> TextIO:
    """Return standard error as a stream that never raises."""
    return patient(sys.stderr, "standard error")


def keep_output_from_raising() -> None:
    """Make sys.stdout and sys.stderr patient, also for libraries that print. Idempotent."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file to be opened would get this descriptor
            os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):  # writes then wait for a pipe that is full for a moment
        with contextlib.suppress(OSError):
            os.set_blocking(descriptor, True)
    sys.stdout, sys.stderr = patient_stdout(), patient_stderr()


def setup_logging(*, quiet: bool = False) -> None:
    """Set up the loggers of this rank.

    Rank 0 logs mcore_rl's messages unless `quiet`, every rank logs warnings, and Megatron logs
    only errors. From here on, output that cannot be written does not raise.
    """
    keep_output_from_raising()
    # `job.environment.open_store` refuses a value that is not a number.
    logs_all = not quiet and not os.environ.get("RANK", "").strip("0 ")
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.INFO)
    # Down to DEBUG, for run.log; the console shows INFO.
    logging.getLogger("mcore_rl").setLevel(logging.DEBUG if logs_all else logging.WARNING)
    logging.getLogger("megatron").setLevel(logging.ERROR)


@contextlib.contextmanager
def log_file() -> Iterator[TextIO]:
    """Open the file for Megatron's output: MCORE_RL_MEGATRON_LOG plus ".rankN", or /dev/null."""
    name = os.environ.get("MCORE_RL_MEGATRON_LOG")
    path = f"{name}.rank{os.environ.get('RANK', 0)}" if name else os.devnull
    with open(path, "w", encoding="utf-8") as file:
        log = patient(file, path)
        try:
            yield log
        finally:
            log.flush()  # otherwise closing raises for buffered text
