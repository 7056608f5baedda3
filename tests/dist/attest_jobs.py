"""Hand-overs with deliberate faults, in one start of the engines, and the proof's reports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mcore_rl.hybrid_engine.plan.transfer_plan import make_plan
from mcore_rl.hybrid_engine.proof import slice_hash
from mcore_rl.hybrid_engine.proof.attest import Attestation, Attestor
from mcore_rl.hybrid_engine.proof.canary import Canary
from mcore_rl.hybrid_engine.proof.proof import Proof
from mcore_rl.hybrid_engine.transfer.gather import GatherPath
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.hybrid_engine.transfer.worlds import DefaultWorld
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.weight_stream import _near, exchange
from mcore_rl.model.boxes import full_box, volume
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.verify import stored_digests
from tests.dist.jobs import random_tokens, started

Fault = contextlib.AbstractContextManager[Any]

# In the second pipeline stage, so that they must travel to the first: a weight that is cut over TP,
# and two experts of one EP rank.
TRAVELS = "model.layers.1.self_attn.o_proj.weight"
EXPERTS = ("model.layers.1.mlp.experts.0.", "model.layers.1.mlp.experts.1.")

# Random weights leave all tokens about equally likely, so that wrong ones change little: 0.014 with
# gates and up-projections exchanged. With the right ones, in bfloat16, 0.003.
CANARY_TOLERANCE = 0.008


def loading(model: Any, change: Callable[[Any], Any], times: int) -> Fault:
    """vLLM's `load_weights` gets `change(weights)`, the first `times`."""
    original = model.load_weights
    left = iter(range(times))

    def changed(weights: Any) -> Any:
        return original(change(weights) if next(left, None) is not None else weights)

    return mock.patch.object(model, "load_weights", changed)


