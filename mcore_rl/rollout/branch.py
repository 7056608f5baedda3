"""The branch of a run that the groups of its bank belong to."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from mcore_rl.common.disk import replace_text
from mcore_rl.common.readers import integer_within, parse_json, read_regular

logger = logging.getLogger(__name__)

_NAME = "branch.json"
_MOST_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class Branch:
    """The branch of a run that the bank's groups belong to, and its newest checkpoint.

    A start continues the branch from there. A start without a checkpoint, or from an older one,
    begins another branch: the groups here were sampled by weights that it will never have.

    Example: `Branch("6f1c...", step=40)`.
    """

    name: str
    step: int  # of the newest checkpoint; 0: none

    @classmethod
    def of_start(cls, folder: Path, name: str, step: int) -> Branch:
        """Return the branch of a run that starts from a checkpoint of branch `name` at `step`; ""
        and 0 without a checkpoint. `folder` is that of the bank."""
        known = cls._read(folder)
        if name and known is not None and known.name == name and known.step <= step:
            return cls(name, step)
        return cls(uuid4().hex, step)

    @classmethod
    def _read(cls, folder: Path) -> Branch | None:
        try:
            facts = parse_json(read_regular(folder / _NAME, _MOST_BYTES))
            name, step = facts["name"], facts["step"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        is_valid = isinstance(name, str) and integer_within(step, 0, 1 << 53) is not None
        return cls(name, step) if is_valid else None

    def write(self, folder: Path) -> None:
        """Write it to the disk. If that fails, which is logged, the next start may begin another
        branch."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / _NAME, json.dumps(asdict(self)))
        except OSError as error:
            logger.error(
                "[Bank] %s cannot be written (%s): if the run is killed, finished groups are "
                "sampled again",
                folder / _NAME,
                error,
            )
