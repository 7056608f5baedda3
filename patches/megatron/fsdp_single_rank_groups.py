"""Megatron-FSDP sums the micro-batches' gradients if a sharding group has one rank.

Symptom: with `optim_grads` or `optim_grads_params` and two or more micro-batches per update, the
gradients of parameters whose sharding group is a single rank are wrong, without a message. These
are experts without replicas (EP x ETP = TP x CP x DP) and, without data parallelism, all parameters
if gradients are communicated in another data type. Updates were off by up to 84 %.

Cause: these strategies reduce gradients after every micro-batch and add the result to this rank's
shard. For a group of one rank Megatron-FSDP makes the gradient buffer unsharded. Such a buffer
accumulates gradients until one reduction per update, but is still reduced after every micro-batch:
its full content is divided by the number of data-parallel ranks each time, or, with
`--megatron-fsdp-grad-comm-dtype`, added to itself.

Why safe: the buffer becomes sharded, as the strategy requires, with one shard. Its size and indices
are the same; each micro-batch's gradients go to a temporary bucket, are scaled there and added to
the shard, as in any larger group. Larger groups and other strategies do not change. Scaling
precedes the reduction, as in bfloat16: upstream found that NCCL does not scale in a reduction over
one rank.

Upstream: issue 6660 of Megatron-LM; its pull request 6773, which is in no release yet.

Drop when: all supported releases have that pull request.

Versions: megatron-core 0.18 to 0.20, until `gradient_reduce_preprocessing` has a `group_size`.
"""

from __future__ import annotations

from typing import Any

from mcore_rl.patches.registry import Patch, parameters_of, require_source

_REDUCE_EACH_MICRO_BATCH = ("optim_grads", "optim_grads_params")


def needed() -> bool:
    """Return whether this Megatron lacks the repair."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    return "group_size" not in parameters_of(buffers.gradient_reduce_preprocessing)


def apply() -> None:
    """Make gradient buffers of one-rank groups sharded, and scale before reducing."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as buffers

    make = buffers.ParamAndGradBuffer._init_each_parameter_group_buffers
    require_source(make, "is_grad_buffer_distributed and main_buf_dp_group.size() > 1")
    require_source(buffers.gradient_reduce_preprocessing, "ddp_config.gradient_reduce_div_fusion")

    def make_sharded(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        for group in self.parameter_groups:
            gradients = group.main_grad_buffer
            if gradients is None or gradients.data_parallel_group.size() > 1:
                continue
            self.ddp_config.gradient_reduce_div_fusion = False
            if self.ddp_config.data_parallel_sharding_strategy in _REDUCE_EACH_MICRO_BATCH:
                gradients.is_data_distributed = True

    buffers.ParamAndGradBuffer._init_each_parameter_group_buffers = make_sharded


PATCH = Patch(
    "megatron.fsdp_single_rank_groups",
    "Megatron-FSDP adds up micro-batches' gradients where a sharding group has one rank",
    apply,
    needed,
)
