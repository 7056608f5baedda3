"""The memory that flags save, as a run reports it at its start: recomputation, chunked log-probs.

Computed by the planner's formulas (`planner.activations`) from the model's shape, its layout and
its batching; nothing is measured. The formulas assume fused kernels and evenly loaded experts:
without a GPU layers keep more, and recomputation saves more.

This module is pure: it imports neither Megatron nor vLLM nor torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.config import RLConfig
from mcore_rl.job.planner_settings import activation_settings
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout
from mcore_rl.planner.activations import (
    logits_bytes,
    micro_batch_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.settings import ActivationSettings, Recompute


@dataclasses.dataclass(frozen=True, slots=True)
class RecomputeSaving:
    """The saving by activation recomputation, on the pipeline stage where it is largest."""

    stage: int
    kept_bytes: int  # of one micro-batch, from its forward to its backward pass
    whole_bytes: int  # the same without recomputation
    peak_bytes: int  # saved at an update's peak, all micro-batches in flight; may be negative

    @property
    def saved_bytes(self) -> int:
        return self.whole_bytes - self.kept_bytes


def memory_lines(
    config: RLConfig,
    values: Mapping[str, Any],
    shape: ModelShape,
    train: TrainLayout,
    layers: PipelineLayers,
    *,
    name: str = "actor",
) -> list[str]:
    """Return a line for each of the two that has an effect on this model.

    `values` are Megatron's arguments by destination, validated or not; `train` and `layers` are the
    layout of the model called `name`.
    """
    settings = activation_settings(
        config,
        values,
        train,
        layers,
        vocabulary_multiple=values.get("make_vocab_size_divisible_by"),
    )
    lines = []
    if settings.recompute.granularity is not None:
        saving = recompute_saving(shape, train, layers, settings)
        if saving.saved_bytes > 0:  # zero for the experts of a dense model
            lines.append(f"{name}: {_recompute_line(saving, settings)}")
    if not shape.value_head and settings.chunk_tokens < settings.micro_batch_tokens:
        lines.append(f"{name}: {_logits_line(shape, train, settings)}")
    return lines


def recompute_saving(
    shape: ModelShape, train: TrainLayout, layers: PipelineLayers, settings: ActivationSettings
) -> RecomputeSaving:
    """Return the effect of `settings.recompute`."""
    without = dataclasses.replace(settings, recompute=Recompute())
    kept = micro_batch_activation_bytes(shape, train, layers, settings)
    whole = micro_batch_activation_bytes(shape, train, layers, without)
    stage = max(range(len(kept)), key=lambda i: whole[i] - kept[i])
    peaks = [train_activation_bytes(shape, train, layers, each) for each in (settings, without)]
    return RecomputeSaving(stage, kept[stage], whole[stage], peaks[1][stage] - peaks[0][stage])


def _recompute_line(saving: RecomputeSaving, settings: ActivationSettings) -> str:
    at_peak = f"{shown_bytes(saving.peak_bytes)} at the peak of an update"
    if saving.peak_bytes <= 0:
        at_peak = "nothing at the peak of an update, where all of it is there again at once"
    return (
        f"activation recomputation ({settings.recompute.describe()}), computed for fused kernels: "
        f"the layers of pipeline stage {saving.stage} keep {shown_bytes(saving.kept_bytes)} of a "
        f"micro-batch of {settings.describe_micro_batch()} instead of "
        f"{shown_bytes(saving.whole_bytes)}: "
        f"{shown_bytes(saving.saved_bytes)} of each micro-batch saved, {at_peak}"
    )


def _logits_line(shape: ModelShape, train: TrainLayout, settings: ActivationSettings) -> str:
    chunk = logits_bytes(shape, train, settings, settings.chunk_tokens)
    whole = logits_bytes(shape, train, settings, settings.micro_batch_tokens)
    return (
        f"chunked log-probs (--rl-log-prob-chunk-tokens {settings.chunk_tokens}), computed: logits "
        f"take {shown_bytes(chunk)} instead of {shown_bytes(whole)} for a micro-batch of "
        f"{settings.describe_micro_batch()}: {shown_bytes(whole - chunk)} saved on the last "
        "pipeline stage"
    )
