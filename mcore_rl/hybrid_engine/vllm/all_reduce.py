"""Whether engines can use vLLM's own all-reduce kernel.

The kernel (`CustomAllreduce`, faster than NCCL for small batches) reads its peers' memory by CUDA
IPC. After it has captured CUDA graphs, vLLM exchanges IPC handles of the buffers in them. It then
goes through the ranks of a group in ascending order, but numbers the handles by group rank, so
that ranks in another order end with handles missing. And there are no IPC handles for memory of
torch's expandable segments, of which graphs consist unless sleep offloads them: the process exits.
vLLM 0.32.0 checks neither. Without the kernel, NCCL reduces instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.common.allocator import expandable_segments


@dataclass(frozen=True, slots=True)
class Obstacle:
    """For example Obstacle("the ranks 0, 2, 1, 3 of a TP group do not ascend", "choose ...")."""

    found: str
    remedy: str


def all_reduce_obstacle(
    tp_size: int,
    rank_map: Sequence[int] | None,
    environment: Mapping[str, str],
    *,
    captures_graphs: bool,
    offloads_graphs: bool,
) -> Obstacle | None:
    """Return what prevents vLLM's own all-reduce in engines of this layout. The same on all ranks
    if `environment` is."""
    if tp_size == 1 or not captures_graphs:
        return None
    ranks = list(rank_map or ())
    for group in (ranks[first : first + tp_size] for first in range(0, len(ranks), tp_size)):
        if group != sorted(group):
            found = f"the ranks {', '.join(map(str, group))} of a TP group do not ascend"
            return Obstacle(found, "choose a --rl-rollout-tp-size that divides Megatron's TP")
    setting = expandable_segments(environment)
    if setting is not None and not offloads_graphs:
        found = f"{setting} puts CUDA graphs into memory without IPC handles"
        return Obstacle(found, "take expandable_segments out of it")
    return None
