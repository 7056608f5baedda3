"""Files with arbitrary content are read or refused with UsageError."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from mcore_rl.common.errors import UsageError
from mcore_rl.data.prompt_file import PromptSource, check_prompts
from mcore_rl.megatron.hf_checkpoint import open_checkpoint
from mcore_rl.observe.run_directory import read_metrics
from tests import hostile
from tests.model_shapes import small_shape

ROW = {"prompt": "2+3=", "answer": "5", "more": [1, {"a": None}]}
CHAT = {"prompt": [{"role": "user", "content": "2+3="}], "answer": ["5", "five"]}
LINE = {"step": 3, "reward/mean": 0.5}
INDEX_FIELDS = {"metadata": {"total_size": 8}, "weight_map": {"a": "model.safetensors"}}
SHAPE = small_shape()
FEW = settings(hostile.BOUNDED, max_examples=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@FEW
@given(st.lists(hostile.messages(ROW) | hostile.messages(CHAT), min_size=1, max_size=3))
def test_any_prompts_are_counted_or_refused(folder, lines):
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(lines))
    try:
        assert check_prompts(PromptSource(path, max_prompt_tokens=64)) >= 0
    except UsageError as error:
        assert "--rl-prompt" in error.flag and error.remedy
        str(error).encode()


@FEW
@given(st.lists(hostile.messages(LINE), max_size=4))
def test_invalid_lines_of_metrics_are_skipped(folder, lines):
    path = folder / "metrics.jsonl"
    path.write_bytes(b"\n".join([json.dumps(LINE).encode(), *lines]))
    found = read_metrics(path)
    assert 3 in found
    assert all(type(step) is int and isinstance(found[step], dict) for step in found)


@FEW
@given(hostile.messages(INDEX_FIELDS))
def test_index_names_files_of_folder_or_is_refused(folder, data):
    save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(data)
    try:
        checkpoint = open_checkpoint(folder, SHAPE)
    except UsageError as error:
        assert error.remedy
        str(error).encode()
    else:
        assert set(checkpoint.tensors) <= {"a"}
