"""Checks of the port of the rendezvous, and of free ports for connections."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from mcore_rl.common.addresses import is_loopback
from mcore_rl.tools.doctor.finding import PORTS, Finding, green, plural, red, yellow

_DEFAULT_PORT = 29500  # torchrun's
# Of a rank: gloo and NCCL connect it to others in each group, and its engine listens on a few.
_PORTS_OF_RANK = 64
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def check_ports(
    environment: Mapping[str, str], *, local_ranks: int, port_range: Path = _PORT_RANGE
) -> Iterator[Finding]:
    """Check ports for the job's `local_ranks` processes here. Binds a port for a moment.

    `port_range` is the file with the first and the last port that the kernel gives to connections.
    """
    yield _rendezvous(environment)
    try:
        first, last = map(int, port_range.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        yield green(PORTS, "the kernel's range of ports for connections cannot be read")
        return
    used = {connection.laddr.port for connection in psutil.net_connections("tcp")}
    free = last - first + 1 - len(used & set(range(first, last + 1)))
    needed = _PORTS_OF_RANK * local_ranks
    what = f"{free:,} ports of {first} to {last} are free for the connections of "
    what += plural(local_ranks, "rank")
    if free < needed:
        remedy = "end programs that hold connections, or widen net.ipv4.ip_local_port_range"
        yield red(PORTS, f"{what}, which need about {needed:,}", remedy)
    else:
        yield green(PORTS, what)
    port = environment.get("MASTER_PORT", "")
    if port.isdecimal() and first <= int(port) <= last:
        what = f"MASTER_PORT={port} is in that range: a connection may take it before the start"
        yield yellow(PORTS, what, f"set a port below {first}")


def _rendezvous(environment: Mapping[str, str]) -> Finding:
    text = environment.get("MASTER_PORT")
    if text is not None and not (text.isdecimal() and 0 < int(text) < 1 << 16):
        return red(PORTS, f"MASTER_PORT={text} is not a port", "set it to a number up to 65535")
    port = int(text or _DEFAULT_PORT)
    address = environment.get("MASTER_ADDR")
    here = (socket.gethostname(), socket.getfqdn())
    if address and not is_loopback(address) and address not in here:
        return green(
            PORTS, f"MASTER_ADDR={address} is another machine: port {port} is needed there"
        )
    if is_free(port):
        return green(PORTS, f"port {port} of the rendezvous is free")
    if text is not None:
        what = f"MASTER_PORT={port} is taken by another program"
        return red(PORTS, what, f"set another one, as MASTER_PORT={free_port()}")
    what = f"port {port}, torchrun's own, is taken: a job on several machines cannot use it"
    return yellow(PORTS, what, f"set MASTER_PORT={free_port()} for such a job")


def is_free(port: int) -> bool:
    """Return whether a server could listen there now."""
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def free_port() -> int:
    """Return a free port near torchrun's."""
    return next(port for port in range(_DEFAULT_PORT + 1, 1 << 16) if is_free(port))
