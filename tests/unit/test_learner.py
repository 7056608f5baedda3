"""Preparation of a step's samples and the order of updates.

Actor and critic are stand-ins in one process; `tests.dist.test_ppo` has real ones on several.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mcore_rl.algorithms.aggregation import Denominators
from mcore_rl.algorithms.recipes import RECIPES
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.algorithms.total_loss import policy_loss_total
from mcore_rl.algorithms.value_loss import ValueLossSums
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.train_batches import take
from mcore_rl.batching.types import (
    Baseline,
    Prompt,
    Rollout,
    ScoredRollout,
    StepBatch,
    TrainBatch,
    TurnReward,
    with_baselines,
)
from mcore_rl.common.user_code import import_user_file
from mcore_rl.config import RLConfig
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.optimizer import UpdateResult
from mcore_rl.model.layout import TrainLayout
from mcore_rl.rewards.functions import ENVIRONMENT
from mcore_rl.rewards.specs import RewardSpec
from mcore_rl.trainer.learner import Learner
from mcore_rl.trainer.roles import critic as critic_module
from mcore_rl.trainer.roles.critic import ServedCritic, StepCritic, ValueUpdateStats
from mcore_rl.trainer.roles.reference import ReferencePolicy
from mcore_rl.trainer.roles.remote import LocalRole
from mcore_rl.trainer.roles.samples import mini_batches, table_to_tensors, tensors_to_table
from tests.held import HeldHere, table_of

LAYOUT = TrainLayout(world_size=1)
# (prompt tokens, response tokens, reward) of two groups of two; one response is empty.
SAMPLES = [(3, 4, 1.0), (3, 2, 0.0), (1, 0, 0.5), (1, 3, 2.0)]
ACTOR_SHIFT = 0.25  # nats by which the actor is above the reference
MAX_RESPONSE_TOKENS = 4

pytestmark = pytest.mark.usefixtures("world_of_one")


class Runner:
    """A runner of one process: global sums are local."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.groups = {"dp": dist.group.WORLD}

    def global_sum(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


class Optimizer:
    learning_rate = 0.125


class State(megatron_adapter.TrainState):
    """One chunk with one parameter, which the reference keeps a copy of."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.tensor([ACTOR_SHIFT]))
        super().__init__([torch.nn.ParameterList([self.parameter])], None, None, 0)


class ScriptedActor:
    """Log-probs are those of the engine plus the model's parameter."""

    has_dropout = False

    def __init__(self, log: list[tuple]) -> None:
        self.state, self.runner, self.optimizer = State(), Runner(), Optimizer()
        self._log = log

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        found = batch.rollout_log_probs + self.state.parameter.detach()
        # What stands at masked positions means nothing and must not matter.
        return torch.where(batch.loss_mask, found, torch.full_like(found, torch.nan))

    def scored(self, batch: TrainBatch) -> TrainBatch:
        return dataclasses.replace(batch, old_log_probs=self.log_probs(batch))

    def weigh_entropy(self, coef: float) -> None:
        self._log.append(("entropy", coef))

    def update(self, batch: TrainBatch) -> str:
        self._log.append(("actor", batch.sample_ids.tolist()))
        with torch.no_grad():
            self.state.parameter += 1.0
        return "actor"


class ScriptedCritic:
    """Its value of a token is the token's number."""

    def __init__(self, log: list[tuple]) -> None:
        self.layout, self.batching = LAYOUT, MicroBatching()
        self.runner, self.optimizer, self._log = Runner(), Optimizer(), log

    def values(self, batch: TrainBatch) -> torch.Tensor:
        return batch.token_ids.float()

    def update(self, batch: TrainBatch) -> ValueUpdateStats:
        assert batch.values is not None and batch.returns is not None
        self._log.append(("critic", batch.sample_ids.tolist()))
        return STATS_OF_CRITIC


STATS_OF_CRITIC = ValueUpdateStats(
    ValueLossSums.from_stacked(torch.arange(8, dtype=torch.float64)),
    UpdateResult(grad_norm=0.5, skipped=False),
)


class NotedUpdates(list[TrainBatch]):
    """The batches of a critic's updates."""

    def update(self, batch: TrainBatch) -> ValueUpdateStats:
        self.append(batch)
        return STATS_OF_CRITIC


def scored(samples: Sequence[tuple[int, int, float]] = SAMPLES) -> list[ScoredRollout]:
    """Token ids continue from sample to sample; all log-probs of the engine are -1."""
    found, token = [], 0
    for number, (prompt, response, reward) in enumerate(samples):
        ids = np.arange(token, token + prompt + response, dtype=np.int32)
        token += len(ids)
        rollout = Rollout(
            prompt=Prompt(number // 2, "", "", ids[:prompt]),
            sample_index=number % 2,
            text="",
            response_token_ids=ids[prompt:],
            rollout_log_probs=-np.ones(response, np.float32),
            finish_reason="stop",
            weight_version=0,
        )
        found.append(ScoredRollout(rollout, reward, baseline=Baseline(0.5, num_tokens=1)))
    return found


def learner_of(
    *,
    algorithm: str = "grpo",
    scored_before: bool = True,
    turn_weight: float = 1.0,
    of_sources: Mapping[str, Mapping[str, float]] | None = None,
    **flags: Any,
) -> tuple[Learner, list[tuple]]:
    log: list[tuple] = []
    config = RLConfig.of(
        algorithm=algorithm,
        num_prompts_per_step=2,
        num_samples_per_prompt=2,
        max_response_tokens=MAX_RESPONSE_TOKENS,
        **flags,
    )
    actor: Any = ScriptedActor(log)
    critic = None
    if config.recipe.needs_critic:
        model: Any = ScriptedCritic(log)
        critic = StepCritic(LocalRole(ServedCritic(model, config.trainer, is_separate=False)))
    reference = ReferencePolicy(actor.state) if config.recipe.needs_reference else None
    rewards = RewardSpec((ENVIRONMENT, "a", "b"), (turn_weight,) * 3, None, 1.0)
    rewards = dataclasses.replace(rewards, of_sources=of_sources or {})
    job: Any = SimpleNamespace(
        config=config,
        spec=SimpleNamespace(train_layout=LAYOUT, rewards=rewards),
        args=SimpleNamespace(seed=1),
        micro_batching=MicroBatching,
    )
    learner = Learner(job, actor, critic, reference=reference, sample_store=HeldHere())
    learner.scores_in_update &= not scored_before
    actor.state.parameter.data += ACTOR_SHIFT  # the reference stays behind by as much
    return learner, log


def held(learner: Learner, samples: Sequence[ScoredRollout]) -> SampleTable:
    """The table of samples, whose tokens the learner gets from now on."""
    sample_store: Any = learner.sample_store
    table: SampleTable = sample_store.hold(samples)
    return table


def with_log_probs(learner: Learner, samples: Sequence[ScoredRollout]) -> StepBatch:
    return learner.with_log_probs(learner.make_batch(0, held(learner, samples)))


def served_critic(learner: Learner) -> Any:
    """The critic's role, which is on this rank."""
    assert learner.critic is not None
    return learner.critic.role.served


def evaluated(learner: Learner, samples: Sequence[ScoredRollout]) -> StepBatch:
    table = held(learner, samples)
    return learner.with_advantages(table, learner.with_log_probs(learner.make_batch(0, table)))


def inputs_of(learner: Learner, samples: Sequence[ScoredRollout]) -> Any:
    table = held(learner, samples)
    batch = learner.with_log_probs(learner.make_batch(0, table)).actor
    return learner.advantage_inputs(table, batch)


def inputs_with(samples: Sequence[ScoredRollout] | None = None, **options: Any) -> Any:
    """The inputs that a learner with these options makes of some samples."""
    return inputs_of(learner_of(**options)[0], scored() if samples is None else samples)


def of_samples(values: torch.Tensor) -> list[list[float]]:
    """Split `[t]` into the values of each sample."""
    lengths = [prompt + response for prompt, response, _ in SAMPLES]
    return [part.tolist() for part in values.split(lengths)]


# Inputs of the estimators -------------------------------------------------------------------------


def test_reward_is_at_last_generated_token():
    inputs = inputs_with()
    # A response of r tokens after a prompt of p is scored by positions p-1 .. p+r-2.
    assert of_samples(inputs.token_rewards) == [
        [0, 0, 0, 0, 0, 1.0, 0],
        [0, 0, 0, 0.0, 0],
        [0],  # nothing was generated, so nothing is rewarded
        [0, 0, 2.0, 0],
    ]
    assert inputs.scores.tolist() == [1.0, 0.0, 0.5, 2.0]
    assert inputs.group_ids.tolist() == [0, 0, 1, 1]
    assert inputs.response_lengths.tolist() == [4, 2, 0, 3]
    assert inputs.baselines.tolist() == [0.5] * 4
    assert inputs.values is None


def of_two_turns() -> list[ScoredRollout]:
    """The first sample's second token is an observation; its turns earned 0.75 and 0.25."""
    samples = scored()
    rollout = dataclasses.replace(
        samples[0].rollout,
        is_generated=np.array([True, False, True, True]),
        turn_rewards=(TurnReward(1, 0.75), TurnReward(4, 0.25)),
    )
    return [dataclasses.replace(samples[0], rollout=rollout, reward=1.5), *samples[1:]]


def test_reward_of_turn_is_at_its_last_token():
    # 2 x (0.75 + 0.25), and -0.5 of another reward
    inputs = inputs_with(of_two_turns(), turn_weight=2.0)
    rewards, mask = of_samples(inputs.token_rewards), of_samples(inputs.loss_mask)
    assert rewards[0] == [0, 0, 1.5, 0, 0, 0.0, 0]
    assert mask[0] == [False, False, True, False, True, True, False]
    assert inputs.scores[0] == 1.5 and sum(rewards[0]) == 1.5
    assert inputs.response_lengths.tolist() == [3, 2, 0, 3]
    assert rewards[1:] == of_samples(inputs_with().token_rewards)[1:]


def loss_of(
    learner: Learner, batch: TrainBatch, log_probs: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    return policy_loss_total(
        log_probs,
        torch.zeros_like(log_probs),
        old_log_probs=batch.old_log_probs,
        advantages=advantages,
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        denominators=Denominators(9.0, 3.0),
        config=learner.recipe.policy_loss_config(MAX_RESPONSE_TOKENS),
    ).loss


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "reinforce_pp"])
def test_advantages_of_observations_do_not_change_gradient(algorithm: str):
    learner, _ = learner_of(algorithm=algorithm)
    batch = evaluated(learner, of_two_turns()).actor
    assert batch.advantages is not None and batch.old_log_probs is not None
    observed = torch.tensor([0, 0, 0, 1, 0, 0, 1]).bool().nonzero().ravel()  # and what ends it
    noise = batch.advantages.clone()
    noise[observed] += torch.tensor([17.0, -4.0])
    gradients = []
    for advantages in (batch.advantages, noise):
        log_probs = batch.old_log_probs.clone().requires_grad_()
        loss_of(learner, batch, log_probs, advantages).backward()
        gradients.append(log_probs.grad)
    assert torch.equal(*gradients) and gradients[0].count_nonzero() > 0
    assert not gradients[0][observed].any()


def test_baselines_need_all_samples():
    samples = scored()
    samples[1] = dataclasses.replace(samples[1], baseline=None)
    assert inputs_with(samples).baselines is None


def test_kl_in_reward_is_subtracted_from_tokens_and_score():
    # k1 is old - ref: the actor is 0.25 above the reference.
    penalty = -0.5 * ACTOR_SHIFT
    inputs = inputs_with(algorithm="rloo", kl_reward_coef=0.5, kl_estimator="k1")
    assert of_samples(inputs.token_rewards) == [
        [0, 0, penalty, penalty, penalty, penalty + 1.0, 0],
        [0, 0, penalty, penalty, 0],
        [0],
        [penalty, penalty, penalty + 2.0, 0],
    ]
    assert inputs.scores.tolist() == pytest.approx(
        [1.0 + 4 * penalty, 2 * penalty, 0.5, 2.0 + 3 * penalty]
    )


def test_kl_in_loss_does_not_change_rewards():
    learner, _ = learner_of(kl_coef=0.5)
    samples = held(learner, scored())
    batch = learner.with_log_probs(learner.make_batch(0, samples)).actor
    assert batch.ref_log_probs is not None
    distances = (batch.old_log_probs - batch.ref_log_probs)[batch.loss_mask]
    assert torch.equal(distances, torch.full((9,), ACTOR_SHIFT))
    inputs = learner.advantage_inputs(samples, batch)
    assert inputs.scores.tolist() == [1.0, 0.0, 0.5, 2.0]
    assert float(inputs.token_rewards.sum()) == 3.0


def test_no_reference_is_used_without_kl():
    learner, _ = learner_of()
    assert learner.reference is None
    assert with_log_probs(learner, scored()).actor.ref_log_probs is None


def test_reference_restores_weights_of_actor():
    learner, _ = learner_of(kl_coef=0.5)
    with_log_probs(learner, scored())
    assert learner.actor.state.parameter.item() == 2 * ACTOR_SHIFT


def test_kl_coefficient_is_adapted_once_per_step_after_use():
    learner, _ = learner_of(algorithm="rloo", kl_reward_coef=0.5, kl_target=0.125, kl_horizon=4.0)
    inputs = inputs_of(learner, scored())
    assert inputs.scores[1] == pytest.approx(2 * -0.5 * ACTOR_SHIFT)
    # KL 0.25 is twice the target, which counts as 20 %; 4 samples are a whole horizon.
    assert learner.kl_controller.coef == pytest.approx(0.5 * 1.2)
    assert learner.rates()["kl/coef"] == 0.5  # of this step, not the next one's
    inputs_of(learner, scored())
    assert learner.rates()["kl/coef"] == pytest.approx(0.5 * 1.2)


def test_overlong_penalty_is_in_score_and_token_rewards():
    inputs = inputs_with(overlong_buffer_tokens=2)
    # Budget 4, buffer 2: a response of 3 tokens loses a half, one of 4 a whole.
    assert inputs.scores.tolist() == [0.0, 0.0, 0.5, 1.5]
    assert [max(s) for s in of_samples(inputs.token_rewards)] == [0.0, 0.0, 0.0, 1.5]


def test_overlong_penalty_of_greedy_response_follows_its_length():
    learner, _ = learner_of(algorithm="remax", kl_reward_coef=0.0, overlong_buffer_tokens=2)
    samples = [
        dataclasses.replace(sample, baseline=Baseline(0.5, num_tokens=length))
        for sample, length in zip(scored(), (2, 3, 4, 4), strict=True)
    ]
    assert inputs_of(learner, samples).baselines.tolist() == [0.5, 0.0, -0.5, -0.5]
    advantages = of_samples(evaluated(learner, samples).actor.advantages)
    # Rewards 1, 0, 0.5 and 2 less penalties of 1, 0, 0 and 0.5.
    assert [max(each, key=abs) for each in advantages] == [-0.5, 0.0, 0.0, 2.0]


def truncated(*numbers: int, samples: list[ScoredRollout] | None = None) -> list[ScoredRollout]:
    found = samples or scored()
    for number in numbers:
        rollout = dataclasses.replace(found[number].rollout, finish_reason="length")
        found[number] = dataclasses.replace(found[number], rollout=rollout)
    return found


def test_missing_eos_is_penalised_in_score_and_token_rewards():
    """As TRL: scores[~contain_eos_token] -= missing_eos_penalty."""
    inputs = inputs_with(truncated(0, 1), missing_eos_penalty=0.75)
    assert inputs.scores.tolist() == [0.25, -0.75, 0.5, 2.0]
    assert [sum(s) for s in of_samples(inputs.token_rewards)] == [0.25, -0.75, 0.0, 2.0]


def test_missing_eos_of_greedy_response_is_penalised_as_that_of_samples():
    flags = {"kl_reward_coef": 0.0, "missing_eos_penalty": 0.75, "overlong_buffer_tokens": 2}
    samples = truncated(0, 3)
    greedy = [dataclasses.replace(each.rollout, text="greedy") for each in samples]
    samples = [
        *with_baselines([*samples[:2], ScoredRollout(greedy[0], 1.0)], [2])[:2],
        *with_baselines([*samples[2:], ScoredRollout(greedy[2], 0.5)], [2])[:2],
    ]
    inputs = inputs_with(samples, algorithm="remax", **flags)
    # The greedy responses have the tokens of samples 0, which is cut, and 2, which is not.
    assert inputs.baselines.tolist() == [-0.75, -0.75, 0.5, 0.5]
    assert inputs.scores[0] == inputs.baselines[0], "they are equal"


def test_rewards_are_clipped_before_penalties():
    samples = scored([(3, 4, 1.0), (3, 2, -9.0), (1, 0, 0.5), (1, 3, 2.0)])
    inputs = inputs_with(truncated(3, samples=samples), reward_clip=0.75, missing_eos_penalty=1.0)
    assert inputs.scores.tolist() == [0.75, -0.75, 0.5, -0.25]
    assert [sum(s) for s in of_samples(inputs.token_rewards)] == [0.75, -0.75, 0.0, -0.25]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_truncated_samples_are_compared_but_not_trained_on(algorithm: str):
    plain = evaluated(learner_of(algorithm=algorithm)[0], scored())
    learner, _ = learner_of(algorithm=algorithm, mask_truncated=True)
    batch = evaluated(learner, truncated(0, 3))
    mask = of_samples(batch.actor.loss_mask)
    assert not any(mask[0] + mask[3]) and sum(mask[1]) == 2
    advantages = of_samples(batch.actor.advantages)
    assert not any(advantages[0] + advantages[3])
    if algorithm == "grpo":  # its group's mean and deviation are those of all samples
        assert advantages[1] == of_samples(plain.actor.advantages)[1] != [0.0] * 5
    else:
        learner.critic.begin_update(batch)()
        returns = of_samples(batch.actor.returns)
        assert not any(returns[0] + returns[3]) and any(returns[1])


def with_parts(samples: list[ScoredRollout]) -> list[ScoredRollout]:
    """Two rewards whose sum is the same in the first group."""
    parts = [(1.0, 0.0), (0.0, 1.0), (0.5, 0.0), (1.0, 1.0)]
    return [
        dataclasses.replace(sample, reward=sum(pair), parts=dict(zip("ab", pair, strict=True)))
        for sample, pair in zip(samples, parts, strict=True)
    ]


def test_gdpo_learns_from_groups_of_equal_sums():
    samples = with_parts(scored())
    inputs = inputs_with(samples, advantage="gdpo", turn_weight=3.0)
    assert inputs.reward_parts.tolist() == [[1, 0], [0, 1], [0.5, 0], [1, 1]]
    assert inputs.reward_weights.tolist() == [[3.0, 3.0]] * 4
    learner, _ = learner_of(advantage="gdpo")
    assert learner.informative_groups(held(learner, samples)).tolist() == [True, True]
    learner, _ = learner_of()
    assert learner.informative_groups(held(learner, samples)).tolist() == [False, True]
    learner, _ = learner_of(advantage="gdpo", turn_weight=0.0)  # that of all rewards
    assert learner.informative_groups(held(learner, samples)).tolist() == [False, False]


def test_gdpo_weighs_rewards_by_the_source_of_a_sample():
    """The second source does not have the reward b."""
    of_sources = {"one": {"a": 1.0, "b": -2.0}, "two": {"a": 0.5}}
    learner, _ = learner_of(advantage="gdpo", turn_weight=3.0, of_sources=of_sources)
    learner.source_keys = lambda prompts: ["one" if each == 0 else "two" for each in prompts]
    samples = with_parts(scored())
    samples[2:] = [dataclasses.replace(each, parts={"a": each.parts["a"]}) for each in samples[2:]]
    inputs = inputs_of(learner, samples)
    assert inputs.reward_parts.tolist() == [[1, 0], [0, 1], [0.5, 0], [1, 0]]
    assert inputs.reward_weights.tolist() == [[1.0, -2.0], [1.0, -2.0], [0.5, 0.0], [0.5, 0.0]]


# Samples without a reward -------------------------------------------------------------------------


def without_rewards(*numbers: int, samples: list[ScoredRollout] | None = None):
    found = samples or scored([(2, 2, -1.0), (2, 2, -2.0), (2, 2, -3.0), (2, 2, -1.0)])
    for number in numbers:
        found[number] = dataclasses.replace(found[number], reward=0.0, failure="timed out")
    return found


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "opo", "reinforce_pp", "remax", "ppo"])
def test_sample_with_failed_reward_is_not_trained_on(algorithm: str):
    # Where others are negative, a reward of 0 would be the best of its group.
    learner, _ = learner_of(algorithm=algorithm)
    batch = evaluated(learner, without_rewards(1)).actor
    assert not batch.loss_mask.view(4, 4)[1].any() and batch.loss_mask.sum() == 6
    advantages = batch.advantages.view(4, 4)
    assert not advantages[1].any()
    if find_advantage_estimator(learner.recipe.advantage).compares_group:
        assert not advantages[0].any()  # alone, it is compared with nothing
        assert advantages[2:].any(dim=1).all()
    if algorithm == "ppo":
        assert not batch.returns.view(4, 4)[1].any()
    # It is scored like the others, so that nothing depends on who failed where.
    assert torch.isfinite(batch.old_log_probs[batch.loss_mask]).all()


