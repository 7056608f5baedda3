"""Recipes, the parts that flags replace, and combinations that are refused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mcore_rl.algorithms.aggregation import Aggregation
from mcore_rl.algorithms.estimators import GAE
from mcore_rl.algorithms.kl import KLController
from mcore_rl.algorithms.mismatch import Cap, MismatchConfig
from mcore_rl.algorithms.policy_losses import Clip, PolicyLossConfig
from mcore_rl.algorithms.recipes import RECIPES, Algorithm, resolve_algorithm
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters

CENTERED = {"policy_loss": "policy_gradient", "score_centering": 8}
TIS = {"mismatch_correction": "token_tis"}
# name: advantage, loss, aggregation, clip range, place of the KL, critic, greedy baseline
EXPECTED = {
    "ppo": ("gae", "ppo_clip", "token_mean", (0.2, 0.2), "reward", True, False),
    "grpo": ("grpo", "ppo_clip", "token_mean", (0.2, 0.2), "none", False, False),
    "dr_grpo": ("dr_grpo", "ppo_clip", "constant", (0.2, 0.2), "none", False, False),
    "rloo": ("rloo", "ppo_clip", "token_mean", (0.2, 0.2), "reward", False, False),
    "reinforce_pp": ("reinforce_pp", "ppo_clip", "token_mean", (0.2, 0.2), "reward", False, False),
    "reinforce_pp_baseline": (
        "reinforce_pp_baseline", "ppo_clip", "token_mean", (0.2, 0.2), "loss", False, False,
    ),
    "remax": ("remax", "ppo_clip", "token_mean", (0.2, 0.2), "reward", False, True),
    "opo": ("opo", "ppo_clip", "token_mean", (0.2, 0.2), "none", False, False),
    "dapo": ("grpo", "ppo_clip", "token_mean", (0.2, 0.28), "none", False, False),
    "gspo": ("grpo", "gspo", "seq_mean_token_mean", (3e-4, 4e-4), "none", False, False),
    "cispo": ("grpo", "cispo", "token_mean", (1.0, 4.0), "none", False, False),
    "gmpo": ("grpo", "gmpo", "seq_mean_token_mean", (0.4, 0.4), "none", False, False),
    "sapo": ("grpo", "sapo", "seq_mean_token_mean", (0.2, 0.2), "none", False, False),
    "sft": ("demonstrations", "policy_gradient", "token_mean", (0.2, 0.2), "none", False, False),
    "dpo": ("dpo", "policy_gradient", "seq_mean_token_sum", (0.2, 0.2), "reward", False, False),
}  # fmt: skip


def clip_range(algorithm: Algorithm) -> tuple[float, float]:
    """The clip range of the loss, or the table's 0.2 if it has none."""
    own = algorithm.policy_loss_parameters
    return getattr(own, "clip_eps_lower", 0.2), getattr(own, "clip_eps_upper", 0.2)


def summary(algorithm: Algorithm) -> tuple:
    return (
        algorithm.advantage,
        algorithm.policy_loss,
        algorithm.loss_aggregation,
        clip_range(algorithm),
        algorithm.kl_place,
        algorithm.needs_critic,
        algorithm.needs_greedy_baseline,
    )


def test_recipes_resolve_to_parts_of_their_papers() -> None:
    assert RECIPES.keys() == EXPECTED.keys()
    assert RECIPES["remax"].kl_coef == 0.05  # --kl_ctl of its authors' scripts
    for name, expected in EXPECTED.items():
        algorithm = resolve_algorithm(name, {})
        assert (algorithm.name, summary(algorithm)) == (name, expected)
        assert algorithm.needs_reference == (algorithm.kl_place != "none")


def test_dapo_has_dynamic_sampling_and_overlong_buffer() -> None:
    algorithm = resolve_algorithm("dapo", {})
    assert algorithm.dynamic_sampling and algorithm.num_samples_per_prompt == 16
    assert algorithm.overlong_buffer(20_480) == 4_096
    assert resolve_algorithm("grpo", {}).overlong_buffer(20_480) == 0


def test_given_parts_replace_parts_of_recipe() -> None:
    given = {
        "policy_loss": "cispo",
        "loss_aggregation": "constant",
        "loss_constant": 64.0,
        "clip_eps_upper": 0.5,
        "kl_coef": 0.02,
        "kl_estimator": "k2",
        "entropy_coef": 0.001,
        "mismatch_correction": "token_tis",
        "mismatch_cap": 3.0,
        "num_samples_per_prompt": 4,
        "dynamic_sampling": True,
        "max_refills": 3,
        "overlong_buffer_tokens": 5,
        "top_p": 0.9,
        "top_k": 50,
    }
    algorithm = resolve_algorithm("grpo", given)
    for key in given.keys() - {"top_p", "top_k", "clip_eps_upper", "mismatch_cap"}:
        assert getattr(algorithm, key) == given[key], key
    assert algorithm.policy_loss_config(512) == PolicyLossConfig(
        "cispo",
        Clip(clip_eps_lower=1.0, clip_eps_upper=0.5),
        Aggregation("constant", 64.0),
        kl_coef=0.02,
        kl_estimator="k2",
        entropy_coef=0.001,
    )
    assert algorithm.mismatch_config == MismatchConfig("token_tis", Cap(3.0))
    assert algorithm.overlong_buffer(512) == 5


