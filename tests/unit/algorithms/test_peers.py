"""Our functions against the published functions of peers on the same inputs.

The files in tests/fixtures/peers hold numbers: a peer's function, its inputs and its outputs, with
the peer's version and commit. Peers pad responses from the left to `[b, r]`; here they become
ragged samples with a prompt of one token.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rl.algorithms.aggregation import Aggregation, Segments, token_weights
from mcore_rl.algorithms.interfaces import AdvantageInputs
from mcore_rl.algorithms.kl import KLController, kl_estimate
from mcore_rl.algorithms.mismatch import Band, Cap, MismatchConfig, mismatch_weights
from mcore_rl.algorithms.policy_losses import PolicyLossConfig
from mcore_rl.algorithms.registry import find_advantage_estimator
from mcore_rl.algorithms.total_loss import policy_loss_total
from mcore_rl.algorithms.value_loss import ValueLossConfig, value_loss
from mcore_rl.common.parameters import with_values
from tests.unit.algorithms.losses_reference import denominators_of, loss_config
from tests.unit.algorithms.ragged import Ragged, from_padded, to_ragged

PEERS = Path(__file__).resolve().parents[2] / "fixtures" / "peers"


def cases(file: str, *functions: str) -> list[Any]:
    stored = json.loads((PEERS / file).read_text())
    found = [
        pytest.param(
            *(case[part] for part in ("function", "inputs", "outputs")),
            id=f"{stored['peer']}-{case['function']}-{number}",
        )
        for number, case in enumerate(stored["cases"])
        if case["function"] in functions
    ]
    assert found, f"{file} has no case of {functions}"
    return found


def cases_of(file: str, *functions: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("function, inputs, outputs", cases(file, *functions))


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def batch_of(mask: Any) -> Ragged:
    mask = tensor(mask)
    return from_padded(mask, mask)[0]


MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-sum-norm": "constant",
}
ESTIMATORS = {
    "compute_rloo_outcome_advantage": "rloo",
    "compute_opo_outcome_advantage": "opo",
    "compute_reinforce_plus_plus_outcome_advantage": "reinforce_pp",
    "compute_reinforce_plus_plus_baseline_outcome_advantage": "reinforce_pp_baseline",
    "compute_remax_outcome_advantage": "remax",
    "compute_gae_advantage_return": "gae",
}


@cases_of("verl_advantages.json", "compute_grpo_outcome_advantage", *ESTIMATORS)
def test_advantages_equal_peers(function: str, inputs: dict, outputs: dict) -> None:
    rewards, mask = tensor(inputs["token_level_rewards"]), tensor(inputs["response_mask"])
    batch, token_rewards = from_padded(rewards, mask)
    name = ESTIMATORS.get(function)
    if name is None:
        name = "grpo" if inputs.get("norm_adv_by_std_in_grpo", True) else "dr_grpo"
    num_samples = len(batch.lengths)
    values = to_ragged(batch, tensor(inputs["values"])).float() if "values" in inputs else None
    entry = find_advantage_estimator(name)
    found = entry.function(
        AdvantageInputs(
            scores=rewards.sum(1).numpy(),
            group_ids=np.array(inputs.get("index", range(num_samples))),
            response_lengths=batch.response_lengths,
            baselines=np.array(inputs.get("reward_baselines", [0.0] * num_samples)),
            rows=np.arange(num_samples),
            token_rewards=token_rewards.float(),
            loss_mask=batch.loss_mask,
            lengths=batch.lengths,
            values=values,
        ),
        with_values(
            entry.parameters,
            {"gamma": inputs.get("gamma", 1.0), "gae_lambda": inputs.get("lam", 1.0)},
        ),
    )
    expected = to_ragged(batch, tensor(outputs["advantages"]))
    # On purpose: verl's variance in whitening divides by n - 1, ours by n.
    if name in ("gae", "reinforce_pp", "reinforce_pp_baseline"):
        num_tokens = int(batch.loss_mask.sum())
        expected = expected * math.sqrt(num_tokens / (num_tokens - 1))
    # Results are float32; verl adds 1e-8 to a variance where we add 1e-6 to a deviation.
    torch.testing.assert_close(found.advantages.double(), expected, rtol=1e-5, atol=1e-6)
    if name == "gae":
        returns = to_ragged(batch, tensor(outputs["returns"]))
        torch.testing.assert_close(found.returns.double(), returns, rtol=1e-6, atol=1e-6)


def assert_policy_loss(
    batch: Ragged, inputs: dict, names: dict[str, str], config: PolicyLossConfig, outputs: dict,
    weights: torch.Tensor | None = None,
) -> None:  # fmt: skip
    arguments = {ours: to_ragged(batch, tensor(inputs[theirs])) for ours, theirs in names.items()}
    arguments["log_probs"].requires_grad_()
    found = policy_loss_total(
        **arguments,
        entropy=torch.zeros(batch.num_tokens),
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        weights=weights,
        denominators=denominators_of(batch),
        config=config,
    )
    assert found.loss.item() == pytest.approx(outputs["loss"], rel=1e-6)
    (gradient,) = torch.autograd.grad(found.loss, [arguments["log_probs"]])
    expected = to_ragged(batch, tensor(outputs["gradient"]))
    # verl's eps of 1e-8 beside counts of tokens
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)


LOSSES = {
    "compute_policy_loss_vanilla": "ppo_clip",
    "compute_policy_loss_gspo": "gspo",
    "compute_policy_loss_sapo": "sapo",
    "compute_policy_loss_cispo": "cispo",
    "compute_policy_loss_geo_mean": "gmpo",
}


@cases_of("verl_policy_losses.json", *LOSSES)
def test_policy_losses_equal_peers(function: str, inputs: dict, outputs: dict) -> None:
    theirs = inputs["config"]
    name = LOSSES[function]
    # verl's geo_mean averages over all samples and takes no mode; no response in its case is
    # empty, since verl counts those and we do not.
    mode = "seq_mean_token_mean" if name == "gmpo" else MODES[inputs["loss_agg_mode"]]
    config = loss_config(
        name,
        Aggregation(mode),
        clip_eps_lower=theirs.get("clip_ratio_low", 0.2),
        clip_eps_upper=theirs.get("clip_ratio_high", 0.2),
        dual_clip=theirs.get("clip_ratio_c"),
        sapo_temperature_positive=theirs.get("tau_pos", 1.0),
        sapo_temperature_negative=theirs.get("tau_neg", 1.0),
    )
    names = {"log_probs": "log_prob", "old_log_probs": "old_log_prob", "advantages": "advantages"}
    assert_policy_loss(batch_of(inputs["response_mask"]), inputs, names, config, outputs)


@cases_of("openrlhf_losses.json", "PolicyLoss.forward")
def test_policy_loss_and_corrections_equal_openrlhf(
    function: str, inputs: dict, outputs: dict
) -> None:
    batch = batch_of(inputs["action_mask"])
    mode = "token_mean" if inputs["token_level_loss"] else "seq_mean_token_mean"
    config = loss_config(
        "ppo_clip",
        Aggregation(mode),
        clip_eps_lower=inputs["clip_eps_low"],
        clip_eps_upper=inputs["clip_eps_high"],
        dual_clip=inputs.get("dual_clip"),
    )
    weights = None
    if inputs.get("enable_vllm_is_correction"):
        low, high = inputs["vllm_is_truncated_threshold"]
        corrections = {
            "tis": MismatchConfig("token_tis", Cap(high)),  # its lower bound is 0: none
            "icepop": MismatchConfig("icepop", Band(low, high)),
        }
        weights = mismatch_weights(
            to_ragged(batch, tensor(inputs["old_log_probs"])),
            to_ragged(batch, tensor(inputs["rollout_log_probs"])),
            batch.loss_mask,
            batch.lengths,
            corrections[inputs["vllm_is_correction_type"]],
        ).weights
    names = {name: name for name in ("log_probs", "old_log_probs", "advantages")}
    assert_policy_loss(batch, inputs, names, config, outputs, weights)


@cases_of("verl_kl_value_aggregation.json", "kl_penalty")
def test_kl_estimates_equal_peers(function: str, inputs: dict, outputs: dict) -> None:
    log_probs = tensor(inputs["logprob"]).requires_grad_()
    found = kl_estimate(log_probs, tensor(inputs["ref_logprob"]), inputs["kl_penalty"])
    (gradient,) = torch.autograd.grad(found.sum(), [log_probs])
    expected, expected_gradient = tensor(outputs["kl"]), tensor(outputs["gradient"])
    # On purpose: verl limits k3 to 10; none of the stored values but those below reach it.
    within = expected.abs() < 10
    torch.testing.assert_close(found[within], expected[within], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient[within], expected_gradient[within], rtol=1e-9, atol=1e-9)
    assert within.sum() > 15


@cases_of("verl_kl_value_aggregation.json", "agg_loss")
def test_aggregation_equals_peers(function: str, inputs: dict, outputs: dict) -> None:
    batch, losses = from_padded(tensor(inputs["loss_mat"]), tensor(inputs["loss_mask"]))
    aggregation = Aggregation(MODES[inputs["loss_agg_mode"]], inputs["loss_scale_factor"])
    segments = Segments.of(batch.lengths, batch.loss_mask)
    weights = token_weights(segments, denominators_of(batch), aggregation, torch.float64)
    assert (weights * losses).sum().item() == pytest.approx(outputs["loss"], rel=1e-7)


@pytest.mark.parametrize(
    "function, inputs, outputs",
    [
        *cases("verl_kl_value_aggregation.json", "compute_value_loss"),
        *cases("openrlhf_losses.json", "ValueLoss.forward"),
    ],
)
def test_value_loss_equals_peers(function: str, inputs: dict, outputs: dict) -> None:
    verl = function == "compute_value_loss"
    batch = batch_of(inputs["response_mask" if verl else "action_mask"])
    if verl:
        mode = MODES[inputs["loss_agg_mode"]]
        clip_eps = inputs["cliprange_value"]
    else:
        mode = "token_mean" if inputs["token_level_loss"] else "seq_mean_token_mean"
        clip_eps = inputs["clip_eps"]
    values = to_ragged(batch, tensor(inputs["vpreds" if verl else "values"])).requires_grad_()
    found = value_loss(
        values,
        old_values=to_ragged(batch, tensor(inputs["values" if verl else "old_values"])),
        returns=to_ragged(batch, tensor(inputs["returns"])),
        loss_mask=batch.loss_mask,
        lengths=batch.lengths,
        denominators=denominators_of(batch),
        config=ValueLossConfig(clip_eps, Aggregation(mode)),
    )
    assert found.loss.item() == pytest.approx(outputs["loss"], rel=1e-7)
    (gradient,) = torch.autograd.grad(found.loss, [values])
    torch.testing.assert_close(
        gradient, to_ragged(batch, tensor(outputs["gradient"])), rtol=1e-7, atol=1e-9
    )
    if verl:
        share = found.sums.clipped / found.sums.num_tokens
        assert share.item() == pytest.approx(outputs["clipfrac"], rel=1e-6)


@cases_of("verl_kl_value_aggregation.json", "AdaptiveKLController.update")
def test_adaptive_kl_equals_peers(function: str, inputs: dict, outputs: dict) -> None:
    controller = KLController(inputs["init_kl_coef"], inputs["target_kl"], inputs["horizon"])
    controller.update(inputs["current_kl"], inputs["n_steps"])
    assert controller.coef == pytest.approx(outputs["value"], rel=1e-10)


def corrected(inputs: dict, config: MismatchConfig) -> tuple[Ragged, torch.Tensor]:
    batch, log_ratio = from_padded(tensor(inputs["log_ratio"]), tensor(inputs["response_mask"]))
    zeros = torch.zeros_like(log_ratio)
    found = mismatch_weights(log_ratio, zeros, batch.loss_mask, batch.lengths, config)
    return batch, found.weights[batch.loss_mask]


@cases_of("verl_corrections.json", "compute_rollout_correction_weights")
def test_correction_weights_equal_peers(function: str, inputs: dict, outputs: dict) -> None:
    threshold = inputs["rollout_is_threshold"]
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        config = MismatchConfig("icepop", Band(low, high))
    else:
        config = MismatchConfig(f"{inputs['rollout_is']}_tis", Cap(threshold))
    batch, weights = corrected(inputs, config)
    expected = to_ragged(batch, tensor(outputs["weights"]))[batch.loss_mask]
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-10)


@cases_of("verl_corrections.json", "compute_rollout_rejection_mask")
def test_rejections_equal_peers(function: str, inputs: dict, outputs: dict) -> None:
    names = {"seq_mean_k1": "geometric_rejection", "seq_sum_k1": "product_rejection"}
    low, high = map(float, inputs["rollout_rs_threshold"].split("_"))
    # On purpose: verl's bounds are on engine / trainer, ours on trainer / engine.
    config = MismatchConfig(names[inputs["rollout_rs"]], Band(1 / high, 1 / low))
    batch, weights = corrected(inputs, config)
    expected = to_ragged(batch, tensor(outputs["response_mask"]))[batch.loss_mask]
    assert weights.tolist() == expected.tolist()
    assert 0 < expected.sum() < len(expected)