def test_prompt_with_failed_greedy_response_is_not_trained_on():
    learner, _ = learner_of(algorithm="remax")
    samples = scored()
    failed = Baseline(0.0, 1, failure="timed out")
    samples[:2] = (dataclasses.replace(sample, baseline=failed) for sample in samples[:2])
    batch = evaluated(learner, samples).actor
    expected = evaluated(learner_of(algorithm="remax")[0], scored()).actor
    parts = list(zip(of_samples(batch.advantages), of_samples(expected.advantages), strict=True))
    assert all(value == 0 for found, _ in parts[:2] for value in found)
    assert parts[2][0] == parts[2][1] and parts[3][0] == parts[3][1] and any(parts[3][0])
    assert batch.loss_mask.sum() == 3


def test_valid_samples_are_sent_to_ranks_of_critic():
    samples = without_rewards(0, 3)
    there = tensors_to_table(table_to_tensors(table_of(samples)))
    assert there.valid.tolist() == [False, True, True, False]


# Advantages, corrections, metrics -----------------------------------------------------------------


def test_advantages_equal_estimator():
    learner, _ = learner_of(algorithm="dr_grpo")
    batch = evaluated(learner, scored()).actor
    assert of_samples(batch.advantages) == [
        [0, 0, 0.5, 0.5, 0.5, 0.5, 0],
        [0, 0, -0.5, -0.5, 0],
        [0],
        [0.75, 0.75, 0.75, 0],
    ]
    assert batch.returns is None


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "opo", "remax"])
def test_groups_of_different_sizes_have_the_advantages_of_each_alone(algorithm: str):
    sizes, start = (2, 4, 3), 0
    rewards = [1.0, 0.0, 0.5, 2.0, 0.25, 0.5, 1.0, 1.0, 4.0]
    samples = []
    for number, size in enumerate(sizes):
        group = scored([(2, 1 + (start + n) % 3, rewards[start + n]) for n in range(size)])
        prompt = dataclasses.replace(group[0].rollout.prompt, index=number)
        baseline = Baseline(float(number), num_tokens=1)
        samples += [
            dataclasses.replace(
                each, rollout=dataclasses.replace(each.rollout, prompt=prompt), baseline=baseline
            )
            for each in group
        ]
        start += size
    learner, _ = learner_of(algorithm=algorithm)

    def advantages(some: Sequence[ScoredRollout]) -> list[list[float]]:
        batch = evaluated(learner, some).actor
        parts = batch.advantages.split(batch.lengths.tolist())
        found = dict(zip(batch.sample_ids.tolist(), (part.tolist() for part in parts), strict=True))
        return [found[sample] for sample in range(len(some))]

    ends = np.cumsum((0, *sizes)).tolist()
    alone = [advantages(samples[a:b]) for a, b in pairwise(ends)]
    assert advantages(samples) == [each for group in alone for each in group]
    assert all(any(any(each) for each in group) for group in alone)


