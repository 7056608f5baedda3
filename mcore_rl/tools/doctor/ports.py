"""Can the ranks meet: the port of the rendezvous, and the ports that connections take."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

from mcore_rl.tools.doctor.finding import PORTS, Finding, green, plural, red, yellow

_DEFAULT_PORT = 29500  # torchrun's
# Of a rank: gloo and NCCL connect it to others group by group, and its engine listens on a few.
_PORTS_OF_RANK = 64
_HERE = ("localhost", "127.0.0.1", "::1")


def check_ports(
    environment: Mapping[str, str], *, local_ranks: int, proc: Path = Path("/proc")
) -> list[Finding]:
    """`local_ranks` are the processes of the job on this machine. Binds a port, for a moment."""
    return [_rendezvous(environment), *_connections(proc, local_ranks, environment)]


def _rendezvous(environment: Mapping[str, str]) -> Finding:
    text = environment.get("MASTER_PORT")
    if text is not None and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        return red(PORTS, f"MASTER_PORT={text} is no port", "set it to a number up to 65535")
    port = int(text) if text is not None else _DEFAULT_PORT
    address = environment.get("MASTER_ADDR")
    if address and address not in (*_HERE, socket.gethostname(), socket.getfqdn()):
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
    """Whether a server could listen there now."""
    with contextlib.closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen()
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port near torchrun's that nobody listens on."""
    return next(port for port in range(_DEFAULT_PORT + 1, 1 << 16) if is_free(port))


def _used_ports(proc: Path) -> set[int]:
    """Local ports of all TCP sockets, from the kernel's own tables."""
    used = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                used.add(int(line.split()[1].rpartition(":")[2], 16))
    return used
