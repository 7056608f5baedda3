"""A hand-over with proof: attest what arrived, repeat it by the plain gather once, or stop the run.

    plan ─► attest ─ ok ─► KV cache ─► canary ─ ok ─► roll out
              │                          │
              └─────► plain gather ◄─────┘   once; a second failure stops the run

All ranks reach the same result and take the same path.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from mcore_rl.hybrid_engine.proof.attest import Attestation, Attestor, ReadSlice
from mcore_rl.hybrid_engine.proof.canary import Canary, CanaryResult
from mcore_rl.hybrid_engine.transfer.gather import GatherPath
from mcore_rl.hybrid_engine.transfer.worlds import PeerFailure, World
from mcore_rl.hybrid_engine.vllm.in_process_engine import Receiver, VLLMEngine
from mcore_rl.hybrid_engine.vllm.reload import Weights

logger = logging.getLogger(__name__)


class NotProved(RuntimeError):
    """The engines do not have Megatron's weights, or compute otherwise. Raised on all ranks."""


class Proof:
    """Reload of the engines of `world` with proof. All methods are collective over it.

    `engine` is None on ranks that only send; `receiver` is what is reloaded, by default the engine.
    Without an attestor nothing is hashed; an error is raised unchanged where it occurred, and as
    RuntimeError on the other ranks. `on_repeat` is called on all ranks before a hand-over is
    repeated: the other path's copies of the last version must not be used again. `room` is entered
    around a repetition that canaries caused, which reads the parameters again and reloads an engine
    that is ready to generate.
    """

    def __init__(
        self,
        engine: VLLMEngine | None,
        *,
        world: World,
        attestor: Attestor | None,
        gather: GatherPath,
        canary: Canary | None = None,
        receiver: Receiver | None = None,
        on_repeat: Callable[[], None] = lambda: None,
        room: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._engine, self._receiver, self._world = engine, receiver or engine, world
        self._attestor, self._gather, self._canary = attestor, gather, canary
        self._on_repeat, self._room = on_repeat, room
        self._version = 0
        self.repeated = False  # whether the last hand-over was repeated by the plain gather

    def score_canary(self, weight_version: int) -> None:
        """Score the canaries by Megatron, if they are due; before rollout mode."""
        if self._canary is not None and self._canary.due(weight_version):
            self._canary.score()

    def begin(self, weight_version: int, read: ReadSlice) -> None:
        """Hash what this rank attests, as `read` serves it; before the hand-over."""
        self._version, self.repeated = weight_version, False
        if self._attestor is not None:
            self._attestor.begin(weight_version, read)

    def reload(self, weights: Weights, read: ReadSlice) -> Attestation | None:
        """Load `weights`; if they fail attestation, load what `read` serves by the plain gather.

        Returns the attestation of the weights that the engine has now. Raises NotProved if they
        are not Megatron's.
        """
        attestation = self._load(weights)
        if attestation is not None and not attestation.ok:
            return self._repeat(str(attestation), read)
        return attestation

    def check_canary(self, read: ReadSlice) -> CanaryResult | None:
        """Compare both sides' scores if canaries are due, in rollout mode; as strict as `reload`.

        Returns None if no canaries are due.
        """
        if self._canary is None or not self._canary.due(self._version):
            return None
        result = self._compared(self._canary)
        if not result.ok and not self.repeated:
            with self._room():
                self._repeat(str(result), read)
            result = self._compared(self._canary)
        if not result.ok:
            raise NotProved(
                f"{result}, and the plain gather did not change that; the engine has other weights "
                "than Megatron or computes otherwise; python -m mcore_rl.verify finds out which. "
                "If it is rounding, raise --rl-canary-tolerance (0 compares and never stops)"
            )
        return result

    def _compared(self, canary: Canary) -> CanaryResult:
        result = canary.compare(self._engine, self._version, self._world)
        if self._world.rank == 0:
            logger.info("[Canary] %s", result)
        return result

    def _repeat(self, reason: str, read: ReadSlice) -> Attestation | None:
        if self._world.rank == 0:
            logger.warning("%s; the hand-over is repeated by the plain gather", reason)
        self.repeated = True
        self._on_repeat()
        if self._attestor is not None:
            self._attestor.repeat()
        attestation = self._load(self._gather.weights(read))
        if attestation is not None and not attestation.ok:
            raise NotProved(f"{reason}; nor by the plain gather: {attestation}")
        return attestation

    def _load(self, weights: Weights) -> Attestation | None:
        fault: Exception | None = None
        try:
            if self._receiver is None:
                for _ in weights:  # yields nothing here, and sends what this rank holds
                    pass
            else:
                note = None if self._attestor is None else self._attestor.note
                self._receiver.reload(weights, note)
        except PeerFailure:
            raise
        except Exception as error:  # of any type: it must be reported to all ranks
            logger.debug("a hand-over failed on this rank", exc_info=True)
            fault = error
        text = None if fault is None else str(fault) or repr(fault)
        if self._attestor is not None:
            return self._attestor.finish(text)
        texts = self._world.gather(text, of=str | None)
        if fault is not None:
            raise fault
        for rank, other in enumerate(texts):
            if other is not None:
                raise RuntimeError(f"the hand-over failed on rank {rank}: {other}")
        return None
