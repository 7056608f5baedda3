"""A file for --rl-import: a run whose computations take at least a given time.

Steps of an engine, updates and hand-overs sleep until their time has passed, and answers of
environments are held back until then. The times are about twice what a quiet machine with 2 cores
needs, so that its speed, which changes, hardly matters. All else is the product: vLLM, scheduling,
admission, environments, training, transfers. A gap between two steps of a busy engine counts as
part of the second one, and steps make up for an earlier one that took too long.

MCORE_RL_PACED names a folder, which gets `RANK.json`: how many computations took longer, and by
how many seconds in all.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = "MCORE_RL_PACED"
# Seconds of an engine's step, for each of its sequences, and for each token before the first.
STEP, PER_SEQUENCE, PER_PREFILL_TOKEN = 0.025, 0.0004, 0.0002
UPDATE, PER_TRAINED_TOKEN = 0.2, 0.0004  # of a rank's tokens, prompts included
HAND_OVER = 0.25
MOST_BEHIND = 0.5  # that later steps of the engine make up for
ENVIRONMENT_START = 1.0  # of a process
TOOL = 1.2  # an answer that `tail_tool.TailTool` gives after a second


class Pace:
    """Sleeps for the rest of each computation's time, and counts those that took longer."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"{os.environ.get('RANK', '0')}.json"
        self._counts: Counter[str] = Counter()
        self._over_seconds: Counter[str] = Counter()
        self._step_due: float | None = None  # when the last one should end; None: idle since
        self._num_prefill_tokens = 0

    def end(self, what: str, began: float, seconds: float, *, most_behind: float = 0.0) -> float:
        """Sleep until `seconds` after `began`, and return that time; if it is over, a time at most
        `most_behind` ago."""
        due = began + seconds
        behind = time.perf_counter() - due
        self._counts[what] += 1
        if behind < 0:
            time.sleep(-behind)
        elif behind > most_behind:
            self._counts[f"{what} over"] += 1
            self._over_seconds[what] += behind - most_behind
            due += behind - most_behind
        return due

    def write(self) -> None:
        """Write the counts so far."""
        found = {"counts": self._counts, "seconds_over": self._over_seconds}
        self._file.write_text(json.dumps(found))

    def submitted(self, num_tokens: int) -> None:
        """Note a request, whose tokens so far the next steps compute."""
        self._num_prefill_tokens += num_tokens

    def idle(self) -> None:
        """Note that the engine has no requests."""
        self._step_due = None

    def step(self, num_running: int, most_tokens: int, run: Callable[[], Any]) -> Any:
        """Run an engine's step with as many sequences, which computes at most `most_tokens`."""
        began = time.perf_counter() if self._step_due is None else self._step_due
        num_tokens = min(self._num_prefill_tokens, most_tokens)
        self._num_prefill_tokens -= num_tokens
        seconds = STEP + PER_SEQUENCE * num_running + PER_PREFILL_TOKEN * num_tokens
        found = run()
        self._step_due = self.end("step", began, seconds, most_behind=MOST_BEHIND)
        return found


def seconds_late(folder: Path) -> float:
    """Return by how many seconds the computations of a run took longer in all, on the rank where
    they are most."""
    files = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return max(sum(found["seconds_over"].values()) for found in files)


class HeldEvents:
    """Events of environments by ticket, each held back until its time."""

    def __init__(self) -> None:
        self._due: dict[int, float] = {}  # of the event that comes next
        self._held: list[tuple[float, int, Any]] = []

    def asked(self, ticket: int, seconds: float) -> None:
        """Note a call that takes as long."""
        self._due[ticket] = time.perf_counter() + seconds

    def released(self, events: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
        """Hold new events, and return those whose time has come."""
        now = time.perf_counter()
        for ticket, event in events:
            is_last = getattr(event, "done", False)
            self._held.append((now if is_last else self._due[ticket], ticket, event))
        self._held.sort(key=lambda each: each[0])
        count = sum(due <= now for due, _, _ in self._held)
        released, self._held = self._held[:count], self._held[count:]
        return [(ticket, event) for _, ticket, event in released]

    def ended(self, tickets: Collection[int]) -> None:
        """Forget these tickets."""
        self._held = [each for each in self._held if each[1] not in tickets]


def _around(owner: type, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def pace_environments() -> None:
    """Hold back the events of this process's environments."""
    from mcore_rl.environments.pool import EnvironmentPool

    held = HeldEvents()

    def opened(real: Callable[..., int]) -> Callable[..., int]:
        def opened(*args: Any, **keywords: Any) -> int:
            ticket = real(*args, **keywords)
            held.asked(ticket, ENVIRONMENT_START)
            return ticket

        return opened

    def step(real: Callable[..., None]) -> Callable[..., None]:
        def step(self: Any, ticket: int, response: Any) -> None:
            held.asked(ticket, TOOL)
            real(self, ticket, response)

        return step

    def finished(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self: held.released(real(self))

    def end(real: Callable[..., None]) -> Callable[..., None]:
        def end(self: Any, tickets: Iterable[int]) -> None:
            tickets = set(tickets)
            held.ended(tickets)
            real(self, tickets)

        return end

    _around(EnvironmentPool, "_open", opened)
    _around(EnvironmentPool, "step", step)
    _around(EnvironmentPool, "finished", finished)
    _around(EnvironmentPool, "end", end)


def pace(folder: Path) -> None:
    """Pace this process."""
    from mcore_rl.hybrid_engine.hand_over import HandOver
    from mcore_rl.hybrid_engine.vllm.generation import Generation
    from mcore_rl.rollout.scheduler import Scheduler
    from mcore_rl.trainer.learner import Learner

    folder.mkdir(parents=True, exist_ok=True)
    pace = Pace(folder)

    def begin(real: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **keywords: Any) -> None:
            pace.idle()
            real(self, *args, **keywords)

        return init

    def submit(real: Callable[..., Any]) -> Callable[..., Any]:
        def submit(self: Any, request: Any) -> None:
            pace.submitted(len(request.token_ids))
            real(self, request)

        return submit

    def step(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any) -> Any:
            limits = self._engine.vllm_config.scheduler_config
            num_running = min(self.num_running, limits.max_num_seqs)
            return pace.step(num_running, limits.max_num_batched_tokens, lambda: real(self))

        return step

    def between_steps(real: Callable[..., Any]) -> Callable[..., Any]:
        def between_steps(self: Any, num_running: int = 0, step_seconds: float = 0.0) -> None:
            if not num_running:
                pace.idle()
            real(self, num_running, step_seconds)

        return between_steps

    def update(real: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, step: int, batch: Any) -> Any:
            began = time.perf_counter()
            found = real(self, step, batch)
            pace.end("update", began, UPDATE + PER_TRAINED_TOKEN * batch.actor.num_tokens)
            return found

        return update

    def move(real: Callable[..., Any]) -> Callable[..., Any]:
        def move(*args: Any, **keywords: Any) -> None:
            began = time.perf_counter()
            real(*args, **keywords)
            pace.end("hand-over", began, HAND_OVER)
            pace.write()

        return move

    pace_environments()
    _around(Generation, "__init__", begin)
    _around(Generation, "submit", submit)
    _around(Generation, "step", step)
    _around(Scheduler, "between_steps", between_steps)
    _around(Learner, "update", update)
    _around(HandOver, "move", move)


if FOLDER in os.environ and "RANK" in os.environ:  # not in the workers of rewards
    pace(Path(os.environ[FOLDER]))
