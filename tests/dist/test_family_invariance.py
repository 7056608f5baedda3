"""The updates of every supported family are those of one process, in every kind of split.

`test_invariance.py` varies everything else, with one family. Here each family makes a step of two
updates in each split, and its losses, gradient norms and weights are compared with those of one
process. The splits are of a HybridModel and of a GPTModel in turn, the process has a GPTModel. The
largest differences are written to build/family_invariance.md. In some splits both classes make the
step, bit for bit the same. Models whose layers keep a state also make it with recomputed
activations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mcore_rl.megatron.model_class import GPT, HYBRID
from mcore_rl.model.families import FAMILIES
from tests.conftest import load_script
from tests.dist.test_fsdp import ENVIRONMENT, fsdp
from tests.dist.test_invariance import COMMON_FLAGS, JOB
from tests.dist.updates import TOLERANCE, Outcome, differences_of, learned
from tests.model_shapes import has_experts, has_one_block_a_layer
from tests.rank_pool import ROOT, RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

TABLE = ROOT / "build" / "family_invariance.md"
FLAGS = (
    *COMMON_FLAGS,
    *("--rl-num-prompts-per-step", "4"),  # 4 samples an update
    *("--micro-batch-size", "1"),
    *("--rl-algorithm", "grpo"),
    *("--rl-kl-coef", "0.05"),
    *("--rl-entropy-coef", "0.01"),
)
TP2 = ("--tensor-model-parallel-size", "2")
PP2 = ("--pipeline-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
EP2 = ("--expert-model-parallel-size", "2")
CLASSES = (HYBRID, GPT)
FSDP = fsdp("optim_grads_params")
# All of two processes; DP is what is left.
OF_ALL = {"TP2": TP2, "PP2": PP2, "CP2": CP2}
OF_DENSE = {**OF_ALL, "DP2": (), "DP2 FSDP": FSDP}
OF_EXPERTS = {**OF_ALL, "TP2 EP2": (*TP2, *EP2), "DP2 EP2": EP2, "DP2 EP2 FSDP": (*EP2, *FSDP)}

ARCHS: tuple[str, ...] = load_script("make_tiny_deepseek").ARCHS
# Megatron builds them of modules that another model, named behind it, has in all splits.
FEWER = {
    "deepseek_v2_large": ("PP2", "CP2", "TP2 EP2"),  # deepseek_v2, deepseek_v3
    "kimi_k2": ("PP2", "TP2 EP2"),  # deepseek_v3, deepseek_v32
    "moonlight": ("PP2", "TP2 EP2"),  # deepseek_v2, deepseek_v3
    "glm4_moe_lite": ("PP2", "TP2 EP2"),  # deepseek_v3
    "glm_moe_dsa": ("PP2", "CP2", "TP2 EP2"),  # deepseek_v32, glm_5_2
    "mixtral": ("PP2", "TP2 EP2"),  # qwen3_moe
    "dots1": ("PP2", "TP2 EP2"),  # qwen3_moe, glm4_moe
    "hy_v3": ("PP2", "CP2", "TP2 EP2"),  # qwen3_moe, glm4_moe
    "mistral": ("TP2", "PP2"),  # llama
    "seed_oss": ("TP2", "PP2"),  # llama, qwen2_moe
    "qwen3_vl_text": ("TP2",),  # qwen3
    "qwen3_vl_moe_text": ("TP2 EP2",),  # qwen3_moe
    "glm4v_moe_text": ("TP2 EP2",),  # glm4_moe
}


def splits_of(arch: str) -> dict[str, tuple[str, ...]]:
    splits = OF_EXPERTS if has_experts(arch) else OF_DENSE
    return {split: splits[split] for split in FEWER.get(arch, splits)}


SPLITS = {arch: splits_of(arch) for arch in ARCHS}
# Where both classes are compared; test_model_class.py has further cases.
BOTH_CLASSES = {
    "deepseek_v3": ("TP2 EP2", "CP2", "DP2 EP2 FSDP"),
    "qwen3": ("DP2 FSDP",),
    "gpt_oss": ("PP2",),
    "minimax_m2": ("TP2",),
    "qwen3_5_text": ("CP2",),
}
BOTH_CLASSES_ALONE = ("deepseek_v3", "qwen3", "llama", "qwen3_next", "deepseek_v32")


@pytest.fixture(scope="module")
def learn(
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Outcome]:
    def learn(arch: str, num_processes: int, *flags: str) -> Outcome:
        return learned(
            ranks,
            ["--rl-hf-checkpoint", str(checkpoint_factory(arch)), *FLAGS, *flags],
            num_processes,
            tmp_path_factory.mktemp("learned"),
            job=JOB,
            num_steps=1,
            environment=ENVIRONMENT if "--use-megatron-fsdp" in flags else None,
        )

    return learn


@pytest.fixture(scope="module")
def reference_of(learn: Callable[..., Outcome]) -> Callable[[str], Outcome]:
    """What one process makes of a family."""

    @functools.cache
    def reference_of(arch: str) -> Outcome:
        of_class = HYBRID if has_one_block_a_layer(arch) else GPT
        return learn(arch, 1, "--rl-model-class", of_class)

    return reference_of


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    rows = [
        f"Largest differences to one process, in float32; allowed is {TOLERANCE:.0e}.",
        "",
        "| model | split | class | loss | gradient norm | weights |",
        "|---|---|---|---|---|---|",
    ]
    yield rows
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(rows) + "\n")


def class_of(arch: str, number: int) -> str:
    """Return one class after the other, where a model can be both."""
    return HYBRID if has_one_block_a_layer(arch) else CLASSES[number % 2]


def assert_same_of_both_classes(gpt: Outcome, hybrid: Outcome, *, is_sharded: bool = False) -> None:
    """Bit for bit, but for Megatron-FSDP: it reduces the halves of a HybridModel's layer apart, so
    that sums have another order."""
    for outcome, stack in ((gpt, "TransformerBlock"), (hybrid, "TransformerStack")):
        assert outcome.found["stacks"] == [stack]
    if is_sharded:
        differences_of(hybrid, gpt).assert_small()
        return
    assert hybrid.found | {"stacks": None} == gpt.found | {"stacks": None}
    assert all(torch.equal(hybrid.weights[name], w) for name, w in gpt.weights.items())


@pytest.mark.parametrize(
    ("arch", "split", "model_class"),
    [
        pytest.param(arch, split, name := class_of(arch, i + k), id=f"{arch} {split} {name}")
        for i, (arch, splits) in enumerate(SPLITS.items())
        for k, split in enumerate(splits)
    ],
)
def test_update_matches_single_process(
    arch: str,
    split: str,
    model_class: str,
    learn: Callable[..., Outcome],
    reference_of: Callable[[str], Outcome],
    rows: list[str],
) -> None:
    flags = (*SPLITS[arch][split], "--rl-model-class", model_class)
    outcome = learn(arch, 2, *flags)
    found = differences_of(outcome, reference_of(arch))
    measured = (found.loss, found.grad_norm, found.weight)
    rows.append(
        f"| {arch} | {split} | {model_class} | {' | '.join(f'{value:.1e}' for value in measured)} |"
    )
    found.assert_small()
    if split in BOTH_CLASSES.get(arch, ()):
        (other,) = {*CLASSES} - {model_class}
        of_other = learn(arch, 2, *SPLITS[arch][split], "--rl-model-class", other)
        both = {model_class: outcome, other: of_other}
        assert_same_of_both_classes(both[GPT], both[HYBRID], is_sharded="FSDP" in split)


@pytest.mark.parametrize("arch", BOTH_CLASSES_ALONE)
def test_update_of_one_process_is_that_of_the_other_class(
    arch: str, learn: Callable[..., Outcome], reference_of: Callable[[str], Outcome]
) -> None:
    alone = learn(arch, 1, "--rl-model-class", HYBRID)
    assert_same_of_both_classes(reference_of(arch), alone)


# Of HybridModels with layers that keep a state.
RECOMPUTED = {
    "nemotron_h": ("full uniform 1", "full uniform 3", "full block 2", "core_attn mlp"),
    "nemotron_3": ("full uniform 1", "core_attn moe", "core_attn shared_experts"),
    "qwen3_next": ("full uniform 1", "core_attn moe"),
}


@pytest.mark.parametrize(
    ("arch", "what"), [(arch, what) for arch, cases in RECOMPUTED.items() for what in cases]
)
def test_update_with_recomputed_activations_is_the_same_bit_for_bit(
    arch: str, what: str, learn: Callable[..., Outcome], reference_of: Callable[[str], Outcome]
) -> None:
    granularity, *more = what.split()
    if granularity == "full":
        method, num_layers = more
        flags = f"full --recompute-method {method} --recompute-num-layers {num_layers}"
    else:
        flags = f"selective --recompute-modules {what}"
    found = learn(arch, 1, "--rl-model-class", HYBRID, *f"--recompute-granularity {flags}".split())
    expected = reference_of(arch)
    (forwards,) = found.found["forwards"]
    assert forwards == 2 if "uniform" in what else 1 < forwards < 2
    assert found.found["steps"] == expected.found["steps"]
    assert all(torch.equal(found.weights[name], w) for name, w in expected.weights.items())


def test_every_family_is_there() -> None:
    assert set(ARCHS) >= FAMILIES.keys()
