"""Advantage estimators against their papers' formulas, sample by sample and token by token."""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mcore_rl.algorithms.estimators import GAE, advantages_of_valid
from mcore_rl.algorithms.interfaces import AdvantageInputs
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.common.parameters import with_values
from tests.unit.algorithms.ragged import Ragged, normal, ragged, random_ragged, spoilt

GROUP_ESTIMATORS = ["grpo", "dr_grpo", "rloo", "opo"]
ESTIMATORS = [*GROUP_ESTIMATORS, "remax", "reinforce_pp", "reinforce_pp_baseline", "gae"]
# Two groups of different outcomes, one of equal ones, a group of one.
GROUP_IDS = np.array([4, 4, 9, 4, 9, 1, 1, 7])
SCORES = np.array([0.3, 1.0, -2.0, 0.25, 0.5, 0.1, 0.1, 3.0])


def inputs_of(batch: Ragged, seed: int = 0, **replaced: object) -> AdvantageInputs:
    num_samples = len(batch.lengths)
    inputs = AdvantageInputs(
        scores=SCORES[:num_samples],
        group_ids=GROUP_IDS[:num_samples],
        response_lengths=batch.response_lengths,
        baselines=np.linspace(-1, 2, num_samples),
        rows=np.arange(num_samples),
        token_rewards=normal(batch, seed + 1, torch.float32),
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        values=normal(batch, seed + 2, torch.float32),
    )
    return dataclasses.replace(inputs, **replaced)


def estimate(name: str, inputs: AdvantageInputs, **config: float | bool):
    entry, own = find_advantage_estimator(name), {"whiten_advantages": False, **config}
    return entry.function(inputs, with_values(entry.parameters, own))


def reference_of_group(name: str, i: int, members: list[int], lengths: np.ndarray) -> float:
    score = SCORES[i]
    others = [SCORES[j] for j in members if j != i]
    if not others or len({SCORES[j] for j in members}) == 1:
        return 0.0
    scores = [SCORES[j] for j in members]
    if name == "grpo":
        return (score - statistics.mean(scores)) / (statistics.stdev(scores) + 1e-6)
    if name == "rloo":
        return score - statistics.mean(others)
    if name == "opo":
        weighted = sum(lengths[j] * SCORES[j] for j in members)
        return score - weighted / sum(lengths[j] for j in members)
    return score - statistics.mean(scores)


def reference_whitened(tokens: list[float], eps: float = 1e-6) -> list[float]:
    mean, std = statistics.fmean(tokens), statistics.pstdev(tokens)
    return [(value - mean) / (std + eps) for value in tokens]


def reference(
    name: str, inputs: AdvantageInputs, batch: Ragged, gamma: float, failed: tuple[int, ...] = ()
) -> torch.Tensor:
    """[t]; loops over samples and tokens."""
    lengths = batch.response_lengths
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    for i, tokens in enumerate(batch.loss_tokens):
        if i in failed:
            continue
        running = 0.0
        for j in reversed(tokens):
            running = inputs.token_rewards[j].item() + gamma * running
            expected[j] = running
            if name == "remax":
                expected[j] -= inputs.baselines[i]
            elif name != "reinforce_pp":
                group = [k for k, group in enumerate(GROUP_IDS) if group == GROUP_IDS[i]]
                members = [k for k in group if k not in failed]
                rule = "dr_grpo" if name == "reinforce_pp_baseline" else name
                expected[j] = reference_of_group(rule, i, members, lengths)
    if name.startswith("reinforce_pp"):
        everything = expected[inputs.loss_mask].tolist()
        expected[inputs.loss_mask] = torch.tensor(reference_whitened(everything)).double()
    return expected


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gae"])
def test_advantages_equal_formula(name: str, gaps: bool, seed: int) -> None:
    batch = random_ragged(seed, gaps=gaps)
    inputs = inputs_of(batch, seed)
    gamma = 0.9 if name == "reinforce_pp" else 1.0
    outputs = estimate(name, inputs, gamma=gamma)
    assert outputs.advantages.dtype == torch.float32 and outputs.returns is None
    assert (outputs.advantages[~batch.loss_mask] == 0).all()
    # Computed in float64, so float32 rounding of the result is all that may differ.
    expected = reference(name, inputs, batch, gamma)
    torch.testing.assert_close(outputs.advantages.double(), expected, rtol=2e-7, atol=1e-7)


