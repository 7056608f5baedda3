"""Other layouts of a job: all of them for `search`, those next to the current one for `advice`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from mcore_rl.common.errors import UsageError
from mcore_rl.hybrid_engine.plan.placement import Placement
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import PipelineLayers, RolloutLayout, TrainLayout, pipeline_layers
from mcore_rl.planner.models import Bytes, TrainedModel
from mcore_rl.planner.phases import Case
from mcore_rl.planner.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of every stage, and their flags in addition to --pipeline-model-parallel-size."""

    layers: PipelineLayers
    flags: str  # with a space before each


def stages_for(num_layers: int, pp_size: int) -> Stages | None:
    """Return the most even stages that Megatron can build: equal, or the last one has fewer layers.

    If the last stage would be empty, the first one gets fewer layers, too. None if neither works.
    """
    if pp_size > num_layers:
        return None
    if num_layers % pp_size == 0:
        return Stages(pipeline_layers(num_layers, pp_size), "")
    middle = math.ceil(num_layers / pp_size)
    last = num_layers - middle * (pp_size - 1)
    if last >= 1:
        layers = pipeline_layers(num_layers, pp_size, last=last)
        return Stages(layers, f" --decoder-last-pipeline-num-layers {last}")
    ends = num_layers - middle * (pp_size - 2)
    if pp_size == 2 or ends < 2:
        return None
    first, last = ends - ends // 2, ends // 2
    return Stages(
        pipeline_layers(num_layers, pp_size, first=first, last=last),
        f" --decoder-first-pipeline-num-layers {first} --decoder-last-pipeline-num-layers {last}",
    )


# --------------------------------------------------------------------------------- enumeration


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def train_layouts(
    shape: ModelShape,
    world_size: int,
    *,
    tp_sizes: Iterable[int],
    pp_sizes: Iterable[int],
    ep_sizes: Iterable[int],
    etp_size: int | None = None,
    cp_size: int = 1,
) -> Iterator[tuple[TrainLayout, Stages]]:
    """Yield the training layouts of these degrees that divide the model and the world, with their
    stages. Without `etp_size` experts have ETP 1 and ETP = TP."""
    experts = shape.experts
    for tp, pp in product(tp_sizes, pp_sizes):
        stages = stages_for(shape.num_layers, pp)
        if stages is None or not tp_divides(shape, tp):
            continue
        if shape.indexer is not None and shape.indexer.separated(stages.layers) is not None:
            continue
        etp_sizes = [etp_size] if etp_size else sorted({1, tp}) if experts else [tp]
        for ep, etp in product(ep_sizes, etp_sizes):
            if experts and (experts.num_experts % ep or experts.hidden_size % etp):
                continue
            try:
                yield TrainLayout(world_size, tp, pp, cp_size, ep, etp), stages
            except UsageError:
                continue


