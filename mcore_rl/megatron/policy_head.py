"""The policy: a Megatron model that returns per-token log-probs and entropy instead of logits.

mcore_rl adds `PolicyHead` to a Megatron language model that ends in an `output_layer` (`GPTModel`,
`HybridModel`): as the first base class or, for a model that a fork has built, through `as_policy`.
Parameters, their names and the checkpoint format stay Megatron's.

Shape legend: b samples, s positions (of this context-parallel rank), h hidden, v vocabulary
(padded, over all TP ranks).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
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
from mcore_rl.megatron.sparse_attention import freeze_indexers
from mcore_rl.model.config_json import ModelShape

# Keyword arguments of Megatron's `_postprocess` that MTP layers take.
_TAKEN_BY_MTP = frozenset(
    "position_ids attention_mask rotary_pos_emb rotary_pos_cos rotary_pos_sin packed_seq_params "
    "sequence_len_offset".split()  # not padding_mask, which each TP rank would shift on its own
)


class PolicyHead:
    """Mixin to place before a Megatron language model class.

    `forward(..., target_ids=...)` returns, on the last pipeline stage, `[b, s, 2]` float32: the
    log-prob of each target and the entropy of its distribution, softmax(logits / temperature) over
    the real vocabulary. On other stages, and without `target_ids`, it is Megatron's own forward.
    Forward and backward hold the logits of at most `chunk_tokens` positions at once.
    """

    real_vocab_size: int
    chunk_tokens: int
    # Attributes of the model, which is super() (mypy takes it for object).
    config: Any
    embedding: Any
    mtp: Any
    output_layer: Any
    pg_collection: Any
    post_process: bool
    share_embeddings_and_output_weights: bool
    shared_embedding_or_output_weight: Any
    training: bool

    # In training a model with n MTP layers (`--mtp-num-layers`) appends n columns: column 2 + i of
    # position t is the log-prob of token t+2+i at temperature 1. Their gradient reaches only the
    # MTP layers: Megatron detaches hidden states and embedding (`--mtp-detach-heads`), this class
    # the head's weight. In evaluation MTP layers do not run.

    def forward(
        self,
        *args: Any,
        target_ids: torch.Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the model; `target_ids` is `[b, s]` int64, position t's target is token t+1."""
        if target_ids is None or not self.post_process:
            unscored: torch.Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
            return unscored
        score = functools.partial(
            self._score, target_ids=target_ids, temperature=temperature, with_entropy=with_entropy
        )
        with self._output_layer_as(score), self._own_postprocess():
            scored: torch.Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
            return scored

    @contextlib.contextmanager
    def _output_layer_as(self, function: Any) -> Iterator[None]:
        # Every model class calls its output layer once the hidden states are final, so shadowing
        # that one method serves all of them.
        layer = self.output_layer
        layer.forward = function
        try:
            yield
        finally:
            del layer.forward

    @contextlib.contextmanager
    def _own_postprocess(self) -> Iterator[None]:
        # Megatron's also runs MTP layers in evaluation, and divides their loss by the tokens of a
        # micro-batch, so that it would depend on the split.
        if not getattr(self, "mtp_process", False):
            yield
            return
        self._postprocess = functools.partial(self._postprocess_with_mtp, super()._postprocess)  # type: ignore[misc]
        try:
            yield
        finally:
            del self._postprocess

    def _postprocess_with_mtp(
        self, postprocess: Any, hidden_states: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        """Run Megatron's `_postprocess` as without MTP layers, and append their log-probs."""
        config = self.config
        self.config = copy.copy(config)
        self.config.mtp_num_layers = None
        try:
            scores: torch.Tensor = postprocess(
                hidden_states, **inputs | {"mtp_in_postprocess": False}
            )
        finally:
            self.config = config
        if not self.training:
            return scores
        return torch.cat((scores, self._mtp_log_probs(hidden_states, **inputs)), dim=-1)

    def _mtp_log_probs(
        self, hidden_states: torch.Tensor, *, input_ids: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        """Return `[b, s, n]` float32, undefined where the predicted token is beyond the sample."""
        block = {name: value for name, value in inputs.items() if name in _TAKEN_BY_MTP}
        of_layers = self.mtp(
            input_ids=input_ids,
            hidden_states=hidden_states,
            embedding=self.embedding,
            **block,
        ).chunk(1 + self.config.mtp_num_layers)[1:]
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        ).detach()
        found = [
            self._distribution(
                hidden,
                weight,
                input_ids.roll(-2 - ahead, dims=1),
                temperature=1.0,
                with_entropy=False,
            )[0]
            for ahead, hidden in enumerate(of_layers)
        ]
        return torch.stack(found, dim=-1).transpose(0, 1)

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
        """Replace the output layer: `[s (or this rank's share), b, h]` -> `[s, b, 2]`."""
        weight = self.output_layer.weight if weight is None else weight
        found = self._distribution(
            hidden, weight, target_ids, temperature=temperature, with_entropy=with_entropy
        )
        return torch.stack(found, dim=-1), None

    def _distribution(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of `target_ids` `[b, s]` and entropies (0 without), each `[s, b]`.

        `hidden` is `[s (or this rank's share), b, h]`, `weight` the head's.
        """
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
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
        found = (log_probs, torch.zeros_like(log_probs) if entropy is None else entropy)
        return found[0].view(positions, samples), found[1].view(positions, samples)


@functools.cache
def _policy_class(base: type) -> type:
    """Return `base` with `PolicyHead` before it."""
    if issubclass(base, PolicyHead):
        return base
    return type(f"{base.__name__}Actor", (PolicyHead, base), {})


def as_policy(
    model: torch.nn.Module, *, real_vocab_size: int, chunk_tokens: int
) -> torch.nn.Module:
    """Turn a built Megatron language model into a policy, in place, and return it.

    `real_vocab_size` is the vocabulary's size without Megatron's padding rows, `chunk_tokens` the
    number of positions whose logits exist at once.
    """
    policy: Any = model  # with the attributes of its new class
    base: Any = type(policy)  # mypy: not Hashable
    policy.__class__ = _policy_class(base)
    policy.real_vocab_size = real_vocab_size
    policy.chunk_tokens = chunk_tokens
    return model


def named_spec(spec: Sequence[str]) -> Any:
    """Import the object of `--spec MODULE NAME`: a layer or block spec, or a function making one.

    Raises UsageError if there are not two names, the import fails, or it is a function and this
    Megatron lacks the configuration to call it with.
    """
    flag = f"--spec {' '.join(spec)}"
    if len(spec) != 2:
        raise UsageError(
            "must be a module and a name in it", flag=flag, remedy="correct it or drop the flag"
        )
    try:
        named = getattr(importlib.import_module(spec[0]), spec[1])
    except Exception as error:  # the module may raise anything
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
    """Return the spec of `--spec`, used as Megatron's GPT builder uses it, or the default."""
    if not args.spec:
        return megatron_adapter.block_spec(config, vp_stage)
    spec = named_spec(args.spec)
    if isinstance(spec, ModuleSpec) or not callable(spec):
        return spec
    from megatron.training.argument_utils import gpt_config_from_args  # as `named_spec` checked

    stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(spec).parameters else {}
    return spec(gpt_config_from_args(args, config), **stage)


def make_actor_provider(args: argparse.Namespace, shape: ModelShape) -> Any:
    """Return Megatron's `model_provider` for a checkpoint of this shape."""

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
        model: torch.nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            mtp_block_spec=_mtp_block_spec(config, spec, vp_stage),
            vocab_size=args.padded_vocab_size,
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
                # Transformer Engine does not set it. Without it only the first rank's gradient
                # would count in the norm, though each rank has its own heads.
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]  # Megatron's
        return model

    return provider


def make_policy_provider(provider: Any, *, real_vocab_size: int, chunk_tokens: int) -> Any:
    """Wrap a Megatron `model_provider` so that it builds a policy."""

    @functools.wraps(provider)
    def policy_provider(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = provider(*args, **kwargs)
        freeze_indexers(model)
        return as_policy(model, real_vocab_size=real_vocab_size, chunk_tokens=chunk_tokens)

    return policy_provider


def _mtp_block_spec(config: Any, decoder_spec: Any, vp_stage: int | None) -> Any:
    """Return the spec of this stage's MTP layers, made like its last decoder layer, or None.

    `decoder_spec` comes from `megatron_adapter.block_spec`.
    """
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    return get_gpt_mtp_block_spec(
        config,
        decoder_spec,
        use_transformer_engine=config.transformer_impl == "transformer_engine",
        vp_stage=vp_stage,
    )
