"""The trainer's side of environments: many samples at once, one process each.

    start() ──► zygote forks ──► start ──► step ──► step ──► done      one ticket, one process
                                   └─ Started ─ Stepped ─ Stepped ─►   finished()

An environment is user code that processes unforeseen text. If it hangs, floods its output or kills
its process, it costs its sample, never the run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self

from mcore_rl.batching.types import Prompt
from mcore_rl.environments import wire
from mcore_rl.environments.interface import FLAG, EnvironmentSpec, Response, resolve_environment
from mcore_rl.environments.wire import Event, Failed
from mcore_rl.environments.zygote_process import ZygoteProcess
from mcore_rl.rewards.functions import PYTHON_SANDBOX
from mcore_rl.rewards.sandbox import check_sandbox
from mcore_rl.rewards.specs import check_environment_names
from mcore_rl.rewards.worker import EXIT_OUT_OF_MEMORY

logger = logging.getLogger(__name__)

# The process's own timer fires first and is exact. This margin covers what escapes it: blocked or
# consumed signals, a stopped process.
_MARGIN_SECONDS = 10.0
_MAX_FRUITLESS_STARTS = 3
_LOOK_SECONDS = 1.0  # poll interval for changes without notification
_CHUNK_BYTES = 1 << 18


class _State(Enum):
    WAITING = auto()  # for a process
    BUSY = auto()  # with a request
    IDLE = auto()  # its last request is answered
    CLOSING = auto()  # released, but its process has not ended


@dataclass(slots=True, eq=False)
class _Episode:
    ticket: int
    begin: bytes  # the request that begins it
    out: deque[bytes] = field(default_factory=deque)  # still to be sent
    state: _State = _State.WAITING
    connection: socket.socket | None = None
    reader: wire.Reader = field(default_factory=lambda: wire.Reader(wire.MAX_ANSWER_BYTES))
    turn: int = 0  # of the request that is answered next
    deadline: float = math.inf  # of its current call, by the trainer's clock
    gone: Failed | None = None  # its process has ended


class EnvironmentPool:
    """Episodes by ticket: 0, 1, 2, ... Used by one thread; `with` closes it.

    Not collective: every rank that rolls out has its own pool. Nothing starts before the first
    `start`. Only `wait` blocks; work advances when `finished` or `wait` is called, so call
    `finished` often. Every `start` and every `step` is answered by one event, possibly a failure. A
    process that ends between two turns is reported at the next `step`. A `Failed`, or a `Stepped`
    that is done, ends the ticket, and its process ends by itself.

    At most `max_open` processes exist at once; other started episodes wait. Each has `memory_gib`
    GiB (0: no limit) and each of its calls `timeout_seconds`. `failure_counts` counts failures by
    kind, and the first of each kind is logged.

    `finished` and `wait` raise UsageError if the class cannot be found, and RuntimeError if its
    processes repeatedly fail to start; open episodes are lost then.
    """

    def __init__(
        self,
        spec: str,
        *,
        timeout_seconds: float,
        memory_gib: float = 0.0,
        imports: Sequence[str] = (),
        environment_names: Sequence[str] = (),
        sandbox_accept: Sequence[str] = (),
        max_open: int = 256,
    ) -> None:
        if not timeout_seconds > 0 or not math.isfinite(timeout_seconds):
            raise ValueError(f"timeout_seconds is {timeout_seconds}, it must be above 0")
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}, it must be at least 1")
        self._spec, self._timeout_seconds, self._memory_gib = spec, timeout_seconds, memory_gib
        # The working directory may differ when processes start.
        self._imports = tuple(os.path.abspath(path) for path in imports)
        self._environment_names, self._max_open = tuple(environment_names), max_open
        self._sandbox_accept = tuple(sandbox_accept)
        self.failure_counts: Counter[str] = Counter()
        self._num_started = 0
        self._episodes: dict[int, _Episode] = {}  # in the order of their tickets
        self._waiting: deque[_Episode] = deque()
        self._found: list[tuple[int, Event]] = []
        self._selector = selectors.DefaultSelector()
        self._zygote: ZygoteProcess | None = None
        self._fruitful, self._num_fruitless_starts = False, 0
        self._closed = False

    @classmethod
    def of(cls, spec: EnvironmentSpec) -> EnvironmentPool:
        """Create the pool that the flags describe."""
        return cls(
            spec.name,
            timeout_seconds=spec.timeout_seconds,
            memory_gib=spec.memory_gib,
            imports=spec.imports,
            environment_names=spec.environment_names,
            sandbox_accept=spec.sandbox_accept,
            max_open=spec.max_open,
        )

    @property
    def num_open(self) -> int:
        """The number of tickets that are not over."""
        return sum(each.state is not _State.CLOSING for each in self._episodes.values())

    @property
    def num_busy(self) -> int:
        """The number of tickets that an event will come for."""
        return sum(each.state in (_State.WAITING, _State.BUSY) for each in self._episodes.values())

    @property
    def is_working(self) -> bool:
        """Whether an event will come even if no other ticket ends."""
        states = {each.state for each in self._episodes.values()}
        return _State.BUSY in states or {_State.WAITING, _State.CLOSING} <= states

    def start(self, prompt: Prompt, seed: int) -> int:
        """Create an environment for a sample. Return its ticket, for which `Started` will come."""
        assert not self._closed, "this EnvironmentPool is closed"
        ticket = self._num_started
        self._num_started += 1
        told = {"text": prompt.text, "answer": prompt.answer, "row": prompt.row, "seed": seed}
        episode = _Episode(ticket, wire.framed({"turn": 0, "prompt": told}))
        self._episodes[ticket] = episode
        self._waiting.append(episode)
        return ticket

    def step(self, ticket: int, response: Response) -> None:
        """Pass the model's turn to an environment that has answered the previous one."""
        episode = self._episodes.get(ticket)
        if episode is None or episode.state is not _State.IDLE:
            raise RuntimeError(f"environment {ticket} is not waiting for a turn")
        episode.turn += 1
        if episode.gone is not None:
            self._fail(episode, episode.gone)
            return
        told = {
            "text": response.text,
            "token_ids": [int(each) for each in response.token_ids],
            "turn": response.turn,
            "finish_reason": response.finish_reason,
        }
        episode.out.append(wire.framed({"turn": episode.turn, "response": told}))
        self._ask(episode)

    def finished(self) -> list[tuple[int, Event]]:
        """Return the events since the last call, in the order of arrival; does not block."""
        self._look(0.0)
        found, self._found = self._found, []
        return found

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until `finished` has an event; False after a timeout, or if no event is due."""
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._look(0.0)
        while not self._found:
            left_seconds = until - time.monotonic()
            if left_seconds <= 0 or not self.num_busy:
                return False
            self._look(max(0.0, min(left_seconds, _LOOK_SECONDS)))
        return True

    def end(self, tickets: Iterable[int]) -> None:
        """End these tickets. An environment between two turns may close itself; any other is
        killed. None of their events is returned later; unknown tickets are ignored."""
        tickets = set(tickets)
        self._found = [(ticket, event) for ticket, event in self._found if ticket not in tickets]
        for ticket in sorted(tickets & self._episodes.keys()):
            episode = self._episodes[ticket]
            if episode.state is _State.IDLE and episode.gone is None:
                episode.out.append(wire.framed({"turn": episode.turn + 1}))
                self._over(episode)
            elif episode.state is not _State.CLOSING:
                self._kill(episode)

    def check(self) -> None:
        """Raise UsageError if a process like those of episodes cannot find the class; this process
        does not import it."""
        with contextlib.closing(self._new_zygote()) as zygote:
            zygote.check()

    def close(self) -> None:
        """End all processes of this pool, in any state. A second call does nothing."""
        self._closed = True
        for episode in self._episodes.values():
            self._disconnect(episode)
        self._episodes.clear()
        self._waiting.clear()
        self._found.clear()
        if self._zygote is not None:
            self._selector.unregister(self._zygote.control)
            self._zygote.close()
            self._zygote = None
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One pass over all events ---------------------------------------------------------------------

    def _look(self, timeout_seconds: float) -> None:
        assert not self._closed, "this EnvironmentPool is closed"
        try:
            self._fork_waiting()
            for key, mask in self._selector.select(timeout_seconds):
                if key.data is None:
                    continue  # the zygote's reports are read below, after the answers
                episode: _Episode = key.data
                if episode.connection is not None:
                    self._talk(episode, mask)
            self._hear()
            self._check_clocks()
            self._fork_waiting()
        except BaseException:
            self._drop_everything()
            raise

    def _fork_waiting(self) -> None:
        """Request processes for waiting episodes, up to the limit."""
        while self._waiting and len(self._episodes) - len(self._waiting) < self._max_open:
            if self._zygote is None:
                self._zygote = self._new_zygote()
                self._selector.register(self._zygote.control, selectors.EVENT_READ)
            try:
                connection, theirs = socket.socketpair()
            except OSError:  # no descriptors are left
                self._max_open = len(self._episodes) - len(self._waiting)
                if self._max_open == 0:
                    raise
                break
            connection.setblocking(False)
            episode = self._waiting.popleft()
            episode.connection = connection
            self._zygote.fork(episode.ticket, theirs)
            episode.out.append(episode.begin)
            self._ask(episode)
            episode.deadline = math.inf  # starts with its process
        if self._zygote is not None:
            self._zygote.flush()

    def _ask(self, episode: _Episode) -> None:
        episode.state = _State.BUSY
        episode.deadline = time.monotonic() + self._timeout_seconds + _MARGIN_SECONDS
        assert episode.connection is not None
        self._selector.register(episode.connection, selectors.EVENT_READ, episode)
        self._send(episode)

    def _talk(self, episode: _Episode, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._send(episode)
        if mask & selectors.EVENT_READ:
            self._receive(episode)

    def _send(self, episode: _Episode) -> None:
        """Send what its process accepts now; the selector reports when it accepts more."""
        assert episode.connection is not None
        with contextlib.suppress(BlockingIOError):
            while episode.out:
                try:
                    num_sent = episode.connection.send(episode.out[0])
                except (BrokenPipeError, ConnectionResetError):
                    episode.out.clear()  # the zygote reports how it ended
                    break
                rest = episode.out.popleft()[num_sent:]
                if rest:
                    episode.out.appendleft(rest)
        if episode.connection in self._selector.get_map():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if episode.out else 0)
            self._selector.modify(episode.connection, events, episode)

    def _receive(self, episode: _Episode) -> None:
        """Read its answer as far as it has arrived; an end alone is reported by the zygote."""
        assert episode.connection is not None
        while episode.state is _State.BUSY:
            try:
                data = episode.connection.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self._unregister(episode)  # else it would be ready forever
                return
            episode.reader.add(data)
            if episode.reader.is_too_long:
                limit = f"an answer has at most {wire.MAX_ANSWER_BYTES >> 20} MiB"
                self._fail(episode, Failed(wire.TOO_MUCH, limit))
            elif (message := episode.reader.next()) is not None:
                self._answered(episode, wire.event_of(message, episode.turn))

    def _answered(self, episode: _Episode, event: Event) -> None:
        self._fruitful = True
        if isinstance(event, Failed):
            self._fail(episode, event)
            return
        self._found.append((episode.ticket, event))
        if isinstance(event, wire.Stepped) and event.done:
            self._over(episode)
            return
        self._unregister(episode)
        episode.state, episode.deadline = _State.IDLE, math.inf

    # The end of an episode ------------------------------------------------------------------------

    def _fail(self, episode: _Episode, failed: Failed) -> None:
        if failed.kind not in self.failure_counts:
            logger.warning(
                "environment %s failed, which costs its sample; the reason, logged once of its "
                "kind: %s",
                self._spec,
                failed.failure,
            )
        self.failure_counts[failed.kind] += 1
        self._found.append((episode.ticket, failed))
        self._kill(episode)

    def _over(self, episode: _Episode) -> None:
        """End the ticket; its process has one more call's time to close itself."""
        if episode.out:
            self._send(episode)
        self._disconnect(episode)
        episode.state = _State.CLOSING
        episode.deadline = time.monotonic() + self._timeout_seconds + _MARGIN_SECONDS

    def _kill(self, episode: _Episode) -> None:
        self._disconnect(episode)
        if episode.state is _State.WAITING:
            self._waiting.remove(episode)
        episode.state, episode.deadline = _State.CLOSING, math.inf
        if episode.gone is not None or self._zygote is None or episode.ticket not in self._zygote:
            del self._episodes[episode.ticket]
        else:
            self._zygote.kill(episode.ticket)

    def _unregister(self, episode: _Episode) -> None:
        if episode.connection is not None and episode.connection in self._selector.get_map():
            self._selector.unregister(episode.connection)

    def _disconnect(self, episode: _Episode) -> None:
        self._unregister(episode)
        if episode.connection is not None:
            episode.connection.close()
            episode.connection = None

    def _hear(self) -> None:
        """Process the zygote's reports of processes that have started or ended."""
        if self._zygote is None:
            return
        for ticket, ended in self._zygote.heard():
            episode = self._episodes.get(ticket)
            if episode is None:
                continue
            if ended is None:
                episode.begin = b""  # sent, or about to be
                if episode.state is _State.BUSY:
                    episode.deadline = time.monotonic() + self._timeout_seconds + _MARGIN_SECONDS
                continue
            if episode.connection is not None:
                self._receive(episode)  # what it wrote before its end
            self._ended(episode, self._why(ended))
        if self._zygote.is_broken:
            self._replace_zygote(self._zygote)

    def _ended(self, episode: _Episode, why: Failed) -> None:
        """Handle the end of its process."""
        episode.gone = why
        if episode.state is _State.BUSY:
            self._fail(episode, why)
        elif episode.state is _State.CLOSING:
            # It may be missing here: its last message was a failure.
            self._episodes.pop(episode.ticket, None)
        elif episode.state is _State.IDLE:
            self._disconnect(episode)

    def _why(self, ended: int | str) -> Failed:
        limit = f"no answer within {self._timeout_seconds:g} s"
        if isinstance(ended, str):
            return Failed("ended its process", ended)
        if ended == -signal.SIGALRM:
            return Failed("timed out", limit)
        if ended == EXIT_OUT_OF_MEMORY:
            has = f"its process may have {self._memory_gib:g} GiB (--rl-environment-memory-gib)"
            return Failed(
                "ran out of memory", has if self._memory_gib else "the machine has no more"
            )
        return Failed("ended its process", f"exit code {ended}")

    def _check_clocks(self) -> None:
        """End calls that outlasted their own timer, and processes that do not close themselves."""
        now = time.monotonic()
        late = [each for each in self._episodes.values() if each.deadline < now]
        for episode in late:
            if episode.state is _State.BUSY:
                limit = f"no answer within {self._timeout_seconds:g} s"
                self._fail(episode, Failed("timed out", limit))
            else:
                self._kill(episode)

    # The zygote and its replacement ---------------------------------------------------------------

    def _new_zygote(self) -> ZygoteProcess:
        return ZygoteProcess(
            self._spec,
            self._imports,
            memory_bytes=int(self._memory_gib * 2**30),
            timeout_seconds=self._timeout_seconds,
            environment_names=self._environment_names,
            sandbox_accept=self._sandbox_accept,
        )

    def _replace_zygote(self, broken: ZygoteProcess) -> None:
        """Replace a broken zygote: episodes lose their processes, the others wait for new ones."""
        self._selector.unregister(broken.control)
        broken.close()
        self._zygote = None
        again = []
        for episode in list(self._episodes.values()):
            if episode.state is _State.WAITING or episode.gone is not None:
                continue
            if episode.state is _State.BUSY and broken.has_not_forked(episode.ticket):
                again.append(episode)
                continue
            self._ended(episode, Failed("ended its process", "with all others, by another's fault"))
        for episode in reversed(again):
            self._wait_again(episode)
        self._num_fruitless_starts = 0 if self._fruitful else self._num_fruitless_starts + 1
        self._fruitful = False
        if self._num_fruitless_starts == _MAX_FRUITLESS_STARTS:
            self._num_fruitless_starts = 0
            raise RuntimeError(
                f"the processes of environment {self._spec} were started {_MAX_FRUITLESS_STARTS} "
                f"times and answered nothing: {broken.why_broken}"
            )

    def _wait_again(self, episode: _Episode) -> None:
        """Queue an episode for a process, ahead of all others."""
        self._disconnect(episode)
        episode.state, episode.deadline = _State.WAITING, math.inf
        episode.out.clear()
        self._waiting.appendleft(episode)

    def _drop_everything(self) -> None:
        for episode in self._episodes.values():
            self._disconnect(episode)
        self._episodes.clear()
        self._waiting.clear()
        self._found.clear()
        if self._zygote is not None:
            self._selector.unregister(self._zygote.control)
            self._zygote.close()
            self._zygote = None


def check_environment(spec: EnvironmentSpec) -> None:
    """Raise UsageError if the class, a variable or the sandbox is unusable.

    A `package.module:Class` is only imported in environment processes, one of which is started
    here. Files of `--rl-import` run in this process, as they may also define losses.
    """
    check_environment_names(spec.environment_names, "--rl-environment-env")
    if ":" in spec.name:
        with EnvironmentPool.of(spec) as pool:
            pool.check()
    else:
        resolve_environment(spec.name, spec.imports)
    if spec.name == PYTHON_SANDBOX:
        check_sandbox(f"{FLAG} {spec.name}", spec.sandbox_accept)
