"""Hand-overs that send less: in a narrower dtype, and only what changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.switch_report import TO_ROLLOUT, ReshardReport
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.verify import stored_digests
from tests.dist.jobs import first_mini_batch, started
from tests.model_only import VLLMModelOnly


def hand_overs(flags: list[str]) -> dict[str, list[Any]]:
    """Five hand-overs in a row by each way of sending, on weights that change in between.

    The checkpoint is treated as a float32 one. Between the first and the second nothing changes,
    then one matrix does, then an update changes everything, then nothing.
    """
    job, actor, shards = started(flags, in_float32=True)
    batch = first_mini_batch(job, has_reference=False)
    engine = VLLMModelOnly(engine_config(job))
    ways = {
        "whole": {},
        "bf16": {"reshard_dtype": "bf16"},
        "delta": {"reshard_delta": True, "reshard_full_interval": 4},
        "both": {"reshard_dtype": "bf16", "reshard_delta": True},
    }
    managers, reports = {}, {}
    for way, config in ways.items():
        spec = dataclasses.replace(job.spec, config=job.config.replaced(**config))
        managers[way] = build_manager(dataclasses.replace(job, spec=spec), shards, engine)
        reports[way] = []
        managers[way].on_reshard_end.append(reports[way].append)
        engine.wake_weights()  # the next manager expects an engine that is awake
        engine.wake_kv_cache()
    engine.sleep()
    digests: dict[str, list[Any]] = {way: [] for way in ways}
    for change in (None, None, _change_one_matrix, lambda *_: actor.update(batch), None):
        if change is not None:
            change(shards)
        for way, manager in managers.items():
            with manager:
                digests[way].append(stored_digests(engine))
    engine.close()
    dist.destroy_process_group()

    def of_hand_over(way: str, field: str) -> list[Any]:
        found: list[ReshardReport] = [r for r in reports[way] if r.direction == TO_ROLLOUT]
        return [getattr(report, field) for report in found]

    return {
        "same_as_whole": [digests[way] == digests["whole"] for way in ways],
        "num_versions": [len({str(digest) for digest in digests["whole"]})],
        **{
            f"{way}_{field}": of_hand_over(way, f"{field}_bytes")
            for way in ways
            for field in ("received", "saved")
        },
        "attested": [all(of_hand_over(way, "attested")) for way in ways],
    }


@torch.no_grad()
def _change_one_matrix(shards: Any) -> None:
    """Two elements of every layer's attention output, wherever a part of it lies."""
    for name in shards.tensors():
        if name.endswith("o_proj.weight"):
            for box in shards.boxes(name):
                data = shards.read(name, box).clone()
                data[0, :2] += 1.0
                shards.write(name, box, data)