def rollout_layouts(case: Case) -> Iterator[RolloutLayout]:
    """Yield every layout of engines: without EP, or with experts sharded over TP' x DP'."""
    shape, world, engine = case.shape, case.rollout.world_size, case.engine
    experts = shape.experts
    ep_sizes = divisors(experts.num_experts) if experts and engine.may_spread_experts else []
    for tp in divisors(case.machine.ranks_per_node):
        if world % tp or not tp_divides(shape, tp, copies_kv_heads=True):
            continue
        if experts is None or experts.hidden_size % tp == 0:
            yield RolloutLayout(world, tp, False, float8=case.rollout.float8)
        for ep in ep_sizes:
            if ep > 1 and ep % tp == 0 and world % ep == 0 and (ep == tp or engine.may_span_ranks):
                yield RolloutLayout(
                    *(world, tp, True, ep // tp),
                    all2all_backend=case.rollout.all2all_backend,
                    float8=case.rollout.float8,
                )


def tp_divides(shape: ModelShape, tp_size: int, *, copies_kv_heads: bool = False) -> bool:
    """Return whether TP divides heads and widths. Engines may copy key/value heads."""
    sizes = [shape.num_heads]
    if not copies_kv_heads or shape.num_kv_heads >= tp_size:
        sizes.append(shape.num_kv_heads)
    elif tp_size % shape.num_kv_heads:
        return False
    if shape.mamba:
        sizes.append(shape.mamba.num_groups)
    if any(kind.has_dense for kind in shape.layer_kinds):
        sizes.append(shape.ffn_hidden_size)
    if shape.experts and shape.experts.shared_hidden_size:
        sizes.append(shape.experts.shared_hidden_size)
    return all(size % tp_size == 0 for size in sizes)


# --------------------------------------------------------------------- a case in another layout


def with_engines_apart(case: Case, num_engine_ranks: int) -> Case:
    """Return a colocated case with engines on the last ranks, which leave the memory of training
    alone. Raises UsageError if the other ranks cannot train, or the last ones are not complete
    engines."""
    world_size = case.train.world_size
    num_trainers = world_size - num_engine_ranks
    rollout = replace(case.rollout, world_size=num_engine_ranks, rank_map=())
    train = replace(case.train, world_size=num_trainers)
    other = with_train_layout(case, train, case.layers)
    # Packed micro-batches are as many as it takes, of an equal number of samples on each rank.
    count = case.training.num_micro_batches * case.train.dp_size
    what = "micro-batches of a mini-batch"
    if case.training.packed_tokens:
        count = case.engine.sampled_tokens_in_all // case.engine.max_model_tokens
        what = "samples of a step"
    if other is None or count % train.dp_size:
        raise UsageError(
            ": the critic or a teacher cannot take the layout of the other ranks"
            if count % train.dp_size == 0
            else f": the {count} {what} do not divide among {train.dp_size} data-parallel ranks",
            flag=f"--rl-rollout-ranks {num_trainers}-{world_size - 1}",
            remedy="give engines another number of ranks",
        )
    samples = math.ceil(case.engine.sampled_tokens_in_all / rollout.num_tp_groups)
    engine = replace(
        case.engine,
        offloaded=frozenset(),
        away_at_start=frozenset(),
        offloads_graphs=False,
        sampled_tokens=samples,
    )
    ranks = tuple(range(num_trainers, world_size))
    return replace(other, rollout=rollout, engine=engine, engine_ranks=ranks)


def with_training(case: Case, change: Callable[[TrainSettings], TrainSettings]) -> Case:
    """Return the case with other settings of training, which all its models share."""
    critic = case.critic
    return replace(
        case,
        training=change(case.training),
        critic=None if critic is None else replace(critic, training=change(critic.training)),
        teachers=tuple(
            replace(each, training=change(each.training).without_state()) for each in case.teachers
        ),
    )


def with_train_layout(case: Case, train: TrainLayout, layers: PipelineLayers) -> Case | None:
    """Return the case, with its critic and teachers, in another training layout; None if samples do
    not divide or another model cannot follow."""
    actor = in_layout(case.actor, train, layers)
    critic = None if case.critic is None else following(case.critic, train, layers)
    followers = [following(model, train, layers) for model in case.teachers]
    teachers = tuple(model for model in followers if model is not None)
    follows = (critic is None) == (case.critic is None) and len(teachers) == len(followers)
    if actor is None or not follows:
        return None
    other = replace(case, train=train, layers=layers, training=actor.training)
    return replace(other, critic=critic, teachers=teachers)


def following(
    model: TrainedModel, train: TrainLayout, layers: PipelineLayers
) -> TrainedModel | None:
    """Return a critic or a teacher for an actor with layout `train`: it follows in all degrees that
    its own flags do not fix. None if that is impossible, or would need flags for its stages.
    """
    old, own = model.train, model.own_degrees
    tp_size = (old if "tp_size" in own else train).tp_size
    try:
        new = TrainLayout(
            old.world_size if model.ranks else train.world_size,
            tp_size=tp_size,
            pp_size=(old if "pp_size" in own else train).pp_size,
            cp_size=train.cp_size,
            ep_size=(old if "ep_size" in own else train).ep_size,
            etp_size=train.etp_size if model.shape.experts else tp_size,
        )
    except UsageError:
        return None
    depth = sum(len(chunk) for stage in layers for chunk in stage)
    alike = new.pp_size == train.pp_size and depth == model.shape.num_layers
    return in_layout(model, new, layers if alike else None)


def in_layout(
    model: TrainedModel, train: TrainLayout, layers: PipelineLayers | None = None
) -> TrainedModel | None:
    """Return `model` in another layout, with the same samples in a mini-batch.

    Its stages are `layers`, or its current ones if PP is the same, or even ones. None if layers or
    samples do not divide.
    """
    old, settings = model.train, model.training
    if layers is None and train.pp_size == old.pp_size:
        layers = model.layers
    if layers is None:
        stages = stages_for(model.shape.num_layers, train.pp_size)
        if stages is None or stages.flags:
            return None
        layers = stages.layers
    share, rest = divmod(settings.num_micro_batches * old.dp_size, train.dp_size)
    if not settings.packed_tokens and (rest or not share):
        return None
    training = replace(
        settings,
        num_micro_batches=share + bool(rest),
        num_demonstration_micro_batches=math.ceil(
            settings.num_demonstration_micro_batches * old.dp_size / train.dp_size
        ),
        sequence_parallel=(
            settings.sequence_parallel if train.tp_size == old.tp_size else train.tp_size > 1
        ),
    )
    return replace(model, train=train, layers=layers, training=training)


def most_resident_bytes(case: Case, rollout: RolloutLayout) -> Bytes:
    """Return `[ranks of engines]`: the bytes that the fullest slot of `rollout` holds, for every
    rank."""
    most = Placement(case.shape, case.train, case.layers, rollout).most_resident_bytes
    return np.full(rollout.world_size, most, dtype=np.int64)