def gates_for_up_projections(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each under the name of the other: what no hash of what was read can see."""
    for name, tensor in weights:
        for a, b in (("gate_proj", "up_proj"), ("up_proj", "gate_proj")):
            if a in name:
                name = name.replace(a, b)
                break
        yield name, tensor


class Bench:
    """A manager, its proof, and every verdict that was given."""

    def __init__(self, flags: list[str]) -> None:
        self.job, actor, self.shards = started(flags)
        self.engine = VLLMEngine(engine_config(self.job, load_format="auto"))
        self.from_disk = stored_digests(self.engine)
        self.manager = manager = build_manager(self.job, self.shards, self.engine)
        self.world = DefaultWorld(self.shards.device)
        held = {name: self.shards.boxes(name) for name in manager.stream.tensors}
        self.holdings = exchange(held, manager.stream.need, self.world)
        tokens = random_tokens(self.job.spec.shape.vocab_size).tolist()
        self.canary = Canary(actor.log_probs, tokens, interval=1, tolerance=CANARY_TOLERANCE)
        self.gather = GatherPath(
            manager.stream.tensors,
            order=manager.stream.order,
            have=self.holdings.have,
            wanted=[name for name, boxes in manager.stream.need.items() if boxes],
            bucket_bytes=1 << 14,  # so that tensors take several
            device="cpu",
        )
        self.verdicts: list[Attestation] = []
        self.invalidated = 0
        self.use("full", with_canary=False)
        self.version = 0

    def use(self, mode: str, *, with_canary: bool) -> None:
        attestor = Attestor(
            self.manager.stream.tensors,
            self.holdings.have,
            self.holdings.need,
            mode=mode,
        )
        finish = attestor.finish

        def noted(fault: str | None = None) -> Attestation:
            self.verdicts.append(finish(fault))
            return self.verdicts[-1]

        attestor.finish = noted  # type: ignore[method-assign]

        def invalidate() -> None:
            self.invalidated += 1

        self.proof = Proof(
            self.engine,
            world=self.world,
            attestor=attestor,
            gather=self.gather,
            canary=self.canary if with_canary else None,
            on_repeat=invalidate,
            room=self.engine_reloadable,
        )

    @contextlib.contextmanager
    def engine_reloadable(self) -> Iterator[None]:
        self.engine.sleep()
        self.engine.wake_weights()
        yield
        self.engine.wake_kv_cache()

    def switch(self, fault: Fault | None = None) -> dict[str, Any]:
        """One hand-over, with a fault in it; everything that is to be known of it."""
        self.version += 1
        self.verdicts.clear()
        before = self.invalidated
        raised, canary, equal = None, None, False
        self.proof.score_canary(self.version)
        self.proof.begin(self.version, self.shards.read)
        self.engine.wake_weights()
        try:
            with fault or contextlib.nullcontext():
                self.proof.reload(self.manager.stream.weights(), self.shards.read)
                self.engine.wake_kv_cache()
                canary = self.proof.check_canary(self.shards.read)
            equal = stored_digests(self.engine) == self.from_disk
        except RuntimeError as error:
            raised = str(error)
        with contextlib.suppress(RuntimeError):  # awake already, where canaries failed
            self.engine.wake_kv_cache()
        self.engine.sleep()
        return {
            "ok": [v.ok for v in self.verdicts],
            "mismatches": [
                [m.tensor, list(m.source_ranks), m.destination_rank, m.problem]
                for v in self.verdicts[:1]
                for m in v.mismatches
            ],
            "faults": [list(v.faults) for v in self.verdicts[:1]],
            "sentence": str(self.verdicts[0]),
            "hashed_bytes": self.verdicts[0].hashed_bytes,
            "repeated": self.proof.repeated,
            "invalidated": self.invalidated - before,
            "gathered_bytes": self.gather.received_bytes if self.proof.repeated else 0,
            "raised": raised,
            "stored_equal": equal,
            "canary": None if canary is None else [canary.mean_abs_differences, canary.ok],
        }

    # Faults

    def flipped_bit(self) -> Fault:
        transfer = self.manager.stream.transfer
        stream = transfer.stream

        def flipping(read: Any, **options: Any) -> Iterator[Any]:
            for name, pieces in stream(read, **options):
                if name == TRAVELS and dist.get_rank() == 0:
                    pieces[0][1].view(-1)[5:6].view(torch.uint8)[1] ^= 1 << 7
                yield name, pieces

        return mock.patch.object(transfer, "stream", flipping)

    def swapped_experts(self) -> Fault:
        def other(name: str) -> str:
            for ours, theirs in (EXPERTS, EXPERTS[::-1]):
                if name.startswith(ours):
                    return theirs + name.removeprefix(ours)
            return name

        transfer = self.manager.stream.transfer
        stream = transfer.stream

        def swapping(read: Any, **options: Any) -> Iterator[Any]:
            return stream(lambda name, box: read(other(name), box), **options)

        return mock.patch.object(transfer, "stream", swapping)

    def skipped_tensor(self) -> Fault:
        """On one rank the manager leaves a tensor out."""
        weights = self.manager.stream.weights

        def skipping() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights():
                if name != TRAVELS or dist.get_rank() != 1:
                    yield name, tensor

        return mock.patch.object(self.manager.stream, "weights", skipping)

    @contextlib.contextmanager
    def stale_plan(self) -> Iterator[None]:
        """As if rollout ranks had changed places since the plan was made."""
        manager, need = self.manager, self.holdings.need
        plan = make_plan(
            manager.stream.tensors,
            order=manager.stream.order,
            have=self.holdings.have,
            need=[*need[1:], need[0]],
            near=_near(self.world, self.world.size, self.job.spec.train_layout),
        )
        stale = Transfer(plan, manager.stream.tensors, bucket_bytes=1 << 20, device="cpu")
        patch = mock.patch.object(manager.stream, "transfer", stale)
        with contextlib.closing(stale), patch:
            yield

    def dropped_slice(self) -> Fault:
        """On rank 2 the loader takes only the first half of the rows, and zeros for the rest."""

        def halved(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == "model.norm.weight" and dist.get_rank() == 2:
                    half = len(tensor) // 2
                    tensor = torch.cat([tensor[:half], torch.zeros(half, dtype=tensor.dtype)])
                yield name, tensor

        return loading(self.engine.model, halved, 1)

    def misplaced(self, times: int) -> Fault:
        """All is read as it should be, and then stored as if it were another tensor."""
        return loading(self.engine.model, gates_for_up_projections, times)

    @contextlib.contextmanager
    def broken_everywhere(self) -> Iterator[None]:
        """A bit flips on the gather's way, too."""
        weights = self.gather.weights

        def flipping(read: Any) -> Iterator[tuple[str, torch.Tensor]]:
            for name, whole in weights(read):
                if name == TRAVELS:
                    whole.view(-1)[:1].view(torch.uint8)[0] ^= 1
                yield name, whole

        with mock.patch.object(self.gather, "weights", flipping), self.flipped_bit():
            yield


def attested_hand_overs(flags: list[str]) -> dict[str, Any]:
    """Every fault in turn, between hand-overs that go well."""
    bench = Bench(flags)
    tensors = bench.manager.stream.tensors
    rank = dist.get_rank()
    found: dict[str, Any] = {"clean": bench.switch()}
    for name in ("flipped_bit", "swapped_experts", "skipped_tensor", "stale_plan"):
        found[name] = bench.switch(getattr(bench, name)())
    found["dropped_slice"] = bench.switch(bench.dropped_slice())
    found["broken_everywhere"] = bench.switch(bench.broken_everywhere())
    bench.use("sample", with_canary=False)
    found["sampled"] = bench.switch()
    found["sampled_skipped"] = bench.switch(bench.skipped_tensor())
    with mock.patch.object(slice_hash, "SMALL_BYTES", 0):  # one row of 32 of these, too
        bench.use("sample", with_canary=False)
        found["few_rows"] = bench.switch()
        found["few_rows_swapped"] = bench.switch(bench.swapped_experts())
    bench.use("full", with_canary=True)
    found["canary"] = bench.switch()
    found["misplaced_once"] = bench.switch(bench.misplaced(1))
    found["misplaced"] = bench.switch(bench.misplaced(2))
    found["clean_again"] = bench.switch()
    found["served_bytes"] = sum(tensors[n].num_bytes for n in tensors)
    found["needed_bytes"] = sum(
        volume(box) * tensors[n].itemsize
        for n, boxes in bench.manager.stream.need.items()
        for box in boxes
    )
    # The plain gather sends what lies on several ranks from the lowest.
    found["to_gather_bytes"] = sum(
        volume(box) * tensors[name].itemsize
        for name in tensors
        for source, box in bench.gather._parts(name)
        if source != rank
    )
    found["whole_tensors"] = all(
        sum(volume(box) for _, box in bench.gather._parts(name))
        == volume(full_box(tensors[name].shape))
        for name in tensors
    )
    bench.engine.close()
    dist.destroy_process_group()
    return found
