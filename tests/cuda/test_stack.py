"""The stack that the contract tests stand on: the pinned packages, imported as Megatron does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cuda.stack import TIER, Stack, pins

IS_FULL = os.environ.get(TIER) == "full"
# What generation calls on a GPU, whatever the model.
OPERATORS = {
    *("_C.rms_norm", "_C.fused_add_rms_norm", "_C.rotary_embedding"),
    *("_moe_C.topk_softmax", "_moe_C.moe_align_block_size", "_moe_C.grouped_topk"),
    *("_C_cache_ops.reshape_and_cache_flash", "_C_cache_ops.concat_and_cache_mla"),
}


def test_jobs_import_the_pinned_packages_of_cuda(cuda_stack: Stack) -> None:
    found = cuda_stack.run("imports_job")

    wanted = pins()
    assert found["torch"].split("+")[0] == wanted["torch"]
    for package, name in (("vllm", "vllm"), ("transformer-engine", "transformer_engine")):
        version, file = found[name]
        assert version.split("+")[0] == wanted[package], name
        assert Path(file).is_relative_to(cuda_stack.site), name
        # The real libraries are behind it on the full stack alone.
        assert found["standins"][name] == (cuda_stack.name == "light"), name
    assert found["have_te"], "Megatron found no Transformer Engine"
    assert found["platform"] == ["NvmlCudaPlatform", "cuda", [9, 0]]
    assert all(found["operators"])


@pytest.mark.skipif(not IS_FULL, reason="the light stack has no libraries")
def test_libraries_load_and_take_the_arguments_that_vllm_gives(cuda_stack: Stack) -> None:
    found = cuda_stack.run("operators_job")
    assert found["unfit"] == []
    assert len(found["fit"]) > 100 and OPERATORS <= set(found["fit"])
    # Those of the CPU build and of other cards.
    assert {name.partition(".")[0] for name in found["absent"]} <= {"_C", "_C_custom_ar"}
    assert Path(found["extension"]).suffix == ".so" and found["names"] > 100
