"""Checks of the network: the variables that NCCL, gloo, CUDA and libraries read, against this
machine's devices; the port of the rendezvous, and free ports for connections."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rl.common.addresses import is_loopback
from mcore_rl.flags.allocator import (
    VARIABLES,
    expandable_segments,
    vllm_refuses_expandable_segments,
)
from mcore_rl.tools.doctor.finding import NETWORK, PORTS, Finding, green, plural, red, yellow

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_BLACKWELL = (10, 0)
_BUFFER_BYTES = 4 << 20  # NCCL's default
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """Properties of a job that decide which checks apply. Without a command line: the defaults."""

    has_gpu: bool
    local_ranks: int = 1
    num_nodes: int = 1
    capabilities: tuple[tuple[int, int], ...] = ()  # of the GPUs here
    splits_layers: bool = False  # TP or CP above 1
    uses_fsdp: bool = False  # Megatron-FSDP or --use-torch-fsdp2
    overlaps_experts: bool = False  # --overlap-moe-expert-parallel-comm
    timeout_minutes: float | None = None  # --distributed-timeout-minutes, if it is given
    stage_timeout_seconds: float = 0.0  # 0: none
    asks_loopback: bool = False  # a reward's server is on this machine
    local_checkpoint: bool = False


def infiniband_devices(sys_root: Path = Path("/sys")) -> dict[str, bool]:
    """Return InfiniBand and RoCE devices, and whether one of their ports is active."""
    folder = sys_root / "class/infiniband"
    if not folder.is_dir():
        return {}
    return {device.name: _is_active(device) for device in sorted(folder.iterdir())}


def _is_active(device: Path) -> bool:
    states = []
    for state in device.glob("ports/*/state"):
        states.append(state.read_text(encoding="ascii").strip())  # "4: ACTIVE"
    return any(state.endswith("ACTIVE") for state in states)


def check_network(
    environment: Mapping[str, str],
    use: NetworkUse,
    *,
    sys_root: Path = Path("/sys"),
    num_cores: int | None = None,
    own_address: str | None = None,
) -> list[Finding]:
    """Check the network's variables and devices. `sys_root` is the folder of the kernel's devices;
    `own_address` is the address of this machine's name, which is looked up by default."""
    findings = [*_gloo(environment, sys_root), *_threads(environment, use, num_cores)]
    findings += _libraries(environment, use)
    findings += _timeouts(environment, use)
    if use.num_nodes > 1:
        findings += _between_machines(environment, own_address or _own_address())
    if use.has_gpu:
        findings += _nccl(environment, sys_root)
        findings += _infiniband(environment, infiniband_devices(sys_root), use)
        findings += _cuda(environment, use)
    else:
        findings.append(green(NETWORK, "no GPU here: what NCCL and CUDA read is not asked"))
    return findings


def _gloo(environment: Mapping[str, str], sys_root: Path) -> Iterator[Finding]:
    yield from _interface("GLOO_SOCKET_IFNAME", environment, sys_root, patterns=False)


def _interface(
    variable: str, environment: Mapping[str, str], sys_root: Path, *, patterns: bool
) -> Iterator[Finding]:
    """Check a list of interfaces; NCCL's are prefixes, exact after "=", excluded after "^"."""
    value = environment.get(variable)
    if not value:
        return
    here = sorted(path.name for path in (sys_root / "class/net").glob("*"))
    if patterns and value.startswith("^"):
        yield green(NETWORK, f"{variable}={value}")
        return
    exact = not patterns or value.startswith("=")
    wanted = [name.strip() for name in value.lstrip("=").split(",")]
    lacking = [
        name
        for name in wanted
        if not any(other == name if exact else other.startswith(name) for other in here)
    ]
    down = [name for name in here if name in wanted and _is_down(sys_root, name)]
    if down:
        what = f"{variable}={value}: {', '.join(down)} is down"
        yield red(NETWORK, what, f"bring it up (ip link set {down[0]} up), or name another")
        return
    # One of them is enough for NCCL.
    if lacking and (not patterns or len(lacking) == len(wanted)):
        what = f"{variable}={value} names {', '.join(lacking)}, which this machine has not"
        yield red(NETWORK, what, f"name one of {', '.join(here)}, or unset it")
    else:
        yield green(NETWORK, f"{variable}={value}")


