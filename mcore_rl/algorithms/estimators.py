"""Advantage estimators: how much better the outcome of a response is than a baseline.

    grpo                   (r_i - mean(r)) / (std(r) + eps)           arXiv 2402.03300, 4.1.2
    gdpo                   grpo's of each reward, summed, normalised  arXiv 2601.05242
    dr_grpo                 r_i - mean(r)                             arXiv 2503.20783
    rloo                    r_i - mean of the group's other r         arXiv 2402.14740
    opo                     r_i - sum(length r) / sum(length)         arXiv 2505.23585
    remax                   return to go - r(greedy response)         arXiv 2310.10505
    reinforce_pp            whitened return to go                     arXiv 2501.03262
    reinforce_pp_baseline   whitened r_i - mean(r)                    arXiv 2501.03262
    gae                     sum over k of (gamma lambda)^k delta      arXiv 1506.02438, eq. 16

Also the preceding stages: the overlong penalty, and the selection of groups with a gradient.

mean, std and sums run over the group, the responses to one prompt; r is the outcome of a sample.
Shape legend: see `mcore_rl.algorithms`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

from mcore_rl.algorithms.aggregation import Segments, discounted_sums_to_go, masked
from mcore_rl.algorithms.interfaces import AdvantageInputs, AdvantageOutputs
from mcore_rl.algorithms.registry import advantage_estimator
from mcore_rl.common.parameters import Parameters, param

P = TypeVar("P", bound=Parameters)  # parameters of an estimator


@dataclass(frozen=True, slots=True)
class Discount(Parameters):
    """Parameters of estimators that depend on the position of a reward."""

    gamma: float = param(
        1.0,
        "discount of rewards, per token",
        least=0,
        most=1,
        advice="later rewards count at most fully, so choose for example 1",
    )


def advantages_of_valid(
    estimator: Callable[[AdvantageInputs, P], AdvantageOutputs],
    inputs: AdvantageInputs,
    config: P,
    valid: np.ndarray,
) -> AdvantageOutputs:
    """Apply `estimator` to the samples that are `valid` `[n]`; the others get advantage 0.

    With any estimator, a sample whose reward failed enters no mean, deviation, baseline or
    whitening. Its tokens must not be in `inputs.loss_mask`. Collective if the estimator is.
    """
    if valid.all():
        return estimator(inputs, config)
    number_among_valid = np.cumsum(valid) - 1
    here = valid[inputs.rows]
    samples = torch.from_numpy(here).to(inputs.lengths.device)
    tokens = samples.repeat_interleave(inputs.lengths)
    assert not inputs.loss_mask[~tokens].any(), "a sample without a reward is learned from"
    estimated = estimator(
        dataclasses.replace(
            inputs,
            scores=inputs.scores[valid],
            group_ids=inputs.group_ids[valid],
            response_lengths=inputs.response_lengths[valid],
            rows=number_among_valid[inputs.rows[here]],
            token_rewards=inputs.token_rewards[tokens],
            loss_mask=inputs.loss_mask[tokens],
            lengths=inputs.lengths[samples],
            baselines=None if inputs.baselines is None else inputs.baselines[valid],
            reward_parts=None if inputs.reward_parts is None else inputs.reward_parts[valid],
            reward_weights=None if inputs.reward_weights is None else inputs.reward_weights[valid],
            values=None if inputs.values is None else inputs.values[tokens],
        ),
        config,
    )

    def in_place(values: torch.Tensor) -> torch.Tensor:
        everywhere = values.new_zeros(tokens.shape)
        everywhere[tokens] = values
        return everywhere

    return AdvantageOutputs(
        in_place(estimated.advantages),
        None if estimated.returns is None else in_place(estimated.returns),
    )


EPS = 1e-6  # added to a standard deviation before dividing by it


@dataclass(frozen=True, slots=True)
class RewardScale(Parameters):
    """Parameters of grpo."""

    scale_rewards: Literal["group", "batch"] = param(
        "group",
        "samples whose rewards' deviation grpo divides by: of the group, or all of the step (arXiv "
        "2508.08221); dr_grpo does not divide",
    )


@advantage_estimator("grpo", RewardScale(), compares_group=True)
def grpo(inputs: AdvantageInputs, config: RewardScale) -> AdvantageOutputs:
    """Return GRPO's advantages: (r - mean) / (std + eps) for all tokens of a response.

    std is the sample standard deviation (divisor n - 1), as in the code that the authors of
    Dr. GRPO published for both forms; the GRPO paper only writes "std" and has no code. With
    `scale_rewards` "batch" it is that of all samples of the step, whatever their group (arXiv
    2508.08221). A group of equal outcomes, including a group of one, gets exactly 0.
    """
    scores = finite_scores(inputs.scores, inputs.group_ids)
    of_batch = _deviation(scores) if config.scale_rewards == "batch" else None

    def normalised(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        std = _deviation(scores) if of_batch is None else of_batch
        return _centred(scores, lengths) / (std + EPS)

    return _per_response(inputs, normalised)


@advantage_estimator("gdpo", compares_group=True, needs_reward_parts=True)
def gdpo(inputs: AdvantageInputs, config: Parameters) -> AdvantageOutputs:
    """Return GDPO's advantages: every reward normalised by itself (arXiv 2601.05242).

        A_i = sum over k of weight_k (r_ik - mean(r_k)) / (std(r_k) + eps)    in the group
        A_i = (A_i - mean(A)) / (std(A) + eps)                                over the step

    Weights are those of the group's source of prompts. Deviations have divisor n - 1. A reward that
    is equal in a group adds exactly 0 to it. Raises RuntimeError without `reward_parts`.
    """
    if inputs.reward_parts is None or inputs.reward_weights is None:
        raise RuntimeError("gdpo needs the rewards one by one, but there are none")

    def normalised(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return _centred(scores, lengths) / (_deviation(scores) + EPS)

    total = np.zeros(len(inputs.scores))
    for weights, part in zip(inputs.reward_weights.T, inputs.reward_parts.T, strict=True):
        total += weights * _by_group(dataclasses.replace(inputs, scores=part), normalised)
    if total.size and total.min() != total.max():
        total = normalised(total, inputs.response_lengths)
    return _of_responses(inputs, total)


@advantage_estimator("dr_grpo", compares_group=True)
def dr_grpo(inputs: AdvantageInputs, config: Parameters) -> AdvantageOutputs:
    """Return Dr. GRPO's advantages: r - mean.

    It omits GRPO's division, which favours prompts that are almost always or almost never solved. A
    group of equal outcomes gets exactly 0.
    """
    return _per_response(inputs, _centred)


@advantage_estimator("rloo", compares_group=True)
def rloo(inputs: AdvantageInputs, config: Parameters) -> AdvantageOutputs:
    """Return RLOO's advantages: r minus the mean of the other n - 1, = (r - mean) * n / (n - 1).

    A group of equal outcomes gets exactly 0, and so does a group of one.
    """

    def against_the_others(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return _centred(scores, lengths) * (scores.size / (scores.size - 1))

    return _per_response(inputs, against_the_others)


@advantage_estimator("opo", compares_group=True)
def opo(inputs: AdvantageInputs, config: Parameters) -> AdvantageOutputs:
    """Return OPO's advantages: r - sum(length * r) / sum(length).

    This baseline has the least variance if the gradients of a response's tokens are orthogonal and
    of equal norm (the paper's assumption): the squared gradient of a response then grows with its
    length. A group of equal outcomes gets exactly 0. A group of empty responses, which has no
    tokens to train on, is compared with the plain mean.
    """

    def against_weighted_mean(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        weights = lengths if lengths.any() else np.ones_like(lengths)
        return scores - math.fsum(weights * scores) / math.fsum(weights)

    return _per_response(inputs, against_weighted_mean)


@advantage_estimator("remax", needs_greedy_baseline=True)
def remax(inputs: AdvantageInputs, config: Parameters) -> AdvantageOutputs:
    """Return ReMax's advantages: undiscounted return to go - reward of the greedy response.

    Raises RuntimeError without baselines.
    """
    if inputs.baselines is None:
        raise RuntimeError(
            "remax needs the rewards of greedy responses, but there are no baselines"
        )
    segments = Segments.of(inputs.lengths, inputs.loss_mask)
    baselines = _select_rows(np.asarray(inputs.baselines, np.float64), inputs)
    advantages = returns_to_go(inputs, segments, 1.0) - segments.to_tokens(baselines)
    return AdvantageOutputs(masked(inputs.loss_mask, advantages).float())


@advantage_estimator("reinforce_pp", Discount())
def reinforce_pp(inputs: AdvantageInputs, config: Discount) -> AdvantageOutputs:
    """Return REINFORCE++'s advantages: discounted returns to go, whitened over the global batch."""
    segments = Segments.of(inputs.lengths, inputs.loss_mask)
    returns = returns_to_go(inputs, segments, config.gamma)
    return AdvantageOutputs(whiten(returns, inputs))


@advantage_estimator("reinforce_pp_baseline", compares_group=True)
def reinforce_pp_baseline(inputs: AdvantageInputs, config: Parameters) -> AdvantageOutputs:
    """Return r - mean of the group, whitened over the global batch (REINFORCE++ with baseline).

    A group of equal outcomes starts at exactly 0. Whitening then shifts all tokens by the same
    mean, which is 0 unless longer responses tend to be better or worse.
    """
    segments = Segments.of(inputs.lengths, inputs.loss_mask)
    per_response = _select_rows(_by_group(inputs, _centred), inputs)
    return AdvantageOutputs(whiten(segments.to_tokens(per_response), inputs))


def returns_to_go(inputs: AdvantageInputs, segments: Segments, gamma: float) -> torch.Tensor:
    """Return `[t]` float64: discounted sum of this and later token rewards; 0 where masked."""
    rewards = inputs.token_rewards[inputs.loss_mask].double()
    return _scattered(discounted_sums_to_go(rewards, segments.tokens_left(), gamma), inputs)


def whiten(values: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    """Return (values - mean) / (std + eps) over all loss tokens of all ranks, `[t]` float32.

    The variance's divisor is the number of tokens n, as in the code of REINFORCE++'s authors (the
    papers only write "std"): it is defined for one token, too, and changes std by a factor of
    1 + 1 / 2n relative to n - 1. Values that differ only by float64 rounding get exactly 0.
    Collective: calls `inputs.global_sum` twice.
    """
    values = masked(inputs.loss_mask, values.double())
    count = inputs.loss_mask.sum().double()
    total = inputs.global_sum(torch.stack((count, values.sum(), values.abs().sum())))
    num_tokens = total[0].clamp(min=1.0)
    centred = masked(inputs.loss_mask, values - total[1] / num_tokens)
    # From centred values, as mean of squares minus square of mean would lose digits.
    std = (inputs.global_sum(centred.square().sum()) / num_tokens).sqrt()
    all_equal = std <= 1e-12 * total[2] / num_tokens  # false for nan, which stays visible
    return torch.where(all_equal, torch.zeros_like(centred), centred / (std + EPS)).float()


def finite_scores(scores: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Return `scores`, which exclude failed rewards, as float64; RuntimeError if not finite."""
    values = np.asarray(scores, dtype=np.float64)
    assert values.ndim == 1 and values.shape == np.shape(group_ids), (
        f"scores {values.shape} and group_ids {np.shape(group_ids)} must both be [n]"
    )
    if not np.isfinite(values).all():
        sample = int(np.flatnonzero(~np.isfinite(values))[0])
        raise RuntimeError(
            f"reward {values[sample]} of sample {sample} (group {group_ids[sample]}) is not finite"
        )
    return values


def members_by_group(group_ids: np.ndarray) -> list[np.ndarray]:
    """Return the samples of each group in order, groups by ascending id; no group is empty."""
    if not len(group_ids):
        return []
    order = np.argsort(group_ids, kind="stable")
    _, starts = np.unique(np.asarray(group_ids)[order], return_index=True)
    return np.split(order, starts[1:])


def _by_group(
    inputs: AdvantageInputs, compare: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return `[n]` float64: `compare(scores, response lengths)` per group, 0 for equal scores.

    `compare` must round its sums once (math.fsum), so that the order of samples has no effect.
    """
    scores = finite_scores(inputs.scores, inputs.group_ids)
    lengths = np.asarray(inputs.response_lengths, dtype=np.float64)
    advantages = np.zeros_like(scores)
    for members in members_by_group(inputs.group_ids):
        group = scores[members]
        # In floating point the mean of equal numbers may differ from them (three times 0.1), and
        # the difference divided by eps would not be small.
        if group.min() != group.max():
            advantages[members] = compare(group, lengths[members])
    return advantages


def _centred(scores: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    centred: np.ndarray = scores - math.fsum(scores) / scores.size
    return centred


def _deviation(scores: np.ndarray) -> float:
    """Return the sample standard deviation, rounded once; 0 for one score."""
    centred = _centred(scores, scores)
    return math.sqrt(math.fsum(centred**2) / max(scores.size - 1, 1))


def _select_rows(per_sample: np.ndarray, inputs: AdvantageInputs) -> torch.Tensor:
    """Convert `[n]` to `[b]` float64 on the device of the tokens."""
    return torch.from_numpy(per_sample[inputs.rows]).to(inputs.loss_mask.device)


def _per_response(
    inputs: AdvantageInputs, compare: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> AdvantageOutputs:
    return _of_responses(inputs, _by_group(inputs, compare))


def _of_responses(inputs: AdvantageInputs, per_sample: np.ndarray) -> AdvantageOutputs:
    """Give every token of a response the value of its sample, of `[n]`."""
    segments = Segments.of(inputs.lengths, inputs.loss_mask)
    per_response = _select_rows(per_sample, inputs).float()
    return AdvantageOutputs(masked(inputs.loss_mask, segments.to_tokens(per_response)))


@dataclass(frozen=True, slots=True)
class GAE(Discount):
    """Parameters of generalised advantage estimation."""

    gae_lambda: float = param(
        0.95,
        "lambda of GAE: 0 relies on the critic, 1 on rewards only",
        least=0,
        most=1,
        advice="later rewards count at most fully, so choose for example 1",
    )
    whiten_advantages: bool = param(
        True, "whiten advantages to mean 0 and deviation 1 over all tokens"
    )


@advantage_estimator("gae", GAE(), needs_critic=True)
def gae(inputs: AdvantageInputs, config: GAE) -> AdvantageOutputs:
    """Return the advantages of GAE (Schulman et al., arXiv 1506.02438, eq. 16), with a critic.

        delta_j = r_j + gamma V_{j+1} - V_j            V after the last token is 0: responses end
        A_j     = sum over k >= 0 of (gamma lambda)^k delta_{j+k}
        R_j     = A_j + V_j                            target of the critic

    The paper neither whitens nor specifies a divisor; whitening comes from PPO's implementations.
    Intermediate results are float64.

    `inputs.values` at position j is the critic's value before token j+1, the token that j scores.
    `config.whiten_advantages` whitens the advantages over the global batch, never the returns.

    Raises RuntimeError without values.
    """
    if inputs.values is None:
        raise RuntimeError("gae needs the critic's values, but there are none")
    tokens_left = Segments.of(inputs.lengths, inputs.loss_mask).tokens_left()
    rewards = inputs.token_rewards[inputs.loss_mask].double()
    values = inputs.values[inputs.loss_mask].double()
    following = torch.where(tokens_left > 0, values.roll(-1), torch.zeros_like(values))
    deltas = rewards + config.gamma * following - values
    advantages = discounted_sums_to_go(deltas, tokens_left, config.gamma * config.gae_lambda)
    per_token = _scattered(advantages, inputs)
    return AdvantageOutputs(
        advantages=whiten(per_token, inputs) if config.whiten_advantages else per_token.float(),
        returns=_scattered(advantages + values, inputs).float(),
    )


def _scattered(loss_tokens: torch.Tensor, inputs: AdvantageInputs) -> torch.Tensor:
    """Return `[t]` float64: the values of the loss tokens at their positions, 0 where masked."""
    tokens = torch.zeros_like(inputs.token_rewards, dtype=torch.float64)
    tokens[inputs.loss_mask] = loss_tokens
    return tokens


def overlong_penalty(
    response_lengths: np.ndarray, *, buffer_tokens: int, max_response_tokens: int
) -> np.ndarray:
    """Return DAPO's soft overlong punishment, `[n]` float64 in [-1, 0], to be added to the scores.

        0                                    length <= max - buffer
        (max - buffer - length) / buffer     up to max
        -1                                   beyond

    (arXiv 2503.14476, eq. 13.) A response truncated at the budget gets -1.

    response_lengths: `[n]` int64, generated tokens. A buffer of 0 disables the penalty.
    """
    lengths = np.asarray(response_lengths, dtype=np.float64)
    if buffer_tokens == 0:
        return np.zeros_like(lengths)
    over = lengths - (max_response_tokens - buffer_tokens)
    return 0.0 - np.clip(over / buffer_tokens, 0.0, 1.0)  # 0.0 - x: without negative zeros


def select_informative_groups(scores: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Return `[k]`, ascending: ids of the groups whose scores are not all equal.

    Only these have nonzero advantages; dynamic sampling (arXiv 2503.14476, section 3.2) draws
    prompts again until there are enough of them. The paper requires an accuracy strictly between 0
    and 1, which is the same for rewards of 0 and 1.

    scores: `[n]` finite, before any length penalty (a penalty makes equal outcomes unequal);
    group_ids: `[n]`. Raises RuntimeError if a score is not finite.
    """
    values, groups = finite_scores(scores, group_ids), np.asarray(group_ids)
    informative = [
        groups[members[0]]
        for members in members_by_group(groups)
        if values[members].min() != values[members].max()
    ]
    return np.asarray(informative, dtype=groups.dtype)
