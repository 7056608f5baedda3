"""The trainer's side of users' code: requests to many processes at once.

    open() ──► zygote forks ──► ask ──► ask ──► end      one ticket, one process
                                 └─ Answer ─ Answer ─►   events()

User code that hangs, floods its output or kills its process fails its requests, never the run. An
environment is a ticket that gets one request per turn of its sample; a reward's worker is a ticket
that gets the requests of many samples; a tokenizer is the only ticket of its pool.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Self

from mcore_rl.common.errors import UsageError
from mcore_rl.common.exits import describe_exit
from mcore_rl.isolation.process import EXIT_OUT_OF_MEMORY
from mcore_rl.isolation.session import Event, Session
from mcore_rl.isolation.wire import Answer, Failed
from mcore_rl.isolation.zygote import Program
from mcore_rl.isolation.zygote_process import Ended, ZygoteProcess

START_SECONDS = 60.0  # for imports
_LOOK_SECONDS = 1.0  # poll interval for changes without notification
_BY_ANOTHER = "with all other processes, because of a fault in another one"


class StartsFailed(RuntimeError):
    """Processes ended several times in a row without an answer; `why` is the last reason."""

    def __init__(self, owner: str, num_starts: int, why: str) -> None:
        super().__init__(
            f"the processes of {owner} were started {num_starts} times and answered nothing: {why}"
        )
        self.why = why


class Starts:
    """The count of starts without a result, in a row."""

    def __init__(self, owner: str, limit: int = 3) -> None:
        self._owner, self._limit = owner, limit
        self._had_result = False
        self._num_fruitless = 0

    def had_result(self) -> None:
        """Record a result of the current start."""
        self._had_result = True

    def ended(self, why: str) -> None:
        """Record the end of the current start. StartsFailed: the latest ones had no result."""
        self._num_fruitless = 0 if self._had_result else self._num_fruitless + 1
        self._had_result = False
        if self._num_fruitless == self._limit:
            self._num_fruitless = 0
            raise StartsFailed(self._owner, self._limit, why)


class ProcessPool:
    """Sessions by ticket: 0, 1, 2, ... Used by one thread; `with` closes it.

    Not collective. Nothing starts before the first `open`. Only `wait` and `call` block; work
    advances when `events` or `wait` is called, so call `events` often. Every `ask` is followed by
    one event: an `Answer`, or a failure, which ends the ticket and its other requests. A process
    that ends between requests is reported at the next `ask`, and by `end_gone`. A process answers
    its requests in order; the time of each begins when the previous one is answered.

    At most `max_open` processes exist at once; other sessions wait. `events` and `wait` raise
    UsageError if the zygote cannot import what it needs, and StartsFailed if zygotes repeatedly
    end; open sessions are lost then.
    """

    def __init__(self, program: Program, max_open: int, *, max_starts: int = 3) -> None:
        """`max_starts` zygotes in a row may end without an answer."""
        self._program, self._max_open = program, max_open
        self._num_opened = 0
        self._sessions: dict[int, Session] = {}  # in the order of their tickets
        self._waiting: deque[Session] = deque()  # for a process
        self._found: list[tuple[int, Event]] = []
        self._selector = selectors.DefaultSelector()
        self._zygote: ZygoteProcess | None = None
        self._starts = Starts(program.owner, max_starts)
        self._closed = False

    @property
    def num_open(self) -> int:
        """The number of tickets that are not over."""
        return sum(not each.is_closing for each in self._sessions.values())

    @property
    def num_busy(self) -> int:
        """The number of tickets that an event will come for."""
        return sum(each.is_busy for each in self._sessions.values())

    @property
    def is_working(self) -> bool:
        """Whether an event will come even if no other ticket ends."""
        sessions = self._sessions.values()
        # A waiting session gets its process at the next look, or once a closing one has ended.
        if self._waiting and (self._has_room or any(each.is_closing for each in sessions)):
            return True
        return any(each.is_busy and each.connection is not None for each in sessions)

    @property
    def _has_room(self) -> bool:
        """Whether another process may be forked."""
        return len(self._sessions) - len(self._waiting) < self._max_open

    @property
    def zygote_pid(self) -> int | None:
        """The process id of the zygote, if there is one."""
        return None if self._zygote is None else self._zygote.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when `events` has something to do."""
        return self._selector.fileno()

    def open(self) -> int:
        """Create a session and return its ticket. Does not block."""
        assert not self._closed, "this pool is closed"
        session = Session(self._num_opened, self._program.max_answer_bytes)
        self._num_opened += 1
        self._sessions[session.ticket] = session
        self._waiting.append(session)
        return session.ticket

    def ask(self, ticket: int, request: Any, *, limit_seconds: float) -> None:
        """Send a request, a value of JSON, for which an event will come. Does not block.

        The trainer ends the process after `limit_seconds` and a margin, from the moment that it
        works on the request.
        """
        session = self._sessions[ticket]
        assert not session.is_closing, f"ticket {ticket} is over"
        was_busy = session.is_busy
        session.ask(request, limit_seconds)
        if session.gone is not None:
            self._fail(session, session.gone)
        elif session.connection is not None:
            self._watch(session)
            if not was_busy:
                session.start_clock()

    def is_idle(self, ticket: int) -> bool:
        """Return whether a ticket has answered all requests and takes others."""
        session = self._sessions.get(ticket)
        return session is not None and not session.is_closing and not session.is_busy

    def events(self) -> list[tuple[int, Event]]:
        """Return the events since the last call, in the order of arrival; does not block."""
        self._look(0.0)
        events, self._found = self._found, []
        return events

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until `events` has an event; False after a timeout, or if no event is due."""
        until = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._look(0.0)
        while not self._found:
            left_seconds = until - time.monotonic()
            if left_seconds <= 0 or not self.num_busy:
                return False
            self._look(max(0.0, min(left_seconds, _LOOK_SECONDS)))
        return True

    def call(self, request: Any, *, limit_seconds: float) -> Event:
        """Ask an idle process, or a new one, and block until its event. For a pool that has no
        other requests; the limits and errors are those of `ask` and `events`."""
        self.events()  # notices processes that have ended
        self.end_gone()
        ticket = next(filter(self.is_idle, self._sessions), None)
        if ticket is None:
            ticket = self.open()
        try:
            self.ask(ticket, request, limit_seconds=limit_seconds)
            self.wait()
            ((_, event),) = self.events()
        except BaseException:  # KeyboardInterrupt: the next call would get this one's answer
            self.kill([ticket])
            raise
        return event

    def end(self, tickets: Iterable[int]) -> None:
        """End these tickets. A process between two requests may close itself; any other is killed.
        None of their events is returned later; unknown tickets are ignored."""
        for session in self._withdrawn(tickets):
            if session.is_busy or session.connection is None:
                self._kill(session)
                continue
            self._unwatch(session)
            session.end()

    def end_gone(self) -> list[int]:
        """End the tickets whose processes have ended between two requests, and return them. Call it
        after `events`."""
        tickets = [each.ticket for each in self._sessions.values() if each.gone is not None]
        self.end(tickets)
        return tickets

    def kill(self, tickets: Iterable[int]) -> None:
        """End these tickets as `end` does, by killing their processes."""
        for session in self._withdrawn(tickets):
            self._kill(session)

    def close(self) -> None:
        """End all processes of this pool, in any state. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._drop_everything()
            self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # One pass over all events ---------------------------------------------------------------------

    def _look(self, timeout_seconds: float) -> None:
        assert not self._closed, "this pool is closed"
        try:
            self._fork_waiting()
            for key, mask in self._selector.select(timeout_seconds):
                if key.data is None:
                    continue  # the zygote's reports are read below, after the answers
                session: Session = key.data
                if session.connection is not None and mask & selectors.EVENT_WRITE:
                    session.send()
                    self._watch(session)
                if mask & selectors.EVENT_READ:
                    self._receive(session)
            self._read_reports()
            self._check_clocks()
            self._fork_waiting()
        except BaseException:
            self._drop_everything()
            raise

    def _fork_waiting(self) -> None:
        """Request processes for waiting sessions, up to the limit."""
        while self._waiting and self._has_room:
            if self._zygote is None:
                self._zygote = ZygoteProcess(self._program)
                self._selector.register(self._zygote.control, selectors.EVENT_READ)
            try:
                connection, theirs = socket.socketpair()
            except OSError:  # no descriptors are left
                self._max_open = len(self._sessions) - len(self._waiting)
                if self._max_open == 0:
                    raise
                break
            session = self._waiting.popleft()
            self._zygote.fork(session.ticket, theirs)
            session.connect(connection)
            if session.is_busy:
                self._watch(session)
        if self._zygote is not None:
            self._zygote.flush()

    def _receive(self, session: Session) -> None:
        for event in session.receive():
            if event is None:
                self._unwatch(session)  # else it would be ready forever
                return
            self._starts.had_result()
            if not isinstance(event, Answer):
                self._fail(session, event)
                return
            self._found.append((session.ticket, event))
            session.start_clock()
        if not session.is_busy:
            self._unwatch(session)

    def _watch(self, session: Session) -> None:
        """Have the selector report when a process answers, and when it takes what is unsent."""
        assert session.connection is not None
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.has_unsent else 0)
        if session.connection in self._selector.get_map():
            self._selector.modify(session.connection, events, session)
        else:
            self._selector.register(session.connection, events, session)

    def _unwatch(self, session: Session) -> None:
        if session.connection is not None and session.connection in self._selector.get_map():
            self._selector.unregister(session.connection)

    def _read_reports(self) -> None:
        """Process the zygote's reports of processes that have started or ended."""
        if self._zygote is None:
            return
        for ticket, ended in self._zygote.reports():
            session = self._sessions.get(ticket)
            if session is None:
                continue
            if ended is None:
                session.has_process = True
                if not session.is_closing:
                    session.start_clock()
                continue
            self._receive(session)  # what it wrote before its end
            self._ended(session, self._why(session, ended))
        if self._zygote.why_broken:
            self._replace_zygote(self._zygote)

    def _check_clocks(self) -> None:
        """End calls that outlasted their own timer, and processes that do not close themselves."""
        now = time.monotonic()
        for session in [each for each in self._sessions.values() if each.deadline < now]:
            if session.is_closing:
                self._kill(session)
            else:
                self._fail(session, _timed_out(session))

    # The end of a session -------------------------------------------------------------------------

    def _withdrawn(self, tickets: Iterable[int]) -> list[Session]:
        """Drop the events of these tickets, and return the sessions that are not over."""
        tickets = set(tickets)
        self._found = [(ticket, event) for ticket, event in self._found if ticket not in tickets]
        sessions = [self._sessions[each] for each in sorted(tickets & self._sessions.keys())]
        return [each for each in sessions if not each.is_closing]

    def _fail(self, session: Session, event: Event) -> None:
        self._found.append((session.ticket, event))
        self._kill(session)

    def _kill(self, session: Session) -> None:
        if session in self._waiting:
            self._waiting.remove(session)
        self._unwatch(session)
        session.drop()
        if session.gone is not None or self._zygote is None or session.ticket not in self._zygote:
            self._sessions.pop(session.ticket, None)
        else:
            self._zygote.kill(session.ticket)

    def _disconnect(self, session: Session) -> None:
        self._unwatch(session)
        session.disconnect()

    def _ended(self, session: Session, why: Failed) -> None:
        """Handle the end of its process."""
        session.gone = why
        if session.is_closing:
            # It may be missing here: its last message was a failure.
            self._sessions.pop(session.ticket, None)
        elif session.is_busy:
            self._fail(session, why)
        else:
            self._disconnect(session)

    def _why(self, session: Session, ended: Ended) -> Failed:
        if isinstance(ended, str):
            return Failed("ended its process", ended)
        if ended == -signal.SIGALRM:
            return _timed_out(session)
        if ended == EXIT_OUT_OF_MEMORY:
            gib, flag = self._program.memory_gib, self._program.memory_flag
            has = f"its process may have {gib:g} GiB ({flag})"
            return Failed("ran out of memory", has if gib else "the machine has no more")
        return Failed("ended its process", describe_exit(ended))

    # The zygote and its replacement ---------------------------------------------------------------

    def _replace_zygote(self, broken: ZygoteProcess) -> None:
        """Replace a broken zygote: sessions lose their processes, the others wait for new ones."""
        again = []
        for session in list(self._sessions.values()):
            if session.connection is not None and broken.has_not_forked(session.ticket):
                again.append(session)
            elif session not in self._waiting and session.gone is None:
                self._ended(session, Failed("ended its process", _BY_ANOTHER))
        self._end_zygote()
        for session in reversed(again):
            self._disconnect(session)
            self._waiting.appendleft(session)
        self._starts.ended(broken.why_broken)

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            self._selector.unregister(self._zygote.control)
            self._zygote.close()
            self._zygote = None

    def _drop_everything(self) -> None:
        for session in self._sessions.values():
            self._disconnect(session)
        self._sessions.clear()
        self._waiting.clear()
        self._found.clear()
        self._end_zygote()


def _timed_out(session: Session) -> Failed:
    return Failed("timed out", f"no answer within {session.limit_seconds:g} s")


def check_program(program: Program, flag: str) -> None:
    """Raise UsageError, for `flag`, if a process cannot import what it needs.

    A service answers the request None once it has imported everything.
    """
    with ProcessPool(program, 1, max_starts=1) as pool:
        try:
            event = pool.call(None, limit_seconds=START_SECONDS)
        except StartsFailed as error:
            event = Failed(error.why)
    if isinstance(event, UsageError):
        raise event
    if isinstance(event, Failed):
        raise UsageError(
            "cannot be used, because the process that imported it ended or gave no answer within "
            f"{START_SECONDS:g} s ({event.failure})",
            flag=flag,
            remedy="make its import work by itself",
        )
