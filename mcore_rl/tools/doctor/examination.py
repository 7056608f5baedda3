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

from mcore_rl.job.environment import check_devices, use_own_toolkit
from mcore_rl.planner.settings import USUAL_RANKS_PER_NODE
from mcore_rl.tools.doctor import installation, machine
from mcore_rl.tools.doctor.finding import Finding, Report, Request, green, plural, red
from mcore_rl.tools.doctor.installation import Gpus
from mcore_rl.tools.doctor.network import check_network, find_devices, infiniband_devices

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
    if request.tokens and megatron_can_start and not report.has_red("flags"):
        from mcore_rl.tools.doctor.job import examine_job  # imports Megatron

        job = examine_job(report, request, gpus, environment)
    examine_machine(report, request, job, gpus, environment)
    return report.sorted()


def _examine_installation(report: Report) -> tuple[Gpus, bool]:
    """Return the machine's GPUs, and whether Megatron can be imported."""
    gpus, has_torch, torch_cuda = Gpus(), False, None
    # Each by itself, so that a failing import does not hide the versions.
    with report.catching("versions"):
        gpus = installation.find_gpus()
    with report.catching("versions"):
        import torch

        has_torch, torch_cuda = True, torch.version.cuda
        if gpus.devices:
            gpus = dataclasses.replace(gpus, num_visible=torch.cuda.device_count())
    with report.catching("versions"):
        report.findings += installation.check_versions(
            installation.installed_versions(),
            gpus,
            torch_cuda=torch_cuda,
            vllm_wants=installation.vllm_requirements(),
        )
    if not has_torch:
        return gpus, False
    if torch_cuda is not None and gpus.devices:
        with report.catching("versions"):
            from vllm.utils.flashinfer import has_flashinfer

            use_own_toolkit()  # as the launcher
            compiler = os.environ.get("CUDA_HOME")
            report.findings.append(installation.check_flashinfer(has_flashinfer(), compiler))
    can_start = False
    with report.catching("patches"):
        from mcore_rl.common.megatron_version import check_megatron
        from mcore_rl.patches.megatron import PATCHES

        check_megatron()
        report.findings += installation.check_patches(PATCHES, "Megatron", apply=True)
        can_start = not report.has_red("patches")
    with report.catching("patches"):
        from mcore_rl.patches.vllm import patches

        # Applying them would import vLLM's models; they name exact versions. Both have torch's.
        own = [patch for patch in patches() if patch not in PATCHES]
        report.findings += installation.check_patches(own, "vLLM", apply=False)
    if can_start:
        with report.catching("flags"):
            from mcore_rl.megatron.adapter import make_parser
            from mcore_rl.tools.doctor.flags import check_taken_flags

            report.findings += check_taken_flags(make_parser())
    else:
        what = "the command line and what it names are not examined: Megatron cannot be imported"
        report.findings.append(red("flags", what, "correct the installation first"))
    return gpus, can_start


def examine_machine(
    report: Report, request: Request, job: Job | None, gpus: Gpus, environment: Mapping[str, str]
) -> None:
    """Examine ports, limits, space and network for the ranks of the job on this machine; without a
    job, for one rank per visible GPU."""
    world_size = request.world_size or gpus.num_ranks
    ranks = world_size
    if request.world_size is not None:
        per_node = job.config.engine.ranks_per_node if job else 0
        ranks = min(per_node or USUAL_RANKS_PER_NODE, world_size)
    report.add("ports", lambda: machine.check_ports(environment, local_ranks=ranks))
    report.add("shared memory", lambda: machine.check_shared_memory(local_ranks=ranks))
    has_infiniband = bool(gpus.devices and infiniband_devices())
    report.add("limits", lambda: machine.check_limits(world_size, has_infiniband=has_infiniband))
    here = {"temporary files": Path(tempfile.gettempdir())}
    here |= {} if job is None else {"the run directory": job.config.run.directory}
    report.add("space", lambda: [machine.check_folder(*each) for each in here.items()])
    nodes, has_gpu = 1 if job is None else math.ceil(world_size / ranks), bool(gpus.devices)
    with report.catching("network"):
        report.findings += check_network(
            *(environment, find_devices()), local_ranks=ranks, num_nodes=nodes, has_gpu=has_gpu
        )
    if job is not None:
        from mcore_rl.tools.doctor.job import check_network_of, check_space

        capabilities = [device.capability for device in gpus.devices]
        report.add("space", lambda: check_space(job, ranks))
        report.add("network", lambda: check_network_of(job, environment, capabilities))
    if has_gpu:
        report.add("network", lambda: _visible_devices(job, ranks, environment))


def _visible_devices(
    job: Job | None, ranks: int, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the GPUs that a process sees with the ranks of the job on this machine."""
    import torch

    visible, rollout = torch.cuda.device_count(), job.facts.rollout if job else None
    check_devices(
        visible,
        # The launcher numbers its ranks; in a task of Slurm's, the number is there.
        local_rank=int(environment.get("LOCAL_RANK") or ranks - 1),
        ranks_per_node=ranks,
        rollout_tp_size=rollout.tp_size if rollout else 1,
    )
    yield green(
        "network", f"each process sees {plural(visible, 'GPU')}, for {plural(ranks, 'rank')}"
    )
