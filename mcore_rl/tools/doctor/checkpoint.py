"""Check of a run's checkpoints: the Hugging Face folder, and the folder of `--load`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.common.errors import UsageError
from mcore_rl.config import RLConfig
from mcore_rl.megatron.hf_checkpoint import HFCheckpoint, check_values
from mcore_rl.megatron.hf_files import check_copies
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.quantization import FP8, MXFP4
from mcore_rl.tools.doctor.finding import CHECKPOINT, Finding, green, plural, red, refusal, yellow
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.trainer_state import check_mtp

# The part of a checkpoint that is read or hashed; the sizes of all files are compared.
_READ_BYTES = 4 << 30


def num_parameters(checkpoint: HFCheckpoint) -> int:
    """Return the number of elements of all trained tensors."""
    return sum(math.prod(info.shape) for info in checkpoint.tensors.values())


def check_hf_folder(shape: ModelShape, checkpoint: HFCheckpoint) -> list[Finding]:
    """Describe a folder that the start accepts, after `check_values_of`."""
    every, zeros = check_values_of(checkpoint, "--rl-hf-checkpoint")
    quantized = {FP8: "FP8 blocks", MXFP4: "MXFP4"}.get(shape.quantization or "")
    blocks = f" of {quantized}, read as bfloat16," if quantized else ""
    files = plural(len(set(checkpoint.files.values())), "file")
    what = (
        f"{checkpoint.folder}: {shape.architecture}, {num_parameters(checkpoint) / 1e6:,.1f} "
        f"million parameters, {shown_bytes(checkpoint.stored_bytes)}{blocks} in {files}, "
        + ("all complete" if every == 1 else f"all there, and one tensor in {every:,} was read")
    )
    findings = [green(CHECKPOINT, what)]
    if checkpoint.mtp:
        carried = plural(len(checkpoint.mtp), "tensor")
        what = f"its multi-token-prediction layers ({carried}) are not trained, and exported as is"
        findings.append(green(CHECKPOINT, what))
    if zeros:
        more = f" and {plural(len(zeros) - 1, 'other tensor')}" if zeros[1:] else ""
        what = f"{checkpoint.folder} holds nothing but zeros in {zeros[0]}{more}"
        findings.append(yellow(CHECKPOINT, what, "copy it again, unless it was made so"))
    return findings


def check_values_of(checkpoint: HFCheckpoint, flag: str) -> tuple[int, list[str]]:
    """Compare tensors that a folder holds twice and read one tensor in N, in seconds; return N and
    the matrices of zeros found. Raises UsageError as the start and the load do."""
    check_copies(checkpoint.folder, checkpoint.repeated, flag=flag)
    every = max(1, math.ceil(checkpoint.stored_bytes / _READ_BYTES))
    return every, check_values(checkpoint, every=every)


def check_load(values: Mapping[str, Any], config: RLConfig) -> tuple[list[Finding], Path | None]:
    """Return findings about `--load`, and the folder of the checkpoint to resume from, if any; None
    with `--finetune`, which takes only the weights. Reads sizes, and hashes of 4 GiB at most."""
    findings, resumed = _check_load(values, config)
    save = folders.checkpoint_folder(values.get("save"), config.run.directory)
    try:
        folders.check_beginning(
            save,
            Path(values["load"]) if values.get("load") else None,
            None if resumed is None else folders.step_of(resumed),
            asked=values.get("ckpt_step"),
            finetune=bool(values.get("finetune")),
        )
    except UsageError as error:
        findings.append(refusal(CHECKPOINT, error))
    return findings, resumed


def _check_load(values: Mapping[str, Any], config: RLConfig) -> tuple[list[Finding], Path | None]:
    load = Path(values["load"]) if values.get("load") else None
    try:
        folders.check_load(
            load,
            asked=values.get("ckpt_step"),
            pretrained=values.get("pretrained_checkpoint"),
            may_begin=config.trainer.load_or_start,
            exits=bool(values.get("exit_on_missing_checkpoint")),
        )
    except UsageError as error:
        return [refusal(CHECKPOINT, error)], None
    if load is None:
        return [], None
    critic = folders.critic_folder(load)
    beside = [critic] if config.recipe.needs_critic and critic.is_dir() else []
    places = [load, *beside]
    steps = [
        step
        for step in folders.complete_steps(load)
        if all(step in folders.complete_steps(place) for place in beside)
    ]
    asked = values.get("ckpt_step")
    if asked is not None and steps:
        if asked not in steps:
            known = ", ".join(map(str, sorted(steps)))
            what = f"--ckpt-step {asked} is not complete in {load}, which has {known}"
            remedy = "choose one of them, or drop the flag for the newest"
            return [red(CHECKPOINT, what, remedy)], None
        steps = [asked]
    if not steps:
        return [_nothing_complete(load, asked)], None
    findings, step = _newest_undamaged(places, steps, load)
    if step is None:
        return findings, None
    try:
        check_mtp(load, step, values.get("mtp_num_layers"))
    except UsageError as error:
        return [*findings, refusal(CHECKPOINT, error)], None
    if values.get("finetune"):
        what = f"--finetune takes only the weights of step {step} of --load {load}"
        findings.append(green(CHECKPOINT, f"{what}: steps and prompts count from 0"))
        return findings, None
    findings.append(green(CHECKPOINT, f"--load {load} goes on from step {step}"))
    return findings, load / folders.iteration_name(step)


def _nothing_complete(load: Path, asked: int | None) -> Finding:
    if asked is not None or (load / folders.TRACKER).is_file():
        step = asked if asked is not None else _tracked(load)
        what = f"--load {load} is a checkpoint of Megatron's own, of step {step}"
        return green(CHECKPOINT, what)
    return green(CHECKPOINT, f"--load {load} has no complete checkpoint: the run begins")


def _tracked(load: Path) -> str:
    return (load / folders.TRACKER).read_text(encoding="utf-8").strip()


def _newest_undamaged(
    places: Sequence[Path], steps: Sequence[int], load: Path
) -> tuple[list[Finding], int | None]:
    """Return findings about damaged checkpoints, and the newest step that is not damaged."""
    findings: list[Finding] = []
    for step in steps:
        damaged = [
            damage
            for place in places
            for damage in folders.damage(place, step, world_size=_parts(place, step))
        ]
        if not damaged:
            return findings, step
        what = f"the checkpoint of step {step} is bad: {damaged[0]}"
        findings.append(yellow(CHECKPOINT, what, "restore that file, or go on from an older step"))
    what = f"--load {load} has no checkpoint that can be read"
    findings.append(red(CHECKPOINT, what, "restore a file, or drop --load to begin again"))
    return findings, None


def _parts(place: Path, step: int) -> int:
    """Return the number of parts of a checkpoint so that reading one part takes seconds."""
    return max(1, math.ceil(folders.recorded_bytes(place, step) / _READ_BYTES))
