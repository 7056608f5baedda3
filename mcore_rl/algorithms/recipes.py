"""Named recipes, and how the parts that a user set by flag join one.

A recipe is a default for every part. `resolve_algorithm` puts what the user set in its place and
refuses what cannot go together or would have no effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mcore_rl.algorithms.advantage_types import AdvantageConfig
from mcore_rl.algorithms.aggregation import Aggregation, AggregationMode
from mcore_rl.algorithms.algorithm_checks import check_parts, resolved_kl
from mcore_rl.algorithms.kl import AdaptiveKL, FixedKL, KLController, KLEstimator
from mcore_rl.algorithms.loss_types import PolicyLossConfig
from mcore_rl.algorithms.mismatch import MismatchConfig, MismatchCorrection
from mcore_rl.algorithms.registry import find_advantage_estimator, find_policy_loss, unknown_name
from mcore_rl.algorithms.shaping import check_overlong_buffer
from mcore_rl.algorithms.value_loss import ValueLossConfig

KLPlace = Literal["none", "loss", "reward"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Defaults of one published algorithm. Every part can be replaced by the flag of its name."""

    advantage: str = "grpo"
    policy_loss: str = "ppo_clip"
    loss_aggregation: AggregationMode = "token_mean"
    clip_eps_lower: float = 0.2
    clip_eps_upper: float = 0.2
    dual_clip: float | None = None
    sapo_temperature_positive: float = 1.0
    sapo_temperature_negative: float = 1.05
    kl_place: KLPlace = "none"
    kl_coef: float = 0.0  # wherever the KL is
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    gamma: float = 1.0
    gae_lambda: float = 0.95
    whiten_advantages: bool = False
    value_clip_eps: float = 0.2
    mismatch_correction: MismatchCorrection = "none"
    num_samples_per_prompt: int = 8
    dynamic_sampling: bool = False
    max_refills: int = 10
    overlong_buffer_share: float = 0.0  # of the response budget


