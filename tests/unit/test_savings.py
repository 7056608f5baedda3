"""The lines about saved memory at the start of a run, and their figures."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mcore_rl.batching.accounting import batch_accounting
from mcore_rl.batching.rows import MicroBatching
from mcore_rl.config import RLConfig
from mcore_rl.megatron.log_probs import vocab_parallel_log_probs
from mcore_rl.model.config_json import LayerKind, ModelShape
from mcore_rl.model.layout import TrainLayout, pipeline_layers
from mcore_rl.planner.activations import layer_terms, logits_bytes, train_activation_bytes
from mcore_rl.planner.models import TrainedModel
from mcore_rl.planner.savings import memory_lines, recompute_saving
from mcore_rl.planner.settings import Recompute, TrainSettings
from mcore_rl.trainer.plan_inputs import activation_settings, model_of_args
from tests.live_bytes import LiveBytes
from tests.model_shapes import published_shape, small_shape

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TRAIN = TrainLayout(8, tp_size=2, pp_size=4, ep_size=2)
SHAPE = published_shape("deepseek-v2-lite")
LAYERS = pipeline_layers(27, 4, last=6)


def config(**given: Any) -> RLConfig:
    lengths = {"max_prompt_tokens": 1024, "max_response_tokens": 1024}
    return RLConfig.of(**lengths, num_prompts_per_step=16, num_samples_per_prompt=8, **given)


def lines(values: dict[str, Any], shape: ModelShape = SHAPE, **given: Any) -> list[str]:
    flags = {"micro_batch_size": 1, "sequence_parallel": True, **values}
    model = model_of_args(config(**given), flags, shape, TRAIN, LAYERS, name="model")
    return memory_lines(model)


def test_switches_without_an_effect_have_no_line():
    assert lines({}, log_prob_chunk_tokens=2048) == []
    assert lines({"micro_batch_size": 4}, log_prob_chunk_tokens=8192) == []
    assert lines({}, max_tokens_per_microbatch=4096, log_prob_chunk_tokens=4096) == []
    of_experts = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    dense = dataclasses.replace(SHAPE, experts=None, is_moe_layer=(False,) * 27)
    assert lines(of_experts, dense, log_prob_chunk_tokens=2048) == []


def test_each_switch_has_its_own_line():
    recompute, logits = lines(FULL)
    assert recompute.startswith(
        "model: activation recomputation (full, uniform, --recompute-num-layers 1), computed"
    )
    assert "of a micro-batch of 1 x 2,048 tokens instead of" in recompute
    assert logits.startswith("model: chunked log-probs (--rl-log-prob-chunk-tokens 1024), computed")
    assert lines({"recompute_activations": True})[0].startswith(
        "model: activation recomputation (selective: core_attn), computed"
    )
    packed = lines(FULL, max_tokens_per_microbatch=8192)
    assert all("a micro-batch of up to 8,192 tokens" in line for line in packed)
    # A critic has no vocabulary at its end.
    critic = dataclasses.replace(SHAPE, value_head=True)
    assert len(lines(FULL, critic)) == 1


def test_full_recomputation_saves_layers_without_their_inputs():
    values = {"micro_batch_size": 2, "sequence_parallel": True, **FULL}
    model = model_of_args(config(), values, SHAPE, TRAIN, LAYERS)
    terms = list(layer_terms(model, LayerKind(is_moe=True)))
    tokens = 2 * 2048
    saving = recompute_saving(model)
    assert saving.stage == 1  # all of its seven layers have experts
    assert saving.kept_bytes == 7 * tokens * terms[0].bytes_per_token
    assert saving.saved_bytes == 7 * tokens * sum(t.bytes_per_token for t in terms[1:])
    # Three micro-batches are in flight on that stage, and one layer is recomputed at a time.
    one_layer = tokens * sum(t.bytes_per_token for t in terms)
    assert saving.peak_bytes == 3 * saving.saved_bytes - one_layer
    training = dataclasses.replace(model.training, recompute=Recompute())
    without = dataclasses.replace(model, training=training)
    peaks = [train_activation_bytes(each)[1] for each in (model, without)]
    assert peaks[1] - peaks[0] == saving.peak_bytes


def test_recomputing_all_layers_at_once_saves_nothing_at_the_peak():
    one = TrainLayout(2, tp_size=2)
    values = {"micro_batch_size": 1, **FULL, "recompute_num_layers": 27}
    model = model_of_args(config(), values, SHAPE, one, pipeline_layers(27, 1))
    (line, _) = memory_lines(model)
    assert "of each micro-batch saved, no saving at the update's peak" in line


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({}, {"micro_batch_size": 4}),
        ({"num_mini_batches": 4}, {"micro_batch_size": 1}),
        ({"max_tokens_per_microbatch": 2048}, {"micro_batch_size": 1}),
        ({"max_tokens_per_microbatch": 7000, "num_mini_batches": 2}, {"micro_batch_size": 1}),
    ],
)
@pytest.mark.parametrize("chunks", [1, 2])
def test_number_of_micro_batches_matches_the_accounting(given, values, chunks):
    train = TrainLayout(16, tp_size=2, pp_size=2)
    layers = pipeline_layers(8, 2, vp_size=chunks)
    settings = activation_settings(config(**given), values, train, layers)
    made = config(**given)
    batching = MicroBatching(
        max_tokens=made.trainer.max_tokens_per_microbatch,
        micro_batch_size=values["micro_batch_size"],
        count_multiple_of=2 if chunks > 1 else 1,
    )
    accounting = batch_accounting(
        num_prompts=made.trainer.num_prompts_per_step,
        samples_per_prompt=made.samples_per_prompt,
        num_mini_batches=made.trainer.num_mini_batches,
        num_epochs=1,
        num_steps=1,
        max_sequence_tokens=2048,
        actor=(train.dp_size, batching),
    )
    assert settings.num_micro_batches == accounting.actor.full_micro_batches


def _model(shape: ModelShape, num_tokens: int, weight_bytes: int) -> TrainedModel:
    training = TrainSettings(
        weight_bytes=weight_bytes,
        vocabulary_multiple=None,
        micro_batch_size=1,
        num_micro_batches=1,
        positions=num_tokens,
        sequence_parallel=False,
        recompute=Recompute(),
        chunk_tokens=num_tokens,
        expert_load=1.0,
    )
    layers = pipeline_layers(shape.num_layers, 1)
    return TrainedModel(
        name="actor", shape=shape, train=TrainLayout(1), layers=layers, training=training
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_saving_matches_measured_peaks(dtype):
    """Peaks of scoring with gradients, in chunks and at once, differ by no more than the saving:
    two copies in float32, of which products in blocks need one, or half of one, and the blocks."""
    num_tokens, chunk, hidden_size = 2048, 128, 16
    shape = dataclasses.replace(small_shape(vocab_size=512), hidden_size=hidden_size)
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(512, hidden_size, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, 512, (num_tokens,))

    def peak(chunk_tokens: int) -> int:
        hidden.grad = weight.grad = None
        with LiveBytes() as live:
            log_probs, entropy = vocab_parallel_log_probs(
                hidden,
                weight,
                targets,
                vocab_start=0,
                vocab_size=512,
                tp_group=None,
                chunk_tokens=chunk_tokens,
            )
            assert entropy is not None
            (log_probs.sum() + entropy.sum()).backward()
        return live.peak_bytes

    model = _model(shape, num_tokens, weight_bytes=hidden.element_size())
    computed = logits_bytes(model, num_tokens) - logits_bytes(model, chunk)
    measured = peak(num_tokens) - peak(chunk)
    assert computed / 2 < measured <= computed


def test_lines_read_megatrons_validated_arguments():
    """Flags that are not given are None, and Megatron sets some switches itself."""
    names = ("granularity", "method", "num_layers", "modules")
    values = {
        **{f"recompute_{name}": None for name in names},
        "micro_batch_size": 1,
        "sequence_parallel": True,
        "recompute_activations": False,
        "distribute_saved_activations": False,
        "microbatch_group_size_per_vp_stage": None,
        "make_vocab_size_divisible_by": 32,
    }
    (line,) = memory_lines(model_of_args(config(), values, SHAPE, TRAIN, LAYERS))
    # 102,400 rows, half of them here, twice in float32, of 1,024 and of 2,048 tokens
    assert "logits take 419 MB instead of 839 MB for a micro-batch of 1 x 2,048 tokens" in line
