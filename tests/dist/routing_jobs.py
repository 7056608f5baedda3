"""What a rank does in `test_routing.py`; run by `tests.rank_pool`."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mcore_rl.batching.table import SampleTable
from mcore_rl.batching.types import Prompt, Rollout, ScoredRollout, TrainBatch
from mcore_rl.common import objects
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.megatron.hf_checkpoint import read_tensor
from mcore_rl.model.weight_map import layer_order
from mcore_rl.rollout.sample_store import SampleStore
from mcore_rl.trainer.hand_overs import engine_config
from mcore_rl.trainer.learner import Learner
from tests.dist.ppo_jobs import Models, build_models
from tests.engine_samples import sample_responses
from tests.held import table_of_engines

NUM_SAMPLES, NUM_PROMPTS, MAX_TOKENS = 4, 8, 24


def engine_and_trainer(flags: list[str]) -> dict[str, Any]:
    """An engine samples, the trainer scores what it sampled, with one's experts and its own."""
    models = build_models(flags)
    config = engine_config(models.job, load_format="auto")
    engine = VLLMEngine(dataclasses.replace(config, max_num_batched_tokens=256, max_num_seqs=16))
    sample_store = models.learner.sample_store
    found: dict[str, Any] = {"capture": captured(engine, models)}
    samples = sampled(engine, models, sample_store)
    found["mismatch"] = mismatches(models.learner, samples)
    found["after_reload"] = after_reload(engine, models)
    found["captured_by_vllm"] = captured_by_vllm(engine)
    engine.close()
    dist.destroy_process_group()
    return found


