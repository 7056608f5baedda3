"""What a rank does in `test_canary.py`; run by `tests.rank_pool`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mcore_rl.data.prompts import load_prompt_files
from mcore_rl.hybrid_engine.proof.canary import CanaryResult
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.trainer.hand_overs import build_canary, build_manager, build_offloader, engine_config
from mcore_rl.verify import stored_digests
from tests.dist.attest_jobs import gates_for_up_projections, loading
from tests.dist.jobs import started
from tests.dist.offload_jobs import state_digests
from tests.dist.sleeping import SleepLog, memory_gone_while_asleep


def switches_with_canaries(flags: list[str]) -> dict[str, Any]:
    """A good hand-over, one of which vLLM stores gates as up-projections, and a good one again.

    With everything offloaded, canaries of real prompts in each, and no memory for what sleeps.
    """
    with memory_gone_while_asleep() as seen:
        return _switches(flags, seen)


def _switches(flags: list[str], seen: SleepLog) -> dict[str, Any]:
    job, actor, shards = started(flags)
    state = actor.state
    engine = VLLMEngine(engine_config(job, load_format="auto"))
    from_disk = stored_digests(engine)
    offloader = build_offloader(job, state)
    prompts, _ = load_prompt_files(job.config.data, job.spec.checkpoint.folder)
    canary = build_canary(job, state, prompts)
    assert canary is not None
    compared: list[CanaryResult] = []
    compare = canary.compare

    def noted(*args: Any) -> CanaryResult:
        compared.append(compare(*args))
        return compared[-1]

    canary.compare = noted  # type: ignore[method-assign]
    manager = build_manager(job, shards, engine, canary=canary, offloader=offloader)
    before = state_digests(state)

    events: dict[str, list[str]] = {}

    def in_rollout(name: str) -> dict[str, Any]:
        events[name] = list(seen.events)
        return {
            "away": sorted(offloader.offloaded),
            "stored_equal": stored_digests(engine) == from_disk,
            "prefetched": manager.prefetch(),
        }

    seen.events.clear()
    with manager:
        good = in_rollout("good")
    seen.events.clear()
    with loading(engine.model, gates_for_up_projections, 1), manager:
        repeated = in_rollout("repeated")
    state_kept = state_digests(state) == before
    seen.events.clear()
    with manager:
        good_again = in_rollout("good_again")
    found = {
        "means": [result.mean_abs_differences for result in compared],
        "ok": [result.ok for result in compared],
        "tolerance": compared[0].tolerance,
        "good": good,
        "repeated": repeated,
        "good_again": good_again,
        "events": events,
        "state_kept": state_kept and state_digests(state) == before,
        "kinds": {k: len(found) for k, found in megatron_adapter.train_tensors(state).items()},
    }
    engine.close()
    dist.destroy_process_group()
    return found
