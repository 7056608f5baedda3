"""Every generator that training draws from, saved before rollout and restored bit for bit after.

Rollout seeds and advances the same generators (torch's on the host and on the devices, Python's,
numpy's), so that without this the engine's work would decide the dropout of the next update.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_rl import megatron_adapter


@dataclass(frozen=True, slots=True)
class RngState:
    """A snapshot. Local to this rank; it may be restored more than once."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]  # one a visible CUDA device, none without CUDA
    tracker: Mapping[str, torch.Tensor]  # Megatron's
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RngState:
        """Copy all states. Nothing is drawn."""
        return cls(
            cpu=torch.get_rng_state(),
            # A device's generator lives on the host: this starts no context on other devices.
            devices=tuple(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ()),
            tracker=megatron_adapter.rng_tracker_states(),
            python=random.getstate(),
            numpy=np.random.get_state(),
        )

    def restore(self) -> None:
        """Put all states back. Generators that exist since the capture only are left alone."""
        torch.set_rng_state(self.cpu)
        for index, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, index)
        megatron_adapter.set_rng_tracker_states(self.tracker)
        random.setstate(self.python)
        np.random.set_state(self.numpy)
