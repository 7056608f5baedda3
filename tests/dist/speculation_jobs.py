"""What ranks do for test_speculation: engines that draft, and hand-overs into their drafters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.train_batches import split_mini_batches
from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.common import objects
from mcore_rl.hybrid_engine.hf_export import export
from mcore_rl.hybrid_engine.sharding_manager import MegatronVLLMShardingManager
from mcore_rl.hybrid_engine.switch_report import ReshardReport
from mcore_rl.hybrid_engine.vllm.generation import Request, Sampling, seed_of
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.weight_stream import missing_bytes
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.saving import save_checkpoint
from mcore_rl.model.config_json import read_model_shape
from mcore_rl.model.speculation import parse_speculation
from mcore_rl.model.tensors import is_mtp_copy, is_mtp_tensor
from mcore_rl.moe.routing import routed_layers
from mcore_rl.trainer.actor import Actor
from mcore_rl.trainer.hand_overs import build_manager, engine_config
from mcore_rl.trainer.job import Job
from mcore_rl.trainer.step_metrics import update_metrics
from mcore_rl.verify import overwrite, stored_digests
from tests.dist.jobs import first_mini_batch, log_probs_of_random_tokens, rank_batch, started
from tests.dist.stream_jobs import Trickle
from tests.engine_samples import sample_responses, small_engine
from tests.streams import run_stream

# Tensors of a drafter of which every rank holds all, in the checkpoint's own shape.
UNCUT = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
PROMPT_TOKENS, NEW_TOKENS = 8, 24
NUM_SAMPLES = 24  # for each of 8 prompts
# Options of sampling, by the name under which the tests find what came of them.
SAMPLING: dict[str, dict[str, Any]] = {
    "top-k 6": {"temperature": 1.0, "top_k": 6},
    "top-p 0.9 at 0.7": {"temperature": 0.7, "top_p": 0.9},
    "top-k 6, seeded": {"temperature": 1.0, "top_k": 6, "seed": 7},  # each response for itself
}


def prompts() -> list[Prompt]:
    """Each ends in a token of its own, and says something twice."""
    return [
        Prompt(i, "", "", np.array([5, 6, 7, 5, 6, 7, 5, 20 + i], dtype=np.int32)) for i in range(8)
    ]


def drafting(checkpoint: str, modes: Sequence[str]) -> dict[str, Any]:
    """Greedy and sampled responses of an engine of each mode, one after the other."""
    dist.init_process_group("gloo")
    return {
        mode: _responses(Path(checkpoint), mode)
        | ({"company": _in_company(Path(checkpoint), mode)} if mode != "off" else {})
        for mode in modes
    }


def greedily(checkpoint: str, modes: Sequence[str]) -> dict[str, Any]:
    """The greedy tokens of an engine of each mode, and how many of them were drafted.

    In float32, where checking drafts in a batch hardly rounds otherwise.
    """
    dist.init_process_group("gloo")
    found = {}
    for mode in modes:
        config = small_engine(
            Path(checkpoint), dtype="float32", speculation=parse_speculation(mode)
        )
        engine = VLLMEngine(config)
        tokens = _greedy(engine)
        found[mode] = {"tokens": tokens, "accepted": engine.take_draft_counts().num_accepted}
        engine.close()
    return found


def _engine(checkpoint: Path, mode: str, dtype: str) -> VLLMEngine:
    config = small_engine(
        checkpoint,
        dtype=dtype,
        max_model_len=PROMPT_TOKENS + NEW_TOKENS,  # not one more, as in a run
        max_num_seqs=128,  # steps cost little more than with few sequences
        speculation=parse_speculation(mode),
        routed_layers=routed_layers(read_model_shape(checkpoint)),
    )
    return VLLMEngine(config)


def _in_company(checkpoint: Path, mode: str) -> dict[str, Any]:
    """Responses with seeds, all at once and a few at a time: their tokens, and accepted drafts.

    In float32, where a batch of another size hardly rounds otherwise.
    """
    engine = _engine(checkpoint, mode, "float32")
    requests = [
        Request(
            number=number,
            token_ids=prompts()[number % 8].token_ids,
            max_tokens=NEW_TOKENS - number % 5,
            sampling=Sampling(top_k=6, ignore_eos=True),
            seed=seed_of(7, number),
        )
        for number in range(24)
    ]
    found: dict[str, Any] = {}
    for name, order, at_once in (
        ("all", requests, 24),
        ("few, backwards", requests[::-1], 3),
        ("alone", requests, 1),
    ):
        trickle = Trickle(order, at_once)
        run_stream(engine, trickle)
        counts = engine.take_draft_counts()
        found[name] = {
            "tokens": {each.number: each.token_ids.tolist() for each in trickle.completions},
            "accepted": counts.num_accepted,
        }
    engine.close()
    return found


def _responses(checkpoint: Path, mode: str) -> dict[str, Any]:
    engine = _engine(checkpoint, mode, "bfloat16")

    def generate(**options: Any) -> list[Rollout]:
        engine.seed_sampling(7)
        return sample_responses(
            engine, prompts(), max_tokens=NEW_TOKENS, weight_version=1, ignore_eos=True, **options
        )

    def summary(rollouts: Sequence[Rollout]) -> dict[str, Any]:
        counts = engine.take_draft_counts()
        return {
            "tokens": [
                [int(r.prompt.token_ids[-1]), *map(int, r.response_token_ids)] for r in rollouts
            ],
            "log_probs": [r.rollout_log_probs.tolist() for r in rollouts],
            "drafted": counts.num_drafted,
            "accepted": counts.num_accepted,
            "steps": counts.num_steps,
        }

    greedy = generate(num_samples=1, temperature=0.0, with_routes=True)
    found = {"greedy": summary(greedy)}
    found["greedy"]["routes"] = [
        (r.routes.ids.tolist(), bool(r.routes.known.all())) for r in greedy
    ]
    for name, options in SAMPLING.items():
        found[name] = summary(generate(num_samples=NUM_SAMPLES, **options))
    if mode != "off":
        with _accepting_too_often():
            options = SAMPLING["top-k 6"]
            found["wrong rule"] = summary(generate(num_samples=NUM_SAMPLES, **options))
    engine.close()
    return found


@contextmanager
def _accepting_too_often() -> Iterator[None]:
    """In which a draft is accepted with the square root of the probability it should be."""
    from vllm.v1.sample import rejection_sampler

    draw = rejection_sampler.generate_uniform_probs
    with mock.patch.object(
        rejection_sampler, "generate_uniform_probs", lambda *a, **k: draw(*a, **k).square()
    ):
        yield


def hand_over(flags: list[str], target: str) -> dict[str, Any]:
    """A run's hand-overs with --rl-speculate mtp: as loaded, changed, and spoilt on the way."""
    job, _, shards = started(flags)
    engine = VLLMEngine(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    manager = build_manager(job, shards, engine)
    reports: list[ReshardReport] = []
    manager.on_reshard_end.append(reports.append)
    assert overwrite(engine, job, from_disk) == []
    found: dict[str, Any] = {"num_stored": len(from_disk)}
    with manager:
        found["differs_from_disk"] = _differing(engine, from_disk)
        found["greedy"] = _greedy(engine)
        found["counts"] = _draft_counts(engine)
    found["traffic"] = _traffic(manager, reports[0])
    export(shards, job.spec.checkpoint, Path(target), max_file_bytes=1 << 17, bucket_bytes=1 << 14)

    for tensor in shards.tensors():
        for box in shards.boxes(tensor):
            shards.write(tensor, box, shards.read(tensor, box) * 1.5)
    with manager:
        now = {name: tensor.clone() for name, tensor in engine.stored_tensors()}
        found["changed_from_disk"] = _differing(engine, from_disk)
        found["shared"] = all(
            torch.equal(now[f"drafter.{name}"], now[name])
            for name in ("model.embed_tokens.weight", "lm_head.weight")
        )
        found["greedy_changed"] = _greedy(engine)

    carried = manager.stream._carried
    assert carried is not None
    name = next(n for n in carried.tensors if n.endswith("eh_proj.weight"))
    part, left = manager.stream._part, iter(range(1))

    def spoilt(tensor: str, pieces: Any) -> Any:
        if tensor == name and dist.get_rank() == 1 and next(left, None) is not None:
            pieces = [(box, data * 2) for box, data in pieces]
        return part(tensor, pieces)

    manager.stream._part = spoilt  # type: ignore[method-assign]
    with manager:
        found["spoilt"] = {"repeated": reports[-1].repeated, "differs": _differing_mtp(engine, now)}
    found["mtp"] = sorted(n for n in carried.tensors if not is_mtp_copy(n))
    found["attested"] = sorted(n for n in manager.stream.tensors if n in carried.tensors)
    found["carried_bytes"] = carried.num_bytes
    engine.close()
    dist.destroy_process_group()
    return found


def _differing(engine: VLLMEngine, before: dict[str, str]) -> list[str]:
    return sorted(name for name, digest in stored_digests(engine).items() if before[name] != digest)


def _differing_mtp(engine: VLLMEngine, before: dict[str, torch.Tensor]) -> list[str]:
    now = dict(engine.stored_tensors())
    return [n for n, t in now.items() if n.startswith("drafter.") and not torch.equal(t, before[n])]


def _greedy(engine: VLLMEngine) -> list[list[int]]:
    rollouts = sample_responses(
        engine,
        prompts(),
        num_samples=1,
        temperature=0.0,
        max_tokens=16,
        weight_version=1,
        ignore_eos=True,
    )
    return [r.response_token_ids.tolist() for r in rollouts]


def _draft_counts(engine: VLLMEngine) -> list[tuple[int, int]]:
    counts = engine.take_draft_counts()
    return objects.all_gather((counts.num_drafted, counts.num_accepted))


def _traffic(manager: MegatronVLLMShardingManager, report: ReshardReport) -> dict[str, int]:
    """What came, and what of the model proper was needed and not held."""
    stream, rank = manager.stream, dist.get_rank()
    carried = stream._carried
    assert carried is not None
    need = {n: b for n, b in stream.holdings.need[rank].items() if n not in carried.tensors}
    return {
        "received": report.received_bytes,
        "of_the_model": missing_bytes(stream.tensors, stream.holdings.have[rank], need),
        "lower_bound": report.lower_bound_bytes,
    }


def train_mtp(flags: list[str], gradients: str, target: str) -> dict[str, Any]:
    """Two updates; the gradient of the first goes to the folder `gradients`, named and cut as the
    checkpoint is, and the weights after both to `target`."""
    job, actor, shards = started(flags, in_float32=True)
    step = actor.optimizer.step

    def step_after_export(**arguments: Any) -> Any:
        parameters = [p for chunk in actor.state.chunks for p in chunk.parameters()]
        before = [p.data.clone() for p in parameters]
        for parameter in parameters:
            parameter.data.copy_(parameter.main_grad)
        export(shards, job.spec.checkpoint, Path(gradients))
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data.copy_(data)
        actor.optimizer.step = step  # type: ignore[method-assign]
        return step(**arguments)

    actor.optimizer.step = step_after_export  # type: ignore[method-assign]
    parts = split_mini_batches(rank_batch(job))
    updates = [actor.update(each) for each in parts]
    export(shards, job.spec.checkpoint, Path(target))
    scores = log_probs_of_random_tokens(job, actor)
    lost = _lost_in_checkpoint(job, actor, Path(target).with_name("checkpoint"))
    lost = objects.all_gather(lost)
    dist.destroy_process_group()
    return {
        "lost": lost,
        "mtp": [None if u.mtp is None else (u.mtp.loss, u.mtp.num_tokens) for u in updates],
        "grad_norms": [u.result.grad_norm for u in updates],
        "log_probs": scores[:, :-1].tolist(),
        "samples": parts[0].sample_ids.tolist(),
    }


def _lost_in_checkpoint(job: Job, actor: Actor, folder: Path) -> list[str]:
    """What of parameters and optimizer is another after Megatron has written and read it."""
    from megatron.training.checkpointing import load_checkpoint

    def held() -> dict[str, torch.Tensor]:
        found = megatron_adapter.train_tensors(actor.state)
        both = [*found["parameters"], *found["optimizer"]]
        return {name: tensor for name, tensor in both if not name.startswith("step ")}

    save_checkpoint(job.args, actor.state, 1, folder)
    before = {name: tensor.clone() for name, tensor in held().items()}
    for tensor in {tensor.data_ptr(): tensor for tensor in held().values()}.values():
        tensor.data.add_(1)
    with mock.patch.multiple(job.args, load=str(folder), ckpt_step=1):
        load_checkpoint(actor.state.model, actor.state.optimizer, actor.state.scheduler)
    return [name for name, tensor in held().items() if not torch.equal(tensor, before[name])]


def hand_over_trained_mtp(flags: list[str], before: str, after: str) -> dict[str, Any]:
    """Hand-overs of MTP layers that are trained, before and after 20 updates, and exports of both.

    What a drafter then holds of tensors that it does not cut goes back by the checkpoint's names.
    """
    job, actor, shards = started(flags)
    engine = VLLMEngine(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    manager = build_manager(job, shards, engine)
    assert overwrite(engine, job, from_disk) == []
    found: dict[str, Any] = {}
    with manager:
        found["differs_from_disk"] = _differing(engine, from_disk)
    export(shards, job.spec.checkpoint, Path(before), max_file_bytes=1 << 17, bucket_bytes=1 << 14)
    batch = first_mini_batch(job)
    updates = [update_metrics([actor.update(batch)]) for _ in range(20)]
    found["losses"] = [metrics["loss/mtp"] for metrics in updates]
    export(shards, job.spec.checkpoint, Path(after), max_file_bytes=1 << 17, bucket_bytes=1 << 14)
    with manager:
        held = dict(engine.stored_tensors())
        found["drafter"] = {
            name.removeprefix("drafter."): tensor.float().tolist()
            for name, tensor in held.items()
            if name.startswith("drafter.") and name.endswith(UNCUT)
        }
        found["greedy"] = _greedy(engine)
        found["changed"] = _differing(engine, from_disk)
    found["attested"] = sorted(n for n in manager.stream.tensors if is_mtp_tensor(n, 2))
    found["carried_bytes"] = manager.stream._carried.num_bytes if manager.stream._carried else 0
    engine.close()
    dist.destroy_process_group()
    return found
