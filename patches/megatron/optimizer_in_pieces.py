"""The distributed optimizer is saved and loaded in pieces, without gathering it.

Symptom: saving with `--dist-ckpt-optim-fully-reshardable` needs several times the memory of the
full optimizer on every data-parallel rank: a run with 0.6 billion parameters is killed in 24 GiB.
Loading also allocates the full optimizer on every rank. With several padded gradient buckets
Megatron also reads the states of some parameters from the wrong places, silently.

Cause: `sharded_param_state_fully_reshardable` gathers the state of all ranks on each rank, because
a checkpoint names states by parameter, and a rank's share begins and ends inside a parameter.

Why safe: names, global shapes and content of the checkpoint do not change. Only its chunks do: a
rank's share of a parameter is a few boxes, which PyTorch's format stores and reads like any others;
Megatron leaves their check to PyTorch (`axis_fragmentations=None`). Older checkpoints load here,
and checkpoints written here load in an unpatched Megatron, in any layout. Loading writes into the
optimizer's own tensors.

Upstream: `fully_sharded_model_space` did the same with flattened ranges, which were removed.

Drop when: the fully reshardable format needs no more memory than a rank's share.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mcore_rl.model.boxes import (
    Box,
    boxes_of_flat_range,
    extent,
    full_box,
    intersect,
    relative,
    volume,
)
from mcore_rl.patches.registry import Patch, require_parameters

# Elements of one piece, which a writer or reader copies at once: 64 MiB in float32.
LARGEST_PIECE = 1 << 24


def needed() -> bool:
    """Return whether this Megatron has the format."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return hasattr(DistributedOptimizer, "sharded_param_state_fully_reshardable")


def apply() -> None:
    """Replace saving and loading of the format."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    require_parameters(
        Optimizer.sharded_param_state_fully_reshardable,
        "self model_sharded_state_dict is_loading metadata",
    )
    require_parameters(Optimizer.load_parameter_state_from_fully_reshardable, "self state_dict")
    require_parameters(Optimizer._get_main_param_and_optimizer_states, "self model_param")
    require_parameters(Optimizer._set_main_param_and_optimizer_states, "self model_param tensors")
    Optimizer.sharded_param_state_fully_reshardable = _state_in_pieces
    Optimizer.load_parameter_state_from_fully_reshardable = _load_state


@dataclass(frozen=True, slots=True)
class _Part:
    """A ShardedTensor with all or a part of this rank's parameter, and its box there."""

    sharded: Any  # without data
    box: Box


@dataclass(frozen=True, slots=True)
class _Share:
    """A range of elements of this rank's parameter, in row-major order."""

    shape: tuple[int, ...]
    parts: list[_Part]
    start: int
    stop: int


