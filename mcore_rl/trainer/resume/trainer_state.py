"""The state besides models and optimizers that determines the next step, and its storage.

Megatron saves the random states of one rank per pair of TP and PP ranks; here every rank's are
saved. The stored data are numbers: reading does not unpickle anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date as Date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_checkpoint

from mcore_rl.common import objects
from mcore_rl.common.errors import UsageError, not_held
from mcore_rl.common.readers import InvalidData, finite_number, integer_within, parse_json
from mcore_rl.data.source_position import Begin
from mcore_rl.megatron import saving as megatron_checkpoint
from mcore_rl.megatron.rng import RngState
from mcore_rl.trainer.resume.folders import complete_steps, iteration_name

TRAINER = "trainer"  # the folder in a checkpoint
_FACTS, _RNG = "facts", "random_states"
_LENGTH_BYTES = 8
LOADED = "loaded"
# Facts that checkpoints of earlier versions may lack.
_LATER_FACTS = {
    *("began_with", "date", "entropy_controller", "lora", "optimizer_by_parameter"),
    *("sources_began_at", "sources_drawn", "only_source", "branch", "demonstrations"),
}
_MOST_FACT_BYTES = 1 << 20
_MOST_COUNTED = 1 << 53
_STATE = "the state of a trainer"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The trainer's state, the same on all ranks. `None` and empty: not of this role, or unused."""

    step: int  # updates so far, and the number of the next step
    layout: str  # `TrainLayout.describe()` of the ranks whose random states these are
    weight_version: int = 0
    sampler_position: int = 0  # prompts drawn so far
    prompts: str = ""  # fingerprints of the prompts
    eval_prompts: str = ""
    kl_controller: Mapping[str, float] = field(default_factory=dict)
    reference_version: int = 0  # the step whose policy the reference is; 0: the run's start
    # Fingerprint of the Hugging Face weights that the run began with, LOADED for a Megatron
    # checkpoint; "": an earlier version did not record it.
    began_with: str = ""
    # Whether the optimizer's states were written by parameter, as patches/megatron/
    # optimizer_in_pieces does. False: by an earlier version, maybe at places of other parameters.
    optimizer_by_parameter: bool = False
    date: str = ""  # ISO, the date for chat templates; "": as `began_with`
    lora: str = ""  # rank, alpha and targets of the adapters (`Lora.describe`); "": without LoRA
    entropy_controller: Mapping[str, float] = field(default_factory=dict)
    # `begin`; draws before it were of other sources, or in other shares.
    sources_began_at: int = 0
    sources_drawn: Mapping[str, int] = field(default_factory=dict)
    only_source: str = ""
    branch: str = ""  # of the bank (`rollout.branch`); "": nothing was sampled ahead
    demonstrations: str = ""  # fingerprint of --rl-sft-demonstrations

    @property
    def begin(self) -> Begin:
        """Where the run began to draw from the sources of `prompts`."""
        return Begin(self.sources_began_at, self.sources_drawn, self.only_source)

    def drawing(self, position: int, begin: Begin) -> TrainerState:
        """Return the state of a run that continues at a position, with sources begun at `begin`."""
        return dataclasses.replace(
            self,
            sampler_position=position,
            sources_began_at=begin.position,
            sources_drawn=begin.counts,
            only_source=begin.only_source,
        )


def save_trainer_state(state: TrainerState, rng: RngState, folder: Path) -> None:
    """Write the state and this rank's generators. Collective."""
    facts = json.dumps(dataclasses.asdict(state)).encode()
    blob = save_safetensors(rng.to_tensors())
    megatron_checkpoint.save_tensors({_FACTS: _row(facts), _RNG: _row(blob)}, folder)


def trainer_writer(state: TrainerState) -> Callable[[Path], None]:
    """Return a writer for `write_checkpoint` of the state, and of the generators at that time."""

    def write(saving: Path) -> None:
        folder = saving / iteration_name(state.step) / TRAINER
        save_trainer_state(state, RngState.capture(), folder)

    return write


def load_trainer_state(
    folder: Path, *, with_rng: bool = True
) -> tuple[TrainerState, RngState | None]:
    """Load the state, and this rank's generators if as many ranks wrote it as read it. Collective.

    Without `with_rng` the generators are not read. Raises RuntimeError for a state of another
    version of mcore_rl, and UsageError for content that is not a state or not generators, the
    latter possibly on one rank alone.
    """
    rows = megatron_checkpoint.load_tensors(folder)
    state = read_facts(_rows_of(rows, _FACTS, folder)[0], folder)
    if not with_rng:
        return state, None
    states = _rows_of(rows, _RNG, folder)
    is_ours = len(states) == dist.get_world_size()
    return state, read_random_states(states[dist.get_rank()], folder) if is_ours else None


