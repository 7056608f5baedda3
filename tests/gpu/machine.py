"""What these tests run on, and the processes in which ranks play their jobs.

They wait for a GPU. Those that are `anywhere` also run without one where MCORE_RL_GPU_TESTS=cpu
asks for it, as `scripts/gpu_trial.sh` does: the same calls, without what only a device can show,
and without the cases that are `not_on_cpu`.

    python -m torch.distributed.run ... tests/gpu/machine.py FOLDER     plays what is ordered there
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.layouts import job_flags
from tests.rank_pool import ROOT

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
ON_CPU = os.environ.get("MCORE_RL_GPU_TESTS") == "cpu"

anywhere = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAS_CUDA and not ON_CPU,
        reason="needs a CUDA device, or MCORE_RL_GPU_TESTS=cpu to do the same without one",
    ),
]
not_on_cpu = pytest.mark.skipif(
    not HAS_CUDA, reason="needs a CUDA device: on CPUs tests/dist shows it, and one case the calls"
)
with_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="needs vLLM, which is not installed"
)


def bf16_flags(checkpoint: Path, *more: str) -> list[str]:
    """Flags of a small job on one device."""
    return job_flags(checkpoint, "tp1_pp1_ep1", "--lr", "1e-2", *more, precision="bf16")


def play(
    function: str,
    folder: Path,
    *,
    num_ranks: int = 1,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Call `module:function(**arguments)` on ranks with a device each; return their results."""
    variables = {**os.environ, **(environment or {}), **_ordered(folder, function, arguments)}
    if HAS_CUDA:
        variables.pop("TORCHDYNAMO_DISABLE", None)  # vLLM compiles what it captures
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), str(Path(__file__)), str(folder)),
        ],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in range(num_ranks)]


def play_apart(function: str, folder: Path, *, num_ranks: int, **arguments: Any) -> list[Any]:
    """`play` on ranks without a launcher, of which some may end; their results are None. Ranks
    without a GPU of their own share the first; to NCCL each is then a machine."""
    ordered = _ordered(folder, function, arguments)
    shares = HAS_CUDA and torch.cuda.device_count() < num_ranks
    processes = []
    for rank in range(num_ranks):
        variables = {**ordered, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        if shares:
            variables |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank-{rank}"}
            variables |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(folder)],
                cwd=ROOT,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=900)[0] for process in processes]
    files = [folder / f"result.{rank}" for rank in range(num_ranks)]
    print(*(text[-3000:] for text in said), sep="\n")
    return [json.loads(file.read_text()) if file.is_file() else None for file in files]


def _ordered(folder: Path, function: str, arguments: dict[str, Any]) -> dict[str, str]:
    """Write the order that ranks play; return the variables that they need."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "order").write_text(json.dumps([function, arguments], default=os.fspath))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _play(folder: Path) -> None:
    function, arguments = json.loads((folder / "order").read_text())
    if importlib.util.find_spec("vllm") is None:  # Megatron's side can be tried even so
        from mcore_rl.job import preflight

        preflight.check_versions = lambda: None
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(**arguments)
    (folder / f"result.{os.environ['RANK']}").write_text(json.dumps(result))


if __name__ == "__main__":
    _play(Path(sys.argv[1]))
