"""A curriculum: prompts whose recent accuracy is 0 or 1 are drawn no more, or less often.

All responses to such a prompt have the same reward, so that it teaches nothing. One whose responses
are all right, or all wrong, but differ in reward counts as neither. Each draw keeps its
source; of the source's prompts, in the order of its epochs, a draw gets the next one that is not
passed over. With a fixed state the prompts of draws are a pure function of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from mcore_rl.batching.table import SampleTable
from mcore_rl.common.errors import not_held
from mcore_rl.common.readers import read_regular
from mcore_rl.data.options import DROP
from mcore_rl.data.prompts import PromptSources

_FILE = "curriculum.safetensors"
_CHUNK = 1024  # prompts looked at together
_NEITHER = 0.5  # accuracy of a prompt that is not passed over
_EPOCHS = 4  # a prompt that is drawn less often is drawn once in this many epochs


@dataclass(frozen=True, slots=True)
class _State:
    """Immutable, so that a step can be undone.

    Example: of two prompts of one source, after 5 draws: `_State(array([1.0, nan]), (5,))`.
    """

    accuracy: np.ndarray  # [rows] float32, by `Prompt.index`: when last drawn; nan: never
    cursors: tuple[int, ...]  # by source: prompts that were drawn or passed over


class Curriculum:
    """The prompts of a run's draws. Local; the same on all ranks that make the same calls."""

    def __init__(self, prompts: PromptSources, kind: str, *, seed: int, position: int) -> None:
        """`kind` is --rl-curriculum, `position` the number of draws before."""
        self._prompts, self._drops, self._seed = prompts, kind == DROP, seed
        accuracy = np.full(prompts.num_rows, np.nan, dtype=np.float32)
        self.state = _State(accuracy, tuple(prompts.apportionment.counts(position)))
        self._set_position(position)
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step, which `undo` returns to."""
        self._state_before, self._num_passed_over = self.state, 0

    def undo(self, position: int) -> None:
        """Return to the beginning of the step, at `position`."""
        self.state = self._state_before
        self._set_position(position)

    def _set_position(self, position: int) -> None:
        self._first = position
        self._positions: list[int] = []  # of the draws from `_first` on
        self._cursors = [self.state.cursors]  # before each of them, and after the last

    def position_of(self, draw: int) -> int:
        """Return the position in the prompts that a draw gets, which is not one settled."""
        while len(self._positions) <= draw - self._first:
            self._assign()
        return self._positions[draw - self._first]

    def _assign(self) -> None:
        """Assign a prompt to the next draw: the source's first that is not passed over, or its
        first if all are."""
        draw = self._first + len(self._positions)
        source = int(self._prompts.apportionment.of_draws(draw, 1)[0][0])
        cursors, size = list(self._cursors[-1]), len(self._prompts.parts[source])
        start = cursors[source]
        number = next((n for n in self._taken(source, start, size)), 0)
        place = self._prompts.in_source(source, start + number, 1, seed=self._seed)
        cursors[source] = start + number + 1
        self._positions.append(int(place[0]))
        self._cursors.append(tuple(cursors))

    def _taken(self, source: int, start: int, count: int) -> Iterator[int]:
        """Yield which of a source's next `count` prompts, from 0, are not passed over."""
        size = len(self._prompts.parts[source])
        for first in range(0, count, _CHUNK):
            numbers = np.arange(first, min(first + _CHUNK, count))
            places = self._prompts.in_source(source, start + first, len(numbers), seed=self._seed)
            yield from numbers[self._takes(places, (start + numbers) // size)].tolist()

    def _takes(self, places: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        """Return whether to draw the prompts at these positions, `[n]` bool, in these epochs."""
        accuracy = self.state.accuracy[self._prompts.rows[places]]
        teaches = ~np.isin(accuracy, (0.0, 1.0))
        return teaches if self._drops else teaches | ((epochs + places) % _EPOCHS == 0)

    def settle(self, position: int, table: SampleTable, informative: np.ndarray) -> None:
        """Record the outcome of the draws below `position`; `table` has samples of them.
        `informative` has the `Prompt.index` of those that teach, whatever their accuracy."""
        num_draws = position - self._first
        if num_draws:
            self.position_of(position - 1)
        # A group that the filter drops has an accuracy, too.
        is_dropped = np.array([each is not None for each in table.dropped], dtype=np.bool_)
        counts = table.valid | (is_dropped & table.has_reward & ~table.has_failed)
        rows, solved = table.prompts[counts], table.rewards[counts] >= 1.0
        drawn, inverse = np.unique(rows, return_inverse=True)
        accuracy = self.state.accuracy.copy()
        shares = np.bincount(inverse, solved) / np.bincount(inverse)
        teaches = np.isin(drawn, informative) & np.isin(shares, (0.0, 1.0))
        accuracy[drawn] = np.where(teaches, _NEITHER, shares)
        cursors = self._cursors[num_draws]
        self._num_passed_over += sum(cursors) - sum(self.state.cursors) - num_draws
        self.state = _State(accuracy, cursors)
        self._set_position(position)

    def metrics(self) -> dict[str, float]:
        """Return the prompts that the step passed over, and the share of all prompts that are drawn
        no more or less often."""
        accuracy = self.state.accuracy
        settled = np.isin(accuracy[self._prompts.rows], (0.0, 1.0))
        return {
            "curriculum/passed_over": float(self._num_passed_over),
            "curriculum/settled_share": float(settled.mean()),
        }

    def save(self, folder: Path) -> None:
        """Write the state. On one rank."""
        cursors = np.array(self.state.cursors, dtype=np.int64)
        save_file({"accuracy": self.state.accuracy, "cursors": cursors}, folder / _FILE)

    def restore(self, folder: Path) -> None:
        """Read the state of a run over the same prompts, if it had a curriculum. Raises
        UsageError for other content."""
        path = folder / _FILE
        if not path.exists():
            return
        what = f"the curriculum of {len(self.state.accuracy)} prompts"
        try:
            tensors = load(read_regular(path))
            accuracy, cursors = tensors["accuracy"], tensors["cursors"]
        except (SafetensorError, LookupError, OSError) as error:
            raise not_held(path, what, f"{type(error).__name__}: {error}") from error
        fits = (
            accuracy.dtype == np.float32
            and accuracy.shape == self.state.accuracy.shape
            and cursors.dtype == np.int64
            and cursors.shape == (len(self.state.cursors),)
            and (cursors >= 0).all()
        )
        if not fits:
            raise not_held(path, what, "it has other shapes or values")
        self.state = _State(accuracy, tuple(cursors.tolist()))
        self._set_position(self._first)
        self.begin_step()
