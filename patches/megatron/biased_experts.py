"""The output bias of an expert (gpt-oss) can be trained where experts are not a grouped layer.

Symptom: without Transformer Engine the first forward pass with gradients raises "Output 0 of
_ReduceFromModelParallelRegion is a view and is being modified inplace"; with TP and without EP it
names _ReduceScatterToSequenceParallelRegion. Without gradients, as in scoring log-probs, nothing is
raised. With sequence parallelism each of these biases also gets other experts' gradients, silently.

Cause: an expert adds its bias, times the token's weight, in place to the output of its second
layer. That layer sums over expert tensor parallelism with an autograd function; with sequence
parallelism the function also scatters the sum. With one rank either function returns its input, of
which autograd makes a view that must not be modified. The layer also marks its bias so that its
gradient is summed over tensor-parallel ranks, although these have other experts, or other tokens,
when experts are not split over them.

Why safe: for a group of one rank both functions are skipped; forward and backward they do nothing
there. With more ranks Megatron refuses experts with biases. The mark is removed from biases that
are reduced over the experts' data parallelism, which is the only sum they need.

Upstream: no issue known; Transformer Engine's grouped layers have neither.

Drop when: `MLP.forward` adds the bias out of place, and `RowParallelLinear` marks no expert's bias.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mcore_rl.patches.registry import Patch, parameters_of, require

_SUMS = ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")


def apply() -> None:
    """Skip sums over one rank, and do not sum the gradients of different biases."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe.experts import SequentialMLP

    for name in _SUMS:
        where = "megatron.core.tensor_parallel.layers"
        require(hasattr(layers, name), where, f"has no {name}")
        setattr(layers, name, _over_several(getattr(layers, name)))

    build = SequentialMLP.__init__

    @functools.wraps(build)
    def build_with_unmarked_biases(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        for expert in self.local_experts:
            bias: Any = getattr(expert.linear_fc2, "bias", None)
            if not getattr(bias, "allreduce", True):
                bias.sequence_parallel = False

    SequentialMLP.__init__ = build_with_unmarked_biases


def _over_several(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `reduce` over the tensor-parallel group so that a group of one rank skips it."""
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    parameters = parameters_of(reduce)
    require(
        parameters[:2] == ("input_", "group"), reduce.__qualname__, f"takes {', '.join(parameters)}"
    )

    @functools.wraps(reduce)
    def reduce_over_several(input_: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = get_tensor_model_parallel_group_if_none(group)
        alone = group is not None and group.size() == 1
        return input_ if alone else reduce(input_, group, *args, **kwargs)

    return reduce_over_several


PATCH = Patch(
    "megatron.biased_experts", "biases of experts are trained, each by its own gradient", apply
)
