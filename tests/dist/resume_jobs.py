"""What a rank does in `test_resume_choice.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.common.errors import UsageError
from mcore_rl.common.run_output import setup_logging
from mcore_rl.config import RLConfig
from mcore_rl.megatron.rng import RngState
from mcore_rl.trainer.resume import folders
from mcore_rl.trainer.resume.checkpoint_writer import write_checkpoint
from mcore_rl.trainer.resume.point import choose, find_resume_point
from mcore_rl.trainer.resume.trainer_state import (
    TRAINER,
    TrainerState,
    load_trainer_state,
    trainer_writer,
)


def choose_step(folder: str, beside: list[str], step: int | None) -> dict[str, Any]:
    """The step that was chosen, or what was said to the user."""
    setup_logging()
    dist.init_process_group("gloo")
    try:
        return {"step": choose(Path(folder), beside=[Path(b) for b in beside], step=step)}
    except UsageError as error:
        return {"error": str(error)}
    finally:
        dist.destroy_process_group()


def find(load: str, run_dir: str, may_begin: bool) -> bool:
    """Whether there is a point to continue from; without prompts, as nothing is read of them."""
    setup_logging()
    dist.init_process_group("gloo")
    args = argparse.Namespace(
        load=load,
        save=None,
        ckpt_step=None,
        pretrained_checkpoint=None,
        exit_on_missing_checkpoint=False,
        finetune=False,
    )
    unread: Any = None
    spec: Any = SimpleNamespace(config=RLConfig.of(run_dir=run_dir, load_or_start=may_begin))
    point = find_resume_point(spec, args, unread, None)
    dist.destroy_process_group()
    return point is not None


def _seed_all() -> None:
    """Other states on every rank."""
    rank = dist.get_rank()
    random.seed(rank)
    random.gauss(0, 1)  # its state then has a second number to give
    np.random.seed(rank + 10)
    torch.manual_seed(rank + 20)


def _draw() -> list[float]:
    return [
        *(random.random(), random.gauss(0, 1), random.gauss(0, 1)),
        *np.random.standard_normal(3).tolist(),
        *torch.rand(3).tolist(),
    ]


def write_state(folder: str, step: int) -> list[float]:
    """Saves a state with this rank's generators; what they give afterwards."""
    dist.init_process_group("gloo")
    _seed_all()
    state = TrainerState(
        step, "TP1", 7, 123, "sha", "", {"coef": 0.1 + 0.2}, 3, entropy_controller={"coef": 0.01}
    )

    def write_something(saving: Path) -> None:
        if dist.get_rank() == 0:
            (saving / folders.iteration_name(step)).mkdir()

    write_checkpoint(Path(folder), step, [write_something, trainer_writer(state)])
    drawn = _draw()
    dist.destroy_process_group()
    return drawn


def read_state(folder: str, step: int) -> dict[str, Any]:
    """What `write_state` has saved."""
    dist.init_process_group("gloo")
    state, rng = load_trainer_state(Path(folder) / folders.iteration_name(step) / TRAINER)
    if rng is not None:
        rng.restore()
    found = {
        "weight_version": state.weight_version,
        "position": state.sampler_position,
        "coef": state.kl_controller["coef"],
        "entropy_coef": state.entropy_controller["coef"],
        "reference_version": state.reference_version,
        "drawn": None if rng is None else _draw(),
    }
    dist.destroy_process_group()
    return found


def write_and_fail(folder: str, step: int, failing_rank: int) -> str:
    """A file that one rank is to read is gone; what every rank raises."""
    dist.init_process_group("gloo")
    sealed = folders.sealed

    def failing(*args: Any) -> dict[str, str]:
        if dist.get_rank() == failing_rank:
            raise OSError(28, "No space left on device")
        return sealed(*args)

    folders.sealed = failing

    def write_something(saving: Path) -> None:
        if dist.get_rank() == 0:
            (saving / folders.iteration_name(step)).mkdir()
            (saving / folders.iteration_name(step) / "file").write_text("x")

    with pytest.raises(RuntimeError) as raised:
        write_checkpoint(Path(folder), step, [write_something])
    dist.destroy_process_group()
    return str(raised.value)


def state_of_generators() -> bool:
    """Whether a snapshot survives being tensors."""
    dist.init_process_group("gloo")
    _seed_all()
    rng = RngState.capture()
    first = _draw()
    RngState.from_tensors(rng.to_tensors()).restore()
    dist.destroy_process_group()
    return _draw() == first
