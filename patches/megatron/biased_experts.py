"""The bias behind an expert (gpt-oss), in training, where experts are not a grouped layer.

Symptom: without Transformer Engine the first forward pass with gradients raises "Output 0 of
_ReduceFromModelParallelRegion is a view and is being modified inplace"; with TP and without EP it
is _ReduceScatterToSequenceParallelRegion. Without gradients, as where log-probs are scored, nothing
is raised. And with sequence parallelism each of these biases learns from the gradients of other
experts', silently.

Cause: an expert adds its bias, times the token's weight, in place to what its second layer returns.
That layer sums over expert tensor parallelism by an autograd function, or with sequence parallelism
by one that also scatters the sum. With one rank either returns what it was given, and of that
autograd makes a view that may not be written into. The layer also marks its bias as one of which
each tensor-parallel rank has a part of the gradient, to be summed, though with experts that are not
split over these ranks each of them has other experts, or other tokens.

Why safe: where a group is one rank, either function is left out; forwards and backwards it does
nothing there. With more ranks Megatron refuses experts with biases. The mark is taken from biases
that are reduced over the data parallelism of experts, which is all that must be summed of them.

Upstream: no issue known; Transformer Engine's grouped layers have neither.

Drop when: `MLP.forward` adds the bias out of place, and `RowParallelLinear` marks no expert's bias.

Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mcore_rl.patches.registry import Patch, parameters_of, require

_SUMS = ("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region")


def needed() -> bool:
    """True wherever Megatron is; Transformer Engine's single experts have the mark, too."""
    return True


def apply() -> None:
    """Have sums over one rank be what was to be summed, and no bias be summed with another's."""
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
    """`reduce` of the tensor-parallel group, which is left out where the group is one rank."""
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    found = parameters_of(reduce)
    require(found[:2] == ("input_", "group"), reduce.__qualname__, f"takes {', '.join(found)}")

    @functools.wraps(reduce)
    def reduce_over_several(input_: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        group = get_tensor_model_parallel_group_if_none(group)
        alone = group is not None and group.size() == 1
        return input_ if alone else reduce(input_, group, *args, **kwargs)

    return reduce_over_several


PATCH = Patch(
    name="megatron.biased_experts",
    package="megatron-core",
    reason="biases of experts are trained, each by its own gradient",
    needed=needed,
    apply=apply,
)
