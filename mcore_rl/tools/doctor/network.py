"""Checks of the variables that NCCL, gloo, CUDA and libraries read, against this machine's
devices."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.allocator import VARIABLES, check_allocator
from mcore_rl.common.machine import available_cores, threads_per_rank
from mcore_rl.tools.doctor.finding import Finding, green, plural, red, yellow

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_NCCL, _GLOO = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
_BLACKWELL = (10, 0)
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_OFFLINE, _YES = "HF_HUB_OFFLINE", ("1", "true", "yes", "on")
_WAITS = "makes ranks wait forever for one whose collective has failed"
# Values that a run should not have, as a regular expression; their effect; the remedy.
_UNWANTED = {
    "NCCL_DEBUG": ("(?i)TRACE|INFO", "writes lines for every rank", "set it to WARN, or unset it"),
    "NCCL_P2P_DISABLE": (
        "1",
        "sends all data between GPUs through the host",
        "unset it unless the machine hangs without it",
    ),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0", _WAITS, "unset it"),
    "NCCL_ASYNC_ERROR_HANDLING": ("0", _WAITS, "unset it"),
    "TORCH_NCCL_BLOCKING_WAIT": ("1", "makes the host wait for every collective", "unset it"),
    "NCCL_CUMEM_ENABLE": (
        "1",
        "allocates NCCL's buffers in CUDA's virtual memory",
        "set it to 0 if an engine has less memory than planned",
    ),
}
_BUFFER_BYTES = 4 << 20  # NCCL's default


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices and cores of this machine. For example Devices({"mlx5_0": False}, "10.0.0.2", 96):
    mlx5_0 has no link."""

    infiniband: Mapping[str, bool] = field(default_factory=dict)  # and whether a port is active
    own_address: str = ""  # of this machine's name; "": unknown
    num_cores: int = 1


def find_devices() -> Devices:
    """Return this machine's devices."""
    own_address = ""
    with contextlib.suppress(OSError):
        own_address = socket.gethostbyname(socket.gethostname())
    return Devices(infiniband_devices(), own_address, available_cores())


def infiniband_devices(folder: Path = Path("/sys/class/infiniband")) -> dict[str, bool]:
    """Return InfiniBand and RoCE devices, and whether one of their ports is active."""
    return {
        device.name: any(
            "ACTIVE" in state.read_text(encoding="ascii")  # "4: ACTIVE"
            for state in device.glob("ports/*/state")
        )
        for device in sorted(folder.glob("*"))
    }


def check_network(
    environment: Mapping[str, str],
    devices: Devices,
    *,
    local_ranks: int,
    num_nodes: int,
    has_gpu: bool,
) -> Iterator[Finding]:
    """Check the variables and devices for the job's `local_ranks` processes here, and for its other
    machines. Ends with UsageError for what a start refuses."""
    yield _threads(environment, local_ranks, devices.num_cores, has_gpu=has_gpu)
    if environment.get(_OFFLINE, "").lower() in _YES:
        yield green("network", f"{_OFFLINE}={environment[_OFFLINE]}")
    if num_nodes > 1:
        yield from _between_machines(environment, devices.own_address)
    if not has_gpu:
        yield green("network", "no GPU here: variables of NCCL and CUDA are not checked")
        return
    yield from _nccl(environment)
    yield _infiniband(environment, devices.infiniband, num_nodes)
    yield from _chosen_devices(environment.get("NCCL_IB_HCA", ""), devices.infiniband)
    if all(environment.get(name) for name in VARIABLES):
        what = f"{VARIABLES[1]} is ignored, because {VARIABLES[0]} is set, too"
        yield yellow("network", what, f"unset {VARIABLES[1]}")
    check_allocator(environment)


def _chosen_devices(value: str, devices: Mapping[str, bool]) -> Iterator[Finding]:
    """Check `NCCL_IB_HCA`, without which NCCL silently takes TCP: prefixes of names, with ":port";
    exact after "=", excluded after "^"."""
    for entry in value.lstrip("=").split(",") if value and value[0] != "^" else ():
        name = entry.partition(":")[0].strip()
        meant = [d for d in devices if d == name or value[0] != "=" and d.startswith(name)]
        if not any(devices[device] for device in meant):
            what = f"NCCL_IB_HCA={value} names {name}, which is "
            what += "down" if meant else f"not one of {', '.join(devices) or 'none'}"
            yield red("network", what, "name another, bring the link up (ibstat), or unset it")


def _between_machines(environment: Mapping[str, str], own_address: str) -> Iterator[Finding]:
    """Report what would keep ranks of several machines from reaching each other."""
    master = environment.get("MASTER_ADDR", "")
    if master and is_loopback(master):
        what = f"MASTER_ADDR={master} is loopback, and the job runs on several machines"
        yield red("network", what, "set it to the address of node 0, on all of them")
    nccl, gloo = (environment.get(name, "") for name in (_NCCL, _GLOO))
    for name, value in ((_NCCL, nccl), (_GLOO, gloo)):
        if value.lstrip("=") == "lo":
            what = f"{name}={value} is the loopback device, which other machines cannot reach"
            yield red("network", what, "name the interface of the network between machines")
    prefixes = tuple(nccl.lstrip("=").split(","))
    is_list = bool(nccl and gloo) and "^" not in nccl + gloo
    if is_list and not any(name.startswith(prefixes) for name in gloo.split(",")):
        what = f"{_NCCL}={nccl} and {_GLOO}={gloo} are different networks"
        yield yellow("network", what, "name the same interface, unless both reach all machines")
    if gloo:
        return
    if not own_address or is_loopback(own_address):
        resolves = f"resolves to {own_address}" if own_address else "does not resolve"
        what = f"{_GLOO} is not set and this machine's host name {resolves}: gloo would wait there "
        remedy = "set it to the interface of the network between machines, or correct /etc/hosts"
        yield red("network", f"{what}for other machines", remedy)
    elif nccl:
        what = f"NCCL's interface is set, and gloo would use that of {own_address}"
        yield yellow("network", what, f"set {_GLOO} to the same interface")


