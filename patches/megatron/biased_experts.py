"""The bias behind an expert (gpt-oss), in training, where experts are no grouped layer.

Symptom: without Transformer Engine the first forward pass with gradients raises "Output 0 of
_ReduceFromModelParallelRegion is a view and is being modified inplace"; without gradients, as where
log-probs are scored, it does not. And with sequence parallelism each of these biases learns from
the gradients of other experts', silently.

Cause: an expert adds its bias, times the token's weight, in place to what its second layer returns.
That layer sums over expert tensor parallelism by an autograd function, which with one rank returns
what it was given, and of that autograd makes a view that may not be written into. The layer also
marks its bias as one of which each tensor-parallel rank has a part of the gradient, to be summed,
though with experts that are not split over these ranks each of them has other experts.

Why safe: where a group is one rank, the function is left out; forwards and backwards it does
nothing there. With more ranks Megatron refuses experts with biases. The mark is taken from biases
that are reduced over the data parallelism of experts, which is all that must be summed of them.

Upstream: no issue known; Transformer Engine's grouped layers have neither.

Drop when: `MLP.forward` adds the bias out of place, and `RowParallelLinear` marks no expert's bias.

Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

import functools

from mcore_rl.patches.registry import Patch, require, require_parameters


def needed() -> bool:
    """True wherever Megatron is; Transformer Engine's single experts have the mark, too."""
    return True


def apply() -> None:
    """Have sums over one rank be what was to be summed, and no bias be summed with another's."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.utils import get_tensor_model_parallel_group_if_none

    name = "reduce_from_tensor_model_parallel_region"
    require(hasattr(layers, name), "megatron.core.tensor_parallel.layers", f"has no {name}")
    reduce = getattr(layers, name)
    require_parameters(reduce, "input_", "group")

    def reduce_over_several(input_, group=None):
        group = get_tensor_model_parallel_group_if_none(group)
        alone = group is not None and group.size() == 1
        return input_ if alone else reduce(input_, group)

    build = SequentialMLP.__init__

    @functools.wraps(build)
    def build_with_unmarked_biases(self, *args, **kwargs):
        build(self, *args, **kwargs)
        for expert in self.local_experts:
            bias = getattr(expert.linear_fc2, "bias", None)
            if not getattr(bias, "allreduce", True):
                bias.sequence_parallel = False

    setattr(layers, name, reduce_over_several)
    SequentialMLP.__init__ = build_with_unmarked_biases


PATCH = Patch(
    name="megatron.biased_experts",
    package="megatron-core",
    reason="biases of experts are trained, each by its own gradient",
    needed=needed,
    apply=apply,
)