def prompts(models: Models, count: int = NUM_PROMPTS) -> list[Prompt]:
    """Prompts of different lengths; pairs share their first 24 tokens, more than a KV block."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(4, models.job.spec.shape.vocab_size, size=(count, 40)).astype(np.int32)
    tokens[1::2, :24] = tokens[::2, :24]
    return [Prompt(i, "", "", row[: 26 + i]) for i, row in enumerate(tokens)]


def generate(engine: VLLMEngine, prompts: list[Prompt], **changes: Any) -> list[Rollout]:
    options = dict(num_samples=NUM_SAMPLES, temperature=1.0, max_tokens=MAX_TOKENS) | changes
    engine.seed_sampling(11)
    return sample_responses(
        engine, prompts, weight_version=0, with_routes=True, ignore_eos=True, **options
    )


def captured(engine: VLLMEngine, models: Models) -> dict[str, Any]:
    """Of every response whether all is known, how many cached and preempted tokens there were, and
    what the engine says of the same sequences as prompts, each computed anew."""
    scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
    preempted, cached = [], []
    noting(scheduler, "_preempt_request", preempted)
    noting(scheduler.kv_cache_manager, "get_computed_blocks", cached)
    rollouts = generate(engine, prompts(models))
    # The samples of a prompt, one after the other, as a prompt of their own: more tokens than a KV
    # block has, in such numbers that the 256 of a step cut some in two.
    whole = [
        Prompt(i, "", "", np.concatenate([t for r in of_prompt for t in tokens_of(r)]))
        for i, of_prompt in enumerate(np.array(rollouts).reshape(-1, NUM_SAMPLES))
    ]
    first = generate(engine, whole, num_samples=1, max_tokens=1)
    again = generate(engine, whole, num_samples=1, max_tokens=1)
    del scheduler._preempt_request, scheduler.kv_cache_manager.get_computed_blocks
    computed = [len(each.routes.known) for each in rollouts[::NUM_SAMPLES]]
    return {
        "complete": [
            bool(each.routes.known.all())
            and len(each.routes.ids) == len(each.prompt.token_ids) + MAX_TOKENS - 1
            for each in rollouts
        ],
        "ids_are_experts": all(
            all(len(set(choice)) == each.routes.ids.shape[-1] for choice in layer)
            for each in rollouts[:4]
            for layer in each.routes.ids
        ),
        # Batches differ, so that rounding does, and a few choices with it.
        "as_prompts": agreement(rollouts[::NUM_SAMPLES], first, computed),
        "cached": agreement(first, again, [150] * len(first)),
        "by_chance": agreement(first, first[2:], computed),
        "preempted": len(preempted),
        "num_cached": sum(found[1] for found in cached),
        "digests": objects.all_gather("".join(each.routes.digest().hex() for each in rollouts)),
    }


def noting(owner: Any, name: str, into: list[Any]) -> None:
    """Have `into` get what a method of an object returns."""
    method = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        into.append(method(*args, **kwargs))
        return into[-1]

    setattr(owner, name, noted)


def tokens_of(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    return rollout.prompt.token_ids, rollout.response_token_ids


def agreement(some: list[Rollout], others: list[Rollout], lengths: list[int]) -> float:
    """The share of tokens and layers with the same experts, of the first tokens of each."""
    same = [
        np.sort(a.routes.ids[:n], axis=-1) == np.sort(b.routes.ids[:n], axis=-1)
        for a, b, n in zip(some, others, lengths, strict=False)
    ]
    return float(np.mean(np.concatenate([each.all(axis=-1).ravel() for each in same])))


def sampled(engine: VLLMEngine, models: Models, sample_store: SampleStore) -> SampleTable:
    """As after a rollout: each engine has sampled its block, and its ranks keep the samples."""
    layout, rank = models.job.spec.rollout_layout, dist.get_rank()
    blocks = np.array_split(np.arange(NUM_PROMPTS), layout.num_tp_groups)
    mine = blocks[layout.tp_group_index(rank)].tolist()
    everything = prompts(models)
    sample_store.clear()
    found = generate(engine, [everything[i] for i in mine])
    draws = [i for i in mine for _ in range(NUM_SAMPLES)]
    return table_of_engines(
        sample_store, [ScoredRollout(each, reward=0.0) for each in found], draws
    )


def mismatches(learner: Learner, samples: SampleTable) -> dict[str, Any]:
    """Means over tokens of |log-prob of the engine - log-prob of the trainer|."""
    batch = learner.make_batch(0, samples)
    actor, replay = learner.actor, learner.actor.replay
    assert replay is not None and batch.actor.routes is not None
    given = batch.actor
    assert given.routes_known is not None
    permuted = dataclasses.replace(
        given, routes=given.routes.roll(7, dims=0), routes_known=given.routes_known.roll(7)
    )
    free = dataclasses.replace(given, routes=None, routes_known=None)
    found = {
        "replayed_share": batch.metrics["moe/replayed_share"],
        "given": difference(learner, actor.log_probs(given), given),
    }
    found["disagreement"] = float(replay.differing.sum() / replay.compared.sum())
    found["free"] = difference(learner, actor.log_probs(free), given)
    found["permuted"] = difference(learner, actor.log_probs(permuted), given)
    return found


def difference(learner: Learner, log_probs: torch.Tensor, batch: TrainBatch) -> float:
    apart = (log_probs - batch.rollout_log_probs).abs()[batch.loss_mask].double()
    total = learner.actor.runner.global_sum(torch.tensor([apart.sum(), float(apart.numel())]))
    return float(total[0] / total[1])


def after_reload(engine: VLLMEngine, models: Models) -> dict[str, Any]:
    """Routers that choose the opposite, and the experts then captured for the same prompts."""
    checkpoint = models.job.spec.checkpoint
    before = generate(engine, prompts(models), num_samples=1, max_tokens=1)
    weights = ((n, read_tensor(checkpoint, n)) for n in layer_order(checkpoint.tensors))
    routers = ("mlp.gate.weight", "mlp.router.weight", "mlp.router.bias")
    engine.reload((n, -w if n.endswith(routers) else w) for n, w in weights)
    after = generate(engine, prompts(models), num_samples=1, max_tokens=1)
    return {
        "complete": all(bool(each.routes.known.all()) for each in after),
        "as_before": agreement(before, after, [20] * len(before)),
    }


def captured_by_vllm(engine: VLLMEngine) -> bool:
    """Whether what serves `enable_return_routed_experts` on CUDA keeps choices on this rank."""
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

    runner = engine._worker.model_runner
    connector = AuxOutputWorkerConnector(
        vllm_config=engine._vllm_config,
        model=runner.get_model(),
        kv_cache_config=runner.kv_cache_config,
    )
    keeps = connector._buffer is not None
    connector.close()
    return keeps
