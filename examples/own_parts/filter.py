"""--rl-import examples/own_parts/filter.py --rl-group-filter solvable --rl-solved-by gsm8k"""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.api import Drop, Parameters, ScoredRollout, group_filter, param


@dataclass(frozen=True)
class Solved(Parameters):
    solved_by: str = param("gsm8k", "reward that is 1 for a right response")


@group_filter("solvable", Solved(), reasons=["all_wrong"])
def solvable(group: Sequence[ScoredRollout], config: Solved) -> Drop | None:
    """Draw another prompt where no response is right, whatever its other rewards are."""
    solved = [sample.parts[config.solved_by] >= 1 for sample in group if sample.is_valid]
    return None if any(solved) else Drop("all_wrong", refill=True)
