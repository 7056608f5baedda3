"""The models that a job trains: the actor and, if the algorithm has one, the critic.

Each has its own layout and settings. This module is pure: it imports neither Megatron nor vLLM nor
torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import flag_of
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout
from mcore_rl.model.roles import DEGREE_FLAGS
from mcore_rl.planner.parameters import optimizer_parameters, stage_parameters
from mcore_rl.planner.settings import TrainSettings
from mcore_rl.planner.stages import stages_for

Bytes = npt.NDArray[np.int64]

ACTOR, CRITIC = "actor", "critic"
# Degrees in which a critic may differ from the actor, and their flags.
CRITIC_FLAGS = {degree: flag_of(f"critic_{degree}") for degree in DEGREE_FLAGS}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A model with its layout and training settings, on `train.world_size` ranks."""

    name: str
    shape: ModelShape
    train: TrainLayout
    layers: PipelineLayers
    training: TrainSettings
    own_degrees: frozenset[str] = frozenset()  # degrees in which a critic does not follow the actor
    # Its separate ranks in the world, `train.world_size` of them; empty: it shares the actor's
    # ranks, which count from 0.
    ranks: tuple[int, ...] = ()

    def of_ranks(self, of_stages: Sequence[int]) -> Bytes:
        """Return `[train.world_size]`: values per rank, from the values per stage."""
        return np.repeat(np.array(of_stages, dtype=np.int64), self.train.ranks_per_stage)

    def describe(self) -> str:
        """Describe it: "TP8 x CP1 x DP4 x PP2, experts ...; layers of the stages: 4+4 4+4"."""
        counts = [[len(chunk) for chunk in stage] for stage in self.layers]
        shown = " ".join("+".join(map(str, chunks)) for chunks in counts)
        return f"{self.train.describe()}; layers of the stages: {shown}"


def stage_state(model: TrainedModel, *, with_moments: bool = True) -> list[dict[str, int]]:
    """Return what a rank of each stage holds on the device between two passes. An optimizer that
    was not loaded has no moments before the first update."""
    training = model.training
    return [
        {
            "weights": parameters.total * training.weight_bytes,
            "gradients": parameters.total * training.gradient_bytes,
            "optimizer": math.ceil(optimizer * (1 - training.optimizer_host_share)),
        }
        for parameters, optimizer in zip(
            stage_parameters(model.shape, model.train, model.layers, training),
            optimizer_bytes(model, with_moments=with_moments),
            strict=True,
        )
    ]


def optimizer_bytes(model: TrainedModel, *, with_moments: bool = True) -> list[int]:
    """Return the optimizer's bytes on a rank of each stage, on device and host together."""
    training = model.training
    per_parameter = training.optimizer_bytes - (0 if with_moments else training.moment_bytes)
    return [
        optimizer_parameters(parameters, model.train, model.training) * per_parameter
        for parameters in stage_parameters(model.shape, model.train, model.layers, model.training)
    ]


def following(
    critic: TrainedModel, train: TrainLayout, layers: PipelineLayers
) -> TrainedModel | None:
    """Return the critic for an actor with layout `train`: it follows in all degrees that its own
    flags do not fix. None if that is impossible, or would need flags for the critic's stages.
    """
    degrees = {
        name: getattr(critic.train if name in critic.own_degrees else train, name)
        for name in CRITIC_FLAGS
    }
    etp_size = train.etp_size if critic.shape.experts else degrees["tp_size"]
    try:
        new = TrainLayout(
            critic.train.world_size, cp_size=train.cp_size, etp_size=etp_size, **degrees
        )
    except UsageError:
        return None
    depth = sum(len(chunk) for stage in layers for chunk in stage)
    alike = new.pp_size == train.pp_size and depth == critic.shape.num_layers
    return in_layout(critic, new, layers if alike else None)


def in_layout(
    model: TrainedModel, train: TrainLayout, layers: PipelineLayers | None = None
) -> TrainedModel | None:
    """Return `model` in another layout, with the same samples in a mini-batch.

    Its stages are `layers`, or its current ones if PP is the same, or even ones. None if layers or
    samples do not divide.
    """
    old, settings = model.train, model.training
    if layers is None and train.pp_size == old.pp_size:
        layers = model.layers
    if layers is None:
        stages = stages_for(model.shape.num_layers, train.pp_size)
        if stages is None or stages.flags:
            return None
        layers = stages.layers
    share, rest = divmod(settings.num_micro_batches * old.dp_size, train.dp_size)
    if not settings.packed_tokens and (rest or not share):
        return None
    training = replace(
        settings,
        num_micro_batches=share + bool(rest),
        sequence_parallel=(
            settings.sequence_parallel if train.tp_size == old.tp_size else train.tp_size > 1
        ),
    )
    return replace(model, train=train, layers=layers, training=training)
