"""A router's choices of experts per token: storage, concatenation and comparison.

R2 and R3 (rollout routing replay, arXiv 2510.11370): the experts that computed a sample may differ
from the experts that the trainer's router chooses, because of rounding. The ratio of the two
log-probs then compares two different models. R3 replays the engine's choices in training, R2 the
trainer's own choices from when it scored the samples.

Shape legend: n tokens of one sample that went through the engine; m layers with experts, in
ascending order; k choices per token; e experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_rl.model.config_json import ModelShape
from mcore_rl.model.hybrid_pattern import numbered_layers

OFF, R2, R3 = "off", "r2", "r3"  # values of --rl-routing-replay


@dataclass(frozen=True, slots=True)
class RoutedLayers:
    """Layers with experts and their number of experts, in a model or a part of it.

    Example: `RoutedLayers(layers=(1, 2, 3), topk=8, num_experts=256)`.
    """

    layers: tuple[int, ...]  # global numbers (from 0) of the layers with experts, ascending
    topk: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """Smallest dtype that holds expert numbers and has all torch operations."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.int16)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same as a torch dtype."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    @property
    def bytes_a_token(self) -> int:
        """Bytes of a token's choices, and one byte for whether they are known."""
        return len(self.layers) * self.topk * self.dtype.itemsize + 1


def routed_layers(shape: ModelShape) -> RoutedLayers | None:
    """Return the layers, top-k and number of experts of a model's routers; None without experts."""
    if shape.experts is None:
        return None
    return RoutedLayers(shape.moe_layers, shape.experts.topk, shape.experts.num_experts)


def routers_of(chunk: Any) -> Iterator[tuple[int, Any]]:
    """Yield the routers of a model chunk, without MTP layers, each with its layer's number."""
    for layer, module in numbered_layers(chunk):
        if (router := getattr(getattr(module, "mlp", None), "router", None)) is not None:
            yield layer, router


@dataclass(frozen=True, slots=True)
class Routes:
    """Choices for one sample in all layers with experts.

    The last token of a response is sampled but never goes through the engine, so a prompt of p
    tokens and a response of r have n = p + r - 1. Some tokens may have no known choices.

    Example: for three tokens, 58 layers and 8 choices, `ids` is `[3, 58, 8]` uint8.
    """

    ids: np.ndarray  # [n, m, k] of `RoutedLayers.dtype`
    known: np.ndarray  # [n] bool; if False, `ids` is undefined

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.known.nbytes

    def digest(self) -> bytes:
        """Return a digest that is equal for equal choices in equal order."""
        hasher = hashlib.blake2b(np.packbits(self.known).tobytes(), digest_size=16)
        hasher.update(np.ascontiguousarray(self.ids).view(np.uint8).data)
        return hasher.digest()


_COUNTED_TOKENS = 1024  # per sample, spread evenly: enough to measure shares


def load_of(routes: Routes, num_experts: int) -> np.ndarray:
    """Return `[m, e]` int64: how often each expert is chosen; long samples are subsampled."""
    every = -(-len(routes.ids) // _COUNTED_TOKENS) or 1
    chosen = routes.ids[::every][routes.known[::every]]
    num_layers = chosen.shape[1]
    flat = chosen.astype(np.int64) + num_experts * np.arange(num_layers)[:, None]
    return np.bincount(flat.ravel(), minlength=num_layers * num_experts).reshape(num_layers, -1)


def concatenated(
    routes: Sequence[Routes | None], lengths: Sequence[int], of: RoutedLayers
) -> tuple[np.ndarray, np.ndarray]:
    """Return `[t, m, k]` and `[t]` bool: choices for consecutive samples of `lengths` tokens.

    A sample's last token, and every token of a sample without routes, has unknown choices.
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
