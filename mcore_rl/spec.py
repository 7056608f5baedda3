"""A job after every check, before Megatron starts: `JobSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.config import RLConfig
from mcore_rl.data.tokenizer import ends_of
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.config_json import ModelShape, read_config_json
from mcore_rl.model.float8_blocks import Float8Weights, float8_weights
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout
from mcore_rl.model.lora import Lora
from mcore_rl.model.quantization import POWERS_OF_TWO, QUANTIZATION
from mcore_rl.model.roles import Roles
from mcore_rl.model.teacher import TeacherPlace
from mcore_rl.moe.routing import RoutedLayers, routed_layers
from mcore_rl.rewards.specs import RewardSpec


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A model of a job in its layout."""

    shape: ModelShape
    layout: TrainLayout
    layers: PipelineLayers
    values: Mapping[str, Any]  # Megatron's flags by destination, for this model
    tokens: tuple[str, ...] | None  # for Megatron's parser; None in a fork


@dataclass(frozen=True, slots=True)
class ValueModelSpec:
    """The description of a critic or a reward model before Megatron starts."""

    shape: ModelShape  # with a value head
    checkpoint: HFCheckpoint  # without the head of a language model; with a value head, see below
    has_head: bool  # whether the folder has a head; else it starts at zero
    layout: TrainLayout
    layers: PipelineLayers
    tokens: tuple[str, ...] | None  # for Megatron's parser; None: the actor's arguments, changed
    extra_args: ExtraArgs  # of that parser


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """The description of a teacher in a folder before Megatron starts."""

    shape: ModelShape
    checkpoint: HFCheckpoint
    layout: TrainLayout
    layers: PipelineLayers
    tokens: tuple[str, ...] | None  # for Megatron's parser; None in a fork, where it is swapped
    extra_args: ExtraArgs  # of that parser
    is_swapped: bool  # has the actor's shape and ranks, and is scored with in the actor's model


def is_swapped(teacher: LaidOut, shape: ModelShape, layout: TrainLayout) -> bool:
    """Return whether a teacher on the actor's ranks is scored with in the actor's model, which has
    this shape and layout."""
    return teacher.shape == shape and teacher.layout == layout


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job after every check, before Megatron starts; same on all ranks.

    For example, two ranks with TP 2 have `train_layout.describe()` "TP2 PP1 EP1 DP1",
    `tokens` ("--num-layers", "2", ...) and `flags` {"--lr": "1e-06", ...}.
    """

    config: RLConfig
    rewards: RewardSpec
    environment: EnvironmentSpec | None
    shape: ModelShape
    checkpoint: HFCheckpoint
    roles: Roles
    train_layout: TrainLayout  # of the actor's ranks
    layers: PipelineLayers
    rollout_layout: RolloutLayout
    ranks_per_node: int
    tokens: tuple[str, ...]  # for Megatron's parser: derived flags, then the user's; () of a fork
    chosen: tuple[str, ...] = ()  # of these, the flags that the plan chose
    given: Mapping[str, Any]  # the user's flags as in a file of --rl-config; empty for a fork
    flags: Mapping[str, str]  # all given or derived flags, with their values
    notes: tuple[str, ...]  # on derived flags, on flags without effect, on memory
    save: str | None  # Megatron's --save
    save_interval: int | None  # Megatron's --save-interval as given; None: saves go by time
    critic: ValueModelSpec | None
    reward_model: ValueModelSpec | None
    teachers: tuple[TeacherSpec, ...] = ()  # of `RLConfig.teachers`, those in a folder
    trust_remote_code: bool
    lora: Lora | None = None

    @property
    def checkpoints(self) -> dict[str, HFCheckpoint]:
        """The Hugging Face checkpoints to read, by the flag that names the folder."""
        by_flag = {"--rl-hf-checkpoint": self.checkpoint}
        if self.critic is not None and self.config.critic.init is not None:
            by_flag["--rl-critic-init"] = self.critic.checkpoint
        if self.reward_model is not None:
            by_flag["--rl-reward-model"] = self.reward_model.checkpoint
        for place in self.config.teachers:
            if (teacher := self.teacher_in(place)) is not None:
                by_flag[place.flag] = teacher.checkpoint
        return by_flag

    def teacher_in(self, place: TeacherPlace) -> TeacherSpec | None:
        """Return the teacher in a folder; None for a server."""
        matching = (each for each in self.teachers if each.checkpoint.folder == Path(place.place))
        return next(matching, None)

    @property
    def float8(self) -> Float8Weights | None:
        """The weights that engines hold in FP8 blocks; None: none."""
        if not self.rollout_layout.float8:
            return None
        published = read_config_json(self.checkpoint.folder).get(QUANTIZATION) or {}
        return float8_weights(
            self.shape,
            self.rollout_layout,
            published=frozenset(self.checkpoint.float8) or None,
            powers_of_two=published.get("scale_fmt") == POWERS_OF_TWO,
        )

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens at which a response ends."""
        return ends_of(self.checkpoint.folder, trust_remote_code=self.trust_remote_code)

    @property
    def routed_layers(self) -> RoutedLayers | None:
        """The layers, top-k and number of experts of the model's routers; None without experts."""
        return routed_layers(self.shape)
