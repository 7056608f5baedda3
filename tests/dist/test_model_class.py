"""HybridModel and GPTModel are the same model: the same updates, and checkpoints of each other.

test_family_invariance.py compares the updates of more families and layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.megatron.model_class import GPT, HYBRID
from tests.dist.checkpoints import tensors_of
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.test_family_invariance import (
    CLASSES,
    CP2,
    EP2,
    FLAGS,
    PP2,
    TP2,
    assert_same_of_both_classes,
)
from tests.dist.test_fsdp import ENVIRONMENT, RATES, fsdp
from tests.dist.test_invariance import ALGORITHMS, JOB, RECOMPUTE, STAGES
from tests.dist.test_other_layout import FLAGS as PPO_FLAGS
from tests.dist.updates import TOLERANCE, Outcome, assert_alike, learned
from tests.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

PACKED = ("--rl-max-tokens-per-microbatch", "128")
MTP = ("--mtp-num-layers", "1")
INDEXERS = ("--dsa-indexer-loss-coeff", "0.01")
MODULES = tuple("--recompute-modules core_attn mlp moe".split())
VIRTUAL = STAGES["2 x 2"]
PPO = (*ALGORITHMS["ppo"].split(), "--rl-kl-coef", "0")
DEEPSEEK, QWEN_MOE, QWEN = "deepseek_v3", "qwen3_moe", "qwen3"
QWEN_NEXT, DEEPSEEK_32 = "qwen3_next", "deepseek_v32"


@dataclass(frozen=True)
class Case:
    arch: str
    num_processes: int = 1
    flags: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Options of the checkpoint."""
        return {
            "num_mtp_layers": 1 if MTP[0] in self.flags else 0,
            "overrides": {"num_hidden_layers": 4} if VIRTUAL[2] in self.flags else None,
        }


