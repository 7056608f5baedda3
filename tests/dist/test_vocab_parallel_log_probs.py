"""Log-probs over a sharded vocabulary in gloo processes, against one process with all of it.

The processes are started once; each case runs in groups of 2 and of 4 of them. They save what they
got, and the tests compare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributions import Categorical

from mcore_rl.megatron.log_probs import vocab_parallel_log_probs
from tests.rank_pool import RankPool

WORLD_SIZE, NUM_TOKENS, HIDDEN = 4, 17, 6
# A bf16 number keeps 8 bits, and each rank rounds its own partial sum (of magnitude 4) to them.
BF16_GRADIENTS = {"rtol": 2**-7, "atol": 2**-6}


@dataclass(frozen=True)
class Case:
    vocab_size: int
    padded_vocab_size: int
    scale: float = 1.0
    temperature: float = 1.0
    dtype: torch.dtype = torch.float32


CASES = {
    "no padding": Case(vocab_size=24, padded_vocab_size=24),
    "padding in the last shard": Case(vocab_size=21, padded_vocab_size=24, temperature=0.7),
    "shards of padding alone": Case(vocab_size=5, padded_vocab_size=40),
    "one token in the last shard": Case(vocab_size=31, padded_vocab_size=40, temperature=1.5),
    "large logits": Case(vocab_size=21, padded_vocab_size=24, scale=30.0),
    "bfloat16": Case(vocab_size=21, padded_vocab_size=24, dtype=torch.bfloat16),
}


def tensors(case: Case) -> tuple[torch.Tensor, ...]:
    """Hidden, weight (all rows), targets, and a random gradient for each output.

    The inputs are multiples of 1/8, so that float32 holds the logits exactly, however large, and
    the comparison sees only what comes after them.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).mul(8).round() / 8 * case.scale
    weight = torch.randn(case.padded_vocab_size, HIDDEN, generator=generator).mul(8).round() / 8
    target_ids = torch.randint(0, case.vocab_size, (NUM_TOKENS,), generator=generator)
    gradients = torch.randn(2, NUM_TOKENS, generator=generator)
    return hidden.to(case.dtype), weight.to(case.dtype), target_ids, *gradients.unbind()


def run_case(case: Case, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    tp_rank, tp_size = dist.get_rank(group), dist.get_world_size(group)
    hidden, weight, target_ids, *gradients = tensors(case)
    rows = case.padded_vocab_size // tp_size
    shard = weight[tp_rank * rows : (tp_rank + 1) * rows].clone().requires_grad_()
    hidden.requires_grad_()
    outputs = vocab_parallel_log_probs(
        hidden,
        shard,
        target_ids,
        vocab_start=tp_rank * rows,
        vocab_size=case.vocab_size,
        tp_group=group,
        temperature=case.temperature,
        # Chunks may differ from rank to rank, as no collective depends on them.
        chunk_tokens=1 + 3 * tp_rank,
    )
    grad_hidden, grad_shard = torch.autograd.grad(outputs, [hidden, shard], gradients)
    return {
        "log_probs": outputs[0].detach(),
        "entropy": outputs[1].detach(),
        "grad_hidden": grad_hidden,
        "grad_shard": grad_shard,
    }


def worker(directory: str) -> None:
    """What each rank does; called by `tests.rank_pool`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[rank // 2], 4: dist.new_group(list(range(WORLD_SIZE)))}
    results = {
        (name, tp_size): run_case(case, group)
        for name, case in CASES.items()
        for tp_size, group in groups.items()
    }
    torch.save(results, Path(directory) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    directory = tmp_path_factory.mktemp("vocab_parallel")
    job = "tests.dist.test_vocab_parallel_log_probs:worker"
    ranks.run(job, world_size=WORLD_SIZE, directory=directory)
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(WORLD_SIZE)]


def reference(case: Case) -> tuple[torch.Tensor, ...]:
    """The textbook on one process; logits in the case's dtype and everything else in float64.

    (float32 would do but for large logits, whose digits `Categorical` does not keep.)
    """
    hidden, weight, target_ids, *gradients = tensors(case)
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = (hidden @ weight[: case.vocab_size].t()).double() / case.temperature
    distribution = Categorical(logits=logits)
    outputs = distribution.log_prob(target_ids), distribution.entropy()
    gradients = [gradient.double() for gradient in gradients]
    return tuple(
        tensor.float()
        for tensor in (*outputs, *torch.autograd.grad(outputs, [hidden, weight], gradients))
    )


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_one_process(
    results: list[dict], name: str, tp_size: int
) -> None:
    case = CASES[name]
    log_probs, entropy, grad_hidden, grad_weight = reference(case)
    ranks = [results[rank][name, tp_size] for rank in range(tp_size)]
    for rank in ranks:
        torch.testing.assert_close(rank["log_probs"], log_probs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank["entropy"], entropy, rtol=1e-5, atol=1e-5)
    close = {"rtol": 1e-5, "atol": 1e-5} if case.dtype == torch.float32 else BF16_GRADIENTS
    partial = torch.stack([rank["grad_hidden"].float() for rank in ranks])
    torch.testing.assert_close(partial.sum(dim=0), grad_hidden, **close)
    gathered = torch.cat([rank["grad_shard"] for rank in ranks])
    torch.testing.assert_close(gathered.float(), grad_weight, **close)
    assert (gathered[case.vocab_size :] == 0).all()


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_the_same_bits_on_every_rank(
    results: list[dict], name: str, tp_size: int
) -> None:
    for output in ("log_probs", "entropy"):
        first = results[0][name, tp_size][output]
        assert first.isfinite().all() and not math.isclose(first.std().item(), 0.0)
        for rank in range(1, WORLD_SIZE):  # with tp_size 2 the second pair holds the same shards
            assert torch.equal(results[rank][name, tp_size][output], first)
