"""Sparse attention (DSA) in Megatron, for which vLLM has no kernels here: against transformers.

What `test_families.py` shows with engines is shown by `tests/cuda/test_vllm_models.py` instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl.model.config_json import read_model_shape
from tests.dist.checkpoints import (
    assert_log_probs_equal_transformers,
    differing,
    loaded,
    log_probs_of,
    tensors_of,
)
from tests.dist.jobs import random_tokens
from tests.dist.layouts import SPLITS, job_flags
from tests.dist.test_families import saved_by_transformers
from tests.dist.test_family_invariance import FLAGS
from tests.dist.test_invariance import JOB
from tests.dist.updates import Outcome, assert_alike, learned
from tests.rank_pool import RankPool

pytestmark = pytest.mark.timeout(400)

# arch -> options. With few heads many scores are 0, and which of equal ones are taken is undefined.
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"num_mtp_layers": 1, "overrides": {"index_n_heads": 13, "index_topk": 7}},
    "glm_moe_dsa": {"num_mtp_layers": 1, "overrides": {"index_head_dim": 81, "index_topk": 5}},
    "glm_5_2": {},
}
CP2 = ("--context-parallel-size", "2")
PACKED = ("--micro-batch-size", "1", "--rl-max-tokens-per-microbatch", "128")
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "alone": ("tp1_pp1_ep1", ()),
    "TP2 PP2 EP2": ("tp2_pp2_ep2", ()),
    "CP2": ("dp2", CP2),
    "packed": ("tp1_pp1_ep1", PACKED),
    "packed, TP2": ("tp2_pp1_ep1", PACKED),
    "packed, CP2": ("dp2", (*CP2, *PACKED)),
}


@pytest.fixture(scope="module")
def checkpoint_of(checkpoint_factory: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda arch: checkpoint_factory(arch, **CASES[arch])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", CASES)
def test_log_probs_equal_transformers_and_export_the_checkpoint(
    arch: str,
    way: str,
    checkpoint_of: Callable[[str], Path],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    checkpoint, (split, more) = checkpoint_of(arch), WAYS[way]
    log_probs = ranks.run(
        "tests.dist.jobs:log_probs_and_export",
        world_size=SPLITS[split][3],
        flags=job_flags(checkpoint, split, *more),
        target=tmp_path / "exported",
    )
    assert_log_probs_equal_transformers(log_probs, checkpoint)
    mtp_layer = f"model.layers.{read_model_shape(checkpoint).num_layers}."
    assert [
        name
        for name in differing(checkpoint, tmp_path / "exported")
        if not name.startswith(mtp_layer)
    ] == []
    loaded(tmp_path / "exported")


@pytest.mark.parametrize("arch", CASES)
def test_packed_samples_are_computed_as_padded_ones(
    arch: str, checkpoint_of: Callable[[str], Path], ranks: RankPool
) -> None:
    """Bit for bit, outputs and gradients, whatever else is in the row. Most samples have more
    positions than a query may see; two begin in a later block of the products over a row's keys."""
    job, lengths = "tests.dist.sparse_attention_jobs:samples_that_differ", [1, 33, 500, 3, 130, 64]
    flags = job_flags(checkpoint_of(arch), "tp1_pp1_ep1", *PACKED)
    (found,) = ranks.run(job, world_size=1, flags=flags, lengths=lengths)
    assert found == {"padded": [], "others": []}


@pytest.mark.parametrize("arch", CASES)
def test_choice_of_keys_is_part_of_what_is_compared(
    arch: str, checkpoint_of: Callable[[str], Path]
) -> None:
    """Log-probs of these models differ from those of dense attention, and of another choice."""
    folder = checkpoint_of(arch)
    model = loaded(folder)
    tokens = random_tokens(model.config.vocab_size)
    sparse = log_probs_of(model, tokens)
    indexers = [layer.self_attn.indexer for layer in model.model.layers]
    for indexer in filter(None, indexers):
        torch.nn.init.normal_(indexer.wq_b.weight)
    another = log_probs_of(model, tokens)
    for indexer in filter(None, indexers):
        indexer.index_topk = tokens.shape[1]
    dense = log_probs_of(model, tokens)
    assert (sparse - dense).abs().max() > 0.01
    assert (sparse - another).abs().max() > 0.01


@pytest.mark.parametrize("arch", CASES)
def test_folder_saved_by_transformers_is_read_as_the_published_one(
    arch: str, checkpoint_of: Callable[[str], Path], ranks: RankPool, tmp_path: Path
) -> None:
    saved = saved_by_transformers(checkpoint_of(arch), tmp_path)
    assert "indexer_rope_interleave" not in json.loads((saved / "config.json").read_text())
    flags = job_flags(saved, "tp1_pp1_ep1")
    log_probs = ranks.run(
        "tests.dist.jobs:log_probs_and_export",
        world_size=1,
        flags=flags,
        target=tmp_path / "exported",
    )
    assert_log_probs_equal_transformers(log_probs, checkpoint_of(arch))
    assert differing(saved, tmp_path / "exported") == []


