"""Reader for the fields of a config.json; an error names the field at fault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Bounds
from mcore_rl.common.readers import finite_number, integer_within

# About ten times the values of the largest published models. Layers, experts and the like are
# enumerated, so a much larger number would delay the start by hours.
_MOST = {
    "num_hidden_layers": 2000,
    "num_nextn_predict_layers": 100,
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), 10_000),
    "vocab_size": 10_000_000,
}
_MOST_ELSEWHERE = 1 << 31  # positions; widths are compared with the weights


class Fields:
    """Reader for fields of config.json; raises an error that names a missing or invalid field."""

    def __init__(self, values: Mapping[str, Any], path: Path, flag: str, inside: str = "") -> None:
        """Read from `values`; `inside` is the field that holds it, plus a dot, for messages."""
        self._values, self._path, self._flag, self.inside = values, path, flag, inside
        self.read: set[str] = set()  # names of the fields read

    def within(self, name: str, values: Mapping[str, Any]) -> Fields:
        """Return a reader for `values`, the object in field `name`."""
        return Fields(values, self._path, self._flag, f"{self.inside}{name}.")

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        if self._values.get(name) is None:
            raise self._missing(name)
        return self._values[name]

    def _missing(self, name: str) -> UsageError:
        return UsageError(
            f": {self._path} has no field '{self.inside}{name}', which its architecture needs",
            flag=self._flag,
            remedy="use the config.json that was published with the checkpoint",
        )

    def check_spelt_out(self, names: Iterable[str]) -> None:
        """Raise UsageError unless each of `names` is present, null or not."""
        for name in names:
            if name not in self._values:
                raise self._missing(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self._values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer from `least` to the field's bound; required unless a default exists."""
        value = self[name] if default is None else self.get(name, default)
        most = _MOST.get(name, _MOST_ELSEWHERE)
        count = integer_within(value, least, most)
        if count is None:
            raise self.invalid(name, value, f"an integer from {least} to {most}")
        return count

    def number(self, name: str, default: float | None = None, *, bounds: Bounds) -> float:
        """Return a finite number within `bounds`; required unless a default exists."""
        value = self[name] if default is None else self.get(name, default)
        as_float = finite_number(value)
        if as_float is None or not bounds.hold(as_float):
            raise self.invalid(name, value, f"in {bounds.interval()}")
        return as_float

    def switch(self, name: str) -> bool:
        """Return true or false; a missing field is false."""
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.invalid(name, value, "true or false")
        return value

    def invalid(self, name: str, value: Any, constraint: str) -> UsageError:
        what = f"{self.inside}{name} {repr(value)[:60]}"
        return UsageError(
            f": {self._path} has {what}, which must be {constraint}",
            flag=self._flag,
            remedy="use the config.json that was published with the checkpoint",
        )

    def refuse(self, what: str, remedy: str = "choose another checkpoint") -> UsageError:
        return UsageError(
            f": {self._path} asks for {what}, which is not supported",
            flag=self._flag,
            remedy=remedy,
        )
