"""A process that has Megatron and vLLM imported and is forked into the ranks of small jobs.

Importing both costs more than most tests, so it is done once: each job runs in children of this
process, with ranks, ports and working files of their own. A fork is safe here because the parent
only imports: it starts no thread, no process group and no engine.

    pool.run("tests.dist.jobs:hand_over", world_size=4, flags=[...])  ->  each rank's result
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
from torch.distributed import TCPStore

from tests import warm_python
from tests.processes import lives

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "MASTER_ADDR": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "WANDB__SERVICE_WAIT": "600",  # seconds; its 30 are too few on a busy machine
}


def run_python(
    *arguments: str | Path,
    python: str | Path = sys.executable,
    cwd: Path = ROOT,
    timeout: float = 500,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python <arguments>` to its end and capture what it prints."""
    return subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@dataclass(frozen=True)
class RankOutcome:
    """How one rank of a job ended."""

    exit_code: int  # negative: the signal that ended it
    result: Any  # what the job's function returned, None if it did not
    output: str  # stdout and stderr


# What jobs and a start of Megatron import: a third of what a rank of a small job costs.
IMPORTED_BY_JOBS = (
    "pytest",
    "tests.dist.ppo_jobs",
    "tests.e2e.jobs",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.models",
    "mcore_rl.megatron.hybrid_model",
    "mcore_rl.launch.launcher",
    "pyarrow.compute",
    "torch.utils.tensorboard",
)
# What an engine without a GPU imports once it starts: a fifth of what a rank of a short run costs.
# Our patches of vLLM, which are applied then, change attributes that are looked up at each use.
IMPORTED_BY_ENGINES = (
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.device_communicators.cpu_communicator",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.attention.backends.mla.cpu_mla",
    "vllm.v1.attention.backends.mla.prefill.cpu_sdpa",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.multiproc_executor",
    "mcore_rl.hybrid_engine.remote.engine",
)


def keep_imports_frozen() -> None:
    """Have garbage collections and ends of children walk through their own objects only.

    vLLM collects a dozen times in the life of an engine, and unfreezes all objects in it: more than
    half of an engine's start and end would be spent on what was imported, which is copied thereby.
    At the end of a process torch takes each of its libraries of operators apart.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def register_kernels_here(platform: Any) -> None:
    """Have engines of children find vLLM's kernels for CPU registered.

    vLLM looks for those that they replace among all objects of all modules, and the count of
    references to each object is written, which copies most of what was imported. Children do it
    beside numba alone, for which vLLM is patched."""
    if (register := getattr(platform, "register_triton_kernel_overrides", None)) is None:
        return  # an older release
    register()

    def register_beside_numba() -> None:
        if "numba" in sys.modules:
            register()

    platform.register_triton_kernel_overrides = staticmethod(register_beside_numba)


def name_callers_without_sources() -> None:
    """Have torchrun's rendezvous ask the interpreter for the names of methods that it reports.

    It has `inspect` look for the source of each frame among all modules, which takes a launcher
    three seconds where thousands are imported."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def keep_versions_of_packages() -> None:
    """Have children know the versions of all packages, which files of tokens depend on."""
    from mcore_rl.data import prompt_cache

    versions = vars(prompt_cache)["_versions"] = functools.cache(prompt_cache._versions)
    for runs_code in (False, True):
        versions(runs_code=runs_code)


def execute(code: str) -> None:
    """Job that executes a script, for which it has Megatron imported and patched."""
    exec(code, {"__name__": "__main__"})


def free_port() -> int:
    """Below the ports that Linux gives to whoever asks for any: of those, one that is free now may
    be another program's by the time that it is used."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class RankPool:
    """Runs one job at a time. The importing process starts with the first.

    `first_on_path` is a folder whose packages are imported in place of the installed ones.
    """

    cpu_seconds: ClassVar[float] = 0.0  # of all ranks so far, of all pools of this process
    programs: ClassVar[list[warm_python.WarmPython]] = []  # of all pools of this process

    def __init__(self, first_on_path: Path | None = None) -> None:
        self._parent: subprocess.Popen[str] | None = None
        self._path = {} if first_on_path is None else {"PYTHONPATH": str(first_on_path)}
        self._folder = Path(tempfile.mkdtemp(prefix="mcore_rl_ranks_"))
        self._num_jobs = 0
        self._python = warm_python.WarmPython(self._folder)
        self.programs.append(self._python)

    @property
    def python(self) -> warm_python.WarmPython:
        """Python programs in forks of this pool's process; see tests/warm_python.py."""
        self._start()
        return self._python

    def process(self) -> psutil.Process:
        """What all ranks and programs are below."""
        return psutil.Process(self._start().pid)

    def run_raw(
        self,
        function: str,
        *,
        world_size: int,
        environment: dict[str, str] | None = None,
        timeout_seconds: float = 450,
        **arguments: Any,
    ) -> list[RankOutcome]:
        """Call `module:function(**arguments)` on `world_size` ranks; results must be JSON, and
        arguments, too, but for paths, which arrive as strings."""
        self._num_jobs += 1
        files = [str(self._folder / f"{self._num_jobs}.{rank}") for rank in range(world_size)]
        # As under torchrun, no rank hosts the store: the last one may still need it.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            "TMPDIR": str(self._folder),
            "PYTHON_EXEC": str(self._python.program),
            **(environment or {}),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        order = {
            "function": function,
            "arguments": arguments,
            "timeout": timeout_seconds,
            "ranks": [
                {
                    "files": file,
                    "environment": {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                }
                for rank, file in enumerate(files)
            ],
        }
        outcomes = []
        for file, exit_code in zip(files, self._ask(order), strict=True):
            result = Path(f"{file}.result")
            outcomes.append(
                RankOutcome(
                    exit_code=exit_code,
                    result=json.loads(result.read_text()) if result.exists() else None,
                    output=Path(f"{file}.output").read_text(errors="replace"),
                )
            )
        return outcomes

    def run(self, function: str, **options: Any) -> list[Any]:
        """`run_raw`, for a job that must succeed: each rank's result."""
        outcomes = self.run_raw(function, **options)
        assert not any(outcome.exit_code for outcome in outcomes), f"{function}:\n" + "\n".join(
            f"rank {rank} ended with {outcome.exit_code}:\n{outcome.output[-4000:]}"
            for rank, outcome in enumerate(outcomes)
        )
        return [outcome.result for outcome in outcomes]

    def _start(self) -> subprocess.Popen[str]:
        """The process that imports, and then reads orders."""
        if self._parent is None:
            listener = self._python.listener
            self._parent = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_pool", str(listener.fileno())],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **self._path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[listener.fileno()],
            )
            listener.close()
        return self._parent

    def _ask(self, order: dict[str, Any]) -> list[int]:
        """Exit code of every rank; negative: the signal that ended it."""
        self._parent = self._start()
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(order, default=os.fspath) + "\n")
        self._parent.stdin.flush()
        line = self._parent.stdout.readline()
        assert line, "the parent of the ranks died"
        answer = json.loads(line)
        RankPool.cpu_seconds += answer["cpu_seconds"]
        return answer["exit_codes"]

    def close(self) -> None:
        before = _children_seconds()
        if self._parent is not None:
            assert self._parent.stdin is not None
            self._parent.stdin.close()
            self._parent.wait(timeout=60)
        # What is waited for now has been counted, except for imports, which are no file's.
        RankPool.cpu_seconds += self._python.cpu_seconds() - (_children_seconds() - before)
        self.programs.remove(self._python)
        self._python.listener.close()
        shutil.rmtree(self._folder)


