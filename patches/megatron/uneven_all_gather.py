"""Tokens for experts can be gathered from ranks with different numbers of tokens.

Symptom: with `--moe-token-dispatcher-type allgather`, Megatron's default, and experts spread over
data-parallel ranks a run fails at its first micro-batch: gloo aborts the process ("48 vs 45"), NCCL
hangs or reads out of bounds.

Cause: `MoEAllGatherTokenDispatcher` assumes that all ranks of a gather have the same number of
tokens, as in pre-training. In RL the length of a micro-batch depends on its samples.

Why safe: the ranks agree on the maximum number of tokens. Each pads to that number with zero
tokens that are routed to no expert, and drops them once the experts' outputs are back. No expert
computes them, and no router, loss or token count sees them. Megatron's HybridEP does the same with
`--moe-hybridep-pad-uneven-dispatch-inputs`. Ranks with equal numbers of tokens send what upstream
sends, after exchanging one number per layer.

Upstream: no issue known; the other dispatchers exchange their numbers of tokens.

Drop when: `MoEAllGatherTokenDispatcher` takes ranks with different numbers of tokens.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require_parameters, require_source


def apply() -> None:
    """Pad tokens before they are gathered, and drop the padding after outputs are summed."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    dispatch = MoEAllGatherTokenDispatcher.token_dispatch
    combine = MoEAllGatherTokenDispatcher.token_combine
    require_parameters(dispatch, "self hidden_states probs")
    require_parameters(combine, "self hidden_states")
    require_source(dispatch, "self.routing_map, group=self.tp_ep_group")
    require_source(MoEAllGatherTokenDispatcher.dispatch_preprocess, "self.hidden_shape =")

    def dispatch_equally_many(self: Any, hidden_states: Any, probs: Any) -> Any:
        if self.tp_size > 1 or self.ep_size > 1:
            most = torch.tensor([len(hidden_states)], device=hidden_states.device)
            torch.distributed.all_reduce(
                most, op=torch.distributed.ReduceOp.MAX, group=self.tp_ep_group
            )
            if missing := int(most) - len(hidden_states):
                hidden_states, probs, self.routing_map = (
                    torch.nn.functional.pad(of_tokens, (0, 0, 0, missing))
                    for of_tokens in (hidden_states, probs, self.routing_map)
                )
        return dispatch(self, hidden_states, probs)

    def combine_own(self: Any, hidden_states: Any) -> Any:
        return combine(self, hidden_states)[: math.prod(self.hidden_shape[:-1])]

    MoEAllGatherTokenDispatcher.token_dispatch = dispatch_equally_many
    MoEAllGatherTokenDispatcher.token_combine = combine_own


PATCH = Patch(
    "megatron.uneven_all_gather",
    "tokens for experts are gathered from ranks with different numbers of them",
    apply,
)
