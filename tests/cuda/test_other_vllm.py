"""What does not fit another vLLM: on the pinned one with a few changes, and on the oldest one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cuda import other_vllm, stack
from tests.cuda.test_names import IS_FULL, unaccepted
from tests.vllm_releases import RELEASES, release

# Each is found in another way: by the type checker, by the fields of a class, by a patch.
CHANGES = {
    "model_executor/layers/attention/__init__.py": (
        "def is_deferred_attention_layer(",
        "def is_deferred_attention_layer(*, ",
    ),
    "engine/arg_utils.py": ("    max_num_seqs: int", "    max_num_requests: int"),
    "v1/worker/gpu_model_runner.py": ("gen.get_offset() - 4", "gen.get_offset() - 8"),
}
ROWS = (
    ("name or signature", "live_layers.py", "Expected 0 positional arguments"),
    ("engine argument", "startup.py", "EngineArgs has no max_num_seqs"),
    ("patch", "seeds_of_cut_prompts.py", "get_offset() - 4"),
)


def test_table_has_what_differs_and_nothing_else(cuda_stack: stack.Stack, tmp_path: Path) -> None:
    copy = tmp_path / "vllm"
    shutil.copytree(cuda_stack.site / "vllm", copy, copy_function=os.symlink)
    for name, (old, new) in CHANGES.items():
        text = (copy / name).read_text()
        assert old in text, name
        (copy / name).unlink()
        (copy / name).write_text(text.replace(old, new))
    rows = [str(row) for row in other_vllm.differences(tmp_path)]
    assert len(rows) == len(ROWS), rows
    for row, parts in zip(rows, ROWS, strict=True):
        assert all(part in row for part in parts), row


# What patches repair in newer versions only.
ABSENT = {
    ("experts_one_by_one.py", '"GptOssRoutedExperts" is unknown import symbol'),
    ("experts_one_by_one.py", 'Cannot access attribute "_try_load_streamed_expert"'),
    ("kernels_beside_numba.py", '"dispatcher" is unknown import symbol'),
    ("mla_prefill_together.py", 'Import "vllm.v1.attention.backends.mla.prefill.cpu_sdpa"'),
    ("routes_on_every_rank.py", 'Import "vllm.distributed.aux_output_connector"'),
    ("sigmoid_router_on_cpu.py", 'Import "vllm.model_executor.layers.fused_moe.router.cpu_router"'),
}


@pytest.mark.skipif(
    not IS_FULL, reason="needs each version's wheel for CUDA: scripts/test_cuda_stack.sh runs it"
)
@pytest.mark.parametrize("version", [*RELEASES])
def test_supported_vllms_have_what_we_use(
    version: str, cuda_stack: stack.Stack, tmp_path: Path
) -> None:
    found = other_vllm.names_that_differ(release(version), cuda_stack.site, tmp_path)
    assert unaccepted(found, ABSENT) == []