def test_parts_of_critic_are_kept_with_critic() -> None:
    given = {"gae_lambda": 0.8, "gamma": 0.9, "value_clip_eps": 0.3, "critic_lr": 1e-5}
    algorithm = resolve_algorithm("ppo", given)
    assert algorithm.advantage_config == GAE(0.9, 0.8, whiten_advantages=True)
    assert algorithm.value_loss_config(512).clip_eps == 0.3
    switched_off = resolve_algorithm("ppo", {"whiten_advantages": False})
    assert switched_off.advantage_config == GAE(whiten_advantages=False)


def test_needs_follow_estimator_not_recipe() -> None:
    with_critic = resolve_algorithm("grpo", {"advantage": "gae", "critic_lr": 1e-5})
    assert with_critic.needs_critic and with_critic.advantage_config == GAE()
    without = resolve_algorithm("ppo", {"advantage": "rloo", "num_samples_per_prompt": 4})
    assert not without.needs_critic and without.advantage_config == Parameters()
    assert resolve_algorithm("grpo", {"advantage": "remax"}).needs_greedy_baseline


def test_clip_range_follows_loss_not_recipe() -> None:
    to_gspo = resolve_algorithm("grpo", {"policy_loss": "gspo"})
    assert clip_range(to_gspo) == (3e-4, 4e-4)
    away = resolve_algorithm("gspo", {"policy_loss": "ppo_clip", "clip_eps_upper": 0.3})
    assert clip_range(away) == (0.2, 0.3)


def test_dr_grpo_divides_by_response_budget_or_given_constant() -> None:
    assert resolve_algorithm("dr_grpo", {}).aggregation(512) == Aggregation("constant", 512.0)
    with_constant = resolve_algorithm("dr_grpo", {"loss_constant": 100.0})
    assert with_constant.aggregation(512) == Aggregation("constant", 100.0)


@pytest.mark.parametrize(
    "name, given, place, coef, estimator",
    [
        ("grpo", {}, "none", 0.0, "k3"),
        ("grpo", {"kl_coef": 0.0}, "none", 0.0, "k3"),
        ("grpo", {"kl_coef": 0.1}, "loss", 0.1, "k3"),
        ("grpo", {"kl_in_reward": True}, "reward", 0.01, "k1"),
        ("grpo", {"kl_in_reward": True, "kl_reward_coef": 0.2}, "reward", 0.2, "k1"),
        ("grpo", {"kl_in_reward": True, "kl_coef": 0.0}, "reward", 0.01, "k1"),
        ("grpo", {"kl_in_reward": True, "kl_estimator": "k2"}, "reward", 0.01, "k2"),
        ("ppo", {}, "reward", 0.02, "k1"),
        ("ppo", {"kl_reward_coef": 0.5}, "reward", 0.5, "k1"),
        ("ppo", {"kl_reward_coef": 0.0}, "none", 0.0, "k1"),
        ("ppo", {"kl_in_reward": False}, "none", 0.0, "k1"),
        ("ppo", {"kl_coef": 0.1}, "loss", 0.1, "k3"),
        ("ppo", {"kl_in_reward": False, "kl_coef": 0.1}, "loss", 0.1, "k3"),
        ("reinforce_pp_baseline", {}, "loss", 1e-5, "k2"),
        ("reinforce_pp_baseline", {"kl_coef": 0.0}, "none", 0.0, "k2"),
        ("reinforce_pp_baseline", {"kl_in_reward": True}, "reward", 0.01, "k1"),
    ],
)
def test_kl_has_one_place(name: str, given: dict, place: str, coef: float, estimator: str) -> None:
    algorithm = resolve_algorithm(name, given)
    found = algorithm.kl_place, algorithm.kl_coef, algorithm.kl_estimator
    assert found == (place, coef, estimator)
    assert algorithm.policy_loss_config(512).kl_coef == (coef if place == "loss" else 0.0)
    assert algorithm.kl_controller() == KLController(coef if place == "reward" else 0.0)


