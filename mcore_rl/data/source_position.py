"""Position of a run in its sources of prompts, and resuming with other sources.

A fingerprint of several sources is the JSON of the prompts per step, and of name, share and
fingerprint of each. That of a single source is its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rl.common.readers import InvalidData, integer_within, parse_json
from mcore_rl.data.apportionment import Apportionment

_PREFIX = "sources:"
_MOST = 10**9  # as the apportionment has it


@dataclass(frozen=True, slots=True)
class Begin:
    """Where a run began to draw from its present sources, in their present shares.

    Example: a source "b" joined the only one, which is called "a" since, after 96 draws:
    `Begin(96, {"a": 96}, only_source="a")`.
    """

    position: int = 0  # draws before
    counts: Mapping[str, int] = field(default_factory=dict)  # of these, by name; absent: 0
    only_source: str = ""  # the source that was the only one, whose order does not have its name


@dataclass(frozen=True, slots=True)
class _Facts:
    """The content of a fingerprint."""

    units: dict[str, int]  # shares, by name
    contents: dict[str, str]  # fingerprints of the sources, by name
    block: int = 1  # prompts per step


def is_of_sources(fingerprint: str) -> bool:
    """Return whether a fingerprint is that of several sources."""
    return fingerprint.startswith(_PREFIX)


def fingerprint_of(units: Mapping[str, int], contents: Mapping[str, str], block: int) -> str:
    """Return the fingerprint of several sources, with `contents` theirs by name."""
    return _PREFIX + json.dumps([block, [[name, units[name], contents[name]] for name in units]])


def _facts(fingerprint: str) -> _Facts:
    """Return the content of a fingerprint; that of nothing if a checkpoint has another text."""
    if not is_of_sources(fingerprint):
        return _Facts({"": 1}, {"": fingerprint})
    facts = _Facts({}, {})
    with contextlib.suppress(InvalidData, TypeError, ValueError):
        block, sources = parse_json(fingerprint[len(_PREFIX) :])
        for name, share, content in sources:
            if integer_within(share, 1, _MOST) is None or integer_within(block, 1, _MOST) is None:
                raise ValueError(f"{share} or {block} is not a number of draws")
            facts.units[str(name)], facts.contents[str(name)] = share, str(content)
        return dataclasses.replace(facts, block=block)
    return _Facts({}, {})


def _names_now(before: _Facts, now: _Facts) -> dict[str, str]:
    """Return the present names of the sources before, by their names then. A single source has
    none: it is found by its content."""
    names = {name: name for name in before.contents}
    if "" in names:
        names[""] = next((n for n, c in now.contents.items() if c == before.contents[""]), "")
    return names


def changes_between(before: str, now: str) -> str:
    """Describe how the sources of one fingerprint differ from those of an earlier one; "" if both
    are single sources, which only a file or a tokenizer can change."""
    if not is_of_sources(before) and not is_of_sources(now):
        return ""
    old, new = _facts(before), _facts(now)
    names = _names_now(old, new)
    common = {name: then for then, name in names.items() if name in new.contents}
    changes = [f"'{name}' is new" for name in new.contents if name and name not in common]
    changes += [
        f"'{then}' is missing" for then, name in names.items() if then and name not in common
    ]
    changed = [name for name, then in common.items() if old.contents[then] != new.contents[name]]
    changes += [f"'{name}' has other prompts" for name in changed if name]
    if not changes and list(old.units.items()) != list(new.units.items()):
        changes = ["their order or their weights differ"]
    elif not changes and old.block != new.block:
        changes = [f"a step has {new.block} prompts of all, and had {old.block}"]
    return ", ".join(changes) or "the file or its name has changed"


def continued(before: str, begin: Begin, position: int, now: str) -> Begin:
    """Return where a run begins to draw from the sources of fingerprint `now`, after `position`
    draws of which those from `begin` on were of the sources `before`.

    A source that has the same prompts continues after the last one drawn of it; others begin with
    the first.
    """
    old, new = _facts(before), _facts(now)
    if not old.units:
        return Begin(position)
    apportionment = Apportionment(
        list(old.units.values()),
        old.block,
        position=begin.position,
        counts=[begin.counts.get(name, 0) for name in old.units],
    )
    drawn = dict(zip(old.units, apportionment.counts(position), strict=True))
    names = _names_now(old, new)
    counts = {
        names[then]: count
        for then, count in drawn.items()
        if new.contents.get(names[then]) == old.contents[then]
    }
    only = names.get("", begin.only_source)
    return Begin(position, counts, only if only in counts else "")