@pytest.mark.parametrize("correction", ["none", "token_tis", "geometric_rejection"])
def test_weights_exist_only_with_correction(correction: str):
    learner, _ = learner_of(mismatch_correction=correction)
    batch = evaluated(learner, scored())
    # Actor and engine differ by 0.5 nats: a ratio of 1.65, within the cap of 2, and far from 1.
    ratio = float(np.exp(2 * ACTOR_SHIFT))
    assert batch.metrics["kl/rollout_actor"] == pytest.approx(ratio - 1 - 2 * ACTOR_SHIFT, rel=1e-5)
    assert "mismatch/kl" not in batch.metrics
    weights = batch.actor.weights
    if correction == "none":
        assert weights is None
        assert batch.metrics["mismatch/mean_weight"] == 1.0
        return
    expected = ratio if correction == "token_tis" else 0.0
    assert weights is not None
    assert weights[batch.actor.loss_mask].tolist() == pytest.approx([expected] * 9)
    assert batch.metrics["mismatch/mean_weight"] == pytest.approx(expected)
    assert batch.metrics["mismatch/masked_share"] == float(correction == "geometric_rejection")


def test_empty_responses_give_finite_metrics_and_zero_advantages():
    learner, _ = learner_of(algorithm="ppo")
    batch = evaluated(learner, scored([(2, 0, 1.0)] * 4))
    assert torch.equal(batch.actor.advantages, torch.zeros(8))
    assert torch.equal(batch.actor.returns, torch.zeros(8))
    assert batch.metrics["kl/rollout_actor"] == 0.0
    assert batch.metrics["critic/value_mean"] == 0.0
    # Nothing varies, so there is nothing to explain.
    assert np.isnan(batch.metrics["critic/explained_variance"])


