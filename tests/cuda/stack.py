"""The CUDA packages that contract tests run on, on a machine without a GPU.

Two stacks with the same interface. The light one is a folder of CUDA packages, unpacked, that comes
before site-packages of the environment that the tests run in, with its torch for CPU:

    .cuda/light/site   vLLM's CUDA wheel with the libraries of its own operators, Transformer
                       Engine's pure wheel, and what they import

The full one is .venv-cuda, as `MCORE_RL_STACK=cuda scripts/setup_env.sh` builds it: torch for CUDA,
vLLM's libraries, and Transformer Engine with its compiled extension. tests/cuda/standins.py stands
in for what is missing in each of them.

A job is a module of tests/cuda that is run in a process of its own, since it imports another vllm
than the tests do. It installs stand-ins at its head and prints one JSON object as its last line:

    def test_x(cuda_stack: Stack) -> None:
        found = cuda_stack.run("models_job", "deepseek_v3", timeout=300)
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cuda"
# Set to "full" by scripts/test_cuda_stack.sh.
TIER = "MCORE_RL_CUDA_STACK"
# What the light stack takes of the pins: what torch for CPU can import, and the CPU stack lacks.
_LIGHT = """vllm transformer-engine onnx onnx-ir onnxscript ml-dtypes nvdlfw-inspect lazy-importer
importlib-metadata zipp flashinfer-python nvidia-ml-py click einops tabulate
nvidia-cuda-runtime""".split()
# vLLM's other libraries (FlashAttention: 450 MB), sources that are compiled on a GPU machine, and
# headers but for the driver's.
_LEFT_OUT = re.compile(
    r"vllm/(?!(_C_stable_libtorch|_moe_C_stable_libtorch|cumem_allocator)\.).*\.so$"
    r"|flashinfer/data/|nvidia/cu13/include/(?!cuda\.h$)"
)
# What vLLM's libraries, of torch's stable ABI, call in the part of torch that is for CUDA.
_TORCH_FOR_CUDA = """aoti_torch_get_current_cuda_stream torch_get_current_cuda_blas_handle
torch_c10_cuda_check_msg torch_c10_cuda_free_error_msg cublasHgemm""".split()
_REQUIREMENTS = ("requirements-cuda.txt", "requirements-te.txt")


@dataclass(frozen=True)
class Stack:
    """Packages for CUDA: an interpreter, the head of its path, and its environment."""

    name: str  # "light" or "full"
    python: Path
    site: Path  # the folder that vllm and transformer_engine are in
    environment: Mapping[str, str]

    def run(self, module: str, *args: str, timeout: float = 300, **environment: str) -> Any:
        """What the job `tests.cuda.<module>` says: the JSON object of its last line.

        Ends the job and all that it started after `timeout` seconds. Raises RuntimeError with the
        end of its output if it fails.
        """
        command = [str(self.python), "-m", f"tests.cuda.{module}", *args]
        job = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **_QUIET, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            stdout, stderr = job.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(job.pid, signal.SIGKILL)
            stdout, stderr = job.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            stderr += f"\nended after {timeout} s"
        if job.returncode:
            lines = (stdout + stderr).splitlines()
            # At its end Triton's library tells which of its objects are left.
            said = "\n".join([line for line in lines if " - leaked " not in line][-60:])
            raise RuntimeError(f"{' '.join(command)} on the {self.name} stack:\n{said}")
        return json.loads(stdout.splitlines()[-1])


_QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def chosen() -> Stack:
    """The stack that the tests run on: the light one by default."""
    return full() if os.environ.get(TIER) == "full" else light()


def pins() -> dict[str, str]:
    """Version by package (lower case, "-" for "_") of the CUDA stack and Transformer Engine."""
    found = {}
    for file in _REQUIREMENTS:
        for line in (ROOT / "scripts" / file).read_text().splitlines():
            if line and not line.startswith("#"):
                pin = Requirement(line)
                (version,) = pin.specifier
                found[canonical(pin.name)] = version.version
    return found


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def light() -> Stack:
    """The light stack; made anew if the pins changed, by one process at a time."""
    site = FOLDER / "light" / "site"
    wanted = {name: version for name, version in pins().items() if name in _LIGHT}
    stamp = site.with_name("stamp.json")
    site.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(site.with_name("lock")):
        if not (stamp.is_file() and json.loads(stamp.read_text()) == wanted):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(site, ignore_errors=True)
            for name, version in wanted.items():
                unpack(name, version, site)
            stamp.write_text(json.dumps(wanted))
    folders = [] if _has_driver() else [driver_stub(site)]
    if not _has_torch_for_cuda():
        folders += [torch_stub(), site / "nvidia" / "cu13" / "lib"]
    environment = {"PYTHONPATH": str(site), **_library_path(folders)}
    return Stack("light", Path(sys.executable), site, environment)


def unpack(package: str, version: str, folder: Path) -> None:
    """Put the wheel's files into `folder`, but for what no test can use."""
    # To pip a version is also that version built for CPU, where its configuration names some.
    wanted = f"{package}=={version},!={version}+cpu"
    command = [sys.executable, "-m", "pip", "-qq", "download", "--no-deps", wanted]
    with tempfile.TemporaryDirectory(dir=folder.parent) as downloads:
        subprocess.run(command, cwd=downloads, check=True)
        (wheel,) = Path(downloads).iterdir()
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if not _LEFT_OUT.match(name)]
            archive.extractall(folder, names)


