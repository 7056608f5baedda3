"""Checks for parts that cannot be combined; each error is one sentence: flag, value, why, remedy.

`parts` are all parts of the algorithm, `given` those that the user set by flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mcore_rl.algorithms.kl import KLParameters
from mcore_rl.algorithms.mismatch import TOKEN_CORRECTIONS
from mcore_rl.algorithms.registry import RegisteredEstimator
from mcore_rl.common.errors import UsageError
from mcore_rl.common.parameters import Parameters, field_of, flag_of, parameters_of


def check_parts(
    parts: Mapping[str, Any],
    given: Mapping[str, Any],
    kl: KLParameters,
    estimator: RegisteredEstimator,
    owners: Mapping[str, Mapping[str, Parameters]],
) -> None:
    """Raise UsageError for the first problem. `owners`: see `recipes.parts_by_flag`."""
    for problem in (
        *_critic_problems(given, estimator),
        *_unread_flags(parts, given, owners),
        *_kl_problems(parts, given, kl),
        *_group_problems(parts, given, estimator),
        *_outcome_problems(parts, estimator),
        *_sampling_problems(parts, given),
        *_old_log_probs_problems(parts),
        *_centering_problems(parts, given),
        *_entropy_problems(parts, given),
    ):
        raise problem


def _critic_problems(
    given: Mapping[str, Any], estimator: RegisteredEstimator
) -> Iterator[UsageError]:
    if estimator.needs_critic:
        return
    for key in given:
        if key.startswith("critic_") or key in ("value_clip_eps", "gae_lambda"):
            yield UsageError(
                f"has no effect, because --rl-advantage {estimator.name} uses no critic",
                flag=f"{flag_of(key)} {given[key]}",
                remedy="drop it, or choose --rl-advantage gae",
            )


def _unread_flags(
    parts: Mapping[str, Any],
    given: Mapping[str, Any],
    owners: Mapping[str, Mapping[str, Parameters]],
) -> Iterator[UsageError]:
    """Yield an error for each parameter of an estimator, loss or correction that is not chosen."""
    for chooser, known in owners.items():
        chosen = parts[field_of(chooser)]
        for key in given:
            readers = [name for name, parameters in known.items() if hasattr(parameters, key)]
            if not readers or chosen in readers:
                continue
            flag, others = f"{flag_of(key)} {given[key]}", " or ".join(readers)
            if chosen is None:
                yield UsageError(
                    f"has no effect without {chooser}",
                    flag=flag,
                    remedy=f"drop it, or choose {chooser} {others}",
                )
                continue
            if chooser == "--rl-mismatch-correction":
                yield UsageError(
                    f"has no effect with {chooser} {chosen}",
                    flag=flag,
                    remedy=f"drop it, or choose {others}",
                )
                continue
            always = key == "whiten_advantages" and chosen.startswith("reinforce_pp")
            why = "always whitens" if always else "does not read it"
            # Suggest the reader with most parameters: gae, ppo_clip.
            other = max(readers, key=lambda name: len(parameters_of(type(known[name]))))
            yield UsageError(
                f"has no effect, because {chooser} {chosen} {why}",
                flag=flag,
                remedy=f"drop it, or choose {chooser} {other}",
            )


def _kl_problems(
    parts: Mapping[str, Any], given: Mapping[str, Any], kl: KLParameters
) -> Iterator[UsageError]:
    if kl.kl_target is not None and parts["kl_place"] != "reward":
        yield UsageError(
            "has no effect, because only the coefficient of a KL in the reward is adapted",
            flag=f"--rl-kl-target {kl.kl_target}",
            remedy="add --rl-kl-in-reward, or drop it",
        )
    if "kl_horizon" in given and kl.kl_target is None:
        yield UsageError(
            "has no effect, because without --rl-kl-target the coefficient of the KL stays",
            flag=f"--rl-kl-horizon {kl.kl_horizon}",
            remedy="give a target, or drop it",
        )
    if kl.kl_clamp is not None and (parts["kl_place"] == "none" or parts["kl_estimator"] != "k3"):
        why = "no KL to the reference is computed"
        if parts["kl_place"] != "none":
            why = f"the KL is estimated by {parts['kl_estimator']}"
        yield UsageError(
            f"has no effect, because {why}",
            flag=f"--rl-kl-clamp {kl.kl_clamp}",
            remedy="choose --rl-kl-estimator k3 with a coefficient of the KL, or drop it",
        )


def _group_problems(
    parts: Mapping[str, Any], given: Mapping[str, Any], estimator: RegisteredEstimator
) -> Iterator[UsageError]:
    samples = parts["num_samples_per_prompt"]
    if estimator.compares_group and samples == 1:
        yield UsageError(
            f"leaves nothing to learn from, because --rl-advantage {estimator.name} compares "
            "the responses to one prompt",
            flag="--rl-num-samples-per-prompt 1",
            remedy="choose 2 or more",
        )
    if parts["dynamic_sampling"] and samples == 1:
        yield UsageError(
            "would have --rl-dynamic-sampling refuse every prompt, because it keeps those whose "
            "responses differ in reward",
            flag="--rl-num-samples-per-prompt 1",
            remedy="choose 2 or more, or drop --rl-dynamic-sampling",
        )
    if "max_refills" in given and not parts["dynamic_sampling"] and parts["group_filter"] is None:
        yield UsageError(
            "has no effect without --rl-dynamic-sampling or --rl-group-filter",
            flag=f"--rl-max-refills {given['max_refills']}",
            remedy="add one of them, or drop it",
        )
    flag = f"--rl-sampler {parts['sampler']}"
    if parts["sampler"] and estimator.needs_greedy_baseline:
        yield UsageError(
            f"samples no greedy response, which --rl-advantage {estimator.name} compares others "
            "with",
            flag=flag,
            remedy="choose another --rl-advantage, for example reinforce_pp",
        )
    if parts["sampler"] and parts["score_centering"]:
        yield UsageError(
            "returns no candidates of each token, which --rl-score-centering "
            f"{parts['score_centering']} needs",
            flag=flag,
            remedy="drop one of them",
        )


def _outcome_problems(
    parts: Mapping[str, Any], estimator: RegisteredEstimator
) -> Iterator[UsageError]:
    """Yield an error for each change of the outcome that the estimator does not read."""
    if not estimator.needs_reward_parts:
        return
    remedy = f"drop it, or choose another estimator than {estimator.name}"
    buffer = parts["overlong_buffer_tokens"]
    if buffer or (buffer is None and parts["overlong_buffer_share"]):
        changes = "--rl-overlong-buffer-tokens", remedy.replace("drop it", "set it to 0")
    elif parts["missing_eos_penalty"]:
        changes = f"--rl-missing-eos-penalty {parts['missing_eos_penalty']}", remedy
    elif parts["reward_clip"] is not None:
        changes = f"--rl-reward-clip {parts['reward_clip']}", remedy
    elif parts["kl_place"] == "reward":
        changes = "--rl-kl-in-reward", "give --rl-kl-coef for the KL in the loss"
    else:
        return
    yield UsageError(
        f"has no effect, because --rl-advantage {estimator.name} reads each reward by itself",
        flag=changes[0],
        remedy=changes[1],
    )


def _sampling_problems(parts: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[UsageError]:
    top_p, top_k = given.get("top_p", 1.0), given.get("top_k", 0)
    if parts["mismatch_correction"] != "none":
        return
    for key, value, narrows in (("top_p", top_p, top_p < 1.0), ("top_k", top_k, top_k > 0)):
        if narrows:
            yield UsageError(
                "needs --rl-mismatch-correction, because the engine then renormalises its "
                "log-probs over the tokens it kept while the trainer's are over the whole "
                "vocabulary",
                flag=f"{flag_of(key)} {value}",
                remedy="choose for example token_tis, or sample from all tokens",
            )


def _old_log_probs_problems(parts: Mapping[str, Any]) -> Iterator[UsageError]:
    if parts["old_log_probs"] == "rollout" and parts["mismatch_correction"] != "none":
        yield UsageError(
            f"leaves --rl-mismatch-correction {parts['mismatch_correction']} without effect, "
            "because ratios then refer to the engine's policy already",
            flag="--rl-old-log-probs rollout",
            remedy="drop one of the two",
        )


def _centering_problems(parts: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[UsageError]:
    num_tokens = parts["score_centering"]
    if not num_tokens:
        return
    ours = f"--rl-score-centering {num_tokens}"
    loss, correction = parts["policy_loss"], parts["mismatch_correction"]
    if parts["trains_on"] != "samples":
        yield UsageError(
            f"has no effect, because nothing is sampled for --rl-advantage {parts['advantage']}",
            flag=ours,
            remedy="drop it",
        )
    if loss != "policy_gradient":
        yield UsageError(
            f"is for REINFORCE's loss, which --rl-policy-loss {loss} is not",
            flag=ours,
            remedy="add --rl-policy-loss policy_gradient, or drop it",
        )
    if correction not in TOKEN_CORRECTIONS:
        yield UsageError(
            f"cannot be combined with --rl-mismatch-correction {correction}, which weighs a token "
            "by the others of its response",
            flag=ours,
            remedy=f"choose {' or '.join(TOKEN_CORRECTIONS)}",
        )
    others = {
        "mismatch_veto": given.get("mismatch_veto") is not None,
        "top_p": given.get("top_p", 1.0) < 1.0,
        "top_k": given.get("top_k", 0) > 0,
    }
    for key, is_set in others.items():
        if is_set:
            why = "which weighs a token by the others of its response"
            if key != "mismatch_veto":
                why = "with which the engine's probabilities are not those of its whole vocabulary"
            yield UsageError(
                f"cannot be combined with {flag_of(key)} {given[key]}, {why}",
                flag=ours,
                remedy="drop one of the two",
            )


def _entropy_problems(parts: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[UsageError]:
    if "entropy_step" in given and parts["entropy_target"] is None:
        yield UsageError(
            "has no effect, because without --rl-entropy-target the weight of the entropy stays",
            flag=f"--rl-entropy-step {given['entropy_step']}",
            remedy="give a target, or drop it",
        )
