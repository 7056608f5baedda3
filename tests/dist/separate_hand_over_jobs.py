"""Hand-overs between ranks of their own: ranks 0 and 1 train, ranks 2 and 3 have the engines.

Each side is a world of its own, as in a job with --rl-rollout-ranks, and one world joins both.
Trainers also hand over to engines in their own processes, whose weights are the reference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mcore_rl.common import objects
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.hand_over import HandOver
from mcore_rl.hybrid_engine.proof.attest import FULL, OFF, Attestor
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.transfer.gather import GatherPath
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, reach_store
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.weight_stream import HandOverOptions, WeightStream
from mcore_rl.job.start import start
from mcore_rl.megatron.carried import CarriedTensors
from mcore_rl.megatron.float8 import quantised_weights
from mcore_rl.model.boxes import volume
from mcore_rl.model.float8_blocks import float8_weights
from mcore_rl.model.layout import RolloutLayout
from mcore_rl.model.tensors import is_mtp_tensor
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.trainer.job import Job
from mcore_rl.verify import overwrite, stored_digests
from tests.dist.attest_jobs import CANARY_TOLERANCE, TRAVELS, gates_for_up_projections, loading
from tests.dist.float8_jobs import GivenNeeds, collected, unlike, whole_weights
from tests.dist.jobs import first_mini_batch, random_tokens, started
from tests.model_only import VLLMModelOnly

RANKS_PER_SIDE = 2
CPU = torch.device("cpu")
Fault = contextlib.AbstractContextManager[Any]


class Side:
    """This rank's place: its job, its model or its engine, and the world of both sides."""

    def __init__(
        self, flags: list[str], ports: Sequence[int], make_engine: Callable[[Job], VLLMEngine]
    ) -> None:
        rank = int(os.environ["RANK"])
        self.is_trainer = rank < RANKS_PER_SIDE
        joint = int(os.environ["MASTER_PORT"])
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # each side has a store of its own
        os.environ.update(
            RANK=str(rank % RANKS_PER_SIDE),
            LOCAL_RANK=str(rank % RANKS_PER_SIDE),
            WORLD_SIZE=str(RANKS_PER_SIDE),
            LOCAL_WORLD_SIZE=str(RANKS_PER_SIDE),
            MASTER_PORT=str(ports[rank // RANKS_PER_SIDE]),
        )
        self.actor = self.shards = self.engine = None
        if self.is_trainer:
            self.job, self.actor, self.shards = started(flags)
        else:
            setup_logging()
            with open("/dev/null", "w") as log:
                self.job = start(flags, log=log, has_engine=False)
            self.engine = make_engine(self.job)
        store = reach_store("127.0.0.1", joint, 400)
        self.world = JoinedWorld(
            store, rank=rank, size=2 * RANKS_PER_SIDE, name="test", timeout_seconds=400
        )

    def hand_over(self, canary: Canary | None = None, **options: Any) -> HandOver:
        checkpoint = self.job.spec.checkpoint
        return HandOver(
            checkpoint.tensors,
            None,
            HandOverOptions(seed=1, bucket_bytes=1 << 16, **options),
            shards=self.shards,
            engine=self.engine,
            shape=self.job.spec.shape,
            device=CPU,
            world=self.world,
            canary=canary,
            carried=CarriedTensors(checkpoint) if checkpoint.mtp else None,
        )

    def failing_on(self, rank: int, target: Any, method: str) -> Fault:
        if self.world.rank != rank:
            return contextlib.nullcontext()
        return mock.patch.object(target, method, side_effect=RuntimeError("the disk is on fire"))

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        dist.barrier(self.world.control)  # a side's first rank hosts its store
        self.world.close()
        dist.destroy_process_group()


def hand_overs(flags: list[str], ports: list[int]) -> dict[str, Any]:
    """As loaded, unchanged, changed, with a fault each, and once more; by delta."""
    side = Side(flags, ports, lambda job: VLLMModelOnly(engine_config(job)))
    hand_over = side.hand_over(attest=FULL, delta=True, full_every=100)
    manager = None
    if side.is_trainer:
        manager = build_manager(side.job, side.shards, VLLMModelOnly(engine_config(side.job)))
    found: dict[str, Any] = {"lower_bound": hand_over.stream.lower_bound_bytes, "versions": {}}
    found["needed"] = sum(
        volume(box) * hand_over.stream.tensors[name].itemsize
        for name, boxes in hand_over.stream.need.items()
        for box in boxes
    )
    unattested = side.hand_over(attest=OFF)

    def run(name: str, of: HandOver = hand_over, fault: Fault | None = None) -> None:
        """One hand-over, the same by `manager`, and everything that is to be known of both."""
        raised = None
        report, version = None, 1 + len(found["versions"])
        try:
            with fault or contextlib.nullcontext():
                report = of.run(version)
        except RuntimeError as error:
            raised = str(error)
        stored = None
        if raised is None and side.engine is not None:
            stored = stored_digests(side.engine)
        if raised is None and manager is not None:
            with manager:
                stored = stored_digests(manager._engine)
        found["versions"][name] = {
            "raised": raised,
            "report": report and dataclasses.asdict(report),
            "headers": of.stream.transfer.stats.header_bytes,
            "stored": stored,
        }

    run("loaded")
    run("unchanged")
    if side.actor is not None:
        side.actor.update(first_mini_batch(side.job, has_reference=False))
    run("updated")
    run("flipped", fault=_flipped_bit(hand_over, on_rank=2, rank=side.world.rank))
    run("repaired")
    run("unread", fault=side.failing_on(1, side.shards, "read"))
    model = side.engine and side.engine.model
    run("unloaded", fault=side.failing_on(3, model, "load_weights"))
    run("unattested", unattested)
    run("unattested_unloaded", unattested, fault=side.failing_on(3, model, "load_weights"))
    run("again")
    if manager is not None:
        manager._engine.close()
    side.close()
    return found


def _flipped_bit(hand_over: HandOver, *, on_rank: int, rank: int) -> Fault:
    transfer = hand_over.stream.transfer
    stream = transfer.stream

    def flipping(read: Any) -> Iterator[Any]:
        for name, pieces in stream(read):
            if name == TRAVELS and rank == on_rank:
                pieces[0][1].view(-1)[5:6].view(torch.uint8)[1] ^= 1 << 7
            yield name, pieces

    return mock.patch.object(transfer, "stream", flipping)


def canaries(flags: list[str], ports: list[int]) -> dict[str, Any]:
    """Hand-overs to engines that generate and draft, compared with vLLM's own load."""
    side = Side(flags, ports, lambda job: VLLMEngine(engine_config(job, load_format="auto")))
    from_disk: dict[str, str] = {}
    if side.engine is not None:
        from_disk = stored_digests(side.engine)
        side.engine.sleep()
        assert overwrite(side.engine, side.job, from_disk) == []
        side.engine.wake_weights()
        side.engine.wake_kv_cache()
    tokens = random_tokens(side.job.spec.shape.vocab_size).tolist()
    log_probs = side.actor and side.actor.log_probs
    canary = Canary(log_probs, tokens, interval=1, tolerance=CANARY_TOLERANCE)
    hand_over = side.hand_over(canary, attest=FULL)
    num_layers = side.job.spec.shape.num_layers
    found: dict[str, Any] = {
        "drafter": sum(name.startswith("drafter.") for name in from_disk),
        "mtp_tensors": sorted(n for n in hand_over.stream.tensors if is_mtp_tensor(n, num_layers)),
    }

    def misplaced(times: int) -> Fault:
        if side.engine is None:
            return contextlib.nullcontext()
        return loading(side.engine.model, gates_for_up_projections, times)

    for name, times in (("clean", 0), ("misplaced_once", 1), ("misplaced", 2), ("again", 0)):
        raised, repeated, equal = None, None, None
        try:
            with misplaced(times):
                repeated = hand_over.run(1 + len(found)).repeated
        except RuntimeError as error:
            raised = str(error)
        if raised is None and side.engine is not None:
            equal = stored_digests(side.engine) == from_disk
        found[name] = {"raised": raised, "repeated": repeated, "stored_equal": equal}
    side.close()
    return found


def float8(flags: list[str], ports: list[int]) -> dict[str, Any]:
    """Two hand-overs in FP8 blocks, by the plan and by the gather; engines' needs are given."""
    side = Side(flags, ports, lambda job: None)
    spec, world = side.job.spec, side.world
    layout = RolloutLayout(RANKS_PER_SIDE, 1, False, float8=True)
    quantised = float8_weights(spec.shape, layout)
    stream = WeightStream(
        spec.checkpoint.tensors,
        None,
        HandOverOptions(seed=1),
        shards=side.shards,
        engine=None if side.is_trainer else GivenNeeds(quantised),
        shape=spec.shape,
        device=CPU,
        world=world,
    )
    have, need = stream.holdings.have, stream.holdings.need
    attestor = Attestor(stream.tensors, have, need, mode=FULL, world=world)
    gather = GatherPath(
        stream.tensors,
        order=stream.order,
        have=have,
        wanted=stream.need,
        bucket_bytes=1 << 20,
        device=CPU,
        world=world,
    )
    found: dict[str, Any] = {
        "cut_blocks": stream._float8._num_shared if stream._float8 else 0,
        "lower_bound": stream.lower_bound_bytes,
        "unlike": [],
        "attested": [],
        "received": [],
    }
    for version in (1, 2):
        whole = whole_weights(side.shards) if side.is_trainer else None
        whole = objects.broadcast(whole, group=world.control)
        stream.prepare()
        attestor.begin(version, stream.read)
        arrived = collected(stream, attestor)
        found["attested"].append(str(attestor.finish(None)))
        gathered = dict(gather.weights(stream.read))
        expected = {} if side.is_trainer else dict(quantised_weights(whole.items(), quantised))
        found["unlike"].append([unlike(arrived, expected), unlike(gathered, expected)])
        found["received"].append(stream.transfer.stats.received_bytes)
        if side.actor is not None:
            side.actor.update(first_mini_batch(side.job, has_reference=False))
    side.close()
    return found