def test_kl_coefficient_is_adaptive_with_target() -> None:
    algorithm = resolve_algorithm("ppo", {"kl_target": 0.1, "kl_horizon": 500.0})
    assert algorithm.kl_controller() == KLController(0.02, 0.1, 500.0)


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("grop", {}, r"--rl-algorithm grop is not a known algorithm \(did you mean grpo\?\)"),
        ("grpo", {"advantage": "gea"}, r"--rl-advantage gea is not .*did you mean gae\?"),
        ("grpo", {"policy_loss": "gsop"}, r"--rl-policy-loss gsop is not .*did you mean gspo\?"),
        ("grpo", {"loss_aggregation": "mean"}, "--rl-loss-aggregation mean is unknown"),
        ("grpo", {"mismatch_correction": "tis"}, "--rl-mismatch-correction tis is unknown"),
        ("grpo", {"critic_lr": 1e-5}, "--rl-critic-lr 1e-05 has no effect.* grpo uses no critic"),
        ("grpo", {"value_clip_eps": 0.1}, "--rl-value-clip-eps 0.1 has no effect"),
        ("rloo", {"gae_lambda": 0.9}, "--rl-gae-lambda 0.9 has no effect.* rloo uses no critic"),
        ("grpo", {"gamma": 0.9}, "--rl-gamma 0.9 has no effect.* grpo does not read it"),
        (
            "reinforce_pp",
            {"whiten_advantages": True},
            "--rl-whiten-advantages True .*always whitens",
        ),
        ("grpo", {"whiten_advantages": True}, "--rl-whiten-advantages True has no effect"),
        ("sapo", {"clip_eps_upper": 0.3}, "--rl-clip-eps-upper 0.3 has no effect.* sapo does not"),
        ("cispo", {"dual_clip": 3.0}, "--rl-dual-clip 3.0 has no effect.* cispo does not"),
        ("grpo", {"sapo_temperature_positive": 2.0}, "--rl-sapo-temperature-positive 2.0 has no"),
        ("grpo", {"kl_coef": 0.1, "kl_in_reward": True}, "--rl-kl-coef 0.1 .*--rl-kl-in-reward"),
        ("ppo", {"kl_coef": 0.1, "kl_reward_coef": 0.2}, "--rl-kl-coef 0.1 .*-reward-coef 0.2"),
        ("grpo", {"kl_reward_coef": 0.2}, "--rl-kl-reward-coef 0.2 has no effect"),
        ("ppo", {"kl_in_reward": False, "kl_reward_coef": 0.2}, "--rl-kl-reward-coef 0.2 has no"),
        ("grpo", {"kl_target": 0.1}, "--rl-kl-target 0.1 has no effect"),
        ("grpo", {"kl_coef": 0.1, "kl_target": 0.1}, "--rl-kl-target 0.1 has no effect"),
        ("ppo", {"kl_horizon": 10.0}, "--rl-kl-horizon 10.0 has no effect"),
        ("ppo", {"kl_target": 0.1, "kl_reward_coef": 0.0}, "--rl-kl-reward-coef 0.0 cannot be"),
        ("grpo", {"num_samples_per_prompt": 1}, "--rl-num-samples-per-prompt 1 leaves nothing"),
        ("grpo", {"num_samples_per_prompt": 0}, "--rl-num-samples-per-prompt 0 must be at least 1"),
        ("ppo", {"dynamic_sampling": True}, "--rl-num-samples-per-prompt 1 would have"),
        ("grpo", {"max_refills": 2}, "--rl-max-refills 2 has no effect"),
        ("dapo", {"max_refills": -1}, "--rl-max-refills -1 must be"),
        ("grpo", {"mismatch_cap": 2.0}, "--rl-mismatch-cap 2.0 has no effect"),
        ("grpo", {"mismatch_low": 0.5}, "--rl-mismatch-low 0.5 has no effect"),
        ("grpo", {"mismatch_high": 2.0}, "--rl-mismatch-high 2.0 has no effect"),
        (
            "grpo",
            {"mismatch_correction": "icepop", "mismatch_cap": 2.0},
            "--rl-mismatch-cap 2.0 has no effect .* icepop; drop it, or choose token_tis or seq",
        ),
        (
            "grpo",
            {"mismatch_correction": "token_tis", "mismatch_low": 0.5},
            "--rl-mismatch-low 0.5 has no effect with --rl-mismatch-correction token_tis",
        ),
        (
            "grpo",
            {"mismatch_correction": "icepop", "mismatch_low": 3.0, "mismatch_high": 2.0},
            "--rl-mismatch-low 3.0 and --rl-mismatch-high 2.0 are not",
        ),
        (
            "grpo",
            {"mismatch_correction": "token_tis", "mismatch_cap": -1.0},
            "--rl-mismatch-cap -1.0 must be",
        ),
        ("grpo", {"mismatch_veto": 0.1}, "--rl-mismatch-veto 0.1 has no effect"),
        (
            "grpo",
            {"mismatch_correction": "icepop", "mismatch_floor": 0.5},
            "--rl-mismatch-floor 0.5 has no effect",
        ),
        ("grpo", {"kl_clamp": 10.0}, "--rl-kl-clamp 10.0 has no effect.* no KL"),
        ("ppo", {"kl_clamp": 10.0}, "--rl-kl-clamp 10.0 has no effect.* estimated by k1"),
        ("rloo", {"scale_rewards": "batch"}, "--rl-scale-rewards batch has no effect"),
        (
            "grpo",
            {"old_log_probs": "rollout", "mismatch_correction": "token_tis"},
            "--rl-old-log-probs rollout leaves --rl-mismatch-correction token_tis without effect",
        ),
        ("dapo", {"advantage": "gdpo"}, "--rl-overlong-buffer-tokens has no effect"),
        (
            "grpo",
            {"advantage": "gdpo", "missing_eos_penalty": 1.0},
            "--rl-missing-eos-penalty 1.0 has no effect",
        ),
        ("grpo", {"advantage": "gdpo", "reward_clip": 1.0}, "--rl-reward-clip 1.0 has no effect"),
        ("rloo", {"advantage": "gdpo"}, "--rl-kl-in-reward has no effect"),
        ("grpo", {"entropy_step": 0.1}, "--rl-entropy-step 0.1 has no effect.*-entropy-target"),
        ("grpo", {"entropy_target": 0.0}, "--rl-entropy-target 0.0 must be"),
        ("grpo", {"loss_constant": 10.0}, "--rl-loss-constant 10.0 has no effect"),
        ("dr_grpo", {"loss_constant": 0.0}, "--rl-loss-constant 0.0 must be"),
        ("grpo", {"top_p": 0.9}, "--rl-top-p 0.9 needs --rl-mismatch-correction"),
        ("grpo", {"top_k": 20}, "--rl-top-k 20 needs --rl-mismatch-correction"),
        ("sft", {"score_centering": 8}, "--rl-score-centering 8 has no effect"),
        ("cispo", {"score_centering": 8}, "--rl-score-centering 8 is for REINFORCE's loss"),
        ("rloo", {"score_centering": -1}, "--rl-score-centering -1 must be"),
        ("rloo", {**CENTERED, "top_k": 20, **TIS}, "--rl-score-centering 8 cannot be .*top-k 20"),
        ("grpo", {"clip_eps_lower": 2.0}, "--rl-clip-eps-lower 2.0 must be"),
        ("grpo", {"kl_coef": -0.1}, "--rl-kl-coef -0.1 must be"),
        ("ppo", {"kl_coef": -0.1}, "--rl-kl-coef -0.1 must be"),
        ("grpo", {"kl_coef": math.nan}, "--rl-kl-coef nan must be"),
        ("ppo", {"kl_reward_coef": -0.1}, "--rl-kl-reward-coef -0.1 must be"),
        ("ppo", {"gamma": 1.5}, "--rl-gamma 1.5 must be"),
        ("ppo", {"value_clip_eps": 0.0}, "--rl-value-clip-eps 0.0 must be"),
    ],
)
def test_invalid_combination_is_refused_with_flag_and_remedy(
    name: str, given: dict, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        resolve_algorithm(name, given)
    text = str(caught.value)
    assert text.startswith(caught.value.flag) and caught.value.flag and caught.value.remedy
    assert "\n" not in text and ". " not in text and not text.endswith(".")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "remax", "opo"])
