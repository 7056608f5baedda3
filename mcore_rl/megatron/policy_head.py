"""The policy: a Megatron model that returns per-token log-probs and entropy instead of logits.

mcore_rl adds `PolicyHead` to a Megatron language model that ends in an `output_layer` (`GPTModel`,
`HybridModel`): as the first base class or, for a model that a fork has built, through `as_policy`.
Parameters, their names and the checkpoint format stay Megatron's.

Shape legend: b samples, s positions (of this context-parallel rank), h hidden, v vocabulary
(padded, over all TP ranks).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from mcore_rl.algorithms.distillation import top_k_reverse_kl
from mcore_rl.algorithms.mismatch import MismatchConfig
from mcore_rl.algorithms.score_centering import expected_scores
from mcore_rl.megatron.log_probs import (
    vocab_parallel_log_probs,
    vocab_parallel_reverse_kl,
    vocab_parallel_top_k,
)
from mcore_rl.megatron.model_provider import as_in_checkpoints
from mcore_rl.megatron.sparse_attention import prepare_indexers

# Keyword arguments that Megatron passes to MTP layers, and that these need here.
_TAKEN_BY_MTP = frozenset(
    "hidden_states input_ids position_ids attention_mask rotary_pos_emb rotary_pos_cos "
    # not padding_mask, which each TP rank would shift on its own
    "rotary_pos_sin packed_seq_params sequence_len_offset embedding".split()
)


@dataclass(frozen=True, slots=True)
class TeacherTopK:
    """A teacher's most probable tokens after each position."""

    token_ids: torch.Tensor  # [b, s, k] int64
    log_probs: torch.Tensor  # [b, s, k] float32


@dataclass(frozen=True, slots=True)
class TeacherHidden:
    """A teacher's distribution after each position, as its output layer's input and weight."""

    hidden: torch.Tensor  # [b, s, g] float32
    weight: (
        torch.Tensor | None
    )  # [v/tp, g], rows of the same tokens as the policy's; on last stages


@dataclass(frozen=True, slots=True)
class EngineTopK:
    """The engine's most probable tokens after each position, and the correction of the mismatch."""

    token_ids: torch.Tensor  # [b, s, k] int64
    log_probs: torch.Tensor  # [b, s, k] float32
    correction: MismatchConfig


