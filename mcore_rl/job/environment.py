"""The variables that a launcher sets for a rank, and the store at which the ranks meet."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import sysconfig
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.common.agreement import leave_with
from mcore_rl.common.errors import UsageError
from mcore_rl.patches.torch.loopback_stores import stay_on_loopback

if TYPE_CHECKING:
    from torch.distributed import Store

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MAX_RANKS = (1 << 31) - 1
# Variables with their smallest and largest values.
_NUMBERS = {
    "RANK": (0, _MAX_RANKS - 1),
    "WORLD_SIZE": (1, _MAX_RANKS),
    "LOCAL_RANK": (0, _MAX_RANKS - 1),
    "LOCAL_WORLD_SIZE": (1, _MAX_RANKS),
    "GROUP_WORLD_SIZE": (1, _MAX_RANKS),
    "MASTER_PORT": (0, 65535),
}
_SHOW_ALL = (
    "make all of them visible to each process: no CUDA_VISIBLE_DEVICES with fewer, and srun "
    "--gpus-per-node in place of --gpus-per-task or --gpu-bind"
)
_REMEDY = "start with mcore_rl.launch or torchrun, or set what they set"
# Variables with the number of tasks that a command was started as, and the program that sets them.
_TASK_COUNTS = {
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
}


def open_store() -> Store | None:
    """Return this job's rendezvous store, or None in a single process without a launcher.

    Ends this process with exit code 2 for an incomplete or invalid environment, for more tasks than
    belong to one run, and if the store cannot be reached. Blank variables are unset.
    """
    for name in (*_NUMBERS, "MASTER_ADDR"):
        if not os.environ.get(name, name).strip():
            del os.environ[name]  # torch and Megatron would parse it as a number
    present = [name for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    try:
        if not present or (present == ["WORLD_SIZE"] and _num_ranks() == "1"):
            # MASTER_PORT is not read here; a Kubernetes service may have set it.
            _check_numbers("LOCAL_RANK", "LOCAL_WORLD_SIZE")
            check_num_tasks(1)
            return None
        # Without it, all ranks of a machine would take its first device.
        needed = (*_NEEDED, "LOCAL_RANK") if _num_ranks() != "1" else _NEEDED
        if missing := [name for name in needed if not os.environ.get(name)]:
            found = f"the environment has {' and '.join(present)} but lacks {' and '.join(missing)}"
            raise UsageError(found, remedy=_REMEDY)
        _check_numbers(*_NUMBERS)
        _check_place()
        # Under torchrun the tasks are its agents; otherwise they are the ranks.
        check_num_tasks(int(os.environ.get("GROUP_WORLD_SIZE") or os.environ["WORLD_SIZE"]))
        stay_on_loopback(os.environ["MASTER_ADDR"])
        return _store()
    except UsageError as error:
        leave_with(error)


def use_own_toolkit() -> None:
    """Name the CUDA compiler and the ninja of this Python's packages to FlashInfer, which compiles
    kernels while an engine starts, and which vLLM leaves out without them. What the environment
    names is left as it is."""
    own = Path(sysconfig.get_path("purelib"), "nvidia").glob("cu*/bin/nvcc")
    if not {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys() and (compiler := max(own, default=None)):
        os.environ["CUDA_HOME"] = str(compiler.parent.parent)
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts):
        os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH"), scripts]))


def bound_product_caches() -> None:
    """Bound the caches of oneDNN, of torch's and of vLLM's own. Each keeps 1,024 products with code
    for their shapes, which differ from step to step: a rank of the tiny model grew from 0.95 to
    1.67 GB in 28 steps. With 128 it reaches 1.09 GB, and its steps take no longer."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def join_store() -> Store:
    """Return the job's store in a process that a rank has started, with that rank's environment."""
    stay_on_loopback(os.environ["MASTER_ADDR"])
    return _store()


def _num_ranks() -> str:
    return os.environ.get("WORLD_SIZE", "").strip()


def _store() -> Store:
    from torch.distributed import DistError  # imported late: the errors above do not need torch
    from torch.distributed.rendezvous import rendezvous

    try:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(minutes=10))))[0]
    except DistError as error:
        raise UsageError(
            f"is not where the ranks of a job can meet ({str(error).splitlines()[0]})",
            flag=f"MASTER_ADDR {os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']},",
            remedy="give the address of rank 0's machine and a free port there, and start all "
            "WORLD_SIZE ranks",
        ) from error
    return store


def _check_numbers(*names: str) -> None:
    """Raise UsageError for a variable of `names` that is not a number in its range."""
    for name in names:
        least, most = _NUMBERS[name]
        text = os.environ.get(name, str(least)).strip()
        if not (text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
            found = f"is not a number from {least} to {most}"
            raise UsageError(found, flag=f"{name} '{text[:20]}'", remedy=_REMEDY)


def _check_place() -> None:
    """Raise UsageError for a rank outside the world or an invalid MASTER_ADDR."""
    rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if int(rank) >= int(world_size):
        found = f"is not below WORLD_SIZE {world_size}: ranks count from 0"
        raise UsageError(found, flag=f"RANK {rank}", remedy=_REMEDY)
    address = os.environ["MASTER_ADDR"]
    try:
        is_address = bool(ipaddress.ip_address(address))
    except ValueError:
        is_address = bool(re.fullmatch(r"[\w.-]+", address))
    if not is_address:  # torch would look it up for ten minutes
        raise UsageError(
            "is not a host name or an IP address",
            flag=f"MASTER_ADDR '{address}'",
            remedy="drop brackets, blanks and the port, which is MASTER_PORT",
        )


def check_devices(
    visible: int, *, local_rank: int, ranks_per_node: int, rollout_tp_size: int
) -> None:
    """Raise UsageError if a rank that sees that many GPUs lacks its own, or one that vLLM would
    look for. vLLM takes the GPU of another rank of a TP group for a visible one."""
    if local_rank >= visible:
        raise UsageError(
            f"numbers a GPU from 0, and this process sees {visible}",
            flag=f"LOCAL_RANK {local_rank}",
            remedy=f"{_SHOW_ALL}, or start fewer processes on a machine",
        )
    if rollout_tp_size > 1 and visible < ranks_per_node:
        raise UsageError(
            f"needs the GPUs of all {ranks_per_node} ranks of a machine visible to each of them, "
            f"and this process sees {visible}",
            flag=f"--rl-rollout-tp-size {rollout_tp_size}",
            remedy=f"{_SHOW_ALL}, or give the ranks of a machine by --rl-ranks-per-node",
        )


def check_num_tasks(most: int) -> None:
    """Raise UsageError if srun, mpirun or the like starts this command as more than `most` tasks,
    each of which would be a separate run."""
    for name, program in _TASK_COUNTS.items():
        count = os.environ.get(name, "").strip()
        if count.isdecimal() and int(count) > most:
            raise UsageError(
                f"says that {program} starts this command as {count} tasks, but only {most} "
                f"{'belongs' if most == 1 else 'belong'} to one run",
                flag=f"{name} {count}",
                remedy="start one `python -m mcore_rl.launch --nnodes NODES --nproc-per-node "
                "DEVICES ...` a node (srun --ntasks-per-node=1), set RANK, WORLD_SIZE, LOCAL_RANK, "
                f"MASTER_ADDR and MASTER_PORT for each task, or unset {name} if these are to be "
                "independent runs",
            )