def test_ppo_gives_values_and_returns_to_actor_and_critic():
    learner, _ = learner_of(
        algorithm="ppo", kl_reward_coef=0.0, gae_lambda=1.0, whiten_advantages=False
    )
    batch = evaluated(learner, scored())
    actor, served = batch.actor, served_critic(learner)
    mask = actor.loss_mask
    # With gamma and lambda 1 the return of every token is the outcome.
    outcomes = torch.tensor([1.0] * 4 + [0.0] * 2 + [2.0] * 3)
    assert torch.equal(actor.returns[mask], outcomes)
    assert torch.equal(actor.values, actor.token_ids.float())
    learned = NotedUpdates()
    served.model.update = learned.update
    learner.update(0, batch)
    assert [torch.equal(part.values, actor.values) for part in learned] == [True]
    assert [torch.equal(part.returns, actor.returns) for part in learned] == [True]
    values = actor.token_ids[mask].float()
    assert torch.equal(actor.advantages[mask], outcomes - values)
    assert batch.metrics["critic/value_mean"] == pytest.approx(float(values.mean()))
    assert batch.metrics["critic/return_mean"] == pytest.approx(float(outcomes.mean()))
    explained = 1 - (outcomes - values).var() / outcomes.var()
    assert batch.metrics["critic/explained_variance"] == pytest.approx(float(explained), rel=1e-5)