def _rows_of(rows: Mapping[str, torch.Tensor], name: str, folder: Path) -> torch.Tensor:
    """Return `[ranks, bytes]` uint8."""
    of_ranks = rows.get(name)
    if (
        of_ranks is None
        or of_ranks.dim() != 2
        or not len(of_ranks)
        or of_ranks.dtype != torch.uint8
    ):
        raise not_held(folder, _STATE, f"it has no rows of bytes called {name}")
    return of_ranks


def read_random_states(row: torch.Tensor, folder: Path) -> RngState:
    """Read the generators of one rank. Raises UsageError for other content."""
    try:
        return RngState.from_tensors(load_safetensors(_content(row)))
    except (SafetensorError, LookupError, ValueError) as error:
        refusal = not_held(folder, "random states of this rank", error)
        refusal.remedy += ", or give --no-load-rng to begin with new ones"
        raise refusal from error


def read_trainer_state(folder: Path) -> TrainerState:
    """Read the state alone. Not collective: no process group is needed.

    Raises as `load_trainer_state`.
    """
    reader = FileSystemReader(folder)
    size: Sequence[int] = getattr(
        reader.read_metadata().state_dict_metadata.get(_FACTS), "size", ()
    )
    if len(size) != 2 or not size[0]:
        raise not_held(folder, _STATE, f"it has no rows of bytes called {_FACTS}")
    if math.prod(size) > _MOST_FACT_BYTES * size[0]:
        raise not_held(folder, _STATE, f"it has {math.prod(size)} bytes")
    rows = {_FACTS: torch.empty(size, dtype=torch.uint8)}
    load_checkpoint(rows, storage_reader=reader, no_dist=True)
    return read_facts(rows[_FACTS][0], folder)


def date_of_checkpoints(folder: Path) -> str | None:
    """Return the chat templates' date in these checkpoints, None if none has it. Not collective.

    All checkpoints of a run have the date of its first start.
    """
    for step in complete_steps(folder):
        with contextlib.suppress(Exception):  # damage is reported where a checkpoint is chosen
            return read_trainer_state(folder / iteration_name(step) / TRAINER).date or None
    return None


def read_facts(row: torch.Tensor, folder: Path) -> TrainerState:
    """Read the state without generators. Raises UsageError for other content, RuntimeError for the
    state of another version."""
    try:
        facts = parse_json(_content(row))
    except InvalidData as error:
        raise not_held(folder, _STATE, str(error)) from error
    if not isinstance(facts, dict):
        raise not_held(folder, _STATE, f"it is a {type(facts).__name__}")
    known = {entry.name for entry in dataclasses.fields(TrainerState)}
    if facts.keys() | _LATER_FACTS != known:
        raise RuntimeError(
            f"{folder} is of another version of mcore_rl: it has {sorted(facts.keys() - known)} "
            f"more and {sorted(known - facts.keys() - _LATER_FACTS)} less than is known here"
        )
    for name, value in facts.items():
        if not _IS_FACT[str(TrainerState.__annotations__[name])](value) or (
            name == "date" and value and not _is_date(value)
        ):
            raise not_held(folder, _STATE, f"{name} is {repr(value)[:60]}")
    return TrainerState(**facts)


def _is_mapping_of_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(finite_number(n) is not None for n in value.values())


_IS_FACT: Mapping[str, Callable[[Any], bool]] = {
    "int": lambda value: integer_within(value, 0, _MOST_COUNTED) is not None,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "Mapping[str, float]": _is_mapping_of_numbers,
    "Mapping[str, int]": lambda value: (
        isinstance(value, dict)
        and all(integer_within(count, 0, _MOST_COUNTED) is not None for count in value.values())
    ),
}


def _is_date(value: str) -> bool:
    with contextlib.suppress(ValueError):
        return Date.fromisoformat(value).isoformat() == value
    return False


def _row(content: bytes) -> torch.Tensor:
    """Return the bytes after their number, padded to the longest rank's. Collective."""
    stored = bytearray(len(content).to_bytes(_LENGTH_BYTES, "little") + content)
    row = torch.frombuffer(stored, dtype=torch.uint8)
    lengths = objects.all_gather(len(row))
    return torch.nn.functional.pad(row, (0, max(lengths) - len(row)))


def _content(row: torch.Tensor) -> bytes:
    stored = row.numpy().astype(np.uint8).tobytes()
    length = int.from_bytes(stored[:_LENGTH_BYTES], "little")
    return stored[_LENGTH_BYTES : _LENGTH_BYTES + length]


def check_mtp(load: Path, step: int, num_layers: int | None) -> None:
    """Raise UsageError if MTP layers are to be trained and the checkpoint of `step` has none."""
    place = load / iteration_name(step)
    if not num_layers or not (place / ".metadata").is_file():
        return
    names = FileSystemReader(place).read_metadata().state_dict_metadata
    if not any("mtp.layers." in name for name in names):
        raise UsageError(
            f"trains multi-token-prediction layers, which the checkpoint of step {step} in --load "
            f"{load} does not have",
            flag=f"--mtp-num-layers {num_layers}",
            remedy="drop it, as when that run began, or begin a new run with it",
        )
