"""Shares of an optimizer's states are saved under the parameter's name, each element once.

That a real optimizer is saved and loaded so, in the same layout and in others, is shown by
tests/dist/test_optimizer_saving.py and test_other_layout.py.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from mcore_rl.megatron import adapter as megatron_adapter

megatron_adapter.prepare()

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, apply_factories  # noqa: E402
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # noqa: E402

SHAPE = (6, 4, 3)
LAYER, NUM_LAYERS = 1, 3


def columns_apart(sharded: ShardedTensor) -> ShardedTensorFactory:
    """Saves two halves of the second axis under names of their own."""

    def build(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{n}", half, replica_id=replica_id)
            for n, half in enumerate(data.chunk(2, dim=1))
        ]

    return ShardedTensorFactory("w", sharded.data, build, torch.cat, sharded.replica_id)


def doubled(sharded: ShardedTensor) -> ShardedTensorFactory:
    """Saves something else than the parameter."""

    def build(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, data * 2, replica_id=replica_id)

    return ShardedTensorFactory("w", sharded.data, build, torch.clone, sharded.replica_id)


def as_saved(kind: str, parameter: torch.Tensor) -> ShardedTensor | ShardedTensorFactory:
    """The parameter as models say that it is saved: second of two TP ranks where it is split."""
    plain = {"replica_id": (0, 0, 0)}
    if kind in ("columns apart", "doubled"):
        factory = columns_apart if kind == "columns apart" else doubled
        return factory(ShardedTensor.from_rank_offsets("w", parameter, **plain))
    layer = (0, LAYER, NUM_LAYERS)
    split = (1, 1, 2)
    sharded = ShardedTensor.from_rank_offsets(
        "w", parameter, layer, split, prepend_axis_num=1, **plain
    )
    return apply_swiglu_sharded_factory(sharded, (layer,)) if kind == "gate and up" else sharded


def pieces(kind: str, states: torch.Tensor, start: int, stop: int) -> list[ShardedTensor]:
    """What a rank saves that has elements start to stop of the parameter."""
    parameter = torch.empty(SHAPE)
    ranges = {"param": types.SimpleNamespace(start=start, end=stop)}
    optimizer = types.SimpleNamespace(
        gbuf_ranges=[{torch.bfloat16: [{"param_map": {parameter: ranges}}]}],
        config=types.SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False),
        distributed_optimizer_instance_id=0,
        _get_main_param_and_optimizer_states=lambda _: {
            "param": states.flatten()[start:stop].clone(),
            "step": torch.tensor(3.0),
        },
    )
    found = DistributedOptimizer.sharded_param_state_fully_reshardable(
        optimizer, {"w": as_saved(kind, parameter)}, False, {}
    )
    apply_factories(found)
    return list(nested_values(found))


def whole(kind: str, states: torch.Tensor) -> dict[str, torch.Tensor]:
    """What lies where, by a state of the whole parameter."""
    saved = {"w": as_saved(kind, states)}
    apply_factories(saved)
    found: dict[str, torch.Tensor] = {}
    for part in nested_values(saved):
        tensor = found.setdefault(part.key, torch.full(part.global_shape, torch.nan))
        tensor[part.global_slice()] = part.data
    return found


@pytest.mark.parametrize("kind", ["plain", "gate and up", "columns apart"])
@pytest.mark.parametrize("cuts", [(0, 72), (0, 1, 37, 72), (0, 24, 30, 31, 60, 72)])
def test_pieces_of_all_shares_cover_parameter_once(kind: str, cuts: tuple[int, ...]) -> None:
    states = torch.arange(72.0).view(SHAPE)
    expected = whole(kind, states)
    found = {key: torch.full_like(tensor, torch.nan) for key, tensor in expected.items()}
    written = 0
    for start, stop in zip(cuts, cuts[1:], strict=False):
        for piece in pieces(kind, states, start, stop):
            key = piece.key.removeprefix("optimizer.state.param.")
            assert piece.global_shape == expected[key].shape and not piece.has_regular_grid
            place = tuple(
                slice(first, first + size)
                for first, size in zip(piece.global_offset, piece.local_shape, strict=True)
            )
            found[key][place] = piece.data
            written += piece.data.numel()
    assert written == states.numel()
    for key, tensor in expected.items():
        assert torch.equal(found[key].nan_to_num(-1), tensor.nan_to_num(-1)), key


def test_parameter_not_saved_as_slices_is_refused() -> None:
    with pytest.raises(RuntimeError, match="saves w as something else"):
        pieces("doubled", torch.zeros(SHAPE), 0, 72)
