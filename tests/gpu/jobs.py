"""What a rank does in the tests of this folder; `tests.gpu.machine.play` calls these by name."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mcore_rl.batching.train_batches import split_mini_batches
from mcore_rl.batching.types import Prompt
from mcore_rl.hybrid_engine.switch_report import ReshardReport
from mcore_rl.hybrid_engine.transfer.transfer import Transfer
from mcore_rl.hybrid_engine.transfer.worlds import JoinedWorld, host_store, reach_store
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.sliced_tensor import Pieces
from mcore_rl.model.boxes import Box, slices
from mcore_rl.trainer.hand_overs import build_manager, build_offloader, engine_config
from mcore_rl.verify import stored_digests
from tests.dist.jobs import first_mini_batch, random_tokens, rank_batch, started
from tests.dist.offload_jobs import state_digests
from tests.dist.small_session import Engine, Shards, session
from tests.dist.transfer_jobs import World
from tests.engine_samples import sample_responses, small_engine
from tests.footprint import Footprint

_LIMIT_SECONDS = 120.0
_ROWS = 1 << 20  # several buckets
PROMPTS = [Prompt(i, str(i), str(i), np.arange(5 + i, 17 + i, dtype=np.int32)) for i in range(2)]


def _start_world() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def free_bytes() -> int:
    """Free device memory by the driver; 0 without CUDA."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def _said(engine: VLLMEngine) -> list[list[tuple[int, float]]]:
    """Greedy tokens and their log-probs; all but the first by decoding, graphs if there are any."""
    rollouts = sample_responses(
        engine,
        PROMPTS,
        num_samples=1,
        temperature=0.0,
        max_tokens=8,
        weight_version=1,
        ignore_eos=True,
    )
    return [
        list(zip(r.response_token_ids.tolist(), r.rollout_log_probs.tolist(), strict=True))
        for r in rollouts
    ]


def life_of_an_engine(checkpoint: str, other: str, graphs: bool) -> dict[str, Any]:
    """Sleeps with its weights kept, sleeps without, and takes others and the first ones again."""
    _start_world()
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.3}
    if torch.cuda.is_available():
        memory["kv_cache_bytes"] = None  # what that leaves
    sizes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4}
    engine = VLLMEngine(small_engine(checkpoint, enforce_eager=not graphs, **memory, **sizes))
    weights, others = (load_file(f"{folder}/model.safetensors") for folder in (checkpoint, other))
    engine.learn_needs({name: (tuple(t.shape), t.dtype) for name, t in weights.items()})
    said = {"at first": _said(engine)}
    digests = stored_digests(engine)
    addresses = {name: tensor.data_ptr() for name, tensor in engine.stored_tensors()}
    free, used = {"awake": free_bytes()}, {"awake": Footprint.now().device_bytes}

    engine.sleep(keep_weights=True)
    free["asleep, weights kept"] = free_bytes()
    engine.wake_weights()
    engine.wake_kv_cache()
    found: dict[str, Any] = {"kept": stored_digests(engine) == digests}
    said["weights kept"] = _said(engine)

    engine.sleep()
    free["asleep"], used["asleep"] = free_bytes(), Footprint.now().device_bytes
    try:
        engine.wake_weights()
        engine.wake_kv_cache()
        _said(engine)
    except RuntimeError as refusal:
        found["refusal"] = str(refusal)
    for name, content in (("first ones", weights), ("others", others), ("once more", weights)):
        engine.reload(content.items())
        said[name] = _said(engine)
    found["same bytes"] = stored_digests(engine) == digests
    if torch.cuda.is_available():  # on CPU what is packed is packed anew
        found["moved"] = [n for n, t in engine.stored_tensors() if t.data_ptr() != addresses[n]]
    engine.close()
    dist.destroy_process_group()
    total = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 0
    return found | {"said": said, "free": free, "used": used, "total": total}


def switches(flags: list[str], num_switches: int) -> dict[str, Any]:
    """Updates and switches with everything offloaded: bits of training, and memory of the device
    in training."""
    job, actor, shards = started(flags)
    offloader = build_offloader(job, actor.state)
    engine = VLLMEngine(engine_config(job, load_format="dummy"))
    manager = build_manager(job, shards, engine, offloader=offloader)
    reports: list[ReshardReport] = []
    manager.on_reshard_end.append(reports.append)
    mini_batch = first_mini_batch(job)
    prompt = random_tokens(job.spec.shape.vocab_size)[0].tolist()
    kept, free = [], []
    for _ in range(num_switches):
        actor.update(mini_batch)
        before = state_digests(actor.state)
        with manager:
            in_rollout = free_bytes()
            log_probs = engine.prompt_log_probs([prompt])[0]
            manager.prefetch()
        kept.append(state_digests(actor.state) == before)
        free.append((free_bytes(), in_rollout))
    engine.close()
    dist.destroy_process_group()
    there = [r for r in reports if r.direction == "train_to_rollout"]
    return {
        "kept": kept,
        "free": free,
        "attested": [r.attested for r in there],
        "moved_bytes": [r.offloaded.moved_bytes for r in there],
        "saved_bytes": [r.offloaded.saved_bytes for r in there],
        "finite": bool(np.isfinite(log_probs).all()),
    }


