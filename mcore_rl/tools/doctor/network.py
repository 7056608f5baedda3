"""Checks of the variables that NCCL, gloo, CUDA and libraries read, against this machine's
devices."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.allocator import VARIABLES, check_allocator
from mcore_rl.common.machine import available_cores, threads_per_rank
from mcore_rl.tools.doctor.finding import NETWORK, Finding, green, plural, red, yellow

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_NCCL_INTERFACE, _GLOO_INTERFACE = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"
_BLACKWELL = (10, 0)
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_OFFLINE, _YES = "HF_HUB_OFFLINE", ("1", "true", "yes", "on")
_WAITS = "makes ranks wait forever for one whose collective has failed"


@dataclass(frozen=True, slots=True)
class Devices:
    """Network devices and cores of this machine. For example Devices({"eth0": True}, {"mlx5_0":
    False}, "10.0.0.2", 96): mlx5_0 has no link."""

    interfaces: Mapping[str, bool]  # and whether each is up
    infiniband: Mapping[str, bool] = field(default_factory=dict)  # and whether a port is active
    own_address: str = ""  # of this machine's name; "": unknown
    num_cores: int = 1


def find_devices() -> Devices:
    """Return this machine's devices."""
    own_address = ""
    with contextlib.suppress(OSError):
        own_address = socket.gethostbyname(socket.gethostname())
    interfaces = {name: stats.isup for name, stats in psutil.net_if_stats().items()}
    cores = available_cores()
    return Devices(interfaces, infiniband_devices(), own_address, cores)