def _is_down(sys_root: Path, interface: str) -> bool:
    state = sys_root / "class/net" / interface / "operstate"
    return state.is_file() and state.read_text(encoding="ascii").strip() == "down"


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _between_machines(environment: Mapping[str, str], own_address: str) -> Iterator[Finding]:
    """Report what would keep ranks of several machines from reaching each other."""
    master = environment.get("MASTER_ADDR", "")
    if master and is_loopback(master):
        what = f"MASTER_ADDR={master} is each machine itself, and the job is on several"
        yield red(NETWORK, what, "set it to the address of node 0, on all of them")
    named = {name: environment.get(name, "") for name in _INTERFACES}
    for variable, value in named.items():
        if value.lstrip("=") == "lo":
            what = f"{variable}={value} is the loopback device, which no other machine reaches"
            yield red(NETWORK, what, "name the interface of the network between machines")
    wanted = [set(value.lstrip("=").split(",")) for value in named.values() if value]
    if len(wanted) == 2 and "^" not in "".join(named.values()):
        nccl, gloo = wanted
        if not any(name.startswith(start) for name in gloo for start in nccl):
            both = " and ".join(f"{name}={value}" for name, value in named.items())
            what = f"{both} are different networks"
            yield yellow(NETWORK, what, "name the same interface, unless both reach all machines")
    if named["GLOO_SOCKET_IFNAME"]:
        return
    if not own_address or is_loopback(own_address):
        leads = f"leads to {own_address}" if own_address else "leads nowhere"
        what = f"GLOO_SOCKET_IFNAME is not set and this machine's own name {leads}"
        remedy = "set it to the interface of the network between machines, or mend /etc/hosts"
        yield red(NETWORK, f"{what}, where gloo would wait for other machines", remedy)
    elif named["NCCL_SOCKET_IFNAME"]:
        what = f"NCCL is told its interface, and gloo would take that of {own_address}"
        yield yellow(NETWORK, what, "set GLOO_SOCKET_IFNAME to the same interface")


def _timeouts(environment: Mapping[str, str], use: NetworkUse) -> Iterator[Finding]:
    """Check timeouts: a collective that times out first hides which rank the others waited for."""
    minutes, stage = use.timeout_minutes, use.stage_timeout_seconds
    if minutes is not None and stage and 60 * minutes <= stage:
        what = f"--distributed-timeout-minutes {minutes:g} is over before "
        what += f"--rl-stage-timeout-seconds {stage:g}, which names the rank that is stuck"
        yield yellow(NETWORK, what, f"drop the first, which is then {stage / 60 + 10:g}")
    heartbeat = environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    if use.has_gpu and heartbeat is not None and not heartbeat.isdecimal():
        what = f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={heartbeat} is not a number of seconds"
        yield red(NETWORK, what, "unset it, or set it to 600")


def _threads(
    environment: Mapping[str, str], use: NetworkUse, num_cores: int | None
) -> Iterator[Finding]:
    cores = num_cores or len(os.sched_getaffinity(0))
    text = environment.get("OMP_NUM_THREADS")
    if text is None:
        yield green(NETWORK, "OMP_NUM_THREADS is not set: the launcher takes 1")
    elif not text.isdecimal() or int(text) < 1:
        yield yellow(NETWORK, f"OMP_NUM_THREADS={text} is not a number", "set it to 1 or more")
    elif int(text) > 1 and int(text) * use.local_ranks > cores:
        ranks = plural(use.local_ranks, "rank")
        what = f"OMP_NUM_THREADS={text} on {ranks} are more threads than {plural(cores, 'core')}"
        yield yellow(NETWORK, what, f"set it to {max(1, cores // use.local_ranks)}")
    else:
        yield green(NETWORK, f"OMP_NUM_THREADS={text}")


def _libraries(environment: Mapping[str, str], use: NetworkUse) -> Iterator[Finding]:
    proxies = [name for name in _PROXIES if environment.get(name)]
    spared = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    is_spared = any(host.strip() == "*" or is_loopback(host.strip()) for host in spared)
    if use.asks_loopback and proxies and not is_spared:
        what = f"{proxies[0]} is set and a reward is asked on this machine"
        remedy = "set no_proxy=localhost,127.0.0.1 for the server's own tools; ours take no proxy"
        yield yellow(NETWORK, what, remedy)
    offline = environment.get("HF_HUB_OFFLINE", "")
    if use.local_checkpoint and offline.lower() not in ("1", "true", "yes", "on"):
        what = "HF_HUB_OFFLINE is not set, and libraries may ask the Hub about a local checkpoint"
        yield yellow(NETWORK, what, "set HF_HUB_OFFLINE=1")
    elif offline:
        yield green(NETWORK, f"HF_HUB_OFFLINE={offline}")