def without(batch: Ragged, failed: tuple[int, ...]) -> torch.Tensor:
    """The loss mask without these samples."""
    mask = batch.loss_mask.clone()
    for i in failed:
        mask[batch.loss_tokens[i]] = False
    return mask


# One of a group of three, all but one of it, whole groups, the first and the last sample.
@pytest.mark.parametrize("failed", [(1,), (0, 3), (2, 4), (5, 6), (0, 7), tuple(range(1, 8))])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gae"])
def test_failed_sample_is_not_compared(name: str, failed: tuple[int, ...]) -> None:
    batch = random_ragged(1)
    valid = ~np.isin(np.arange(8), failed)
    # What stands there is never looked at.
    poisoned = np.where(valid, SCORES, np.nan)
    inputs = inputs_of(batch, 1, loss_mask=without(batch, failed), scores=poisoned)
    entry = find_advantage_estimator(name)
    found = advantages_of_valid(entry.function, inputs, entry.parameters, valid)
    assert found.returns is None
    expected = reference(name, inputs, batch, 1.0, failed)
    torch.testing.assert_close(found.advantages.double(), expected, rtol=2e-7, atol=1e-7)


def test_gae_ignores_failed_samples() -> None:
    batch, config = random_ragged(2), GAE(gamma=0.9, whiten_advantages=True)
    keep = [0, 2, 3, 6, 7]
    valid = np.isin(np.arange(8), keep)
    mask = without(batch, (1, 4, 5))
    # This rank has only some of the samples, in an order of its own.
    inputs = inputs_of(batch, 2, loss_mask=mask)
    found = advantages_of_valid(find_advantage_estimator("gae").function, inputs, config, valid)
    starts = np.cumsum([0, *batch.lengths.tolist()])
    tokens = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in keep])
    alone = dataclasses.replace(
        inputs,
        rows=np.arange(5),
        scores=SCORES[keep],
        lengths=batch.lengths[keep],
        loss_mask=mask[tokens],
        token_rewards=inputs.token_rewards[tokens],
        values=inputs.values[tokens],
    )
    expected = find_advantage_estimator("gae").function(alone, config)
    for name in ("advantages", "returns"):
        assert torch.equal(getattr(found, name)[tokens], getattr(expected, name)), name
        others = getattr(found, name)
        others[tokens] = 0.0
        assert not others.any(), name


def test_advantages_are_zero_on_rank_without_valid_samples() -> None:
    batch = ragged([3, 4], [2, 3])
    inputs = inputs_of(batch, loss_mask=without(batch, (0, 1)))
    for name in ESTIMATORS:
        found = advantages_of_valid(
            find_advantage_estimator(name).function,
            dataclasses.replace(
                inputs,
                scores=np.zeros(3),
                group_ids=np.zeros(3, np.int64),
                response_lengths=np.ones(3, np.int64),
                baselines=np.zeros(3),
            ),
            find_advantage_estimator(name).parameters,
            np.array([False, False, True]),
        )
        assert not found.advantages.any(), name


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "reinforce_pp_baseline"])
@pytest.mark.parametrize(
    "scores", [[0.1] * 3, [0.1] * 10, [1 / 3] * 7, [5.0]], ids=["0.1x3", "0.1x10", "1/3x7", "one"]
)
def test_advantages_are_exactly_zero_for_equal_scores(name: str, scores: list[float]) -> None:
    batch = ragged([3] * len(scores), [2] * len(scores))
    inputs = inputs_of(
        random_ragged(0),
        scores=np.array(scores),
        group_ids=np.zeros(len(scores), dtype=int),
        response_lengths=np.arange(len(scores)),
        rows=np.arange(len(scores)),
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        token_rewards=torch.zeros(batch.num_tokens),
    )
    assert estimate(name, inputs).advantages.tolist() == [0.0] * batch.num_tokens


def test_whitened_advantages_are_exactly_zero_for_equal_returns() -> None:
    batch = ragged([1] * 7, [2] * 7)
    rewards = torch.full((batch.num_tokens,), 0.1)
    outputs = estimate("reinforce_pp", inputs_of(batch, token_rewards=rewards))
    assert outputs.advantages.tolist() == [0.0] * batch.num_tokens


