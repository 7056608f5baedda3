"""What sampling calls of an engine: `VLLMEngine` in this process, or servers (`remote`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from mcore_rl.hybrid_engine.vllm.drafter import DraftCounts
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request
from mcore_rl.model.speculation import Speculation


class SamplingConfig(Protocol):
    """The part of an engine's configuration that sampling reads."""

    @property
    def max_num_seqs(self) -> int:
        """The number of requests that run at the same time."""

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks, which step together."""

    @property
    def speculation(self) -> Speculation | None:
        """The drafting whose counts `take_draft_counts` returns; None: no counts."""


class SamplingGeneration(Protocol):
    """The requests running in an engine; see `Generation` for the contracts."""

    @property
    def num_running(self) -> int:
        """The number of requests that are not complete, including those that wait for room."""

    def submit(self, request: Request) -> None:
        """Add a request from the next step on."""

    def step(self) -> list[Completion]:
        """Return what ended in one step, in the same order on all ranks."""

    def end_soon(self, numbers: Sequence[int]) -> None:
        """End requests with the tokens that they have or their next one; drop those without a
        token; ignore unknown numbers."""

    def drop(self, numbers: Sequence[int] | None = None) -> list[tuple[Request, int]]:
        """Drop requests (default: all) with their tokens; ignore unknown numbers. Return each with
        the number of tokens that it had generated."""


class SamplingEngine(Protocol):
    """One rank of an engine that samples; see `VLLMEngine` for the contracts."""

    @property
    def config(self) -> SamplingConfig:
        """Its configuration."""

    @property
    def tp_rank(self) -> int:
        """The tensor-parallel rank, within the engine's data-parallel rank."""

    def generation(self) -> AbstractContextManager[SamplingGeneration]:
        """Open a context for adding and removing requests; those left at its end are dropped."""

    def any_rank(self, here: bool) -> bool:
        """Return whether `here` is true on any data-parallel rank of the engine."""

    def of_first_rank(self, mine: Any) -> Any:
        """Broadcast `mine` from the first rank of this TP group to all its ranks."""

    def text_of(self, token_ids: np.ndarray, *, with_special: bool = False) -> str:
        """Decode a response for its rewards, without special tokens; with them for a log."""

    def take_draft_counts(self) -> DraftCounts:
        """Return this data-parallel rank's draft counts since the last call."""

    def seed_sampling(self, seed: int) -> None:
        """Seed the random state of requests that have no seed of their own."""

    def close(self) -> None:
        """Free the engine."""
