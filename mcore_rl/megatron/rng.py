"""The random state of training, saved before rollout and restored bit for bit afterwards.

Rollout seeds and advances the same generators (torch's on host and devices, Python's, numpy's).
Without this module the engine's work would determine the dropout of the next update. Checkpoints
contain the state as tensors.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_rl.common.readers import InvalidData
from mcore_rl.megatron import adapter  # noqa: F401 - it applies the patches

_PYTHON_VERSION = 3  # of random.getstate()
_NUMPY_NAME = "MT19937"


@dataclass(frozen=True, slots=True)
class RngState:
    """A snapshot of this rank's generators; it may be restored more than once."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]  # one per visible CUDA device, empty without CUDA
    tracker: Mapping[str, torch.Tensor]  # Megatron's
    python: Any
    numpy: Any

    @classmethod
    def capture(cls) -> RngState:
        """Copy all states, without drawing numbers."""
        return cls(
            cpu=torch.get_rng_state(),
            # A device's generator is on the host: this creates no context on other devices.
            devices=tuple(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ()),
            tracker=_tracker_states(),
            python=random.getstate(),
            numpy=np.random.get_state(),
        )

    def restore(self) -> None:
        """Restore all states. Generators created after the capture are not changed."""
        torch.set_rng_state(self.cpu)
        for index, state in enumerate(self.devices):
            torch.cuda.set_rng_state(state, index)
        _set_tracker_states(self.tracker)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Convert to CPU tensors of integers and float64, which can be stored without pickle."""
        version, words, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        if (version, name) != (_PYTHON_VERSION, _NUMPY_NAME):
            raise RuntimeError(
                f"random's state has version {version} and numpy's generator is {name}; known are "
                f"{_PYTHON_VERSION} and {_NUMPY_NAME}"
            )
        tensors = {
            "cpu": self.cpu,
            "python/words": torch.tensor(words, dtype=torch.int64),
            "numpy/keys": torch.from_numpy(keys.astype(np.int64)),
            "numpy/position": torch.tensor([position, has_gauss], dtype=torch.int64),
            "numpy/cached": torch.tensor([cached], dtype=torch.float64),
        }
        if gauss is not None:
            tensors["python/gauss"] = torch.tensor([gauss], dtype=torch.float64)
        for index, state in enumerate(self.devices):
            tensors[f"device/{index}"] = state.cpu()
        for name, state in self.tracker.items():
            tensors[f"tracker/{name}"] = state.cpu()
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> RngState:
        """Invert `to_tensors`. Raises InvalidData if the snapshot could not be restored."""
        try:
            state = cls._of_tensors(tensors)
            state._check(tensors)
        except (LookupError, OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidData(f"{type(error).__name__}: {error}") from error
        return state

    @classmethod
    def _of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> RngState:
        prefix = "tracker/"
        devices = [f"device/{index}" for index in range(len(tensors))]
        gauss = tensors.get("python/gauss")
        position, has_gauss = tensors["numpy/position"].tolist()
        return cls(
            cpu=tensors["cpu"],
            devices=tuple(tensors[name] for name in devices if name in tensors),
            tracker={
                name.removeprefix(prefix): state
                for name, state in tensors.items()
                if name.startswith(prefix)
            },
            python=(
                _PYTHON_VERSION,
                tuple(tensors["python/words"].tolist()),
                None if gauss is None else gauss.item(),
            ),
            numpy=(
                _NUMPY_NAME,
                tensors["numpy/keys"].numpy().astype(np.uint32),
                position,
                has_gauss,
                tensors["numpy/cached"].item(),
            ),
        )

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Try `restore` with other generators, and raise its errors; `tensors` are the source.
        Raises ValueError for faults that `restore` would not notice."""
        again = self.to_tensors()
        for name in again.keys() | tensors.keys():
            if name not in again or name not in tensors:
                raise ValueError(f"{name} is missing or superfluous")
            if again[name].dtype != tensors[name].dtype or not again[name].equal(tensors[name]):
                raise ValueError(f"{name} changes when it is written again")
        if not 0 <= self.numpy[2] <= len(self.numpy[1]):  # numpy would read out of bounds
            raise ValueError(f"numpy's position is {self.numpy[2]}")
        torch.Generator().set_state(self.cpu)
        random.Random().setstate(self.python)
        np.random.RandomState().set_state(self.numpy)
        for name, value in tensors.items():
            if value.dim() != 1:
                raise ValueError(f"{name} is {tuple(value.shape)}")
        now = RngState.capture()
        sizes = {state.shape for state in (*now.devices, *now.tracker.values())}
        for state in (*self.devices, *self.tracker.values()):
            if state.dtype != torch.uint8 or sizes and state.shape not in sizes:
                raise ValueError(f"a device's state is {tuple(state.shape)} of {state.dtype}")


def _tracker_states() -> dict[str, torch.Tensor]:
    """Return copies of the states of Megatron's RNG tracker."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        # With CUDA graphs or Transformer Engine's tracker, a state is a generator.
        name: state.get_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


def _set_tracker_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore the states that `_tracker_states` returned."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    now = get_cuda_rng_tracker().get_states()
    for name, state in states.items():
        if isinstance(generator := now.get(name), torch.Generator):
            generator.set_state(state)  # captured graphs refer to this generator
        else:
            now[name] = state.clone()
    get_cuda_rng_tracker().set_states(now)
