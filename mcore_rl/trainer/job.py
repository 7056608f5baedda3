"""A job whose Megatron runs, and a role's ranks as a world of their own.

torch.distributed, Megatron and vLLM read RANK and WORLD_SIZE; after `enter_role` these are the
role's.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch.distributed as dist

from mcore_rl.batching.rows import MicroBatching
from mcore_rl.config import RLConfig
from mcore_rl.model.roles import ACTOR, CRITIC, REWARD, ROLLOUT, TEACHER, Roles
from mcore_rl.observe.watchdog import StageWatchdog, own_connection
from mcore_rl.spec import JobSpec
from mcore_rl.trainer.roles.remote import Bridge, JointGroup


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose Megatron runs, the same on all ranks of a role except `args.rank`."""

    spec: JobSpec
    args: argparse.Namespace  # Megatron's
    world: RoleWorld

    @property
    def config(self) -> RLConfig:
        return self.spec.config

    @property
    def joint_rank(self) -> int:
        """This rank among the actor's and those of engines on ranks of their own, the actor's
        first."""
        first = len(self.spec.roles.actor) if self.world.role == ROLLOUT else 0
        return first + dist.get_rank()

    def watchdog(self) -> StageWatchdog:
        """Start the watchdog of this rank, which answers those of all other ranks of the job."""
        roles, run = self.spec.roles, self.config.run
        return StageWatchdog(
            run.stage_timeout_seconds,
            rank=roles.ranks(self.world.role)[dist.get_rank()],
            world_size=roles.world_size,
            connect=own_connection if roles.world_size > 1 else None,
        )

    def micro_batching(self) -> MicroBatching:
        """Return how the actor's samples become micro-batches."""
        return self.config.micro_batching(self.spec.shape, self.spec.train_layout, vars(self.args))


@dataclass(frozen=True, slots=True)
class RoleWorld:
    """This process's place in the job."""

    role: str
    store: dist.Store | None  # of the role's world; None: a process without a launcher
    # A role on ranks of its own is called by another one: each of its ranks has an end of a bridge,
    # and so has the first rank of the caller.
    bridges: dict[str, Bridge]
    joint_groups: dict[str, JointGroup]  # on all ranks of the caller and of such a role
    weights_store: dist.Store | None = None  # at which the actor and engines on other ranks meet


def enter_role(roles: Roles, store: dist.Store | None) -> RoleWorld:
    """Become a rank of this process's role, and connect the roles. Collective over the job."""
    separate = [role for role in (CRITIC, REWARD, ROLLOUT, TEACHER) if roles.is_separate(role)]
    if not separate:
        return RoleWorld(ACTOR, store, {}, {})
    assert store is not None, "a job of several ranks has a store"
    role = roles.role_of(int(os.environ["RANK"]))
    ranks = roles.ranks(role)
    rank = ranks.index(int(os.environ["RANK"]))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(ranks)))
    bridges, joint_groups = {}, {}
    for other in separate:
        # Engines call the reward model: they have the responses.
        caller = ROLLOUT if other == REWARD and roles.is_separate(ROLLOUT) else ACTOR
        if role in (other, caller):
            joint_groups[other] = JointGroup(
                dist.PrefixStore(f"mcore_rl/joint_group/{other}", store),
                is_near=role == caller,
                rank=rank,
                num_near_ranks=len(roles.ranks(caller)),
                num_far_ranks=len(roles.ranks(other)),
            )
        if role == other or (role == caller and rank == 0):
            bridges[other] = Bridge(
                dist.PrefixStore(f"mcore_rl/bridge/{other}", store),
                place=0 if role == caller else 1 + rank,
                num_far_ranks=len(roles.ranks(other)),
            )
    return RoleWorld(
        role,
        dist.PrefixStore(f"mcore_rl/role/{role}", store),
        bridges,
        joint_groups,
        dist.PrefixStore("mcore_rl/weights", store),
    )
