"""The Megatron that is imported, whatever pip's record says, and refusals of unsupported ones.

The search for modules runs in a separate process: this one has imported its Megatron.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rl.common.errors import UsageError
from mcore_rl.common.megatron_version import MegatronSource, stated_version
from mcore_rl.megatron.model_class import AUTO, HYBRID, choose_model_class
from tests.megatron_sources import installed_megatron, megatron_on_the_path, write_version

SAY_WHAT_IS_FOUND = """
import sys
from mcore_rl.common.megatron_version import check_megatron
found = check_megatron()
print(found.version, found.folder)
assert not [name for name in sys.modules if name.startswith("megatron.")], "something of it ran"
"""


def python(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=500,
    )


def git(folder: Path, *command: str) -> str:
    named = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    run = subprocess.run(
        ["git", "-C", str(folder), *named, *command], capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def test_checkout_on_path_precedes_installed_megatron(tmp_path: Path) -> None:
    megatron_on_the_path(tmp_path, "0.18.7")
    run = python("-c", SAY_WHAT_IS_FOUND, path=tmp_path)
    assert run.stdout == f"0.18.7 {tmp_path}\n", run.stderr


def test_pip_record_of_other_version_is_ignored(tmp_path: Path) -> None:
    record = tmp_path / "megatron_core-0.16.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n"
    )
    run = python("-c", SAY_WHAT_IS_FOUND, path=tmp_path)
    assert run.stdout.split()[1:] == [str(installed_megatron())], run.stderr


def test_megatron_without_training_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """As of 0.16.1, beside which the `megatron.training` of the installed one is found."""
    write_version(tmp_path, "0.16.1")
    run = python("-m", "mcore_rl.train", path=tmp_path)
    assert run.returncode == 2
    assert run.stderr == (
        f"mcore_rl: error: megatron-core 0.16.1, which Python finds in {tmp_path}, lacks "
        f"megatron.training (that in {installed_megatron()} belongs to another Megatron); mcore_rl "
        "runs with 0.18.0 to 0.20.0: pip install megatron-core==0.19.2, or put a checkout of one "
        "of them first on PYTHONPATH\n"
    )


def test_missing_module_of_older_checkout_is_named(tmp_path: Path) -> None:
    """0.16 has a `megatron.training`, and builds tokenizers elsewhere."""
    megatron_on_the_path(tmp_path, "0.16.0")
    (tmp_path / "megatron/core/tokenizers/utils/build_tokenizer.py").unlink()
    run = python("-m", "mcore_rl.verify", path=tmp_path)
    assert run.returncode == 2
    assert "lacks megatron.core.tokenizers.utils.build_tokenizer; mcore_rl runs with" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_code_that_patch_does_not_fit_is_refused_with_reason(tmp_path: Path) -> None:
    megatron_on_the_path(tmp_path, "0.21.0", changed=True)
    run = python("-m", "mcore_rl.train", path=tmp_path)
    assert run.returncode == 2
    error = run.stderr.splitlines()[-1]
    assert error.startswith("mcore_rl: error: patch megatron.packed_rope (")
    assert "does not fit the code of megatron-core 0.21.0: " in error
    assert "takes t, a_parameter_of_a_fork, cu_seqlens" in error
    assert "Traceback" not in run.stderr


def test_commit_is_that_of_checkout(tmp_path: Path) -> None:
    write_version(tmp_path, "0.20.0")
    source = MegatronSource(tmp_path, "0.20.0")
    assert source.commit() is None
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "megatron")
    git(tmp_path, "commit", "--quiet", "--message", "a fork")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert source.commit() == commit and len(commit) == 40
    (tmp_path / "megatron/core/__init__.py").write_text("changed = True\n")
    assert source.commit() == f"{commit}-dirty"


def test_environment_inside_other_checkout_has_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "not Megatron's")
    write_version(tmp_path / "packages", "0.20.0")
    assert MegatronSource(tmp_path / "packages", "0.20.0").commit() is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = 'rc3'\n__version__ = f()", "0.20.1rc3"),
        ("__version__ = '0.19.2+ours'", "0.19.2+ours"),
    ],
)
def test_version_is_read_without_execution(text: str, version: str, tmp_path: Path) -> None:
    file = tmp_path / "package_info.py"
    file.write_text(f"{text}\n")
    assert stated_version(file) == version


@pytest.mark.parametrize("text", ["", "__version__ = f()", "MAJOR = ("])
def test_file_without_version_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "package_info.py"
    file.write_text(text)
    with pytest.raises(UsageError, match=f"{file} does not say which Megatron it is"):
        stated_version(file)


SAY_CLASSES = """
from mcore_rl.common.errors import UsageError
from mcore_rl.megatron.model_class import choose_model_class
for requested in ("auto", "gpt", "hybrid"):
    for values in ({}, {"spec": ["module", "name"]}):
        try:
            print(choose_model_class(requested, values).describe())
        except UsageError as error:
            print(error)
