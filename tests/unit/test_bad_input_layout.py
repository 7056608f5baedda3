"""Layouts and batches that do not fit are refused in one sentence; see bad_input_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input_cases import Case, assert_refused, table
from tests.bad_input_folder import QWEN3, model

LAYOUT = [
    Case(
        "dense_product",
        [
            "--tensor-model-parallel-size 4 x --pipeline-model-parallel-size 1 x "
            "--context-parallel-size 1 = 4 does not divide the world of 2 processes",
            "change",
        ],
        flags={"--tensor-model-parallel-size": "4"},
    ),
    Case(
        "expert_product",
        [
            "--expert-tensor-parallel-size 2 x --expert-model-parallel-size 2 x "
            "--pipeline-model-parallel-size 1 = 4 does not divide the world of 2 processes",
            "change",
        ],
        more="--expert-tensor-parallel-size 2",
    ),
    Case(
        "degree_of_zero",
        ["--pipeline-model-parallel-size 0 must be at least 1"],
        more="--pipeline-model-parallel-size 0",
    ),
    Case(
        "heads",
        ["--tensor-model-parallel-size 2 does not divide", "num_attention_heads 3", "choose"],
        change=model(num_attention_heads=3, num_key_value_heads=3),
    ),
    Case(
        "key_value_heads",
        ["--tensor-model-parallel-size 2 does not divide", "num_key_value_heads 1", "choose"],
        flags={"--expert-model-parallel-size": None},
        change=model(QWEN3, num_key_value_heads=1),
    ),
    Case(
        "layers",
        ["--pipeline-model-parallel-size 2 does not divide the 3 layers", "choose a divisor"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--pipeline-model-parallel-size 2",
        change=model(num_hidden_layers=3, first_k_dense_replace=2),
    ),
    Case(
        "layers_of_the_last_stage",
        ["--decoder-first/last-pipeline-num-layers 5 leaves -3 of 2 layers", "choose"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 5",
    ),
    Case(
        "experts",
        ["--expert-model-parallel-size 2 does not divide", "number of experts 3", "choose"],
        change=model(n_routed_experts=3),
    ),
    Case(
        "experts_of_a_dense_model",
        ["--expert-model-parallel-size 2 needs a model with experts", "qwen3 has none", "drop"],
        flags={"--tensor-model-parallel-size": "1"},
        change=model(QWEN3),
    ),
    Case(
        "replayed_experts_of_a_dense_model",
        ["--rl-routing-replay r3 is for models with experts", "qwen3", "has none", "set it to off"],
        more="--rl-routing-replay r3",
        change=model(QWEN3),
    ),
    Case(
        "sample_as_context_parallelism_pads_it",
        [
            "--rl-max-tokens-per-microbatch 131 is less than the longest sample, "
            "--rl-max-prompt-tokens 66 + --rl-max-response-tokens 64 = 130, which "
            "--context-parallel-size 2 pads to 132; raise it to that"
        ],
        flags={"--tensor-model-parallel-size": "1", "--rl-max-prompt-tokens": "66"},
        more="--context-parallel-size 2 --rl-max-tokens-per-microbatch 131",
    ),
    Case(
        "hybrid_context_parallel",
        ["--hybrid-context-parallel shares samples out by a data loader", "drop it"],
        flags={"--tensor-model-parallel-size": "1"},
        more="--context-parallel-size 2 --hybrid-context-parallel",
    ),
    Case(
        "virtual_stages_without_pipeline",
        ["--num-virtual-stages-per-pipeline-rank 2 needs --pipeline-model-parallel-size above 1"],
        more="--num-virtual-stages-per-pipeline-rank 2",
    ),
    Case(
        "layers_of_a_custom_layout",
        ["--pipeline-model-parallel-layout Et|tttL has 4 decoder layers", "has 2", "correct"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL",
    ),
    Case(
        "ep_of_rollout_is_no_multiple_of_tp",
        ["--rl-rollout-ep-size 3 is not a multiple of the engine's TP size 2", "change"],
        more="--rl-rollout-ep-size 3",
    ),
    Case(
        "ep_of_rollout_exceeds_the_world",
        ["--rl-rollout-ep-size 4", "does not divide the world of 2 processes", "choose a divisor"],
        more="--rl-rollout-ep-size 4",
    ),
    Case(
        "ep_of_rollout_over_data_parallel_ranks_on_cpu",
        ["--rl-rollout-ep-size 2 spreads experts over 2 data-parallel ranks", "GPUs only", "drop"],
        more="--rl-rollout-tp-size 1 --rl-rollout-ep-size 2",
    ),
    Case(
        "ep_of_rollout_contradicts_no_ep",
        ["--rl-rollout-ep-size 2 contradicts --rl-rollout-no-expert-parallel", "drop one"],
        more="--rl-rollout-ep-size 2 --rl-rollout-no-expert-parallel",
    ),
    Case(
        "dtype_of_the_hand_over",
        ["--rl-reshard-dtype", "invalid choice: 'fp8'", "--help"],
        more="--rl-reshard-dtype fp8",
    ),
    Case(
        "interval_of_full_hand_overs",
        ["--rl-reshard-full-interval 0 must be greater than 0"],
        more="--rl-reshard-full-interval 0",
    ),
    Case(
        "rollout_degree",
        ["--rl-rollout-tp-size 3 does not divide the world of 2 processes", "choose a divisor"],
        more="--rl-rollout-tp-size 3",
    ),
    Case(
        "rollout_heads",
        ["--rl-rollout-tp-size 2 does not divide", "num_attention_heads 3", "choose a divisor"],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--rl-rollout-tp-size 2",
        change=model(num_attention_heads=3, num_key_value_heads=3),
    ),
]

BATCHES = [
    Case(
        "samples",
        [
            "--rl-num-prompts-per-step 3 x --rl-num-samples-per-prompt 5 = 15 samples do not "
            "divide into --rl-num-mini-batches 2 x 1 data-parallel ranks x "
            "--micro-batch-size 4 = 8",
            "change one of them",
        ],
        more="--rl-num-prompts-per-step 3 --rl-num-samples-per-prompt 5 --rl-num-mini-batches 2 "
        "--micro-batch-size 4",
    ),
    Case(
        "more_mini_batches_than_samples",
        ["--rl-num-prompts-per-step 1", "= 2 samples do not divide", "--rl-num-mini-batches 4"],
        more="--rl-num-prompts-per-step 1 --rl-num-samples-per-prompt 2 --rl-num-mini-batches 4",
    ),
    Case(
        "no_mini_batches",
        ["--rl-num-mini-batches 0 must be greater than 0"],
        more="--rl-num-mini-batches 0",
    ),
    Case(
        "micro_batch_of_zero",
        ["--micro-batch-size 0 = 0", "change one of them"],
        more="--micro-batch-size 0",
    ),
    Case(
        "global_batch",
        ["--global-batch-size 7 contradicts the 128 samples of a mini-batch", "drop the flag"],
        more="--global-batch-size 7",
    ),
    Case(
        "one_sample",
        ["--rl-num-samples-per-prompt 1 leaves nothing to learn from", "choose 2 or more"],
        more="--rl-num-samples-per-prompt 1",
    ),
    Case(
        "micro_batches_of_virtual_stages",
        [
            "--num-virtual-stages-per-pipeline-rank 2 interleaves the micro-batches",
            "must be a multiple of --pipeline-model-parallel-size 2",
            "--rl-num-prompts-per-step 1, --rl-num-samples-per-prompt 3",
            "make 3 of a mini-batch",
            "change one of them, or pack samples by --rl-max-tokens-per-microbatch",
        ],
        flags={"--tensor-model-parallel-size": "1", "--expert-model-parallel-size": "1"},
        more="--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--rl-num-prompts-per-step 1 --rl-num-samples-per-prompt 3",
        change=model(num_hidden_layers=4),
    ),
    Case(
        "positions",
        [
            "--rl-max-prompt-tokens 64 + --rl-max-response-tokens 200 = 264 exceeds",
            "max_position_embeddings 256",
            "lower one of them",
        ],
        flags={"--rl-max-response-tokens": "200"},
    ),
    Case(
        "positions_of_verify",  # which answers no prompt
        [
            "--rl-max-prompt-tokens 256 + 1 that vLLM adds when it scores = 257 exceeds",
            "max_position_embeddings 256",
            "lower it",
        ],
        flags={"--rl-max-prompt-tokens": "256"},
        entry="mcore_rl.verify",
    ),
]


@pytest.mark.parametrize("case", table(layout=LAYOUT, batches=BATCHES))
def test_bad_layout_is_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
