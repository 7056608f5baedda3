"""Megatron's optimizer with a check of losses and gradients.

Before each update all ranks agree whether a loss or gradient is non-finite, and report its rank and
parameter. The run then stops or skips the update, as configured.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.spans import PASS, span
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.moe.balance import expert_biases

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of one optimizer step.

    Example: `UpdateResult(grad_norm=0.8, skipped=False)`.
    """

    grad_norm: float  # before clipping, over all ranks; nan if the update was skipped
    skipped: bool


class CheckedOptimizer:
    """A wrapper of a `TrainState`'s optimizer and scheduler; `name` is the model's, for messages.

    `on_nonfinite_grad` is "stop" (RuntimeError on every rank) or "skip" (parameters, expert biases,
    optimizer state and scheduler do not change).
    """

    def __init__(
        self, state: megatron_adapter.TrainState, *, name: str, on_nonfinite_grad: str
    ) -> None:
        self._state = state
        self._name = name
        self._skip = on_nonfinite_grad == "skip"
        self._biases_before: list[torch.Tensor] = []
        self._last_rate: float | None = None
        self._keep_biases()

    def _keep_biases(self) -> None:
        """Save the expert biases before each update.
        Megatron changes them when it finishes the gradients, before these are checked."""
        from megatron.core.utils import get_model_config

        config = get_model_config(self._state.model[0])
        finish = config.finalize_model_grads_func

        def finish_and_keep(*args: Any, **kwargs: Any) -> None:
            self._biases_before = [b.clone() for b in expert_biases(self._state.chunks)]
            finish(*args, **kwargs)

        config.finalize_model_grads_func = finish_and_keep

    def _skipped(self) -> UpdateResult:
        """Restore the expert biases, and return the result of a skipped update."""
        biases = expert_biases(self._state.chunks)
        for bias, before in zip(biases, self._biases_before, strict=True):
            bias.copy_(before)
        return UpdateResult(grad_norm=float("nan"), skipped=True)

    @property
    def learning_rate(self) -> float:
        """The rate of the last update, skipped or not; before the first one, its rate."""
        return self._next_rate() if self._last_rate is None else self._last_rate

    def _next_rate(self) -> float:
        return float(max(group["lr"] for group in self._state.optimizer.param_groups))

    @span("optimizer", PASS)
    def step(self, *, num_samples: int, nonfinite_losses: Sequence[int] = ()) -> UpdateResult:
        """Update the parameters from the finished gradients. Collective over all ranks.

        `num_samples` is the number of samples in the global mini-batch, the unit of Megatron's
        scheduler. `nonfinite_losses` are the ranks whose part of the loss is not finite; messages
        name them before the gradients, which data parallelism has spread to other ranks.
        """
        self._last_rate = self._next_rate()  # the scheduler changes it after the update
        culprits = self._nonfinite_gradients()
        if culprits and not nonfinite_losses and self._scale_may_fall():
            # The step only lowers the scale: Megatron's scaler finds the overflow, too.
            self._state.optimizer.step()
            logger.info("%s: gradients overflow in fp16, the loss scale falls", self._name)
            return self._skipped()
        if culprits or nonfinite_losses:
            problems = [
                f"non-finite loss of the {self._name} on rank {r}" for r in nonfinite_losses
            ]
            if culprits:
                problems.append(f"non-finite gradient of the {self._name} in {'; '.join(culprits)}")
            message = ", ".join(problems)
            if not self._skip:
                raise RuntimeError(
                    f"{message}; --rl-on-nonfinite-grad skip would continue without this update"
                )
            logger.warning("%s: update skipped", message)
            return self._skipped()
        successful, grad_norm, _ = self._state.optimizer.step()
        if not successful:
            return self._skipped()
        self._state.scheduler.step(increment=num_samples)
        # Without gradient clipping Megatron computes no norm.
        return UpdateResult(float("nan") if grad_norm is None else float(grad_norm), skipped=False)

    def _scale_may_fall(self) -> bool:
        """Return whether a lower loss scale may make the gradients finite.
        Scales start at 2^32 (--initial-loss-scale), far above the range of float16."""
        from megatron.core.optimizer.grad_scaler import DynamicGradScaler

        scalers = [getattr(part, "grad_scaler", None) for part in self._state.optimizers]
        return bool(scalers) and all(
            isinstance(scaler, DynamicGradScaler) and bool(scaler.scale > scaler.min_scale)
            for scaler in scalers
        )

    def _nonfinite_gradients(self) -> list[str]:
        """Return "rank R: parameter" of each rank's first non-finite gradient, on all ranks."""
        gradients = dict(megatron_adapter.finished_gradients(self._state))
        # Usually all are finite, which one sum per gradient shows quickly. A sum that is not finite
        # may have overflowed, so each gradient is then checked.
        sums = [gradient.sum(dtype=torch.float64) for gradient in gradients.values()]
        mine = None
        if sums and not torch.isfinite(torch.stack(sums)).all():
            mine = next(
                (name for name, grad in gradients.items() if not torch.isfinite(grad).all()), None
            )
        has_any = torch.tensor([mine is not None], dtype=torch.int32, device=self._state.device)
        dist.all_reduce(has_any, op=dist.ReduceOp.MAX)
        if not has_any.item():
            return []
        names = objects.all_gather(mine)
        return [f"rank {rank}: {name}" for rank, name in enumerate(names) if name is not None]