def _nccl(environment: Mapping[str, str], sys_root: Path) -> Iterator[Finding]:
    yield from _interface("NCCL_SOCKET_IFNAME", environment, sys_root, patterns=True)
    level = environment.get("NCCL_DEBUG", "").upper()
    if level in ("TRACE", "INFO"):
        make = yellow(
            NETWORK,
            f"NCCL_DEBUG={level} writes lines for every rank",
            "set it to WARN, or unset it",
        )
        yield make
    if environment.get("NCCL_P2P_DISABLE") == "1":
        what = "NCCL_P2P_DISABLE=1 sends everything between GPUs through the host"
        yield yellow(NETWORK, what, "unset it unless the machine hangs without it")
    handling = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
    for variable in handling:
        if environment.get(variable) == "0":
            what = f"{variable}=0: ranks wait for ever for one whose collective has failed"
            yield yellow(NETWORK, what, "unset it")
    if environment.get("TORCH_NCCL_BLOCKING_WAIT") == "1":
        what = "TORCH_NCCL_BLOCKING_WAIT=1 makes the host wait for every collective"
        yield yellow(NETWORK, what, "unset it")
    if environment.get("NCCL_CUMEM_ENABLE") == "1":
        what = "NCCL_CUMEM_ENABLE=1 takes NCCL's buffers from CUDA's virtual memory"
        yield yellow(NETWORK, what, "set it to 0 if an engine has less memory than planned")
    buffer = environment.get("NCCL_BUFFSIZE", "")
    if buffer.isdecimal() and int(buffer) > _BUFFER_BYTES:
        what = f"NCCL_BUFFSIZE={buffer}: each communicator takes more of the device than its "
        yield yellow(NETWORK, what + "usual 4 MiB a channel", "unset it, or plan with a larger "
                     "--communicator-mb")  # fmt: skip
    others = sorted(name for name in environment if name.startswith("NCCL_"))
    yield green(NETWORK, f"NCCL is told: {', '.join(others) or 'nothing'}")


def _infiniband(
    environment: Mapping[str, str], devices: Mapping[str, bool], use: NetworkUse
) -> Iterator[Finding]:
    active = [name for name, is_active in devices.items() if is_active]
    if not devices and use.num_nodes > 1:
        what = f"no InfiniBand or RoCE device here: {use.num_nodes} machines talk over TCP, some "
        what += "ten times slower than plans assume (--inter-node-gb-per-second 50)"
        yield yellow(NETWORK, what, "see whether the container is given /dev/infiniband")
    elif not devices:
        yield green(NETWORK, "no InfiniBand device here")
    elif environment.get("NCCL_IB_DISABLE") == "1":
        what = f"NCCL_IB_DISABLE=1 while this machine has {', '.join(devices)}"
        yield yellow(NETWORK, what, "unset it, or machines talk over TCP")
        return
    elif not active:
        what = f"no port of {', '.join(devices)} is active"
        yield yellow(NETWORK, what, "look at ibstat, or at the cable and the subnet manager")
    else:
        yield green(NETWORK, f"InfiniBand is active on {', '.join(active)}")
    yield from _chosen_devices(environment.get("NCCL_IB_HCA", ""), devices)


def _chosen_devices(value: str, devices: Mapping[str, bool]) -> Iterator[Finding]:
    """Check `NCCL_IB_HCA`: prefixes of names, with ":port"; exact after "=", excluded after "^"."""
    if not value or value.startswith("^"):
        return
    exact = value.startswith("=")
    for entry in value.lstrip("=").split(","):
        name = entry.partition(":")[0].strip()
        meant = [d for d in devices if (d == name if exact else d.startswith(name))]
        if not meant:
            what = f"NCCL_IB_HCA={value} names {name}, which this machine has not"
            known = ", ".join(devices) or "none"
            yield red(NETWORK, what, f"name one of those that are here ({known}), or unset it")
        elif not any(devices[device] for device in meant):
            what = f"NCCL_IB_HCA={value} names {name}, of which no port is active"
            yield red(NETWORK, what, "name another, or bring the link up (ibstat)")


