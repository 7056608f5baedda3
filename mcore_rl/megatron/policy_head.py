"""The policy: Megatron's model, returning per-token log-probs and entropy instead of logits.

`PolicyHead` is the part that mcore_rl adds. It goes before any Megatron language model that ends in
an `output_layer` (`GPTModel`, `HybridModel`), as a base class or, for a model that a fork has
built, through `as_policy`. Parameters, their names and the checkpoint format stay Megatron's.

Shape legend: b samples, s positions (of this context-parallel rank), h hidden, v vocabulary
(padded, over all TP ranks).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from mcore_rl.common.errors import UsageError
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.log_probs import vocab_parallel_log_probs
from mcore_rl.megatron.projection_norms import set_projection_norms
from mcore_rl.model.config_json import ModelShape


class PolicyHead:
    """Mixin before a Megatron language model class.

    `forward(..., target_ids=...)` returns, on the last pipeline stage, `[b, s, 2]` float32: the
    log-prob of each target and the entropy of its distribution, both of the softmax over the real
    vocabulary of logits / temperature. Elsewhere, and without `target_ids`, it is Megatron's own
    forward. The logits of at most `chunk_tokens` positions exist at one time, in the forward and in
    the backward pass.
    """

    real_vocab_size: int
    chunk_tokens: int

    def forward(
        self,
        *args: Any,
        target_ids: torch.Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As the model's forward; `target_ids` `[b, s]` int64, position t's target is token t+1."""
        if target_ids is None or not self.post_process:  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        score = functools.partial(
            self._score, target_ids=target_ids, temperature=temperature, with_entropy=with_entropy
        )
        with self._output_layer_as(score):
            return super().forward(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _output_layer_as(self, function: Any) -> Iterator[None]:
        # The model calls its output layer at the point where the hidden states are final, whatever
        # lies before; shadowing that one method serves every model class alike.
        layer = self.output_layer  # type: ignore[attr-defined]
        layer.forward = function
        try:
            yield
        finally:
            del layer.forward

    def _score(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        target_ids: torch.Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, None]:
        """`[s (or this rank's share), b, h]` -> `[s, b, 2]`, in the place of the output layer."""
        layer = self.output_layer  # type: ignore[attr-defined]
        group = self.pg_collection.tp  # type: ignore[attr-defined]
        weight = layer.weight if weight is None else weight
        if self.config.sequence_parallel:  # type: ignore[attr-defined]
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
        positions, samples, width = hidden.shape
        log_probs, entropy = vocab_parallel_log_probs(
            hidden.reshape(positions * samples, width),
            weight,
            target_ids.transpose(0, 1).reshape(-1),
            vocab_start=group.rank() * weight.shape[0],
            vocab_size=self.real_vocab_size,
            tp_group=group,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            with_entropy=with_entropy,
        )
        return torch.stack((log_probs, entropy), dim=-1).view(positions, samples, 2), None


class GPTActor(PolicyHead, GPTModel):
    """Megatron's `GPTModel` as a policy."""


@functools.cache
def policy_class(base: type) -> type:
    """`base` with `PolicyHead` before it: GPTActor for GPTModel, a new class for any other."""
    if issubclass(base, PolicyHead):
        return base
    return GPTActor if base is GPTModel else type(f"{base.__name__}Actor", (PolicyHead, base), {})


def as_policy(
    model: torch.nn.Module, *, real_vocab_size: int, chunk_tokens: int
) -> torch.nn.Module:
    """Turn a built Megatron language model into a policy, in place; returns the model.

    `real_vocab_size` counts the vocabulary without Megatron's padding rows, `chunk_tokens` the
    positions whose logits exist at one time.
    """
    model.__class__ = policy_class(type(model))
    model.real_vocab_size = real_vocab_size
    model.chunk_tokens = chunk_tokens
    return model


def named_spec(spec: Sequence[str]) -> Any:
    """What `--spec MODULE NAME` names: a layer spec, a block's, or a function that makes one.

    UsageError: it is not two names, cannot be imported, or is a function and Megatron has no
    configuration to call it with.
    """
    flag = f"--spec {' '.join(spec)}"
    if len(spec) != 2:
        raise UsageError(
            "must be a module and a name in it", flag=flag, remedy="correct it or drop the flag"
        )
    try:
        named = getattr(importlib.import_module(spec[0]), spec[1])
    except Exception as error:  # whatever the module raises is its author's to see
        raise UsageError(
            f"cannot be imported ({type(error).__name__}: {error})",
            flag=flag,
            remedy="correct it, or put the module's folder on PYTHONPATH",
        ) from error
    from megatron.training import argument_utils

    is_function = callable(named) and not isinstance(named, ModuleSpec)
    if is_function and not hasattr(argument_utils, "gpt_config_from_args"):
        raise UsageError(
            "is a function, which Megatron calls from 0.19 on only",
            flag=flag,
            remedy="name a ModuleSpec, or install megatron-core 0.19 or later",
        )
    return named


def _layer_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    """That of `--spec`, taken as Megatron's own builder of GPT models takes it, or the default."""
    if not args.spec:
        return megatron_adapter.block_spec(config, vp_stage)
    spec = named_spec(args.spec)
    if isinstance(spec, ModuleSpec) or not callable(spec):
        return spec
    from megatron.training import argument_utils

    make_config = getattr(argument_utils, "gpt_config_from_args", None)
    assert make_config is not None, "named_spec refuses a function where there is none"
    stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(spec).parameters else {}
    return spec(make_config(args, config), **stage)


def make_actor_provider(args: argparse.Namespace, shape: ModelShape) -> Any:
    """Megatron's `model_provider` for a checkpoint of this shape."""

    def provider(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> torch.nn.Module:
        config = config or megatron_adapter.transformer_config(args)
        spec = _layer_spec(args, config, vp_stage)
        if shape.norms_whole_projection and not args.spec:
            set_projection_norms(spec)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=megatron_adapter.padded_vocab_size(shape, args),
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
        for name, parameter in model.named_parameters():
            if name.endswith("softmax_offset"):
                # Transformer Engine leaves it out. Only the first rank's would count in the norm
                # of the gradient, though each rank has those of its own heads.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        return model

    return provider


def make_policy_provider(provider: Any, *, real_vocab_size: int, chunk_tokens: int) -> Any:
    """Wrap any Megatron `model_provider` so that what it builds is a policy."""

    @functools.wraps(provider)
    def policy_provider(*args: Any, **kwargs: Any) -> torch.nn.Module:
        return as_policy(
            provider(*args, **kwargs), real_vocab_size=real_vocab_size, chunk_tokens=chunk_tokens
        )

    return policy_provider
