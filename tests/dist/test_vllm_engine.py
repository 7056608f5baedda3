"""The in-process engine, on two gloo ranks: hand-over, strictness, sampling, cleaning up.

What the ranks do is in `vllm_engine_worker`; it runs once, and each test looks at one part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dist.checkpoints import NO_WEIGHT
from tests.rank_pool import RankPool

HAND_OVERS = (
    "deepseek_v3, TP2 with EP",
    "deepseek_v3, TP2",
    "deepseek_v2, TP2 with EP",
    "qwen3_moe, TP2 with EP",
    "qwen3_moe, TP1",
    "qwen3, tied, TP2",
)
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


@pytest.fixture(scope="module")
def results(checkpoint_factory: Callable[..., Path], ranks: RankPool) -> list[dict[str, Any]]:
    """What each of the two ranks saw."""
    checkpoints = {
        "deepseek_v3": checkpoint_factory("deepseek_v3", num_mtp_layers=1),
        "deepseek_v2": checkpoint_factory("deepseek_v2"),
        "qwen3_moe": checkpoint_factory("qwen3_moe"),
        "qwen3": checkpoint_factory("qwen3", tie_word_embeddings=True),
    }
    return ranks.run(
        "tests.dist.vllm_engine_worker:run",
        world_size=2,
        checkpoints={name: str(path) for name, path in checkpoints.items()},
    )


@pytest.mark.parametrize("case", HAND_OVERS)
def test_slices_leave_what_the_own_loader_leaves_bit_for_bit(results, case):
    for rank in results:
        found = rank["hand_over"][case]
        assert found["num_stored"] > 20
        # Zeros change every stored weight, packed copies included...
        assert [n for n in found["same_as_zeros"] if not NO_WEIGHT.search(n)] == []
        # ... and the slices bring every bit back: what is stored, and what is computed.
        assert found["after_slices"] == [[], False]
        assert found["after_halves"] == [[], False]
        assert found["score_lengths"] == [31, 9]


@pytest.mark.parametrize("case", HAND_OVERS)
def test_all_that_a_sleep_discards_comes_back_by_a_reload(results, case):
    """Discarded is all that vLLM made while it loaded the model, but for buffers. Scales that it
    makes anew with every load are on the host on CUDA, too."""
    for rank in results:
        found = rank["hand_over"][case]
        assert found["lost"] == []
        assert found["after_sleep"] == [[], False]
        assert found["sampled_after_sleep"]
        assert [p for p in found["kept_asleep"] if not p.endswith("_scale_cpu")] == []
        absorbed = {"W_UV", "W_UK_T"} if "deepseek" in case else set()  # of latent attention
        assert {"weight", *absorbed} <= set(found["overwritten"])


@pytest.mark.parametrize("case", HAND_OVERS)
def test_an_observer_hears_of_each_needed_element_once_as_it_was_stored(results, case):
    for rank in results:
        found = rank["hand_over"][case]
        assert found["witnessed"] == [found["needed_elements"], []]


@pytest.mark.parametrize("case", HAND_OVERS)
def test_learning_needs_changes_nothing_and_can_be_repeated(results, case):
    for rank in results:
        found = rank["hand_over"][case]
        assert found["after_learning"] == [[], False]
        assert found["learned_again_differs"] == []
        assert all(boxes == [] for boxes in found["mtp_needs"])


def test_closing_leaves_no_shared_memory_and_the_world_in_place(results):
    for case in HAND_OVERS:
        for rank in results:
            found = rank["hand_over"][case]["close"]
            assert bool(found["before"]) == ("TP2" in case)  # there was some to leave
            assert found["named"] == []
            assert found["left"] == []
            assert found["world_sum"] == 2.0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("generate on dummy weights", "no complete set of weights; call reload first"),
        ("missing, nothing learned", r"does not fill vLLM's parameter .*w13_weight.*\[3:4, "),
        ("generate after a failure", "no complete set of weights"),
        ("unknown", r"loader failed at model\.layers\.0\.mlp\.gate\.weight"),
        ("unknown expert", r"model\.layers\.1\.mlp\.experts\.99\.up_proj\.weight"),
        ("too small", r"does not fill vLLM's parameter .*w13_weight.*\[3:4, "),
        ("twice", r"model\.norm\.weight was given to reload twice"),
        ("missing, learned", r"not given to reload.*: model\.norm\.weight"),
        ("outside the slices", r"not given to reload.*: \[8:\d+, 0:\d+\] of .*experts\.3\.up_proj"),
        ("a part twice", r"model\.norm\.weight was given to reload twice \(\[32:64\] and \[0:40\]"),
        ("a part missing", r"not given to reload.*: \[40:48\] of model\.norm\.weight"),
        ("without a place", r"no rank of the engine has a place for: model\.layers\.2\."),
        ("generate asleep", r"the engine sleeps \(kv_cache, weights\)"),
        ("reload asleep", "call wake_weights first"),
        ("wake twice", "kv_cache does not sleep"),
        ("generate before reload", "no complete set of weights"),
    ],
)
def test_a_faulty_call_raises_and_names_the_fault(results, case, words):
    for rank in results:
        assert re.match("RuntimeError: .*" + words, rank["strictness"][case], re.DOTALL)


def test_a_faulty_reload_does_not_spoil_the_next(results):
    for rank in results:
        found = rank["strictness"]
        for case in ("complete again", "sleep", "reload after sleep", "kept weights"):
            assert found[case] == "no error"
        assert found["scores after all that"] == "the same"


def test_all_ranks_of_an_engine_hear_of_one_ranks_failure(results):
    healthy, faulty = (rank["disagreement"] for rank in results)
    assert "not given to reload, though vLLM needs them: [0:" in faulty["faulty"]
    assert faulty["faulty"].endswith("of model.layers.1.self_attn.o_proj.weight")
    assert re.match("RuntimeError: reload failed on rank 1: .*o_proj.weight", healthy["faulty"])
    for found in (healthy, faulty):
        assert "no complete set of weights" in found["generate after"]
        assert found["right"] == "no error"


def _tokens(rollouts: list[dict[str, Any]]) -> list[list[int]]:
    return [rollout["tokens"] for rollout in rollouts]


def test_the_ranks_of_one_engine_draw_the_same_tokens(results):
    first, second = (rank["one engine of two"] for rank in results)
    for case in ("first", "own_seed", "greedy", "narrow", "ignore_eos"):
        assert first[case] == second[case]


def test_two_engines_draw_the_same_with_one_seed_and_others_with_their_own(results):
    first, second = (rank["two engines of one"] for rank in results)
    assert first["first"] == second["first"]
    assert _tokens(first["own_seed"]) != _tokens(second["own_seed"])


def test_sampling_repeats_with_the_seed_and_differs_between_samples(results):
    for rank in results:
        for engine in ("one engine of two", "two engines of one"):
            found = rank[engine]
            assert found["first"] == found["again"]
            assert len({tuple(t) for t in _tokens(found["first"])}) > 12


def test_rollouts_come_in_prompt_order_with_all_fields(results):
    rollouts = results[0]["one engine of two"]["first"]
    assert [(r["prompt"], r["sample"]) for r in rollouts] == [
        (prompt, sample) for prompt in (0, 10, 20) for sample in range(8)
    ]
    for rollout, text in zip(rollouts, results[0]["one engine of two"]["texts"], strict=True):
        assert rollout["dtypes"] == ["int32", "float32"]
        assert len(rollout["tokens"]) == len(rollout["log_probs"]) <= 16
        assert rollout["text"] == text
        assert rollout["weight_version"] == 3
        stopped = rollout["tokens"][-1] == 2  # the tokenizer's end of sequence
        assert rollout["finish_reason"] == ("stop" if stopped else "length")


def test_ignore_eos_samples_to_the_end(results):
    for rollout in results[0]["one engine of two"]["ignore_eos"]:
        assert len(rollout["tokens"]) == 16


def test_log_probs_of_sampling_agree_with_scoring_the_same_tokens(results):
    """Decoding and prefill run different bf16 kernels: 8 bits, at log-probs of about 5."""
    for engine in ("one engine of two", "two engines of one"):
        found = results[0][engine]
        sampled = np.concatenate([r["log_probs"] for r in found["first"]])
        scored = np.concatenate(found["scores"])
        assert np.abs(sampled - scored).mean() < 0.03


def test_log_probs_are_of_the_distribution_sampled_from(results):
    """With top-k 2 each probability is at least that of the rarer of two, and none is far below."""
    for rollout in results[0]["one engine of two"]["narrow"]:
        assert np.exp(rollout["log_probs"]).min() > 1e-3
        assert np.mean(rollout["log_probs"]) > np.log(0.4)


def test_starting_an_engine_leaves_the_random_state_alone(results):
    for rank in results:
        assert rank["one engine of two"]["random_state_kept"]


def test_steps_scheduled_ahead_give_the_same_rollouts_and_scores(results):
    """vLLM schedules so on CUDA. The step that is left over when the last sequence has ended meets
    a sleep, a reload and the next prompts."""
    for rank in results:
        ahead, usual = rank["one engine, scheduled ahead"], rank["one engine of two"]
        assert ahead["steps_left"] == 1, "no step was scheduled ahead"
        assert ahead["again"] == ahead["first"]
        for case in ("first", "greedy", "narrow", "scores"):
            assert ahead[case] == usual[case], case
