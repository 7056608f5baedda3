"""Whether a checkpoint has the adapters that a run with LoRA resumes, or none for a run without."""

from __future__ import annotations

from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from mcore_rl.common.errors import UsageError
from mcore_rl.model.lora import Lora
from mcore_rl.trainer.resume.folders import iteration_name
from mcore_rl.trainer.resume.trainer_state import TrainerState

_PREFIX = "lora."  # of the tensors that `megatron.lora` saves


def check_stored_adapters(load: Path, step: int, lora: Lora | None) -> None:
    """Raise UsageError unless the checkpoint of `step` has the adapters of `lora`, and no others.

    It reads names and shapes only, and is not collective.
    """
    place = load / iteration_name(step)
    if not (place / ".metadata").is_file():
        return
    metadata = FileSystemReader(place).read_metadata().state_dict_metadata
    stored = {
        name: tuple(getattr(entry, "size", ()))
        for name, entry in metadata.items()
        if name.startswith(_PREFIX)
    }
    expected: dict[str, tuple[int, ...]] = {}
    if lora is not None:
        for layer, (rows, columns) in lora.modules.items():
            expected[f"{_PREFIX}{layer}.a"] = (lora.rank, columns)
            expected[f"{_PREFIX}{layer}.b"] = (rows, lora.rank)
    if stored == expected:
        return
    ranks = sorted({shape[0] for name, shape in stored.items() if name.endswith(".a")})
    layers = sorted({name.split(".")[-2] for name in stored})
    has = f"has adapters of rank {', '.join(map(str, ranks))} for {', '.join(layers)}"
    given = "this run has none" if lora is None else f"this run has {lora.describe()}"
    raise UsageError(
        f": the checkpoint of step {step} {has if stored else 'has no adapters'}, and {given}",
        flag=f"--load {load}",
        remedy="give --rl-lora-rank and --rl-lora-targets as that run did"
        if stored
        else "drop --rl-lora-rank, or start from --rl-hf-checkpoint without --load",
    )


def check_same_adapters(
    state: TrainerState, lora: Lora, now: str, *, load: Path, base: Path
) -> None:
    """Raise UsageError unless the run continues with its adapters' alpha and its base.

    `now` is the fingerprint of `base`, which holds the weights without adapters.
    """
    if state.lora != lora.describe():
        raise UsageError(
            f": its adapters have {state.lora}, and this run's {lora.describe()}",
            flag=f"--load {load}",
            remedy="give --rl-lora-rank, --rl-lora-alpha and --rl-lora-targets as that run did",
        )
    if state.began_with != now:
        raise UsageError(
            f"has other weights than those that the adapters of --load {load} were trained on",
            flag=f"--rl-hf-checkpoint {base}",
            remedy="bring these back",
        )