def _children_seconds() -> float:
    """CPU seconds of the children that this process has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _serve() -> None:
    """The parent of all ranks: import, then fork their processes for every order from stdin."""
    listener, environment = socket.socket(fileno=int(sys.argv[1])), dict(os.environ)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print is not an answer
    from mcore_rl import train  # noqa: F401
    from mcore_rl.flags.parser import add_rl_args
    from mcore_rl.megatron import adapter
    from mcore_rl.patches.vllm import patches

    importlib.import_module("megatron.training.training")
    from vllm import LLM, _custom_ops  # noqa: F401  (the package alone is lazy)
    from vllm.platforms import current_platform

    modules: tuple[str, ...] = IMPORTED_BY_JOBS
    if current_platform.is_cpu():  # others might touch a device, which no fork can use then
        modules += IMPORTED_BY_ENGINES
        patches()  # imports them
    for module in modules:
        with contextlib.suppress(ImportError):  # older releases lack some
            importlib.import_module(module)
    if current_platform.is_cpu():
        register_kernels_here(type(current_platform))
    keep_versions_of_packages()
    name_callers_without_sources()
    adapter.make_parser(add_rl_args)
    keep_imports_frozen()
    server = warm_python.serve(listener, environment, _end_group)
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        for rank in order["ranks"]:
            pid = os.fork()
            if pid == 0:
                _play(order, rank)
            pids.append(pid)
        codes, cpu_seconds = _wait(pids, order["timeout"])
        answers.write(json.dumps({"exit_codes": codes, "cpu_seconds": cpu_seconds}) + "\n")
        answers.flush()
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def _wait(pids: list[int], timeout_seconds: float) -> tuple[list[int], float]:
    """How each process ended, and the CPU seconds of all; those that run at the end of the time are
    killed."""
    deadline = time.monotonic() + timeout_seconds
    codes: dict[int, int] = {}
    cpu_seconds = 0.0
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            late = time.monotonic() > deadline
            if late:
                os.killpg(pid, signal.SIGKILL)
            done, status, usage = os.wait4(pid, 0 if late else os.WNOHANG)
            if done:
                _end_group(pid)
                codes[pid] = -signal.SIGALRM if late else os.waitstatus_to_exitcode(status)
                cpu_seconds += usage.ru_utime + usage.ru_stime
        time.sleep(0.02)
    return [codes[pid] for pid in pids], cpu_seconds


def _end_group(pid: int) -> None:
    """End what a rank has left; multiprocessing's trackers first remove its shared memory, for
    which they need more than a moment where the machine is busy."""
    _wait_for_group(pid, 1.0)
    for other in _living(pid):
        with contextlib.suppress(psutil.Error):
            if not _is_tracker(other):
                other.kill()
    _wait_for_group(pid, 20.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _wait_for_group(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _living(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _living(group: int) -> list[psutil.Process]:
    """Its processes that have not ended."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return []
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and lives(process):
                found.append(process)
    return found


def _is_tracker(process: psutil.Process) -> bool:
    return any("multiprocessing.resource_tracker" in part for part in process.cmdline())


def _play(order: dict[str, Any], rank: dict[str, Any]) -> None:
    """The child: one rank of one job. Never returns."""
    os.setpgid(0, 0)
    file = rank["files"]
    output = os.open(f"{file}.output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(rank["environment"])
    tempfile.tempdir = None  # the parent's; what a rank leaves there goes with the pool
    code = 1
    try:
        module, name = order["function"].split(":")
        result = getattr(importlib.import_module(module), name)(**order["arguments"])
        Path(f"{file}.result").write_text(json.dumps(result))
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # As at the end of any process: Megatron's checkpoint writer, for one, has a process to end.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