def test_values_travel_between_two_orders_of_the_samples(monkeypatch: pytest.MonkeyPatch):
    """Actor and critic divide samples differently; each value stays with its token."""
    learner, _ = learner_of(algorithm="ppo")
    served = served_critic(learner)
    monkeypatch.setattr(critic_module, "plan_epochs", lambda *_, **__: [[(((3, 1, 0, 2),),)]])
    own = learner.make_batch(0, held(learner, scored()))
    backwards = take(own.actor, (((3, 1, 0, 2),),))
    values = learner.critic.begin_values(own)()
    assert torch.equal(values, own.actor.token_ids.float())
    learned = NotedUpdates()
    served.model.update = learned.update
    returns = own.actor.token_ids.double()  # as an estimator of a user's may make them
    actor = dataclasses.replace(own.actor, returns=returns)
    stats = learner.critic.begin_update(dataclasses.replace(own, actor=actor))()
    assert learned[0].returns.dtype == torch.float32
    assert torch.equal(learned[0].returns, backwards.token_ids.float())
    assert torch.equal(learned[0].values, backwards.token_ids.float())
    assert [each.sums.stacked().tolist() for each in stats] == [list(range(8))]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, True),
        ({"kl_coef": 0.1, "mismatch_correction": "sequence_tis"}, True),
        ({"num_epochs": 2}, False),  # the second epoch learns from another policy
        ({"num_mini_batches": 2}, False),
        ({"algorithm": "rloo"}, False),  # has the KL in its reward
        ({"algorithm": "ppo", "kl_reward_coef": 0.0, "critic_warmup_steps": 1}, False),
    ],
)
def test_log_probs_are_computed_in_update_if_it_is_the_only_one(flags, expected):
    learner, _ = learner_of(scored_before=False, **flags)
    assert learner.scores_in_update is expected
    batch = evaluated(learner, scored())
    assert (batch.actor.old_log_probs is None) is expected
    assert ("kl/rollout_actor" in batch.metrics) is not expected  # else the update tells


