"""Named recipes, and their combination with the parts that a user sets by flag.

A recipe has a default for every part. `resolve_algorithm` replaces the parts that the user set, and
refuses combinations that are invalid or settings without effect.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mcore_rl.algorithms.aggregation import Aggregation, AggregationMode
from mcore_rl.algorithms.algorithm_checks import check_parts
from mcore_rl.algorithms.entropy import DEFAULT_STEP, EntropyController
from mcore_rl.algorithms.kl import KLController, KLEstimator, KLParameters
from mcore_rl.algorithms.mismatch import CORRECTIONS, MismatchConfig, MismatchCorrection
from mcore_rl.algorithms.policy_losses import PolicyLossConfig
from mcore_rl.algorithms.registry import (
    find_advantage_estimator,
    find_group_filter,
    find_policy_loss,
    find_sampler,
    owners_by_kind,
    unknown_name,
)
from mcore_rl.algorithms.value_loss import ValueLossConfig
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameter, Parameters, param, parameters_of, with_values

KLPlace = Literal["none", "loss", "reward"]
# What a step trains on: samples of engines, or rows of a file.
TrainsOn = Literal["samples", "demonstrations", "pairs"]
DEFAULT_KL_REWARD_COEF = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe(Parameters):
    """Defaults of one published algorithm; the flag of its name replaces any part.

    Estimator, loss and correction have their own parameters with their own defaults; `parameters`
    holds the recipe's deviations from these, for example dapo's upper clip range.
    """

    advantage: str = param(
        "grpo",
        "advantage estimator: gae, grpo, gdpo, dr_grpo, rloo, opo, remax, reinforce_pp, "
        "reinforce_pp_baseline, or one of --rl-import; sft and dpo have their own",
    )
    policy_loss: str = param(
        "ppo_clip",
        "policy loss: ppo_clip, gspo, cispo, gmpo, sapo, clip_cov, kl_cov, policy_gradient, or one "
        "of --rl-import",
    )
    parameters: Mapping[str, Any] = field(default_factory=dict)
    loss_aggregation: AggregationMode = param(
        "token_mean",
        "aggregation of token losses: over all tokens, or per sequence and then over sequences",
    )
    loss_constant: float | None = param(
        None,
        "divisor of aggregation constant, in tokens; default: --rl-max-response-tokens",
        above=0,
        advice="token losses are divided by it, so choose for example the value of "
        "--rl-max-response-tokens",
    )
    kl_place: KLPlace = "none"
    kl_coef: float = 0.0  # at the KL's place
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = param(
        0.0,
        "weight of the entropy bonus in the loss",
        least=0,
        advice="choose 0 to leave the term out",
    )
    entropy_target: float | None = param(
        None,
        "entropy in nats per token up to which the weight of the bonus is raised (arXiv "
        "2505.22312); --rl-entropy-coef is the first weight",
        above=0,
        advice="choose for example 0.2",
    )
    entropy_step: float = param(
        DEFAULT_STEP,
        "change of that weight in a step, with --rl-entropy-target",
        above=0,
        advice="choose for example 0.005",
    )
    value_clip_eps: float = param(
        0.2,
        "clip range of the critic's values; inf: unlimited",
        above=0,
        most=math.inf,
        advice="values are held within it of what they were before the update, so choose for "
        "example 0.2, or inf",
    )
    mismatch_correction: MismatchCorrection = param(
        "none", "correction of the engine-trainer mismatch: weights per token or sequence, or masks"
    )
    score_centering: int = param(
        0,
        "subtract from each token's score its expectation under the engine, computed from this "
        "many of the engine's most likely tokens (arXiv 2609.20807); for --rl-policy-loss "
        "policy_gradient; 0: off",
        least=0,
        advice="choose for example 128",
    )
    off_policy_threshold: float | None = param(
        None,
        "drop tokens of negative advantage in responses whose mean log-ratio of engine to current "
        "policy exceeds this, in nats (arXiv 2512.02556)",
        above=0,
        advice="choose for example 0.1",
    )
    old_log_probs: Literal["actor", "rollout"] = param(
        "actor",
        "policy before the update, to which ratios refer: actor: log-probs of a scoring pass; "
        "rollout: those of the engine, without a scoring pass",
    )
    num_samples_per_prompt: int = param(
        8, "responses per prompt, the group size", least=1, advice="choose for example 8"
    )
    dynamic_sampling: bool = param(
        False, "draw prompts again whose responses all have the same reward (arXiv 2503.14476)"
    )
    group_filter: str | None = param(
        None, "function of --rl-import that decides which groups of responses a step learns from"
    )
    sampler: str | None = param(
        None, "function of --rl-import that samples the responses to a prompt itself"
    )
    max_refills: int = param(
        10,
        "prompts that a step may draw again, as a multiple of its prompts",
        least=0,
        advice="choose for example 10",
    )
    overlong_buffer_tokens: int | None = param(
        None, "last tokens of the response budget, over which a penalty grows to 1"
    )
    overlong_buffer_share: float = 0.0  # of the response budget, if the tokens are not given
    missing_eos_penalty: float = param(
        0.0,
        "penalty of a response that ends by its length instead of an end-of-sequence token",
        least=0,
        advice="it is subtracted from the reward, so choose for example 1",
    )
    mask_truncated: bool = param(
        False,
        "leave responses that end by their length out of the losses (arXiv 2503.14476); their "
        "rewards still count in their group",
    )
    reward_clip: float | None = param(
        None,
        "limit rewards to [-this, this] before penalties and advantages",
        above=0,
        advice="choose for example 10",
    )
    trains_on: TrainsOn = "samples"


# KL coefficients are from the papers or, if a paper has none, from its authors' code. Recipes have
# no KL if their papers have none. grpo has none either: on verifiable rewards it is used with the
# mean over all tokens and without KL; its paper's form is --rl-loss-aggregation seq_mean_token_mean
# --rl-kl-coef 0.04. The papers of rloo, remax and opo update once per step and do not clip; in a
# first update clipping has no effect, and later updates need it.
RECIPES: dict[str, Recipe] = {
    # arXiv 1707.06347, with the KL in the reward as InstructGPT (arXiv 2203.02155)
    "ppo": Recipe(
        advantage="gae",
        kl_place="reward",
        kl_coef=0.02,
        kl_estimator="k1",
        num_samples_per_prompt=1,
    ),
    "grpo": Recipe(),
    # arXiv 2503.20783
    "dr_grpo": Recipe(advantage="dr_grpo", loss_aggregation="constant"),
    # arXiv 2402.14740, appendix C
    "rloo": Recipe(advantage="rloo", kl_place="reward", kl_coef=0.03, kl_estimator="k1"),
    # arXiv 2501.03262
    "reinforce_pp": Recipe(
        advantage="reinforce_pp",
        kl_place="reward",
        kl_coef=0.01,
        kl_estimator="k1",
        num_samples_per_prompt=1,
    ),
    "reinforce_pp_baseline": Recipe(
        advantage="reinforce_pp_baseline", kl_place="loss", kl_coef=1e-5, kl_estimator="k2"
    ),
    # arXiv 2310.10505; the coefficient is --kl_ctl of both training scripts of its authors, in
    # step3_rlhf_finetuning/training_scripts of github.com/liziniu/ReMax
    "remax": Recipe(
        advantage="remax",
        kl_place="reward",
        kl_coef=0.05,
        kl_estimator="k1",
        num_samples_per_prompt=1,
    ),
    # arXiv 2505.23585
    "opo": Recipe(advantage="opo"),
    # arXiv 2503.14476, section 4.1: 4,096 of 20,480 tokens
    "dapo": Recipe(
        parameters={"clip_eps_upper": 0.28},
        num_samples_per_prompt=16,
        dynamic_sampling=True,
        overlong_buffer_share=0.2,
    ),
    # arXiv 2507.18071, section 5.1
    "gspo": Recipe(policy_loss="gspo", loss_aggregation="seq_mean_token_mean"),
    # arXiv 2506.13585
    "cispo": Recipe(policy_loss="cispo"),
    # arXiv 2507.20673, section 4
    "gmpo": Recipe(policy_loss="gmpo", loss_aggregation="seq_mean_token_mean"),
    # arXiv 2511.20347
    "sapo": Recipe(policy_loss="sapo", loss_aggregation="seq_mean_token_mean"),
    "sft": Recipe(
        advantage="demonstrations",
        policy_loss="policy_gradient",
        num_samples_per_prompt=1,
        trains_on="demonstrations",
    ),
    # arXiv 2305.18290; the KL's coefficient is 1 since the estimator has the paper's beta
    "dpo": Recipe(
        advantage="dpo",
        policy_loss="policy_gradient",
        loss_aggregation="seq_mean_token_sum",
        kl_place="reward",
        kl_coef=1.0,
        kl_estimator="k1",
        num_samples_per_prompt=2,
        trains_on="pairs",
    ),
}


def recipe(name: str, parts: Recipe) -> Recipe:
    """Register `parts` for --rl-algorithm under `name`; raise ValueError if the name is taken."""
    if name in RECIPES:
        raise ValueError(f"two algorithms are called {name!r}; rename one")
    RECIPES[name] = parts
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm(Recipe):
    """Algorithm of a run: a recipe with the parts replaced by flags, and the parts' parameters.
    `resolve_algorithm` creates it.

    If not set, two parts follow from --rl-max-response-tokens, which is therefore an argument of
    the methods that need it.
    """

    name: str
    advantage_config: Parameters
    policy_loss_parameters: Parameters
    mismatch_config: MismatchConfig
    group_filter_parameters: Parameters
    sampler_parameters: Parameters
    kl_target: float | None  # None: the coefficient is constant
    kl_clamp: float | None
    kl_horizon: float
    needs_critic: bool
    needs_greedy_baseline: bool

    @property
    def needs_reference(self) -> bool:
        return self.kl_place != "none"

    @property
    def replaces_groups(self) -> bool:
        """Whether other prompts may be drawn in place of groups."""
        return self.dynamic_sampling or self.group_filter is not None

    @property
    def is_supervised(self) -> bool:
        """Whether a step trains on rows of a file, without engines and rewards."""
        return self.trains_on != "samples"

    def aggregation(self, max_response_tokens: int) -> Aggregation:
        constant = self.loss_constant
        if self.loss_aggregation == "constant" and constant is None:
            constant = float(max_response_tokens)
        return Aggregation(self.loss_aggregation, constant)

    def policy_loss_config(self, max_response_tokens: int) -> PolicyLossConfig:
        return PolicyLossConfig(
            policy_loss=self.policy_loss,
            parameters=self.policy_loss_parameters,
            aggregation=self.aggregation(max_response_tokens),
            kl_coef=self.kl_coef if self.kl_place == "loss" else 0.0,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
            kl_clamp=self.kl_clamp,
            off_policy_threshold=self.off_policy_threshold,
        )

    def value_loss_config(self, max_response_tokens: int) -> ValueLossConfig:
        return ValueLossConfig(self.value_clip_eps, self.aggregation(max_response_tokens))

    def kl_controller(self) -> KLController:
        """Return the controller of the KL in the reward; constant 0 without such a KL."""
        coef = self.kl_coef if self.kl_place == "reward" else 0.0
        return KLController(coef, self.kl_target, self.kl_horizon)

    def entropy_controller(self) -> EntropyController:
        return EntropyController(self.entropy_coef, self.entropy_target, self.entropy_step)

    def overlong_buffer(self, max_response_tokens: int) -> int:
        """Return tokens, 0 without the penalty; raise UsageError above the response budget."""
        buffer = self.overlong_buffer_tokens
        if buffer is None:
            buffer = int(self.overlong_buffer_share * max_response_tokens)
        if not 0 <= buffer <= max_response_tokens:
            raise UsageError(
                f"is not between 0 and --rl-max-response-tokens {max_response_tokens}",
                flag=f"--rl-overlong-buffer-tokens {buffer}",
                remedy="the penalty grows over the last tokens of that budget, so choose for "
                f"example {max(1, max_response_tokens // 5)}",
            )
        return buffer


def declared_parameters() -> dict[str, Parameter]:
    """Return every parameter of an algorithm by name: common ones, then each registered part's.

    This includes the parts of users that are registered so far.
    Raises UsageError if two parts declare one name differently.
    """
    by_name = {p.name: p for kind in (Recipe, KLParameters) for p in parameters_of(kind)}
    for flag, owners in parts_by_flag().items():
        for owner, parameters in owners.items():
            for parameter in parameters_of(type(parameters)):
                if by_name.setdefault(parameter.name, parameter) != parameter:
                    raise UsageError(
                        f"is a flag already, so that {owner} of {flag} cannot declare "
                        f"{parameter.name} anew",
                        flag=parameter.flag,
                        remedy="rename it, or inherit from the class that declares it",
                    )
    return by_name


def _resolved_kl(recipe: Recipe, kl: KLParameters) -> tuple[KLPlace, float, KLEstimator]:
    """Return the KL's place, coefficient and estimator; raise UsageError for two places."""
    wants_loss = bool(kl.kl_coef)
    if wants_loss and (kl.kl_in_reward or kl.kl_reward_coef):
        other = "--rl-kl-in-reward"
        if not kl.kl_in_reward:
            other = f"--rl-kl-reward-coef {kl.kl_reward_coef}"
        raise UsageError(
            f"puts the KL into the loss and {other} into the reward, which would count it twice",
            flag=f"--rl-kl-coef {kl.kl_coef}",
            remedy="give one of them",
        )
    to_reward = kl.kl_in_reward
    if to_reward is None:
        to_reward = recipe.kl_place == "reward" and not wants_loss
    if kl.kl_reward_coef is not None and not to_reward:
        raise UsageError(
            "has no effect, because the KL is not in the reward",
            flag=f"--rl-kl-reward-coef {kl.kl_reward_coef}",
            remedy="add --rl-kl-in-reward, or give --rl-kl-coef for the KL in the loss",
        )
    place: KLPlace = "reward" if to_reward else "loss"
    coef = kl.kl_reward_coef if to_reward else kl.kl_coef
    if coef is None:
        default = DEFAULT_KL_REWARD_COEF if to_reward else 0.0
        coef = recipe.kl_coef if recipe.kl_place == place else default
    if coef == 0 and not (to_reward and kl.kl_target is not None):
        return "none", 0.0, kl.kl_estimator or recipe.kl_estimator
    # A recipe's estimator only suits the recipe's place: k1 in a loss has no expected gradient.
    usual: KLEstimator = "k1" if to_reward else "k3"
    if recipe.kl_place == place:
        usual = recipe.kl_estimator
    return place, coef, kl.kl_estimator or usual


