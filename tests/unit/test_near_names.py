"""Suggestions for unknown names: typing errors only, no names with other meanings."""

from __future__ import annotations

import pytest

from mcore_rl.common.near_names import did_you_mean, nearest_name
from mcore_rl.flags.parsed_flags import options_of
from mcore_rl.job.reading import make_parser


@pytest.fixture(scope="module")
def flags() -> list[str]:
    return list(options_of(make_parser()))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--rl-num-step", "--rl-num-steps"),
        ("--rl-numsteps", "--rl-num-steps"),
        ("--rl_num_steps", "--rl-num-steps"),
        ("--rl-eval-temprature", "--rl-eval-temperature"),
        ("--rl-max-respones-tokens", "--rl-max-response-tokens"),
        ("--rl-critc-lr", "--rl-critic-lr"),
        ("--rl-clip-lower-eps", "--rl-clip-eps-lower"),
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--use-distributed-optimiser", "--use-distributed-optimizer"),
        ("--moe-router-top-k", "--moe-router-topk"),
        ("--weigth-decay", "--weight-decay"),
        ("--clip-grads", "--clip-grad"),
        ("--save-intervall", "--save-interval"),
    ],
)
def test_typing_error_suggests_meant_flag(typed: str, meant: str, flags: list[str]) -> None:
    assert nearest_name(typed, flags) == meant


@pytest.mark.parametrize(
    "typed",
    [
        "--rl-train-temperature",  # --rl-eval-temperature
        "--rl-rollout-temperature",
        "--rl-train-prompts",  # --rl-eval-prompts
        "--max-lr",  # --min-lr
        "--rl-actor-lr",  # --rl-critic-lr
        "--rl-ref-tp-size",  # --rl-reward-tp-size
        "--rl-reward-mode",  # --rl-reward-model
        "--rl-clip-eps-high",  # --rl-clip-eps-lower
        "--rl-no-offload",
        "--rl-critic-rl",  # a word twice
        "--rl-rl-prompts",
        "--adam-beta3",
        "--no-save-optimizer",
        # In slime it scales the KL in the reward; --rl-kl-coef scales that of the loss.
        "--kl-coef",
        "--eps-clip-high",
        "--rollout-batch-size",
        "--lr-warmup-steps",
        # Flags of verl and TRL.
        "--ppo-epochs",
        "--val-temperature",
        "--max-completion-length",
        "--num-iterations",
        "--no-no-rope-fusion",  # a word that is there twice
        "--rl-rl-num-steps",
    ],
)
def test_name_with_other_meaning_suggests_no_flag(typed: str, flags: list[str]) -> None:
    assert nearest_name(typed, flags) is None


def test_tie_between_names_suggests_nothing() -> None:
    assert nearest_name("cart", ["care", "card"]) is None
    assert nearest_name("exact_macth", ["exact_match", "exact_batch"]) == "exact_match"


def test_suggestion_is_in_brackets_or_empty() -> None:
    assert did_you_mean("gms8k", ["gsm8k", "http"]) == " (did you mean gsm8k?)"
    assert did_you_mean("gsm9k", ["gsm8k", "http"]) == ""