def test_log_probs_of_engine_are_old_ones_without_scoring_pass():
    """As verl's bypass mode: old_log_probs = rollout_log_probs."""
    learner, _ = learner_of(
        scored_before=False, old_log_probs="rollout", num_mini_batches=2, num_epochs=2
    )
    batch = evaluated(learner, scored())
    assert batch.actor.old_log_probs is None and "kl/rollout_actor" not in batch.metrics
    updates = NotedUpdates()
    learner.actor.update = updates.append
    learner.update(0, batch)
    first, *others = updates
    assert first.old_log_probs is None and len(others) == 3  # it measures the mismatch, too
    assert all(torch.equal(part.old_log_probs, part.rollout_log_probs) for part in others)


def test_kl_in_reward_is_that_of_engine_if_its_log_probs_are_old_ones():
    learner, _ = learner_of(
        scored_before=False, algorithm="rloo", kl_reward_coef=0.5, old_log_probs="rollout"
    )
    learner.actor.state.parameter.data += 1.0  # what the actor gives does not matter
    inputs = inputs_of(learner, scored())
    bonus = 0.5 * ACTOR_SHIFT  # for each token: the engine is below the reference
    assert inputs.scores.tolist() == [1.0 + 4 * bonus, 2 * bonus, 0.5, 2.0 + 3 * bonus]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_of_a_loss_are_selected_before_updates(name: str):
    ratio = {f"{name}_ratio": 0.5, "num_epochs": 2, "num_mini_batches": 2}
    if name == "clip_cov":
        ratio |= {"clip_cov_low": 0.0, "clip_cov_high": 9.0}
    learner, _ = learner_of(scored_before=False, policy_loss=name, **ratio)
    batch = evaluated(learner, scored())  # scored before, even with one update
    selected = batch.actor.selected
    assert batch.actor.old_log_probs is not None
    assert not (selected & ~batch.actor.loss_mask).any()
    if name == "clip_cov":
        assert 0 < selected.sum() <= 4  # floor(0.5 * 9)
        again = evaluated(learner, scored()).actor.selected
        assert torch.equal(selected, again)  # by draw, not by chance of a run
    updates = NotedUpdates()
    learner.actor.update = updates.append
    learner.update(0, batch)
    for part in updates:  # tokens keep theirs in every epoch
        for number, sample in enumerate(part.sample_ids.tolist()):
            alone = take(part, (((number,),),)).selected
            first = batch.actor.sample_ids.tolist().index(sample)
            assert torch.equal(alone, take(batch.actor, (((first,),),)).selected)
    learner, _ = learner_of(scored_before=False, policy_loss=name)
    assert not learner.scores_in_update