UPDATES = {
    "deepseek, PP2 EP2 MTP": Case(DEEPSEEK, 4, (*PP2, *EP2, *MTP)),
    "deepseek, packed, replayed, TP2": Case(
        DEEPSEEK, 2, (*PACKED, *TP2, *ALGORITHMS["grpo"].split())
    ),
    "deepseek, recomputed": Case(DEEPSEEK, 1, tuple(RECOMPUTE["full"].split())),
    "deepseek, MTP, recomputed": Case(DEEPSEEK, 1, (*MTP, *RECOMPUTE["full"].split())),
    "deepseek, modules recomputed": Case(DEEPSEEK, 1, (*RECOMPUTE["selective"].split(), *MODULES)),
    "deepseek, PPO, EP2": Case(DEEPSEEK, 2, (*EP2, *PPO)),
    "qwen3-moe, TP2 PP2 EP2": Case(QWEN_MOE, 4, (*TP2, *PP2, *EP2)),
    "qwen3-moe, virtual stages": Case(QWEN_MOE, 2, VIRTUAL),
    "qwen3-moe, packed, replayed by the trainer, CP2": Case(
        QWEN_MOE, 2, (*PACKED, *CP2, *ALGORITHMS["gspo"].split())
    ),
    "qwen3, TP2 PP2": Case(QWEN, 4, (*TP2, *PP2)),
    "qwen3-next, packed, TP2 PP2 EP2": Case(QWEN_NEXT, 4, (*PACKED, *TP2, *PP2, *EP2)),
    "deepseek-v3.2, packed, TP2 PP2 EP2": Case(DEEPSEEK_32, 4, (*PACKED, *TP2, *PP2, *EP2)),
    "deepseek-v3.2, indexers trained": Case(DEEPSEEK_32, 1, (*PACKED, *INDEXERS)),
    "glm-5.2, shared choices, recomputed": Case("glm_5_2", 1, tuple(RECOMPUTE["full"].split())),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_are_those_of_gpt_model_bit_for_bit(
    name: str, checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    case = UPDATES[name]
    checkpoint = checkpoint_factory(case.arch, **case.options)
    expected, found = (
        learned(
            ranks,
            ["--rl-hf-checkpoint", str(checkpoint), *FLAGS, *case.flags, *of_class(name)],
            case.num_processes,
            tmp_path / name,
            job=JOB,
            num_steps=1,
        )
        for name in (GPT, HYBRID)
    )
    assert_same_of_both_classes(expected, found)


def of_class(name: str) -> tuple[str, ...]:
    return ("--rl-model-class", name)


# model, options of its checkpoint, flags, layout that saves, layout that loads
RESUMES = {
    # actor and critic, all layers by number
    "deepseek, actor and critic": (DEEPSEEK, {}, PPO_FLAGS, "tp2_pp2_ep2", "tp1_pp1_ep2"),
    "deepseek, MTP": (DEEPSEEK, {"num_mtp_layers": 1}, (*RATES, *MTP), "tp1_pp2_ep1", "dp2"),
    # GPTModel stores a weight of all layers as one tensor.
    "qwen3": (QWEN, {}, RATES, "tp1_pp2_ep1", "tp2_pp1_ep1"),
    "qwen3-next": (QWEN_NEXT, {}, RATES, "tp1_pp2_ep1", "tp2_pp1_ep1"),
    "deepseek-v3.2": (DEEPSEEK_32, {}, RATES, "tp1_pp2_ep1", "tp2_pp1_ep1"),
}


@pytest.mark.parametrize("saves", CLASSES)
@pytest.mark.parametrize("name", RESUMES)
def test_the_next_step_is_the_same_with_the_other_class(
    name: str,
    saves: str,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    arch, options, flags, before, after = RESUMES[name]
    checkpoint = checkpoint_factory(arch, **options)
    (loads,) = {*CLASSES} - {saves}

    def run(job: str, split: str, target: Path, *more: str) -> Outcome:
        results = ranks.run(
            f"tests.dist.ppo_jobs:{job}",
            world_size=SPLITS[split][3],
            flags=job_flags(checkpoint, split, *flags, *more, micro_batch_size=1),
            target=target,
        )
        return Outcome.of([{"steps": [results[0]]}], target)

    expected = run("learn_save_and_learn", before, tmp_path / "a", *of_class(saves))
    load = ("--load", str(tmp_path / "a" / "saved"))
    found = run("load_and_learn", after, tmp_path / "b", *of_class(loads), *load)
    assert_alike(found, expected)


@pytest.mark.parametrize("fork_saves", [False, True])
@pytest.mark.parametrize(("arch", "layers", "routers"), [(DEEPSEEK, 2, [1]), (QWEN, 2, [])])
def test_a_fork_may_build_a_hybrid_model(
    arch: str,
    layers: int,
    routers: list[int],
    fork_saves: bool,
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    """Its layers are numbered by position. It resumes what GPTModel has saved, and the reverse."""

    def learn(name: str, in_fork: bool, *more: str) -> Path:
        found = ranks.run(
            "tests.dist.policy_jobs:learn_in_fork",
            world_size=2,
            flags=job_flags(checkpoint_factory(arch), "tp2_pp1_ep1", *RATES, *of_class(GPT), *more),
            target=tmp_path / name,
            provider="hybrid_provider" if in_fork else None,
        )
        for rank in found:
            assert rank["layer"] == "TransformerLayer" and rank["routers"] == routers
            assert rank["layers"] == sorted([*range(layers)] * (1 + in_fork))
        return tmp_path / name / "weights"

    expected = tensors_of(learn("a", fork_saves))
    found = tensors_of(learn("b", not fork_saves, "--load", str(tmp_path / "a" / "saved")))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("saves", CLASSES)
def test_a_sharded_checkpoint_resumes_with_the_other_class(
    saves: str, checkpoint_factory: Callable[..., Path], ranks: RankPool, tmp_path: Path
) -> None:
    (loads,) = {*CLASSES} - {saves}
    jobs = {"save_and_continue": (saves, "iter_0000001"), "load_and_continue": (loads, 1)}
    for job, (name, result) in jobs.items():
        flags = job_flags(
            checkpoint_factory(DEEPSEEK),
            "tp1_pp1_ep1",
            *(*RATES, *fsdp("optim_grads_params"), *of_class(name)),
        )
        found = ranks.run(
            f"tests.dist.fsdp_jobs:{job}",
            world_size=2,
            flags=flags,
            target=tmp_path,
            environment=ENVIRONMENT,
        )
        assert found == [result] * 2
    continued, resumed = tensors_of(tmp_path / "continued"), tensors_of(tmp_path / "resumed")
    for tensor, value in continued.items():
        assert (resumed[tensor] - value).abs().max() < TOLERANCE, tensor