def test_megatron_is_verified_without_an_engine(
    checkpoint_of: Callable[[str], Path], ranks: RankPool, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    out = tmp_path / "out.json"
    flags = [
        *job_flags(checkpoint_of("glm_5_2"), "tp2_pp1_ep1", precision="bf16"),
        *("--rl-prompts", str(prompts), "--rl-no-chat-template", "--rl-verify-megatron-only"),
        *("--rl-verify-out", str(out), "--rl-cache-dir", str(tmp_path / "cache"), "--rl-export-hf"),
    ]
    job = "tests.dist.jobs:verify_megatron"
    assert ranks.run(job, world_size=2, flags=[*flags, str(tmp_path / "a")]) == [0, 0]
    found = json.loads(out.read_text())
    assert found["differing"] == [] and found["num_tensors"] > 100
    assert all(value < 0 for value in found["megatron_log_probs"][0])

    # In a HybridModel the fifth half is the attention of layer 2.
    spoilt = "decoder.layers.4.self_attention.core_attention.indexer.k_norm.bias"
    flags.append(str(tmp_path / "b"))
    assert ranks.run(job, world_size=2, flags=flags, spoilt=spoilt) == [1, 1]
    name = "model.layers.2.self_attn.indexer.k_norm.bias"
    [sentence] = json.loads(out.read_text())["differing"]
    found = re.fullmatch(
        rf"{name}\[0\] is (\S+) in the checkpoint and (\S+) in the export", sentence
    )
    assert found and float(found[2]) == pytest.approx(float(found[1]) + 1, abs=0.01)


RECOMPUTED = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
SPARSE_LOSS = ("--dsa-indexer-loss-coeff", "0.5", "--dsa-indexer-use-sparse-loss")
# Splits, and other micro-batches.
LEARNED: dict[str, tuple[int, tuple[str, ...]]] = {
    "longer rows": (1, ("--rl-max-tokens-per-microbatch", "512")),
    "TP2": (2, ("--tensor-model-parallel-size", "2")),
    "PP2": (2, ("--pipeline-model-parallel-size", "2")),
    "CP2": (2, CP2),
    "DP2 EP2": (2, ("--expert-model-parallel-size", "2")),
    "PP2 recomputed": (2, ("--pipeline-model-parallel-size", "2", *RECOMPUTED)),
}


@pytest.fixture(scope="module")
def learn(
    checkpoint_factory: Callable[..., Path],
    ranks: RankPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Outcome]:
    checkpoint = checkpoint_factory("glm_5_2")

    def learn(num_processes: int, *flags: str) -> Outcome:
        return learned(
            ranks,
            ["--rl-hf-checkpoint", str(checkpoint), *FLAGS, *PACKED, *flags],
            num_processes,
            tmp_path_factory.mktemp("learned"),
            job=JOB,
            num_steps=1,
        )

    return learn


@pytest.fixture(scope="module")
def reference(learn: Callable[..., Outcome]) -> Outcome:
    return learn(1, *SPARSE_LOSS)


@pytest.mark.slow
@pytest.mark.parametrize("way", LEARNED)
def test_trained_indexers_are_those_of_one_process(
    way: str, learn: Callable[..., Outcome], reference: Outcome
) -> None:
    num_processes, flags = LEARNED[way]
    assert_alike(learn(num_processes, *SPARSE_LOSS, *flags), reference)


@pytest.mark.slow
def test_indexers_are_frozen_unless_they_have_a_loss(
    learn: Callable[..., Outcome], reference: Outcome, checkpoint_factory: Callable[..., Path]
) -> None:
    """Weight decay, too, leaves frozen ones alone; the loss of indexers leaves all others alone."""
    frozen, other = learn(1, "--weight-decay", "0.5"), learn(1)
    before = tensors_of(checkpoint_factory("glm_5_2"))
    moved = 0
    for name, weight in reference.weights.items():
        same = torch.equal(weight, other.weights[name])
        if ".indexer." in name:
            published = before[name.removeprefix("actor/")].float()
            assert torch.equal(other.weights[name].float(), published), name
            assert torch.equal(frozen.weights[name].float(), published), name
            moved += not same
        else:
            assert torch.allclose(weight, other.weights[name], atol=1e-6), name
    assert moved == 10  # five in each of two layers


def test_loss_of_indexers_falls_and_replaced_choices_are_measured(
    checkpoint_of: Callable[[str], Path], ranks: RankPool
) -> None:
    job, rate = "tests.dist.jobs:metrics_of_updates", ("--lr", "1e-4")
    split = "tp2_pp1_ep1"
    flags = job_flags(checkpoint_of("glm_5_2"), split, *PACKED, *rate)
    (trained, alike), (frozen, _) = (
        ranks.run(job, world_size=2, flags=[*flags, *more]) for more in (SPARSE_LOSS, ())
    )
    assert trained == alike
    assert trained[-1]["loss/indexer"] < 0.95 * trained[0]["loss/indexer"]
    assert "loss/indexer" not in frozen[0]
    for metrics in (*trained, *frozen):
        assert 0 < metrics["mismatch/indexer_replaced"] < 0.2
