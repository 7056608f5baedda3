"""Stores on loopback accept only local connections, and otherwise work like upstream's.

They run in a separate process, because a repair stays applied.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
import torch.distributed.run as torchrun

from mcore_rl.common.addresses import is_loopback
from mcore_rl.common.errors import UsageError
from mcore_rl.launch.flags import check_flags, meeting_place
from mcore_rl.patches.torch import loopback_stores

STORES = """
import gc, psutil, sys
from datetime import timedelta
from torch.distributed import TCPStore
from torch.distributed.rendezvous import TCPStore as imported_by_name

def listening():
    connections = psutil.Process().net_connections("tcp")
    return sorted(c.laddr.ip for c in connections if c.status == "LISTEN")

def store(host, port=0, **options):
    options = {"is_master": True, "wait_for_workers": False} | options
    return TCPStore(host, port, timeout=timedelta(seconds=20), **options)

kept = store("127.0.0.1")
assert listening() == ["::"], "torch itself binds to loopback now: the repair can go"
del kept
gc.collect()
assert listening() == []

from mcore_rl.patches.torch.loopback_stores import stay_on_loopback
assert stay_on_loopback("127.0.0.1") and imported_by_name is TCPStore

first = store("127.0.0.1", multi_tenant=True)
assert listening() == ["127.0.0.1"] and first.port > 0
same = store("127.0.0.1", first.port, multi_tenant=True)
assert (same.port, listening()) == (first.port, ["127.0.0.1"])
client = store("localhost", first.port, is_master=False)
client.set("key", "value")
assert first.get("key") == same.get("key") == b"value"
try:
    store("127.0.0.1", first.port)
except RuntimeError as error:  # of torch, as without the repair
    assert "EADDRINUSE" in str(error)
else:
    raise SystemExit("two stores on one port")

positional = TCPStore("localhost", 0, None, True, timedelta(seconds=20), False)
old_backend = store("127.0.0.1", use_libuv=False)
assert listening() == ["127.0.0.1"] * 3 and positional.port != old_backend.port
open_to_all = store("0.0.0.0")
assert listening() == ["127.0.0.1"] * 3 + ["::"]
del first, same, client, positional, old_backend
gc.collect()
assert listening() == ["::"]
print("done")
"""


def test_only_stores_on_loopback_are_bound_to_loopback() -> None:
    done = subprocess.run([sys.executable, "-c", STORES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "done"


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["127.0.0.1", "127.0.1.1", "::1", "localhost"], True),
        (["", "0.0.0.0", "::", "10.0.0.1", "node7", "127.0.0.1.example"], False),
    ],
)
def test_loopback_hosts_are_recognised(hosts: list[str], expected: bool) -> None:
    assert [is_loopback(host) for host in hosts] == [expected] * len(hosts)


def test_given_environment_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback_stores, "apply_patch", lambda patch: True)
    monkeypatch.setattr(os, "environ", {"VLLM_HOST_IP": "10.0.0.1"})
    assert not loopback_stores.stay_on_loopback("node7")
    assert os.environ == {"VLLM_HOST_IP": "10.0.0.1"}
    assert loopback_stores.stay_on_loopback("localhost")
    assert os.environ == {"VLLM_HOST_IP": "10.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("flags", "is_local"),
    [
        ({}, True),
        ({"rdzv_endpoint": "localhost:0"}, True),
        ({"rdzv_endpoint": "[::1]:29400"}, True),
        ({"master_addr": "node7"}, False),
        ({"rdzv_endpoint": "node7:29400"}, False),
        ({"local_addr": "10.0.0.1"}, False),
        ({"nnodes": "2"}, False),
        ({"nnodes": "1:2"}, False),
    ],
)
def test_meeting_place_follows_flags(flags: dict[str, str], is_local: bool) -> None:
    defaults = {"nnodes": "1", "rdzv_endpoint": "", "master_addr": "127.0.0.1"}
    args = argparse.Namespace(**{"local_addr": "127.0.0.1", **defaults, **flags})
    assert is_loopback(meeting_place(args)) == is_local


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--nnodes abc", "--nnodes abc cannot be used"),
        ("--nnodes 1:2:3", "--nnodes 1:2:3 cannot be used"),
        ("--nnodes 0", "--nnodes 0 "),
        ("--nnodes 2:1", "--nnodes 2:1 "),
        ("--nproc-per-node two", "--nproc-per-node two cannot be used"),
        ("--nproc-per-node 0", "--nproc-per-node 0 must be at least 1"),
        ("--nproc-per-node -1", "--nproc-per-node -1 must be at least 1"),
        ("--nnodes 2 --node-rank 2", "--node-rank 2 is not below --nnodes 2"),
        ("--nnodes 2 --node-rank -1", "--node-rank -1 is not below --nnodes 2"),
        ("--max-restarts -1", "--max-restarts -1 must be at least 0"),
        ("--master-port 65536", "--master-port 65536 must be from 0 to 65535"),
        ("--rdzv-endpoint node:99999", "--rdzv-endpoint node:99999 cannot be used"),
        ("--rdzv-endpoint [::1", r"--rdzv-endpoint \[::1 cannot be used"),
    ],
)
def test_invalid_flags_of_torchrun_are_refused(flags: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refusal:
        check_flags(torchrun.parse_args([*flags.split(), "script.py"]))
    assert refusal.value.remedy and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--standalone --nproc-per-node 8",
        "--nnodes 2 --node-rank 1 --nproc-per-node cpu --master-addr node0 --master-port 29500",
        "--nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint [fe80::1]:29400 --max-restarts 0",
        "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0 --node-rank 7",  # unread
    ],
)
def test_valid_flags_of_torchrun_are_accepted(flags: str) -> None:
    check_flags(torchrun.parse_args([*flags.split(), "script.py"]))
