"""What a rank does in `test_offload.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.train_batches import split_mini_batches
from mcore_rl.common.run_output import setup_logging
from mcore_rl.hybrid_engine.memory.offload import KINDS, Offloader
from mcore_rl.hybrid_engine.vllm.generation import Request, Sampling
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.job.start import start
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.rng import RngState
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.hand_overs import build_manager, build_offloader, engine_config
from mcore_rl.trainer.models import build_actor
from mcore_rl.trainer.roles.reference import ReferencePolicy
from tests.dist.jobs import first_mini_batch, random_tokens, rank_batch, started
from tests.dist.sleeping import digest, digests
from tests.dist.stream_jobs import Trickle
from tests.footprint import Footprint
from tests.streams import run_stream

from megatron.core.tensor_parallel import get_cuda_rng_tracker  # isort: skip  (after the patches)


def train_with_and_without(
    flags: list[str], plain_optimizer: bool, keep_gradients: bool
) -> dict[str, Any]:
    """Two updates as they are, then, from the same state, two with three cycles before each."""
    setup_logging()
    with open("/dev/null", "w") as log:
        job = start(flags, log=log)
        if plain_optimizer:  # what a fork may use; ours is the distributed one
            job.args.use_distributed_optimizer = False
        state, shards = build_actor(job, log=log)
    actor = Actor(job, state)
    reference = ReferencePolicy(state)
    find = functools.partial(megatron_adapter.train_tensors, state)
    batch = rank_batch(job)
    actor.update(split_mini_batches(batch)[1])  # makes the moments
    begin = _copies(find())
    expected = [_step(actor, reference, batch) for _ in range(2)]
    expected_state = digests(find(), ("parameters", "optimizer"))
    for kind, tensors in find().items():
        for (_, tensor), old in zip(tensors, begin[kind], strict=True):
            tensor.data.copy_(old)
    assert digests(find(), ("parameters", "optimizer")) != expected_state, "updates must change it"

    offloader = Offloader(
        find,
        frozenset(KINDS),
        device=torch.device("cpu"),
        keep_gradients=keep_gradients,
        chunk_bytes=1 << 12,
    )
    gradients_came_back, all_gone, found = True, True, []
    for _ in range(2):
        for cycle in range(3):
            gradients = digests(find(), ("gradients",))
            held = {n: shards.read(n, b) for n in shards.tensors() for b in shards.boxes(n)}
            offloader.offload("gradients", "optimizer")
            offloader.offload("parameters")
            all_gone &= not any(
                tensor.untyped_storage().nbytes() for ts in find().values() for _, tensor in ts
            )
            if cycle:
                offloader.prefetch()
            offloader.onload()
            for n, value in held.items():
                assert torch.equal(shards.read(n, shards.boxes(n)[-1]), value), n
            if keep_gradients:
                gradients_came_back &= digests(find(), ("gradients",)) == gradients
            else:
                gradients_came_back &= not any(t.any() for _, t in find()["gradients"])
        found.append(_step(actor, reference, batch))
    optimizers = getattr(state.optimizer, "chained_optimizers", [state.optimizer])
    result = {
        "optimizer": sorted({type(optimizer).__name__ for optimizer in optimizers}),
        "expected": expected,
        "found": found,
        "state_equal": digests(find(), ("parameters", "optimizer")) == expected_state,
        "num_tensors": {kind: len(tensors) for kind, tensors in find().items()},
        "all_gone": all_gone,
        "gradients_came_back": gradients_came_back,
        "moved_bytes": offloader.stats.moved_bytes,
        "dropped_bytes": offloader.stats.dropped_bytes,
        "bytes": _storage_bytes(find()),
        "tied_views": _aliases_hold(state),
        "rng": _rng_comes_back(),
    }
    dist.destroy_process_group()
    return result


def _step(actor: Actor, reference: ReferencePolicy, batch: Any) -> list[Any]:
    """An update, seen from outside: loss, norm, log-probs of the actor and of the reference."""
    stats = actor.update(split_mini_batches(batch)[0])
    with reference:
        of_reference = digest(actor.log_probs(batch))
    return [
        float(stats.sums.policy_loss).hex(),
        stats.result.grad_norm.hex(),
        digest(actor.log_probs(batch)),
        of_reference,
    ]


def _copies(tensors: Any) -> dict[str, list[torch.Tensor]]:
    return {kind: [t.detach().clone() for _, t in found] for kind, found in tensors.items()}


def _storage_bytes(tensors: Any) -> dict[str, int]:
    """Bytes by kind, counted apart from the code under test: by address, first kind first."""
    found: dict[str, int] = {}
    taken: set[int] = set()
    for kind in ("parameters", "optimizer", "gradients"):
        sizes = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for _, t in tensors[kind])}
        found[kind] = sum(size for address, size in sizes.items() if address not in taken)
        taken |= sizes.keys()
    return found


def _aliases_hold(state: megatron_adapter.TrainState) -> bool:
    """Parameters and their `main_grad` are views of Megatron's buffers."""

    def within(view: torch.Tensor, whole: torch.Tensor) -> bool:
        offset = view.data_ptr() - whole.data_ptr()
        return 0 <= offset <= whole.nbytes - view.nbytes and whole.data_ptr() != 0

    inside = True
    chunk: Any
    for chunk in state.model:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for parameter in buffer.params:
                views = [(parameter.main_grad, buffer.grad_data)]
                if buffer.param_data is not None:
                    views.append((parameter.data, buffer.param_data))
                inside &= all(within(view, whole) for view, whole in views)
    return inside


