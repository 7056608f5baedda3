"""Stores that ranks reach on loopback are open to nobody else, and work as before.

In processes of their own, because a repair stays applied.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from mcore_rl import launch
from mcore_rl.common import loopback
from mcore_rl.patches.torch.loopback_stores import is_loopback

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

from mcore_rl.common.loopback import stay_on_loopback
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


def test_stores_on_loopback_are_bound_to_it_and_others_are_not() -> None:
    done = subprocess.run([sys.executable, "-c", STORES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "done"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_hosts_that_are_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "node7", "127.0.0.1.example"])
def test_hosts_that_may_be_another(host: str) -> None:
    assert not is_loopback(host)


def test_only_what_is_not_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "apply_patch", lambda patch: True)
    monkeypatch.setattr(os, "environ", {"VLLM_HOST_IP": "10.0.0.1"})
    assert not loopback.stay_on_loopback("node7")
    assert os.environ == {"VLLM_HOST_IP": "10.0.0.1"}
    assert loopback.stay_on_loopback("localhost")
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
def test_the_launcher_stays_where_its_flags_say(flags: dict[str, str], is_local: bool) -> None:
    defaults = {"nnodes": "1", "rdzv_endpoint": "", "master_addr": "127.0.0.1"}
    args = argparse.Namespace(**{"local_addr": "127.0.0.1", **defaults, **flags})
    assert is_loopback(launch._meeting_place(args)) == is_local