def _nccl(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (values, effect, remedy) in _UNWANTED.items():
        value = environment.get(name, "")
        if re.fullmatch(values, value):
            yield yellow("network", f"{name}={value} {effect}", remedy)
    buffer = environment.get("NCCL_BUFFSIZE", "")
    if buffer.isdecimal() and int(buffer) > _BUFFER_BYTES:
        what = f"NCCL_BUFFSIZE={buffer}: each communicator uses more device memory than the "
        remedy = "unset it, or plan with a larger --communicator-mb"
        yield yellow("network", what + "usual 4 MiB a channel", remedy)
    names = sorted(name for name in environment if name.startswith("NCCL_"))
    yield green("network", f"NCCL's variables: {', '.join(names) or 'none'}")


def _threads(
    environment: Mapping[str, str], local_ranks: int, num_cores: int, *, has_gpu: bool
) -> Finding:
    text = environment.get("OMP_NUM_THREADS")
    if text is None:
        threads = threads_per_rank(local_ranks, has_gpu=has_gpu, num_cores=num_cores)
        return green("network", f"OMP_NUM_THREADS is not set: the launcher sets it to {threads}")
    setting = f"OMP_NUM_THREADS={text}"
    if not text.isdecimal() or int(text) < 1:
        return yellow("network", f"{setting} is not a number", "set it to 1 or more")
    if int(text) > 1 and int(text) * local_ranks > num_cores:
        ranks, cores = plural(local_ranks, "rank"), plural(num_cores, "core")
        what = f"{setting} on {ranks} are more threads than {cores}"
        return yellow("network", what, f"set it to {max(1, num_cores // local_ranks)}")
    return green("network", setting)


def _infiniband(
    environment: Mapping[str, str], devices: Mapping[str, bool], num_nodes: int
) -> Finding:
    active = [name for name, is_active in devices.items() if is_active]
    if not devices and num_nodes > 1:
        what = f"no InfiniBand or RoCE device here: {num_nodes} machines communicate over TCP, "
        what += "about ten times slower than plans assume (--inter-node-gb-per-second 50)"
        return yellow("network", what, "check that the container has /dev/infiniband")
    if not devices:
        return green("network", "no InfiniBand device here")
    if environment.get("NCCL_IB_DISABLE") == "1":
        what = f"NCCL_IB_DISABLE=1 while this machine has {', '.join(devices)}"
        return yellow("network", what, "unset it, or machines communicate over TCP")
    if not active:
        what = f"no port of {', '.join(devices)} is active"
        return yellow("network", what, "check ibstat, the cable and the subnet manager")
    return green("network", f"InfiniBand is active on {', '.join(active)}")


def check_job(
    environment: Mapping[str, str],
    *,
    collective_minutes: float | None = None,
    stage_seconds: float = 0,
    has_server_here: bool = False,
    has_local_checkpoint: bool = False,
    splits_and_overlaps: bool = False,
    capabilities: Sequence[tuple[int, int]] = (),
) -> Iterator[Finding]:
    """Check what matters to some jobs: timeouts, of which that of collectives hides which rank the
    others waited for; a reward's server on this machine; a local checkpoint; TP or CP together with
    --overlap-moe-expert-parallel-comm, on GPUs of these compute capabilities."""
    if collective_minutes is not None and 0 < 60 * collective_minutes <= stage_seconds:
        what = f"--distributed-timeout-minutes {collective_minutes:g} ends before "
        what += f"--rl-stage-timeout-seconds {stage_seconds:g}, which names the rank that is stuck"
        remedy = f"drop the first, whose default is then {stage_seconds / 60 + 10:g}"
        yield yellow("network", what, remedy)
    proxies = [name for name in _PROXIES if environment.get(name)]
    spared = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    is_spared = any(host.strip() == "*" or is_loopback(host.strip()) for host in spared)
    if has_server_here and proxies and not is_spared:
        what = f"{proxies[0]} is set and a reward's server is on this machine"
        remedy = "set no_proxy=localhost,127.0.0.1 for the server's own tools, mcore_rl uses none"
        yield yellow("network", what, remedy)
    if has_local_checkpoint and environment.get(_OFFLINE, "").lower() not in _YES:
        what = f"{_OFFLINE} is not set, and libraries may ask the Hub about a local checkpoint"
        yield yellow("network", what, f"set {_OFFLINE}=1")
    # A start refuses other wrong values.
    if splits_and_overlaps and any(each < _BLACKWELL for each in capabilities):
        queues = environment.get(_QUEUES, "set to 1 by the start")
        what = f"--overlap-moe-expert-parallel-comm wants {_QUEUES}=32, TP and CP want 1 on GPUs "
        what += f"before Blackwell, and it is {queues}"
        yield yellow("network", what, "set it to 32 or 1, for the one of both that is to overlap")