def transfers_and_objects(num_plans: int) -> dict[str, Any]:
    """Random plans on the device, every byte compared on the host; then objects of all ranks over a
    gloo group beside the world's own backend, and what they took of the device."""
    device = _start_world()
    for seed in range(num_plans):
        world = World(seed)
        for bucket_bytes in (100, 1 << 20):
            transfer = Transfer(world.plan, world.tensors, bucket_bytes=bucket_bytes, device=device)
            arriving = transfer.stream(partial(_read_to, device, world))
            found = world.collect(arriving)
            assert all(d.device.type == device.type for pieces in found.values() for _, d in pieces)
            world.check({name: [(box, d.cpu()) for box, d in found[name]] for name in found})
            transfer.close()
    group = dist.new_group(backend="gloo")
    before = free_bytes()
    mine = {"rank": dist.get_rank(), "tokens": list(range(100_000))}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine, group=group)
    taken = before - free_bytes()
    dist.destroy_process_group()
    ranks = [found["rank"] for found in gathered]
    return {"num_plans": num_plans, "ranks": ranks, "taken": taken}


def lost_worker(port: int) -> dict[str, Any]:
    """Two trainers update two workers, the second of which ends amid the second update. The others
    form a world without it, and update again."""
    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    meet = host_store if rank == 0 else reach_store
    store, told = meet("127.0.0.1", port, _LIMIT_SECONDS), []
    found: dict[int, torch.Tensor] = {}

    version = 0

    def read(_: str, box: Box, at: Any = ...) -> torch.Tensor:
        rows = torch.arange(_ROWS * 4.0, device=device).view(_ROWS, 4)
        return (rows + version)[slices(box)][at]

    def load(name: str, pieces: Pieces, on_write: Any) -> None:
        if rank == 3 and version == 2:
            os._exit(3)
        whole = found.setdefault(version, torch.zeros(_ROWS, 4, device=device))
        for box, data in pieces:
            whole[slices(box)] = data
            on_write(name, box, whole[slices(box)])

    for name, size, versions in (("first", 4, (1, 2)), ("without", 3, (3,))):
        world = JoinedWorld(
            store,
            rank=rank,
            size=size,
            name=name,
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout_seconds=_LIMIT_SECONDS,
        )
        half = ((rank * _ROWS // 2, (rank + 1) * _ROWS // 2), (0, 4))
        of_rank = session(
            world,
            (_ROWS, 4),
            device=device,
            shards=Shards([half], read) if rank < 2 else None,
            engine=None if rank < 2 else Engine(((0, _ROWS), (0, 4)), load),
        )
        for version in versions:
            try:
                of_rank.update(str(version), plan_id=of_rank.plan_id)
            except RuntimeError as error:
                told.append(str(error))
        of_rank.close()
    expected = torch.arange(_ROWS * 4.0).view(_ROWS, 4)
    right = [v for v, rows in found.items() if torch.equal(rows.cpu(), expected + v)]
    return {"told": told, "right": right}


def _read_to(device: torch.device, world: World, name: str, box: Box) -> torch.Tensor:
    return world.read(name, box).to(device)


def reference_swaps(flags: list[str]) -> dict[str, Any]:
    """An update, the reference swapped in and out: whose bits are where."""
    from mcore_rl.trainer.roles.reference import ReferencePolicy

    job, actor, _ = started(flags)
    batch = rank_batch(job)
    reference = ReferencePolicy(actor.state)
    begin, at_begin = state_digests(actor.state), actor.log_probs(batch)
    actor.update(split_mini_batches(batch)[0])
    now, after = state_digests(actor.state), actor.log_probs(batch)
    with reference:
        inside = actor.log_probs(batch)
    found = {
        "learned": begin != now and not torch.equal(at_begin, after),
        "reference's": float((inside - at_begin).abs().max()),
        "back": state_digests(actor.state) == now,
        "actor's": float((actor.log_probs(batch) - after).abs().max()),
    }
    dist.destroy_process_group()
    return found
