"""Which parts of an algorithm cannot go together. One sentence per error: flag, value, why, remedy.

`parts` is what the algorithm would be, `given` the part of it that the user set by flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mcore_rl.algorithms.kl import KLEstimator
from mcore_rl.algorithms.registry import (
    ESTIMATOR_FLAGS,
    POLICY_LOSS_FLAGS,
    RegisteredEstimator,
    RegisteredPolicyLoss,
)
from mcore_rl.common.errors import UsageError

DEFAULT_KL_REWARD_COEF = 0.01


def flag_of(key: str) -> str:
    """clip_eps_lower -> --rl-clip-eps-lower."""
    return "--rl-" + key.replace("_", "-")


def resolved_kl(
    recipe_place: Literal["none", "loss", "reward"],
    recipe_coef: float,
    parts: Mapping[str, Any],
    given: Mapping[str, Any],
) -> tuple[Literal["none", "loss", "reward"], float, KLEstimator]:
    """Where the KL goes, its coefficient and estimator. UsageError: two places."""
    in_reward: bool | None = given.get("kl_in_reward")
    loss_coef, reward_coef = given.get("kl_coef"), given.get("kl_reward_coef")
    # Below 0 and nan too, which the range check then names.
    wants_loss = loss_coef is not None and loss_coef != 0
    if wants_loss and (in_reward or reward_coef):
        other = "--rl-kl-in-reward" if in_reward else f"--rl-kl-reward-coef {reward_coef}"
        raise UsageError(
            f"--rl-kl-coef {loss_coef} puts the KL into the loss and {other} into the reward, "
            "which would count it twice: give one of them."
        )
    to_reward = in_reward if in_reward is not None else recipe_place == "reward" and not wants_loss
    if reward_coef is not None and not to_reward:
        raise UsageError(
            f"--rl-kl-reward-coef {reward_coef} has no effect, because the KL is not in the "
            "reward: add --rl-kl-in-reward, or give --rl-kl-coef for the KL in the loss."
        )
    if to_reward:
        default = recipe_coef if recipe_place == "reward" else DEFAULT_KL_REWARD_COEF
        coef = default if reward_coef is None else reward_coef
        if coef == 0 and parts["kl_target"] is None:
            return "none", 0.0, parts["kl_estimator"]
        return "reward", coef, _estimator(recipe_place, "reward", parts, given)
    if loss_coef is None and recipe_place == "loss":
        loss_coef = recipe_coef
    if loss_coef is None or loss_coef == 0:
        return "none", 0.0, parts["kl_estimator"]
    return "loss", loss_coef, _estimator(recipe_place, "loss", parts, given)


def _estimator(
    recipe_place: str, place: str, parts: Mapping[str, Any], given: Mapping[str, Any]
) -> KLEstimator:
    """A recipe's estimator suits its own place: k1 in a loss pulls nowhere."""
    if "kl_estimator" in given or recipe_place == place:
        estimator: KLEstimator = parts["kl_estimator"]
        return estimator
    return "k1" if place == "reward" else "k3"


def check_parts(
    parts: Mapping[str, Any],
    given: Mapping[str, Any],
    estimator: RegisteredEstimator,
    loss: RegisteredPolicyLoss,
) -> None:
    """UsageError with the first thing that is wrong."""
    for problem in (
        *_critic_problems(given, estimator),
        *_unread_flags(given, estimator, loss),
        *_kl_problems(parts, given),
        *_group_problems(parts, given, estimator),
        *_sampling_problems(parts, given),
    ):
        raise UsageError(problem)


def _critic_problems(given: Mapping[str, Any], estimator: RegisteredEstimator) -> Iterator[str]:
    if estimator.needs_critic:
        return
    for key in given:
        if key.startswith("critic_") or key in ("value_clip_eps", "gae_lambda"):
            yield (
                f"{flag_of(key)} {given[key]} has no effect, because --rl-advantage "
                f"{estimator.name} uses no critic: drop it, or choose --rl-advantage gae."
            )


def _unread_flags(
    given: Mapping[str, Any], estimator: RegisteredEstimator, loss: RegisteredPolicyLoss
) -> Iterator[str]:
    """An estimator or loss of the user's own may read any."""
    for key in given:
        if key in ESTIMATOR_FLAGS and estimator.reads is not None and key not in estimator.reads:
            always = key == "whiten_advantages" and estimator.name.startswith("reinforce_pp")
            why = "always whitens" if always else "does not read it"
            yield (
                f"{flag_of(key)} {given[key]} has no effect, because --rl-advantage "
                f"{estimator.name} {why}: drop it, or choose --rl-advantage gae."
            )
        if key in POLICY_LOSS_FLAGS and loss.reads is not None and key not in loss.reads:
            owner = "sapo" if key.startswith("sapo") else "ppo_clip"
            yield (
                f"{flag_of(key)} {given[key]} has no effect, because --rl-policy-loss {loss.name} "
                f"does not read it: drop it, or choose --rl-policy-loss {owner}."
            )


def _kl_problems(parts: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    if parts["kl_target"] is not None and parts["kl_place"] != "reward":
        yield (
            f"--rl-kl-target {parts['kl_target']} has no effect, because only the coefficient of a "
            "KL in the reward is adapted: add --rl-kl-in-reward, or drop it."
        )
    if "kl_horizon" in given and parts["kl_target"] is None:
        yield (
            f"--rl-kl-horizon {given['kl_horizon']} has no effect, because without --rl-kl-target "
            "the coefficient of the KL stays: give a target, or drop it."
        )


def _group_problems(
    parts: Mapping[str, Any], given: Mapping[str, Any], estimator: RegisteredEstimator
) -> Iterator[str]:
    samples = parts["num_samples_per_prompt"]
    if samples < 1:
        yield f"--rl-num-samples-per-prompt {samples} is not 1 or more: choose for example 8."
    if estimator.compares_group and samples == 1:
        yield (
            "--rl-num-samples-per-prompt 1 leaves nothing to learn from, because --rl-advantage "
            f"{estimator.name} compares the responses to one prompt: choose 2 or more."
        )
    if parts["dynamic_sampling"] and samples == 1:
        yield (
            "--rl-num-samples-per-prompt 1 would have --rl-dynamic-sampling refuse every prompt, "
            "because it keeps those whose responses differ in reward: choose 2 or more, or drop "
            "--rl-dynamic-sampling."
        )
    if "max_refills" in given and not parts["dynamic_sampling"]:
        yield (
            f"--rl-max-refills {given['max_refills']} has no effect without --rl-dynamic-sampling: "
            "add that, or drop it."
        )
    if parts["max_refills"] < 0:
        yield f"--rl-max-refills {parts['max_refills']} is not 0 or more: choose for example 10."


def _sampling_problems(parts: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    top_p, top_k = given.get("top_p", 1.0), given.get("top_k", 0)
    if parts["mismatch_correction"] != "none":
        return
    for key, value, narrows in (("top_p", top_p, top_p < 1.0), ("top_k", top_k, top_k > 0)):
        if narrows:
            yield (
                f"{flag_of(key)} {value} needs --rl-mismatch-correction, because the engine then "
                "renormalises its log-probs over the tokens it kept while the trainer's are over "
                "the whole vocabulary: choose for example token_tis, or sample from all tokens."
            )
