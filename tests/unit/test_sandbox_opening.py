"""docs/using/security.md lists exactly what the sandbox's filter leaves open."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path

from mcore_rl.isolation import confine, seccomp, supervisor
from mcore_rl.sandbox.runner import run_python

PAGE = Path(__file__).parents[2] / "docs/using/security.md"
CODE = r"""
import ctypes, fcntl, json, mmap, os, platform, threading, time

def machine_code():
    memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
    memory.write(b"\xb8\x2a\x00\x00\x00\xc3" if platform.machine() == "x86_64"
                 else b"\x40\x05\x80\x52\xc0\x03\x5f\xd6")
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)()

def threads():
    event = threading.Event()
    running = [threading.Thread(target=event.wait) for _ in range(20)]
    for thread in running: thread.start()
    count = threading.active_count()
    event.set()
    return count

class Info(ctypes.Structure):
    _fields_ = [("up", ctypes.c_long), ("loads", ctypes.c_ulong * 3), ("bytes", ctypes.c_ulong),
                ("rest", ctypes.c_char * 256)]

def memory():
    info = Info()
    assert ctypes.CDLL(None).sysinfo(ctypes.byref(info)) == 0
    return info.bytes

with open(os.__file__) as file:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
time.clock_gettime_ns(time.CLOCK_MONOTONIC), os.times(), os.statvfs(os.__file__)
print(json.dumps({"code": machine_code(), "release": os.uname().release, "threads": threads(),
                  "processors": sorted(os.sched_getaffinity(0)), "bytes": memory()}))
"""


def section() -> str:
    return PAGE.read_text().partition("### What the filter leaves open")[2].partition("\n## ")[0]


def test_listed_calls_match_the_filter():
    allowed = " ".join([seccomp.ANY_ARGUMENTS, *seccomp.WITH_CONDITIONS])
    names = {call.split(":")[0] for call in allowed.split()}
    table, refused = section().split("are often the way")
    calls = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = set(re.findall(r"`(\w+)`", " ".join(calls)))
    assert len(listed) > 25 and listed <= names
    assert not set(re.findall(r"`(\w+)`", refused)) & names
    assert supervisor.MAX_THREADS == confine._MAX_DESCRIPTORS == 128
    assert "up to 128 threads" in table and "up to 128 descriptors" in table


def test_listed_openings_work():
    """Without what differs between the levels of protection."""
    found = run_python(CODE, [], timeout_seconds=60.0)
    assert found.ended, found.stderr
    assert json.loads(found.stdout) == {
        "code": 42,
        "release": platform.release(),
        "threads": 21,
        "processors": sorted(os.sched_getaffinity(0)),
        "bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
