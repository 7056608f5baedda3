"""LoRA in every layout against a dense reference: W + (alpha / r) B A of each layer, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from mcore_rl.common.errors import UsageError
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.model.lora import Lora, LoraOptions, is_expert, peft_names, resolve_lora
from mcore_rl.trainer.resume.adapters import check_stored_adapters
from tests.dist.checkpoints import (
    assert_log_probs_equal_transformers,
    differing,
    loaded,
    log_probs_of,
    tensors_of,
)
from tests.dist.jobs import random_tokens
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.updates import TOLERANCE
from tests.multimodal import make_multimodal
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400)]

JOBS = "tests.dist.lora_jobs"
RANK, ALPHA = 4, 6.0
SCALE = ALPHA / RANK
LORA = ("--rl-lora-rank", str(RANK), "--rl-lora-alpha", str(ALPHA))
# Adam's epsilon is large, so that a step shows the gradient and not its sign.
RATES = tuple("--rl-kl-coef 0.05 --adam-eps 1.0 --lr 0.5".split())


def start_from(adapter: Path) -> tuple[str, ...]:
    return (*LORA, "--rl-lora-adapter", str(adapter))


def lora_of(checkpoint: Path, targets: str | None = None) -> Lora:
    options = LoraOptions(rank=RANK, alpha=ALPHA, targets=targets)
    found = resolve_lora(options, read_model_shape(checkpoint))
    assert found is not None
    return found


def random_adapter(checkpoint: Path, folder: Path, targets: str | None = None) -> Path:
    """An adapter in PEFT's format whose two factors are random."""
    lora, generator = lora_of(checkpoint, targets), torch.Generator().manual_seed(11)
    tensors = {}
    for layer, a, b in peft_names(lora):
        rows, columns = lora.modules[layer]
        tensors[a] = torch.randn(RANK, columns, generator=generator) * 0.1
        tensors[b] = torch.randn(rows, RANK, generator=generator) * 0.1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(lora.targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def weight_of(tensors: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """A view of a layer's weight `[o, i]` in a folder's tensors.

    Stacked experts are `[e, i, o]`, gate and up-projection in alternating columns, as gpt-oss has
    them."""
    if f"{layer}.weight" in tensors:
        return tensors[f"{layer}.weight"]
    experts, number, kind = layer.rsplit(".", 2)
    if kind == "w2":
        return tensors[f"{experts}.down_proj"][int(number)].t()
    both = tensors[f"{experts}.gate_up_proj"][int(number)]
    return both[:, {"w1": 0, "w3": 1}[kind] :: 2].t()


def factors_of(folder: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Layer -> A and B of an adapter's folder, in float64."""
    found = load_file(folder / "adapter_model.safetensors")
    start, end = "base_model.model.", ".lora_A.weight"
    return {
        name[len(start) : -len(end)]: (
            found[name].double(),
            found[name.replace("lora_A", "lora_B")].double(),
        )
        for name in found
        if name.endswith(end)
    }


def merged_by_hand(checkpoint: Path, adapter: Path, folder: Path) -> Path:
    """A copy of a checkpoint in float32 with an adapter merged, layer by layer."""
    shutil.copytree(checkpoint, folder)
    tensors = {name: value.float() for name, value in tensors_of(checkpoint).items()}
    for layer, (a, b) in factors_of(adapter).items():
        target = weight_of(tensors, layer)
        target += SCALE * b @ a
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapted(
    checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path, Path]]:
    """`adapted(arch)`: a checkpoint, a random adapter, and both merged by hand."""
    folder = tmp_path_factory.mktemp("adapted")

    def make(arch: str) -> tuple[Path, Path, Path]:
        # Of four layers each of two stages has two chunks.
        overrides = {"num_hidden_layers": 4} if arch == "qwen3" else None
        checkpoint = checkpoint_factory(arch, overrides=overrides)
        adapter, merged = folder / arch, folder / f"{arch}+"
        if not adapter.exists():
            merged_by_hand(checkpoint, random_adapter(checkpoint, adapter), merged)
        return checkpoint, adapter, merged

    return make


@pytest.mark.parametrize(
    ("arch", "split", "more"),
    [
        ("deepseek_v3", "tp1_pp1_ep1", ""),
        ("deepseek_v3", "tp2_pp2_ep2", ""),
        ("qwen3", "tp2_pp2_ep1", ""),
        ("gpt_oss", "tp2_pp1_ep2", ""),
        ("qwen2_moe", "tp2_pp1_ep1", "--expert-tensor-parallel-size 2"),
        ("qwen3_next", "tp1_pp1_ep2", ""),
    ],
)
def test_forward_and_export_equal_the_dense_reference(
    arch: str,
    split: str,
    more: str,
    adapted: Callable[[str], tuple[Path, Path, Path]],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    checkpoint, adapter, expected = adapted(arch)
    log_probs = ranks.run(
        f"{JOBS}:log_probs_and_exports",
        world_size=SPLITS[split][3],
        flags=[*job_flags(checkpoint, split, *start_from(adapter)), *more.split()],
        target=tmp_path,
    )
    assert_log_probs_equal_transformers(log_probs, expected)
    found = tensors_of(tmp_path / "merged")
    for name, value in tensors_of(expected).items():
        assert (found[name] - value).abs().max() <= 1e-7, name
    assert differing(tmp_path / "adapter", adapter) == []


@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3", "gpt_oss"])
def test_gradients_are_those_of_the_dense_reference(
    arch: str,
    adapted: Callable[[str], tuple[Path, Path, Path]],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """By the chain rule from dW of the merged model, all of whose weights are trained."""
    checkpoint, adapter, merged = adapted(arch)
    common = ("tp1_pp1_ep1", "--clip-grad", "0")
    for folder, flags in (
        ("dense", job_flags(merged, *common)),
        ("lora", job_flags(checkpoint, *common, *start_from(adapter))),
    ):
        (counts,) = ranks.run(
            f"{JOBS}:gradients", world_size=1, flags=flags, target=tmp_path / folder
        )
    made, kept = counts[::2], counts[1::2]
    assert min(made) > 0 and max(kept) == 0  # autograd keeps none for the backward pass
    dense = {n: g.double() for n, g in tensors_of(tmp_path / "dense").items()}
    found = factors_of(tmp_path / "lora")
    for layer, (a, b) in factors_of(adapter).items():
        gradient = weight_of(dense, layer)
        for expected, value in (
            (SCALE * b.t() @ gradient, found[layer][0]),
            (SCALE * gradient @ a.t(), found[layer][1]),
        ):
            assert (value - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-9, layer


def learned(
    ranks: RankPool, flags: list[str], num_processes: int, target: Path, job: str = "learn"
) -> dict[str, Any]:
    results = ranks.run(f"{JOBS}:{job}", world_size=num_processes, flags=flags, target=target)
    assert all(result["steps"] == results[0]["steps"] for result in results), "ranks disagree"
    for result in results:
        assert result["base is unchanged"] and result["only adapters are trained"]
        assert all(result["references"])
        padding = 64 * 2 * len(lora_of(Path(flags[1])).modules) + 4096
        least = result["adapter_elements"]
        assert least <= result["gradient_elements"] <= least + padding
    return results[0]


# Pipeline stages, and virtual ones; experts and data parallelism; packed samples; experts split by
# rows; recomputed layers, whose input has no gradient of its own; context parallelism.
LAYOUTS = {
    "tp2_pp2_ep2": ("deepseek_v3", "tp2_pp2_ep2", "--rl-max-tokens-per-microbatch 128"),
    "dp2_ep2": (
        "deepseek_v3",
        "tp1_pp1_ep2",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "etp2": (
        "deepseek_v3",
        "tp2_pp1_ep1",
        "--expert-tensor-parallel-size 2 --rl-model-class gpt "
        "--rl-offload gradients,optimizer,parameters",
    ),
    "overlap": ("qwen3", "dp2", "--overlap-grad-reduce --overlap-param-gather"),
    "tp2_vpp2": ("qwen3", "tp2_pp2_ep1", "--num-layers-per-virtual-pipeline-stage 1"),
    "ep2_tp2": ("gpt_oss", "tp2_pp1_ep2", ""),
    "cp2": (
        "deepseek_v3",
        "tp1_pp1_ep2",
        "--context-parallel-size 2 --rl-max-tokens-per-microbatch 128",
    ),
}


@pytest.fixture(scope="module")
def alone(
    adapted: Callable[[str], tuple[Path, Path, Path]],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[dict[str, Any], Path]]:
    """`alone(arch)`: what one process learns that has the whole model."""
    made: dict[str, tuple[dict[str, Any], Path]] = {}

    def learn(arch: str) -> tuple[dict[str, Any], Path]:
        if arch not in made:
            checkpoint, adapter, _ = adapted(arch)
            target = tmp_path_factory.mktemp("alone")
            flags = job_flags(checkpoint, "tp1_pp1_ep1", *RATES, *start_from(adapter))
            made[arch] = learned(ranks, flags, 1, target), target
        return made[arch]

    return learn


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_learn_what_one_process_learns(
    layout: str,
    adapted: Callable[[str], tuple[Path, Path, Path]],
    alone: Callable[[str], tuple[dict[str, Any], Path]],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    arch, split, more = LAYOUTS[layout]
    checkpoint, adapter, _ = adapted(arch)
    size = 1 if "max-tokens" in more else 2
    flags = job_flags(
        checkpoint, split, *RATES, *start_from(adapter), *more.split(), micro_batch_size=size
    )
    found = learned(ranks, flags, SPLITS[split][3], tmp_path)
    expected, folder = alone(arch)
    for step, expected_step in zip(found["steps"], expected["steps"], strict=True):
        for name, value in expected_step.items():
            assert step[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name
    before, after = factors_of(adapter), factors_of(tmp_path / "adapter")
    for layer, factors in factors_of(folder / "adapter").items():
        for old, value, mine in zip(before[layer], factors, after[layer], strict=True):
            change = (value - old).abs().max()
            # No token may have chosen an expert.
            assert change > 0 or is_expert(layer), f"{layer} was not trained"
            assert (mine - value).abs().max() <= 1e-3 * change + 1e-7, layer


@pytest.mark.parametrize(
    ("targets", "split", "more"),
    [
        ("experts.down_proj", "tp1_pp1_ep2", ()),
        ("mlp.up_proj", "tp1_pp2_ep1", ()),
        ("self_attn.o_proj", "dp2", ("--rl-algorithm", "ppo")),
    ],
)
def test_stage_or_kind_of_parameters_may_have_no_adapters(
    targets: str,
    split: str,
    more: tuple[str, ...],
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """Only routed experts are trained, or only the dense layer of the first stage; or attention,
    beside a critic all of whose weights are trained."""
    flags = [*RATES, *LORA, "--rl-lora-targets", targets, *more]
    results = ranks.run(
        f"{JOBS}:learn",
        world_size=2,
        flags=job_flags(checkpoint_factory("deepseek_v3"), split, *flags),
        target=tmp_path,
    )
    assert all(result["base is unchanged"] for result in results)
    changed = [layer for layer, (_, b) in factors_of(tmp_path / "adapter").items() if b.any()]
    assert changed and all(layer.endswith(targets.split(".")[1]) for layer in changed)


def test_adapters_that_start_at_zero_are_the_base_bit_for_bit(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    checkpoint = checkpoint_factory("deepseek_v3")
    found = [
        ranks.run(
            "tests.dist.jobs:log_probs_and_export",
            world_size=4,
            flags=job_flags(checkpoint, "tp2_pp2_ep2", *flags, precision="bf16"),
            target=tmp_path / name,
        )
        for name, flags in (("base", ()), ("lora", LORA))
    ]
    assert found[0] == found[1]
    assert differing(tmp_path / "lora", tmp_path / "base") == []


def test_new_adapters_do_not_depend_on_the_layout(
    checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    checkpoint = checkpoint_factory("deepseek_v3")
    for split in ("tp1_pp1_ep1", "tp2_pp2_ep2"):
        ranks.run(
            f"{JOBS}:log_probs_and_exports",
            world_size=SPLITS[split][3],
            flags=job_flags(checkpoint, split, *LORA),
            target=tmp_path / split,
        )
    folders = [tmp_path / split / "adapter" for split in ("tp1_pp1_ep1", "tp2_pp2_ep2")]
    assert differing(*folders) == []
    for layer, (a, b) in factors_of(folders[0]).items():
        bound = a.shape[1] ** -0.5  # as PEFT starts: kaiming_uniform with a = sqrt(5)
        assert bound * 0.8 < a.abs().max() <= bound and not b.any(), layer


@pytest.mark.parametrize(
    ("arch", "targets"),
    [
        ("qwen3", None),
        ("qwen3_moe", None),  # whose experts transformers stacks
        ("mistral3", None),  # whose tower has layers of the same names
        ("deepseek_v3", "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj"),
        ("deepseek_v3", "o_proj,experts.gate_proj,experts.up_proj,experts.down_proj"),
    ],
)
def test_peft_loads_an_exported_adapter(
    arch: str,
    targets: str | None,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft", reason="the extra test is not installed")
    checkpoint = checkpoint_factory("mistral" if arch == "mistral3" else arch)
    if arch == "mistral3":
        checkpoint = make_multimodal(checkpoint, arch, tmp_path / "whole")
    adapter = random_adapter(checkpoint, tmp_path / "random", targets)
    flags = job_flags(checkpoint, "tp2_pp1_ep1", *start_from(adapter))
    flags += [] if targets is None else ["--rl-lora-targets", targets]
    (log_probs, *_) = ranks.run(
        f"{JOBS}:log_probs_and_exports", world_size=2, flags=flags, target=tmp_path / "out"
    )
    base = loaded(checkpoint)
    tokens = random_tokens(base.config.get_text_config().vocab_size)
    plain = log_probs_of(base, tokens)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    found, mine = log_probs_of(model, tokens), torch.tensor(log_probs)[:, :-1]
    assert (found - mine).abs().max() <= 1e-4 < (found - plain).abs().max()


@pytest.mark.parametrize(
    ("arch", "split"), [("deepseek_v3", "tp2_pp2_ep2"), ("qwen3", "tp2_pp1_ep1")]
)
def test_engines_get_the_merged_weights_of_the_exported_folder(
    arch: str,
    split: str,
    adapted: Callable[[str], tuple[Path, Path, Path]],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    checkpoint, adapter, _ = adapted(arch)
    flags = job_flags(checkpoint, split, *start_from(adapter), precision="bf16")
    target = tmp_path / "merged"
    results = ranks.run(
        f"{JOBS}:hand_over", world_size=SPLITS[split][3], flags=flags, target=target
    )
    for result in results:
        assert result["handed_over"] == result["from_disk"]
    adapted_weights = {f"{layer}.weight" for layer in lora_of(checkpoint).modules}
    assert set(differing(target, checkpoint)) == adapted_weights


def test_a_run_resumes_its_adapters_alone(
    adapted: Callable[[str], tuple[Path, Path, Path]], ranks: RankPool, tmp_path: Path
) -> None:
    checkpoint, adapter, _ = adapted("deepseek_v3")
    flags = job_flags(checkpoint, "tp2_pp2_ep2", *RATES, *LORA)
    first = [*flags, "--rl-lora-adapter", str(adapter)]
    (expected, *_) = ranks.run(
        "tests.dist.ppo_jobs:learn_save_and_learn",
        world_size=4,
        flags=first,
        target=tmp_path / "first",
    )
    saved = tmp_path / "first" / "saved"
    place = saved / "iter_0000001"
    stored = FileSystemReader(place).read_metadata().state_dict_metadata
    tensors = [name for name, entry in stored.items() if len(getattr(entry, "size", ())) == 2]
    lora = lora_of(checkpoint)
    assert {n for n in tensors if n.startswith("lora.")} == {
        f"lora.{layer}.{factor}" for layer in lora.modules for factor in "ab"
    }
    assert [name for name in tensors if ".lora." not in f".{name}"] == []

    (found, *_) = ranks.run(
        "tests.dist.ppo_jobs:load_and_learn",
        world_size=4,
        flags=[*flags, "--load", str(saved)],
        target=tmp_path / "again",
    )
    assert found == expected
    assert differing(tmp_path / "again" / "actor", tmp_path / "first" / "actor") == []
    assert differing(tmp_path / "again" / "adapter", tmp_path / "first" / "adapter") == []

    (elsewhere, *_) = ranks.run(
        "tests.dist.ppo_jobs:load_and_learn",
        world_size=1,
        flags=[*job_flags(checkpoint, "tp1_pp1_ep1", *RATES, *LORA), "--load", str(saved)],
        target=tmp_path / "alone",
    )
    for name, value in expected.items():
        assert elsewhere[name] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), name

    check_stored_adapters(saved, 1, lora)
    for other, text in (
        (replace(lora, rank=8), "has adapters of rank 4 .* rank 8, .*; give --rl-lora-rank"),
        (lora_of(checkpoint, "kv_b_proj"), "targets kv_b_proj; give .* --rl-lora-targets"),
        (None, "this run has none; give --rl-lora-rank"),
    ):
        with pytest.raises(UsageError, match=text):
            check_stored_adapters(saved, 1, other)
