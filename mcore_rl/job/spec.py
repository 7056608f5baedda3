"""The description of a job, from its command line or a fork's arguments, after every check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.flags.derived import DerivedFlags
from mcore_rl.flags.options import RLConfig
from mcore_rl.flags.parser import ExtraArgs, all_args
from mcore_rl.flags.roles import Roles
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout


@dataclass(frozen=True, slots=True)
class ValueModelSpec:
    """The description of a critic or a reward model before Megatron starts."""

    shape: ModelShape  # with a value head
    checkpoint: HFCheckpoint  # without the head of a language model; with a value head, see below
    has_head: bool  # whether the folder has a head; else it starts at zero
    layout: TrainLayout
    layers: PipelineLayers
    tokens: tuple[str, ...] | None  # for Megatron's parser; None: the actor's arguments, changed
    extra_args: ExtraArgs = all_args  # of that parser


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The description of a run before Megatron starts."""

    config: RLConfig
    shape: ModelShape
    checkpoint: HFCheckpoint
    roles: Roles
    train_layout: TrainLayout  # of the actor's ranks
    layers: PipelineLayers
    rollout_layout: RolloutLayout
    derived: DerivedFlags
    tokens: tuple[str, ...]  # for Megatron's parser: derived flags, then the user's; () of a fork
    flags: Mapping[str, str]  # all given or derived flags, with their values
    notes: tuple[str, ...]  # on given flags without effect, and on memory that may be too small
    save: str | None  # Megatron's --save
    critic: ValueModelSpec | None
    reward_model: ValueModelSpec | None
    trust_remote_code: bool

    @property
    def checkpoints(self) -> dict[str, HFCheckpoint]:
        """The Hugging Face checkpoints to read, by the flag that names the folder."""
        found = {"--rl-hf-checkpoint": self.checkpoint}
        if self.critic is not None and self.config.critic_init is not None:
            found["--rl-critic-init"] = self.critic.checkpoint
        if self.reward_model is not None:
            found["--rl-reward-model"] = self.reward_model.checkpoint
        return found