def full() -> Stack:
    """The CUDA stack as a GPU machine has it; without a driver, with one by which it can be loaded.

    Built by scripts/test_cuda_stack.sh: in .venv-cuda, or in .venv on a machine with a GPU.
    """
    folder = next((ROOT / name for name in (".venv-cuda", ".venv") if (ROOT / name).is_dir()), ROOT)
    (site,) = (folder / "lib").glob("python3.*/site-packages")
    if not (site / "nvidia" / "cu13").is_dir():
        raise RuntimeError(f"{folder} has no CUDA: run scripts/test_cuda_stack.sh")
    driver = [] if _has_driver() else [driver_stub(site)]
    return Stack("full", folder / "bin" / "python", site, _library_path(driver))


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _has_torch_for_cuda() -> bool:
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists()


def _library_path(folders: Sequence[Path]) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": ":".join(map(str, folders))} if folders else {}


def driver_stub(site: Path) -> Path:
    """A folder with a libcuda.so.1 whose functions all report that there is no device.

    Libraries for CUDA are linked with the driver's, which only machines with a GPU have. It has the
    names that cuda.h of the installed CUDA has, and is never put into the environment.
    """
    header = (site / "nvidia" / "cu13" / "include" / "cuda.h").read_text()
    return _stub("driver", ["libcuda.so.1"], sorted(set(re.findall(r"\bcu[A-Z]\w*", header))))


def torch_stub() -> Path:
    """The same for libraries that only torch for CUDA has, or brings: by it vLLM's libraries load
    beside torch for CPU, and register the schemas of their operators."""
    return _stub("torch", ["libtorch_cuda.so", "libc10_cuda.so", "libnvrtc.so.13"], _TORCH_FOR_CUDA)


def _stub(name: str, libraries: Sequence[str], functions: Sequence[str]) -> Path:
    """A folder with libraries of functions that all return CUDA_ERROR_NO_DEVICE."""
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    no_device = 100
    source = "".join(f"int {function}(void) {{ return {no_device}; }}\n" for function in functions)
    stub = folder / "stub.c"
    with FileLock(folder / "lock"):
        if not stub.is_file() or stub.read_text() != source:
            stub.unlink(missing_ok=True)
            for library in libraries:
                command = f"gcc -shared -fPIC -Wl,-soname,{library} -o {library} -x c -"
                subprocess.run(command.split(), cwd=folder, input=source, text=True, check=True)
            stub.write_text(source)
    return folder


if __name__ == "__main__":
    print(chosen().site)
