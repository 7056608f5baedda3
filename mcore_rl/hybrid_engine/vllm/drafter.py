"""Speculative decoding with `--rl-speculate`: the drafter's weights, and counts of drafts.

vLLM's drafter of MTP layers is a second model, built and loaded next to the first. It uses the
first model's embedding and head. Both are therefore reloaded from one stream of tensors: first the
model's, then the drafter's, without the drafter's copies of shared tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from mcore_rl.hybrid_engine.vllm.needs import Metadata, Needs
from mcore_rl.hybrid_engine.vllm.reload import Reloader, Weights
from mcore_rl.hybrid_engine.vllm.sliced_tensor import WriteObserver
from mcore_rl.model.tensors import is_mtp_tensor


class DraftedReloader(Reloader):
    """Reloader of a model and its drafter together.

    In a stream of weights the drafter's tensors come after all of the model's.
    """

    def __init__(self, model: torch.nn.Module, drafter: torch.nn.Module, vllm_config: Any) -> None:
        super().__init__(model, vllm_config)
        self._alone = Reloader(model, vllm_config)
        self._drafter = Reloader(drafter, vllm_config, sharing_with=model)
        self._num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers

    def learn_needs(self, tensor_metadata: Metadata) -> Needs:
        """Return the needs of model and drafter; only one of them needs a given tensor."""
        of_drafter = {n: m for n, m in tensor_metadata.items() if self._is_drafters(n)}
        of_model = {n: m for n, m in tensor_metadata.items() if n not in of_drafter}
        return self._alone.learn_needs(of_model) | self._drafter.learn_needs(of_drafter)

    def load(self, weights: Weights, on_write: WriteObserver | None = None) -> list[str]:
        """Replace all weights of both; return the names of tensors not needed here."""
        arriving = iter(weights)
        ahead: list[tuple[str, torch.Tensor]] = []

        def of_model() -> Iterator[tuple[str, torch.Tensor]]:
            for item in arriving:
                if self._is_drafters(item[0]):
                    ahead.append(item)  # valid until the next one is requested
                    return
                yield item

        unread = self._alone.load(of_model(), on_write)
        return [*unread, *self._drafter.load(chain(ahead, arriving), on_write)]

    def _is_drafters(self, name: str) -> bool:
        return is_mtp_tensor(name, self._num_layers)


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of drafts over some time, on one engine or several.

    Example: `DraftCounts(num_steps=10, num_drafted=20, num_accepted=15)`.
    """

    num_steps: int = 0  # steps of a sequence in which a draft was verified
    num_drafted: int = 0  # tokens
    num_accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
        )

    def metrics(self) -> dict[str, float]:
        """Return the ratios as metrics; 0 if nothing was drafted."""
        return {
            "rollout/draft_acceptance": self.num_accepted / max(1, self.num_drafted),
            "rollout/accepted_tokens_per_step": self.num_accepted / max(1, self.num_steps),
        }


class DraftRecord:
    """Counter of drafts where vLLM's scheduler counts them, which it does only if it also logs."""

    def __init__(self, scheduler: Any) -> None:
        self._counts = DraftCounts()
        make_stats = scheduler.make_spec_decoding_stats

        def counted(
            stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *a: Any, **k: Any
        ) -> Any:
            if num_draft_tokens:
                self._counts += DraftCounts(1, num_draft_tokens, num_accepted_tokens)
            return make_stats(stats, num_draft_tokens, num_accepted_tokens, *a, **k)

        scheduler.make_spec_decoding_stats = counted  # shadows the class's method

    def take(self) -> DraftCounts:
        """Return and reset the counts since the last call."""
        taken, self._counts = self._counts, DraftCounts()
        return taken
