"""What the ranks of test_bad_input*.py do; `tests.rank_pool` calls these by name."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import io
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from mcore_rl.common.agreement import agreed
from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import WITHOUT_CUDA
from mcore_rl.flags.parser import add_rl_args
from mcore_rl.job.environment import open_store
from mcore_rl.job.facts import Source
from mcore_rl.job.resolver import resolve
from mcore_rl.job.start import hold_folders, job_from_args
from mcore_rl.megatron.world import parsed_args
from tests.bad_input_cases import ParameterCounter, check


def start(
    entry: str,
    tokens: list[str],
    report: str,
    installed: dict[str, str],
    folders: list[str],
    unset: list[str],
) -> None:
    """Do what `python -m <entry> <tokens>` does; this ends the process.

    `<report>.<rank>.stderr` is what it printed, `<report>.<rank>.json` how far it came. `installed`
    has this process believe in other versions of packages; `folders` are the ranks' working
    directories, as on hosts with disks of their own; `unset` variables are as under a launcher that
    does not set them.
    """
    rank = os.environ["RANK"]
    os.dup2(os.open(f"{report}.{rank}.stderr", os.O_CREAT | os.O_WRONLY), 2)
    report_at_exit(Path(f"{report}.{rank}.json"))
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: installed.get(name) or version(name)
    if folders:
        os.chdir(folders[int(rank)])
    for name in unset:
        del os.environ[name]
    sys.exit(importlib.import_module(entry).main(tokens))


def report_at_exit(path: Path) -> None:
    """Have this process write whether torch.distributed runs and how many parameters were made."""
    parameters, leave = ParameterCounter(), os._exit

    def write_and_leave(code: int) -> NoReturn:
        facts = {"is_initialized": dist.is_initialized(), "num_parameters": parameters.count}
        path.write_text(json.dumps(facts))
        leave(code)

    os._exit = write_and_leave


def count_parameters_of_a_layer() -> int:
    parameters = ParameterCounter()
    torch.nn.Linear(2, 2)
    return parameters.count


def check_layout(tokens: list[str]) -> str:
    """All the checks of mcore_rl.train and nothing else; returns the layout they found."""
    return check(tokens).train_layout.describe()


def run_directory(tokens: list[str], folder: str) -> str:
    """The directory that this rank has for a run that is given none."""
    os.chdir(folder)
    checked = resolve(Source(tokens=tokens, platform=WITHOUT_CUDA))
    return str(hold_folders(checked, open_store()).config.run.directory)


def fork(tokens: list[str], rates: list[str]) -> None:
    """A fork that has parsed its arguments itself, each rank with a learning rate of its own."""
    rank = int(os.environ["RANK"])
    derived = resolve(Source(tokens=tokens, platform=WITHOUT_CUDA)).tokens
    like = argparse.Namespace(rank=rank, local_rank=rank, async_save=False, async_strategy="mcore")
    args = parsed_args([*derived, "--lr", rates[rank]], add_rl_args, like, log=io.StringIO())
    dist.init_process_group("gloo")
    job_from_args(args)


def agree(failing: list[int], is_bug: bool) -> str:
    """Agree on a check that raises on the ranks `failing`."""
    rank = int(os.environ["RANK"])

    def content() -> str:
        if rank in failing:
            raise (KeyError if is_bug else UsageError)(f"rank {rank} is not\n  content")
        return f"rank {rank} is content"

    return agreed(content, open_store(), stage="test")