def _rng_comes_back() -> bool:
    """All generators, among them one such as Megatron tracks with CUDA graphs."""
    tracker = get_cuda_rng_tracker()
    tracked = torch.Generator().manual_seed(3)
    tracker.states_["a generator"] = tracked

    def draw() -> list[Any]:
        with tracker.fork():
            forked = torch.rand(2).tolist()
        plain = torch.rand(2).tolist()
        by_generator = torch.rand(2, generator=tracked).tolist()
        return [forked, plain, by_generator, random.random(), np.random.rand()]

    before = RngState.capture()
    first, second = draw(), draw()
    before.restore()
    again = [draw(), draw()]
    before.restore()
    same_object = tracker.states_.pop("a generator") is tracked
    return first != second and again == [first, second] and same_object


def many_switches(flags: list[str], num_switches: int) -> dict[str, Any]:
    """Footprints after each of `num_switches` switches with everything offloaded."""
    job, actor, shards = started(flags)
    state = actor.state
    batch = first_mini_batch(job)
    actor.update(batch)
    engine = VLLMEngine(engine_config(job))
    offloader = build_offloader(job, state)
    manager = build_manager(job, shards, engine, offloader=offloader)
    failed_well = _fails_without_harm(manager, engine, state)
    reported: list[dict[str, Any]] = []
    manager.on_reshard_end.append(
        lambda report: reported.append(dataclasses.asdict(report.offloaded))
    )
    prompt = random_tokens(job.spec.shape.vocab_size)[0].tolist()

    footprints, scores, prefetched = [], [], []
    # One more switch than is measured: none of those between the measurements generates, because
    # the engine's bookkeeping of requests grows for a while.
    for switch in range(1, num_switches + 2):
        with manager:
            if switch in (2, num_switches + 1):
                scores.append(engine.prompt_log_probs([prompt])[0].tolist())
                engine_freed = not any(
                    p.untyped_storage().nbytes() for c in state.chunks for p in c.parameters()
                )
                _generate(engine, lambda: prefetched.append(manager.prefetch()))
        if switch <= num_switches:
            footprints.append(Footprint.now())
    actor.update(batch)  # training continues
    engine.close()
    dist.destroy_process_group()
    return {
        "footprints": [
            {name: getattr(f, name) for name in Footprint.__slots__} for f in footprints
        ],
        "same_scores": scores[0] == scores[1],
        "parameters_were_away": engine_freed,
        "moved_bytes": offloader.stats.moved_bytes,
        "prefetched_bytes": prefetched[-1],
        "failed_well": failed_well,
        "reported": reported[-2:],
        "stats": dataclasses.asdict(offloader.stats.of(offloader.what)),
    }


def state_digests(state: megatron_adapter.TrainState) -> dict[str, str]:
    """Digests of parameters and optimizer state, tensor by tensor."""
    return digests(megatron_adapter.train_tensors(state), KINDS[:2])


def _fails_without_harm(manager: Any, engine: VLLMEngine, state: Any) -> bool:
    """A hand-over that breaks off, here because the engine is awake, leaves training its state."""
    rng, before = RngState.capture(), state_digests(state)
    engine.wake_weights()
    try:
        with manager:
            raise AssertionError("the engine's weights were awake already")
    except RuntimeError as error:
        assert "does not sleep" in str(error), error
    engine.wake_kv_cache()
    engine.sleep()
    same = state_digests(state) == before
    return same and torch.equal(RngState.capture().cpu, rng.cpu)


def _generate(engine: VLLMEngine, when_few_are_left: Any) -> None:
    requests = [
        Request(
            number=i,
            token_ids=np.arange(5 + i, 15 + i, dtype=np.int32),
            max_tokens=6,
            sampling=Sampling(),
        )
        for i in range(6)
    ]
    run_stream(
        engine, Trickle(requests, at_once=len(requests)), when_few_are_left=when_few_are_left
    )
