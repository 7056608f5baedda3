"""Canaries: a few prompts that Megatron and vLLM must score equally, with the same weights.

They detect what no hash of weights can: errors in vLLM's processing of a tensor after reading it, a
weight map that names the wrong tensor, a kernel that computes something else. They are coarse: both
sides round in different orders, and choose different experts where a router's scores are close.
They therefore run after the first hand-over and then at an interval, and compare a mean over
tokens. The difference with correct weights depends on the model
(docs/using/never_lose_a_run.md); it is logged whether or not it is within the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from mcore_rl.batching.train_batches import batch_of_tokens
from mcore_rl.batching.types import TrainBatch
from mcore_rl.hybrid_engine.transfer.worlds import World
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine

LogProbs = Callable[[TrainBatch], torch.Tensor]  # [t] float32, as `Actor.log_probs`

_Differences = tuple[list[float], list[float]]  # means and maxima, by prompt

NUM_PROMPTS = 4
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class CanaryResult:
    """Differences of both sides' log-probs by prompt, on the worst engine; equal on all ranks.

    Example: `CanaryResult(1, (0.004, 0.006), (0.03, 0.05), tolerance=0.1)`.
    """

    weight_version: int
    mean_abs_differences: tuple[float, ...]
    max_abs_differences: tuple[float, ...]
    tolerance: float  # of the means, in nats; 0: unlimited

    @property
    def ok(self) -> bool:
        """Whether every prompt's mean is within the tolerance; False for a nan."""
        tolerance = self.tolerance or float("inf")
        return all(mean <= tolerance for mean in self.mean_abs_differences)

    def __str__(self) -> str:
        worst = int(np.argmax(self.mean_abs_differences))  # the first nan, if there is one
        return (
            f"canary prompt {worst} is scored apart by {self.mean_abs_differences[worst]:.4f} on "
            f"average and {self.max_abs_differences[worst]:.4f} at most (version "
            f"{self.weight_version}, --rl-canary-tolerance {self.tolerance:g} on average)"
        )


class Canary:
    """Canary prompts that both sides of a hand-over score.

    `tolerance` limits the mean |difference| of a prompt's log-probs, in nats; with 0 only a nan
    exceeds it. `log_probs` is Megatron's scoring without temperature (see `megatron_log_probs`,
    also for `count_multiple_of`); None on ranks without Megatron, which get the scores of rank 0.
    `prompts` are token ids, the same on all ranks. Call `score` while Megatron's parameters are in
    place, that is before rollout mode, and `compare` once the engine can generate. `score` is
    collective over Megatron's ranks, `compare` over the world.
    """

    def __init__(
        self,
        log_probs: LogProbs | None,
        prompts: Sequence[Sequence[int]],
        *,
        interval: int,
        tolerance: float,
        count_multiple_of: int = 1,
    ) -> None:
        assert interval >= 1, f"canaries every {interval} hand-overs"
        self._log_probs = log_probs
        self._count_multiple_of = count_multiple_of
        self._prompts = [[int(t) for t in ids[:MAX_TOKENS]] for ids in prompts[:NUM_PROMPTS]]
        self._prompts = [ids for ids in self._prompts if len(ids) > 1]  # token 0 has no score
        if not self._prompts:
            raise RuntimeError("canaries were given no prompt of two tokens or more")
        self._interval, self._tolerance = interval, tolerance
        self._megatron: list[np.ndarray] = []

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of each prompt."""
        return self._prompts

    def due(self, weight_version: int) -> bool:
        """Return whether canaries run: after the first hand-over and every `interval`th from it."""
        return (weight_version - 1) % self._interval == 0

    def score(self) -> None:
        """Score the prompts with Megatron, if it is here, for the next `compare`."""
        if self._log_probs is not None:
            self._megatron = megatron_log_probs(
                self._log_probs, self._prompts, count_multiple_of=self._count_multiple_of
            )

    def compare(self, engine: VLLMEngine | None, weight_version: int, world: World) -> CanaryResult:
        """Score the prompts with every engine, and compare with the last `score`.

        `engine` is None on ranks without one. Rank 0 of `world` has Megatron.
        """
        scores = [each.tolist() for each in self._megatron]
        of_first = world.gather(scores, of=list[list[float]])[0]
        ours: Sequence[ArrayLike] = self._megatron or of_first
        assert ours, "compare before score"
        mine = None
        if engine is not None:
            mine = differences(ours, engine.prompt_log_probs(self._prompts))
        everywhere = [each for each in world.gather(mine, of=_Differences | None) if each]
        return self._result(everywhere, weight_version)

    def compare_with(self, theirs: Sequence[ArrayLike], weight_version: int) -> CanaryResult:
        """Compare the last `score` with the log-probs of `prompts` by an engine elsewhere, each
        `[s - 1]`; on a rank with Megatron."""
        assert self._megatron, "compare before score"
        return self._result([differences(self._megatron, theirs)], weight_version)

    def _result(self, of_engines: Sequence[_Differences], weight_version: int) -> CanaryResult:
        return CanaryResult(
            weight_version=weight_version,
            mean_abs_differences=worst_of([means for means, _ in of_engines]),
            max_abs_differences=worst_of([maxima for _, maxima in of_engines]),
            tolerance=self._tolerance,
        )


def megatron_log_probs(
    log_probs: LogProbs, token_ids: Sequence[Sequence[int]], *, count_multiple_of: int = 1
) -> list[np.ndarray]:
    """Score every prompt with Megatron, each in its own micro-batch.

    All DP ranks give the same prompts. The last one is repeated up to a multiple of
    `count_multiple_of` micro-batches. `log_probs` is `Actor.log_probs`. Returns per prompt
    `[s - 1]` float32, entry i scores token i + 1.
    """
    batch = batch_of_tokens(token_ids, count_multiple_of=count_multiple_of)
    of_prompts = log_probs(batch).split(batch.lengths.tolist())
    # Drop each prompt's last position, which scores no token, and the repetitions.
    return [scores[:-1].numpy() for scores in of_prompts[: len(token_ids)]]


def differences(ours: Sequence[ArrayLike], theirs: Sequence[ArrayLike]) -> _Differences:
    """Return the means and the maxima of |difference| of each prompt's log-probs."""
    apart = [np.abs(np.asarray(a) - np.asarray(b)) for a, b in zip(ours, theirs, strict=True)]
    return [float(d.mean()) for d in apart], [float(d.max()) for d in apart]


def worst_of(by_rank: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return each prompt's maximum over the ranks; a nan is the largest."""
    return tuple(float(value) for value in np.max(np.array(by_rank), axis=0))
