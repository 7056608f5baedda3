"""The stack that the contract tests stand on: the pinned packages, imported as Megatron does."""

from __future__ import annotations

from pathlib import Path

from tests.cuda.stack import Stack, pins


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
