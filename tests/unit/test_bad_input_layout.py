"""Layouts and batches that do not fit are refused in one sentence; see bad_input_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input_cases import Case, assert_refused, parse_cases, table
from tests.bad_input_folder import QWEN3, model

LAYOUT_TEXT = """
dense_product: --tensor-model-parallel-size 4
    --tensor-model-parallel-size 4 x --pipeline-model-parallel-size 1 x --context-parallel-size
    1 = 4 does not divide the world of 2 processes ... change
    => --tensor-model-parallel-size 2
expert_product: --expert-tensor-parallel-size 2
    --expert-tensor-parallel-size 2 x --expert-model-parallel-size 2 x
    --pipeline-model-parallel-size 1 = 4 does not divide the world of 2 processes ... change
    => --expert-tensor-parallel-size 1
degree_of_zero: --pipeline-model-parallel-size 0
    --pipeline-model-parallel-size 0 must be at least 1
heads:
    --tensor-model-parallel-size 2 does not divide ... num_attention_heads 3 ... choose
    => --tensor-model-parallel-size 1 --expert-model-parallel-size 1
key_value_heads: without --expert-model-parallel-size
    --tensor-model-parallel-size 2 does not divide ... num_key_value_heads 1 ... choose
    => --tensor-model-parallel-size 1
layers: --tensor-model-parallel-size 1 --expert-model-parallel-size 1 --pipeline-model-parallel-size
  2
    --pipeline-model-parallel-size 2 does not divide the 3 layers ... choose a divisor
    => --pipeline-model-parallel-size 1 | --decoder-last-pipeline-num-layers 1
layers_of_the_last_stage: --tensor-model-parallel-size 1 --expert-model-parallel-size 1
  --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 5
    --decoder-first/last-pipeline-num-layers 5 leaves -3 of 2 layers ... choose
    => --decoder-last-pipeline-num-layers 1
experts:
    --expert-model-parallel-size 2 does not divide ... number of experts 3 ... choose
    => --expert-model-parallel-size 1
experts_of_a_dense_model: --tensor-model-parallel-size 1
    --expert-model-parallel-size 2 needs a model with experts ... qwen3 has none ... drop
replayed_experts_of_a_dense_model: --rl-routing-replay r3
    --rl-routing-replay r3 is for models with experts ... qwen3 ... has none ... set it to off
    => --rl-routing-replay off drop --expert-model-parallel-size
sample_as_context_parallelism_pads_it: --tensor-model-parallel-size 1 --rl-max-prompt-tokens 66
  --context-parallel-size 2 --rl-max-tokens-per-microbatch 131
    --rl-max-tokens-per-microbatch 131 is less than the longest sample, --rl-max-prompt-tokens
    66 + --rl-max-response-tokens 64 = 130, which --context-parallel-size 2 pads to 132; raise
    it to that
    => --rl-max-tokens-per-microbatch 132
hybrid_context_parallel: --tensor-model-parallel-size 1 --context-parallel-size 2
  --hybrid-context-parallel
    --hybrid-context-parallel distributes samples by a data loader ... drop it
virtual_stages_without_pipeline: --num-virtual-stages-per-pipeline-rank 2
    --num-virtual-stages-per-pipeline-rank 2 needs --pipeline-model-parallel-size above 1
layers_of_a_custom_layout: --tensor-model-parallel-size 1 --expert-model-parallel-size 1
  --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL
    --pipeline-model-parallel-layout Et|tttL has 4 decoder layers ... has 2 ... correct
    => --pipeline-model-parallel-layout Et|tL
ep_of_rollout_over_data_parallel_ranks_on_cpu: --rl-rollout-tp-size 1 --rl-rollout-ep-size 2
    --rl-rollout-ep-size 2 spreads experts over 2 data-parallel ranks ... GPUs only ... drop
    => --rl-rollout-tp-size 2
ep_of_rollout_contradicts_no_ep: --rl-rollout-ep-size 2 --rl-rollout-no-expert-parallel
    --rl-rollout-ep-size 2 contradicts --rl-rollout-no-expert-parallel ... drop one
    => drop --rl-rollout-no-expert-parallel
