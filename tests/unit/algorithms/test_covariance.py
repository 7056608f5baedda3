"""clip_cov and kl_cov against the code of their authors, written as loops, and in every split.

The authors' code is core_algos.py of github.com/PRIME-RL/Entropy-Mechanism-of-RL.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.covariance import ClipCov, KLCov, largest, select_clip_cov, select_kl_cov
from mcore_rl.algorithms.interfaces import SelectionInputs
from mcore_rl.algorithms.total_loss import policy_loss_total
from mcore_rl.common.errors import UsageError
from tests.unit.algorithms.losses_reference import denominators_of, loss_config
from tests.unit.algorithms.ragged import Ragged, normal, random_ragged, spoilt

CLIP = ClipCov(clip_cov_ratio=0.1, clip_cov_low=0.3, clip_cov_high=2.0)
KL = KLCov(kl_cov_ratio=0.1, kl_cov_coef=0.7)


def inputs_of(batch: Ragged, seed: int) -> SelectionInputs:
    generator = torch.Generator().manual_seed(seed)
    return SelectionInputs(
        old_log_probs=spoilt(batch, -normal(batch, seed).abs().float(), math.nan),
        advantages=spoilt(batch, normal(batch, seed + 1).float(), math.nan),
        loss_mask=batch.loss_mask,
        random=torch.rand(batch.num_tokens, generator=generator),
    )


def reference_covariances(inputs: SelectionInputs) -> dict[int, float]:
    tokens = inputs.loss_mask.nonzero().ravel().tolist()
    logs = {j: inputs.old_log_probs[j].item() for j in tokens}
    advantages = {j: inputs.advantages[j].item() for j in tokens}
    mean_log, mean_a = np.mean(list(logs.values())), np.mean(list(advantages.values()))
    return {j: (logs[j] - mean_log) * (advantages[j] - mean_a) for j in tokens}


def chosen(selected: torch.Tensor) -> set[int]:
    return set(selected.nonzero().ravel().tolist())


@pytest.mark.parametrize("seed", range(4))
def test_kl_cov_selects_the_largest_covariances(seed: int) -> None:
    inputs = inputs_of(random_ragged(seed, num_samples=16), seed)
    cov = reference_covariances(inputs)
    order = sorted(cov, key=lambda j: cov[j], reverse=True)
    assert chosen(select_kl_cov(inputs, KL)) == set(order[: int(0.1 * len(cov))])
    few = replace(KL, kl_cov_ratio=1e-6)
    assert chosen(select_kl_cov(inputs, few)) == {order[0]}


@pytest.mark.parametrize("seed", range(4))
def test_clip_cov_selects_randomly_between_bounds(seed: int) -> None:
    inputs = inputs_of(random_ragged(seed, num_samples=16), seed)
    cov = reference_covariances(inputs)
    high = {j for j, value in cov.items() if 0.3 <= value <= 2.0}
    count = min(int(0.1 * len(cov)), len(high))
    first = chosen(select_clip_cov(inputs, CLIP))
    assert first <= high and len(first) == count > 1
    times, trials = dict.fromkeys(high, 0), 400
    for trial in range(trials):
        torch.manual_seed(trial)
        again = replace(inputs, random=torch.rand(len(inputs.random)))
        for j in chosen(select_clip_cov(again, CLIP)):
            times[j] += 1
    share = count / len(high)  # uniform: within 5 standard deviations
    tolerance = 5 * math.sqrt(share * (1 - share) / trials) + 1e-9
    assert all(abs(time / trials - share) < tolerance for time in times.values())


def test_clip_cov_selects_nothing_without_high_covariances() -> None:
    inputs = inputs_of(random_ragged(0), 0)
    config = replace(CLIP, clip_cov_low=50.0, clip_cov_high=60.0)
    assert not select_clip_cov(inputs, config).any()


class SumOfThreads:
    """A collective of threads, one per rank."""

    def __init__(self, size: int) -> None:
        self._given: list[torch.Tensor] = [torch.zeros(())] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def of(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def global_sum(values: torch.Tensor) -> torch.Tensor:
            self._given[rank] = values
            self._barrier.wait()
            total = torch.stack(self._given).sum(dim=0)
            self._barrier.wait()
            return total

        return global_sum


@pytest.mark.parametrize("select, config", [(select_kl_cov, KL), (select_clip_cov, CLIP)])
@pytest.mark.parametrize("seed", range(3))
def test_selection_does_not_depend_on_ranks(select: Callable, config: object, seed: int) -> None:
    batch = random_ragged(seed, num_samples=16)
    inputs = inputs_of(batch, seed)
    whole = select(inputs, config)
    order = np.random.default_rng(seed).permutation(16)
    ranks = [order[:9].tolist(), [], order[9:].tolist()]
    collective, found = SumOfThreads(3), {}

    def run(rank: int) -> None:
        part, index = batch.part(ranks[rank])
        mine = SelectionInputs(
            inputs.old_log_probs[index],
            inputs.advantages[index],
            part.loss_mask,
            inputs.random[index],
            collective.of(rank),
        )
        found[rank] = index, select(mine, config)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and whole.any()
    for index, selected in found.values():
        assert torch.equal(selected, whole[index])


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8])
def test_largest_numbers_of_any_sign(count: int) -> None:
    values = torch.tensor([-0.0, 3e38, -3e38, 1e-44, -1e-44, 2.0, 2.0, -2.0])
    found = largest(values, count, inputs_of(random_ragged(0), 0))
    kept = sorted(values.tolist(), reverse=True)[:count]
    expected = [bool(kept) and value >= min(kept) for value in values.tolist()]
    assert found.tolist() == expected


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_published_code(name: str, seed: int) -> None:
    batch = random_ragged(seed, num_samples=16)
    old = -normal(batch, seed).abs()
    log_probs = (old + 0.3 * normal(batch, seed + 2)).requires_grad_()
    advantages = normal(batch, seed + 1)
    config = loss_config(name, clip_eps_upper=0.3, kl_cov_coef=0.7)
    selected = (torch.rand(batch.num_tokens) < 0.3) & batch.loss_mask
    output = policy_loss_total(
        log_probs, torch.zeros_like(old), old_log_probs=old, advantages=advantages,
        loss_mask=batch.loss_mask, lengths=batch.lengths, selected=selected,
        denominators=denominators_of(batch), config=config,
    )  # fmt: skip
    losses = []
    for j in batch.loss_mask.nonzero().ravel().tolist():
        ratio, a = (log_probs[j] - old[j]).exp(), advantages[j]
        if name == "clip_cov":
            corr = 0.0 if selected[j] else 1.0
            losses.append(max(-a * ratio, -a * ratio.clamp(0.8, 1.3)) * corr)
        else:
            penalty = 0.7 * (log_probs[j] - old[j]).abs() if selected[j] else 0.0
            losses.append(-a * ratio + penalty)
    expected = sum(losses) / len(losses)
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(loss, log_probs)[0] for loss in (output.loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    if name == "clip_cov":
        assert not gradients[0][selected].any()


def test_bounds_of_clip_cov_are_ordered() -> None:
    with pytest.raises(UsageError, match="--rl-clip-cov-low 5.0 is not below --rl-clip-cov-high"):
        ClipCov(clip_cov_low=5.0)
