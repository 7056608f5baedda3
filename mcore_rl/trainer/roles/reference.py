"""The reference: the policy that the KL is taken to.

It is not served as critic and reward model are (see `remote`), because it has no model: its weights
take the place of the actor's for as long as the actor scores with them, so it is where the actor
is, and is asked of the samples that this rank has.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TextIO

from mcore_rl.hybrid_engine.memory.host_memory import HostCopy
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, load_into_megatron
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.trainer.resume.point import ResumePoint


class ReferencePolicy:
    """The policy as it was, kept on the host (`HostCopy`) in this rank's own shards.

    `with reference:` swaps its weights into the actor's model and back; no second model exists.
    `version` is the step whose policy it is, 0 for the one that the run began with.
    """

    def __init__(self, state: megatron_adapter.TrainState) -> None:
        self.version = 0
        self._state = state
        self._weights = HostCopy(megatron_adapter.weights(state))

    def refresh(self, version: int) -> None:
        """Take the actor as it is now, after `version` steps."""
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


def build_reference(
    state: megatron_adapter.TrainState,
    point: ResumePoint | None,
    *,
    args: argparse.Namespace,
    checkpoint: HFCheckpoint,
    shards: ModelShards,
    log: TextIO | None = None,
) -> ReferencePolicy:
    """The policy that the run began with, or a later one that it was saved with. Collective.

    `state` is the actor's, `point` is there if the run goes on from it.
    """
    reference = ReferencePolicy(state)  # of a run that begins, whatever it was loaded from
    if point is not None:  # the actor goes on from a later policy
        reference.version = point.state.reference_version
        if point.reference is not None:
            with megatron_adapter.megatron_output_to(log):
                megatron_checkpoint.load_weights(args, state, state.iteration, point.reference)
        else:
            load_into_megatron(checkpoint, shards)
        reference.swap()
    return reference