# Scores of very different sizes make every order of summing give another float64.
SCORE = st.one_of(st.floats(-10, 10), st.floats(-1e17, 1e17))


@given(
    scores=st.lists(SCORE, min_size=1, max_size=24),
    num_groups=st.integers(1, 4),
    name=st.sampled_from(GROUP_ESTIMATORS),
    seed=st.integers(0, 2**32 - 1),
)
@example(scores=[1e17, 1.0, -1e17, 3.0], num_groups=1, name="dr_grpo", seed=0)
@example(scores=[1e17, 1.0, -1e17, 3.0], num_groups=1, name="opo", seed=0)
def test_group_advantages_are_bit_equal_in_any_order_and_split(
    scores: list[float], num_groups: int, name: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    group_ids = rng.integers(0, num_groups, len(scores))
    lengths = rng.integers(1, 5, len(scores))

    def outcome(samples: np.ndarray, rows: np.ndarray) -> dict[int, bytes]:
        """The advantages on a rank with `rows` of `samples`, by sample."""
        local = samples[rows]
        batch = ragged(lengths[local].tolist(), [2] * len(local))
        inputs = AdvantageInputs(
            scores=np.array(scores)[samples],
            group_ids=group_ids[samples],
            response_lengths=lengths[samples],
            rows=rows,
            token_rewards=torch.zeros(batch.num_tokens),
            loss_mask=batch.loss_mask,
            lengths=batch.lengths,
        )
        advantages = estimate(name, inputs).advantages
        return {
            int(sample): advantages[tokens].numpy().tobytes()
            for sample, tokens in zip(local, batch.loss_tokens, strict=True)
        }

    everyone = np.arange(len(scores))
    order, parts = rng.permutation(len(scores)), rng.integers(0, 3, len(scores))
    split: dict[int, bytes] = {}
    for rank in range(3):
        split |= outcome(order, np.flatnonzero(parts == rank))
    assert split == outcome(everyone, everyone)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("seed", range(3))
def test_advantages_are_invariant_to_split_over_ranks(name: str, seed: int) -> None:
    batch = random_ragged(seed)
    whole_inputs = inputs_of(batch, seed)
    whiten = name == "gae"
    whole = estimate(name, whole_inputs, whiten_advantages=whiten)
    order = np.random.default_rng(seed).permutation(len(batch.lengths))
    ranks = [order[:5].tolist(), [], order[5:].tolist()]
    parts = [(rows, *batch.part(rows)) for rows in ranks]

    def collective(calls: list[list[torch.Tensor]]):
        """A sum over ranks that run in turn: of what they gave in the rounds before."""

        def of_rank(rank: int):
            index = iter(range(len(calls)))

            def global_sum(values: torch.Tensor) -> torch.Tensor:
                call = next(index, None)
                if call is None or len(calls[call]) < len(ranks):
                    raise Incomplete(values)
                return torch.stack(calls[call]).sum(0)

            return global_sum

        return of_rank

    def run(rank: int, global_sum):
        rows, part, index = parts[rank]
        inputs = dataclasses.replace(
            whole_inputs,
            rows=np.array(rows, dtype=np.int64),
            loss_mask=part.loss_mask,
            lengths=part.lengths,
            token_rewards=whole_inputs.token_rewards[index],
            values=whole_inputs.values[index],
            global_sum=global_sum,
        )
        return estimate(name, inputs, whiten_advantages=whiten)

    calls: list[list[torch.Tensor]] = []
    while True:
        outputs, asked = [], []
        for rank in range(len(ranks)):
            try:
                outputs.append(run(rank, collective(calls)(rank)))
            except Incomplete as incomplete:
                asked.append(incomplete.values)
        if not asked:
            break
        assert len(asked) == len(ranks), "every rank takes part in every collective"
        calls.append(asked)
    whitens = whiten or name.startswith("reinforce_pp")
    assert len(calls) == (2 if whitens else 0)
    for (_, _, index), output in zip(parts, outputs, strict=True):
        expected = whole.advantages[index]
        if whitens:
            torch.testing.assert_close(output.advantages, expected, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(output.advantages, expected)
        if name == "gae":
            assert torch.equal(output.returns, whole.returns[index])


class Incomplete(Exception):
    def __init__(self, values: torch.Tensor):
        self.values = values


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_positions_do_not_matter(name: str, garbage: float) -> None:
    batch = random_ragged(3, gaps=True)
    clean = inputs_of(batch)
    dirty = dataclasses.replace(
        clean,
        token_rewards=spoilt(batch, clean.token_rewards, garbage),
        values=spoilt(batch, clean.values, garbage),
    )
    for whiten in (False, True):
        expected, actual = (
            estimate(name, inputs, whiten_advantages=whiten) for inputs in (clean, dirty)
        )
        assert torch.equal(actual.advantages, expected.advantages)
        assert actual.advantages.isfinite().all()
        if name == "gae":
            assert torch.equal(actual.returns, expected.returns)


@pytest.mark.parametrize("name", ["reinforce_pp", "remax", "gae"])
def test_nan_in_loss_token_is_visible(name: str) -> None:
    batch = random_ragged(1)
    inputs = inputs_of(batch)
    rewards = inputs.token_rewards.clone()
    rewards[max(batch.loss_tokens, key=len)[0]] = math.nan
    dirty = dataclasses.replace(inputs, token_rewards=rewards)
    assert estimate(name, dirty, whiten_advantages=True).advantages.isnan().any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_zero_for_empty_responses(name: str) -> None:
    batch = ragged([0, 0, 0], [1, 2, 3])
    outputs = estimate(name, inputs_of(batch), whiten_advantages=True)
    assert outputs.advantages.tolist() == [0.0] * batch.num_tokens


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sample_with_score_not_finite_is_named(bad: float) -> None:
    scores = np.array([0.0, 1.0, bad, *SCORES[3:]])
    with pytest.raises(RuntimeError, match=r"of sample 2 \(group 9\) is not finite"):
        estimate("grpo", inputs_of(random_ragged(0), scores=scores))


def test_missing_input_of_estimator_is_named() -> None:
    batch = random_ragged(0)
    with pytest.raises(RuntimeError, match="remax needs .* no baselines"):
        estimate("remax", inputs_of(batch, baselines=None))
    with pytest.raises(RuntimeError, match="gae needs the critic's values"):
        estimate("gae", inputs_of(batch, values=None))


# gae ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (1.0, 0.0), (0.0, 0.5)]
)
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
def test_gae_equals_double_sum(gamma: float, lam: float, gaps: bool, whiten: bool) -> None:
    batch = random_ragged(5, num_samples=8, gaps=gaps)
    inputs = inputs_of(batch)
    outputs = estimate("gae", inputs, gamma=gamma, gae_lambda=lam, whiten_advantages=whiten)
    advantages = torch.zeros(batch.num_tokens, dtype=torch.float64)
    returns = torch.zeros_like(advantages)
    for tokens in batch.loss_tokens:
        values = [inputs.values[j].item() for j in tokens] + [0.0]
        rewards = [inputs.token_rewards[j].item() for j in tokens]
        deltas = [reward + gamma * values[k + 1] - values[k] for k, reward in enumerate(rewards)]
        for k, j in enumerate(tokens):
            advantages[j] = sum((gamma * lam) ** i * d for i, d in enumerate(deltas[k:]))
            returns[j] = advantages[j] + values[k]
    if whiten:
        everything = advantages[batch.loss_mask].tolist()
        advantages[batch.loss_mask] = torch.tensor(reference_whitened(everything)).double()
    # float32 rounding of the results
    torch.testing.assert_close(outputs.advantages.double(), advantages, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(outputs.returns.double(), returns, rtol=2e-7, atol=2e-7)


def test_gae_with_lambda_one_equals_return_minus_value() -> None:
    batch = ragged([3], [2])
    outputs = estimate(
        "gae",
        inputs_of(
            batch,
            token_rewards=torch.tensor([9.0, 0.0, 0.0, 1.0, 9.0]),
            values=torch.tensor([9.0, 0.25, 0.5, 0.75, 9.0]),
        ),
        gae_lambda=1.0,
    )
    assert outputs.advantages.tolist() == [0.0, 0.75, 0.5, 0.25, 0.0]
    assert outputs.returns.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
