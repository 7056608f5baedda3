"""Check of a run's checkpoints: the Hugging Face folder, and the folder of `--load`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, check_values
from mcore_rl.megatron.hf_files import check_copies
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.quantization import READ_AS
from mcore_rl.tools.doctor.finding import CHECKPOINT, Finding, Report, green, plural, yellow
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.save_rule import SaveRule
from mcore_rl.trainer.resume.trainer_state import check_mtp

# The part of a checkpoint that is read or hashed; the sizes of all files are compared.
_READ_BYTES = 4 << 30


def num_parameters(checkpoint: HFCheckpoint) -> int:
    """Return the number of elements of all trained tensors."""
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values())


def check_hf_folder(shape: ModelShape, checkpoint: HFCheckpoint) -> Iterator[Finding]:
    """Describe a folder that the start accepts, after `check_values_of`."""
    every, zeros = check_values_of(checkpoint, "--rl-hf-checkpoint")
    quantized = READ_AS.get(shape.quantization or "")
    blocks = f" of {quantized}, read as bfloat16," if quantized else ""
    files = plural(len(set(checkpoint.files.values())), "file")
    read = "all complete" if every == 1 else f"no file missing, one tensor in {every:,} was read"
    yield green(
        CHECKPOINT,
        f"{checkpoint.folder}: {shape.architecture}, {num_parameters(checkpoint) / 1e6:,.1f} "
        f"million parameters, {shown_bytes(checkpoint.stored_bytes)}{blocks} in {files}, {read}",
    )
    for part, held in (
        ("multi-token-prediction layers", checkpoint.mtp),
        ("models besides the text model", checkpoint.others),
    ):
        if held:
            carried = plural(len(held), "tensor")
            what = f"its {part} ({carried}) are not trained, and exported as is"
            yield green(CHECKPOINT, what)
    if zeros:
        more = f" and {plural(len(zeros) - 1, 'other tensor')}" if zeros[1:] else ""
        what = f"{checkpoint.folder} has only zeros in {zeros[0]}{more}"
        yield yellow(CHECKPOINT, what, "copy it again, unless it was made so")


def check_values_of(checkpoint: HFCheckpoint, flag: str) -> tuple[int, list[str]]:
    """Compare tensors that a folder holds twice and read one tensor in N, in seconds; return N and
    the matrices of zeros found. Raises UsageError as the start and the load do."""
    check_copies(checkpoint.folder, checkpoint.repeated, flag=flag)
    every = max(1, math.ceil(checkpoint.stored_bytes / _READ_BYTES))
    return every, check_values(checkpoint, every=every)


def check_interval(save_interval: int | None, num_steps: int) -> Finding:
    """Check that a run that ends early can be resumed; `save_interval` is the given one."""
    if save_interval is None or save_interval < num_steps:
        return green(CHECKPOINT, f"saves {SaveRule(save_interval)}")
    what = f"--save-interval {save_interval} saves only at the end of --rl-num-steps {num_steps}: "
    what += "a run that is killed before cannot be resumed"
    return yellow(CHECKPOINT, what, "drop it, to save by time, or lower it")


def check_other_folders(checkpoints: Mapping[str, HFCheckpoint]) -> None:
    """Check the values in the folders of models other than the actor, by flag."""
    for flag, checkpoint in checkpoints.items():
        if flag != "--rl-hf-checkpoint":
            check_values_of(checkpoint, flag)


def check_load(report: Report, values: Mapping[str, Any], config: RLConfig) -> Path | None:
    """Report what `--load` resumes; return the checkpoint's folder, None for a new run and with
    `--finetune`, which takes only the weights.

    Reads sizes, and hashes of 4 GiB at most. Raises UsageError for what the start refuses.
    """
    load = Path(values["load"]) if values.get("load") else None
    asked, finetune = values.get("ckpt_step"), bool(values.get("finetune"))
    folders.check_load(
        load,
        asked=asked,
        pretrained=values.get("pretrained_checkpoint"),
        may_begin=config.trainer.load_or_start,
        exits=bool(values.get("exit_on_missing_checkpoint")),
    )
    step = None if load is None else _newest_undamaged(report, load, asked, config)
    save = folders.checkpoint_folder(values.get("save"), config.run.directory)
    folders.check_beginning(save, load, step, asked=asked, finetune=finetune)
    if load is None or step is None:
        return None
    check_mtp(load, step, values.get("mtp_num_layers"))
    if finetune:
        what = f"--finetune takes only the weights of step {step} of --load {load}"
        report.findings.append(green(CHECKPOINT, f"{what}: steps and prompts count from 0"))
        return None
    report.findings.append(green(CHECKPOINT, f"--load {load} resumes at step {step}"))
    return load / folders.iteration_name(step)


def _newest_undamaged(
    report: Report, load: Path, asked: int | None, config: RLConfig
) -> int | None:
    """Return the step to resume from; None if there is no checkpoint of mcore_rl."""
    beside = [folders.critic_folder(load)] if config.recipe.needs_critic else []
    places = folders.places_of(load, beside)
    steps = folders.common_steps(places)
    if not steps:
        report.findings.append(_nothing_complete(load, asked))
        return None
    for step in folders.steps_to_try(load, steps, asked):
        damaged = [damage for place in places for damage in _damage(place, step)]
        if not damaged:
            return step
        what = f"the checkpoint of step {step} is bad: {damaged[0]}"
        remedy = "restore that file, or resume at an older step"
        report.findings.append(yellow(CHECKPOINT, what, remedy))
    raise UsageError(
        "has no checkpoint that can be read",
        flag=f"--load {load}",
        remedy="restore a file, or drop --load to begin a new run",
    )


def _nothing_complete(load: Path, asked: int | None) -> Finding:
    tracker = load / folders.TRACKER
    if asked is None and not tracker.is_file():
        return green(
            CHECKPOINT, f"--load {load} has no complete checkpoint: the run begins at step 0"
        )
    step = tracker.read_text(encoding="utf-8").strip() if asked is None else asked
    return green(CHECKPOINT, f"--load {load} is Megatron's own checkpoint of step {step}")


def _damage(place: Path, step: int) -> list[folders.Damage]:
    """Return the damage to a checkpoint, of which a part is hashed that takes seconds."""
    parts = max(1, math.ceil(folders.recorded_bytes(place, step) / _READ_BYTES))
    return folders.damage(place, step, world_size=parts)
