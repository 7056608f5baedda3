"""A checkpoint can be saved and loaded without Apex and Transformer Engine.

Symptom: `--load` of a checkpoint with optimizer state dies in `DistributedOptimizer.state_dict`
("assert len(steps) == 1", or KeyError 'step'); so does saving where a pipeline stage has no experts
beside others that have. What is loaded has step 0, in one tensor that all parameters count up, so
that training goes on otherwise than it would have; and in float32 loading dies ("a view of a leaf
Variable that requires grad is being used in an in-place operation").

Cause: loading first asks the new optimizer for its state, to know the shapes. PyTorch's AdamW has
none before its first step, and Megatron's own initialiser of it leaves out `step`, which Apex's
and Transformer Engine's Adam keep elsewhere. The optimizer of a stage's experts, where there are
none, has no state at all to read the step of. The step that was read from the checkpoint is then
overwritten by the new optimizer's own, which stands in the state of its parameters. Main parameters
in float32 are views of the model's, and of the three ways to load them one forbids gradients.

Why safe: an AdamW without state gets what it would give itself at its first step: zero moments and
step 0. A state that exists is left alone. Without parameters the step that is read stands for
nothing. A step is not part of the buffers that are loaded, so none is taken from there.

Upstream: no issue known; with Apex or Transformer Engine the branch is never taken.

Drop when: `state_dict` of a fresh distributed optimizer works without both.

Versions: megatron-core 0.17 to 0.20.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mcore_rl.patches.registry import Patch, require_parameters


def needed() -> bool:
    """True where Megatron falls back on PyTorch's AdamW."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE


def apply() -> None:
    """Initialise AdamW before its state is asked for, and keep the step that is loaded."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict
    require_parameters(state_dict, "self")

    def state_dict_of_initialised(self: Any) -> Any:
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    state = self.optimizer.state[parameter]
                    state.setdefault("step", torch.tensor(0.0))
                    for moment in ("exp_avg", "exp_avg_sq"):
                        if moment not in state:
                            state[moment] = torch.zeros_like(parameter.data)
            if not self.optimizer.state:
                with _showing_a_step(self.optimizer):
                    return state_dict(self)
        return state_dict(self)

    load_state_dict = DistributedOptimizer.load_state_dict
    require_parameters(load_state_dict, "self", "state_dict")
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    require_parameters(set_states, "self", "model_param", "tensors")

    def load_with_steps_of_their_own(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @torch.no_grad()
    def set_states_but_step(self: Any, model_param: Any, tensors: Any) -> None:
        if isinstance(self.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            tensors = {**tensors, "step": None}  # values that are not tensors are skipped
        set_states(self, model_param, tensors)

    DistributedOptimizer.state_dict = state_dict_of_initialised
    DistributedOptimizer.load_state_dict = load_with_steps_of_their_own
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step


@contextlib.contextmanager
def _showing_a_step(optimizer: Any) -> Iterator[None]:
    """While inside, the state dict of an optimizer without parameters has a step to read."""
    import torch

    own = optimizer.state_dict
    optimizer.state_dict = lambda: {**own(), "state": {0: {"step": torch.tensor(0.0)}}}
    try:
        yield
    finally:
        del optimizer.state_dict


PATCH = Patch(
    name="megatron.torch_adam_state",
    package="megatron-core",
    reason="a checkpoint's optimizer state can be loaded into PyTorch's AdamW",
    needed=needed,
    apply=apply,
)
