"""The model of a critic or reward model: a Megatron model with one number per token, not logits.

`ValueHead` takes the place of the output layer of any Megatron language model that has one
(`GPTModel`, `HybridModel`). The rest of the model, its parameter names and its checkpoint format
stay Megatron's.

Shape legend: b samples, s positions (of this context-parallel rank), h hidden.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist

from mcore_rl.megatron import adapter  # noqa: F401  # isort: skip  (first: it applies patches)

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from mcore_rl.megatron.hf_checkpoint import HFCheckpoint
from mcore_rl.megatron.model_class import AUTO
from mcore_rl.megatron.model_provider import as_in_checkpoints, make_actor_provider
from mcore_rl.megatron.shards import ModelShards
from mcore_rl.megatron.sparse_attention import prepare_indexers
from mcore_rl.megatron.world import MegatronWorld
from mcore_rl.model.architecture_flags import settings_without_flag
from mcore_rl.model.config_json import ModelShape


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to one number, in float32 and without a bias.

    `weight` `[1, h]` is replicated over TP and starts at zero, the same for every layout. With
    sequence parallelism each TP rank computes its own positions; the attribute on the weight makes
    Megatron sum the partial gradients.
    """

    def __init__(self, config: Any, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype)
        )
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._tp_group = tp_group

    def forward(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Map `[s (or this rank's share), b, h]` to `[s, b, 1]` float32, on every TP rank."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float())
        if self.sequence_parallel:
            # All TP ranks compute the same from here, so each takes its own part of the gradient.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._tp_group
            )
        return values, None

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return one replicated entry, for Megatron's distributed checkpoints."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {}, sharded_offsets
        )
        return tensors


def make_critic_provider(provider: Any) -> Any:
    """Wrap a Megatron `model_provider` so that it builds a critic.

    On the last pipeline stage its forward returns `[b, s, 1]` float32; position t has the value of
    the state before token t+1. Raises RuntimeError if embedding and output layer are tied: the
    other use would be lost.
    """

    @functools.wraps(provider)
    def critic_provider(*args: Any, **kwargs: Any) -> torch.nn.Module:
        # With the attributes of Megatron's class.
        model: Any = as_in_checkpoints(provider(*args, **kwargs))
        prepare_indexers(model)
        if model.share_embeddings_and_output_weights:
            raise RuntimeError("a critic is built without tied embeddings; the model has them")
        if model.post_process:
            model.output_layer = ValueHead(model.config, model.pg_collection.tp)
        critic: torch.nn.Module = model
        return critic

    return critic_provider


def build_value_model(
    shape: ModelShape,
    checkpoint: HFCheckpoint,
    args: argparse.Namespace,
    setup: Callable[[Any], adapter.TrainState],
    provider: Callable[..., Any] | None = None,
    *,
    requested_class: str = AUTO,
    add_head: Callable[[Any], Any] = make_critic_provider,
    log: TextIO | None = None,
) -> tuple[MegatronWorld, adapter.TrainState, ModelShards]:
    """Build the model in its own world, without reading weights. Collective.

    `args` are its Megatron arguments; `setup` builds it with or without an optimizer; `provider` is
    a fork's own; `requested_class` is `--rl-model-class`; `add_head` wraps a provider.
    """
    for name, value in settings_without_flag(shape).items():
        setattr(args, name, value)
    with adapter.megatron_output_to(log):
        world = MegatronWorld(args)
        with world:
            provider = provider or make_actor_provider(args, shape, requested_class)
            state = setup(add_head(provider))
            shards = ModelShards(
                state.chunks, shape, world.layout, dist.get_rank(), checkpoint.tensors
            )
    return world, state, shards
