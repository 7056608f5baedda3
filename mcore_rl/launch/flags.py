"""torchrun's flags: values that would make it raise or wait, and its meeting address."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch.distributed.run as torchrun
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.errors import CORRECT, UsageError


def check_flags(args: argparse.Namespace) -> int:
    """Return the processes of this machine. Raises UsageError for the first of torchrun's flags
    that cannot be used."""

    def parsed(flag: str, value: Any, parse: Callable[[Any], Any]) -> Any:
        try:
            return parse(value)
        except (AssertionError, RuntimeError, ValueError) as error:
            found = f"cannot be used ({error})"
            raise UsageError(found, flag=f"{flag} {value}", remedy=CORRECT) from error

    least, most = parsed("--nnodes", args.nnodes, torchrun.parse_min_max_nnodes)
    ranks = parsed("--nproc-per-node", args.nproc_per_node, torchrun.determine_local_world_size)
    parsed(
        "--rdzv-endpoint",
        args.rdzv_endpoint,
        lambda endpoint: parse_rendezvous_endpoint(endpoint, default_port=-1),
    )
    # A node outside the job would wait for the others forever.
    is_node = args.rdzv_backend != "static" or 0 <= args.node_rank < most
    for flag, value, is_right, words in (
        ("--nnodes", args.nnodes, 1 <= least <= most, "must be at least 1, MIN not above MAX"),
        ("--nproc-per-node", args.nproc_per_node, ranks >= 1, "must be at least 1"),
        ("--node-rank", args.node_rank, is_node, f"is not below --nnodes {most}, counted from 0"),
        ("--max-restarts", args.max_restarts, args.max_restarts >= 0, "must be at least 0"),
        (
            "--master-port",
            args.master_port,
            args.master_port is None or 0 <= args.master_port < 65536,
            "must be from 0 to 65535",
        ),
    ):
        if not is_right:
            raise UsageError(words, flag=f"{flag} {value}", remedy=CORRECT)
    return int(ranks)


def meeting_place(args: argparse.Namespace) -> str:
    """Return the address of torchrun's store or `local_addr`, the first that is not loopback.

    Return "" on several machines, where the user chooses the addresses and loopback has no role.
    """
    if torchrun.parse_min_max_nnodes(args.nnodes)[1] != 1:
        return ""
    endpoint = args.rdzv_endpoint.rpartition(":")[0] or args.rdzv_endpoint
    places = (endpoint.strip("[]") or args.master_addr, args.local_addr)
    address: str = next((place for place in places if not is_loopback(place)), places[0])
    return address


def port_fault(args: argparse.Namespace, error: str) -> UsageError | None:
    """Return the mistake behind torch's `error` if its store cannot listen on the port given."""
    faults = {"EADDRINUSE": "is in use by another program", "EACCES": "is not for this user"}
    for name, what in faults.items():
        if name in error:
            flag = f"--rdzv-endpoint {args.rdzv_endpoint}"
            if not args.rdzv_endpoint:
                flag = f"--master-port {args.master_port} on {args.master_addr}"
            remedy = "give another one, or none on a single machine, where a free one is taken"
            return UsageError(what, flag=flag, remedy=remedy)
    return None
