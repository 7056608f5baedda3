"""Megatron's `--wandb-*` flags, which send metrics to Weights & Biases from the first rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from mcore_rl.common.errors import UsageError

_NEED_A_PROJECT = ("wandb_exp_name", "wandb_save_dir", "wandb_entity")


def check_wandb(values: Mapping[str, Any]) -> None:
    """A project needs the package, the other flags need a project.

    Whether a server can be reached shows when the run begins, and then stops nothing.
    """
    project = values.get("wandb_project")
    if not project:
        for dest in _NEED_A_PROJECT:
            if values.get(dest):
                flag = f"--{dest.replace('_', '-')} {values[dest]}"
                raise UsageError(
                    "has no effect without --wandb-project", flag=flag, remedy="add it or drop it"
                )
    elif importlib.util.find_spec("wandb") is None:
        raise UsageError(
            "needs the package wandb, which is not installed",
            flag=f"--wandb-project {project}",
            remedy="pip install wandb, or drop the flag (TensorBoard gets the same metrics)",
        )
