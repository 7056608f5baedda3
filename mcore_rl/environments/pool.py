"""The environments of many samples at once, one process each.

start() ──► start ──► step ──► step ──► done      one ticket, one process
              └─ Started ─ Stepped ─ Stepped ─►   finished()

`restore()` takes the place of `start()` for a class that keeps its state.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from mcore_rl.batching.types import Prompt
from mcore_rl.common.errors import UsageError
from mcore_rl.environments.interface import FLAG, EnvironmentSpec, Response, resolve_environment
from mcore_rl.environments.wire import Event, Stepped, event_of
from mcore_rl.isolation.pool import ProcessPool, check_program
from mcore_rl.isolation.variables import check_environment_names
from mcore_rl.isolation.wire import Failed
from mcore_rl.isolation.zygote import Program
from mcore_rl.sandbox import PYTHON_SANDBOX
from mcore_rl.sandbox.runner import check_sandbox

logger = logging.getLogger(__name__)


class EnvironmentPool(ProcessPool):
    """Environments by ticket.

    Every rank that rolls out has its own pool. Every `start` and every `step` is answered by one
    event, possibly a failure. A process that ends between two turns is reported at the next `step`.
    A `Failed`, or a `Stepped` that is done, ends the ticket. `failure_counts` counts failures by
    kind; the first of each kind is logged.

    `finished` and `wait` raise UsageError if the class cannot be found, and RuntimeError if its
    processes repeatedly fail to start; open environments are lost then.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec, self._timeout_seconds = spec, spec.timeout_seconds
        self._title = ",".join(spec.names)
        # The working directory may differ when processes start.
        files = [os.path.abspath(path) for path in spec.imports]
        program = Program(
            f"environment {self._title}",
            "mcore_rl.environments.service",
            {
                "specs": spec.names,
                "imports": files,
                "timeout_seconds": spec.timeout_seconds,
                "needs_state": spec.needs_state,
            },
            memory_gib=spec.memory_gib,
            memory_flag="--rl-environment-memory-gib",
            environment_names=spec.environment_names,
            runs_code=PYTHON_SANDBOX in spec.names,
            sandbox_accept=spec.sandbox_accept,
            is_silent=True,  # nobody reads what hundreds print, and it could fill the run's log
        )
        super().__init__(program, spec.max_open)
        self._starting: set[int] = set()  # tickets that have not answered yet
        self.failure_counts: Counter[str] = Counter()

    def start(self, prompt: Prompt, seed: int) -> int:
        """Create an environment for a sample. Return its ticket, for which `Started` will come."""
        return self._open(prompt, seed)

    def restore(self, prompt: Prompt, seed: int, state: str, num_turns: int) -> int:
        """Create an environment for a sample whose environment answered `num_turns` turns and then
        had this state, as in `Started` and `Stepped`. Return its ticket, for which `Started` will
        come."""
        return self._open(prompt, seed, kept={"state": state, "num_turns": num_turns})

    def step(self, ticket: int, response: Response) -> None:
        """Pass the model's turn to an environment that has answered the previous one."""
        if not self.is_idle(ticket):
            raise RuntimeError(f"environment {ticket} is not waiting for a turn")
        fields = {
            "text": response.text,
            "token_ids": [int(each) for each in response.token_ids],
            "turn": response.turn,
            "finish_reason": response.finish_reason,
            "in_parts": None if response.in_parts is None else asdict(response.in_parts),
        }
        self.ask(ticket, {"response": fields}, limit_seconds=self._timeout_seconds)

    def finished(self) -> list[tuple[int, Event]]:
        """Return the events since the last call, in the order of arrival; does not block."""
        events: list[tuple[int, Event]] = []
        for ticket, answer in self.events():
            if isinstance(answer, UsageError):  # raised by no environment of ours
                answer = Failed("raised UsageError", str(answer))
            event = event_of(answer, is_first=ticket in self._starting)
            self._starting.discard(ticket)
            if isinstance(event, Failed):
                self._note(event)
                self.kill([ticket])
            elif isinstance(event, Stepped) and event.done:
                self.end([ticket])
            events.append((ticket, event))
        return events

    def end(self, tickets: Iterable[int]) -> None:
        """End these tickets; an environment between two turns may close itself."""
        tickets = set(tickets)
        self._starting -= tickets
        super().end(tickets)

    def check(self) -> None:
        """Raise UsageError if a process like those of samples cannot find the classes; this process
        does not import them."""
        check_program(self._program, f"{FLAG} {self._title}")

    def _open(self, prompt: Prompt, seed: int, **more: Any) -> int:
        fields = {"text": prompt.text, "answer": prompt.answer, "row": prompt.row, "seed": seed}
        fields["has_tool_format"] = self._spec.has_tool_format
        request = {"prompt": fields, "environment": self._spec.name_for(prompt.source), **more}
        ticket = self.open()
        self.ask(ticket, request, limit_seconds=self._timeout_seconds)
        self._starting.add(ticket)
        return ticket

    def _note(self, failed: Failed) -> None:
        if failed.kind not in self.failure_counts:
            logger.warning(
                "environment %s failed, which fails its sample; the first failure of this kind: %s",
                self._title,
                failed.failure,
            )
        self.failure_counts[failed.kind] += 1


def check_environment(spec: EnvironmentSpec) -> None:
    """Raise UsageError if the class, a variable or the sandbox cannot be used, or if the class
    does not keep its state and must.

    A `package.module:Class` is only imported in environment processes, one of which is started
    here. Files of `--rl-import` run in this process, as they may also define losses.
    """
    check_environment_names(spec.environment_names, "--rl-environment-env")
    if any(":" in name for name in spec.names):
        with EnvironmentPool(spec) as pool:
            pool.check()
    for name in spec.names:
        if ":" not in name:
            resolve_environment(name, spec.imports, needs_state=spec.needs_state)
    if PYTHON_SANDBOX in spec.names:
        check_sandbox(f"{FLAG} {PYTHON_SANDBOX}", spec.sandbox_accept)
