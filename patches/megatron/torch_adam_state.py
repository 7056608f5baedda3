"""A checkpoint can be saved and loaded without Apex and Transformer Engine.

Symptom: `--load` of a checkpoint with optimizer state fails in `DistributedOptimizer.state_dict`
("assert len(steps) == 1", or KeyError 'step'); so does saving if one pipeline stage has no experts
while others do. The loaded state has step 0, in one tensor that all parameters increment, so that a
resumed run differs. In float32 loading fails ("a view of a leaf Variable that requires grad is
being used in an in-place operation").

Cause: loading first requests the new optimizer's state, for its shapes. PyTorch's AdamW has none
before its first step, and Megatron's initialiser omits `step`, which Apex's and Transformer
Engine's Adam keep elsewhere. On a stage without experts, the experts' optimizer has no state to
read the step from. The new optimizer's own step, in the state of its parameters, then overwrites
the step read from the checkpoint. Main parameters in float32 are views of the model's, and one of
the three ways to load them does not allow gradients.

Why safe: an AdamW without state gets its initial state: zero moments and step 0. An existing state
is not changed. Without parameters the step has no effect. A step is not part of the loaded buffers,
so none is taken from there.

Upstream: no issue known; with Apex or Transformer Engine the branch is never taken.

Drop when: `state_dict` of a fresh distributed optimizer works without both.

Versions: megatron-core 0.18 to 0.20.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require_parameters

ADAMS = (torch.optim.Adam, torch.optim.AdamW)


def needed() -> bool:
    """Return whether Megatron falls back to PyTorch's AdamW."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def apply() -> None:
    """Initialise AdamW before its state is read, and keep the loaded step."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict
    require_parameters(state_dict, "self")

    def state_dict_of_initialised(self: Any) -> Any:
        if isinstance(self.optimizer, ADAMS):
            add_missing_states(self.optimizer, step=0.0)
            if not self.optimizer.state:
                with _showing_a_step(self.optimizer):
                    return state_dict(self)
        return state_dict(self)

    load_state_dict = DistributedOptimizer.load_state_dict
    require_parameters(load_state_dict, "self state_dict")
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    require_parameters(set_states, "self model_param tensors")

    def load_with_steps_of_their_own(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        if isinstance(self.optimizer, ADAMS):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def set_states_but_step(self: Any, model_param: Any, tensors: Any) -> None:
        if isinstance(self.optimizer, ADAMS):
            tensors = {**tensors, "step": None}  # values that are not tensors are skipped
        set_states(self, model_param, tensors)

    DistributedOptimizer.state_dict = state_dict_of_initialised
    DistributedOptimizer.load_state_dict = load_with_steps_of_their_own
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step


def add_missing_states(optimizer: Any, step: float) -> None:
    """Give each parameter that lacks a state in Adam one with zero moments and `step`."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state.setdefault("step", torch.tensor(step))
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment not in state:
                    state[moment] = torch.zeros_like(parameter.data)


@contextlib.contextmanager
def _showing_a_step(optimizer: Any) -> Iterator[None]:
    """Add a step to the state dict of an optimizer without parameters, temporarily."""
    own = optimizer.state_dict
    optimizer.state_dict = lambda: {**own(), "state": {0: {"step": torch.tensor(0.0)}}}
    try:
        yield
    finally:
        del optimizer.state_dict


PATCH = Patch(
    "megatron.torch_adam_state",
    "a checkpoint's optimizer state can be loaded into PyTorch's AdamW",
    apply,
    needed,
)
