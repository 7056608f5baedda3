"""The ranks of actor, critic, reward model, teacher and engines: in turn, or each on its own.

The ranks of a role are a world of their own: torch.distributed, Megatron and vLLM see no others.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from mcore_rl.common.errors import UsageError

ACTOR, CRITIC, REWARD, ROLLOUT = "actor", "critic", "reward", "rollout"
TEACHER = "teacher"
# Degrees in which another model may differ from the actor, and Megatron's flags.
DEGREE_FLAGS = {
    "tp_size": "--tensor-model-parallel-size",
    "pp_size": "--pipeline-model-parallel-size",
    "ep_size": "--expert-model-parallel-size",
}
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Roles:
    """The world's ranks by role; a role without ranks runs on the actor's, in turn.

    The controllers of `--rl-rollout-servers` are processes of their own: their ranks follow those
    of the world.
    """

    world_size: int
    critic: tuple[int, ...] = ()
    reward: tuple[int, ...] = ()
    rollout: tuple[int, ...] = ()  # of the engines, or of the controllers of servers
    teacher: tuple[int, ...] = ()

    @property
    def has_controllers(self) -> bool:
        """Whether the ranks of `rollout` are controllers of servers."""
        return bool(self.rollout) and self.rollout[0] >= self.world_size

    @property
    def actor(self) -> tuple[int, ...]:
        """The ranks of the actor: all without another role."""
        others = {*self.critic, *self.reward, *self.rollout, *self.teacher}
        return tuple(rank for rank in range(self.world_size) if rank not in others)

    def ranks(self, role: str) -> tuple[int, ...]:
        """Return the ranks of a role; the actor's if it has none of its own."""
        return self._own(role) or self.actor

    def is_separate(self, role: str) -> bool:
        """Return whether a role has ranks of its own."""
        return self.ranks(role) != self.actor

    def role_of(self, rank: int) -> str:
        """Return the role that a rank's process runs."""
        others = (role for role in (CRITIC, REWARD, ROLLOUT, TEACHER) if rank in self._own(role))
        return next(others, ACTOR)

    def _own(self, role: str) -> tuple[int, ...]:
        return {
            ACTOR: self.actor,
            CRITIC: self.critic,
            REWARD: self.reward,
            ROLLOUT: self.rollout,
            TEACHER: self.teacher,
        }[role]


def parse_roles(
    world_size: int,
    critic: str | None = None,
    reward: str | None = None,
    rollout: str | None = None,
    num_controllers: int = 0,
    teacher: str | None = None,
) -> Roles:
    """Parse `--rl-critic-ranks` and the like: ranges such as "4-7" or "4-5,8". `num_controllers` is
    the number of controllers of servers.

    Raises UsageError for text that is not a range, ranks outside the world, ranks with two roles,
    and if no rank is left for the actor.
    """
    flags = {
        "--rl-critic-ranks": critic,
        "--rl-reward-ranks": reward,
        "--rl-rollout-ranks": rollout,
        "--rl-teacher-ranks": teacher,
    }
    ranks = {
        flag: _parsed(flag, text, world_size) for flag, text in flags.items() if text is not None
    }
    for (flag, some), (other, others) in itertools.combinations(ranks.items(), 2):
        if both := set(some) & set(others):
            raise UsageError(
                f"rank {min(both)} is in {{flag}} and in {other} {flags[other]}",
                flag=f"{flag} {flags[flag]}",
                remedy="give each role ranks of its own",
            )
    if sum(map(len, ranks.values())) == world_size:
        given = " and ".join(f"{flag} {flags[flag]}" for flag in ranks)
        raise UsageError(
            f"leave none of the {world_size} ranks to the actor",
            flag=given,
            remedy="give fewer, or drop the flag to let all ranks take all roles in turn",
        )
    roles = Roles(world_size, *(ranks.get(flag, ()) for flag in flags))
    if num_controllers:
        controllers = tuple(range(world_size, world_size + num_controllers))
        roles = replace(roles, rollout=controllers)
    return roles


def _parsed(flag: str, text: str, world_size: int) -> tuple[int, ...]:
    ranks: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(
                f": {part.strip()!r} is not a range of ranks",
                flag=f"{flag} {text}",
                remedy="give for example 4-7 or 4-5,8",
            )
        ranks += range(int(match[1]), int(match[2] or match[1]) + 1)
    if max(ranks) >= world_size:
        raise UsageError(
            f"names rank {max(ranks)}, but the {world_size} processes are ranks 0 to "
            f"{world_size - 1}",
            flag=f"{flag} {text}",
            remedy="change the range or the number of processes",
        )
    if len(set(ranks)) < len(ranks):
        raise UsageError("names a rank twice", flag=f"{flag} {text}", remedy="give each once")
    return tuple(sorted(ranks))


def describe_ranks(ranks: tuple[int, ...]) -> str:
    """Describe ranks in words: (0, 1, 2, 5) -> "ranks 0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
