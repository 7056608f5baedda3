"""One rank of one case: the real Megatron, the real vLLM's model, and every path between them."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Case
from benchmarks.destination import Destination
from benchmarks.measuring import measure, of_all_ranks
from benchmarks.paths import Gather, Memcpy, Ours, Path, Setting, Switch, VllmLoad
from benchmarks.peers import CoreResharding, MBridge, NotHere
from benchmarks.report import rows_of
from mcore_rl.hybrid_engine.holdings import exchange
from mcore_rl.hybrid_engine.layout import RolloutLayout
from mcore_rl.hybrid_engine.placement import Placement, with_rank_map
from mcore_rl.hybrid_engine.vllm_model_only import VLLMModelOnly
from mcore_rl.run_parts import build_manager, engine_config, setup_logging
from mcore_rl.startup import build_actor, start
from mcore_rl.verify import overwrite_with_zeros, stored_digests


def play(
    case: Case,
    *,
    checkpoint: str,
    weights: Mapping[str, torch.Tensor],
    bucket_mb: int,
    repetitions: int,
) -> list[dict[str, Any]]:
    """The rows of the case, the same on all ranks. Collective.

    `weights` is the checkpoint in memory that all ranks share.
    """
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(case.flags(checkpoint, bucket_mb), log=log)
        state, shards = build_actor(job, log=log)
    rollout = RolloutLayout(
        case.world_size, case.rollout_tp_size, case.expert_parallel, case.rollout_dp_size
    )
    placement = Placement(job.shape, job.train_layout, job.layers, rollout)
    job = dataclasses.replace(
        job, rollout_layout=with_rank_map(placement, ranks_per_node=case.world_size)
    )
    engine = VLLMModelOnly(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    tensors = dict(job.checkpoint.tensors)
    needed = engine.learn_needs(
        {name: (info.shape, getattr(torch, info.dtype)) for name, info in tensors.items()}
    )
    setting = Setting(
        job=job,
        shards=shards,
        chunks=state.chunks,
        tensors=tensors,
        holdings=exchange({name: shards.boxes(name) for name in tensors}, needed),
        engine=engine,
        weights=weights,
        bucket_bytes=bucket_mb << 20,
    )
    paths, not_here = _paths(setting, build_manager(job, shards, engine))
    gc.collect()
    gc.freeze()  # walking all that was imported takes long, and not for what a path makes

    def clear(path: Path) -> None:
        if path.destination is None:
            overwrite_with_zeros(engine, job, from_disk)
        else:
            path.destination.clear()

    def check(path: Path) -> list[str]:
        if path.destination is not None:
            return path.destination.differing(weights)
        stored = stored_digests(engine)
        return [name for name in from_disk if stored.get(name) != from_disk[name]]

    samples = of_all_ranks(measure(paths, repetitions=repetitions, check=check, clear=clear))
    bounds: list[Any] = [None] * case.world_size
    resident = Destination(setting.holdings.need[setting.rank], tensors).num_bytes
    dist.all_gather_object(
        bounds, (setting.holdings.lower_bound_bytes(setting.rank, tensors), resident)
    )
    rows = rows_of(
        samples,
        model=case.model.name,
        layout=case.layout,
        model_bytes=sum(info.num_bytes for info in tensors.values()),
        lower_bound_bytes=max(bound for bound, _ in bounds),
        resident_bytes=max(size for _, size in bounds),
        not_here=not_here,
    )
    for path in paths:
        if isinstance(path, CoreResharding):
            next(row for row in rows if row["path"] == path.name)["note"] = (
                f"and a second model of {path.resident_bytes / 1e6:.0f} MB stays resident"
            )
    engine.close()
    dist.barrier()
    dist.destroy_process_group()
    return rows


def _paths(setting: Setting, manager: Any) -> tuple[list[Path], dict[str, str]]:
    """The paths that can run, in the order of the table, and why the others cannot."""
    target = Destination(setting.holdings.need[setting.rank], setting.tensors)
    makers = {
        "ours": lambda: Ours(setting, target),
        "gather": lambda: Gather(setting, target),
        "mbridge": lambda: MBridge(setting, target),
        "core.resharding": lambda: CoreResharding(setting),
        "memcpy": lambda: Memcpy(setting, target),
        "switch": lambda: Switch(setting, manager),
        "vllm_load": lambda: VllmLoad(setting),
    }
    paths: list[Path] = []
    not_here: dict[str, str] = {}
    for name, make in makers.items():
        try:
            paths.append(make())
        except NotHere as reason:
            not_here[name] = str(reason)
    return paths, not_here