def resolve_algorithm(name: str, given: Mapping[str, Any]) -> Algorithm:
    """Return the recipe `name` with the parts in `given`, which holds only the user's settings.

    Keys are flags without --rl- and with underscores: the names in `declared_parameters`, and also
    top_p, top_k and keys that begin with critic_, which are checked but not kept.

    The KL has one place. Putting it into the loss or the reward removes it from the recipe's place.

    Raises UsageError, one sentence, for an unknown name, a value out of range, parts that cannot be
    combined, and a flag without effect. Raises AssertionError for any other key.
    """
    if name not in RECIPES:
        raise unknown_name("--rl-algorithm", name, "algorithm", RECIPES)
    declared = declared_parameters()
    for key, value in given.items():
        assert key in declared or key in ("top_p", "top_k") or key.startswith("critic_"), (
            f"no part of an algorithm: '{key}'"
        )
        if key in declared:
            declared[key].check(value)
    recipe = RECIPES[name]
    kl_names = {p.name for p in parameters_of(KLParameters)}
    part_names = {field.name for field in dataclasses.fields(recipe)}
    parts: dict[str, Any] = {key: getattr(recipe, key) for key in part_names}
    parts.update({key: value for key, value in given.items() if key in part_names - kl_names})
    kl = KLParameters(**{key: value for key, value in given.items() if key in kl_names})
    place, coef, kl_estimator = _resolved_kl(recipe, kl)
    parts.update(kl_place=place, kl_coef=coef, kl_estimator=kl_estimator)
    estimator = find_advantage_estimator(parts["advantage"])
    loss = find_policy_loss(parts["policy_loss"])
    chosen, own = parts["group_filter"], parts["sampler"]
    of_filter = Parameters() if chosen is None else find_group_filter(chosen).parameters
    of_sampler = Parameters() if own is None else find_sampler(own).parameters
    check_parts(parts, given, kl, estimator, parts_by_flag())

    def parameters(part: str, defaults: Parameters) -> Parameters:
        """Return a part's parameters; the recipe's values only apply to the recipe's own part."""
        wanted = recipe.parameters if parts[part] == getattr(recipe, part) else {}
        return with_values(defaults, {**wanted, **given})

    correction: MismatchCorrection = parts["mismatch_correction"]
    algorithm = Algorithm(
        name=name,
        advantage_config=parameters("advantage", estimator.parameters),
        policy_loss_parameters=parameters("policy_loss", loss.parameters),
        mismatch_config=MismatchConfig(
            correction, parameters("mismatch_correction", CORRECTIONS[correction])
        ),
        group_filter_parameters=parameters("group_filter", of_filter),
        sampler_parameters=parameters("sampler", of_sampler),
        kl_target=kl.kl_target,
        kl_horizon=kl.kl_horizon,
        kl_clamp=kl.kl_clamp,
        needs_critic=estimator.needs_critic,
        needs_greedy_baseline=estimator.needs_greedy_baseline,
        **parts,
    )
    algorithm.aggregation(max_response_tokens=1)  # these two check their parameters
    algorithm.kl_controller()
    return algorithm


def parts_by_flag() -> dict[str, dict[str, Parameters]]:
    """Return, by the flag that selects a part, the parameters of each choice."""
    return {**owners_by_kind(), "--rl-mismatch-correction": dict(CORRECTIONS)}