def test_log_probs_need_own_pass_with_dropout(monkeypatch):
    monkeypatch.setattr(ScriptedActor, "has_dropout", True)
    learner, _ = learner_of(scored_before=False)
    assert not learner.scores_in_update


# Updates ------------------------------------------------------------------------------------------


def test_updates_visit_mini_batches_once_per_epoch_critic_first():
    learner, log = learner_of(algorithm="ppo", num_mini_batches=2, num_epochs=6)
    learned = learner.update(0, evaluated(learner, scored()))
    parts = [samples for name, samples in log if name == "actor"]
    assert log == [(name, part) for name in ("critic", "actor") for part in parts]
    assert learned.actor == ["actor"] * 12
    assert [each.result for each in learned.critic] == [STATS_OF_CRITIC.result] * 12
    epochs = [parts[at : at + 2] for at in range(0, 12, 2)]
    halves = [[0, 1], [2, 3]]  # the samples of a prompt stay together
    assert all(epoch in (halves, halves[::-1]) for epoch in epochs)
    assert halves in epochs and halves[::-1] in epochs


def of_rewards(*rewards: float) -> list[ScoredRollout]:
    return scored([(1, 1, reward) for reward in rewards])


@pytest.mark.parametrize(
    ("flags", "samples", "num_orders"),
    [
        # Dynamic sampling leaves them at the end of the step.
        ({}, of_rewards(*(1.0, 0.0) * 4, *(1.0, 1.0) * 4), 6),
        # The last two groups have nothing to compare.
        ({}, without_rewards(5, 6, 7, samples=of_rewards(*range(8))), 2),
        ({"mask_truncated": True}, truncated(4, 5, 6, 7, samples=of_rewards(*range(8))), 2),
    ],
    ids=["equal rewards", "without two rewards", "truncated"],
)
def test_groups_that_teach_nothing_are_spread_over_mini_batches(flags, samples, num_orders):
    """They are the second half of the step, and then half of each mini-batch."""
    learner, _ = learner_of(num_mini_batches=2, **flags)
    half, orders = len(samples) // 2, set()
    for step in range(20):
        batch = learner.make_batch(step, held(learner, samples))
        first, second = batch.actor.sample_ids.split(half)
        assert (first < half).sum() == (second < half).sum() == half // 2
        orders.add(tuple(first.sort().values.tolist()))
    assert len(orders) >= num_orders


def test_turn_rewards_are_not_sent_if_later_epoch_lacks_them():
    """Otherwise a rank would send rows of another width than the other ranks expect."""
    learner, _ = learner_of(num_mini_batches=2, num_epochs=2)
    batch = evaluated(learner, scored())
    assert batch.actor.turn_rewards is not None
    later = dataclasses.replace(batch.actor.later[0], turn_rewards=None)
    actor = dataclasses.replace(batch.actor, later=(later,))
    *_, last = mini_batches(actor, 2, batch.division, dist.group.WORLD)
    assert last.turn_rewards is None and last.advantages is not None


def test_fields_follow_samples_in_every_epoch():
    learner, _ = learner_of(
        algorithm="ppo", num_mini_batches=2, num_epochs=4, mismatch_correction="token_tis"
    )
    batch = evaluated(learner, scored())
    assert any(part.sample_ids[0] != 0 for part in (batch.actor, *batch.actor.later))
    learned = {"actor": NotedUpdates(), "critic": NotedUpdates()}
    learner.actor.update = learned["actor"].append
    served_critic(learner).model.update = learned["critic"].update
    learner.update(0, batch)
    of_sample: dict[tuple[str, int], set[tuple]] = {}
    for name, fields in (
        ("actor", ("token_ids", "advantages", "ref_log_probs", "values", "weights")),
        ("critic", ("token_ids", "values", "returns")),
    ):
        assert len(learned[name]) == 8
        for part in learned[name]:
            for number, sample in enumerate(part.sample_ids.tolist()):
                alone = take(part, (((number,),),))
                kept = torch.stack([getattr(alone, field).float() for field in fields])
                if name == "actor":
                    kept = kept[:, alone.loss_mask]
                of_sample.setdefault((name, sample), set()).add(tuple(kept.flatten().tolist()))
    assert of_sample.keys() == {(name, sample) for name in learned for sample in range(4)}
    assert all(len(seen) == 1 for seen in of_sample.values())