# Coefficients of the KL are the papers' or, where a paper has none, those of its authors' code. The
# recipes without KL are those whose papers leave it out, and grpo: the mean over all tokens without
# KL is how it is run on verifiable rewards; --rl-loss-aggregation seq_mean_token_mean --rl-kl-coef
# 0.04 is its paper's form. The papers of rloo, remax and opo update once per step and do not clip;
# in a first update clipping changes nothing, and later ones need it.
RECIPES: Mapping[str, Recipe] = {
    # arXiv 1707.06347, with the KL in the reward as InstructGPT (arXiv 2203.02155)
    "ppo": Recipe(
        advantage="gae",
        kl_place="reward",
        kl_coef=0.02,
        kl_estimator="k1",
        whiten_advantages=True,
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
        clip_eps_upper=0.28,
        num_samples_per_prompt=16,
        dynamic_sampling=True,
        overlong_buffer_share=0.2,
    ),
    # arXiv 2507.18071, section 5.1
    "gspo": Recipe(
        policy_loss="gspo",
        loss_aggregation="seq_mean_token_mean",
        clip_eps_lower=3e-4,
        clip_eps_upper=4e-4,
    ),
    # arXiv 2506.13585; it does not say its upper bound. 5 is that of ScaleRL, arXiv 2510.13786.
    "cispo": Recipe(policy_loss="cispo", clip_eps_lower=1.0, clip_eps_upper=4.0),
    # arXiv 2507.20673, section 4
    "gmpo": Recipe(
        policy_loss="gmpo",
        loss_aggregation="seq_mean_token_mean",
        clip_eps_lower=0.4,
        clip_eps_upper=0.4,
    ),
    # arXiv 2511.20347
    "sapo": Recipe(policy_loss="sapo", loss_aggregation="seq_mean_token_mean"),
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What a run does: every part, after flags have replaced defaults. Made by `resolve_algorithm`.

    Two parts follow from --rl-max-response-tokens unless they are set, so that number is a
    parameter where it is needed.
    """

    name: str
    advantage: str
    policy_loss: str
    loss_aggregation: AggregationMode
    loss_constant: float | None  # None: the response budget, where the aggregation is constant
    clip_eps_lower: float
    clip_eps_upper: float
    dual_clip: float | None
    sapo_temperature_positive: float
    sapo_temperature_negative: float
    kl_place: KLPlace
    kl_coef: float  # wherever the KL is; 0 for "none"
    kl_estimator: KLEstimator
    kl_target: float | None  # None: the coefficient stays
    kl_horizon: float
    entropy_coef: float
    gamma: float
    gae_lambda: float
    whiten_advantages: bool
    value_clip_eps: float
    mismatch_correction: MismatchCorrection
    mismatch_cap: float | None
    mismatch_low: float | None
    mismatch_high: float | None
    num_samples_per_prompt: int
    dynamic_sampling: bool
    max_refills: int
    overlong_buffer_tokens: int | None  # None: the share below of the response budget
    overlong_buffer_share: float
    needs_critic: bool
    needs_greedy_baseline: bool

    @property
    def needs_reference(self) -> bool:
        return self.kl_place != "none"

    @property
    def advantage_config(self) -> AdvantageConfig:
        return AdvantageConfig(self.gamma, self.gae_lambda, self.whiten_advantages)

    @property
    def mismatch_config(self) -> MismatchConfig:
        return MismatchConfig(
            self.mismatch_correction, self.mismatch_cap, self.mismatch_low, self.mismatch_high
        )

    def aggregation(self, max_response_tokens: int) -> Aggregation:
        constant = self.loss_constant
        if self.loss_aggregation == "constant" and constant is None:
            constant = float(max_response_tokens)
        return Aggregation(self.loss_aggregation, constant)

    def policy_loss_config(self, max_response_tokens: int) -> PolicyLossConfig:
        return PolicyLossConfig(
            policy_loss=self.policy_loss,
            aggregation=self.aggregation(max_response_tokens),
            clip_eps_lower=self.clip_eps_lower,
            clip_eps_upper=self.clip_eps_upper,
            dual_clip=self.dual_clip,
            sapo_temperature_positive=self.sapo_temperature_positive,
            sapo_temperature_negative=self.sapo_temperature_negative,
            kl_coef=self.kl_coef if self.kl_place == "loss" else 0.0,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
        )

    def value_loss_config(self, max_response_tokens: int) -> ValueLossConfig:
        return ValueLossConfig(self.value_clip_eps, self.aggregation(max_response_tokens))

    def kl_controller(self) -> KLController:
        """Of the KL in the reward; one that stays at 0 where there is none."""
        coef = self.kl_coef if self.kl_place == "reward" else 0.0
        if self.kl_target is None:
            return FixedKL(coef)
        return AdaptiveKL(coef, self.kl_target, self.kl_horizon)

    def overlong_buffer(self, max_response_tokens: int) -> int:
        """Tokens; 0 without the penalty. UsageError: more than the response budget."""
        buffer = self.overlong_buffer_tokens
        if buffer is None:
            buffer = int(self.overlong_buffer_share * max_response_tokens)
        check_overlong_buffer(buffer, max_response_tokens)
        return buffer


def resolve_algorithm(name: str, given: Mapping[str, Any]) -> Algorithm:
    """The recipe `name` with the parts in `given`, which holds only what the user set.

    Keys are flags without --rl- and with underscores: the fields of `Algorithm` but name,
    kl_place, overlong_buffer_share and needs_*, and besides them kl_in_reward, kl_reward_coef,
    top_p, top_k and any that begins with critic_, which are looked at and not kept.

    The KL has one place. A user who puts it into the loss or the reward takes it out of the
    recipe's place.

    UsageError, one sentence: an unknown name; a value out of range; parts that cannot go together;
    a flag that would have no effect. AssertionError: a key that is none of the above.
    """
    if name not in RECIPES:
        raise unknown_name("--rl-algorithm", name, "algorithm", RECIPES)
    recipe = RECIPES[name]
    parts: dict[str, Any] = {
        "loss_constant": None,
        "kl_target": None,
        "kl_horizon": 10_000.0,
        "mismatch_cap": None,
        "mismatch_low": None,
        "mismatch_high": None,
        "overlong_buffer_tokens": None,
        **dataclasses.asdict(recipe),
    }
    replaceable = parts.keys() - {"kl_place", "kl_coef", "overlong_buffer_share"}
    others = {"kl_coef", "kl_in_reward", "kl_reward_coef", "top_p", "top_k"}
    unknown = [key for key in given if key not in replaceable | others | set(_critic(given))]
    assert not unknown, f"no part of an algorithm: {unknown}"
    parts.update({key: value for key, value in given.items() if key in replaceable})
    parts.update(_defaults_of_replaced(recipe, parts, given))
    place, coef, estimator = resolved_kl(recipe.kl_place, recipe.kl_coef, parts, given)
    parts.update(kl_place=place, kl_coef=coef, kl_estimator=estimator)
    estimator_entry = find_advantage_estimator(parts["advantage"])
    loss_entry = find_policy_loss(parts["policy_loss"])
    check_parts(parts, given, estimator_entry, loss_entry)
    algorithm = Algorithm(
        name=name,
        needs_critic=estimator_entry.needs_critic,
        needs_greedy_baseline=estimator_entry.needs_greedy_baseline,
        **parts,
    )
    _check_ranges(algorithm)
    return algorithm


def _defaults_of_replaced(
    recipe: Recipe, parts: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """A clip range suits one loss and whitening one estimator: not what replaces the recipe's."""
    defaults: dict[str, Any] = {}
    if parts["policy_loss"] != recipe.policy_loss:
        owner = RECIPES.get(parts["policy_loss"], Recipe())
        defaults["clip_eps_lower"] = owner.clip_eps_lower
        defaults["clip_eps_upper"] = owner.clip_eps_upper
    if parts["advantage"] != recipe.advantage:
        defaults["whiten_advantages"] = parts["advantage"] == "gae"
    return {key: value for key, value in defaults.items() if key not in given}


def _critic(given: Mapping[str, Any]) -> list[str]:
    return [key for key in given if key.startswith("critic_")]


def _check_ranges(algorithm: Algorithm) -> None:
    """Each config checks its own values when it is made."""
    _ = algorithm.advantage_config, algorithm.mismatch_config
    algorithm.policy_loss_config(max_response_tokens=1)
    algorithm.value_loss_config(max_response_tokens=1)
    algorithm.kl_controller()
