"""The memory that flags save, as a run reports it at its start: recomputation, chunked log-probs.

Computed by the formulas of `activations`; nothing is measured. They assume fused kernels and evenly
loaded experts: without a GPU layers keep more, and recomputation saves more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rl.common.byte_sizes import shown_bytes
from mcore_rl.planner.activations import (
    logits_bytes,
    micro_batch_activation_bytes,
    train_activation_bytes,
)
from mcore_rl.planner.models import TrainedModel
from mcore_rl.planner.settings import Recompute


@dataclass(frozen=True, slots=True)
class RecomputeSaving:
    """The saving by activation recomputation, on the pipeline stage where it is largest."""

    stage: int
    kept_bytes: int  # of one micro-batch, from its forward to its backward pass
    whole_bytes: int  # the same without recomputation
    peak_bytes: int  # saved at an update's peak, all micro-batches in flight; may be negative

    @property
    def saved_bytes(self) -> int:
        return self.whole_bytes - self.kept_bytes


def memory_lines(model: TrainedModel) -> list[str]:
    """Return a line for each of the two that has an effect on this model."""
    training = model.training
    lines = []
    if training.recompute.granularity is not None:
        saving = recompute_saving(model)
        if saving.saved_bytes > 0:  # zero for the experts of a dense model
            lines.append(f"{model.name}: {_recompute_line(model, saving)}")
    if not model.shape.value_head and training.chunk_tokens < training.micro_batch_tokens:
        lines.append(f"{model.name}: {_logits_line(model)}")
    return lines


def recompute_saving(model: TrainedModel) -> RecomputeSaving:
    """Return the effect of `model.training.recompute`."""
    without = replace(model, training=replace(model.training, recompute=Recompute()))
    kept, whole = micro_batch_activation_bytes(model), micro_batch_activation_bytes(without)
    stage = max(range(len(kept)), key=lambda i: whole[i] - kept[i])
    at_peak = train_activation_bytes(without)[stage] - train_activation_bytes(model)[stage]
    return RecomputeSaving(stage, kept[stage], whole[stage], at_peak)


def _recompute_line(model: TrainedModel, saving: RecomputeSaving) -> str:
    at_peak = f"{shown_bytes(saving.peak_bytes)} at the peak of an update"
    if saving.peak_bytes <= 0:
        at_peak = "no saving at the update's peak"
    return (
        f"activation recomputation ({model.training.recompute.describe()}), computed for fused "
        f"kernels: the layers of pipeline stage {saving.stage} keep "
        f"{shown_bytes(saving.kept_bytes)} of a micro-batch of "
        f"{model.training.describe_micro_batch()} instead of {shown_bytes(saving.whole_bytes)}: "
        f"{shown_bytes(saving.saved_bytes)} of each micro-batch saved, {at_peak}"
    )


def _logits_line(model: TrainedModel) -> str:
    training = model.training
    chunk = logits_bytes(model, training.chunk_tokens)
    whole = logits_bytes(model, training.micro_batch_tokens)
    return (
        f"chunked log-probs (--rl-log-prob-chunk-tokens {training.chunk_tokens}), computed: logits "
        f"take {shown_bytes(chunk)} instead of {shown_bytes(whole)} for a micro-batch of "
        f"{training.describe_micro_batch()}: {shown_bytes(whole - chunk)} saved on the last "
        "pipeline stage"
    )
