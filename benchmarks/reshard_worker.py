"""One rank of a resharding case: Megatron, vLLM's model, and every path between them."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Case
from benchmarks.destination import Destination
from benchmarks.measuring import measure, of_all_ranks, return_freed_memory_at_once
from benchmarks.paths import Gather, Memcpy, Ours, Path, Setting, Switch, VllmLoad
from benchmarks.peers import CoreResharding, MBridge, NotHere
from benchmarks.report import rows_of
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.plan.placement import Placement, with_rank_map
from mcore_rl.job.start import start
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.trainer.models import build_actor
from mcore_rl.verify import overwrite, stored_digests
from tests.model_only import VLLMModelOnly

# The path's name -> --rl-attest; None is its default.
SWITCHES = {"switch": None, "switch, proved in full": "full", "switch, unproved": "off"}


def measure_case(
    case: Case,
    *,
    checkpoint: str,
    weights: Mapping[str, torch.Tensor],
    bucket_mb: int,
    repetitions: int,
) -> list[dict[str, Any]]:
    """Return the rows of the case, the same on all ranks. Collective.

    `weights` is the checkpoint in shared memory.
    """
    return_freed_memory_at_once(True)
    setting, managers, from_disk = started(
        case, checkpoint=checkpoint, weights=weights, bucket_mb=bucket_mb
    )
    paths, unavailable = make_paths(setting, managers)
    gc.collect()
    gc.freeze()  # otherwise garbage collection walks all imported objects during a path

    def clear(path: Path) -> None:
        if path.destination is None:
            left = overwrite(setting.engine, setting.job, from_disk)
            assert not left, f"values of the load before are left: {left}"
        else:
            path.destination.clear()

    def check(path: Path) -> list[str]:
        if path.destination is not None:
            return path.destination.differing(weights)
        stored = stored_digests(setting.engine)
        return [name for name in from_disk if stored.get(name) != from_disk[name]]

    samples = of_all_ranks(measure(paths, repetitions=repetitions, check=check, clear=clear))
    needed = Destination(setting.holdings.need[setting.rank], setting.tensors).num_bytes
    sizes: list[Any] = [None] * case.world_size
    dist.all_gather_object(sizes, (setting.stream.lower_bound_bytes, needed))
    rows = rows_of(
        samples,
        model=case.model.name,
        layout=case.layout,
        model_bytes=sum(info.num_bytes for info in setting.tensors.values()),
        lower_bound_bytes=max(bound for bound, _ in sizes),
        resident_bytes=max(needed for _, needed in sizes),
        notes=unavailable | {path.name: path.note for path in paths if path.note},
    )
    setting.engine.close()
    dist.barrier()
    dist.destroy_process_group()
    return rows


def started(
    case: Case, *, checkpoint: str, weights: Mapping[str, torch.Tensor], bucket_mb: int
) -> tuple[Setting, dict[str, Any], dict[str, str]]:
    """Return Megatron and vLLM in the case's layouts, managers by the name of their path, and
    digests of vLLM's weights after its own load from disk. Collective."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(case.flags(checkpoint, bucket_mb), log=log)
        state, shards = build_actor(job, log=log)
    rollout = RolloutLayout(
        case.world_size, case.rollout_tp_size, case.expert_parallel, case.rollout_dp_size
    )
    placement = Placement(job.spec.shape, job.spec.train_layout, job.spec.layers, rollout)
    rollout = with_rank_map(placement, ranks_per_node=case.world_size)
    job = dataclasses.replace(job, spec=dataclasses.replace(job.spec, rollout_layout=rollout))
    engine = VLLMModelOnly(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    managers = {}
    for name, attest in SWITCHES.items():
        config = job.config.replaced(attest=attest or job.config.weight_sync.attest)
        spec = dataclasses.replace(job.spec, config=config)
        managers[name] = build_manager(dataclasses.replace(job, spec=spec), shards, engine)
        engine.wake_weights()  # the next manager puts it to sleep again
        engine.wake_kv_cache()
    engine.sleep()
    setting = Setting(
        job=job,
        shards=shards,
        chunks=state.chunks,
        stream=managers["switch"].stream,
        engine=engine,
        weights=weights,
        bucket_bytes=bucket_mb << 20,
    )
    return setting, managers, from_disk


def make_paths(setting: Setting, managers: Mapping[str, Any]) -> tuple[list[Path], dict[str, str]]:
    """Return the paths that can run, in the table's order, and why others cannot. Collective."""
    target = Destination(setting.holdings.need[setting.rank], setting.tensors)
    makers: dict[str, Callable[[], Path]] = {
        "ours": lambda: Ours(setting, target),
        "gather": lambda: Gather(setting, target),
        "mbridge": lambda: MBridge(setting, target),
        "core.resharding": lambda: CoreResharding(setting),
        "memcpy": lambda: Memcpy(setting, target),
        **{
            name: partial(
                Switch, manager, name, SWITCHES[name] or setting.job.config.weight_sync.attest
            )
            for name, manager in managers.items()
        },
        "vllm_load": lambda: VllmLoad(setting),
    }
    paths: list[Path] = []
    unavailable: dict[str, str] = {}
    for name, make in makers.items():
        try:
            paths.append(make())
        except NotHere as reason:
            unavailable[name] = str(reason)
    return paths, unavailable
