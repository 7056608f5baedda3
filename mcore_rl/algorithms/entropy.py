"""Control of the coefficient of the entropy bonus (Skywork-OR1, arXiv 2505.22312)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_STEP = 0.005  # of the paper


@dataclass(slots=True)
class EntropyController:
    """Controller of the weight of the entropy in the loss.

    Without a target the weight is `coef`; the state is empty. With a target, e being the entropy
    of a step, c the coefficient and d the step size (arXiv 2505.22312, eq. 3.2, with c = 0 in the
    first step):

        weight = c if e <= target else 0
        c     += d if e < target, -d if e > target

    so that the bonus acts only while the entropy is too low, and grows until it is not. Here c is
    never negative, as in the authors' code, which also bounds it above (by 0.005 in their scripts,
    with steps of 1e-4). The entropy of a step is known after its updates, so that the weight of a
    step follows from the step before, as in TRL. A non-finite entropy has no effect.
    """

    coef: float  # of the next step
    target: float | None = None  # nats per token
    step: float = DEFAULT_STEP
    entropy: float = 0.0  # of the last step, nats per token

    @property
    def weight(self) -> float:
        """The weight of the entropy in the next step's loss."""
        return self.coef if self.target is None or self.entropy <= self.target else 0.0

    def update(self, entropy: float) -> None:
        """Update after a step with its entropy per token, the mean over all loss tokens."""
        if self.target is None or not math.isfinite(entropy):
            return
        self.entropy = entropy
        direction = (entropy < self.target) - (entropy > self.target)
        self.coef = max(self.coef + direction * self.step, 0.0)

    def state_dict(self) -> dict[str, float]:
        return {} if self.target is None else {"coef": self.coef, "entropy": self.entropy}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state, if the coefficient is adapted now and was adapted then."""
        if self.target is not None:
            self.coef = float(state.get("coef", self.coef))
            self.entropy = float(state.get("entropy", self.entropy))