dtype_of_the_hand_over: --rl-reshard-dtype fp8
    --rl-reshard-dtype ... invalid choice: 'fp8' ... --help
    => --rl-reshard-dtype bf16
interval_of_full_hand_overs: --rl-reshard-full-interval 0
    --rl-reshard-full-interval 0 must be greater than 0
    => --rl-reshard-full-interval 20
rollout_heads: --tensor-model-parallel-size 1 --expert-model-parallel-size 1 --rl-rollout-tp-size 2
    --rl-rollout-tp-size 2 does not divide ... num_attention_heads 3 ... choose a divisor
    => --rl-rollout-tp-size 1
"""
CHANGES_LAYOUT = {
    "heads": model(num_attention_heads=3, num_key_value_heads=3),
    "key_value_heads": model(QWEN3, num_key_value_heads=1),
    "layers": model(num_hidden_layers=3, first_k_dense_replace=2),
    "experts": model(n_routed_experts=3),
    "experts_of_a_dense_model": model(QWEN3),
    "replayed_experts_of_a_dense_model": model(QWEN3),
    "rollout_heads": model(num_attention_heads=3, num_key_value_heads=3),
}
LAYOUT = parse_cases(LAYOUT_TEXT, CHANGES_LAYOUT)

BATCHES_TEXT = """
samples: --rl-num-prompts-per-step 3 --rl-num-samples-per-prompt 5 --rl-num-mini-batches 2
  --micro-batch-size 4
    --rl-num-prompts-per-step 3 x --rl-num-samples-per-prompt 5 = 15 samples do not divide into
    --rl-num-mini-batches 2 x 1 data-parallel ranks x --micro-batch-size 4 = 8 ... change one of
    them
    => --rl-num-mini-batches 1 --micro-batch-size 3
more_mini_batches_than_samples: --rl-num-prompts-per-step 1 --rl-num-samples-per-prompt 2
  --rl-num-mini-batches 4
    --rl-num-prompts-per-step 1 ... = 2 samples do not divide ... --rl-num-mini-batches 4
    => --rl-num-mini-batches 1
no_mini_batches: --rl-num-mini-batches 0
    --rl-num-mini-batches 0 must be greater than 0
    => --rl-num-mini-batches 1
micro_batch_of_zero: --micro-batch-size 0
    --micro-batch-size 0 = 0 ... change one of them
    => --micro-batch-size 1
global_batch: --global-batch-size 7
    --global-batch-size 7 contradicts the 128 samples of a mini-batch ... drop the flag
micro_batches_of_virtual_stages: --tensor-model-parallel-size 1 --expert-model-parallel-size 1
  --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
  --rl-num-prompts-per-step 1 --rl-num-samples-per-prompt 3
    --num-virtual-stages-per-pipeline-rank 2 interleaves the micro-batches ... must be a
    multiple of --pipeline-model-parallel-size 2 ... --rl-num-prompts-per-step 1,
    --rl-num-samples-per-prompt 3 ... make 3 of a mini-batch ... change one of them, or pack
    samples by --rl-max-tokens-per-microbatch
    => --rl-num-samples-per-prompt 4 | --rl-max-tokens-per-microbatch 128
positions: --rl-max-response-tokens 200
    --rl-max-prompt-tokens 64 + --rl-max-response-tokens 200 = 264 exceeds ...
    max_position_embeddings 256 ... lower one of them
    => --rl-max-response-tokens 192
"""
CHANGES_BATCHES = {"micro_batches_of_virtual_stages": model(num_hidden_layers=4)}
BATCHES = [
    *parse_cases(BATCHES_TEXT, CHANGES_BATCHES),
    Case(
        "positions_of_verify",  # which answers no prompt
        [
            "--rl-max-prompt-tokens 256 + 1 that vLLM adds when it scores = 257 exceeds",
            "max_position_embeddings 256",
            "lower it",
        ],
        flags={"--rl-max-prompt-tokens": "256"},
        advice=("--rl-max-prompt-tokens 255",),
        entry="mcore_rl.verify",
    ),
]


@pytest.mark.parametrize("case", table(layout=LAYOUT, batches=BATCHES))
def test_bad_layout_is_refused_in_one_sentence(
    case: Case, here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(case, here, monkeypatch, capfd)
