"""Which experts a router chose for each token: how choices are kept, joined and compared.

R2 and R3 (rollout routing replay, arXiv 2510.11370): what a policy is trained on was computed by
some experts; if the router of the trainer, a little apart in rounding, chooses others, then the
ratio of the two log-probs compares two different models. R3 replays in training what the engine
chose, R2 what the trainer itself chose when it scored the samples.

Shape legend: n tokens of one sample that went through the engine; m layers with experts, in
ascending order; k choices a token; e experts.
This module is pure: it imports neither Megatron nor vLLM nor torch.distributed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

OFF, R2, R3 = "off", "r2", "r3"  # values of --rl-routing-replay


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """What choices there are: by how many experts of which layers, of a model or a part of it."""

    layers: tuple[int, ...]  # global numbers from 0, ascending: those with experts
    topk: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest in which experts have a number and that torch has all operations of."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same, as torch calls it."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    @property
    def bytes_a_token(self) -> int:
        """Bytes of a token's choices, and one that says whether they are known."""
        return len(self.layers) * self.topk * self.dtype.itemsize + 1


@dataclass(frozen=True, slots=True)
class Routes:
    """The choices for one sample, of all layers with experts.

    The last token of a response is sampled and never goes through the engine, so that of a prompt
    of p tokens and a response of r there are n = p + r - 1. Of some the choices may be lacking.
    """

    ids: np.ndarray  # [n, m, k] of `RoutedLayers.dtype`
    known: np.ndarray  # [n] bool; where False, `ids` means nothing

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.known.nbytes

    def digest(self) -> bytes:
        """Equal for equal choices in equal order."""
        found = hashlib.blake2b(np.packbits(self.known).tobytes(), digest_size=16)
        found.update(np.ascontiguousarray(self.ids).view(np.uint8).data)
        return found.digest()


_COUNTED_TOKENS = 1024  # of a sample, spread over it: what counts is a share, and choices are many


def load_of(routes: Routes, num_experts: int) -> np.ndarray:
    """`[m, e]` int64: how often each expert of each layer is chosen, of a long sample for every
    second, third... token."""
    every = -(-len(routes.ids) // _COUNTED_TOKENS) or 1
    chosen = routes.ids[::every][routes.known[::every]]
    num_layers = chosen.shape[1]
    flat = chosen.astype(np.int64) + num_experts * np.arange(num_layers)[:, None]
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, -1)


def joined(
    routes: Sequence[Routes | None], lengths: Sequence[int], of: RoutedLayers
) -> tuple[np.ndarray, np.ndarray]:
    """`[t, m, k]` and `[t]` bool: the choices for samples of `lengths` tokens, one after the other.

    A sample's last token has none, nor has any of a sample without routes.
    """
    total = int(sum(lengths))
    ids = np.zeros((total, len(of.layers), of.topk), dtype=of.dtype)
    known, start = np.zeros(total, dtype=np.bool_), 0
    for each, length in zip(routes, lengths, strict=True):
        if each is not None:
            stop = start + len(each.ids)
            ids[start:stop], known[start:stop] = each.ids, each.known
        start += int(length)
    return ids, known
