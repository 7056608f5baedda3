"""A scheduler's requests on an engine, from the first to the last."""

from __future__ import annotations

from collections.abc import Callable

from mcore_rl.hybrid_engine.vllm.sampling_engine import SamplingEngine
from mcore_rl.rollout.stream import RequestScheduler, step_engine


def run_stream(
    engine: SamplingEngine,
    scheduler: RequestScheduler,
    when_few_are_left: Callable[[], object] | None = None,
) -> None:
    """Step the engine until no request runs and none will come. Collective over the engine."""
    with engine.generation() as generation:
        step_engine(engine, scheduler, generation, when_few_are_left)
