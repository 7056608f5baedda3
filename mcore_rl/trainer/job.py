"""A job whose Megatron runs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mcore_rl.config import RLConfig
from mcore_rl.spec import JobSpec
from mcore_rl.trainer.roles.role_world import RoleWorld


@dataclass(frozen=True, slots=True)
class Job:
    """A job whose Megatron runs, the same on all ranks of a role but for `args.rank`."""

    spec: JobSpec
    args: argparse.Namespace  # Megatron's
    world: RoleWorld

    @property
    def config(self) -> RLConfig:
        return self.spec.config
