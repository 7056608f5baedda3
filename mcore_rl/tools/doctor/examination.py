"""All checks of the doctor, ordered by their dependencies. They leave no files or processes behind.

Megatron is imported once its patches are known to fit, vLLM's engine never. No CUDA context is
created: devices are queried through NVML, by torch as well.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rl.common.machine import machine_memory
from mcore_rl.job.environment import use_own_toolkit
from mcore_rl.planner.settings import USUAL_RANKS_PER_NODE
from mcore_rl.tools.doctor.finding import (
    FLAGS,
    LIMITS,
    NETWORK,
    PATCHES,
    PORTS,
    SHARED_MEMORY,
    SPACE,
    VERSIONS,
    Finding,
    Report,
    Request,
    green,
    plural,
    red,
)
from mcore_rl.tools.doctor.gpus import Gpus, find_gpus
from mcore_rl.tools.doctor.network import (
    check_network,
    find_devices,
    infiniband_devices,
)
from mcore_rl.tools.doctor.ports import check_ports
from mcore_rl.tools.doctor.space import (
    check_folder,
    check_host_memory,
    check_locked_memory,
    check_open_files,
    check_saves,
    check_shared_memory,
)
from mcore_rl.tools.doctor.versions import (
    check_flashinfer,
    check_versions,
    installed_versions,
    vllm_requirements,
)

if TYPE_CHECKING:
    from mcore_rl.tools.doctor.job import Job


def examine(request: Request) -> list[Finding]:
    """Run every check; return the findings in the order of `AREAS`."""
    report = Report()
    # Copied before Megatron is imported, which sets variables of this process.
    environment = dict(os.environ)
    # Makes torch count devices through NVML, without starting CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gpus, megatron_can_start = _examine_installation(report)
    job = None
    if request.tokens and megatron_can_start and not report.has_red(FLAGS):
        from mcore_rl.tools.doctor.job import examine_job  # imports Megatron

        job = examine_job(report, request, gpus, environment)
    examine_machine(report, request, job, gpus, environment)
    return report.sorted()


def _examine_installation(report: Report) -> tuple[Gpus, bool]:
    """Return the machine's GPUs, and whether Megatron can be imported."""
    gpus, has_torch, torch_cuda = Gpus(), False, None
    # Each by itself, so that a failing import does not hide the versions.
    with report.catching(VERSIONS):
        gpus = find_gpus()
    with report.catching(VERSIONS):
        import torch

        has_torch, torch_cuda = True, torch.version.cuda
        if gpus.devices:
            gpus = dataclasses.replace(gpus, num_visible=torch.cuda.device_count())
    with report.catching(VERSIONS):
        report.findings += check_versions(
            installed_versions(), gpus, torch_cuda=torch_cuda, vllm_wants=vllm_requirements()
        )
    if not has_torch:
        return gpus, False
    if torch_cuda is not None and gpus.devices:
        report.add(VERSIONS, _flashinfer)
    report.add(PATCHES, _megatron_patches)
    can_start = not report.has_red(PATCHES)
    report.add(PATCHES, _vllm_patches)
    if can_start:
        report.add(FLAGS, _taken_flags)
    else:
        what = "the command line and what it names are not examined: Megatron cannot be imported"
        report.findings.append(red(FLAGS, what, "correct the installation first"))
    return gpus, can_start


def _flashinfer() -> Iterator[Finding]:
    from vllm.utils.flashinfer import has_flashinfer

    use_own_toolkit()  # as the launcher
    yield check_flashinfer(has_flashinfer(), os.environ.get("CUDA_HOME"))


def _megatron_patches() -> Iterator[Finding]:
    from mcore_rl.common.megatron_version import check_megatron
    from mcore_rl.patches.megatron import PATCHES as MEGATRON_PATCHES
    from mcore_rl.tools.doctor.patches import check_patches

    check_megatron()
    yield from check_patches(MEGATRON_PATCHES, "Megatron", apply=True)


def _vllm_patches() -> Iterator[Finding]:
    from mcore_rl.patches.megatron import PATCHES as MEGATRON_PATCHES
    from mcore_rl.patches.vllm import patches
    from mcore_rl.tools.doctor.patches import check_patches

    # Applying them would import vLLM's models; they name exact versions. Both have torch's.
    own = [patch for patch in patches() if patch not in MEGATRON_PATCHES]
    yield from check_patches(own, "vLLM", apply=False)


def _taken_flags() -> Iterator[Finding]:
    from mcore_rl.megatron.adapter import make_parser
    from mcore_rl.tools.doctor.flags import check_taken_flags

    yield from check_taken_flags(make_parser())


def examine_machine(
    report: Report, request: Request, job: Job | None, gpus: Gpus, environment: Mapping[str, str]
) -> None:
    """Examine ports, limits, space and network for the ranks of the job on this machine; without a
    job, for one rank per visible GPU."""
    if request.world_size is None:
        ranks = world_size = gpus.num_ranks
    else:
        world_size = request.world_size
        per_node = job.config.engine.ranks_per_node if job else 0
        ranks = min(per_node or USUAL_RANKS_PER_NODE, world_size)
    report.add(PORTS, lambda: check_ports(environment, local_ranks=ranks))
    report.add(SHARED_MEMORY, lambda: check_shared_memory(local_ranks=ranks))
    report.add(LIMITS, lambda: _limits(world_size, gpus))
    report.add(SPACE, lambda: _space(job, ranks))
    report.add(NETWORK, lambda: _network(job, gpus, ranks, world_size, environment))
    if gpus.devices:
        report.add(NETWORK, lambda: _visible_devices(job, ranks, environment))


def _limits(world_size: int, gpus: Gpus) -> Iterator[Finding]:
    yield check_open_files(world_size)
    if gpus.devices and infiniband_devices():
        yield check_locked_memory()


def _space(job: Job | None, ranks: int) -> Iterator[Finding]:
    saves = job.saves() if job else None
    if saves is not None:
        yield check_saves(saves)
    yield check_folder("temporary files", Path(tempfile.gettempdir()))
    if job is not None:
        yield check_folder("the run directory", job.config.run.directory)
        phase = job.fullest_on_host(ranks)
        if phase is not None:
            yield check_host_memory(phase, machine_memory(), ranks=ranks)


def _visible_devices(
    job: Job | None, ranks: int, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the GPUs that a process sees with the ranks of the job on this machine."""
    import torch

    from mcore_rl.job.environment import check_devices

    visible = torch.cuda.device_count()
    rollout = job.facts.rollout if job else None
    # The launcher numbers its ranks; in a task of Slurm's, the number is there.
    local_rank = environment.get("LOCAL_RANK") or str(ranks - 1)
    check_devices(
        visible,
        local_rank=int(local_rank),
        ranks_per_node=ranks,
        rollout_tp_size=rollout.tp_size if rollout else 1,
    )
    yield green(NETWORK, f"each process sees {plural(visible, 'GPU')}, for {plural(ranks, 'rank')}")


def _network(
    job: Job | None, gpus: Gpus, ranks: int, world_size: int, environment: Mapping[str, str]
) -> Iterator[Finding]:
    yield from check_network(
        environment,
        find_devices(),
        local_ranks=ranks,
        num_nodes=1 if job is None else math.ceil(world_size / ranks),
        has_gpu=bool(gpus.devices),
    )
    if job is not None:
        capabilities = [device.capability for device in gpus.devices]
        yield from job.check_network(environment, capabilities)
