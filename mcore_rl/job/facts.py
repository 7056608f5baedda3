"""Inputs and results of the checks of a job: `Source`, `Refusals` and `Facts`; see `resolver`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine import MachineMemory
from mcore_rl.common.parameters import ExtraArgs
from mcore_rl.common.platform import Platform
from mcore_rl.config import RLConfig
from mcore_rl.environments.interface import EnvironmentSpec
from mcore_rl.flags.derived import DerivedFlags
from mcore_rl.flags.parser import all_args
from mcore_rl.job.reading import ReadShape, read_shape_of
from mcore_rl.job.value_models import Folder
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.megatron.model_class import ModelClass
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.lora import Lora
from mcore_rl.model.roles import Roles
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.spec import JobSpec, LaidOut

P = ParamSpec("P")
T = TypeVar("T")

# Flags, by destination, that the checks of layout, batch and lengths depend on.
LAYOUT = re.compile(
    r"parallel_size|pipeline|virtual|^rl_(rollout_|critic_|reward_|teacher_)?(ranks|[te]p_)"
)
BATCH = re.compile(r"batch|^rl_(num_prompts|num_samples|algorithm|share_prompts|max_tokens)")
LENGTHS = re.compile(r"^rl_max_(prompt|response)_tokens|^rl_max_tokens|context_parallel")


class Refusals:
    """Handling of refusals by checks: here, as at a start, the first refusal is raised.

    A subclass may collect refusals instead. `value` then returns None and `passes` False, and
    `examine` continues with the checks that do not need the result.
    """

    # Destinations of flags that were left out because they are wrong; their meaning is unknown.
    left_out: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.count = 0
        # Whether flags are being checked one by one: without the refused one, others may be right.
        self.examines_single_flags = False
        self._role = ""

    def refuse(self, error: UsageError) -> None:
        """Handle a refusal."""
        raise error

    def value(self, check: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Return the result of a check, or None if it refuses."""
        try:
            return check(*args, **options)
        except UsageError as error:
            self.count += 1
            self.refuse(error.of_role(self._role) if self._role else error)
            return None

    def passes(self, check: Callable[P, object], *args: P.args, **options: P.kwargs) -> bool:
        """Return whether a check passes."""
        before = self.count
        self.value(check, *args, **options)
        return self.count == before

    def knows(self, flags: re.Pattern[str]) -> bool:
        """Return whether none of these flags was left out."""
        return not any(map(flags.search, self.left_out))

    @contextmanager
    def single_flags(self) -> Iterator[None]:
        """Mark the checks inside as checks of one flag by itself."""
        self.examines_single_flags = True
        try:
            yield
        finally:
            self.examines_single_flags = False

    @contextmanager
    def of_role(self, whose: str) -> Iterator[None]:
        """Name the role, such as "the critic", in the refusals of the checks inside."""
        self._role = whose
        try:
            yield
        finally:
            self._role = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a job: `tokens` of a command line, or the `args` that a fork has parsed.

    For a fork it is too late to derive flags: the architecture in `args` must match config.json.
    """

    tokens: Sequence[str] = ()
    args: argparse.Namespace | None = None
    platform: Platform
    world_size: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", 1)))
    chosen: tuple[str, ...] = ()  # flags that `choices` added to these
    extra_args: ExtraArgs = all_args  # adds all flags that are not Megatron's own
    parser: argparse.ArgumentParser | None = None  # of `make_parser(extra_args)`, if made already
    # Prompts are scored without responses: --rl-max-response-tokens is then 1, the token that vLLM
    # generates whenever it scores.
    scores_only: bool = False
    # Return the size and the compute capability of this rank's device, and this machine's host
    # memory. A device is asked only with CUDA, and late: the environment may be changed before.
    device_bytes: Callable[[], int] | None = None
    device_capability: Callable[[], tuple[int, int]] | None = None
    host_memory: Callable[[], MachineMemory] | None = None
    read_shape: ReadShape = read_shape_of
    has_files: bool = True  # whether weights and other files that the flags name can be read
    is_here: bool = True  # whether this machine will run the job
    has_engine: bool = True  # whether the job has an engine; otherwise Megatron runs alone
    checks_batches: bool = True


@dataclass(slots=True)
class Facts:
    """The results of the checks of a job; None for what was refused or depends on a refusal."""

    parser: argparse.ArgumentParser
    tokens: tuple[str, ...] = ()  # with the files of --rl-config expanded
    given: Mapping[str, Any] = field(default_factory=dict)  # the given flags, by destination
    config: RLConfig | None = None
    rewards: RewardSpec | None = None
    environment: EnvironmentSpec | None = None
    shape: ModelShape | None = None
    checkpoint: HFCheckpoint | None = None
    lora: Lora | None = None  # None: without LoRA, too
    derived: DerivedFlags | None = None
    values: Mapping[str, Any] | None = None  # given and derived flags, by destination
    model_class: ModelClass | None = None
    roles: Roles | None = None
    actor: LaidOut | None = None
    rollout: RolloutLayout | None = None
    batches_are_right: bool = False
    is_accepted: bool = False  # whether Megatron's own validation has passed
    critic: LaidOut | None = None
    reward_model_folder: Folder | None = None
    teachers: tuple[LaidOut, ...] = ()  # those in folders
    spec: JobSpec | None = None  # if nothing was refused, of a job whose files are here

    @property
    def known(self) -> Mapping[str, Any]:
        """The flags by destination: given and derived, or only given if some are wrong."""
        return self.values or self.given
