"""The stack that the contract tests stand on: the pinned packages, imported as Megatron does."""

from __future__ import annotations

from pathlib import Path

from tests.cuda.stack import Stack, pins

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
        # All the real libraries are behind it on the full stack alone.
        assert found["standins"][name] == (cuda_stack.name == "light"), name
    if cuda_stack.name == "full":
        file, num_names = found["extension"]
        assert Path(file).suffix == ".so" and num_names > 100
    assert found["have_te"], "Megatron found no Transformer Engine"
    assert found["platform"] == ["NvmlCudaPlatform", "cuda", [9, 0]]
    assert all(found["operators"])


def test_libraries_load_and_take_the_arguments_that_vllm_gives(
    cuda_stack: Stack, tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("torch.ops._C.rms_norm(1, 2, 3, 4, 5)\ntorch.ops._moe_C.moe_sum(1, out=2)\n")
    found = cuda_stack.run("operators_job", str(wrong))
    of_vllm = [finding for finding in found["unfit"] if not finding.startswith("wrong.py")]
    assert of_vllm == []
    assert len(found["fit"]) > 100 and OPERATORS <= set(found["fit"])
    # Those of other platforms' builds.
    namespaces = {name.partition(".")[0] for name in found["absent"]}
    assert namespaces <= {"_C", "_C_cache_ops", "_C_custom_ar"}
    assert [finding.partition(" is called")[0] for finding in found["unfit"]] == [
        "wrong.py: _C.rms_norm",
        "wrong.py: _moe_C.moe_sum",
    ], "what the job would find"
