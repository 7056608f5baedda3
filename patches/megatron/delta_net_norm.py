"""The gated norm of Megatron's delta net: a plain factor, and its gradient over all TP ranks.

Symptom: with --apply-layernorm-1p, which Qwen3-Next and Qwen3.5 need, the norm before the delta
net's output projection multiplies by 1 + weight, too. These models multiply by the weight itself,
so that a checkpoint gives another model. With TP and without --sequence-parallel the ranks' weights
of this norm drift apart.

Cause: upstream builds it with the model's configuration, and leaves the other parametrisation to
the conversion of checkpoints. Each TP rank norms its own heads and gets their part of the
gradient; Megatron sums the gradients of replicated weights only under sequence parallelism.

Why safe: the function computed is the family's. The stored weight is that of the checkpoint, so
that loading and the hand-over copy bytes; 1 + weight in bfloat16 would round. The gradients are
summed only where Megatron does not. A Megatron checkpoint written without this patch holds the
weight minus 1: import such a model from its Hugging Face checkpoint instead.

Upstream: no issue.

Drop when: upstream builds this norm with a plain weight and reduces its gradient.

Versions: megatron-core 0.19 and 0.20; earlier ones have no `gated_delta_net` package.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require_source


class PlainNorm:
    """A norm without zero-centring, whatever the configuration says: call it as `norm`'s class."""

    def __new__(cls, norm: Any, config: Any, **arguments: Any) -> Any:
        """Return the norm of the spec `norm`, not an instance of this class."""
        from megatron.core.transformer.spec_utils import build_module

        config = copy.copy(config)
        config.layernorm_zero_centered_gamma = False
        return build_module(norm, config=config, **arguments)


def has_delta_net() -> bool:
    """Return whether this Megatron has the package of delta nets."""
    spec = importlib.util.find_spec("megatron.core.ssm.gated_delta_net")
    return spec is not None and spec.submodule_search_locations is not None


def apply() -> None:
    """Wrap the construction of the layer."""
    from megatron.core.ssm.gated_delta_net import common
    from megatron.core.transformer.spec_utils import ModuleSpec

    initialize = common._GDNBase.__init__
    require_source(initialize, "self.out_norm = build_module( submodules.out_norm,")

    @functools.wraps(initialize)
    def initialize_with_plain_norm(
        self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
    ) -> None:
        if config.layernorm_zero_centered_gamma:
            norm = ModuleSpec(module=PlainNorm, params={"norm": submodules.out_norm})
            submodules = dataclasses.replace(submodules, out_norm=norm)
        initialize(self, config, submodules, *args, **kwargs)
        if self.tp_size > 1 and not config.sequence_parallel:
            self.out_norm.weight.register_hook(functools.partial(_summed, group=self.tp_group))

    common._GDNBase.__init__ = initialize_with_plain_norm


def _summed(gradient: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    total = gradient.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


PATCH = Patch(
    "megatron.delta_net_norm", "the delta net's norm is that of its family", apply, has_delta_net
)
