"""Packages of the platform are found by importing them, with an apparent GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.common.errors import UsageError
from mcore_rl.common.platform import WITHOUT_CUDA, Platform, find_platform

_ENGINE, _APEX = "transformer_engine", "fused_weight_gradient_mlp_cuda"
_OPTIMIZERS = "emerging_optimizers"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages that only this test can import, beside a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.syspath_prepend(str(tmp_path))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(_ENGINE)}
    find_platform.cache_clear()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith((_ENGINE, _APEX, _OPTIMIZERS))]:
        del sys.modules[name]
    sys.modules.update(kept)
    find_platform.cache_clear()


def write_engine(site: Path, of_torch: str) -> None:
    package = site / _ENGINE
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(of_torch)
    info = site / f"{_ENGINE}-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n"
    )


def test_importable_packages_are_found(site: Path) -> None:
    bare = Platform(cuda=True, emerging_optimizers=False)
    assert find_platform() == bare
    assert find_platform().lacks == "Transformer Engine and Apex's fused weight gradients"
    find_platform.cache_clear()
    write_engine(site, "")
    assert find_platform() == replace(bare, transformer_engine=(2, 20, 2))
    find_platform.cache_clear()
    (site / f"{_APEX}.py").write_text("")
    (site / f"{_OPTIMIZERS}.py").write_text("")
    assert find_platform().fused_weight_gradients and not find_platform().lacks
    assert find_platform().emerging_optimizers


@pytest.mark.parametrize(
    ("of_torch", "reason"),
    [
        ("raise FileNotFoundError('no shared object\\nof torch')", "no shared object of torch"),
        ("import compiled_for_another_torch", "No module named 'compiled_for_another_torch'"),
    ],
)
def test_broken_transformer_engine_is_refused(of_torch: str, reason: str, site: Path) -> None:
    write_engine(site, of_torch)
    says = rf"Transformer Engine .* \({reason}\); run scripts/setup_env.sh, or uninstall it"
    with pytest.raises(UsageError, match=says):
        find_platform()


def test_packages_are_not_searched_without_cuda(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_engine(site, "raise FileNotFoundError")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_platform() == replace(WITHOUT_CUDA, emerging_optimizers=False)


QUERIES = """
import json, os, sys
import torch

seen = []
def recorded(name, ask):
    def query(*args, **options):
        seen.append([name, os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")])
        return ask(*args, **options)
    return query

for name in ("is_available", "device_count", "_lazy_init", "current_device", "mem_get_info",
             "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, recorded(name, getattr(torch.cuda, name)))
import mcore_rl.train
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_queues_are_set_before_cuda_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", QUERIES], capture_output=True, text=True, check=True, timeout=300
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "is_available" in dict(seen) and {queues for _, queues in seen} == {"1"}, seen
