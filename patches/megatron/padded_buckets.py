"""Checkpoints have the optimizer's state of each parameter where gradients lie in several buckets.

Symptom: a run that goes on from a `torch_dist` checkpoint of the fully reshardable kind computes
with another optimizer state, main parameters among it, and says nothing. Seen with
`--pipeline-model-parallel-size 2 --mtp-num-layers 1` where the parameters of a bucket are no
multiple of 128: the embedding was another one after the first update.

Cause: `DistributedOptimizer.get_parameter_state_dp_zero` puts the states of all buckets one after
the other without the padding at their ends, and `sharded_param_state_fully_reshardable` reads them
where parameters begin in the padded buffer. Several buckets there are with an embedding that two
stages share, and with `--overlap-grad-reduce`.

Why safe: that one reader gets the states at the places that it reads from, which for a single
bucket, or without padding, are the same; other formats read and write as before.

Upstream: megatron-core 0.19.2 pads what it finds missing at the end with zeros and names its
issue 504.

Drop when: the reader goes by unpadded places.

Versions: those whose two functions look so, which is tested by their source.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from mcore_rl.patches.registry import Patch, require_parameters

_WRITES = "offset_in_world_tensors += gbuf_world_numel_unpadded\n"
_READS = "world_tensors[state_key][param_world_start:param_world_end]\n"
_SIZE = "numel_unpadded"


def needed() -> bool:
    """Whether this Megatron writes and reads at different places."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    reads = getattr(Optimizer, "sharded_param_state_fully_reshardable", None)
    return (
        reads is not None
        and _READS in inspect.getsource(reads)
        and _WRITES in inspect.getsource(Optimizer.get_parameter_state_dp_zero)
    )


def apply() -> None:
    """Put the states at the places of the padded buffer."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer as Optimizer

    read = Optimizer.sharded_param_state_fully_reshardable
    require_parameters(read, "self", "model_sharded_state_dict", "is_loading", "metadata")

    def read_padded(self: Any, *args: Any, **kwargs: Any) -> Any:
        gather = self.get_parameter_state_dp_zero
        self.get_parameter_state_dp_zero = lambda *a, **k: _padded(self, gather(*a, **k))
        try:
            return read(self, *args, **kwargs)
        finally:
            del self.get_parameter_state_dp_zero

    Optimizer.sharded_param_state_fully_reshardable = read_padded


def _padded(optimizer: Any, state: dict | None) -> dict | None:
    """All states of `get_parameter_state_dp_zero`, None where another rank has them."""
    for number, buffer in enumerate(optimizer.buffers if state is not None else ()):
        assert state is not None
        for tensors in state[number].values():
            for key, tensor in tensors.items():
                if key != _SIZE:
                    tensors[key] = spread(
                        tensor,
                        [start for start, _ in buffer.bucket_indices],
                        [bucket.numel_unpadded for bucket in buffer.buckets],
                        buffer.numel,
                    )
    return state


def spread(tensor: torch.Tensor, starts: list[int], sizes: list[int], length: int) -> torch.Tensor:
    """Parts of `sizes`, one after the other in `tensor`, at `starts` of one of `length`."""
    if len(starts) == 1:
        return tensor
    found = tensor.new_zeros(length)
    for start, size, part in zip(starts, sizes, tensor.split(sizes), strict=True):
        found[start : start + size] = part
    return found


PATCH = Patch(
    name="megatron.padded_buckets",
    package="megatron-core",
    reason="checkpoints have the optimizer's state of each parameter where there are several "
    "buckets",
    needed=needed,
    apply=apply,
)
