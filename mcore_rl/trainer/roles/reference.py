"""The reference: the policy to which the KL is computed.

Unlike critic and reward model it is not served (see `remote`), because it has no model of its own:
its weights replace the actor's while the actor scores with them. It is therefore on the actor's
ranks and scores the samples of this rank.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO

from mcore_rl.hybrid_engine.memory.host_memory import HostCopy
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, load_into_megatron
from mcore_rl.megatron.lora import adapters_of
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.trainer.resume.point import ResumePoint


class ReferencePolicy:
    """An earlier policy, kept on the host (`HostCopy`) in this rank's own shards.

    `with reference:` swaps its weights into the actor's model and back; no second model exists.
    `version` is the step of that policy, 0 for the one that the run began with.
    """

    def __init__(self, state: megatron_adapter.TrainState) -> None:
        self.version = 0
        self._state = state
        self._weights = HostCopy(megatron_adapter.weights(state))

    def refresh(self, version: int) -> None:
        """Copy the actor's present weights, after `version` steps."""
        self.version = version
        self._weights.take()

    def __enter__(self) -> ReferencePolicy:
        self.swap()
        return self

    def __exit__(self, *exc: object) -> None:
        self.swap()

    def swap(self) -> None:
        """Exchange the model's weights with those kept here."""
        self._weights.exchange()
        megatron_adapter.weights_written(self._state)

    def save(self, args: argparse.Namespace, num_steps: int, folder: Path) -> None:
        """Write the weights as a checkpoint of their own. Collective."""
        with self:
            megatron_checkpoint.save_weights(args, self._state, num_steps, folder)


class BasePolicy(ReferencePolicy):
    """The reference of a run with LoRA: the actor without its adapters, which costs nothing; once
    refreshed, with the adapters of that time, which are kept on the host."""

    def __init__(self, state: megatron_adapter.TrainState) -> None:
        self.version = 0
        self._state = state
        self._adapters = [a for c in state.chunks if (a := adapters_of(c)) is not None]
        self._kept: HostCopy | None = None

    def refresh(self, version: int) -> None:
        """Copy the actor's present adapters, after `version` steps."""
        self.version = version
        if self._kept is None:
            each = [adapter for part in self._adapters for adapter in part.by_tensor.values()]
            self._kept = HostCopy([f.data for adapter in each for f in (adapter.a, adapter.b)])
        else:
            self._kept.take()

    def swap(self) -> None:
        """Exchange the adapters with those kept; without any, disable or enable them."""
        if self._kept is not None:
            self._kept.exchange()
            return
        for adapters in self._adapters:
            adapters.enabled = not adapters.enabled


def build_reference(
    state: megatron_adapter.TrainState,
    point: ResumePoint | None,
    *,
    args: argparse.Namespace,
    checkpoint: HFCheckpoint,
    shards: ModelShards,
    log: TextIO | None = None,
) -> ReferencePolicy:
    """Build the policy that the run began with, or a later one from a checkpoint. Collective. After
    another kind of training, the run begins with the policy of that.

    `state` is the actor's; `point` is given if the run resumes.
    """
    has_adapters = any(adapters_of(chunk) is not None for chunk in state.chunks)
    # Of a new run, whatever it was loaded from; with LoRA it is the base.
    reference = BasePolicy(state) if has_adapters else ReferencePolicy(state)
    if point is None:
        return reference
    if point.follows_another:
        reference.refresh(point.state.step)  # so that it is saved
    elif point.reference is not None:  # the actor resumes from a later policy
        reference.refresh(point.state.reference_version)
        with megatron_adapter.megatron_output_to(log):
            megatron_checkpoint.load_weights(args, state, state.iteration, point.reference)
        reference.swap()
    elif not has_adapters:
        load_into_megatron(checkpoint, shards)
        reference.swap()
    return reference
