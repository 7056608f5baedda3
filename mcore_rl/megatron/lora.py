"""Adapters in Megatron's model: attached to the linear layers of this rank, merged where used.

An adapted layer computes with the merged weight W + (alpha / r) B A, which exists only during its
forward and again during its backward: autograd saves the factors, not the product. All kinds of
layers are served alike (fused query, key and value; Transformer Engine's grouped experts; with or
without sequence parallelism), since `weight_map` knows the rows of the Hugging Face weights in each
of Megatron's. The hand-over reads the same merged weight, so that the engine samples with exactly
the weights that are trained.

With X the input and dY the gradient of the output of a layer, dA = (alpha / r) (dY B)^T X and
dB = (alpha / r) dY^T (X A^T). Megatron's own linear layers give both, so that the gradient of W is
not computed. Elsewhere (layers of Transformer Engine, and those that gather their input over
sequence parallelism) it is, for one layer at a time, and the chain rule reduces it to dA and dB.

A tensor-parallel rank has the rows of B or the columns of A that belong to its part of W, and all
of the other factor, whose gradient is summed over the tensor-parallel group. An expert's adapter is
reduced over the ranks that have this expert.

Shape legend: o output rows of a weight, i input columns, r rank; those of this rank; t tokens.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.dither import dithered
from mcore_rl.model.boxes import Box, contains, relative, show, slices
from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.layout import TrainLayout
from mcore_rl.model.lora import Lora, bound_of, factor_names, is_expert, seed_of
from mcore_rl.model.weight_map import ShardCoordinates, map_parameter
from mcore_rl.model.weight_rules import Piece
from mcore_rl.patches.megatron.local_layers import DuplicatedLinear

# After the patches, which mcore_rl.megatron.adapter applies.
from megatron.core import parallel_state  # isort: skip
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # isort: skip
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip

_MARK = "lora_adapters"  # a layer's attribute with its adapters
_MERGED_AT_ONCE = 1 << 19  # elements, on a CPU


@dataclass(frozen=True, slots=True)
class Factor:
    """A rank's part of A or B.

    Example: `Factor("base_model.model.layers.0.mlp.up_proj.lora_A.weight", ((0, 8), (0, 64)),
    data, scale=1.0)`.
    """

    name: str  # in an adapter's file
    box: Box
    data: torch.Tensor  # the parameter's own memory, without gradient
    scale: float  # with which it enters the merged weight: alpha / r of B, 1 of A


class Adapter(torch.nn.Module):
    """The part of a Hugging Face layer's adapter on this rank: `a` `[r, i]` and `b` `[o, r]`.

    `rows` and `columns` are their ranges in the full weight; `at` are the rows of Megatron's weight
    that `rows` are: a slice, or `[o]` int64. If it `dithers`, merged weights are `dithered`.
    """

    def __init__(
        self,
        layer: str,
        lora: Lora,
        pieces: Sequence[Piece],
        weight: torch.nn.Parameter,
        *,
        dithers: bool,
    ) -> None:
        super().__init__()
        self.dithers = dithers
        self.layer, self.scale, self.full = layer, lora.scale, lora.modules[layer]
        pieces = sorted(pieces, key=lambda piece: piece.checkpoint_box)
        (first, _), self.columns = pieces[0].checkpoint_box
        self.rows = (first, pieces[-1].checkpoint_box[0][1])
        at = torch.cat([torch.arange(*piece.local_box[0]) for piece in pieces])
        assert len(at) == self.rows[1] - first, f"{layer}: its rows on a rank are not consecutive"
        in_order = bool((at.diff() == 1).all())
        self.at = slice(int(at[0]), int(at[-1]) + 1) if in_order else at.to(weight.device)
        num_columns = self.columns[1] - self.columns[0]
        new = functools.partial(torch.empty, dtype=weight.dtype, device=weight.device)
        self.a = torch.nn.Parameter(new(lora.rank, num_columns))
        self.b = torch.nn.Parameter(new(len(at), lora.rank))
        split_b, split_a = len(at) < self.full[0], num_columns < self.full[1]
        self.is_expert = is_expert(layer)
        group: Any = (  # untyped in some versions
            parallel_state.get_expert_tensor_parallel_group()
            if self.is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        size = group.size()
        elements = len(at) * num_columns * (size if split_a or split_b else 1)
        assert elements == math.prod(self.full), f"{layer}: ranks have parts of different sizes"
        # Every rank has the full weight, and a gradient from its part of the sequence.
        is_partial = bool(getattr(weight, "sequence_parallel", False))
        # Where gradients are summed over the group: of a full factor beside a split one.
        self.sums_a = group if size > 1 and (split_b or is_partial) else None
        self.sums_b = group if size > 1 and (split_a or is_partial) else None
        for factor, is_split in ((self.a, split_a), (self.b, split_b)):
            # The ranks over which data parallelism reduces it.
            factor.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            # Megatron counts the norm of other factors on the first rank of a group only.
            factor.tensor_model_parallel = is_split or size == 1  # type: ignore[attr-defined]

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Set the factors to their values at the start of a training."""
        generator = torch.Generator().manual_seed(seed_of(self.layer, seed))
        bound = bound_of(self.full[1])
        whole = torch.empty(len(self.a), self.full[1]).uniform_(-bound, bound, generator=generator)
        self.a.copy_(whole[:, slice(*self.columns)])
        self.b.zero_()

    def factors(self) -> tuple[Factor, Factor]:
        """Return A and B."""
        a, b = factor_names(self.layer)
        rank = (0, len(self.a))
        return (
            Factor(a, (rank, self.columns), self.a.detach(), scale=1.0),
            Factor(b, (self.rows, rank), self.b.detach(), scale=self.scale),
        )

    def gradients(
        self, of_a: torch.Tensor, of_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of A and B from those of this rank, float32 and without the scale,
        which are overwritten. Collective over the group in which they are partial sums."""
        for gradient, group in ((of_a, self.sums_a), (of_b, self.sums_b)):
            gradient.mul_(self.scale)
            if group is not None:
                dist.all_reduce(gradient, group=group)
        return of_a.to(self.a.dtype), of_b.to(self.b.dtype)

    @torch.no_grad()
    def added_to(self, values: torch.Tensor, box: Box, rows: Any) -> torch.Tensor:
        """Return `values`, which are `rows` (an index) of `box` of the weight, with the adapter."""
        (first, last), (left, right) = box
        b = self.b[first - self.rows[0] : last - self.rows[0]][rows]
        a = self.a[:, left - self.columns[0] : right - self.columns[0]]
        numbers = torch.arange(first, last, device=b.device)[rows]
        return self._plus_product(values, b, a, numbers, (left, right))

    def merged(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, which are the adapter's part of the weight, with the adapter."""
        numbers = torch.arange(*self.rows, device=self.b.device)
        return self._plus_product(values, self.b, self.a, numbers, self.columns)

    def _plus_product(
        self,
        values: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        rows: torch.Tensor,
        columns: tuple[int, int],
    ) -> torch.Tensor:
        places = (rows, torch.arange(*columns, device=b.device)) if self.dithers else None
        return plus_product(values, b, a, self.scale, places)


def plus_product(
    values: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    scale: float,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return values + scale * b @ a in the dtype of `values`.

    The product is computed in float64, so that a slice of it is the same whatever else is computed
    with it, and added in float32 or, to float32 values, in float64. Where it is zero the values
    keep their bits, those of a negative zero too. With `places` 16-bit values are `dithered`: a
    product that is small beside their rounding arrives in the mean.
    """
    negative, a = b.double() * -scale, a.double()
    wide = torch.float32 if values.itemsize < 4 else torch.float64
    merged = torch.empty_like(values)
    # In parts that a CPU's caches hold.
    step = len(values) if values.is_cuda else max(1, _MERGED_AT_ONCE // max(1, a.shape[1]))
    for start in range(0, len(values), max(1, step)):
        part = slice(start, start + step)
        if places is None or values.itemsize > 2:
            copies = values[part].to(wide)
        else:
            copies = dithered(values[part], values.dtype, (places[0][part], places[1]))
        merged[part] = copies - (negative[part] @ a).to(wide)  # -0 - 0 is -0
    return merged


class _Merge(torch.autograd.Function):
    """The merged weight; `factors` are a and b of each adapter in turn."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, adapters: Sequence[Adapter], *factors: torch.Tensor
    ) -> torch.Tensor:
        ctx.adapters = adapters
        ctx.save_for_backward(*factors)
        return merged_weight(weight, adapters)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, factors = grads[0], ctx.saved_tensors
        gradients: list[torch.Tensor | None] = []
        for adapter, a, b in zip(ctx.adapters, factors[::2], factors[1::2], strict=True):
            part = grad[adapter.at].float()
            gradients += adapter.gradients(b.float().t() @ part, part @ a.float().t())
        return None, None, *gradients


class _OfProducts(torch.autograd.Function):
    """The output `[..., o]` of a layer unchanged; backward computes the gradients of its adapters,
    from its input `[..., i]`. `factors` are a and b of each adapter in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        output: torch.Tensor,
        layer_input: torch.Tensor,
        adapters: Sequence[Adapter],
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.adapters = adapters
        ctx.save_for_backward(layer_input, *factors)
        ctx.mark_dirty(output)  # not returned as a view, to which Megatron could not add in place
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, (x, *factors) = grads[0], ctx.saved_tensors
        of_output, x = grad.flatten(0, -2), x.flatten(0, -2)
        # All adapters of the layer in one product: A below each other, B side by side, with zeros
        # in the rows of other adapters.
        all_a = torch.cat(factors[::2])
        columns, last = [], 0
        for a in factors[::2]:
            columns.append(slice(last, last := last + len(a)))
        all_b = all_a.new_zeros(of_output.shape[1], last)
        for adapter, b, at in zip(ctx.adapters, factors[1::2], columns, strict=True):
            all_b[adapter.at, at] = b
        of_a, of_b = (of_output @ all_b).t() @ x, of_output.t() @ (x @ all_a.t())
        gradients: list[torch.Tensor | None] = []
        for adapter, at in zip(ctx.adapters, columns, strict=True):
            gradients += adapter.gradients(of_a[at].float(), of_b[adapter.at, at].float())
        return grad, None, None, *gradients


@torch.no_grad()
def merged_weight(weight: torch.Tensor, adapters: Sequence[Adapter]) -> torch.Tensor:
    """Return a new tensor: Megatron's weight of this rank with its adapters."""
    merged = weight.clone()
    for each in adapters:
        merged[each.at] = each.merged(weight[each.at])
    return merged


class Adapters:
    """The adapters of a model chunk; `enabled` is False while the chunk is its own base."""

    def __init__(self, seed: int) -> None:
        self.enabled = True
        self.by_tensor: dict[str, Adapter] = {}  # by the name of the weight
        self._seed = seed

    def reset(self) -> None:
        """Set all factors to their values at the start of a training."""
        for adapter in self.by_tensor.values():
            adapter.reset(self._seed)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, ShardedTensor]:
        """Return the adapters as Megatron saves them, in place of the model's weights.

        They are named and cut as parts of the Hugging Face model's, so that a checkpoint fits every
        layout.
        """
        return {
            f"lora.{adapter.layer}.{name}": _sharded(adapter, name)
            for adapter in self.by_tensor.values()
            for name in ("a", "b")
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy what `sharded_state_dict` describes, as read from a checkpoint."""
        for adapter in self.by_tensor.values():
            for name in ("a", "b"):
                getattr(adapter, name).copy_(state[f"lora.{adapter.layer}.{name}"])


def _sharded(adapter: Adapter, name: str) -> ShardedTensor:
    data = getattr(adapter, name)
    axis, (start, _), whole = {
        "a": (1, adapter.columns, adapter.full[1]),
        "b": (0, adapter.rows, adapter.full[0]),
    }[name]
    size = data.shape[axis]
    if adapter.is_expert:
        tp_rank = parallel_state.get_expert_tensor_parallel_rank()
        dp_rank = parallel_state.get_expert_data_parallel_rank()
    else:
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        dp_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedTensor.from_rank_offsets(
        f"lora.{adapter.layer}.{name}",
        data,
        (axis, start // size, whole // size),
        replica_id=(0, 0 if size < whole else tp_rank, dp_rank),
    )


class FactorShards:
    """This rank's parts of A and (alpha / r) B, with the interface of `ModelShards`.

    The tensors have their names in an adapter's file. `read` returns the parameters' dtype.
    """

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        self._adapters = {name: each for each in adapters for name in factor_names(each.layer)}

    def tensors(self) -> tuple[str, ...]:
        """Return the factors of which this rank holds any part."""
        return tuple(self._adapters)

    def boxes(self, tensor: str) -> tuple[Box, ...]:
        """Return the box of `tensor` on this rank, if it holds a part of it."""
        return tuple(factor.box for factor in self._held(tensor))

    def read(self, tensor: str, box: Box, at: Any = ...) -> torch.Tensor:
        """Return the values of `box`, which must lie in the held one, or those that `at` selects.

        vLLM's LoRA layers multiply by A and B only, so B is scaled here, rounded once.
        """
        for factor in self._held(tensor):
            if contains(factor.box, box):
                data = factor.data[slices(relative(box, factor.box))][at]
                return data if factor.scale == 1.0 else data * factor.scale
        raise RuntimeError(f"{tensor}{show(box)} was read on a rank that does not hold it")

    def _held(self, tensor: str) -> list[Factor]:
        adapter = self._adapters.get(tensor)
        return [] if adapter is None else [f for f in adapter.factors() if f.name == tensor]


def adapters_of(chunk: torch.nn.Module) -> Adapters | None:
    """Return the adapters of a model chunk without wrappers; None without LoRA."""
    return getattr(chunk, _MARK, None)


def is_adapter(parameter_name: str) -> bool:
    """Return whether a parameter of a chunk is a factor of an adapter."""
    return f".{_MARK}." in parameter_name


def attach(
    chunk: Any,
    lora: Lora,
    shape: ModelShape,
    layout: TrainLayout,
    *,
    rank: int,
    seed: int,
    dithers: bool,
) -> Adapters:
    """Freeze a built model chunk and attach its adapters, before data parallelism wraps it.

    Its checkpoints then hold the adapters only.
    """
    chunk.requires_grad_(False)
    at = ShardCoordinates.of(layout, rank, megatron_adapter.stage_layers(chunk))
    attached = Adapters(seed)
    for name, module in list(chunk.named_modules()):
        weights = {
            own: adapters
            for own, parameter in module.named_parameters(recurse=False)
            if (adapters := _adapters(f"{name}.{own}", parameter, lora, shape, at, dithers))
        }
        if not weights:
            continue
        everyone = [adapter for adapters in weights.values() for adapter in adapters]
        setattr(module, _MARK, torch.nn.ModuleList(everyone))
        module.forward = _merging(module.forward, module, weights, attached)
        attached.by_tensor.update({f"{each.layer}.weight": each for each in everyone})
    attached.reset()
    setattr(chunk, _MARK, attached)
    chunk.sharded_state_dict = attached.sharded_state_dict
    chunk.load_state_dict = attached.load_state_dict
    if getattr(chunk, "pre_process", False):
        # Recomputed layers return gradients only if their input needs one.
        chunk.embedding.register_forward_hook(_with_gradient)
    return attached


def with_adapters(
    provider: Any, lora: Lora, shape: ModelShape, layout: TrainLayout, *, seed: int, dithers: bool
) -> Any:
    """Wrap a Megatron `model_provider` so that it builds a frozen model with adapters, whose merged
    weights are `dithered`."""

    @functools.wraps(provider)
    def adapted_provider(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model: torch.nn.Module = provider(*args, **kwargs)
        attach(model, lora, shape, layout, rank=dist.get_rank(), seed=seed, dithers=dithers)
        return model

    return adapted_provider


def _with_gradient(_: Any, __: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _adapters(
    name: str,
    weight: torch.nn.Parameter,
    lora: Lora,
    shape: ModelShape,
    at: ShardCoordinates,
    dithers: bool,
) -> list[Adapter]:
    """Return the adapters of one of Megatron's weights, in the order of its rows."""
    if weight.dim() != 2:
        return []
    by_layer: dict[str, list[Piece]] = {}
    for piece in map_parameter(name, weight.shape, shape, at):
        layer = piece.tensor.removesuffix(".weight")
        if layer in lora.modules:
            by_layer.setdefault(layer, []).append(piece)
    return [Adapter(layer, lora, some, weight, dithers=dithers) for layer, some in by_layer.items()]


def _merging(
    forward: Callable[..., Any],
    module: torch.nn.Module,
    weights: Mapping[str, Sequence[Adapter]],
    of_chunk: Adapters,
) -> Callable[..., Any]:
    """Return a layer's `forward` that computes with merged weights."""
    adapters = [each for of_weight in weights.values() for each in of_weight]

    def merging(*args: Any, **kwargs: Any) -> Any:
        if not of_chunk.enabled:
            return forward(*args, **kwargs)
        if not _has_plain_product(module):
            with _merged(module, weights, _differentiable):
                return forward(*args, **kwargs)
        with _merged(module, weights, merged_weight):
            output, bias = forward(*args, **kwargs)
        apply: Any = _OfProducts.apply  # mypy: untyped
        return apply(output, args[0], adapters, *_factors(adapters)), bias

    return merging


def _has_plain_product(module: Any) -> bool:
    """Return whether a layer's input and the gradient of its output are those of its product: it
    gathers or scatters neither."""
    if isinstance(module, DuplicatedLinear):
        return True
    if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
        return False
    gathers = module.sequence_parallel and not module.explicit_expert_comm
    if isinstance(module, ColumnParallelLinear):
        return not gathers and not module.gather_output
    return not gathers and module.input_is_parallel


def _factors(adapters: Iterable[Adapter]) -> list[torch.nn.Parameter]:
    return [factor for each in adapters for factor in (each.a, each.b)]


def _differentiable(weight: torch.Tensor, adapters: Sequence[Adapter]) -> torch.Tensor:
    apply: Any = _Merge.apply  # mypy: untyped
    merged: torch.Tensor = apply(weight, adapters, *_factors(adapters))
    return merged


@contextlib.contextmanager
def _merged(
    module: torch.nn.Module,
    weights: Mapping[str, Sequence[Adapter]],
    merge: Callable[[torch.Tensor, Sequence[Adapter]], torch.Tensor],
) -> Iterator[None]:
    """Replace the weights of a layer by merged ones, which autograd computes again in backward."""
    places: dict[int, tuple[torch.Tensor, Sequence[Adapter]]] = {}  # by address
    for name, adapters in weights.items():
        weight = module._parameters[name]
        assert weight is not None, name
        merged = merge(weight, adapters)
        places[merged.untyped_storage().data_ptr()] = weight, adapters
        module.__dict__[name] = merged  # found before the registered parameter

    def pack(tensor: torch.Tensor) -> Any:
        place = places.get(tensor.untyped_storage().data_ptr())
        if place is None:
            return tensor
        return _Again(*place, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    try:
        with saved_tensors_hooks(pack, lambda kept: kept() if isinstance(kept, _Again) else kept):
            yield
    finally:
        for name in weights:
            del module.__dict__[name]


@dataclass(frozen=True, slots=True)
class _Again:
    """A merged weight that is not kept, or a view of it, such as its transpose."""

    weight: torch.Tensor
    adapters: Sequence[Adapter]
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def __call__(self) -> torch.Tensor:
        merged = merged_weight(self.weight, self.adapters)
        return merged.as_strided(self.shape, self.stride, self.offset)