class PolicyHead:
    """Mixin to place before a Megatron language model class.

    `forward(..., target_ids=...)` returns, on the last pipeline stage, `[b, s, 2]` float32: the
    log-prob of each target and the entropy of its distribution, softmax(logits / temperature) over
    the real vocabulary. On other stages, and without `target_ids`, it is Megatron's own forward.
    With `top_k` it appends the log-probs and the ids of the k most probable tokens, `[b, s, 2 +
    2k]`, and with `with_hidden` the output layer's input, both without a gradient. With `teacher`
    it appends the reverse KL to a teacher, `[b, s, 3]`, and with `engine` the columns of
    `expected_scores`, `[b, s, 6]`; not both. With `scored` only these positions are computed, and
    all columns of the others are 0.
    Forward and backward hold the logits of at most `chunk_tokens` positions at once.
    """

    real_vocab_size: int
    chunk_tokens: int
    in_float32: bool  # the products with the head's weight
    # Attributes of the model, which is super() (mypy takes it for object).
    config: Any
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
        scored: torch.Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = True,
        top_k: int = 0,
        with_hidden: bool = False,
        teacher: TeacherTopK | TeacherHidden | None = None,
        engine: EngineTopK | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Run the model; `target_ids` is `[b, s]` int64, position t's target is token t+1.

        `scored` is `[n]` int64, different positions in `[s, b]`, flattened.
        """
        if target_ids is None or not self.post_process:
            unscored: torch.Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
            return unscored
        score = functools.partial(
            self._score,
            target_ids=target_ids,
            scored=scored,
            temperature=temperature,
            with_entropy=with_entropy,
            top_k=top_k,
            with_hidden=with_hidden,
            teacher=teacher,
            engine=engine,
        )
        with self._output_layer_as(score), self._without_mtp() as mtp_inputs:
            columns: torch.Tensor = super().forward(*args, **kwargs)  # type: ignore[misc]
        if mtp_inputs and self.training:
            columns = torch.cat((columns, self._mtp_log_probs(scored, **mtp_inputs)), dim=-1)
        return columns

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
    def _without_mtp(self) -> Iterator[dict[str, Any]]:
        """Leave MTP layers out of a forward, and collect their inputs; nothing without them."""
        # Megatron also runs them in evaluation, and divides their loss by the tokens of a
        # micro-batch, so that it would depend on the split.
        inputs: dict[str, Any] = {}
        if not getattr(self, "mtp_process", False):
            yield inputs
            return

        def keep(**given: Any) -> torch.Tensor:
            inputs.update({n: value for n, value in given.items() if n in _TAKEN_BY_MTP})
            hidden_states: torch.Tensor = given["hidden_states"]
            return hidden_states

        config = self.config
        self.config = copy.copy(config)
        self.config.mtp_num_layers = None
        self.mtp.forward = keep
        try:
            yield inputs
        finally:
            del self.mtp.forward
            self.config = config

    def _mtp_log_probs(
        self, scored: torch.Tensor | None, *, input_ids: torch.Tensor, **inputs: Any
    ) -> torch.Tensor:
        """Return `[b, s, n]` float32, undefined where the predicted token is beyond the sample.
        With `scored`, it is 0 where that token is the target of none of these positions."""
        of_layers = self.mtp(input_ids=input_ids, **inputs)
        of_layers = of_layers.chunk(1 + self.config.mtp_num_layers)[1:]
        weight = (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        ).detach()
        num_samples, per_layer = len(input_ids), []
        for ahead, of_layer in enumerate(of_layers):
            hidden = self._on_all_positions(of_layer)
            targets, shape, at = input_ids.roll(-2 - ahead, dims=1), hidden.shape[:2], None
            if scored is not None:
                at = scored - (1 + ahead) * num_samples  # as many positions before
                at = at[at >= 0]
                hidden, targets = _rows_at(hidden, at), _positions_of(targets, at)
            log_probs, _ = self._distribution(
                hidden, weight, targets[..., None], temperature=1.0, with_entropy=False
            )
            per_layer.append(_spread(log_probs, at, shape))
        return torch.cat(per_layer, dim=-1).transpose(0, 1)

    def _score(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        target_ids: torch.Tensor,
        scored: torch.Tensor | None,
        temperature: float,
        with_entropy: bool,
        top_k: int,
        with_hidden: bool,
        teacher: TeacherTopK | TeacherHidden | None,
        engine: EngineTopK | None,
    ) -> tuple[torch.Tensor, None]:
        """Replace the output layer: `[s (or this rank's share), b, h]` -> `[s, b, 2 or more]`."""
        weight = self.output_layer.weight if weight is None else weight
        hidden = self._on_all_positions(hidden)
        shape = hidden.shape[:2]
        if scored is not None:  # from here on they are the positions of one sample
            hidden = _rows_at(hidden, scored)
            target_ids = _positions_of(target_ids, scored)
            if teacher is not None:
                teacher = _positions_of_all(teacher, scored)
            if engine is not None:
                engine = _positions_of_all(engine, scored)
        targets = target_ids[..., None]
        assert teacher is None or engine is None, "the columns of both are not told apart"
        others = teacher if isinstance(teacher, TeacherTopK) else engine
        if others is not None:
            targets = torch.cat([targets, others.token_ids], dim=-1)
        log_probs, entropy = self._distribution(
            hidden, weight, targets, temperature=temperature, with_entropy=with_entropy
        )
        parts = [log_probs[..., :1], entropy[..., None]]
        if isinstance(teacher, TeacherTopK):
            theirs = teacher.log_probs.transpose(0, 1).flatten(0, 1)
            kl = top_k_reverse_kl(log_probs[..., 1:].flatten(0, 1), theirs)
            parts.append(kl.view(*entropy.shape, 1))
        elif teacher is not None:
            assert teacher.weight is not None, "this stage has the output layer"
            kl = vocab_parallel_reverse_kl(
                hidden.flatten(0, 1),
                weight,
                teacher.hidden.transpose(0, 1).flatten(0, 1),
                teacher.weight,
                **self._head_of(weight),
                temperature=temperature,
            )
            parts.append(kl.view(*entropy.shape, 1))
        if engine is not None:
            theirs = engine.log_probs.transpose(0, 1).flatten(0, 1)
            scores = expected_scores(log_probs[..., 1:].flatten(0, 1), theirs, engine.correction)
            parts.append(scores.view(*entropy.shape, scores.shape[-1]))
        if top_k:
            best, ids = self._most_probable(hidden, weight, top_k, temperature)
            parts += [best, ids.to(best.dtype)]  # exact below 2^24
        if with_hidden:
            parts.append(hidden.to(log_probs.dtype))
        return _spread(torch.cat(parts, dim=-1), scored, shape), None

    def _distribution(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target_ids: torch.Tensor,
        *,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs of `target_ids` `[b, s, k]` as `[s, b, k]`, and entropies (0 without)
        `[s, b]`.

        `hidden` `[s, b, h]` is of `_on_all_positions`, `weight` the head's.
        """
        positions, samples, width = hidden.shape
        log_probs, entropy = vocab_parallel_log_probs(
            hidden.reshape(positions * samples, width),
            weight,
            target_ids.transpose(0, 1).flatten(0, 1),
            **self._head_of(weight),
            temperature=temperature,
            in_float32=self.in_float32,
            with_entropy=with_entropy,
        )
        entropy = torch.zeros_like(log_probs[:, 0]) if entropy is None else entropy
        shape = (positions, samples, target_ids.shape[-1])
        return log_probs.view(shape), entropy.view(shape[:2])

    def _most_probable(
        self, hidden: torch.Tensor, weight: torch.Tensor, k: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs and ids of the k most probable tokens, `[s, b, k]` each."""
        best = vocab_parallel_top_k(
            hidden.flatten(0, 1),
            weight,
            k,
            **self._head_of(weight),
            temperature=temperature,
            in_float32=self.in_float32,
        )
        return best[0].view(*hidden.shape[:2], k), best[1].view(*hidden.shape[:2], k)

    def _on_all_positions(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[s, b, h]`, the same on all TP ranks, whose partial gradients are summed."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            gathered: torch.Tensor = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=group
            )
            return gathered
        copied: torch.Tensor = copy_to_tensor_model_parallel_region(hidden, group=group)
        return copied

    def _head_of(self, weight: torch.Tensor) -> dict[str, Any]:
        group = self.pg_collection.tp
        return {
            "vocab_start": group.rank() * weight.shape[0],
            "vocab_size": self.real_vocab_size,
            "tp_group": group,
            "chunk_tokens": self.chunk_tokens,
        }


def _rows_at(hidden: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return `[n, 1, h]`, the positions `at` of `[s, b, h]`."""
    return hidden.flatten(0, 1).index_select(0, at)[:, None]


def _spread(columns: torch.Tensor, at: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Return `[s, b, c]` of this shape, with `columns` `[n, 1, c]` at these positions and 0 at
    others; with None `columns` themselves."""
    if at is None:
        return columns
    everywhere = columns.new_zeros(shape.numel(), columns.shape[-1])
    return everywhere.index_copy(0, at, columns[:, 0]).view(*shape, -1)


def _positions_of(values: torch.Tensor, scored: torch.Tensor) -> torch.Tensor:
    """Return `[1, n, ...]`, the `scored` positions of `[b, s, ...]`."""
    return values.transpose(0, 1).flatten(0, 1).index_select(0, scored)[None]


def _positions_of_all(outputs: Any, scored: torch.Tensor) -> Any:
    """Return the outputs of an engine or a teacher at the `scored` positions."""
    names = [name for name in ("token_ids", "log_probs", "hidden") if hasattr(outputs, name)]
    values = {name: _positions_of(getattr(outputs, name), scored) for name in names}
    return dataclasses.replace(outputs, **values)


@functools.cache
def _policy_class(base: type) -> type:
    """Return `base` with `PolicyHead` before it."""
    if issubclass(base, PolicyHead):
        return base
    return type(f"{base.__name__}Actor", (PolicyHead, base), {})


def as_policy(
    model: torch.nn.Module, *, real_vocab_size: int, chunk_tokens: int, in_float32: bool = False
) -> torch.nn.Module:
    """Turn a built Megatron language model into a policy, in place, and return it.

    `real_vocab_size` is the vocabulary's size without Megatron's padding rows, `chunk_tokens` the
    number of positions whose logits exist at once; `in_float32`: see `vocab_parallel_log_probs`.
    """
    policy: Any = model  # with the attributes of its new class
    base: Any = type(policy)  # mypy: not Hashable
    policy.__class__ = _policy_class(base)
    policy.real_vocab_size = real_vocab_size
    policy.chunk_tokens = chunk_tokens
    policy.in_float32 = in_float32
    return model


def make_policy_provider(provider: Any, **head: Any) -> Any:
    """Wrap a Megatron `model_provider` so that it builds a policy; `head` is for `as_policy`."""

    @functools.wraps(provider)
    def policy_provider(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = as_in_checkpoints(provider(*args, **kwargs))
        prepare_indexers(model)
        return as_policy(model, **head)

    return policy_provider
