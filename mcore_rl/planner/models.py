"""The models that a job trains, and what a rank holds of them: parameters and optimizer state.

Counts are exact, from the tensors in `model.tensors` and the vocabulary padded as in Megatron.
Megatron adds only the padding inside its buffers: less than 64 elements per parameter and less than
lcm(DP, 128) per bucket.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from mcore_rl.model.config_json import LayerKind, ModelShape
from mcore_rl.model.layout import PipelineLayers, TrainLayout
from mcore_rl.model.lora import adapted_specs, is_adapted
from mcore_rl.model.roles import ACTOR
from mcore_rl.model.tensors import (
    Cut,
    TensorSpec,
    embedding_specs,
    head_specs,
    layer_specs,
    mtp_layer_specs,
    trained_vocabulary_rows,
)
from mcore_rl.planner.settings import TrainSettings

Bytes = npt.NDArray[np.int64]

# Per element of a weight while LoRA merges it: the product in float64, and where it is zero.
_PRODUCT_BYTES = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """The actor, the critic, or a teacher, which has no gradients and no optimizer, with its layout
    and settings, on `train.world_size` ranks."""

    name: str  # ACTOR, CRITIC or TEACHER
    shape: ModelShape
    train: TrainLayout
    layers: PipelineLayers
    training: TrainSettings
    own_degrees: frozenset[str] = frozenset()  # in which another model does not follow the actor
    # Its separate ranks in the world, `train.world_size` of them; empty: it shares the actor's
    # ranks, which count from 0.
    ranks: tuple[int, ...] = ()

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the padded vocabulary on a rank."""
        multiple, tp_size = self.training.vocabulary_multiple, self.train.tp_size
        if multiple is None:
            return trained_vocabulary_rows(self.shape.vocab_size, tp_size)
        return math.ceil(self.shape.vocab_size / (multiple * tp_size)) * multiple

    def layer_kinds(self, stage: int) -> list[list[LayerKind]]:
        """Return the kind of each layer of a stage's chunks. Trained MTP layers follow the last
        layer, and are of its kind."""
        of_layer = self.shape.layer_kinds
        kinds = [[of_layer[layer] for layer in chunk] for chunk in self.layers[stage]]
        if stage == len(self.layers) - 1:
            kinds[-1] += [of_layer[-1]] * self.training.mtp_layers
        return kinds

    def of_ranks(self, of_stages: Sequence[int]) -> Bytes:
        """Return `[train.world_size]`: values per rank, from the values per stage."""
        return np.repeat(np.array(of_stages, dtype=np.int64), self.train.ranks_per_stage)

    def part_name(self, part: str) -> str:
        """Return the name of a part of its state: "weights" of the actor, "critic weights"."""
        return part if self.name == ACTOR else f"{self.name} {part}"

    def describe(self) -> str:
        """Return "TP8 x CP1 x DP4 x PP2, experts ...; layers of the stages: 4+4 4+4"."""
        counts = [[len(chunk) for chunk in stage] for stage in self.layers]
        shown = " ".join("+".join(map(str, chunks)) for chunks in counts)
        return f"{self.train.describe()}; layers of the stages: {shown}"


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of each rank of a pipeline stage, the same number on all its ranks."""

    dense: int  # the frozen ones included
    experts: int
    # Without gradient and optimizer state: indexers of sparse attention; with LoRA, the base.
    frozen: int = 0  # of `dense`
    frozen_experts: int = 0

    @property
    def total(self) -> int:
        return self.dense + self.experts

    @property
    def trained(self) -> int:
        return self.total - self.frozen - self.frozen_experts


@functools.lru_cache(maxsize=16)  # a search asks often for one layout, with several of engines
def stage_parameters(model: TrainedModel) -> tuple[StageParameters, ...]:
    """Return the parameters of every stage. The router's bias is not a parameter. Trained MTP
    layers are on the last stage, with a copy of the embedding."""
    shape, mtp_layers = model.shape, model.training.mtp_layers
    last = len(model.layers) - 1
    head = head_specs(shape)
    if last and (shape.tied_embeddings or mtp_layers):
        head += embedding_specs(shape)  # Megatron keeps a copy of it on the last stage
    kinds = shape.layer_kinds
    of_kind = {kind: _count(model, layer_specs(shape, kind)) for kind in set(kinds)}
    per_stage = []
    for stage, chunks in enumerate(model.layers):
        parts = [of_kind[kinds[n]] for chunk in chunks for n in chunk]
        if stage == 0:
            parts.append(_count(model, embedding_specs(shape)))
        if stage == last:
            parts.append(_count(model, head))
            parts += [_count(model, _trained_mtp_specs(shape))] * mtp_layers
        per_stage.append(
            StageParameters(
                dense=sum(p.dense for p in parts),
                experts=sum(p.experts for p in parts),
                frozen=sum(p.frozen for p in parts),
                frozen_experts=sum(p.frozen_experts for p in parts),
            )
        )
    return tuple(per_stage)


def _trained_mtp_specs(shape: ModelShape) -> list[TensorSpec]:
    """Return the tensors of an MTP layer; Megatron shards eh_proj, and vLLM does not."""
    return [
        replace(spec, cut=Cut.ROWS) if spec.name == "eh_proj.weight" else spec
        for spec in mtp_layer_specs(shape)
    ]


def _count(model: TrainedModel, specs: Iterable[TensorSpec]) -> StageParameters:
    train, rank = model.train, model.training.lora_rank
    dense = experts = frozen = adapters = expert_adapters = 0
    for spec in specs:
        if spec.dtype == "float32":
            continue  # the router's bias
        size = math.prod(spec.shape)
        if spec.num_experts:
            experts += size * spec.num_experts // (train.ep_size * train.etp_size)
        elif spec.cut is Cut.VOCABULARY:
            dense += model.vocabulary_rows * spec.shape[1]
        else:
            dense += size // (1 if spec.cut is Cut.REPLICATED else train.tp_size)
        if spec.is_indexer and not model.training.trains_indexers:
            frozen += size
        if rank and is_adapted(model.shape, spec, model.training.lora_targets):
            if spec.num_experts:
                count = spec.num_experts // train.ep_size
                expert_adapters += count * _adapter_size(spec, rank, train.etp_size)
            else:
                adapters += _adapter_size(spec, rank, train.tp_size)
    if rank:
        return StageParameters(dense + adapters, experts + expert_adapters, dense, experts)
    return StageParameters(dense, experts, frozen)


def _adapter_size(spec: TensorSpec, rank: int, tp_size: int) -> int:
    """Return the elements of one adapter on a rank, of which `tp_size` divide the weight: its part
    of the factor that follows the cut of the weight, and all of the other one."""
    rows, columns = spec.shape
    if spec.cut is Cut.COLUMNS:
        columns //= tp_size
    elif spec.cut is not Cut.REPLICATED:
        rows //= tp_size
    return rank * (rows + columns)


def optimizer_parameters(model: TrainedModel) -> list[int]:
    """Return for how many parameters a rank of each stage keeps state: its shard of a distributed
    optimizer. Dense parameters are sharded over DP and CP, experts over expert data parallelism.
    """
    train, copies = model.train, model.training.optimizer_instances
    if not model.training.distributed_optimizer:
        return [parameters.trained for parameters in stage_parameters(model)]
    return [
        math.ceil((parameters.dense - parameters.frozen) * copies / (train.dp_size * train.cp_size))
        + math.ceil((parameters.experts - parameters.frozen_experts) * copies / train.edp_size)
        for parameters in stage_parameters(model)
    ]


def optimizer_bytes(model: TrainedModel, *, with_moments: bool = True) -> list[int]:
    """Return the optimizer's bytes on a rank of each stage, on device and host together."""
    training = model.training
    per_parameter = training.optimizer_bytes - (0 if with_moments else training.moment_bytes)
    return [count * per_parameter for count in optimizer_parameters(model)]


