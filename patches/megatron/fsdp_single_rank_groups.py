"""Megatron-FSDP adds up the micro-batches' gradients where a sharding group has one rank.

Symptom: with `optim_grads` or `optim_grads_params` and two or more micro-batches an update, the
gradients of parameters whose sharding group is a single rank are wrong, without a message: those of
experts that have no replicas (EP x ETP = TP x CP x DP), and without data parallelism, those of all
parameters once gradients travel in a data type of their own. Updates were off by up to 84 %.

Cause: these strategies reduce gradients after every micro-batch and add the result to this rank's
shard. Where the group has one rank, Megatron-FSDP makes the gradient buffer an unsharded one, which
accumulates gradients until they are reduced once an update, but reduces it after every micro-batch
all the same: its whole content is divided by the number of data-parallel ranks each time, or, with
`--megatron-fsdp-grad-comm-dtype`, added to itself.

Why safe: the buffer becomes the sharded one that the strategy asks for, with one shard. Its size
and indices are the same; each micro-batch's gradients go to a temporary bucket, are scaled there
and added to the shard, as in any larger group. Larger groups and other strategies are left alone.
The scaling comes before the reduction, as it does in bfloat16: upstream found that NCCL does not
scale in a reduction over one rank.

Upstream: issue 6660 of Megatron-LM; its pull request 6773, which is in no release yet.

Drop when: all supported releases have that pull request.

Versions: megatron-core 0.17 to 0.20, until `gradient_reduce_preprocessing` knows a `group_size`.
"""

from __future__ import annotations

import importlib
from typing import Any

from mcore_rl.patches.registry import Patch, parameters_of, require_source

_BUFFERS = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
_REDUCE_EACH_MICRO_BATCH = ("optim_grads", "optim_grads_params")


def needed() -> bool:
    """True unless this Megatron has the repair."""
    buffers = importlib.import_module(_BUFFERS)
    return "group_size" not in parameters_of(buffers.gradient_reduce_preprocessing)


def apply() -> None:
    """Let gradient buffers of one-rank groups be sharded, and scale before reducing."""
    buffers = importlib.import_module(_BUFFERS)
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
    name="megatron.fsdp_single_rank_groups",
    package="megatron-core",
    reason="Megatron-FSDP adds up micro-batches' gradients where a sharding group has one rank",
    needed=needed,
    apply=apply,
)