def infiniband_devices(folder: Path = Path("/sys/class/infiniband")) -> dict[str, bool]:
    """Return InfiniBand and RoCE devices, and whether one of their ports is active."""
    states: dict[str, list[str]] = {path.name: [] for path in sorted(folder.glob("*"))}
    for file in folder.glob("*/ports/*/state"):
        states[file.parts[-4]].append(file.read_text(encoding="ascii"))  # "4: ACTIVE"
    return {
        name: any("ACTIVE" in state for state in port_states)
        for name, port_states in states.items()
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
    yield from _interface(_GLOO_INTERFACE, environment, devices, has_prefixes=False)
    yield _threads(environment, local_ranks, devices.num_cores, has_gpu=has_gpu)
    if environment.get(_OFFLINE, "").lower() in _YES:
        yield green(NETWORK, f"{_OFFLINE}={environment[_OFFLINE]}")
    if num_nodes > 1:
        yield from _between_machines(environment, devices.own_address)
    if not has_gpu:
        yield green(NETWORK, "no GPU here: variables of NCCL and CUDA are not checked")
        return
    yield from _interface(_NCCL_INTERFACE, environment, devices, has_prefixes=True)
    yield from _nccl(environment)
    yield from _infiniband(environment, devices.infiniband, num_nodes)
    if all(environment.get(name) for name in VARIABLES):
        what = f"{VARIABLES[1]} is ignored, because {VARIABLES[0]} is set, too"
        yield yellow(NETWORK, what, f"unset {VARIABLES[1]}")
    check_allocator(environment)


# ------------------------------------------------------------------------------------- interfaces


def _interface(
    variable: str, environment: Mapping[str, str], devices: Devices, *, has_prefixes: bool
) -> Iterator[Finding]:
    """Check a list of interfaces; NCCL's are prefixes, exact after "=", excluded after "^"."""
    value, here = environment.get(variable, ""), devices.interfaces
    if not value:
        return
    if has_prefixes and value.startswith("^"):
        yield green(NETWORK, f"{variable}={value}")
        return
    wanted = [name.strip() for name in value.lstrip("=").split(",")]
    meant = {name: _meant(name, here, not has_prefixes or value[0] == "=") for name in wanted}
    missing = [name for name in wanted if not meant[name]]
    down = [name for name in sorted(here) if name in wanted and not here[name]]
    if down:
        what = f"{variable}={value}: {', '.join(down)} is down"
        yield red(NETWORK, what, f"bring it up (ip link set {down[0]} up), or name another")
    # One of them is enough for NCCL.
    elif missing and (not has_prefixes or len(missing) == len(wanted)):
        what = f"{variable}={value} names {', '.join(missing)}, which this machine does not have"
        yield red(NETWORK, what, f"name one of {', '.join(sorted(here))}, or unset it")
    else:
        yield green(NETWORK, f"{variable}={value}")


def _meant(name: str, here: Mapping[str, bool], is_exact: bool) -> list[str]:
    """Return the devices that a name, or the prefix of one, means."""
    return [each for each in here if (each == name if is_exact else each.startswith(name))]


def _between_machines(environment: Mapping[str, str], own_address: str) -> Iterator[Finding]:
    """Report what would keep ranks of several machines from reaching each other."""
    master = environment.get("MASTER_ADDR", "")
    if master and is_loopback(master):
        what = f"MASTER_ADDR={master} is loopback, and the job runs on several machines"
        yield red(NETWORK, what, "set it to the address of node 0, on all of them")
    nccl, gloo = (environment.get(name, "") for name in (_NCCL_INTERFACE, _GLOO_INTERFACE))
    for setting, value in (f"{_NCCL_INTERFACE}={nccl}", nccl), (f"{_GLOO_INTERFACE}={gloo}", gloo):
        if value.lstrip("=") == "lo":
            what = f"{setting} is the loopback device, which other machines cannot reach"
            yield red(NETWORK, what, "name the interface of the network between machines")
    prefixes = tuple(nccl.lstrip("=").split(","))
    if nccl and gloo and "^" not in nccl + gloo:
        if not any(name.startswith(prefixes) for name in gloo.split(",")):
            what = f"{_NCCL_INTERFACE}={nccl} and {_GLOO_INTERFACE}={gloo} are different networks"
            yield yellow(NETWORK, what, "name the same interface, unless both reach all machines")
    if not gloo:
        yield from _gloo_by_host_name(own_address, has_nccl=bool(nccl))


def _gloo_by_host_name(own_address: str, *, has_nccl: bool) -> Iterator[Finding]:
    """Check the address at which gloo listens without `GLOO_SOCKET_IFNAME`."""
    if not own_address or is_loopback(own_address):
        resolves = f"resolves to {own_address}" if own_address else "does not resolve"
        what = f"{_GLOO_INTERFACE} is not set and this machine's host name {resolves}: gloo "
        remedy = "set it to the interface of the network between machines, or correct /etc/hosts"
        yield red(NETWORK, f"{what}would wait there for other machines", remedy)
    elif has_nccl:
        what = f"NCCL's interface is set, and gloo would use that of {own_address}"
        yield yellow(NETWORK, what, f"set {_GLOO_INTERFACE} to the same interface")


# ------------------------------------------------------------------------------- single variables

# Values that a run should not have, as a regular expression; their effect; the remedy.
_UNWANTED = {
    "NCCL_DEBUG": ("TRACE|INFO", "writes lines for every rank", "set it to WARN, or unset it"),
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


def _nccl(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (values, effect, remedy) in _UNWANTED.items():
        value = environment.get(name, "")
        if re.fullmatch(values, value, re.IGNORECASE):
            yield yellow(NETWORK, f"{name}={value} {effect}", remedy)
    heartbeat = environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "600")
    if not heartbeat.isdecimal():
        what = f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} is not a number of seconds"
        yield red(NETWORK, what, "unset it, or set it to 600")
    buffer = environment.get("NCCL_BUFFSIZE", "")
    if buffer.isdecimal() and int(buffer) > _BUFFER_BYTES:
        what = f"NCCL_BUFFSIZE={buffer}: each communicator uses more device memory than the "
        remedy = "unset it, or plan with a larger --communicator-mb"
        yield yellow(NETWORK, what + "usual 4 MiB a channel", remedy)
    names = sorted(name for name in environment if name.startswith("NCCL_"))
    yield green(NETWORK, f"NCCL's variables: {', '.join(names) or 'none'}")


def _threads(
    environment: Mapping[str, str], local_ranks: int, num_cores: int, *, has_gpu: bool
) -> Finding:
    text = environment.get("OMP_NUM_THREADS")
    if text is None:
        threads = threads_per_rank(local_ranks, has_gpu=has_gpu, num_cores=num_cores)
        return green(NETWORK, f"OMP_NUM_THREADS is not set: the launcher sets it to {threads}")
    setting = f"OMP_NUM_THREADS={text}"
    if not text.isdecimal() or int(text) < 1:
        return yellow(NETWORK, f"{setting} is not a number", "set it to 1 or more")
    if int(text) > 1 and int(text) * local_ranks > num_cores:
        ranks, cores = plural(local_ranks, "rank"), plural(num_cores, "core")
        what = f"{setting} on {ranks} are more threads than {cores}"
        return yellow(NETWORK, what, f"set it to {max(1, num_cores // local_ranks)}")
    return green(NETWORK, setting)


# ------------------------------------------------------------------------------------- InfiniBand


def _infiniband(
    environment: Mapping[str, str], devices: Mapping[str, bool], num_nodes: int
) -> Iterator[Finding]:
    active = [name for name, is_active in devices.items() if is_active]
    if not devices and num_nodes > 1:
        what = f"no InfiniBand or RoCE device here: {num_nodes} machines communicate over TCP, "
        what += "about ten times slower than plans assume (--inter-node-gb-per-second 50)"
        yield yellow(NETWORK, what, "check that the container has /dev/infiniband")
    elif not devices:
        yield green(NETWORK, "no InfiniBand device here")
    elif environment.get("NCCL_IB_DISABLE") == "1":
        what = f"NCCL_IB_DISABLE=1 while this machine has {', '.join(devices)}"
        yield yellow(NETWORK, what, "unset it, or machines communicate over TCP")
        return
    elif not active:
        what = f"no port of {', '.join(devices)} is active"
        yield yellow(NETWORK, what, "check ibstat, the cable and the subnet manager")
    else:
        yield green(NETWORK, f"InfiniBand is active on {', '.join(active)}")
    yield from _chosen_devices(environment.get("NCCL_IB_HCA", ""), devices)


def _chosen_devices(value: str, devices: Mapping[str, bool]) -> Iterator[Finding]:
    """Check `NCCL_IB_HCA`: prefixes of names, with ":port"; exact after "=", excluded after "^"."""
    if not value or value.startswith("^"):
        return
    for entry in value.lstrip("=").split(","):
        name = entry.partition(":")[0].strip()
        meant = _meant(name, devices, value.startswith("="))
        if not meant:
            what = f"NCCL_IB_HCA={value} names {name}, which this machine does not have"
            known = ", ".join(devices) or "none"
            yield red(NETWORK, what, f"name one of this machine's ({known}), or unset it")
        elif not any(devices[device] for device in meant):
            what = f"NCCL_IB_HCA={value} names {name}, of which no port is active"
            yield red(NETWORK, what, "name another, or bring the link up (ibstat)")


# -------------------------------------------------------------------------- for some jobs only


def check_timeouts(collective_minutes: float | None, stage_seconds: float) -> Iterator[Finding]:
    """Check timeouts: a collective that times out first hides which rank the others waited for."""
    if collective_minutes is not None and 0 < 60 * collective_minutes <= stage_seconds:
        what = f"--distributed-timeout-minutes {collective_minutes:g} ends before "
        what += f"--rl-stage-timeout-seconds {stage_seconds:g}, which names the rank that is stuck"
        yield yellow(
            NETWORK, what, f"drop the first, whose default is then {stage_seconds / 60 + 10:g}"
        )


def check_proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the variables of proxies for a reward whose server is on this machine."""
    proxies = [name for name in _PROXIES if environment.get(name)]
    spared = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    is_spared = any(host.strip() == "*" or is_loopback(host.strip()) for host in spared)
    if proxies and not is_spared:
        what = f"{proxies[0]} is set and a reward's server is on this machine"
        remedy = (
            "set no_proxy=localhost,127.0.0.1 for the server's own tools; mcore_rl uses no proxy"
        )
        yield yellow(NETWORK, what, remedy)


def check_hub(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that libraries do not ask the Hub about a local checkpoint."""
    if environment.get(_OFFLINE, "").lower() not in _YES:
        what = f"{_OFFLINE} is not set, and libraries may ask the Hub about a local checkpoint"
        yield yellow(NETWORK, what, f"set {_OFFLINE}=1")


def check_queues(
    environment: Mapping[str, str], capabilities: Sequence[tuple[int, int]]
) -> Iterator[Finding]:
    """Warn that --overlap-moe-expert-parallel-comm and TP or CP want different numbers of queues,
    on GPUs of these compute capabilities. A start refuses other wrong values."""
    if any(each < _BLACKWELL for each in capabilities):
        queues = environment.get(_QUEUES, "set to 1 by the start")
        what = f"--overlap-moe-expert-parallel-comm wants {_QUEUES}=32, TP and CP want 1 on GPUs "
        what += f"before Blackwell, and it is {queues}"
        yield yellow(NETWORK, what, "set it to 32 or 1, for the one of the two that is to overlap")