@pytest.mark.parametrize("given", [{}, TIS, {"mismatch_correction": "icepop"}, {"top_k": -1}])
def test_scores_are_centered_with_any_estimator_and_weights_per_token(
    name: str, given: dict
) -> None:
    algorithm = resolve_algorithm(name, {**CENTERED, **given})
    assert (algorithm.score_centering, algorithm.policy_loss) == (8, "policy_gradient")


@pytest.mark.parametrize("given", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}])
def test_sampling_from_all_tokens_needs_no_correction(given: dict) -> None:
    assert resolve_algorithm("grpo", given) == resolve_algorithm("grpo", {})


@pytest.mark.parametrize("buffer", [-1, 600])
def test_overlong_buffer_out_of_range_is_refused(buffer: int) -> None:
    algorithm = resolve_algorithm("dapo", {"overlong_buffer_tokens": buffer})
    with pytest.raises(UsageError, match=f"^--rl-overlong-buffer-tokens {buffer} is not between"):
        algorithm.overlong_buffer(512)


def test_unknown_part_raises_assertion() -> None:
    with pytest.raises(AssertionError, match="no part of an algorithm: .*clip_eps'"):
        resolve_algorithm("grpo", {"clip_eps": 0.2})


def test_recipes_hold_only_parts_of_algorithms() -> None:
    parts = {field.name for field in dataclasses.fields(Algorithm)}
    assert {field.name for field in dataclasses.fields(RECIPES["ppo"])} <= parts