def _cuda(environment: Mapping[str, str], use: NetworkUse) -> Iterator[Finding]:
    queues = environment.get(_QUEUES)
    # As in Megatron's validate_args, which fails an assertion in the cases reported red here.
    before_blackwell = any(capability < _BLACKWELL for capability in use.capabilities)
    if use.uses_fsdp and queues == "1":
        what = f"{_QUEUES}=1 does not go with --use-megatron-fsdp"
        yield red(NETWORK, what, "unset it, or set it to 8")
    elif use.splits_layers and before_blackwell and use.overlaps_experts:
        what = f"--overlap-moe-expert-parallel-comm wants {_QUEUES}=32, TP and CP want 1 on GPUs "
        what += f"before Blackwell, and it is {queues or 'set to 1 by the start'}"
        yield yellow(NETWORK, what, "set it to 32 or 1, whichever of the two is to overlap")
    elif use.splits_layers and before_blackwell and not use.uses_fsdp and queues not in (None, "1"):
        what = f"{_QUEUES}={queues}: Megatron wants 1 with TP or CP on GPUs before Blackwell"
        yield red(NETWORK, what, "unset it, the start sets it")
    yield from _allocator(environment)


def _allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    if all(environment.get(name) for name in VARIABLES):
        what = f"{VARIABLES[1]} is set and not read, as {VARIABLES[0]} is set, too"
        yield yellow(NETWORK, what, f"unset {VARIABLES[1]}")
    setting = expandable_segments(environment)
    if setting is None:
        return
    if vllm_refuses_expandable_segments():
        what = f"{setting}: the installed vLLM's sleep mode refuses expandable segments"
        yield red(NETWORK, what, "take expandable_segments out of it")
    else:
        what = f"{setting}: vLLM switches it off for what it puts to sleep"
        yield green(NETWORK, what)


_DEFAULT_PORT = 29500  # torchrun's
# Of a rank: gloo and NCCL connect it to others in each group, and its engine listens on a few.
_PORTS_OF_RANK = 64


def check_ports(
    environment: Mapping[str, str], *, local_ranks: int, proc: Path = Path("/proc")
) -> list[Finding]:
    """Check ports for the job's `local_ranks` processes here. Binds a port for a moment."""
    return [_rendezvous(environment), *_connections(proc, local_ranks, environment)]


def _rendezvous(environment: Mapping[str, str]) -> Finding:
    text = environment.get("MASTER_PORT")
    if text is not None and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        return red(PORTS, f"MASTER_PORT={text} is not a port", "set it to a number up to 65535")
    port = int(text) if text is not None else _DEFAULT_PORT
    address = environment.get("MASTER_ADDR")
    here = (socket.gethostname(), socket.getfqdn())
    if address and not is_loopback(address) and address not in here:
        return green(PORTS, f"MASTER_ADDR={address} is another machine, whose port {port} counts")
    if is_free(port):
        return green(PORTS, f"port {port} of the rendezvous is free")
    if text is not None:
        what = f"MASTER_PORT={port} is taken by another program"
        return red(PORTS, what, f"set another one, as MASTER_PORT={free_port()}")
    what = f"port {port}, torchrun's own, is taken: a job on several machines could not meet there"
    return yellow(PORTS, what, f"set MASTER_PORT={free_port()} for such a job")


def _connections(proc: Path, local_ranks: int, environment: Mapping[str, str]) -> list[Finding]:
    try:
        words = (proc / "sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        first, last = map(int, words)
    except (OSError, ValueError):
        return [green(PORTS, "the range of ports for connections cannot be read here")]
    used = len(_used_ports(proc) & set(range(first, last + 1)))
    free = last - first + 1 - used
    needed = _PORTS_OF_RANK * local_ranks
    what = f"{free:,} ports of {first} to {last} are free for the connections of "
    what += plural(local_ranks, "rank")
    findings = []
    if free < needed:
        remedy = "end programs that hold connections, or widen net.ipv4.ip_local_port_range"
        findings.append(red(PORTS, f"{what}, which take some {needed:,}", remedy))
    else:
        findings.append(green(PORTS, what))
    port = environment.get("MASTER_PORT", "")
    if port.isdecimal() and first <= int(port) <= last:
        what = f"MASTER_PORT={port} is in that range: any connection may be given it before a start"
        findings.append(yellow(PORTS, what, f"set a port below {first}"))
    return findings


def is_free(port: int) -> bool:
    """Return whether a server could listen there now."""
    with contextlib.closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen()
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a free port near torchrun's."""
    return next(port for port in range(_DEFAULT_PORT + 1, 1 << 16) if is_free(port))


def _used_ports(proc: Path) -> set[int]:
    """Return the local ports of all TCP sockets, from the kernel's tables."""
    used = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                used.add(int(line.split()[1].rpartition(":")[2], 16))
    return used
