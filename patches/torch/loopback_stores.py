"""A store that ranks reach on loopback listens only there.

Symptom: a run on one machine, whose ranks meet on 127.0.0.1, has ports open that every machine of
the network can reach: torchrun's store, the ranks' own store, stores for other groups. Anyone who
connects can read and change the values that ranks exchange there.
Cause: TCPStore binds to all addresses for any host; the host only determines where clients connect.
Why safe: TCPStore accepts a listening socket. It gets one bound to the requested address, only for
loopback. With any other host torch's own socket is used, and also if the port is already taken, by
a store of this process to be shared or by another process.
Upstream: as described, as of torch 2.13.0.
Drop when: TCPStore binds to the host that it is given.
Versions: torch 2.13.0; 2.8 to 2.12, which is not tried, have the same parameter.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

from mcore_rl.common.addresses import is_loopback
from mcore_rl.patches.registry import Patch, apply_patch, require

_BACKLOG = 2048  # as torch has it
_PARAMETERS = ("host_name", "port", "world_size", "is_master", "timeout", "wait_for_workers")
_LISTENING = "master_listen_fd"
_DEFAULTS = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def stay_on_loopback(address: str) -> bool:
    """Restrict this process and its children to loopback, if `address` is a loopback address.

    Call it before the first store or process group. Variables that are already set are kept. NCCL
    is not configured: it opens its sockets for the device that it chooses. With any other address,
    torch and vLLM keep their own defaults.
    """
    apply_patch(PATCH)
    if not is_loopback(address):
        return False
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    return True


def listening_socket(host: str, port: int) -> socket.socket | None:
    """Return a socket bound only to `host`; None if the port is taken. 0 takes a free port."""
    address = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        return None
    return listening


def apply() -> None:
    """Replace TCPStore's constructor in place, since many modules have imported it by name."""
    from torch.distributed import TCPStore

    make = TCPStore.__init__
    known = all(name in (make.__doc__ or "") for name in (*_PARAMETERS, _LISTENING))
    require(known, "torch.distributed.TCPStore", f"takes no {_LISTENING}")
    TCPStore.__init__ = _bound_to_loopback(make)  # type: ignore[method-assign]  # replaced


def _bound_to_loopback(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        listening = None
        hosts = given.get("is_master") and given.get(_LISTENING) is None
        if hosts and len(args) <= len(_PARAMETERS) and is_loopback(str(given["host_name"])):
            listening = listening_socket(given["host_name"], int(given["port"]))
        if listening is None:
            make(self, *args, **kwargs)
            return
        given["port"] = listening.getsockname()[1]
        make(self, **given, **{_LISTENING: listening.detach()})  # torch closes it

    return made


PATCH = Patch(
    "torch.loopback_stores",
    "stores that ranks reach on loopback listen nowhere else",
    apply,
    packages=("torch",),
    versions=">=2.8,<2.14",
)