def stage_state(model: TrainedModel, *, with_moments: bool = True) -> list[dict[str, int]]:
    """Return what a rank of each stage holds on the device between two passes. An optimizer that
    was not loaded has no moments before the first update."""
    training = model.training
    optimizer = optimizer_bytes(model, with_moments=with_moments)
    return [
        {
            "weights": parameters.total * training.weight_bytes,
            "gradients": parameters.trained * training.gradient_bytes,
            "optimizer": math.ceil(state * (1 - training.optimizer_host_share)),
        }
        for parameters, state in zip(stage_parameters(model), optimizer, strict=True)
    ]


def teacher_head_bytes(model: TrainedModel) -> list[int]:
    """Return the bytes of a teacher's output layer on a rank of each stage of the actor."""
    sizes = [0] * len(model.layers)
    sizes[-1] = model.training.weight_bytes * model.vocabulary_rows * model.training.teacher_hidden
    return sizes


def largest_tensor(model: TrainedModel) -> int:
    """Return an upper bound on the elements of a rank's largest trained weight. Gate and up of an
    MLP are one weight, and so are Q, K and V of attention."""
    shape, tp_size, rank = model.shape, model.train.tp_size, model.training.lora_rank
    if rank:
        targets = model.training.lora_targets
        adapted = (adapted_specs(shape, kind, targets) for kind in set(shape.layer_kinds))
        return rank * max(max(spec.shape) for spec in chain.from_iterable(adapted))
    sizes = [model.vocabulary_rows * shape.hidden_size]
    for kind in set(shape.layer_kinds):
        for spec in layer_specs(shape, kind):
            ranks = model.train.etp_size if spec.num_experts else tp_size
            fused = 1 if spec.cut is Cut.COLUMNS or shape.latent else 3
            if "gate_proj" in spec.name or "up_proj" in spec.name:
                fused = 2
            if spec.cut is Cut.REPLICATED:
                ranks = fused = 1
            sizes.append(fused * math.prod(spec.shape) // ranks)
    return max(sizes)


def merged_bytes(model: TrainedModel, *, with_gradients: bool) -> int:
    """Return the bytes of weights that LoRA merges at the peak of a pass; 0 without LoRA.

    They are the weights of one layer, with their gradients in a backward pass, and the product of
    one. Upper bound: gate and up-projection are one layer, as are a rank's experts, and all
    projections of attention count as if they were.
    """
    training, train, most = model.training, model.train, 0
    if not training.lora_rank:
        return 0
    copies = 2 if with_gradients else 1
    for kind in set(model.shape.layer_kinds):
        for spec in adapted_specs(model.shape, kind, training.lora_targets):
            ranks = train.etp_size if spec.num_experts else train.tp_size
            weight = math.prod(spec.shape) // (1 if spec.cut is Cut.REPLICATED else ranks)
            weight *= 1 if spec.cut is Cut.COLUMNS or spec.cut is Cut.REPLICATED else 2
            together = weight * max(1, spec.num_experts // train.ep_size)
            most = max(most, together * copies * training.weight_bytes + weight * _PRODUCT_BYTES)
    return most


def sum_over_layers(shape: ModelShape, size: Callable[[Sequence[TensorSpec]], int]) -> int:
    """Return the sum of `size` over the tensors of all decoder layers."""
    return sum(
        size(layer_specs(shape, kind)) * count for kind, count in Counter(shape.layer_kinds).items()
    )