"""
GIVEN = {name: f"{name}, as --rl-model-class .* is given" for name in ("GPTModel", "HybridModel")}
NOT_WITH_SPEC = "--rl-model-class {} is not possible with --spec module name, which .*; drop {}"
NO_HYBRID = "--rl-model-class hybrid asks for .*HybridModel.*; give gpt"
NO_GPT = "--rl-model-class gpt asks for .*GPTModel; give hybrid"


@pytest.mark.parametrize(
    ("has_gpt_model", "deprecates_gpt_model", "has_hybrid_model", "said"),
    [
        (
            *(True, True, True),
            [
                "HybridModel, as megatron-core 0.19.7 has deprecated GPTModel",
                "GPTModel, as --spec module name is given, which .*",
                *(GIVEN["GPTModel"], GIVEN["GPTModel"]),
                *(GIVEN["HybridModel"], NOT_WITH_SPEC.format("hybrid", "one of the two")),
            ],
        ),
        (
            *(True, False, True),
            [
                *["GPTModel, as megatron-core 0.19.7 has not deprecated it"] * 2,
                *(GIVEN["GPTModel"], GIVEN["GPTModel"]),
                *(GIVEN["HybridModel"], NOT_WITH_SPEC.format("hybrid", "one of the two")),
            ],
        ),
        (
            *(False, True, True),
            [
                "HybridModel, as megatron-core 0.19.7 has no GPTModel",
                NOT_WITH_SPEC.format("auto", "--spec .*"),
                *(NO_GPT, NO_GPT),
                *(GIVEN["HybridModel"], NOT_WITH_SPEC.format("hybrid", "--spec .*")),
            ],
        ),
        (
            *(True, True, False),
            [
                *["GPTModel, as megatron-core 0.19.7 has no HybridModel .*"] * 2,
                *(GIVEN["GPTModel"], GIVEN["GPTModel"]),
                *(NO_HYBRID, NO_HYBRID),
            ],
        ),
    ],
)
def test_model_class_is_what_megatron_recommends_and_the_flags_allow(
    has_gpt_model: bool,
    deprecates_gpt_model: bool,
    has_hybrid_model: bool,
    said: list[str],
    tmp_path: Path,
) -> None:
    megatron_on_the_path(
        tmp_path, "0.19.7", has_gpt_model=has_gpt_model, deprecates_gpt_model=deprecates_gpt_model
    )
    if not has_hybrid_model:
        (tmp_path / "megatron/core/models/hybrid/hybrid_layer_allocation.py").unlink()
    found = python("-c", SAY_CLASSES, path=tmp_path)
    lines = found.stdout.splitlines()
    assert len(lines) == len(said), found.stderr
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(said, lines, strict=True)), (
        lines
    )


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "hybrid"),
        ({"cpu_offloading_num_layers": 2}, "gpt"),
        ({"first_last_layers_bf16": True}, "gpt"),
        ({"te_precision_config_file": "recipe.yaml"}, "gpt"),
        ({"ckpt_format": "torch"}, "gpt"),
        ({"ckpt_format": "fsdp_dtensor", "cpu_offloading_num_layers": 0}, "hybrid"),
    ],
)
def test_flags_that_hybrid_model_does_not_support_choose_the_other_class(
    values: dict[str, Any], name: str
) -> None:
    assert choose_model_class(AUTO, values).name == name
    if name == "gpt":
        with pytest.raises(UsageError, match="--rl-model-class hybrid is not possible with --"):
            choose_model_class(HYBRID, values)