def _state_in_pieces(
    self: Any,
    model_sharded_state_dict: Any,
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> dict[int, dict[str, Any]]:
    """Return the states, by name, of each parameter in this rank's share. Not collective."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

    tensors, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    saved_as = {sharded.data: sharded for sharded in nested_values(tensors)}
    states: dict[int, dict[str, Any]] = {}
    for number, (parameter, start, stop) in enumerate(_shares(self)):
        sharded = saved_as[parameter]
        # (PP, TP, DP): each data-parallel rank saves its own share.
        replica = (*sharded.replica_id[:2], self.distributed_optimizer_instance_id)
        share = _Share(tuple(parameter.shape), _parts(sharded), start, stop)
        states[number] = {
            name: _factory(f"optimizer.state.{name}", sharded.key, state, share, replica)
            for name, state in _flat_states(self, parameter, stop - start, is_loading)
        }
    return states


def _load_state(self: Any, state_dict: dict[int, dict[str, torch.Tensor]]) -> None:
    """Set the states that `_state_in_pieces` requested; usually they are already in place."""
    with torch.no_grad():
        for number, (parameter, _, _) in enumerate(_shares(self)):
            self._set_main_param_and_optimizer_states(
                parameter, {"step": None, **state_dict[number]}
            )
    sync = getattr(self.optimizer, "_sync_hdo_state_to_sub_optimizers", None)
    if sync is not None:  # with --optimizer-cpu-offload
        sync()


def _shares(optimizer: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield each parameter in this rank's share, with start and end of its elements."""
    for ranges_by_dtype in optimizer.gbuf_ranges:
        for buckets in ranges_by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _flat_states(
    optimizer: Any, parameter: Any, size: int, is_loading: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the states of a share by name, `[size]` each: "param", "exp_avg", "exp_avg_sq", ..."""
    # The precision-aware optimizer returns new float32 copies.
    are_copies = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    states = optimizer._get_main_param_and_optimizer_states(parameter)
    for name, state in states.items():
        if state.numel() != size or name == "step":  # parameter groups have the step
            continue
        flat = state.detach().view(-1)
        yield name, flat.cpu() if are_copies and not is_loading else flat


def _factory(
    prefix: str, key: str, state: torch.Tensor, share: _Share, replica: tuple[int, ...]
) -> Any:
    """Return a factory that splits a state `[stop - start]` into pieces, and joins them on load."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def build(_key: str, data: torch.Tensor, replica_id: Any, _flattened: Any) -> list[Any]:
        return list(_pieces(prefix, data, share, replica_id))

    def merge(read: list[torch.Tensor]) -> torch.Tensor:
        for piece, source in zip(_pieces(prefix, state, share, replica), read, strict=True):
            if piece.data.data_ptr() != source.data_ptr():
                piece.data.copy_(source.view(piece.data.shape))
        return state

    return ShardedTensorFactory(f"{prefix}.{key}", state, build, merge, replica)


def _pieces(prefix: str, state: torch.Tensor, share: _Share, replica: Any) -> Iterator[Any]:
    """Yield ShardedTensors that together are `state`, in order; each is a view of it."""
    at = 0
    for begin in range(share.start, share.stop, LARGEST_PIECE):
        end = min(share.stop, begin + LARGEST_PIECE)
        for box in boxes_of_flat_range(share.shape, begin, end):
            values = state[at : at + volume(box)].view(extent(box))
            at += volume(box)
            for part in share.parts:
                shared = intersect(box, part.box)
                if shared is not None:
                    inside = tuple(slice(*ends) for ends in relative(shared, box))
                    yield _piece(prefix, values[inside], part, shared, replica)


def _piece(prefix: str, values: torch.Tensor, part: _Part, box: Box, replica: Any) -> Any:
    whole = part.sharded
    ahead = whole.prepend_axis_num  # axes that the parameter lacks, such as the layer axis
    corner = (start for start, _ in relative(box, part.box))
    offsets = zip(whole.global_offset[ahead:], corner, strict=True)
    data = values.reshape((1,) * ahead + tuple(values.shape))
    return replace(
        whole,
        key=f"{prefix}.{whole.key}",
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_offset=(*whole.global_offset[:ahead], *(a + b for a, b in offsets)),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=replica,
    )


def _parts(sharded: Any) -> list[_Part]:
    """Return a parameter's saved parts: itself, or slices such as gate and up of a fused MLP."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shape = tuple(sharded.data.shape)
    if isinstance(sharded, ShardedTensor):
        return [_Part(sharded.without_data(), full_box(shape))]
    # Slices of a tensor without data show their locations.
    stand_in = torch.empty(shape, device="meta", dtype=sharded.data.dtype)
    built = sharded.build_fn(sharded.key, stand_in, sharded.replica_id, None)
    parts = [
        _Part(part.without_data(), _box_in(stand_in, part.data)) for part in nested_values([built])
    ]
    if sum(volume(part.box) for part in parts) != stand_in.numel():
        raise RuntimeError(
            f"Megatron saves {sharded.key} as something else than slices of it: its optimizer "
            "states cannot be saved in pieces"
        )
    return parts


def _box_in(whole: torch.Tensor, part: torch.Tensor) -> Box:
    """Return the box of a view; an empty one if it is not a slice of `whole`."""
    is_slice = part._base is whole and part.stride() == whole.stride()
    if not is_slice:
        return tuple((0, 0) for _ in whole.shape)
    box, rest = [], int(part.storage_offset())
    for size, stride in zip(part.shape, whole.stride(), strict=True):
        first, rest = divmod(rest, stride)
        box.append((first, first + size))
    return tuple(box)


PATCH = Patch(
    "megatron.optimizer_in_pieces",
    "saving and loading the distributed optimizer needs no more than a rank's share of it",
    apply,
    needed,
)
