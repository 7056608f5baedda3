"""Small engines, and all prompts of a test at once through one, by the product's `generation`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_rl.batching.types import Prompt, Rollout
from mcore_rl.hybrid_engine.vllm.generation import Completion, Request, Sampling, seed_of
from mcore_rl.hybrid_engine.vllm.in_process_engine import VLLMEngine
from mcore_rl.hybrid_engine.vllm.startup import EngineConfig


def small_engine(checkpoint: str | Path, load_format: str = "auto", **changes: Any) -> EngineConfig:
    """32 sequences of 128 tokens, and 64 MiB of KV cache."""
    sizes = {"max_model_len": 128, "max_num_seqs": 32, "kv_cache_bytes": 1 << 26}
    return EngineConfig(model_dir=Path(checkpoint), load_format=load_format, **{**sizes, **changes})


def sample_responses(
    engine: VLLMEngine,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    temperature: float,
    max_tokens: int,
    weight_version: int,
    top_p: float = 1.0,
    top_k: int = -1,
    ignore_eos: bool = False,
    seed: int | None = None,
    with_routes: bool = False,
) -> list[Rollout]:
    """Sample `num_samples` responses to each prompt, in the order of the prompts.

    With `seed` each response has a random stream of its own; without, all use the process's.
    """
    sampling = Sampling(temperature, top_p, top_k, ignore_eos)
    found: dict[int, Completion] = {}
    with engine.generation() as generation:
        for number in range(len(prompts) * num_samples):
            request = Request(
                number=number,
                token_ids=prompts[number // num_samples].token_ids,
                max_tokens=max_tokens,
                sampling=sampling,
                seed=None if seed is None else seed_of(seed, number),
                with_routes=with_routes,
            )
            generation.submit(request)
        while engine.any_rank(generation.num_running > 0):
            found |= {each.number: each for each in generation.step()}
    return [
        engine.rollout(prompts[number // num_samples], number % num_samples, each, weight_version)
        for number, each in sorted(found.items())
    ]