def test_actor_is_not_updated_during_critic_warmup():
    learner, log = learner_of(algorithm="ppo", critic_warmup_steps=2)
    batch = evaluated(learner, scored())
    for step in range(3):
        learned = learner.update(step, batch)
        assert len(learned.critic) == 1 and len(learned.actor) == (1 if step == 2 else 0)
    assert [name for name, _ in log] == ["critic", "critic", "critic", "actor"]


def test_weight_of_entropy_follows_entropy_of_steps_before():
    learner, log = learner_of(entropy_target=0.5, entropy_step=0.25, num_mini_batches=2)
    entropies, rates = iter([0.25, 0.5, 0.125, 0.25, 1.0, 1.0]), []
    batch = evaluated(learner, scored())

    def update(part: TrainBatch) -> SimpleNamespace:  # two updates of 4 tokens a step
        sums = SimpleNamespace(num_tokens=4.0, entropy=4 * next(entropies))
        return SimpleNamespace(sums=sums)

    learner.actor.update = update
    for step in range(3):
        learner.update(step, batch)
        rates.append(learner.rates()["entropy_coef"])
    # Entropies 0.375, 0.1875 and 1: each step's changes the weight of the next one.
    assert rates == [0.0, 0.25, 0.5]
    assert [coef for name, coef in log if name == "entropy"] == rates
    assert (learner.entropy_controller.coef, learner.entropy_controller.weight) == (0.25, 0.0)


def test_reference_follows_actor_at_interval():
    learner, _ = learner_of(kl_coef=0.5, reference_refresh_interval=2)
    distances = []
    for step in range(5):
        batch = evaluated(learner, scored())
        old, ref = batch.actor.old_log_probs, batch.actor.ref_log_probs
        distances.append(float((old - ref)[batch.actor.loss_mask].mean()))
        learner.update(step, batch)  # moves the actor by 1
    # Renewed behind steps 2 and 4 (counted from 1).
    assert distances == pytest.approx([ACTOR_SHIFT, 1 + ACTOR_SHIFT, 0, 1, 0])


def test_reference_stays_fixed_without_interval():
    learner, _ = learner_of(kl_coef=0.5)
    batch = evaluated(learner, scored())
    for step in range(3):
        learner.update(step, batch)
    samples = learner.with_log_probs(batch).actor
    moved = (samples.old_log_probs - samples.ref_log_probs)[samples.loss_mask]
    assert float(moved.mean()) == pytest.approx(3 + ACTOR_SHIFT)


def test_rates_cover_existing_models():
    assert learner_of()[0].rates() == {"learning_rate": 0.125}
    learner, _ = learner_of(algorithm="ppo")
    learner.update(0, evaluated(learner, scored()))
    rates = {"learning_rate": 0.125, "critic/learning_rate": 0.125, "kl/coef": 0.02}
    assert learner.rates() == rates


# docs/using/algorithms.md -------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "using" / "algorithms.md"


@pytest.mark.usefixtures("restored_tables")
def test_example_of_docs_runs(tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    file = tmp_path / "mine.py"
    file.write_text(example)
    import_user_file(str(file))
    learner, _ = learner_of(advantage="median", policy_loss="spo", spo_width=0.25)
    batch = evaluated(learner, scored()).actor
    # The median of two samples is their mean.
    expected = evaluated(learner_of(algorithm="dr_grpo")[0], scored()).actor.advantages
    assert torch.equal(batch.advantages, expected)
    assert batch.old_log_probs is not None and batch.advantages is not None
    log_probs = (batch.old_log_probs + 0.1).requires_grad_()
    loss = loss_of(learner, batch, log_probs, batch.advantages)
    a, ratio = batch.advantages[batch.loss_mask], float(np.exp(0.1))
    expected = (a.abs() * (ratio - 1) ** 2 / 0.5 - ratio * a).sum() / 9
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    loss.backward()
    assert torch.isfinite(log_probs.grad[batch.loss_mask]).all()


def test_table_of_docs_equals_recipes():
    rows = [line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines()]
    table = {row[0].strip("`"): row for row in rows if len(row) >= 6 and row[0].startswith("`")}
    assert table.keys() == RECIPES.keys()
    for name, row in table.items():
        recipe = RECIPES[name]
        parts = [cell.strip("` ") for cell in row[2:5]]
        assert parts == [recipe.advantage, recipe.policy_loss, recipe.loss_aggregation], name
        kl = f"{recipe.kl_place} {recipe.kl_coef:g}, {recipe.kl_estimator}"
        assert row[5].strip("| ") == ("none" if recipe.kl_place == "none" else kl), name
