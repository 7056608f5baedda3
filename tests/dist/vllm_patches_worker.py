"""Run vLLM with and without single patches; called by `tests.rank_pool`.

Each case is forked with one process per rank, in which no patch of vLLM is applied yet.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.patches import registry
from mcore_rl.patches.vllm import register, shared_memory_names
from tests.engine_samples import small_engine

TOKENS = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
CASE_SECONDS = 180  # what hangs ends with them


def leave_out(patch: str) -> None:
    """Make this process believe that `patch` is applied already."""
    registry._applied[patch] = "left out by a test"


def log_probs(model_dir: str, load_format: str, **config: Any) -> list[float]:
    """Score TOKENS with weights read from disk: at the start ("auto") or by a reload ("dummy")."""
    from safetensors.torch import load_file

    engine = VLLMEngine(small_engine(model_dir, load_format, **config))
    if load_format == "dummy":
        engine.reload(load_file(Path(model_dir) / "model.safetensors").items())
    (scores,) = engine.prompt_log_probs([TOKENS])
    engine.close()
    return scores.tolist()


def reload_without(patch: str, model_dir: str) -> list[float]:
    leave_out(patch)
    return log_probs(model_dir, "dummy")


def expert_parallel(model_dir: str, *, left_out: str | None = None) -> list[float]:
    if left_out:
        leave_out(left_out)
    return log_probs(model_dir, "auto", tp_size=2, enable_expert_parallel=True)


def shared_memory(
    ident: str,
    *,
    patched: bool,
    leftover: bool = False,
    die: bool = False,
    num_ranks_here: int = 1,
) -> Any:
    """Make the communicator of a group of two ranks, as vLLM's worker does, and use it."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks_here)
    if patched:
        register()
    os.environ["VLLM_DIST_IDENT"] = ident  # the worker sets it: the same in every run
    if leftover and dist.get_rank() == 0:
        (shared_memory_names.SHARED_MEMORY / f"{ident}-tp:0-[0-1]-cpushm_0").touch()
    dist.barrier()
    communicator = CpuCommunicator(
        dist.group.WORLD, torch.device("cpu"), dist.group.WORLD, unique_name="tp:0"
    )
    total = communicator.all_reduce(torch.full((8,), float(dist.get_rank() + 1)))
    dist.barrier()
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"total": total.tolist(), "name": getattr(communicator.dist_module, "group_name", None)}


def remove_leftovers() -> dict[str, bool]:
    """What becomes of segments whose maker is alive, dead, in another namespace, or not ours."""
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    alive = shared_memory_names.run_name()
    head, pid, start, random = alive.rsplit("-", 3)
    os.waitpid(dead, 0)
    names = {
        "alive": alive,
        "dead": f"{head}-{dead}-{start}-{random}",
        "pid_reused": f"{head}-{pid}-{int(start) + 1}-{random}",
        "other_namespace": f"mcore_rl-1-{dead}-{start}-{random}",
        "not_ours": f"test-{random}",
    }
    paths = {case: Path("/dev/shm") / f"{name}-tp_0" for case, name in names.items()}
    for path in paths.values():
        path.touch()
    shared_memory_names.remove_leftovers()
    left = {case: path.exists() for case, path in paths.items()}
    for path in paths.values():
        path.unlink(missing_ok=True)
    return left


def cases(model_dir: str) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Name -> number of ranks, and what each of them does."""
    ident = f"test-{os.getpid()}"
    return {
        "started from disk": (1, lambda: log_probs(model_dir, "auto")),
        "reloaded": (1, lambda: log_probs(model_dir, "dummy")),
        "reloaded without vllm.repack_experts_on_reload": (
            1,
            lambda: reload_without("vllm.repack_experts_on_reload", model_dir),
        ),
        "expert parallel": (2, lambda: expert_parallel(model_dir)),
        "expert parallel unpatched": (
            2,
            lambda: expert_parallel(model_dir, left_out="vllm.expert_parallel_on_cpu"),
        ),
        "beside a leftover": (2, lambda: shared_memory(ident, patched=True, leftover=True)),
        "beside a leftover unpatched": (
            2,
            lambda: shared_memory(f"{ident}-a", patched=False, leftover=True),
        ),
        "more ranks than cores": (
            2,
            lambda: shared_memory(f"{ident}-d", patched=True, num_ranks_here=1_000_000),
        ),
        "killed": (2, lambda: shared_memory(f"{ident}-b", patched=True, die=True)),
        "killed unpatched": (2, lambda: shared_memory(f"{ident}-c", patched=False, die=True)),
        "leftovers": (1, remove_leftovers),
    }


def run_case(num_ranks: int, case: Callable[[], Any]) -> dict[str, Any]:
    """Fork `num_ranks` ranks, wait, and collect results, errors, deaths and segments left."""
    shm = Path("/dev/shm")
    before = {path.name for path in shm.iterdir()}
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, num_ranks, case, Path(folder)) for rank in range(num_ranks)]
        deaths = _wait(dict(zip(pids, range(num_ranks), strict=True)))
        ranks = [
            json.loads(path.read_text()) if path.exists() else {"died_of": deaths.get(rank)}
            for rank in range(num_ranks)
            for path in [Path(folder) / f"{rank}.json"]
        ]
    ours = tuple(f"-{pid}-" for pid in pids), f"test-{os.getpid()}"
    left = sorted(
        path.name
        for path in shm.iterdir()
        if path.name not in before and (path.name.startswith(ours[1]) or _has(path.name, ours[0]))
    )
    for name in left:
        (shm / name).unlink(missing_ok=True)
    return {"ranks": ranks, "left": left}


def _has(name: str, parts: tuple[str, ...]) -> bool:
    return name.startswith("mcore_rl-") and any(part in name for part in parts)


def _fork(rank: int, num_ranks: int, case: Callable[[], Any], folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    try:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        result = {"result": case()}
    except BaseException as error:  # whatever it is, it is what the test asks for
        result = {"error": f"{type(error).__name__}: {error}", "where": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # no exit handlers: the parent's are not this process's


def _wait(ranks: dict[int, int]) -> dict[int, str]:
    """Rank -> the signal it died of. When one dies, the others get a second and are killed."""
    deaths: dict[int, str] = {}
    deadline = time.monotonic() + CASE_SECONDS
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            rank = ranks.pop(pid)
            if os.WIFSIGNALED(status):
                deaths.setdefault(rank, signal.Signals(os.WTERMSIG(status)).name)
                deadline = min(deadline, time.monotonic() + 1)
            continue
        if time.monotonic() > deadline:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.05)
    return deaths


def run(checkpoint: str) -> dict[str, Any]:
    """Each case under its name, and whether this build of vLLM has shared memory."""
    found: dict[str, Any] = {"has shared memory": hasattr(torch.ops._C, "init_shm_manager")}
    return found | {name: run_case(*case) for name, case in cases(checkpoint).items()}
